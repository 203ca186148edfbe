"""Job folders: numbered without races, private, found by name; a dead supervisor's job is ended by its readers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from resihp.errors import JobNotFoundError, LedgerError, ProtocolError, UsageError
from resihp.record.journal import AnyEntry, JobEnded, NodeJoined
from resihp.record.journal_file import Journal
from resihp.wrapper import job_folder, registry
from resihp.wrapper.job_files import dead_jobs
from resihp.wrapper.job_files.dead_jobs import finish_dead_job
from resihp.wrapper.job_folder import create_local_job, find_job, lock_file, take_lock, write_private
from resihp.wrapper.output.ledgers import opened


def test_numbers_are_given_once(fresh_home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: create_local_job().name, range(24)))
    assert sorted(names) == sorted(f"local-{n}" for n in range(1, 25))


def test_folder_is_private_and_the_journal_is_elsewhere(fresh_home: Path) -> None:
    job = create_local_job()
    assert job.folder == fresh_home / "home" / "jobs" / "local-1"
    assert job.folder.stat().st_mode & 0o777 == 0o700
    assert job.key_file.stat().st_mode & 0o777 == 0o600
    assert len(job.key) == 32
    assert job.journal_file.parent.parent == fresh_home / "local"
    assert job.journal_file.name == "journal"


def test_same_name_in_another_home_has_another_journal(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = create_local_job()
    monkeypatch.setenv("RESIHP_HOME", str(fresh_home / "another"))
    second = create_local_job()
    assert first.name == second.name
    assert first.journal_file != second.journal_file


def test_find_job_takes_the_newest_and_names_near_matches(fresh_home: Path) -> None:
    with pytest.raises(JobNotFoundError, match="no job in"):
        find_job()
    made = [create_local_job() for _ in range(3)]
    assert find_job() == made[-1]
    assert find_job("local-2") == made[1]
    with pytest.raises(JobNotFoundError, match="did you mean local-"):
        find_job("locl-2")


def test_what_could_not_be_looked_at_is_not_said_not_to_be_there(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_local_job()
    monkeypatch.setenv("RESIHP_HOME", str(fresh_home / "another"))
    root = registry.place()
    assert root is not None
    root.chmod(0o775)
    with pytest.raises(JobNotFoundError, match=r"whether it is in another folder of yours: .*: is not yours alone"):
        find_job("local-1")
    with pytest.raises(JobNotFoundError, match=r"no job in .*/another; .*: is not yours alone, and not read"):
        find_job()
    root.chmod(0o700)
    [entry] = root.iterdir()
    entry.write_bytes(entry.read_bytes()[:20])
    with pytest.raises(JobNotFoundError, match=r"whether it is in another folder of yours: .* left out"):
        find_job("local-1")


def test_a_job_that_never_began_is_told_as_such(fresh_home: Path) -> None:
    job = create_local_job()
    with pytest.raises(LedgerError, match=r"has it begun\?"), opened(job.name, None):
        pass
    file = msgspec.structs.replace(job.read(), created_at=time.time() - 61)
    write_private(job.folder / "job.json", msgspec.json.encode(file))
    with pytest.raises(LedgerError, match="job local-1: never began: it has no supervisor"), opened(job.name, None):
        pass


def test_home_that_cannot_be_made_is_a_usage_error(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh_home / "file").write_text("")
    monkeypatch.setenv("RESIHP_HOME", str(fresh_home / "file"))
    with pytest.raises(UsageError, match="RESIHP_HOME"):
        create_local_job()


def begun(entry: AnyEntry | None = None) -> job_folder.Job:
    job = create_local_job()
    journal = Journal(job.journal_file)
    journal.append(NodeJoined(node="n1", host="h", devices=1), time.time())
    if entry is not None:
        journal.append(entry, time.time())
    journal.close()
    return job


def test_job_of_a_dead_supervisor_ends_abnormally_once(fresh_home: Path) -> None:
    job = begun()
    assert finish_dead_job(job)
    last = job.records()[-1].entry
    assert isinstance(last, JobEnded)
    assert (last.state, last.exit_code) == ("abnormal", 1)
    assert job.journal_copy.read_bytes() == job.journal_file.read_bytes()
    assert not finish_dead_job(job)
    assert len(job.records()) == 2


def test_a_journal_that_cannot_be_restored_is_named(fresh_home: Path) -> None:
    job = begun()
    assert finish_dead_job(job)
    job.journal_file.unlink()
    job.journal_file.mkdir()
    with pytest.raises(ProtocolError, match="is no plain file"):
        finish_dead_job(job)


def test_an_end_that_cannot_be_written_is_a_warning(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    job = begun()
    monkeypatch.setattr(dead_jobs, "write_private", full)
    assert not finish_dead_job(job)
    told = capsys.readouterr().err
    assert told.startswith("resihp: warning: the end of job local-1 cannot be written: ")
    assert told.endswith(": No space left on device\n")


def test_job_that_is_supervised_ended_or_not_begun_is_left_alone(fresh_home: Path) -> None:
    assert not finish_dead_job(create_local_job())
    assert not finish_dead_job(begun(JobEnded(exit_code=0, state="completed", reason="done")))
    supervised = begun()
    assert take_lock(supervised) is not None
    assert take_lock(supervised) is None
    assert not finish_dead_job(supervised)


def test_journal_is_read_from_its_copy_when_the_original_is_gone(fresh_home: Path) -> None:
    job = begun()
    finish_dead_job(job)
    job.journal_file.unlink()
    assert len(job.records()) == 2


def test_job_that_a_successor_leads_from_this_machine_is_left_alone(fresh_home: Path) -> None:
    """The guardian's lock is free, since its node is gone; the successor's agent holds another, beside its journal."""
    job = begun()
    write_private(job.supervisor_file, b'{"host":"127.0.0.1","port":1,"pid":1}')
    assert job.supervisor() is None
    moved = job.journal_file.with_name("n2.journal")
    job.journal_file.rename(moved)
    job.move_journal(moved)
    lock = lock_file(moved.with_suffix(".lock"))
    assert lock is not None
    assert job.supervisor() is not None
    assert not finish_dead_job(job)
    os.close(lock)
    assert job.supervisor() is None
    assert finish_dead_job(job)


def test_job_whose_agents_may_elect_a_successor_is_left_alone(fresh_home: Path) -> None:
    job = begun()
    words = ("resihp.wrapper.agent.process", "--run", str(job.run_file), "--node", "n1")
    agent = subprocess.Popen([sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE)
    assert not finish_dead_job(job)
    agent.communicate(b"\n")
    assert finish_dead_job(job)


def test_guardians_supervisor_ends_the_job_under_the_guardians_lock(fresh_home: Path) -> None:
    job = begun()
    assert take_lock(job) is not None
    assert finish_dead_job(job, "it died", locked=True)
    last = job.records()[-1].entry
    assert isinstance(last, JobEnded)
    assert last.reason == "it died"
