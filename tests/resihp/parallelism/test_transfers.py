"""Transfers: whatever follows whatever, everybody ends with what they need, and nothing is sent that need not be."""

from __future__ import annotations

import itertools
from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import LayoutError
from resihp.parallelism import transfers
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.ownership import ParameterSpec, Slice, holders, share, size_of
from resihp.parallelism.transfers import STATE_TENSORS, Base, Move, bytes_of, missing, moves, sole_holders

LAYERS = 5
RANKS = 24


def parameters(tied: bool) -> tuple[ParameterSpec, ...]:
    return (
        ParameterSpec("words", "embedding", (24, 2), 0, tied="head" if tied else None),
        *(
            spec
            for i in range(LAYERS)
            for spec in (
                ParameterSpec(f"layers.{i}.norm", f"layer.{i}", (3,)),
                ParameterSpec(f"layers.{i}.fc1", f"layer.{i}", (24, 2), 0, 2),
                ParameterSpec(f"layers.{i}.fc2", f"layer.{i}", (2, 12), 1),
            )
        ),
        ParameterSpec("last_norm", "final", (3,)),
        *(() if tied else (ParameterSpec("output", "head", (24, 2), 0),)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ranks = iter(draw(st.permutations(range(RANKS))))
    replicas = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=1)))
        bounds = [0, *cuts, LAYERS]
        stages = [
            Stage(tuple(itertools.islice(ranks, draw(st.sampled_from([1, 2, 3, 4])))), ((first, after - 1),))
            for first, after in itertools.pairwise(bounds)
        ]
        if len(stages) == 2 and cuts[0] > 1 and draw(st.booleans()):  # a second chunk of the first stage
            first, second = stages
            stages = [Stage(first.ranks, ((0, cuts[0] - 2), (LAYERS - 1, LAYERS - 1)))]
            stages.append(Stage(second.ranks, ((cuts[0] - 1, LAYERS - 2),)))
        replicas.append(Replica(tuple(stages)))
    return Layout(tuple(replicas))


@st.composite
def transitions(draw: st.DrawFn) -> tuple[Base, Layout, dict[int, str], tuple[ParameterSpec, ...]]:
    old, new = draw(layouts()), draw(layouts())
    lost = draw(st.sets(st.sampled_from(old.active), max_size=4))
    nodes = {rank: f"n{draw(st.integers(1, 3))}" for rank in range(RANKS)}
    base = Base(epoch=1, layout=old, survivors=tuple(rank for rank in old.active if rank not in lost))
    return base, new, nodes, parameters(draw(st.booleans()))


Held = dict[int, dict[str, set[int]]]


def rows(layout: Layout, specs: tuple[ParameterSpec, ...]) -> Held:
    """Rows of each parameter that each rank holds (a parameter that is not cut has one)."""
    held: Held = defaultdict(lambda: defaultdict(set))
    for spec in specs:
        for stage in holders(layout, spec):
            for t, rank in enumerate(stage.ranks):
                mine = share(spec, t, stage.tp)
                held[rank][spec.name] |= set(range(mine.start, mine.stop))
    return held


def carried_out(
    base: Base, layout: Layout, specs: tuple[ParameterSpec, ...], nodes: dict[int, str]
) -> tuple[Move, ...] | None:
    """The moves, or None if state was lost: the same as what `missing` says of what the new layout needs (all)."""
    reason = missing(base, specs)
    if reason is None:
        return moves(base, layout, specs, nodes)
    with pytest.raises(LayoutError) as caught:
        moves(base, layout, specs, nodes)
    assert "was lost with rank" in str(caught.value)
    return None


@settings(max_examples=150)
@given(transitions())
def test_everybody_ends_with_what_they_need_and_got_nothing_twice(
    transition: tuple[Base, Layout, dict[int, str], tuple[ParameterSpec, ...]],
) -> None:
    base, layout, nodes, specs = transition
    sent = carried_out(base, layout, specs, nodes)
    if sent is None:
        return
    survivors = set(base.survivors)
    before = {rank: held for rank, held in rows(base.layout, specs).items() if rank in survivors}
    needed = rows(layout, specs)
    got: Held = defaultdict(lambda: defaultdict(set))
    for move in sent:
        assert move.source in survivors
        assert move.source != move.target
        for piece in move.slices:
            part = set(range(piece.start, piece.stop))
            assert part <= before[move.source][piece.name]
            assert part <= needed[move.target][piece.name]
            assert not part & got[move.target][piece.name]
            assert not part & before.get(move.target, {}).get(piece.name, set())
            got[move.target][piece.name] |= part
    for rank, wanted in needed.items():
        for name, part in wanted.items():
            assert part <= before.get(rank, {}).get(name, set()) | got[rank][name]
    assert len({(move.source, move.target) for move in sent}) == len(sent)


@settings(max_examples=150)
@given(transitions())
def test_bytes_are_what_is_needed_less_what_is_held(
    transition: tuple[Base, Layout, dict[int, str], tuple[ParameterSpec, ...]],
) -> None:
    base, layout, nodes, specs = transition
    sent = carried_out(base, layout, specs, nodes)
    if sent is None:
        return
    before = rows(base.layout, specs)
    least = Fraction(0)
    for rank, wanted in rows(layout, specs).items():
        for spec in specs:
            held = before[rank][spec.name] if rank in base.survivors else set()
            least += Fraction(spec.elements, spec.extent) * len(wanted[spec.name] - held)
    names = {spec.name: spec for spec in specs}
    assert sum(bytes_of(move, names, element=2) for move in sent) == least * STATE_TENSORS * 2


@settings(max_examples=150)
@given(transitions())
def test_another_node_sends_only_what_no_rank_of_the_same_node_holds(
    transition: tuple[Base, Layout, dict[int, str], tuple[ParameterSpec, ...]],
) -> None:
    base, layout, nodes, specs = transition
    sent = carried_out(base, layout, specs, nodes)
    before = rows(base.layout, specs)
    for move in sent or ():
        if nodes[move.source] == nodes[move.target]:
            continue
        for piece in move.slices:
            for rank in base.survivors:
                near = nodes[rank] == nodes[move.target]
                assert not (near and set(range(piece.start, piece.stop)) <= before[rank][piece.name])


@settings(max_examples=100)
@given(transitions())
def test_state_is_missing_exactly_where_no_survivor_holds_it(
    transition: tuple[Base, Layout, dict[int, str], tuple[ParameterSpec, ...]],
) -> None:
    base, layout, nodes, specs = transition
    before = rows(base.layout, specs)
    whole = all(
        set(range(spec.extent)) <= set().union(*(before[rank][spec.name] for rank in base.survivors)) for spec in specs
    )
    assert (missing(base, specs) is None) == whole
    carried_out(base, layout, specs, nodes)


@settings(max_examples=100)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_equally_near_holders_share_the_load(holding: int, asking: int, count: int, near: bool) -> None:
    """Two holders of everything never differ by more than the largest slice."""
    specs = tuple(ParameterSpec(f"layers.{i}.w", f"layer.{i}", (2 + i % 3, 4), 0) for i in range(count))
    span = ((0, count - 1),)
    old = Layout(tuple(Replica((Stage((rank,), span),)) for rank in range(holding)))
    new = Layout(tuple(Replica((Stage((holding + rank,), span),)) for rank in range(asking)))
    nodes = {rank: "n1" if near or rank < holding else "n2" for rank in range(holding + asking)}
    sent: dict[int, int] = dict.fromkeys(range(holding), 0)
    for move in moves(Base(epoch=1, layout=old, survivors=tuple(range(holding))), new, specs, nodes):
        sent[move.source] += sum(size_of(specs[int(s.name.split(".")[1])], s) for s in move.slices)
    assert sum(sent.values()) == asking * sum(spec.elements for spec in specs)
    assert max(sent.values()) - min(sent.values()) <= max(spec.elements for spec in specs)


def test_nothing_moves_where_nothing_changes() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=2, layers=LAYERS)
    base = Base(epoch=1, layout=layout, survivors=layout.active)
    assert moves(base, layout, parameters(False), dict.fromkeys(range(8), "n1")) == ()


def test_what_nothing_changes_for_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of replicas, few lose a rank."""
    looked_at = 0

    def counted(spec: ParameterSpec, t: int, tp: int) -> Slice:
        nonlocal looked_at
        looked_at += 1
        return share(spec, t, tp)

    monkeypatch.setattr(transfers, "share", counted)
    old = Layout.uniform(tp=4, pp=1, dp=50, layers=LAYERS)
    smaller = Replica((Stage(old.replicas[0].stages[0].ranks[:2], old.replicas[0].stages[0].chunks),))
    new = Layout((smaller, *old.replicas[1:]))
    specs = parameters(tied=False)
    base = Base(epoch=1, layout=old, survivors=tuple(rank for rank in old.active if rank not in (2, 3)))
    found = moves(base, new, specs, dict.fromkeys(old.active, "n1"))
    assert {move.target for move in found} == {0, 1}
    assert looked_at < 2 * len(old.active) * len(specs)
    looked_at = 0
    assert missing(base, specs) is None
    assert looked_at < 20 * len(specs)


def test_a_group_that_shrinks_sends_only_the_halves_that_are_new() -> None:
    """TP4 to TP2 after rank 1 died: rank 0 lacks its quarter, which the other replica has; rank 2 gets rank 3's."""
    specs = (ParameterSpec("w", "layer.0", (8, 1), 0),)
    old = Layout((Replica((Stage((0, 1, 2, 3), ((0, 0),)),)), Replica((Stage((4, 5, 6, 7), ((0, 0),)),))))
    new = Layout((Replica((Stage((0, 2), ((0, 0),)),)), old.replicas[1]), (3,))
    nodes = {rank: "n1" if rank < 4 else "n2" for rank in range(8)}
    sent = moves(Base(epoch=1, layout=old, survivors=(0, 2, 3, 4, 5, 6, 7)), new, specs, nodes)
    assert sent == (Move(3, 2, (Slice("w", 6, 8),)), Move(5, 0, (Slice("w", 2, 4),)))


def test_lost_state_is_named_with_those_who_held_it() -> None:
    layout = Layout.uniform(tp=2, pp=1, dp=2, layers=LAYERS)
    base = Base(epoch=3, layout=layout, survivors=(0, 2))
    expected = r"the state of words, rows 12 to 23 was lost with ranks 1, 3"
    assert missing(base, parameters(False)) == expected
    with pytest.raises(LayoutError, match=expected):
        moves(base, Layout((Replica((Stage((0,), ((0, LAYERS - 1),)),)),)), parameters(False), {0: "n1", 2: "n1"})


@settings(max_examples=100)
@given(transitions())
def test_sole_holders_are_those_with_whom_state_would_be_lost(
    transition: tuple[Base, Layout, dict[int, str], tuple[ParameterSpec, ...]],
) -> None:
    base, _, _, specs = transition
    if missing(base, specs) is not None:
        return
    found = sole_holders(base, specs)
    for rank in base.survivors:
        less = Base(epoch=1, layout=base.layout, survivors=tuple(other for other in base.survivors if other != rank))
        lost = {unit for spec in specs if missing(less, (spec,)) is not None for unit in spec.units}
        assert found.get(rank, frozenset()) == lost
