"""Layouts: Megatron's grid, what makes a layout valid, what is left after a loss, and when two are the same."""

from __future__ import annotations

import msgspec
import pytest

from resihp.errors import LayoutError, UsageError
from resihp.parallelism.layout import Layout, Place, Replica, Stage, validate
from resihp.parallelism.model import ModelSpec

MODEL = ModelSpec(layers=8, hidden=64, heads=8, kv_groups=4, ffn_hidden=256, vocab=512, sequence=128)


def pipeline(*stages: tuple[tuple[int, ...], tuple[int, int]]) -> Replica:
    """One chunk per stage: (ranks, (first layer, last layer))."""
    return Replica(stages=tuple(Stage(ranks=ranks, chunks=(span,)) for ranks, span in stages))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_uniform_is_megatrons_grid(tp: int, pp: int, dp: int) -> None:
    layout = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=8)
    validate(layout, MODEL)
    for rank, place in layout.places():
        assert rank == (place.replica * pp + place.stage) * tp + place.t
    assert layout.active == tuple(range(tp * pp * dp))
    assert layout.ranks == layout.active


@pytest.mark.parametrize(("layers", "pp"), [(8, 1), (8, 2), (8, 3), (8, 5), (8, 8), (61, 16)])
def test_uniform_spreads_layers_evenly_the_remainder_to_the_first(layers: int, pp: int) -> None:
    stages = Layout.uniform(tp=1, pp=pp, dp=1, layers=layers).replicas[0].stages
    counts = [len(stage.layers) for stage in stages]
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("degrees", [{"tp": 0}, {"pp": 0}, {"dp": 0}, {"tp": -1}])
def test_uniform_refuses_a_degree_below_one(degrees: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="every degree must be at least 1"):
        Layout.uniform(**{"tp": 1, "pp": 1, "dp": 1, **degrees}, layers=8)


def test_uniform_refuses_more_stages_than_layers_and_says_what_to_type() -> None:
    with pytest.raises(LayoutError, match=r"pp=9.*only 8 layers.*--pp 8"):
        Layout.uniform(tp=1, pp=9, dp=1, layers=8)


def test_places_and_stages_of_ranks() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=2, layers=8, standby=(8,))
    assert layout.place(0) == Place(0, 0, 0)
    assert layout.place(7) == Place(1, 1, 1)
    assert layout.stage_of(6) == Stage(ranks=(6, 7), chunks=((4, 7),))
    assert layout.place(8) is None
    assert layout.stage_of(8) is None
    assert layout.place(99) is None
    assert layout.ranks == (0, 1, 2, 3, 4, 5, 6, 7, 8)


def test_virtual_stages_pass_all_first_chunks_before_all_second() -> None:
    replica = Replica(
        stages=(
            Stage(ranks=(0,), chunks=((0, 1), (5, 6))),
            Stage(ranks=(1,), chunks=((2, 3), (7, 7))),
            Stage(ranks=(2,), chunks=((4, 4),)),
        )
    )
    assert replica.virtual_stages == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
    validate(Layout(replicas=(replica,)), MODEL)


def test_a_micro_batch_passes_in_the_order_of_layers_wherever_they_are() -> None:
    bent = Replica((Stage((0,), ((0, 1), (6, 7))), Stage((1,), ((2, 3), (4, 5)))))
    validate(Layout(replicas=(bent,)), MODEL)
    assert bent.virtual_stages == ((0, 0), (1, 0), (1, 1), (0, 1))


def test_replicas_may_differ_in_shape() -> None:
    wide = pipeline(((0, 1), (0, 3)), ((2,), (4, 7)))
    flat = pipeline(((3, 4, 5, 6), (0, 7)))
    layout = Layout(replicas=(wide, flat), standby=(7,))
    validate(layout, MODEL)
    assert layout.describe() == "TP2,1 | TP4 + 1 standby"


WHOLE = pipeline(((0, 1), (0, 3)), ((2, 3), (4, 7)))

INVALID = [
    (Layout(replicas=()), "no replica"),
    (Layout(replicas=(Replica(stages=()),)), r"replica 0: no stage"),
    (Layout(replicas=(WHOLE, pipeline(((3, 4), (0, 7))))), r"rank 3 stands in two places"),
    (Layout(replicas=(WHOLE,), standby=(1,)), r"rank 1 stands in two places"),
    (Layout(replicas=(WHOLE,), standby=(5, 5)), r"rank 5 stands in two places"),
    (Layout(replicas=(WHOLE,), standby=(-2,)), r"rank -2 is negative"),
    (Layout(replicas=(WHOLE, pipeline(((4,), (0, 3)), ((5,), (5, 7))))), r"replica 1: layers \[0, 1, 2, 3, 5, 6, 7\]"),
    (Layout(replicas=(pipeline(((0,), (0, 4)), ((1,), (4, 7))),)), r"replica 0: layers"),
    (Layout(replicas=(pipeline(((0,), (0, 8))),)), r"replica 0: layers.*0 to 7"),
    (
        Layout(replicas=(pipeline(((0,), (0, 3)), ((), (4, 7))),)),
        r"replica 0 stage 1: no rank, and no other replica holds",
    ),
    (
        Layout(replicas=(WHOLE, pipeline(((4,), (0, 7)), ((5,), (8, 7))))),
        r"replica 1 stage 1: empty layer chunk",
    ),
    (
        Layout(replicas=(Replica(stages=(Stage((0,), ((0, 7),)), Stage((1,), ()))),)),
        r"replica 0 stage 1: empty layer chunk",
    ),
    (
        Layout(replicas=(pipeline(((0, 1, 2), (0, 7))),)),
        r"replica 0 stage 0: 8 attention heads cannot be divided by tensor-parallel degree 3",
    ),
    (
        Layout(replicas=(pipeline((tuple(range(8)), (0, 7))),)),
        r"replica 0 stage 0: 4 query groups cannot be divided by tensor-parallel degree 8",
    ),
]


@pytest.mark.parametrize(("layout", "culprit"), INVALID, ids=[culprit[:30] for _, culprit in INVALID])
def test_validation_names_the_culprit(layout: Layout, culprit: str) -> None:
    with pytest.raises(LayoutError, match=culprit) as caught:
        validate(layout, MODEL)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(("field", "name"), [("vocab", "vocabulary rows"), ("ffn_hidden", "MLP width")])
def test_validation_names_the_tensor_that_does_not_divide(field: str, name: str) -> None:
    model = msgspec.structs.replace(MODEL, **{field: 514})
    with pytest.raises(LayoutError, match=f"514 {name} cannot be divided by tensor-parallel degree 4"):
        validate(Layout.uniform(tp=4, pp=1, dp=1, layers=8), model)


def test_without_drops_whole_replicas_and_keeps_their_survivors_as_standby() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=3, layers=8, standby=(12,))
    left = layout.without(frozenset({5}))
    assert left.replicas == (layout.replicas[0], layout.replicas[2])
    assert left.standby == (4, 6, 7, 12)
    assert left.ranks == tuple(rank for rank in layout.ranks if rank != 5)
    validate(left, MODEL)


def test_without_a_standby_rank_keeps_every_replica() -> None:
    layout = Layout.uniform(tp=2, pp=1, dp=2, layers=8, standby=(4, 5))
    left = layout.without(frozenset({4}))
    assert left.replicas == layout.replicas
    assert left.standby == (5,)


def test_without_nothing_is_the_same_layout() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=8, standby=(4, 5))
    assert layout.without(frozenset()) == layout
    assert layout.without(frozenset({99})) == layout


def test_without_one_of_each_replica_leaves_standby_alone() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=8)
    left = layout.without(frozenset({0, 3}))
    assert left.replicas == ()
    assert left.standby == (1, 2)
    assert left.describe() == "no replica + 2 standby"


def test_without_is_the_same_at_once_or_one_after_the_other() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=4, layers=8, standby=(16,))
    at_once = layout.without(frozenset({1, 9, 16}))
    assert at_once == layout.without(frozenset({1})).without(frozenset({16})).without(frozenset({9}))


def test_digest_is_of_the_content_and_does_not_change_between_versions() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=2, layers=8, standby=(8,))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
    assert again == layout
    assert again.digest == layout.digest
    assert layout.digest == "853fc008ba4e72f1ee147e780624b5e7ae04574e20213f6859c3de24a022a6ab"


def test_digest_tells_any_difference() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=2, layers=8, standby=(8,))
    others = [
        Layout.uniform(tp=2, pp=2, dp=2, layers=8),
        Layout.uniform(tp=2, pp=2, dp=2, layers=9, standby=(8,)),
        Layout.uniform(tp=1, pp=4, dp=2, layers=8, standby=(8,)),
        Layout(replicas=layout.replicas[::-1], standby=(8,)),
        Layout(replicas=layout.replicas, standby=(9,)),
    ]
    assert len({layout.digest, *(other.digest for other in others)}) == len(others) + 1


def test_describe_is_short() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=3, layers=8)
    assert layout.describe() == "DP3 x PP2 x TP2"
    assert layout.without(frozenset({0})).describe() == "DP2 x PP2 x TP2 + 3 standby"


# --- stages without ranks -----------------------------------------------------------------------------------------

CROSSED = Layout(
    replicas=(
        pipeline(((0,), (0, 3)), ((), (4, 7))),
        pipeline(((), (0, 3)), ((3,), (4, 7))),
    ),
    standby=(4,),
)
"""Each replica lacks what the other one has."""


def test_a_stage_without_ranks_is_part_of_a_layout_where_another_replica_holds_its_layers() -> None:
    validate(CROSSED, MODEL)
    assert CROSSED.vacant == ((0, 1), (1, 0))
    assert (CROSSED.active, CROSSED.hosts((4, 7)), CROSSED.hosts((0, 7))) == ((0, 3), (1,), ())
    assert not Layout.uniform(tp=1, pp=2, dp=2, layers=8).vacant


@pytest.mark.parametrize(
    ("other", "culprit"),
    [
        (
            pipeline(((2,), (0, 7))),
            r"replica 0 stage 1: no rank, and no other replica holds layers 4 to 7 in one",
        ),
        (pipeline(((2,), (0, 3)), ((), (4, 7))), r"replica 0 stage 1: no rank, and no other replica holds layers 4"),
    ],
)
def test_layers_that_nobody_holds_in_one_chunk_cannot_lack_ranks(other: Replica, culprit: str) -> None:
    with pytest.raises(LayoutError, match=culprit):
        validate(Layout((CROSSED.replicas[0], other)), MODEL)


def test_a_replica_without_any_rank_is_none() -> None:
    with pytest.raises(LayoutError, match="replica 1: no rank"):
        validate(Layout((WHOLE, pipeline(((), (0, 3)), ((), (4, 7))))), MODEL)


def test_replicas_with_a_stage_without_ranks_are_not_whole() -> None:
    whole = Layout((*CROSSED.replicas, pipeline(((5,), (0, 3)), ((6,), (4, 7)))), (4,))
    assert whole.without(frozenset()) == Layout((whole.replicas[2],), (0, 3, 4))


def test_a_copy_of_the_model_takes_from_others_what_a_replica_lacks() -> None:
    assert CROSSED.model_copy(0) == pipeline(((0,), (0, 3)), ((3,), (4, 7)))
    assert CROSSED.model_copy(1) == pipeline(((3,), (4, 7)), ((0,), (0, 3)))
    two_chunks = Layout(
        (
            Replica((Stage((0,), ((0, 1), (4, 5))), Stage((), ((2, 3), (6, 7))))),
            Replica((Stage((1,), ((0, 1), (2, 3))), Stage((2,), ((4, 5), (6, 7))))),
        )
    )
    assert two_chunks.model_copy(0).ranks == (0, 1, 2)
    assert two_chunks.model_copy(1) == two_chunks.replicas[1]
    host = Replica((Stage((5,), ((0, 1), (2, 3))), Stage((6,), ((4, 7),))))
    lacks_both = Layout((pipeline(((), (0, 1)), ((), (2, 3)), ((4,), (4, 7))), host))
    assert lacks_both.model_copy(0).ranks == (4, 5), "each once"
