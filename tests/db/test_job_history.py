"""A job's history is the same whether it is followed record by record or read from a ledger's rows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.db.reading.queries import Reader
from resihp.db.writing.catch_up import catch_up
from resihp.record import journal, journal_file
from resihp.simulator.invariants.violations import Violation
from resihp.simulator.scenarios.plain_jobs import draw_orphaned, draw_plain, draw_stormy
from resihp.simulator.scenarios.probed_jobs import draw_sluggish
from resihp.simulator.scenarios.scenario import Scenario
from resihp.simulator.scenarios.slurm_jobs import draw_allocated
from resihp.simulator.scenarios.stopped_jobs import draw_stopped
from resihp.simulator.world import World
from resihp.wrapper.output.idle_gpus import IdleGpus
from resihp.wrapper.output.job_history import JobHistory, PastPlan
from resihp.wrapper.output.rank_health import rank_health
from tests.db.conftest import BEGAN, started

HISTORY_SEEDS = range(max(2, int(os.environ.get("RESIHP_FUZZ_SEEDS", "500")) // 125))
DRAWS: Sequence[Callable[[int], Scenario]] = (
    draw_plain,
    draw_stormy,
    draw_allocated,
    draw_sluggish,
    draw_stopped,
    draw_orphaned,
)


def records_of(scenario: Scenario, job: str) -> list[journal.Record]:
    """Return the journal of a simulated job; none if it broke a rule. The simulator leaves the first entry out."""
    world = World(scenario)
    try:
        world.run()
    except Violation:
        return []
    settings = world.settings
    began = msgspec.structs.replace(started(job), nodes=settings.nodes, gpus_per_node=settings.gpus_per_node)
    entries = [(0.0, began), *world.entries]
    return [journal.Record(seq, round(BEGAN + at, 6), entry) for seq, (at, entry) in enumerate(entries, 1)]


def comparable(history: JobHistory) -> tuple[dict[str, Any], list[float | None]]:
    """Return all that a history knows, with ranks instead of layouts, and all its times."""

    def plan(past: PastPlan | None) -> Any:
        return None if past is None else (past.epoch, past.begins, past.ranks, past.layout.standby)

    values = {each.name: getattr(history, each.name) for each in dataclasses.fields(history)}
    del values["seq"]
    values["plans"] = [plan(past) for past in history.plans]
    values["proposed"] = plan(history.proposed)
    values["nodes"] = sorted(history.nodes)
    values["failures"] = {number: (*failure[:6], failure.ended) for number, failure in history.failures.items()}
    if not history.running:  # the ledger's reader leaves them out
        del values["suspicions"]
    nodes = [moment for _, node in sorted(history.nodes.items()) for moment in node]
    return values, [*nodes, *(moment for _, failure in sorted(history.failures.items()) for moment in failure.moments)]


def assert_equal(stored: JobHistory, followed: JobHistory) -> None:
    (stored_values, stored_times), (values, times) = comparable(stored), comparable(followed)
    assert stored_values == values
    assert [moment is None for moment in stored_times] == [moment is None for moment in times]
    known = [moment for moment in times if moment is not None]
    stored_known = [moment for moment in stored_times if moment is not None]
    assert stored_known == pytest.approx(known, abs=5e-6, rel=0)  # a database keeps microseconds


def check(records: Sequence[journal.Record], folder: Path, url: str) -> None:
    """Write the records to the ledger, and compare the history from there with the one that followed them."""
    path = folder / "journal.jsonl"
    path.unlink(missing_ok=True)
    written = journal_file.Journal(path, sync=False)
    for record in records:
        written.append(record.entry, record.at)
    written.close()
    catch_up(url, folder, path)
    first = records[0].entry
    assert isinstance(first, journal.JobStarted)
    followed = JobHistory.of_records(records)
    with Reader.open(url) as reader:
        stored = JobHistory.of_ledger(reader, reader.job(first.job))
    assert_equal(stored, followed)
    assert IdleGpus(stored).line() == IdleGpus(followed).line()
    if (plan := followed.shown_plan) is not None:
        assert rank_health(stored, plan.layout) == rank_health(followed, plan.layout)


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_followed_and_stored_histories_are_equal(
    draw: Callable[[int], Scenario], tmp_path: Path, ledger_url: str
) -> None:
    """At the end of a job, and at two moments before."""
    compared = 0
    for seed in HISTORY_SEEDS:
        records = records_of(draw(seed), "")
        for until in {len(records), 2 * len(records) // 3, len(records) // 2} - {0}:
            first = msgspec.structs.replace(records[0].entry, job=f"local-{seed}-{until}")
            check([msgspec.structs.replace(records[0], entry=first), *records[1:until]], tmp_path, ledger_url)
            compared += 1
    assert compared >= 2 * len(HISTORY_SEEDS)
