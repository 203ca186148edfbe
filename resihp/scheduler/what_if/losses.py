"""Ranks possible losses by their harm: evaluates the planner's reaction to each loss that may come next. Pure.

For a plan in effect, one loss of each kind is evaluated (`resihp.scheduler.losses`). Losses of one kind were seen to
differ by 0.3 % in time and by a fifth in bytes, because the planner breaks ties by rank number. Whether state is lost
is determined by `resihp.parallelism.transfers`, the reaction by the planner.

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
    """The result of one loss: the iteration time after it, the bytes moved, or the reason why nothing can run."""

    loss: PossibleLoss
    alike: tuple[PossibleLoss, ...]
    """Other losses of the same kind, which were not evaluated."""
    seconds: float = math.inf
    """Iteration time after the planner's reaction; infinite if nothing can run."""
    idle: int = 0
    """Number of remaining ranks without work after the planner's reaction."""
    bytes_moved: int = 0
    """Bytes of state that survivors send to each other; 0 if the state comes from a checkpoint."""
    state_lost: str = ""
    """Reason why all state must come from the last checkpoint; empty if survivors hold all state."""
    obstacle: str = ""
    """Reason why nothing can run; empty if a plan can."""


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all possible losses under one plan."""

    plan: Plan
    seconds: float
    """Iteration time before any loss."""
    after: tuple[LossResult, ...]
    """Results sorted by harm: first losses after which nothing can run, then losses of state, then by throughput in
    whole percent."""
    unasked: int
    """Number of losses that were not evaluated, because there were too many kinds."""


def after_each(
    situation: Situation,
    plan: Plan,
    decide: Callable[[Situation], Decision],
    progress: Callable[[int, int], None] = lambda evaluated, total: None,
) -> Losses:
    """Return the result of `decide` after each possible loss while `plan` is in effect in `situation`.

    `progress` is called with the number of losses evaluated so far and the total number.
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
    """Return the situation after `plan` has taken effect."""
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
    """Return why some state would be lost with these ranks; None if other ranks hold it."""
    survivors = tuple(rank for rank in now.base.active if rank not in ranks)
    return missing(Base(epoch=now.epoch, layout=now.base, survivors=survivors), outline(now.model))


def as_json(results: Losses, planning_s: float) -> dict[str, object]:
    """Return the output of `resihp plan --hurts --json` except device names. Infinite and undefined times become
    null."""
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
