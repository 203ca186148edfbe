"""`--json` of what runs, submits, stops, hurts, reports and upgrades: one document on stdout, messages on stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resihp.db.migrate import head
from resihp.errors import UsageError
from resihp.protocol.messages import OperatorReply
from resihp.worker.checkpoints import write_manifest
from resihp.wrapper.cli import app
from resihp.wrapper.commands.run import guardian
from resihp.wrapper.config.run_spec import load
from resihp.wrapper.job_folder import Job, create_local_job
from tests.slurm.fake_slurm import FakeSlurm
from tests.wrapper.commands.status.test_status import record_job
from tests.wrapper.run_requests import run_request

OUTCOME = [
    *("schema", "job", "id", "exit_code", "state", "reason", "iteration", "target", "committed_iterations"),
    *("failures", "goodput", "checkpoint", "go_on", "folder", "logs"),
]


def told(*arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
    """The document, and what was said beside it."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    assert document.pop("schema") == 1
    return document, result.stderr


@pytest.fixture
def over(fresh_home: Path) -> Job:
    """A job that has ended."""
    job = create_local_job()
    record_job(job)
    run_request(job.name, job.folder, checkpoint_folder=str(job.checkpoints)).save()
    return job


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*arguments: object, **options: object) -> OperatorReply:
        return OperatorReply(ok=True, text="done as asked")

    monkeypatch.setattr("resihp.wrapper.commands.operate.request.ask", ask)
    monkeypatch.setattr("resihp.wrapper.commands.operate.inject.ask", ask)


def test_run(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = 1

    def guard(run_file: Path) -> int:
        job = load(run_file).of_job
        record_job(job)
        folder = job.checkpoints / "iteration-000002"
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"1234")
        write_manifest(folder, 2, [("part", 4)])
        return code

    monkeypatch.setattr(guardian, "guard", guard)
    monkeypatch.setattr("resihp.wrapper.commands.run.never_wait_for", lambda *_: None)
    (fresh_home / "train.py").write_text("")
    command = ("run", "--json", "--local", "--nodes", "2", "--gpus-per-node", "2", "--", sys.executable, "train.py")
    found, said = told(*command, code=1)
    assert ["schema", *found] == OUTCOME
    folder = fresh_home / "home" / "jobs" / "local-1"
    assert (found["job"], found["exit_code"], found["state"]) == ("local-1", 1, "completed")
    assert (found["iteration"], found["committed_iterations"], found["failures"]) == (3, 3, 1)
    assert (found["folder"], found["logs"]) == (str(folder), str(folder / "logs"))
    assert found["checkpoint"]["iteration"] == 2
    assert f"--resume local-1 -- {sys.executable} train.py" in found["go_on"]
    assert len(found["id"]) == 36
    assert "job local-1: 2 nodes of 2, logs in" in said
    code = 0
    found, _ = told(*command)
    assert (found["job"], found["checkpoint"]["iteration"], found["go_on"]) == ("local-2", 2, None), "it is done"


def test_a_dry_run(fresh_home: Path) -> None:
    (fresh_home / "train.py").write_text("")
    found, _ = told("run", "--json", "--dry-run", "--local", "--", sys.executable, "train.py")
    assert found["dry_run"] is True
    assert found["lines"][-1] == "nothing was started or written"


def test_what_a_ledger_cannot_tell_is_null(over: Job, answers: None) -> None:
    (over.folder / "ledger.db").write_bytes(b"no database at all" * 1000)
    found, said = told("stop", over.name, "--json")
    assert (found["job"], found["state"], found["failures"], found["folder"]) == (
        "local-1",
        None,
        None,
        str(over.folder),
    )
    assert "job local-1: its ledger cannot be read, values are missing: " in said


def test_stop(over: Job, answers: None) -> None:
    found, said = told("stop", over.name, "--json")
    assert ["schema", *found] == OUTCOME
    assert (found["job"], found["exit_code"], found["state"], found["reason"]) == (
        *("local-1", 0, "completed", "3 iterations done"),
    )
    assert "resihp: job local-1: done as asked\n" in said


def test_inject_has_one_target(over: Job, answers: None) -> None:
    found, _ = told("inject", "kill", over.name, "--rank", "0", "--json")
    assert (found["rank"], found["node"], found["link"], found["speed"]) == (0, None, None, None)
    for target, said in (
        (("--link", "n1"), "--link n1 is not two nodes; for example --link n1-n2"),
        (("--rank", "0", "--node", "n1"), "name one target"),
        ((), "name one target"),
    ):
        refusal = CliRunner().invoke(app, ["inject", "slow", over.name, *target]).exception
        assert isinstance(refusal, UsageError)
        assert said in str(refusal)


def test_inject(over: Job, answers: None) -> None:
    found, said = told("inject", "slow", over.name, "--link", "n1-n2", "--speed", "0.5", "--json")
    assert found == {
        "job": "local-1",
        "kind": "slow",
        "rank": None,
        "node": None,
        "link": ["n1", "n2"],
        "speed": 0.5,
        "text": "done as asked",
    }
    assert said == "resihp: job local-1: done as asked\n"


@pytest.mark.parametrize("chain", [1, 2])
def test_submit(fresh_home: Path, monkeypatch: pytest.MonkeyPatch, chain: int) -> None:
    monkeypatch.setattr("resihp.slurm.commands.CommandLine", lambda: FakeSlurm(["n1"]))
    (fresh_home / "train.py").write_text("")
    job_file = fresh_home / "job.toml"
    command = f"[job]\ntime = '2h'\ncommand = ['{sys.executable}', 'train.py']\n[checkpoint]\nfolder = '{fresh_home}'\n"
    job_file.write_text(command)
    found, said = told("submit", job_file, "--chain", chain, "--json")
    assert found["dry_run"] is False
    assert len(found["jobs"]) == chain
    assert found["script"] == Path(found["path"]).read_text()
    assert f"submitted {'job' if chain == 1 else 'a chain of 2 jobs'}" in said
    found, _ = told("submit", job_file, "--dry-run", "--json")
    assert (found["dry_run"], found["jobs"], found["path"]) == (True, [], None)
    assert found["script"].startswith("#!")


def test_report(over: Job, fresh_home: Path) -> None:
    found, said = told("report", over.name, "-o", "page.html", "--json")
    page = fresh_home / "page.html"
    assert (found["job"], found["format"], found["file"]) == ("local-1", "html", str(page))
    assert found["bytes"] == page.stat().st_size
    assert found["summary"][0].startswith("Job local-1 trained 3")
    assert "report written to page.html" in said
    found, said = told("report", over.name, "--markdown", "--json")
    assert (found["format"], said) == ("markdown", "")
    assert found["text"].startswith("## Job local-1: completed")


def test_db_upgrade(over: Job) -> None:
    found, said = told("db", "upgrade", over.name, "--json")
    assert found.pop("ledger").endswith("ledger.db")
    assert found == {"before": None, "after": head(), "newer": False, "settled": 0}
    assert "created" in said
    found, _ = told("db", "upgrade", over.name, "--json")
    assert (found["before"], found["after"]) == (head(), head())
