"""What the commands show of a script that does not report to resihp, and prints its iterations."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.db.writer import Ledger
from resihp.protocol.messages import StepOutcome
from resihp.record import journal
from resihp.wrapper.commands.status import tables
from resihp.wrapper.job_folder import create_local_job, find_job, take_lock
from resihp.wrapper.sinks.figures import followed
from tests.db.conftest import started, write_journal
from tests.resihp.controller.direct import DECLARE
from tests.wrapper.commands.status.test_status import resihp


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("COLUMNS", "80")


EVERY, GOAL, PACE_S = 10, 500, 0.8
MARGIN_S = 20.0


def printed(iteration: int, seconds: float = PACE_S) -> journal.IterationCommitted:
    loss = None if iteration % 20 else 10.0 / iteration
    return journal.IterationCommitted(
        epoch=0, outcome=StepOutcome.printed(iteration, loss), seconds=seconds, predicted_seconds=None
    )


def entries(last: int, *more: tuple[journal.AnyEntry, float]) -> list[tuple[journal.AnyEntry, float]]:
    """A script that prints every tenth iteration, with seconds since its start."""
    rows: list[tuple[journal.AnyEntry, float]] = [(started("local-1"), 0.0)]
    rows.append((journal.CounterSeen(rank=3, iteration=EVERY, goal=GOAL), MARGIN_S))
    rows += [(printed(i), MARGIN_S + i * PACE_S) for i in range(EVERY, last + 1, EVERY)]
    return rows + list(more)


def shown(*arguments: str) -> str:
    return " ".join(resihp(*arguments).stdout.split())


def write(told: list[tuple[journal.AnyEntry, float]], *, ended_s_ago: float = 0.0) -> str:
    job = create_local_job()
    began = time.time() - told[-1][1] - ended_s_ago
    with Ledger.open("sqlite", job.folder) as ledger:
        for record in write_journal(job.journal_file, ((entry, began + at) for entry, at in told)):
            ledger.submit(record)
    job.set_ledger(ledger.url)
    if isinstance(told[-1][0], journal.JobEnded):
        job.exit_code_file.write_text("0\n")
    return job.name


def running(name: str) -> dict[str, Any]:
    """The status of the job while its supervisor holds its lock."""
    lock = take_lock(find_job(name))
    assert lock is not None
    try:
        return dict(json.loads(resihp("status", name, "--json").stdout))
    finally:
        os.close(lock)


def test_a_script_that_has_ended_has_its_iterations_its_goodput_and_its_reasons() -> None:
    slow = [(printed(410, 1.6), MARGIN_S + 400 * PACE_S + 16.0)]
    end = (journal.JobEnded(exit_code=0, state="completed", reason="done"), 400.0)
    name = write([*entries(400), *slow, end])
    status: dict[str, Any] = json.loads(resihp("status", name, "--json").stdout)
    assert (status["iteration"], status["target"], status["tokens_per_second"]) == (410, GOAL, None)
    assert status["iteration_seconds"] == pytest.approx(PACE_S)
    assert status["goodput"] == pytest.approx(1.0, abs=0.01)
    assert f"iteration 410 of {GOAL}" in shown("status", name)
    rows = json.loads(resihp("history", "iterations", name, "--json").stdout)["rows"]
    assert [row["iteration"] for row in rows] == list(range(10, 411, 10))
    assert [row["loss"] for row in rows[:2]] == [None, 0.5]
    assert "iteration 410 took 1.60 s, 2.00 times the 0.80 s usual for this job" in shown("why", "410", name)
    assert "iteration 410 took 1.60 s" in shown("why", "405", name), "its line stands for the ten before it"
    assert "trained" in (report := shown("report", name, "--markdown"))
    assert "is known" not in report + shown("history", "cost", name)


def test_counters_of_metrics_agree_with_the_ledger() -> None:
    end = (journal.JobEnded(exit_code=0, state="completed", reason="done"), 400.0)
    told = entries(400, end)
    name = write(told)
    status: dict[str, Any] = json.loads(resihp("status", name, "--json").stdout)
    records = [journal.Record(seq, 1e9 + at, entry) for seq, (entry, at) in enumerate(told, 1)]
    figures = followed(records)
    assert (figures.iteration, figures.iterations, figures.tokens) == (400, 391, 0)
    assert figures.goodput(1e9 + 400.0) == pytest.approx(status["goodput"], abs=0.01)
    assert figures.useful_s() == pytest.approx(status["useful_seconds"], rel=0.01)


def test_iterations_that_are_done_again_are_told_apart_from_a_hang() -> None:
    seen = journal.CounterSeen(rank=3, iteration=310, furthest=400, goal=GOAL)
    name = write(entries(400, (seen, MARGIN_S + 900.0)), ended_s_ago=5.0)
    status = running(name)
    assert (status["iteration"], status["redone"], status["stuck"]) == (400, 310, False)
    assert status["eta_seconds"] == pytest.approx((GOAL - 310) * PACE_S)
    assert tables.progress_line(status) == "iteration 310 is done again, done in about 2 min 32 s"


def test_time_left_follows_from_lines_that_were_read_together() -> None:
    """Twenty lines, read once a second."""
    told: list[tuple[journal.AnyEntry, float]] = [(started("local-1"), 0.0)]
    told.append((journal.CounterSeen(rank=0, iteration=1, goal=1200), 1.0))
    told += [(printed(20 * second + i, 0.05), 1.0 + second) for second in range(10) for i in range(1, 21)]
    name = write(told)
    assert running(name)["eta_seconds"] == pytest.approx(50.0, abs=3.0)


def test_a_restart_costs_what_it_took_until_the_counter_had_passed_its_furthest() -> None:
    failure = journal.FailureFound(
        failure=1, kind="fail-stop", component="process", cause="rank 1 killed", ranks=(1,), node="n1", device=1,
        iteration=401, epoch=0, evidence="", detect_s=None, noticed_s=0.0, failed_s=1.0,
    )  # fmt: skip
    stopped = MARGIN_S + 400 * PACE_S + 2.0
    mended = journal.Reconfigured(
        epoch=1, failures=(1,), attempts=1, action="redo", park_s=1.0, plan_s=0.0, groups_s=0.0, state_s=0.0,
        first_iteration_s=9.0, seconds=10.0,
    )  # fmt: skip
    after = msgspec.structs.replace(printed(410), epoch=1)
    end = journal.JobEnded(exit_code=0, state="completed", reason="done")
    name = write(entries(400, (failure, stopped), (mended, stopped + 10), (after, stopped + 50), (end, stopped + 51)))
    status: dict[str, Any] = json.loads(resihp("status", name, "--json").stdout)
    assert status["lost_seconds"]["fail-stop"] == pytest.approx(52.0 - 10 * PACE_S, abs=0.1)
    assert "MTTR 11.0 s" in shown("history", "cost", name)
    assert "training was interrupted before it" in shown("why", "410", name)


def test_lines_that_were_read_together_are_all_useful_time() -> None:
    """Ten lines of two iterations each, read once a second."""
    told: list[tuple[journal.AnyEntry, float]] = [(started("local-1"), 0.0)]
    told += [(printed(20 * second + i, 0.05), 1.0 + second) for second in range(60) for i in range(2, 21, 2)]
    told.append((journal.JobEnded(exit_code=0, state="completed", reason="done"), 61.0))
    name = write(told)
    status: dict[str, Any] = json.loads(resihp("status", name, "--json").stdout)
    assert status["goodput"] == pytest.approx(1.0, abs=0.02)
    figures = followed([journal.Record(seq, 1e9 + at, entry) for seq, (entry, at) in enumerate(told, 1)])
    assert figures.goodput(1e9 + 61.0) == pytest.approx(status["goodput"], abs=0.02)


def test_what_was_printed_before_a_model_is_declared_is_forgotten() -> None:
    trains = journal.ModelDeclared(declare=DECLARE)
    name = write(entries(400, (trains, 400.0)))
    status = running(name)
    assert (status["iteration"], status["loss"], status["target"]) == (0, None, DECLARE.iterations)
    assert json.loads(resihp("history", "iterations", name, "--json").stdout)["rows"] == []
