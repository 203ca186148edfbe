"""Devices under suspicion: who is measured, who is convicted, who is acquitted.

All findings that wait are one suspicion. Their suspects are measured together, and so is the rest of their
tensor-parallel groups, where one waits for the other. What the probe and the detector come to together decides, as
odds: everyone whom it convicts is, at once. A device whose probe is fine, but which is found again before that is
forgotten, is slow in its training and not in a matrix product, unless far more is unexplained that it may suffer from;
so is one that is slow now and then. Where nobody in particular is under suspicion everybody is measured, and only who
stands out is convicted; if nobody does it is the job's (`slow_parts`). Called by `slowness`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Literal

import msgspec

from resihp.controller import replan_policy
from resihp.controller.fail_slow import probing, slow_parts
from resihp.controller.fail_slow.convictions import Conviction, convict, convict_again, in_training
from resihp.controller.fail_slow.suspicions import (
    OTHER,
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
from resihp.controller.state.examinations import Examination
from resihp.controller.state.job import Job
from resihp.detector.findings import Finding
from resihp.detector.sequential.peer_cusum import MAX_PATIENCE_FACTOR
from resihp.detector.suspects import Verdicts
from resihp.record.describe import rank_list
from resihp.record.journal import FailureEnded, Outcome
from resihp.record.state import Device

TRUSTED = 4.0
"""So much of them a finding brings at most: its confidence takes noise to be as assumed; twice that where the change is
large."""
LARGE = (0.10, 0.35)
"""From which change on noise is less and less likely, and from which it is nobody's."""
SHOWN = 2 / 3
"""A finding that may come of what else is slow brings nothing where the probe shows less than this of it."""
LEANING = 1.0
"""Log odds that the probe alone has to have, however sure the finding is."""
TRAINED = 0.04
"""The smallest change that training shows alone: devices are unlike by less, and it wanders by less."""
UNNAMED = 2.0
"""So much speaks against the guilt of a device that is measured because its group is."""
FORGOTTEN = 200
"""Iterations after which a probe that found nothing is forgotten."""
MILD = 0.2
"""So much longer at most takes the work of who only suffers from what makes iterations longer: kernels of transfers
that last longer take processors from it, and clocks fall while a device waits."""
WITH_IT = 20
"""Who suffers from what all do becomes slower within so many iterations of it."""
ALIKE = 0.9
"""Who takes this share of what a slow peer of its group takes longer may just wait for it."""
IN_TRAINING = "in its training, not in a matrix product"


# --- suspicion ------------------------------------------------------------------------------------------------------


def suspected(job: Job, findings: Iterable[Finding]) -> None:
    """Look into these, all at once; nothing else is being looked into."""
    groups, speeds = _groups(job), dict(job.monitor.speeds())
    held = [finding for finding in findings if _is_news(job, finding, groups, speeds)]
    if not held:
        return
    suspects = tuple(dict.fromkeys(rank for finding in held for rank in _fresh(job, finding)))
    first = held[0]
    where = job.where(suspects[0]) if suspects else "no device stands out"
    others = f", and {len(suspects) - 1} more" if len(suspects) > 1 else ""
    opened(job, first, suspects)
    job.say("notice", f"{where}{others}: suspected to be slow, {change(first)}; measuring")
    measured = {mate for rank in suspects for mate in groups.get(rank, (rank,))} or set(job.record.active)
    probing.begin(job, "suspicion", measured | set(probing.witnesses(job, sorted(measured))), findings=held)


def joined(job: Job, finding: Finding) -> bool:
    """Whether a finding is part of what is being measured: all its suspects are."""
    for examination in job.examinations.values():
        known = examination.findings
        if examination.occasion == "suspicion" and known and known[0].link is None:
            suspects = _fresh(job, finding)
            if suspects and all(rank in examination.silent or rank in examination.answers for rank in suspects):
                known.append(finding)
                return True
    return False


def _is_news(
    job: Job, finding: Finding, groups: Mapping[int, tuple[int, ...]], speeds: MutableMapping[int, float]
) -> bool:
    """Whether it is worth a probe; who is known to be slow may be slower still. `speeds`: of all that were found slow,
    which are others after such a verdict."""
    if not finding.ranks:
        if (cause := _explains(job, finding)) is not None:
            dropped(job, finding, f"failure {cause} explains it")
        return cause is None
    present = [rank for rank in finding.ranks if _present(job, rank)]
    fresh = _fresh(job, finding)
    if not present:
        dropped(job, finding, "whoever was suspected has no work any more")
        return False
    worse = [
        rank
        for rank in set(present).difference(fresh)
        if abs(in_training(speeds, rank, finding) / job.record.slow[job.device_of(rank)].speed - 1.0) >= OTHER
    ]
    if worse:
        convict_again(job, sorted(worse), finding)
        speeds.update(job.monitor.speeds())
    elif not fresh:
        failure = job.record.slow[job.device_of(present[0])].failure
        dropped(job, finding, f"{job.where(present[0])} is known to be slow, see failure {failure}")
    mates = [_waits_for(job, rank, groups.get(rank, ()), finding) for rank in fresh]
    if fresh and None not in mates:
        for rank in fresh:
            job.monitor.cleared(rank)
        dropped(job, finding, f"{job.where(fresh[0])} may just wait for rank {mates[0]}, which is slow")
        return False
    return bool(fresh)


def _explains(job: Job, finding: Finding) -> int | None:
    """The failure, known since about then, that explains at least half of what iterations take longer: for all of them
    to be slower is no failure of its own then."""
    longer = excess(job, finding.iteration, ())
    if longer is None or longer.left or longer.slowest == 1.0:
        return None
    known = (*job.record.slow.values(), *job.record.slow_links.values())
    return next((slow.failure for slow in known if slow.speed == longer.slowest), None)


def _present(job: Job, rank: int) -> bool:
    return rank in job.record.working and job.members[rank].alive


def _fresh(job: Job, finding: Finding) -> list[int]:
    """Suspects that have no verdict yet."""
    return [rank for rank in finding.ranks if _present(job, rank) and job.device_of(rank) not in job.record.slow]


def _groups(job: Job) -> dict[int, tuple[int, ...]]:
    """The tensor-parallel group of each rank with work."""
    plan = job.record.plan
    stages = [stage.ranks for replica in plan.layout.replicas for stage in replica.stages] if plan is not None else []
    return {rank: ranks for ranks in stages for rank in ranks}


def _waits_for(job: Job, rank: int, mates: Sequence[int], finding: Finding) -> int | None:
    """A slow peer of its group that a rank may just wait for, going by times alone; it was measured then, and well."""
    for mate in mates:
        slow = job.record.slow.get(job.device_of(mate))
        if mate == rank or slow is None or not _was_acquitted(job, rank):
            continue
        if ALIKE * finding.change <= 1.0 / slow.speed - 1.0 and abs(finding.iteration - slow.since) <= FORGOTTEN:
            return mate
    return None


# --- verdicts -------------------------------------------------------------------------------------------------------


def measured(job: Job, done: Examination) -> None:
    """Those who were asked have answered, or had the time to."""
    verdicts = probing.conclude_suspicion(job, done)
    findings = done.findings
    if not job.training:
        _acquit(job, (), "unconfirmed", "another plan is on its way", done.probe)
        job.findings += tuple(one for one in findings if not one.ranks or any(job.members[r].alive for r in one.ranks))
        return
    if not findings:
        _acquit(job, (), "passed", "it was over before it was measured", done.probe)
        return
    named: dict[int, Finding] = {}
    for finding in findings:
        named |= {rank: finding for rank in _fresh(job, finding) if rank not in named}
    longer = excess(job, min(finding.iteration for finding in findings), ())
    guilty = _by_probe(job, done, verdicts, named, longer)
    convicted = {one.rank for one in guilty}
    groups = _groups(job)
    waiting = [
        rank
        for rank, finding in named.items()
        if rank not in convicted
        and (convicted.intersection(mates := groups.get(rank, ())) or _waits_for(job, rank, mates, finding) is not None)
    ]
    left = [rank for rank in named if rank not in convicted and rank not in waiting]
    guilty += _by_training(job, done, verdicts, findings, frozenset(left), longer)
    convicted = {one.rank for one in guilty}
    well = [*waiting, *(rank for rank in left if rank not in convicted)]
    for rank in well:
        job.monitor.cleared(rank)
        job.inquiry.acquitted[rank] = (job.furthest, _first_onset(job, rank, named[rank]))
    whole = next((finding for finding in findings if not finding.ranks), None)
    if guilty:
        found = (one.rank for one in guilty)
        ranks = tuple(dict.fromkeys((*(rank for rank in named if rank in convicted), *found)))
        ended(job, "slow", rank_list(ranks), done.probe, () if whole is not None else ranks)
        unexplained = convict(job, guilty, all_lost=whole is not None and verdicts.lost > 0.0)
        _tell_well(job, findings, {rank: named[rank] for rank in well}, ranks)
        if whole is not None and verdicts.lost:
            slow_parts.all_lost(job, whole, verdicts)
        elif whole is not None and unexplained:
            slow_parts.may_last(job, whole)
    elif whole is not None:
        slow_parts.nobody_stands_out(job, whole, verdicts, done)
    elif not named:
        gone = not any(_present(job, rank) for finding in findings for rank in finding.ranks)
        _acquit(job, (), "dropped", "it has gone" if gone else "it is known to be slow", done.probe)
    else:
        outcome, why = _finding_nothing(done, verdicts, well)
        if outcome == "fine" and all(_may_suffer(job, finding, speed_of(finding), longer) for finding in findings):
            many = len(well) > 1
            why = f"{why}, and {'they explain' if many else 'it explains'} little of what iterations take longer"
        _acquit(job, well, outcome, why, done.probe, tuple(named))


def _tell_well(job: Job, findings: Iterable[Finding], well: Mapping[int, Finding], slow: Sequence[int]) -> None:
    """Of each finding, suspects that were found well beside others that were not."""
    beside = f"measured beside {some(slow)}, and found well"
    for finding in findings:
        ranks = tuple(rank for rank in finding.ranks if well.get(rank) is finding)
        if ranks:
            dropped(job, msgspec.structs.replace(finding, ranks=ranks), beside, "fine")


def _by_probe(
    job: Job, done: Examination, verdicts: Verdicts, named: dict[int, Finding], longer: IterationExcess | None
) -> list[Conviction]:
    """Whom the probe convicts, with what was found before it."""
    groups = _groups(job)
    mates = {mate: one for rank, one in reversed(named.items()) for mate in groups.get(rank, ()) if mate not in named}
    whole = next((finding for finding in done.findings if not finding.ranks), None)
    guilty = []
    speeds = job.monitor.speeds()
    sure = job.settings.detection.thresholds.sure
    least = math.log(sure / (1.0 - sure))
    for rank in sorted(done.answers):
        one = verdicts.devices.get(rank)
        if one is None or not _present(job, rank) or job.device_of(rank) in job.record.slow:
            continue
        finding = named.get(rank)
        if finding is not None:
            speed = in_training(speeds, rank, finding)
            shown = one.speed is None or 1.0 / one.speed - 1.0 >= SHOWN * (1.0 / speed - 1.0)
            trusted = shown or not _may_suffer(job, finding, speed, longer)
            odds = one.odds + (_trust(finding) if trusted else 0.0) - math.log(len(named))
        elif rank in mates:
            finding, odds = mates[rank], one.odds - UNNAMED - math.log(len(mates))
        elif whole is not None:
            finding, odds = whole, one.odds - math.log(len(done.answers))
        if finding is None or odds < least or one.odds < LEANING:
            continue
        told = speeds.get(rank) if finding.intermittent is None else speed_of(finding)
        guilty.append(
            Conviction(
                rank=rank,
                speed=possible(told or one.speed or speed_of(finding)),
                confidence=max(1.0 / (1.0 + math.exp(-min(odds, 10.0))), finding.confidence),
                evidence=f"{one.evidence}; {finding.evidence}",
                finding=finding,
            )
        )
    return guilty


def _trust(finding: Finding) -> float:
    sure = min(max(finding.confidence, 0.5), 1.0 - 1e-9)
    large = (finding.change - LARGE[0]) / (LARGE[1] - LARGE[0])
    most = TRUSTED * (1.0 + min(max(large, 0.0), 1.0))
    return min(math.log(sure / (1.0 - sure)), most)


def _by_training(
    job: Job,
    done: Examination,
    verdicts: Verdicts,
    findings: Sequence[Finding],
    left: Collection[int],
    longer: IterationExcess | None,
) -> list[Conviction]:
    """Whom training convicts though the probe does not: the most likely suspect of what is found again, and may not
    come of what else makes iterations longer, or shows now and then only."""
    guilty: dict[int, Conviction] = {}
    speeds = job.monitor.speeds()
    for finding in findings:
        rank = next((rank for rank in finding.ranks if rank in left), None)
        if rank is None or finding.change < TRAINED or not (finding.intermittent or _was_acquitted(job, rank)):
            continue
        speed = in_training(speeds, rank, finding)
        if _may_suffer(job, finding, speed, longer):
            continue
        fine = rank in done.answers and not done.answers[rank].untried
        told = verdicts.devices[rank].evidence if rank in done.answers else "it did not answer"
        guilty[rank] = Conviction(
            rank=rank,
            speed=speed,
            confidence=1.0 / (1.0 + math.exp(-_trust(finding))),
            evidence=f"{f'its probe is fine ({told})' if fine else told}; {finding.evidence}",
            finding=finding,
            only=IN_TRAINING if fine else "",
        )
    return list(guilty.values())


def _may_suffer(job: Job, finding: Finding, speed: float, longer: IterationExcess | None) -> bool:
    """Whether it is slower by little, while iterations take longer by far more: since then (`longer`), and more than
    what is known explains, or because the job as a whole is known to be slow since about then."""
    by, whole = 1.0 / speed - 1.0, job.record.slow_job
    if finding.intermittent is not None or by > MILD:
        return False
    if whole is not None and by < (1.0 / whole.speed - 1.0) / 2:
        return any(_first_onset(job, rank, finding) <= whole.since + WITH_IT for rank in finding.ranks)
    return longer is not None and longer.leaves_most(speed)


def _first_onset(job: Job, rank: int, finding: Finding) -> int:
    """When it became slower: what is found again after a pardon seems to begin anew."""
    return job.inquiry.acquitted[rank][1] if _was_acquitted(job, rank) else finding.iteration


def _was_acquitted(job: Job, rank: int) -> bool:
    lasts = max(FORGOTTEN, 2 * MAX_PATIENCE_FACTOR * job.settings.detection.patience)  # longer than any pardon
    return rank in job.inquiry.acquitted and job.furthest - job.inquiry.acquitted[rank][0] <= lasts


def _finding_nothing(
    done: Examination, verdicts: Verdicts, left: Sequence[int]
) -> tuple[Literal["fine", "unconfirmed"], str]:
    answered = [rank for rank in left if rank in done.answers]
    untried = [rank for rank in answered if done.answers[rank].untried]
    if not answered:
        return "unconfirmed", "it did not answer"
    if untried:
        return "unconfirmed", verdicts.devices[untried[0]].evidence
    return "fine", "its probe is fine" if len(answered) == 1 else "their probes are fine"


def _acquit(
    job: Job, ranks: Sequence[int], outcome: Outcome, why: str, probe: int, named: tuple[int, ...] = ()
) -> None:
    """A suspicion that came to nothing; `named`: its suspects, those that joined it, too."""
    suspected = job.record.suspects_slow
    assert suspected is not None
    who = "all devices" if suspected.rank is None else job.where(suspected.rank)
    others = f", and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    ended(job, outcome, why, probe, tuple(dict.fromkeys((*suspected.ranks, *named))))
    job.say("notice", f"{who}{others}: no longer suspected to be slow, {why}")


# --- as fast as before ----------------------------------------------------------------------------------------------


def recovered(job: Job, finding: Finding) -> None:
    """As fast as before, at work."""
    present = (job.device_of(rank) for rank in finding.ranks if rank in job.members)
    devices = [device for device in dict.fromkeys(present) if device in job.record.slow]
    if devices:
        devices_recovered(job, devices, finding.iteration, finding.evidence)


def devices_recovered(job: Job, devices: Sequence[Device], iteration: int, evidence: str) -> None:
    """All of them, and one question about the plan."""
    for node, index in devices:
        failure = job.record.slow[node, index].failure
        job.log(FailureEnded(failure=failure, node=node, device=index, iteration=iteration, evidence=evidence))
        job.say("notice", f"node {node} device {index}: as fast as before, since iteration {iteration}")
    name = "node {} device {}".format(*devices[0])
    who = f"{name} is" if len(devices) == 1 else f"{name} and {len(devices) - 1} more are"
    replan_policy.consider_all(job, f"{who} as fast as before", iteration, dict.fromkeys(devices))
