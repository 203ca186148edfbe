"""What is lost before the first plan: whose fault it is, who begins, and what another supervisor makes of it."""

from __future__ import annotations

import itertools
import signal
import sys
from collections import Counter
from types import CodeType
from typing import Any

import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.detector.diagnosis.clues import read_log
from resihp.detector.diagnosis.diagnosis import diagnose
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound, NodeJoined, NodeLost, PlanDecided, ReplacementAsked, WorkerStarted
from tests.resihp.controller.direct import DECLARE
from tests.resihp.controller.test_size import work
from tests.resihp.controller.test_startup import Start
from tests.resihp.detector.lines import FAILED_CONNECTIONS, GLOO_CLOSED, LOST_PEERS, REFUSED_BY_A_SERVICE, traceback

FOUR = {"nodes": 2, "gpus_per_node": 2, "spares": 0}


def gathered(**settings: Any) -> Start:
    """All nodes are there, and their processes were asked for."""
    job = Start(**(FOUR | settings))
    job.join(*job.settings.node_names)
    return job


def says(job: Start, rank: int, message: m.WorkerMessage) -> None:
    job.feed(api.WorkerSaid(rank=rank, message=message))


def ends(job: Start, rank: int, error: str = "", status: int = 1) -> None:
    if error:
        says(job, rank, m.Raised(iteration=1, error=error, traceback=f"Traceback\n{error}"))
    job.feed(api.WorkerExited(rank=rank, status=status))


def first_plan(job: Start) -> Plan:
    plan: Plan = job.all(PlanDecided)[0].plan
    return plan


def failures(job: Start) -> list[tuple[str, str | None, tuple[int, ...]]]:
    return [(failure.component, failure.node, failure.ranks) for failure in job.all(FailureFound)]


# --- whose fault ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_what_all_ranks_raise_is_the_scripts_in_whatever_order_they_end(order: tuple[int, ...]) -> None:
    job = gathered()
    job.spawn(*order)
    for rank in order:
        ends(job, rank, "ValueError: broken")
    assert job.end is not None
    assert job.end[0] == 93
    assert [failure.component for failure in job.all(FailureFound)] == ["script"], "no node is to blame"


def test_the_only_rank_that_raises_is_told_as_one() -> None:
    """It was told as `1 ranks raised the same`."""
    job = gathered(nodes=1, gpus_per_node=1, tp=1, pp=1)
    job.spawn(0)
    ends(job, 0, "ValueError: broken")
    assert job.end is not None
    assert (job.end[0], "on rank 0: ValueError: broken" in job.end[1]) == (93, True)
    (failure,) = job.all(FailureFound)
    assert failure.cause == "rank 0 (n1 device 0) raised: ValueError: broken"


def test_what_differs_in_a_number_alone_is_the_same() -> None:
    job = gathered()
    job.spawn(0, 1, 2, 3)
    for rank in range(4):
        ends(job, rank, f"FileNotFoundError: [Errno 2] No such file or directory: '/data/{rank}'")
    assert job.end is not None
    assert job.end[0] == 93
    (failure,) = job.all(FailureFound)
    assert failure.cause == "4 ranks raised the same: FileNotFoundError: [Errno 2] No such file or directory: '/data/0'"
    told = [action.text for action in job.actions if isinstance(action, api.Say) and ": raised " in action.text]
    assert len(told) == 1, "said of the first rank alone"


def test_a_script_that_exits_alike_everywhere_is_one_failure() -> None:
    job = gathered()
    job.spawn(0, 1, 2, 3)
    for rank in range(4):
        ends(job, rank, status=3)
    assert job.end is not None
    assert job.end == (93, "the training script exits with status 3, on 4 ranks; no node is the cause")
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.cause) == (
        "script",
        None,
        "4 ranks exited with status 3",
    )


def test_a_command_that_fails_everywhere_is_one_failure_though_one_process_is_first() -> None:
    job = gathered(declares=False)
    job.spawn(0, 1, 2, 3)
    ends(job, 1, status=2)
    job.wait(1)
    assert job.end is None
    for rank in (0, 2, 3):
        ends(job, rank, status=2)
    assert job.end is not None
    assert job.end[0] == 93
    assert len(job.all(FailureFound)) == 1


@pytest.mark.parametrize("status", [137, -9, 117])
def test_what_a_signal_ended_is_no_fault_of_the_script(status: int) -> None:
    job = gathered()
    job.spawn(0, 1, 2, 3)
    for rank in range(4):
        ends(job, rank, status=status)
    assert job.end is not None
    assert job.end[0] == 1


@pytest.mark.parametrize("others", [(0, 2), (1, 3)])
def test_half_of_the_ranks_on_two_nodes_are_enough_to_blame_the_script(others: tuple[int, int]) -> None:
    job = gathered()
    job.spawn(0, 1, 2, 3)
    for rank in others:
        ends(job, rank, "ValueError: broken")
    job.wait(5)
    assert job.end is not None
    assert job.end[0] == 93


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_what_all_of_one_node_raise_is_the_nodes(first: bool) -> None:
    """One machine lacks a library: it is lost, as if it had died, and another one may come in its place."""
    job = gathered(replacements=1, drains_left=1)
    job.spawn(0, 1)
    if not first:
        job.train(2, 3)
    for rank in (0, 1):
        ends(job, rank, "ImportError: libcudart.so.12: cannot open shared object file")
    if first:
        job.train(2, 3)
    assert first_plan(job).layout.ranks == (2, 3)
    assert failures(job) == [("node", "n1", (0, 1))]
    (lost,) = job.all(NodeLost)
    assert (lost.node, lost.how) == ("n1", "useless")
    assert "ImportError: libcudart.so.12" in lost.reason
    assert not any(failure.hardware for failure in job.all(FailureFound)), "nothing says that it is broken"


def test_a_rank_that_had_declared_and_raises_before_the_first_plan_is_begun_without() -> None:
    job = gathered()
    job.train(0, 1, 2)
    says(job, 1, m.Raised(iteration=1, error="RuntimeError: CUDA error", traceback="..."))
    job.train(3)
    assert job.planned == [], "its process is waited for"
    ends(job, 1)
    assert job.planned == [(0, 2, 3)]
    assert failures(job) == [("process", "n1", (1,))]


def test_a_rank_whose_script_has_failed_and_that_does_not_end_is_killed() -> None:
    job = gathered()
    job.train(0, 1, 2)
    job.spawn(3)
    says(job, 3, m.Raised(iteration=1, error="RuntimeError: CUDA error", traceback="..."))
    job.wait(5)
    assert [a.rank for a in job.actions if isinstance(a, api.SignalWorker)] == [3]
    assert job.planned == []
    job.wait(20)
    assert job.planned == [(0, 1, 2)], "one that does not even die of that is not waited for"


def test_all_refuse_for_the_user_to_mend() -> None:
    job = gathered()
    job.spawn(0, 1, 2, 3)
    for rank in range(4):
        says(job, rank, m.Refuse(reason=f"rank {rank}: no such folder: data"))
        ends(job, rank, status=2)
    assert job.end == (2, "rank 0: no such folder: data")


# --- processes that cannot be started -------------------------------------------------------------------------------


def test_a_node_that_cannot_start_any_process_is_lost() -> None:
    job = gathered()
    job.feed(api.SpawnRefused(node="n2", reason="no such file: trian.py"))
    job.train(0, 1)
    assert job.planned == [(0, 1)]
    assert failures(job) == [("node", "n2", (2, 3))]
    assert "no such file: trian.py" in job.all(FailureFound)[0].cause


def test_if_no_node_can_start_any_it_is_the_users_to_mend() -> None:
    job = gathered()
    job.feed(api.SpawnRefused(node="n2", reason="no such file: trian.py"))
    assert job.end is None
    job.feed(api.SpawnRefused(node="n1", reason="no such file: trian.py"))
    assert job.end == (2, "node n1: cannot start workers: no such file: trian.py")


def test_one_process_that_could_not_be_started_is_begun_without() -> None:
    job = gathered()
    job.train(0, 1, 2)
    job.feed(api.SpawnRefused(node="n2", reason="cannot fork", rank=3))
    assert job.planned == [(0, 1, 2)]
    assert failures(job) == [("process", "n2", (3,))]


def test_a_fork_server_that_hangs_is_not_waited_for_for_ever() -> None:
    """Its agent beats, its processes never come."""
    job = gathered()
    job.train(0, 1)
    job.wait(job.settings.start_budget_s - 5)
    assert (job.planned, job.end) == ([], None)
    job.wait(10)
    assert job.planned == [(0, 1)]
    assert failures(job) == [("node", "n2", (2, 3))]
    job.feed(api.WorkerSpawned(rank=2, node="n2", device=0, pid=1002))
    assert api.SignalWorker(rank=2, signal=int(signal.SIGKILL)) in job.actions, "what comes after all is in the way"


# --- who begins -----------------------------------------------------------------------------------------------------


def test_groups_stay_within_their_nodes_when_a_device_is_missing() -> None:
    job = gathered(nodes=3, tp=2, pp=1)
    job.train(0, 2, 3, 4, 5)
    job.spawn(1)
    ends(job, 1, "RuntimeError: CUDA error: no device")
    stages = [stage.ranks for replica in first_plan(job).layout.replicas for stage in replica.stages]
    assert (2, 3) in stages
    assert (4, 5) in stages
    assert all(len(ranks) == 1 or ranks in [(2, 3), (4, 5)] for ranks in stages)


def test_a_job_of_two_stages_can_begin_on_one_device() -> None:
    job = gathered(gpus_per_node=1)
    job.train(0)
    job.lose("n2")
    (replica,) = first_plan(job).layout.replicas
    assert [stage.ranks for stage in replica.stages] == [(0,)]


def test_a_model_that_does_not_fit_the_rest_is_told_so() -> None:
    job = gathered(gpus_per_node=1, memory_bytes=1_300_000)
    job.train(0)
    job.lose("n2")
    job.wait(3)
    assert job.end is not None
    assert job.end[0] == 75
    assert "1 of 2 devices are missing, and no layout fits the others" in job.end[1]


def test_a_spare_takes_the_place_of_a_device_that_is_missing() -> None:
    job = gathered(nodes=3, spares=1)
    job.train(0, 1, 2, 4, 5)
    job.spawn(3)
    ends(job, 3, status=-9)
    assert first_plan(job).layout.active == (0, 1, 4, 5)
    assert first_plan(job).layout.standby == (2,)


def test_a_plain_program_ends_with_its_first_failure() -> None:
    """It never says that it trains, so that it cannot do with less."""
    job = gathered()
    job.spawn(0, 1, 2, 3)
    ends(job, 2, status=-9)
    assert job.end is None
    for rank in (0, 1, 3):
        ends(job, rank, status=0)
    assert job.end is not None
    code, reason = job.end
    assert code == 1
    assert reason == "rank 2 (n2 device 0): killed by signal 9 (SIGKILL); see its log, n2.rank2.log"


@pytest.mark.parametrize("declares", [True, False], ids=["script", "command"])
@pytest.mark.parametrize("how", ["killed", "raised", "exited", "node"])
def test_a_rank_of_a_plain_program_that_is_done_is_no_failure(how: str, declares: bool) -> None:
    """Its ranks never meet: the first is done before another one fails."""
    job = gathered(declares=declares)
    job.spawn(0, 1, 2, 3)
    ends(job, 0, status=0)
    if how == "node":
        job.feed(api.AgentLost(node="n1", reason="its agent is gone", how="agent"))
    else:
        ends(job, 2, "ValueError: bad shard" if how == "raised" else "", status=-9 if how == "killed" else 3)
    for rank in (1, 3) if how != "node" else (2, 3):
        ends(job, rank, status=0)
    job.wait(3)
    assert job.end is not None
    (failure,) = job.all(FailureFound)
    assert failure.ranks == ((1,) if how == "node" else (2,))
    assert failure.node == (None if how == "raised" else "n1" if how == "node" else "n2")


def test_nor_is_it_under_a_new_supervisor() -> None:
    before = gathered()
    before.spawn(0, 1, 2, 3)
    ends(before, 0, status=0)
    job = Start(controller=Controller.recover(before.settings, before.journal), **FOUR)
    alive = tuple(m.RunningWorker(rank=rank, device=rank % 2, pid=0, steps=(), said=()) for rank in (1, 2, 3))
    for name, devices in (("n1", alive[:1]), ("n2", alive[1:])):
        inventory = m.Inventory(workers=devices, ended=((0, 0),) if name == "n1" else (), epoch=0)
        job.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=inventory))
    ends(job, 2, status=-9)
    for rank in (1, 3):
        ends(job, rank, status=0)
    assert job.end == (1, "rank 2 (n2 device 0): killed by signal 9 (SIGKILL); see its log, n2.rank2.log")
    assert [failure.ranks for failure in job.all(FailureFound)] == [(2,)]


def test_who_exits_with_status_0_while_others_say_what_they_train_is_lost() -> None:
    job = gathered()
    job.spawn(0)
    ends(job, 0, status=0)
    job.train(1, 2, 3)
    assert job.planned == [(1, 2, 3)]
    assert [(failure.cause, failure.ranks) for failure in job.all(FailureFound)] == [
        ("rank 0 exited with status 0", (0,))
    ]


# --- who comes later ------------------------------------------------------------------------------------------------


def begun_without_n3(**settings: Any) -> Start:
    job = Start(**({"spares": 0} | settings))
    job.join("n1", "n2")
    job.wait(job.settings.start_budget_s + 2)
    return job


def test_a_node_that_comes_late_joins_what_trains() -> None:
    job = begun_without_n3()
    job.train(0, 1)
    assert job.planned == [(0, 1)]
    job.join("n3")
    assert job.starts[-1] == ("n3", ((2, 0),), ("n1", "n2", "n3"))
    assert [entry.node for entry in job.all(NodeJoined)] == ["n1", "n2", "n3"]
    assert "n3" not in job.controller.job.record.lost


def test_one_that_comes_while_the_others_start_waits_for_them() -> None:
    job = begun_without_n3()
    job.join("n3")
    assert [node for node, _, _ in job.starts] == ["n1", "n2"]
    job.train(0, 1)
    assert job.starts[-1][:2] == ("n3", ((2, 0),))
    assert failures(job) == [], "it is there"


def test_one_that_was_given_back_stays_out() -> None:
    job = begun_without_n3()
    job.train(0, 1)
    job.feed(api.SlurmSees(node="n3", state="down", reason="not responding"))
    job.wait(3)
    assert [a.node for a in job.actions if isinstance(a, api.ReleaseNode)] == ["n3"]
    job.feed(api.ReleaseAnswered(node="n3", outcome="done", text=""))
    job.join("n3")
    assert any(isinstance(action, api.DropNode) and action.node == "n3" for action in job.actions)
    assert len(job.starts) == 2


def test_another_node_is_asked_for_in_place_of_one_that_never_came() -> None:
    job = begun_without_n3(replacements=1, pp=1, replacement_wait_s=0.0)
    job.train(0, 1)
    train_on(job, 3, iterations=6)
    (asked,) = job.all(ReplacementAsked)
    assert asked.node == "n3"
    assert "2 of 3 ranks have work" in asked.reason


def train_on(job: Start, last: int, iterations: int) -> None:
    """Through the first plan, and some iterations of a minute, of many more to come."""
    plan = first_plan(job)
    for rank in plan.layout.ranks:
        says(job, rank, m.Confirm(epoch=plan.epoch, digest=plan.digest))
    for rank in plan.layout.ranks:
        says(job, rank, m.Ready(epoch=plan.epoch, groups_s=0.1, state_s=0.1))
    for iteration in range(1, last + 1):
        job.wait(2)
        for rank in plan.layout.active:
            outcome = m.StepOutcome(
                iteration=iteration, clip=1.0, skip=False, learning_rate=1e-3, gradient_norm=1.0, loss=1.0, tokens=512,
                sum_squared_lengths=32768, samples=8, samples_digest="0" * 16,
            )  # fmt: skip
            says(job, rank, m.Stepped(epoch=plan.epoch, outcome=outcome, seconds=600.0, compute_s=480.0))
    job.wait(2)


# --- another supervisor ---------------------------------------------------------------------------------------------


def hindered() -> Start:
    """A node is lost, a process is killed, one raises; then the first plan."""
    job = gathered(nodes=4)
    job.train(0, 1, 2)
    job.spawn(3, 4, 5, 6, 7)
    job.lose("n4", "connection closed for 1 s")
    ends(job, 3, status=-9)
    ends(job, 4, "RuntimeError: CUDA error: no device")
    says(job, 5, DECLARE)
    return job


@pytest.mark.parametrize("kept", range(3, 23))
def test_another_supervisor_comes_to_the_same_wherever_the_last_one_died(kept: int) -> None:
    before = hindered()
    assert first_plan(before).layout.ranks == (0, 1, 2, 5)
    whole = before.journal
    until = next(at for at, entry in enumerate(whole) if isinstance(entry, PlanDecided))
    assert kept <= until, "the plan was decided"
    job = Start(controller=Controller.recover(before.settings, whole[:kept]), **(FOUR | {"nodes": 4}))
    for name in ("n1", "n2", "n3"):
        here = {entry.rank: entry for entry in whole if isinstance(entry, WorkerStarted) and entry.node == name}
        alive = tuple(
            m.RunningWorker(rank=rank, device=entry.device, pid=entry.pid, steps=(), said=(DECLARE,))
            for rank, entry in here.items()
            if rank not in (3, 4)
        )
        gone = {3: -9, 4: 1}
        inventory = m.Inventory(workers=alive, ended=tuple((r, gone[r]) for r in here if r in gone), epoch=0)
        job.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=inventory))
    if not any(isinstance(entry, NodeLost) for entry in whole[:kept]):
        job.lose("n4", "connection closed for 1 s")
    job.wait(1)
    assert first_plan(job).layout.ranks == (0, 1, 2, 5)
    told = [entry for entry in whole[:kept] if isinstance(entry, FailureFound)] + job.all(FailureFound)
    by_rank = sorted(rank for failure in told for rank in failure.ranks)
    assert len(by_rank) == len(set(by_rank)), "nobody is told of twice"
    assert {3, 4} <= set(by_rank)
    assert {failure.node for failure in told} == {"n2", "n3", "n4"}


@pytest.mark.parametrize("what", ["process", "node"])
def test_a_command_cannot_do_without_any_of_its_processes(what: str) -> None:
    """It never says what it trains, and is known not to: nobody waits ten minutes for that."""
    job = gathered(declares=False)
    job.spawn(0, 1, 2, 3)
    job.wait(700)
    assert job.end is None, "it runs for as long as it likes"
    if what == "process":
        ends(job, 2)
    else:
        job.feed(api.AgentLost(node="n2", reason="its agent is gone", how="agent"))
    job.wait(5)
    assert job.end is not None
    assert job.end[0] in ((1,) if what == "process" else (5, 75))


# --- a script that makes process groups of its own -------------------------------------------------------------------

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:{}."


def met(**settings: Any) -> Start:
    """Its ranks have found each other, and nobody has said what they train."""
    job = gathered(**settings)
    job.spawn(0, 1, 2, 3)
    job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
    return job


def lines(job: Start) -> list[str]:
    return [action.text for action in job.actions if isinstance(action, api.Say)]


@pytest.mark.parametrize("first", [True, False], ids=["noticed first", "noticed last"])
@pytest.mark.parametrize("how", ["killed", "exited", "raised"])
def test_the_rank_that_ended_the_others_is_the_one_failure(how: str, first: bool) -> None:
    job = met()
    peers = [lambda rank=rank: ends(job, rank, PEER.format(4000 + rank)) for rank in (0, 1, 3)]
    ways = {
        "killed": lambda: ends(job, 2, status=-9),
        "exited": lambda: ends(job, 2, status=3),
        "raised": lambda: ends(job, 2, "ValueError: no such token"),
    }
    for end in (ways[how], *peers) if first else (*peers, ways[how]):
        end()
    assert job.end is not None
    code, reason = job.end
    assert code == 1, "three of four ranks raised the same, and yet the script is not broken"
    said = {
        "killed": "killed by signal 9 (SIGKILL); see its log, n2.rank2.log",
        "exited": "exited with status 3; see its log, n2.rank2.log",
        "raised": "ValueError: no such token; other ranks did not raise it",
    }
    assert reason == f"rank 2 (n2 device 0): {said[how]}; 3 others then lost their peer"
    (failure,) = job.all(FailureFound)
    assert failure.ranks == (0, 1, 2, 3)
    assert "then rank 0 raised RuntimeError" in failure.evidence
    if how == "raised":
        assert (failure.kind, failure.node) == ("program", None)
        assert failure.cause == "rank 2 (n2 device 0) raised ValueError: no such token"
    else:
        assert (failure.kind, failure.node, failure.device) == ("fail-stop", "n2", 0)
    assert not any("before training" in line for line in lines(job))
    assert any(line.startswith("not started again: ") for line in lines(job))


def test_who_lost_a_peer_and_takes_its_time_to_end_does_not_make_it_the_scripts_fault() -> None:
    job = met()
    ends(job, 2, status=-9)
    for rank in (0, 1, 3):
        says(job, rank, m.Raised(iteration=1, error=PEER.format(4000 + rank), traceback=PEER.format(4000 + rank)))
    job.wait(8)
    told = "rank 2 (n2 device 0): killed by signal 9 (SIGKILL); see its log, n2.rank2.log; 3 others then lost"
    assert job.end == (1, f"{told} their peer")
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.node, failure.ranks) == ("fail-stop", "n2", (2,))
    assert any(line.startswith("rank 0 (n1 device 0): lost a peer, and raised RuntimeError") for line in lines(job))
    assert not any("pair.cc" in line or "typically" in line for line in lines(job)), "gloo's own words are in the log"


def test_ranks_that_lost_peers_on_a_silent_node_do_not_make_it_the_scripts_fault() -> None:
    """A node without power says nothing, and is lost after some seconds."""
    job = met(nodes=3)
    job.spawn(4, 5)
    for rank, place in enumerate(job.controller.job.record.placements):
        if place.node != "n3":
            ends(job, rank, PEER.format(4000 + rank))
    for _ in range(10):
        for name in ("n1", "n2"):
            job.feed(api.AgentBeat(node=name, beat=m.Beat(workers=())), 0.0)
        job.feed(api.Tick(), 1.0)
    assert job.end is not None
    assert job.end[0] == 75
    assert job.end[1].startswith("node n3: ")
    assert not any(line.startswith("nothing was restarted") for line in lines(job)), "Slurm runs it again"
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.ranks) == ("node", "n3", tuple(range(6)))


def test_a_rank_that_exits_with_status_0_while_others_train_is_the_cause_of_their_lost_peers() -> None:
    """A loader that is shorter on one rank, or `sys.exit()` in its last epoch."""
    job = met()
    fails(job, 0, GLOO_CLOSED, "raised")
    job.feed(api.WorkerExited(rank=1, status=0))
    for rank in (2, 3):
        fails(job, rank, GLOO_CLOSED, "raised")
    job.wait(8)
    told = "rank 1 (n1 device 1) exited with status 0, while other ranks still waited for it"
    assert job.end is not None
    assert job.end[1].startswith(told.replace(") exited", "): exited"))
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.node, failure.ranks) == ("program", None, (0, 1, 2, 3))
    assert failure.cause == told
    assert "then rank 2 raised RuntimeError" in failure.evidence


def test_a_collective_that_all_ranks_waited_for_in_vain_is_one_failure_of_no_node() -> None:
    """NCCL's watchdog aborts every process, and nobody says why."""
    job = met()
    line = "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE) ran for 600 s"
    for rank in range(4):
        job.feed(api.WorkerExited(rank=rank, status=-6, clues=read_log(line.format(rank))))
    told = "waited in vain for its peers in a collective; the rank that failed first left no reason"
    assert job.end == (1, f"rank 0 (n1 device 0): {told}; see its log, n1.rank0.log; 3 more failed")
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.node, failure.ranks) == ("fail-stop", None, (0, 1, 2, 3))
    assert failure.cause == f"rank 0 (n1 device 0): {told}"
    assert "Watchdog caught collective operation timeout" in failure.evidence
    assert sum("killed by signal 6" in line for line in lines(job)) == 1, "said of the first rank alone"


def test_whose_ranks_have_met_ends_with_its_first_failure() -> None:
    """A script that may still say what it trains would be waited for; this one cannot do with less."""
    job = met()
    ends(job, 2, status=-9)
    job.wait(2)
    assert job.end is None, "others may fail alike"
    job.wait(3)
    assert job.end == (1, "rank 2 (n2 device 0): killed by signal 9 (SIGKILL); see its log, n2.rank2.log")


def test_whose_ranks_have_met_does_not_begin_without_a_node() -> None:
    job = met(slurm=False)
    ends(job, 0, PEER.format(4000))
    job.feed(api.AgentLost(node="n2", reason="its agent is gone", how="agent"))
    assert job.end == (5, "node n2: its agent is gone")
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.ranks) == ("node", "n2", (0, 2, 3))


def test_who_says_what_it_trains_may_meet_as_it_likes() -> None:
    job = gathered()
    job.train(0, 1, 2)
    job.spawn(3)
    job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
    ends(job, 3, status=-9)
    assert first_plan(job).layout.ranks == (0, 1, 2)


def test_what_all_ranks_say_of_peers_is_the_scripts_where_nobody_said_more() -> None:
    job = met()
    for rank in range(4):
        ends(job, rank, "ConnectionRefusedError: [Errno 111] Connection refused")
    assert job.end is not None
    assert job.end[0] == 93


def raises(job: Start, rank: int, text: str) -> None:
    """As the process itself tells of it."""
    kind, _, what = text.splitlines()[-1].partition(": ")
    says(job, rank, m.Raised(iteration=1, error=f"{kind.rpartition('.')[2]}: {what}", traceback=text))


def fails(job: Start, rank: int, text: str, how: str) -> None:
    if how == "raised":
        raises(job, rank, text)
    clues = read_log(text) if how == "in its log" else ()
    job.feed(api.WorkerExited(rank=rank, status=1, clues=clues))


ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0))


@pytest.mark.parametrize("order", ORDERS, ids=["first", "second", "last"])
@pytest.mark.parametrize("how", ["raised", "in its log"])
@pytest.mark.parametrize("service", FAILED_CONNECTIONS)
@pytest.mark.parametrize("peers", ["gloo", "NCCL, refused"])
def test_a_service_that_refused_one_rank_is_the_failure_and_its_peers_follow(
    peers: str, service: str, how: str, order: tuple[int, ...]
) -> None:
    """wandb is down, which rank 0 alone talks to."""
    job = met()
    for rank in order:
        fails(job, rank, FAILED_CONNECTIONS[service] if rank == 0 else LOST_PEERS[peers], how)
    error = FAILED_CONNECTIONS[service].splitlines()[-1]
    kind, _, what = error.partition(": ")
    told = f"{kind.rpartition('.')[2]}: {what}; other ranks did not raise it"
    if how == "in its log":
        told = f"raised {error[:200]}; see its log, n1.rank0.log"
    assert job.end == (1, f"rank 0 (n1 device 0): {told}; 3 others then lost their peer")
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.component, failure.node) == ("program", "script", None)
    assert failure.ranks == (0, 1, 2, 3)
    assert failure.cause.startswith("rank 0 (n1 device 0) raised ")
    assert failure.diagnosed.ranks == (0,)


def test_it_is_so_though_its_process_takes_its_time_to_end() -> None:
    job = met()
    raises(job, 0, REFUSED_BY_A_SERVICE)
    for rank in (1, 2, 3):
        fails(job, rank, GLOO_CLOSED, "raised")
    job.wait(8)
    assert job.end is not None
    assert job.end[1].startswith("rank 0 (n1 device 0): ConnectionError: HTTPConnectionPool(host='wandb.local'")
    assert job.end[1].endswith("; other ranks did not raise it; 3 others then lost their peer")
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.node, failure.ranks) == ("program", None, (0, 1, 2, 3))


@pytest.mark.parametrize("order", ORDERS, ids=["first", "second", "last"])
@pytest.mark.parametrize("how", ["raised", "in its log"])
@pytest.mark.parametrize("text", [*LOST_PEERS, *FAILED_CONNECTIONS])
def test_a_rank_that_was_killed_is_why_connections_to_it_were_refused(
    text: str, how: str, order: tuple[int, ...]
) -> None:
    """Of the process group, or of what the script has beside it."""
    job = met()
    for rank in order:
        if rank == 0:
            ends(job, 0, status=-9)
        else:
            fails(job, rank, (LOST_PEERS | FAILED_CONNECTIONS)[text], how)
    told = "killed by signal 9 (SIGKILL); see its log, n1.rank0.log; 3 others then lost their peer"
    assert job.end == (1, f"rank 0 (n1 device 0): {told}")
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.node, failure.ranks) == ("fail-stop", "n1", (0, 1, 2, 3))


def test_who_lost_a_peer_is_no_cause_since_we_killed_it() -> None:
    """It is slow to end, and may yet have said what it trains."""
    job = gathered()
    job.spawn(0, 1, 2, 3)
    raises(job, 1, GLOO_CLOSED)
    ends(job, 0, status=-9)
    job.wait(5)
    assert api.SignalWorker(rank=1, signal=int(signal.SIGKILL)) in job.actions
    ends(job, 1, status=-9)
    for rank in (2, 3):
        fails(job, rank, GLOO_CLOSED, "raised")
    told = "killed by signal 9 (SIGKILL); see its log, n1.rank0.log; 3 others then lost their peer"
    assert job.end == (1, f"rank 0 (n1 device 0): {told}")
    (failure,) = job.all(FailureFound)
    assert failure.ranks == (0, 1, 2, 3)


def test_of_a_failed_connection_and_another_error_the_first_one_is_the_cause() -> None:
    """Somebody else's handler has a text of its own; a service that one rank offers is gone with it."""
    for first, told in ((0, "ConnectionError: HTTPConnectionPool"), (2, "ValueError: step 17 failed")):
        job = met()
        for rank in (first, 2 - first):
            fails(job, rank, REFUSED_BY_A_SERVICE if rank == 0 else traceback("ValueError: step 17 failed"), "raised")
        job.wait(5)
        assert job.end is not None
        assert job.end[1].startswith(f"rank {first} (n{1 + first // 2} device 0): {told}")


def test_a_service_that_refuses_all_ranks_is_no_nodes_fault_nor_the_scripts() -> None:
    job = met()
    for rank in range(4):
        fails(job, rank, REFUSED_BY_A_SERVICE, "raised")
    assert job.end is not None
    assert job.end[0] == 75
    assert [(failure.component, failure.node) for failure in job.all(FailureFound)] == [("process", None)]


def test_an_error_of_some_ranks_of_a_plain_script_is_one_failure() -> None:
    """Of too few to call the script broken, and each with a text of its own."""
    job = gathered(nodes=4)
    ranks = range(8)
    job.spawn(*ranks)
    for rank in ranks:
        fails(job, rank, traceback(f"ValueError: no sample {'abc'[rank]}.jpg") if rank < 3 else GLOO_CLOSED, "raised")
    told = "ValueError: no sample a.jpg; other ranks did not raise it; 2 more failed; 5 others then lost their peer"
    assert job.end == (1, f"rank 0 (n1 device 0): {told}")
    (failure,) = job.all(FailureFound)
    assert failure.cause == "3 ranks raised ValueError at train.py:71: no sample a.jpg"
    assert failure.ranks == tuple(ranks)
    assert (failure.kind, failure.component, failure.node) == ("program", "script", None)
    assert "then rank 2 raised ValueError: no sample c.jpg" in failure.evidence


def test_telling_who_lost_a_peer_takes_as_long_for_each_rank_however_many_they_are() -> None:
    """The supervisor hears nobody meanwhile."""

    def cost(nodes: int) -> int:
        job = gathered(nodes=nodes, gpus_per_node=8)
        ranks = range(nodes * 8)
        job.spawn(*ranks)
        for rank in ranks[:-1]:
            ends(job, rank, "ValueError: bad batch" if rank == 0 else PEER.format(rank))
        assert job.end is None
        counted = work(lambda: ends(job, ranks[-1], PEER.format(ranks[-1])))
        (failure,) = job.all(FailureFound)
        assert failure.ranks == tuple(ranks)
        return counted

    assert cost(64) < 10 * cost(8)


def test_what_a_rank_raised_is_read_once_and_weighed_again_only_for_what_is_new() -> None:
    """At 2,048 nodes that takes the supervisor seconds, in which it hears nobody."""
    job = met(nodes=4, gpus_per_node=4)
    job.spawn(*range(4, 16))
    said = {rank: GLOO_CLOSED.replace("39831", str(4000 + rank)) for rank in range(1, 16)}
    clues = {rank: read_log(text) for rank, text in said.items()}
    count: Counter[CodeType] = Counter()
    sys.setprofile(lambda frame, event, argument: count.update([frame.f_code] if event == "call" else []))
    try:
        ends(job, 0, status=-9)
        for rank, text in said.items():
            raises(job, rank, text)
        for rank in said:
            job.feed(api.WorkerExited(rank=rank, status=1, clues=clues[rank]))
    finally:
        sys.setprofile(None)
    (failure,) = job.all(FailureFound)
    assert failure.ranks == tuple(range(16))
    assert count[read_log.__code__] == len(said)
    as_raised_and_as_it_ended, of_nodes, of_the_killed = 2 * len(said), 4, 1
    assert count[diagnose.__code__] == as_raised_and_as_it_ended + of_nodes + of_the_killed


@pytest.mark.parametrize("how", ["lost peers", "done"])
def test_who_ends_costs_the_same_in_a_large_job(how: str) -> None:
    """A supervisor that compares each with each is silent for minutes at 2,048 nodes."""

    def calls(nodes: int) -> int:
        job = gathered(nodes=nodes, gpus_per_node=8)
        ranks = range(8 * nodes)
        job.spawn(*ranks)
        job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
        counted = itertools.count()
        sys.setprofile(lambda frame, event, argument: next(counted))
        try:
            if how == "lost peers":
                ends(job, 9, status=-9)
            for rank in ranks:
                if how == "done":
                    ends(job, rank, status=0)
                elif rank != 9:
                    ends(job, rank, PEER.format(4000 + rank))
        finally:
            sys.setprofile(None)
        assert job.end is not None
        assert len(job.all(FailureFound)) == (how == "lost peers")
        return next(counted)

    assert calls(64) < 4.5 * calls(16)
