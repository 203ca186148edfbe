"""Judge, record and report the answers to probes.

`resihp.detector.probes` judges the answers, and `resihp.detector.suspects` those to a suspicion. A device that is not
fit gets no work in the first plan: it stands by, so that the detector does not learn its speed as healthy. Decides with
which earlier speeds the answers are compared. The callers decide about the consequences: `slowness`, `slow_links`,
`device_verdicts` and `second_looks`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from resihp.controller.fail_slow.thresholds import RECOVERED_SPEED
from resihp.controller.probing.probe_orders import link_ends
from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.detector import probes, suspects
from resihp.protocol import messages as m
from resihp.record.journal import DeviceProbe, LinkProbe, ProbesTaken
from resihp.record.state import Device, Link

NOTHING_LOST = m.Speed(flops=1.0, memory_bytes=1.0)
"""Share of their former speed that all devices have left, if they have lost no speed."""
MAX_PROBES_IN_ENTRY = 1000
"""Largest number of devices, and of links, in one journal entry. Entries are sent to every agent, and one frame cannot
hold the probes of 16,384 ranks."""


def conclude(job: Job, examination: Examination) -> dict[int, probes.Judged]:
    """Judge the answers of an examination; record and report the judgements.

    A live rank that did not answer is not fit. A rank that answers that it could not measure is treated as fit, because
    nothing is known about it.
    """
    job.examinations.pop(examination.probe, None)
    speeds = measured(examination)
    judged = _judge(job, examination, speeds)
    _excuse_untried(job, examination, judged)
    link_times = _link_seconds(examination)
    link_speeds = probes.judge_links(link_times, job.node_of)
    best = _best_speeds(examination, speeds)
    devices = tuple(_entry(job, verdict, best.get(rank)) for rank, verdict in sorted(judged.items()))
    min_speed = job.settings.detection.probe_limits.link_fit
    slow = sorted(pair for pair, speed in link_speeds.items() if speed < min_speed)
    _log(job, examination, devices, link_times, link_speeds, slow)
    for a, b in slow:
        job.say("warning", f"{job.where_link((a, b))}: at {link_speeds[a, b]:.0%} of its peers")
    return judged


def _judge(job: Job, examination: Examination, speeds: dict[int, m.Speed]) -> dict[int, probes.Judged]:
    """Judge the measured `speeds` and the missing answers, by comparison with other devices, with the past and with
    former jobs."""
    failed = {rank: answer.error for rank, answer in examination.answers.items() if answer.error}
    failed |= _missing_answers(job, examination)
    past = {rank: _usual(job, job.device_of(rank)) for rank in _past(job, speeds)}
    others = _others(job, examination)
    verdicts = probes.judge_devices(speeds | others, failed, past, job.settings.detection.probe_limits)
    probed_ranks = set(examination.asked)
    judged = {rank: verdict for rank, verdict in verdicts.items() if rank in probed_ranks}
    judged |= {rank: verdict for rank, verdict in examination.settled.items() if rank in speeds}
    judged |= _unconfirmed(job, examination, judged)
    slower = _slower_than_in_former_jobs(
        job, _as_in_former_jobs(examination, speeds), speeds | others | examination.best
    )
    return judged | {rank: verdict for rank, verdict in slower.items() if judged[rank].fit}


def _missing_answers(job: Job, examination: Examination) -> dict[int, str]:
    """Return the live ranks that did not answer, each with the evidence."""
    evidence = f"no answer to its probe within {job.settings.probe_budget_s:.0f} s"
    return {rank: evidence for rank in sorted(examination.silent) if job.members[rank].alive}


def _excuse_untried(job: Job, examination: Examination, judged: dict[int, probes.Judged]) -> None:
    """Judge devices that could not be measured as fit, and report them."""
    for rank, answer in examination.answers.items():
        if answer.untried:
            evidence = f"not measured: {answer.untried}"
            judged[rank] = probes.Judged(rank=rank, speed=None, fit=True, evidence=evidence)
            job.say("notice", f"{job.where(rank)}: {evidence}")


def _as_in_former_jobs(examination: Examination, speeds: Mapping[int, m.Speed]) -> Mapping[int, m.Speed]:
    """Return the measured speeds that can be compared with those of former jobs. Except at the start, shared processors
    also run training during the probe, which they did not do in the probes of former jobs."""
    if examination.occasion == "start":
        return speeds
    return {rank: speed for rank, speed in speeds.items() if not examination.answers[rank].shared}


def _best_speeds(examination: Examination, speeds: Mapping[int, m.Speed]) -> dict[int, m.Speed]:
    """Return the best speed of each device over all looks. For shared processors return the first look, which was taken
    while all devices were measured."""
    best = dict(speeds)
    for rank, again in examination.best.items():
        if rank in speeds and not examination.answers[rank].shared:
            best[rank] = probes.best(speeds[rank], again)
    return best


def measured(examination: Examination) -> dict[int, m.Speed]:
    """Return the speeds of the devices that could be measured."""
    answers = examination.answers.items()
    return {rank: answer.speed for rank, answer in answers if not answer.error and not answer.untried}


def _unconfirmed(job: Job, examination: Examination, judged: Mapping[int, probes.Judged]) -> dict[int, probes.Judged]:
    """Return, judged as fit, the devices on shared processors that a single probe found slow without a reference device
    beside them. Other programs on the machine make a healthy device look as slow. A standby device continues to stand
    by."""
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
    """Return the doubtful devices: those that this single short probe shows to be slow, or nearly so, each with the
    evidence.

    For a standby device that does not share its processor, one look is enough to find it as slow as before.
    """
    speeds = measured(examination)
    others = _others(job, examination)
    past = {rank: _usual(job, job.device_of(rank)) for rank in _past(job, speeds)}
    judged = probes.judge_devices(speeds | others, {}, past)
    if examination.occasion == "standby":
        return {rank: judged[rank].evidence for rank in speeds if _standby_in_doubt(job, examination, judged[rank])}
    doubts = {rank: judged[rank].evidence for rank in probes.in_doubt(judged) if rank in speeds}
    slow, known_nodes = _slow_nodes(job, speeds | others)
    if 2 * len(slow) <= known_nodes:
        names = {rank: job.members[rank].node for rank in speeds}
        doubts |= {rank: slow[name][1] for rank, name in names.items() if name in slow and rank not in doubts}
    return doubts


def _standby_in_doubt(job: Job, examination: Examination, judged: probes.Judged) -> bool:
    if judged.speed is None:
        return False
    shared, device = examination.answers[judged.rank].shared, job.device_of(judged.rank)
    if device in job.record.unfit:
        return judged.speed < probes.DOUBT_SHARE and (shared or judged.speed >= job.settings.detection.probe_limits.fit)
    return shared and judged.speed < RECOVERED_SPEED


def _usual(job: Job, device: Device) -> m.Speed:
    """Return the speed that a device showed in its first successful probe, less the loss of speed common to all devices
    since then."""
    speed, share = job.record.reference[device], job.record.common_share
    if share is None:
        return speed
    flops, memory_bytes = speed.flops * share.flops, speed.memory_bytes * share.memory_bytes
    return m.Speed(flops=flops, memory_bytes=memory_bytes, hardware=speed.hardware)


def _past(job: Job, ranks: Iterable[int]) -> dict[int, m.Speed]:
    reference = job.record.reference
    return {rank: reference[device] for rank in ranks if (device := job.device_of(rank)) in reference}


def best_of_looks(examination: Examination) -> dict[int, m.Speed]:
    """Return the best speed of each device over all looks, because other programs can only make a device look slower
    than it is."""
    latest, earlier = measured(examination), examination.best
    return latest | {rank: probes.best(latest.get(rank, speed), speed) for rank, speed in earlier.items()}


def failed_looks(examination: Examination) -> dict[int, str]:
    """Return the error of each device that reported one in any look."""
    return examination.failed | {rank: answer.error for rank, answer in examination.answers.items() if answer.error}


def weigh_suspicion(job: Job, examination: Examination) -> suspects.Verdicts:
    """Return the verdicts that follow from the answers to a suspicion's probe, without acting on them."""
    answers = examination.answers.items()
    speeds = best_of_looks(examination)
    failed = failed_looks(examination)
    named = {rank for finding in examination.findings for rank in finding.ranks}
    all_devices = any(not finding.ranks for finding in examination.findings)
    suspected, limits = None if all_devices else named, job.settings.detection.probe_limits
    usual, shared = job.record.common_share, any(answer.shared for _, answer in answers)
    speeds = {rank: speed for rank, speed in speeds.items() if rank not in failed}
    return suspects.judge(speeds, failed, _past(job, speeds), suspected, usual, limits, shared=shared)


def conclude_suspicion(job: Job, examination: Examination) -> suspects.Verdicts:
    """Judge the suspects together with their reference devices, or all devices; record and report the verdicts.

    A live rank that did not answer is not fit. Nothing is known about a rank that answers that it could not measure.
    """
    job.examinations.pop(examination.probe, None)
    speeds = best_of_looks(examination)
    verdicts = weigh_suspicion(job, examination)
    judged = verdicts.devices
    if examination.looks > 1:
        for rank, verdict in judged.items():
            if verdict.speed is not None:
                evidence = f"{verdict.evidence}, the best of {examination.looks} looks"
                judged[rank] = msgspec.structs.replace(verdict, evidence=evidence)
    _excuse_untried(job, examination, judged)
    for rank, evidence in _missing_answers(job, examination).items():
        judged[rank] = probes.Judged(rank=rank, speed=None, fit=False, evidence=evidence)
    devices = tuple(_entry(job, verdict, speeds.get(rank)) for rank, verdict in sorted(judged.items()))
    _log(job, examination, devices, {}, {}, (), _common_share(examination, verdicts))
    return verdicts


def _common_share(examination: Examination, verdicts: suspects.Verdicts) -> m.Speed | None:
    """Return the share of their former speed that all devices have left. None unless all devices were measured, because
    suspects and references alone do not show it."""
    all_devices = any(not finding.ranks for finding in examination.findings)
    if not all_devices or verdicts.share is None:
        return None
    return verdicts.share if verdicts.lost else NOTHING_LOST


def conclude_link(job: Job, examination: Examination, suspect: Link) -> probes.JudgedLink | None:
    """Judge a suspected link; record and report the judgement. Returns None if the link was not measured."""
    link = link_ends(suspect)
    del job.examinations[examination.probe]
    times, limits = _link_seconds(examination), job.settings.detection.probe_limits
    speeds: dict[probes.Pair, float | None] = {**probes.judge_links(times, job.node_of)}
    judged = probes.judge_link(link, times, job.node_of, job.record.link_seconds, limits) if link in times else None
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
    for start in range(0, max(len(devices), len(links), 1), MAX_PROBES_IN_ENTRY):
        part = slice(start, start + MAX_PROBES_IN_ENTRY)
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
    job: Job, measured_speeds: Mapping[int, m.Speed], fleet: Mapping[int, m.Speed]
) -> dict[int, probes.Judged]:
    """Return the measured devices of nodes on which every device is slower than in former jobs. Empty if that holds for
    most nodes of the fleet."""
    slow, judged_nodes = _slow_nodes(job, fleet)
    ours = {rank: slow[node] for rank in measured_speeds if (node := job.members[rank].node) in slow}
    if not ours or 2 * len(slow) <= judged_nodes:
        return {
            rank: probes.Judged(rank=rank, speed=speed, fit=False, evidence=text)
            for rank, (speed, text) in ours.items()
        }
    worst = min(slow, key=lambda node: slow[node])
    job.say(
        "warning",
        f"{len(slow)} of {judged_nodes} nodes are slower than in former jobs, node {worst}: {slow[worst][1]}; "
        "check for a new driver, or for shared cores; none of them is left out; see resihp history probes",
    )
    return {}


def _slow_nodes(job: Job, fleet: Mapping[int, m.Speed]) -> tuple[dict[str, tuple[float, str]], int]:
    """Return the nodes that are slower than in former jobs (see `probes.judge_nodes`), and the number of nodes that
    were judged."""
    places = {rank: _place(job, rank, speed) for rank, speed in fleet.items()}
    shares = probes.judge_nodes(fleet, places, job.usual_speeds)
    min_speed = job.settings.detection.probe_limits.fit
    return {node: share for node, share in shares.items() if share[0] < min_speed}, len(shares)


def _place(job: Job, rank: int, speed: m.Speed) -> probes.Place:
    node = job.nodes[job.members[rank].node]
    return node.name, node.host, speed.hardware


def _others(job: Job, examination: Examination) -> dict[int, m.Speed]:
    """Return the earlier speeds of devices that are not measured now, for comparison; empty at the start."""
    if examination.occasion == "start":
        return {}
    probed_ranks = set(examination.asked)
    return {
        rank: _usual(job, device)
        for rank in job.live
        if rank not in probed_ranks and (device := job.device_of(rank)) in job.record.reference
    }


def _entry(job: Job, judged: probes.Judged, speed: m.Speed | None) -> DeviceProbe:
    node, device = job.device_of(judged.rank)
    return DeviceProbe(
        rank=judged.rank,
        node=node,
        device=device,
        flops=speed.flops if speed else 0.0,
        memory_bytes=speed.memory_bytes if speed else 0.0,
        speed=judged.speed,
        fit=judged.fit,
        evidence="" if judged.fit and speed else judged.evidence,
        hardware=speed.hardware if speed else "",
    )
