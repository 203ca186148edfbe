"""Which single loss would hurt most: what the planner would do after each of those that may come next. Pure.

Of a plan in effect, one loss of each kind of place (`resihp.scheduler.losses`). Places that are alike were seen to
differ by 0.3 % in time and by a fifth in bytes, for the planner settles ties by number. Whether state is lost is
`resihp.parallelism.transfers`'s to say, what is done the planner's.

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
from resihp.scheduler.cost.prices import bytes_to_move, iteration_seconds
from resihp.scheduler.losses import PossibleLoss
from resihp.scheduler.situation import Decision, Situation


class Aftermath(msgspec.Struct, frozen=True, kw_only=True):
    """What one loss comes to."""

    loss: PossibleLoss
    alike: tuple[PossibleLoss, ...]
    """Others of its kind, which were not asked about."""
    seconds: float = math.inf
    """Of an iteration afterwards; infinite where nothing can run."""
    idle: int = 0
    """Ranks that are left and have no work afterwards."""
    bytes_moved: int = 0
    """State that survivors send each other; 0 where it comes from a checkpoint."""
    state_lost: str = ""
    """Why all state has to come from the last checkpoint; empty where others hold it."""
    obstacle: str = ""
    """Why nothing can run."""


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Of one plan in effect."""

    plan: Plan
    seconds: float
    """Of an iteration now."""
    after: tuple[Aftermath, ...]
    """What hurts most first: nothing can run, then state is lost, then by throughput in percent."""
    unasked: int
    """Losses of kinds that were too many to ask about."""


def after_each(
    situation: Situation,
    plan: Plan,
    decide: Callable[[Situation], Decision],
    progress: Callable[[int, int], None] = lambda asked, of: None,
) -> Losses:
    """What `decide` would do after each loss that may come while `plan` is in effect in `situation`. `progress` is told
    how many were asked about, and of how many."""
    now = in_effect(situation, plan)
    kinds = losses.kinds(losses.possible_losses(now), now)
    asked = kinds[: losses.MOST_ASKED]
    after: list[Aftermath] = []
    for kind in asked:
        progress(len(after), len(asked))
        after.append(_aftermath(now, kind, decide))
    seconds = iteration_seconds(plan, now)
    after.sort(
        key=lambda one: (
            not one.obstacle,
            not one.state_lost,
            round(seconds / one.seconds, 2),
            -one.idle,
            -one.bytes_moved,
            one.loss.node is None,
            one.loss.ranks,
        )
    )
    return Losses(
        plan=plan,
        seconds=seconds,
        after=tuple(after),
        unasked=sum(len(kind) for kind in kinds[len(asked) :]),
    )


def in_effect(situation: Situation, plan: Plan) -> Situation:
    """The situation once a plan for it has taken effect."""
    return msgspec.structs.replace(situation, epoch=plan.epoch + 1, base=plan.layout, stale=(), fresh=False)


def _aftermath(now: Situation, kind: tuple[PossibleLoss, ...], decide: Callable[[Situation], Decision]) -> Aftermath:
    loss, *alike = kind
    lost = state_lost(now, loss.ranks)
    found = Aftermath(loss=loss, alike=tuple(alike), state_lost=lost or "")
    left = tuple(rank for rank in now.available if rank not in loss.ranks)
    if not left:
        return msgspec.structs.replace(found, obstacle="no rank is left")
    then = msgspec.structs.replace(now, available=left, fresh=lost is not None)
    try:
        decision = decide(then)
    except LayoutError as error:
        return msgspec.structs.replace(found, obstacle=str(error))
    layout = decision.plan.layout
    return msgspec.structs.replace(
        found,
        seconds=decision.seconds,
        idle=len(layout.standby),
        bytes_moved=0 if lost else bytes_to_move(then, layout),
    )


def state_lost(now: Situation, ranks: Collection[int]) -> str | None:
    """Why state would be lost with these ranks; None where others hold it."""
    survivors = tuple(rank for rank in now.base.active if rank not in ranks)
    return missing(Base(epoch=now.epoch, layout=now.base, survivors=survivors), outline(now.model))


def as_json(found: Losses, planning_s: float) -> dict[str, object]:
    """`resihp plan --hurts --json`, but for how devices are called. Times that are not finite become null."""
    return {
        "schema": 1,
        "planning_seconds": planning_s,
        "now": {"iteration_seconds": found.seconds, "idle": len(found.plan.layout.standby)},
        "losses": [_one_as_json(one, found.seconds) for one in found.after],
        "unasked": found.unasked,
    }


def _one_as_json(one: Aftermath, now_s: float) -> dict[str, object]:
    runs = math.isfinite(one.seconds)
    return {
        "node": one.loss.node,
        "ranks": list(one.loss.ranks),
        "iteration_seconds": one.seconds if runs else None,
        "throughput": now_s / one.seconds,
        "idle": one.idle if runs else None,
        "bytes": one.bytes_moved if runs and not one.state_lost else None,
        "state_lost": one.state_lost or None,
        "obstacle": one.obstacle or None,
        "alike": [list(other.ranks) for other in one.alike],
    }
