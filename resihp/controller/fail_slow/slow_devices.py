"""Suspected devices: which are measured, which are declared slow, and which are cleared.

All pending findings make up one suspicion. Their suspects are measured together with the rest of their tensor-parallel
groups, because the ranks of a group wait for each other. The odds of the probe and of the detector are added, and every
device over the limit is declared slow at once. A device whose probe is fine but which is found again before it is
forgotten is slow in training and not in a matrix product, unless it may only suffer from a much larger unexplained
slowdown. A device that is slow now and then is treated the same way. If a finding names no suspect, all devices are
measured, and only those that stand out are declared slow; if none stands out, the job as a whole is slow
(`slow_parts`). The limits are in `thresholds`. Called by `slowness`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Literal

import msgspec

from resihp.controller import replan_policy
from resihp.controller.fail_slow import slow_parts
from resihp.controller.fail_slow.convictions import DeviceVerdict, declare_slow, in_training, update_speeds
from resihp.controller.fail_slow.suspicions import (
    IterationExcess,
    change,
    dropped,
    ended,
    excess,
    opened,
    possible,
    some,
    speed_of,
)
from resihp.controller.fail_slow.thresholds import (
    CLEARED_ITERATIONS,
    GROUP_MEMBER_PENALTY_LOG_ODDS,
    LARGE_CHANGE_RANGE,
    MAX_DETECTOR_LOG_ODDS,
    MAX_VICTIM_DELAY_ITERATIONS,
    MAX_VICTIM_SLOWDOWN,
    MIN_CHANGE_WITHOUT_PROBE,
    MIN_PEER_SLOWDOWN_SHARE,
    MIN_PROBE_LOG_ODDS,
    MIN_SLOWDOWN_SHARE_IN_PROBE,
    MIN_SPEED_CHANGE,
)
from resihp.controller.probing import probe_orders, probe_results
from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.detector.findings import Finding
from resihp.detector.sequential.peer_cusum import MAX_PATIENCE_FACTOR
from resihp.detector.suspects import Verdicts
from resihp.record.describe import rank_list
from resihp.record.journal import FailureEnded, Outcome
from resihp.record.state import Device

ONLY_IN_TRAINING = "in its training, not in a matrix product"
"""Words of a verdict that the probe does not confirm."""


# --- suspicion ------------------------------------------------------------------------------------------------------


def suspected(job: Job, findings: Iterable[Finding]) -> None:
    """Measure the suspects of these findings, all at once. Called only while no other suspicion is open."""
    groups, speeds = _groups(job), dict(job.monitor.speeds())
    new_findings = [finding for finding in findings if _is_worth_a_probe(job, finding, groups, speeds)]
    if not new_findings:
        return
    suspects = tuple(dict.fromkeys(rank for finding in new_findings for rank in _without_verdict(job, finding)))
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
    """Add a finding to the suspicion that is being measured if all its suspects are part of it; return whether it was
    added."""
    for examination in job.examinations.values():
        pending = examination.findings
        if examination.occasion == "suspicion" and pending and pending[0].link is None:
            suspects = _without_verdict(job, finding)
            if suspects and all(rank in examination.silent or rank in examination.answers for rank in suspects):
                pending.append(finding)
                return True
    return False


def _is_worth_a_probe(
    job: Job, finding: Finding, groups: Mapping[int, tuple[int, ...]], speeds: MutableMapping[int, float]
) -> bool:
    """Return whether a finding is worth a probe; close it with a reason, or update the verdicts of its suspects, if
    not.

    A device that is known to be slow may have become slower still: its verdict is then replaced, which also updates
    `speeds`, the speeds of all ranks that were found slow.
    """
    if not finding.ranks:
        if (cause := _explaining_failure(job, finding)) is not None:
            dropped(job, finding, f"failure {cause} explains it")
        return cause is None
    present = [rank for rank in finding.ranks if _present(job, rank)]
    fresh = _without_verdict(job, finding)
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
    mates = [_awaited_peer(job, rank, groups.get(rank, ()), finding) for rank in fresh]
    if fresh and None not in mates:
        for rank in fresh:
            job.monitor.cleared(rank)
        dropped(job, finding, f"{job.where(fresh[0])} may only be waiting for rank {mates[0]}, which is slow")
        return False
    return bool(fresh)


def _explaining_failure(job: Job, finding: Finding) -> int | None:
    """Return the failure, known since about the same time, that accounts for at least half of the excess iteration
    time, or None. With such a failure, slower iterations of all ranks are not a failure of their own."""
    longer = excess(job, finding.iteration, ())
    if longer is None or longer.mostly_unexplained or longer.slowest == 1.0:
        return None
    slow_ones = (*job.record.slow.values(), *job.record.slow_links.values())
    return next((slow.failure for slow in slow_ones if slow.speed == longer.slowest), None)


def _present(job: Job, rank: int) -> bool:
    return rank in job.record.working and job.members[rank].alive


def _without_verdict(job: Job, finding: Finding) -> list[int]:
    """Return the suspects of a finding that are present and have no verdict yet."""
    return [rank for rank in finding.ranks if _present(job, rank) and job.device_of(rank) not in job.record.slow]


def _groups(job: Job) -> dict[int, tuple[int, ...]]:
    """Return the tensor-parallel group of each rank that has work."""
    plan = job.record.plan
    stages = [stage.ranks for replica in plan.layout.replicas for stage in replica.stages] if plan is not None else []
    return {rank: ranks for ranks in stages for rank in ranks}


def _awaited_peer(job: Job, rank: int, mates: Sequence[int], finding: Finding) -> int | None:
    """Return a slow peer of its group that a rank may only be waiting for, or None. Judged by times alone, for a rank
    whose own probe was fine at the time."""
    for mate in mates:
        slow = job.record.slow.get(job.device_of(mate))
        if mate == rank or slow is None or not _was_cleared(job, rank):
            continue
        close = abs(finding.iteration - slow.since) <= CLEARED_ITERATIONS
        if MIN_PEER_SLOWDOWN_SHARE * finding.change <= 1.0 / slow.speed - 1.0 and close:
            return mate
    return None


# --- verdicts -------------------------------------------------------------------------------------------------------


def measured(job: Job, done: Examination) -> None:
    """Decide about a suspicion once all measured ranks have answered, or have had the time to."""
    verdicts = probe_results.conclude_suspicion(job, done)
    findings = done.findings
    if not job.training:
        _clear(job, (), "unconfirmed", "a new plan is about to take effect", done.probe)
        job.findings += tuple(
            finding for finding in findings if not finding.ranks or any(job.members[r].alive for r in finding.ranks)
        )
        return
    if not findings:
        _clear(job, (), "passed", "it ended before it was measured", done.probe)
        return
    named: dict[int, Finding] = {}
    for finding in findings:
        named |= {rank: finding for rank in _without_verdict(job, finding) if rank not in named}
    longer = excess(job, min(finding.iteration for finding in findings), ())
    declared = _declared_by_probe(job, done, verdicts, named, longer)
    slow_ranks = {verdict.rank for verdict in declared}
    groups = _groups(job)
    waiting = [
        rank
        for rank, finding in named.items()
        if rank not in slow_ranks
        and (
            slow_ranks.intersection(mates := groups.get(rank, ()))
            or _awaited_peer(job, rank, mates, finding) is not None
        )
    ]
    remaining = [rank for rank in named if rank not in slow_ranks and rank not in waiting]
    declared += _declared_by_training(job, done, verdicts, findings, frozenset(remaining), longer)
    slow_ranks = {verdict.rank for verdict in declared}
    healthy = [*waiting, *(rank for rank in remaining if rank not in slow_ranks)]
    for rank in healthy:
        job.monitor.cleared(rank)
        job.inquiry.cleared[rank] = (job.furthest, _first_onset(job, rank, named[rank]))
    whole = next((finding for finding in findings if not finding.ranks), None)
    if declared:
        in_order = (verdict.rank for verdict in declared)
        ranks = tuple(dict.fromkeys((*(rank for rank in named if rank in slow_ranks), *in_order)))
        ended(job, "slow", rank_list(ranks), done.probe, () if whole is not None else ranks)
        unexplained = declare_slow(job, declared, all_lost=whole is not None and verdicts.lost > 0.0)
        _close_healthy(job, findings, {rank: named[rank] for rank in healthy}, ranks)
        if whole is not None and verdicts.lost:
            slow_parts.all_lost(job, whole, verdicts)
        elif whole is not None and unexplained:
            slow_parts.may_last(job, whole)
    elif whole is not None:
        slow_parts.no_device_stands_out(job, whole, verdicts, done)
    elif not named:
        is_gone = not any(_present(job, rank) for finding in findings for rank in finding.ranks)
        _clear(job, (), "dropped", "it has left" if is_gone else "it is known to be slow", done.probe)
    else:
        outcome, why = _reason_to_clear(done, verdicts, healthy)
        if outcome == "fine" and all(_may_be_victim(job, finding, speed_of(finding), longer) for finding in findings):
            subject = "they account" if len(healthy) > 1 else "it accounts"
            why = f"{why}, and {subject} for little of the excess iteration time"
        _clear(job, healthy, outcome, why, done.probe, tuple(named))


def _close_healthy(job: Job, findings: Iterable[Finding], healthy: Mapping[int, Finding], slow: Sequence[int]) -> None:
    """Record, for each finding, the suspects that were found healthy while others (`slow`) were declared slow."""
    beside = f"measured together with {some(slow)}, and its probe is fine"
    for finding in findings:
        ranks = tuple(rank for rank in finding.ranks if healthy.get(rank) is finding)
        if ranks:
            dropped(job, msgspec.structs.replace(finding, ranks=ranks), beside, "fine")


def _declared_by_probe(
    job: Job, done: Examination, verdicts: Verdicts, named: dict[int, Finding], longer: IterationExcess | None
) -> list[DeviceVerdict]:
    """Return the devices that the odds of the probe, together with those of the findings before it, declare slow."""
    groups = _groups(job)
    mates = {
        mate: finding for rank, finding in reversed(named.items()) for mate in groups.get(rank, ()) if mate not in named
    }
    whole = next((finding for finding in done.findings if not finding.ranks), None)
    declared = []
    speeds = job.monitor.speeds()
    confidence = job.settings.detection.thresholds.sure
    min_odds = math.log(confidence / (1.0 - confidence))
    for rank in sorted(done.answers):
        probe = verdicts.devices.get(rank)
        if probe is None or not _present(job, rank) or job.device_of(rank) in job.record.slow:
            continue
        finding = named.get(rank)
        if finding is not None:
            speed = in_training(speeds, rank, finding)
            in_probe = probe.speed is None or 1.0 / probe.speed - 1.0 >= MIN_SLOWDOWN_SHARE_IN_PROBE * (
                1.0 / speed - 1.0
            )
            trusted = in_probe or not _may_be_victim(job, finding, speed, longer)
            odds = probe.odds + (_detector_log_odds(finding) if trusted else 0.0) - math.log(len(named))
        elif rank in mates:
            finding, odds = mates[rank], probe.odds - GROUP_MEMBER_PENALTY_LOG_ODDS - math.log(len(mates))
        elif whole is not None:
            finding, odds = whole, probe.odds - math.log(len(done.answers))
        if finding is None or odds < min_odds or probe.odds < MIN_PROBE_LOG_ODDS:
            continue
        trained = speeds.get(rank) if finding.intermittent is None else speed_of(finding)
        declared.append(
            DeviceVerdict(
                rank=rank,
                speed=possible(trained or probe.speed or speed_of(finding)),
                confidence=max(1.0 / (1.0 + math.exp(-min(odds, 10.0))), finding.confidence),
                evidence=f"{probe.evidence}; {finding.evidence}",
                finding=finding,
            )
        )
    return declared


def _detector_log_odds(finding: Finding) -> float:
    """Return the log odds that a finding adds to its suspect's: those of its confidence, capped."""
    confidence = min(max(finding.confidence, 0.5), 1.0 - 1e-9)
    large = (finding.change - LARGE_CHANGE_RANGE[0]) / (LARGE_CHANGE_RANGE[1] - LARGE_CHANGE_RANGE[0])
    cap = MAX_DETECTOR_LOG_ODDS * (1.0 + min(max(large, 0.0), 1.0))
    return min(math.log(confidence / (1.0 - confidence)), cap)


def _declared_by_training(
    job: Job,
    done: Examination,
    verdicts: Verdicts,
    findings: Sequence[Finding],
    remaining: Collection[int],
    longer: IterationExcess | None,
) -> list[DeviceVerdict]:
    """Return the devices that training shows to be slow although no probe confirms it.

    The probe was fine, or the device did not answer. Each finding yields at most one device, its first remaining
    suspect. That device must be slower by at least `MIN_CHANGE_WITHOUT_PROBE`. It must also be slow only now and then,
    or have been cleared by a recent measurement. A device that may only suffer from another cause is left out
    (`_may_be_victim`).
    """
    declared: dict[int, DeviceVerdict] = {}
    speeds = job.monitor.speeds()
    for finding in findings:
        rank = next((rank for rank in finding.ranks if rank in remaining), None)
        if rank is None or finding.change < MIN_CHANGE_WITHOUT_PROBE:
            continue
        if not (finding.intermittent or _was_cleared(job, rank)):
            continue
        speed = in_training(speeds, rank, finding)
        if _may_be_victim(job, finding, speed, longer):
            continue
        fine = rank in done.answers and not done.answers[rank].untried
        answer = verdicts.devices[rank].evidence if rank in done.answers else "it did not answer"
        declared[rank] = DeviceVerdict(
            rank=rank,
            speed=speed,
            confidence=1.0 / (1.0 + math.exp(-_detector_log_odds(finding))),
            evidence=f"{f'its probe is fine ({answer})' if fine else answer}; {finding.evidence}",
            finding=finding,
            only=ONLY_IN_TRAINING if fine else "",
        )
    return list(declared.values())


def _may_be_victim(job: Job, finding: Finding, speed: float, longer: IterationExcess | None) -> bool:
    """Return whether a suspect may only be a victim: it is slightly slower while iterations take far longer.

    That is so if most of the excess since its onset is unexplained (`longer`), or if the job as a whole is known to be
    slow since about the same time.
    """
    slowdown, whole = 1.0 / speed - 1.0, job.record.slow_job
    if finding.intermittent is not None or slowdown > MAX_VICTIM_SLOWDOWN:
        return False
    if whole is not None and slowdown < (1.0 / whole.speed - 1.0) / 2:
        latest = whole.since + MAX_VICTIM_DELAY_ITERATIONS
        return any(_first_onset(job, rank, finding) <= latest for rank in finding.ranks)
    return longer is not None and longer.mostly_unexplained_with(speed)


def _first_onset(job: Job, rank: int, finding: Finding) -> int:
    """Return the iteration since which a rank is slower. A finding after a cooldown seems to begin anew, so the first
    onset is kept."""
    return job.inquiry.cleared[rank][1] if _was_cleared(job, rank) else finding.iteration


def _was_cleared(job: Job, rank: int) -> bool:
    # longer than any cooldown
    lasts = max(CLEARED_ITERATIONS, 2 * MAX_PATIENCE_FACTOR * job.settings.detection.patience)
    return rank in job.inquiry.cleared and job.furthest - job.inquiry.cleared[rank][0] <= lasts


def _reason_to_clear(
    done: Examination, verdicts: Verdicts, healthy: Sequence[int]
) -> tuple[Literal["fine", "unconfirmed"], str]:
    answered = [rank for rank in healthy if rank in done.answers]
    untried = [rank for rank in answered if done.answers[rank].untried]
    if not answered:
        return "unconfirmed", "it did not answer"
    if untried:
        return "unconfirmed", verdicts.devices[untried[0]].evidence
    return "fine", "its probe is fine" if len(answered) == 1 else "their probes are fine"


def _clear(job: Job, ranks: Sequence[int], outcome: Outcome, why: str, probe: int, named: tuple[int, ...] = ()) -> None:
    """Close a suspicion that came to nothing. `named`: all its suspects, those that joined it later included."""
    suspected = job.record.suspects_slow
    assert suspected is not None
    subject = "all devices" if suspected.rank is None else job.where(suspected.rank)
    others = f", and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    ended(job, outcome, why, probe, tuple(dict.fromkeys((*suspected.ranks, *named))))
    job.say("notice", f"{subject}{others}: no longer suspected to be slow, {why}")


# --- as fast as before ----------------------------------------------------------------------------------------------


def recovered(job: Job, finding: Finding) -> None:
    """End the verdicts of devices that work as fast as before."""
    present = (job.device_of(rank) for rank in finding.ranks if rank in job.members)
    devices = [device for device in dict.fromkeys(present) if device in job.record.slow]
    if devices:
        devices_recovered(job, devices, finding.iteration, finding.evidence)


def devices_recovered(job: Job, devices: Sequence[Device], iteration: int, evidence: str) -> None:
    """End the verdicts of these devices, then ask the planner once about all of them."""
    for node, index in devices:
        failure = job.record.slow[node, index].failure
        job.log(FailureEnded(failure=failure, node=node, device=index, iteration=iteration, evidence=evidence))
        job.say("notice", f"node {node} device {index}: as fast as before, since iteration {iteration}")
    name = "node {} device {}".format(*devices[0])
    subject = f"{name} is" if len(devices) == 1 else f"{name} and {len(devices) - 1} more are"
    replan_policy.consider_all(job, f"{subject} as fast as before", iteration, dict.fromkeys(devices))
