"""What a process that ended left behind: read from its log's tail, and told with the news of its exit, or without."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resihp.protocol import messages as m
from resihp.protocol.messages import Clue
from resihp.wrapper.agent import exit_clues as module
from resihp.wrapper.agent.exit_clues import LOG_BYTES, last_words
from resihp.wrapper.job_folder import Job
from tests.resihp.detector.lines import traceback
from tests.wrapper.agent.test_agent import PretendedSupervisor, halt, job, play, spawn

__all__ = ["job"]  # a fixture

OOM = traceback("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
OFF_THE_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture(autouse=True)
def _quiet_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's kernel says is no part of these tests."""
    monkeypatch.setattr(module, "_kernel", lambda uptime_s: "")


def kinds(clues: tuple[Clue, ...]) -> list[str]:
    return [clue.kind for clue in clues]


# --- the log ------------------------------------------------------------------------------------------------------


def test_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "n1.rank0.log"
    log.write_text(f"iteration 1: loss 4.2\n{OOM}\n")
    (clue,) = last_words(log)
    assert (clue.kind, clue.raised) == ("gpu memory", True)
    assert clue.line.startswith("torch.cuda.OutOfMemoryError")


def test_a_log_that_says_nothing_gives_no_clue(tmp_path: Path) -> None:
    log = tmp_path / "n1.rank0.log"
    log.write_text("iteration 1: loss 4.2\n")
    assert last_words(log) == ()
    log.write_bytes(b"")
    assert last_words(log) == ()


def test_a_log_that_cannot_be_read_gives_no_clue(tmp_path: Path) -> None:
    assert last_words(tmp_path / "missing.log") == ()
    assert last_words(tmp_path) == (), "a folder"
    log = tmp_path / "n1.rank0.log"
    log.write_text(OOM)
    assert last_words(log / "below") == ()


def test_of_a_long_log_the_end_alone_is_read(tmp_path: Path) -> None:
    log = tmp_path / "n1.rank0.log"
    line = "iteration 123: loss 4.2, learning rate 0.0001, 800 ms\n"
    early = traceback("ValueError: long ago")
    log.write_text(early + "\n" + line * (5 * 2**20 // len(line)) + OOM + "\n")
    assert kinds(last_words(log)) == ["gpu memory"]


@pytest.mark.parametrize("shift", range(4))
def test_a_tail_that_begins_within_a_character_is_read(tmp_path: Path, shift: int) -> None:
    log = tmp_path / "n1.rank0.log"
    log.write_bytes(b"x" * shift + "€".encode() * LOG_BYTES + b"\xff\x00\n" + OOM.encode())
    assert kinds(last_words(log)) == ["gpu memory"]


# --- the kernel ---------------------------------------------------------------------------------------------------


def kernel_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *records: str) -> str:
    """What is read of a kernel that said these (one read each), two hours after it was started."""
    waiting = [record.encode() for record in records]

    def read(handle: int, size: int) -> bytes:
        if not waiting:
            raise BlockingIOError
        if waiting[0] == b"overwritten":
            waiting.pop(0)
            raise BrokenPipeError
        return waiting.pop(0)

    monkeypatch.undo()  # the kernel is not quiet
    kmsg = tmp_path / "kmsg"
    kmsg.touch()
    real = os.open
    monkeypatch.setattr("resihp.wrapper.agent.exit_clues.os.open", lambda path, flags: real(kmsg, os.O_RDONLY))
    monkeypatch.setattr("resihp.wrapper.agent.exit_clues.os.read", read)
    text = module._kernel(7200.0)
    monkeypatch.undo()
    return text


def test_recent_messages_of_the_kernel_are_read_as_dmesg_prints_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = kernel_says(
        monkeypatch,
        tmp_path,
        "6,1,3600000000,-;an hour ago\n",
        "overwritten",
        f"3,2,7100500000,-;{OFF_THE_BUS}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n",
    )
    assert text == f"[ 7100.500000] {OFF_THE_BUS}"


def test_of_many_messages_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    noise = (
        f"6,1,{7_000_000_000 + i},-;audit: something of no interest that is said very often\n" for i in range(9999)
    )
    text = kernel_says(monkeypatch, tmp_path, *noise, f"3,2,7100500000,-;{OFF_THE_BUS}\n")
    assert text.splitlines()[-1] == f"[ 7100.500000] {OFF_THE_BUS}"
    assert len(text) <= module.KERNEL_BYTES


def test_who_ends_together_shares_a_reading_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[float] = []

    def kernel(uptime_s: float) -> str:
        readings.append(uptime_s)
        return f"[{uptime_s:12.6f}] {OFF_THE_BUS}"

    monkeypatch.setattr(module, "_kernel", kernel)
    shared = module.KernelClues()
    together = time.monotonic()
    assert [kinds(shared.since(together)) for _ in range(8)] == [["xid 79"]] * 8
    assert len(readings) == 1
    shared.since(time.monotonic())
    assert len(readings) == 2, "the kernel may have spoken of a later end meanwhile"


def test_a_kernel_record_that_is_odd_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = kernel_says(monkeypatch, tmp_path, "", ";", "6,1,x,-;what\n", f"3,2,7100500000,-;{OFF_THE_BUS}\n")
    assert OFF_THE_BUS in text


def test_where_the_kernel_may_not_be_read_the_log_still_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    log = tmp_path / "n1.rank0.log"
    log.write_text(OOM)
    monkeypatch.setattr("resihp.wrapper.agent.exit_clues.os.open", forbidden)
    assert kinds(last_words(log)) == ["gpu memory"]


def test_a_clue_of_the_kernel_has_the_time_at_which_it_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(uptime_s: float) -> str:
        return f"[{uptime_s - 60:12.6f}] {OFF_THE_BUS}"

    monkeypatch.setattr(module, "_kernel", kernel)
    (clue,) = last_words(tmp_path / "missing.log")
    assert clue.kind == "xid 79"
    assert clue.at == pytest.approx(time.time() - 60, abs=2)


# --- the news of an exit ------------------------------------------------------------------------------------------

FAILS = """
import os, socket, sys, traceback
from resihp.process import AGENT_FD
from resihp.protocol import messages as m
from resihp.protocol.channels import LocalChannel
agent = LocalChannel(socket.socket(fileno=int(os.environ[AGENT_FD])))
agent.recv(m.WorkerOrder)
if os.environ.get("LOG"):
    os.unlink(os.environ["LOG"])
    {instead}
agent.send(m.Finished(iteration=7))
if agent.recv(m.WorkerOrder).reason == "raise":
    try:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    except RuntimeError:
        traceback.print_exc()
        sys.exit(1)
sys.exit(0)
"""


HANGS = 'os.mkfifo(os.environ["LOG"])'
"""Whoever opens it waits."""


def ending(
    job: Job, *, instead: str = "", reason: str = "raise", afterwards: Callable[[], object] = lambda: None
) -> m.Exited:
    """How the end of a worker arrives. `instead`: what becomes of its log meanwhile."""
    exits: list[m.Exited] = []

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.FromWorker))
        supervisor.order(halt(0, reason=reason))
        await supervisor.until(lambda: supervisor.of(m.Exited))
        exits.extend(supervisor.of(m.Exited))
        told = [type(said) for said in supervisor.said]
        assert told.index(m.FromWorker) < told.index(m.Exited)
        afterwards()

    log = str(job.logs / "n1.rank0.log") if instead else ""
    play(job, scene, FAILS.format(instead=instead), environment={"LOG": log})
    (exited,) = exits
    return exited


def test_the_news_of_an_exit_carry_what_the_worker_said(job: Job) -> None:
    exited = ending(job)
    assert exited.status == 1
    (clue,) = [clue for clue in exited.clues if clue.raised]
    assert (clue.kind, clue.named["error"]) == (
        "illegal access",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    )


def test_a_worker_that_ends_well_has_nothing_to_explain(job: Job) -> None:
    assert ending(job, reason="end") == m.Exited(rank=0, pid=ending_pid(job), status=0)


def ending_pid(job: Job) -> int:
    """Of the worker whose end the agent has printed."""
    (line,) = [line for line in (job.logs / "n1.agent.log").read_text().splitlines() if line.startswith("rank 0: ")]
    return int(line.split()[3])


def test_the_news_of_an_exit_arrive_though_there_is_no_log(job: Job) -> None:
    exited = ending(job, instead="pass")
    assert exited.status == 1
    assert [clue for clue in exited.clues if clue.raised] == []


def test_the_news_of_an_exit_arrive_though_reading_its_log_hangs(job: Job) -> None:
    log = job.logs / "n1.rank0.log"
    exited = ending(job, instead=HANGS, afterwards=lambda: os.close(os.open(log, os.O_WRONLY)))
    assert (exited.status, exited.clues) == (1, ())


def test_an_agent_ends_though_reading_a_log_hangs(job: Job) -> None:
    released: list[int] = []

    def release() -> None:
        released.append(os.open(job.logs / "n1.rank0.log", os.O_WRONLY | os.O_NONBLOCK))
        os.close(released[0])

    late = threading.Timer(6.0, release)
    ending(job, instead=HANGS, afterwards=late.start)
    late.cancel()
    late.join()
    assert released == [], "it ended when its file system answered again"


def test_a_signal_tells_itself_in_the_news_of_an_exit(job: Job) -> None:
    exits: list[m.Exited] = []

    async def scene(supervisor: PretendedSupervisor) -> None:
        supervisor.order(spawn(0, 1))
        await supervisor.until(lambda: supervisor.of(m.FromWorker))
        os.kill(supervisor.of(m.Spawned)[0].pid, signal.SIGKILL)
        await supervisor.until(lambda: supervisor.of(m.Exited))
        exits.extend(supervisor.of(m.Exited))

    play(job, scene, FAILS.format(instead="pass"))
    assert [(exited.rank, exited.status) for exited in exits] == [(0, -signal.SIGKILL)]
