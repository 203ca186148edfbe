"""Judges suspected devices by a probe: computes for each device the odds that it is slow. Pure.

Each device is compared with its own past, after the loss that all devices share is subtracted, so that a power cap
makes no device stand out. Devices do not become faster: if the answers form two groups, the faster group is healthy,
provided that it has at least a quarter of the answers. Devices without a known past are compared with each other, with
a wider tolerance, because devices differ by nature. The spread of healthy devices is estimated from the answers,
blended with a prior if the answers are few. Never starts a probe. Called by the controller
(`resihp.controller.probing`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.probes import DEFAULT_PROBE_LIMITS, Judged
from resihp.protocol.messages import Speed
from resihp.settings import ProbeLimits

REPEAT_SIGMA = 0.01
"""Prior standard deviation between repeated probes of one device, log units."""
SHARED_SIGMA = 0.12
"""As `REPEAT_SIGMA`, for a device on processors that other workers use: the scheduling order there is random."""
DEVICE_SIGMA = 0.02
"""Prior standard deviation between devices of one kind, log units."""
PRIOR_ANSWERS = 4
"""Weight of these prior standard deviations, as a number of answers."""
MIN_SLOWDOWN_LOG = 0.03
"""Smallest slow-down that a probe should detect, log units."""
MAX_LOG_ODDS = 20.0
"""Cap on the log odds of a verdict; the negative of this cap is also the lower bound of the log of a speed."""
MAX_LOG_SPEED = 100.0
"""Log of a speed, per second, that no device reaches."""
GROUP_SEPARATION_SIGMAS = 4.5
"""Smallest distance between the means of two groups, in standard deviations, at which answers count as two groups. The
halves of one normal group are 2.7 apart."""
HEALTHY_GROUP_DIVISOR = 4
"""The faster group counts as healthy if it has at least one in this many answers."""
MIN_COMMON_LOSS = 0.02
"""Smallest loss shared by all devices that is reported, log units."""

Floats = npt.NDArray[np.float64]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts on all devices of one probe, and the speed that all devices lost together."""

    devices: dict[int, Judged]
    """Verdicts by rank."""
    share: Speed | None = None
    """Present speed over former speed, for all devices together; None if too few devices have a known past."""

    @property
    def lost(self) -> float:
        """Share of the former speed that all devices lost, 0 to 1, for the measure that lost more; 0 if it is too small
        to be reported."""
        if self.share is None:
            return 0.0
        worst = min(self.share.flops, self.share.memory_bytes)
        return 1.0 - worst if worst < math.exp(-MIN_COMMON_LOSS) else 0.0


class _Usual(msgspec.Struct, frozen=True):
    """Distribution of healthy devices in log units: mean level, standard deviation, and number of answers behind
    them."""

    centre: float
    sigma: float
    count: int

    def odds(self, value: float) -> float:
        """Return the log odds that a device at `value` (log units) is slow.

        Compares a healthy device with the best-fitting slow-down of at least `MIN_SLOWDOWN_LOG`, by Student's
        distribution, because the standard deviation is an estimate itself.
        """
        drop = self.centre - value
        sigma = self.sigma * math.sqrt(1.0 + math.pi / 2 / max(self.count, 1))
        freedom = self.count - 1 + PRIOR_ANSWERS
        healthy, slow = (
            math.log1p((distance / sigma) ** 2 / freedom) for distance in (drop, drop - max(drop, MIN_SLOWDOWN_LOG))
        )
        return min(max((freedom + 1) / 2 * (healthy - slow), -MAX_LOG_ODDS), MAX_LOG_ODDS)


def judge(
    speeds: Mapping[int, Speed],
    failed: Mapping[int, str],
    past: Mapping[int, Speed],
    suspects: Collection[int] | None = None,
    usual: Speed | None = None,
    limits: ProbeLimits = DEFAULT_PROBE_LIMITS,
    *,
    shared: bool = False,
) -> Verdicts:
    """Judge all devices that answered a probe.

    `speeds`: measured speeds by rank; `failed`: ranks with a device that could not be measured at all, with the reason;
    `past`: former speeds by rank. `suspects`: the suspected ranks; all others are references. `usual`: latest known
    `Verdicts.share`. `shared`: other workers compute on the same processors.

    With `suspects`, a device is compared with its past and with its peers, and the worse result counts. If `suspects`
    is None, no device is under suspicion in particular; then a device with a known past is compared with its past only,
    because devices differ, and the slowest of many healthy devices may be far from its peers."""
    judged = {
        rank: Judged(rank=rank, speed=None, fit=False, evidence=why, odds=MAX_LOG_ODDS) for rank, why in failed.items()
    }
    repeat = SHARED_SIGMA if shared else REPEAT_SIGMA
    comparisons: dict[int, list[tuple[float, float, str]]] = {rank: [] for rank in speeds}
    shares: list[float | None] = []
    for name, attribute, unit in (("matrix products", "flops", "GFLOP/s"), ("memory", "memory_bytes", "GB/s")):
        own = _logs(speeds, attribute)
        before = _logs(past, attribute)
        changes = {
            rank: figure - before[rank]
            for rank, figure in own.items()
            if rank in before and before[rank] > -MAX_LOG_ODDS
        }
        by_past = _by_past(changes, getattr(usual, attribute) if usual is not None else 1.0, repeat)
        shares.append(math.exp(by_past.centre) if by_past is not None and by_past.count > 2 else None)
        by_peers = _by_peers(own, suspects, max(repeat, DEVICE_SIGMA))
        for rank, figure in own.items():
            amount = f"{math.exp(figure) / 1e9:.4g} {unit}"
            if by_past is not None and rank in changes:
                note = (
                    f", others at {math.exp(by_past.centre):.0%}" if abs(by_past.centre) > MIN_COMMON_LOSS / 2 else ""
                )
                text = f"{name} at {math.exp(changes[rank]):.0%} of its own past{note}, {amount}"
                odds = by_past.odds(changes[rank])
                comparisons[rank].append((odds, math.exp(changes[rank] - by_past.centre), text))
            if by_peers is not None and (suspects is not None or by_past is None or rank not in changes):
                share = math.exp(figure - by_peers.centre)
                comparisons[rank].append(
                    (by_peers.odds(figure), share, f"{name} at {share:.0%} of its peers, {amount}")
                )
    judged |= {rank: _judged(rank, parts, limits) for rank, parts in comparisons.items()}
    return Verdicts(devices=judged, share=_remaining_share(shares))


def _judged(rank: int, comparisons: Sequence[tuple[float, float, str]], limits: ProbeLimits) -> Judged:
    """Judge a device by the worst of its comparisons, each with odds, share of the healthy speed, and evidence."""
    if not comparisons:
        return Judged(rank=rank, speed=None, fit=True, evidence="nothing to compare it with")
    odds, share, text = max(comparisons, key=lambda comparison: (comparison[0], -comparison[1]))
    odds -= math.log(len(comparisons))  # correction for taking the worst of several
    return Judged(rank=rank, speed=share, fit=share >= limits.fit, evidence=text, odds=odds)


def _remaining_share(shares: Sequence[float | None]) -> Speed | None:
    """Return the shares of the former speed, of matrix products and of memory, as a Speed; None if both are unknown."""
    if all(share is None for share in shares):
        return None
    flops, memory_bytes = (1.0 if share is None else share for share in shares)
    return Speed(flops=flops, memory_bytes=memory_bytes)


def _logs(speeds: Mapping[int, Speed], attribute: str) -> dict[int, float]:
    """Return the log of one measure of each rank; ranks without a measurement are left out."""
    return {rank: figure for rank, speed in speeds.items() if (figure := _log(getattr(speed, attribute))) is not None}


def _log(figure: float) -> float | None:
    """Return the log of a speed, at least -`MAX_LOG_ODDS`; None if the speed was not measured."""
    if math.isnan(figure) or figure < 0.0:
        return None
    return min(max(math.log(figure), -MAX_LOG_ODDS), MAX_LOG_SPEED) if figure > 0.0 else -MAX_LOG_ODDS


def _by_past(changes: Mapping[int, float], usual: float, repeat: float) -> _Usual | None:
    if not changes:
        return None
    if len(changes) == 1:  # a shared loss cannot be separated
        return _Usual(math.log(usual), repeat, PRIOR_ANSWERS)
    values = np.sort(np.array(list(changes.values())))
    # A device far above its past was disturbed when the past was measured: devices do not become faster.
    below = np.median(values) - values[: values.size // 2]
    values = np.minimum(values, 2 * max(repeat, 1.4826 * float(np.median(below))))
    return _level(_healthy(values, repeat), repeat)


def _by_peers(own: Mapping[int, float], suspects: Collection[int] | None, different: float) -> _Usual | None:
    """Return the level of two or more references, else of all devices; None for fewer than three devices.

    With two devices it cannot be decided which one is slow.
    """
    values = [figure for figure in own.values() if figure > -MAX_LOG_ODDS]
    if not values or len(own) < 3:
        return None
    references = [figure for rank, figure in own.items() if rank not in (suspects or ()) and figure > -MAX_LOG_ODDS]
    return _level(np.sort(np.array(references if suspects is not None and len(references) > 1 else values)), different)


def _level(values: Floats, usual: float) -> _Usual:
    """Return the median of the values, and their spread blended with the prior spread `usual`."""
    count, centre = values.size, float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - centre)))
    return _Usual(
        centre, math.sqrt(((count - 1) * spread**2 + PRIOR_ANSWERS * usual**2) / (count - 1 + PRIOR_ANSWERS)), count
    )


def _healthy(values: Floats, repeat: float) -> Floats:
    """Return the faster group of ascending values if the values form two groups, else all values.

    Splits the values so that the sum of squares within both groups is least (Jenks, 1967), then the faster group again.
    """
    min_healthy = max(2, -(-values.size // HEALTHY_GROUP_DIVISOR)) if values.size > 2 else 1
    while values.size > min_healthy:
        n = values.size
        below = np.arange(1, n - min_healthy + 1)  # so many in the lower group
        sums, squares = np.cumsum(values), np.cumsum(values**2)
        low, high = sums[below - 1] / below, (sums[-1] - sums[below - 1]) / (n - below)
        within = np.maximum(squares[-1] - below * low**2 - (n - below) * high**2, 0.0)
        best = int(np.argmin(within))
        sigma = math.sqrt((within[best] + PRIOR_ANSWERS * repeat**2) / max(n - 2 + PRIOR_ANSWERS, 1))
        if high[best] - low[best] < GROUP_SEPARATION_SIGMAS * sigma:
            return values
        values = values[below[best] :]
    return values
