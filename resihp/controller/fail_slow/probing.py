"""Probes of devices and links: when they are taken, and what follows from them.

Before the first iteration every device is measured, and every link between neighbours; when a device joins, that one;
on a suspicion the suspects and a few witnesses, between two iterations, while training goes on. What an answer says is
judged by `resihp.detector.probes`. A device that is not fit does not get into the first plan: it stands by, so that it
is not learnt as healthy. Called by `startup`, `joins` and `slowness`.

Both ends of a link have to come at the same time. Which iteration's end that is, is announced to them ahead; whoever
hears of it too late does not come, and who waits does so for two seconds at most. The pairs are disjoint, and each has
a communicator of its own, while nothing is under way on any other of its ranks': none can wait for another one, and the
rest of the job waits for them as for any slow peer.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.detector import probes, suspects
from resihp.detector.findings import Finding
from resihp.protocol import messages as m
from resihp.record.fold import RECOVERED
from resihp.record.journal import DeviceProbe, LinkProbe, ProbesTaken
from resihp.record.state import Device, Link

MOST_WITNESSES = 4
"""Devices measured beside suspects, to compare with."""
WHOLE = m.Speed(flops=1.0, memory_bytes=1.0)
"""What is left for all devices where they have lost nothing."""
LONGEST_S = 3600.0
"""Of an iteration and the evaluation before it, for what waits for their end."""
MOST_IN_ENTRY = 1000
"""Devices, and links, in one entry of the journal: it is sent to every agent, and no frame holds those of 16,384."""


def begin(
    job: Job,
    occasion: Literal["start", "join", "suspicion", "standby"],
    ranks: Iterable[int],
    pairs: Sequence[Sequence[tuple[int, int]]] = (),
    findings: Iterable[Finding] = (),
) -> Examination:
    """Ask ranks to measure their devices, and with `pairs` (rounds of them) the links between them."""
    job.probes += 1
    asked = tuple(sorted(ranks))
    begun = job.examinations[job.probes] = Examination(
        probe=job.probes, occasion=occasion, asked=asked, asked_at=job.now, findings=[*findings], after=job.furthest
    )
    rounds = tuple(tuple(pair for pair in round_) for round_ in pairs)
    job.order(asked, m.Probe(probe=job.probes, pairs=rounds))
    return begun


def begin_link(
    job: Job, finding: Finding, after_iteration: int, slow_looks: tuple[probes.JudgedLink, ...] = ()
) -> None:
    """Announce that a link under suspicion is measured, and others of its kind, at the end of that iteration."""
    assert finding.link is not None
    slow = {rank for link in job.record.slow_links for rank in link}
    able = [rank for rank in job.record.active if rank not in slow and job.device_of(rank) not in job.record.slow]
    round_ = probes.beside(_ends(finding.link), able, job.node_of)
    asked = tuple(sorted(rank for pair in round_ for rank in pair))
    job.probes += 1
    job.examinations[job.probes] = Examination(
        probe=job.probes,
        occasion="suspicion",
        asked=asked,
        asked_at=job.now,
        findings=[finding],
        ahead_s=(after_iteration - job.furthest) * job.predicted_s,
        slow_looks=slow_looks,
    )
    job.order(asked, m.Probe(probe=job.probes, pairs=(round_,), after_iteration=after_iteration))


def _ends(link: tuple[int, int]) -> probes.Pair:
    return min(link), max(link)


def probed(job: Job, rank: int, answer: m.Probed) -> Examination | None:
    """Take an answer; returns the examination if it was the last one."""
    examination = job.examinations.get(answer.probe)
    if examination is None or (rank not in examination.silent and rank not in examination.answers):
        return None
    examination.answered(rank, answer)
    return examination if _complete(job, examination) else None


def overdue(job: Job) -> list[Examination]:
    """Examinations that are complete because of who died, or have waited long enough."""
    return [
        examination
        for examination in job.examinations.values()
        if _complete(job, examination)
        or job.now - examination.asked_at
        > job.settings.probe_budget_s + examination.ahead_s + _busy_s(job, examination)
    ]


def _busy_s(job: Job, examination: Examination) -> float:
    """How much longer answers may take: ranks that train answer between two iterations, and an evaluation may come
    before the next. A rank that has reported one since had its chance, and so had one that has no work."""
    if examination.ahead_s or not job.training:
        return 0.0
    working = job.record.working
    had = any(rank not in working or job.members[rank].stepped > examination.after for rank in examination.silent)
    return 0.0 if had else LONGEST_S


def _complete(job: Job, examination: Examination) -> bool:
    return not examination.waits(lambda rank: job.members[rank].alive)


def conclude(job: Job, examination: Examination) -> dict[int, probes.Judged]:
    """Judge the answers, remember and tell them. A live rank that did not answer is not fit; of one that answers that
    it could not be measured nothing is known, and nothing follows."""
    job.examinations.pop(examination.probe, None)
    untried = {rank: answer.untried for rank, answer in examination.answers.items() if answer.untried}
    found = measured(examination)
    failed = {rank: answer.error for rank, answer in examination.answers.items() if answer.error}
    for rank in sorted(examination.silent):
        if job.members[rank].alive:
            failed[rank] = f"no answer to its probe within {job.settings.probe_budget_s:.0f} s"
    past = {rank: _usual(job, job.device_of(rank)) for rank in _past(job, found)}
    known = {} if examination.occasion == "start" else _fleet(job, examination)
    wanted = job.settings.detection.thresholds
    judged = probes.judge_devices(found | known, failed, past, wanted)
    asked = set(examination.asked)
    judged = {rank: verdict for rank, verdict in judged.items() if rank in asked}
    judged |= {rank: verdict for rank, verdict in examination.settled.items() if rank in found}
    judged |= _unconfirmed(job, examination, judged)
    comparable = found
    if examination.occasion != "start":  # what trains beside it was not at work when former jobs were measured
        comparable = {rank: speed for rank, speed in found.items() if not examination.answers[rank].shared}
    slower = _slower_than_in_former_jobs(job, comparable, found | known | examination.best)
    judged |= {rank: verdict for rank, verdict in slower.items() if judged[rank].fit}
    for rank, why in untried.items():
        judged[rank] = probes.Judged(rank=rank, speed=None, fit=True, evidence=f"not measured: {why}")
        job.say("notice", f"{job.where(rank)}: {judged[rank].evidence}")
    times = _link_seconds(examination)
    speeds = probes.judge_links(times, job.node_of)
    shown = found | {  # but who shares its processors is compared with what all gave while all were at it
        rank: probes.best(found[rank], again)
        for rank, again in examination.best.items()
        if rank in found and not examination.answers[rank].shared
    }
    devices = tuple(_entry(job, verdict, shown.get(rank)) for rank, verdict in sorted(judged.items()))
    slow = sorted(pair for pair, speed in speeds.items() if speed < wanted.link_fit)
    _log(job, examination, devices, times, speeds, slow)
    for a, b in slow:
        job.say("warning", f"{job.where_link((a, b))}: at {speeds[a, b]:.0%} of its peers")
    return judged


def measured(examination: Examination) -> dict[int, m.Speed]:
    """What the devices gave that could be measured."""
    answers = examination.answers.items()
    return {rank: answer.speed for rank, answer in answers if not answer.error and not answer.untried}


def _unconfirmed(job: Job, examination: Examination, judged: Mapping[int, probes.Judged]) -> dict[int, probes.Judged]:
    """Return the devices that one look at shared processors found slow, and no witness beside them: they count as fit,
    for others at work on the machine make a healthy device look as slow. What stands by goes on doing so."""
    fit: dict[int, probes.Judged] = {}
    if examination.occasion == "standby":
        return fit
    for rank, verdict in judged.items():
        answer = examination.answers.get(rank)
        settled = rank in examination.settled or verdict.fit or verdict.speed is None
        if answer is None or settled or not answer.shared:
            continue
        fit[rank] = msgspec.structs.replace(verdict, fit=True)
        job.say(
            "notice",
            f"{job.where(rank)}: {verdict.evidence}, in a single probe on shared processors, with no other device to "
            "compare it with: ignored",
        )
    return fit


def in_doubt(job: Job, examination: Examination) -> dict[int, str]:
    """Return the devices that are slow or nearly so, by this one short probe, and what it says of them.

    One look at a device that stands by, and has its processor to itself, is good enough to find it as slow as before.
    """
    found = measured(examination)
    known = {} if examination.occasion == "start" else _fleet(job, examination)
    past = {rank: _usual(job, job.device_of(rank)) for rank in _past(job, found)}
    judged = probes.judge_devices(found | known, {}, past)
    if examination.occasion == "standby":
        return {rank: judged[rank].evidence for rank in found if _standby_in_doubt(job, examination, judged[rank])}
    doubts = {rank: judged[rank].evidence for rank in probes.in_doubt(judged) if rank in found}
    slow, known_nodes = _slow_nodes(job, found | known)
    if 2 * len(slow) <= known_nodes:
        names = {rank: job.members[rank].node for rank in found}
        doubts |= {rank: slow[name][1] for rank, name in names.items() if name in slow and rank not in doubts}
    return doubts


def _standby_in_doubt(job: Job, examination: Examination, judged: probes.Judged) -> bool:
    if judged.speed is None:
        return False
    shared, device = examination.answers[judged.rank].shared, job.device_of(judged.rank)
    if device in job.record.unfit:
        return judged.speed < probes.DOUBT_SHARE and (shared or judged.speed >= job.settings.detection.thresholds.fit)
    return shared and judged.speed < RECOVERED


def _usual(job: Job, device: Device) -> m.Speed:
    """What it gave first, less what all have lost since."""
    speed, share = job.record.reference[device], job.record.common_share
    if share is None:
        return speed
    flops, memory_bytes = speed.flops * share.flops, speed.memory_bytes * share.memory_bytes
    return m.Speed(flops=flops, memory_bytes=memory_bytes, hardware=speed.hardware)


def _past(job: Job, ranks: Iterable[int]) -> dict[int, m.Speed]:
    reference = job.record.reference
    return {rank: reference[device] for rank in ranks if (device := job.device_of(rank)) in reference}


def best_of_looks(examination: Examination) -> dict[int, m.Speed]:
    """Return the best that each device gave in all looks at it: others at work only make it look slower than it is."""
    found, before = measured(examination), examination.best
    return found | {rank: probes.best(found.get(rank, speed), speed) for rank, speed in before.items()}


def failed_looks(examination: Examination) -> dict[int, str]:
    """Return the errors that devices answered with, in any look."""
    return examination.failed | {rank: answer.error for rank, answer in examination.answers.items() if answer.error}


def weigh_suspicion(job: Job, examination: Examination) -> suspects.Verdicts:
    """Return what the answers to a suspicion's probe come to; nothing follows from it yet."""
    answers = examination.answers.items()
    found = best_of_looks(examination)
    failed = failed_looks(examination)
    named = {rank for finding in examination.findings for rank in finding.ranks}
    everybody = any(not finding.ranks for finding in examination.findings)
    suspected, wanted = None if everybody else named, job.settings.detection.thresholds
    usual, shared = job.record.common_share, any(answer.shared for _, answer in answers)
    found = {rank: speed for rank, speed in found.items() if rank not in failed}
    return suspects.judge(found, failed, _past(job, found), suspected, usual, wanted, shared=shared)


def conclude_suspicion(job: Job, examination: Examination) -> suspects.Verdicts:
    """Judge suspects beside their witnesses, or everybody, remember and tell it. A live rank that did not answer is not
    fit; of one that answers that it could not be measured nothing is known."""
    job.examinations.pop(examination.probe, None)
    answers = examination.answers.items()
    found = best_of_looks(examination)
    verdicts = weigh_suspicion(job, examination)
    everybody = any(not finding.ranks for finding in examination.findings)
    judged = verdicts.devices
    if examination.looks > 1:
        for rank, verdict in judged.items():
            if verdict.speed is not None:
                evidence = f"{verdict.evidence}, the best of {examination.looks} looks"
                judged[rank] = msgspec.structs.replace(verdict, evidence=evidence)
    for rank, answer in answers:
        if answer.untried:
            evidence = f"not measured: {answer.untried}"
            judged[rank] = probes.Judged(rank=rank, speed=None, fit=True, evidence=evidence)
            job.say("notice", f"{job.where(rank)}: {evidence}")
    for rank in sorted(examination.silent):
        if job.members[rank].alive:
            evidence = f"no answer to its probe within {job.settings.probe_budget_s:.0f} s"
            judged[rank] = probes.Judged(rank=rank, speed=None, fit=False, evidence=evidence)
    devices = tuple(_entry(job, one, found.get(rank)) for rank, one in sorted(judged.items()))
    share = None
    if everybody and verdicts.share is not None:  # suspects and witnesses alone do not tell what all have lost
        share = verdicts.share if verdicts.lost else WHOLE
    _log(job, examination, devices, {}, {}, (), share)
    return verdicts


def conclude_link(job: Job, examination: Examination, of: Link) -> probes.JudgedLink | None:
    """Judge a link under suspicion, remember and tell it; None if it was not measured."""
    link = _ends(of)
    del job.examinations[examination.probe]
    times, wanted = _link_seconds(examination), job.settings.detection.thresholds
    speeds: dict[probes.Pair, float | None] = {**probes.judge_links(times, job.node_of)}
    judged = probes.judge_link(link, times, job.node_of, job.record.link_seconds, wanted) if link in times else None
    if judged is not None:
        speeds[link] = judged.speed
    _log(job, examination, (), times, speeds, (link,) if judged is not None and judged.slow else ())
    return judged


def _link_seconds(examination: Examination) -> dict[probes.Pair, float]:
    return probes.link_seconds({rank: answer.transfers for rank, answer in examination.answers.items()})


def _log(
    job: Job,
    examination: Examination,
    devices: tuple[DeviceProbe, ...],
    times: Mapping[probes.Pair, float],
    speeds: Mapping[probes.Pair, float | None],
    slow: Collection[probes.Pair],
    share: m.Speed | None = None,
) -> None:
    node_of = job.node_of
    links = tuple(
        LinkProbe(
            ranks=pair,
            nodes=(node_of[pair[0]], node_of[pair[1]]),
            speed=speeds.get(pair),
            fit=pair not in slow,
            seconds=seconds,
        )
        for pair, seconds in sorted(times.items())
    )
    took_s = max((answer.seconds for answer in examination.answers.values()), default=0.0)
    for at in range(0, max(len(devices), len(links), 1), MOST_IN_ENTRY):
        part = slice(at, at + MOST_IN_ENTRY)
        job.log(
            ProbesTaken(
                probe=examination.probe,
                occasion=examination.occasion,
                devices=devices[part],
                links=links[part],
                seconds=took_s,
                looks=examination.looks,
                share=share,
            )
        )


def _slower_than_in_former_jobs(
    job: Job, found: Mapping[int, m.Speed], fleet: Mapping[int, m.Speed]
) -> dict[int, probes.Judged]:
    """Of the measured devices, those of nodes all of whose devices are; nobody where most nodes of the fleet are."""
    slow, known = _slow_nodes(job, fleet)
    ours = {rank: slow[node] for rank in found if (node := job.members[rank].node) in slow}
    if not ours or 2 * len(slow) <= known:
        return {
            rank: probes.Judged(rank=rank, speed=speed, fit=False, evidence=text)
            for rank, (speed, text) in ours.items()
        }
    worst = min(slow, key=lambda node: slow[node])
    job.say(
        "warning",
        f"{len(slow)} of {known} nodes are slower than in former jobs, node {worst}: {slow[worst][1]}; "
        "a new driver, or cores that are shared? none is left out for it; see resihp history probes",
    )
    return {}


def _slow_nodes(job: Job, fleet: Mapping[int, m.Speed]) -> tuple[dict[str, tuple[float, str]], int]:
    """Nodes slower than in former jobs, as `probes.judge_nodes` has them, and of how many it is known."""
    places = {rank: _place(job, rank, speed) for rank, speed in fleet.items()}
    shares = probes.judge_nodes(fleet, places, job.usual_speeds)
    least = job.settings.detection.thresholds.fit
    return {node: share for node, share in shares.items() if share[0] < least}, len(shares)


def _place(job: Job, rank: int, speed: m.Speed) -> probes.Place:
    node = job.nodes[job.members[rank].node]
    return node.name, node.host, speed.hardware


def _fleet(job: Job, examination: Examination) -> dict[int, m.Speed]:
    """What devices that are not measured now gave before: more to compare with."""
    asked = set(examination.asked)
    return {
        rank: _usual(job, device)
        for rank in job.live
        if rank not in asked and (device := job.device_of(rank)) in job.record.reference
    }


def measured_again(job: Job, rank: int) -> str:
    """Say when a device that was set aside is measured again."""
    times = job.record.unfit_probes.get(job.device_of(rank), 1)
    return f"measured again in {probes.again_in_s(times, job.settings.recheck_s):.3g} s"


def witnesses(job: Job, beside: Sequence[int]) -> tuple[int, ...]:
    """Active ranks to measure beside suspects: of the same nodes, which share whatever is a node's, and of others in
    turn, which show what it is that they share."""
    nodes = {job.members[rank].node for rank in beside}
    slow, known = job.record.slow, set(beside)
    others = [
        rank
        for rank in job.record.computing
        if rank not in known and job.members[rank].alive and job.device_of(rank) not in slow
    ]
    near = [rank for rank in others if job.members[rank].node in nodes]
    far = [rank for rank in others if job.members[rank].node not in nodes]
    return tuple(sorted(alternating(near, far)[:MOST_WITNESSES]))


def alternating(near: Iterable[int], far: Iterable[int]) -> list[int]:
    pairs = itertools.zip_longest(near, far)
    return [rank for pair in pairs for rank in pair if rank is not None]


def _entry(job: Job, judged: probes.Judged, found: m.Speed | None) -> DeviceProbe:
    node, device = job.device_of(judged.rank)
    return DeviceProbe(
        rank=judged.rank,
        node=node,
        device=device,
        flops=found.flops if found else 0.0,
        memory_bytes=found.memory_bytes if found else 0.0,
        speed=judged.speed,
        fit=judged.fit,
        evidence="" if judged.fit and found else judged.evidence,
        hardware=found.hardware if found else "",
    )
