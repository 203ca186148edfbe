"""Every decision of a job: what called for it, what else was possible, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from resihp.db import models
from resihp.db.reading import queries
from resihp.db.reading.plans import plan_rows
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from tests.db.conftest import BEGAN, DP3, outcome, started, write_journal
from tests.db.reading.test_costs import change

Told = Iterator[tuple[journal.AnyEntry, float]]
Opener = Callable[..., Ledger]


def plan(epoch: int, **changes: Any) -> journal.PlanDecided:
    given: dict[str, Any] = {
        "plan": Plan(epoch=epoch, layout=DP3, assignment=spread(12, 3)),
        "next_iteration": 1,
        "action": "start" if epoch == 1 else "redo",
        "finish": None,
        "reason": "start",
        "predicted": 0.5,
        "unit": "s",
    }
    return journal.PlanDecided(**given | changes)


def commits(epoch: int, first: int, last: int, seconds: float, at: float) -> Told:
    for i in range(first, last + 1):
        at += seconds
        yield journal.IterationCommitted(epoch=epoch, outcome=outcome(i), seconds=seconds, predicted_seconds=0.5), at


def decided_story() -> Told:
    """A start; a slow device for which the plan stays; a plan that rank 3 refuses, the next one in effect, a node asked
    for and one not; a plan that is taken back as the job stops."""
    yield started(), BEGAN
    yield plan(1), BEGAN + 1
    yield journal.PlanInEffect(epoch=1), BEGAN + 2
    yield from commits(1, 1, 10, 0.5, BEGAN + 2)
    yield (
        journal.ChangeDeclined(
            about="plan",
            reason="n2 device 1 is slow",
            why="would save 3.0% of the time, but may pass",
            iteration=11,
            failures=(1,),
            layout="a layout without it",
            predicted=0.49,
            present=0.51,
            unit="s",
            considered=(
                journal.OtherPlan(name="all devices", predicted=0.56),
                journal.OtherPlan(name="odd", predicted=1),
            ),
        ),
        BEGAN + 8,
    )
    others = (journal.OtherPlan(name="without replica 1", predicted=0.75),)
    lost = "rank 5 killed"
    yield plan(2, reason=lost, next_iteration=11, predicted=0.6, present=None, considered=others), BEGAN + 9
    yield journal.PlanRefused(epoch=2, rank=3, reason="its shapes differ"), BEGAN + 10
    yield plan(3, reason=lost, next_iteration=11, predicted=0.6, present=None, considered=others), BEGAN + 11
    yield journal.PlanInEffect(epoch=3), BEGAN + 12
    yield from commits(3, 11, 20, 0.62, BEGAN + 12)
    yield journal.ReplacementAsked(replacement=1, node="n2", excluded=(), reason="8 of 12 ranks have work"), BEGAN + 20
    yield (
        journal.ReplacementChanged(replacement=1, state="joined", slurm_job="77", node="n9", text=""),
        BEGAN + 50,
    )
    yield (
        journal.ChangeDeclined(about="node", reason="node n3 lost", why="the job ends before it pays", iteration=21),
        BEGAN + 60,
    )
    yield plan(4, reason="node n9 joined", next_iteration=21), BEGAN + 61
    yield journal.PlanWithdrawn(epoch=4, reason="the job is to stop"), BEGAN + 62


def rows(open_ledger: Opener, tmp_path: Path, told: Told) -> list[dict[str, Any]]:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", told):
        ledger.submit(record)
    assert ledger.close(30)
    with Reader.open(ledger.url) as reader:
        job = reader.job()["id"]
        found = plan_rows.decisions_rows(reader, job)
        frame = queries.decisions(reader, job)
    assert list(frame.columns) == list(queries.COLUMNS["decisions"])
    assert len(frame) == len(found)
    assert [str(frame[name].dtype) for name in ("at", "epoch", "predicted")] == [
        *("datetime64[ns, UTC]" if "ns" in str(frame["at"].dtype) else "datetime64[us, UTC]", "Int64", "float64")
    ]
    return found


def test_every_decision_has_a_row(open_ledger: Opener, tmp_path: Path) -> None:
    found = rows(open_ledger, tmp_path, decided_story())
    assert [(row["kind"], row["epoch"], row["advice"]) for row in found] == [
        ("plan", 1, "start"),
        ("plan stays", None, "n2 device 1 is slow"),
        ("plan", 2, "rank 5 killed"),
        ("plan", 3, "rank 5 killed"),
        ("node", None, "8 of 12 ranks have work"),
        ("no node", None, "node n3 lost"),
        ("plan", 4, "node n9 joined"),
    ]
    first, stays, refused, taken, node, no_node, back = found
    assert (first["outcome"], first["refused"], first["measured"]) == ("promised nothing", [], 0.5)
    assert stays["failures"] == [1]
    assert stays["action"] == "the plan stays: would save 3.0% of the time, but may pass"
    assert stays["refused"] == [
        {"name": "a layout without it", "predicted": 0.49, "why": "would save 3.0% of the time, but may pass"},
        {"name": "all devices", "predicted": 0.56, "why": "14.3% slower"},
        {"name": "odd", "predicted": 1.0, "why": "104.1% slower"},
    ]
    assert stays["outcome"] == "in effect until epoch 3", "epoch 2 was refused"
    assert refused["outcome"] == "refused by rank 3: its shapes differ"
    assert refused["refused"] == [{"name": "without replica 1", "predicted": 0.75, "why": "25.0% slower"}]
    assert (taken["outcome"], taken["promised"], taken["measured"]) == ("kept its promise", 1.2, 0.62)
    assert abs(taken["kept"] - 1.24) < 1e-9
    assert (node["action"], node["outcome"]) == ("a node is requested in place of n2", "joined, node n9 after 30 s")
    assert no_node["action"] == "no other node is requested: the job ends before it pays"
    assert back["outcome"] == "rolled back: the job was to stop"


def test_a_period_may_be_asked_for(open_ledger: Opener, tmp_path: Path) -> None:
    found = rows(open_ledger, tmp_path, decided_story())
    ledger_rows = [row["at"] for row in found]
    ledger = open_ledger()
    with Reader.open(ledger.url) as reader:
        part = plan_rows.decisions_rows(reader, reader.job()["id"], since=ledger_rows[2], until=ledger_rows[4])
    ledger.close(30)
    assert [row["at"] for row in part] == ledger_rows[2:4]


def test_journals_of_before_tell_plans_alone(open_ledger: Opener, tmp_path: Path) -> None:
    def told() -> Told:
        yield started(), BEGAN
        yield plan(1, predicted=None, unit="layer times"), BEGAN + 1
        yield from commits(1, 1, 3, 0.5, BEGAN + 2)

    (row,) = rows(open_ledger, tmp_path, told())
    assert (row["predicted"], row["refused"], row["measured"]) == (None, [], 0.5)


def test_clocks_that_were_set_back_and_odd_candidates(open_ledger: Opener, tmp_path: Path) -> None:
    """Another supervisor's clock is two hours behind; a candidate was faster, and more would have had to be moved."""

    def told() -> Told:
        yield started(), BEGAN
        yield plan(1), BEGAN + 1
        yield journal.PlanInEffect(epoch=1), BEGAN + 2
        yield (
            journal.ChangeDeclined(about="plan", reason="n2 is slow", why="may pass", iteration=11, predicted=0.5),
            BEGAN + 8,
        )
        asked = journal.ReplacementAsked(replacement=1, node="n2", excluded=(), reason="lost")
        yield asked, BEGAN + 9
        back = BEGAN - 7200
        joined = journal.ReplacementChanged(replacement=1, state="joined", slurm_job="77", node="n9", text="")
        yield joined, back + 10
        others = (journal.OtherPlan(name="wide", predicted=0.45), journal.OtherPlan(name="same", predicted=0.5))
        yield plan(2, next_iteration=15, considered=others), back + 11
        yield journal.PlanInEffect(epoch=2), back + 12

    found = {row["kind"]: row for row in rows(open_ledger, tmp_path, told()) if row["epoch"] != 1}
    assert found["plan stays"]["outcome"] == "in effect until epoch 2"
    assert found["node"]["outcome"] == "joined, node n9"
    assert [one["why"] for one in found["plan"]["refused"]] == ["10.0% faster", "0.0% slower"]


@pytest.mark.parametrize("odd", ["{}", '"x"', "[1]", '[{"name": "x"}]', '[{"predicted": "x"}]', "[[]]", "null"])
def test_what_an_import_calls_candidates(open_ledger: Opener, tmp_path: Path, odd: str) -> None:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", decided_story()):
        ledger.submit(record)
    assert ledger.close(30)
    change(
        ledger.url,
        update(models.PlanRow).values(considered=odd),
        update(models.DeclinedChangeRow).values(considered=odd),
    )
    with Reader.open(ledger.url) as reader:
        found = plan_rows.decisions_rows(reader, reader.job()["id"])
    assert len(found) == 7
    assert [
        one for row in found for one in row["refused"] if one["why"] != "would save 3.0% of the time, but may pass"
    ] == []
