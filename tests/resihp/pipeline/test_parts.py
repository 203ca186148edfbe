"""Where a last backward is cut, and that sums begin between its parts."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.ownership import size_of
from resihp.parallelism.plan import Plan, Primitive, spread
from resihp.pipeline.checker import check
from resihp.pipeline.parts import MAX_PARTS, cuts, depths
from resihp.pipeline.program import Bucket, Compute, Instruction, Program, Reduce, buckets, programs
from tests.resihp.pipeline.plans import model, random_plan

WHOLE = 1 << 30
"""Bytes of buckets that hold everything."""


def layers_of(count: int) -> list[tuple[tuple[int, int], tuple[str, ...]]]:
    """A sum for each layer, over two ranks."""
    return [((0, 1), (f"layer.{layer}",)) for layer in range(count)]


def test_how_deep_a_backward_must_be_for_a_gradient() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=1, layers=8, chunks=2)
    assert layout.replicas[0].stages[0].chunks == ((0, 1), (4, 5))
    assert depths(layout, 0, 0, ("embedding",)) == {0: 0}
    assert depths(layout, 0, 0, ("layer.1", "layer.5", "layer.4")) == {0: 1, 1: 4}
    assert depths(layout, 0, 1, ("final", "head")) == {1: 7}
    assert depths(layout, 0, 1, ("layer.1",)) == {}


def test_a_chunk_is_cut_where_sums_can_begin_and_into_few_parts() -> None:
    def parts(layers: int, *sums: tuple[tuple[int, ...], tuple[str, ...]]) -> tuple[tuple[int, int], ...] | None:
        return cuts(Layout.uniform(tp=1, pp=1, dp=2, layers=layers), sums).get((0, 0, 0))

    assert parts(4, *layers_of(4)) == ((3, 3), (2, 2), (1, 1), (0, 0))
    assert parts(4, ((0, 1), ("layer.3", "layer.2")), ((0, 1), ("layer.1", "layer.0"))) == ((2, 3), (0, 1))
    assert parts(4, ((0, 1), ("head", "layer.3", "layer.2", "layer.1", "layer.0", "embedding"))) is None
    assert parts(4, ((0, 1), ("embedding", "head"))) is None, "a tied table is there when the embedding's gradient is"
    assert parts(4, ((0,), ("layer.3",))) is None
    many = parts(61, *layers_of(61))
    assert many is not None
    assert len(many) <= MAX_PARTS
    assert [layer for low, high in many for layer in range(high, low - 1, -1)] == list(range(60, -1, -1))


def test_where_nothing_is_gained_programs_are_uncut() -> None:
    for seed in range(100):
        plan, _ = random_plan(random.Random(seed))
        alone = msgspec.structs.replace(plan, layout=Layout(plan.layout.replicas[:1]), orders=(), migrations=())
        alone = msgspec.structs.replace(alone, assignment=spread(4, 1))
        if alone.schedule != "interleaved":
            assert not in_parts(programs(alone, buckets(alone.layout, model_of(alone), bucket_bytes=1000)))
    layout = Layout.uniform(tp=2, pp=2, dp=2, layers=8)
    plan = Plan(epoch=1, layout=layout, assignment=spread(8, 2))
    assert not in_parts(programs(plan, buckets(layout, model(8), bucket_bytes=WHOLE)))


def model_of(plan: Plan) -> tuple[object, ...]:
    return model(1 + max(last for stage in plan.layout.replicas[0].stages for _, last in stage.chunks))


def in_parts(found: dict[int, Program]) -> bool:
    return any(isinstance(entry, Compute) and entry.layers for program in found.values() for entry in program)


def test_most_bytes_are_under_way_before_the_last_part() -> None:
    """Without a pipeline: of eight alike layers all but the first one's sums begin inside the last backward."""
    layout = Layout.uniform(tp=1, pp=1, dp=2, layers=8)
    plan = Plan(epoch=1, layout=layout, assignment=spread(4, 2))
    specs = model(8)
    by_name = {spec.name: spec for spec in specs}
    cut = buckets(layout, specs, bucket_bytes=1000)
    for program in programs(plan, cut).values():
        last = max(i for i, entry in enumerate(program) if isinstance(entry, Compute))
        sizes = [sum(size_of(by_name[piece.name], piece) for piece in bucket.slices) for bucket in cut]
        early = sum(sizes[entry.bucket] for entry in program[:last] if isinstance(entry, Reduce))
        first = sum(spec.elements for spec in specs if spec.unit in ("layer.0", "embedding"))
        assert early >= sum(sizes) - first - max(sizes)
        assert early > 0.75 * sum(sizes)


def test_every_sum_begins_as_soon_as_its_last_owner_is_deep_enough() -> None:
    """On one rank at least of its owners, it stands right behind the part that completes it, but for communication."""
    counted = 0
    for seed in range(150):
        plan, specs = random_plan(random.Random(seed))
        cut = buckets(plan.layout, specs, bucket_bytes=1000)
        found = programs(plan, cut)
        places = {rank: (place.replica, place.stage) for rank, place in plan.layout.places()}
        for b, bucket in enumerate(cut):
            prompt = []
            for owner in bucket.owners:
                needed = depths(plan.layout, *places[owner], bucket.units)
                before = found[owner][: found[owner].index(Reduce(b))]
                work = [entry for entry in before if isinstance(entry, Compute)]
                last = work[-1] if work else None
                low = (last.layers or (0, 0))[0] if last else 0
                prompt.append(
                    last is None or (last.primitive.kind != "F" and low <= needed.get(last.primitive.chunk, -1))
                )
                counted += bool(last and last.layers)
            assert any(prompt), f"seed {seed}, bucket {b}"
    assert counted > 500


LAYOUT = Layout((Replica((Stage((0, 1), ((0, 3),)),)), Replica((Stage((2,), ((0, 3),)),))))
PLAN = Plan(epoch=3, layout=LAYOUT, assignment=((0, 1), (2,)))
CUT = buckets(LAYOUT, model(4), bucket_bytes=1000)
Programs = dict[int, list[Instruction]]
LAST = Primitive("B", 1)


def part(program: list[Instruction], layer: int) -> int:
    return program.index(Compute(LAST, (layer, layer)))


def swapped(p: Programs) -> None:
    for rank in (0, 1):
        i, j = part(p[rank], 3), part(p[rank], 2)
        p[rank][i], p[rank][j] = p[rank][j], p[rank][i]


def put_together_on_one(p: Programs) -> None:
    i, j = part(p[1], 3), part(p[1], 2)
    p[1][j] = Compute(LAST, (2, 3))
    del p[1][i]
    p[1] = [entry for entry in p[1] if not isinstance(entry, Reduce)] + [e for e in p[1] if isinstance(e, Reduce)]


def summed_a_part_too_soon(p: Programs) -> None:
    i = part(p[0], 1)
    after = next(j for j in range(i, len(p[0])) if isinstance(p[0][j], Reduce))
    p[0].insert(i, p[0].pop(after))


def in_parts_too_early(p: Programs) -> None:
    for rank in (0, 1):
        i = p[rank].index(Compute(Primitive("B", 0)))
        p[rank][i : i + 1] = [Compute(Primitive("B", 0), span) for span in ((2, 3), (0, 1))]


def work_between(p: Programs) -> None:
    for rank in (0, 1):
        moved = p[rank].pop(p[rank].index(Compute(Primitive("F", 1))))
        p[rank].insert(part(p[rank], 1), moved)


BAD: list[tuple[str, Callable[[Programs], object], str]] = [
    ("swapped", swapped, r"rank 0, instruction \d+ \(B of micro-batch 1 in layers 2 to 2\): layer 3 of B .*is due"),
    ("lost", lambda p: p[0].pop(part(p[0], 2)), r"rank 0, .*in layers 1 to 1\): layer 2 of B of micro-batch 1 is due"),
    ("last one lost", lambda p: p[0].pop(part(p[0], 0)), r"rank 0 never computes layer 0 of B of micro-batch 1"),
    ("other work between", work_between, r"rank 0, instruction \d+ \(F of micro-batch 1\): layer 1 of B .*is due"),
    (
        "cut otherwise on one rank of a group",
        put_together_on_one,
        r"operation \d+ on communicator group/0-1 is B of micro-batch 1 in layers 3 to 3 on rank 0, but .*2 to 3 on",
    ),
    ("summed a part too soon", summed_a_part_too_soon, r"rank 0, .*too early, gradients of chunk 0 are not complete"),
    ("not the last backward", in_parts_too_early, r"B of micro-batch 0 in layers 2 to 3\): in parts, though"),
]


@pytest.mark.parametrize(("spoil", "fault"), [entry[1:] for entry in BAD], ids=[entry[0] for entry in BAD])
def test_a_bad_part_is_named(spoil: Callable[[Programs], object], fault: str) -> None:
    good = programs(PLAN, CUT)
    check(PLAN, good, CUT)
    bad = {rank: list(program) for rank, program in good.items()}
    spoil(bad)
    with pytest.raises(PlanError, match=f"plan of epoch 3: .*{fault}"):
        check(PLAN, {rank: tuple(program) for rank, program in bad.items()}, CUT)


def test_a_weight_pass_comes_in_parts_where_it_is_the_last() -> None:
    plan = msgspec.structs.replace(PLAN, schedule="zero-bubble")
    found = programs(plan, CUT)
    cut = [entry for program in found.values() for entry in program if isinstance(entry, Compute) and entry.layers]
    assert {entry.primitive.kind for entry in cut} == {"W"}
    check(plan, found, CUT)


def test_a_bucket_of_one_owner_cuts_nothing() -> None:
    lone = (Bucket((2,), (), ("layer.3",)),)
    assert not in_parts(programs(PLAN, lone))
