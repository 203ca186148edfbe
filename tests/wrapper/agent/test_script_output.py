"""The iterations of a script, read from the logs of its processes while they write."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from resihp.protocol import messages as m
from resihp.wrapper.agent.logs import script_output
from resihp.wrapper.agent.logs.log_mirror import _free
from resihp.wrapper.agent.logs.script_output import MAX_READ_BYTES, LogTail, ScriptOutput

LINE = " iteration {i:8}/     500 | elapsed time per iteration (ms): 820.0 | lm loss: {loss} | \n"


def lines(*numbers: int, loss: str = "2.5E+00") -> str:
    return "".join(LINE.format(i=i, loss=loss) for i in numbers)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def start_of(rank: int, world_size: int) -> m.Start:
    return m.Start(
        rank=rank,
        node="n1",
        device=0,
        world_size=world_size,
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        resume=False,
    )


class Output:
    """The output of rank 0 of a script of one rank, and what is reported of it."""

    def __init__(self, folder: Path, pattern: str = "") -> None:
        self.log = folder / "n1.rank0.log"
        self.sent: list[Any] = []
        self.output = ScriptOutput(self.sent.append, pattern)
        self.start()

    def start(self, begin: int = 0) -> None:
        self.output.follow(start_of(0, 1), self.log, begin)

    def write(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(text)

    async def look(self) -> None:
        await self.output.look_within(30.0)

    @property
    def iterations(self) -> list[int]:
        return [figures.iteration for printed in self.sent for figures in printed.figures]


@in_loop
async def test_what_a_rank_prints_is_reported(tmp_path: Path) -> None:
    job = Output(tmp_path)
    await job.look()
    assert job.sent == [], "there is no log yet"
    job.write("loading\n" + lines(1, 2, 3)[:-20])
    await job.look()
    job.write(lines(3)[-20:] + lines(4, loss="nan"))
    await job.look()
    await job.look()
    assert job.iterations == [1, 2, 3, 4]
    first, second = job.sent
    assert first == m.Printed(
        rank=0, goal=500, figures=tuple(m.PrintedFigures(iteration=i, seconds=0.82, loss=2.5) for i in (1, 2))
    )
    assert str(second.figures[-1].loss) == "nan"


@in_loop
async def test_only_the_first_and_the_last_rank_are_read(tmp_path: Path) -> None:
    sent: list[Any] = []
    output = ScriptOutput(sent.append)
    for rank in range(4):
        (tmp_path / f"{rank}.log").write_text(lines(1, 2))
        output.follow(start_of(rank, 4), tmp_path / f"{rank}.log")
    assert [rank for rank in range(4) if output.follows(rank)] == [0, 3]
    await output.look_within(30.0)
    assert [printed.rank for printed in sent] == [0, 3]


@in_loop
async def test_a_new_process_is_read_from_where_it_began(tmp_path: Path) -> None:
    job = Output(tmp_path)
    job.write(lines(*range(1, 41)) + "iteration       41/     500 | elapsed")
    await job.look()
    job.start(begin=job.log.stat().st_size)
    job.write(lines(31, 32, 33))
    await job.look()
    assert job.iterations[-3:] == [31, 32, 33]


@in_loop
async def test_of_a_flood_only_the_end_is_read(tmp_path: Path) -> None:
    """Sparse, so that the test writes no gigabyte."""
    job = Output(tmp_path)
    job.write(lines(1, 2))
    await job.look()
    os.truncate(job.log, 1 << 30)
    job.write("\n" + "x" * MAX_READ_BYTES + "\n" + lines(100, 101))
    began = time.process_time()
    await job.look()
    assert time.process_time() - began < 0.5
    job.write(lines(102))
    await job.look()
    assert job.iterations == [1, 2, 100, 101, 102]


@in_loop
async def test_what_was_freed_is_no_line(tmp_path: Path) -> None:
    job = Output(tmp_path)
    job.write(lines(*range(1, 3)))
    await job.look()
    job.write(lines(*range(3, 2000)))
    with job.log.open("r+b") as log:
        if not _free(log.fileno(), 100 << 10):
            pytest.skip("no holes on this file system")
    await job.look()
    read = job.iterations[2:]
    assert read[-1] == 1999
    assert read[0] > (100 << 10) // len(lines(1))


@in_loop
async def test_a_log_that_became_shorter_is_read_again(tmp_path: Path) -> None:
    job = Output(tmp_path)
    job.write(lines(*range(1, 10)))
    await job.look()
    job.log.write_text(lines(10, 11))
    await job.look()
    assert job.iterations[-2:] == [10, 11]


@in_loop
async def test_hundreds_of_iterations_a_second_are_combined(tmp_path: Path) -> None:
    job = Output(tmp_path)
    job.write(lines(*range(1, 101)) + lines(101, loss="nan") + lines(*range(102, 201)))
    await job.look()
    (printed,) = job.sent
    assert len(printed.figures) == 20
    assert job.iterations == list(range(10, 201, 10))
    assert {figures.seconds for figures in printed.figures} == {0.82}
    assert [figures.iteration for figures in printed.figures if figures.loss != 2.5] == [110]


@in_loop
async def test_lines_that_are_read_together_have_the_times_between(tmp_path: Path) -> None:
    """A script that states no time is read once a second; its iterations take a tenth of it."""
    job = Output(tmp_path)
    for second in range(4):
        job.write("".join(f"step: {i}  loss:  2.5  memory: 3GiB\n" for i in range(10 * second + 1, 10 * second + 11)))
        os.utime(job.log, (1e9 + second, 1e9 + second))
        await job.look()
    assert job.iterations == list(range(1, 41))
    seconds = [figures.seconds for printed in job.sent[1:] for figures in printed.figures]
    assert seconds == [pytest.approx(0.1, rel=0.01)] * 30


@in_loop
async def test_a_log_that_hangs_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang, job = threading.Event(), Output(tmp_path)
    monkeypatch.setattr(LogTail, "new", lambda tail: str(hang.wait(30))[:0])
    began = time.monotonic()
    for _ in range(100):
        job.output.look()
    await job.output.last_look(0, 0.05)
    assert not job.output.follows(0)
    assert time.monotonic() - began < 5.0
    assert job.output._requests.qsize() <= 1, "one reading waits, whatever the number of heartbeats"
    hang.set()


@in_loop
async def test_a_pattern_that_is_too_slow_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_output, "MAX_PATTERN_S", -1.0)
    job = Output(tmp_path, pattern=r"batch (?P<iteration>\d+)")
    job.write("batch 1\nbatch 2\n")
    await job.look()
    assert not job.output.follows(0)


@in_loop
async def test_nothing_is_read_after_the_end(tmp_path: Path) -> None:
    job = Output(tmp_path)
    job.write(lines(1, 2))
    job.output.close()
    job.start()
    job.output.look()
    await job.output.look_within(0.05)
    assert job.sent == []
