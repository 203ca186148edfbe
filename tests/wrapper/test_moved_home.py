"""A folder of experiments that was moved, with something new in its old place: each job's own files are read."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from resihp.record import journal
from resihp.record.journal_file import Journal
from resihp.wrapper import registry
from resihp.wrapper.commands.resume import checkpoint_folder_of
from resihp.wrapper.config.run_spec import load
from resihp.wrapper.job_folder import Job, OurJob, create_local_job, find_job, note_end
from tests.wrapper.commands.status.test_status import record_job, resihp
from tests.wrapper.run_requests import run_request


def made(home: Path, monkeypatch: pytest.MonkeyPatch, *, ended: bool = True) -> Job:
    """A job of this home that wrote a checkpoint into its folder, and a ledger; registered as the supervisor does."""
    monkeypatch.setenv("RESIHP_HOME", str(home))
    job = create_local_job()
    run_request(job.name, job.folder, checkpoint_folder=str(job.checkpoints)).save()
    last = record_job(job, ended=ended)[-1]
    folder = str(job.checkpoints / "iteration-000002")
    part = journal.CheckpointCommitted(iteration=2, folder=folder, bytes=1, seconds=0.1)
    if not ended:
        writer = Journal(job.journal_file)
        writer.append(part, last.at)
        writer.close()
    job.set_ledger(f"sqlite:///{job.folder}/ledger.db")
    if ended:
        note_end(job)
        resihp("status", str(job.folder))
    return job


def jobs_in(ledger: Path) -> int:
    with closing(sqlite3.connect(ledger)) as connection:
        return int(connection.execute("SELECT count(*) FROM jobs").fetchone()[0])


def test_a_job_of_a_moved_home_is_read_where_it_is_now_and_what_is_in_its_old_place_is_let_alone(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fresh_home / "exp", fresh_home / "exp-old"
    before = made(old, monkeypatch)
    old.rename(new)
    after = made(old, monkeypatch)
    assert (before.name, before.folder) == (after.name, after.folder)
    moved = OurJob(before.name, new / "jobs" / before.name)
    state = json.loads(resihp("status", str(moved.folder), "--json").stdout)
    assert state["iteration"] == 3
    assert moved.ledger_url == f"sqlite:///{moved.folder}/ledger.db"
    assert jobs_in(after.folder / "ledger.db") == 1
    assert checkpoint_folder_of(moved) == moved.checkpoints
    assert load(moved.run_file).of_job == moved
    assert checkpoint_folder_of(after) == after.checkpoints


def test_the_old_place_of_a_moved_home_stays_empty(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fresh_home / "exp", fresh_home / "exp-old"
    job = made(old, monkeypatch, ended=False)
    old.rename(new)
    moved = Job(job.name, new / "jobs" / job.name)
    state = json.loads(resihp("status", str(moved.folder), "--json").stdout)
    assert state["state"] == "abnormal", "it was ended, and its ledger brought up to that"
    assert state["checkpoint"]["folder"] == str(moved.checkpoints / "iteration-000002")
    assert not old.exists()


def test_jobs_lists_a_moved_job_once_and_it_is_found_by_name_from_elsewhere(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fresh_home / "exp", fresh_home / "exp-old"
    job = made(old, monkeypatch)
    old.rename(new)
    monkeypatch.setenv("RESIHP_HOME", str(new))
    [row] = json.loads(resihp("jobs", "--json").stdout)["rows"]
    assert (row["state"], row["folder"]) == ("completed", str(new / "jobs" / job.name))
    monkeypatch.setenv("RESIHP_HOME", str(fresh_home / "elsewhere"))
    assert find_job(job.name).folder == new / "jobs" / job.name
    assert [entry.folder for entry in registry.entries()[0]] == [str(new / "jobs" / job.name)]


def test_a_ledger_elsewhere_is_where_it_was(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fresh_home / "exp", fresh_home / "exp-old"
    job = made(old, monkeypatch)
    shared = f"sqlite:///{fresh_home}/shared.db"
    job.set_ledger(shared)
    old.rename(new)
    assert OurJob(job.name, new / "jobs" / job.name).ledger_url == shared
    monkeypatch.setenv("RESIHP_HOME", str(new))
    assert resihp("jobs").exit_code == 0
    new.rename(newest := fresh_home / "newest")
    monkeypatch.setenv("RESIHP_HOME", str(newest))
    assert resihp("jobs").exit_code == 0, "its entry in the registry follows"
    assert OurJob(job.name, newest / "jobs" / job.name).ledger_url == shared
