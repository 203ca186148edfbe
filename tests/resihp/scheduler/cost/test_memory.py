"""Memory: what a rank needs, who has too little, and how small a group may become."""

from __future__ import annotations

import re

import msgspec
import pytest

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import owned, size_of
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler.cost.memory import StageSetup, capacity, needed_bytes, obstacle, smallest_degree
from resihp.scheduler.cost.tensor_bytes import STATE_BYTES, zero_1

MODEL = ModelSpec(layers=8, hidden=64, heads=8, kv_groups=8, ffn_hidden=256, vocab=512, sequence=128)
TOKENS = 100


def plan(layout: Layout, micro_batches: int = 8, schedule: str = "1f1b", *, sequence_parallel: bool = False) -> Plan:
    return Plan(
        epoch=4,
        layout=layout,
        assignment=spread(micro_batches, len(layout.replicas)),
        schedule=schedule,
        sequence_parallel=sequence_parallel,
    )


def grid(tp: int = 1, pp: int = 1, dp: int = 1, chunks: int = 1, standby: tuple[int, ...] = ()) -> Layout:
    return Layout.uniform(tp=tp, pp=pp, dp=dp, layers=8, chunks=chunks, standby=standby)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [grid(), grid(tp=2, pp=2), grid(tp=4, pp=3, dp=2), grid(pp=2, chunks=2)])
def test_state_is_what_ownership_says_in_four_copies(layout: Layout, tied: bool) -> None:
    model = msgspec.structs.replace(MODEL, tied_embeddings=tied)
    specs = {spec.name: spec for spec in outline(model)}
    for rank, slices in owned(layout, tuple(specs.values())).items():
        held = sum(size_of(specs[piece.name], piece) for piece in slices)
        assert needed_bytes(plan(layout), rank, model, 0) == STATE_BYTES["fp32"] * held
        assert needed_bytes(plan(layout), rank, model, 0, state_bytes=7) == 7 * held


def activations(layout: Layout, rank: int, **settings: bool | str) -> int:
    made = plan(layout, **settings)  # type: ignore[arg-type]
    return needed_bytes(made, rank, MODEL, TOKENS) - needed_bytes(made, rank, MODEL, 0)


def test_a_layer_keeps_its_norms_whole_and_the_rest_cut() -> None:
    """4 hidden of the norms; of attention 2 + 2 + 2 as multiplied, turned and attended, and once more document by
    document in fp32; 2 of four times the width in the MLP; sine and cosine of each head's width, an eighth, 4 times."""
    unit = TOKENS * MODEL.hidden * 4
    middle = grid(pp=4)
    assert activations(middle, 1) == 3 * 2 * (4 + 3 + 2 + 1 + 1 + 8 + 0.5) * unit
    halves = grid(tp=2, pp=4)
    assert activations(halves, 2) == 3 * 2 * (4 + 15 / 2 + 0.5) * unit
    assert activations(halves, 2, sequence_parallel=True) == 3 * 2 * (19 / 2 + 0.5) * unit


def test_wide_heads_and_their_norms_keep_more() -> None:
    """Twice as wide: three as multiplied, two turned, two attended, and sine and cosine. What goes into the norms of
    queries and keys is kept already."""

    def layer(tp: int, **changes: int | bool) -> int:
        model = msgspec.structs.replace(MODEL, **changes)
        rank, made = tp, plan(grid(tp=tp, pp=4))
        return (needed_bytes(made, rank, model, TOKENS) - needed_bytes(made, rank, model, 0)) // (3 * 2)

    unit = TOKENS * MODEL.hidden * 4
    assert layer(1, kv_channels=16) == (19.5 + 7 + 0.5) * unit
    assert layer(2, kv_channels=16, qk_layernorm=True) == (4 + (15 + 7) / 2 + 1) * unit
    assert layer(1, qk_layernorm=True) == 19.5 * unit


def test_earlier_stages_keep_more_micro_batches() -> None:
    needs = [activations(grid(pp=4), rank) for rank in range(4)]
    embedding = TOKENS * 2 * 8
    head = TOKENS * 4 * (2 * MODEL.hidden + 2 * MODEL.vocab_rows)  # logits, and once more in a chunk of the loss
    assert needs[0] - embedding == 4 * (needs[3] - head)
    assert needs[1] * 2 == needs[2] * 3


def test_a_split_backward_keeps_activations_until_its_weights_gradients() -> None:
    assert activations(grid(pp=4), 3, schedule="zero-bubble") > activations(grid(pp=4), 3)


def test_a_rank_without_work_needs_nothing() -> None:
    assert needed_bytes(plan(grid(tp=2, standby=(9,))), 9, MODEL, TOKENS) == 0


def test_the_rank_that_needs_most_is_named() -> None:
    layout = Layout((Replica((Stage((0, 1), ((0, 3),)), Stage((2,), ((4, 7),)))),), (3,))
    made = plan(layout)
    most = needed_bytes(made, 2, MODEL, 0)
    assert obstacle(made, MODEL, most, 0) is None
    found = obstacle(made, MODEL, most - 1, 0)
    assert found is not None
    assert re.match(r"rank 2: needs .* GB under the plan of epoch 4, its device has", found)


@pytest.mark.parametrize("tokens", [0, TOKENS])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_capacity_agrees_with_what_is_needed(schedule: str, tokens: int) -> None:
    made = plan(grid(tp=2, pp=4), schedule=schedule)
    for stage in range(4):
        post = StageSetup(stage=stage, stages=4, tp=2, schedule=schedule, micro_batches=8)
        needed = needed_bytes(made, 2 * stage, MODEL, tokens)
        assert capacity(MODEL, post, needed, tokens) == 2
        assert capacity(MODEL, post, needed - 1, tokens) == 1


def test_the_smallest_degree_is_the_first_that_can_hold_a_layer_in_each_chunk() -> None:
    post = StageSetup(stage=1, stages=4, tp=4, micro_batches=8)
    one_layer = [needed_bytes(plan(Layout.uniform(tp=k, pp=8, dp=1, layers=8)), k, MODEL, 0) for k in (1, 2, 4)]
    assert [smallest_degree(MODEL, post, memory, 0) for memory in one_layer] == [1, 2, 4]
    assert smallest_degree(MODEL, post, one_layer[2] - 1, 0) == 5
    assert smallest_degree(MODEL, post, None, 0) == 1
    two_chunks = msgspec.structs.replace(post, chunks=2)
    norm = STATE_BYTES["fp32"] * MODEL.hidden  # which is not cut
    assert smallest_degree(MODEL, two_chunks, one_layer[0] + norm, 0) == 2
    assert smallest_degree(MODEL, two_chunks, one_layer[0], 0) == 4


def test_under_zero_1_replicas_share_twelve_of_sixteen_bytes() -> None:
    assert [zero_1(replicas) for replicas in (1, 2, 4, 12, 128)] == [16, 10, 7, 5, 5]


def test_bf16_takes_eighteen_bytes_a_parameter_and_half_the_activations_but_for_the_loss() -> None:
    half = msgspec.structs.replace(MODEL, precision="bf16")
    made, first, last = plan(grid(pp=4)), 0, 3
    assert needed_bytes(made, first, half, 0) * 16 == needed_bytes(made, first, MODEL, 0) * 18
    once_more = TOKENS * MODEL.hidden * 4  # attention document by document, which is for fp32
    for rank, alive, unchanged in ((first, 4, TOKENS * 2 * 8), (last, 1, TOKENS * 4 * MODEL.vocab_rows)):
        full = activations(grid(pp=4), rank) - unchanged - alive * 2 * once_more
        assert needed_bytes(made, rank, half, TOKENS) - needed_bytes(made, rank, half, 0) == full / 2 + unchanged
    most = needed_bytes(made, first, half, TOKENS)
    assert obstacle(made, half, most, TOKENS) is None
    assert obstacle(made, half, most - 1, TOKENS) is not None
    post = StageSetup(stage=1, stages=4, tp=1, micro_batches=8)
    enough = needed_bytes(made, 1, half, TOKENS)
    assert (capacity(half, post, enough, TOKENS), capacity(half, post, enough - 1, TOKENS)) == (2, 1)


def test_a_model_of_an_old_journal_is_of_fp32() -> None:
    old = msgspec.to_builtins(MODEL)
    del old["precision"]
    assert msgspec.convert(old, ModelSpec) == MODEL
