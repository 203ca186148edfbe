"""What many jobs tell together: counted by the database, joined over ledgers, the same as what each job tells alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import update

from resihp.db import models
from resihp.db.engine import make_engine, resolve
from resihp.db.migrate import upgrade
from resihp.db.reading import fleet, health, queries
from resihp.db.reading.costs import fleet_costs
from resihp.db.reading.iterations.newest import newest_iterations
from resihp.db.reading.reader import Reader
from resihp.db.writer import Ledger
from resihp.record import journal
from tests.db.conftest import BEGAN, any_layout_story, started, story, write_journal


def retold(name: str, entries: Iterator[tuple[journal.AnyEntry, float]], after_s: float = 0.0) -> Iterator:
    for entry, at in entries:
        yield started(name) if isinstance(entry, journal.JobStarted) else entry, at + after_s


def write(folder: Path, url: str, *told: tuple[str, Iterator[tuple[journal.AnyEntry, float]]]) -> str:
    """Jobs of these names, an hour apart, in one ledger."""
    for number, (name, entries) in enumerate(told):
        place = folder / name
        place.mkdir()
        with Ledger.open(url, place) as ledger:
            for record in write_journal(place / "journal", retold(name, entries, 3600.0 * number)):
                ledger.submit(record)
            assert ledger.close()
    return url


@pytest.fixture
def reader(tmp_path: Path, ledger_url: str) -> Iterator[Reader]:
    """local-1 and local-2 lost rank 5 of n2, by signal; local-3 lost its device, and still runs."""
    write(tmp_path, ledger_url, ("local-1", story()), ("local-2", story()), ("local-3", any_layout_story()))
    with Reader.open(ledger_url) as reader:
        yield reader


def test_failures_are_counted_over_all_jobs_or_one(reader: Reader) -> None:
    [row] = fleet.joined("node", fleet.failures_by(reader, "node"))
    assert (row["node"], row["failures"], row["jobs"], row["fail_stop"], row["fail_slow"]) == ("n2", 3, 3, 3, 0)
    assert (row["detect_seconds"], row["recover_seconds"]) == pytest.approx((0.02, 1.02), abs=1e-3)
    assert row["without_noticing_seconds"] == pytest.approx(1.0, abs=1e-3)
    assert row["last"] == datetime.fromtimestamp(BEGAN + 7200 + 2.2, UTC)
    rows = fleet.joined("component", fleet.failures_by(reader, "component"))
    assert [(row["component"], row["failures"]) for row in rows] == [("process", 2), ("device", 1)]
    assert len(fleet.joined("job", fleet.failures_by(reader, "job"))) == 3
    one = reader.job("local-2")["id"]
    assert [row["failures"] for row in fleet.joined("node", fleet.failures_by(reader, "node", one))] == [1]
    since = datetime.fromtimestamp(BEGAN + 3600, UTC)
    assert [row["failures"] for row in fleet.joined("kind", fleet.failures_by(reader, "kind", since=since))] == [2]
    assert fleet.failures_by(reader, "kind", node="n1") == []


def test_what_the_database_adds_up_is_what_its_rows_say(reader: Reader) -> None:
    rows = reader.rows("failures", None)
    [node] = fleet.failures_by(reader, "node")
    for total, each in (
        ("recover_seconds", "seconds_to_recover"),
        ("without_noticing_seconds", "seconds_without_noticing"),
    ):
        assert node[total] == pytest.approx(sum(row[each] for row in rows), abs=1e-2)
    assert all(row["seconds_to_recover"] > row["seconds_without_noticing"] > 0.0 for row in rows)


def test_counts_of_several_ledgers_are_joined(reader: Reader) -> None:
    part = fleet.failures_by(reader, "node")
    [row] = fleet.joined("node", [*part, *part])
    assert (row["failures"], row["jobs"], row["recover_seconds"]) == (6, 6, pytest.approx(1.02, abs=1e-3))


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("rank 5 killed by signal 9 (SIGKILL)", "rank * killed by signal 9 (SIGKILL)"),
        ("ranks 0-3, 8 lost", "ranks * lost"),
        ("node gpu-17: 3 missed heartbeats, last 15.2 s ago", "node *: 3 missed heartbeats, last * s ago"),
        ("rank 7 at 50 % of its speed", "rank * at * % of its speed"),
        ("connection closed", "connection closed"),
    ],
)
def test_causes_are_one_where_only_names_and_figures_differ(cause: str, kind: str) -> None:
    assert fleet.kind_of_cause(cause) == kind


def test_cost_of_all_jobs_is_the_sum_of_each(reader: Reader) -> None:
    now = datetime.fromtimestamp(BEGAN + 7300, UTC)
    found = fleet_costs.accounts(reader, now=now)
    assert [job["name"] for job, _ in found] == ["local-3", "local-2", "local-1"]
    rows = {row["cause"]: row for row in fleet_costs.cost_rows([account for _, account in found])}
    each = [{row["cause"]: row for row in fleet_costs.cost_rows([account])} for _, account in found]
    for cause, row in rows.items():
        assert row["seconds"] == pytest.approx(sum(one[cause]["seconds"] for one in each))
        assert row["gpu_hours"] == pytest.approx(sum(one[cause]["gpu_hours"] for one in each))
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    assert rows["capacity"]["seconds"] == pytest.approx(2 * 0.45 + 0.05)
    assert rows["idle"]["seconds"] == pytest.approx(2 * 1.35)
    by_job = fleet_costs.cost_by_job(found)
    assert [row["failures"] for row in by_job] == [1, 1, 1]
    assert by_job[2]["goodput"] == pytest.approx(9.1 / 11.6, abs=1e-4)
    hours = sum(row["gpu_hours"] for row in rows.values() if row["of_failures"])
    assert sum(row["failure_gpu_hours"] for row in by_job) == pytest.approx(hours)
    assert fleet_costs.accounts(reader, until=datetime.fromtimestamp(BEGAN - 1, UTC)) == []


def test_the_account_of_a_job_that_is_over_is_kept_and_is_the_same(reader: Reader) -> None:
    job, running = reader.job("local-1"), reader.job("local-3")
    assert job["account"] is not None
    assert running["account"] is None
    afresh = reader.account({**job, "account": None})
    kept = reader.account(job)
    assert kept.lost_s == pytest.approx(afresh.lost_s)
    assert (kept.goodput, kept.wall_s, kept.failures) == (afresh.goodput, afresh.wall_s, afresh.failures)


def test_the_account_of_a_job_that_runs_ends_at_the_time_of_the_question(reader: Reader) -> None:
    last = reader.rows("iterations", reader.job("local-3")["id"])[-1]["finished_at"]
    short, longer = (
        next(
            account
            for job, account in fleet_costs.accounts(reader, now=last + timedelta(seconds=seconds))
            if job["name"] == "local-3"
        )
        for seconds in (10, 70)
    )
    assert longer.wall_s - short.wall_s == pytest.approx(60.0)


def test_a_job_whose_rows_were_thinned_has_the_figures_that_it_had(reader: Reader, ledger_url: str) -> None:
    job = reader.job("local-1")
    before = reader.summary(job["id"])
    engine = make_engine(resolve(ledger_url), write=True)
    iterations = models.IterationRow.__table__
    with engine.begin() as connection:
        gone = iterations.c.iteration.between(2, 10) | iterations.c.iteration.between(14, 18)
        connection.execute(iterations.delete().where(iterations.c.job_id == job["id"], gone))
    engine.dispose()
    after = reader.summary(job["id"])
    for figure in ("goodput", "ettr", "useful_seconds", "wall_seconds", "committed_iterations", "iteration"):
        assert after[figure] == before[figure], figure
    assert after["lost_seconds"] == pytest.approx(before["lost_seconds"], abs=1e-3)
    # From the rows that are left, not what was kept, it is nearly the same.
    assert reader.account({**job, "account": None}).goodput == pytest.approx(before["goodput"], abs=1e-3)


def test_the_newest_iterations_of_all_jobs(reader: Reader) -> None:
    rows = newest_iterations(reader, 5)
    assert [(row["job"], row["iteration"]) for row in rows] == [
        *(("local-2", 19), ("local-2", 20)),
        *(("local-3", 1), ("local-3", 2), ("local-3", 3)),
    ]
    assert rows == reader.rows("iterations", None, last=5)
    until = datetime.fromtimestamp(BEGAN + 3000, UTC)
    assert [row["iteration"] for row in newest_iterations(reader, 2, until=until)] == [19, 20]
    [user] = {job["owner"] for job in reader.jobs()}
    assert newest_iterations(reader, 5, user=user) == rows
    assert newest_iterations(reader, 5, user=f"not-{user}") == []


def test_tables_of_all_jobs_name_them(reader: Reader) -> None:
    rows = reader.rows("failures", None)
    assert [(row["job"], row["node"], row["ranks"]) for row in rows] == [
        (f"local-{n}", "n2", [5]) for n in (1, 2, 3)
    ]  # fmt: skip
    assert next(iter(rows[0])) == "job"
    frame = queries.frame(reader, "failures")
    assert frame["job"].tolist() == ["local-1", "local-2", "local-3"]
    assert frame["noticed_at"].dtype.kind == "M"


def aged(url: str, days: float) -> None:
    """Make the ledger's jobs recent: they ended so long ago."""
    upgrade(url)
    move = datetime.now(UTC) - timedelta(days=days) - datetime.fromtimestamp(BEGAN, UTC)
    engine = make_engine(resolve(url), write=True)
    with engine.begin() as connection:
        for model in (models.JobRow, models.NodeRow, models.FailureRow):
            table = model.__table__
            times = [c for c in table.c if isinstance(c.type, models.UtcDateTime)]
            for row in connection.execute(table.select()).mappings().all():
                values = {c.key: row[c.key] + move for c in times if row[c.key] is not None}
                keys = [column == row[column.key] for column in table.primary_key]
                connection.execute(update(table).where(*keys).values(values))
    engine.dispose()


def test_lemons(tmp_path: Path, ledger_url: str, open_ledger: Callable[..., Ledger]) -> None:
    told = [(f"local-{n}", story()) for n in range(1, 8)]
    write(tmp_path, ledger_url, *told)
    aged(ledger_url, 1.0)
    with Reader.open(ledger_url) as reader:
        frame = queries.lemons(reader, injected=True)
        clean = queries.lemons(reader)
    worst = frame.iloc[0]
    assert (worst["node"], worst["jobs"], worst["failures"], worst["fail_stop"]) == ("n2", 7, 7, 7)
    assert (worst["observed"], worst["lemon"]) == (0, False)  # a process was killed, of which nobody knows why
    assert worst["device_hours"] == pytest.approx(7 * 4 * 13.9 / 3600, rel=0.05)
    assert worst["mtbf_hours"] == pytest.approx(13.9 / 3600, rel=0.05)
    assert set(frame["node"]) == {"n1", "n2", "n3"}
    # What was injected says nothing of a node.
    assert clean["failures"].tolist() == [0, 0, 0]
    assert not clean["lemon"].any()


def test_a_device_that_fails_in_job_after_job_is_a_lemon(tmp_path: Path, ledger_url: str) -> None:
    def broken() -> Iterator[tuple[journal.AnyEntry, float]]:
        for entry, at in story():
            if isinstance(entry, journal.FaultInjected):
                continue
            yield (
                (
                    msgspec.structs.replace(entry, component="device", detect_s=None)
                    if isinstance(entry, journal.FailureFound)
                    else entry
                ),
                at,
            )

    day = 86_400.0
    for number in range(5):
        place = tmp_path / f"j{number}"
        place.mkdir()
        with Ledger.open(ledger_url, place) as ledger:
            for record in write_journal(place / "journal", retold(f"j{number}", broken(), 7 * number * day)):
                ledger.submit(record)
            assert ledger.close()
    with Reader.open(ledger_url) as reader:
        now = datetime.fromtimestamp(BEGAN + 30 * day, UTC)
        [worst, *others] = queries.lemons(reader, now).to_dict("records")
        [first, *_] = health.health_rows(reader, now)
    assert (worst["node"], worst["lemon"], worst["observed"]) == ("n2", True, 5)
    assert worst["expected"] < 1e-3
    assert worst["q"] < 1e-6
    assert not any(row["lemon"] for row in others)
    shared = ("node", "lemon", "observed", "expected", "window_days", "p", "q", "lemon_devices", "devices")
    assert {name: worst[name] for name in shared} == pytest.approx({name: first[name] for name in shared})


def test_frames(reader: Reader) -> None:
    job = reader.job("local-1")["id"]
    assert queries.failures_by(reader, "node")["failures"].tolist() == [3]
    cost = queries.cost(reader, job).set_index("cause")
    assert cost["seconds"].sum() == pytest.approx(13.9, abs=1e-3)
    assert cost["seconds"]["redo"] == pytest.approx(0.28, abs=1e-3)
    assert queries.reliability(reader).set_index("job")["mttr_seconds"]["local-1"] == pytest.approx(1.02)
    assert queries.promises(reader, job)["verdict"].tolist() == ["promised nothing"] * 2
    assert queries.predictions(reader, job)["ratio"].iloc[-1] == pytest.approx(0.6 / 0.59)


def test_an_empty_ledger_answers_everything_with_nothing(ledger_url: str) -> None:
    upgrade(ledger_url)
    with Reader.open(ledger_url) as reader:
        assert fleet.joined("node", fleet.failures_by(reader, "node")) == []
        assert fleet_costs.accounts(reader) == []
        assert [row["seconds"] for row in fleet_costs.cost_rows([])] == [0] * 11
        assert queries.lemons(reader).empty
        assert newest_iterations(reader, 5) == []
        assert queries.failures(reader).empty
        assert reader.nodes(None) == []
