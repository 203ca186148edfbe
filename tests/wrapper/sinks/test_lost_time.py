"""What a job has lost so far is what its ledger's account says in the end, and never goes down on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from resihp.record.packing import pack
from resihp.wrapper.sinks.lost_time import CONTEXT_COMMITS, SETTLE_EVERY_COMMITS, SETTLE_LAG_COMMITS, LostTime
from tests.db.conftest import (
    BEGAN,
    DP3,
    absent_story,
    any_layout_story,
    node_story,
    outcome,
    started,
    story,
    write_journal,
)

Story = Iterator[tuple[journal.AnyEntry, float]]


def accounted(records: list[journal.Record], tmp_path: Path) -> dict[str, float]:
    with Ledger.open("sqlite", tmp_path) as ledger:
        for record in records:
            ledger.submit(record)
        assert ledger.flush()
    with Reader.open(f"sqlite:///{tmp_path / 'ledger.db'}") as reader:
        return reader.account(reader.job()).lost_s


def settled(records: list[journal.Record]) -> dict[str, float]:
    lost = LostTime(records)
    while lost.step():
        pass
    return lost.by_cause()


def decided(epoch: int, layout: Any, first: int, at: float) -> tuple[journal.AnyEntry, float]:
    plan = Plan(epoch=epoch, layout=layout, assignment=spread(max(12, len(layout.replicas)), len(layout.replicas)))
    action: Any = "start" if epoch == 1 else "redo"
    return journal.PlanDecided(plan=plan, next_iteration=first, action=action, finish=None, reason="r"), at


def long_story(seed: int, iterations: int = 1500, end: Any = "completed") -> Story:
    """Iterations of 2 s, checkpoints that cost 1 s, every few hundred iterations a process that dies and is later
    there again, and once a device that is slow for a while, which is found 12 iterations late."""
    rng = Random(seed)
    at, epoch, failures, slow, behind = BEGAN + 300.0, 1, 0, range(700, 760), 12
    yield started(), BEGAN
    yield decided(1, DP3, 1, at)
    last = None
    for i in range(1, iterations + 1):
        if i > 1 and rng.random() < 0.008 and i not in range(650, 800):
            failures, epoch = failures + 1, epoch + 1
            died = at + rng.uniform(0.1, 30.0)
            yield failure(failures, "fail-stop", i, epoch, max(died - at - 2.0, 0.0)), died
            layout = DP3.without(frozenset({5})) if epoch % 2 == 0 else DP3
            yield decided(epoch, layout, i, died + 1.0)
            at = died + rng.uniform(5.0, 60.0)
            last = journal.Reconfigured(
                epoch=epoch, failures=(failures,), attempts=1, action="redo", park_s=1.0, plan_s=1.0, groups_s=1.0,
                state_s=1.0, first_iteration_s=2.0, seconds=at + 2.0 - died,
            )  # fmt: skip
        seconds = 2.0 + rng.uniform(-0.01, 0.01) + (1.5 if i in slow else 0.0)
        at += seconds + rng.uniform(0.0, 0.02)
        yield (
            journal.IterationCommitted(epoch=epoch, outcome=outcome(i), seconds=seconds, predicted_seconds=2.0),
            at,
        )
        if last is not None:
            yield last, at
            last = None
        if i == slow.start + behind:
            failures += 1
            yield failure(failures, "fail-slow", slow.start, epoch), at
        if i == slow.stop + 3:
            yield (
                journal.FailureEnded(failure=failures, node="n1", device=1, iteration=slow.stop, evidence=""),
                at,
            )
        if i % 100 == 0:
            yield journal.CheckpointCommitted(iteration=i, folder=f"c/{i}", bytes=1, seconds=1.0), at
            at += 1.0
    if end:
        yield journal.JobEnded(exit_code=0, state=end, reason=""), at + 5.0


def failure(number: int, kind: Any, iteration: int, epoch: int, failed_s: float = 0.0) -> journal.FailureFound:
    return journal.FailureFound(
        failure=number, kind=kind, component="device", cause="", ranks=(5,), node="n1", device=1, iteration=iteration,
        epoch=epoch, evidence="", detect_s=None, failed_s=failed_s,
    )  # fmt: skip


@pytest.mark.parametrize("of", [story, any_layout_story, node_story, absent_story])
def test_of_a_short_job_it_is_the_account_s(of: Callable[[], Story], tmp_path: Path) -> None:
    told = list(of())
    if not isinstance(told[-1][0], journal.JobEnded):
        told.append((journal.JobEnded(exit_code=1, state="failed", reason=""), told[-1][1] + 3.0))
    records = write_journal(tmp_path / "told", iter(told))
    assert settled(records) == pytest.approx(accounted(records, tmp_path), abs=1e-5)


@pytest.mark.parametrize("end", ["completed", "failed"])
@pytest.mark.parametrize("seed", range(2))
def test_of_a_long_one_it_is_the_account_s_within_what_a_window_knows(seed: int, end: str, tmp_path: Path) -> None:
    records = write_journal(tmp_path / "told", long_story(seed, end=end))
    found, whole = settled(records), accounted(records, tmp_path)
    for cause in ("start", "redo", "capacity"):
        assert found[cause] == pytest.approx(whole[cause], rel=1e-6), cause
    for cause in ("detect", "reconfigure", "slow", "checkpoint", "other"):
        assert found[cause] == pytest.approx(whole[cause], rel=0.01, abs=0.5), cause
    assert sum(found.values()) == pytest.approx(sum(whole.values()), rel=1e-3)
    assert all(whole[cause] > 1.0 for cause in whole if cause not in ("rollback",))


def test_slow_that_was_settled_before_anybody_knew_is_told_when_it_is_known(tmp_path: Path) -> None:
    def late() -> Story:
        yield started(), BEGAN
        yield decided(1, DP3, 1, BEGAN)
        at = BEGAN
        for i in range(1, 4 * SETTLE_EVERY_COMMITS + 1):
            seconds = 3.0 if i > SETTLE_EVERY_COMMITS - 40 else 2.0
            at += seconds
            yield journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=seconds, predicted_seconds=2.0), at
            if i == SETTLE_EVERY_COMMITS + 10:
                yield failure(1, "fail-slow", SETTLE_EVERY_COMMITS - 39, 1), at

    records = write_journal(tmp_path / "told", late())
    lost = LostTime(records)
    assert lost.step()
    assert lost.by_cause()["slow"] == 0.0
    assert lost.step()
    assert lost.by_cause()["slow"] == pytest.approx(40 + SETTLE_EVERY_COMMITS - SETTLE_LAG_COMMITS)
    assert 40 + SETTLE_EVERY_COMMITS < CONTEXT_COMMITS


def test_what_is_slow_costs_nothing_while_it_stands_by(tmp_path: Path) -> None:
    def put_aside() -> Story:
        yield started(), BEGAN
        yield decided(1, DP3, 1, BEGAN)
        at = BEGAN
        for i in range(1, 121):
            if i == 31:
                yield failure(1, "fail-slow", 21, 1), at
                plan, when = decided(2, DP3.without(frozenset({5})), 31, at)
                yield msgspec.structs.replace(plan, unaffected_by=(1,)), when
            if i == 91:
                yield decided(3, DP3, 91, at)
            seconds = 3.0 if i > 20 else 2.0
            at += seconds
            epoch = 1 if i <= 30 else 2 if i <= 90 else 3
            predicted = 2.9 if epoch == 2 else 2.0  # on fewer devices, and a little off
            yield journal.IterationCommitted(epoch=epoch, outcome=outcome(i), seconds=seconds,
                                             predicted_seconds=predicted), at  # fmt: skip
        yield journal.JobEnded(exit_code=0, state="completed", reason=""), at

    records = write_journal(tmp_path / "told", put_aside())
    found = settled(records)
    assert found == pytest.approx(accounted(records, tmp_path), abs=1e-5)
    assert found["slow"] == pytest.approx(10.0 + 30.0), "under the first plan and the last one"


def test_no_counter_goes_back_and_it_is_a_few_iterations_behind(tmp_path: Path) -> None:
    records = write_journal(tmp_path / "told", long_story(1))
    lost, before = LostTime(), dict.fromkeys(LostTime().by_cause(), 0.0)
    for record in records:
        lost.submit(record)
        while lost.step():
            pass
        now = lost.by_cause()
        assert all(now[cause] >= before[cause] for cause in now)
        before = now


def test_packed_or_not_and_whenever_it_is_asked_it_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    records = write_journal(tmp_path / "told", long_story(2, end=None))
    one_by_one = LostTime()
    for record in records:
        one_by_one.submit(record)
        while one_by_one.step():
            pass
    packed = [*pack(records[:900]), *pack(records[900:])]
    assert len(packed) < len(records) / 5
    assert settled(packed) == one_by_one.by_cause()


def test_it_keeps_no_more_of_a_job_than_its_window(tmp_path: Path) -> None:
    lost = LostTime(write_journal(tmp_path / "told", long_story(3, iterations=3000, end=None)))
    while lost.step():
        pass
    assert len(lost._iterations) <= CONTEXT_COMMITS + SETTLE_EVERY_COMMITS + SETTLE_LAG_COMMITS
    assert max(map(len, (lost._failures, lost._reconfigurations, lost._plans, lost._checkpoints))) < 10


def test_a_job_that_was_said_to_be_dead_and_is_not_goes_on(tmp_path: Path) -> None:
    told = list(long_story(4, end="abnormal"))
    leader = journal.LeaderChosen(term=2, node="n2", host="h", how="elected")
    records = write_journal(tmp_path / "told", iter([*told, (leader, told[-1][1] + 60.0)]))
    assert settled(records) == settled(records[:-2])


def test_what_is_told_after_the_end_takes_nothing_back(tmp_path: Path) -> None:
    """Of a job that was stopped, its last checkpoint and its processes come after the end."""
    told = list(long_story(5, iterations=SETTLE_EVERY_COMMITS // 2, end="cancelled"))
    at = told[-1][1]
    after = [
        (journal.CheckpointCommitted(iteration=SETTLE_EVERY_COMMITS // 2, folder="c", bytes=1, seconds=1.0), at + 0.5),
        (journal.WorkerEnded(rank=0, exit=0, epoch=1), at + 1.0),
    ]
    records = write_journal(tmp_path / "told", iter([*told, *after]))
    found = settled(records)
    assert found["start"] == pytest.approx(300.0, abs=0.1)
    assert found == settled(records[: len(told)])
    assert found == pytest.approx(accounted(records, tmp_path), abs=1e-5)


def test_of_a_job_that_was_found_dead_the_time_since_is_not_lost(tmp_path: Path) -> None:
    told = list(long_story(6, iterations=SETTLE_EVERY_COMMITS // 2, end=None))
    dead = journal.JobEnded(exit_code=1, state="abnormal", reason="its supervisor was killed")
    records = write_journal(tmp_path / "told", iter([*told, (dead, told[-1][1] + 28800.0)]))
    assert settled(records) == pytest.approx(accounted(records, tmp_path), abs=1e-5)
