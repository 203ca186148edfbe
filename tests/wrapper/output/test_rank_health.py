"""What a rank is: one answer for the live view, metrics and `status`."""

from __future__ import annotations

from copy import copy

from resihp.parallelism.layout import Layout
from resihp.record import journal
from wrapper.output.rank_health import RankHealth

LAYOUT = Layout.uniform(tp=1, pp=2, dp=1, layers=4)


def started(*ranks: int) -> RankHealth:
    found = RankHealth()
    for rank in ranks:
        found.follow(journal.WorkerStarted(rank=rank, node="n1", device=rank, pid=rank + 1, epoch=1))
    return found


def slow(rank: int) -> journal.FailureFound:
    return journal.FailureFound(
        failure=7,
        kind="fail-slow",
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


def test_a_rank_without_a_place_starts() -> None:
    assert started(0, 2).by_rank(None) == {0: "starting", 2: "starting"}
    assert started(0, 2).by_rank(LAYOUT) == {0: "active", 2: "starting"}


def test_a_verdict_ends_a_suspicion_and_slowness_lasts_until_it_ends() -> None:
    found = started(0, 1)
    found.follow(journal.Suspected(rank=1, node="n1", evidence="late"))
    assert found.by_rank(LAYOUT)[1] == "suspected"
    found.follow(slow(1))
    assert found.by_rank(LAYOUT)[1] == "slow"
    found.follow(journal.Suspected(rank=1, node="n1", evidence="no beats"))
    assert found.by_rank(LAYOUT)[1] == "suspected"
    found.follow(journal.Suspected(rank=1, node="n1", evidence="no beats", cleared=True))
    assert found.by_rank(LAYOUT)[1] == "slow"
    found.follow(journal.FailureEnded(failure=7, node="n1", device=1, iteration=9, evidence=""))
    assert found.by_rank(LAYOUT)[1] == "active"


def test_who_ends_by_himself_is_not_dead_and_who_runs_again_is_well() -> None:
    found = started(0, 1, 2)
    for rank, exit_code in ((0, 0), (1, -9), (2, 0)):
        found.follow(journal.WorkerEnded(rank=rank, exit=exit_code, epoch=1))
    assert found.by_rank(LAYOUT) == {0: "active", 1: "dead"}
    before = copy(found)
    found.follow(journal.WorkerStarted(rank=1, node="n1", device=1, pid=9, epoch=2))
    assert found.by_rank(LAYOUT)[1] == "active"
    assert before.by_rank(LAYOUT)[1] == "dead"
