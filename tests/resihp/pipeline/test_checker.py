"""The checker: every plan that can be carried out passes, every planted fault is found and named."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Migration, Plan, Primitive, Stop, spread
from resihp.pipeline import communication_rules
from resihp.pipeline.checker import check, check_forward_only
from resihp.pipeline.program import (
    Bucket,
    Compute,
    Instruction,
    Parcel,
    Program,
    Reduce,
    TensorRange,
    Transmit,
    buckets,
    forward_only,
    programs,
)
from resihp.pipeline.rendezvous import Rendezvous
from resihp.pipeline.schedules import orders_of
from tests.resihp.pipeline.plans import model, random_plan

PLANS = int(os.environ.get("RESIHP_CHECKED_PLANS", "1500"))


def test_random_plans_of_all_kinds_are_clean() -> None:
    for seed in range(PLANS):
        plan, specs = random_plan(random.Random(seed))
        cut = buckets(plan.layout, specs, bucket_bytes=1000)
        try:
            check(plan, programs(plan, cut), cut)
        except PlanError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_evaluations_of_random_plans_are_clean_and_lack_nothing() -> None:
    for seed in range(PLANS // 5):
        plan, specs = random_plan(random.Random(seed))
        evaluations = forward_only(programs(plan, buckets(plan.layout, specs)))
        check_forward_only(plan, evaluations)
        rank = min(rank for rank, program in evaluations.items() if program)
        fewer = evaluations | {rank: evaluations[rank][:-1]}
        with pytest.raises(PlanError):
            check_forward_only(plan, fewer)


def test_programs_that_follow_from_the_plan_need_not_be_given() -> None:
    plan, specs = random_plan(random.Random(0))
    check(plan)
    check(plan, buckets=buckets(plan.layout, specs))


def refusal(plan: Plan, *given: dict[int, Program]) -> str:
    try:
        check(plan, *given)
    except PlanError as error:
        return str(error)
    return ""


def test_of_replicas_that_do_the_same_one_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []

    class Counted(Rendezvous):
        def __init__(self, programs: dict[int, Program]) -> None:
            played.append(len(programs))
            super().__init__(programs)

    monkeypatch.setattr(communication_rules, "Rendezvous", Counted)
    layout = Layout.uniform(tp=2, pp=2, dp=40, layers=4)
    plan = Plan(epoch=1, layout=layout, assignment=spread(81, 40))
    check(plan)
    assert played == [8], "one that has three micro-batches, and one that has two"
    migrating = msgspec.structs.replace(plan, migrations=(Migration(0, 0, 1),))
    check(migrating)
    assert played == [8, 160]


def test_a_fault_of_one_replica_among_many_is_found_and_named() -> None:
    """As it is where all programs are given, and played."""
    found = 0
    for seed in range(200):
        rng = random.Random(seed)
        stages, replicas = rng.randint(1, 3), rng.randint(2, 6)
        layout = Layout.uniform(tp=rng.choice([1, 2]), pp=stages, dp=replicas, layers=6)
        plan = Plan(epoch=1, layout=layout, assignment=spread(rng.randint(replicas, 3 * replicas), replicas))
        orders = [[list(order) for order in replica] for replica in orders_of(plan)]
        d, s = rng.randrange(replicas), rng.randrange(stages)
        order = orders[d][s]
        a, b = rng.randrange(len(order)), rng.randrange(len(order))
        match rng.choice(["swap", "drop", "replace", "nothing"]):
            case "swap":
                order[a], order[b] = order[b], order[a]
            case "drop":
                del order[a]
            case "replace":
                order[a] = msgspec.structs.replace(order[a], micro_batch=rng.randrange(plan.micro_batches))
            case _:
                pass
        plan = msgspec.structs.replace(plan, orders=tuple(tuple(map(tuple, replica)) for replica in orders))
        try:
            expected = refusal(plan, programs(plan))
        except PlanError as error:
            expected = str(error)
        told = refusal(plan)
        assert bool(told) == bool(expected), f"seed {seed}: {told or expected}"
        if told and "deadlock" not in told:
            assert f"replica {d}" in told or any(f"rank {rank}" in told for rank in layout.replicas[d].ranks), told
        found += bool(told)
    assert 50 < found < 150


@pytest.mark.parametrize("seed", range(150))
def test_no_instruction_can_be_lost_or_doubled(seed: int) -> None:
    rng = random.Random(seed)
    plan, specs = random_plan(rng)
    cut = buckets(plan.layout, specs, bucket_bytes=1000)
    good = programs(plan, cut)
    rank = rng.choice([rank for rank, program in good.items() if program])
    at = rng.randrange(len(good[rank]))
    for changed in (good[rank][:at] + good[rank][at + 1 :], good[rank][: at + 1] + good[rank][at:]):
        with pytest.raises(PlanError, match=r"rank \d+"):
            check(plan, good | {rank: changed}, cut)


def ends(plan: Plan, given: dict[int, Program], cut: tuple[Bucket, ...]) -> bool:
    """Whether programs end, one operation at a time on each rank: the rule by itself, scanned without any wit."""
    place = {rank: (at.replica, at.stage) for rank, at in plan.layout.places()}
    paths = plan.paths()
    at = dict.fromkeys(given, 0)
    queues: dict[int, list[tuple[object, frozenset[int]]]] = {rank: [] for rank in given}
    done: set[object] = set()
    begun: set[tuple[int, object]] = set()

    def begin(rank: int, what: object, members: frozenset[int]) -> None:
        if (rank, what) not in begun and len(members) > 1:
            begun.add((rank, what))
            queues[rank].append((what, members))

    def passes(rank: int, entry: Instruction) -> bool:
        """Begin what an instruction begins; whether it needs to wait for nothing any more."""
        if isinstance(entry, Reduce):
            begin(rank, entry.bucket, frozenset(cut[entry.bucket].owners))
            return True
        if isinstance(entry, Transmit):
            for piece in entry.parcel.pieces:
                if rank in (piece.sender, piece.receiver):
                    what = (entry.parcel.direction, entry.parcel.micro_batch, entry.parcel.boundary, piece)
                    begin(rank, what, frozenset((piece.sender, piece.receiver)))
            return True
        p = entry.primitive
        v = paths[p.micro_batch].index(Stop(*place[rank], p.chunk))
        edge = {"F": ("forward", p.micro_batch, v - 1), "B": ("backward", p.micro_batch, v)}.get(p.kind)
        for earlier in given[rank]:
            if isinstance(earlier, Transmit) and edge is not None:
                key = (earlier.parcel.direction, earlier.parcel.micro_batch, earlier.parcel.boundary)
                mine = [(*key, piece) for piece in earlier.parcel.pieces if piece.receiver == rank]
                if key == edge and not done.issuperset(mine):
                    return False
        group = frozenset(plan.layout.replicas[place[rank][0]].stages[place[rank][1]].ranks)
        begin(rank, (place[rank], entry), group)
        return len(group) == 1 or (place[rank], entry) in done

    moved = True
    while moved:
        moved = False
        for rank, program in given.items():
            while at[rank] < len(program) and passes(rank, program[at[rank]]):
                at[rank] += 1
                moved = True
        for queue in queues.values():
            if queue and all(queues[member][:1] == queue[:1] for member in queue[0][1]):
                what, members = queue[0]
                done.add(what)
                moved = True
                for member in members:
                    del queues[member][0]
    return not any(queues.values()) and all(at[rank] == len(program) for rank, program in given.items())


def test_verdicts_on_shuffled_communication_are_those_of_a_plain_simulation() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(250):
        rng = random.Random(seed)
        plan, specs = random_plan(rng)
        cut = buckets(plan.layout, specs, bucket_bytes=3000)
        found = {rank: list(program) for rank, program in programs(plan, cut).items()}
        for _ in range(rng.randint(1, 4)):
            program = found[rng.choice(sorted(found))]
            movable = [i for i, entry in enumerate(program) if not isinstance(entry, Compute)]
            if movable:
                i = rng.choice(movable)
                program.insert(max(0, i + rng.randint(-4, 4)), program.pop(i))
        given = {rank: tuple(program) for rank, program in found.items()}
        try:
            check(plan, given, cut)
        except PlanError as error:
            if "deadlock" not in str(error) and "on communicator" not in str(error):
                continue
            verdict = False
        else:
            verdict = True
        assert ends(plan, given, cut) == verdict, f"seed {seed}"
        verdicts[verdict] += 1
    assert min(verdicts.values()) > 20, verdicts


LAYOUT = Layout(
    replicas=(
        Replica((Stage((0, 1), ((0, 3),)), Stage((2,), ((4, 7),)))),
        Replica((Stage((3,), ((0, 3),)), Stage((4,), ((4, 7),)))),
    ),
    standby=(5,),
)
PLAN = Plan(epoch=3, layout=LAYOUT, assignment=((0, 1, 2), (3, 4, 5)), schedule="zero-bubble")
CUT = buckets(LAYOUT, model(8))

Order = list[Primitive]
Programs = dict[int, list[Instruction]]


def f(m: int) -> Primitive:
    return Primitive("F", m)


def b(m: int) -> Primitive:
    return Primitive("B", m)


def w(m: int) -> Primitive:
    return Primitive("W", m)


def swap(order: Order, one: Primitive, other: Primitive) -> None:
    i, j = order.index(one), order.index(other)
    order[i], order[j] = order[j], order[i]


def without(order: Order, *lost: Primitive) -> None:
    order[:] = [primitive for primitive in order if primitive not in lost]


def insert(order: Order, place: int, primitive: Primitive) -> None:
    order.insert(place, primitive)


def rewrite(order: Order, text: str) -> None:
    kinds: dict[str, Callable[[int], Primitive]] = {"F": f, "B": b, "W": w}
    order[:] = [kinds[word[0]](int(word[1:])) for word in text.split()]


BAD_ORDERS: list[tuple[str, tuple[int, int], Callable[[Order], object], str]] = [
    ("missing W", (0, 1), lambda o: o.remove(w(1)), r"rank 2 .* lacks W of micro-batch 1 in chunk 0, though others"),
    ("missing B", (1, 1), lambda o: without(o, b(4), w(4)), r"rank 4 .* lacks B of micro-batch 4"),
    ("missing F and all", (1, 0), lambda o: without(o, f(5), b(5), w(5)), r"rank 3 .* lacks F of"),
    (
        "B before F",
        (0, 1),
        lambda o: swap(o, f(1), b(1)),
        r"rank 2 .*computation \d+ \(B of micro-batch 1\): .*before its F",
    ),
    ("W before B", (0, 0), lambda o: swap(o, b(2), w(2)), r"rank 0 .*\(W of micro-batch 2\): comes before its B"),
    ("doubled F", (0, 0), lambda o: insert(o, 1, f(0)), r"rank 0 .*computation 1 \(F of micro-batch 0\): comes twice"),
    ("doubled B", (1, 0), lambda o: o.append(b(3)), r"rank 3 .*\(B of micro-batch 3\): comes twice"),
    ("doubled W", (1, 0), lambda o: o.append(w(3)), r"rank 3 .*\(W of micro-batch 3\): comes twice"),
    ("another replica's micro-batch", (1, 1), lambda o: insert(o, 0, f(0)), r"rank 4 .*wrong stop, micro-batch 0"),
    ("no such micro-batch", (1, 1), lambda o: insert(o, 0, f(9)), r"rank 4 .*there is no micro-batch 9"),
    ("no such chunk", (0, 1), lambda o: insert(o, 0, Primitive("F", 0, 1)), r"rank 2 .*the stage has no chunk 1"),
    (
        "stages that wait for each other",
        (0, 1),
        lambda o: rewrite(o, "F2 B2 W2 F0 B0 W0 F1 B1 W1"),
        r"can never finish: .*of micro-batch .* on replica 0 stage \d waits for .*of micro-batch .* on replica 0 stage",
    ),
]


@pytest.mark.parametrize(
    ("place", "spoil", "fault"), [entry[1:] for entry in BAD_ORDERS], ids=[e[0] for e in BAD_ORDERS]
)
def test_a_bad_order_is_named(place: tuple[int, int], spoil: Callable[[Order], object], fault: str) -> None:
    good = orders_of(PLAN)
    order = list(good[place[0]][place[1]])
    spoil(order)
    orders = tuple(tuple(tuple(order) if (d, s) == place else good[d][s] for s in range(2)) for d in range(2))
    assert orders != good
    with pytest.raises(PlanError, match=f"plan of epoch 3: .*{fault}"):
        check(msgspec.structs.replace(PLAN, orders=orders), buckets=CUT)


def parcel(program: list[Instruction], direction: str, m: int) -> int:
    """Where a rank's part of a parcel begins."""
    return next(
        i
        for i, entry in enumerate(program)
        if isinstance(entry, Transmit) and (entry.parcel.direction, entry.parcel.micro_batch) == (direction, m)
    )


def shift(program: list[Instruction], source: int, target: int) -> None:
    program.insert(target, program.pop(source))


def changed(program: list[Instruction], at: int, **fields: object) -> None:
    entry = program[at]
    assert isinstance(entry, Transmit)
    program[at] = Transmit(msgspec.structs.replace(entry.parcel, **fields))


def everywhere(p: Programs, direction: str, m: int, **fields: object) -> None:
    for program in p.values():
        if any(
            isinstance(e, Transmit) and (e.parcel.direction, e.parcel.micro_batch) == (direction, m) for e in program
        ):
            changed(program, parcel(program, direction, m), **fields)


def swapped_sends(p: Programs) -> None:
    """Rank 3 sends micro-batch 4 before 3."""
    i, j = parcel(p[3], "forward", 3), parcel(p[3], "forward", 4)
    p[3][j], late = p[3][i], p[3][j]
    p[3].insert(j, late)
    del p[3][i]


def received_late(p: Programs) -> None:
    """Rank 4 begins to receive micro-batch 4 only after it began to send the gradient of 3."""
    shift(p[4], parcel(p[4], "forward", 4), parcel(p[4], "backward", 3))


def after(p: list[Instruction], primitive: Primitive) -> int:
    return p.index(Compute(primitive)) + 1


def use_first(p: Programs) -> None:
    at = parcel(p[2], "forward", 0)
    shift(p[2], at, after(p[2], f(0)) - 1)


def too_soon(p: Programs) -> None:
    shift(p[3], parcel(p[3], "forward", 3), 0)


def reduces(program: list[Instruction]) -> list[int]:
    return [i for i, entry in enumerate(program) if isinstance(entry, Reduce)]


def early_reduce(p: Programs) -> None:
    shift(p[4], reduces(p[4])[0], p[4].index(Compute(w(5))))


def lost_on_all(p: Programs) -> None:
    for rank in (3, 4):
        del p[rank][parcel(p[rank], "backward", 4)]


def to_the_wrong_rank(p: Programs) -> None:
    everywhere(p, "forward", 3, pieces=(TensorRange(3, 2, 0, 1, 1),))


def half_a_tensor(p: Programs) -> None:
    everywhere(p, "forward", 0, pieces=(TensorRange(0, 2, 0, 1, 2),))


def nothing_from_one(p: Programs) -> None:
    everywhere(p, "forward", 0, pieces=(TensorRange(0, 2, 0, 2, 2),))


def other_size(p: Programs) -> None:
    changed(p[1], parcel(p[1], "forward", 0), pieces=(TensorRange(0, 2, 0, 1, 4), TensorRange(1, 2, 1, 4, 4)))


def not_gathered(p: Programs) -> None:
    everywhere(p, "backward", 1, gathered=False)


def peers_differ(p: Programs) -> None:
    i, j = p[1].index(Compute(f(0))), p[1].index(Compute(f(1)))
    p[1][i], p[1][j] = p[1][j], p[1][i]


def foreign(p: Programs) -> None:
    p[4].insert(0, p[2][parcel(p[2], "forward", 0)])


def no_boundary(p: Programs) -> None:
    p[4].insert(0, Transmit(Parcel("forward", 3, 1, (TensorRange(3, 4, 0, 1, 1),), False)))


BAD_PROGRAMS: list[tuple[str, Callable[[Programs], object], str]] = [
    (
        "swapped sends",
        swapped_sends,
        r"operation 0 on communicator forward/3-4 is .*micro-batch 4.* on rank 3, but .*micro-batch 3",
    ),
    (
        "received after its use",
        use_first,
        r"rank 2, instruction \d+ \(activations of micro-batch 0.*received after its use",
    ),
    (
        "sent before it is made",
        too_soon,
        r"rank 3, instruction 0 \(activations of micro-batch 3.*sent before it is computed",
    ),
    (
        "received too late for one queue",
        received_late,
        r"deadlock .*rank 3 .*waits in .*micro-batch 4.* for rank 4; rank 4 .*waits in .*micro-batch 3.* for rank 3",
    ),
    (
        "reduced too early",
        early_reduce,
        r"rank 4, instruction \d+ \(sum of bucket \d\): too early, gradients of chunk 0",
    ),
    ("reduce lost", lambda p: p[4].pop(), r"rank 4 owns bucket \d and never begins to sum it"),
    ("reduced twice", lambda p: p[4].append(p[4][-1]), r"rank 4, instruction \d+ \(sum of bucket \d\): a second time"),
    (
        "reduced by another rank",
        lambda p: p[2].append(p[0][-1]),
        r"rank 2, .*\(sum of bucket \d\): the rank does not own it",
    ),
    ("no such bucket", lambda p: p[2].append(Reduce(99)), r"rank 2, .*\(sum of bucket 99\): there is no such bucket"),
    ("other elements on one rank", other_size, r"rank 1, .*micro-batch 0.*its pieces are not those that rank 0 has"),
    ("wrong receiver", to_the_wrong_rank, r"rank 3, .*from rank 3 to rank 2, but rank 2 has no part"),
    ("part of a tensor", half_a_tensor, r"rank 0, .*rank 1 has nothing to send"),
    ("a sender without a piece", nothing_from_one, r"rank 0, .*rank 1 has nothing to send"),
    (
        "parts not gathered",
        not_gathered,
        r"rank 0, .*gradients of micro-batch 1.*do not bring rank 0 just the elements that it needs",
    ),
    ("parcel lost", lost_on_all, r"rank 4 never sends the gradients of micro-batch 4 over boundary 0"),
    (
        "receive lost",
        lambda p: p[2].pop(parcel(p[2], "forward", 2)),
        r"rank 2 never receives the activations of micro-batch 2",
    ),
    ("sent twice", lambda p: p[3].append(p[3][parcel(p[3], "forward", 3)]), r"rank 3, .*micro-batch 3.*a second time"),
    (
        "another rank's parcel",
        foreign,
        r"rank 4, instruction 0 .*for the ranks of replica 0 stage 0 and replica 0 stage 1",
    ),
    ("no such boundary", no_boundary, r"rank 4, instruction 0 .*over boundary 1\): there is no such boundary"),
    (
        "peers that compute otherwise",
        peers_differ,
        r"computation 0 is F of micro-batch 1 on rank 1, but F of micro-batch 0 on rank 0",
    ),
    ("no program", lambda p: p.pop(4), r"rank 4 has no program"),
    ("a program on standby", lambda p: p.update({5: []}), r"rank 5 has a program, but no work"),
]


@pytest.mark.parametrize(("spoil", "fault"), [entry[1:] for entry in BAD_PROGRAMS], ids=[e[0] for e in BAD_PROGRAMS])
def test_a_bad_program_is_named(spoil: Callable[[Programs], object], fault: str) -> None:
    good = programs(PLAN, CUT)
    check(PLAN, good, CUT)
    bad = {rank: list(program) for rank, program in good.items()}
    spoil(bad)
    spoilt: dict[int, Program] = {rank: tuple(program) for rank, program in bad.items()}
    assert spoilt != good
    with pytest.raises(PlanError, match=f"plan of epoch 3: .*{fault}"):
        check(PLAN, spoilt, CUT)


PAIR = Layout((Replica((Stage((0, 1), ((0, 0), (1, 1))),)), Replica((Stage((2,), ((0, 1),)),))))
CROSSED = (Bucket((0, 2), (), ("layer.0",)), Bucket((0, 1, 2), (), ("layer.0",)), Bucket((0, 2), (), ("layer.0",)))


def reordered(first: int, second: int) -> dict[int, Program]:
    """Rank 2 sums one bucket before the other, rank 0 after."""
    plan = Plan(epoch=1, layout=PAIR, assignment=((0,), (1,)))
    found = {rank: list(program) for rank, program in programs(plan, CROSSED).items()}
    i, j = (found[2].index(Reduce(bucket)) for bucket in (first, second))
    found[2][i], found[2][j] = found[2][j], found[2][i]
    return {rank: tuple(program) for rank, program in found.items()}


def test_reductions_of_one_group_in_different_orders_are_named() -> None:
    plan = Plan(epoch=1, layout=PAIR, assignment=((0,), (1,)))
    with pytest.raises(
        PlanError, match=r"operation 0 on communicator group/0-2 is the sum of bucket 0 on rank 0, but .*2"
    ):
        check(plan, reordered(0, 2), CROSSED)


def test_reductions_of_overlapping_groups_in_different_orders_deadlock() -> None:
    plan = Plan(epoch=1, layout=PAIR, assignment=((0,), (1,)))
    with pytest.raises(
        PlanError,
        match=r"deadlock.*rank 0 .*waits in the sum of bucket 0 on group/0-2 for rank 2; rank 2 .* for rank 0",
    ):
        check(plan, reordered(0, 1), CROSSED)


def test_a_stage_that_hands_over_to_itself_keeps_the_order_of_its_chunks() -> None:
    plan = Plan(epoch=1, layout=PAIR, assignment=((0,), ()))
    order = (Primitive("F", 0, 1), Primitive("F", 0, 0), Primitive("B", 0, 1), Primitive("B", 0, 0))
    with pytest.raises(
        PlanError, match=r"rank 0 .*\(F of micro-batch 0 in chunk 1\): comes before F of micro-batch 0, which"
    ):
        check(msgspec.structs.replace(plan, orders=((order,), ((),))))


def test_a_parcel_within_a_stage_is_refused() -> None:
    plan = Plan(epoch=1, layout=PAIR, assignment=((0,), ()))
    good = programs(plan)
    extra = Transmit(Parcel("forward", 0, 0, (TensorRange(0, 0, 0, 1, 1),), False))
    with pytest.raises(PlanError, match=r"rank 0, .*both sides are the same stage"):
        check(plan, good | {0: (*good[0], extra)})


def test_under_sequence_parallelism_a_rank_sends_only_its_part() -> None:
    layout = Layout((Replica((Stage((0, 1), ((0, 0),)), Stage((2, 3), ((1, 1),)))),))
    plan = Plan(epoch=1, layout=layout, assignment=((0,),), sequence_parallel=True)
    check(plan)
    crossed = {
        rank: [
            Transmit(msgspec.structs.replace(e.parcel, pieces=(TensorRange(0, 2, 1, 2, 2), TensorRange(1, 3, 0, 1, 2))))
            if isinstance(e, Transmit) and e.parcel.direction == "forward"
            else e
            for e in program
        ]
        for rank, program in programs(plan).items()
    }
    with pytest.raises(PlanError, match=r"rank 0 does not hold elements 1 to 2 of 2"):
        check(plan, {rank: tuple(program) for rank, program in crossed.items()})


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"assignment": ((0, 1), (1, 2))}, "do not give each micro-batch one home"),
        ({"assignment": ((0, 2), (3,))}, "do not give each micro-batch one home"),
        ({"assignment": ((0, 1, 2),)}, "1 shares of micro-batches for 2 replicas"),
        ({"migrations": (Migration(0, 0, 2),)}, "micro-batch 0 migrates to replica 2, which does not exist"),
        ({"migrations": (Migration(0, 2, 1),)}, "micro-batch 0 has no virtual stage 2"),
        ({"migrations": (Migration(9, 0, 1),)}, "micro-batch 9 has no virtual stage 0"),
        ({"migrations": (Migration(0, 0, 1), Migration(0, 0, 1))}, "micro-batch 0 migrates twice at virtual stage 0"),
        ({"schedule": "gpipe"}, "unknown schedule gpipe; choose 1f1b, interleaved, zero-bubble"),
        ({"orders": ((), ())}, "its orders do not fit its layout"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(fields: dict[str, object], fault: str) -> None:
    with pytest.raises(PlanError, match=f"plan of epoch 3: .*{fault}"):
        check(msgspec.structs.replace(PLAN, **fields))


def test_programs_that_are_not_the_plans_are_refused() -> None:
    good = orders_of(PLAN)
    order = list(good[0][1])
    order[-1], order[-2] = order[-2], order[-1]
    other = msgspec.structs.replace(PLAN, orders=((good[0][0], tuple(order)), good[1]))
    with pytest.raises(
        PlanError, match=r"computation 7 is W of micro-batch 1 on rank 2, but W of micro-batch 2 in the plan"
    ):
        check(other, programs(PLAN, CUT), CUT)


def test_buckets_belong_to_ranks_with_work() -> None:
    with pytest.raises(PlanError, match=r"bucket 0 is of ranks \[0, 5\]"):
        check(PLAN, buckets=(Bucket((0, 5), (), ("layer.0",)),))
