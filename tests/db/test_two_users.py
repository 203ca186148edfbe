"""A PostgreSQL that two users share: each writes jobs of his own, reads all, and changes nothing of the other's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

from resihp.db import migrate
from resihp.db.engine import make_engine, resolve
from resihp.db.exchange import export, import_from
from resihp.db.grants import DASHBOARD_VIEWS, statements
from resihp.db.maintenance import record
from resihp.db.models import LedgerTable
from resihp.db.reading import fleet, naming
from resihp.db.reading.costs import fleet_costs
from resihp.db.reading.hardware import maintenance_rows
from resihp.db.reading.health import nodes_by_health, usual_speeds
from resihp.db.reading.rates import repairs
from resihp.db.reading.reader import TRUSTED_ROLE, Reader
from resihp.db.retention import prune
from resihp.db.settling import settle
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import LedgerError, UsageError
from resihp.record import journal, journal_file
from resihp.wrapper.cli import app
from resihp.wrapper.job_folder import create_local_job, id_of, write_private
from tests.db.conftest import BEGAN, Listener, started, story, write_journal
from tests.db.exports import sealed, set_column
from tests.db.later_schema import add_later_schema
from tests.db.postgres import Server
from tests.db.test_migrate import execute

JOBS = 5
MINE, THEIRS, BOARD, ADMIN = "alice", 'mallory "the" role', "board's $$ :x", "ledger_admin"
"""A role may be called anything."""
Told = Iterator[tuple[journal.AnyEntry, float]]


@dataclass(frozen=True)
class Shared:
    """The same ledger, for its owner, and as two users reach it."""

    owner: str
    alice: str
    mallory: str
    board: str
    """Of one who only reads."""
    admin: str
    """Of one who may own the tables, and does not yet."""
    name: str

    def trust(self, role: str) -> None:
        as_psql(self.owner, *statements(role, self.name, trusted=True))


@pytest.fixture
def shared(postgres_server: Server) -> Iterator[Shared]:
    """An administrator has made the ledger, and granted what `resihp db grant` says."""
    url = postgres_server.new_database()
    name = url.partition("?")[0].rpartition("/")[2]
    migrate.upgrade(url)
    urls = {}
    for role, kind in ((MINE, "writer"), (THEIRS, "writer"), (BOARD, "reader"), (ADMIN, None)):
        as_psql(url, f"DROP ROLE IF EXISTS {quoted(role)}", f"CREATE ROLE {quoted(role)} LOGIN")
        if kind is not None:
            as_psql(url, *statements(role, name, kind=kind))
        urls[role] = resolve(url).set(username=role).render_as_string(hide_password=False)
    yield Shared(url, urls[MINE], urls[THEIRS], urls[BOARD], urls[ADMIN], name)
    postgres_server.drop_database(url)
    for role in (MINE, THEIRS, BOARD, ADMIN, TRUSTED_ROLE):
        as_psql(postgres_server.url("postgres"), f"DROP ROLE IF EXISTS {quoted(role)}")


def quoted(role: str) -> str:
    return '"{}"'.format(role.replace('"', '""'))


def as_psql(url: str, *lines: str) -> None:
    """Runs them as they stand, in one transaction."""
    engine = make_engine(resolve(url), write=True)
    with engine.begin() as connection:
        for line in lines:
            connection.exec_driver_sql(line, execution_options={"no_parameters": True})
    engine.dispose()


def written(url: str, folder: Path, name: str = "local-1", told: Told | None = None) -> Path:
    """A job's journal, that its user has written into the ledger."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.journal"
    entries = [
        (msgspec.structs.replace(entry, job=name) if isinstance(entry, journal.JobStarted) else entry, at)
        for entry, at in (told or story())
    ]
    write_journal(path, iter(entries))
    catch_up(url, folder, path)
    return path


def rows(url: str) -> dict[str, int]:
    engine = make_engine(resolve(url), write=False)
    with engine.connect() as connection:
        found = {
            table: connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
            for table in LedgerTable.metadata.tables
        }
    engine.dispose()
    return found


def writers(url: str) -> dict[str, str]:
    engine = make_engine(resolve(url), write=False)
    with engine.connect() as connection:
        found = {name: writer for name, writer in connection.execute(text("SELECT name, written_by FROM jobs"))}
    engine.dispose()
    return found


def test_the_database_says_who_wrote_and_everybody_reads(shared: Shared, tmp_path: Path) -> None:
    written(shared.alice, tmp_path, "hers")
    written(shared.mallory, tmp_path, "his")
    assert writers(shared.alice) == writers(shared.mallory) == {"hers": MINE, "his": THEIRS}
    for url in (shared.alice, shared.mallory):
        with Reader.open(url) as reader:
            assert len(reader.rows("iterations", reader.job("hers")["id"])) == 20
            assert {job["name"] for job in reader.jobs()} == {"hers", "his"}


def test_nobody_writes_in_anothers_name(shared: Shared, tmp_path: Path) -> None:
    written(shared.mallory, tmp_path, "his")
    with pytest.raises(DBAPIError, match="row-level security"):
        execute(shared.mallory, f"UPDATE jobs SET written_by = '{MINE}'")
    columns = [column.name for column in LedgerTable.metadata.tables["jobs"].columns if column.name != "id"]
    taken = ", ".join({"uuid": "'other'", "written_by": f"'{MINE}'"}.get(name, name) for name in columns)
    with pytest.raises(DBAPIError, match="row-level security"):
        execute(shared.mallory, f"INSERT INTO jobs ({', '.join(columns)}) SELECT {taken} FROM jobs")


REPAIRED = (
    "INSERT INTO maintenance (cluster, node, kind, text, at, recorded_at) VALUES ('', 'n1', 'x', '', now(), now())"
)
WRITTEN = sorted(set(LedgerTable.metadata.tables) - {"compatibility"})


@pytest.mark.parametrize("table", WRITTEN)
def test_rows_of_another_can_neither_be_changed_nor_removed(shared: Shared, tmp_path: Path, table: str) -> None:
    written(shared.alice, tmp_path, "hers")
    execute(shared.alice, REPAIRED)
    before = rows(shared.owner)
    column = LedgerTable.metadata.tables[table].columns.values()[1].name
    execute(shared.mallory, f"DELETE FROM {table}", f"UPDATE {table} SET {column} = {column}")
    assert rows(shared.owner) == before
    with pytest.raises(DBAPIError, match="permission denied"):
        execute(shared.mallory, f"TRUNCATE {table} CASCADE")
    with pytest.raises(DBAPIError, match="must be owner"):
        execute(shared.mallory, f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")


OF_ANOTHER = sorted(name for name, table in LedgerTable.metadata.tables.items() if "job_id" in table.columns)


@pytest.mark.parametrize("table", OF_ANOTHER)
def test_not_a_row_of_any_table_is_put_under_anothers_job(shared: Shared, tmp_path: Path, table: str) -> None:
    """As a copy of what the intruder has, or of what she has; the policy is asked before any key is."""
    written(shared.alice, tmp_path, "hers")
    columns = LedgerTable.metadata.tables[table].columns
    job = "(SELECT id FROM jobs WHERE name = 'hers')"
    wanted = [column for column in columns if not column.nullable and column.name != "id"]
    kinds = {"job_id": job, "VARCHAR": "''", "TEXT": "''", "BOOLEAN": "false", "DATETIME": "now()"}
    values = [kinds["job_id"] if c.name == "job_id" else kinds.get(_kind(c.type), "1") for c in wanted]
    names = ", ".join(column.name for column in wanted)
    with pytest.raises(DBAPIError, match="row-level security"):
        execute(shared.mallory, f"INSERT INTO {table} ({names}) VALUES ({', '.join(values)})")


def _kind(of: object) -> str:
    name = type(of).__name__.upper()
    return {"STRING": "TEXT", "UTCDATETIME": "DATETIME"}.get(name, name)


def test_what_was_repaired_each_writes_in_his_own_name(shared: Shared) -> None:
    for url in (shared.alice, shared.mallory):
        execute(url, REPAIRED)
    execute(shared.mallory, "UPDATE maintenance SET kind = 'forged'")
    execute(shared.alice, "UPDATE maintenance SET kind = 'hers'")
    assert asked(shared.board, "SELECT written_by, kind FROM maintenance ORDER BY id") == [
        (MINE, "hers"),
        (THEIRS, "forged"),
    ]
    with pytest.raises(DBAPIError, match="row-level security"):
        execute(shared.mallory, f"UPDATE maintenance SET written_by = '{MINE}'")


@pytest.mark.parametrize(
    "statement", ["UPDATE compatibility SET min_reader = '9999'", "DELETE FROM compatibility"], ids=["update", "delete"]
)
def test_no_writer_says_who_may_use_the_ledger(shared: Shared, statement: str) -> None:
    with pytest.raises(DBAPIError, match="permission denied"):
        execute(shared.mallory, statement)


# --- dashboards -----------------------------------------------------------------------------------------------------


def asked(url: str, query: str) -> list[tuple[object, ...]]:
    engine = make_engine(resolve(url), write=False)
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(query))]
    engine.dispose()
    return found


@pytest.mark.parametrize("table", [*sorted(LedgerTable.metadata.tables), migrate.VERSION_TABLE])
def test_a_reader_reads_everything_and_writes_nothing(shared: Shared, tmp_path: Path, table: str) -> None:
    written(shared.alice, tmp_path, "hers")
    asked(shared.board, f"SELECT * FROM {table}")
    columns = ["version_num"]
    if table != migrate.VERSION_TABLE:  # nobody may change a number that the database gives
        columns = [column.name for column in LedgerTable.metadata.tables[table].c if column.name != "id"]
    column = columns[0]
    for statement in (
        f"DELETE FROM {table}",
        f"UPDATE {table} SET {column} = {column}",
        f"INSERT INTO {table} DEFAULT VALUES",
        f"LOCK TABLE {table} IN EXCLUSIVE MODE",
    ):
        with pytest.raises(DBAPIError, match="permission denied"):
            execute(shared.board, statement)


def test_a_job_of_a_reader_says_who_helps(shared: Shared, tmp_path: Path) -> None:
    with Reader.open(shared.board) as reader:
        assert reader.jobs() == []
    listener = Listener()
    with Ledger.open(shared.board, tmp_path, say=listener) as ledger:
        ledger.submit(journal.Record(1, BEGAN, started()))
        assert not ledger.flush(1.0)
        ledger.close(0.0)
    assert "permission denied" in listener.heard[0]


COLUMNS = {
    "resihp_jobs": (
        *("job_id", "uuid", "name", "host", "owner", "written_by", "run", "cluster", "slurm_job", "slurm_account"),
        *("partition", "qos", "nodes", "gpus_per_node", "state", "exit_code", "reason", "started_at", "ended_at"),
        *("last_entry_at", "seconds", "version", "torch", "cuda", "nccl"),
    ),
    "resihp_failures": (
        *("job_id", "job", "owner", "written_by", "cluster", "failure", "kind", "component", "cause", "node"),
        *("device", "iteration", "epoch", "noticed_at", "detect_seconds", "action", "seconds_to_recover", "speed"),
        *("ended_at", "code", "category", "hardware", "intermittent", "failed_at", "noticed_after_seconds"),
    ),
    "resihp_node_failures": ("cluster", "node", "day", "failures", "slow", "hardware", "jobs", "last_at"),
    "resihp_iterations_hourly": (
        *("job_id", "job", "owner", "hour", "iterations", "first_iteration", "last_iteration", "tokens", "seconds"),
        *("mean_seconds", "max_seconds", "mean_loss"),
    ),
}


def test_views_keep_their_names_and_columns(shared: Shared) -> None:
    """Others' dashboards ask for them: columns may be added at the end."""
    query = "SELECT table_name, column_name FROM information_schema.columns WHERE table_name LIKE 'resihp_%' "
    found: dict[str, list[str]] = {}
    for view, column in asked(shared.owner, query + "ORDER BY table_name, ordinal_position"):
        found.setdefault(str(view), []).append(str(column))
    found.pop(migrate.VERSION_TABLE)
    assert set(found) == set(COLUMNS) == set(DASHBOARD_VIEWS)
    for view, columns in COLUMNS.items():
        assert tuple(found[view][: len(columns)]) == columns


def test_views_tell_what_the_tables_do_to_a_reader(shared: Shared, tmp_path: Path) -> None:
    written(shared.alice, tmp_path, "hers")
    written(shared.mallory, tmp_path, "his")
    with Reader.open(shared.board) as reader:
        job = reader.job("hers")
        failures = reader.rows("failures", job["id"])
    mine = "WHERE job = 'hers'"
    assert asked(shared.board, "SELECT name, written_by FROM resihp_jobs ORDER BY name") == [
        ("hers", MINE),
        ("his", THEIRS),
    ]
    times = ("failed_at", "seconds_to_recover", "noticed_after_seconds")
    assert asked(shared.board, f"SELECT failure, {', '.join(times)} FROM resihp_failures {mine} ORDER BY 1") == [
        (row["failure"], *(row[name] for name in times)) for row in failures
    ]
    assert all(row["seconds_to_recover"] > row["noticed_after_seconds"] > 0.0 for row in failures)
    assert asked(shared.board, f"SELECT sum(iterations) FROM resihp_iterations_hourly {mine}") == [(20,)]
    counted = asked(shared.board, "SELECT sum(failures), max(jobs) FROM resihp_node_failures")
    assert counted == [(2 * len([row for row in failures if row["node"]]), 2)]


def test_a_view_shows_nobody_more_than_its_tables(shared: Shared) -> None:
    as_psql(shared.owner, f"REVOKE SELECT ON jobs FROM {quoted(BOARD)}")
    with pytest.raises(DBAPIError, match="permission denied for table jobs"):
        asked(shared.board, "SELECT * FROM resihp_jobs")
    with pytest.raises(DBAPIError, match="permission denied"):
        execute(shared.mallory, "DELETE FROM resihp_jobs")


def test_no_rows_are_put_under_anothers_job(shared: Shared, tmp_path: Path) -> None:
    """Forged failures of a job that the victim believes, because it is her own."""
    written(shared.alice, tmp_path, "hers")
    written(shared.mallory, tmp_path, "his")
    forged = (
        "INSERT INTO probes (job_id, probe, occasion, kind, rank, node, passed, evidence, measured_at) "
        "SELECT id, 1, 'start', 'device', 0, 'n1', false, 'forged', now() FROM jobs WHERE name = 'hers'"
    )
    with pytest.raises(DBAPIError, match="row-level security"):
        execute(shared.mallory, forged)
    with pytest.raises(DBAPIError, match="row-level security"):
        execute(shared.mallory, "UPDATE failures SET job_id = (SELECT id FROM jobs WHERE name = 'hers')")


@pytest.mark.parametrize("source", ["journal", "ledger", "export"])
def test_anothers_job_is_not_replaced_by_an_import(shared: Shared, tmp_path: Path, source: str) -> None:
    """Its uuid can be worked out; a copy that claims to have more of its journal would take its place."""
    path = written(shared.alice, tmp_path, "hers", story(ended=False))
    writer = journal_file.Journal(path, sync=False)
    for iteration in range(500):
        entry = journal.Suspected(rank=0, node="n1", evidence=f"forged {iteration}")
        writer.append(entry, BEGAN + 100 + iteration)
    writer.close()
    forged = str(path)
    if source != "journal":
        forged = f"sqlite:///{tmp_path / 'forged.db'}"
        catch_up(forged, tmp_path, path)
    if source == "export":
        export(forged, tmp_path / "exported")
        forged = str(tmp_path / "exported")
    before = rows(shared.owner)
    began = time.monotonic()
    with pytest.raises(LedgerError, match=r"job hers: is in the ledger already, and database user alice wrote it"):
        import_from(forged, shared.mallory)
    assert time.monotonic() - began < 20, "nobody waits for what will never be"
    assert rows(shared.owner) == before
    assert [merged.outcome for merged in import_from(forged, shared.alice)] == ["brought forward"]


def test_what_is_in_already_is_no_trouble_whoever_wrote_it(shared: Shared, tmp_path: Path) -> None:
    path = written(shared.alice, tmp_path, "hers")
    export(shared.alice, tmp_path / "exported")
    for source in (path, tmp_path / "exported"):
        assert [merged.outcome for merged in import_from(str(source), shared.mallory)] == ["unchanged"]


def test_supervisor_whose_job_another_user_has_taken_says_so_and_goes_on(shared: Shared, tmp_path: Path) -> None:
    path = written(shared.mallory, tmp_path, "hers")
    listener = Listener()
    with Ledger.open(shared.alice, tmp_path, say=listener) as ledger:
        for record in journal_file.read(path):
            ledger.submit(record)
        ledger.telemetry([(1, 1, 0, 0.5, None)])
        assert not ledger.flush(2.0)
        ledger.close(0.0)
    assert "and database user mallory" in listener.heard[0]
    assert len([line for line in listener.heard if "retrying" in line]) == 1, listener.heard


# --- what counts against a node -------------------------------------------------------------------------------------


def slander(url: str, folder: Path, node: str, at: float) -> None:
    """Jobs that say of a node that it fails all the time, and of its devices that they were once much faster."""
    for number in range(JOBS):
        written(url, folder, f"slander-{number}", slandered(f"slander-{number}", node, at + number))


def slandered(name: str, node: str, at: float) -> Told:
    yield msgspec.structs.replace(started(name), nodes=1), at
    yield journal.NodeJoined(node=node, host=node, devices=1, hardware="H200"), at
    for number in (1, 2):
        probe = journal.DeviceProbe(
            rank=0,
            node=node,
            device=0,
            flops=9e15,
            memory_bytes=9e12,
            speed=1.0,
            fit=True,
            evidence="",
            hardware="H200",
        )
        yield (
            journal.ProbesTaken(probe=number, occasion="start", devices=(probe,), links=(), seconds=1.0),
            at + 10 * number,
        )
        yield (
            journal.FailureFound(
                failure=number,
                kind="fail-stop",
                component="node",
                cause="forged",
                ranks=(0,),
                node=node,
                device=None,
                iteration=number,
                epoch=1,
                evidence="forged",
                detect_s=None,
            ),
            at + 10 * number + 13 * 3600 * (number - 1),  # outages of their own
        )
    yield journal.JobEnded(exit_code=0, state="completed", reason=""), at + 3600 * 20


def told_of(url: str, node: str, now: datetime) -> tuple[bool, int, bool]:
    """Of a node: whether its devices' former speeds are known, its failures, and whether it is called a lemon."""
    with Reader.open(url) as reader:
        usual = any(place[0] == node for place in usual_speeds(reader, [node], now))
        failures = sum(one.failures for one in nodes_by_health(reader, now) if one.node == node)
        record = fleet.NodeRecord()
        record.read(reader, fleet.horizon(now), injected=False)
        lemon = any(row["lemon"] for row in fleet.lemons(record, now) if row["node"] == node)
    return usual, failures, lemon


def test_forged_probes_and_failures_do_not_count_against_others_nodes(shared: Shared, tmp_path: Path) -> None:
    at = BEGAN + 86400
    now = datetime.fromtimestamp(at + 86400, UTC)
    for healthy in range(8):
        told = [
            (msgspec.structs.replace(started(f"good-{healthy}"), nodes=1), at),
            (journal.NodeJoined(node=f"n{healthy}", host="here", devices=8), at),
            (journal.JobEnded(exit_code=0, state="completed", reason=""), at + 86000),
        ]
        written(shared.alice, tmp_path, f"good-{healthy}", iter(told))
    slander(shared.mallory, tmp_path, "n5", at)
    assert told_of(shared.alice, "n5", now) == (False, 0, False)
    assert told_of(shared.mallory, "n5", now)[:2] == (True, 2), "his own he may believe"
    shared.trust(THEIRS)
    assert told_of(shared.alice, "n5", now)[:2] == (True, 2)


def test_what_the_owner_of_the_tables_wrote_counts_for_everybody(shared: Shared, tmp_path: Path) -> None:
    at = BEGAN + 86400
    slander(shared.owner, tmp_path, "n5", at)
    assert told_of(shared.alice, "n5", datetime.fromtimestamp(at + 86400, UTC))[:2] == (True, 2)


def test_a_repair_counts_only_from_whom_jobs_count(shared: Shared, tmp_path: Path) -> None:
    """Else anybody could clear a bad node of his own."""
    at = BEGAN + 86400
    now = datetime.fromtimestamp(at + 2 * 86400, UTC)
    slander(shared.owner, tmp_path, "n5", at)
    record(shared.mallory, "n5", at=datetime.fromtimestamp(at + 86400 * 1.5, UTC), now=now)
    assert told_of(shared.alice, "n5", now)[1] == 2
    assert told_of(shared.mallory, "n5", now)[1] == 0, "his own he may believe"
    with Reader.open(shared.alice) as reader:
        [row] = maintenance_rows(reader, "n5")
        assert "n5" in {row["node"] for row in repairs(reader, datetime.fromtimestamp(BEGAN, UTC))}
    assert (row["written_by"], row["counts"]) == (THEIRS, False)
    with pytest.raises(DBAPIError, match="row-level security"):
        execute(shared.mallory, f"UPDATE maintenance SET written_by = '{MINE}'")
    shared.trust(THEIRS)
    assert told_of(shared.alice, "n5", now)[1] == 0


def test_a_repair_that_is_brought_in_counts_as_one_of_who_brings_it(shared: Shared, tmp_path: Path) -> None:
    """Whoever the file says wrote it: else an export could clear a bad node in anybody's name."""
    at = BEGAN + 86400
    now = datetime.fromtimestamp(at + 2 * 86400, UTC)
    slander(shared.owner, tmp_path, "n5", at)
    own = f"sqlite:///{tmp_path}/own.db"
    told = [
        (msgspec.structs.replace(started("elsewhere"), nodes=1), at),
        (journal.NodeJoined(node="n5", host="here", devices=8), at),
        (journal.JobEnded(exit_code=0, state="completed", reason=""), at + 60),
    ]
    written(own, tmp_path, "elsewhere", iter(told))
    record(own, "n5", at=datetime.fromtimestamp(at + 86400 * 1.5, UTC), now=now)
    export(own, tmp_path / "out")
    set_column(tmp_path / "out" / "maintenance.parquet", "written_by", MINE)
    sealed(tmp_path / "out")
    for _ in range(2):
        import_from(str(tmp_path / "out"), shared.mallory)
        assert asked(shared.board, "SELECT written_by FROM maintenance") == [(THEIRS,)]
    assert told_of(shared.alice, "n5", now)[1] == 2
    import_from(str(tmp_path / "out"), shared.alice)
    assert told_of(shared.alice, "n5", now)[1] == 0, "that he has the same does not keep hers out"
    assert asked(shared.board, "SELECT written_by FROM maintenance ORDER BY id") == [(THEIRS,), (MINE,)]
    import_from(str(tmp_path / "out"), shared.alice)
    assert len(asked(shared.board, "SELECT 1 FROM maintenance")) == 2


def test_repairs_of_others_are_not_taken_along_where_they_would_count(shared: Shared, tmp_path: Path) -> None:
    """In the name of who exports, or of the owner, who moves a ledger."""
    at = BEGAN + 86400
    now = datetime.fromtimestamp(at + 2 * 86400, UTC)
    slander(shared.owner, tmp_path, "n5", at)
    for url, days in ((shared.mallory, 1.5), (shared.alice, 0.5)):
        record(url, "n5", at=datetime.fromtimestamp(at + 86400 * days, UTC), now=now)
    for number, (url, counted) in enumerate(((shared.alice, 1), (shared.owner, 0))):
        out = tmp_path / f"out-{number}"
        assert export(url, out).manifest.rows["maintenance"] == counted
        import_from(str(out), f"sqlite:///{tmp_path}/other-{number}.db")
        with Reader.open(f"sqlite:///{tmp_path}/other-{number}.db") as reader:
            assert len(maintenance_rows(reader)) == counted
    shared.trust(THEIRS)
    assert export(shared.owner, tmp_path / "trusted").manifest.rows["maintenance"] == 1


def test_nobody_makes_anothers_iterations_useless(shared: Shared, tmp_path: Path) -> None:
    """As if his job were a later attempt of hers, that committed them again."""

    def attempt(run: str, began: float) -> Told:
        for entry, at in story():
            is_first = isinstance(entry, journal.JobStarted)
            yield msgspec.structs.replace(entry, run=run) if is_first else entry, at + began

    written(shared.alice, tmp_path, "hers")
    with Reader.open(shared.board) as reader:
        hers = reader.job("hers")
        before = reader.account(hers)
    written(shared.mallory, tmp_path, "his", attempt(hers["run"], 86400.0))
    with Reader.open(shared.board) as reader:
        assert reader.account(hers) == before
        assert fleet_costs.accounts(reader)[-1][1] == before
    written(shared.alice, tmp_path, "again", attempt(hers["run"], 2 * 86400.0))
    with Reader.open(shared.board) as reader:
        assert reader.account(hers).lost_s["rollback"] > 0.0


def test_what_was_rolled_back_is_kept_by_those_who_may_change_the_job(shared: Shared, tmp_path: Path) -> None:
    """Of attempts of one run that different users wrote, none settles another's."""

    def attempt(run: str, began: float) -> Told:
        for entry, at in story():
            is_first = isinstance(entry, journal.JobStarted)
            yield msgspec.structs.replace(entry, run=run) if is_first else entry, at + began

    def accounts() -> dict[str, str]:
        with Reader.open(shared.board) as reader:
            return {name: reader.job(name)["account"] for name in ("hers", "again", "his", "his again")}

    run = "00000000-0000-0000-0000-00000000000a"
    for day, (url, name) in enumerate(
        [(shared.alice, "hers"), (shared.mallory, "his"), (shared.alice, "again"), (shared.mallory, "his again")]
    ):
        written(url, tmp_path, name, attempt(run, 86400.0 * day))
    told = accounts()
    rolled = {name: msgspec.json.decode(account)["rolled_back"] for name, account in told.items()}
    assert [name for name, found in rolled.items() if found] == ["hers", "his"]
    old = "UPDATE jobs SET account = (account::jsonb - 'rolled_back')::text WHERE name IN ('hers', 'his')"
    execute(shared.owner, old)
    left = accounts()
    with Reader.open(shared.board) as reader:
        assert len(reader.unsettled()) == 2
        before = {name: reader.account(reader.job(name)) for name in told}
    assert settle(shared.board) == 0
    assert accounts() == left
    assert settle(shared.mallory) == 1
    assert {name for name, account in accounts().items() if account != left[name]} == {"his"}
    prune(shared.mallory, datetime.fromtimestamp(BEGAN - 1, UTC))
    assert accounts()["hers"] == left["hers"]
    assert settle(shared.owner) == 1
    with Reader.open(shared.board) as reader:
        assert reader.unsettled() == []
        for name, account in before.items():
            assert reader.account(reader.job(name)).lost_s == pytest.approx(account.lost_s)


# --- administration -------------------------------------------------------------------------------------------------


def test_prune_is_of_ones_own_jobs_and_of_all_for_the_owner(shared: Shared, tmp_path: Path) -> None:
    written(shared.alice, tmp_path, "hers")
    written(shared.mallory, tmp_path, "his")
    after = datetime.fromtimestamp(BEGAN + 86400, UTC)
    for dry_run in (True, False):
        assert [each.job for each in prune(shared.mallory, after, dry_run=dry_run)] == ["his"]
    assert [each.job for each in prune(shared.owner, after, dry_run=True)] == ["hers"]


def test_user_without_grants_is_told_who_helps(shared: Shared, postgres_server: Server) -> None:
    execute(shared.owner, f'REVOKE ALL ON jobs, resihp_version FROM "{MINE}"')
    with pytest.raises(LedgerError, match=r"permission denied .* resihp db grant ROLE"):
        Reader.open(shared.alice)


def test_users_cannot_change_the_schema_s_version(shared: Shared) -> None:
    with pytest.raises(DBAPIError, match="permission denied"):
        execute(shared.mallory, "UPDATE resihp_version SET version_num = '9999'")


def test_a_job_removes_old_telemetry_of_its_own_role_alone(shared: Shared, tmp_path: Path) -> None:
    """Whatever user a job says it is of."""
    told = [journal.Record(number, at, entry) for number, (entry, at) in enumerate(story(), 1)]
    for url, name in ((shared.mallory, "his"), (shared.alice, "hers")):
        with Ledger.open(url, tmp_path) as ledger:
            for record in told:
                entry = record.entry
                if isinstance(entry, journal.JobStarted):
                    entry = msgspec.structs.replace(entry, job=name)
                ledger.submit(journal.Record(record.seq, record.at, entry))
            ledger.telemetry([(1, 1, rank, 0.5, None) for rank in range(12)])
            assert ledger.flush(30)
    with Ledger.open(shared.alice, tmp_path, keep_s=90 * 86400.0) as ledger:
        ledger.submit(journal.Record(1, time.time(), started("new")))
        assert ledger.flush(30)
        deadline = time.monotonic() + 30
        query = "SELECT name FROM rank_reports JOIN jobs ON jobs.id = job_id GROUP BY name"
        while len(asked(shared.board, query)) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert asked(shared.board, query) == [("his",)]


def test_a_job_that_may_not_remove_says_so_and_writes_on(shared: Shared, tmp_path: Path) -> None:
    path = written(shared.alice, tmp_path, "hers")
    execute(shared.owner, f'REVOKE DELETE ON rank_reports FROM "{MINE}"')
    listener = Listener()
    with Ledger.open(shared.alice, tmp_path, say=listener, keep_s=90 * 86400.0) as ledger:
        for record in journal_file.read(path):
            ledger.submit(record)
        ledger.telemetry([(1, 1, 0, 0.5, None)])
        assert ledger.flush(30)
        deadline = time.monotonic() + 30
        while not listener.heard:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ledger.telemetry([(2, 1, 0, 0.5, None)])
        assert ledger.flush(30)
    assert [line for line in listener.heard if "were not removed, permission denied" in line] == listener.heard


def test_an_owner_upgrades_and_prunes_everybodys_rows(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No policy hides a row from him: an upgrade that passed over some would be worse than none."""
    path = written(shared.alice, tmp_path, "hers")
    as_psql(shared.owner, *statements(ADMIN, shared.name, kind="owner"))
    add_later_schema(monkeypatch, tmp_path / "migrations")
    with pytest.raises(LedgerError, match="run resihp db upgrade"):
        Reader.open(shared.alice)
    migrate.upgrade(shared.admin)
    assert writers(shared.admin) == {"hers": MINE}
    as_psql(shared.admin, *statements(MINE, shared.name))
    assert [merged.outcome for merged in import_from(str(path), shared.alice)] == ["unchanged"]
    assert [each.job for each in prune(shared.admin, datetime.fromtimestamp(BEGAN + 86400, UTC))] == ["hers"]


def test_a_role_that_owns_nothing_upgrades_nothing(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrate.head()
    add_later_schema(monkeypatch, tmp_path / "migrations")
    for url in (shared.alice, shared.board):
        with pytest.raises(LedgerError, match=r"permission denied|must be owner"):
            migrate.upgrade(url)
    assert migrate.current(shared.owner) == known


def test_a_writer_is_made_a_reader(shared: Shared, tmp_path: Path) -> None:
    written(shared.alice, tmp_path, "hers")
    as_psql(shared.owner, *statements(MINE, shared.name, kind="reader"))
    for statement in ("DELETE FROM jobs", REPAIRED, "SELECT nextval('jobs_id_seq')"):
        with pytest.raises(DBAPIError, match="permission denied"):
            execute(shared.alice, statement)
    assert len(asked(shared.alice, "SELECT * FROM resihp_jobs")) == 1


def test_what_is_no_kind_of_role_is_refused() -> None:
    with pytest.raises(UsageError, match="--as king: not one of owner, writer, reader"):
        statements("alice", "ledger", kind="king")
    with pytest.raises(UsageError, match="exclude each other"):
        statements("alice", "ledger", kind="reader", trusted=True)


@pytest.mark.parametrize("role", ["", "a\nb", "x" * 64, "nul\0"])
def test_what_is_no_role_is_refused(role: str) -> None:
    with pytest.raises(UsageError, match="not a name"):
        statements(role, "ledger")


def test_default_privileges_of_the_database_neither_lock_out_writers_nor_open_the_compatibility_row(
    postgres_server: Server, tmp_path: Path
) -> None:
    """Where an administrator lets a role use every table that he makes, before he makes the ledger."""
    url = postgres_server.new_database()
    as_psql(
        url,
        f"DROP ROLE IF EXISTS {MINE}",
        f"CREATE ROLE {MINE} LOGIN",
        f"ALTER DEFAULT PRIVILEGES GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {MINE}",
    )
    alice = resolve(url).set(username=MINE).render_as_string(hide_password=False)
    try:
        migrate.upgrade(url)
        written(alice, tmp_path, "hers")
        assert writers(url) == {"hers": MINE}
        assert len(asked(alice, "SELECT * FROM resihp_jobs")) == 1
        with pytest.raises(DBAPIError, match="permission denied"):
            execute(alice, "UPDATE compatibility SET min_writer = '9999'")
    finally:
        postgres_server.drop_database(url)
        as_psql(postgres_server.url("postgres"), f"DROP ROLE IF EXISTS {MINE}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_looking_at_anothers_folder_changes_nothing_of_ones_own_on_the_server(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """His job.json names the ledger as she reaches it, and his journal begins as hers does, and goes on as he likes:
    it was brought in with her rights, which row-level security allows."""
    told = list(story(ended=False))
    written(shared.alice, tmp_path / "hers", "local-1", iter(told))
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "his"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    job = create_local_job()
    job.set_ledger(shared.alice)
    forged = journal.JobEnded(exit_code=1, state="failed", reason="forged")
    entries = [*told, (forged, told[-1][1] + 1.0)]
    write_journal(job.journal_file, iter([(msgspec.structs.replace(started(), job="local-1"), BEGAN), *entries[1:]]))
    write_private(job.journal_copy, job.journal_file.read_bytes())
    write_private(job.exit_code_file, b"1\n")
    with Reader.open(shared.alice) as reader:
        before = reader.job("local-1")
    assert before["uuid"] == id_of(job), "his journal passes for hers"
    for path in (job.home, *job.home.rglob("*")):
        os.chown(path, 54321, 54321, follow_symlinks=False)
    for words in (("status", "--json"), ("history", "failures"), ("report", "--markdown"), ("db", "upgrade", "--all")):
        CliRunner().invoke(app, list(words))
    with Reader.open(shared.alice) as reader:
        assert reader.job("local-1") == before


def told_by(user: str, at: float = 0.0) -> Told:
    """The story of a job that says it is this user's, so many seconds later."""
    for entry, moment in story():
        yield (
            (msgspec.structs.replace(entry, user=user) if isinstance(entry, journal.JobStarted) else entry),
            moment + at,
        )


def test_a_job_of_another_database_user_does_not_pose_as_ones_own(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming.getpass, "getuser", lambda: MINE)
    written(shared.alice, tmp_path / "hers", "train", told_by(MINE))
    written(shared.mallory, tmp_path / "his", "train", told_by(MINE, at=3600.0))
    written(shared.mallory, tmp_path / "his", "bait", told_by(MINE, at=7200.0))
    forged = f"{MINE} (by {THEIRS})"
    with Reader.open(shared.alice) as reader:
        assert reader.job("train")["written_by"] == MINE
        assert reader.job()["written_by"] == MINE, "the newest one of mine"
        assert reader.job(f"{MINE}/train")["written_by"] == MINE
        assert (reader.job("bait")["owner"], reader.job(f"{forged}/bait")["name"]) == (forged, "bait")
        assert [job["name"] for job in reader.jobs(user=MINE)] == ["train"]
        assert {row["job"] for row in reader.rows("failures", None, user=MINE)} == {"train"}
        costs = fleet_costs.cost_by("owner", fleet_costs.accounts(reader))
        assert {row["owner"]: row["jobs"] for row in costs} == {MINE: 1, forged: 2}
        assert len(fleet_costs.accounts(reader, user=MINE)) == 1
        failures = fleet.failures_by(reader, "owner")
        assert {row["key"]: row["failures"] for row in failures} == {MINE: 1, forged: 2}
        assert [row["failures"] for row in fleet.failures_by(reader, "job", user=MINE)] == [1]
    shared.trust(THEIRS)
    with Reader.open(shared.alice) as reader:
        assert len(reader.jobs(user=MINE)) == 3, "an administrator vouches for what he writes"


def test_a_job_is_ones_own_by_the_database_where_its_name_for_us_is_another(shared: Shared, tmp_path: Path) -> None:
    written(shared.alice, tmp_path / "hers", "train", told_by("container-user"))
    written(shared.mallory, tmp_path / "his", "train", told_by("somebody", at=3600.0))
    with Reader.open(shared.alice) as reader:
        assert reader.job("train")["written_by"] == MINE
        assert reader.job()["written_by"] == MINE


def test_nobody_takes_the_numbers_that_come_next(shared: Shared, tmp_path: Path) -> None:
    written(shared.mallory, tmp_path, "his")
    columns = [column.name for column in LedgerTable.metadata.tables["jobs"].columns if column.name != "id"]
    taken = ", ".join({"uuid": "'x' || n"}.get(name, name) for name in columns)
    source = "FROM jobs, generate_series({}, {}) AS n WHERE name = 'his'"
    honest = f"INSERT INTO jobs ({', '.join(columns)}) SELECT {taken} {source.format(-2, 0)}"
    squat = f"INSERT INTO jobs (id, {', '.join(columns)}) {{}} SELECT id + n, {taken} {source.format(2, 5)}"
    execute(shared.mallory, honest, "DELETE FROM jobs WHERE name = 'his' AND uuid LIKE 'x%'")  # several, row by row
    with pytest.raises(DBAPIError, match="cannot insert a non-DEFAULT value"):
        execute(shared.mallory, squat.format(""))
    with pytest.raises(DBAPIError, match="row-level security"):  # in a session that was given a number
        execute(shared.mallory, honest, squat.format("OVERRIDING SYSTEM VALUE"))
    with pytest.raises(DBAPIError, match="can only be updated to DEFAULT"):
        execute(shared.mallory, "UPDATE jobs SET id = id + 1")
    with pytest.raises(DBAPIError, match="permission denied for sequence"):
        execute(shared.mallory, "SELECT nextval('jobs_id_seq')")
    repair = (
        "INSERT INTO maintenance ({}cluster, node, kind, text, at, recorded_at) {} "
        "VALUES ({}'', 'n1', 'x', '', now(), now())"
    )
    with pytest.raises(DBAPIError, match="row-level security"):
        execute(shared.mallory, repair.format("", "", ""), repair.format("id, ", "OVERRIDING SYSTEM VALUE", "9, "))
    written(shared.alice, tmp_path, "hers")
    assert writers(shared.alice) == {"hers": MINE, "his": THEIRS}
