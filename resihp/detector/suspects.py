"""What a probe says of devices under suspicion: how sure it is that each is slow, as odds. Pure.

Each device is compared with its own past, from which what all have lost together is taken out: under a power cap
nobody stands out. Devices do not become faster: where answers fall apart into two groups, the upper one is healthy, as
long as it is a quarter of all. Where pasts are not known devices are compared with each other, which differ by
themselves. How far apart healthy ones come is read off the answers; few answers are held to what is usual. Called by
the controller (`resihp.controller.fail_slow.probing`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.probes import USUAL, Judged
from resihp.protocol.messages import Speed
from resihp.settings import Thresholds

REPEAT = 0.01
"""Standard deviation of a probe's repetitions, log units, as far as answers do not tell."""
SHARED = 0.12
"""The same of a device whose processors other workers compute on, too: who goes first is chance."""
DIFFERENT = 0.02
"""The same between devices of one kind."""
PRIOR = 4
"""How many answers these count for."""
LEAST = 0.03
"""The smallest slow-down that a probe is to show, log units."""
MOST = 20.0
"""Log odds beyond are no surer."""
FASTEST = 100.0
"""Log of what no device computes or moves in a second."""
APART = 4.5
"""Two groups of answers lie apart if their means do by so many standard deviations; halves of one normal group, 2.7."""
QUORUM = 4
"""One in so many has to be in the upper group for that to be the healthy one."""
COMMON = 0.02
"""What all have lost together is told from this on, log units."""

Floats = npt.NDArray[np.float64]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers to one probe come to."""

    devices: dict[int, Judged]
    share: Speed | None = None
    """What is left, for all of them, of what they reached before; None where too few pasts are known."""

    @property
    def lost(self) -> float:
        """What all have lost together of what was worst, at most 1; 0 for nothing that counts."""
        if self.share is None:
            return 0.0
        worst = min(self.share.flops, self.share.memory_bytes)
        return 1.0 - worst if worst < math.exp(-COMMON) else 0.0


class _Usual(msgspec.Struct, frozen=True):
    """Where healthy devices are, in log units; how far one of them comes from there; how many it rests on."""

    centre: float
    sigma: float
    count: int

    def odds(self, value: float) -> float:
        """Log odds of slow against healthy: of the slow-down that suits the value best, and is no less than `LEAST`.

        Of Student's distribution: the spread is an estimate itself.
        """
        drop = self.centre - value
        sigma = self.sigma * math.sqrt(1.0 + math.pi / 2 / max(self.count, 1))
        freedom = self.count - 1 + PRIOR
        healthy, slow = (math.log1p((away / sigma) ** 2 / freedom) for away in (drop, drop - max(drop, LEAST)))
        return min(max((freedom + 1) / 2 * (healthy - slow), -MOST), MOST)


def judge(
    found: Mapping[int, Speed],
    failed: Mapping[int, str],
    past: Mapping[int, Speed],
    suspects: Collection[int] | None = None,
    usual: Speed | None = None,
    wanted: Thresholds = USUAL,
    *,
    shared: bool = False,
) -> Verdicts:
    """Everybody's answer. `suspects`: who is under suspicion, the others are witnesses; None for nobody in particular.

    `failed`: ranks whose device could not even be measured, and why. `usual`: what was left for all when that was last
    known. `shared`: other workers compute on the same processors. With suspects, a device is as slow as its past or its
    peers show; without, its past alone counts where known, for devices differ and the slowest of many differs most.
    """
    judged = {rank: Judged(rank=rank, speed=None, fit=False, evidence=why, odds=MOST) for rank, why in failed.items()}
    repeat = SHARED if shared else REPEAT
    told: dict[int, list[tuple[float, float, str]]] = {rank: [] for rank in found}
    shares: list[float | None] = []
    for name, attribute, unit in (("matrix products", "flops", "GFLOP/s"), ("memory", "memory_bytes", "GB/s")):
        own = {rank: figure for rank, speed in found.items() if (figure := _log(getattr(speed, attribute))) is not None}
        changes = {
            rank: figure - before
            for rank, figure in own.items()
            if rank in past and (before := _log(getattr(past[rank], attribute))) is not None and before > -MOST
        }
        by_past = _by_past(changes, getattr(usual, attribute) if usual is not None else 1.0, repeat)
        shares.append(math.exp(by_past.centre) if by_past is not None and by_past.count > 2 else None)
        by_peers = _by_peers(own, suspects, max(repeat, DIFFERENT))
        for rank, figure in own.items():
            amount = f"{math.exp(figure) / 1e9:.4g} {unit}"
            if by_past is not None and rank in changes:
                others = f", others at {math.exp(by_past.centre):.0%}" if abs(by_past.centre) > COMMON / 2 else ""
                text = f"{name} at {math.exp(changes[rank]):.0%} of its own past{others}, {amount}"
                odds = by_past.odds(changes[rank])
                told[rank].append((odds, math.exp(changes[rank] - by_past.centre), text))
            if by_peers is not None and (suspects is not None or by_past is None or rank not in changes):
                share = math.exp(figure - by_peers.centre)
                told[rank].append((by_peers.odds(figure), share, f"{name} at {share:.0%} of its peers, {amount}"))
    for rank, parts in told.items():
        if not parts:
            judged[rank] = Judged(rank=rank, speed=None, fit=True, evidence="nothing to compare it with")
            continue
        odds, share, text = max(parts, key=lambda part: (part[0], -part[1]))
        odds -= math.log(len(parts))  # the worst of several
        judged[rank] = Judged(rank=rank, speed=share, fit=share >= wanted.fit, evidence=text, odds=odds)
    flops, memory_bytes = (1.0 if share is None else share for share in shares)
    known = any(share is not None for share in shares)
    return Verdicts(devices=judged, share=Speed(flops=flops, memory_bytes=memory_bytes) if known else None)


def _log(figure: float) -> float | None:
    """None where it was not measured; a device that does next to nothing is as slow as can be."""
    if math.isnan(figure) or figure < 0.0:
        return None
    return min(max(math.log(figure), -MOST), FASTEST) if figure > 0.0 else -MOST


def _by_past(changes: Mapping[int, float], usual: float, repeat: float) -> _Usual | None:
    if not changes:
        return None
    if len(changes) == 1:  # nobody to tell what all have lost
        return _Usual(math.log(usual), repeat, PRIOR)
    values = np.sort(np.array(list(changes.values())))
    # Who is far above its past was disturbed when that was measured: nobody becomes faster.
    below = np.median(values) - values[: values.size // 2]
    values = np.minimum(values, 2 * max(repeat, 1.4826 * float(np.median(below))))
    return _level(_healthy(values, repeat), repeat)


def _by_peers(own: Mapping[int, float], suspects: Collection[int] | None, different: float) -> _Usual | None:
    """Witnesses alone, where there are some; nobody can tell which of two is odd."""
    values = [figure for figure in own.values() if figure > -MOST]
    if not values or len(own) < 3:
        return None
    witnesses = [figure for rank, figure in own.items() if rank not in (suspects or ()) and figure > -MOST]
    return _level(np.sort(np.array(witnesses if suspects is not None and len(witnesses) > 1 else values)), different)


def _level(values: Floats, usual: float) -> _Usual:
    """By their median, and by their spread as far as they are many."""
    count, centre = values.size, float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - centre)))
    return _Usual(centre, math.sqrt(((count - 1) * spread**2 + PRIOR * usual**2) / (count - 1 + PRIOR)), count)


def _healthy(values: Floats, repeat: float) -> Floats:
    """Of ascending values, the upper group where they fall apart; else all.

    The split that leaves the least squares within two groups (Jenks, 1967), over again in the upper one.
    """
    least = max(2, -(-values.size // QUORUM)) if values.size > 2 else 1
    while values.size > least:
        n = values.size
        below = np.arange(1, n - least + 1)  # so many in the lower group
        sums, squares = np.cumsum(values), np.cumsum(values**2)
        low, high = sums[below - 1] / below, (sums[-1] - sums[below - 1]) / (n - below)
        within = np.maximum(squares[-1] - below * low**2 - (n - below) * high**2, 0.0)
        best = int(np.argmin(within))
        sigma = math.sqrt((within[best] + PRIOR * repeat**2) / max(n - 2 + PRIOR, 1))
        if high[best] - low[best] < APART * sigma:
            return values
        values = values[below[best] :]
    return values
