"""A worker's end of the socket to its agent: what it does at once, whatever its main thread is in."""

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

from resihp.process import AGENT_FD
from resihp.protocol import messages as m
from resihp.protocol.channels import LocalChannel

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 20.0

PREAMBLE = """
import os, signal, subprocess, sys, time
from resihp.protocol import client as agent
client = agent.attach()
def tell(what): print(what, flush=True)
"""
IN_A_LOCK = """
import threading
lock = threading.Lock(); lock.acquire()
"""


class Process:
    """A worker that runs a few lines, and the agent's end of its socket."""

    def __init__(self, body: str) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        self.channel = LocalChannel(ours)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + body],
            pass_fds=[theirs.fileno()],
            env=os.environ | {AGENT_FD: str(theirs.fileno()), "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        theirs.close()
        self.channel.send(
            m.Start(
                rank=0,
                node="n1",
                device=0,
                world_size=1,
                nodes=("n1",),
                faults=(),
                checkpoint_folder="",
                checkpoint_every=0,
                resume=False,
            )
        )

    def heard(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "says nothing"
        return self.process.stdout.readline().decode().strip()

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for each in made:
        each.process.kill()
        each.process.wait()
        assert each.process.stdout is not None
        each.process.stdout.close()


def run(started: list[Process], body: str) -> Process:
    started.append(Process(body))
    return started[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_that_would_stop_it_are_disregarded_only_in_training(started: list[Process], number: int) -> None:
    worker = run(
        started,
        f"""
with client.deaf():
    os.kill(os.getpid(), {number})
    tell("lives")
tell(signal.getsignal({number}) is signal.SIG_DFL)
os.kill(os.getpid(), {number})
""",
    )
    assert [worker.heard(), worker.heard()] == ["lives", "True"]
    assert worker.ends() == -number


def test_halt_at_once_ends_it_though_it_is_deaf_and_waits(started: list[Process]) -> None:
    worker = run(started, f"with client.deaf():\n{IN_A_LOCK.replace(chr(10), chr(10) + '    ')}tell(1); lock.acquire()")
    assert worker.heard() == "1"
    worker.process.send_signal(signal.SIGTERM)
    worker.channel.send(m.Halt(reason="the job ends", at_once=True))
    assert worker.ends() == -signal.SIGTERM


def test_halt_at_once_leaves_a_script_that_listens_its_own_way_out(started: list[Process]) -> None:
    worker = run(
        started,
        """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with client.deaf():
    tell(1)
    time.sleep(60)
""",
    )
    assert worker.heard() == "1"
    worker.channel.send(m.Halt(reason="the job ends", at_once=True))
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ends() == 7


def test_a_probe_that_was_announced_is_due_at_its_moment(started: list[Process]) -> None:
    worker = run(
        started,
        """
while client.next_order().probe != 4:
    pass
tell([asked.probe for asked in client.due_link_probes(6)])
tell([asked.probe for asked in client.due_link_probes(7)])
tell(client.due_probe().probe)
tell([asked.probe for asked in client.due_link_probes()])
tell([client.due_link_probes(), client.due_probe()])
""",
    )
    for probe, after in ((1, 7), (2, 9), (3, 5), (4, None)):
        worker.channel.send(m.Probe(probe=probe, after_iteration=after))
    assert [worker.heard() for _ in range(5)] == ["[3]", "[1]", "4", "[2]", "[[], None]"]


def test_a_rank_whose_device_waits_for_peers_is_told_so_wherever_its_host_is(started: list[Process]) -> None:
    worker = run(
        started,
        """
client.activity = "compute"
client.on_beat(lambda: (True, 0.0))
tell(1)
time.sleep(60)
""",
    )
    assert worker.heard() == "1"
    while worker.channel.recv(m.Progress).activity != "communication":
        pass


def test_what_a_deaf_worker_starts_is_not_deaf(started: list[Process]) -> None:
    worker = run(
        started,
        """
with client.deaf():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.terminate()
    tell(child.wait())
    there, ready = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(ready, b".")
        time.sleep(60)
        os._exit(0)
    os.read(there, 1)
    os.kill(forked, signal.SIGTERM)
    tell(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
""",
    )
    assert [worker.heard(), worker.heard()] == ["-15", "-15"]
    assert worker.ends() == 0


def test_a_rank_that_builds_hears_its_peers_while_its_main_thread_waits_and_a_park_can_free_it(
    started: list[Process],
) -> None:
    body = """
from resihp.errors import CommunicatorError
from resihp.protocol import messages as m
old = client.attend(m.MeetingId(epoch=2), ["world"], 60.0)
old.leave()
it = client.attend(m.MeetingId(epoch=3), ["world"], 60.0)
client.on_park(it.leave)
tell(it.values("world", ["1"]))
try:
    it.values("world", ["2"])
except CommunicatorError as error:
    tell(error)
tell(old.has("world", ["1"]))
"""
    worker = run(started, body)
    asked: list[m.Attend] = []
    while len(asked) < 2:
        message = worker.channel.recv(m.MeetingMessage | m.Progress)
        asked += [message] if isinstance(message, m.Attend) else []
    epochs = [each.meeting.epoch for each in asked]
    assert epochs == [2, 3]
    said = (m.Said("world", "1", b"peer"),)
    worker.channel.send(m.Published(meeting=m.MeetingId(epoch=2), said=said))
    worker.channel.send(m.Published(meeting=m.MeetingId(epoch=3), said=said))
    assert worker.heard() == "[b'peer']"
    worker.channel.send(m.Park(epoch=4, reason="another rank died"))
    assert worker.heard() == "communicators of epoch 3: woken while waiting for a peer"
    assert worker.heard() == "False", "what is said of a meeting that it has left reaches nobody"
