"""The ledger's writer against the bare drivers, and against what databases do in mid-run.

    python -m benchmarks.ledger_ingest [reports|sustained|records|durability] [--rounds 5] [--json FILE]

`reports`: rank reports a second, from `Ledger.telemetry` to the commit, beside the bare driver's bulk insert of the
same rows into the same table: executemany on SQLite, COPY on PostgreSQL. `sustained`: 16,384 ranks that report every
5 s, handed over as the supervisor does; processor time of the writer's process, conversion included. `records`: journal
records a second. `durability`: `tests/db/test_durability.py` with 200 moments, and a database locked for 60 s.
PostgreSQL is a private one with its durability on, started here.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from resihp.db.engine import file_of, make_engine, resolve
from resihp.db.telemetry import report_rows
from resihp.db.telemetry.condensed import MAX_OPEN_ITERATIONS
from resihp.db.writer import Ledger
from resihp.protocol.messages import StepOutcome
from resihp.record import journal

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.db.postgres import Server

Row = tuple[int, int, int, int, float, float]
RANKS, EVERY_S = 16_384, 5.0
DURABLE = "-c fsync=on"
BEGAN = 1_750_000_000.0
BARE_COLUMNS = "(job_id, iteration, epoch, rank, seconds, compute_seconds)"
LIMITS = {"reports": 0.5, "sustained": 0.25}


def begin(name: str, nodes: int = 2048) -> journal.Record:
    entry = journal.JobStarted(
        job=name,
        command=("python", "train.py"),
        nodes=nodes,
        gpus_per_node=8,
        tp=8,
        pp=16,
        schedule="1f1b",
        host="bench",
        user="bench",
        restart_count=0,
        version="bench",
        configuration={},
    )
    return journal.Record(1, BEGAN, entry)


def committed(seq: int) -> journal.Record:
    outcome = StepOutcome(
        iteration=seq - 1,
        clip=1.0,
        skip=False,
        learning_rate=1e-4,
        gradient_norm=2.0,
        loss=3.5,
        tokens=1 << 22,
        sum_squared_lengths=1 << 44,
        samples=1024,
        samples_digest="00ff00ff00ff00ff",
    )
    return journal.Record(
        seq, BEGAN + seq, journal.IterationCommitted(epoch=1, outcome=outcome, seconds=1.0, predicted_seconds=1.01)
    )


def reports(iteration: int, ranks: int = RANKS) -> list[dict[str, Any]]:
    """As the supervisor makes them of what ranks say."""
    return [
        {"iteration": iteration, "epoch": 1, "rank": rank, "seconds": 1.0 + rank * 1e-6, "compute_seconds": 0.9}
        for rank in range(ranks)
    ]


# --- reports --------------------------------------------------------------------------------------------------------


def ours(url: str, iterations: int) -> float:
    """Seconds from handing over to committed."""
    with Ledger.open(url, Path("/"), telemetry_rows=RANKS * iterations) as ledger:
        ledger.submit(begin("ours", 128))  # of more ranks not all reports are written
        assert ledger.flush(60)
        rows = [reports(i) for i in range(1, iterations + 1)]
        began = time.perf_counter()
        for each in rows:
            ledger.telemetry(each)
        assert ledger.flush(600)
        spent = time.perf_counter() - began
        assert ledger.dropped == 0
    assert count(url) == RANKS * iterations
    return spent


def bare(url: str, iterations: int) -> float:
    """The driver alone, in transactions of as many rows as the writer's."""
    Ledger.open(url, Path("/")).close()
    with Ledger.open(url, Path("/")) as ledger:  # the same table, with a job to refer to
        ledger.submit(begin("bare"))
        assert ledger.flush(60)
    rows: list[Row] = [
        (1, i, 1, rank, 1.0 + rank * 1e-6, 0.9) for i in range(1, iterations + 1) for rank in range(RANKS)
    ]
    file = file_of(resolve(url))
    began = time.perf_counter()
    if file is not None:
        lite = sqlite3.connect(file, isolation_level=None)
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            lite.execute(f"PRAGMA {pragma}")
        for at in range(0, len(rows), RANKS):
            lite.execute("BEGIN IMMEDIATE")
            lite.executemany(f"INSERT INTO rank_reports {BARE_COLUMNS} VALUES (?,?,?,?,?,?)", rows[at : at + RANKS])
            lite.execute("COMMIT")
        lite.close()
    else:
        import psycopg

        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as post:
            for at in range(0, len(rows), RANKS):
                with (
                    post.transaction(),
                    post.cursor() as cursor,
                    cursor.copy(f"COPY rank_reports {BARE_COLUMNS} FROM STDIN") as copy,
                ):
                    for row in rows[at : at + RANKS]:
                        copy.write_row(row)
    spent = time.perf_counter() - began
    assert count(url) == RANKS * iterations
    return spent


def count(url: str) -> int:
    engine = make_engine(resolve(url), write=False)
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT COUNT(*) FROM rank_reports").scalar_one()
    engine.dispose()
    return int(found)


def compare_reports(console: Console, databases: dict[str, Callable[[], str]], rounds: int) -> list[dict[str, Any]]:
    iterations = 20
    rows = RANKS * iterations
    table = Table(title=f"{rows:,} rank reports into the ledger, rows/s, medians of {rounds} interleaved rounds")
    for name in ("database", "bare driver", "the writer", "ratio", "at least"):
        table.add_column(name, justify="right")
    found = []
    for database, new in databases.items():
        spent: dict[str, list[float]] = {"bare": [], "ours": []}
        for _ in range(rounds):
            spent["bare"].append(bare(new(), iterations))
            spent["ours"].append(ours(new(), iterations))
        medians = {name: rows / statistics.median(times) for name, times in spent.items()}
        ratio = medians["ours"] / medians["bare"]
        table.add_row(
            database, f"{medians['bare']:,.0f}", f"{medians['ours']:,.0f}", f"{ratio:.2f}", f"{LIMITS['reports']}"
        )
        found.append({"database": database, "bare_rows_s": medians["bare"], "rows_s": medians["ours"], "ratio": ratio})
    console.print(table)
    return found


# --- sustained ------------------------------------------------------------------------------------------------------


def sustain(console: Console, databases: dict[str, Callable[[], str]], rounds: int) -> list[dict[str, Any]]:
    """The reports arrive spread over the 5 s, and are handed over at every tick of the supervisor (0.1 s); for twice as
    long as an iteration waits to be condensed."""
    rounds = max(rounds, 2 * MAX_OPEN_ITERATIONS)
    table = Table(title=f"{RANKS:,} ranks that report every {EVERY_S:g} s, for {rounds * EVERY_S:g} s")
    for name in ("database", "rows/s", "a core's share", "at most", "dropped", "behind at the end"):
        table.add_column(name, justify="right")
    found = []
    ticks = round(EVERY_S / 0.1)
    for database, new in databases.items():
        with Ledger.open(new(), Path("/")) as ledger:
            ledger.submit(begin("sustained"))
            assert ledger.flush(60)
            made = [reports(i) for i in range(1, rounds + 1)]
            cpu, began = time.process_time(), time.perf_counter()
            for i, rows in enumerate(made):
                for tick in range(ticks):
                    due = began + i * EVERY_S + (tick + 1) * EVERY_S / ticks
                    time.sleep(max(due - time.perf_counter(), 0.0))
                    ledger.telemetry(rows[tick * RANKS // ticks : (tick + 1) * RANKS // ticks])
            last = time.perf_counter()
            assert ledger.flush(60)
            ended = time.perf_counter()
            share = (time.process_time() - cpu) / (ended - began)
            rate = RANKS * rounds / (ended - began)
            table.add_row(
                database,
                f"{rate:,.0f}",
                f"{share:.1%}",
                f"{LIMITS['sustained']:.0%}",
                str(ledger.dropped),
                f"{ended - last:.2f} s",
            )
            found.append({"database": database, "rows_s": rate, "core_share": share, "dropped": ledger.dropped})
    console.print(table)
    return found


# --- records --------------------------------------------------------------------------------------------------------


def project_records(console: Console, databases: dict[str, Callable[[], str]], rounds: int) -> list[dict[str, Any]]:
    many = 20_000
    table = Table(title=f"{many:,} journal records (committed iterations) into the ledger, median of {rounds}")
    for name in ("database", "records/s"):
        table.add_column(name, justify="right")
    found = []
    records = [begin("records"), *(committed(seq) for seq in range(2, many + 1))]
    for database, new in databases.items():
        spent = []
        for _ in range(rounds):
            with Ledger.open(new(), Path("/")) as ledger:
                began = time.perf_counter()
                for record in records:
                    ledger.submit(record)
                assert ledger.flush(600)
                spent.append(time.perf_counter() - began)
        rate = many / statistics.median(spent)
        table.add_row(database, f"{rate:,.0f}")
        found.append({"database": database, "records_s": rate})
    console.print(table)
    return found


def durability(console: Console, databases: dict[str, Callable[[], str]], rounds: int) -> list[dict[str, Any]]:
    began = time.perf_counter()
    tests = Path(__file__).parents[1] / "tests" / "db" / "test_durability.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "soak or not soak", "--timeout", "3600", str(tests)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    console.print(done.stdout.strip().splitlines()[-1])
    if done.returncode:
        console.print(done.stdout)
    return [{"passed": done.returncode == 0, "seconds": time.perf_counter() - began}]


# --- the databases --------------------------------------------------------------------------------------------------


@contextmanager
def both() -> Iterator[dict[str, Callable[[], str]]]:
    with tempfile.TemporaryDirectory(prefix="resihp-ledger-") as folder, Server(DURABLE) as server:
        made = iter(range(10**6))
        yield {
            "SQLite": lambda: f"sqlite:///{folder}/{next(made)}.db",
            "PostgreSQL": server.new_database,
        }


def main() -> None:
    parts = {"reports": compare_reports, "sustained": sustain, "records": project_records, "durability": durability}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", nargs="?", choices=sorted(parts))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    console = Console()
    found: dict[str, Any] = {"statement_rows": report_rows.ROWS_IN_STATEMENT}
    with both() as databases:
        for name, part in parts.items():
            if asked.part in (None, name):
                found[name] = part(console, databases, asked.rounds)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
