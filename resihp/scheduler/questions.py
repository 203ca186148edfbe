"""Questions that are asked before their answer is needed: what one is, when two are the same, and what an answer is
good for.

The controller asks (`resihp.controller.ahead`), `resihp.scheduler.thinking` answers. Pure.
"""

from __future__ import annotations

import hashlib

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import validate
from resihp.scheduler.situation import Decision, Situation

ENCODER = msgspec.msgpack.Encoder()
_decisions = msgspec.msgpack.Decoder(Decision)


def canonical(situation: Situation) -> Situation:
    """The same question of any epoch, without nodes and links of ranks that are neither there nor in the layout."""
    concerned = sorted({*situation.available, *situation.holding.ranks})
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
