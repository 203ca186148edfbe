"""Ownership: whatever the layout, every piece of every parameter is held, summed and counted as it must be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.ownership import (
    OwnerSet,
    ParameterSpec,
    Slice,
    counted,
    holder,
    owned,
    owner_sets,
    primary,
    share,
)

LAYERS = 6
EXTENT = 24


def model(layers: int = LAYERS) -> tuple[ParameterSpec, ...]:
    per_layer = [
        spec
        for i in range(layers)
        for spec in (
            ParameterSpec(f"layers.{i}.norm", f"layer.{i}", (8,)),
            ParameterSpec(f"layers.{i}.fc1", f"layer.{i}", (2 * EXTENT, 8), 0, 2),
            ParameterSpec(f"layers.{i}.fc2", f"layer.{i}", (8, EXTENT), 1),
        )
    ]
    return (
        ParameterSpec("words", "embedding", (EXTENT, 8), 0),
        *per_layer,
        ParameterSpec("last_norm", "final", (8,)),
        ParameterSpec("output", "head", (EXTENT, 8), 0),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ranks = iter(draw(st.permutations(range(64))))
    replicas = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=2)))
        bounds = [0, *cuts, LAYERS]
        stages = [
            Stage(
                ranks=tuple(next(ranks) for _ in range(draw(st.sampled_from([1, 2, 3, 4])))),
                chunks=((first, after - 1),),
            )
            for first, after in itertools.pairwise(bounds)
        ]
        replicas.append(Replica(tuple(stages)))
    return Layout(tuple(replicas))


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_slice_is_held_by_its_stage_summed_over_all_replicas_and_counted_once(layout: Layout) -> None:
    specs = model()
    held = owned(layout, specs)
    for spec in specs:
        for d in range(len(layout.replicas)):
            stage = holder(layout, d, spec.unit)
            for t, rank in enumerate(stage.ranks):
                mine = share(spec, t, stage.tp)
                pieces = [piece for piece in held[rank] if piece.name == spec.name]
                assert pieces[0].start == mine.start
                assert pieces[-1].stop == mine.stop
                assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    sets = owner_sets(layout, specs)
    assert len({entry.owners for entry in sets}) == len(sets)
    reached: set[tuple[int, Slice]] = set()
    for entry in sets:
        assert len(entry.owners) == len(layout.replicas)
        for d, rank in enumerate(entry.owners):
            assert rank in layout.replicas[d].ranks
            for piece in entry.slices:
                assert piece in held[rank]
                reached.add((rank, piece))
    assert reached == {(rank, piece) for rank, pieces in held.items() for piece in pieces}
    turns = [piece for pieces in counted(layout, specs).values() for piece in pieces]
    for spec in specs:
        pieces = sorted(piece for piece in turns if piece.name == spec.name)
        assert pieces[0].start == 0
        assert pieces[-1].stop == spec.extent
        assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    for rank, pieces in counted(layout, specs).items():
        assert not pieces or rank in layout.replicas[0].ranks


def test_a_uniform_layout_gives_megatrons_data_parallel_groups() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=2, layers=LAYERS)
    assert {entry.owners for entry in owner_sets(layout, model())} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    turns = counted(layout, model())
    assert Slice("layers.0.norm", 0, 1) in turns[0]
    assert Slice("layers.0.norm", 0, 1) not in turns[1]
    assert Slice("layers.0.fc2", 12, 24) in turns[1]


def test_unequal_degrees_share_pieces_at_the_finest_cut() -> None:
    layout = Layout((Replica((Stage((0, 1), ((0, 0),)),)), Replica((Stage((2,), ((0, 0),)),))))
    sets = owner_sets(layout, (ParameterSpec("w", "layer.0", (4, 4), 0), ParameterSpec("b", "layer.0", (4,))))
    assert sets == (
        OwnerSet((0, 2), (Slice("w", 0, 2), Slice("b", 0, 1))),
        OwnerSet((1, 2), (Slice("w", 2, 4), Slice("b", 0, 1))),
    )
    assert primary(sets[0].owners) == 0


def test_a_gated_parameter_is_cut_inside_each_part() -> None:
    spec = ParameterSpec("fc1", "layer.0", (16, 4), 0, 2)
    assert share(spec, 1, 2) == Slice("fc1", 4, 8)


def test_an_uneven_cut_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"parameter w: 1 x 6 rows cannot be cut for tensor-parallel degree 4"):
        share(ParameterSpec("w", "layer.0", (6, 4), 0), 0, 4)
