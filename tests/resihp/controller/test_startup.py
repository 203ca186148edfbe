"""The start: nodes that never come, or go before training begins, with and without spares."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.fail_stop.watchdog import LATECOMERS_S
from resihp.protocol import messages as m
from resihp.record.journal import AnyEntry, FailureFound, NodeLost, PlanDecided
from resihp.settings import Settings
from tests.resihp.controller.direct import DECLARE, PLAIN, Direct

NAMES = ("n1", "n2", "n3")


class Start:
    """A job at its start: three nodes of one device in an allocation, unless told otherwise."""

    def __init__(self, spares: int = 1, controller: Controller | None = None, **settings: Any) -> None:
        given: dict[str, Any] = {"slurm": True, "batch_node": "n1", "may_requeue": True, "restarts_left": 2}
        given |= PLAIN | {"nodes": 3, "gpus_per_node": 1, "tp": 1, "pp": 2} | settings
        names = tuple(f"n{number + 1}" for number in range(given["nodes"]))
        self.settings = Settings(job="77", node_names=names, spares=spares, **given)
        self.controller = controller or Controller(self.settings)
        self.now = 0.0
        self.actions: list[api.AnyAction] = []

    def feed(self, event: api.AnyEvent, later_s: float = 0.01) -> list[api.AnyAction]:
        self.now += later_s
        answer = self.controller.handle(event, self.now)
        self.actions += answer
        return answer

    def join(self, *names: str) -> None:
        for name in names:
            self.feed(api.AgentJoined(node=name, host=name, devices=self.settings.gpus_per_node))

    def spawn(self, *ranks: int) -> None:
        for rank in ranks:
            place = self.controller.job.record.placements[rank]
            self.feed(api.WorkerSpawned(rank=rank, node=place.node, device=place.device, pid=1000 + rank))

    def lose(self, name: str, reason: str = "its agent exited with status 127") -> None:
        self.feed(api.AgentLost(node=name, reason=reason, how="agent"))

    def train(self, *ranks: int) -> None:
        """Processes come up and say what they train."""
        for rank in ranks:
            self.spawn(rank)
            self.feed(api.WorkerSaid(rank=rank, message=DECLARE))

    def wait(self, seconds: float) -> None:
        """With beats of all agents that have joined."""
        for _ in range(round(seconds)):
            for name, node in self.controller.job.nodes.items():
                if node.alive:
                    self.feed(api.AgentBeat(node=name, beat=m.Beat(workers=())), 0.0)
            self.feed(api.Tick(), 1.0)

    def all(self, kind: type) -> list[Any]:
        return [a.entry for a in self.actions if isinstance(a, api.Log) and isinstance(a.entry, kind)]

    @property
    def journal(self) -> list[AnyEntry]:
        return [action.entry for action in self.actions if isinstance(action, api.Log)]

    @property
    def end(self) -> tuple[int, str] | None:
        return next(((a.exit_code, a.reason) for a in self.actions if isinstance(a, api.End)), None)

    @property
    def starts(self) -> list[tuple[str, tuple[tuple[int, int], ...], tuple[str, ...]]]:
        return [(a.node, a.workers, a.nodes) for a in self.actions if isinstance(a, api.StartWorkers)]

    @property
    def planned(self) -> list[tuple[int, ...]]:
        return [entry.plan.layout.ranks for entry in self.all(PlanDecided)]


def test_a_node_whose_agent_cannot_start_ends_the_job_at_once() -> None:
    """Not after all the time that a start may take."""
    job = Start(spares=0, slurm=False)
    job.join("n1")
    job.lose("n2")
    assert job.end is None
    job.lose("n3")
    assert job.end == (5, "node n3: its agent exited with status 127 before it joined")


def test_slurm_runs_a_job_again_that_could_not_begin() -> None:
    job = Start(spares=0, least=1.0)
    job.join("n1")
    job.lose("n2")
    job.wait(3)
    assert job.end == (75, "node n2: its agent exited with status 127 before it joined; to be run again")
    assert any(isinstance(action, api.End) and action.requeue for action in job.actions)


def test_what_no_other_run_could_start_either_is_not_run_again() -> None:
    """The job's folder is not there, say."""
    job = Start(spares=0, least=0.7)
    job.join("n1")
    job.feed(api.AgentLost(node="n2", reason="its agent exited with status 3", cannot_start=True))
    text = "node n2: its agent exited with status 3 before it joined; not run again, because this must be fixed first"
    assert job.end == (5, text)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"may_requeue": False}, "not run again, because its batch script forbids it; submit it again to continue"),
        (
            {"restarts_left": 0},
            "not requeued: this run added no checkpoint, and [slurm] restarts is used up",
        ),
    ],
)
def test_a_job_that_may_not_be_run_again_says_why(settings: dict[str, Any], advice: str) -> None:
    job = Start(spares=0, least=1.0, **settings)
    job.lose("n2")
    job.wait(3)
    assert job.end == (5, f"node n2: its agent exited with status 127 before it joined; {advice}")


def test_a_node_that_never_joined_is_left_out_and_ranks_are_given_to_the_others() -> None:
    job = Start()
    job.join("n1")
    job.lose("n2")
    assert job.starts == []
    job.join("n3")
    assert job.starts == [("n1", ((0, 0),), ("n1", "n3")), ("n3", ((1, 0),), ("n1", "n3"))]
    job.train(0, 1)
    assert job.planned == [(0, 1)]
    assert [entry.node for entry in job.all(NodeLost)] == ["n2"]
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.ranks) == ("node", "n2", ()), "none of its processes ever ran"
    assert failure.cause == "node n2: its agent exited with status 127"


def test_a_node_that_dies_before_training_begins_is_left_out_and_ranks_stay_as_they_are() -> None:
    job = Start()
    job.join(*NAMES)
    job.train(0, 2)
    job.lose("n2", "connection closed for 1 s")
    assert job.planned == [(0, 2)]
    job.train(1)
    assert job.planned == [(0, 2)], "what was lost stays out"


def test_its_processes_are_a_failure_of_the_node() -> None:
    job = Start()
    job.join(*NAMES)
    job.train(1)
    job.lose("n2", "connection closed for 1 s")
    job.train(0, 2)
    assert job.planned == [(0, 2)]
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.ranks) == ("node", "n2", (1,))


def test_more_nodes_than_can_be_done_without_end_the_job() -> None:
    job = Start(least=0.6)
    job.join(*NAMES)
    job.lose("n2", "connection closed for 1 s")
    assert job.end is None
    job.lose("n3", "connection closed for 1 s")
    assert [failure.node for failure in job.all(FailureFound)] == ["n2", "n3"], "the record says who was missing"
    job.wait(3)
    assert job.end == (75, "node n3: connection closed for 1 s before training began; to be run again")


def test_a_spare_that_does_not_come_is_not_waited_for_for_long() -> None:
    job = Start()
    job.join("n1", "n3")
    job.wait(LATECOMERS_S - 1)
    assert job.starts == []
    job.wait(3)
    assert [node for node, _, _ in job.starts] == ["n1", "n3"]
    assert not any(isinstance(action, api.DropNode) for action in job.actions), "it may still come"


def test_a_job_without_spares_waits_for_all_nodes_as_long_as_a_start_may_take() -> None:
    job = Start(spares=0)
    job.join("n1", "n3")
    job.wait(job.settings.start_budget_s - 1)
    assert (job.starts, job.end) == ([], None)
    job.wait(3)
    assert [node for node, _, _ in job.starts] == ["n1", "n3"]
    job.train(0, 1)
    (failure,) = job.all(FailureFound)
    assert failure.cause == "node n2: has not joined within 600 s"


def test_a_job_that_may_only_begin_whole_ends_when_a_start_has_taken_its_time() -> None:
    job = Start(spares=0, least=1.0)
    job.join("n1", "n3")
    job.wait(job.settings.start_budget_s + 2)
    assert job.end == (75, "only 2 of 3 nodes joined within 600 s; to be run again")
    assert [failure.node for failure in job.all(FailureFound)] == ["n2"]


def test_a_plain_program_does_not_hang_without_one_of_its_nodes() -> None:
    """It never says that it trains, so that nobody knows whether it can do without."""
    job = Start()
    job.join(*NAMES)
    job.spawn(0, 1, 2)
    job.lose("n2", "connection closed for 1 s")
    assert job.end is None
    job.wait(job.settings.start_budget_s + 3)
    assert job.end == (75, "n2 lost, and no rank was ready to train within 600 s; to be run again")


@pytest.mark.parametrize("early", [True, False], ids=["before it joined", "after it joined"])
def test_another_supervisor_gives_the_same_ranks_to_the_same_nodes(early: bool) -> None:
    job = Start()
    job.join("n1") if early else job.join(*NAMES)
    job.lose("n2", "connection closed for 1 s")
    if early:
        job.join("n3")
    next_one = Start(controller=Controller.recover(job.settings, job.journal))
    for name in ("n1", "n3"):
        next_one.feed(
            api.AgentJoined(node=name, host=name, devices=1, inventory=m.Inventory(workers=(), ended=(), epoch=0))
        )
    assert next_one.starts == [start for start in job.starts if start[0] != "n2"]
    last = 1 if early else 2
    next_one.train(0, last)
    assert next_one.planned == [(0, last)]
    assert next_one.end is None


def test_a_loss_gives_those_that_are_still_to_come_their_time_again() -> None:
    """Two of three were enough, and one of them is gone."""
    job = Start()
    job.join("n1", "n2")
    job.wait(30)
    job.lose("n2")
    job.wait(LATECOMERS_S)
    assert job.end is None
    job.join("n3")
    assert [node for node, _, _ in job.starts] == ["n1", "n3"]


def test_devices_that_were_measured_when_the_job_is_to_stop_are_given_no_work() -> None:
    job = Start(examine=True)
    job.join(*NAMES)
    job.train(0, 1, 2)
    job.feed(api.Signalled(signal=signal.SIGTERM))  # Slurm has not said why yet
    (probe,) = [a.order for a in job.actions if isinstance(a, api.Order) and isinstance(a.order, m.Probe)]
    for rank in range(3):
        answer = m.Probed(probe=probe.probe, speed=m.Speed(flops=1e14, memory_bytes=1e12), seconds=0.2)
        job.feed(api.WorkerSaid(rank=rank, message=answer))
    assert job.planned == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_first_plan_leaves_room_for_what_ranks_work_with(device: str) -> None:
    """CUDA and NCCL take more than all of this device's memory; on processors they are not there."""
    declare = msgspec.structs.replace(DECLARE, device=device, back_end="nccl" if device == "cuda" else "gloo")
    job = Direct(declare=declare, memory_bytes=4_000_000_000)
    ended = [action for action in job.actions if isinstance(action, api.End)]
    if device == "cpu":
        assert not ended
        assert job.job.record.first_plan is not None
    else:
        assert ended
        for part in ("state", "activations", "CUDA's context", "NCCL's communicators", "gaps between allocations"):
            assert f"B of {part}" in ended[0].reason


def test_the_first_plan_is_tuned_where_the_user_wants_it() -> None:
    plain, tuned = Direct(), Direct(tune=True)
    (before,), (after,) = plain.all(PlanDecided), tuned.all(PlanDecided)
    assert after.predicted < before.predicted
    assert "; tuned: predicted " in after.reason
    assert tuned.run(1).job.record.committed == 1


# --- a script that is broken for everybody ------------------------------------------------------------------------


def raises(job: Start, rank: int, spawn: bool = True) -> None:
    """Its process comes up, and the script raises."""
    if spawn:
        job.spawn(rank)
    said = m.Raised(iteration=0, error="ValueError: broken", traceback="...")
    job.feed(api.WorkerSaid(rank=rank, message=said))
    job.feed(api.WorkerExited(rank=rank, status=1))


def test_a_node_that_takes_longer_to_start_may_come_to_the_same_exception() -> None:
    """Nodes import from one file system, and the first may have raised, and ended, long before the last begins."""
    job = Start(spares=0)
    job.join(*NAMES)
    raises(job, 0)
    job.wait(100)
    assert job.end is None
    raises(job, 1)
    job.wait(100)
    raises(job, 2)
    assert job.end is not None
    assert job.end[0] == 93


def test_an_exception_of_one_rank_alone_is_told_when_the_others_do_not_get_ready_either() -> None:
    """A plain program never says that it trains, and cannot do without one of its processes."""
    job = Start(spares=0, start_budget_s=30.0)
    job.join(*NAMES)
    job.spawn(0, 1, 2)
    raises(job, 0, spawn=False)
    job.wait(25)
    assert job.end is None
    job.wait(10)
    assert job.end is not None
    assert "ValueError: broken; other ranks did not raise it" in job.end[1]
