"""Whether a worker does anything, as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resihp.process import Work, work_of
from resihp.wrapper.agent import idleness as idleness_module
from resihp.wrapper.agent.idleness import LOOK_EVERY_S, Idleness

SLEEPS = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
COMPUTES = "print('ready', flush=True)\nwhile True: pass\n"
WRITES = "import time\nprint('ready', flush=True)\nwhile True:\n    print('.', flush=True)\n    time.sleep(0.01)\n"
HAS_IT_DONE = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {!r}])\n"


@contextmanager
def running(script: str, log: Path) -> Iterator[int]:
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=out)
    try:
        while "ready" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        yield process.pid
    finally:
        for pid in work_of(process.pid).processes - {process.pid}:
            subprocess.run(["kill", "-9", str(pid)], check=True)
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("script", "works"),
    [
        (SLEEPS, False),
        (COMPUTES, True),
        (WRITES, True),
        (HAS_IT_DONE.format(COMPUTES), True),
        (HAS_IT_DONE.format(SLEEPS), False),
    ],
)
def test_a_process_that_computes_or_writes_or_has_it_done_is_at_work(tmp_path: Path, script: str, works: bool) -> None:
    idleness = Idleness()
    with running(script, tmp_path / "log") as pid:
        time.sleep(0.1)
        assert idleness.idle_s(pid, now=0.0) == 0.0
        before = work_of(pid)
        deadline = time.monotonic() + 20
        while works and time.monotonic() < deadline:
            done = work_of(pid)
            if (
                done.processor_s - before.processor_s > 0.1
                or done.bytes_written_by_itself != before.bytes_written_by_itself
            ):
                break
            time.sleep(0.05)
        assert idleness.idle_s(pid, now=LOOK_EVERY_S) == (0.0 if works else LOOK_EVERY_S)
        assert idleness.idle_s(pid, now=LOOK_EVERY_S + 1.0) == (1.0 if works else LOOK_EVERY_S + 1.0), (
            "not looked at again so soon"
        )


def test_a_process_that_is_gone_has_done_nothing() -> None:
    assert work_of(2**22 + 1).processor_s == 0.0


@pytest.mark.parametrize("measured_at", [9.8, 10.2, 10.8], ids=["before", "meanwhile", "after"])
def test_what_an_inspection_lets_a_process_write_is_no_work(
    monkeypatch: pytest.MonkeyPatch, measured_at: float
) -> None:
    """Its stacks are written and counted at once, and taken off the count half a second later."""
    size, written = 2000, 0

    def work(pid: int) -> Work:
        return Work(0.0, written, written, False, frozenset((pid,)))

    monkeypatch.setattr(idleness_module, "work_of", work)
    idleness = Idleness()
    idleness.idle_s(7, now=0.0)
    if measured_at < 10.0:
        idleness.idle_s(7, now=10.0)
    idleness.begin_inspection(7)
    written += size
    if 10.0 < measured_at < 10.5:
        idleness.idle_s(7, now=measured_at)
    idleness.end_inspection(7, size)
    assert idleness.idle_s(7, now=11.0) == 11.0
    assert idleness.idle_s(7, now=22.0) == 22.0


@pytest.mark.parametrize(
    ("threads", "is_idle"),
    [([0.004] * 40, True), ([0.16], False), ([0.004] * 10 + [0.12], False), ([], False)],
    ids=["all poll", "one computes", "one computes among others", "not told by the kernel"],
)
def test_many_threads_that_poll_are_no_work(
    monkeypatch: pytest.MonkeyPatch, threads: list[float], is_idle: bool
) -> None:
    """A script with forty process groups: each of gloo's threads wakes a hundred times a second. `threads`: seconds
    that each uses in ten."""
    now = 0.0

    def work(pid: int) -> Work:
        return Work(0.16 * now / 10, 0, 0, False, frozenset((pid,)))

    monkeypatch.setattr(idleness_module, "work_of", work)
    monkeypatch.setattr(
        idleness_module, "thread_times", lambda pids: {i: used * now / 10 for i, used in enumerate(threads)}
    )
    idleness = Idleness()
    for now in (0.0, 10.0, 20.0, 30.0):
        idle_s = idleness.idle_s(7, now=now)
    assert idle_s == (20.0 if is_idle else 0.0)
