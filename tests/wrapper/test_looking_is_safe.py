"""Whoever looks at somebody else's job lends him nothing: no file, no connection, no right, and no time.

Each test plays an attack. The attacker's folder is another user's; the one who looks is a third user, or root.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from resihp.db.writing.catch_up import catch_up
from resihp.errors import ConfigurationError, LedgerError, ResihpError
from resihp.record import journal
from resihp.record.journal_file import read_packed
from resihp.worker.checkpoints import MANIFEST_NAME, newest_complete, stored
from resihp.wrapper.cli import app
from resihp.wrapper.config.sources import read
from resihp.wrapper.job_files.dead_jobs import finish_dead_job
from resihp.wrapper.job_folder import Job, OurJob, create_local_job, note_end, ours, take_lock, write_private
from resihp.wrapper.output.ledgers import opened, url_of
from tests.db.conftest import started, story, write_journal
from tests.db.foreign.half_way import half_way
from tests.wrapper.run_requests import run_request
from tests.wrapper.second_user import (
    ATTACKER,
    ROOT,
    VICTIM,
    give,
    grounds,
    needs_two_users,
    run_as,
    snapshot,
)

__all__ = ["grounds"]

KEY = "\n\nssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAttacker attacker@elsewhere\n\n"
"""A line that sshd finds in whatever file it stands."""

LOOKS = (
    ("status",),
    ("status", "--json"),
    ("history", "failures"),
    ("history", "cost"),
    ("history", "jobs"),
    ("logs", "--supervisor"),
    ("logs",),
    ("report", "--markdown"),
    ("why",),
    ("why-not", "0"),
    ("compare", "local-1", "local-1"),
    ("plan", "local-1"),
    ("node", "health"),
    ("checkpoint", "list"),
    ("jobs",),
    ("jobs", "--all"),
    ("db", "upgrade"),
    ("db", "upgrade", "--all"),
    ("db", "prune", "--older-than", "1d"),
    ("db", "grant", "mallory"),
)


def written(job: OurJob, told: Iterator[tuple[journal.AnyEntry, float]] | None = None) -> None:
    """A job of the past: journal, its copy, exit code, and a ledger in its folder that lacks nothing."""
    write_journal(job.journal_file, story() if told is None else told)
    write_private(job.journal_copy, job.journal_file.read_bytes())
    write_private(job.exit_code_file, b"0\n")
    (job.logs / "supervisor.log").write_text("supervisor: all is well\n")
    (job.logs / "n1.rank0.log").write_text("rank 0: all is well\n")


def with_ledger(job: OurJob) -> OurJob:
    written(job)
    catch_up(f"sqlite:///{job.folder}/ledger.db", job.folder, job.journal_file)
    return job


def change(job: Job, **fields: Any) -> None:
    """Of its job.json, whatever that allows."""
    file = json.loads((job.folder / "job.json").read_bytes())
    (job.folder / "job.json").write_text(json.dumps(file | fields))


def completed() -> journal.JobEnded:
    return journal.JobEnded(exit_code=0, state="completed", reason="done")


@pytest.fixture
def trap(fresh_home: Path, grounds: Path, monkeypatch: pytest.MonkeyPatch) -> OurJob:
    """A completed job in a home that will be the attacker's, `give`n to him by the test when it is set up."""
    monkeypatch.setenv("RESIHP_HOME", str(grounds / "evil" / ".resihp"))
    monkeypatch.setenv("RESIHP_LOCAL", str(grounds / "evil" / "local"))
    return create_local_job()


@pytest.fixture
def victims_home(grounds: Path) -> Path:
    """With a .ssh, as sshd likes it."""
    home = grounds / "victim"
    for folder in (home, home / ".ssh"):
        folder.mkdir(mode=0o700)
    return home


def environment(home: Path, job: Job) -> dict[str, str]:
    return {"HOME": str(home), "RESIHP_HOME": str(job.home), "PGPASSFILE": str(home / ".pgpass")}


# --- what job.json names ---------------------------------------------------------------------------------------------


class Listener:
    """A server that only counts who connects."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.callers = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            self.callers += 1
            caller.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    server = Listener()
    yield server
    server.close()


@needs_two_users
@pytest.mark.parametrize("looker", [VICTIM, ROOT])
def test_what_a_foreign_folder_names_is_neither_written_nor_made_nor_connected_to(
    trap: OurJob, victims_home: Path, grounds: Path, listener: Listener, looker: int
) -> None:
    """A file that sshd reads, where the reason of the job's end would be a line of its own; a server under another
    host's name, for which libpq looks up our password; a supervisor that would be sent our nonce."""
    written(trap)
    (victims_home / ".pgpass").write_text("db.example.org:*:*:*:secret\n")
    (victims_home / ".pgpass").chmod(0o600)
    change(trap, ledger=f"postgresql://someone@db.example.org:{listener.port}/ledger?hostaddr=127.0.0.1")
    running = with_ledger(create_local_job())
    address = {"host": "127.0.0.1", "port": listener.port, "pid": 1}
    running.supervisor_file.write_text(json.dumps(address))
    running.key_file.chmod(0o644)
    lock = take_lock(running)
    newest = with_ledger(create_local_job())
    entries = [(entry, at) for entry, at in story() if not isinstance(entry, journal.JobEnded)]
    entries.append((msgspec.structs.replace(completed(), reason=KEY), entries[-1][1] + 1))
    newest.journal_file.unlink()
    written(newest, iter([*entries, (journal.NodeLost(node="n1", reason=KEY), entries[-1][1])]))
    keys = victims_home / ".ssh" / "authorized_keys2"
    change(newest, ledger=f"sqlite:///{keys}")
    give(grounds / "evil", ATTACKER)
    give(victims_home, looker)
    before = snapshot(grounds)
    others = [words for job in (trap, running) for words in (("status", job.name), ("why-not", "0", job.name))]
    answers = run_as(looker, [*LOOKS, *others], victims_home, environment(victims_home, trap))
    assert lock is not None
    os.close(lock)
    assert not keys.exists(), "it would be a database in which a line is the attacker's key"
    assert listener.callers == 0
    after = snapshot(grounds)
    assert {path for path in after if path.startswith("evil")} == {path for path in before if path.startswith("evil")}
    assert all(after[path] == before[path] for path in before), "nothing of his is changed, made or deleted"
    made = {path for path in after if path not in before}
    assert all(path.startswith(("victim/.local", "victim/.cache", "victim/.config")) for path in made), made
    told = {tuple(answer["words"]): answer for answer in answers}
    assert "completed" in told["status",]["output"], "the ledger in his folder is shown"
    assert "all is well" in told["logs", "--supervisor"]["output"]
    assert "name the job's ledger yourself with --ledger" in told["status", trap.name]["said"]
    upgrade = told["db", "upgrade"]
    assert upgrade["exit"] != 0
    assert "its ledger is not upgraded" in upgrade["said"]


@needs_two_users
def test_an_own_folder_in_a_home_that_others_may_write_is_somebodys(fresh_home: Path) -> None:
    job = create_local_job()
    assert ours(Job(job.name, job.folder)) == job
    for folder in (job.home, job.folder.parent, job.folder):
        before = folder.stat().st_mode & 0o7777
        folder.chmod(0o770)
        assert ours(Job(job.name, job.folder)) is None, folder
        folder.chmod(before)
    (job.folder / "job.json").chmod(0o660)
    assert ours(Job(job.name, job.folder)) is None
    (job.folder / "job.json").chmod(0o600)
    os.chown(job.folder / "job.json", ATTACKER, -1)
    assert ours(Job(job.name, job.folder)) is None


@pytest.mark.parametrize("query", ["hostaddr=127.0.0.1", "passfile=/x", "service=x", "options=-c%20x", "sslkey=/x"])
def test_a_url_in_a_file_says_nothing_that_a_user_must_say_himself(fresh_home: Path, query: str) -> None:
    """Also where the registry knows the job: it has another URL for it."""
    job = create_local_job()
    written(job)
    job.set_ledger("postgresql://me:secret@db.example.org/ledger")
    changed = msgspec.structs.replace(job.read(), ledger=f"postgresql://me:secret@db.example.org/ledger?{query}")
    write_private(job.folder / "job.json", msgspec.json.encode(changed))
    name = query.partition("=")[0]
    with pytest.raises(LedgerError, match=rf"job\.json gives the connection parameter '{name}'.*--ledger") as refused:
        url_of(job)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:secret@db.example.org/ledger?options=-csearch_path%3Dteam&passfile=%2Fx",
        "postgresql+psycopg://me@db.example.org/ledger?password=secret",
        "sqlite:////shared/ledger.db?timeout=30",
    ],
)
def test_a_job_of_ones_own_is_read_back_with_the_ledger_that_it_was_given(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    job = create_local_job()
    written(job)
    run_request(job.name, job.folder).save()
    job.set_ledger(url)
    assert url_of(job) == url
    os.rename(job.home, fresh_home / "moved")
    moved = OurJob(job.name, fresh_home / "moved" / "jobs" / job.name)
    assert url_of(moved) == url
    note_end(moved)
    assert url_of(moved) == url, "its entry at the new place has the ledger as well"


def test_a_url_in_a_file_may_say_how_a_connection_is_kept(fresh_home: Path) -> None:
    job = create_local_job()
    written(job)
    url = "postgresql://me@/ledger?host=/run/postgresql&sslmode=verify-full&connect_timeout=3&user=me&require_auth=gss"
    write_private(job.folder / "job.json", msgspec.json.encode(msgspec.structs.replace(job.read(), ledger=url)))
    assert "sslmode=verify-full" in url_of(job)


@needs_two_users
@pytest.mark.parametrize("linked", ["folder", "link"])
def test_a_home_that_happens_to_be_here_is_not_looked_at(
    trap: OurJob, victims_home: Path, grounds: Path, linked: str
) -> None:
    with_ledger(trap)
    give(grounds / "evil", ATTACKER)
    give(victims_home, VICTIM)
    if linked == "link":
        (grounds / "evil" / ".resihp").rename(grounds / "evil" / "real")
        give(grounds / "evil" / "real", VICTIM)
        (grounds / "evil" / ".resihp").symlink_to(grounds / "evil" / "real")
        os.chown(grounds / "evil" / ".resihp", ATTACKER, ATTACKER, follow_symlinks=False)
    answers = run_as(
        VICTIM, [("status",), ("jobs", "--all"), ("node", "list")], grounds / "evil", {"HOME": str(victims_home)}
    )
    for answer in answers:
        assert answer["exit"] == (1 if answer["words"] == ["status"] else 0), answer
        assert (answer["said"] + answer["output"]).count(f"RESIHP_HOME={grounds}/evil/.resihp") == 1, answer
        assert trap.name not in answer["output"], "what is there is not listed"
    assert "\n" not in answers[0]["said"]


@needs_two_users
def test_a_configuration_that_happens_to_be_here_is_read_only_if_it_is_named(fresh_home: Path) -> None:
    """It says which commands are run, and doctor connects to the ledger that it names."""
    file = fresh_home / "resihp.toml"
    file.write_text('[ledger]\nurl = "postgresql://db.example.org/x?hostaddr=127.0.0.1"\n')
    assert "hostaddr" in read({}).ledger.url
    os.chown(file, ATTACKER, -1)
    with pytest.raises(ConfigurationError, match=rf"{file}: belongs to user {ATTACKER};.*--config resihp\.toml"):
        read({})
    assert "hostaddr" in read({}, Path("resihp.toml")).ledger.url


# --- what SQLite does to whoever opens a file ------------------------------------------------------------------------


def with_hot_journal(ledger: Path, names: Path) -> None:
    """Leave a transaction half-way, whose journal names a super-journal: SQLite deletes that when it plays it back."""
    connection = sqlite3.connect(ledger, isolation_level=None)
    connection.execute("PRAGMA journal_mode=DELETE")
    page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
    content, rolled = half_way(ledger, connection)
    name = str(names).encode()
    trailer = struct.pack(">I", 0x40000000 // page_bytes + 1) + name
    trailer += struct.pack(">II", len(name), sum(name)) + rolled[:8]
    ledger.write_bytes(content)
    Path(f"{ledger}-journal").write_bytes(rolled + trailer)


def test_the_hot_journal_of_these_tests_does_delete(tmp_path: Path) -> None:
    """Else the others show nothing."""
    precious, ledger = tmp_path / "precious", tmp_path / "ledger.db"
    precious.write_text("mine")
    with_hot_journal(ledger, precious)
    sqlite3.connect(ledger).execute("SELECT count(*) FROM sqlite_master").fetchone()
    assert not precious.exists()


@needs_two_users
def test_a_foreign_ledger_deletes_no_file_of_whoever_reads_it(trap: OurJob, victims_home: Path, grounds: Path) -> None:
    with_ledger(trap)
    precious = victims_home / "precious"
    precious.write_text("mine")
    with_hot_journal(trap.folder / "ledger.db", precious)
    for path in (trap.folder, *trap.folder.glob("ledger.db*")):
        path.chmod(0o777)  # so that SQLite may do it
    give(grounds / "evil", ATTACKER)
    give(victims_home, VICTIM)
    named = ("--ledger", f"sqlite:///{trap.folder}/ledger.db")
    imported = ("db", "import", f"{trap.folder}/ledger.db", "--ledger", f"sqlite:///{victims_home}/mine.db")
    looks = [("status",), ("status", *named), ("db", "export", "-o", "x", *named), imported]
    answers = run_as(VICTIM, looks, victims_home, environment(victims_home, trap))
    assert precious.read_text() == "mine"
    for answer in answers:
        assert "was killed while writing" in answer["said"]


def test_an_unpacked_ledger_deletes_no_file_either(fresh_home: Path) -> None:
    """Whoever unpacks an archive owns what is in it."""
    job = with_ledger(create_local_job())
    precious = fresh_home / "precious"
    precious.write_text("mine")
    with_hot_journal(job.folder / "ledger.db", precious)
    for words in (("status", job.name), ("db", "upgrade", job.name), ("history", "failures", job.name)):
        result = CliRunner().invoke(app, list(words))
        assert "names a super-journal" in str(result.exception), words
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [("status",), ("history", "jobs"), ("db", "export", "--all", "-o", "out"), ("db", "prune", "--older-than=1d")],
)
def test_a_mistyped_ledger_makes_no_file(fresh_home: Path, words: tuple[str, ...]) -> None:
    place = fresh_home / "elsewhere"
    place.mkdir()
    result = CliRunner().invoke(app, [*words, "--ledger", f"sqlite:///{place}/typo.db"])
    assert isinstance(result.exception, LedgerError)
    assert list(place.iterdir()) == []


def test_a_number_beyond_64_bits_is_refused_in_a_line(fresh_home: Path) -> None:
    job = with_ledger(create_local_job())
    result = CliRunner().invoke(app, ["history", "scores", job.name, "--rank", "9" * 30])
    assert isinstance(result.exception, ResihpError), result.exc_info


# --- a job that has ended stays as it ended --------------------------------------------------------------------------


def as_of_the_end(job: OurJob) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (job.journal_copy, job.exit_code_file)}


def state(job: Job) -> str:
    with opened(str(job.folder), None) as (_, row):
        return str(row["state"])


def test_a_flipped_bit_in_the_last_record_ends_no_completed_job(fresh_home: Path) -> None:
    job = with_ledger(create_local_job())
    good, before = job.journal_file.read_bytes(), as_of_the_end(job)
    job.journal_file.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    assert len(read_packed(job.journal_file)) == len(read_packed(job.journal_copy)) - 1, "its end is torn off"
    assert not finish_dead_job(job)
    assert state(job) == "completed"
    assert as_of_the_end(job) == before
    assert job.journal_file.read_bytes() == good, "restored from the copy"


def test_a_journal_that_is_damaged_in_its_midst_is_restored_from_the_copy(fresh_home: Path) -> None:
    job = with_ledger(create_local_job())
    good = job.journal_file.read_bytes()
    middle = len(good) // 2
    job.journal_file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    assert not finish_dead_job(job)
    assert job.journal_file.read_bytes() == good
    assert isinstance(job.records()[-1].entry, journal.JobEnded)


def without_its_end(job: OurJob, **changed: Any) -> None:
    """A journal where the job's own would be, that tells of no end."""
    job.journal_file.unlink(missing_ok=True)
    entries = [(entry, at) for entry, at in story(ended=False)]
    entries[0] = (msgspec.structs.replace(started(), **changed), entries[0][1])
    write_journal(job.journal_file, iter(entries))


def test_a_stale_journal_on_another_machine_ends_no_job(fresh_home: Path) -> None:
    """Of an earlier job of that name, whose home was removed since; the job itself ran elsewhere, and completed."""
    job = with_ledger(create_local_job())
    job.exit_code_file.unlink()
    job.journal_copy.unlink()
    without_its_end(job)
    change(job, host="login-2")
    stale = job.journal_file.read_bytes()
    assert not finish_dead_job(job)
    assert job.journal_file.read_bytes() == stale
    assert not job.exit_code_file.exists()
    assert not job.journal_copy.exists()


def test_a_journal_of_another_job_is_not_taken_for_this_ones(fresh_home: Path) -> None:
    """On the same machine; job.json says which job it is."""
    job = create_local_job()
    without_its_end(job, restart_count=7)
    job.set_uuid("11111111-2222-3333-4444-555555555555")
    assert not finish_dead_job(job)
    assert job.records() == []
    write_private(job.journal_copy, job.journal_file.read_bytes())
    assert job.records() == []


def test_what_a_job_exited_with_is_never_written_over(fresh_home: Path) -> None:
    job = create_local_job()
    without_its_end(job)
    write_private(job.exit_code_file, b"0\n")
    assert not finish_dead_job(job)
    assert job.exit_code() == 0
    assert not job.journal_copy.exists()


# --- what is no plain file, and what is too much of one --------------------------------------------------------------


def test_pipes_and_links_among_logs_are_neither_waited_for_nor_followed(fresh_home: Path) -> None:
    job = with_ledger(create_local_job())
    secret = fresh_home / "shadow"
    secret.write_text("root:secret\n")
    os.mkfifo(job.logs / "n1.rank1.log")
    (job.logs / "n1.rank2.log").symlink_to(secret)
    for words in (("logs", job.name), ("logs", job.name, "-f"), ("logs", job.name, "--json")):
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        assert "all is well" in result.output
        assert "secret" not in result.output


@needs_two_users
def test_a_foreign_folder_of_logs_is_not_followed_elsewhere(trap: OurJob, victims_home: Path, grounds: Path) -> None:
    with_ledger(trap)
    (victims_home / "private.log").write_text("secret\n")
    for file in trap.logs.iterdir():
        file.unlink()
    trap.logs.rmdir()
    trap.logs.symlink_to(victims_home)
    give(grounds / "evil", ATTACKER)
    give(victims_home, VICTIM)
    [answer] = run_as(VICTIM, [("logs",)], victims_home, environment(victims_home, trap))
    assert "secret" not in answer["output"]
    assert "is a link" in answer["said"]


def spoil(job: OurJob, how: str) -> None:
    """One of the ways in which a file of a job's may be none."""
    if how == "pipes":
        for file in (job.run_file, job.exit_code_file, job.progress_file, job.supervisor_file, job.journal_copy):
            file.unlink(missing_ok=True)
            os.mkfifo(file)
    elif how == "linked lock":
        (job.folder / "supervisor.lock").unlink(missing_ok=True)
        (job.folder / "supervisor.lock").symlink_to("/etc/passwd")
    elif how == "lists":
        job.run_file.write_text("[" * 100_000)
        job.progress_file.write_text('{"recent":' + "[" * 100_000)
    elif how == "numbers":
        began_at = job.read().created_at
        last = {"iteration": 10**400, "loss": 1.0, "tokens": 2**70, "seconds": 1e308, "finished_at": began_at}
        told = {"began_at": began_at, "written_at": began_at, "nodes": 2**64, "gpus_per_node": -1, "target": 10**30}
        job.progress_file.write_text(json.dumps(told | {"recent": [last, last]}))
        job.exit_code_file.write_text("9" * 60)
        job.supervisor_file.write_text('{"host":"\\u0000","port":99999999999,"pid":99999999999999999999}')
    else:
        fields: dict[str, Any] = {
            "NUL": {"journal": "/x\0y", "ledger": "sqlite:///x\0y"},
            "time": {"created_at": 1e308},
            "starter": {"starter": "9" * 5000 + "/1"},
            "ledger": {"ledger": "mysql://\x1b]0;x\x07"},
        }[how]
        change(job, **fields)


def test_bad_jobs_keep_no_other_from_being_listed(fresh_home: Path) -> None:
    good = with_ledger(create_local_job())
    bad = []
    for how in ("pipes", "linked lock", "lists", "numbers", "NUL", "time", "starter", "ledger"):
        bad.append(create_local_job())
        written(bad[-1])
        shutil.copy(good.folder / "ledger.db", bad[-1].folder)
        spoil(bad[-1], how)
    for words in (("jobs", "--all"), ("jobs", "--json", "--all"), ("history", "cost", "--all"), ("history", "jobs")):
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, (words, result.output, result.exception)
        assert good.name in result.output, words
    for job in bad:
        for words in (("status", str(job.folder)), ("logs", str(job.folder))):
            error = CliRunner().invoke(app, list(words)).exception
            assert error is None or isinstance(error, SystemExit | ResihpError), (words, error)


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"format": 1, "parts": [' + "[" * 100_000, '{"format": 1, "parts": [], "iteration": 1e999}'],
)
def test_a_checkpoint_whose_manifest_is_none_is_incomplete(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "iteration-000040"
    folder.mkdir()
    (folder / MANIFEST_NAME).write_text(content)
    assert newest_complete(tmp_path) is None
    assert stored(tmp_path)[0].fault
    (folder / MANIFEST_NAME).unlink()
    os.mkfifo(folder / MANIFEST_NAME)
    assert newest_complete(tmp_path) is None


def test_a_checkpoints_part_is_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "iteration-000040"
    folder.mkdir()
    (tmp_path / "elsewhere.pt").write_bytes(b"x")
    content = {"format": 1, "iteration": 40, "fingerprint": "", "parts": [{"file": "../elsewhere.pt", "bytes": 1}]}
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    assert newest_complete(tmp_path) is None
    assert "is not in its folder" in stored(tmp_path)[0].fault
