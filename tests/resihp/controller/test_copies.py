"""State that one rank holds: a live rank without work is given a copy, and the next loss does not end the job."""

from __future__ import annotations

from typing import Any

import msgspec

from resihp.controller import interface as api
from resihp.controller.fail_slow import standings
from resihp.controller.interface import Dependencies
from resihp.protocol import messages as m
from resihp.record.journal import ChangeDecided, PlanRefused
from resihp.simulator.random_planner import RandomPlanner
from tests.resihp.controller.direct import DECLARE
from tests.resihp.controller.fail_slow.test_slowness import DEAR, Job

LONG = msgspec.structs.replace(DECLARE, iterations=1000)


def only_drops_replicas() -> Dependencies:
    """A planner that gives up a replica that lost a rank, so that its other ranks have no work."""
    return Dependencies(planner=RandomPlanner(0, 0.0, "cautious"))


def after_a_loss(**options: Any) -> Job:
    """Two replicas on two nodes, ranks 0 1 and 2 3; rank 1 died, and everybody has parked."""
    given: dict[str, Any] = {"nodes": 2, "come_backs": 0, "dependencies": only_drops_replicas()} | options
    job = Job(**given)
    if given.get("examine"):
        job.measure()
    job.run(1)
    job.crash(1)
    job.park(stepped=1)
    return job


def said(job: Job) -> list[str]:
    return [action.text for action in job.actions if isinstance(action, api.Say)]


def changes(job: Job) -> list[str]:
    return [entry.reason for entry in job.all(ChangeDecided)]


def test_a_job_of_one_replica_begins_with_its_copies_and_is_not_interrupted_for_them() -> None:
    job = Job(nodes=2, spares=1)
    job.run(2)
    assert (job.plan.epoch, job.plan.computing, job.plan.mirroring) == (1, (0, 1), {2, 3})
    assert not [text for text in said(job) if "alone: if" in text]
    assert changes(job) == []


def test_the_rank_that_a_loss_leaves_idle_takes_a_copy_with_the_same_change_of_layout() -> None:
    job = after_a_loss()
    assert job.plan.computing == (2, 3)
    assert job.plan.mirroring == {0}
    job.run(2)
    assert not [text for text in said(job) if "alone: if" in text]
    assert changes(job) == []


def test_the_last_replica_may_lose_a_rank_whose_copy_is_there() -> None:
    job = after_a_loss(dependencies=None).run(1)
    for lost in (2, 3):
        job.crash(lost)
        job.park(stepped=job.job.record.committed)
        assert job.end is None
        job.run(1)
    assert job.plan.layout.active == (0,)


def test_a_mirror_that_dies_costs_no_state() -> None:
    job = after_a_loss().run(1)
    job.crash(0)
    job.park(stepped=2)
    assert job.plan.layout.active == (2, 3)
    assert job.plan.mirrors == ()


def came_back(speed: float, **options: Any) -> Job:
    """Node n1 lost both of its ranks, one after the other; the process that came back on n1's first device reaches
    `speed` of its peers in its probe."""
    job = after_a_loss(come_backs=1, examine=True, **options)
    job.run(1)
    job.crash(0)
    job.park(stepped=2)
    job.run(1)
    assert job.plan.layout.ranks == (2, 3)
    (newcomer,) = [p for p, place in enumerate(job.job.record.placements) if p > 3 and place.device == 0]
    job.join(newcomer)
    while any(newcomer in known.silent for known in job.job.examinations.values()):
        job.measure({newcomer: speed})
    return job


def interrupted(job: Job) -> None:
    """Everybody parks after the iteration that the controller asked to pause after."""
    assert job.job.pause is not None
    epoch, iteration = job.job.pause.epoch, job.job.record.committed + 1
    asked = sorted(job.job.pause.asked)
    job.step(iteration, pause=True)
    for rank in sorted(asked, key=lambda rank: rank in job.job.record.working):
        job.park(rank, stepped=iteration, epoch=epoch)


def test_a_device_whose_probe_is_slow_holds_a_copy_and_computes_nothing() -> None:
    job = came_back(0.6)
    assert job.job.pause is not None
    assert "second copy" in job.job.pause.reason
    interrupted(job)
    assert job.plan.computing == (2, 3)
    assert job.plan.mirroring == {5}
    job.run(1)
    assert len(changes(job)) == 1


def test_near_the_end_no_copy_is_worth_an_interruption() -> None:
    job = came_back(0.6, declare=msgspec.structs.replace(DECLARE, iterations=6), records=DEAR)
    assert job.job.pause is None


def test_a_device_without_an_answer_to_its_probe_holds_no_copy() -> None:
    job = after_a_loss(come_backs=1, examine=True)
    job.run(1)
    job.crash(0)
    job.park(stepped=2)
    job.run(1)
    job.join(4)
    _, probe = job.orders(m.Probe)[-1]
    job.say(4, m.Probed(probe=probe.probe, error="device cuda:1: fails its probe: a product is off by 3"))
    job.step(4)
    assert job.job.pause is None
    assert changes(job) == []


def test_a_rank_that_refuses_to_hold_a_copy_is_not_asked_again_and_again() -> None:
    job = came_back(0.6)
    refusals = 0
    for _ in range(20):
        if job.job.pause is None:
            job.step(job.job.record.committed + 1)
            continue
        interrupted(job)
        assert job.plan.mirroring == {5}
        refusals += 1
        job.say(5, m.Object(epoch=job.plan.epoch, reason="rank 5: needs 9 GB, its device has 1 GB"))
        job.park(stepped=job.job.record.committed)
        assert job.plan.computing == job.plan.layout.active == (2, 3)
        job.run(1)
    assert job.end is None
    assert refusals == len(job.all(PlanRefused)) == 1


def test_a_mirror_that_is_well_again_gets_work() -> None:
    job = came_back(0.6, dependencies=None)
    interrupted(job)
    assert job.plan.mirroring == {5}
    job.run(1)
    job.train(job.job.settings.recheck_s + 1)
    assert 5 in job.asked
    job.measure()
    assert job.job.pause is not None
    interrupted(job)
    assert 5 in job.plan.computing


def test_who_holds_a_copy_is_said_once() -> None:
    job = after_a_loss().run(3)
    assert [text for text in said(job) if "as a backup" in text] == [
        "rank 0 mirrors layers 0-5 as a backup, and processes no micro-batches"
    ]


def test_a_mirror_has_nothing_to_measure_and_is_not_told_to_be_silent() -> None:
    job = after_a_loss().run(1)
    job.monitor.coverage = lambda: {0: 0, 2: 0, 3: 400}  # type: ignore[method-assign]
    job.monitor.standing = lambda rank: None  # type: ignore[attr-defined]
    job.monitor.scores = lambda: None  # type: ignore[method-assign]
    job.job.judged_by = "workload"
    for iteration in (400, 416):
        standings.note(job.job, iteration, "workload")
    assert job.job.record.unwatched == (2,), "rank 0 mirrors them, and never reports times"
