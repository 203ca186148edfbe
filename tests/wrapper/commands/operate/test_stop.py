"""`resihp stop`: says what the journal tells until the job has ended, and reads of a long one what is new alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resihp.protocol.messages import AskStop, OperatorReply
from resihp.record import journal, journal_file, journal_format
from resihp.wrapper.cli import app
from resihp.wrapper.commands.operate import request, stop
from resihp.wrapper.job_folder import Job, create_local_job, take_lock
from tests.wrapper.commands.status.test_status import record_job


class Clock:
    """Waiting takes no time, and in each pause the job does the next thing."""

    def __init__(self, *does: Callable[[], Any]) -> None:
        self.now = 0.0
        self.does = list(does)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.does:
            self.does.pop(0)()


@pytest.fixture
def job(fresh_home: Path) -> Job:
    job = create_local_job()
    record_job(job, ended=False)
    return job


def test_a_long_journal_is_not_read_again_and_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """`resihp stop local-1`, with twenty looks at the journal until a checkpoint is there and the job has ended."""
    asked = []

    async def answered(of: Job, what: AskStop, patience_s: float = 0.0) -> OperatorReply:
        asked.append((of, what.at_once))
        return OperatorReply(ok=True, text="stops after iteration 4")

    lock = take_lock(job)
    assert lock is not None
    writer = journal_file.Journal(job.journal_file, sync=False)
    before = len(job.records())

    def saved() -> None:
        entry = journal.CheckpointCommitted(iteration=4, folder="/saved/4", bytes=2_839_154, seconds=0.034)
        writer.append(entry, time.time())

    def ends() -> None:
        writer.append(journal.JobEnded(exit_code=143, state="cancelled", reason="asked to stop"), time.time())
        job.exit_code_file.write_text("143\n")
        os.close(lock)

    decoded: list[int] = []
    real = journal_format.decode
    monkeypatch.setattr(journal_format, "decode", lambda body: (decoded.append(len(body)), real(body))[1])
    monkeypatch.setattr(request, "ask", answered)
    monkeypatch.setattr("resihp.wrapper.commands.resume.resume_hint", lambda of: "")
    monkeypatch.setattr("resihp.wrapper.config.run_spec.load", lambda path: None)
    nothing = [lambda: None] * 8
    monkeypatch.setattr(stop, "time", Clock(*nothing, saved, *nothing, ends))
    result = CliRunner().invoke(app, ["stop", "local-1"])
    assert result.exit_code == 0, result.exception
    assert asked == [(job, False)]
    assert result.stderr.splitlines() == [
        "resihp: job local-1: stops after iteration 4",
        "resihp: job local-1: checkpoint of iteration 4: 2.8 MB in 0.03 s",
        "resihp: job local-1: cancelled, exit code 143, asked to stop",
    ]
    assert len(decoded) <= before + 2, "each record once"


def test_a_job_that_nobody_supervises_any_more_is_not_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "time", Clock())
    told = stop.StopProgress(job)
    told.new()
    assert not stop._follow(job, told)


def test_the_copy_is_read_on_where_the_journal_is_gone(job: Job) -> None:
    """As when another node has taken the lead, and the job has ended there."""
    told = stop.StopProgress(job)
    told.new()
    writer = journal_file.Journal(job.journal_file, sync=False)
    writer.append(journal.JobEnded(exit_code=0, state="completed", reason="done"), time.time())
    writer.close()
    job.journal_file.rename(job.journal_copy)
    assert [type(entry) for entry in told.new()] == [journal.JobEnded]
    assert told.new() == []
