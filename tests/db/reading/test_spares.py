"""What one more spare would have saved: the planner is asked again, with a node more, and its share is of what was
measured."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from resihp.db.reading import queries
from resihp.db.reading.plans import plan_rows
from resihp.db.reading.queries import Reader
from resihp.db.retention import prune
from resihp.db.writer import Ledger
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from resihp.scheduler import Situation, decide
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.explained.recorded import basis_of
from resihp.wrapper.job_folder import create_local_job
from tests.db.conftest import BEGAN, outcome, write_journal
from tests.db.reading.test_explanations import DECLARE, GRID, MODEL, NODES, TIMES
from tests.wrapper.commands.status.test_status import home, resihp

__all__ = ["home"]
Told = Iterator[tuple[journal.AnyEntry, float]]
FIRST = Plan(epoch=1, layout=GRID, assignment=spread(16, 2))


def situation(*available: int, **changes: Any) -> Situation:
    given: dict[str, Any] = {
        "epoch": 2,
        "base": GRID,
        "available": available,
        "nodes": NODES,
        "model": MODEL,
        "micro_batches": 16,
        "tokens": MODEL.sequence,
        "tp": 2,
        "pp": 2,
        "memory_bytes": 80_000_000_000,
        "profile": TIMES,
    }
    return Situation(**given | changes)


def lost_story(now: Situation, *, told: bool = True, name: str = "7") -> Told:
    """8 devices: 10 iterations of 1 s with all, then 10 of 2.5 s with what the planner made of the rest."""
    decision = decide(now)
    yield (
        journal.JobStarted(
            job=name,
            command=("python", "train.py"),
            nodes=2,
            gpus_per_node=4,
            tp=2,
            pp=2,
            schedule="1f1b",
            host="here",
            user="me",
            restart_count=0,
            version="0.1.0",
            configuration={"job": {"memory_per_device": 80_000_000_000}},
        ),
        BEGAN,
    )
    for rank, node in NODES.items():
        if rank % 4 == 0:
            yield journal.NodeJoined(node=node, host=node, devices=4), BEGAN
        yield journal.WorkerStarted(rank=rank, node=node, device=rank % 4, pid=rank, epoch=0), BEGAN
    yield journal.ModelDeclared(declare=DECLARE), BEGAN
    healthy = basis_of(situation(*range(8)), ()) if told else None
    yield (
        journal.PlanDecided(
            plan=FIRST, next_iteration=1, action="start", finish=None, reason="start", unit="s", basis=healthy
        ),
        BEGAN,
    )
    yield journal.PlanInEffect(epoch=1), BEGAN
    at = BEGAN
    for i in range(1, 11):
        at += 1.0
        yield journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=1.0, predicted_seconds=None), at
    yield (
        journal.PlanDecided(
            plan=decision.plan,
            next_iteration=11,
            action="redo",
            finish=None,
            reason="lost",
            predicted=decision.seconds,
            unit="s",
            basis=basis_of(now, ()) if told else None,
        ),
        at,
    )
    yield journal.PlanInEffect(epoch=2), at
    for i in range(11, 21):
        at += 2.5
        yield journal.IterationCommitted(epoch=2, outcome=outcome(i), seconds=2.5, predicted_seconds=None), at
    yield journal.JobEnded(exit_code=0, state="completed", reason="done"), at


def found_of(url: str, folder: Path, told: Told) -> None:
    folder.mkdir(exist_ok=True)
    with Ledger.open(url, folder) as ledger:
        for record in write_journal(folder / "journal", told):
            ledger.submit(record)
        assert ledger.flush(30)


def found(url: str, folder: Path, told: Told) -> dict[str, Any]:
    found_of(url, folder, told)
    with Reader.open(url) as reader:
        (row,) = plan_rows.spares_rows(reader, reader.job())
        frame = queries.spares(reader)
    assert list(frame.columns) == list(queries.COLUMNS["spares"])
    assert list(frame["saved_seconds"]) == [row["saved_seconds"]]
    return row


def test_a_spare_makes_up_for_a_lost_node(ledger_url: str, tmp_path: Path) -> None:
    """With one more the planner has all eight again: as the first plan, so that the others' share is lost."""
    now = situation(0, 1, 2, 3)
    row = found(ledger_url, tmp_path, lost_story(now))
    full = iteration_seconds(FIRST, situation(*range(8)))
    share = 1.0 - full / decide(now).seconds
    assert 0.3 < share < 0.6
    assert (row["decisions"], row["untold"], row["iterations"], row["measured_seconds"]) == (1, 0, 10, 25.0)
    assert row["saved_seconds"] == pytest.approx(25.0 * share, rel=0.02)
    assert row["saved_gpu_hours"] == pytest.approx(row["saved_seconds"] * 8 / 3600)
    assert row["spare_gpu_hours"] == pytest.approx(35.0 * 4 / 3600)


def test_it_saves_no_more_than_what_was_lost(ledger_url: str, tmp_path: Path) -> None:
    """All are there: a node more would be faster still, which is no loss that it makes up for."""
    row = found(ledger_url, tmp_path, lost_story(situation(*range(8))))
    assert (row["decisions"], row["saved_seconds"]) == (1, 0.0)


def test_a_spare_stands_in_for_what_is_slow(ledger_url: str, tmp_path: Path) -> None:
    row = found(ledger_url, tmp_path, lost_story(situation(*range(8), speeds={4: 0.4})))
    assert 0.0 < row["saved_seconds"] < 25.0


def test_what_older_journals_do_not_tell_is_counted(ledger_url: str, tmp_path: Path) -> None:
    row = found(ledger_url, tmp_path, lost_story(situation(0, 1, 2, 3), told=False))
    assert (row["decisions"], row["untold"], row["saved_seconds"]) == (0, 1, 0.0)


SMALL = {"name": "x", "uuid": "u", "started_at": None, "nodes": 1, "gpus_per_node": 1}


def test_a_layout_that_makes_no_sense_is_counted_as_such() -> None:
    from resihp.db.reading.plans import spares

    job = SMALL | {"model": "{", "configuration": "{"}
    row = {"epoch": 2, "basis": {}, "layout": {}, "assignment": [], "in_effect_at": None}
    times = [{"iteration": e, "epoch": e, "seconds": 1.0} for e in (1, 2)]
    told = spares.saved(job, [row | {"epoch": 1}, row], {}, times, 2.0)
    assert (told["decisions"], told["untold"]) == (0, 1)


def test_rows_that_were_thinned_tell_the_same(ledger_url: str, tmp_path: Path) -> None:
    before = found(ledger_url, tmp_path, lost_story(situation(0, 1, 2, 3)))
    assert prune(ledger_url, datetime.fromtimestamp(BEGAN, UTC) + timedelta(days=1))
    with Reader.open(ledger_url) as reader:
        job = reader.job()
        assert len(reader.narrow("iterations", job["id"])) < 20
        (after,) = plan_rows.spares_rows(reader, job)
    assert after == before


def test_an_end_before_the_start_holds_no_spare() -> None:
    from resihp.db.reading.plans import spares

    job = SMALL | {"model": None, "configuration": "{}"}
    assert spares.saved(job, [], {}, [], -7200.0)["spare_gpu_hours"] == 0.0


def test_the_newest_jobs_may_be_asked_for_alone(ledger_url: str, tmp_path: Path) -> None:
    for number in ("7", "8"):
        found_of(ledger_url, tmp_path / number, lost_story(situation(0, 1, 2, 3), name=number))
    with Reader.open(ledger_url) as reader:
        assert len(plan_rows.spares_rows(reader)) == 2
        assert [row["job"] for row in plan_rows.spares_rows(reader, jobs=1)] == ["8"]


def test_the_command_says_what_is_assumed() -> None:
    job = create_local_job()
    write_journal(job.journal_file, lost_story(situation(0, 1, 2, 3), name=job.name))
    job.exit_code_file.write_text("0\n")
    for options in ((), ("--all", "--since", "2020-01-01")):
        told = resihp("history", "spares", *options).stdout
        assert "assumptions: one more healthy spare node" in told
    assert resihp("history", "spares", "--csv").stdout.splitlines()[0].endswith("saved_gpu_hours,spare_gpu_hours")
