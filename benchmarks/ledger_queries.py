"""How long the ledger's answers take: 10 million iterations, 100,000 failures and 4,000 nodes in 1,981 jobs.

    python -m benchmarks.ledger_queries [--only sqlite|postgresql] [--share 0.01] [--keep FOLDER]

Builds such a ledger on SQLite and on a private PostgreSQL (tests/db/postgres.py), one after the other, in a temporary
folder that it removes: 4 GB at most. One job has 100,000 iterations, 1,000 failures and 64 nodes; the others 5,000, 50
and 16. Then asks what every `resihp history` view, `why`, `status` and the report of that job ask: first on a
connection just opened, then three times more, of which the best counts. Prints a table; fails if anything takes longer
than 1 s on PostgreSQL or 2 s on SQLite. `--keep` leaves the SQLite file there, and uses one that is there already.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Connection

from resihp.db import migrate
from resihp.db.engine import make_engine, resolve
from resihp.db.reading import fleet, queries
from resihp.db.reading.costs import fleet_costs
from resihp.db.reading.iterations.newest import newest_iterations
from resihp.db.reading.plans import plan_rows
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import TABLES, Row

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMIT_S = {"sqlite": 2.0, "postgresql": 1.0}
NODES, JOBS, DEVICES = 4000, 1981, 8
AGAIN = 3
"""Times that each question is asked again: the best counts."""
BEGAN = datetime.now(UTC).replace(microsecond=0) - timedelta(days=90)
ITERATION_S = 2.1


def layout(nodes: int) -> str:
    """DP x PP4 x TP8 of all devices."""
    stages = [
        [{"ranks": list(range(DEVICES * (4 * d + s), DEVICES * (4 * d + s + 1))), "layers": [10 * s, 10 * s + 9]}
         for s in range(4)]
        for d in range(nodes // 4)
    ]  # fmt: skip
    return json.dumps({"replicas": stages, "standby": []}, separators=(",", ":"))


def build(connection: Connection, share: float) -> dict[str, int]:
    """Fill an empty ledger; `share` of the full size. All in SQL, the same on both databases. Returns rows by table."""
    lite = connection.dialect.name == "sqlite"

    def at(start: str, seconds: str) -> str:
        """SQL of the time `seconds` after `start`, as the ledger keeps times."""
        if lite:
            return f"strftime('%Y-%m-%d %H:%M:%f000', {start}, '+' || ({seconds}) || ' seconds')"
        return f"({start} + ({seconds}) * interval '1 second')"

    cursor = connection.connection.cursor()  # its % is a modulo, not a placeholder

    def run(sql: str) -> None:
        cursor.execute(sql)

    true = "1" if lite else "true"
    false = "0" if lite else "false"
    real = "REAL" if lite else "double precision"
    big, small = max(int(100_000 * share), 200), max(int(5_000 * share), 20)
    stamp = "TEXT" if lite else "timestamptz"
    run("CREATE TABLE numbers (i INTEGER PRIMARY KEY)")
    run(
        f"INSERT INTO numbers WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {big}) "
        "SELECT i FROM n"
    )
    run(f"CREATE TABLE sizes (job INTEGER PRIMARY KEY, n INTEGER, gap INTEGER, nodes INTEGER, began {stamp})")
    began = BEGAN.strftime("%Y-%m-%d %H:%M:%S.000000") + ("" if lite else "+00")
    start = f"'{began}'" if lite else f"timestamptz '{began}'"
    run(
        f"INSERT INTO sizes SELECT i, CASE i WHEN 1 THEN {big} ELSE {small} END, "
        f"CASE i WHEN 1 THEN {max(big // 1000, 1)} ELSE {max(small // 50, 1)} END, CASE i WHEN 1 THEN 64 ELSE 16 END, "
        f"{at(start, 'i * 3000.0')} FROM numbers WHERE i <= {min(JOBS, big)}"
    )
    over = at("began", f"30 + n * {ITERATION_S}")
    run(
        "INSERT INTO jobs (id, uuid, name, host, owner, command, nodes, gpus_per_node, tp, pp, schedule, "
        "restart_count, version, configuration, state, exit_code, reason, started_at, ended_at, last_entry_at, "
        "journal_seq, telemetry_dropped, model) "
        f"SELECT job, 'u' || job, 'job-' || job, 'head', 'me', '[]', nodes, {DEVICES}, 8, 4, '1f1b', 0, '0.1.0', "
        f"'{{}}', 'completed', 0, 'done', began, {over}, {over}, 1, 0, NULL FROM sizes"
    )
    node = f"'n' || (1 + (s.job * 16 + m.i) % {NODES})"
    run(
        "INSERT INTO nodes (job_id, node, host, devices, joined_at) "
        f"SELECT s.job, {node}, 'h' || m.i, {DEVICES}, s.began FROM sizes s JOIN numbers m ON m.i <= s.nodes"
    )
    run(
        "INSERT INTO workers (job_id, rank, node, device, pid, epoch_joined, started_at) "
        f"SELECT s.job, {DEVICES} * (m.i - 1) + d.i - 1, {node}, d.i - 1, d.i, 0, s.began "
        f"FROM sizes s JOIN numbers m ON m.i <= s.nodes JOIN numbers d ON d.i <= {DEVICES}"
    )
    begun = at("s.began", f"20 + k.i * s.gap * {ITERATION_S}")
    changes = "FROM sizes s JOIN numbers k ON k.i * s.gap <= s.n"
    for which, of in (("s.job = 1", 64), ("s.job > 1", 16)):
        run(
            "INSERT INTO plans (job_id, epoch, action, next_iteration, description, replicas, active, standby, "
            "schedule, reason, decided_at, layout, assignment, digest, in_effect_at, predicted, present) "
            "SELECT s.job, k.i, CASE k.i WHEN 1 THEN 'start' ELSE 'redo' END, (k.i - 1) * s.gap + 1, "
            f"'DP x PP4 x TP8', 4, {of * DEVICES} - 8 * (k.i % 2), 8 * (k.i % 2), '1f1b', 'rank lost', {begun}, "
            f"'{layout(of)}', '[]', '{'0' * 64}', {begun}, 100.0 + k.i % 3, 100.0 {changes} AND {which}"
        )
    print("  iterations ...", file=sys.stderr)
    run(
        "INSERT INTO iterations (job_id, iteration, epoch, seconds, predicted_seconds, tokens, sum_squared_lengths, "
        "samples, samples_digest, loss, finished_at, gradient_norm, learning_rate, skipped) "
        "SELECT s.job, i.i, 1 + (i.i - 1) / s.gap, CAST(2.0 + (i.i * 7919 % 1000) * 0.0001 AS " + real + "), 2.05, "
        f"4194304, 34359738368, 512, '00ff00ff00ff00ff', 2.5, {at('s.began', f'20 + i.i * {ITERATION_S}')}, "
        f"1.0, 0.0003, {false} FROM sizes s JOIN numbers i ON i.i <= s.n"
    )
    noticed = at("s.began", f"20 + k.i * s.gap * {ITERATION_S} + 0.5")
    run(
        "INSERT INTO reconfigurations (job_id, epoch, action, attempts, seconds, park_seconds, plan_seconds, "
        "groups_seconds, state_seconds, first_iteration_seconds, finished_at) "
        "SELECT s.job, k.i, 'redo', 1, 2.09, 0.01, 0.01, 0.01, 0.01, 2.05, "
        f"{at('s.began', f'20 + ((k.i - 1) * s.gap + 1) * {ITERATION_S}')} {changes} AND k.i > 1"
    )
    which_node = f"'n' || (1 + (s.job * 16 + 1 + k.i * 7 % s.nodes) % {NODES})"
    run(
        "INSERT INTO failures (job_id, failure, kind, component, cause, ranks, node, device, iteration, epoch, "
        "noticed_at, recovered_epoch, evidence, speed, confidence, ended_iteration, ended_at) "
        "SELECT s.job, k.i, CASE k.i % 5 WHEN 0 THEN 'fail-slow' ELSE 'fail-stop' END, "
        "CASE k.i % 4 WHEN 0 THEN 'device' ELSE 'process' END, 'rank ' || k.i || ' killed by signal 9 (SIGKILL)', "
        f"'[' || k.i || ']', {which_node}, k.i % 8, k.i * s.gap, k.i + 1, {noticed}, "
        "CASE WHEN (k.i + 1) * s.gap <= s.n THEN k.i + 1 END, 'pid 1: killed', "
        "CASE k.i % 5 WHEN 0 THEN 0.5 END, CASE k.i % 5 WHEN 0 THEN 0.99 END, "
        f"CASE k.i % 5 WHEN 0 THEN k.i * s.gap + 40 END, CASE k.i % 5 WHEN 0 THEN {noticed} END {changes}"
    )
    for number, kind in enumerate(("NodeLost", "FailureFound", "PlanDecided", "Reconfigured", "PlanInEffect")):
        run(
            "INSERT INTO events (job_id, seq, at, kind, text, iteration, epoch, rank, node) "
            f"SELECT s.job, k.i * 10 + {number}, {noticed}, '{kind}', 'rank 5 (n2 device 1) killed by signal 9', "
            f"k.i * s.gap, k.i, 5, {which_node} {changes}"
        )
    run(
        "INSERT INTO events (job_id, seq, at, kind, text, iteration) SELECT s.job, k.i * 10 + 9, "
        f"{noticed}, 'CheckpointCommitted', 'checkpoint', k.i * s.gap {changes} AND k.i % 2 = 0"
    )
    run(
        "INSERT INTO drains (job_id, drain, node, failure, step, outcome, reason, drained_at, answers) SELECT s.job, "
        f"k.i, {which_node}, k.i, 'slurm', 'done', 'lost rank', {noticed}, '[]' {changes} AND k.i % 20 = 0"
    )
    run(
        "INSERT INTO replacements (job_id, replacement, instead, outcome, reason, text, asked_at, excluded) SELECT "
        f"s.job, k.i, {which_node}, 'joined', 'lost rank', '', {noticed}, '[]' {changes} AND k.i % 20 = 0"
    )
    run(
        "INSERT INTO probes (job_id, probe, occasion, kind, rank, node, device, flops, memory_bytes, speed, passed, "
        f"evidence, measured_at, hardware) SELECT s.job, 1, 'start', 'device', {DEVICES} * (m.i - 1) + d.i - 1, "
        f"{node}, d.i - 1, 3e14, 1e12, 1.0, {true}, 'as fast as its peers', s.began, 'A100' "
        f"FROM sizes s JOIN numbers m ON m.i <= s.nodes JOIN numbers d ON d.i <= {DEVICES}"
    )
    for job in (1, 2):  # the others are like the second
        account = Reader.within(connection).settled(job)
        run(f"UPDATE jobs SET account = '{account}' WHERE id {'=' if job == 1 else '>='} {job}")
    run("DROP TABLE numbers")
    run("DROP TABLE sizes")
    return {
        name: int(connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar() or 0)
        for name in ("jobs", "nodes", "workers", "plans", "iterations", "reconfigurations", "failures", "events")
    }


def questions(job: Row, nodes: list[str]) -> dict[str, Callable[[Reader], object]]:
    """By the words of the command: what it asks."""
    id, month = job["id"], datetime.now(UTC) - timedelta(days=30)
    asked: dict[str, Callable[[Reader], object]] = {}
    for name in TABLES:
        asked[f"{name} JOB, on a terminal"] = lambda r, name=name: r.rows(name, id, last=50)  # type: ignore[misc]
        asked[f"{name} JOB --json"] = lambda r, name=name: r.rows(name, id)  # type: ignore[misc]
        asked[f"{name} --all, on a terminal"] = (
            (lambda r: newest_iterations(r, 50))
            if name == "iterations"
            else lambda r, name=name: r.rows(name, None, last=50)  # type: ignore[misc]
        )
        if "node" in TABLES[name].source.c:
            asked[f"{name} --all --node N"] = lambda r, name=name: r.rows(name, None, node=nodes[0])  # type: ignore[misc]
    asked["failures --all --since 30d --json"] = lambda r: r.rows("failures", None, since=month)
    asked["iterations JOB --since 30d --json"] = lambda r: r.rows("iterations", id, since=month)
    for by in ("node", "component", "cause", "kind", "job"):
        asked[f"failures JOB --by {by}"] = lambda r, by=by: fleet.joined(by, fleet.failures_by(r, by, id))  # type: ignore[misc]
        asked[f"failures --all --by {by}"] = lambda r, by=by: fleet.joined(by, fleet.failures_by(r, by))  # type: ignore[misc]
    asked["failures --all --by node --since 30d"] = lambda r: fleet.joined(
        "node", fleet.failures_by(r, "node", since=month)
    )
    asked["cost JOB"] = lambda r: r.account(job)
    asked["cost --all"] = lambda r: fleet_costs.cost_rows([one for _, one in fleet_costs.accounts(r)])
    asked["promises JOB"] = lambda r: plan_rows.promises_rows(r, id)
    asked["lemons"] = lambda r: queries.lemons(r)
    asked["why 37 JOB"] = lambda r: queries.why(r, job, min(37, 100))
    asked["status JOB: summary"] = lambda r: r.summary(id)
    asked["status JOB: plan"] = lambda r: r.shown_plan(id)
    asked["status JOB: events"] = lambda r: r.events(id, ("FailureFound", "PlanDecided"), 50)
    asked["job by name"] = lambda r: r.job("job-1")
    asked["newest job"] = lambda r: r.job()
    asked["jobs"] = lambda r: r.jobs()
    asked["nodes' names"] = lambda r: r.nodes(None)
    return asked


def measure(url: str) -> list[tuple[str, float, float, int]]:
    """(question, seconds first, seconds again, rows)."""
    with Reader.open(url) as reader:
        job, nodes = reader.job("job-1"), reader.nodes(None)
    found = []
    for words, ask in questions(job, nodes).items():
        with Reader.open(url) as reader:
            times = []
            for _ in range(1 + AGAIN):
                began = time.perf_counter()
                answer = ask(reader)
                times.append(time.perf_counter() - began)
        found.append((words, times[0], min(times[1:]), len(answer) if isinstance(answer, list) else 1))
        print(f"  {words}: {times[0]:.3f} s, {min(times[1:]):.3f} s", file=sys.stderr)
    return found


@contextlib.contextmanager
def databases(only: str | None, keep: Path | None) -> Iterator[Iterator[str]]:
    """URLs of ledgers to build, each gone when the next is asked for."""

    def urls() -> Iterator[str]:
        if only != "postgresql":
            with tempfile.TemporaryDirectory(prefix="resihp-queries-") as folder:
                yield f"sqlite:///{(keep or Path(folder)) / 'ledger.db'}"
        if only != "sqlite":
            from tests.db.postgres import FAST, Server, missing

            if why := missing():
                print(f"PostgreSQL left out: {why}", file=sys.stderr)
                return
            with Server(f"{FAST} -c shared_buffers=512MB -c max_wal_size=1GB") as server:
                yield server.new_database()

    yield urls()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("sqlite", "postgresql"))
    parser.add_argument("--share", type=float, default=1.0, help="of the full size")
    parser.add_argument("--keep", type=Path, help="folder that keeps the SQLite file")
    given = parser.parse_args()
    late = 0
    with databases(given.only, given.keep) as urls:
        for url in urls:
            backend = resolve(url).get_backend_name()
            if not (given.keep and backend == "sqlite" and (given.keep / "ledger.db").exists()):
                began = time.perf_counter()
                migrate.upgrade(url)
                engine = make_engine(resolve(url), write=True)
                with engine.begin() as connection:
                    if backend == "sqlite":
                        connection.exec_driver_sql("PRAGMA cache_size=-500000")
                    counts = build(connection, given.share)
                with engine.connect() as connection:
                    if backend == "postgresql":
                        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("VACUUM ANALYZE")
                    else:
                        connection.exec_driver_sql("ANALYZE")
                        connection.commit()
                engine.dispose()
                print(f"{backend}: {counts}, built in {time.perf_counter() - began:.0f} s", file=sys.stderr)
            print(
                f"{backend}, at most {LIMIT_S[backend]:.0f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
            )
            print(f"{'question':44} {'rows':>8} {'first s':>8} {'again s':>8}")
            for words, first, again, rows in sorted(measure(url), key=lambda one: -max(one[1:3])):
                over = max(first, again) > LIMIT_S[backend]
                late += over
                print(f"{words:44} {rows:8,} {first:8.3f} {again:8.3f}{'  TOO LONG' if over else ''}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
