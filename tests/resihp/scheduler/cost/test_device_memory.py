"""What of a device is not for state and activations: counted on GPUs alone, in plans and in what refuses them."""

from __future__ import annotations

import random

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.executor import backends
from resihp.executor.state import state_transfer
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.program import buckets, memberships, programs
from resihp.scheduler import decide
from resihp.scheduler.cost import device_memory, memory
from resihp.scheduler.cost.device_memory import NO_OVERHEAD, Overhead, communicator_bytes, overhead
from resihp.scheduler.situation import Situation
from resihp.scheduler.what_if import catalogue, question

MODEL = ModelSpec(layers=8, hidden=64, heads=8, kv_groups=8, ffn_hidden=256, vocab=512, sequence=128)
FULL = overhead("cuda", "nccl")


def test_nothing_is_counted_on_processors_and_no_communicators_with_gloo() -> None:
    assert overhead("cpu", "gloo") == overhead("cpu", "nccl-like") == NO_OVERHEAD
    assert NO_OVERHEAD.room(80_000_000_000) == NO_OVERHEAD.with_gaps(80_000_000_000) == 80_000_000_000
    assert {name for name, _ in FULL.parts} - {name for name, _ in overhead("cuda", "gloo").parts} == {
        "NCCL's communicators"
    }


@pytest.mark.parametrize("memory_bytes", [16_000_000_000, 80_000_000_000, 141_000_000_001])
def test_what_fits_into_the_room_fits_into_the_device(memory_bytes: int) -> None:
    room = FULL.room(memory_bytes)
    assert FULL.with_gaps(room) <= memory_bytes < FULL.with_gaps(room + 2)
    assert FULL.with_gaps(0) == 0


def test_the_constants_are_those_of_what_they_count() -> None:
    assert device_memory.EDGE_CHANNELS == backends.EDGE_CTAS
    assert device_memory.TRANSFER_BYTES == state_transfer.MAX_CHUNKS_IN_FLIGHT * state_transfer.CHUNK_BYTES


def grid(tokens: int = 100) -> tuple[Plan, int]:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=8)
    plan = Plan(epoch=1, layout=layout, assignment=spread(8, 2))
    return plan, max(memory.needed_bytes(plan, rank, MODEL, tokens) for rank in layout.active)


def test_a_plan_that_leaves_no_room_for_cuda_and_nccl_is_refused_by_its_parts() -> None:
    plan, needed = grid()
    enough = FULL.with_gaps(needed) + 1
    assert memory.obstacle(plan, MODEL, enough, 100, overhead=FULL) is None
    assert memory.obstacle(plan, MODEL, needed, 100) is None
    said = memory.obstacle(plan, MODEL, enough - 3, 100, overhead=FULL)
    assert said is not None
    for name, size in FULL.parts:
        told = f"{size / 1e9:.3g} GB" if size >= 100_000_000 else f"{size / 1e6:.3g} MB"
        assert f"{told} of {name}" in said
    for name in ("state", "activations", "gaps between allocations"):
        assert f"B of {name}" in said


def test_the_planner_keeps_room_for_them() -> None:
    """With room for all layers on the survivor it gets them; CUDA's context takes that room, and nothing is left."""
    plan, _ = grid()
    alone = Plan(epoch=2, layout=Layout.uniform(tp=1, pp=1, dp=1, layers=8), assignment=spread(8, 1))
    enough = memory.needed_bytes(alone, 0, MODEL, 0)
    situation = Situation(
        epoch=2,
        base=plan.layout,
        available=(0,),
        nodes=dict.fromkeys(range(4), "n1"),
        model=MODEL,
        micro_batches=8,
        tp=1,
        pp=2,
        memory_bytes=enough,
    )
    assert decide(situation).plan.layout.active == (0,)
    tight = Overhead((("CUDA's context", enough // 20),), 0.0)
    with pytest.raises(PlanError):
        decide(msgspec.structs.replace(situation, overhead=tight))
    roomy = msgspec.structs.replace(situation, overhead=tight, memory_bytes=enough + enough // 20)
    assert decide(roomy).plan.layout.active == (0,)


def test_no_rank_has_more_communicators_than_are_counted() -> None:
    """Of plans as they are and after failures, with tied embeddings and sequence parallelism."""
    draw = random.Random(1)
    model = msgspec.structs.replace(MODEL, layers=16, vocab=256)
    counted = communicator_bytes(device_memory.LARGE_COMMUNICATORS, device_memory.EDGE_COMMUNICATORS)
    looked_at = 0
    for _ in range(25):
        tp, pp, dp = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4)), draw.choice((1, 2, 4))
        asked = question.Question(
            model=msgspec.structs.replace(model, tied_embeddings=draw.random() < 0.3),
            hardware=catalogue.hardware("a100"),
            tp=tp,
            pp=pp,
            dp=dp,
            micro_batches=4,
            gpus_per_node=8,
            failed=tuple(draw.sample(range(tp * pp * dp), min(tp * pp * dp - 1, draw.randrange(4)))),
            sequence_parallel=draw.random() < 0.3,
        )
        if tp * pp * dp > 32:
            continue
        plan = decide(question.pose(asked, question.first_plan(asked))).plan
        cut = buckets(plan.layout, outline(asked.model))
        groups = memberships(plan, programs(plan, cut), cut)
        for rank in plan.layout.active:
            uses = [group.use for group in groups if rank in group.ranks]
            edges = uses.count("edge")
            assert communicator_bytes(len(uses) - edges, edges) <= counted, (plan, rank)
            looked_at += 1
    assert looked_at > 100
