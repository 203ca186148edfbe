"""Which plan is proposed: by the rules that the job's settings name, also once stages have no ranks."""

from __future__ import annotations

import msgspec
import pytest

from resihp.controller.interface import Dependencies
from resihp.errors import PlanError
from resihp.parallelism.plan import Plan
from resihp.pipeline.checker import check
from resihp.protocol import messages as m
from resihp.record.journal import PlanInEffect, Reconfigured
from resihp.settings import PlannerName
from tests.resihp.controller.direct import DECLARE, Direct

PIPELINES = {"nodes": 2, "gpus": 3, "tp": 1, "pp": 3}


def after(job: Direct, rank: int) -> Direct:
    """A rank dies in the iteration under way; what is left goes on."""
    stepped = job.job.record.committed
    job.crash(rank)
    job.park(stepped=stepped)
    return job.run(2)


@pytest.mark.parametrize(
    ("rule", "groups"),
    [("resihp-paper", [(1, 0, 1), (1, 1, 1)]), ("drop-replica", [(1, 1, 1)]), ("paper-tp", [(1, 1, 1)])],
)
def test_a_job_is_planned_by_the_rule_that_it_was_given(rule: PlannerName, groups: list[tuple[int, ...]]) -> None:
    job = after(Direct(planner=rule, come_backs=0, **PIPELINES).run(2), 1)
    layout = job.plan.layout
    assert [tuple(len(stage.ranks) for stage in replica.stages) for replica in layout.replicas] == groups
    assert [entry.epoch for entry in job.all(PlanInEffect)] == [1, 2]
    assert job.job.record.committed == 4


def test_stages_without_ranks_last_through_another_loss_and_a_checkpoint_of_both_replicas() -> None:
    job = after(Direct(planner="resihp-paper", come_backs=0, **PIPELINES).run(2), 1)
    after(job, 5)
    assert job.plan.layout.vacant == ((0, 1), (1, 2))
    assert job.job.record.writers[3] == (0, 2, 4), "a whole copy of the model"
    assert len(job.all(Reconfigured)) == 2
    assert all(order.plan.migrations for _, order in job.orders(m.Propose)[1:])


def test_the_cautious_plan_keeps_replicas_that_do_each_others_work() -> None:
    """Two pipelines do each other's work; a rank of the third one dies, and the plan that is made then is refused."""
    refused: list[int] = []

    def refusing(plan: Plan) -> None:
        if plan.epoch == 4 and not refused:
            refused.append(plan.epoch)
            raise PlanError("refused")
        check(plan)

    job = Direct(
        planner="resihp-paper",
        come_backs=0,
        dependencies=Dependencies(check=refusing),
        declare=msgspec.structs.replace(DECLARE, iterations=20),
        nodes=3,
        gpus=3,
        tp=1,
        pp=3,
    )
    for rank in (1, 5):
        after(job.run(2) if rank == 1 else job, rank)
    assert job.plan.layout.vacant == ((0, 1), (1, 2))
    after(job, 8)  # of the third pipeline, whose plan is refused once
    assert refused == [4]
    assert job.plan.layout.vacant == ((0, 1), (1, 2))
    assert len(job.plan.layout.replicas) == 2
