"""Memory of a transition: old state beside the new one, who has no room for it, and what is then done."""

from __future__ import annotations

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.scheduler.cost import transition_memory
from resihp.scheduler.cost.transition_memory import Both, beside, holdings

MODEL = ModelSpec(layers=4, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=64, sequence=64)


def test_a_transition_without_room_for_both_states_is_told() -> None:
    """Of two stages that change places each is held twice, gradients left out."""
    there = Layout((Replica((Stage((0,), ((0, 1),)), Stage((1,), ((2, 3),)))),))
    back = Layout((Replica((Stage((1,), ((0, 1),)), Stage((0,), ((2, 3),)))),))
    before, after = dict(holdings(there.replicas)), dict(holdings(back.replicas))
    most = max(beside(before[rank], after[rank], MODEL).total for rank in (0, 1))
    assert transition_memory.obstacle(there, there.active, back, MODEL, most) is None
    said = transition_memory.obstacle(there, there.active, back, MODEL, most - 1)
    assert said is not None
    assert "GB of state as it was" in said
    assert transition_memory.obstacle(there, (), back, MODEL, most - 1) is None, "nobody holds anything"
    assert transition_memory.obstacle(there, there.active, there, MODEL, 1) is None, "nothing changes"


def test_optimizer_state_that_replicas_share_moves_piece_by_piece() -> None:
    there = Layout((Replica((Stage((0,), ((0, 1),)), Stage((1,), ((2, 3),)))),))
    back = Layout((Replica((Stage((1,), ((0, 1),)), Stage((0,), ((2, 3),)))),))
    old, new = dict(holdings(there.replicas))[0], dict(holdings(back.replicas))[0]
    own = beside(old, old, MODEL, (1, 1))
    assert own == Both(own.old, 0)
    both = beside(old, new, MODEL, (2, 1))
    assert both.old < both.total < beside(old, new, MODEL).total
