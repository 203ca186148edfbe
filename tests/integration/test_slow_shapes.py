"""What is slow in real jobs and is no single device for good: a node, everybody, now and then; and observed only.

Devices are emulated (`resihp.executor.emulation`): workers sleep as long as chunks take, so that many of them on few
cores have times of their own. All else is real: processes, reports, probes, supervisor, ledger.
"""

from __future__ import annotations

from typing import Any

import pytest

from resihp.executor.emulation import LAYER_MS
from resihp.record import journal, journal_file
from tests.integration.jobs import Job

ONSET = 16
WATCHED_FROM = 48
"""Iteration: by then, what iterations take is known (from the 32nd on) and has been seen to hold."""

WATCHED = {"RESIHP_ADAPT__DETECT": "true", LAYER_MS: "8"}
LAYERS = ("--layers", "2")
MICRO_BATCHES_PER_REPLICA = 2


def trained(job: Job, *options: str, iterations: int, nodes: int) -> list[Any]:
    """The entries of the journal of a job that ran to its end."""
    job.environment |= WATCHED
    script = (*LAYERS, "--micro-batches", str(MICRO_BATCHES_PER_REPLICA * 2 * nodes))
    job.train(*options, script=script, iterations=iterations, nodes=nodes, gpus=2, tp=1, pp=1).wait()
    assert job.status == 0, job.stderr
    (file,) = (job.folder / "home").rglob("journal")
    entries = [record.entry for record in journal_file.read(file)]
    injected = [entry for entry in entries if isinstance(entry, journal.FaultInjected)]
    assert len(injected) == options.count("--fault"), "a fault did not fire"
    return entries


def verdicts(entries: list[Any]) -> list[journal.FailureFound]:
    found = [entry for entry in entries if isinstance(entry, journal.FailureFound)]
    assert all(entry.kind == "fail-slow" for entry in found)
    return found


def verdicts_on(component: str, entries: list[Any]) -> list[journal.FailureFound]:
    """Where the machine's disk or processors are busy, data or collectives may well be late; that is told as well."""
    return [entry for entry in verdicts(entries) if entry.component == component]


def last_verdict_at(entries: list[Any]) -> int:
    """Iterations committed when the last verdict on a device was journaled."""
    last = verdicts_on("device", entries)[-1]
    return sum(isinstance(entry, journal.IterationCommitted) for entry in entries[: entries.index(last)])


@pytest.mark.alone
def test_both_ranks_of_a_slow_node_are_declared_slow_and_no_other_rank(job: Job) -> None:
    fault = f"slow:node=n2,speed=0.6@iteration={ONSET},phase=forward"
    entries = trained(job, "--fault", fault, iterations=ONSET + 16, nodes=3)
    found = verdicts_on("device", entries)
    assert sorted(entry.ranks for entry in found) == [(2,), (3,)], job.stderr
    assert all(0.5 < (entry.speed or 0.0) < 0.75 for entry in found)
    noticed = last_verdict_at(entries) - ONSET + 1
    print(f"last verdict {noticed} iterations after the onset")
    assert noticed <= 12


@pytest.mark.alone
@pytest.mark.parametrize(
    ("speed", "lasts", "least", "most"),
    [(0.33, 28, 0.28, 0.5), pytest.param(0.7, 60, 0.6, 0.85, marks=pytest.mark.soak)],
    ids=["three-times-as-slow", "a-little"],
)
def test_a_slow_down_of_everybody_is_the_jobs_and_no_device_is_declared_slow(
    job: Job, speed: float, lasts: int, least: float, most: float
) -> None:
    faults = [f"slow:node=n{n},speed={speed}@iteration={WATCHED_FROM},phase=forward" for n in (1, 2)]
    options = [part for fault in faults for part in ("--fault", fault)]
    entries = trained(job, *options, iterations=WATCHED_FROM + lasts, nodes=2)
    (coverage,) = [entry for entry in entries if isinstance(entry, journal.CoverageChanged)]
    assert coverage.iteration < WATCHED_FROM, "what is slow before times are known cannot be told from them"
    assert verdicts_on("device", entries) == [], job.stderr
    (found,) = verdicts_on("job", entries)
    assert (found.ranks, found.node, found.device) == ((), None, None), job.stderr
    assert least < (found.speed or 0.0) < most
    assert len([entry for entry in entries if isinstance(entry, journal.PlanInEffect)]) == 1, "no plan is better"
    assert "job" in {row["component"] for row in job.history("failures")}


@pytest.mark.alone
def test_a_device_that_is_slow_now_and_then_is_named(job: Job) -> None:
    fault = f"slow:rank=2,speed=0.33@iteration={ONSET},every=10"
    entries = trained(job, "--fault", fault, iterations=ONSET + 80, nodes=2)
    found = verdicts_on("device", entries)
    assert [entry.ranks for entry in found] == [(2,)], job.stderr
    assert "now and then" in found[0].cause
    assert last_verdict_at(entries) - ONSET <= 80


@pytest.mark.alone
def test_in_observe_mode_a_slow_device_is_told_and_nothing_is_done(job: Job) -> None:
    job.environment["RESIHP_ADAPT__MODE"] = "observe"
    fault = f"slow:rank=2,speed=0.4@iteration={ONSET}"
    entries = trained(job, "--fault", fault, iterations=ONSET + 12, nodes=2)
    assert [entry.ranks for entry in verdicts_on("device", entries)] == [(2,)], job.stderr
    assert len([entry for entry in entries if isinstance(entry, journal.PlanInEffect)]) == 1, job.stderr
    assert "observe" in job.stderr, "it is told what would have been done"
