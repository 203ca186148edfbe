"""`resihp jobs`: what runs, what ended, and what is gone; sound in any width, and quick with many past jobs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.db.writer import Ledger
from resihp.errors import JobNotFoundError, LedgerError
from resihp.record import journal, journal_file
from resihp.slurm.client import JobView
from resihp.slurm.errors import SlurmUnavailableError
from resihp.wrapper import registry
from resihp.wrapper.cli import app
from resihp.wrapper.commands.jobs.listing import listed
from resihp.wrapper.commands.jobs.tables import lines
from resihp.wrapper.job_files.registered import entry_of, user_name
from resihp.wrapper.job_folder import Job, create_local_job, create_slurm_job, find_job, note_end, take_lock
from resihp.wrapper.output.ledgers import opened
from resihp.wrapper.sinks.progress_file import ProgressFileWriter
from tests.slurm.fake_slurm import FakeSlurm
from tests.waiting import until
from tests.wrapper.commands.status.test_status import record_job

HOST = socket.gethostname()
DAY_S = 86400.0


def jobs(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["jobs", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(jobs(*arguments, "--json").stdout)["rows"]
    return found


def ended(job: Job, *, days_ago: float = 0.0, **changed: Any) -> registry.KnownJob:
    """The job as it was when it ended so long ago."""
    at = time.time() - days_ago * DAY_S
    file = msgspec.structs.replace(job.read(), created_at=at - 60)
    registry.drop(entry_of(job, job.read()))
    (job.folder / "job.json").write_bytes(msgspec.json.encode(file))
    figures = {"state": "completed", "exit_code": 0, "ended_at": at, "iterations": 1000, "target": 1000, "loss": 2.25}
    entry = msgspec.structs.replace(entry_of(job, file), **(figures | changed))
    assert not registry.save(entry)
    return entry


@pytest.fixture
def runs(fresh_home: Path) -> Iterator[Callable[..., Job]]:
    """A job that somebody supervises, with a ledger."""
    with ExitStack() as stack:

        def begin(job: Job | None = None) -> Job:
            job = job or create_local_job()
            lock = take_lock(job)
            assert lock is not None
            stack.callback(os.close, lock)
            with Ledger.open("sqlite", job.folder) as ledger:
                for record in record_job(job, ended=False):
                    ledger.submit(record)
            job.set_ledger(ledger.url)
            return job

        yield begin


def test_a_running_job_has_its_ledgers_figures_from_any_folder(
    runs: Callable[..., Job], fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = runs()
    monkeypatch.setenv("RESIHP_HOME", str(fresh_home / "another"))
    [row] = rows()
    assert (row["job"], row["state"], row["iteration"], row["loss"]) == ("local-1", "running", 3, 3.25)
    assert (row["nodes"], row["gpus_per_node"], row["folder"], row["host"]) == (2, 2, str(job.folder), HOST)
    assert row["layout"]
    assert row["seconds_since_iteration"] is not None
    assert row["slurm_job"] is None


def told(job: Job) -> None:
    """Its supervisor has written how far it is, up to its last record."""
    writer = ProgressFileWriter(job, job.records())
    until(job.progress_file.exists)
    writer.close(time.monotonic())


HEAVY = """
import sys
from resihp.wrapper.cli import app
try: app(['jobs'])
except SystemExit: pass
print([name for name in ('sqlalchemy', 'pandas', 'numpy', 'torch', 'asyncio', 'resihp.record.journal')
       if name in sys.modules])
"""


def test_of_running_jobs_no_ledger_is_opened(runs: Callable[..., Job]) -> None:
    """`resihp jobs` beside three running jobs: what is printed is the same, and neither SQLAlchemy nor numpy loads."""
    found = [runs() for _ in range(3)]
    by_ledgers = rows()
    for job in found:
        told(job)
        (job.folder / "ledger.db").unlink()
    clocks = ("seconds_since_iteration", "last_iteration_at")  # the file has more digits than the ledger
    for row, by_ledger in zip(rows(), by_ledgers, strict=True):
        assert row | dict.fromkeys(clocks) == by_ledger | dict.fromkeys(clocks)
    done = subprocess.run([sys.executable, "-c", HEAVY], check=True, capture_output=True, text=True)
    *lines, imported = done.stdout.splitlines()
    assert [line.split()[:6] for line in lines if "  running  " in line] == [
        [job.name, "running", "2", "x", "2", "3"] for job in reversed(found)
    ]
    assert imported == "[]"


def test_what_a_supervisor_told_long_ago_is_not_believed(runs: Callable[..., Job]) -> None:
    """The folder could not be written to, or the job is stuck: its ledger knows."""
    job = runs()
    told(job)
    file = job.progress(job.read().created_at)
    assert file is not None
    old = tuple(msgspec.structs.replace(each, finished_at=each.finished_at - 7200, loss=9.0) for each in file.recent)
    job.progress_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, recent=old)))
    assert rows()[0]["loss"] == 3.25
    old = tuple(msgspec.structs.replace(each, finished_at=1e300) for each in file.recent)
    job.progress_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, recent=old)))
    assert rows()[0]["loss"] == 3.25
    job.progress_file.write_bytes(b"{")
    assert rows()[0]["loss"] == 3.25


def test_an_earlier_jobs_file_in_the_same_folder_is_not_believed(runs: Callable[..., Job]) -> None:
    job = runs()
    told(job)
    file = job.progress(job.read().created_at)
    assert file is not None
    other = msgspec.structs.replace(file, began_at=file.began_at - 1, target=777)
    job.progress_file.write_bytes(msgspec.json.encode(other))
    assert rows()[0]["target"] != 777


def test_two_running_jobs_of_one_name_have_each_its_own_figures(
    runs: Callable[..., Job], fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runs()
    told(first)
    monkeypatch.setenv("RESIHP_HOME", str(fresh_home / "another"))
    second = runs()
    told(second)
    file = second.progress(second.read().created_at)
    assert file is not None
    second.progress_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, target=777)))
    assert {row["folder"]: row["target"] for row in rows()} == {str(first.folder): None, str(second.folder): 777}
    shutil.rmtree(second.folder)
    assert {row["folder"]: row["state"] for row in rows()} == {
        str(first.folder): "running",
        str(second.folder): "folder gone",
    }


def test_those_that_ended_long_ago_are_counted_and_shown_when_asked_for(fresh_home: Path) -> None:
    for days in (0.5, 0.9, 1.1, 40):
        ended(create_local_job(), days_ago=days)
    assert [row["job"] for row in rows()] == ["local-1", "local-2"]
    assert [row["job"] for row in rows("--all")] == ["local-1", "local-2", "local-3", "local-4"]
    assert "2 more ended earlier: resihp jobs --all" in jobs().stderr


def test_no_job_at_all(fresh_home: Path) -> None:
    result = jobs()
    assert (result.exit_code, result.stdout) == (0, "")
    assert "you have no jobs" in result.stderr
    assert rows() == []


def test_jobs_of_this_home_that_the_registry_has_not_are_listed(fresh_home: Path, own_registry: Path) -> None:
    """As those of an older version; the end of one is noted."""
    job = create_local_job()
    record_job(job)
    shutil.rmtree(own_registry)
    [row] = rows()
    assert (row["job"], row["state"], row["iteration"], row["exit_code"]) == ("local-1", "completed", 3, 0)
    assert [entry.state for entry in registry.entries()[0]] == ["completed"]


def test_a_dead_job_is_ended_and_one_that_never_began_too(fresh_home: Path) -> None:
    record_job(create_local_job(), ended=False)
    ended(create_local_job(), days_ago=0.01, ended_at=None, state="running")
    create_local_job()
    assert {row["job"]: row["state"] for row in rows()} == {
        "local-1": "abnormal",
        "local-2": "never began",
        "local-3": "starting",
    }


@pytest.mark.parametrize("which", ["its process", "that of an earlier boot"])
def test_a_job_whose_process_ended_before_it_began_is_not_starting(fresh_home: Path, which: str) -> None:
    if which == "its process":
        code = "from resihp.wrapper.job_folder import create_local_job; create_local_job()"
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        job = create_local_job()
        file = msgspec.structs.replace(job.read(), starter=f"{os.getpid()}/1")
        (job.folder / "job.json").write_bytes(msgspec.json.encode(file))
    [row] = rows()
    assert (row["state"], row["exit_code"]) == ("never began", None)
    assert row["ended_at"] is not None
    assert "never began" in jobs().stdout
    with pytest.raises(LedgerError, match="local-1: never began"), opened("local-1", None):
        pass


def test_a_folder_that_is_gone_is_said_and_dropped_after_a_month(fresh_home: Path, own_registry: Path) -> None:
    for days, state in ((0.1, "completed"), (29, "completed"), (31, "completed")):
        shutil.rmtree(Path(ended(create_local_job(), days_ago=days, state=state).folder))
    here = create_local_job()
    away = msgspec.structs.replace(entry_of(here, here.read()), host="gpu-9", folder="/there/jobs/local-9")
    registry.save(away)
    shutil.rmtree(here.folder)
    assert [(row["host"] == HOST, row["state"]) for row in rows("--all")] == [
        (False, "not seen from here"),
        (True, "folder gone"),
        (True, "folder gone"),
        (True, "folder gone"),
    ]
    assert len(list(own_registry.iterdir())) == 4
    later = time.time() + 31 * DAY_S
    left, _ = listed(include_old=True, now_s=later, say=lambda text: None)
    assert [row["host"] for row in left] == ["gpu-9"], "there it may run"


def test_a_damaged_file_is_one_warning(fresh_home: Path, own_registry: Path) -> None:
    ended(create_local_job())
    for number in range(2):
        (own_registry / f"local-7.{number:016}.json").write_bytes(b"{")
    result = jobs()
    assert "local-1" in result.stdout
    assert result.stderr.count("warning") == 1
    assert "left out" in result.stderr
    assert "; and 1 more" in result.stderr


@pytest.mark.parametrize("wrong", [{"began_at": 9e11}, {"ended_at": 1e300}, {"last_iteration_at": -9e11}])
def test_a_time_that_no_calendar_has_is_one_warning(fresh_home: Path, wrong: dict[str, float]) -> None:
    entry = ended(create_local_job())
    registry.save(msgspec.structs.replace(entry, name="local-7", **wrong))
    result = jobs()
    assert "local-1" in result.stdout
    assert "left out: has no absolute folder, or an invalid time" in result.stderr


def test_a_job_that_cannot_be_looked_at_costs_nobody_else(
    runs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, fine = runs(), runs()
    is_led = Job.is_led.fget
    assert is_led is not None

    def looks(job: Job) -> bool:
        if job == broken:
            raise OSError(errno.EIO, "Input/output error")
        return bool(is_led(job))

    monkeypatch.setattr(Job, "is_led", property(looks))
    result = jobs("--json")
    assert {row["job"]: row["state"] for row in json.loads(result.stdout)["rows"]} == {
        fine.name: "running",
        broken.name: "unknown",
    }
    assert f"warning: job {broken.name}: " in result.stderr


def test_a_ledger_of_another_version_costs_its_figures_alone(runs: Callable[..., Job]) -> None:
    job = runs()
    with sqlite3.connect(job.folder / "ledger.db") as connection:
        connection.execute("UPDATE resihp_version SET version_num = '0001'")
    connection.close()
    result = jobs("--json")
    [row] = json.loads(result.stdout)["rows"]
    assert (row["state"], row["iteration"], row["nodes"]) == ("running", 0, None)
    assert "made by a development version" in result.stderr
    assert "resihp db import JOURNAL" in result.stderr


def test_a_ledger_that_is_gone_or_not_there_yet(runs: Callable[..., Job]) -> None:
    job = runs()
    (job.folder / "ledger.db").unlink()
    result = jobs("--json")
    assert [row["state"] for row in json.loads(result.stdout)["rows"]] == ["running"]


# --- Slurm ----------------------------------------------------------------------------------------------------------


def slurm_of(job: Job, **view: Any) -> FakeSlurm:
    slurm = FakeSlurm([])
    fields = {"id": "77", "name": "resihp", "user": entry_of(job, job.read()).user, "state": "completing"}
    slurm.job_views["77"] = JobView(**(fields | view))
    return slurm


def ask(slurm: Any) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    found, _ = listed(include_old=False, now_s=time.time(), say=said.append, slurm=slurm)
    return found, said


def test_slurms_state_stands_beside_ours(runs: Callable[..., Job]) -> None:
    job = runs(create_slurm_job("77", 0))
    [row], said = ask(slurm_of(job))
    assert (row["state"], row["slurm_state"], said) == ("running", "completing", [])


@pytest.mark.parametrize("view", [{"user": "somebody"}, {"submitted_at": time.time() + 3600}])
def test_a_number_that_is_another_jobs_says_nothing(runs: Callable[..., Job], view: dict[str, Any]) -> None:
    job = runs(create_slurm_job("77", 0))
    assert ask(slurm_of(job, **view))[0][0]["slurm_state"] is None


def test_slurm_that_does_not_answer_is_told(runs: Callable[..., Job]) -> None:
    job = runs(create_slurm_job("77", 0))

    class Down(FakeSlurm):
        def jobs(self, job_ids: Any) -> Any:
            raise SlurmUnavailableError("squeue: no answer")

    [row], said = ask(Down([]))
    assert (row["job"], row["slurm_state"]) == (job.name, None)
    assert said == ["states of Slurm are missing: squeue: no answer"]


def over(job: Job, state: str, exit_code: int) -> registry.KnownJob:
    entry = msgspec.structs.replace(entry_of(job, job.read()), state=state, exit_code=exit_code, ended_at=time.time())
    assert not registry.save(entry)
    return entry


@pytest.mark.parametrize(("state", "exit_code"), [("cancelled", 75), ("abnormal", 1), ("cancelled", 143)])
def test_a_job_that_slurm_runs_again_is_told_to_wait(
    runs: Callable[..., Job], fresh_home: Path, state: str, exit_code: int
) -> None:
    """Its batch host died, its time was up, or it was requeued: "cancelled" alone sounded like the end."""
    job = runs(create_slurm_job("77", 0))
    over(job, state, exit_code)
    submitted_at = time.time() + 3600
    [row], said = ask(slurm_of(job, state="pending", why="BeginTime", submitted_at=submitted_at))
    assert (row["state"], row["slurm_state"], row["slurm_reason"], said) == (state, "pending", "BeginTime", [])
    assert f"{state}, runs again (BeginTime)" in "\n".join(line.plain for line in lines([row], 100))
    assert ask(slurm_of(job, state="pending", user="somebody"))[0][0]["slurm_state"] is None
    assert ask(slurm_of(job, state="completed"))[0][0]["slurm_state"] is None


def test_a_held_job_is_told_with_the_command_that_releases_it(runs: Callable[..., Job], fresh_home: Path) -> None:
    """A prolog has failed, for example; it would wait for ever."""
    job = runs(create_slurm_job("77", 0))
    over(job, "cancelled", 143)
    why = "launch failed requeued held"
    [row], _ = ask(slurm_of(job, state="pending", why=why, submitted_at=time.time() + 3600))
    text = "\n".join(line.plain for line in lines([row], 160))
    assert f"cancelled, held by Slurm ({why}): scontrol release 77" in text


@pytest.mark.parametrize(("state", "exit_code"), [("completed", 0), ("failed", 93)])
def test_a_job_that_is_over_for_good_is_not_asked_about(
    runs: Callable[..., Job], fresh_home: Path, state: str, exit_code: int
) -> None:
    job = runs(create_slurm_job("77", 0))
    over(job, state, exit_code)
    [row], _ = ask(slurm_of(job, state="pending"))
    assert (row["state"], row["slurm_state"]) == (state, None)


# --- submitted ------------------------------------------------------------------------------------------------------


def submitted(home: Path, *, days_ago: float = 0.0) -> registry.KnownJob:
    """Job 77, as `resihp submit` tells the registry of it."""
    entry = registry.KnownJob(
        name="77",
        folder=str(home / "jobs" / "77"),
        host=HOST,
        user=user_name(),
        began_at=time.time() - days_ago * DAY_S,
        slurm_job="77",
        state=registry.QUEUED,
        nodes=2,
        gpus_per_node=8,
    )
    assert not registry.save(entry)
    return entry


def slurms_view(**view: Any) -> FakeSlurm:
    slurm = FakeSlurm([])
    slurm.job_views["77"] = JobView(**({"id": "77", "name": "resihp", "user": user_name()} | view))
    return slurm


def test_a_submitted_job_is_listed_with_what_it_waits_for(fresh_home: Path) -> None:
    submitted(fresh_home)
    [row], said = ask(slurms_view(state="pending", why="Resources"))
    assert (row["job"], row["state"], row["slurm_state"], row["slurm_reason"]) == (
        "77",
        "queued",
        "pending",
        "Resources",
    )
    assert said == []
    assert "queued (Resources)" in "\n".join(line.plain for line in lines([row], 80))
    with pytest.raises(JobNotFoundError, match=r"job 77: submitted .* UTC and has not begun; squeue --start --jobs=77"):
        find_job("77")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("cancelled", "never began: Slurm job 77 is cancelled; sacct -j 77"),
        (None, "never began: Slurm job 77 is no longer known to Slurm; sacct -j 77"),
        ("pending", "has not begun; squeue --start --jobs=77"),
        ("no answer", "has not begun; squeue --start --jobs=77"),
    ],
)
def test_status_tells_whether_a_submitted_job_still_waits(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, says: str
) -> None:
    submitted(fresh_home)
    slurm = slurms_view(state=state or "pending")
    slurm.unavailable = state == "no answer"
    if state is None:
        slurm.job_views.clear()
    monkeypatch.setattr("resihp.slurm.commands.CommandLine", lambda timeout_s: slurm)
    with pytest.raises(JobNotFoundError, match=f"job 77: submitted .* UTC and {says}"):
        find_job("77")


def test_a_submitted_job_that_begins_is_one_job(runs: Callable[..., Job], fresh_home: Path) -> None:
    submitted(fresh_home)
    assert ask(slurms_view(state="running"))[0][0]["state"] == "starting"
    runs(create_slurm_job("77", 0))
    [row], _ = ask(slurms_view(state="running"))
    assert (row["job"], row["state"]) == ("77", "running")
    assert [entry.state for entry in registry.entries()[0]] == ["running"]


@pytest.mark.parametrize(
    ("cluster", "began_s", "states"),
    [
        ("blue", -40 * 3600.0, ["queued", "running"]),
        ("red", 1.0, ["queued", "running"]),
        ("blue", 1.0, ["running"]),
        ("", 1.0, ["running"]),
    ],
    ids=["an earlier job of that number", "another cluster's", "the one that was submitted", "of no known cluster"],
)
def test_a_submitted_job_waits_beside_others_of_its_number(
    fresh_home: Path, cluster: str, began_s: float, states: list[str]
) -> None:
    """Slurm begins its numbers again, and each cluster has its own."""
    queued = msgspec.structs.replace(submitted(fresh_home), cluster="blue")
    job = create_local_job()
    other = msgspec.structs.replace(
        queued,
        name=job.name,
        folder=str(job.folder),
        host="elsewhere",
        state="running",
        cluster=cluster,
        began_at=queued.began_at + began_s,
    )
    for entry in (queued, other):
        assert not registry.save(entry)
    listed(include_old=True, now_s=time.time(), say=lambda _: None, slurm=FakeSlurm([]))
    known = [entry for entry in registry.entries()[0] if entry.slurm_job == "77"]
    assert sorted(entry.state for entry in known) == states


def test_a_submitted_job_that_never_began_is_forgotten_after_a_day(fresh_home: Path) -> None:
    submitted(fresh_home)
    assert ask(slurms_view(state="cancelled"))[0][0]["state"] == "never began"
    assert ask(FakeSlurm([]))[0][0]["state"] == "never began"
    submitted(fresh_home, days_ago=2)
    assert [row["state"] for row in ask(FakeSlurm([]))[0]] == ["never began"]
    assert len(registry.entries()[0]) == 1


def test_a_job_of_another_cluster_is_not_this_slurms_to_tell(fresh_home: Path) -> None:
    """Of the same home, on a login node of another cluster: it waits there, and is not forgotten."""
    entry = submitted(fresh_home, days_ago=2)
    registry.save(msgspec.structs.replace(entry, cluster="big"))
    slurm = slurms_view(state="completed")
    [row], said = ask(slurm)
    assert (row["state"], row["slurm_state"], said) == ("queued", None, [])
    assert len(registry.entries()[0]) == 1
    here = FakeSlurm([], cluster="big")
    assert not ask(here)[0] or ask(here)[0][0]["state"] == "never began"


def died_elsewhere(home: Path, *, days_ago: float) -> registry.KnownJob:
    """Job 77, whose nodes lost their power: nobody could tell its end."""
    entry = submitted(home, days_ago=days_ago)
    registry.drop(entry)
    entry = msgspec.structs.replace(entry, host="gpu-9", state="running", folder="/there/jobs/77")
    assert not registry.save(entry)
    return entry


def test_a_job_that_died_unseen_and_that_slurm_does_not_have_is_no_running_job_for_ever(fresh_home: Path) -> None:
    died_elsewhere(fresh_home, days_ago=2)
    for slurm in (FakeSlurm([]), slurms_view(state="node_fail"), slurms_view(state="running", user="somebody")):
        said: list[str] = []
        assert listed(include_old=False, now_s=time.time(), say=said.append, slurm=slurm) == ([], 1)
        assert [
            row["state"] for row in listed(include_old=True, now_s=time.time(), say=said.append, slurm=slurm)[0]
        ] == ["not seen from here"]
        assert said == []
    assert [row["slurm_state"] for row in ask(slurms_view(state="running"))[0]] == ["running"]
    assert len(registry.entries()[0]) == 1
    died_elsewhere(fresh_home, days_ago=0.5)
    assert len(ask(FakeSlurm([]))[0]) == 1, "for a day one is told of it"


def test_slurm_is_asked_for_jobs_of_its_own_alone(runs: Callable[..., Job]) -> None:
    runs()
    ended(create_slurm_job("77", 0))

    class Never(FakeSlurm):
        def jobs(self, job_ids: Any) -> Any:
            raise AssertionError("asked")

    assert len(ask(Never([]))[0]) == 2


# --- on a terminal --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 160])
def test_it_fits(runs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    runs()
    entry = ended(create_slurm_job("123456789_1234", 12), state="failed", exit_code=93, layout="DP128 x PP16 x TP8")
    deep = "/".join(["a-folder-of-some-length"] * 9) + "[red]\x1b[2J"
    far = {"iterations": 10**9, "target": 10**9, "began_at": entry.began_at - 1}
    registry.save(msgspec.structs.replace(entry, folder=f"/{deep}/jobs/x", **far))
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    text = jobs().stdout
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    together = "".join(text.split())
    assert "failed93" in together
    assert "DP128xPP16xTP8" in together
    assert "[red]\\x1b[2J/jobs/x" in together
    assert "3.2500" in together
    for piece in ("folder-", "some-", "length"):
        assert sum(line.count(piece) for line in text.splitlines()) == 9, "words of a path are not broken"


def test_a_pipe_gets_whole_lines(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    home = fresh_home / ("long-" * 30)
    monkeypatch.setenv("RESIHP_HOME", str(home))
    job = create_local_job()
    record_job(job)
    note_end(job)
    lines = jobs().stdout.splitlines()
    assert lines[0].split() == ["job", "state", "nodes", "iteration", "last", "ETA", "loss"]
    assert lines[1].split()[:6] == ["local-1", "completed", "2", "x", "2", "3"]
    assert lines[2].endswith(f"  {job.folder}")
    assert len(lines) == 3


def test_a_job_that_is_stuck_is_asked_about(runs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    job = runs()
    trains = '{"iterations":60}'
    with sqlite3.connect(job.folder / "ledger.db") as connection:
        connection.execute("UPDATE jobs SET model = ?", (trains,))
        connection.execute("UPDATE iterations SET finished_at = datetime(finished_at, '-2 hours')")
    connection.close()
    assert "stuck?  " in jobs().stdout
    [row] = rows()
    assert (row["target"], row["stuck"], row["eta_seconds"]) == (60, True, None)
    result = CliRunner().invoke(app, ["status"])
    assert "iteration 3 of 60" in result.stdout
    assert "last iteration 2 h 00 min ago (stuck?)" in result.stdout


# --- quick ----------------------------------------------------------------------------------------------------------


def test_nothing_heavy_is_imported_for_past_jobs(fresh_home: Path) -> None:
    for days in (0.1, 2):
        ended(create_local_job(), days_ago=days)
    done = subprocess.run([sys.executable, "-c", HEAVY], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_file_is_read_once(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        ended(create_local_job(), days_ago=3)
    read: list[Path] = []
    real = registry.read_own
    monkeypatch.setattr(registry, "read_own", lambda path, *most: (read.append(path), real(path, *most))[1])
    assert rows() == []
    assert len(read) == len(set(read)) == 5


def test_the_end_of_a_journal_is_what_is_listed(fresh_home: Path) -> None:
    job = create_local_job()
    record_job(job, ended=False)
    writer = journal_file.Journal(job.journal_file, sync=False)
    writer.append(journal.JobEnded(exit_code=130, state="cancelled", reason="received SIGINT"), time.time())
    writer.close()
    job.exit_code_file.write_text("130\n")
    [row] = rows()
    assert (row["state"], row["exit_code"], row["iteration"]) == ("cancelled", 130, 3)


def test_what_is_known_of_a_job_goes_with_its_home(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures were noted at the old place, and that this user has started it; at the new one it was only seen."""
    job = create_local_job()
    ended(job, days_ago=0.1)
    old, new = job.folder.parent.parent, fresh_home / "moved"
    old.rename(new)
    monkeypatch.setenv("RESIHP_HOME", str(new))
    rows("--all")
    (entry,) = registry.entries()[0]
    assert (entry.folder, entry.only_seen) == (str(new / "jobs" / job.name), False)
    (row,) = rows("--all")
    assert (row["folder"], row["iteration"], row["loss"]) == (entry.folder, 1000, 2.25)
