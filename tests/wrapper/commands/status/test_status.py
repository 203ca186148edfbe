"""`status`, `history`, `db upgrade`: data on stdout in the promised shapes, tables that fit, errors with a way out."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine
from typer.testing import CliRunner, Result

from resihp.db.migrate import head
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import JobNotFoundError, LedgerError, UsageError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import StepOutcome
from resihp.record import journal, journal_file
from resihp.wrapper.cli import app
from resihp.wrapper.commands.history.tables import history_table
from resihp.wrapper.commands.history.views import HISTORY_VIEWS
from resihp.wrapper.commands.status import tables
from resihp.wrapper.commands.status.job_status import job_status
from resihp.wrapper.job_folder import Job, create_local_job, take_lock
from resihp.wrapper.output.answers import moment, to_json
from resihp.wrapper.output.tables import show
from resihp.wrapper.sinks.figures import followed
from tests.db.conftest import BEGAN, any_layout_story, node_story, started, write_journal
from tests.resihp.controller.direct import DECLARE

ODD = "rank 3 raised ValueError: [red]'x'[/red] \"y\" [/b] \x1b[2J"
NODE = "n2[bold]"


def suspected(suspicion: int, rank: int, evidence: str) -> journal.Suspected:
    return journal.Suspected(
        rank=rank, node="n1", evidence=evidence, component="process", ranks=(rank,), suspicion=suspicion
    )


def record_job(job: Job, *, ended: bool = True, loss: float = 3.25) -> list[journal.Record]:
    """A journal of two nodes of two, one failure in iteration 3, names and reasons that look like markup."""
    began = job.read().created_at
    writer = journal_file.Journal(job.journal_file, sync=False)
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=4)

    def log(entry: journal.AnyEntry, after_s: float) -> None:
        writer.append(entry, began + after_s)

    def commit(iteration: int, epoch: int, after_s: float) -> None:
        outcome = StepOutcome(
            iteration=iteration,
            clip=1.0,
            skip=False,
            learning_rate=1e-3,
            gradient_norm=2.0,
            loss=loss,
            tokens=4096,
            sum_squared_lengths=1 << 20,
            samples=17,
            samples_digest="00ff00ff00ff00ff",
        )
        log(journal.IterationCommitted(epoch=epoch, outcome=outcome, seconds=1.0, predicted_seconds=None), after_s)

    log(
        journal.JobStarted(
            job=job.name,
            command=("python", "train.py"),
            nodes=2,
            gpus_per_node=2,
            tp=1,
            pp=2,
            schedule="1f1b",
            host=job.read().host,
            user="me",
            restart_count=0,
            version="0.1.0",
            configuration={},
        ),
        0.0,
    )
    for rank in range(4):
        node = "n1" if rank < 2 else NODE
        if rank % 2 == 0:
            log(journal.NodeJoined(node=node, host="here", devices=2), 0.0)
        log(journal.WorkerStarted(rank=rank, node=node, device=rank % 2, pid=rank, epoch=0), 0.0)
    plan = Plan(epoch=1, layout=layout, assignment=spread(4, 2))
    log(journal.PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="start"), 1.0)
    commit(1, 1, 2.0)
    commit(2, 1, 3.0)
    log(journal.WorkerEnded(rank=3, exit=-9, epoch=1), 3.5)
    failure = journal.FailureFound(
        failure=1,
        kind="fail-stop",
        component="process",
        cause=ODD,
        ranks=(3,),
        node=NODE,
        device=1,
        iteration=3,
        epoch=2,
        evidence="Traceback: " + "x" * 300,
        detect_s=None,
        noticed_s=0.1,
        failed_s=0.1,
    )
    log(failure, 3.6)
    plan = Plan(epoch=2, layout=layout.without(frozenset({3})), assignment=spread(4, 1))
    log(journal.PlanDecided(plan=plan, next_iteration=3, action="redo", finish=None, reason=ODD), 3.6)
    commit(3, 2, 5.5)
    log(
        journal.Reconfigured(
            epoch=2,
            failures=(1,),
            attempts=1,
            action="redo",
            park_s=0.1,
            plan_s=0.1,
            groups_s=0.2,
            state_s=0.1,
            first_iteration_s=1.0,
            seconds=2.0,
        ),
        5.5,
    )
    log(suspected(1, 0, "no progress for 3.0 s"), 5.5)
    log(msgspec.structs.replace(suspected(1, 0, "progress again"), cleared=True), 5.5)
    log(suspected(2, 1, "no progress for 3.0 s"), 5.5)
    if ended:
        log(journal.JobEnded(exit_code=0, state="completed", reason="3 iterations done"), 6.0)
        job.exit_code_file.write_text("0\n")
    writer.close()
    return journal_file.read(job.journal_file)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job() -> Job:
    """A completed job whose ledger nobody has written yet: the commands rebuild it from the journal."""
    job = create_local_job()
    record_job(job)
    return job


def resihp(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows(*arguments: str) -> list[dict[str, object]]:
    result = resihp("history", *arguments, "--json")
    answer = json.loads(result.stdout)
    assert answer["schema"] == 1
    assert set(answer) == {"schema", "rows"}
    return list(answer["rows"])


def test_status_json(job: Job) -> None:
    state = json.loads(resihp("status", job.name, "--json").stdout)
    assert state["schema"] == 1
    assert state["job"] == job.name
    assert state["state"] == "completed"
    assert state["iteration"] == 3
    assert state["loss"] == 3.25
    assert state["iteration_seconds"] == 1.0
    # In the last of three seconds one of four devices was dead, and another stood by.
    assert state["goodput"] == pytest.approx(2.5 / 4.5, abs=1e-3)
    lost = {"fail-stop": 1.5, "idle": 0.25, "capacity": 0.25, "other": 0.0}
    assert state["lost_seconds"] == pytest.approx(lost, abs=1e-3)
    stages = [{"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [2, 3]}]
    assert state["layout"] == {"replicas": [stages], "standby": [2]}
    assert state["health"] == {"0": "active", "1": "active", "2": "standby", "3": "dead"}
    kinds = [event["kind"] for event in state["events"]]
    assert kinds == [
        "PlanDecided",
        "FailureFound",
        "PlanDecided",
        "Reconfigured",
        "Suspected",
        "SuspicionCleared",
        "Suspected",
        "JobEnded",
    ]
    assert datetime.fromisoformat(state["events"][0]["at"]).tzinfo == UTC
    assert state["events"][0]["at"].endswith("Z")


def test_status_fits_a_terminal_and_needs_no_colour(job: Job) -> None:
    text = resihp("status").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert text.startswith(f"job {job.name}  completed  iteration 3  loss 3.2500  1.00 s an iteration\n")
    assert "goodput 55.6 %" in text
    assert "lost: idle GPUs 0.25 s, missing GPUs 0.25 s," in text
    assert "replica 0  0           1" in text
    assert "standby    2s" in text
    assert "dead       3x" in text
    assert "[red]'x'[/red]" in " ".join(text.split())
    assert "\\x1b[2J" in text


def test_ranks_that_were_told_to_go_are_not_dead() -> None:
    """Ctrl-C ends workers by a signal; only a failure makes one dead."""
    job = create_local_job()
    record_job(job, ended=False)
    writer = journal_file.Journal(job.journal_file, sync=False)
    for rank in range(3):
        writer.append(journal.WorkerEnded(rank=rank, exit=-15, epoch=2), job.read().created_at + 6)
    ended = journal.JobEnded(exit_code=130, state="cancelled", reason="received SIGINT")
    writer.append(ended, job.read().created_at + 6)
    writer.close()
    job.exit_code_file.write_text("130\n")
    assert json.loads(resihp("status", "--json").stdout)["health"] == {
        **{"0": "active", "1": "active", "2": "standby", "3": "dead"}
    }


@pytest.mark.parametrize(
    ("state", "code"), [("completed", 0), ("cancelled", 0), ("failed", 1), ("abnormal", 1), ("running", 0)]
)
def test_status_exits_with_1_for_a_job_that_has_failed(state: Any, code: int) -> None:
    job = create_local_job()
    with Ledger.open("sqlite", job.folder) as ledger:
        for record in record_job(job, ended=False):
            ledger.submit(record)
    job.set_ledger(ledger.url)
    lock = None
    if state == "running":
        lock = take_lock(job)
    else:
        writer = journal_file.Journal(job.journal_file, sync=False)
        writer.append(journal.JobEnded(exit_code=5, state=state, reason="so"), job.read().created_at + 6)
        writer.close()
        job.exit_code_file.write_text("5\n")
    try:
        assert resihp("status").exit_code == code
        assert resihp("status", "--json").exit_code == code
        if state != "running":
            assert resihp("status", "--watch").exit_code == code
    finally:
        if lock is not None:
            os.close(lock)


def test_status_tells_where_logs_and_the_last_checkpoint_are(job: Job) -> None:
    writer = journal_file.Journal(job.journal_file, sync=False)
    done = journal.CheckpointCommitted(iteration=2, folder="/ckpt", bytes=9, seconds=1.0)
    writer.append(done, job.read().created_at + 6)
    writer.close()
    state = json.loads(resihp("status", "--json").stdout)
    assert (state["folder"], state["logs"]) == (str(job.folder), f"{job.folder}/logs")
    assert (state["checkpoint"]["iteration"], state["checkpoint"]["folder"]) == (2, "/ckpt")
    text = "".join(resihp("status").stdout.split())
    assert f"logs:{job.folder}/logs" in text
    assert "UTCin/ckpt" in text
    url = f"sqlite:///{job.folder}/ledger.db"
    assert json.loads(resihp("status", "--json", "--ledger", url).stdout)["logs"] is None


def test_history_failures(job: Job) -> None:
    [row] = rows("failures", job.name)
    assert row["cause"] == ODD
    assert row["node"] == NODE
    assert row["ranks"] == [3]
    assert row["seconds_to_recover"] == 2.0
    assert row["detect_seconds"] is None
    assert datetime.fromisoformat(str(row["noticed_at"])).timestamp() == pytest.approx(
        job.read().created_at + 3.5, abs=1e-3
    )
    text = resihp("history", "failures").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert NODE in text
    assert "[red]" in text
    assert "2.00 s" in text


@pytest.mark.parametrize("table", [table for table in HISTORY_VIEWS if table != "rate"])
def test_every_table_has_json_csv_parquet_and_a_terminal_form(job: Job, table: str, tmp_path: Path) -> None:
    found = rows(table, job.name)
    parsed = list(csv.reader(io.StringIO(resihp("history", table, "--csv").stdout)))
    assert len(parsed) == len(found) + 1
    path = tmp_path / "out.parquet"
    result = resihp("history", table, "--parquet", str(path))
    assert result.stdout == ""
    frame = pd.read_parquet(path)
    assert len(frame) == len(found)
    assert list(frame.columns) == parsed[0]
    if found:
        assert [name for name in found[0] if name != "explanation"] == parsed[0], "JSON alone has room for it"
    shown = resihp("history", table)
    assert max(map(len, [*shown.stdout.splitlines(), ""])) <= 80
    if not found:
        assert shown.stdout == ""
        whose = "all jobs" if HISTORY_VIEWS[table].of_job is None else f"job {job.name}"
        assert shown.stderr == f"resihp: {whose}: no {table}\n"


@pytest.mark.parametrize(
    ("job", "state", "exit_code", "told"),
    [
        ("6", "cancelled", 75, "Slurm was asked to run it again: resihp jobs shows whether it is queued"),
        ("3", "abnormal", 1, "Slurm may run it again: resihp jobs shows whether it is queued"),
        ("local-3", "abnormal", 1, ""),
        ("6", "cancelled", 143, ""),
        ("6", "running", None, ""),
    ],
)
def test_a_job_that_ended_and_is_run_again_says_so(job: str, state: str, exit_code: int | None, told: str) -> None:
    assert tables.again_line({"job": job, "state": state, "exit_code": exit_code}) == told


def lines_of(shown: object, rows: list[dict[str, Any]] | None = None) -> list[str]:
    """What a terminal of 80 columns shows of something, or of rows of a view of `history`."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    if rows is None:
        console.print(shown)
    else:
        show(console, *history_table(HISTORY_VIEWS[str(shown)].columns, rows))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    return [line for line in lines if line]


def any_layout(folder: Path, until: Callable[[journal.AnyEntry], bool] = lambda entry: False) -> str:
    """A ledger of layouts that change: plans refused and overtaken, a newcomer taken in, another turned away."""

    def told() -> Iterator[tuple[journal.AnyEntry, float]]:
        for entry, at in any_layout_story():
            yield entry, at
            if until(entry):
                return

    write_journal(folder / "journal", told())
    catch_up("sqlite", folder, folder / "journal")
    return f"sqlite:///{folder / 'ledger.db'}"


def test_history_tells_which_plans_took_effect_and_what_was_moved(tmp_path: Path) -> None:
    url = any_layout(tmp_path)
    with Reader.open(url) as reader:
        [job] = reader.jobs()
        plans = lines_of("plans", reader.rows("plans", job["id"]))
        moves = lines_of("reconfigurations", reader.rows("reconfigurations", job["id"]))
    assert [" ".join(line.split()) for line in plans if line[:6].strip().isdigit()] == [
        "1 DP3 x PP2 x TP2 1 start 06-15 15:06:41 start",
        "2 2x TP2,2 | TP2,1 2 redo refused rank 5 killed; rank",
        "3 2x TP2,2 | TP2,1 2 redo superseded rank 5 killed",
        "4 2x TP2,2 | TP2,1 2 redo 06-15 15:06:42 rank 5 killed",
        "5 DP3 x PP2 x TP2 3 between 06-15 15:06:44 rank 12 joined",
    ]
    assert "rank 3: 79.1 GB needed, 79.0 GB there" in " ".join(" ".join(plans).split())
    assert [" ".join(line.split()) for line in moves if line[:6].strip().isdigit()] == [
        "4 redo 3 0.10 0.05 0.20 0.05 - 0.60 1.00 3.4 GB",
        "5 between 1 0.10 0.05 0.20 0.05 - 0.60 1.00 1.2 MB",
    ]


def test_status_shows_unequal_stages_and_newcomers_that_start(tmp_path: Path) -> None:
    url = any_layout(tmp_path, lambda entry: isinstance(entry, journal.Reconfigured))
    with Reader.open(url) as reader:
        job = reader.job()
        state = job_status(reader, job)
    assert (state["health"]["12"], state["health"]["5"], state["health"]["6"]) == ("starting", "dead", "active")
    lines = lines_of(tables.render_status(state, 80))
    at = next(n for n, line in enumerate(lines) if line.startswith("epoch 4: "))
    assert lines[at : at + 9] == [
        "epoch 4: 2x TP2,2 | TP2,1",
        "           stage 0     stage 1",
        "           layers 0-3  layers 4-7",
        "replica 0  0-1         2-3",
        "replica 1  4 7 L0-4    6 L5-7",
        "replica 2  8-9         10-11",
        "starting   12+",
        "dead       5x",
        "+ starting, x dead",
    ]
    assert any("plan refused by rank 3" in line for line in lines)


def record_nodes(job: Job) -> None:
    """A job that loses a node and gets another one, and still runs, as far as its journal tells."""
    began = job.read().created_at
    write_journal(job.journal_file, ((entry, at - BEGAN + began) for entry, at in node_story()))
    catch_up("sqlite", job.folder, job.journal_file)


def test_history_of_drains_and_replacements() -> None:
    job = create_local_job()
    record_nodes(job)
    drains = rows("drains", job.name)
    assert [(row["node"], row["step"], row["outcome"]) for row in drains] == [
        ("n3", "slurm", "done"),
        ("n2", "slurm", "refused"),
    ]
    assert len(rows("drains", job.name, "--node", "n2")) == 1
    assert [row["replacement"] for row in rows("replacements", job.name, "--node", "n9")] == [2]
    assert [row["replacement"] for row in rows("replacements", job.name, "--node", "n3")] == [1, 2]
    asked = datetime.fromtimestamp(job.read().created_at + 10, UTC).isoformat()
    assert [row["outcome"] for row in rows("replacements", "--job", job.name, "--until", asked)] == ["refused"]
    assert [row["outcome"] for row in rows("replacements", "--job", job.name, "--since", asked)] == ["joined"]
    table = list(csv.DictReader(io.StringIO(resihp("history", "replacements", job.name, "--csv").stdout)))
    assert [(row["instead"], row["node"], row["excluded"]) for row in table] == [
        ("n3", "", '["n1", "n2", "n3"]'),
        ("n3", "n9", '["n1", "n2", "n3"]'),
    ]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("drains", ["Slurm refused", "job local-1 lost rank 5: killed"]),
        ("replacements", ["invalid partition", "8 of 12 ranks", "n9"]),
    ],
)
def test_drains_and_replacements_fit_a_terminal(table: str, told: list[str]) -> None:
    job = create_local_job()
    record_nodes(job)
    text = resihp("history", table, job.name).stdout
    assert max(map(len, text.splitlines())) <= 80
    for line in told:
        assert set(line.split()) <= set(text.split()), line


def test_status_tells_of_nodes_that_went_and_came() -> None:
    job = create_local_job()
    record_nodes(job)
    state = json.loads(resihp("status", job.name, "--json").stdout)
    assert [row["node"] for row in state["drains"]] == ["n3", "n2"]
    assert [row["outcome"] for row in state["replacements"]] == ["refused", "joined"]
    text = resihp("status", job.name).stdout
    assert "\nin use: n9 for n3\n" in text
    state["replacements"][1]["outcome"] = "pending"
    state["drains"][0]["undrained_at"] = None
    assert tables.nodes_line(state) == "drained: n3; requested: a node for n3 (Slurm job 42, pending)"
    assert tables.nodes_line({"drains": [], "replacements": []}) == ""


def test_history_iterations_and_workers_columns(job: Job) -> None:
    found = rows("iterations")
    assert [row["iteration"] for row in found] == [1, 2, 3]
    assert list(found[0])[:10] == [
        *("iteration", "epoch", "seconds", "predicted_seconds", "tokens", "sum_squared_lengths", "samples"),
        *("samples_digest", "loss", "finished_at"),
    ]
    assert found[0]["predicted_seconds"] is None
    assert [(row["rank"], row["exit"]) for row in rows("workers")] == [(0, None), (1, None), (2, None), (3, -9)]


def test_what_is_not_a_number_is_null_in_json() -> None:
    job = create_local_job()
    record_job(job, loss=float("nan"))
    assert {row["loss"] for row in rows("iterations")} == {None}
    assert json.loads(resihp("status", "--json").stdout)["loss"] is None
    assert to_json({"a": [float("inf"), float("nan"), 1.5]}) == '{"a": [null, null, 1.5]}'


def test_history_filters(job: Job) -> None:
    assert [row["rank"] for row in rows("workers", "--node", NODE)] == [2, 3]
    cut = datetime.fromtimestamp(job.read().created_at + 4, UTC)
    assert [row["iteration"] for row in rows("iterations", "--since", cut.isoformat())] == [3]
    assert [row["iteration"] for row in rows("iterations", "--until", f"{cut:%Y-%m-%dT%H:%M:%S.%f}")] == [1, 2]
    assert len(rows("iterations", "--job", job.name, "--since", "1h")) == 3
    assert rows("iterations", "--until", "1d") == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("failures", "--since", "yesterday"), "time 'yesterday': not a time; examples"),
        (("failures", "--json", "--csv"), "exclude each other"),
        (("plans", "--node", "n1"), "has no nodes"),
        (("plans", "local-1", "--job", "local-2"), "differ; name one"),
        (("plans", "local-7"), "local-7"),
        (("plans", "--ledger", "sqlite:///nowhere/x.db"), "no such file"),
        (("plans", "--parquet", "/nowhere/x.parquet"), "/nowhere/x.parquet: cannot be written"),
    ],
)
def test_history_refuses(job: Job, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        resihp("history", *arguments)


def test_unknown_table_names_the_known_ones(job: Job) -> None:
    result = resihp("history", "failure")
    assert result.exit_code == 2
    assert "reconfigurations" in result.stderr


def test_newest_job_without_a_name(job: Job) -> None:
    second = create_local_job()
    record_job(second, loss=1.5)
    assert json.loads(resihp("status", "--json").stdout)["job"] == second.name
    assert json.loads(resihp("status", job.name, "--json").stdout)["loss"] == 3.25


def test_job_without_ledger_and_journal() -> None:
    job = create_local_job()
    with pytest.raises(UsageError, match=f"job {job.name}: its ledger is not there yet"):
        resihp("status")


@pytest.mark.parametrize(("ended", "most"), [(True, 10), (False, 11)])
def test_status_reads_a_job_in_few_statements(tmp_path: Path, ended: bool, most: int) -> None:
    """It took 21, each with its own transaction: on a server, three round trips."""
    job = create_local_job()
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with Ledger.open(url, job.folder) as ledger:
        for record in record_job(job, ended=ended):
            ledger.submit(record)
    with Reader.open(url) as reader:
        row = reader.job(job.name)
        statements: list[str] = []

        def note(*arguments: object) -> None:
            statements.append(str(arguments[2]))

        event.listen(Engine, "before_cursor_execute", note)
        try:
            state = job_status(reader, row, folder=str(job.folder))
        finally:
            event.remove(Engine, "before_cursor_execute", note)
    assert state["iteration"] == 3
    queries = [statement for statement in statements if statement.startswith("SELECT")]
    assert 0 < len(queries) <= most, queries


def test_running_job_is_left_alone_and_a_dead_one_is_marked() -> None:
    job = create_local_job()
    with Ledger.open("sqlite", job.folder) as ledger:
        for record in record_job(job, ended=False):
            ledger.submit(record)
    job.set_ledger(ledger.url)
    lock = take_lock(job)
    assert lock is not None
    try:
        assert json.loads(resihp("status", "--json").stdout)["state"] == "running"
        assert json.loads(resihp("status", "--json").stdout)["health"]["1"] == "suspected"
        text = resihp("status").stdout
        assert f"job {job.name}  running" in text
    finally:
        os.close(lock)
    state = json.loads(resihp("status", "--json").stdout)
    assert state["state"] == "abnormal"
    assert state["reason"]
    # The hours until somebody looked do not count.
    assert state["wall_seconds"] == pytest.approx(4.5, abs=1e-3)


def test_watch_ends_with_the_job(job: Job) -> None:
    assert json.loads(resihp("status", "--watch", "--json").stdout)["state"] == "completed"
    assert resihp("status", "--watch").stdout.count("completed") >= 1


def test_ledger_option_reads_another_ledger(job: Job, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    with Ledger.open(url, tmp_path) as ledger:
        for record in journal_file.read(job.journal_file):
            ledger.submit(record)
    assert len(rows("iterations", job.name, "--ledger", url)) == 3
    with pytest.raises(UsageError, match=r"job nix: not in ledger .*shared.db, which holds local-1"):
        resihp("status", "nix", "--ledger", url)


def test_db_upgrade(job: Job, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    assert f"schema {head()}, created" in resihp("db", "upgrade", "--ledger", url).stderr
    assert f"schema {head()}, up to date" in resihp("db", "upgrade", "--ledger", url).stderr
    resihp("status")
    assert f"ledger.db: schema {head()}, up to date" in resihp("db", "upgrade").stderr


def test_newer_ledger_says_what_to_do(job: Job) -> None:
    resihp("status")
    connection = sqlite3.connect(job.folder / "ledger.db")
    with connection:
        connection.execute("UPDATE resihp_version SET version_num = '0999'")
        connection.execute("UPDATE compatibility SET min_reader = '0999', min_writer = '0999'")
    connection.close()
    with pytest.raises(UsageError, match=rf"schema 0999 is newer than {head()}.*upgrade resihp"):
        resihp("status")


def test_moment() -> None:
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert moment(None) is None
    assert moment("30m", now) == datetime(2026, 1, 31, 11, 30, tzinfo=UTC)
    assert moment("2026-01-31") == datetime(2026, 1, 31, tzinfo=UTC)
    assert moment("2026-01-31T12:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)


def test_the_command_line_does_not_load_databases_to_answer_help() -> None:
    heavy = ("sqlalchemy", "alembic", "pandas", "resihp.db")
    code = f"import sys, resihp.wrapper.cli; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "detector: warming up, nothing can be found yet"),
        ({"detector": "workload"}, "detector: judges each rank's own work"),
        ({"detector": "workload", "unwatched": "[4, 5]"}, "each rank's own work; not watched: ranks 4-5"),
        ({"detector": "plain times"}, "plain iteration times, no rank reports its chunks"),
        ({"detector": "workload", "configuration": '{"adapt": {"detect": false}}'}, "detector: off"),
    ],
)
def test_what_the_detector_sees_is_told(row: dict[str, Any], words: str) -> None:
    job = create_local_job()
    record_job(job, ended=False)
    url = f"sqlite:///{job.folder}/ledger.db"
    catch_up(url, job.folder, job.journal_file)
    with Reader.open(url) as reader:
        state = job_status(reader, {**reader.job(), **row})
    assert state["state"] == "running"
    assert words in " ".join(" ".join(lines_of(tables.render_status(state, 80))).split())


def test_a_job_that_committed_nothing_has_not_lost_nothing() -> None:
    figures = {"goodput": None, "ettr": None, "state": "failed", "epoch": 1, "lost_seconds": {"other": 3600.0}}
    assert tables.goodput_line(figures) == "goodput -, ETTR -; lost: all time, no iteration was committed"


def test_a_job_that_went_on_from_the_last_iteration_has_lost_nothing() -> None:
    job = create_local_job()
    records = record_job(job)
    declare = msgspec.structs.replace(DECLARE, iterations=60, resume_from=60)
    ended = journal.JobEnded(exit_code=0, state="completed", reason="done: 60 iterations")
    began = records[0].at
    job.journal_file.unlink()
    told = [(records[0].entry, began), (journal.ModelDeclared(declare=declare), began + 1), (ended, began + 2)]
    write_journal(job.journal_file, iter(told))
    job.exit_code_file.write_text("0\n")
    state = json.loads(resihp("status", job.name, "--json").stdout)
    assert (state["iteration"], state["target"], state["committed_iterations"]) == (60, 60, 0)
    shown = " ".join(resihp("status", job.name).stdout.split())
    assert "iteration 60 of 60" in shown
    assert "nothing was left to do: it resumed from a checkpoint of iteration 60" in shown
    assert "lost" not in shown
    assert (
        "nothing was left to do, as it resumed from the checkpoint of iteration 60"
        in resihp("report", job.name, "--markdown").stdout
    )
    figures = followed(job.records())
    assert figures.iteration == 60


@pytest.mark.parametrize(
    ("state", "exit_code", "how"),
    [("completed", 0, "and completed"), ("failed", 1, "and failed: rank 2 was killed")],
)
def test_what_a_script_without_a_trainer_has_lost_nobody_knows(state: Any, exit_code: int, how: str) -> None:
    """It said "iteration 0", "lost: all of it" and "until the first iteration 100 %" of a job of DDP that had trained
    for an hour."""
    job = create_local_job()
    began = job.read().created_at
    reason = "done" if state == "completed" else "rank 2 was killed"
    told = [(started(job.name), 0.0), (journal.JobEnded(exit_code=exit_code, state=state, reason=reason), 3600.0)]
    write_journal(job.journal_file, ((entry, began + at) for entry, at in told))
    job.exit_code_file.write_text(f"{exit_code}\n")
    shown = " ".join(resihp("status", job.name).stdout.split())
    assert "goodput and ETTR are unknown: no iteration is known; of a script without resihp.Trainer" in shown
    assert "lost" not in shown
    told_in_report = " ".join(resihp("report", job.name, "--markdown").stdout.split())
    assert f"took 1 h 00 min, {how}; no iteration is known" in told_in_report
    assert "committed no iteration" not in told_in_report
    assert "| - | - | - | 0 |" in told_in_report, "goodput, ETTR, lost, failures"
    cost = " ".join(resihp("history", "cost", job.name).stdout.split())
    assert "those that it prints ([progress] pattern): the use of time is unknown" in cost
    with pytest.raises(UsageError, match=f"iteration 20: no iteration of job {job.name} is known"):
        resihp("why", "20", job.name)


def test_a_script_that_has_not_said_yet_what_it_trains_has_lost_nothing_that_anybody_knows_of() -> None:
    figures = {"goodput": None, "ettr": None, "state": "running", "epoch": None, "lost_seconds": {"other": 3600.0}}
    assert "no iteration is known" in tables.goodput_line(figures)


def test_an_id_names_a_job_to_every_command_from_any_folder(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `history jobs` shows it, where several have one name."""
    [row] = rows("jobs")
    short = str(row["uuid"])[:8]
    assert short in resihp("history", "jobs").stdout
    (job.logs / "n1.rank0.log").write_text("the end\n")
    monkeypatch.setenv("RESIHP_HOME", str(job.home.parent / "another"))
    assert create_local_job().name == job.name
    for name in (f"{short}-" if short.isdigit() else short, str(row["uuid"])):
        assert json.loads(resihp("status", name, "--json").stdout)["folder"] == str(job.folder)
        assert resihp("logs", name, "--rank", "0").stdout == "the end\n"
        assert len(rows("failures", name)) == 1
    with pytest.raises(JobNotFoundError, match="job 0000000f: not in"):
        resihp("status", "0000000f")


def test_without_its_ledger_one_is_told_what_tells_of_a_job_all_the_same(job: Job) -> None:
    job.set_ledger("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    with pytest.raises(LedgerError) as refused:
        resihp("status", job.name)
    assert str(refused.value).splitlines()[-1] == f"without a ledger: resihp jobs, and resihp logs {job.name}"
    for command in ("jobs", "logs"):
        (job.logs / "n1.rank0.log").write_text("the end\n")
        assert resihp(command).stdout


@pytest.mark.parametrize(("slow_s", "told"), [(27.0, ", slow: 27.0 s of it"), (0.5, "")])
def test_goodput_of_slow_iterations_says_so(slow_s: float, told: str) -> None:
    """They count in full, for their work was done: 99 % alone would say that all is well at 3 a.m."""
    figures = {"goodput": 0.99, "ettr": 0.95, "slow_seconds": slow_s, "wall_seconds": 61.0, "lost_seconds": {}}
    assert tables.goodput_line(figures) == f"goodput 99.0 %{told}, ETTR 95.0 %; lost: nothing"
