"""Jobs are found from any folder: a file for each, which is never in the way, and is believed only if it is ours."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.db.writer import Ledger
from resihp.errors import JobNotFoundError, UsageError
from resihp.record import journal, journal_file, journal_format
from resihp.wrapper import registry
from resihp.wrapper.cli import app
from resihp.wrapper.job_files.dead_jobs import finish_dead_job
from resihp.wrapper.job_folder import Job, create_local_job, create_slurm_job, find_job, note_end
from tests.wrapper.commands.status.test_status import record_job

NEIGHBOUR = 65533


def ask(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def move_to(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_HOME", str(home))


@pytest.fixture
def elsewhere(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job that has ended, seen from another folder, which has none."""
    job = create_local_job()
    record_job(job)
    move_to(fresh_home / "another", monkeypatch)
    return job


def journal_layout(job: Job) -> str:
    """Of the last plan."""
    plans = [record.entry.plan for record in job.records() if isinstance(record.entry, journal.PlanDecided)]
    return plans[-1].layout.describe()


def files(place: Path) -> list[Path]:
    return sorted(place.iterdir())


def test_a_job_is_known_when_it_begins_and_when_it_ends(fresh_home: Path, own_registry: Path) -> None:
    job = create_local_job()
    [path] = files(own_registry)
    assert [own_registry.stat().st_mode & 0o777, own_registry.parent.stat().st_mode & 0o777] == [0o700, 0o700]
    assert path.stat().st_mode & 0o777 == 0o600
    told = json.loads(path.read_bytes())
    assert (told["name"], told["folder"], told["host"]) == ("local-1", str(job.folder), socket.gethostname())
    assert "ended_at" not in told
    record_job(job)
    note_end(job)
    [entry], wrong = registry.entries()
    assert not wrong
    assert (entry.state, entry.exit_code, entry.iterations, entry.nodes) == ("completed", 0, 3, 2)
    assert entry.ended_at == pytest.approx(job.read().created_at + 6)
    assert (entry.loss, entry.layout) == (3.25, journal_layout(job))
    assert len(files(own_registry)) == 1


def test_no_password_is_in_it(fresh_home: Path, own_registry: Path) -> None:
    create_local_job().set_ledger("postgresql://me:s3cret@db/ledger?sslpassword=s3cret")
    assert b"s3cret" not in files(own_registry)[0].read_bytes()
    assert registry.entries()[0][0].ledger.startswith("postgresql://me:***@db/ledger")


def test_a_dead_job_is_noted_by_whoever_finds_it(fresh_home: Path) -> None:
    job = create_local_job()
    record_job(job, ended=False)
    assert finish_dead_job(job)
    [entry], _ = registry.entries()
    assert (entry.state, entry.exit_code, entry.iterations) == ("abnormal", 1, 3)


def test_jobs_of_slurm_are_known_by_its_number(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alps")
    create_slurm_job("4711_3", 2)
    [entry], _ = registry.entries()
    assert (entry.name, entry.slurm_job, entry.cluster) == ("4711_3-r2", "4711_3", "alps")


# --- found from elsewhere -------------------------------------------------------------------------------------------


def test_a_job_is_found_from_another_folder_by_name_by_path_and_as_the_newest(elsewhere: Job) -> None:
    for arguments in (("local-1",), (str(elsewhere.folder),), ()):
        result = ask("status", *arguments, "--json")
        assert json.loads(result.stdout)["job"] == "local-1"
        told = f"using your newest, local-1 in {elsewhere.folder} (host {socket.gethostname()})"
        assert (told in result.stderr) == (not arguments)
    assert json.loads(ask("history", "iterations", "local-1", "--json").stdout)["rows"]


def test_what_does_something_to_a_job_of_another_folder_has_to_name_it(elsewhere: Job) -> None:
    for arguments in (("inject", "kill", "--rank", "0"), ("checkpoint", "now"), ("db", "upgrade")):
        with pytest.raises(JobNotFoundError, match=r"you have jobs in .*, or name a job"):
            ask(*arguments)
    with pytest.raises(UsageError, match="job local-1: is not running"):
        ask("inject", "kill", "local-1", "--rank", "0")
    assert "schema" in ask("db", "upgrade", "local-1").stderr


def test_the_job_of_this_home_is_meant_first(elsewhere: Job) -> None:
    here = create_local_job()
    assert here.name == elsewhere.name
    assert find_job("local-1") == here
    assert find_job() == here
    assert find_job(str(elsewhere.folder)) == elsewhere


def test_two_jobs_of_one_name_elsewhere_are_refused_with_how_to_name_each(
    elsewhere: Job, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = create_local_job()
    record_job(second)
    note_end(second)
    move_to(fresh_home / "third", monkeypatch)
    with pytest.raises(UsageError, match=r"job local-1: not in .*/third, and in 2 others") as refused:
        find_job("local-1")
    lines = str(refused.value).splitlines()[1:]
    assert [line.split(" (")[0] for line in lines] == [str(second.folder), str(elsewhere.folder)]
    assert all(f"(host {socket.gethostname()}, began 20" in line for line in lines)
    assert lines[0].endswith("UTC, completed)")
    assert find_job(lines[0].split(" (")[0]) == second


def test_runs_of_a_slurm_job_elsewhere_are_one_job(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_slurm_job("77", 0)
    again = create_slurm_job("77", 1)
    move_to(fresh_home / "another", monkeypatch)
    assert find_job("77") == again
    assert find_job("77-r1") == again


def test_a_folder_that_is_gone_is_told(elsewhere: Job) -> None:
    shutil.rmtree(elsewhere.folder)
    with pytest.raises(JobNotFoundError, match=f"job local-1: its folder {elsewhere.folder} is gone"):
        find_job("local-1")
    with pytest.raises(JobNotFoundError, match="no job in"):
        find_job()


def test_a_folder_of_another_host_is_said_to_be_there(elsewhere: Job, own_registry: Path) -> None:
    shutil.rmtree(elsewhere.folder)
    [entry], _ = registry.entries()
    registry.save(msgspec.structs.replace(entry, host="gpu-9"))
    with pytest.raises(JobNotFoundError, match="not seen from here; it was made on gpu-9: look there"):
        find_job("local-1")


def test_a_folder_that_holds_another_job_by_now_is_not_taken_for_it(
    elsewhere: Job, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(elsewhere.folder.parent.parent)
    monkeypatch.setenv("RESIHP_HOME", str(elsewhere.folder.parent.parent))
    again = create_local_job()
    assert again.folder == elsewhere.folder
    move_to(fresh_home / "another", monkeypatch)
    assert find_job("local-1") == again
    assert len(registry.entries()[0]) == 2


def test_near_names_are_of_all_homes(elsewhere: Job) -> None:
    with pytest.raises(JobNotFoundError, match="did you mean local-1"):
        find_job("locl-1")
    with pytest.raises(JobNotFoundError, match="resihp jobs --all lists all of yours, --all-users those of others"):
        find_job("99999")


def test_all_is_of_this_home_and_says_that_there_are_others(elsewhere: Job) -> None:
    other = str(elsewhere.folder.parent.parent)
    with pytest.raises(JobNotFoundError, match=f"you have jobs in {other}: set RESIHP_HOME"):
        ask("history", "jobs", "--all")
    here = create_local_job()
    record_job(here)
    result = ask("history", "jobs", "--all", "--json")
    assert len(json.loads(result.stdout)["rows"]) == 1
    assert f"only jobs of this home; other jobs of yours are in {other}" in result.stderr


# --- what cannot be believed, read or written -----------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"\x00\xff", b"[1]", b'{"name":"local-1"}', b"[" * 60000])
def test_a_damaged_file_is_left_out(elsewhere: Job, own_registry: Path, content: bytes) -> None:
    damaged = own_registry / f"local-2.{'0' * 16}.json"
    damaged.write_bytes(content)
    damaged.chmod(0o600)
    assert find_job("local-1") == elsewhere
    known, wrong = registry.entries()
    assert [entry.name for entry in known] == ["local-1"]
    assert [str(damaged) in line for line in wrong] == [True]


def test_what_is_being_written_is_not_seen(elsewhere: Job, own_registry: Path) -> None:
    (own_registry / f".local-2.{'0' * 16}.json.4711").write_bytes(b'{"name":"loc')
    assert registry.entries()[1] == []
    assert registry.names() == ["local-1"]


def test_a_pipe_holds_nobody_up(elsewhere: Job, own_registry: Path) -> None:
    os.mkfifo(own_registry / f"local-2.{'0' * 16}.json", 0o600)
    assert len(registry.entries()[1]) == 1
    assert find_job("local-1") == elsewhere


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_is_not_believed(elsewhere: Job, own_registry: Path) -> None:
    [path] = files(own_registry)
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    known, [wrong] = registry.entries()
    assert not known
    assert "belongs to" in wrong
    os.chown(path, 0, 0)
    os.chown(own_registry, NEIGHBOUR, NEIGHBOUR)
    assert registry.entries() == (
        [],
        [f"{own_registry}: is not yours alone, and not read; set RESIHP_STATE to a folder of yours"],
    )
    with pytest.raises(JobNotFoundError):
        find_job("local-1")


def test_a_registry_open_to_others_is_neither_read_nor_written(
    elsewhere: Job, own_registry: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_registry.chmod(0o777)
    assert registry.entries()[0] == []
    create_local_job()
    assert "is not yours alone; set RESIHP_STATE" in capsys.readouterr().err
    assert len(files(own_registry)) == 1


def test_one_that_cannot_be_written_is_one_warning(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (fresh_home / "file").write_text("")
    monkeypatch.setenv("RESIHP_STATE", str(fresh_home / "file"))
    job = create_local_job()
    record_job(job)
    job.set_ledger("sqlite:////x")
    note_end(job)
    assert capsys.readouterr().err.count("resihp: warning:") == 1
    assert find_job("local-1") == job


def test_one_that_hangs_is_left_alone(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()
    monkeypatch.setattr(registry, "ANSWER_TIMEOUT_S", 0.01)
    monkeypatch.setattr(registry, "_write", lambda path, entry: over.wait())
    create_local_job()
    over.set()
    assert "no answer for" in capsys.readouterr().err


def test_a_user_without_a_home_is_told(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "place", lambda: None)
    job = create_local_job()
    note_end(job)
    assert "set RESIHP_STATE" in capsys.readouterr().err
    assert (registry.entries(), registry.names()) == (([], []), [])


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"RESIHP_STATE": "/a"}, "/a/jobs"),
        ({"XDG_STATE_HOME": "/b"}, "/b/resihp/jobs"),
        ({"HOME": "/c"}, "/c/.local/state/resihp/jobs"),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str) -> None:
    for name in ("RESIHP_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(registry.place()) == place


def test_a_process_of_a_test_has_the_tests_registry(fresh_home: Path, own_registry: Path) -> None:
    code = "from resihp.wrapper.job_folder import create_local_job; create_local_job()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert registry.names() == ["local-1"]
    assert registry.place() == own_registry


# --- one ledger, many folders ---------------------------------------------------------------------------------------


def test_jobs_of_one_name_in_one_ledger_are_told_apart_by_their_folders(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders on one host, whose jobs are called alike and began at almost the same time."""
    url = f"sqlite:///{fresh_home}/shared.db"
    jobs = []
    for number, home in enumerate(("a", "b")):
        move_to(fresh_home / home, monkeypatch)
        job = create_local_job()
        record_job(job, loss=float(number))
        job.set_ledger(url)
        with Ledger.open(url, job.folder) as ledger:
            for record in journal_file.read(job.journal_file):
                ledger.submit(record)
        jobs.append(job)
    first, second = jobs
    for number, job in enumerate((first, second)):
        assert json.loads(ask("status", str(job.folder), "--json").stdout)["loss"] == number
    file = second.read()  # as if it were made at the very moment of the first
    content = msgspec.structs.replace(file, created_at=first.read().created_at)
    (second.folder / "job.json").write_bytes(msgspec.json.encode(content))
    (known,) = [entry for entry in registry.entries()[0] if entry.folder == str(second.folder)]
    assert not registry.save(msgspec.structs.replace(known, began_at=content.created_at))
    assert json.loads(ask("status", str(second.folder), "--json").stdout)["loss"] == 1


def test_a_job_that_has_not_begun_is_no_other_folders(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{fresh_home}/shared.db"
    waits = create_local_job()
    waits.set_ledger(url)
    move_to(fresh_home / "another", monkeypatch)
    job = create_local_job()
    record_job(job)
    job.set_ledger(url)
    assert json.loads(ask("status", "local-1", "--json").stdout)["job"] == "local-1"
    with pytest.raises(UsageError, match="job local-1: has not begun; logs are in"):
        ask("status", str(waits.folder))


def test_the_first_record_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(journal_format.MAGIC)
    assert journal_file.first(path) is None
    writer = journal_file.Journal(path)
    writer.append(journal.NodeJoined(node="n1", host="h", devices=1), 1.0)
    writer.append(journal.NodeJoined(node="n2", host="h", devices=1), 2.0)
    writer.close()
    assert journal_file.first(path) == journal_file.read(path)[0]
    path.write_bytes(path.read_bytes()[:30])
    assert journal_file.first(path) is None
