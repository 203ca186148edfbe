"""The start's devices in doubt: measured again, later and beside the same witnesses, before they are judged.

One probe is a tenth of a second, in which others may have been at work on the machine. Whoever it finds slow, or nearly
so, is measured a few times more, and so are some whom it finds well: what all give in the same looks is compared
(`resihp.detector.probes.judge_again`). Devices that share their machine's processors are measured one after another:
together, they would compete. Where all are well nothing is asked, and what the first probe found stands. Nothing is on
record before all are judged: a new supervisor begins anew. Called by `slowness`.
"""

from __future__ import annotations

import msgspec

from resihp.controller.fail_slow import probing
from resihp.controller.state.examinations import Examination, SecondLooks
from resihp.controller.state.job import Job
from resihp.detector import probes
from resihp.settings import Thresholds


def after(job: Job, done: Examination) -> Examination | None:
    """The start's examination, with what was found in all looks; None while some devices are looked at again."""
    looks = job.start.second_looks
    if looks is None:
        looks = _begin(job, done)
        if looks is None:
            return done
        job.start.second_looks = looks
    else:
        _take(job, looks, done)
    del job.examinations[done.probe]
    if job.stage == "gathering" and job.departure is None and _next(job, looks):
        return None
    job.start.second_looks = None
    return looks.first


def _begin(job: Job, done: Examination) -> SecondLooks | None:
    doubts = probing.in_doubt(job, done)
    nodes = {job.members[rank].node for rank in doubts}
    others = [rank for rank in probing.measured(done) if rank not in doubts and job.members[rank].alive]
    near = sorted(rank for rank in others if job.members[rank].node in nodes)
    # of the same nodes, which share whatever is a node's, and of others, which show what it is that they share
    others = probing.alternating(near, sorted(rank for rank in others if job.members[rank].node not in nodes))
    if not doubts or not others:
        return None
    first = min(doubts)
    left = len(doubts) - 1
    more = f", and {left} other{'' if left == 1 else 's'}" if left else ""
    job.say("notice", f"{job.where(first)}{more}: measured again before it is judged: {doubts[first]}")
    witnesses = tuple(sorted(others[: probing.MOST_WITNESSES]))
    return SecondLooks(first=done, doubted=tuple(sorted(doubts)), witnesses=witnesses)


def _take(job: Job, looks: SecondLooks, done: Examination) -> None:
    """Those of one turn have answered. What is wrong is wrong; of speeds the best counts, in these looks alone: others
    were measured while everybody was, and may not be compared with who had the machine to itself."""
    answers = looks.first.answers
    for rank, answer in done.answers.items():
        if answer.error:
            answers[rank] = msgspec.structs.replace(answers[rank], error=answer.error)
        elif not answer.untried:
            best = looks.first.best
            best[rank] = probes.best(best.get(rank, answer.speed), answer.speed)
    for rank in done.silent:
        if job.members[rank].alive:
            answers.pop(rank, None)
            looks.first.silent.add(rank)


def _next(job: Job, looks: SecondLooks) -> bool:
    """Ask those whose turn it is; False when nobody is in doubt any more."""
    if not looks.turns and not _look_again(job, looks):
        return False
    turn = [rank for rank in looks.turns.pop(0) if job.members[rank].alive]
    if not turn:
        return _next(job, looks)
    probing.begin(job, "start", turn)
    return True


def _look_again(job: Job, looks: SecondLooks) -> bool:
    """One more look at whoever is in doubt still; False if nobody is, or could be compared."""
    if looks.taken:
        _judge(looks, job.settings.detection.thresholds)
    answers = looks.first.answers
    asked = [
        rank
        for rank in (*looks.doubted, *looks.witnesses)
        if job.members[rank].alive and rank in answers and not answers[rank].error
    ]
    looks.doubted = tuple(rank for rank in looks.doubted if rank in asked)
    looks.witnesses = tuple(rank for rank in looks.witnesses if rank in asked)
    if not looks.doubted or not looks.witnesses:
        return False
    looks.taken += 1
    looks.first.looks += 1
    machines = {rank: job.nodes[job.members[rank].node].host for rank in asked}
    shared = {rank for rank in asked if answers[rank].shared}
    looks.turns = probes.in_turns(asked, machines, shared)
    return True


def _judge(looks: SecondLooks, wanted: Thresholds) -> None:
    """Whoever is not in doubt any more; of one that could not be measured again the first look is all that is known."""
    best = looks.first.best
    witnesses = [best[rank] for rank in looks.witnesses if rank in best]
    left = []
    for rank in looks.doubted if witnesses else ():
        if rank not in best or rank not in looks.first.answers:
            continue
        shared = looks.first.answers[rank].shared
        judged = probes.judge_again(rank, best[rank], witnesses, looks.taken, shared=shared, wanted=wanted)
        if judged is None:
            left.append(rank)
        else:
            looks.first.settled[rank] = judged
    looks.doubted = tuple(left)
