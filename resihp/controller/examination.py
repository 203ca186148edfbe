"""Probes of devices and links: when they are taken, and what follows from them.

Before the first iteration every device is measured, and every link between neighbours; when a device joins, that one;
on a suspicion the suspects and a few witnesses, between two iterations, while training goes on. What an answer says is
judged by `resihp.detector.probes`. A device that is not fit does not get into the first plan: it stands by, so that it
is not learnt as healthy. Called by `gathering`, `newcomers` and `slowness`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from resihp.controller import interface as api
from resihp.controller.state import Examination, Job
from resihp.detector import probes
from resihp.detector.findings import Finding
from resihp.journal import DeviceProbe, LinkProbe, ProbesTaken
from resihp.protocol import messages as m

MOST_WITNESSES = 4
"""Devices measured beside suspects, to compare with."""


def begin(
    job: Job,
    occasion: Literal["start", "join", "suspicion", "standby"],
    ranks: Iterable[int],
    pairs: Sequence[Sequence[tuple[int, int]]] = (),
    finding: Finding | None = None,
) -> None:
    """Ask ranks to measure their devices, and with `pairs` (rounds of them) the links between them."""
    job.probes += 1
    asked = tuple(sorted(ranks))
    job.examinations[job.probes] = Examination(
        probe=job.probes, occasion=occasion, asked=asked, asked_at=job.now, finding=finding
    )
    rounds = tuple(tuple(pair for pair in round_) for round_ in pairs)
    job.order(asked, m.Probe(probe=job.probes, pairs=rounds, store=job.store if rounds else None))


def probed(job: Job, rank: int, answer: m.Probed) -> Examination | None:
    """Take an answer; returns the examination if it was the last one."""
    examination = job.examinations.get(answer.probe)
    if examination is None or rank not in examination.asked:
        return None
    examination.answers[rank] = answer
    return examination if _complete(job, examination) else None


def overdue(job: Job) -> list[Examination]:
    """Examinations that are complete because of who died, or have waited long enough."""
    return [
        examination
        for examination in job.examinations.values()
        if _complete(job, examination) or job.now - examination.asked_at > job.settings.probe_budget_s
    ]


def _complete(job: Job, examination: Examination) -> bool:
    return all(rank in examination.answers or not job.members[rank].alive for rank in examination.asked)


def conclude(job: Job, examination: Examination) -> dict[int, probes.Judged]:
    """Judge the answers, remember and tell them. A live rank that did not answer is not fit."""
    del job.examinations[examination.probe]
    found = {rank: answer.speed for rank, answer in examination.answers.items() if not answer.error}
    failed = {rank: answer.error for rank, answer in examination.answers.items() if answer.error}
    for rank in examination.asked:
        if rank not in examination.answers and job.members[rank].alive:
            failed[rank] = f"no answer to its probe within {job.settings.probe_budget_s:.0f} s"
    past = {rank: job.reference[device] for rank in found if (device := _device(job, rank)) in job.reference}
    known = {} if examination.occasion == "start" else _fleet(job, examination)
    judged = probes.judge_devices(found | known, failed, past)
    judged = {rank: verdict for rank, verdict in judged.items() if rank in examination.asked}
    for rank, verdict in judged.items():
        if verdict.fit and rank in found:
            job.reference.setdefault(_device(job, rank), found[rank])
    transfers = {rank: answer.transfers for rank, answer in examination.answers.items()}
    links = probes.judge_links(transfers, job.node_of)
    job.do(
        api.Log(
            entry=ProbesTaken(
                probe=examination.probe,
                occasion=examination.occasion,
                devices=tuple(_entry(job, verdict, found.get(rank)) for rank, verdict in sorted(judged.items())),
                links=tuple(
                    LinkProbe(
                        ranks=pair,
                        nodes=(job.node_of[pair[0]], job.node_of[pair[1]]),
                        speed=speed,
                        fit=speed >= probes.LINK_FIT,
                    )
                    for pair, speed in sorted(links.items())
                ),
                seconds=max((answer.seconds for answer in examination.answers.values()), default=0.0),
            )
        )
    )
    for (a, b), speed in sorted(links.items()):
        if speed < probes.LINK_FIT:
            job.say(
                "warning", f"link {job.node_of[a]}-{job.node_of[b]} (ranks {a} and {b}): at {speed:.0%} of its peers"
            )
    return judged


def _fleet(job: Job, examination: Examination) -> dict[int, m.Speed]:
    """What devices that are not measured now gave before: more to compare with."""
    return {
        rank: job.reference[device]
        for rank in job.live
        if rank not in examination.asked and (device := _device(job, rank)) in job.reference
    }


def witnesses(job: Job, suspects: Sequence[int]) -> tuple[int, ...]:
    """Active ranks to measure beside suspects: of the same nodes first, which share whatever is a node's."""
    nodes = {job.members[rank].node for rank in suspects}
    slow = set(job.slow)
    others = [rank for rank in job.active if rank not in suspects and _device(job, rank) not in slow]
    return tuple(sorted(others, key=lambda rank: (job.members[rank].node not in nodes, rank))[:MOST_WITNESSES])


def _device(job: Job, rank: int) -> tuple[str, int]:
    return job.members[rank].node, job.members[rank].device


def _entry(job: Job, judged: probes.Judged, found: m.Speed | None) -> DeviceProbe:
    node, device = _device(job, judged.rank)
    return DeviceProbe(
        rank=judged.rank,
        node=node,
        device=device,
        flops=found.flops if found else 0.0,
        memory_bytes=found.memory_bytes if found else 0.0,
        speed=judged.speed,
        fit=judged.fit,
        evidence=judged.evidence,
    )
