"""Commit the iterations that a script prints (`resihp.detector.console`) or reports with `resihp.iteration`, if it does
not train with `resihp.Trainer`.

An iteration is committed once, when it is first printed. After a restart the counter goes back; the iterations that are
then done again are not committed again, so that the time for them counts as lost. Two ranks may print the same counter:
rank 0 and the last one; then the line that comes first counts. Once a call was heard, no line counts any more, except
that the last iteration of the script is read from it. Decides nothing else: the end of a script, and a hang, are
decided elsewhere by `Job.counter` and the record.
"""

from __future__ import annotations

import math

import msgspec

from resihp.controller.scripts import bad_losses, script_hangs
from resihp.controller.state.job import Job
from resihp.detector.offline.iteration_model import IterationModel, Point
from resihp.protocol import messages as m
from resihp.record.describe import explain
from resihp.record.journal import CounterSeen, IterationCommitted, LossNotFinite, Reconfigured

NOTE_EVERY_S = 30.0
"""Seconds between two entries about a counter that has not passed the furthest iteration yet."""


def printed(job: Job, report: m.Printed) -> None:
    """Take the iterations that a rank has printed."""
    member = job.members.get(report.rank)
    if member is None or not member.alive or job.has_declared:
        return
    if not (job.needs_all or job.settings.spares_wait or report.called):
        return  # it may declare a model yet, and prints the progress of something else meanwhile
    if report.called:
        if not _leads(job, report):
            return
        report = msgspec.structs.replace(report, goal=job.counter.goal)
    else:
        job.counter.goal = report.goal or job.counter.goal
        if job.counter.caller is not None:
            return
    before = job.counter.at, job.counter.iteration
    for figures in report.figures:
        if figures.iteration > 0:
            _take(job, report, figures)
    if (job.counter.at, job.counter.iteration) != before:
        script_hangs.note_iteration(job, *before)
    _judge_recovery(job)


def _leads(job: Job, report: m.Printed) -> bool:
    """Return whether the calls of this rank count. Those of one rank do, so that no figure is lost to the calls of
    another: of the first one, until another rank reports losses and it does not."""
    counter = job.counter
    has_losses = any(figures.loss is not None for figures in report.figures)
    if counter.caller not in job.live or (has_losses and not counter.has_losses):
        counter.caller, counter.has_losses = report.rank, False
    if report.rank != counter.caller:
        return False
    counter.has_losses = counter.has_losses or has_losses
    return True


def _take(job: Job, report: m.Printed, figures: m.PrintedFigures) -> None:
    counter, record, iteration = job.counter, job.record, figures.iteration
    again = iteration <= record.committed
    if again and report.rank != counter.rank and counter.rank in job.live:
        return  # the other rank prints the same, or something else
    went_back = counter.rank != report.rank or iteration < counter.iteration
    counter.rank, counter.iteration, counter.at = report.rank, iteration, job.now
    is_due = job.now - counter.noted_at >= NOTE_EVERY_S
    has_new_goal = record.counter is not None and report.goal not in (None, record.counter.goal)
    if record.counter is None or (has_new_goal and is_due) or (again and (went_back or is_due)):
        counter.noted_at = job.now
        entry = CounterSeen(rank=report.rank, iteration=iteration, furthest=record.committed, goal=report.goal)
        job.log(entry)
        if again and went_back:
            job.say("notice", explain(entry))
    _judge_loss(job, report.rank, figures)
    if figures.loss is not None:
        bad_losses.take(job, iteration, figures.loss)
    if not again:
        job.log(
            IterationCommitted(
                epoch=record.round,
                outcome=m.StepOutcome.printed(iteration, figures.loss, figures.tokens, figures.sum_squared_lengths),
                seconds=figures.seconds,
                predicted_seconds=_predicted_s(job, figures),
            )
        )


def _predicted_s(job: Job, figures: m.PrintedFigures) -> float | None:
    """Predict the seconds of an iteration from its workload and the iterations before it, then learn from it. None if
    its workload is not known, or as long as too few iterations are."""
    if not (figures.tokens or figures.sum_squared_lengths) or not figures.seconds or not job.settings.detect:
        return None
    model = job.counter.model = job.counter.model or IterationModel()
    point = Point(
        iteration=figures.iteration,
        seconds=figures.seconds,
        tokens=figures.tokens,
        squares=figures.sum_squared_lengths,
    )
    predicted_s = model.predict(point)
    if not job.record.slow:  # a prediction is of healthy ranks
        model.learn(point)
    return predicted_s


def _judge_recovery(job: Job) -> None:
    """Record that the script has recovered from the failures before its last restart: it has printed an iteration."""
    record, start = job.record, job.start
    failures = tuple(sorted(set(range(record.recovered + 1, record.failures + 1)) - record.slow_failures))
    if not failures or record.round <= record.recovered_epoch or job.stage != "gathering" or start.early_at is not None:
        return
    began_at = start.ordered_at if start.restarted is None else start.restarted
    job.log(
        Reconfigured(
            epoch=record.round,
            failures=failures,
            attempts=record.round - record.recovered_epoch,
            action="redo",
            park_s=start.ordered_at - began_at,
            plan_s=0.0,
            groups_s=0.0,
            state_s=0.0,
            first_iteration_s=job.now - start.ordered_at,
            seconds=job.now - began_at,
            is_restart=True,
        )
    )


def _judge_loss(job: Job, rank: int, figures: m.PrintedFigures) -> None:
    """Record the first of several losses that are not finite."""
    if figures.loss is None:
        return
    was_finite, job.counter.is_finite = job.counter.is_finite, math.isfinite(figures.loss)
    if was_finite and not job.counter.is_finite:
        entry = LossNotFinite(rank=rank, iteration=figures.iteration, loss=str(figures.loss))
        job.log(entry)
        job.say("warning", explain(entry))
