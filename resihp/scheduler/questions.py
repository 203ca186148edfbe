"""Questions that the controller asks the planner in advance: their canonical form, their key, and the use of answers.

`resihp.controller.ahead` asks, `resihp.scheduler.thinking` answers. Pure.
"""

from __future__ import annotations

import hashlib

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import validate
from resihp.scheduler.situation import Decision, Situation

QUESTION_ENCODER = msgspec.msgpack.Encoder()
_decisions = msgspec.msgpack.Decoder(Decision)


def canonical(situation: Situation) -> Situation:
    """Return the question without facts that do not affect the answer: its epoch, and nodes and links of irrelevant
    ranks.

    A rank is irrelevant if it is neither available nor in the layout in effect.
    """
    concerned = sorted({*situation.available, *situation.holding.ranks})
    available_nodes = {situation.nodes[rank] for rank in situation.available}
    return msgspec.structs.replace(
        situation,
        epoch=0,
        nodes={rank: situation.nodes[rank] for rank in concerned},
        speeds=dict(sorted(situation.speeds.items())),
        links={pair: speed for pair, speed in sorted(situation.links.items()) if available_nodes.issuperset(pair)},
    )


def key_of(question: Situation) -> str:
    """Return a key of a canonical situation; two keys are equal if and only if the situations are equal."""
    return hashlib.blake2b(QUESTION_ENCODER.encode(question), digest_size=16).hexdigest()


def answer_for(situation: Situation, encoded: bytes) -> Decision | None:
    """Decode an earlier decision for an equal question, and return it with the epoch of `situation`.

    None if it cannot be decoded or does not fit the situation: the answer comes from another process, and is checked
    like all such data.
    """
    try:
        decision = _decisions.decode(encoded)
        plan = msgspec.structs.replace(decision.plan, epoch=situation.epoch)
        validate(plan.layout, situation.model)
    except (msgspec.MsgspecError, LayoutError):
        return None
    if plan.micro_batches != situation.micro_batches or set(plan.layout.ranks) != set(situation.available):
        return None
    return msgspec.structs.replace(decision, plan=plan)
