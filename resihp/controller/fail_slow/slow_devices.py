"""Handle suspected devices: decide which findings are worth a probe, and which devices have recovered.

All pending findings form one suspicion. Their suspects are measured together with the rest of their tensor-parallel
groups, because the ranks of a group wait for each other. If a finding names no suspect, all devices are measured. A
finding that a known failure explains is closed at once. `device_verdicts` decides on verdicts after the probe. Called
by `slowness`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from resihp.controller import replan_policy
from resihp.controller.fail_slow.suspicions import change, dropped, excess, opened
from resihp.controller.fail_slow.thresholds import (
    CLEARED_ITERATIONS,
    MIN_PEER_SLOWDOWN_SHARE,
    MIN_SPEED_CHANGE,
)
from resihp.controller.fail_slow.verdict_entries import in_training, update_speeds
from resihp.controller.probing import probe_orders
from resihp.controller.state.job import Job
from resihp.detector.findings import Finding
from resihp.detector.sequential.peer_cusum import MAX_PATIENCE_FACTOR
from resihp.record.journal import FailureEnded
from resihp.record.state import Device


def suspected(job: Job, findings: Iterable[Finding]) -> None:
    """Measure the suspects of all these findings at once. Called only while no other suspicion of slowness is open."""
    groups, speeds = tensor_groups(job), dict(job.monitor.speeds())
    new_findings = [finding for finding in findings if _is_worth_a_probe(job, finding, groups, speeds)]
    if not new_findings:
        return
    suspects = tuple(dict.fromkeys(rank for finding in new_findings for rank in without_verdict(job, finding)))
    first = new_findings[0]
    where = job.where(suspects[0]) if suspects else "no device stands out"
    others = f", and {len(suspects) - 1} more" if len(suspects) > 1 else ""
    opened(job, first, suspects)
    job.say("notice", f"{where}{others}: suspected to be slow, {change(first)}; measuring")
    measured = {mate for rank in suspects for mate in groups.get(rank, (rank,))} or set(job.record.active)
    probe_orders.begin(
        job, "suspicion", measured | set(probe_orders.reference_ranks(job, sorted(measured))), findings=new_findings
    )


def joined(job: Job, finding: Finding) -> bool:
    """Add a finding to the suspicion that is being measured, if all its suspects are being measured; return whether it
    was added."""
    for examination in job.examinations.values():
        pending = examination.findings
        if examination.occasion == "suspicion" and pending and pending[0].link is None:
            suspects = without_verdict(job, finding)
            if suspects and all(rank in examination.silent or rank in examination.answers for rank in suspects):
                pending.append(finding)
                return True
    return False


def _is_worth_a_probe(
    job: Job, finding: Finding, groups: Mapping[int, tuple[int, ...]], speeds: MutableMapping[int, float]
) -> bool:
    """Return whether a finding is worth a probe. If it is not, close it with a reason, or update the verdicts of its
    suspects.

    A device that is known to be slow may have become slower still. Its verdict is then replaced, which also updates
    `speeds`, the speeds of all ranks that were found slow.
    """
    if not finding.ranks:
        if (cause := _explaining_failure(job, finding)) is not None:
            dropped(job, finding, f"failure {cause} explains it")
        return cause is None
    present = [rank for rank in finding.ranks if has_work(job, rank)]
    fresh = without_verdict(job, finding)
    if not present:
        dropped(job, finding, "the suspects have no work any more")
        return False
    worse = [
        rank
        for rank in set(present).difference(fresh)
        if abs(in_training(speeds, rank, finding) / job.record.slow[job.device_of(rank)].speed - 1.0)
        >= MIN_SPEED_CHANGE
    ]
    if worse:
        update_speeds(job, sorted(worse), finding)
        speeds.update(job.monitor.speeds())
    elif not fresh:
        failure = job.record.slow[job.device_of(present[0])].failure
        dropped(job, finding, f"{job.where(present[0])} is known to be slow, see failure {failure}")
    mates = [awaited_peer(job, rank, groups.get(rank, ()), finding) for rank in fresh]
    if fresh and None not in mates:
        for rank in fresh:
            job.monitor.cleared(rank)
        dropped(job, finding, f"{job.where(fresh[0])} may only be waiting for rank {mates[0]}, which is slow")
        return False
    return bool(fresh)


def _explaining_failure(job: Job, finding: Finding) -> int | None:
    """Return the number of a failure, known since about the same time, that accounts for at least half of the excess
    iteration time; None if there is none. With such a failure, slower iterations of all ranks are not a failure of
    their own."""
    longer = excess(job, finding.iteration, ())
    if longer is None or longer.mostly_unexplained or longer.slowest == 1.0:
        return None
    slow_ones = (*job.record.slow.values(), *job.record.slow_links.values())
    return next((slow.failure for slow in slow_ones if slow.speed == longer.slowest), None)


def has_work(job: Job, rank: int) -> bool:
    """Return whether a rank is alive and has work under the plan in effect."""
    return rank in job.record.working and job.members[rank].alive


def without_verdict(job: Job, finding: Finding) -> list[int]:
    """Return the suspects of a finding that have work and have no verdict yet."""
    return [rank for rank in finding.ranks if has_work(job, rank) and job.device_of(rank) not in job.record.slow]


def tensor_groups(job: Job) -> dict[int, tuple[int, ...]]:
    """Return, for each rank with work, the ranks of its tensor-parallel group."""
    plan = job.record.plan
    stages = [stage.ranks for replica in plan.layout.replicas for stage in replica.stages] if plan is not None else []
    return {rank: ranks for ranks in stages for rank in ranks}


def awaited_peer(job: Job, rank: int, mates: Sequence[int], finding: Finding) -> int | None:
    """Return a slow peer of the rank's tensor-parallel group for which the rank may merely be waiting; None if there is
    none. Judged by times alone, for a rank with a recent good probe."""
    for mate in mates:
        slow = job.record.slow.get(job.device_of(mate))
        if mate == rank or slow is None or not was_cleared(job, rank):
            continue
        close = abs(finding.iteration - slow.since) <= CLEARED_ITERATIONS
        if MIN_PEER_SLOWDOWN_SHARE * finding.change <= 1.0 / slow.speed - 1.0 and close:
            return mate
    return None


def was_cleared(job: Job, rank: int) -> bool:
    """Return whether a recent measurement found a rank healthy. The result counts for longer than any cooldown of the
    detector."""
    lasts = max(CLEARED_ITERATIONS, 2 * MAX_PATIENCE_FACTOR * job.settings.detection.patience)
    return rank in job.inquiry.cleared and job.furthest - job.inquiry.cleared[rank][0] <= lasts


# --- as fast as before ----------------------------------------------------------------------------------------------


def recovered(job: Job, finding: Finding) -> None:
    """End the verdicts on devices that work at their former speed again."""
    present = (job.device_of(rank) for rank in finding.ranks if rank in job.members)
    devices = [device for device in dict.fromkeys(present) if device in job.record.slow]
    if devices:
        devices_recovered(job, devices, finding.iteration, finding.evidence)


def devices_recovered(job: Job, devices: Sequence[Device], iteration: int, evidence: str) -> None:
    """End the verdicts on these devices, then ask the planner once about all of them."""
    for node, index in devices:
        failure = job.record.slow[node, index].failure
        job.log(FailureEnded(failure=failure, node=node, device=index, iteration=iteration, evidence=evidence))
        job.say("notice", f"node {node} device {index}: as fast as before, since iteration {iteration}")
    name = "node {} device {}".format(*devices[0])
    subject = f"{name} is" if len(devices) == 1 else f"{name} and {len(devices) - 1} more are"
    replan_policy.consider_all(job, f"{subject} as fast as before", iteration, dict.fromkeys(devices))
