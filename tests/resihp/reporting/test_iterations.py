"""What `resihp.iteration` and `resihp.section` send to the agent, and what they cost."""

from __future__ import annotations

import os
import socket
import time
import timeit
from collections.abc import Iterator

import msgspec
import pytest

import resihp
from resihp.process import AGENT_FD
from resihp.protocol import messages as m
from resihp.protocol.framing import LocalFrames
from resihp.reporting import iterations, outlet


class Agent:
    """The agent's end of the socket of this process."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = LocalFrames()
        self._decoder = msgspec.msgpack.Decoder(m.ScriptProgress)

    def messages(self) -> list[m.ScriptProgress]:
        received = []
        while True:
            try:
                chunk = self.sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return received
            received += [self._decoder.decode(body) for body in self._frames.feed(chunk)]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(AGENT_FD, str(theirs.fileno()))
    monkeypatch.setattr(outlet, "_socket", None)
    monkeypatch.setattr(outlet, "_is_forked", False)
    monkeypatch.setattr(iterations, "_calls", None)
    monkeypatch.setattr(iterations.atexit, "register", lambda function: None)
    yield Agent(ours)
    if outlet._socket is not None:
        outlet._socket.close()
    ours.close()
    theirs.close()


def due() -> None:
    """Make the next call send at once."""
    iterations._present()._sent_at = float("-inf")


def test_an_iteration_is_reported_with_its_figures(agent: Agent) -> None:
    resihp.iteration(7, loss=2.5, sequence_lengths=[3, 4])
    due()
    resihp.iteration(8, tokens=9)
    first, second = agent.messages()
    assert first.figures == (m.PrintedFigures(iteration=7, loss=2.5, tokens=7, sum_squared_lengths=25),)
    (figures,) = second.figures
    assert (figures.iteration, figures.loss, figures.tokens) == (8, None, 9)
    assert figures.seconds is not None
    assert 0.0 < figures.seconds < 5.0
    assert (second.totals.iterations, second.totals.iteration) == (2, 8)


def test_calls_without_a_number_are_counted(agent: Agent) -> None:
    resihp.iteration()
    due()
    resihp.iteration()
    assert [message.totals.iteration for message in agent.messages()] == [1, 2]


def test_a_process_sends_at_most_two_messages_a_second_however_short_its_iterations_are(agent: Agent) -> None:
    for i in range(1, 2001):
        resihp.iteration(i, loss=float(i), tokens=i)
    due()
    resihp.iteration(2001, loss=1.0, tokens=10)
    first, *_, last = agent.messages()
    assert first.totals.iterations == 1
    assert last.totals.iterations == 2001
    assert len(last.figures) <= iterations.MAX_FIGURES
    assert last.figures[-1].iteration == 2001
    assert last.figures[-1].tokens == pytest.approx(1000, abs=40), "the mean of those that it stands for"


def test_sections_add_up_and_an_inner_one_counts_once(agent: Agent) -> None:
    for _ in range(2):
        with resihp.section("forward"):
            time.sleep(0.01)
            with resihp.section("attention"):
                time.sleep(0.01)
    resihp.iteration(1)
    (message,) = agent.messages()
    sections = {name: (seconds, count) for name, seconds, count in message.totals.sections}
    assert sections["forward"][0] == pytest.approx(message.totals.own_s)
    assert 0.02 <= sections["attention"][0] < sections["forward"][0]
    assert sections["forward"][1] == 2


def test_an_exception_passes_through_a_section(agent: Agent) -> None:
    with pytest.raises(KeyError), resihp.section("data"):
        raise KeyError("no batch")
    with resihp.section("data"):
        pass
    resihp.iteration(1)
    assert agent.messages()[0].totals.sections[0][2] == 2


def test_names_beyond_the_limit_count_as_own_work(agent: Agent) -> None:
    for i in range(40):
        with resihp.section(f"layer {i}"):
            time.sleep(0.0005)
    resihp.iteration(1)
    totals = agent.messages()[0].totals
    assert len(totals.sections) == iterations.MAX_SECTIONS
    assert totals.own_s >= 40 * 0.0005


def test_what_a_full_socket_refuses_comes_with_the_next_message(agent: Agent) -> None:
    resihp.iteration(1)
    sock = outlet._socket
    assert sock is not None
    filled = 0
    while True:
        try:
            filled += sock.send(b"\0\0\0\1\xc0" * 1000, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
    due()
    resihp.iteration(2)
    while filled > 0:
        try:
            agent.sock.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
    agent._frames = LocalFrames()
    due()
    resihp.iteration(3)
    (message,) = agent.messages()
    assert [figures.iteration for figures in message.figures] == [2, 3]


def test_outside_of_resihp_run_the_calls_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_FD, raising=False)
    monkeypatch.setattr(iterations, "_calls", None)
    with resihp.section("forward"):
        resihp.iteration(1, loss=object())  # type: ignore[arg-type]
    assert AGENT_FD not in os.environ


def test_a_call_costs_a_few_microseconds(agent: Agent) -> None:
    def calls() -> None:
        with resihp.section("forward"):
            pass
        resihp.iteration()

    calls()
    each_s = min(timeit.repeat(calls, number=2000, repeat=5)) / 2000
    assert each_s < 20e-6, "two calls, on a busy machine"


def test_nothing_is_written_into_a_connection_of_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that the script starts inherits the variable, and may have a connection under that number."""
    monkeypatch.setattr(outlet, "_socket", None)
    monkeypatch.setattr(outlet, "_is_forked", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with client, peer:
            monkeypatch.setenv(AGENT_FD, str(client.fileno()))
            assert not outlet.send(m.ScriptSaved(path="/ckpt", iteration=1))
            with pytest.raises(BlockingIOError):
                peer.recv(1, socket.MSG_DONTWAIT)
