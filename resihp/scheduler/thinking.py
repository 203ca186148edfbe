"""A question to the planner that can wait: asked before its answer is needed, answered where time does not matter.

What a question is (`canonical`: a situation without what the answer does not depend on), by what name two are the same
(`key_of`), and what is done about it (`think`): decided, searched for as long as the caller says, and played by the
checker. The controller asks (`resihp.controller.ahead`), `wrapper.supervisor.thinking` answers in a process of its
own, and the simulator on its virtual clock; all of them by what is here. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import validate
from resihp.parallelism.plan import Plan
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.situation import Decision, Situation

TRIALS = 20
"""Of a search between two looks at whether it is to go on."""

ENCODER = msgspec.msgpack.Encoder()
_decisions = msgspec.msgpack.Decoder(Decision)


def canonical(situation: Situation) -> Situation:
    """The same question of any epoch, without nodes and links of ranks that are neither there nor in the layout."""
    concerned = sorted({*situation.available, *situation.base.ranks})
    there = {situation.nodes[rank] for rank in situation.available}
    return msgspec.structs.replace(
        situation,
        epoch=0,
        nodes={rank: situation.nodes[rank] for rank in concerned},
        speeds=dict(sorted(situation.speeds.items())),
        links={pair: speed for pair, speed in sorted(situation.links.items()) if there.issuperset(pair)},
    )


def key_of(question: Situation) -> str:
    """Equal for two canonical situations if and only if they are equal."""
    return hashlib.blake2b(ENCODER.encode(question), digest_size=16).hexdigest()


def think(
    situation: Situation,
    decide: Callable[[Situation], Decision],
    check: Callable[[Plan], None],
    more: Callable[[], bool] | None = None,
) -> Decision:
    """What is decided, checked; searched as long as there is to be `more`. Raises LayoutError where there is no plan,
    or none that passes the check."""
    decision = decide(situation)
    if more is not None:
        anytime = Anytime(situation, decision)
        while anytime.obstacle is None and more():
            anytime.run(TRIALS)
        found = anytime.decision()
        try:
            check(found.plan)
            return found
        except LayoutError:
            if found.plan == decision.plan:
                raise
    check(decision.plan)
    return decision


def answer_for(situation: Situation, encoded: bytes) -> Decision | None:
    """A decision that was made before, for the same question, as one for this epoch. None where it is none after all:
    it came from another process, and is looked at like everything that does."""
    try:
        decision = _decisions.decode(encoded)
        plan = msgspec.structs.replace(decision.plan, epoch=situation.epoch)
        validate(plan.layout, situation.model)
    except (msgspec.MsgspecError, LayoutError):
        return None
    if plan.micro_batches != situation.micro_batches or set(plan.layout.ranks) != set(situation.available):
        return None
    return msgspec.structs.replace(decision, plan=plan)
