"""Verdicts on devices: how they are told, and what follows from them.

A verdict each, however many are convicted at once; a line a node, and one question about the plan for all. Called by
`slow_devices`, which decides who is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from resihp.controller import replan_policy
from resihp.controller.fail_slow import slow_parts
from resihp.controller.fail_slow.suspicions import IterationExcess, ended, excess, opened, possible, speed_of
from resihp.controller.state.job import Job
from resihp.controller.state.members import natural
from resihp.detector.findings import Finding
from resihp.record.describe import rank_list
from resihp.record.journal import FailureEnded, FailureFound
from resihp.record.state import Device, Link

MOST_LINES = 8
"""Nodes whose slow devices are told one by one."""


class Conviction(msgspec.Struct, frozen=True, kw_only=True):
    """A device that is slow, and what that rests on."""

    rank: int
    speed: float
    confidence: float
    evidence: str
    finding: Finding
    only: str = ""
    """In what alone, if not in all it does."""


def in_training(speeds: Mapping[int, float], rank: int, finding: Finding) -> float:
    """What a rank's own work shows of its speed; `speeds`: of all that were found slow."""
    told = None if finding.intermittent else speeds.get(rank)
    return possible(speed_of(finding) if told is None else told)


def convict(job: Job, guilty: Sequence[Conviction], *, all_lost: bool = False) -> bool:
    """All of them, and one question about the plan. `all_lost`: beside them all are slower than they were.

    Returns whether they, and what is known to be slow besides, explain less than half of what iterations take longer:
    then what is told of the whole is not their doing.
    """
    failures: dict[Device | Link, int] = {}
    since = min(one.finding.iteration for one in guilty)
    longer = None
    if all(one.finding.intermittent is None for one in guilty):
        longer = excess(job, since, (one.speed for one in guilty))
    left = longer is not None and longer.left
    for one in guilty:
        job.inquiry.acquitted.pop(one.rank, None)
        if one.finding.intermittent is None:
            job.monitor.confirmed(one.rank, one.speed)
        entry = _failure(job, one, longer)
        job.log(entry)
        failures[job.device_of(one.rank)] = entry.failure
    ranks = {one.rank for one in guilty}
    _tell(job, guilty, longer)
    if not left:
        slow_parts.explained(job, ranks, since, min(failures.values()), all_lost=all_lost)
    replan_policy.consider_all(job, f"{_subject(job, guilty)} slow", since, failures)
    return left


def _failure(job: Job, one: Conviction, longer: IterationExcess | None) -> FailureFound:
    member, now_and_then = job.members[one.rank], one.finding.intermittent
    if now_and_then is not None:
        cause = (
            f"is slow now and then: {now_and_then.share:.0%} of the iterations at {now_and_then.factor:.1f} times, "
            f"on average {one.speed:.0%} of its speed"
        )
    else:
        cause = f"works at {one.speed:.0%} of a healthy device's speed{f', {one.only}' if one.only else ''}"
    told = "" if longer is None else longer.told(one.speed)
    left = longer is not None and longer.left
    injected = job.slow_since.get(one.rank)
    since_s = None if injected is None else job.now - injected
    return FailureFound(
        failure=job.record.failures + 1,
        kind="fail-slow",
        component="device",
        cause=f"rank {one.rank} {cause}{f', which {told}' if left else ''}",
        ranks=(one.rank,),
        node=member.node,
        device=member.device,
        iteration=one.finding.iteration,
        epoch=job.epoch,
        evidence=f"{one.evidence}; {told}" if told and not left else one.evidence,
        detect_s=since_s,
        noticed_s=0.0,
        failed_s=job.onsets.slow_for_s(one.finding.iteration, job.now, since_s),
        speed=one.speed,
        confidence=one.confidence,
        intermittent=now_and_then is not None,
        idle=one.rank not in job.record.working,
    )


def convict_again(job: Job, ranks: Sequence[int], finding: Finding) -> None:
    """Devices with a verdict whose speed is another one by now."""
    opened(job, finding, tuple(ranks))
    ended(job, "slow", f"{rank_list(ranks)}: slow before, at another speed now")
    guilty, speeds = [], job.monitor.speeds()
    for rank in ranks:
        device, speed = job.device_of(rank), in_training(speeds, rank, finding)
        former = job.record.slow[device]
        told = f"at {speed:.0%} of its speed now, at {former.speed:.0%} before; {finding.evidence}"
        job.log(
            FailureEnded(
                failure=former.failure,
                node=device[0],
                device=device[1],
                iteration=max(finding.iteration, former.since),
                evidence=f"at {speed:.0%} of its speed from then on",
            )
        )
        guilty.append(Conviction(rank=rank, speed=speed, confidence=finding.confidence, evidence=told, finding=finding))
    convict(job, guilty)


# --- words ----------------------------------------------------------------------------------------------------------


def _by_node(job: Job, guilty: Iterable[Conviction]) -> dict[str, list[Conviction]]:
    found: dict[str, list[Conviction]] = {}
    for one in guilty:
        found.setdefault(job.members[one.rank].node, []).append(one)
    return found


def _tell(job: Job, guilty: Sequence[Conviction], longer: IterationExcess | None) -> None:
    """One line for each node, or one for all of many."""
    if longer is not None and longer.left:
        job.say("warning", longer.unexplained())
    nodes = _by_node(job, guilty)
    if len(nodes) > MOST_LINES:
        since = min(one.finding.iteration for one in guilty)
        job.say(
            "warning",
            f"{len(guilty)} devices of {len(nodes)} nodes: slow since iteration {since}, {_speeds(guilty)} of their "
            "speed; see resihp history failures",
        )
        return
    for node, ours in sorted(nodes.items(), key=lambda item: natural(item[0])):
        since = min(one.finding.iteration for one in ours)
        if len(ours) == 1:
            how = "now and then, on average " if ours[0].finding.intermittent else ""
            job.say(
                "warning", f"{job.where(ours[0].rank)}: slow since iteration {since}, {how}{_speeds(ours)} of its speed"
            )
            continue
        count, every = len(ours), len(_devices(job, node))
        which = f"its {count} devices" if count == every else f"{count} of its {every} devices"
        ranks = "" if count == every else f" ({rank_list(one.rank for one in ours)})"
        job.say("warning", f"node {node}: {which}{ranks} work {_speeds(ours)}, slow since iteration {since}")


def _devices(job: Job, node: str) -> list[int]:
    return [rank for rank in job.live if job.members[rank].node == node]


def _speeds(guilty: Iterable[Conviction]) -> str:
    """`at 80%`, `at 70% to 80%`."""
    speeds = sorted(f"{one.speed:.0%}" for one in sorted(guilty, key=lambda one: one.speed))
    return f"at {speeds[0]}" if speeds[0] == speeds[-1] else f"at {speeds[0]} to {speeds[-1]}"


def _subject(job: Job, guilty: Sequence[Conviction]) -> str:
    nodes = _by_node(job, guilty)
    if len(guilty) > 1 and len(nodes) == 1 and len(guilty) == len(_devices(job, next(iter(nodes)))):
        return f"node {next(iter(nodes))} is"
    return f"{rank_list(one.rank for one in guilty)} {'is' if len(guilty) == 1 else 'are'}"
