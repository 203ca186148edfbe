"""What is shown of the log of the worker that failed first."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.record.journal import AnyEntry, FailureFound, WorkerEnded, WorkerStarted
from resihp.record.journal_file import Journal
from resihp.wrapper.commands.operate.last_words import last_words
from resihp.wrapper.job_folder import Job, create_local_job


@pytest.fixture
def failed(fresh_home: Path) -> Job:
    job = create_local_job()
    write(job, *(WorkerStarted(rank=rank, node=f"n{rank + 1}", device=0, pid=rank + 1, epoch=0) for rank in range(2)))
    return job


def write(job: Job, *entries: AnyEntry) -> None:
    journal = Journal(job.journal_file)
    for entry in entries:
        journal.append(entry, 1.0)
    journal.close()


def blamed(evidence: str) -> FailureFound:
    return FailureFound(
        failure=1,
        kind="program",
        component="script",
        cause="2 ranks exited with status 3",
        ranks=(),
        node=None,
        device=None,
        iteration=1,
        epoch=0,
        evidence=evidence,
        detect_s=None,
    )


def test_the_end_of_the_log_is_shown_with_its_path(failed: Job) -> None:
    write(failed, WorkerEnded(rank=1, exit=3, epoch=0), WorkerEnded(rank=0, exit=3, epoch=0), blamed(""))
    log = failed.logs / "n2.rank1.log"
    log.write_text("".join(f"line {number}\n" for number in range(20)) + "no data at /data\n\n")
    lines = last_words(failed).splitlines()
    assert lines[0] == f"log of rank 1: {log}; it ends with"
    assert [line.strip() for line in lines[-2:]] == ["line 19", "no data at /data"]
    assert len(lines) == 9


def test_where_a_traceback_was_shown_the_path_is_enough(failed: Job) -> None:
    write(failed, WorkerEnded(rank=1, exit=1, epoch=0), blamed("Traceback (most recent call last):\nValueError: x"))
    log = failed.logs / "n2.rank1.log"
    log.write_text("ValueError: x\n")
    assert last_words(failed) == f"log of rank 1: {log}"


def test_without_a_log_or_a_failure_nothing_is_said(failed: Job) -> None:
    assert last_words(failed) == ""
    write(failed, WorkerEnded(rank=1, exit=3, epoch=0))
    assert last_words(failed) == ""
