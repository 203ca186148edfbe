"""A script that does not use resihp.Trainer is started again inside the running job: when, where, how often."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.fold import fold
from resihp.record.journal import FailureFound, RestartDecided, WorkersOrdered
from resihp.settings import SCRIPT_ALONE_S
from tests.resihp.controller.direct import DECLARE
from tests.resihp.controller.test_startup import Start

PEER = "RuntimeError: Connection closed by peer [10.0.0.2]:{}"


class Script(Start):
    """A script of two nodes with two devices each, and nodes that obey: processes start and end as ordered."""

    def __init__(self, controller: Controller | None = None, **settings: Any) -> None:
        given = {"nodes": 2, "gpus_per_node": 2, "spares": 0, "pp": 1, "max_restarts": 100}
        super().__init__(controller=controller, **(given | settings))
        self.obeyed = 0

    def begin(self) -> None:
        self.join(*self.settings.node_names)
        self.obey()
        self.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))

    def obey(self) -> None:
        """Carry out the orders of the controller that are not carried out yet."""
        while self.obeyed < len(self.actions):
            self.obey_one()

    def obey_one(self) -> None:
        action = self.actions[self.obeyed]
        self.obeyed += 1
        if isinstance(action, api.StartWorkers):
            for rank, device in action.workers:
                self.feed(api.WorkerSpawned(rank=rank, node=action.node, device=device, pid=1000 + self.obeyed))
        elif isinstance(action, api.EndProcesses):
            self.end_processes(action.node)

    def end_processes(self, node: str) -> None:
        for rank in self.controller.job.live:
            if self.controller.job.members[rank].node == node:
                self.feed(api.WorkerExited(rank=rank, status=-15))
        self.feed(api.ProcessesEnded(node=node, round=self.controller.job.record.round))

    def kill(self, rank: int) -> None:
        self.feed(api.WorkerExited(rank=rank, status=-9))
        self.feed(api.Tick())

    def run_for(self, seconds: float) -> None:
        """Let time pass with heartbeats, in steps of 10 s."""
        for _ in range(round(seconds / 10)):
            self.wait(1)
            self.now += 9.0
            self.controller.job.now = self.now
            for node in self.controller.job.nodes.values():
                node.last_beat = self.now

    @property
    def rounds(self) -> list[tuple[int, tuple[str, ...]]]:
        """(number, nodes) of each round."""
        return [(entry.round, tuple(node for _, node, _ in entry.workers)) for entry in self.all(WorkersOrdered)]

    @property
    def texts(self) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, api.Say)]


def script(**settings: Any) -> Script:
    job = Script(**settings)
    job.begin()
    return job


def test_all_processes_are_ended_and_started_again_on_the_same_nodes() -> None:
    job = script()
    job.kill(2)
    assert [action.node for action in job.actions if isinstance(action, api.EndProcesses)] == ["n1", "n2"]
    assert len(job.starts) == 2, "nothing starts before all processes have ended"
    job.end_processes("n1")
    assert len(job.starts) == 2
    job.end_processes("n2")
    job.obey()
    assert job.rounds == [(0, ("n1", "n1", "n2", "n2")), (1, ("n1", "n1", "n2", "n2"))]
    assert [action.round for action in job.actions if isinstance(action, api.StartWorkers)] == [0, 0, 1, 1]
    assert job.controller.job.live == (0, 1, 2, 3)
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.ranks, failure.node) == ("process", (2,), "n2")
    assert job.end is None


def test_processes_that_only_lost_their_peer_or_were_ended_by_us_are_no_failures() -> None:
    job = script()
    job.feed(api.WorkerSaid(rank=0, message=m.Raised(iteration=0, error=PEER.format(1), traceback=PEER.format(1))))
    job.kill(2)
    job.obey()
    job.feed(api.WorkerExited(rank=0, status=1))
    assert [failure.ranks for failure in job.all(FailureFound)] == [(2,)]


def test_the_script_ends_well_in_its_second_round() -> None:
    job = script()
    job.kill(2)
    job.obey()
    for rank in range(4):
        job.feed(api.WorkerExited(rank=rank, status=0))
    assert job.end is not None
    assert job.end[0] == 0


def test_an_exception_of_one_rank_waits_a_second_for_the_same_on_others() -> None:
    job = script()
    job.feed(api.WorkerSaid(rank=1, message=m.Raised(iteration=0, error="ValueError: x", traceback="ValueError: x")))
    job.feed(api.WorkerExited(rank=1, status=1))
    job.feed(api.Tick())
    assert not job.all(RestartDecided)
    job.wait(2)
    assert len(job.all(RestartDecided)) == 1


def test_a_lost_node_ends_the_job_unless_the_user_allows_fewer() -> None:
    job = script(slurm=False)
    job.lose("n2", "its agent was killed")
    assert job.end == (5, "node n2: its agent was killed")
    assert any("the script needs 2 nodes ([job] min_nodes), 1 can be used" in text for text in job.texts)


@pytest.mark.parametrize(("slurm", "exit_code"), [(True, 75), (False, 1)])
def test_a_dead_device_without_another_node_has_slurm_run_the_job_again(slurm: bool, exit_code: int) -> None:
    job = script(slurm=slurm)
    line = "NVRM: Xid (PCI:0000:00): 79, pid=1002, GPU has fallen off the bus"
    xid = m.Clue(kind="xid 79", line=line, at=None, named={"xid": "79", "pid": str(job.controller.job.members[2].pid)})
    job.feed(api.WorkerExited(rank=2, status=-9, clues=(xid,)))
    job.feed(api.Tick())
    job.wait(30)
    assert job.end is not None
    assert job.end[0] == exit_code
    assert any("the script needs 2 nodes ([job] min_nodes), 1 can be used" in text for text in job.texts)


def test_with_fewer_nodes_ranks_are_counted_anew() -> None:
    job = script(nodes=3, min_nodes=2, slurm=False)
    job.lose("n2", "its agent was killed")
    job.obey()
    assert job.rounds[1] == (1, ("n1", "n1", "n3", "n3"))
    assert [workers for _, workers, _ in job.starts[3:]] == [((0, 0), (1, 1)), ((2, 0), (3, 1))]
    assert job.starts[-1][2] == ("n1", "n1", "n3", "n3")
    job.kill(3)
    job.obey()
    assert job.rounds[2] == (2, ("n1", "n1", "n3", "n3"))
    assert job.end is None


def test_a_round_has_whole_replicas() -> None:
    job = script(nodes=4, min_nodes=1, tp=2, pp=2, slurm=False)
    job.lose("n4", "its agent was killed")
    job.obey()
    assert job.rounds[1][1] == ("n1", "n1", "n2", "n2", "n3", "n3")[:4], "three nodes of 2 are not whole replicas of 4"


def test_a_node_with_a_dead_device_is_not_used_again() -> None:
    job = script(nodes=3, min_nodes=2, slurm=False)
    line = "NVRM: Xid (PCI:0000:00): 79, pid=1002, GPU has fallen off the bus"
    xid = m.Clue(kind="xid 79", line=line, at=None, named={"xid": "79", "pid": str(job.controller.job.members[2].pid)})
    job.feed(api.WorkerExited(rank=2, status=-9, clues=(xid,)))
    job.feed(api.Tick())
    assert job.controller.job.record.dead_devices == {("n2", 0)}
    job.obey()
    assert "n2" not in job.rounds[1][1]


def test_a_device_that_fails_again_and_again_is_left_out_if_others_are_enough() -> None:
    job = script(nodes=3, min_nodes=2, slurm=False, come_backs=1)
    for _ in range(2):
        job.run_for(130)
        job.kill(2)
        job.obey()
    assert [nodes for _, nodes in job.rounds][-1] == ("n1", "n1", "n3", "n3")


def test_a_late_node_takes_part_in_the_next_round() -> None:
    job = Script(nodes=3, min_nodes=2, spares=1, slurm=False)
    job.join("n1", "n2")
    for _ in range(8):
        job.run_for(10)
    job.obey()
    job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
    assert job.rounds == [(0, ("n1", "n1", "n2", "n2"))]
    job.join("n3")
    job.kill(0)
    job.obey()
    assert job.rounds[1] == (1, ("n1", "n1", "n2", "n2", "n3", "n3"))


@pytest.mark.parametrize("times", [0, 1, 2])
def test_the_users_limit_holds(times: int) -> None:
    job = script(max_restarts=times, slurm=False)
    for _ in range(times):
        job.run_for(130)
        job.kill(1)
        job.obey()
        assert job.end is None
    job.kill(1)
    job.wait(4)
    assert job.end is not None
    assert job.end[0] == 1
    assert len(job.all(RestartDecided)) == times
    assert any(f"[adapt] max_restarts is {times}" in text for text in job.texts)


def test_a_script_without_progress_is_not_started_for_ever() -> None:
    job = script(slurm=False)
    for _ in range(10):
        job.kill(1)
        job.wait(4)
        job.obey()
    assert len(job.all(RestartDecided)) == 3
    assert job.end is not None
    assert job.end[0] == 93
    assert any("the last 4 runs of the script made no progress" in text for text in job.texts)


def test_printed_iterations_beyond_the_furthest_are_progress() -> None:
    def reach(iteration: int) -> None:
        figures = (m.PrintedFigures(iteration=iteration, seconds=1.0),)
        job.feed(api.WorkerPrinted(printed=m.Printed(rank=0, figures=figures)))
        job.kill(1)
        job.wait(4)
        job.obey()

    job = script(slurm=False)
    for iteration in range(10, 100, 10):
        reach(iteration)
    assert job.end is None, "although each round was short, and ended as the one before"
    for _ in range(10):
        reach(90)
    assert [entry.progressed for entry in job.all(RestartDecided)] == [True] * 9 + [False] * 3
    assert job.end is not None


def test_progress_begins_the_count_anew() -> None:
    job = script(slurm=False)
    for rank in (1, 2, 1, 2, 1, 2, 1):
        job.run_for(130)
        job.feed(api.WorkerExited(rank=rank, status=-9 if rank == 1 else -6))
        job.wait(4)
        job.obey()
    assert job.end is None
    assert [entry.progressed for entry in job.all(RestartDecided)] == [True] * 7


def test_in_a_long_job_processes_die_of_the_same_cause_again_and_again() -> None:
    job = script(nodes=8, slurm=False)
    for rank in (1, 3, 5, 7, 9, 11):
        job.run_for(4000)
        job.kill(rank)
        job.wait(4)
        job.obey()
    assert job.end is None
    assert len(job.rounds) == 7


def test_other_nodes_may_be_lost_one_after_the_other() -> None:
    job = script(nodes=8, min_nodes=2, slurm=False)
    for name in ("n1", "n3", "n5", "n7", "n8"):
        job.run_for(200)
        job.lose(name, "its agent was killed")
        job.wait(4)
        job.obey()
    assert job.end is None
    assert job.rounds[-1][1] == ("n2", "n2", "n4", "n4", "n6", "n6")


def test_nodes_of_ranks_that_failed_with_another_are_not_left_out() -> None:
    """A command's ranks only exit with a status: which of them lost a peer is not known."""
    job = script(nodes=4, min_nodes=2, slurm=False, come_backs=1)
    for _ in range(3):
        job.run_for(4000)
        job.feed(api.WorkerExited(rank=2, status=-9))
        for rank in (0, 4):
            job.feed(api.WorkerExited(rank=rank, status=1))
        job.wait(4)
        job.obey()
    assert [nodes[::2] for _, nodes in job.rounds][-1] == ("n1", "n3", "n4")


def test_a_round_in_which_a_supervisor_died_is_no_progress_by_its_clock() -> None:
    before = script(nodes=3, min_nodes=1, slurm=False, declares=False)
    after = Script(controller=Controller.recover(before.settings, before.journal), slurm=False)
    after.now = 1e6
    for number, name in enumerate(before.settings.node_names[:2]):
        workers = tuple(m.RunningWorker(rank=2 * number + d, device=d, pid=10 + d) for d in (0, 1))
        after.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=m.Inventory(workers=workers)))
    after.lose("n3")
    after.wait(4)
    (decision,) = after.all(RestartDecided)
    assert not decision.progressed


@pytest.mark.parametrize("seconds", [130, 8000])
def test_an_error_of_the_script_on_all_ranks_is_tried_again_only_after_progress(seconds: float) -> None:
    def fail(job: Script) -> None:
        for rank in range(4):
            error = "ValueError: bad sample"
            job.feed(api.WorkerSaid(rank=rank, message=m.Raised(iteration=0, error=error, traceback=error)))
            job.feed(api.WorkerExited(rank=rank, status=1))
        job.wait(4)
        job.obey()

    job = script(slurm=False)
    fail(job)
    assert job.end is not None
    assert job.end[0] == 93
    job = script(slurm=False)
    job.run_for(130)
    fail(job)
    assert job.end is None
    job.run_for(seconds)
    fail(job)
    assert job.end is not None
    assert job.end[0] == 93, "the same error again"


def test_a_node_whose_processes_cannot_be_ended_is_given_up() -> None:
    job = script(nodes=3, min_nodes=2, slurm=False)
    job.feed(api.WorkerExited(rank=0, status=-9))
    job.feed(api.Tick())
    job.end_processes("n1")
    job.end_processes("n3")
    job.obeyed = len(job.actions)
    job.wait(35)
    assert len(job.rounds) == 1, "they may still run"
    job.wait(40)
    job.obey()
    assert job.rounds[1] == (1, ("n1", "n1", "n3", "n3"))
    assert any("n2: its processes have not ended within 30 s" in text for text in job.texts)


def test_a_node_that_is_lost_meanwhile_is_left_out() -> None:
    job = script(nodes=3, min_nodes=1, slurm=False)
    job.feed(api.WorkerExited(rank=0, status=-9))
    job.feed(api.Tick())
    job.lose("n3", "its agent was killed")
    job.obey()
    assert job.rounds[1] == (1, ("n1", "n1", "n2", "n2"))
    assert [failure.node for failure in job.all(FailureFound)] == ["n1", "n3"]


def test_a_stop_is_heard_while_processes_are_ended() -> None:
    job = script(slurm=False)
    job.kill(0)
    job.feed(api.StopAsked(request=1, at_once=False))
    job.obey()
    job.wait(5)
    assert job.end is not None
    assert len(job.rounds) == 1


def test_a_successor_goes_on_with_the_restart() -> None:
    before = script(slurm=False)
    before.kill(0)
    after = Script(controller=Controller.recover(before.settings, before.journal), slurm=False)
    for name in ("n1", "n2"):
        ranks = {"n1": (1,), "n2": (2, 3)}[name]
        workers = tuple(m.RunningWorker(rank=rank, device=rank % 2, pid=10 + rank) for rank in ranks)
        ended = ((0, -9),) if name == "n1" else ()
        inventory = m.Inventory(workers=workers, ended=ended)
        after.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=inventory))
    after.obey()
    assert after.rounds == [(1, ("n1", "n1", "n2", "n2"))]
    assert not after.all(FailureFound), "the first supervisor has explained it"


def test_a_successor_starts_the_round_that_was_decided() -> None:
    before = script(slurm=False)
    before.kill(0)
    before.obey()
    journal = before.journal
    last = max(number for number, entry in enumerate(journal) if isinstance(entry, WorkersOrdered))
    after = Script(controller=Controller.recover(before.settings, journal[: last + 1]), slurm=False)
    for name in ("n1", "n2"):
        after.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=m.Inventory()))
    assert [(node, workers) for node, workers, _ in after.starts] == [
        ("n1", ((0, 0), (1, 1))),
        ("n2", ((2, 0), (3, 1))),
    ]
    after.obey()
    after.kill(2)
    after.obey()
    assert after.rounds == [(2, ("n1", "n1", "n2", "n2"))]


def test_the_answer_to_a_repeated_order_does_not_end_the_next_round() -> None:
    """A successor repeats the order; the answer comes once the next round runs and is being ended, too."""
    job = script(slurm=False)
    job.kill(0)
    job.obey()
    job.kill(3)
    late = [api.ProcessesEnded(node=name, round=0) for name in ("n1", "n2")]
    for answer in late:
        job.feed(answer)
    assert len(job.rounds) == 2, "no process of round 1 has been ended"
    job.obey()
    assert len(job.rounds) == 3


@pytest.mark.parametrize("seed", range(150))
def test_no_two_rounds_ever_run_at_the_same_time(seed: int) -> None:
    """Kills, losses of nodes, refusals, take-overs and late reports in any order: a rank names one live process."""
    draw = random.Random(seed)
    job = Script(nodes=4, min_nodes=draw.choice([1, 2, 4]), slurm=draw.random() < 0.3, max_restarts=8)
    running: dict[int, str] = {}
    pending: list[api.AnyAction] = []
    ended: dict[str, int] = {}
    answers: list[api.ProcessesEnded] = []

    def carry_out(action: api.AnyAction) -> None:
        if isinstance(action, api.StartWorkers) and job.controller.job.nodes[action.node].alive:
            for rank, device in action.workers:
                assert rank not in running, "two processes of one rank"
                running[rank] = action.node
                job.feed(api.WorkerSpawned(rank=rank, node=action.node, device=device, pid=100 + rank))
        elif isinstance(action, api.EndProcesses) and job.controller.job.nodes[action.node].alive:
            answers.append(api.ProcessesEnded(node=action.node, round=action.round))
            if action.round <= ended.get(action.node, -1):
                return  # the order is repeated
            ended[action.node] = action.round
            for rank in [rank for rank, node in running.items() if node == action.node]:
                del running[rank]
                job.feed(api.WorkerExited(rank=rank, status=-15))
        elif isinstance(action, api.DropNode):
            for rank in [rank for rank, node in running.items() if node == action.node]:
                del running[rank]

    job.join(*job.settings.node_names)
    for _ in range(120):
        pending += job.actions[job.obeyed :]
        job.obeyed = len(job.actions)
        if job.end is not None:
            break
        if pending and draw.random() < 0.7:
            carry_out(pending.pop(0))
            continue
        if answers and draw.random() < 0.7:
            job.feed(answers.pop(0))
            continue
        happens = draw.random()
        alive = [name for name, node in job.controller.job.nodes.items() if node.alive]
        if happens < 0.25 and running:
            rank = draw.choice(sorted(running))
            del running[rank]
            job.feed(api.WorkerExited(rank=rank, status=draw.choice([-9, 1, 0])))
        elif happens < 0.3 and len(alive) > 1:
            name = draw.choice(alive)
            for rank in [rank for rank, node in running.items() if node == name]:
                del running[rank]
            job.lose(name)
        elif happens < 0.36:
            pending.clear()
            journal = job.journal
            successor = Script(controller=Controller.recover(job.settings, journal), nodes=4)
            successor.settings, successor.now = job.settings, job.now
            successor.actions = [api.Log(entry=entry) for entry in journal]
            successor.obeyed = len(successor.actions)
            job = successor
            for name in alive:
                here = [rank for rank, node in running.items() if node == name]
                workers = tuple(m.RunningWorker(rank=rank, device=rank % 2, pid=100 + rank) for rank in here)
                inventory = m.Inventory(workers=workers)
                job.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=inventory))
        elif happens < 0.4 and alive:
            job.feed(api.AgentBeat(node=alive[0], beat=m.Beat(workers=(), met=True)))
        else:
            job.wait(draw.choice([1, 5]))
        job.controller.check()
    record, folded = job.controller.job.record, fold(job.journal)
    assert (folded.round, folded.placements, folded.restart) == (record.round, record.placements, record.restart)
    assert job.end is None or job.end[0] in (0, 1, 5, 75, 93)


def test_a_spare_node_waits_and_takes_the_place_of_a_lost_one() -> None:
    job = script(nodes=3, spares=1, spares_wait=True, slurm=False)
    assert job.rounds == [(0, ("n1", "n1", "n2", "n2"))], "the world that was asked for"
    job.lose("n1", "its agent was killed")
    job.obey()
    assert job.rounds[1] == (1, ("n2", "n2", "n3", "n3"))
    job.lose("n3", "its agent was killed")
    assert job.end == (5, "node n3: its agent was killed")


def test_the_loss_of_a_node_without_processes_leaves_the_script_alone() -> None:
    job = script(nodes=3, spares=1, spares_wait=True, slurm=False)
    job.lose("n3", "its agent was killed")
    for _ in range(4):
        job.wait(3)
    job.obey()
    assert len(job.rounds) == 1
    assert job.end is None
    assert [failure.node for failure in job.all(FailureFound)] == ["n3"]
    job.kill(1)
    job.obey()
    assert job.rounds[1] == (1, ("n1", "n1", "n2", "n2"))


def test_a_successor_leaves_a_round_alone_that_runs_without_a_lost_node() -> None:
    before = script(nodes=3, min_nodes=2, slurm=False)
    before.lose("n3", "its agent was killed")
    before.obey()
    after = Script(controller=Controller.recover(before.settings, before.journal), slurm=False)
    for number, name in enumerate(("n1", "n2")):
        workers = tuple(m.RunningWorker(rank=2 * number + d, device=d, pid=10 + d) for d in (0, 1))
        after.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=m.Inventory(workers=workers)))
    after.wait(4)
    assert not after.all(RestartDecided)
    assert not after.all(FailureFound)
    assert after.end is None
    assert after.controller.job.live == (0, 1, 2, 3)


def test_spare_nodes_that_waited_stand_by_if_the_script_trains_with_resihp() -> None:
    job = Script(nodes=3, spares=1, spares_wait=True, slurm=False, pp=2)
    job.join(*job.settings.node_names)
    job.obey()
    for rank in range(4):
        job.feed(api.WorkerSaid(rank=rank, message=DECLARE))
    job.obey()
    assert job.planned == [(0, 1, 2, 3)]
    assert job.starts[-1][:2] == ("n3", ((4, 0), (5, 1)))


def test_a_restart_costs_the_same_for_each_rank_in_a_large_job() -> None:
    def calls(nodes: int) -> int:
        job = Script(nodes=nodes, gpus_per_node=8)
        job.begin()
        counted = itertools.count()
        sys.setprofile(lambda frame, event, argument: next(counted))
        try:
            job.kill(9)
            for name in job.settings.node_names:
                for rank in [
                    rank for rank, place in enumerate(job.controller.job.record.placements) if place.node == name
                ]:
                    job.feed(api.WorkerExited(rank=rank, status=-15))
                job.feed(api.ProcessesEnded(node=name, round=0))
        finally:
            sys.setprofile(None)
        assert job.rounds[-1][0] == 1
        return next(counted)

    assert calls(64) < 4.5 * calls(16)


def test_a_replacement_takes_part_in_the_next_round() -> None:
    job = script(nodes=3, min_nodes=2, slurm=True, replacements=1)
    job.lose("n3", "its agent was killed")
    job.obey()
    assert job.rounds[1] == (1, ("n1", "n1", "n2", "n2"))
    for _ in range(6):
        job.run_for(10)
    (asked,) = [action for action in job.actions if isinstance(action, api.AskReplacement)]
    assert asked.exclude == ("n1", "n2", "n3")
    news = {"replacement": 1, "slurm_job": "78", "node": "n9", "text": ""}
    job.feed(api.ReplacementNews(state="running", **news))
    job.feed(api.AgentJoined(node="n9", host="n9", devices=2, lease=1))
    assert len(job.rounds) == 2, "the running round is left alone"
    job.kill(0)
    job.obey()
    assert job.rounds[2] == (2, ("n1", "n1", "n2", "n2", "n9", "n9"))


def test_a_script_with_too_few_nodes_waits_for_a_replacement() -> None:
    job = script(nodes=2, slurm=True, replacements=1)
    job.lose("n2", "its agent was killed")
    job.obey()
    assert job.end is None
    assert any(
        "the script needs 2 nodes ([job] min_nodes), 1 can be used; waits for another node" in t for t in job.texts
    )
    for _ in range(6):
        job.run_for(10)
    assert any(isinstance(action, api.AskReplacement) for action in job.actions)
    job.feed(api.ReplacementNews(replacement=1, state="running", slurm_job="78", node="n9", text=""))
    job.feed(api.AgentJoined(node="n9", host="n9", devices=2, lease=1))
    job.feed(api.Tick())
    job.obey()
    assert job.rounds[-1] == (1, ("n1", "n1", "n9", "n9"))


@pytest.mark.parametrize("settings", [{"slurm": False}, {"slurm": True, "observes": True}])
def test_nobody_waits_for_a_replacement_that_is_not_asked_for(settings: dict[str, bool]) -> None:
    job = script(nodes=2, replacements=1, **settings)
    job.lose("n2", "its agent was killed")
    for _ in range(6):
        job.wait(4)
    assert job.end is not None
    assert not job.all(RestartDecided)


@pytest.mark.parametrize("how", ["refused for good", "in vain"])
def test_a_wait_for_a_replacement_ends(how: str) -> None:
    job = script(nodes=2, slurm=True, replacements=1, start_budget_s=200.0)
    job.lose("n2", "its agent was killed")
    job.obey()
    for _ in range(6):
        job.run_for(10)
    if how == "refused for good":
        job.feed(api.ReplacementNews(replacement=1, state="ended", slurm_job="78", node=None, text="cancelled"))
        job.feed(api.Tick())
    else:
        job.run_for(200)
    job.run_for(30)
    assert job.end is not None
    assert job.end[0] == 75


def test_the_next_round_waits_until_the_processes_of_a_silent_node_have_ended_by_themselves() -> None:
    """A node whose network is cut may still write checkpoints."""
    job = script(nodes=3, min_nodes=2, slurm=False)
    lost_at = job.now
    job.feed(api.AgentLost(node="n3", reason="connection closed for 1 s"))
    job.obey()
    job.wait(20)
    job.obey()
    assert len(job.rounds) == 1
    assert any(
        "node n3: may still run its processes; the others start 40 s after its loss" in text for text in job.texts
    )
    while len(job.rounds) == 1:
        job.wait(1)
        assert job.now - lost_at < 45
    assert job.now - lost_at > SCRIPT_ALONE_S
    assert job.rounds[1] == (1, ("n1", "n1", "n2", "n2"))


def test_a_silent_node_that_slurm_calls_down_is_not_waited_for() -> None:
    job = script(nodes=3, min_nodes=2, slurm=True)
    job.feed(api.AgentLost(node="n3", reason="connection closed for 1 s"))
    job.obey()
    job.wait(3)
    assert len(job.rounds) == 1
    job.feed(api.SlurmSees(node="n3", state="down", reason="Not responding"))
    job.feed(api.Tick())
    assert job.rounds[1] == (1, ("n1", "n1", "n2", "n2"))
