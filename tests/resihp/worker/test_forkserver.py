"""The fork server that virtual nodes share, as its launcher and their agents see it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resihp.protocol.channels import LocalChannel
from resihp.worker.requests import Deliver, Ended, Fork, Forked, Ready, Report, Serve, Unable

FOREVER = "import time\ntime.sleep(3600)\n"
WITH_A_CHILD = "import subprocess\nprint(subprocess.Popen(['sleep', '3600'], start_new_session=True).pid)\n" + FOREVER


class Shared:
    """One such process and its launcher's end of the socket."""

    def __init__(self, folder: Path, preload: str = "json") -> None:
        self.folder = folder
        ours, theirs = socket.socketpair()
        self.launcher = LocalChannel(ours)
        command = [sys.executable, "-P", "-m", "resihp.worker.forkserver", "--shared", "--fd", "0", "--parent", "0"]
        with theirs:
            self.process = subprocess.Popen([*command, "--preload", preload], stdin=theirs, stderr=subprocess.DEVNULL)
        self.agents: list[Agent] = []

    def agent(self) -> Agent:
        self.agents.append(Agent(self))
        return self.agents[-1]

    def end(self) -> None:
        self.launcher.close()
        for agent in self.agents:
            agent.server.close()
        for process in (self.process, *(agent.process for agent in self.agents)):
            process.kill()
            process.wait()


class Agent:
    """One virtual node: a process in a group of its own, and the agent's end of the socket to the fork server."""

    def __init__(self, shared: Shared) -> None:
        self.process = subprocess.Popen(["sleep", "3600"], process_group=0)
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        self.server = LocalChannel(ours)
        self._folder = shared.folder
        with theirs:
            log = shared.folder / f"{self.process.pid}.log"
            shared.launcher.send(Serve(group=self.process.pid, log=str(log)), [theirs.fileno()])

    def fork(self, script: str, rank: int = 0, processors: tuple[int, ...] = ()) -> int:
        """Returns the worker's process id."""
        path = self._folder / f"{self.process.pid}.py"
        path.write_text(script)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            order = Fork(
                rank=rank,
                kind="script",
                argv=(str(path),),
                cwd="/",
                environment={},
                log=str(path.with_suffix(".out")),
                processors=processors,
            )
            self.server.send(order, [theirs.fileno()])
        answer = self.server.recv(Report)
        assert isinstance(answer, Forked)
        return answer.pid

    def said(self) -> str:
        return (self._folder / f"{self.process.pid}.out").read_text()


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    """Preloads what the test's parameter says."""
    made = Shared(tmp_path, getattr(request, "param", "json"))
    yield made
    made.end()


def test_a_node_ends_with_its_agent_and_no_other_does(shared: Shared) -> None:
    first, second = shared.agent(), shared.agent()
    assert isinstance(first.server.recv(Report), Ready)
    assert isinstance(second.server.recv(Report), Ready)
    dying, living = first.fork(FOREVER), second.fork(FOREVER)
    assert os.getpgid(dying) == first.process.pid
    assert os.getpgid(living) == second.process.pid
    first.server.close()
    assert gone(dying)
    assert not gone(living, 0)
    os.killpg(second.process.pid, signal.SIGKILL)
    assert gone(living)


def test_signals_reach_the_own_nodes_workers_only(shared: Shared) -> None:
    first, second = shared.agent(), shared.agent()
    assert isinstance(first.server.recv(Report), Ready)
    assert isinstance(second.server.recv(Report), Ready)
    mine, other = first.fork(FOREVER, rank=3), second.fork(FOREVER)
    first.server.send(Deliver(pid=other, signal=signal.SIGKILL))
    first.server.send(Deliver(pid=mine, signal=signal.SIGKILL))
    assert first.server.recv(Report) == Ended(rank=3, pid=mine, status=-signal.SIGKILL)
    assert not gone(other, 0)


def test_what_workers_have_started_ends_with_the_node_in_whatever_session_it_is(shared: Shared) -> None:
    agent = shared.agent()
    assert isinstance(agent.server.recv(Report), Ready)
    worker = agent.fork(WITH_A_CHILD)
    while not agent.said().endswith("\n"):
        assert not gone(worker, 0.01)
    agent.server.close()
    assert gone(int(agent.said()))


def test_it_serves_on_without_its_launcher_and_ends_with_the_last_node(shared: Shared) -> None:
    agent = shared.agent()
    assert isinstance(agent.server.recv(Report), Ready)
    shared.launcher.close()
    worker = agent.fork(FOREVER)
    shared.process.kill()
    shared.process.wait()
    assert not gone(worker, 0), "a node outlives who forked its server"
    assert not gone(agent.fork(FOREVER, rank=1), 0)
    agent.server.close()
    assert gone(worker)


def test_it_ends_when_launcher_and_nodes_are_gone(shared: Shared) -> None:
    agent = shared.agent()
    assert isinstance(agent.server.recv(Report), Ready)
    agent.server.close()
    shared.launcher.close()
    assert shared.process.wait(10) == 0


def test_a_node_whose_agent_has_gone_by_then_gets_no_server(shared: Shared) -> None:
    agent = shared.agent()
    agent.process.kill()
    agent.process.wait()
    with pytest.raises(EOFError):
        agent.server.recv(Report)


@pytest.mark.parametrize("shared", ["no_such_library"], indirect=True)
def test_all_nodes_are_told_of_an_import_that_fails(shared: Shared) -> None:
    for agent in (shared.agent(), shared.agent()):
        answer = agent.server.recv(Report)
        assert isinstance(answer, Unable)
        assert "cannot import no_such_library" in answer.reason
    shared.launcher.close()
    assert shared.process.wait(10) == 0


ENDS_INSIDE_TORCH = """
import threading, time
from datetime import timedelta
import torch
from resihp.executor.backends import NcclLike, Role
from resihp.executor.tensor_group import dist

kept = open({told!r}, "w")
kept.write("done")
connect = NcclLike(torch.device("cpu")).connect
arguments = (dist.HashStore(), 0, 2, timedelta(seconds=0.5))
threading.Thread(target=connect, args=arguments, daemon=True).start()  # a peer that never comes
time.sleep({waits_s})
"""


@pytest.mark.parametrize(("waits_s", "patience"), [(0.42, "5.0"), (0.1, "0.0")], ids=["comes back", "is stuck"])
def test_a_worker_that_is_done_has_not_failed_because_a_thread_of_ours_is_inside_of_torch(
    shared: Shared, waits_s: float, patience: str
) -> None:
    pytest.importorskip("torch")
    node = shared.agent()
    assert isinstance(node.server.recv(Report), Ready)
    told = shared.folder / "told"
    waits_less = f"import resihp.worker.leaving as leaving\nleaving.EXIT_WAIT_S = {patience}\n"
    pid = node.fork(waits_less + ENDS_INSIDE_TORCH.format(told=str(told), waits_s=waits_s))
    assert node.server.recv(Report) == Ended(rank=0, pid=pid, status=0), node.said()
    assert told.read_text() == "done", "though it was left open"


def test_a_worker_runs_on_the_cpus_that_it_is_given(shared: Shared) -> None:
    here = sorted(os.sched_getaffinity(0))
    if len(here) < 2:
        pytest.skip("one CPU only")
    script = "import os\nprint(sorted(os.sched_getaffinity(0)))\n"
    for processors, expected in (((here[-1],), here[-1:]), ((), here)):
        agent = shared.agent()
        assert isinstance(agent.server.recv(Report), Ready)
        agent.fork(script, processors=processors)
        assert isinstance(agent.server.recv(Report), Ended)
        assert agent.said() == f"{expected}\n"


@pytest.mark.parametrize("shared", ["torch"], indirect=True)
def test_each_worker_draws_its_own_random_numbers(shared: Shared) -> None:
    """As processes do that import torch themselves: nobody has seeded it."""
    pytest.importorskip("torch")
    node = shared.agent()
    assert isinstance(node.server.recv(Report), Ready)
    for rank in range(2):
        pid = node.fork("import torch\nprint(torch.rand(1, dtype=torch.float64).item())\n", rank=rank)
        assert node.server.recv(Report) == Ended(rank=rank, pid=pid, status=0), node.said()
    first, second = node.said().split()
    assert first != second
