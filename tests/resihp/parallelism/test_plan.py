"""Plans: shares of the global batch, and a digest that all ranks can compare."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from resihp.errors import LayoutError, PlanError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Migration, Plan, spread
from resihp.pipeline.checker import check


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [7, 8, 9, 64])
def test_spread_gives_each_micro_batch_once_in_contiguous_even_shares(micro_batches: int, replicas: int) -> None:
    shares = spread(micro_batches, replicas)
    assert [m for share in shares for m in share] == list(range(micro_batches))
    counts = [len(share) for share in shares]
    assert len(counts) == replicas
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


def test_spread_by_hand() -> None:
    assert spread(8, 3) == ((0, 1, 2), (3, 4, 5), (6, 7))


def test_spread_refuses_an_empty_share_and_says_what_to_type() -> None:
    with pytest.raises(LayoutError, match=r"3 micro-batches.*4 replicas.*--micro-batches to 4"):
        spread(3, 4)


def test_digest_survives_the_wire_and_tells_plans_apart() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=4)
    plan = Plan(epoch=3, layout=layout, assignment=spread(8, 2))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    assert again == plan
    assert again.digest == plan.digest
    assert plan.digest is plan.digest, "every rank's confirmation is compared with it"
    others = [
        msgspec.structs.replace(plan, epoch=4),
        msgspec.structs.replace(plan, layout=layout.without(frozenset({0}))),
        msgspec.structs.replace(plan, assignment=((0, 1, 2, 3, 4), (5, 6, 7))),
        msgspec.structs.replace(plan, assignment=((1, 0, 2, 3), (4, 5, 6, 7))),
        msgspec.structs.replace(plan, schedule="other"),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == len(others) + 1
    assert plan.micro_batches == 8


def test_dealing_gives_what_would_pass_a_stage_without_ranks_to_those_who_hold_it_in_turn() -> None:
    grid = Layout.uniform(tp=1, pp=2, dp=3, layers=4)
    vacated = Replica((grid.replicas[0].stages[0], Stage((), grid.replicas[0].stages[1].chunks)))
    layout = Layout((vacated, *grid.replicas[1:]))
    plan = Plan(epoch=1, layout=layout, assignment=((), (), ()), schedule="zero-bubble").dealing(7)
    assert plan.assignment == spread(7, 3)
    assert plan.migrations == (Migration(0, 1, 1), Migration(1, 1, 2), Migration(2, 1, 1))
    check(plan)
    assert not plan.dealing(3).orders
    with pytest.raises(PlanError, match="micro-batch 1 passes replica 0 stage 1, which has no rank; it must migrate"):
        check(msgspec.structs.replace(plan, migrations=(plan.migrations[0], plan.migrations[2])))
    with pytest.raises(PlanError, match="micro-batch 3 passes replica 0 stage 1, which has no rank"):
        check(msgspec.structs.replace(plan, migrations=(*plan.migrations, Migration(3, 1, 0))))


def test_dealing_spreads_the_work_of_many_stages_without_ranks_over_all_who_hold_them() -> None:
    grid = Layout.uniform(tp=1, pp=2, dp=32, layers=4)
    gone = Stage((), grid.replicas[0].stages[1].chunks)
    layout = Layout(tuple(Replica((r.stages[0], gone)) if d % 4 == 0 else r for d, r in enumerate(grid.replicas)))
    plan = Plan(epoch=1, layout=layout, assignment=()).dealing(128)
    loads = Counter(stop.replica for path in plan.paths().values() for stop in path if stop.stage == 1)
    assert sorted(set(loads.values())) == [5, 6], "128 over 24 replicas"
