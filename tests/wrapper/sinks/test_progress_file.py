"""How far a job is, in a file of its folder: as the journal has it, after a take-over too, and nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import StepOutcome
from resihp.record import journal
from resihp.wrapper.job_files.contents import ProgressFile
from resihp.wrapper.job_folder import Job, create_local_job
from resihp.wrapper.output.progress import progress_in
from resihp.wrapper.sinks import progress_file
from resihp.wrapper.sinks.progress_file import ProgressFileWriter
from tests.resihp.controller.direct import DECLARE
from tests.waiting import until
from tests.wrapper.commands.status.test_status import record_job


def found(job: Job) -> ProgressFile | None:
    return job.progress(job.read().created_at)


def plan(epoch: int, layout: Layout) -> journal.PlanDecided:
    made = Plan(epoch=epoch, layout=layout, assignment=spread(4, len(layout.replicas)))
    return journal.PlanDecided(plan=made, next_iteration=4, action="redo", finish=None, reason="")


def wait_for(job: Job, condition: Callable[[ProgressFile], bool]) -> ProgressFile:
    until(lambda: (file := found(job)) is not None and condition(file))
    file = found(job)
    assert file is not None
    return file


@pytest.fixture
def job(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(progress_file, "WRITE_EVERY_S", 0.001)
    return create_local_job()


def test_it_tells_what_the_journal_tells(job: Job) -> None:
    records = record_job(job, ended=False)
    writer = ProgressFileWriter(job)
    for record in records:
        writer.submit(record)
    file = wait_for(job, lambda file: len(file.recent) == 3)
    assert (file.nodes, file.gpus_per_node, file.layout) == (2, 2, records_layout(records))
    last = records_of(records, journal.IterationCommitted)[-1]
    assert (file.recent[-1].iteration, file.recent[-1].finished_at) == (3, last.at)
    assert job.progress_file.stat().st_mode & 0o777 == 0o600
    writer.close(time.monotonic())


def test_after_a_take_over_it_goes_on(job: Job) -> None:
    records = record_job(job, ended=False)
    commits = records_of(records, journal.IterationCommitted)
    writer = ProgressFileWriter(job, [record for record in records if record.seq < commits[-1].seq])
    writer.submit(commits[-1])
    file = wait_for(job, lambda file: len(file.recent) == 3)
    assert [each.iteration for each in file.recent] == [1, 2, 3]
    assert file.nodes == 2
    writer.close(time.monotonic())


def test_a_plan_that_never_took_effect_is_not_shown(job: Job) -> None:
    whole, half, one = (Layout.uniform(tp=1, pp=pp, dp=dp, layers=4) for pp, dp in ((2, 2), (2, 1), (1, 1)))
    never = [
        plan(2, half),  # overtaken by the next one
        plan(3, one),
        journal.PlanRefused(epoch=3, rank=1, reason="no"),
        plan(4, one),
        journal.PlanWithdrawn(epoch=4, reason="the job is to stop"),
    ]
    writer = ProgressFileWriter(job)
    writer.submit(journal.Record(1, 1.0, plan(1, whole)))
    wait_for(job, lambda file: file.layout == whole.describe())
    for seq, entry in enumerate((journal.PlanInEffect(epoch=1), *never, journal.ModelDeclared(declare=DECLARE)), 2):
        writer.submit(journal.Record(seq, 1.0, entry))
    assert wait_for(job, lambda file: file.target == DECLARE.iterations).layout == whole.describe()
    for seq, taken in enumerate((plan(5, half), journal.PlanInEffect(epoch=5)), 20):
        writer.submit(journal.Record(seq, 1.0, taken))
    wait_for(job, lambda file: file.layout == half.describe())
    writer.close(time.monotonic())


def test_a_folder_that_hangs_or_is_gone_is_waited_for_by_nobody(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    records = record_job(job, ended=False)
    hangs, begun = threading.Event(), threading.Event()

    def hanging(path: Path, content: bytes) -> None:
        begun.set()
        hangs.wait(20)
        raise FileNotFoundError(path)

    monkeypatch.setattr(progress_file, "write_private", hanging)
    writer = ProgressFileWriter(job)
    try:
        for record in records:
            writer.submit(record)
        assert begun.wait(20)
        began = time.monotonic()
        writer.submit(records[-1])
        writer.close(began)
        assert time.monotonic() - began < 5
        assert found(job) is None
    finally:
        hangs.set()


def test_it_stays_small(job: Job) -> None:
    """The last twenty iterations, however many there were."""
    records = record_job(job, ended=False)
    last = records_of(records, journal.IterationCommitted)[-1]
    outcome = last.entry.outcome
    writer = ProgressFileWriter(job, records)
    for number in range(4, 400):
        entry = msgspec.structs.replace(last.entry, outcome=msgspec.structs.replace(outcome, iteration=number))
        writer.submit(journal.Record(last.seq + number, last.at + number, entry))
    file = wait_for(job, lambda file: file.recent[-1].iteration == 399)
    assert len(file.recent) == 20
    assert job.progress_file.stat().st_size < 4096
    writer.close(time.monotonic())


def records_of(records: list[journal.Record], kind: type[journal.Entry]) -> list[Any]:
    return [record for record in records if isinstance(record.entry, kind)]


def records_layout(records: list[journal.Record]) -> str:
    return str(records_of(records, journal.PlanDecided)[-1].entry.plan.layout.describe())


def test_a_script_that_does_iterations_again_does_not_look_stuck() -> None:
    so_far, now_s = progress_file.ProgressSoFar(), 1e9 + 10_000.0

    def follow(seq: int, entry: journal.AnyEntry) -> bool:
        so_far.follow(journal.Record(seq, 1e9 + seq, entry))
        figures = progress_in(so_far.progress, now_s)
        assert figures is not None
        return bool(figures["stuck"])

    def printed(iteration: int) -> journal.IterationCommitted:
        outcome = StepOutcome.printed(iteration, 2.5)
        return journal.IterationCommitted(epoch=0, outcome=outcome, seconds=1.0, predicted_seconds=None)

    follow(1, journal.CounterSeen(rank=0, iteration=1, goal=100))
    assert [follow(seq, printed(seq)) for seq in (2, 3, 4)] == [True] * 3, "they are long ago"
    assert not follow(5, journal.CounterSeen(rank=0, iteration=2, furthest=4, goal=100))
    assert follow(6, printed(5))
    assert so_far.progress.target == 100
