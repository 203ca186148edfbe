"""Memory of a transition: old state beside the new one, who has no room for it, and what is then done."""

from __future__ import annotations

import msgspec

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.scheduler import decide
from resihp.scheduler.cost import transition_memory
from resihp.scheduler.cost.held_state import holdings
from resihp.scheduler.cost.transition_memory import TransitionBytes, beside
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.question import Question, first_plan, pose

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
    assert "GB of old state" in said
    assert transition_memory.obstacle(there, (), back, MODEL, most - 1) is None, "nobody holds anything"
    assert transition_memory.obstacle(there, there.active, there, MODEL, 1) is None, "nothing changes"


def test_optimizer_state_that_replicas_share_moves_piece_by_piece() -> None:
    there = Layout((Replica((Stage((0,), ((0, 1),)), Stage((1,), ((2, 3),)))),))
    back = Layout((Replica((Stage((1,), ((0, 1),)), Stage((0,), ((2, 3),)))),))
    old, new = dict(holdings(there.replicas))[0], dict(holdings(back.replicas))[0]
    own = beside(old, old, MODEL, (1, 1))
    assert own == TransitionBytes(own.old, 0)
    both = beside(old, new, MODEL, (2, 1))
    assert both.old < both.total < beside(old, new, MODEL).total


def test_a_plan_whose_transition_has_no_room_is_not_proposed() -> None:
    """The fastest plan puts ranks of whole groups into smaller ones: what they hold leaves no room for that."""
    question = Question(
        model=catalogue.model("llama2-30b", 2048),
        hardware=msgspec.structs.replace(catalogue.hardware("h100"), memory_bytes=52_500_000_000),
        tp=4,
        pp=5,
        dp=2,
        micro_batches=16,
        gpus_per_node=8,
        sequence_parallel=True,
        failed=(1, 11, 23, 32),
        slow={17: 0.7},
    )
    case = pose(question, first_plan(question))
    assert case.memory_bytes is not None
    decision = decide(case)
    found = transition_memory.obstacle(
        case.base, case.available, decision.plan.layout, case.model, case.memory_bytes, overhead=case.overhead
    )
    assert found is None
    with_room = decide(case, search=False)
    assert "with room for the current state" in with_room.reason
    assert decision.seconds < 0.9 * with_room.seconds
    from_a_checkpoint = decide(msgspec.structs.replace(case, fresh=True))
    assert from_a_checkpoint.seconds < decision.seconds, "nobody holds anything beside it"
