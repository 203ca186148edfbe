"""Decides whether a transition is worth its cost: now, later or never. Pure: times are arguments.

The module never decides which plan is best (`resihp.scheduler.planner`): its input is the predicted time of the plan in
effect and of a better plan. `verdict` combines four rules:

- The gain is the saved share of time, 1 - then / now, multiplied by the remaining time: until the end of the job, or
  until the end of a slow-down that is expected to pass. A transition must gain more than it costs.
- The duration of a slow-down is rarely known. In that case, the transition is made once the slow-down has cost, since
  its onset, as much as the transition costs. This is the break-even rule of ski rental (Karlin et al., 1988): it costs
  at most twice as much as knowing the end in advance, and no deterministic rule does better. Greyhound climbs its
  ladder of mitigations in the same way.
- A recovery follows the same rule, with the onset of the recovery: the device gets its work back once the work that it
  could have done since then equals the cost of the transition. By then, an immediate return would just have paid for
  itself.
- Each recent change of layout for the same device doubles the threshold. However a flickering device behaves within a
  time W, it causes at most log2(W * share / cost) + 2 transitions.

Called by the controller, by `resihp plan` and by the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from resihp.record.state import ChangeCost

PREDICTION_ERROR = 0.01
"""Relative error of a comparison of two predictions; a smaller gain is ignored. Errors that both predictions share
cancel."""
FLICKER_WINDOW_S = 3600.0
"""Seconds during which a change of layout raises the threshold of the next change for the same device."""
MAX_DOUBLINGS = 20
TRANSITION_NOISE = 0.2
"""Relative scatter of the durations of equal transitions."""
PRIOR_LOG_SCATTER = 1.5
"""Standard deviation of the logarithm of a rate that was not measured: a factor of 4.5 in either direction."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates that give the duration of a transition: `fixed_s` + `group_s` per communicator + `byte_s` per byte."""

    fixed_s: float = 0.5
    """Seconds for parking, planning and agreement. We measured 0.2 s with 8 workers (measured.md); larger jobs take
    longer to agree."""
    group_s: float = 0.15
    """Seconds per communicator of a rank. ResiHP rebuilds all communicators in less than 2 s (its section 7); a rank
    has 8 to 12."""
    byte_s: float = 1 / 20e9
    """Seconds per byte over a device's share of the network: 200 Gb/s at 80 % efficiency."""


DEFAULT_RATES = Rates()
"""Rates to use if no transition was measured."""


class Movement(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a transition (`resihp.scheduler.cost.layout_change`).

    `total_bytes` is the number of bytes that all ranks receive. `busiest_bytes` is the number of bytes that the busiest
    rank sends or receives, each byte weighted by the slowness of its link (1 for a healthy link between nodes).
    `groups` is the number of communicators that the rank with the most communicators has to build.
    """

    total_bytes: int = 0
    busiest_bytes: float = 0.0
    groups: int = 0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a transition in seconds without training; `seconds` is the sum of its parts."""

    total_bytes: int
    groups_s: float
    transfer_s: float
    fixed_s: float
    lost_s: float = 0.0
    """Seconds of work that is repeated: on average half of the iteration that a failure interrupts, at most all of
    it."""

    @property
    def seconds(self) -> float:
        return self.groups_s + self.transfer_s + self.fixed_s + self.lost_s


NO_COST = Cost(total_bytes=0, groups_s=0.0, transfer_s=0.0, fixed_s=0.0)
"""Cost of keeping the plan in effect."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision whether to make a transition, and the numbers behind it, in seconds of training."""

    go: bool
    reason: str
    cost_s: float
    threshold_s: float
    """Seconds that the gain must exceed: the cost, doubled for each recent change for the same device."""
    share: float
    """Share of time that the other plan saves while it is in effect."""
    horizon_s: float
    """Longest time for which the other plan would be useful, in seconds; infinite if no end is known."""
    gain_s: float
    """Seconds saved over the horizon, without subtracting the cost."""
    loss_s: float = 0.0
    """Seconds lost since the onset because the other plan was not in effect."""
    again_in_s: float | None = None
    """Seconds after which the decision becomes yes if nothing else changes; 0 if it is yes now, None if it never
    becomes yes."""


def cost(movement: Movement, rates: Rates = DEFAULT_RATES, *, lost_s: float = 0.0) -> Cost:
    """Return the cost of a transition. `lost_s` is 0 for a transition between two iterations."""
    return Cost(
        total_bytes=movement.total_bytes,
        groups_s=movement.groups * rates.group_s,
        transfer_s=movement.busiest_bytes * rates.byte_s,
        fixed_s=rates.fixed_s,
        lost_s=lost_s,
    )


def calibrated(records: Iterable[ChangeCost], prior: Rates = DEFAULT_RATES) -> Rates:
    """Return the rates that explain past reconfigurations. Rates are positive, robust, and near `prior` without
    evidence.

    The method is least squares over logarithms: a record is expected within `TRANSITION_NOISE` of its prediction, a
    rate within a factor of e^`PRIOR_LOG_SCATTER` of the prior. A few clear records therefore suffice, and rates that
    the records cannot separate keep their prior values. Residuals beyond one deviation count by their size instead of
    its square (Huber): one transition that waited for a dying node does not make all others look expensive. Records
    with times that are not positive and finite are ignored.
    """
    valid_records = [
        r for r in records if 0 < r.seconds < math.inf and 0 <= r.busiest_bytes < math.inf and r.communicators >= 0
    ]
    prior_rates = np.array([prior.fixed_s, prior.group_s, prior.byte_s])
    if not valid_records or not np.all(prior_rates > 0):
        return prior
    rows = np.array([[1.0, r.communicators, r.busiest_bytes] for r in valid_records]) * prior_rates
    measured_logs = np.log([r.seconds for r in valid_records])

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [(np.log(rows @ np.exp(logs)) - measured_logs) / TRANSITION_NOISE, logs / PRIOR_LOG_SCATTER]
        )

    from scipy.optimize import least_squares  # half of a supervisor's start; it is loaded beside the job

    log_factors = least_squares(residuals, np.zeros(3), bounds=(-12.0, 12.0), loss="huber").x
    fixed_s, group_s, byte_s = (float(x) for x in prior_rates * np.exp(log_factors))
    return Rates(fixed_s=fixed_s, group_s=group_s, byte_s=byte_s)


def recent(changes_at_s: Sequence[float], now_s: float, window_s: float = FLICKER_WINDOW_S) -> int:
    """Return the number of changes of layout for one device, demotions and promotions, within the last `window_s`
    seconds."""
    return sum(now_s - window_s < at <= now_s for at in changes_at_s)


def verdict(
    cost: Cost,
    now_s: float,
    then_s: float,
    *,
    remaining_s: float | None = None,
    duration_s: float | None = None,
    elapsed_s: float = 0.0,
    changes: int = 0,
    doubt: float = PREDICTION_ERROR,
) -> Verdict:
    """Decide whether to change from a plan with iterations of `now_s` to a plan with iterations of `then_s`.

    `now_s` and `then_s` are in one unit, all other times in seconds. An infinite `now_s` (nothing runs) is worth any
    cost. `remaining_s`: time until the end of the job at the present pace; None if unknown. `duration_s`: how much
    longer the present state is expected to last; `math.inf` if it does not pass by itself (a lost device); None if
    unknown (a device that is slow, or has just recovered): then the change waits until the loss over `elapsed_s`, the
    time since the state began, reaches the cost. `changes`: number of `recent` changes for the same device. Raises
    ValueError for invalid times.
    """
    _check(now_s=now_s, then_s=then_s, elapsed_s=elapsed_s, doubt=doubt)
    for name, value in (("remaining_s", remaining_s), ("duration_s", duration_s)):
        if value is not None:
            _check(**{name: value})
    share = _share(now_s, then_s, doubt)
    threshold_s = cost.seconds * 2.0 ** min(max(changes, 0), MAX_DOUBLINGS)
    horizon_s = min(math.inf if limit is None else limit for limit in (remaining_s, duration_s))
    gain_s = share * horizon_s if share > 0 else 0.0
    loss_s = share * elapsed_s if share > 0 else 0.0
    again_in_s: float | None = None
    price, percent = _price(cost, threshold_s), f"{100 * share:.1f} %"
    if math.isinf(now_s) and math.isfinite(then_s):
        go, reason = True, "nothing runs under the present plan"
    elif share <= 0:
        saved = 1.0 - then_s / now_s if now_s > 0 and math.isfinite(now_s) else 0.0
        go, reason = False, f"saves {100 * saved:.1f} % per iteration, less than the error of a prediction"
    elif gain_s <= threshold_s:
        until = "until the job's end" if horizon_s == remaining_s else "while it lasts"
        go, reason = False, f"saves {gain_s:.3g} s {until}, but switching costs {price}"
    elif duration_s is not None:
        go, reason = True, f"saves {percent} per iteration{_over(horizon_s, gain_s)}; switching costs {price}"
    elif loss_s >= threshold_s:
        go, reason = True, f"saves {percent} per iteration ({loss_s:.3g} s lost so far, switching costs {price})"
    else:
        go, again_in_s = False, (threshold_s - loss_s) / share
        reason = (
            f"would save {percent} per iteration, but the cause may be temporary ({loss_s:.3g} s lost so far, "
            f"switching costs {price}); worth switching in {again_in_s:.3g} s if it persists"
        )
        if remaining_s is not None and share * (remaining_s - again_in_s) <= threshold_s:
            again_in_s = None  # by then too little time remains
    return Verdict(
        go=go,
        reason=reason,
        cost_s=cost.seconds,
        threshold_s=threshold_s,
        share=share,
        horizon_s=horizon_s,
        gain_s=gain_s,
        loss_s=loss_s,
        again_in_s=0.0 if go else again_in_s,
    )


def worth_asking(
    cost: Cost,
    now_s: float,
    then_s: float,
    *,
    remaining_s: float | None,
    wait_s: float,
    joining_s: float,
    doubt: float = PREDICTION_ERROR,
) -> Verdict:
    """Decide whether to request a node, with which an iteration takes `then_s` instead of `now_s`.

    The node arrives after `wait_s` and needs `joining_s` to start its processes. Both cost nothing, because the job
    goes on. The gain after that must exceed the cost of the transition that includes the node. `remaining_s` as for
    `verdict`.
    """
    _check(wait_s=wait_s, joining_s=joining_s)
    if math.isinf(now_s) and math.isfinite(then_s):
        return verdict(cost, now_s, then_s, remaining_s=remaining_s, duration_s=math.inf)
    left_s = math.inf if remaining_s is None else max(0.0, remaining_s - wait_s - joining_s)
    decision = verdict(cost, now_s, then_s, remaining_s=left_s, duration_s=math.inf, doubt=doubt)
    waiting = f"after {wait_s:.3g} s of waiting and {joining_s:.3g} s of joining: {decision.reason}"
    return msgspec.structs.replace(decision, reason=waiting, again_in_s=0.0 if decision.go else None)


def pays_back_s(cost: Cost, now_s: float, then_s: float) -> float:
    """Return the time under the better plan after which a transition has paid for itself, in seconds.

    Infinite if it never does, 0 if nothing runs at present.
    """
    _check(now_s=now_s, then_s=then_s)
    if math.isinf(now_s) and math.isfinite(then_s):
        return 0.0
    share = _share(now_s, then_s, 0.0)
    return cost.seconds / share if share > 0 else math.inf


def _share(now_s: float, then_s: float, doubt: float) -> float:
    if math.isinf(then_s) or now_s <= 0:
        return 0.0
    if math.isinf(now_s):
        return 1.0
    share = 1.0 - then_s / now_s
    return share if share > doubt else 0.0


def _price(cost: Cost, threshold_s: float) -> str:
    flickers = "" if threshold_s == cost.seconds else f", counted as {threshold_s:.3g} s after recent changes"
    return f"{cost.seconds:.3g} s{flickers}"


def _over(horizon_s: float, gain_s: float) -> str:
    return "" if math.isinf(horizon_s) else f", {gain_s:.3g} s of the remaining time"


def _check(**times: float) -> None:
    for name, value in times.items():
        if math.isnan(value) or value < 0:
            raise ValueError(f"{name} is {value}; times are at least 0")
