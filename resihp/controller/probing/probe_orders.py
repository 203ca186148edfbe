"""Order ranks to measure devices and links, and collect the answers.

Before the first iteration every device is measured, and every link between neighbours. When a device joins, this device
is measured. On a suspicion the suspects and some reference devices are measured between two iterations, while training
goes on. Decides which devices serve as references, and how long answers may take; `probe_results` judges the answers.
Called by `startup`, `joins`, `slowness` and the modules that handle suspicions.

Both ends of a link have to measure at the same time, so they are told in advance after which iteration to measure. An
end that gets the order too late does not take part, and the other end waits for at most two seconds. The pairs of a
measurement are disjoint. Each pair has a communicator of its own, and measures while no other communicator of its ranks
is in use. So no pair can wait for another pair, and the rest of the job waits for the pairs as it does for any slow
rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.detector import probes
from resihp.detector.findings import Finding
from resihp.protocol import messages as m

MAX_REFERENCE_DEVICES = 4
"""Largest number of reference devices that are measured together with suspects, for comparison."""
MAX_BUSY_S = 3600.0
"""Longest time in seconds for which an iteration, with the evaluation before it, may keep ranks from answering a
probe."""


def begin(
    job: Job,
    occasion: Literal["start", "join", "suspicion", "standby"],
    ranks: Iterable[int],
    pairs: Sequence[Sequence[tuple[int, int]]] = (),
    findings: Iterable[Finding] = (),
) -> Examination:
    """Order ranks to measure their devices and, if `pairs` is given, the links between them. `pairs`: one sequence of
    disjoint pairs for each round."""
    job.probes += 1
    probed_ranks = tuple(sorted(ranks))
    examination = job.examinations[job.probes] = Examination(
        probe=job.probes,
        occasion=occasion,
        asked=probed_ranks,
        asked_at=job.now,
        findings=[*findings],
        after=job.furthest,
    )
    rounds = tuple(tuple(pair for pair in round_) for round_ in pairs)
    job.order(probed_ranks, m.Probe(probe=job.probes, pairs=rounds))
    return examination


def begin_link(
    job: Job, finding: Finding, after_iteration: int, slow_looks: tuple[probes.JudgedLink, ...] = ()
) -> None:
    """Order the ranks to measure a suspected link, together with other links of its kind, at the end of iteration
    `after_iteration`."""
    assert finding.link is not None
    slow = {rank for link in job.record.slow_links for rank in link}
    usable = [rank for rank in job.record.active if rank not in slow and job.device_of(rank) not in job.record.slow]
    round_ = probes.beside(link_ends(finding.link), usable, job.node_of)
    probed_ranks = tuple(sorted(rank for pair in round_ for rank in pair))
    job.probes += 1
    job.examinations[job.probes] = Examination(
        probe=job.probes,
        occasion="suspicion",
        asked=probed_ranks,
        asked_at=job.now,
        findings=[finding],
        ahead_s=(after_iteration - job.furthest) * job.predicted_s,
        slow_looks=slow_looks,
    )
    job.order(probed_ranks, m.Probe(probe=job.probes, pairs=(round_,), after_iteration=after_iteration))


def link_ends(link: tuple[int, int]) -> probes.Pair:
    return min(link), max(link)


def probed(job: Job, rank: int, answer: m.Probed) -> Examination | None:
    """Record an answer; return the examination if this was the last missing answer, else None."""
    examination = job.examinations.get(answer.probe)
    if examination is None or (rank not in examination.silent and rank not in examination.answers):
        return None
    examination.answered(rank, answer)
    return examination if _complete(job, examination) else None


def overdue(job: Job) -> list[Examination]:
    """Return the examinations that are complete because ranks died, or that have exceeded their time limit."""
    return [
        examination
        for examination in job.examinations.values()
        if _complete(job, examination)
        or job.now - examination.asked_at
        > job.settings.probe_budget_s + examination.ahead_s + _busy_s(job, examination)
    ]


def _busy_s(job: Job, examination: Examination) -> float:
    """Return the additional seconds that answers may take because ranks are training.

    Ranks that train answer between two iterations, and an evaluation may come before the next iteration. No additional
    time is allowed once a silent rank has reported an iteration since the order, or has no work, because such a rank
    could have answered.
    """
    if examination.ahead_s or not job.training:
        return 0.0
    working = job.record.working
    could_answer = any(
        rank not in working or job.members[rank].stepped > examination.after for rank in examination.silent
    )
    return 0.0 if could_answer else MAX_BUSY_S


def _complete(job: Job, examination: Examination) -> bool:
    return not examination.waits(lambda rank: job.members[rank].alive)


def reference_ranks(job: Job, beside: Sequence[int]) -> tuple[int, ...]:
    """Return reference ranks to measure together with suspects. They come in turn from the suspects' nodes, which share
    any problem of the node, and from other nodes, which reveal such a problem."""
    nodes = {job.members[rank].node for rank in beside}
    slow, suspects = job.record.slow, set(beside)
    others = [
        rank
        for rank in job.record.computing
        if rank not in suspects and job.members[rank].alive and job.device_of(rank) not in slow
    ]
    same_nodes = [rank for rank in others if job.members[rank].node in nodes]
    other_nodes = [rank for rank in others if job.members[rank].node not in nodes]
    return tuple(sorted(alternating(same_nodes, other_nodes)[:MAX_REFERENCE_DEVICES]))


def alternating(near: Iterable[int], far: Iterable[int]) -> list[int]:
    pairs = itertools.zip_longest(near, far)
    return [rank for pair in pairs for rank in pair if rank is not None]


def measured_again(job: Job, rank: int) -> str:
    """Return, in words, when an unfit device is measured again."""
    times = job.record.unfit_probes.get(job.device_of(rank), 1)
    return f"measured again in {probes.again_in_s(times, job.settings.recheck_s):.3g} s"
