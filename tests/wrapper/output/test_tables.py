"""Every table that a command prints, in terminals of 40, 80 and 160 columns and in a pipe, with names as clusters have.

No line is wider than the terminal, no word is broken but where a name may be, nothing is cut, and what is left out is
said. Commands are run as they are typed; that none has a table of its own is asserted on their source.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.text import Text
from typer.testing import CliRunner, Result

from resihp import wrapper
from resihp.db.maintenance import record as record_repair
from resihp.db.reading import queries
from resihp.db.writing.catch_up import catch_up
from resihp.errors import ResihpError, UsageError
from resihp.record import journal
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.errors import SlurmRefusedError
from resihp.worker.checkpoints import write_manifest
from resihp.wrapper.cli import app
from resihp.wrapper.commands.doctor import command as doctor
from resihp.wrapper.commands.doctor.machine import CheckResult
from resihp.wrapper.commands.history import tables as views
from resihp.wrapper.commands.history.query import By
from resihp.wrapper.commands.history.views import HISTORY_VIEWS
from resihp.wrapper.commands.node import command as node_commands
from resihp.wrapper.job_folder import create_local_job, home
from resihp.wrapper.output import tables
from resihp.wrapper.output.tables import Column
from tests.db.conftest import any_layout_story, node_story, write_journal
from tests.slurm.fake_slurm import FakeSlurm
from tests.wrapper.commands.history.test_history import doubted

WIDTHS = [40, 80, 160]
JOB = "llama3-70b-pretrain-long-context-ablation-lr3e4-stage2-run"
NODE = "gpu-a100-rack17-node00"
USER = "magdalena.von-und-zu-hohenstein"
ACCOUNT = "large-language-models-and-multimodal-research"
REASON = "rank 3 raised torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3 of group default_pg"


# --- what was printed ------------------------------------------------------------------------------------------------


class Seen:
    """Tables as they were asked for, and how they were laid out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: list[tuple[Sequence[Column], Sequence[Sequence[Text]], list[int]]] = []
        self.modules: set[str] = set()
        for name in ("_print", "_show_records"):
            monkeypatch.setattr(tables, name, self._noting(getattr(tables, name)))

    def _noting(self, real: Callable[..., None]) -> Callable[..., None]:
        def noted(screen: Any, columns: Any, cells: Any, *layout: Any) -> None:
            chosen = list(layout[0]) if layout else list(range(len(columns)))
            self.tables.append((columns, cells, chosen))
            frame = sys._getframe(2)
            self.modules.add(str(frame.f_globals["__name__"]))
            real(screen, columns, cells, *layout)

        return noted


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def pieces(words: str, width: int) -> Iterator[str]:
    """What must stand in one line: words, of long ones what stands between separators. Of a word that is longer than
    half of the terminal nothing."""
    for word in words.split():
        parts = [word] if len(word) <= 12 else re.split(r"(?<=[-_/=+@|.,:;])", word)
        yield from (part for part in parts if len(part) <= width // 2 - 2)


def check(shown: str, errors: str, width: int, seen: Seen) -> None:
    lines = shown.splitlines()
    assert max(map(len, [*lines, ""])) <= width, max(lines, key=len)
    for columns, cells, chosen in seen.tables:
        left = [column.heading for n, column in enumerate(columns) if n not in chosen]
        if left:
            assert f"no room for columns: {', '.join(left)}; " in " ".join(errors.split()), errors
        assert not [columns[n].heading for n in range(len(columns)) if columns[n].kept and n not in chosen]
        for row in cells:
            for n in chosen:
                wanted = [] if row[n].plain in ("", "-") else [row[n].plain, columns[n].heading]
                for piece in (part for words in wanted for part in pieces(words, width)):
                    assert any(piece in line for line in lines), (piece, shown)


def run(*argv: object) -> Result:
    result = CliRunner().invoke(app, list(map(str, argv)))
    if result.exception is not None and not isinstance(result.exception, SystemExit | ResihpError):
        raise result.exception
    return result


# --- a fleet with long names -----------------------------------------------------------------------------------------


def longer(value: Any, number: int) -> Any:
    """An entry of a journal whose names are long."""
    if isinstance(value, str):
        return re.sub(r"\bn(\d)\b", lambda found: f"{NODE}{40 + int(found[1])}", value)
    if isinstance(value, tuple):
        return tuple(longer(each, number) for each in value)
    if isinstance(value, journal.JobStarted):
        value = msgspec.structs.replace(value, job=f"{JOB}{number}", user=USER, host=f"{NODE}01.cluster.example.org")
        slurm = journal.SlurmIdentity(job=4_711_000 + number, cluster="alps", account=ACCOUNT, partition="gpu-long")
        return msgspec.structs.replace(value, slurm=slurm)
    if isinstance(value, msgspec.Struct):
        names = [name for name in value.__struct_fields__ if name not in ("plan", "declare", "outcome")]
        changed = {name: longer(getattr(value, name), number) for name in names}
        if isinstance(value, journal.FailureFound | journal.JobEnded) and number != 3:
            changed["cause" if isinstance(value, journal.FailureFound) else "reason"] = REASON
        return msgspec.structs.replace(value, **changed)
    return value


@pytest.fixture
def fleet(fresh_home: Path) -> str:
    """The URL of a ledger of four jobs, two of which have the same name."""
    url = f"sqlite:///{fresh_home / 'fleet.db'}"
    began = time.time() - 7200.0
    for number, tell in enumerate((doubted, doubted, any_layout_story, node_story)):
        job = create_local_job()
        told = list(tell(job)) if tell is doubted else list(tell())  # type: ignore[call-arg, operator]
        shift = began + number - told[0][1]
        name = 0 if number == 1 else number
        path = fresh_home / f"journal-{number}"
        write_journal(path, ((longer(entry, name), at + shift) for entry, at in told))
        catch_up(url, job.folder, path)
    record_repair(url, f"{NODE}42", note="GPU 3 was replaced after double-bit errors", kind="replaced")
    return url


@pytest.fixture
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return int(request.param)


each_width = pytest.mark.parametrize("narrow", WIDTHS, indirect=True)


# --- the commands ----------------------------------------------------------------------------------------------------

HISTORY = [
    *([name, f"{JOB}2"] for name, view in HISTORY_VIEWS.items() if view.of_job is not None),
    *([name, f"{JOB}3"] for name in ("nodes", "drains", "replacements", "hosts")),
    *([name, "--all", "--limit", "5"] for name in HISTORY_VIEWS if name != "rate"),
    *(["failures", "--all", "--by", by.value] for by in By),
    *(["cost", "--all", "--by", by] for by in ("job", "owner", "account", "partition", "cluster", "week", "month")),
    ["cost", "--all", "--price", "2.5"],
    ["cost", "--all", "--by", "job", "--price", "2.5"],
    ["rate", "--around", "1d"],
    ["lemons", "--injected"],
]


@each_width
def test_history(fleet: str, narrow: int, seen: Seen) -> None:
    shown = 0
    for arguments in HISTORY:
        seen.tables.clear()
        done = run("history", *arguments, "--ledger", fleet)
        if isinstance(done.exception, UsageError):  # of one job, or of all
            continue
        assert done.exit_code == 0, (arguments, done.exception)
        check(done.stdout, done.stderr, narrow, seen)
        shown += bool(seen.tables)
    assert shown > 40, "there was something to see"


def test_jobs_of_the_same_name_are_told_apart(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")

    def ids(*arguments: str) -> list[str]:
        """Of the rows of the two jobs, what stands beside their name."""
        shown = run("history", *arguments, "--ledger", fleet).stdout
        rows = (line.split() for line in shown.splitlines())
        return sorted(row[1] for row in rows if row[:1] == [f"{JOB}0"])

    jobs = ids("jobs")
    assert len(set(jobs)) == 2
    for view in ("cost", "failures"):
        asked = (view, "--all", "--by", "job")
        assert ids(*asked) == jobs, view
        rows = json.loads(run("history", *asked, "--json", "--ledger", fleet).stdout)["rows"]
        assert sorted(row["uuid"][:8] for row in rows if row["job"] == f"{JOB}0") == jobs
    for view in ("failures", "events", "iterations", "promises", "plans"):
        asked = (view, "--all", "--limit", "10000")
        rows = json.loads(run("history", *asked, "--json", "--ledger", fleet).stdout)["rows"]
        told = {row["job_uuid"][:8] for row in rows if row["job"] == f"{JOB}0"}
        assert told
        assert told <= set(jobs), view
        assert set(ids(*asked)) == told, view
        header = run("history", *asked, "--csv", "--ledger", fleet).stdout.splitlines()[0]
        assert header.split(",")[:2] == ["job", "job_uuid"], view
    assert ids("failures", f"{JOB}1") == [], "of one job nobody asks which"
    for name in jobs:
        assert run("status", name, "--ledger", fleet).exit_code == 0, "a name for every command"


VIEW_COLUMNS = {
    **{name: view.columns for name, view in HISTORY_VIEWS.items()},
    **{f"{name} by {by}": columns for name, view in HISTORY_VIEWS.items() for by, columns in view.columns_by.items()},
    "placements": views.PLACEMENTS_COLUMNS,
}


@pytest.mark.parametrize("view", sorted(VIEW_COLUMNS))
@each_width
def test_every_view_of_history(view: str, narrow: int, seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of which that fleet has nothing: two rows whose names differ in their last letter."""
    from resihp.wrapper.output.answers import console

    names = [name for name in (*queries.COLUMNS[view], "job", "uuid", "money") if name != "job_uuid"]
    rows = [{name: made(name, n) for name in names} for n in (1, 2)]
    own = {"cost": {"cause": "rollback"}, "scores": {"evidence": 0.25}}
    rows = [row | own.get(view, {}) for row in rows]
    of_all = [row | {"job": "one-name", "job_uuid": made("uuid", n)} for n, row in enumerate(rows, 1)]
    for each in (rows, of_all):
        tables.show(console(), *views.history_table(VIEW_COLUMNS[view], each))
        printed = capsys.readouterr()
        check(printed.out, printed.err, narrow, seen)
        assert not re.search(r"left out.*\b(text|cause)\b", printed.err), "it says what happened"
        seen.tables.clear()


WORDY = {
    *("reason", "cause", "text", "evidence", "outcome_evidence", "refused_reason", "lost_reason", "advice"),
}
FIXED: dict[str, Any] = {
    "owner": USER,
    "account": ACCOUNT,
    "partition": "gpu-long",
    "cluster": "alps-production",
    "component": "device",
    "kind": "communication",
    "hardware": "hardware",
    "state": "completed",
    "verdict": "kept",
    "action": "redo",
    "outcome": "superseded",
    "occasion": "suspicion",
    "passed": False,
    "test": "log evidence",
    "unit": "s",
    "step": "exclusion",
    "drained": "resihp",
    "slurm_job": "4711001",
    "description": "2x TP2,2 | TP2,1, 30x TP2,2,2,2,2,2,2,2",
    "lemon": True,
    "lemon_devices": "3",
    "codes": "79, 94, 119",
    "driver": "580.65.06",
    "kernel": "5.14.0-503.el9",
    "vbios": "96.00.89.00.01",
    "changed": "driver 570.86.15 to 580.65.06",
    "version": "0.2.0.dev12+g1234567",
    "torch": "2.13.0+cu130",
    "week": "2026-10-26",
    "month": "2026-10",
    "which": "with",
    "when": "driver=580.65.06",
}


def made(name: str, n: int) -> Any:
    """A value of a column of the ledger's."""
    at = datetime(2026, 11, 1, 12, 30, n, tzinfo=UTC)
    if name in WORDY:
        return REASON
    told: dict[str, Any] = {
        **dict.fromkeys(("job", "name"), f"{JOB}{n}"),
        **dict.fromkeys(("node", "instead", "replaced_by"), f"{NODE}4{n}"),
        "host": f"{NODE}4{n}.cluster.example.org",
        "uuid": f"0bd5f1a{n}-1df4-4e0a-9c55-0f9b5b1f0a3c",
        "folder": f"/scratch/{USER}/runs/{JOB}{n}/ckpt/{n}",
        "refused": [{"name": "without replica 1", "predicted": 3.5, "why": "12.0% slower"}],
        "ranks": [n, n + 1],
    }
    if name in told | FIXED:
        return (told | FIXED)[name]
    if name == "at" or name.endswith("_at") or name in ("last", "first_seen", "last_seen"):
        return at
    return 12345.678 + n if name.endswith(("seconds", "hours", "share", "level", "evidence")) else 12345 + n


@each_width
def test_jobs_status_and_why(fleet: str, narrow: int, seen: Seen) -> None:
    for arguments in (
        *(["status", f"{JOB}{n}", "--ledger", fleet] for n in (2, 3)),
        *(["why", "2", f"{JOB}2", "--ledger", fleet], ["why-not", "3", f"{JOB}2", "--ledger", fleet]),
        ["compare", f"{JOB}2", f"{JOB}3", "--ledger", fleet],
    ):
        done = run(*arguments)
        check(done.stdout, done.stderr, narrow, seen)
        assert len(done.stdout.splitlines()) >= 1, arguments
    assert [columns[1].heading for columns, _, _ in seen.tables] == [f"{JOB}2"]


@each_width
def test_node(fleet: str, narrow: int, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [f"{NODE}{n}" for n in (41, 42, 43)]
    slurm = FakeSlurm(nodes, cluster="alps")
    slurm.add_job(*nodes, id="17")
    monkeypatch.setattr(node_commands, "connect", lambda: slurm)
    exclusions = Exclusions(home(), "alps")
    for node in nodes:
        exclusions.add(node, REASON, time.time() + 86_400)
    for arguments in (
        *(["list"], ["health", f"{JOB}2", "--ledger", fleet], ["maintenance", "--ledger", fleet]),
        ["undrain", nodes[0], "--job", "17"],
    ):
        seen.tables.clear()
        done = run("node", *arguments)
        assert done.exit_code == 0 or isinstance(done.exception, SlurmRefusedError), done.exception
        check(done.stdout, done.stderr, narrow, seen)
        assert len(seen.tables) == 1, arguments


@each_width
def test_checkpoints(fresh_home: Path, narrow: int, seen: Seen) -> None:
    job = create_local_job()
    layout = "2x TP2,2 | TP2,1, 30x TP2,2,2,2,2,2,2,2"
    for iteration in (10, 1_000_020):
        folder = job.checkpoints / f"iteration-{iteration:06}"
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"1234")
        write_manifest(folder, iteration, [("part", 4)], layout=layout, seconds=12.5)
    (folder / "part").write_bytes(b"12")
    done = run("checkpoint", "list", job.name)
    tabled, _, where = done.stdout.rpartition("\nin ")
    assert where == f"{job.checkpoints}\n"
    check(tabled, done.stderr, narrow, seen)
    assert len(seen.tables) == 1


@each_width
def test_doctor(narrow: int, seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    advice = f"add to slurm.conf: TaskPlugin=task/cgroup,task/affinity; then: scontrol reconfigure, on {NODE}42"
    outcomes = ("ok", "warning", "failed", "unknown")
    doctor.show([CheckResult(check="slurm-settings", outcome=one, text=REASON, advice=advice) for one in outcomes])
    printed = capsys.readouterr()
    check(printed.out, printed.err, narrow, seen)


@each_width
def test_analyze(narrow: int, seen: Seen, tmp_path: Path) -> None:
    lines = ["iteration,rank,seconds"]
    for i in range(400):
        for rank in range(8):
            lines.append(
                f"{i},{rank},{(1.9 if 150 <= i < 300 and rank < 6 else 1.0) * (1 + 0.01 * ((i * 7 + rank) % 5))}"
            )
    path = tmp_path / f"{JOB}.csv"
    path.write_text("\n".join(lines))
    done = run("analyze", path)
    assert seen.tables, done.stdout
    del seen.tables[1:]
    check(without_sentences(done.stdout), done.stderr, narrow, seen)


@each_width
def test_plan(narrow: int, seen: Seen) -> None:
    small = ("--model", "llama2-7b", "--micro-batches", "4", "--sequence-length", "1024", "--gpus-per-node", "4")
    for more in (("--fail", "1,5"), ("--hurts",)):
        seen.tables.clear()
        done = run("plan", *small, "--layout", "tp=2,dp=2,pp=2", *more)
        assert done.exit_code == 0, done.exception
        assert seen.tables
        check(without_sentences(done.stdout), done.stderr, narrow, seen)


def without_sentences(shown: str) -> str:
    """Those are whole lines, which a terminal goes on with by itself."""
    of_title = "tokens per sequence"
    return "\n".join(line for line in shown.splitlines() if line[-1:] not in (".", ":") and of_title not in line)


def test_no_command_has_a_table_of_its_own() -> None:
    """What is not seen above is not tested: tables are `resihp.wrapper.output.tables`', and these modules use them."""
    root = Path(wrapper.__file__).parent
    own, users = set(), set()
    for path in root.rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "rich.table":
                own.add(name)
            if isinstance(node, ast.ImportFrom) and node.module == "resihp.wrapper.output.tables":
                users.add(name)
    assert own == {"output.tables", "commands.watch.picture"}, "the picture is two columns of a window"
    assert users == {
        *("commands.analyze", "commands.compare", "commands.doctor.command"),
        *("commands.history.command", "commands.history.tables", "commands.jobs.tables", "commands.status.tables"),
        *("commands.node.command", "commands.node.maintenance", "commands.node.tables"),
        *("commands.operate.checkpoint", "commands.plan.command", "commands.plan.hurts", "commands.plan.tables"),
    }


# --- terminals and pipes ---------------------------------------------------------------------------------------------


def in_terminal(columns: int, *argv: str) -> list[str]:
    """What the command prints in a real terminal of so many columns."""
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "resihp", *argv]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as child:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(own, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
        os.close(own)
        assert child.wait() == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r", "").splitlines()


def test_a_terminal_has_its_width_and_a_pipe_all_of_it(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("history", "failures", "--all", "--ledger", fleet)
    for columns in (40, 80):
        assert max(map(len, in_terminal(columns, *arguments))) <= columns
    monkeypatch.delenv("COLUMNS", raising=False)
    piped = subprocess.run([sys.executable, "-m", "resihp", *arguments], capture_output=True, text=True, check=True)
    rows = [line for line in piped.stdout.splitlines() if JOB in line]
    assert len(rows) == 5
    assert all(f"{JOB}{n}" in "".join(rows) for n in (0, 2))
    assert sum(REASON in line for line in rows) == 5, "in one line, whatever its length"
    assert piped.stderr == ""


def test_words_are_broken_where_a_reader_would() -> None:
    assert broken(f"{JOB}1", 20) == ["llama3-70b-pretrain-", "long-context-", "ablation-lr3e4-", "stage2-run1"]
    assert broken("580.65.06 on gpu-7", 12) == ["580.65.06 on", "gpu-7"]
    assert broken("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5], "for want of anything better"
    assert broken("a\n-> b", 40) == ["a", "-> b"]
    assert broken("", 10) == [""]
    assert broken("雪" * 8, 10) == ["雪" * 5, "雪" * 3], "two columns each"


def broken(words: str, width: int) -> list[str]:
    return [line.plain for line in tables.lines(Text(words), width)]


COLUMNS = (Column("job", wraps=True), Column("took"), Column("node", kept=True), Column("reason", wraps=True))


def test_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from resihp.wrapper.output.answers import console

    rows = [("a-job-of-some-length", "3 min 20 s", "n" * 20, "it failed for some reason")]
    monkeypatch.setenv("COLUMNS", "54")
    tables.show(console(), COLUMNS, rows)
    printed = capsys.readouterr()
    assert printed.err == "resihp: no room for columns: took; a wider terminal, a pipe and --json show all\n"
    assert next(line.split() for line in printed.out.splitlines() if line.strip()) == ["job", "node", "reason"]
    monkeypatch.setenv("COLUMNS", "26")
    tables.show(console(), COLUMNS, rows)
    printed = capsys.readouterr()
    assert printed.err == ""
    for width in ("1", "2", "9"):
        monkeypatch.setenv("COLUMNS", width)
        tables.show(console(), COLUMNS, rows)
        assert "".join(capsys.readouterr().out.split()).count("n") > 20, "however narrow"
    assert printed.out.splitlines() == [
        "job     a-job-of-some-",
        "        length",
        "took    3 min 20 s",
        "node    nnnnnnnnnnnnnnnnnn",
        "        nn",
        "reason  it failed for some",
        "        reason",
    ]
