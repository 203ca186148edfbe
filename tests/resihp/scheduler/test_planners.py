"""Rules that a job may be planned by, side by side."""

from __future__ import annotations

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.pipeline.checker import check
from resihp.scheduler import planner, planners
from resihp.scheduler.cost.lacking_state import bytes_to_move
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.orders import migration
from tests.resihp.scheduler.cases import on_nodes, situation

THIN = Layout.uniform(tp=1, pp=3, dp=3, layers=6)


def test_what_each_rule_makes_of_a_lost_stage() -> None:
    case = situation(THIN, nodes=on_nodes(9, 3), tp=1, pp=3, lost=[4], micro_batches=9)
    found = {name: planners.named(name).decide(case) for name in planners.PLANNER_NAMES}
    for decision in found.values():
        check(decision.plan)
    assert found["resihp"].plan == planner.decide(case).plan
    assert found["resihp-paper"].plan.layout.vacant == ((1, 1),)
    assert bytes_to_move(case, found["resihp-paper"].plan.layout) == 0
    for name in ("paper-tp", "paper-tp-pp", "drop-replica"):
        assert len(found[name].plan.layout.replicas) == 2, name  # type: ignore[index]
    assert found["resihp"].seconds <= min(decision.seconds for decision in found.values())


def test_after_a_second_loss_only_migration_goes_on() -> None:
    case = situation(THIN, nodes=on_nodes(9, 3), tp=1, pp=3, lost=[0, 4, 8], micro_batches=9)
    decision = planners.named("resihp-paper").decide(case)
    assert decision.plan.layout.vacant == ((0, 0), (1, 1), (2, 2))
    again = situation(decision.plan.layout, nodes=on_nodes(9, 3), tp=1, pp=3, micro_batches=9)
    assert planners.named("resihp-paper").decide(again).plan == decision.plan
    for name in ("drop-replica", "paper-tp"):
        with pytest.raises(PlanError, match="every replica has lost a"):
            planners.named(name).decide(case)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="every replica has lost a rank: some have stages without ranks"):
        planners.named("drop-replica").decide(again)


def test_orders_that_are_too_many_to_be_sent_are_left_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = situation(THIN, nodes=on_nodes(9, 3), tp=1, pp=3, lost=[4], micro_batches=9)
    monkeypatch.setattr(migration, "MAX_ORDERED_PRIMITIVES", 50)
    decision = planners.named("resihp-paper").decide(case)
    assert decision.plan.layout.vacant
    assert decision.plan.orders == ()
    assert decision.seconds == pytest.approx(iteration_seconds(decision.plan, case))
    check(decision.plan)


def test_a_stage_without_ranks_takes_those_that_stand_by_on_one_node() -> None:
    lost = situation(THIN, nodes=on_nodes(9, 3), tp=1, pp=3, lost=[4], micro_batches=9)
    layout = planners.named("resihp-paper").decide(lost).plan.layout
    standing = msgspec.structs.replace(layout, standby=(9, 10))  # they came, and were put there until they are measured
    again = situation(standing, nodes=on_nodes(11, 3), tp=1, pp=3, micro_batches=9)
    filled = planners.named("resihp-paper").decide(again).plan.layout
    assert (filled.vacant, filled.replicas[1].stages[1].ranks, filled.standby) == ((), (9,), (10,))


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="planner paper: unknown; choose resihp, resihp-paper"):
        planners.named("paper")  # type: ignore[arg-type]
