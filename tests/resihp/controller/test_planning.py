"""Which plan is proposed: by the rules that the job's settings name, also once stages have no ranks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.controller.interface import Dependencies
from resihp.errors import PlanError
from resihp.parallelism.plan import Plan
from resihp.pipeline.checker import check
from resihp.protocol import messages as m
from resihp.record.journal import PlanInEffect, Reconfigured
from resihp.scheduler import planner
from resihp.scheduler.planners import NamedPlanner
from resihp.scheduler.situation import Decision, Situation
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


class Listening:
    """The planner, and what it was told of memory."""

    def __init__(self) -> None:
        self.sizes: list[int | None] = []

    def named(self) -> NamedPlanner:
        def decide(situation: Situation) -> Decision:
            self.sizes.append(situation.memory_bytes)
            return planner.decide(situation)

        return NamedPlanner(decide=decide)


def with_memory(sizes: list[int | None], **settings: Any) -> tuple[Direct, Listening]:
    """A job whose devices have these sizes loses a rank."""
    listening = Listening()
    job = Direct(come_backs=0, dependencies=Dependencies(planner=listening.named()), declares=False, **settings)
    for rank, size in enumerate(sizes):
        job.say(rank, msgspec.structs.replace(DECLARE, memory_bytes=size))
    return after(job.run(2), 1), listening


def test_plans_are_made_for_what_the_smallest_device_has_unless_the_user_says_it() -> None:
    sizes: list[int | None] = [80_000_000, 79_000_000, 81_000_000, 80_000_000]
    _, told_by_devices = with_memory(sizes)
    assert set(told_by_devices.sizes) == {79_000_000}
    _, told_by_user = with_memory(sizes, memory_bytes=60_000_000)
    assert set(told_by_user.sizes) == {60_000_000}
    _, unknown = with_memory([80_000_000, None, 80_000_000, 80_000_000])
    assert set(unknown.sizes) == {None}


def test_a_plan_that_runs_fits_whatever_is_estimated() -> None:
    job, listening = with_memory([1, 1, 1, 1])
    assert job.job.record.committed == 4
    (size,) = set(listening.sizes)
    assert size is not None
    assert size > 1


def test_a_device_of_another_size_may_join() -> None:
    job, _ = with_memory([80_000_000] * 4)
    declare = msgspec.structs.replace(DECLARE, memory_bytes=40_000_000)
    assert declare.trains_as(job.job.declaration)
    assert not msgspec.structs.replace(declare, fingerprint="other").trains_as(job.job.declaration)
