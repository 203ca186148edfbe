"""Devices in doubt: measured again, later and beside the same witnesses, before they are judged.

One probe is a tenth of a second, in which others may have been at work on the machine. Whoever it finds slow, or nearly
so, is measured a few times more, and so are some whom it finds well, or who train: what all give in the same looks is
compared (`resihp.detector.probes.judge_again`). This holds for the start, for a device that joins and for one that
stands by. At the start, devices that share their machine's processors are measured one after another: together, they
would compete. While training goes on all are measured at once: a witness that trains has the machine nearly to itself
if it is measured alone, since the others wait for it, and the newcomer has not. Where all are well nothing is asked,
and what the first probe found stands. Nothing is on record before all are judged: a new supervisor begins anew.
Suspects on shared processors get more looks as well (`suspects_again`). Called by `slowness`.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resihp.controller.fail_slow import probing
from resihp.controller.fail_slow.slow_devices import LEANING
from resihp.controller.state.examinations import Examination, SecondLooks
from resihp.controller.state.job import Job
from resihp.detector import probes
from resihp.settings import Thresholds


def after(job: Job, done: Examination) -> Examination | None:
    """Return the examination with what was found in all looks; None while some devices are looked at again."""
    looks = job.rechecks.second_looks.pop(done.probe, None)
    if looks is None:
        looks = _begin(job, done)
        if looks is None:
            return done
    else:
        _take(job, looks, done)
    del job.examinations[done.probe]
    if _may_go_on(job, looks.first) and _next(job, looks):
        return None
    return looks.first


def suspects_again(job: Job, done: Examination) -> bool:
    """Measure suspects and their witnesses once more where one look at shared processors would convict somebody; tells
    whether it does. Noise that makes a device look slow at work makes its probe look slow, too."""
    shared = any(answer.shared for answer in done.answers.values())
    if not shared or done.looks >= probes.SUSPECT_LOOKS or not job.training or not done.findings:
        return False
    verdicts = probing.weigh_suspicion(job, done).devices.values()
    asked = [rank for rank in done.asked if job.members[rank].alive]
    leaning = any(verdict.speed is not None and verdict.odds >= LEANING for verdict in verdicts)
    if not leaning or not asked:
        return False
    del job.examinations[done.probe]
    again = probing.begin(job, "suspicion", asked, findings=done.findings)
    again.best, again.looks = probing.best_of_looks(done), done.looks + 1
    again.failed = probing.failed_looks(done)
    return True


def _may_go_on(job: Job, first: Examination) -> bool:
    """Whether there is still somebody to be given work."""
    if job.departure is not None:
        return False
    return job.stage == "gathering" if first.occasion == "start" else job.under_way


def _begin(job: Job, done: Examination) -> SecondLooks | None:
    doubts = {rank: why for rank, why in probing.in_doubt(job, done).items() if job.members[rank].alive}
    if not doubts:
        return None
    if done.occasion == "start":
        witnesses = _others_that_start(job, done, doubts.keys())
    else:
        witnesses = probing.witnesses(job, sorted(doubts))
    if not witnesses:
        return None
    first = min(doubts)
    left = len(doubts) - 1
    more = f", and {left} other{'' if left == 1 else 's'}" if left else ""
    job.say("notice", f"{job.where(first)}{more}: its probe looks slow, probing again before deciding: {doubts[first]}")
    return SecondLooks(first=done, doubted=tuple(sorted(doubts)), witnesses=witnesses)


def _others_that_start(job: Job, done: Examination, doubted: Collection[int]) -> tuple[int, ...]:
    """Return witnesses of the same nodes, which share whatever is a node's, and of others, which show what that is."""
    nodes = {job.members[rank].node for rank in doubted}
    others = [rank for rank in probing.measured(done) if rank not in doubted and job.members[rank].alive]
    near = sorted(rank for rank in others if job.members[rank].node in nodes)
    far = sorted(rank for rank in others if job.members[rank].node not in nodes)
    return tuple(sorted(probing.alternating(near, far)[: probing.MOST_WITNESSES]))


def _take(job: Job, looks: SecondLooks, done: Examination) -> None:
    """Those of one turn have answered. What is wrong is wrong; of speeds the best counts, in these looks alone: others
    were measured while everybody was, and may not be compared with who had the machine to itself."""
    answers, best = looks.first.answers, looks.first.best
    for rank, answer in done.answers.items():
        if answer.error and rank in answers:
            answers[rank] = msgspec.structs.replace(answers[rank], error=answer.error)
        elif answer.error:
            job.say("warning", f"{job.where(rank)}: probed for comparison, and failed: {answer.error}")
            looks.witnesses = tuple(witness for witness in looks.witnesses if witness != rank)
        elif not answer.untried:
            best[rank] = probes.best(best.get(rank, answer.speed), answer.speed)
    for rank in done.silent:
        if job.members[rank].alive and rank in looks.first.asked:
            answers.pop(rank, None)
            looks.first.silent.add(rank)


def _next(job: Job, looks: SecondLooks) -> bool:
    """Ask those whose turn it is; False when nobody is in doubt any more."""
    if not looks.turns and not _look_again(job, looks):
        return False
    turn = [rank for rank in looks.turns.pop(0) if job.members[rank].alive]
    if not turn:
        return _next(job, looks)
    asked = probing.begin(job, looks.first.occasion, turn)
    job.rechecks.second_looks[asked.probe] = looks
    return True


def _look_again(job: Job, looks: SecondLooks) -> bool:
    """One more look at whoever is in doubt still; False if nobody is, or could be compared."""
    first = looks.first
    if looks.taken:
        _judge(looks, job.settings.detection.thresholds)
    for rank in looks.doubted:
        if not job.members[rank].alive:  # of a device whose process died meanwhile nothing is known
            first.answers.pop(rank, None)
    looks.doubted = tuple(rank for rank in looks.doubted if rank in first.answers and not first.answers[rank].error)
    looks.witnesses = tuple(
        rank
        for rank in looks.witnesses
        if job.members[rank].alive and (rank not in first.asked or _is_well(first, rank))
    )
    if looks.doubted and not looks.witnesses and first.occasion != "start":  # those who were have died meanwhile
        looks.witnesses = probing.witnesses(job, looks.doubted)
    if not looks.doubted or not looks.witnesses:
        return False
    looks.taken += 1
    first.looks += 1
    looks.turns = _turns(job, looks)
    return True


def _is_well(first: Examination, rank: int) -> bool:
    return rank in first.answers and not first.answers[rank].error


def _turns(job: Job, looks: SecondLooks) -> list[tuple[int, ...]]:
    asked = [*looks.doubted, *looks.witnesses]
    if looks.first.occasion != "start":
        return [tuple(sorted(asked))]
    machines = {rank: job.nodes[job.members[rank].node].host for rank in asked}
    shared = {rank for rank in asked if looks.first.answers[rank].shared}
    return probes.in_turns(asked, machines, shared)


def _judge(looks: SecondLooks, wanted: Thresholds) -> None:
    """Whoever is not in doubt any more; of one that could not be measured again the first look is all that is known."""
    first = looks.first
    witnesses = [first.best[rank] for rank in looks.witnesses if rank in first.best]
    if not witnesses and first.occasion != "start" and looks.taken < probes.SHARED_LOOKS[1]:
        return  # those who were asked have died: others are
    left = []
    for rank in looks.doubted if witnesses else ():
        if rank not in first.best or rank not in first.answers:
            continue
        shared = first.answers[rank].shared
        within = probes.SHARED_LOOKS if shared and first.occasion != "start" else probes.RECHECK_LOOKS
        judged = probes.judge_again(
            rank, first.best[rank], witnesses, looks.taken, shared=shared, wanted=wanted, within=within
        )
        if judged is None:
            left.append(rank)
        else:
            first.settled[rank] = judged
    looks.doubted = tuple(left)
