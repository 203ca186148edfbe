"""How the time of a job was spent, in seconds and GPU-hours, from the rows of its ledger. Pure; reads nothing.

A job *holds* its GPUs from its start to its end. The end of a running job is now; that of a job known to have died is
its last entry; that of a job with an unrecorded death is one day after its last entry. The time held is the sum of

=============  ========================================================================================================
`useful`       committed iterations, minus the parts of them that count as `slow`, `idle`, `capacity` and `rollback`
`start`        from the job's start until the first committed iteration begins; all of it if none was committed
`detect`       from a failure until it was noticed, both from the failure's row (`failed_at`, `noticed_at`); for several
               failures that one change of plan ended, from the first failure to the first notice
`redo`         discarded work on the interrupted iteration: from the last commit to the failure. Zero if the iteration
               was committed, or if none was in progress
`reconfigure`  from the notice to the first commit after it, minus the iterations committed meanwhile: park, plan,
               groups, state. Until the job's end for a failure without a recovery
`rollback`     the useful part of committed iterations that a later attempt of the same run committed again. It is known
               only once that attempt exists, so a stored account has it in a separate field (`RolledBack`), together
               with the iterations concerned. It is computed again if these iterations have changed
`slow`         excess time of iterations that were affected by a `fail-slow` failure: from the failure's first slow
               iteration to its end, except under plans that give the slow component no work
               (`resihp.db.reading.plans.idle_epochs`). The excess is the time, without `idle` and `capacity`, over the
               healthy time. The healthy time is the detector's prediction for the plan and the workload. It is scaled
               by the ratio of actual to predicted time while nothing was slow if that ratio is far from 1, as on a
               busy machine. Under a later plan, which has already adapted to the slow device, the healthy time is the
               time per token of healthy iterations on as many devices, if there are any
`idle`         time of iterations on fewer devices than requested (`asked_devices`), multiplied by the share of
               requested devices that exist but are on standby: in this time they would have done their share of the
               work. They failed the probe at the start, are slow, or the plan has no stage for them
`capacity`     the same for devices that are missing: dead, lost with their node, or not joined yet. It is the cost of
               waiting for nodes. For GPU-hours, `idle` and `capacity` count only devices that are held: a node that
               was given back costs time, but no GPU-hours
`checkpoint`   pauses between a checkpointed iteration and the next one, beyond the usual pause
`other`        the rest: the usual pauses between iterations, winding down after the last one, clock differences, and
               unrecorded time
=============  ========================================================================================================

*Wall time* begins with the first committed iteration (with the first plan if none is committed) and ends with the job;
for a completed job, with its last commit. *Goodput* is the time of committed iterations, minus `idle` and `capacity`,
over the wall time. Its numerator is the time that these iterations would have taken in the requested layout with all
its devices. Slow iterations, and iterations that are committed again later, count as work done. *ETTR* has the same
numerator over the time held (Kokolis et al., "Revisiting reliability in large-scale ML clusters"). Spare nodes are not
part of the layout: their purpose is to stand by, and their hours are included in every line. *GPU-hours* are times
multiplied by the devices held at that moment: those of the allocation from the job's start, those of a lost node until
it is given back. *Useful share* is useful GPU-hours over GPU-hours held. *MTBF* is the time held per root cause, or per
root cause of hardware; both are also given as failures in 1,000 GPU-days held. *MTTR* is the mean time from the failure
to the first commit after it, `detect` included.

`goodput` defines the clock of commits, `iteration_shares` and `timeline` attribute the time on it, and `job_timeline`
does so for a job.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from resihp.db.reading.costs.timeline import (
    CAUSES,
    GOODPUT_SHARES,
    SHARES,
    HeldTime,
)

Row = dict[str, Any]

OF_FAILURES = ("detect", "reconfigure", "redo", "rollback", "slow", "idle", "capacity")
"""Causes that are attributed to failures, to unfit devices, and to the resulting changes of plan."""
OF_HARDWARE = frozenset({"device", "node", "link", "process"})
"""Components that count as hardware if a failure's row does not say whether it was hardware; the same as in
`resihp.db.reading.health`."""
GPU_DAYS = 1000.0


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """Useful time of a job that is over which later attempts repeated, in the iterations `again`."""

    again: tuple[tuple[int, int], ...]
    seconds: float
    gpu_hours: float


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Cost account of a job; see the module's docstring. `lost_s` and `lost_gpu_hours` are by `CAUSES`. `lost_s` and
    `useful_s` add up to `held_s`; `lost_gpu_hours` and `useful_gpu_hours` add up to `gpu_hours`. Fields with a default
    are missing in accounts of older versions, which covered only the wall time."""

    wall_s: float
    useful_s: float
    committed_s: float
    """Seconds of committed iterations, slow or not, reduced to the requested layout with all devices: the numerator of
    goodput."""
    goodput: float | None
    ettr: float | None
    lost_s: dict[str, float]
    gpu_hours: float
    lost_gpu_hours: dict[str, float]
    devices: float
    """Average number of devices held."""
    failures: int
    mtbf_s: float | None
    mttr_s: float | None
    held_s: float = 0.0
    useful_gpu_hours: float = 0.0
    hardware_failures: int = 0
    repairs: int = 0
    """Number of failures that ended with a recovery; `mttr_s` is the mean time of the recoveries."""
    in_proportion: int = 0
    """Number of jobs of which only a part was counted, with causes in proportion to the wall time, because their rows
    were thinned."""
    rolled_back: RolledBack | None = None
    """Set only in an account stored in a job's row, in which the other figures exclude later attempts. None if there
    are no later attempts, or if their effect is not computed yet."""

    @property
    def failure_gpu_hours(self) -> float:
        """GPU-hours lost to failures."""
        return sum(self.lost_gpu_hours[cause] for cause in OF_FAILURES)

    @property
    def useful_share(self) -> float | None:
        """Useful share of the GPU-hours held; None if there are none."""
        return self.useful_gpu_hours / self.gpu_hours if self.gpu_hours > 0 else None

    @property
    def hardware_mtbf_s(self) -> float | None:
        return self.held_s / self.hardware_failures if self.hardware_failures and self.held_s > 0 else None

    @property
    def failure_rate(self) -> float | None:
        """Failures in 1,000 GPU-days."""
        return _in_gpu_days(self.failures, self.gpu_hours)

    @property
    def hardware_failure_rate(self) -> float | None:
        """Hardware failures in 1,000 GPU-days."""
        return _in_gpu_days(self.hardware_failures, self.gpu_hours)


def _in_gpu_days(number: int, gpu_hours: float) -> float | None:
    return GPU_DAYS * number / (gpu_hours / 24.0) if gpu_hours > 0 else None


def of_hardware(failure: Row) -> bool:
    """Decide whether a failure indicates hardware; an injected one never does."""
    if failure["detect_seconds"] is not None:  # only injected failures have it
        return False
    if failure["hardware"] is not None:
        return bool(failure["hardware"])
    return failure["kind"] in ("fail-stop", "fail-slow") and failure["component"] in OF_HARDWARE


def between(held_time: HeldTime, since_s: float = -np.inf, until_s: float = np.inf) -> Account:
    """Return the account of the part of a job from `since_s` on and before `until_s`, in seconds since the job's
    start."""
    every_s, every_h = (amounts.tolist() for amounts in held_time.between(since_s, until_s))
    seconds, hours = dict(zip(SHARES, every_s, strict=True)), dict(zip(SHARES, every_h, strict=True))
    held_s, gpu_hours = sum(every_s), sum(every_h)
    wall_s = max(min(held_time.wall[1], until_s) - max(held_time.wall[0], since_s), 0.0)
    committed_s = min(sum(seconds[share] for share in GOODPUT_SHARES), wall_s)
    failures = [hardware for at, hardware in held_time.failures if since_s <= at < until_s]
    repairs = [took for at, took in held_time.repairs if since_s <= at < until_s]
    cut = since_s > 0.0 or until_s < held_time.held_s
    return Account(
        wall_s=wall_s,
        useful_s=seconds.pop("useful"),
        committed_s=committed_s,
        goodput=committed_s / wall_s if held_time.trained and wall_s > 0 else None,
        ettr=min(committed_s / held_s, 1.0) if held_time.trained and held_s > 0 else None,
        lost_s=seconds,
        gpu_hours=gpu_hours,
        lost_gpu_hours={cause: hours[cause] for cause in CAUSES},
        devices=gpu_hours * 3600.0 / held_s if held_s > 0 else 0.0,
        failures=len(failures),
        mtbf_s=held_s / len(failures) if failures and held_s > 0 else None,
        mttr_s=statistics.fmean(repairs) if repairs else None,
        held_s=held_s,
        useful_gpu_hours=hours["useful"],
        hardware_failures=sum(failures),
        repairs=len(repairs),
        in_proportion=int(held_time.in_proportion and cut),
    )


def added(parts: Iterable[Account]) -> Account:
    """Add up the accounts of many jobs, or of parts of them."""
    accounts = list(parts)

    def total(name: str) -> Any:
        return sum(getattr(account, name) for account in accounts)

    wall_s, held_s, committed_s, gpu_hours = map(total, ("wall_s", "held_s", "committed_s", "gpu_hours"))
    failures, repairs = total("failures"), total("repairs")
    trained = any(account.goodput is not None for account in accounts)
    return Account(
        wall_s=wall_s,
        useful_s=total("useful_s"),
        committed_s=committed_s,
        goodput=committed_s / wall_s if trained and wall_s > 0 else None,
        ettr=committed_s / held_s if trained and held_s > 0 else None,
        lost_s={cause: sum(account.lost_s[cause] for account in accounts) for cause in CAUSES},
        gpu_hours=gpu_hours,
        lost_gpu_hours={cause: sum(account.lost_gpu_hours[cause] for account in accounts) for cause in CAUSES},
        devices=gpu_hours * 3600.0 / held_s if held_s > 0 else 0.0,
        failures=failures,
        mtbf_s=held_s / failures if failures and held_s > 0 else None,
        mttr_s=sum((account.mttr_s or 0.0) * account.repairs for account in accounts) / repairs if repairs else None,
        held_s=held_s,
        useful_gpu_hours=total("useful_gpu_hours"),
        hardware_failures=total("hardware_failures"),
        repairs=repairs,
        in_proportion=total("in_proportion"),
    )
