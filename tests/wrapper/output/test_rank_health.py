"""What a rank is: one answer for the live view, metrics and `status`."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy

from resihp.parallelism.layout import Layout
from resihp.record import journal
from resihp.wrapper.output.job_history import JobHistory
from resihp.wrapper.output.rank_health import rank_health
from resihp.wrapper.output.render import Health

LAYOUT = Layout.uniform(tp=1, pp=2, dp=1, layers=4)


class Watched:
    """A history that takes entries."""

    def __init__(self, *entries: journal.AnyEntry) -> None:
        self.history = JobHistory()
        self.add(*entries)

    def add(self, *entries: journal.AnyEntry) -> None:
        for entry in entries:
            self.history.follow(journal.Record(self.history.seq + 1, 1e9, entry))

    def health(self, layout: Layout | None = LAYOUT, stopped: Collection[int] = ()) -> dict[int, Health]:
        return rank_health(self.history, layout, stopped)


def started(*ranks: int) -> Watched:
    return Watched(*(journal.WorkerStarted(rank=rank, node="n1", device=rank, pid=rank + 1, epoch=1) for rank in ranks))


def suspected(rank: int, number: int, *, cleared: bool = False) -> journal.Suspected:
    return journal.Suspected(
        rank=rank, node="n1", evidence="late", component="process", ranks=(rank,), suspicion=number, cleared=cleared
    )


def failure(rank: int, kind: str = "fail-slow") -> journal.FailureFound:
    return journal.FailureFound(
        failure=7,
        kind=kind,  # type: ignore[arg-type]
        component="device",
        cause="slow-device",
        ranks=(rank,),
        node="n1",
        device=rank,
        iteration=4,
        epoch=1,
        evidence="",
        detect_s=None,
    )


def test_a_rank_without_a_place_is_starting() -> None:
    assert started(0, 2).health(None) == {0: "starting", 2: "starting"}
    assert started(0, 2).health() == {0: "active", 2: "starting"}


def test_a_verdict_ends_a_suspicion_and_slowness_lasts_until_it_ends() -> None:
    job = started(0, 1)
    slowness = journal.Suspected(
        rank=1, node="n1", evidence="20 % slower", kind="slow", component="device", ranks=(1,), suspicion=1
    )
    job.add(slowness)
    assert job.health()[1] == "suspected"
    job.add(failure(1))
    assert job.health()[1] == "slow"
    job.add(suspected(1, 2))
    assert job.health()[1] == "suspected"
    job.add(suspected(1, 2, cleared=True))
    assert job.health()[1] == "slow"
    job.add(journal.FailureEnded(failure=7, node="n1", device=1, iteration=9, evidence=""))
    assert job.health()[1] == "active"


def test_a_link_under_suspicion_makes_neither_end_a_suspect() -> None:
    job = started(0, 1)
    job.add(journal.Suspected(rank=None, node=None, evidence="", component="link", ranks=(0, 1), suspicion=1))
    assert job.health() == {0: "active", 1: "active"}


def test_a_stopped_process_is_suspected_as_long_as_it_is_stopped() -> None:
    """It stayed suspected for good, where the controller had not suspected it in time."""
    job = started(0, 1)
    assert job.health(stopped={1}) == {0: "active", 1: "suspected"}
    assert job.health() == {0: "active", 1: "active"}


def test_a_rank_that_left_is_not_dead_and_one_that_runs_again_is_well() -> None:
    job = started(0, 1, 2)
    for rank, exit_code in ((0, 0), (1, -9), (2, 0)):
        job.add(journal.WorkerEnded(rank=rank, exit=exit_code, epoch=1))
    assert job.health() == {0: "active", 1: "dead"}
    before = copy(job.history)
    job.add(journal.WorkerStarted(rank=1, node="n1", device=1, pid=9, epoch=2))
    assert job.health()[1] == "active"
    assert rank_health(before, LAYOUT)[1] == "dead"


def test_in_a_job_that_is_over_only_failed_ranks_are_dead() -> None:
    """All others were asked to exit, some by a signal; the live view showed them as dead."""
    job = started(0, 1)
    job.add(failure(1, "fail-stop"))
    for rank in (0, 1):
        job.add(journal.WorkerEnded(rank=rank, exit=-15, epoch=1))
    job.add(suspected(0, 1), journal.JobEnded(exit_code=130, state="cancelled", reason="INT"))
    assert job.health() == {0: "active", 1: "dead"}
