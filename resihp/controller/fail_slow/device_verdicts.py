"""Decide which suspects are declared slow, and which are cleared, after they have been measured.

The log odds of the probe and of the detector's finding are added, and every device above the limit is declared slow at
once. A device with a good probe that is found again soon is slow in training though not in a matrix product. It is
declared slow, unless it may only suffer from a much larger unexplained slowdown. A device that is slow only now and
then is treated in the same way. If a finding names no suspect, the devices that stand out are declared slow; if none
stands out, the job as a whole is slow (`slow_parts`). `thresholds` defines the limits. Called by `slowness`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from resihp.controller.fail_slow import slow_parts
from resihp.controller.fail_slow.slow_devices import awaited_peer, has_work, tensor_groups, was_cleared, without_verdict
from resihp.controller.fail_slow.suspicions import IterationExcess, dropped, ended, excess, possible, some, speed_of
from resihp.controller.fail_slow.thresholds import (
    GROUP_MEMBER_PENALTY_LOG_ODDS,
    LARGE_CHANGE_RANGE,
    MAX_DETECTOR_LOG_ODDS,
    MAX_VICTIM_DELAY_ITERATIONS,
    MAX_VICTIM_SLOWDOWN,
    MIN_CHANGE_WITHOUT_PROBE,
    MIN_PROBE_LOG_ODDS,
    MIN_SLOWDOWN_SHARE_IN_PROBE,
)
from resihp.controller.fail_slow.verdict_entries import DeviceVerdict, declare_slow, in_training
from resihp.controller.probing import probe_results
from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.detector.findings import Finding
from resihp.detector.probes import Judged
from resihp.detector.suspects import Verdicts
from resihp.record.describe import rank_list
from resihp.record.journal import Outcome

ONLY_IN_TRAINING = "in its training, not in a matrix product"
"""Addition to the text of a verdict that the probe does not confirm."""


class _Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """A suspicion after the measurement of its suspects: the answers, and the findings behind it."""

    done: Examination
    verdicts: Verdicts
    """The probe's result for each device."""
    named: dict[int, Finding]
    """Suspects without an earlier verdict, each with the first finding that names it."""
    whole_job: Finding | None
    """The first finding that names no suspect; None if every finding names one."""
    longer: IterationExcess | None
    """Excess time of iterations since the earliest finding; None if there are too few iterations to measure it."""
    groups: dict[int, tuple[int, ...]]
    """The ranks of the tensor-parallel group of each rank with work."""


def decide(job: Job, done: Examination) -> None:
    """Decide about a suspicion, once all measured ranks have answered or their time is over."""
    verdicts = probe_results.conclude_suspicion(job, done)
    if not job.training:
        _put_off(job, done)
        return
    if not done.findings:
        _clear(job, (), "passed", "it ended before it was measured", done.probe)
        return
    suspicion = _suspicion(job, done, verdicts)
    named = suspicion.named
    declared = _declared_by_probe(job, suspicion)
    slow_ranks = {verdict.rank for verdict in declared}
    waiting = _waiting_for_slow_peers(job, suspicion, slow_ranks)
    remaining = [rank for rank in named if rank not in slow_ranks and rank not in waiting]
    declared += _declared_by_training(job, suspicion, frozenset(remaining))
    slow_ranks = {verdict.rank for verdict in declared}
    healthy = [*waiting, *(rank for rank in remaining if rank not in slow_ranks)]
    for rank in healthy:
        job.monitor.cleared(rank)
        job.inquiry.cleared[rank] = (job.furthest, _first_onset(job, rank, named[rank]))
    if declared:
        _declare(job, suspicion, declared, healthy)
    elif suspicion.whole_job is not None:
        slow_parts.no_device_stands_out(job, suspicion.whole_job, verdicts, done)
    else:
        _clear_all(job, suspicion, healthy)


def _put_off(job: Job, done: Examination) -> None:
    """Close the suspicion without a verdict, because the plan changes. Its findings are examined again under the new
    plan."""
    _clear(job, (), "unconfirmed", "a new plan is about to take effect", done.probe)
    job.findings += tuple(
        finding
        for finding in done.findings
        if not finding.ranks or any(job.members[rank].alive for rank in finding.ranks)
    )


def _suspicion(job: Job, done: Examination, verdicts: Verdicts) -> _Suspicion:
    named: dict[int, Finding] = {}
    for finding in done.findings:
        for rank in without_verdict(job, finding):
            named.setdefault(rank, finding)
    return _Suspicion(
        done=done,
        verdicts=verdicts,
        named=named,
        whole_job=next((finding for finding in done.findings if not finding.ranks), None),
        longer=excess(job, min(finding.iteration for finding in done.findings), ()),
        groups=tensor_groups(job),
    )


def _waiting_for_slow_peers(job: Job, suspicion: _Suspicion, slow_ranks: set[int]) -> list[int]:
    """Return the suspects that may merely be waiting for a slow peer of their tensor-parallel group."""
    waiting = []
    for rank, finding in suspicion.named.items():
        if rank in slow_ranks:
            continue
        mates = suspicion.groups.get(rank, ())
        if slow_ranks.intersection(mates) or awaited_peer(job, rank, mates, finding) is not None:
            waiting.append(rank)
    return waiting


# --- outcomes -------------------------------------------------------------------------------------------------------


def _declare(job: Job, suspicion: _Suspicion, declared: list[DeviceVerdict], healthy: Sequence[int]) -> None:
    """Close the suspicion with these verdicts. The suspects that were not declared slow are recorded as healthy."""
    named, whole_job, verdicts = suspicion.named, suspicion.whole_job, suspicion.verdicts
    slow_ranks = dict.fromkeys(verdict.rank for verdict in declared)
    suspects_first = (*(rank for rank in named if rank in slow_ranks), *slow_ranks)
    ranks = tuple(dict.fromkeys(suspects_first))
    ended(job, "slow", rank_list(ranks), suspicion.done.probe, () if whole_job is not None else ranks)
    unexplained = declare_slow(job, declared, all_lost=whole_job is not None and verdicts.lost > 0.0)
    _close_healthy(job, suspicion.done.findings, {rank: named[rank] for rank in healthy}, ranks)
    if whole_job is None:
        return
    if verdicts.lost:
        slow_parts.all_lost(job, whole_job, verdicts)
    elif unexplained:
        slow_parts.may_last(job, whole_job)


def _close_healthy(job: Job, findings: Iterable[Finding], healthy: Mapping[int, Finding], slow: Sequence[int]) -> None:
    """Journal, for each finding, the suspects that were found healthy while the ranks `slow` were declared slow."""
    beside = f"measured together with {some(slow)}, and its probe is fine"
    for finding in findings:
        ranks = tuple(rank for rank in finding.ranks if healthy.get(rank) is finding)
        if ranks:
            dropped(job, msgspec.structs.replace(finding, ranks=ranks), beside, "fine")


def _clear_all(job: Job, suspicion: _Suspicion, healthy: Sequence[int]) -> None:
    """Close a suspicion that has led to no verdict, with the reason."""
    done, findings, longer = suspicion.done, suspicion.done.findings, suspicion.longer
    if not suspicion.named:
        is_gone = not any(has_work(job, rank) for finding in findings for rank in finding.ranks)
        _clear(job, (), "dropped", "it has left" if is_gone else "it is known to be slow", done.probe)
        return
    outcome, why = _reason_to_clear(done, suspicion.verdicts, healthy)
    if outcome == "fine" and all(_may_be_victim(job, finding, speed_of(finding), longer) for finding in findings):
        subject = "they account" if len(healthy) > 1 else "it accounts"
        why = f"{why}, and {subject} for little of the excess iteration time"
    _clear(job, healthy, outcome, why, done.probe, tuple(suspicion.named))


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
    """Close a suspicion without a verdict. `ranks`: the cleared suspects; `named`: all its suspects, including later
    ones."""
    suspected = job.record.suspects_slow
    assert suspected is not None
    subject = "all devices" if suspected.rank is None else job.where(suspected.rank)
    others = f", and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    ended(job, outcome, why, probe, tuple(dict.fromkeys((*suspected.ranks, *named))))
    job.say("notice", f"{subject}{others}: no longer suspected to be slow, {why}")


# --- verdicts -------------------------------------------------------------------------------------------------------


def _declared_by_probe(job: Job, suspicion: _Suspicion) -> list[DeviceVerdict]:
    """Return the devices to declare slow because of the sum of the probe's log odds and those of the findings."""
    named, whole_job, answers = suspicion.named, suspicion.whole_job, suspicion.done.answers
    mates = _unnamed_mates(suspicion)
    declared = []
    speeds = job.monitor.speeds()
    confidence = job.settings.detection.sure
    min_odds = math.log(confidence / (1.0 - confidence))
    for rank in sorted(answers):
        probe = suspicion.verdicts.devices.get(rank)
        if probe is None or not has_work(job, rank) or job.device_of(rank) in job.record.slow:
            continue
        if rank in named:
            finding = named[rank]
            odds = probe.odds + _trusted_log_odds(job, suspicion, probe, speeds) - math.log(len(named))
        elif rank in mates:
            finding = mates[rank]
            odds = probe.odds - GROUP_MEMBER_PENALTY_LOG_ODDS - math.log(len(mates))
        elif whole_job is not None:
            finding = whole_job
            odds = probe.odds - math.log(len(answers))
        else:
            continue
        if odds >= min_odds and probe.odds >= MIN_PROBE_LOG_ODDS:
            declared.append(_verdict(probe, finding, odds, speeds))
    return declared


def _unnamed_mates(suspicion: _Suspicion) -> dict[int, Finding]:
    """Return the other members of the suspects' tensor-parallel groups, each with the first finding about its group."""
    mates: dict[int, Finding] = {}
    for rank, finding in suspicion.named.items():
        for mate in suspicion.groups.get(rank, ()):
            if mate not in suspicion.named:
                mates.setdefault(mate, finding)
    return mates


def _trusted_log_odds(job: Job, suspicion: _Suspicion, probe: Judged, speeds: Mapping[int, float]) -> float:
    """Return the log odds that a suspect's finding contributes: 0 if the probe shows little of the slowdown and the
    suspect may only be a victim."""
    finding = suspicion.named[probe.rank]
    speed = in_training(speeds, probe.rank, finding)
    min_slowdown = MIN_SLOWDOWN_SHARE_IN_PROBE * (1.0 / speed - 1.0)
    in_probe = probe.speed is None or 1.0 / probe.speed - 1.0 >= min_slowdown
    if in_probe or not _may_be_victim(job, finding, speed, suspicion.longer):
        return _detector_log_odds(finding)
    return 0.0


def _verdict(probe: Judged, finding: Finding, odds: float, speeds: Mapping[int, float]) -> DeviceVerdict:
    trained = speeds.get(probe.rank) if finding.intermittent is None else speed_of(finding)
    return DeviceVerdict(
        rank=probe.rank,
        speed=possible(trained or probe.speed or speed_of(finding)),
        confidence=max(1.0 / (1.0 + math.exp(-min(odds, 10.0))), finding.confidence),
        evidence=f"{probe.evidence}; {finding.evidence}",
        finding=finding,
    )


def _detector_log_odds(finding: Finding) -> float:
    """Return the log odds that correspond to a finding's confidence, up to the limit for its change."""
    confidence = min(max(finding.confidence, 0.5), 1.0 - 1e-9)
    large = (finding.change - LARGE_CHANGE_RANGE[0]) / (LARGE_CHANGE_RANGE[1] - LARGE_CHANGE_RANGE[0])
    cap = MAX_DETECTOR_LOG_ODDS * (1.0 + min(max(large, 0.0), 1.0))
    return min(math.log(confidence / (1.0 - confidence)), cap)


def _declared_by_training(job: Job, suspicion: _Suspicion, remaining: Collection[int]) -> list[DeviceVerdict]:
    """Return the devices that training shows to be slow although no probe confirms it: the probe was fine, or the
    device did not answer.

    Each finding yields at most one device, its first suspect in `remaining`. The device must be slower by at least
    `MIN_CHANGE_WITHOUT_PROBE`. It must also be slow only now and then, or have been cleared by a recent measurement. A
    device that may only suffer from another cause is left out (`_may_be_victim`).
    """
    done, devices = suspicion.done, suspicion.verdicts.devices
    declared: dict[int, DeviceVerdict] = {}
    speeds = job.monitor.speeds()
    for finding in done.findings:
        rank = next((rank for rank in finding.ranks if rank in remaining), None)
        if rank is None or finding.change < MIN_CHANGE_WITHOUT_PROBE:
            continue
        if not (finding.intermittent or was_cleared(job, rank)):
            continue
        speed = in_training(speeds, rank, finding)
        if _may_be_victim(job, finding, speed, suspicion.longer):
            continue
        fine = rank in done.answers and not done.answers[rank].untried
        answer = devices[rank].evidence if rank in done.answers else "it did not answer"
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
    """Return whether a suspect may only be a victim of another cause: it is slightly slower while iterations take much
    longer.

    This is so if most of the excess since its onset is unexplained (`longer`), or if the job as a whole is known to be
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
    """Return the iteration since which a rank is slower. A repeated finding has a later onset of its own, so the first
    onset is kept."""
    return job.inquiry.cleared[rank][1] if was_cleared(job, rank) else finding.iteration
