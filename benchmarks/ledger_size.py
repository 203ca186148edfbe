"""What a job of many ranks takes in a PostgreSQL ledger in a day, each rank's report kept and condensed.

    python -m benchmarks.ledger_size [--ranks 16384] [--whole 60] [--iterations 400] [--findings 3] [--json FILE]

A synthetic job: each rank reports an iteration's time and its own work's; stages differ by a tenth, times scatter by
half a per cent, one rank becomes 20 % slower in mid-run, which is found. `every report`: `--whole` iterations as the
job's writer put them in before it condensed. `condensed`: `--iterations` through the writer as it is, with and without
a finding in the middle. Bytes are `pg_total_relation_size` of rank_reports and rank_quantiles, indexes included, after
VACUUM; a day is 8,640 iterations, and `--findings` findings in a job that has them. PostgreSQL is a private one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ledger_ingest import begin
from resihp.db.engine import make_engine, resolve
from resihp.db.telemetry import queue as telemetry_queue
from resihp.db.telemetry.report_rows import Report
from resihp.db.writer import Ledger
from resihp.record import journal
from tests.db.postgres import FAST, Server

A_DAY = 8640
STAGES = 16
TABLES = ("rank_reports", "rank_quantiles")


def reports(ranks: int, iterations: int, slow_from: int | None) -> Iterator[list[Report]]:
    random = np.random.default_rng(7)
    work = 8.0 * (1.0 + np.arange(ranks) % STAGES / (10 * STAGES))
    for number in range(1, iterations + 1):
        compute = work * random.normal(1.0, 0.005, ranks)
        if slow_from is not None and number >= slow_from:
            compute[ranks // 3] *= 1.2
        whole = float(compute.max()) * 1.1 + random.normal(0, 1e-3, ranks)
        yield list(zip([number] * ranks, [1] * ranks, range(ranks), whole.tolist(), compute.tolist(), strict=True))


def written(url: str, ranks: int, iterations: int, *, finding: bool) -> dict[str, int]:
    """Bytes of each table after a job of its own."""
    middle = iterations // 2
    with Ledger.open(url, Path("/"), telemetry_rows=4 * ranks) as ledger:
        ledger.submit(begin("size", max(ranks // 8, 1)))
        for number, rows in enumerate(reports(ranks, iterations, middle if finding else None), 1):
            ledger.telemetry(rows)
            assert ledger.flush(600)
            if finding and number == middle + 5:
                suspected = journal.Suspected(rank=ranks // 3, node="n1", evidence="", kind="slow", suspicion=1)
                ledger.submit(journal.Record(2, 1_750_000_100.0, suspected))
        assert ledger.close(600)
        assert ledger.dropped == 0
    return sizes(url)


def sizes(url: str) -> dict[str, int]:
    engine = make_engine(resolve(url), write=False).execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE")
        found = {
            table: int(connection.exec_driver_sql(f"SELECT pg_total_relation_size('{table}')").scalar_one())
            for table in TABLES
        }
        found["rows"] = int(connection.exec_driver_sql("SELECT count(*) FROM rank_reports").scalar_one())
    engine.dispose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--whole", type=int, default=60, help="iterations of which every report is kept")
    parser.add_argument("--iterations", type=int, default=400, help="iterations that are condensed")
    parser.add_argument("--findings", type=int, default=3, help="a day")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    runs: dict[str, tuple[int, dict[str, int]]] = {}
    with Server(FAST) as server:
        most, telemetry_queue.RANKS_KEPT_WHOLE = telemetry_queue.RANKS_KEPT_WHOLE, given.ranks
        runs["every report"] = (given.whole, written(server.new_database(), given.ranks, given.whole, finding=False))
        telemetry_queue.RANKS_KEPT_WHOLE = most
        for name, finding in (("condensed", False), ("condensed, a finding", True)):
            url = server.new_database()
            runs[name] = (given.iterations, written(url, given.ranks, given.iterations, finding=finding))
    table = Table(title=f"{given.ranks:,} ranks in PostgreSQL; a day is {A_DAY:,} iterations")
    for column in ("", "iterations", "rows of ranks", "reports MB", "quantiles MB", "GB a day"):
        table.add_column(column, justify="right")
    found: list[dict[str, Any]] = []
    for name, (iterations, size) in runs.items():
        total = sum(size[each] for each in TABLES)
        if name == "condensed, a finding":
            of_one = total - found[-1]["bytes"]
            a_day = found[-1]["bytes_a_day"] + given.findings * of_one
            name = f"condensed, {given.findings} findings a day of {of_one / 1e6:.0f} MB"
        else:
            a_day = total * A_DAY / iterations
        megabytes = [f"{size[each] / 1e6:,.1f}" for each in TABLES]
        table.add_row(name, f"{iterations:,}", f"{size['rows']:,}", *megabytes, f"{a_day / 1e9:.2f}")
        found.append({"run": name, "iterations": iterations, "bytes": total, "bytes_a_day": a_day, **size})
    Console(width=120).print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
