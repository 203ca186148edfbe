"""Ranks single losses by the harm that they would do: the planner's reaction to each possible next loss. Pure.

One loss of each kind of place is evaluated for a plan in effect (`resihp.scheduler.losses`). Equal places were seen to
differ by 0.3 % in time and by a fifth in bytes, since the planner settles ties by number. Whether state is lost is
decided by `resihp.parallelism.transfers`, the reaction by the planner.

Called by `resihp plan --hurts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan
from resihp.parallelism.transfers import Base, missing
from resihp.scheduler import losses
from resihp.scheduler.cost.lacking_state import bytes_to_move
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.losses import PossibleLoss
from resihp.scheduler.situation import Decision, Situation


class LossResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one loss."""

    loss: PossibleLoss
    alike: tuple[PossibleLoss, ...]
    """Other losses of its kind, which were not evaluated."""
    seconds: float = math.inf
    """Time of an iteration afterwards; infinite if nothing can run."""
    idle: int = 0
    """Remaining ranks without work afterwards."""
    bytes_moved: int = 0
    """Bytes of state that survivors send each other; 0 if it comes from a checkpoint."""
    state_lost: str = ""
    """Why all state has to come from the last checkpoint; empty if others hold it."""
    obstacle: str = ""
    """Why nothing can run."""


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Results for one plan in effect."""

    plan: Plan
    seconds: float
    """Time of an iteration now."""
    after: tuple[LossResult, ...]
    """Results by harm: nothing can run, then state is lost, then by throughput in percent."""
    unasked: int
    """Number of losses that were not evaluated because there were too many kinds."""


def after_each(
    situation: Situation,
    plan: Plan,
    decide: Callable[[Situation], Decision],
    progress: Callable[[int, int], None] = lambda evaluated, total: None,
) -> Losses:
    """Return the result of `decide` after each loss that may come while `plan` is in effect in `situation`.

    `progress` is called with the number of evaluated losses and the total.
    """
    situation_in_effect = in_effect(situation, plan)
    kinds = losses.kinds(losses.possible_losses(situation_in_effect), situation_in_effect)
    evaluated_kinds = kinds[: losses.MAX_LOSSES]
    after: list[LossResult] = []
    for kind in evaluated_kinds:
        progress(len(after), len(evaluated_kinds))
        after.append(_loss_result(situation_in_effect, kind, decide))
    seconds = iteration_seconds(plan, situation_in_effect)
    after.sort(
        key=lambda result: (
            not result.obstacle,
            not result.state_lost,
            round(seconds / result.seconds, 2),
            -result.idle,
            -result.bytes_moved,
            result.loss.node is None,
            result.loss.ranks,
        )
    )
    return Losses(
        plan=plan,
        seconds=seconds,
        after=tuple(after),
        unasked=sum(len(kind) for kind in kinds[len(evaluated_kinds) :]),
    )


def in_effect(situation: Situation, plan: Plan) -> Situation:
    """Return the situation once a plan for it has taken effect."""
    return msgspec.structs.replace(situation, epoch=plan.epoch + 1, base=plan.layout, stale=(), fresh=False)


def _loss_result(now: Situation, kind: tuple[PossibleLoss, ...], decide: Callable[[Situation], Decision]) -> LossResult:
    loss, *alike = kind
    lost_state = state_lost(now, loss.ranks)
    result = LossResult(loss=loss, alike=tuple(alike), state_lost=lost_state or "")
    survivors = tuple(rank for rank in now.available if rank not in loss.ranks)
    if not survivors:
        return msgspec.structs.replace(result, obstacle="no rank is left")
    situation_after = msgspec.structs.replace(now, available=survivors, fresh=lost_state is not None)
    try:
        decision = decide(situation_after)
    except LayoutError as error:
        return msgspec.structs.replace(result, obstacle=str(error))
    layout = decision.plan.layout
    return msgspec.structs.replace(
        result,
        seconds=decision.seconds,
        idle=len(layout.standby),
        bytes_moved=0 if lost_state else bytes_to_move(situation_after, layout),
    )


def state_lost(now: Situation, ranks: Collection[int]) -> str | None:
    """Return why state would be lost with these ranks; None if others hold it."""
    survivors = tuple(rank for rank in now.base.active if rank not in ranks)
    return missing(Base(epoch=now.epoch, layout=now.base, survivors=survivors), outline(now.model))


def as_json(results: Losses, planning_s: float) -> dict[str, object]:
    """Return the output of `resihp plan --hurts --json`, except device names. Times that are not finite become null."""
    return {
        "schema": 1,
        "planning_seconds": planning_s,
        "now": {"iteration_seconds": results.seconds, "idle": len(results.plan.layout.standby)},
        "losses": [_one_as_json(result, results.seconds) for result in results.after],
        "unasked": results.unasked,
    }


def _one_as_json(result: LossResult, now_s: float) -> dict[str, object]:
    runs = math.isfinite(result.seconds)
    return {
        "node": result.loss.node,
        "ranks": list(result.loss.ranks),
        "iteration_seconds": result.seconds if runs else None,
        "throughput": now_s / result.seconds,
        "idle": result.idle if runs else None,
        "bytes": result.bytes_moved if runs and not result.state_lost else None,
        "state_lost": result.state_lost or None,
        "obstacle": result.obstacle or None,
        "alike": [list(other_loss.ranks) for other_loss in result.alike],
    }
