"""Copies of state that one rank holds: who gets them, and what they leave as it is."""

from __future__ import annotations

import msgspec
import pytest

from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan, spread
from resihp.parallelism.transfers import Base, missing, sole_holders
from resihp.pipeline import checker, program
from resihp.scheduler.candidates import PricedPlan, best_of, is_held_on_two_nodes
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts import mirrors
from resihp.scheduler.layouts.mirrors import layers_held_once, with_mirrors
from tests.resihp.scheduler.cases import MODEL, on_nodes, situation

NODES = on_nodes(8, of=2)


def one_replica(*stages: tuple[tuple[int, ...], tuple[int, int]], standby: tuple[int, ...]) -> Plan:
    replica = Replica(tuple(Stage(ranks, (span,)) for ranks, span in stages))
    return Plan(epoch=3, layout=Layout((replica,), standby), assignment=spread(8, 1))


def in_effect(plan: Plan, **given: object) -> Plan:
    case = situation(plan.layout, nodes=NODES, tp=2, pp=2, epoch=plan.epoch, **given)  # type: ignore[arg-type]
    return with_mirrors(plan, case, plan.layout.standby)


def copies(plan: Plan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ranks and layers of each stage of a mirror that has ranks."""
    replicas = [plan.layout.replicas[d] for d in plan.mirrors]
    return [(stage.ranks, stage.layers) for replica in replicas for stage in replica.stages if stage.ranks]


def test_each_stage_of_the_last_replica_gets_a_copy_and_nothing_else_changes() -> None:
    plan = one_replica(((0, 1), (0, 2)), ((2, 3), (3, 5)), standby=(4, 5, 6, 7))
    found = in_effect(plan)
    assert sorted(layers for _, layers in copies(found)) == [(0, 1, 2), (3, 4, 5)]
    assert found.without_mirrors() == plan
    assert found.computing == (0, 1, 2, 3)
    assert sole_holders(Base(epoch=3, layout=found.layout, survivors=found.layout.active), outline(MODEL)) == {}
    validate(found.layout, MODEL)
    buckets = program.buckets(found.layout, outline(MODEL))
    checker.check(found, program.programs(found, buckets), buckets)


@pytest.mark.parametrize("lost", range(4))
def test_the_loss_of_any_rank_of_the_last_replica_leaves_all_state(lost: int) -> None:
    plan = one_replica(((0, 1), (0, 2)), ((2, 3), (3, 5)), standby=(4, 5))
    survivors = tuple(rank for rank in (0, 1, 2, 3, 4, 5) if rank != lost)
    specs = outline(MODEL)
    assert missing(Base(epoch=3, layout=plan.layout, survivors=survivors), specs) is not None
    assert missing(Base(epoch=3, layout=in_effect(plan).layout, survivors=survivors), specs) is None


def test_one_rank_copies_all_stages_where_its_memory_holds_them() -> None:
    plan = one_replica(((0,), (0, 2)), ((1,), (3, 5)), standby=(4,))
    assert copies(in_effect(plan)) == [((4,), (0, 1, 2, 3, 4, 5))]


def test_memory_decides_how_much_a_rank_copies() -> None:
    plan = one_replica(((0,), (0, 1)), ((1,), (2, 3)), ((2,), (4, 5)), standby=(4,))
    needed = max(memory.needed_bytes(plan, rank, MODEL, 0) for rank in plan.layout.active)
    [(ranks, layers)] = copies(in_effect(plan, memory_bytes=needed))
    assert ranks == (4,)
    assert len(layers) == 2, "as much as a rank that computes has room for"
    assert copies(in_effect(plan, memory_bytes=needed // 4)) == []


def test_two_ranks_share_a_copy_that_is_too_large_for_one() -> None:
    plan = one_replica(((0, 1), (0, 5)), standby=(4, 5))
    needed = memory.needed_bytes(plan, 0, MODEL, 0)
    assert copies(in_effect(plan, memory_bytes=needed)) == [((4, 5), (0, 1, 2, 3, 4, 5))]


def test_state_with_two_holders_gets_no_copy() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=6, standby=(4, 5))
    plan = Plan(epoch=3, layout=layout, assignment=spread(8, 2))
    assert in_effect(plan) == plan


def test_a_copy_is_on_another_node_than_the_state_where_it_can_be() -> None:
    plan = one_replica(((0,), (0, 2)), ((2,), (3, 5)), standby=(1, 3, 4))
    for ranks, layers in copies(in_effect(plan)):
        holder = 0 if 0 in layers else 2
        assert all(NODES[rank] != NODES[holder] for rank in ranks)


def test_a_copy_that_is_there_stays_where_it_is() -> None:
    plan = one_replica(((0,), (0, 2)), ((2,), (3, 5)), standby=(4, 5, 6, 7))
    before = in_effect(plan)
    holders = dict(copies(before))
    case = situation(plan.layout, nodes=NODES, tp=1, pp=2)
    case = msgspec.structs.replace(case, mirrors=tuple(before.layout.replicas[d] for d in before.mirrors))
    for ranks in holders:
        others = [rank for rank in (4, 5, 6, 7) if rank not in ranks]
        free = (*ranks, *others[:1])
        again = with_mirrors(plan, case, free)
        assert holders[ranks] in [layers for held_by, layers in copies(again) if held_by == ranks]


def test_a_plan_with_mirrors_takes_no_longer_where_sums_take_no_time() -> None:
    plan = one_replica(((0,), (0, 2)), ((2,), (3, 5)), standby=(4, 5))
    case = situation(plan.layout, nodes=NODES, tp=1, pp=2, speeds={4: 0.5})
    assert iteration_seconds(with_mirrors(plan, case, (4, 5)), case) == iteration_seconds(plan, case)


SLOW_LINKS = {("n1", "n3"): 0.05, ("n2", "n3"): 0.05}


@pytest.mark.parametrize(
    ("standby", "step_s", "speed", "groups"),
    [
        ((4, 5, 6, 7), 0.2, 1.0, [(6, 7)]),
        ((4, 5), 0.2, 1.0, []),
        ((6, 7), 0.2, 0.1, [(6, 7)]),
        ((6, 7), 0.5, 0.1, []),
    ],
    ids=["one node behind slow links", "only that node", "slow device", "slow device, long step"],
)
def test_copies_that_would_slow_training_by_more_than_a_tenth_are_not_made(
    standby: tuple[int, ...], step_s: float, speed: float, groups: list[tuple[int, ...]]
) -> None:
    """Node n3 is behind slow links. An iteration takes 45 units without mirrors."""
    plan = one_replica(((0, 1), (0, 2)), ((2, 3), (3, 5)), standby=standby)
    case = situation(plan.layout, nodes=NODES, tp=2, pp=2, epoch=3, speeds=dict.fromkeys(standby, speed))
    profile = msgspec.structs.replace(case.times, gradient_s=0.5, step_s=step_s)
    case = msgspec.structs.replace(case, profile=profile, links=SLOW_LINKS)
    found = with_mirrors(plan, case, standby)
    assert [ranks for ranks, _ in copies(found)] == groups
    assert iteration_seconds(found, case) <= 1.1 * iteration_seconds(plan, case)


def test_few_plans_are_checked_however_many_stages_are_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica of 16 stages, and memory for little more than a stage: each full check takes long at that size."""
    checked: list[Layout] = []
    monkeypatch.setattr(mirrors, "validate", lambda layout, model: checked.append(layout))
    model = msgspec.structs.replace(MODEL, layers=32)
    stages = tuple(Stage((2 * s, 2 * s + 1), ((2 * s, 2 * s + 1),)) for s in range(16))
    plan = Plan(epoch=3, layout=Layout((Replica(stages),), tuple(range(32, 62))), assignment=spread(32, 1))
    needed = max(memory.needed_bytes(plan, rank, model, 0) for rank in plan.layout.active)
    nodes = on_nodes(62, of=2)
    case = situation(plan.layout, nodes=nodes, tp=2, pp=16, model=model, epoch=3, memory_bytes=int(1.02 * needed))
    found = with_mirrors(plan, case, plan.layout.standby)
    assert len(layers_held_once(found.layout)) == 2, "15 of 16 stages have a copy"
    assert len(checked) <= mirrors.MAX_CHECKED


def test_a_growing_batch_gives_mirrors_nothing() -> None:
    found = in_effect(one_replica(((0,), (0, 2)), ((2,), (3, 5)), standby=(4,)))
    grown = found.dealing(12)
    assert grown.mirrors == found.mirrors
    assert [len(share) for share in grown.assignment] == [12, 0]


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zero-bubble", 1), ("1f1b", 1)])
def test_every_schedule_runs_beside_a_mirror(schedule: str, chunks: int) -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=1, layers=6, chunks=chunks, standby=(4, 5))
    plan = Plan(epoch=3, layout=layout, assignment=spread(8, 1), schedule=schedule)
    found = in_effect(plan, schedule=schedule, chunks=chunks)
    assert layers_held_once(found.layout) == frozenset()
    buckets = program.buckets(found.layout, outline(MODEL))
    checker.check(found, program.programs(found, buckets), buckets)


def test_a_plan_with_mirrors_says_so() -> None:
    plan = one_replica(((0,), (0, 2)), ((2,), (3, 5)), standby=(4, 5))
    assert plan.describe() == "DP1 x PP2 x TP1 + 2 standby"
    assert in_effect(plan).describe() == "DP1 x PP2 x TP1 + 2 mirrors"


def test_a_plan_that_keeps_state_on_two_nodes_is_preferred_up_to_two_percent() -> None:
    nodes = on_nodes(8, of=2)
    case = situation(Layout.uniform(tp=1, pp=2, dp=2, layers=6), nodes=nodes, tp=1, pp=2)

    def priced(seconds: float, *replicas: tuple[int, int]) -> PricedPlan:
        stages = (((0, 2),), ((3, 5),))
        layout = Layout(
            tuple(Replica(tuple(Stage((rank,), span) for rank, span in zip(r, stages, strict=True))) for r in replicas)
        )
        return PricedPlan(str(seconds), Plan(epoch=2, layout=layout, assignment=spread(8, len(replicas))), seconds)

    same_nodes, two_nodes, slower = (
        priced(1.0, (0, 2), (1, 3)),
        priced(1.019, (0, 2), (4, 6)),
        priced(1.03, (0, 2), (4, 6)),
    )
    assert best_of(case, [same_nodes, two_nodes]) is two_nodes
    assert best_of(case, [same_nodes, slower]) is same_nodes
    assert best_of(case, [same_nodes, priced(1.01, (0, 2))]) is same_nodes


def test_state_of_replicas_with_stages_that_others_hold_is_on_two_nodes() -> None:
    """The second and the third replica hold half of the layers each, on the other node than the first."""
    first, last = ((0, 2),), ((3, 5),)
    replicas = (
        Replica((Stage((0,), first), Stage((1,), last))),
        Replica((Stage((2,), first), Stage((), last))),
        Replica((Stage((), first), Stage((3,), last))),
    )
    assert is_held_on_two_nodes(Layout(replicas), {0: "a", 1: "b", 2: "b", 3: "a"})
    assert not is_held_on_two_nodes(Layout(replicas), {0: "a", 1: "b", 2: "a", 3: "a"})
