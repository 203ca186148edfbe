"""`resihp jobs --all-users`, and `resihp status` of a job that one cannot read: what the site shares, and no more."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.wrapper.cli import app
from resihp.wrapper.commands.jobs import shared
from resihp.wrapper.config.sources import read
from resihp.wrapper.job_files.contents import LastIteration, ProgressFile
from resihp.wrapper.site_folders import folder as site_folder
from resihp.wrapper.site_folders.folder import user_of
from resihp.wrapper.site_folders.summaries import JobSummary, publish

ME = user_of(os.geteuid())


@pytest.fixture
def folder(fresh_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "site"
    made.mkdir()
    made.chmod(0o1733)
    etc = tmp_path / "etc.toml"
    etc.write_text(f"[site]\nshare = '{made}'\n")
    monkeypatch.setattr(shared, "read", partial(read, site=(etc,), authority=etc))
    monkeypatch.setattr(site_folder, "ADMINISTRATOR_UID", os.geteuid())
    return made


def summary(job: str, age_s: float = 1.0, event: str = "node n3: lost, no answer") -> JobSummary:
    now = time.time()
    recent = tuple(
        LastIteration(iteration=n, loss=2.25, tokens=1000, seconds=1.0, finished_at=now - age_s - 9 + n)
        for n in range(1, 10)
    )
    progress = ProgressFile(
        began_at=0.0, written_at=now, nodes=4, gpus_per_node=8, layout="2 x 2 stages", target=60, recent=recent
    )
    return JobSummary(
        uid=os.geteuid(),
        job=job,
        cluster="vc",
        host="gpu-1",
        written_at=now - age_s,
        progress=progress,
        event=event,
        event_at=now - 60,
    )


def ask(*argv: str) -> Result:
    return CliRunner().invoke(app, list(argv))


def test_running_jobs_of_all_users_are_listed(folder: Path) -> None:
    publish(folder, summary("17-r1"))
    publish(folder, summary("18", age_s=600.0))
    done = ask("jobs", "--all-users")
    assert done.exit_code == 0, done.output
    assert "17-r1" in done.stdout
    assert "9 of 60" in done.stdout
    assert ME in done.stdout
    assert "node n3: lost, no answer" in done.stdout
    rows = {row["job"]: row for row in json.loads(ask("jobs", "--all-users", "--json").stdout)["rows"]}
    assert {job: row["state"] for job, row in rows.items()} == {"17-r1": "running", "18": "silent"}
    assert rows["17-r1"]["user"] == ME
    assert rows["17-r1"]["folder"] is None
    assert rows["17-r1"]["tokens_per_second"] == pytest.approx(1000, rel=0.01)


def test_hostile_texts_steer_no_terminal(folder: Path) -> None:
    content = msgspec.to_builtins(summary("17"))
    content["event"] = content["host"] = content["progress"]["layout"] = "\x1b[2J[bold]x\n"
    (folder / f"vc-17-{os.geteuid()}.json").write_bytes(json.dumps(content).encode())
    for argv in (("jobs", "--all-users"), ("status", "17")):
        done = ask(*argv)
        assert done.exit_code == 0, done.output
        assert "\x1b" not in done.stdout
        assert "[bold]x" in done.stdout


def test_status_of_a_job_that_cannot_be_read_shows_what_it_shares(folder: Path) -> None:
    publish(folder, summary("17-r1"))
    for name in ("17", "17-r1", "/home/ada/.resihp/jobs/17-r1"):
        done = ask("status", name)
        assert done.exit_code == 0, done.output
        assert "job 17-r1  running  iteration 9 of 60  loss 2.2500" in done.stdout
        assert f"user {ME}, 4 x 8 GPUs, cluster vc, supervised on gpu-1" in done.stdout
        assert "not shown: health of the ranks, goodput, logs, other events" in done.stdout
    (row,) = json.loads(ask("status", "17", "--json").stdout)["shared"]
    assert (row["job"], row["iteration"]) == ("17-r1", 9)
    other = ask("status", "170")
    assert other.exit_code != 0
    assert "job 170: not in" in str(other.exception) + other.output


def test_a_site_that_shares_nothing_says_so(fresh_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "read", partial(read, site=()))
    done = ask("jobs", "--all-users")
    assert "[site] share" in str(done.exception) + done.output
    assert done.exit_code != 0
