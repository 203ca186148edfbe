"""What others hand us: journals, exports, ledgers, names made to hurt. One line each; nothing hangs, nothing grows."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.db.engine import resolve
from resihp.db.exchange import export
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import ProtocolError, ResihpError
from resihp.record import journal
from resihp.record.journal_file import read, read_packed
from resihp.record.journal_format import MAGIC
from resihp.wrapper.cli import app, main
from resihp.wrapper.commands.run import Options, prepare
from resihp.wrapper.job_folder import create_local_job
from tests.db.conftest import started, story, write_journal
from tests.db.exports import files_of, former, sealed, set_column

EVIL = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\r\nresihp: all is well\u202e<script>alert(1)</script>/../../etc"


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def plain(entry: journal.AnyEntry, seq: int = 1, at: float = 0.0) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(journal.Record(seq, at, entry)))
    return found


def file_of(folder: Path, *bodies: bytes | dict[str, Any]) -> Path:
    path = folder / "hostile.journal"
    encoded = [body if isinstance(body, bytes) else msgspec.msgpack.encode(body) for body in bodies]
    path.write_bytes(MAGIC + b"".join(map(frame, encoded)))
    return path


def resihp(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refusal(result: Result) -> str:
    assert isinstance(result.exception, ResihpError), (result.output, result.exc_info)
    said = str(result.exception)
    assert "\n" not in said
    return said


# --- journals -------------------------------------------------------------------------------------------------------


def deep() -> bytes:
    """A configuration of a million lists in one another."""
    body = msgspec.msgpack.encode(plain(msgspec.structs.replace(started(), configuration={"a": 7})))
    assert body.count(b"\xa1a\x07") == 1
    return body.replace(b"\xa1a\x07", b"\xa1a" + b"\x91" * 1_000_000 + b"\x07")


BEGINNINGS: dict[str, Callable[[], bytes | dict[str, Any]]] = {
    "deep": deep,
    "announces 4 G": lambda: b"\x83\xa3seq\x01\xa2at\xcb" + b"\0" * 8 + b"\xa5entry\xdf\xff\xff\xff\xff",
    "at NaN": lambda: plain(started(), at=float("nan")),
    "at the end of time": lambda: plain(started(), at=1e300),
    "before the beginning of time": lambda: plain(started(), at=-1e18),
    "number -1": lambda: plain(started(), seq=-1),
    "number 2^63": lambda: plain(started(), seq=2**63),
    "nodes 2^63": lambda: plain(msgspec.structs.replace(started(), nodes=2**63)),
    "no start": lambda: plain(journal.NodeLost(node="n1", reason="")),
    "no record": lambda: b"\xc0",
}


@pytest.mark.parametrize("what", BEGINNINGS)
def test_hostile_beginning_of_a_journal_is_refused_at_once(fresh_home: Path, what: str) -> None:
    path = file_of(fresh_home, BEGINNINGS[what]())
    began = time.monotonic()
    refusal(resihp("db", "import", str(path), "--ledger", f"sqlite:///{fresh_home}/ledger.db"))
    assert time.monotonic() - began < 30, "nobody waits for a ledger that can never take it"


def test_hostile_middle_of_a_journal_does_not_hold_up_the_rest(fresh_home: Path) -> None:
    """What fits no table is kept as words, and what comes after it is brought in."""
    records = [plain(entry, seq, at) for seq, (entry, at) in enumerate(story(), 1)]
    records[5]["at"] = -1e18
    next(each for each in records if each["entry"]["type"] == "WorkerStarted")["entry"]["rank"] = 2**62
    url = f"sqlite:///{fresh_home}/ledger.db"
    assert resihp("db", "import", str(file_of(fresh_home, *records)), "--ledger", url).exit_code == 0
    assert "completed" in resihp("status", "--ledger", url).output


def packed(count: int, columns: int = 13) -> journal.IterationsPacked:
    empty = zlib.compress(b"")
    return journal.IterationsPacked(epoch=1, first=1, count=count, columns=(empty,) * columns)


@pytest.mark.parametrize("count", [0, -1, 8193, 2**40, 2**62])
def test_packed_iterations_that_would_fill_the_memory_are_refused(tmp_path: Path, count: int) -> None:
    path = file_of(tmp_path, plain(started()), plain(packed(count), seq=2))
    with pytest.raises(ProtocolError, match="cannot be unpacked"):
        read(path)


def test_iterations_stay_packed_until_they_are_written(tmp_path: Path) -> None:
    """A few kilobytes that stand for half a million iterations, of a job that never had them."""
    columns = 3 + 4 + 4 + 2
    widths = {**dict.fromkeys(range(columns), 8), **dict.fromkeys(range(7, 11), 4)}
    column = [zlib.compress(bytes(widths[i] * 8192), 9) for i in range(columns)]
    path = tmp_path / "journal"
    bodies: list[bytes | dict[str, Any]] = [plain(started())]
    for number in range(64):
        entry = journal.IterationsPacked(epoch=1, first=8192 * number + 1, count=8192, columns=tuple(column))
        bodies.append(plain(entry, seq=8192 * (number + 1) + 1))
    file_of(tmp_path, *bodies).rename(path)
    ledger = Ledger(resolve(f"sqlite:///{tmp_path}/never.db"))
    tracemalloc.start()
    ledger.catch_up(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100 * path.stat().st_size


def test_what_is_made_to_be_slow_to_look_through_is_given_up(tmp_path: Path) -> None:
    """Behind a torn record whole ones are looked for: here everything looks like the beginning of a long one."""
    bait = (1 << 20).to_bytes(4, "little") + b"\0" * 4 + b"\x83\xa3seq"
    path = tmp_path / "slow.journal"
    path.write_bytes(MAGIC + frame(msgspec.msgpack.encode(plain(started()))) + b"torn" * 4 + bait * 200_000)
    with pytest.raises(ProtocolError, match="damaged at byte"):
        read_packed(path)


def test_journal_that_is_a_pipe_a_device_or_without_end_is_refused(fresh_home: Path) -> None:
    pipe, giant = fresh_home / "pipe", fresh_home / "giant"
    os.mkfifo(pipe)
    with giant.open("wb") as file:
        file.write(MAGIC)
        file.truncate(1 << 40)
    ledger = ("--ledger", f"sqlite:///{fresh_home}/ledger.db")
    assert "is no plain file" in refusal(resihp("db", "import", str(pipe), *ledger))
    assert "is no plain file" in refusal(resihp("db", "import", "/dev/zero", *ledger))
    assert "more than any journal" in refusal(resihp("db", "import", str(giant), *ledger))
    job = create_local_job()
    os.mkfifo(job.journal_file)
    assert "is no plain file" in refusal(resihp("status", job.name))


# --- names ----------------------------------------------------------------------------------------------------------


def test_names_and_causes_steer_no_terminal_no_page_and_no_path(fresh_home: Path, capsys: Any) -> None:
    told = [(msgspec.structs.replace(e, job=EVIL) if isinstance(e, journal.JobStarted) else e, at) for e, at in story()]
    for number, (entry, at) in enumerate(told):
        if isinstance(entry, journal.FailureFound):
            told[number] = (msgspec.structs.replace(entry, cause=EVIL, node=EVIL, evidence=EVIL), at)
        if isinstance(entry, journal.NodeJoined) and entry.node == "n2":
            told[number] = (msgspec.structs.replace(entry, hardware=EVIL, host=EVIL), at)
    path = fresh_home / "journal"
    write_journal(path, iter(told))
    ledger = ("--ledger", f"sqlite:///{fresh_home}/ledger.db")
    commands = [
        ("db", "import", str(path), *ledger),
        ("status", *ledger),
        ("report", "--markdown", *ledger),
        ("report", *ledger),
        ("db", "prune", "--older-than", "1d", *ledger),
        *(("history", table, *ledger) for table in ("failures", "nodes", "plans", "events", "cost")),
        ("history", "lemons", "--all", *ledger),
    ]
    for words in commands:
        output = resihp(*words).output
        assert "\x1b]" not in output, words
        assert "\x1b[31mred" not in output, words
        assert "\u202e" not in output, words
        assert "\nresihp: all is well" not in output, words
    pages = list(fresh_home.glob("*.html"))
    assert len(pages) == 1, "beside us, whatever the job's name says"
    assert "<script>alert" not in pages[0].read_text()


def test_refusal_that_quotes_a_name_says_nothing_in_ours(fresh_home: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["resihp", "status", EVIL])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert [line for line in said.splitlines() if line.startswith("resihp: ")] == said.splitlines()[:1]
    assert "\x1b" not in said


# --- exports and ledgers --------------------------------------------------------------------------------------------


@pytest.fixture
def exported(fresh_home: Path) -> Path:
    folder = fresh_home / "exported"
    write_journal(fresh_home / "journal", story())
    catch_up(f"sqlite:///{fresh_home}/source.db", fresh_home, fresh_home / "journal")
    export(f"sqlite:///{fresh_home}/source.db", folder)
    return folder


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


NO_PARQUET = b"PAR1" + bytes(5000) + b"PAR1"


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("manifest.json", become_pipe),
        ("manifest.json", lambda path: path.write_bytes(b'{"x":' + b"[" * 500_000)),
        ("jobs.parquet", become_pipe),
        ("jobs.parquet", become_link),
        ("jobs.parquet", lambda path: path.write_bytes(NO_PARQUET)),
        ("jobs.parquet", lambda path: set_column(path, "uuid", None)),
        ("jobs.parquet", lambda path: set_column(path, "state", "\x1b[31m")),
        ("jobs.parquet", lambda path: set_column(path, "journal_seq", -5)),
        ("plans.parquet", Path.unlink),
    ],
)
@pytest.mark.parametrize("layout", ["as it is", "sealed again", "former"])
def test_hostile_export_is_refused(
    exported: Path, fresh_home: Path, file: str, spoil: Callable[[Path], Any], layout: str
) -> None:
    if layout == "former":
        former(exported)
    spoil(exported / file)
    if layout == "sealed again" and spoil not in (become_pipe, become_link) and file != "manifest.json":
        sealed(exported)
    said = refusal(resihp("db", "import", str(exported), "--ledger", f"sqlite:///{fresh_home}/target.db"))
    assert "folder writable" not in said, "that is not what is wrong"


@pytest.mark.parametrize(
    ("file", "column", "value"),
    [
        ("plans.parquet", "layout", "[" * 100_000),
        ("plans.parquet", "layout", '{"replicas": 5}'),
        ("plans.parquet", "assignment", "nothing"),
        ("failures.parquet", "ranks", '{"a": [[['),
        ("jobs.parquet", "account", '{"a": ' + "[" * 100_000),
        ("jobs.parquet", "nodes", -(2**60)),
        ("iterations.parquet", "seconds", float("nan")),
    ],
)
@pytest.mark.parametrize("is_former", [False, True])
def test_rows_that_make_no_sense_end_no_command_with_a_traceback(
    exported: Path, fresh_home: Path, file: str, column: str, value: object, is_former: bool
) -> None:
    if is_former:
        former(exported)
    for path in files_of(exported, file.removesuffix(".parquet")):
        set_column(path, column, value)
    if not is_former:
        sealed(exported)
    ledger = ("--ledger", f"sqlite:///{fresh_home}/target.db")
    for words in (
        ("db", "import", str(exported)),
        ("status",),
        ("report", "--markdown"),
        ("history", "failures"),
        ("history", "plans"),
        ("history", "cost", "--all"),
    ):
        result = resihp(*words, *ledger)
        if result.exit_code != 0:
            refusal(result)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("failures", "ranks", "5"),
        ("failures", "ranks", "[[1]]"),
        ("suspicions", "ranks", "true"),
        ("workers", "device", 3_000_000),
        ("jobs", "gpus_per_node", 2**40),
        ("nodes", "node", "9" * 5000),
        ("jobs", "configuration", "[" * 100_000),
        ("jobs", "model", "[" * 100_000),
        ("jobs", "unwatched", "[" * 100_000),
        ("jobs", "unwatched", "nothing"),
        ("jobs", "detector", "not heard of"),
    ],
)
def test_cells_that_make_no_sense_end_no_status_with_a_traceback(
    exported: Path, fresh_home: Path, table: str, column: str, value: object
) -> None:
    """Of a running job, in a ledger that somebody else has written."""
    evil = fresh_home / "evil.db"
    shutil.copy(fresh_home / "source.db", evil)
    with closing(sqlite3.connect(evil)) as connection, connection:
        connection.execute("UPDATE jobs SET state = 'running'")
        connection.execute("UPDATE OR IGNORE suspicions SET ended_at = NULL, outcome = NULL")
        connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
    for words in (("status",), ("history", "cost")):
        result = resihp(*words, "--ledger", f"sqlite:///{evil}")
        if result.exit_code != 0:
            refusal(result)


@pytest.mark.parametrize(
    "made",
    [
        "CREATE TRIGGER t AFTER INSERT ON jobs BEGIN SELECT 1; END",
        "ALTER TABLE jobs RENAME TO old; CREATE VIEW jobs AS "
        "WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT id FROM c",
    ],
    ids=["trigger", "view without an end"],
)
def test_ledger_in_which_something_runs_is_not_read(exported: Path, fresh_home: Path, made: str) -> None:
    evil = fresh_home / "evil.db"
    shutil.copy(fresh_home / "source.db", evil)
    connection = sqlite3.connect(evil)
    connection.executescript(made)
    connection.close()
    assert "was not made by resihp" in refusal(
        resihp("db", "import", str(evil), "--ledger", f"sqlite:///{fresh_home}/target.db")
    )
    assert "was not made by resihp" in refusal(resihp("status", "--ledger", f"sqlite:///{evil}"))


def test_ledger_that_is_no_plain_file_is_not_opened(fresh_home: Path) -> None:
    os.mkfifo(fresh_home / "pipe")
    for place in (fresh_home / "pipe", Path("/dev/zero")):
        for words in (("status",), ("db", "upgrade")):
            assert "is no plain file" in refusal(resihp(*words, "--ledger", f"sqlite:///{place}"))


@pytest.mark.parametrize("url", ["mysql://x", "not a url", "sqlite://"])
def test_ledger_that_is_none_is_refused_before_a_folder_is_made(fresh_home: Path, url: str) -> None:
    options = Options(job={"command": ("true",)}, ledger={"url": url}, local=True)
    with pytest.raises(ResihpError, match="ledger"):
        prepare(options)
    assert not (fresh_home / "home").exists()
