"""Neighbours on a cluster: what another user could have written is not run, and what is another user's is not written.

Tests that need a second user give files away, so they need root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resihp.errors import JobNotFoundError, OwnershipError, UsageError
from resihp.record.journal import JobEnded, NodeJoined
from resihp.record.journal_file import Journal
from resihp.wrapper import job_folder
from resihp.wrapper.commands import resume
from resihp.wrapper.config.run_spec import load
from resihp.wrapper.job_files.dead_jobs import finish_dead_job
from resihp.wrapper.job_folder import Job, close_home, create_local_job, create_slurm_job, find_job, take_lock
from resihp.wrapper.strict_modes import read_own, read_plain, write_private
from tests.wrapper.run_requests import run_request

NEIGHBOUR = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def open_umask() -> None:
    """As where every user has a group of his own; the one before is back after the test."""
    before = os.umask(0o002)
    yield  # type: ignore[misc]
    os.umask(before)


def asked(fresh_home: Path) -> Job:
    """A job whose run.json is written."""
    job = create_local_job()
    run_request(job.name, job.folder).save()
    return job


# --- folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [create_local_job, lambda: create_slurm_job("77", 0)], ids=["local", "slurm"])
def test_folders_are_private_whatever_the_umask(fresh_home: Path, open_umask: None, make: object) -> None:
    job: Job = make()  # type: ignore[operator]
    for folder in (fresh_home / "home", fresh_home / "home" / "jobs", job.folder, job.logs):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for file in job.folder.iterdir():
        assert file.is_dir() or stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_jobs_that_an_older_version_left_open_are_closed(fresh_home: Path) -> None:
    create_local_job()
    jobs = fresh_home / "home" / "jobs"
    jobs.chmod(0o2775)
    create_local_job()
    assert stat.S_IMODE(jobs.stat().st_mode) == 0o2755


def test_home_that_a_group_may_write_is_refused_with_the_command_that_mends_it(fresh_home: Path) -> None:
    home = fresh_home / "home"
    home.mkdir(mode=0o700)
    home.chmod(0o2770)
    with pytest.raises(UsageError, match=rf"{home}: group \S+ may write it; chmod go-w {home}"):
        create_local_job()
    assert not (home / "jobs").exists() or not list((home / "jobs").iterdir())
    home.chmod(0o777)
    with pytest.raises(UsageError, match="everybody may write it"):
        create_local_job()


def test_sticky_home_is_taken(fresh_home: Path) -> None:
    """As of a site that has one folder for all, like /tmp: others can add to it, and take nothing away."""
    home = fresh_home / "home"
    home.mkdir()
    home.chmod(0o1777)
    assert create_local_job().folder.parent == home / "jobs"


def test_home_below_a_folder_of_a_group_is_taken_and_below_one_of_everybody_not(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = fresh_home / "project"
    project.mkdir()
    monkeypatch.setenv("RESIHP_HOME", str(project / "mine"))
    project.chmod(0o2775)  # as projects are on most clusters, often with a root or a colleague for owner
    assert create_local_job().name == "local-1"
    project.chmod(0o777)
    with pytest.raises(UsageError, match=rf"{project} is writable by all; chmod o-w {project}"):
        create_local_job()


@as_root
def test_home_of_somebody_else_is_refused_by_his_name(fresh_home: Path) -> None:
    home = fresh_home / "home"
    home.mkdir()
    os.chown(home, NEIGHBOUR, -1)
    with pytest.raises(UsageError, match=f"{home}: belongs to user {NEIGHBOUR}; set RESIHP_HOME"):
        create_local_job()


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_place_of_journals_that_others_may_write_is_refused(fresh_home: Path, mode: int) -> None:
    local = fresh_home / "local"
    local.mkdir()
    local.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod go-w {local}, or set RESIHP_LOCAL"):
        create_local_job()


# --- what is run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.json", "job.json"])
def test_run_that_others_may_write_is_not_loaded(fresh_home: Path, name: str) -> None:
    job = asked(fresh_home)
    assert load(job.run_file).job == job.name
    (job.folder / name).chmod(0o660)
    with pytest.raises(OwnershipError, match=rf"{name}: group \S+ may write it; chmod go-w {job.folder / name}"):
        load(job.run_file)


@pytest.mark.parametrize("place", ["home", "jobs", "job", "journal"])
def test_run_below_a_folder_that_others_may_write_is_not_loaded(fresh_home: Path, place: str) -> None:
    job = asked(fresh_home)
    folder = {
        "home": job.folder.parent.parent,
        "jobs": job.folder.parent,
        "job": job.folder,
        "journal": job.journal_file.parent,
    }[place]
    folder.chmod(0o777)
    with pytest.raises(OwnershipError, match=f"chmod go-w {folder}"):
        load(job.run_file)


def test_key_that_others_may_write_is_not_used(fresh_home: Path) -> None:
    job = create_local_job()
    assert len(job.key) == 32
    job.key_file.chmod(0o620)
    with pytest.raises(OwnershipError, match="chmod go-w"):
        _ = job.key


@as_root
def test_colleagues_run_is_neither_loaded_nor_gone_on_with(fresh_home: Path) -> None:
    """In a folder of a group: a job that a colleague has put there, under the name of the Slurm job that is run."""
    job = create_slurm_job("77", 0)
    run_request(job.name, job.folder).save()
    for each in (job.run_file, job.folder / "job.json", job.key_file, job.folder):
        os.chown(each, NEIGHBOUR, -1)
    with pytest.raises(OwnershipError, match=f"belongs to user {NEIGHBOUR}"):
        load(job.run_file)
    with pytest.raises(OwnershipError, match=f"belongs to user {NEIGHBOUR}"):
        resume.after_restart("77", 1, ("python", "train.py"), 3, lambda text: None)
    assert len(job.key) == 32, "root may speak to any job, and run nothing of it"


def test_link_in_place_of_a_run_is_not_followed(fresh_home: Path) -> None:
    job = asked(fresh_home)
    elsewhere = fresh_home / "theirs.json"
    job.run_file.rename(elsewhere)
    job.run_file.symlink_to(elsewhere)
    with pytest.raises(OwnershipError, match="is a link"):
        load(job.run_file)


def test_private_file_is_never_written_into_one_that_somebody_has_put_there(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever guessed its temporary name, and made that file first, could read what is written into it."""
    job = create_local_job()
    monkeypatch.setattr("resihp.durable_files.secrets.token_hex", lambda _: "guessed")
    trap = job.folder / ".resihp-guessed"
    trap.touch(mode=0o666)
    for sync in (False, True):
        with trap.open() as theirs:
            with pytest.raises(FileExistsError):
                job_folder.write_private(job.key_file, b"secret", sync=sync)
            assert theirs.read() == ""
    trap.unlink()
    trap.symlink_to(fresh_home / "elsewhere")
    with pytest.raises(FileExistsError):
        job_folder.write_private(job.key_file, b"secret")
    assert not (fresh_home / "elsewhere").exists()
    trap.unlink()
    job_folder.write_private(job.key_file, b"secret")
    assert stat.S_IMODE(job.key_file.stat().st_mode) == 0o600


# --- what is only shown ---------------------------------------------------------------------------------------------


def begun(job: Job) -> None:
    journal = Journal(job.journal_file)
    journal.append(NodeJoined(node="n1", host="h", devices=1), 1.0)
    journal.close()


@as_root
def test_another_users_job_is_read_and_never_written(fresh_home: Path) -> None:
    """root looks at a job of a user's that died: nothing of it changes hands, and its lock is not made."""
    job = create_local_job()
    begun(job)
    for path in (job.folder, *job.folder.iterdir(), job.journal_file, job.journal_file.parent):
        os.chown(path, NEIGHBOUR, -1)
    assert find_job(job.name) == job
    assert job.supervisor() is None
    assert not finish_dead_job(job)
    assert [type(record.entry) for record in job.records()] == [NodeJoined]
    for path in (*job.folder.iterdir(), *job.journal_file.parent.iterdir()):
        assert path.stat().st_uid == NEIGHBOUR, path
    assert not (job.folder / job_folder.LOCK_NAME).exists()


@as_root
def test_another_users_job_that_runs_is_seen_to_run(fresh_home: Path) -> None:
    job = create_local_job()
    begun(job)
    job_folder.write_private(job.supervisor_file, b'{"host":"127.0.0.1","port":1,"pid":1}')
    lock = take_lock(job)
    assert lock is not None
    for path in (job.folder, *job.folder.iterdir()):
        os.chown(path, NEIGHBOUR, -1)
    assert job.supervisor() is not None
    os.close(lock)
    assert job.supervisor() is None


def test_own_job_that_died_is_still_ended_by_its_readers(fresh_home: Path) -> None:
    job = create_local_job()
    begun(job)
    assert finish_dead_job(job)
    assert isinstance(job.records()[-1].entry, JobEnded)


# --- what is no file, or too much of one ----------------------------------------------------------------------------


def test_pipes_devices_and_giants_are_refused_at_once(tmp_path: Path) -> None:
    pipe, giant = tmp_path / "pipe", tmp_path / "giant"
    os.mkfifo(pipe)
    with giant.open("wb") as file:
        file.truncate(1 << 40)
    for read in (read_own, read_plain):
        with pytest.raises(OSError, match="is no plain file"):
            read(pipe)
        with pytest.raises(OSError, match="is no plain file"):
            read(Path("/dev/zero"))
        with pytest.raises(OSError, match="is no plain file"):
            read(tmp_path)
        with pytest.raises(OSError, match=f"has {1 << 40} bytes"):
            read(giant)


def test_job_whose_files_are_pipes_is_no_job(fresh_home: Path) -> None:
    job = create_local_job()
    (job.folder / "job.json").unlink()
    os.mkfifo(job.folder / "job.json")
    with pytest.raises(JobNotFoundError):
        find_job(job.name)
    with pytest.raises(JobNotFoundError, match="is no plain file"):
        job.read()


def test_json_without_an_end_to_its_depth_is_no_job(fresh_home: Path) -> None:
    job = asked(fresh_home)
    (job.folder / "job.json").write_bytes(b'{"name":' + b"[" * 200_000)
    with pytest.raises(JobNotFoundError):
        job.read()
    with pytest.raises(UsageError):
        load(job.run_file)


def test_two_threads_write_a_file_whole_each(tmp_path: Path) -> None:
    """A job's folder is changed by the supervisor's threads at once."""
    path = tmp_path / "job.json"
    contents = [bytes([letter]) * 50_000 for letter in b"abcd"]
    with ThreadPoolExecutor(len(contents)) as threads:
        list(threads.map(lambda content: write_private(path, content), contents * 50))
    assert path.read_bytes() in contents
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


# --- locks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_told_with_the_way_out(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Lustre that is mounted without -o flock."""
    job = create_local_job()

    def refuse(descriptor: int, what: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"supervisor\.lock: .*mounted with -o flock.* set RESIHP_HOME"):
        job_folder.hold_lock(job)
    with pytest.raises(UsageError, match="set RESIHP_LOCAL"):
        job_folder.lock_file(job.journal_file.with_suffix(".lock"))


def test_home_that_is_not_there_yet_is_none_that_is_open(fresh_home: Path) -> None:
    close_home()
    assert not (fresh_home / "home").exists()
