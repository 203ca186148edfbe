"""Programs: pieces between unequal degrees, buckets, communicators, and one order that all ranks obey."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.ownership import ParameterSpec, owner_sets, size_of
from resihp.parallelism.plan import Plan
from resihp.pipeline.parts import depths
from resihp.pipeline.program import (
    WORLD_GROUP,
    Bucket,
    Compute,
    GroupSpec,
    Instruction,
    Reduce,
    TensorRange,
    Transmit,
    buckets,
    edge_of,
    memberships,
    mirrored,
    pieces_between,
    programs,
    sums_of,
    tensor_of,
)
from tests.resihp.pipeline.plans import model, random_plan


def written(program: tuple[Instruction, ...]) -> str:
    """F3 for a computation, f3 and b3 for a parcel, r0 for a sum."""
    words = []
    for entry in program:
        if isinstance(entry, Compute):
            words.append(f"{entry.primitive.kind}{entry.primitive.micro_batch}")
        elif isinstance(entry, Transmit):
            words.append(f"{entry.parcel.direction[0]}{entry.parcel.micro_batch}")
        else:
            words.append(f"r{entry.bucket}")
    return " ".join(words)


UNEQUAL = Layout(
    replicas=(
        Replica((Stage((0, 1), ((0, 1),)), Stage((2,), ((2, 3),)))),
        Replica((Stage((3,), ((0, 1),)), Stage((4,), ((2, 3),)))),
    ),
    standby=(5,),
)


def test_programs_by_hand() -> None:
    plan = Plan(epoch=1, layout=UNEQUAL, assignment=((0, 1), (2,)))
    cut = buckets(UNEQUAL, model(4))
    assert [bucket.owners for bucket in cut] == [(2, 4), (0, 3), (1, 3)]
    found = programs(plan, cut)
    assert {rank: written(program) for rank, program in found.items()} == {
        0: "F0 f0 F1 f1 b0 B0 b1 B1 r1",
        1: "F0 f0 F1 f1 b0 B0 b1 B1 r2",
        2: "f0 F0 f1 B0 b0 F1 B1 b1 r0",
        3: "F2 f2 b2 B2 r1 r2",
        4: "f2 F2 B2 b2 r0",
    }
    assert memberships(plan, found, cut) == (
        GroupSpec("world", (0, 1, 2, 3, 4)),
        GroupSpec("group/0-1", (0, 1), "tensor"),
        GroupSpec("forward/0-2", (0, 2), "edge"),
        GroupSpec("forward/1-2", (1, 2), "edge"),
        GroupSpec("forward/3-4", (3, 4), "edge"),
        GroupSpec("backward/2-0", (2, 0), "edge"),
        GroupSpec("backward/2-1", (2, 1), "edge"),
        GroupSpec("backward/4-3", (4, 3), "edge"),
        GroupSpec("group/0-3", (0, 3)),
        GroupSpec("group/1-3", (1, 3)),
        GroupSpec("group/2-4", (2, 4)),
    )
    sent = [entry.parcel for entry in found[2] if isinstance(entry, Transmit)]
    assert sent[0].pieces == (TensorRange(0, 2, 0, 1, 2), TensorRange(1, 2, 1, 2, 2))
    assert not sent[0].gathered
    assert sent[2].direction == "backward"
    assert sent[2].pieces == (TensorRange(2, 0, 0, 1, 2), TensorRange(2, 1, 1, 2, 2))
    assert sent[2].gathered


def test_a_rank_without_micro_batches_still_sums() -> None:
    plan = Plan(epoch=1, layout=UNEQUAL, assignment=((0, 1), ()))
    found = programs(plan, buckets(UNEQUAL, model(4)))
    assert (written(found[3]), written(found[4])) == ("r1 r2", "r0")
    assert set(programs(plan)) == {0, 1, 2, 3, 4}


def test_stages_of_equal_degree_send_whole_tensors_to_counterparts() -> None:
    assert pieces_between((4, 5), (2, 3), sequence_parallel=False) == (
        TensorRange(4, 2, 0, 1, 1),
        TensorRange(5, 3, 0, 1, 1),
    )
    assert pieces_between((4, 5), (2, 3), sequence_parallel=True) == (
        TensorRange(4, 2, 0, 1, 2),
        TensorRange(5, 3, 1, 2, 2),
    )


@pytest.mark.parametrize("up", range(1, 7))
@pytest.mark.parametrize("down", range(1, 7))
@pytest.mark.parametrize("split", [False, True])
def test_pieces_bring_every_element_once_in_one_piece_a_pair(up: int, down: int, split: bool) -> None:
    senders, receivers = tuple(range(up)), tuple(range(10, 10 + down))
    pieces = pieces_between(senders, receivers, sequence_parallel=split)
    assert {piece.sender for piece in pieces} == set(senders)
    assert {piece.receiver for piece in pieces} == set(receivers)
    assert len({(piece.sender, piece.receiver) for piece in pieces}) == len(pieces)
    if up == down and not split:
        return
    assert sum(Fraction(piece.stop - piece.start, piece.of) for piece in pieces) == 1
    for piece in pieces:
        start, stop = Fraction(piece.start, piece.of), Fraction(piece.stop, piece.of)
        assert Fraction(piece.sender, up) <= start < stop <= Fraction(piece.sender + 1, up)
        assert Fraction(piece.receiver - 10, down) <= start < stop <= Fraction(piece.receiver - 9, down)
    assert mirrored(mirrored(pieces)) == pieces
    assert {(p.receiver, p.sender, p.start, p.stop) for p in mirrored(pieces)} == {
        (p.sender, p.receiver, p.start, p.stop) for p in pieces
    }


def test_every_slice_of_several_owners_is_in_one_bucket_of_these_owners() -> None:
    for seed in range(200):
        plan, specs = random_plan(random.Random(seed))
        cut = buckets(plan.layout, specs, bucket_bytes=1500)
        by_name = {spec.name: spec for spec in specs}
        expected = Counter(
            (entry.owners, piece)
            for entry in owner_sets(plan.layout, specs)
            if len(entry.owners) > 1
            for piece in entry.slices
        )
        assert Counter((bucket.owners, piece) for bucket in cut for piece in bucket.slices) == expected
        places = {rank: (place.replica, place.stage) for rank, place in plan.layout.places()}
        for bucket in cut:
            assert bucket.slices
            assert set(bucket.units) == {unit for piece in bucket.slices for unit in by_name[piece.name].units}
            size = 4 * sum(size_of(by_name[piece.name], piece) for piece in bucket.slices)
            assert size <= 1500 or len(bucket.slices) == 1
            for owner in bucket.owners:  # no gradient waits for a chunk that it does not come from
                needed = list(depths(plan.layout, *places[owner], bucket.units))
                for piece in bucket.slices:
                    assert list(depths(plan.layout, *places[owner], by_name[piece.name].units)) == needed


def test_buckets_begin_with_the_models_last_parameters() -> None:
    layout = Layout.uniform(tp=1, pp=1, dp=2, layers=4, chunks=2)
    found = buckets(layout, model(4), bucket_bytes=1 << 20)
    assert [bucket.units for bucket in found] == [
        ("head", "final", "layer.3", "layer.2"),
        ("layer.1", "layer.0", "embedding"),
    ]
    smaller = buckets(layout, model(4), bucket_bytes=2500)
    assert len(smaller) > 2
    names = [piece.name for bucket in smaller for piece in bucket.slices]
    assert names == [spec.name for spec in reversed(model(4))]


def test_a_tied_parameter_waits_for_both_of_its_units() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=2)
    (tied,) = (bucket for bucket in buckets(layout, model(2, tied=True)) if len(bucket.owners) == 4)
    assert tied.units == ("embedding", "head")
    assert [depths(layout, 0, stage, tied.units) for stage in (0, 1)] == [{0: 0}, {0: 1}]
    (one,) = buckets(Layout.uniform(tp=2, pp=1, dp=1, layers=2), (ParameterSpec("n", "layer.1", (8,), partial=True),))
    assert one.owners == (0, 1)
    assert buckets(Layout.uniform(tp=2, pp=2, dp=1, layers=2), model(2)) == ()


def test_sums_over_all_ranks_use_the_communicator_of_all() -> None:
    layout = Layout.uniform(tp=1, pp=1, dp=3, layers=2)
    plan = Plan(epoch=1, layout=layout, assignment=((0,), (1,), (2,)))
    cut = buckets(layout, model(2))
    assert memberships(plan, programs(plan, cut), cut) == (GroupSpec("world", (0, 1, 2)),)
    assert sums_of((2, 0, 1), (0, 1, 2)) == "world"
    assert sums_of((2, 0), (0, 1, 2)) == "group/2-0"
    assert tensor_of((0, 2, 1), (0, 1, 2)) == "group/0-2-1"
    alone = Plan(epoch=1, layout=Layout.uniform(tp=1, pp=1, dp=1, layers=2), assignment=((0,),))
    assert memberships(alone, programs(alone)) == ()


def test_ranks_that_do_several_things_together_have_one_communicator_for_all() -> None:
    """A stage whose ranks also sum what sequence parallelism gives each a part of; the only stage there is."""
    parts = model(2, partial=True)
    edges = ("forward/0-2", "forward/1-3", "backward/2-0", "backward/3-1")
    for pp, expected in ((2, ("world", "group/0-1", "group/2-3", *edges)), (1, ("world",))):
        layout = Layout.uniform(tp=2, pp=pp, dp=1, layers=2)
        plan = Plan(epoch=1, layout=layout, assignment=((0,),), sequence_parallel=True)
        cut = buckets(layout, parts)
        assert cut
        found = memberships(plan, programs(plan, cut), cut)
        assert tuple(group.name for group in found) == expected
        assert {group.name for group in found if group.use == "tensor"} == set(expected[1 : 1 + pp] or expected)


def test_all_ranks_obey_one_order() -> None:
    """The ranks' communications, tensor-parallel computations included, are parts of one list without a circle."""
    for seed in range(150):
        plan, specs = random_plan(random.Random(seed))
        cut = buckets(plan.layout, specs, bucket_bytes=1500)
        found = programs(plan, cut)
        after: dict[object, set[object]] = {}
        for rank, program in found.items():
            place = plan.layout.place(rank)
            assert place is not None
            events: list[object] = [
                (place.replica, place.stage, entry)
                if isinstance(entry, Compute)
                else (entry.parcel.direction, entry.parcel.micro_batch, entry.parcel.boundary)
                if isinstance(entry, Transmit)
                else entry
                for entry in program
            ]
            for event, then in itertools.pairwise(events):
                after.setdefault(event, set()).add(then)
                after.setdefault(then, set())
        entering = Counter(then for others in after.values() for then in others)
        free = [event for event in after if not entering[event]]
        passed = 0
        while free:
            passed += 1
            for then in after[free.pop()]:
                entering[then] -= 1
                if not entering[then]:
                    free.append(then)
        assert passed == len(after)


def test_every_communication_has_a_communicator() -> None:
    for seed in range(200):
        plan, specs = random_plan(random.Random(seed))
        cut: tuple[Bucket, ...] = buckets(plan.layout, specs, bucket_bytes=1500)
        found = programs(plan, cut)
        known = {membership.name: membership.ranks for membership in memberships(plan, found, cut)}
        assert len(known) == len(memberships(plan, found, cut))
        for rank, program in found.items():
            for entry in program:
                if isinstance(entry, Transmit):
                    for piece in entry.parcel.pieces:
                        pair = (piece.sender, piece.receiver)
                        assert known[edge_of(entry.parcel.direction, *pair)] == pair
                elif isinstance(entry, Reduce):
                    owners = cut[entry.bucket].owners
                    name = sums_of(owners, plan.layout.active)
                    assert known[name] == (plan.layout.active if name == WORLD_GROUP else owners)
                    assert rank in owners
