"""What jobs cost is what somebody else reckons from the same rows, and parts of the time add up to all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, update

from resihp.db import models
from resihp.db.engine import make_engine, resolve
from resihp.db.reading import queries
from resihp.db.reading.costs import fleet_costs
from resihp.db.reading.costs.cost_accounts import Account, added
from resihp.db.reading.costs.timeline import CAUSES
from resihp.db.reading.reader import Reader
from resihp.db.retention import prune
from resihp.db.writer import Ledger
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from tests.db.conftest import BEGAN, DP3, inventory, outcome, started, write_journal
from tests.db.reading.made_fleet import MONDAY, raw, reckoned, write_fleet

JOBS = 24
NOW = MONDAY + timedelta(days=50)
WEEK = timedelta(days=7)
PERIODS: tuple[fleet_costs.Period | None, ...] = (None, "week")


def change(url: str, *statements: Any) -> None:
    engine = make_engine(resolve(url), write=True)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(statement)
    engine.dispose()


def settle(url: str, jobs: Sequence[int]) -> None:
    """Keep the accounts of jobs that are over, as it is done when they end."""
    with Reader.open(url) as reader:
        kept = {job["id"]: reader.settled(job["id"]) for job in reader.jobs() if job["state"] != "running"}
    change(
        url, *(update(models.JobRow).where(models.JobRow.id == i).values(account=kept[i]) for i in jobs if i in kept)
    )


@pytest.fixture
def url(ledger_url: str) -> str:
    write_fleet(ledger_url, JOBS)
    return ledger_url


def sums(found: Sequence[Account]) -> dict[str, float]:
    total = added(found)
    names = ("held_s", "wall_s", "committed_s", "useful_s", "gpu_hours", "useful_gpu_hours", "failures", "repairs")
    return {
        **{name: getattr(total, name) for name in (*names, "hardware_failures", "failure_gpu_hours")},
        **{f"{cause}, s": total.lost_s[cause] for cause in CAUSES},
        **{f"{cause}, h": total.lost_gpu_hours[cause] for cause in CAUSES},
    }


def test_every_figure_is_what_somebody_else_reckons_from_the_rows(url: str) -> None:
    settle(url, range(1, JOBS, 2))
    with Reader.open(url) as reader:
        found = fleet_costs.cost_by("job", fleet_costs.accounts(reader, now=NOW))
    compared = set()
    for row in found:
        number = int(row["job"][1:])
        other = reckoned(raw(url, number), NOW)
        for cause in ("useful", *CAUSES):
            assert row[f"{cause}_seconds"] == pytest.approx(other.pop(cause, 0.0), abs=2e-2, rel=1e-6), (number, cause)
            hours = other.pop(f"h:{cause}", 0.0)
            assert row[f"{cause}_gpu_hours"] == pytest.approx(hours, abs=1e-3, rel=1e-6), (number, cause)
            compared |= {cause} if hours > 0.0 else set()
        for figure, value in other.items():
            assert row[figure] == pytest.approx(value, rel=1e-5), (number, figure)
    assert compared == {"useful", *CAUSES} - {"rollback"}
    assert {row["state"] for row in found} == {"completed", "failed", "cancelled", "running"}


def test_weeks_and_months_add_up_to_the_whole(url: str) -> None:
    shared = 6
    change(  # an attempt that goes on from iteration 51 of j6, and one whose rows were thinned
        url,
        update(models.JobRow).where(models.JobRow.id.in_([shared, shared + 1])).values(run="one run"),
        update(models.IterationRow).where(models.IterationRow.job_id == shared + 1).values(
            iteration=models.IterationRow.iteration + 10_000
        ),
        update(models.IterationRow).where(models.IterationRow.job_id == shared + 1).values(
            iteration=models.IterationRow.iteration - 9_950
        ),
        update(models.JobRow).where(models.JobRow.id == shared).values(started_at=MONDAY),
    )  # fmt: skip
    settle(url, [*range(1, JOBS, 2), 10])
    change(url, delete(models.IterationRow).where(models.IterationRow.job_id.in_([5, 9, 10]),
                                                  models.IterationRow.iteration.between(12, 95),
                                                  models.IterationRow.iteration % 7 != 0))  # fmt: skip
    with Reader.open(url) as reader:
        whole = sums([one for _, one in fleet_costs.accounts(reader, now=NOW)])
        first = min(job["started_at"] for job in reader.jobs())
        weeks = [first + n * WEEK for n in range((NOW - first) // WEEK + 2)]
        each = [fleet_costs.accounts(reader, since=at, until=at + WEEK, now=NOW) for at in weeks]
        periods = {by: fleet_costs.accounts(reader, now=NOW, period=by) for by in ("week", "month")}  # type: ignore[misc]
        rows = {by: fleet_costs.cost_by(by, found) for by, found in periods.items()}  # type: ignore[arg-type]
    assert whole["rollback, h"] > 0.0
    assert all(value > 0.0 for value in whole.values())
    parts = sums([one for found in each for _, one in found])
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-6), name
        for by, found in periods.items():
            assert sums([one for _, one in found])[name] == pytest.approx(value, rel=1e-6), (name, by)
    assert added([one for found in each for _, one in found]).in_proportion > 0
    assert [row["week"] for row in rows["week"]] == [f"{MONDAY + n * WEEK:%Y-%m-%d}" for n in range(6)]
    assert [row["month"] for row in rows["month"]] == ["2026-03", "2026-04"]
    # Nobody holds more than the GPUs that there were in a week, and who runs all week holds them all week.
    for found in each[1:3]:
        assert max(one.held_s for _, one in found) == pytest.approx(WEEK.total_seconds())


def test_however_many_periods_there_are_rows_are_read_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all of jobs that are over and whole: what was kept of them is what they cost."""
    settle(url, range(1, JOBS + 1))
    read: list[int] = []
    usual = Reader.narrow

    def narrow(self: Reader, table: str, job_id: int, *names: Any) -> Any:
        read.append(job_id)
        return usual(self, table, job_id, *names)

    monkeypatch.setattr(Reader, "narrow", narrow)
    for period in ("week", "month"):
        with Reader.open(url) as reader:
            found = fleet_costs.accounts(reader, now=NOW, period=period)  # type: ignore[arg-type]
            read.clear()
            monkeypatch.setattr("resihp.db.reading.costs.accounts.JOBS_AT_ONCE", 3)
            assert fleet_costs.accounts(reader, now=NOW, period=period) == found  # type: ignore[arg-type]
            monkeypatch.setattr("resihp.db.reading.costs.accounts.JOBS_AT_ONCE", 100)
        parts = [job["id"] for job, _ in found]
        running = {job["id"] for job, _ in found if job["state"] == "running"}
        assert sorted(read) == sorted(running | {each for each in parts if parts.count(each) > 1})
        assert 0 < len(read) < len(set(parts)) or period == "week"
    with Reader.open(url) as reader:
        read.clear()
        after = fleet_costs.accounts(reader, now=NOW, since=NOW)
        assert (after, {*read} <= running) == ([], True)


def test_a_job_is_cut_to_the_moment(tmp_path: Path, ledger_url: str) -> None:
    """20 iterations of 10 s from 100 s on; the 11th was redone: 4 s of work, 1 s to notice, 15 s of reconfiguring."""

    mended = journal.Reconfigured(
        epoch=2, failures=(1,), attempts=1, action="redo", park_s=1.0, plan_s=1.0, groups_s=1.0, state_s=1.0,
        first_iteration_s=10.0, seconds=25.0,
    )  # fmt: skip

    def cut() -> Iterator[tuple[journal.AnyEntry, float]]:
        yield started(), BEGAN
        for n in (1, 2, 3):
            yield journal.NodeJoined(node=f"n{n}", host="h", devices=4, inventory=inventory(f"n{n}")), BEGAN + 30
        for epoch, layout, first in ((1, DP3, 1), (2, DP3, 11)):
            at = BEGAN + (100 if epoch == 1 else 220)
            plan = Plan(epoch=epoch, layout=layout, assignment=spread(12, 3))
            action: Any = "start" if epoch == 1 else "redo"
            yield journal.PlanDecided(plan=plan, next_iteration=first, action=action, finish=None, reason="r"), at - 1
            for i in range(first, first + 10):
                at += 10
                yield commit(i, 10.0, epoch), at
                if i == 11:
                    yield mended, at
            if epoch == 1:
                yield failure("node", detect_s=1.0), at + 5
        yield journal.JobEnded(exit_code=0, state="completed", reason="done"), at

    write(tmp_path, ledger_url, ("cut", cut()))

    def part(since: float, until: float) -> dict[str, float]:
        times = (datetime.fromtimestamp(BEGAN + at, UTC) for at in (since, until))
        with Reader.open(ledger_url) as reader:
            frame = queries.cost(reader, **dict(zip(("since", "until"), times, strict=True)))
        assert frame["gpu_hours"].sum() * 3600 == pytest.approx(12 * frame["seconds"].sum(), abs=1e-2)
        return {row.cause: round(row.seconds, 2) for row in frame.itertuples() if row.seconds > 5e-3}

    assert part(50, 115) == {"start": 50.0, "useful": 15.0}
    assert part(195, 207) == {"useful": 5.0, "redo": 4.0, "detect": 1.0, "reconfigure": 2.0}
    assert part(207, 225) == {"reconfigure": 13.0, "useful": 5.0}
    assert part(-1000, 10_000) == {
        "start": 100.0, "useful": 200.0, "redo": 4.0, "detect": 1.0, "reconfigure": 15.0
    }  # fmt: skip
    assert part(-1000, 0) == part(320, 10_000) == {}


def write(folder: Path, url: str, *told: tuple[str, Iterator[tuple[journal.AnyEntry, float]]]) -> None:
    for name, entries in told:
        place = folder / name
        place.mkdir()
        with Ledger.open(url, place) as ledger:
            for record in write_journal(place / "journal", entries):
                ledger.submit(record)
            assert ledger.close()


def commit(iteration: int, seconds: float, epoch: int = 1) -> journal.IterationCommitted:
    return journal.IterationCommitted(epoch=epoch, outcome=outcome(iteration), seconds=seconds, predicted_seconds=None)


def failure(component: Any, detect_s: float | None = None) -> journal.FailureFound:
    return journal.FailureFound(
        failure=1, kind="fail-stop", component=component, cause="gone", ranks=(0,), node="n1", device=0,
        iteration=11, epoch=1, evidence="", detect_s=detect_s, failed_s=detect_s,
    )  # fmt: skip


def attempt(name: str, began: float, first: int, last: int, run: str) -> Iterator[tuple[journal.AnyEntry, float]]:
    """3 nodes of 4; 100 s to start, then iterations of 2 s."""
    yield msgspec.structs.replace(started(name), run=run), began
    for n in (1, 2, 3):
        yield journal.NodeJoined(node=f"n{n}", host="h", devices=4), began + 50
    at = began + 100
    plan = Plan(epoch=1, layout=DP3, assignment=spread(12, 3))
    yield journal.PlanDecided(plan=plan, next_iteration=first, action="start", finish=None, reason="start"), at - 10
    for i in range(first, last + 1):
        at += 2
        yield commit(i, 2.0), at
    yield journal.JobEnded(exit_code=1, state="cancelled", reason="requeued"), at


def test_a_second_attempt_that_repeats_80_iterations(tmp_path: Path, ledger_url: str) -> None:
    run = "00000000-0000-0000-0000-00000000000a"
    write(tmp_path, ledger_url, ("a", attempt("a", BEGAN, 1, 100, run)))
    with Reader.open(ledger_url) as reader:
        assert reader.account(reader.job("a")).lost_gpu_hours["rollback"] == 0.0  # as long as nobody repeats them
    write(tmp_path, ledger_url, ("b", attempt("b", BEGAN + 1000, 21, 120, run)))
    write(tmp_path, ledger_url, ("c", attempt("c", BEGAN + 2000, 1, 50, "")))
    with Reader.open(ledger_url) as reader:
        first, second, alone = (reader.account(reader.job(name)) for name in "abc")
        every = {job["name"]: account for job, account in fleet_costs.accounts(reader)}
    assert (first.useful_s, first.lost_s["rollback"]) == pytest.approx((40.0, 160.0), abs=1e-3)
    assert first.lost_gpu_hours["rollback"] == pytest.approx(160 * 12 / 3600, abs=1e-5)
    assert first.lost_gpu_hours["start"] == pytest.approx(100 * 12 / 3600, abs=1e-5)
    assert first.gpu_hours == pytest.approx(300 * 12 / 3600, abs=1e-5)
    assert first.failure_gpu_hours == first.lost_gpu_hours["rollback"]
    assert first.goodput == pytest.approx(1.0)
    assert (second.useful_s, second.lost_s["rollback"]) == pytest.approx((200.0, 0.0), abs=1e-3)
    assert (alone.useful_s, alone.lost_s["rollback"]) == pytest.approx((100.0, 0.0), abs=1e-3)
    assert every == {"a": first, "b": second, "c": alone}


def test_attempts_in_other_ledgers_count_too(tmp_path: Path) -> None:
    run = "00000000-0000-0000-0000-00000000000a"
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in "ab"]
    write(tmp_path, urls[0], ("a", attempt("a", BEGAN, 1, 100, run)))
    write(tmp_path, urls[1], ("b", attempt("b", BEGAN + 1000, 21, 120, run)))
    with Reader.open(urls[1]) as reader:
        others = reader.attempts(run)
    with Reader.open(urls[0]) as reader:
        [(_, found)] = fleet_costs.accounts(reader, others=others)
        [(_, alone)] = fleet_costs.costs_of(reader, reader.job(), others=others)
    assert found.lost_s["rollback"] == pytest.approx(160.0, abs=1e-3)
    assert alone == found


def test_a_start_of_64_nodes_that_failed(tmp_path: Path, ledger_url: str) -> None:
    def dies() -> Iterator[tuple[journal.AnyEntry, float]]:
        yield msgspec.structs.replace(started("big"), nodes=64, gpus_per_node=8), BEGAN
        yield journal.NodeJoined(node="n1", host="h", devices=8), BEGAN + 60
        yield journal.JobEnded(exit_code=1, state="failed", reason="nodes did not come"), BEGAN + 2400

    write(tmp_path, ledger_url, ("big", dies()))
    with Reader.open(ledger_url) as reader:
        frame = queries.cost(reader, price=2.5).set_index("cause")
        [row] = queries.cost_by(reader, "week").to_dict("records")
    assert frame["gpu_hours"]["start"] == pytest.approx(64 * 8 * 40 / 60)
    assert frame["money"].sum() == pytest.approx(64 * 8 * 40 / 60 * 2.5)
    assert frame["gpu_hours"].sum() == frame["gpu_hours"]["start"]
    assert (row["gpu_hours"], row["useful_share"]) == (pytest.approx(64 * 8 * 40 / 60), 0.0)


def test_accounts_that_were_kept_before_there_was_a_start_are_reckoned_anew(url: str) -> None:
    with Reader.open(url) as reader:
        jobs = [job for job in reader.jobs() if job["state"] != "running"]
        found = {job["id"]: one for job in jobs if (one := reader.account(reader.job(job["name"]))).lost_s["redo"]}
    whole, thinned = sorted(found)[:2]
    for number in (whole, thinned):
        account = found[number]
        old = {
            "wall_s": account.wall_s, "useful_s": account.useful_s, "committed_s": account.committed_s, "failures": 2,
            "goodput": account.goodput, "ettr": account.ettr, "mtbf_s": 1.0, "mttr_s": 1.0, "devices": account.devices,
            "gpu_hours": account.wall_s * account.devices / 3600,
            "lost_s": {cause: account.lost_s[cause] for cause in CAUSES if cause not in ("start", "rollback")},
        }  # fmt: skip
        old["lost_s"]["other"] -= max(account.held_s - account.wall_s - account.lost_s["start"], 0.0)
        old["lost_gpu_hours"] = {cause: each * account.devices / 3600 for cause, each in old["lost_s"].items()}
        kept = msgspec.json.encode(old).decode()
        change(url, update(models.JobRow).where(models.JobRow.id == number).values(account=kept))
    with Reader.open(url) as reader:
        assert reader.account(reader.job(f"j{whole}")) == found[whole]
    # One whose rows went meanwhile has the causes that it had; only its start and its end are told anew.
    gone = models.IterationRow.job_id == thinned, models.IterationRow.iteration.between(2, 19)
    change(url, delete(models.IterationRow).where(*gone))
    prune(url, NOW)
    with Reader.open(url) as reader:
        for number in (whole, thinned):
            after = reader.account(reader.job(f"j{number}"))
            assert after.lost_s == pytest.approx(found[number].lost_s, abs=1e-2)
            assert after.gpu_hours == pytest.approx(found[number].gpu_hours)


@pytest.mark.parametrize("odd", [{"lost_gpu_hours": {}}, {"held_s": 1e300}, {"held_s": -1.0}], ids=str)
def test_an_account_that_was_imported_may_say_anything(url: str, odd: dict[str, Any]) -> None:
    settle(url, range(JOBS + 1))
    with Reader.open(url) as reader:
        job = next(job for job in reader.jobs() if job["state"] != "running")
        whole = reader.account(reader.job(job["name"]))
        before = [fleet_costs.accounts(reader, period=period, now=NOW) for period in PERIODS]
    account = msgspec.json.encode(msgspec.to_builtins(whole) | odd).decode()
    change(url, update(models.JobRow).where(models.JobRow.id == job["id"]).values(account=account))
    with Reader.open(url) as reader:
        after = [fleet_costs.accounts(reader, period=period, now=NOW) for period in PERIODS]
    for one, other in zip(before, after, strict=True):
        assert sums([part for _, part in other]) == pytest.approx(sums([part for _, part in one]))


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("owner", {"user0", "user1", "user2"}),
        ("account", {"lab0", "lab1", "-"}),
        ("partition", {"gpu"}),
        ("cluster", {"c"}),
    ],
)
def test_whose_it_was(url: str, by: Any, names: set[str]) -> None:
    since = MONDAY + WEEK
    with Reader.open(url) as reader:
        rows = queries.cost_by(reader, by, since=since, until=since + WEEK, price=2.0).to_dict("records")
        whole = queries.cost(reader, since=since, until=since + WEEK)
        jobs = queries.cost_by(reader, "job", since=since, until=since + WEEK)
    assert {row[by] for row in rows} == names
    assert sum(row["gpu_hours"] for row in rows) == pytest.approx(whole["gpu_hours"].sum())
    assert sum(row["money"] for row in rows) == pytest.approx(2.0 * whole["gpu_hours"].sum())
    assert sum(row["jobs"] for row in rows) == len(jobs) < JOBS
    assert [row["gpu_hours"] for row in rows] == sorted((row["gpu_hours"] for row in rows), reverse=True)


def test_a_job_that_fell_silent_costs_a_day_more_whatever_its_row_says(url: str) -> None:
    with Reader.open(url) as reader:
        silent = next(job for job in reader.jobs() if job["state"] == "running")
        soon, late = (
            reader.account(reader.job(silent["uuid"]), silent["last_entry_at"] + timedelta(days=days)).gpu_hours
            for days in (1, 300)
        )
    assert soon == late
