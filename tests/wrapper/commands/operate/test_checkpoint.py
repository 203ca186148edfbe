"""`resihp checkpoint now|list`: which one a job would go on from, and what becomes of the question for one more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from resihp.errors import ResihpError
from resihp.protocol.messages import AskCheckpoint, OperatorReply
from resihp.worker.checkpoints import write_manifest
from resihp.wrapper.cli import app
from resihp.wrapper.commands.operate import request
from resihp.wrapper.job_folder import Job, create_local_job
from tests.wrapper.commands.status.test_status import record_job
from tests.wrapper.run_requests import run_request


@pytest.fixture
def job(fresh_home: Path) -> Job:
    job = create_local_job()
    record_job(job)
    run_request(job.name, job.folder, checkpoint_folder=str(job.checkpoints)).save()
    return job


def saved(job: Job, iteration: int) -> Path:
    folder = job.checkpoints / f"iteration-{iteration:06d}"
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(b"1234")
    write_manifest(folder, iteration, [("part", 4)], keep=3)
    return folder


def checkpoint(*words: str) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *words])


def listed(*words: str) -> list[dict[str, Any]]:
    result = checkpoint("list", *words, "--json")
    assert result.exit_code == 0, result.exception
    return list(json.loads(result.stdout)["rows"])


def test_the_newest_complete_one_is_what_a_job_goes_on_from(job: Job) -> None:
    assert checkpoint("list", job.name).stderr == f"resihp: job {job.name}: no checkpoint in {job.checkpoints}\n"
    for iteration in (2, 4, 6):
        (saved(job, iteration) / "part").write_bytes(b"12" if iteration == 6 else b"1234")
    rows = listed(job.name)
    assert [(row["iteration"], row["complete"], row["resumes"]) for row in rows] == [
        *((6, False, False), (4, True, True), (2, True, False)),
    ]
    assert rows[0]["fault"] is not None
    lines = checkpoint("list", job.name).stdout.splitlines()
    assert [words[1] for line in lines if (words := line.split())[:1] == [">"]] == ["4"]
    assert lines[-1] == f"in {job.checkpoints}"


def answered(monkeypatch: pytest.MonkeyPatch, reply: OperatorReply | KeyboardInterrupt) -> list[float]:
    """Have the job answer so; how long it was waited for."""
    patience: list[float] = []

    async def ask(of: Job, what: object, patience_s: float = 0.0) -> OperatorReply:
        assert isinstance(what, AskCheckpoint)
        patience.append(patience_s)
        if isinstance(reply, KeyboardInterrupt):
            raise reply
        return reply

    monkeypatch.setattr(request, "ask", ask)
    return patience


def test_one_more_is_waited_for_and_its_folder_printed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(job, 4)
    patience = answered(monkeypatch, OperatorReply(ok=True, text="checkpoint of iteration 4"))
    result = checkpoint("now", job.name, "--patience", "5")
    assert (result.exit_code, result.stdout) == (0, f"{folder}\n")
    assert "checkpoint of iteration 4" in result.stderr
    found = json.loads(checkpoint("now", job.name, "--json").stdout)
    assert (found["job"], found["checkpoint"]["iteration"]) == (job.name, 4)
    assert patience == [5.0, 600.0]


def test_a_job_that_writes_none_and_a_user_who_waits_no_longer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, OperatorReply(ok=False, text="no rank is training"))
    refusal = checkpoint("now", job.name).exception
    assert isinstance(refusal, ResihpError)
    assert str(refusal) == f"job {job.name}: no rank is training"
    answered(monkeypatch, KeyboardInterrupt())
    result = checkpoint("now", job.name)
    assert result.exit_code == 130
    assert f"the checkpoint is still being written: resihp checkpoint list {job.name}" in result.stderr
