"""Record verdicts on slow devices: write journal entries and log lines, and ask the planner for another plan.

Each device gets a verdict of its own, however many are declared slow at once. The log gets one line for each node, and
the planner is asked once for all devices. Never decides which devices are slow; the callers `device_verdicts` and
`slow_devices` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from resihp.controller import replan_policy
from resihp.controller.fail_slow import slow_parts
from resihp.controller.fail_slow.suspicions import IterationExcess, ended, excess, opened, possible, speed_of
from resihp.controller.state.job import Job
from resihp.detector.findings import Finding
from resihp.record.describe import rank_list
from resihp.record.journal import FailureEnded, FailureFound
from resihp.record.state import Device, Link
from resihp.words import natural

MAX_NODE_LINES = 8
"""Largest number of nodes that get a log line each. If slow devices are on more nodes, one line is written for all of
them."""


class DeviceVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict that a device is slow, with the evidence for it."""

    rank: int
    speed: float
    confidence: float
    evidence: str
    finding: Finding
    only: str = ""
    """The only kind of work that is slow, in words; empty if all work is."""


def in_training(speeds: Mapping[int, float], rank: int, finding: Finding) -> float:
    """Return a rank's speed as shown by its own work in training. `speeds`: the speeds of all ranks that were found
    slow."""
    speed = None if finding.intermittent else speeds.get(rank)
    return possible(speed_of(finding) if speed is None else speed)


def declare_slow(job: Job, verdicts: Sequence[DeviceVerdict], *, all_lost: bool = False) -> bool:
    """Record the verdicts, then ask the planner once about all of them. `all_lost`: in addition, every device is slower
    than it was before.

    Returns True if these devices and all other known slow ones together account for less than half of the excess
    iteration time. In this case they do not explain a finding about the whole job.
    """
    failures: dict[Device | Link, int] = {}
    since = min(verdict.finding.iteration for verdict in verdicts)
    longer = None
    if all(verdict.finding.intermittent is None for verdict in verdicts):
        longer = excess(job, since, (verdict.speed for verdict in verdicts))
    mostly_unexplained = longer is not None and longer.mostly_unexplained
    for verdict in verdicts:
        job.inquiry.cleared.pop(verdict.rank, None)
        if verdict.finding.intermittent is None:
            job.monitor.confirmed(verdict.rank, verdict.speed)
        entry = _failure(job, verdict, longer)
        job.log(entry)
        failures[job.device_of(verdict.rank)] = entry.failure
    ranks = {verdict.rank for verdict in verdicts}
    _log_verdicts(job, verdicts, longer)
    if not mostly_unexplained:
        slow_parts.explained(job, ranks, since, min(failures.values()), all_lost=all_lost)
    replan_policy.consider_all(job, f"{_subject(job, verdicts)} slow", since, failures)
    return mostly_unexplained


def _failure(job: Job, verdict: DeviceVerdict, longer: IterationExcess | None) -> FailureFound:
    member, intermittent = job.members[verdict.rank], verdict.finding.intermittent
    if intermittent is not None:
        cause = (
            f"is slow now and then: {intermittent.share:.0%} of the iterations at {intermittent.factor:.1f} times, "
            f"on average {verdict.speed:.0%} of its speed"
        )
    else:
        cause = f"works at {verdict.speed:.0%} of a healthy device's speed{f', {verdict.only}' if verdict.only else ''}"
    accounts_for = "" if longer is None else longer.explanation(verdict.speed)
    mostly_unexplained = longer is not None and longer.mostly_unexplained
    injected = job.slow_since.get(verdict.rank)
    since_s = None if injected is None else job.now - injected
    return FailureFound(
        failure=job.record.failures + 1,
        kind="fail-slow",
        component="device",
        cause=f"rank {verdict.rank} {cause}{f', which {accounts_for}' if mostly_unexplained else ''}",
        ranks=(verdict.rank,),
        node=member.node,
        device=member.device,
        iteration=verdict.finding.iteration,
        epoch=job.epoch,
        evidence=f"{verdict.evidence}; {accounts_for}" if accounts_for and not mostly_unexplained else verdict.evidence,
        detect_s=since_s,
        noticed_s=0.0,
        failed_s=job.onsets.slow_for_s(verdict.finding.iteration, job.now, since_s),
        speed=verdict.speed,
        confidence=verdict.confidence,
        intermittent=intermittent is not None,
        idle=verdict.rank not in job.record.working,
    )


def update_speeds(job: Job, ranks: Sequence[int], finding: Finding) -> None:
    """Replace the verdicts of slow devices that have changed their speed since."""
    opened(job, finding, tuple(ranks))
    ended(job, "slow", f"{rank_list(ranks)}: already slow, speed has changed")
    verdicts, speeds = [], job.monitor.speeds()
    for rank in ranks:
        device, speed = job.device_of(rank), in_training(speeds, rank, finding)
        former = job.record.slow[device]
        evidence = f"at {speed:.0%} of its speed now, at {former.speed:.0%} before; {finding.evidence}"
        job.log(
            FailureEnded(
                failure=former.failure,
                node=device[0],
                device=device[1],
                iteration=max(finding.iteration, former.since),
                evidence=f"at {speed:.0%} of its speed from then on",
            )
        )
        verdicts.append(
            DeviceVerdict(rank=rank, speed=speed, confidence=finding.confidence, evidence=evidence, finding=finding)
        )
    declare_slow(job, verdicts)


# --- wording --------------------------------------------------------------------------------------------------------


def _by_node(job: Job, verdicts: Iterable[DeviceVerdict]) -> dict[str, list[DeviceVerdict]]:
    by_node: dict[str, list[DeviceVerdict]] = {}
    for verdict in verdicts:
        by_node.setdefault(job.members[verdict.rank].node, []).append(verdict)
    return by_node


def _log_verdicts(job: Job, verdicts: Sequence[DeviceVerdict], longer: IterationExcess | None) -> None:
    """Log one line for each node, or a single line if there are more than `MAX_NODE_LINES` nodes."""
    if longer is not None and longer.mostly_unexplained:
        job.say("warning", longer.unexplained())
    nodes = _by_node(job, verdicts)
    if len(nodes) > MAX_NODE_LINES:
        since = min(verdict.finding.iteration for verdict in verdicts)
        job.say(
            "warning",
            f"{len(verdicts)} devices of {len(nodes)} nodes: slow since iteration {since}, {_speeds(verdicts)} of "
            "their speed; see resihp history failures",
        )
        return
    for node, node_verdicts in sorted(nodes.items(), key=lambda item: natural(item[0])):
        since = min(verdict.finding.iteration for verdict in node_verdicts)
        if len(node_verdicts) == 1:
            how = "now and then, on average " if node_verdicts[0].finding.intermittent else ""
            job.say(
                "warning",
                f"{job.where(node_verdicts[0].rank)}: slow since iteration {since}, {how}{_speeds(node_verdicts)} of "
                "its speed",
            )
            continue
        count, total = len(node_verdicts), len(_devices(job, node))
        subset = f"its {count} devices" if count == total else f"{count} of its {total} devices"
        ranks = "" if count == total else f" ({rank_list(verdict.rank for verdict in node_verdicts)})"
        job.say("warning", f"node {node}: {subset}{ranks} work {_speeds(node_verdicts)}, slow since iteration {since}")


def _devices(job: Job, node: str) -> list[int]:
    return [rank for rank in job.live if job.members[rank].node == node]


def _speeds(verdicts: Iterable[DeviceVerdict]) -> str:
    """Return the range of the verdicts' speeds in words: `at 80%`, `at 70% to 80%`."""
    speeds = sorted(f"{verdict.speed:.0%}" for verdict in sorted(verdicts, key=lambda verdict: verdict.speed))
    return f"at {speeds[0]}" if speeds[0] == speeds[-1] else f"at {speeds[0]} to {speeds[-1]}"


def _subject(job: Job, verdicts: Sequence[DeviceVerdict]) -> str:
    nodes = _by_node(job, verdicts)
    if len(verdicts) > 1 and len(nodes) == 1 and len(verdicts) == len(_devices(job, next(iter(nodes)))):
        return f"node {next(iter(nodes))} is"
    return f"{rank_list(verdict.rank for verdict in verdicts)} {'is' if len(verdicts) == 1 else 'are'}"
