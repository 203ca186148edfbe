"""Measure doubtful devices again, together with the same reference devices, before they are judged.

A probe takes a tenth of a second, during which other programs may have used the machine. So a device that its first
probe shows to be slow, or nearly so, is measured a few times more, together with devices that the probe shows to be
healthy or that train. Speeds of the same looks are compared (`resihp.detector.probes.judge_again`). This applies at the
start, to a device that joins, and to a device that stands by.

At the start, devices that share their machine's processors are measured one after another, because they would compete.
While training goes on, all are measured at once. A reference device that trains and was measured alone would have the
machine nearly to itself, because all other ranks would wait for it; the new device would not.

If all devices are healthy in the first probe, no more is measured. Nothing is journaled before all devices are judged,
so a new supervisor starts over. Suspects on shared processors get more looks as well (`suspects_again`). Called by
`slowness`.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resihp.controller.fail_slow.thresholds import MIN_PROBE_LOG_ODDS
from resihp.controller.probing import probe_orders, probe_results
from resihp.controller.state.examinations import Examination, SecondLooks
from resihp.controller.state.job import Job
from resihp.detector import probes
from resihp.settings import ProbeLimits


def after(job: Job, done: Examination) -> Examination | None:
    """Return the examination with the results of all looks; None while some devices are measured again."""
    looks = job.rechecks.second_looks.pop(done.probe, None)
    if looks is None:
        looks = _begin(job, done)
        if looks is None:
            return done
    else:
        _take(job, looks, done)
    del job.examinations[done.probe]
    if _may_go_on(job, looks.first) and _measure_next_turn(job, looks):
        return None
    return looks.first


def suspects_again(job: Job, done: Examination) -> bool:
    """Measure suspects and references once more if a single look at shared processors would declare a device slow;
    return whether they are measured.

    The noise that makes a device look slow in training makes it look slow in its probe, too.
    """
    shared = any(answer.shared for answer in done.answers.values())
    if not shared or done.looks >= probes.SUSPECT_LOOKS or not job.training or not done.findings:
        return False
    verdicts = probe_results.weigh_suspicion(job, done).devices.values()
    probed_ranks = [rank for rank in done.asked if job.members[rank].alive]
    over_limit = any(verdict.speed is not None and verdict.odds >= MIN_PROBE_LOG_ODDS for verdict in verdicts)
    if not over_limit or not probed_ranks:
        return False
    del job.examinations[done.probe]
    again = probe_orders.begin(job, "suspicion", probed_ranks, findings=done.findings)
    again.best, again.looks = probe_results.best_of_looks(done), done.looks + 1
    again.failed = probe_results.failed_looks(done)
    return True


def _may_go_on(job: Job, first: Examination) -> bool:
    """Return whether the results still matter: the job is in the same phase and has not begun to stop."""
    if job.stop_request is not None:
        return False
    return job.stage == "gathering" if first.occasion == "start" else job.under_way


def _begin(job: Job, done: Examination) -> SecondLooks | None:
    doubts = {rank: why for rank, why in probe_results.in_doubt(job, done).items() if job.members[rank].alive}
    if not doubts:
        return None
    if done.occasion == "start":
        references = _references_that_start(job, done, doubts.keys())
    else:
        references = probe_orders.reference_ranks(job, sorted(doubts))
    if not references:
        return None
    first = min(doubts)
    others = len(doubts) - 1
    more = f", and {others} other{'' if others == 1 else 's'}" if others else ""
    job.say(
        "notice", f"{job.where(first)}{more}: looks slow in its probe, probing again before deciding: {doubts[first]}"
    )
    return SecondLooks(first=done, doubted=tuple(sorted(doubts)), references=references)


def _references_that_start(job: Job, done: Examination, doubted: Collection[int]) -> tuple[int, ...]:
    """Return reference ranks for the start, in turn from the doubtful devices' nodes, which share any problem of the
    node, and from other nodes, which reveal it."""
    nodes = {job.members[rank].node for rank in doubted}
    others = [rank for rank in probe_results.measured(done) if rank not in doubted and job.members[rank].alive]
    same_nodes = sorted(rank for rank in others if job.members[rank].node in nodes)
    other_nodes = sorted(rank for rank in others if job.members[rank].node not in nodes)
    return tuple(sorted(probe_orders.alternating(same_nodes, other_nodes)[: probe_orders.MAX_REFERENCE_DEVICES]))


def _take(job: Job, looks: SecondLooks, done: Examination) -> None:
    """Add the answers of one turn to the results. An error in any look counts. Of the speeds the best one counts, but
    not that of the first look: it was taken while all devices were measured, so it cannot be compared with a look in
    which a device had the machine to itself."""
    answers, best = looks.first.answers, looks.first.best
    for rank, answer in done.answers.items():
        if answer.error and rank in answers:
            answers[rank] = msgspec.structs.replace(answers[rank], error=answer.error)
        elif answer.error:
            job.say("warning", f"{job.where(rank)}: failed its probe, which was taken for comparison: {answer.error}")
            looks.references = tuple(reference for reference in looks.references if reference != rank)
        elif not answer.untried:
            best[rank] = probes.best(best.get(rank, answer.speed), answer.speed)
    for rank in done.silent:
        if job.members[rank].alive and rank in looks.first.asked:
            answers.pop(rank, None)
            looks.first.silent.add(rank)


def _measure_next_turn(job: Job, looks: SecondLooks) -> bool:
    """Order the probes of the next turn; return False once no device is doubtful any more."""
    if not looks.turns and not _look_again(job, looks):
        return False
    turn = [rank for rank in looks.turns.pop(0) if job.members[rank].alive]
    if not turn:
        return _measure_next_turn(job, looks)
    examination = probe_orders.begin(job, looks.first.occasion, turn)
    job.rechecks.second_looks[examination.probe] = looks
    return True


def _look_again(job: Job, looks: SecondLooks) -> bool:
    """Begin one more look at the devices that are still doubtful; return False if there are none, or no reference
    device."""
    first = looks.first
    if looks.taken:
        _judge(looks, job.settings.detection.probe_limits)
    for rank in looks.doubted:
        if not job.members[rank].alive:  # its process has died meanwhile: nothing is known
            first.answers.pop(rank, None)
    looks.doubted = tuple(rank for rank in looks.doubted if rank in first.answers and not first.answers[rank].error)
    looks.references = tuple(
        rank
        for rank in looks.references
        if job.members[rank].alive and (rank not in first.asked or _is_healthy(first, rank))
    )
    if (
        looks.doubted and not looks.references and first.occasion != "start"
    ):  # the former references have died meanwhile
        looks.references = probe_orders.reference_ranks(job, looks.doubted)
    if not looks.doubted or not looks.references:
        return False
    looks.taken += 1
    first.looks += 1
    looks.turns = _turns(job, looks)
    return True


def _is_healthy(first: Examination, rank: int) -> bool:
    return rank in first.answers and not first.answers[rank].error


def _turns(job: Job, looks: SecondLooks) -> list[tuple[int, ...]]:
    ranks = [*looks.doubted, *looks.references]
    if looks.first.occasion != "start":
        return [tuple(sorted(ranks))]
    machines = {rank: job.nodes[job.members[rank].node].host for rank in ranks}
    shared = {rank for rank in ranks if looks.first.answers[rank].shared}
    return probes.in_turns(ranks, machines, shared)


def _judge(looks: SecondLooks, limits: ProbeLimits) -> None:
    """Judge the devices that are no longer doubtful. If a device could not be measured again, its first look counts."""
    first = looks.first
    speeds = [first.best[rank] for rank in looks.references if rank in first.best]
    if not speeds and first.occasion != "start" and looks.taken < probes.SHARED_LOOKS[1]:
        return  # the references have died: the next look has others
    undecided = []
    for rank in looks.doubted if speeds else ():
        if rank not in first.best or rank not in first.answers:
            continue
        shared = first.answers[rank].shared
        within = probes.SHARED_LOOKS if shared and first.occasion != "start" else probes.RECHECK_LOOKS
        judged = probes.judge_again(
            rank, first.best[rank], speeds, looks.taken, shared=shared, limits=limits, within=within
        )
        if judged is None:
            undecided.append(rank)
        else:
            first.settled[rank] = judged
    looks.doubted = tuple(undecided)
