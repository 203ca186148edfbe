"""A link that becomes slow in a real job: found, measured, and passed by without a byte of state that moves.

Devices and links are emulated (`resihp.executor.emulation`), as in test_planned_times.py: all else is real.
"""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from resihp.executor.emulation import LAYER_MS
from resihp.faults import LINK_MS
from resihp.parallelism.layout import Layout
from resihp.record import journal, journal_file
from tests.integration.jobs import Job
from tests.integration.test_planned_times import SETTLING, plans_that_ran

SPEED, ONSET, ITERATIONS = 0.25, 22, 44
LAYER_S, LINK_S = 0.008, 0.032
"""Transfers are much longer than what it takes ranks on shared cores to begin an iteration one after the other."""
TOLERANCE = 0.15


@pytest.mark.alone
def test_a_slow_link_is_found_and_pipelines_pass_it_by(job: Job) -> None:
    """Two pipelines of two stages on four nodes: the stages exchange their neighbours."""
    job.environment |= {
        "RESIHP_ADAPT__DETECT": "true",
        LAYER_MS: f"{LAYER_S * 1e3:g}",
        LINK_MS: f"{LINK_S * 1e3:g}",
    }
    fault = f"slow:link=n2-n1,speed={SPEED}@iteration={ONSET}"
    script = ("--layers", "6", "--micro-batches", "4")
    job.train("--fault", fault, script=script, iterations=ITERATIONS, nodes=4, gpus=1, tp=1, pp=2).wait()
    assert job.status == 0, job.stderr

    (file,) = (job.folder / "home").rglob("journal")
    entries = [record.entry for record in journal_file.read(file)]
    (injected,) = (entry for entry in entries if isinstance(entry, journal.FaultInjected))
    assert injected.iteration == ONSET
    found = [entry for entry in entries if isinstance(entry, journal.FailureFound)]
    assert found, job.stderr
    assert {(entry.kind, entry.component) for entry in found} == {("fail-slow", "link")}, job.stderr
    assert {frozenset(entry.ranks) for entry in found} == {frozenset({0, 1})}, "either way, or both"
    for entry in found:
        assert entry.speed is not None
        assert 0.75 * SPEED < entry.speed < 1.35 * SPEED
        assert ONSET <= entry.iteration <= ONSET + 1

    before, after = plans_that_ran(entries)
    assert after.measured
    assert neighbours(before.plan.layout) == {(0, 1), (2, 3)}
    assert neighbours(after.plan.layout) == {(0, 3), (2, 1)}
    (changed,) = (entry for entry in entries if isinstance(entry, journal.Reconfigured) and entry.epoch > 1)
    assert changed.bytes_moved == 0
    assert changed.failures == (found[0].failure,) or len(found) > 1
    healthy, slow, relieved = (
        statistics.median(before.measured[i] for i in before.measured if SETTLING < i < ONSET),
        statistics.median(before.measured[i] for i in before.measured if i >= ONSET),
        statistics.median(after.measured.values()),
    )
    (decided,) = (entry for entry in entries if isinstance(entry, journal.PlanDecided) and entry.plan == after.plan)
    assert decided.unit == "s"
    assert decided.predicted is not None
    print(
        f"healthy {healthy:.3f} s, with the slow link {slow:.3f} s, past it {relieved:.3f} s, "
        f"predicted {decided.predicted:.3f} s; found at {found[0].speed:.0%}; {changed.seconds:.2f} s to change"
    )
    assert slow > 1.3 * healthy, "the fault did what it is for"
    assert abs(relieved / healthy - 1) <= TOLERANCE
    assert abs(relieved / decided.predicted - 1) <= TOLERANCE


@pytest.mark.alone
def test_the_only_path_between_two_nodes_is_named_though_all_its_links_are_as_slow(job: Job) -> None:
    """Tensor parallelism within nodes, a pipeline between them: no link is left that could be compared with."""
    job.environment |= {"RESIHP_ADAPT__DETECT": "true", LAYER_MS: "4", LINK_MS: "20"}
    onset, until = 22, 31
    fault = f"slow:link=n1-n2,speed=0.1@iteration={onset},until={until}"
    job.train(
        "--fault", fault, script=("--micro-batches", "4"), iterations=until + 9, nodes=2, gpus=2, tp=2, pp=2
    ).wait()
    assert job.status == 0, job.stderr

    (file,) = (job.folder / "home").rglob("journal")
    entries = [record.entry for record in journal_file.read(file)]
    assert [entry.iteration for entry in entries if isinstance(entry, journal.FaultInjected)] == [onset]
    (found,) = (entry for entry in entries if isinstance(entry, journal.FailureFound))
    assert (found.component, found.ranks) == ("link", (0, 2)), job.stderr
    assert abs(found.iteration - onset) <= 1
    assert found.speed is not None
    assert 0.06 < found.speed < 0.16
    noticed = sum(isinstance(entry, journal.IterationCommitted) for entry in entries[: entries.index(found)])
    assert noticed < until, "while it lasted"
    assert [entry.failure for entry in entries if isinstance(entry, journal.FailureEnded)] == [found.failure]
    print(f"found {noticed - onset + 1} iterations after the onset, at {found.speed:.1%}")


@pytest.mark.alone
def test_a_network_that_is_slow_as_a_whole_is_told_while_it_lasts_and_accuses_nobody(job: Job) -> None:
    job.environment |= {"RESIHP_ADAPT__DETECT": "true", LAYER_MS: "4", LINK_MS: "8"}
    onset, until = 44, 60  # by then nothing is learnt any more
    faults = [f"slow:link={link},speed=0.1@iteration={onset},until={until}" for link in ("n1-n2", "n2-n3")]
    options = [word for fault in faults for word in ("--fault", fault)]
    script = ("--layers", "6", "--micro-batches", "4")
    job.train(*options, script=script, iterations=until + 14, nodes=3, gpus=1, tp=1, pp=3).wait()
    assert job.status == 0, job.stderr

    (file,) = (job.folder / "home").rglob("journal")
    entries = [record.entry for record in journal_file.read(file)]
    assert [entry.iteration for entry in entries if isinstance(entry, journal.FaultInjected)] == [onset, onset]
    (found,) = (entry for entry in entries if isinstance(entry, journal.FailureFound))
    assert (found.component, found.ranks, found.node) == ("job", (), None), job.stderr
    assert abs(found.iteration - onset) <= 1
    assert "transfers between nodes take" in found.cause
    noticed = sum(isinstance(entry, journal.IterationCommitted) for entry in entries[: entries.index(found)])
    assert noticed < until, "while it lasted"
    assert [entry.failure for entry in entries if isinstance(entry, journal.FailureEnded)] == [found.failure]
    print(f"told {noticed - onset + 1} iterations after the onset: {found.cause}")


def neighbours(layout: Layout) -> set[tuple[int, int]]:
    return {(a.ranks[0], b.ranks[0]) for replica in layout.replicas for a, b in pairwise(replica.stages)}
