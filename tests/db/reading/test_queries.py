"""What the ledger answers: a job's figures, frames with the types that pandas users expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from resihp.db.reading import fleet, queries
from resihp.db.reading.iterations.newest import newest_iterations
from resihp.db.reading.plans import plan_rows
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.errors import JobNotFoundError, UsageError
from resihp.record import journal
from tests.db.conftest import BEGAN, any_layout_story, write_journal


@pytest.fixture
def reader(records: list[journal.Record], open_ledger: Callable[..., Ledger]) -> Iterator[Reader]:
    ledger = open_ledger()
    for record in records:
        ledger.submit(record)
    assert ledger.close()
    with Reader.open(ledger.url) as reader:
        yield reader


def test_summary(reader: Reader) -> None:
    figures = reader.summary(reader.job("local-1")["id"])
    assert figures["committed_iterations"] == figures["iteration"] == 20
    assert figures["useful_seconds"] == pytest.approx(11 * 0.5 + 9 * 0.6 * 8 / 12)
    # From the first iteration's start to the last commit: 11 healthy ones, 1.3 s with the failure, 8 more.
    assert figures["wall_seconds"] == pytest.approx(5.5 + 1.3 + 8 * 0.6, abs=1e-4)
    assert figures["goodput"] == pytest.approx(9.1 / 11.6, abs=1e-4)
    assert figures["ettr"] == pytest.approx(9.1 / 13.9, abs=1e-4)
    assert figures["lost_seconds"] == pytest.approx(
        {"fail-stop": 0.7, "idle": 1.35, "capacity": 0.45, "other": 0.0}, abs=1e-4
    )
    assert figures["loss"] == 2.0
    assert figures["iteration_seconds"] == 0.5, "the median of the last 20"


def test_a_job_is_found_by_its_uuid_alone(reader: Reader) -> None:
    """Without a name, the newest job was returned, whatever the uuid."""
    [job] = reader.jobs()
    assert reader.job(uuid=job["uuid"])["id"] == job["id"]
    with pytest.raises(JobNotFoundError, match="job 0000: not in ledger"):
        reader.job(uuid="0000")


def test_summary_of_a_running_job_counts_until_now(reader: Reader) -> None:
    [job] = reader.jobs()
    iterations = reader.rows("iterations", job["id"])
    running = {**job, "state": "running", "ended_at": None}
    now = iterations[-1]["finished_at"] + timedelta(seconds=10)
    figures = queries.summarise(running, iterations, [], [], [], now)
    assert figures["wall_seconds"] == pytest.approx(21.6, abs=1e-4)
    assert figures["goodput"] == pytest.approx(10.9 / 21.6, abs=1e-4)


def test_summary_before_anything_happened(reader: Reader) -> None:
    [job] = reader.jobs()
    figures = queries.summarise(job, [], [], [], [], datetime.now(UTC))
    assert figures["goodput"] is None
    assert figures["iteration"] == 0


def test_time_lost_to_a_change_of_layout_without_a_failure_has_its_own_name(
    tmp_path: Path, open_ledger: Callable[..., Ledger]
) -> None:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", any_layout_story()):
        ledger.submit(record)
    assert ledger.close()
    with Reader.open(ledger.url) as reader:
        [job] = reader.jobs()
        now = reader.rows("iterations", job["id"])[-1]["finished_at"]
        figures = reader.summary(job["id"], now)
    # Iterations of 0.5, 0.6 and 0.5 s end 2.0, 3.2 and 4.8 s after the start: 0.6 and 1.1 s between them are lost.
    # One of twelve devices is missing for 0.6 s.
    lost = {"fail-stop": 0.6, "reconfiguration": 1.1, "capacity": 0.05, "other": 0.0}
    assert figures["lost_seconds"] == pytest.approx(lost, abs=1e-4)
    assert figures["epoch"] == 5


def test_status_is_about_the_newest_plan_that_was_not_refused(
    tmp_path: Path, open_ledger: Callable[..., Ledger]
) -> None:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", any_layout_story()):
        ledger.submit(record)
        if isinstance(record.entry, journal.PlanRefused):
            break
    assert ledger.close()
    with Reader.open(ledger.url) as reader:
        [plan] = reader.shown_plan(reader.jobs()[0]["id"])
    assert plan["epoch"] == 1
    assert len(plan["layout"]["replicas"]) == 3


def test_a_failure_that_nobody_mended_costs_until_the_end(reader: Reader) -> None:
    [job] = reader.jobs()
    iterations = reader.rows("iterations", job["id"])[:11]
    [failure] = reader.rows("failures", job["id"])
    end = iterations[-1]["finished_at"] + timedelta(seconds=30)
    failure |= {"recovered_epoch": None, "kind": "program"}
    figures = queries.summarise({**job, "state": "failed", "ended_at": end}, iterations, [failure], [], [], end)
    assert figures["lost_seconds"]["program"] == pytest.approx(30)


def test_an_iteration_without_seconds_counts_as_a_typical_one(reader: Reader) -> None:
    [job] = reader.jobs()
    iterations = reader.rows("iterations", job["id"])[:5]
    iterations[3]["seconds"] = None
    figures = queries.summarise(job, iterations, [], [], [], datetime.now(UTC))
    assert figures["useful_seconds"] == pytest.approx(2.5)


def test_frames(reader: Reader) -> None:
    job = reader.job()["id"]
    iterations = queries.iterations(reader, job)
    assert len(iterations) == 20
    assert iterations["predicted_seconds"].isna().sum() == 12
    assert str(iterations["finished_at"].dt.tz) == "UTC"
    assert iterations["finished_at"].iloc[0] == pd.Timestamp(BEGAN + 2.5, unit="s", tz="UTC")
    workers = queries.workers(reader, job)
    assert workers["exit"].dtype == "Int64"
    assert workers.set_index("rank")["exit"][5] == -9
    failures = queries.failures(reader, job)
    assert failures["seconds_to_recover"].tolist() == [1.02]
    assert failures["noticed_after_seconds"].tolist() == [0.02]
    assert failures["seconds_without_noticing"].tolist() == [1.0]
    assert queries.plans(reader, job)["standby"].tolist() == [0, 3]
    assert queries.nodes(reader, job)["node"].tolist() == ["n1", "n2", "n3"]
    assert queries.reconfigurations(reader, job)["attempts"].tolist() == [1]
    empty = queries.frame(reader, "drains", job)
    assert list(empty.columns) == [
        *("drain", "node", "failure", "step", "outcome", "reason", "drained_at", "undrained_at", "answers")
    ]


def test_filters(reader: Reader) -> None:
    job = reader.job()["id"]
    cut = datetime.fromtimestamp(BEGAN + 2.0 + 5.6, UTC)
    assert len(reader.rows("iterations", job, until=cut)) == 11
    assert len(reader.rows("iterations", job, since=cut)) == 9
    assert [row["rank"] for row in reader.rows("workers", job, node="n2")] == [4, 5, 6, 7]
    assert [row["iteration"] for row in reader.rows("iterations", job, last=2)] == [19, 20]
    with pytest.raises(UsageError, match="history plans: has no nodes"):
        reader.rows("plans", job, node="n1")


def test_unknown_job(reader: Reader) -> None:
    with pytest.raises(JobNotFoundError, match=r"job nix: not in ledger .* which holds local-1"):
        reader.job("nix")


def test_what_happened_at_the_end_of_a_time_is_in_the_next_one(reader: Reader) -> None:
    """As costs are cut: of two times that follow one another nothing counts twice."""
    job = reader.job()
    [failure] = reader.rows("failures", job["id"])
    at, began = failure["noticed_at"], job["started_at"]
    asked: dict[str, tuple[datetime, Callable[..., Any]]] = {
        "failures": (at, lambda **when: reader.rows("failures", None, **when)),
        "failures of a job": (at, lambda **when: reader.rows("failures", job["id"], **when)),
        "by node": (at, lambda **when: fleet.failures_by(reader, "node", **when)),
        "counted": (at, lambda **when: range(reader.count("failures", job["id"], **when))),
        "iterations": (
            reader.rows("iterations", job["id"])[0]["finished_at"],
            lambda **when: newest_iterations(reader, 100, **when),
        ),
        "decisions": (
            reader.rows("plans", job["id"])[0]["decided_at"],
            lambda **when: plan_rows.decisions_rows(reader, job["id"], **when),
        ),
        "jobs": (began, lambda **when: reader.jobs(**when)),
        "spares": (began, lambda **when: plan_rows.spares_rows(reader, **when)),
    }
    counts = {name: (len(of(until=end)), len(of(since=end)) > 0) for name, (end, of) in asked.items()}
    assert counts == {name: (0, True) for name in asked}
