"""Report on the detector: answer operators' questions about a rank, report ranks that the detector does not watch, and
record scores of ranks over time.

Makes no decision about the job. If a rank has sent no report for many iterations, or if the detector judges no single
rank, this is journaled once, and once more when it is over, because a detector that sees nothing must not look healthy.
Scores are telemetry: of all ranks now and then, of the most suspicious ranks more often. Called by `expectation` after
each iteration, and by `controller` with questions.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from resihp.controller import interface as api
from resihp.controller.state.job import Job
from resihp.record.describe import DETECTORS, rank_list
from resihp.record.journal import CoverageChanged

UNWATCHED_AFTER_ITERATIONS = 200
"""Number of iterations without a report after which a rank counts as not watched."""
COVERAGE_CHECK_ITERATIONS = 16
"""Number of iterations between two checks of the ranks that are watched. A change of the detector's basis is reported
once two checks in a row agree."""
SCORE_ITERATIONS = 10
"""Number of iterations between two scores."""
MEAN_SCORES_PER_ITERATION = 8
"""Average number of ranks scored per iteration, when all ranks are scored: a job of 16,384 ranks scores all of them
every 2050 iterations."""
MAX_SUSPICIOUS_RANKS = 8
"""Number of ranks in every score: slow ranks, and the ranks with the most evidence against them."""


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an operator's question about a rank: the detector's figures (`findings.RankStanding`) and their
    context. Figures are None if nothing is known of the rank."""

    rank: int
    node: str
    device: int
    alive: bool
    working: bool
    """Whether the rank has work under the plan in effect."""
    iteration: int
    """The last committed iteration."""
    detector: str
    """The basis of the detector's judgements, as in `journal.CoverageChanged`, or "off"."""
    unwatched: bool
    reported: int | None = None
    level: float | None = None
    noise: float | None = None
    evidence: float | None = None
    slow: bool = False
    pardon: float = 0.0
    pardoned_until: int | None = None
    peers: int | None = None


def asked(job: Job, event: api.StandingAsked) -> None:
    """Answer an operator's question why a rank is, or is not, considered slow."""
    member = job.members.get(event.rank)
    if member is None:
        text = f"there is no rank {event.rank}; the job has ranks {min(job.members, default=0)} to "
        job.do(api.Reply(request=event.request, ok=False, text=text + str(max(job.members, default=0))))
        return
    answer = RankAnswer(
        rank=event.rank,
        node=member.node,
        device=member.device,
        alive=member.alive,
        working=event.rank in job.record.working,
        iteration=job.record.committed,
        detector=job.judged_by if job.settings.detect else "off",
        unwatched=event.rank in job.record.unwatched,
    )
    standing = job.monitor.standing(event.rank) if answer.working and job.settings.detect else None
    if standing is not None:
        figures = {name: getattr(standing, name) for name in standing.__struct_fields__ if name != "rank"}
        figures["level"] = standing.level if math.isfinite(standing.level) else None
        answer = msgspec.structs.replace(answer, **figures)
    job.do(api.Reply(request=event.request, ok=True, text=msgspec.json.encode(answer).decode()))


def note(job: Job, iteration: int, basis: str) -> None:
    """Check the detector's coverage and record scores, after a committed iteration. `basis`: the present basis of the
    detector's judgements."""
    if iteration % COVERAGE_CHECK_ITERATIONS == 0:
        by_ranks = basis != "workload" or job.settings.detection.mode == "sequential"
        _check_coverage(job, iteration, basis if by_ranks else "iterations")
    if iteration % SCORE_ITERATIONS == 0:
        _score(job, iteration)


# --- which ranks are watched ----------------------------------------------------------------------------------------


def _check_coverage(job: Job, iteration: int, basis: str) -> None:
    before = job.record
    twice = basis == job.judged_by  # a new plan makes the detector warm up for an iteration or two
    job.judged_by = basis
    detector = basis if twice else before.detector
    unwatched = _unwatched(job, iteration)
    if (detector, unwatched) == (before.detector, before.unwatched):
        return
    silent = [rank for rank in unwatched if rank not in before.unwatched]
    reporting_again = [rank for rank in before.unwatched if rank not in unwatched and rank in before.working]
    entry = CoverageChanged(iteration=iteration, detector=detector, unwatched=unwatched)  # type: ignore[arg-type]
    if silent:
        job.say(
            "notice",
            f"{_named(job, silent)}: no report for {UNWATCHED_AFTER_ITERATIONS} iterations; not watched for being slow",
        )
    if reporting_again:
        job.say("notice", f"{_named(job, reporting_again)}: reporting again, watched for being slow")
    if detector != before.detector and detector != "workload":
        job.say("notice", f"detector: {DETECTORS[detector]}")
    job.log(entry)


def _unwatched(job: Job, iteration: int) -> tuple[int, ...]:
    """Return the ranks with micro-batches that have sent no report for many iterations. Under a new plan the previous
    result is kept until there are reports."""
    computing = set(job.record.computing)
    covered = {rank: last for rank, last in job.monitor.coverage().items() if rank in computing}
    if not covered:  # the plan has just begun: nothing is known yet
        return tuple(rank for rank in job.record.unwatched if rank in job.record.working)
    silent = {rank for rank, last in covered.items() if iteration - last >= UNWATCHED_AFTER_ITERATIONS}
    for rank in covered.keys() & set(job.record.unwatched):
        standing = job.monitor.standing(rank)
        if standing is None or standing.reported is None:
            silent.add(rank)
    return tuple(sorted(silent))


def _named(job: Job, ranks: list[int]) -> str:
    return job.where(ranks[0]) if len(ranks) == 1 else rank_list(ranks)


# --- scores ---------------------------------------------------------------------------------------------------------


def _score(job: Job, iteration: int) -> None:
    scores = job.monitor.scores()
    if scores is None:
        return
    ranks, levels, evidence = scores
    chosen = np.arange(ranks.size)
    if iteration % _full_score_iterations(ranks.size):
        suspicion = np.where(np.isin(ranks, list(job.monitor.speeds())), np.inf, evidence)
        chosen = np.argsort(-suspicion, kind="stable")[:MAX_SUSPICIOUS_RANKS]
    job.do(
        api.TellScores(
            iteration=iteration,
            scores=tuple(
                (int(ranks[row]), float(levels[row]) if np.isfinite(levels[row]) else None, float(evidence[row]))
                for row in chosen
            ),
        )
    )


def _full_score_iterations(ranks: int) -> int:
    """Return the number of iterations between two scores of all ranks. `ranks`: the number of ranks."""
    return SCORE_ITERATIONS * max(1, math.ceil(ranks / MEAN_SCORES_PER_ITERATION / SCORE_ITERATIONS))
