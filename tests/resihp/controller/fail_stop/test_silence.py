"""Suspicions of silence, as the journal has them: numbered with those to be slow, tested, each with an outcome."""

from __future__ import annotations

import msgspec

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.fold import fold
from resihp.record.journal import AnyEntry, Suspected, WorkerEnded
from tests.resihp.controller.direct import Direct
from tests.resihp.controller.test_takeover import TakenOver, journal_of
from tests.resihp.controller.test_transactions import Direct as Training


def told(job: Direct) -> list[tuple[int, str]]:
    return [(entry.suspicion, entry.outcome) for entry in job.all(Suspected)]


def silent(job: Direct, seconds: float, *but: str) -> None:
    """Nodes but these say nothing."""
    for _ in range(round(4 * seconds)):
        for node in but:
            job.feed(api.AgentBeat(node=node, beat=m.Beat(workers=())), 0.0)
        job.feed(api.Tick(), 0.25)


def test_a_node_that_beats_again_was_suspected_for_a_while() -> None:
    job = Training(nodes=3, gpus=2).run(3)
    silent(job, 4, "n1", "n2")
    job.wait(1)
    (opened, ended) = (entry for entry in job.all(Suspected) if entry.node == "n3" and entry.rank is None)
    assert (opened.suspicion, opened.kind, opened.sort, opened.component) == (1, "silent", "silent", "node")
    assert (opened.test, opened.threshold) == ("s without a beat", 3.0)
    assert 3.0 < opened.statistic <= 3.5
    assert ended == msgspec.structs.replace(opened, cleared=True, outcome="passed", evidence="heartbeats again")
    assert job.job.record.suspects_silent == {}


def test_a_silent_node_that_is_given_up_was_suspected_and_is_lost() -> None:
    job = Training(nodes=3, gpus=2).run(3)
    silent(job, 12, "n1", "n2")
    ends = [entry for entry in job.all(Suspected) if entry.node == "n3" and entry.cleared and entry.rank is None]
    assert [(entry.outcome, entry.suspicion) for entry in ends] == [("lost", 1)]
    assert ends[0].evidence.startswith("silent for ")
    assert not any(isinstance(who, str) for who in job.job.record.suspects_silent)


def test_a_rank_that_hangs_is_suspected_once_and_lost_before_its_end_is_told() -> None:
    job = Training().run(3)
    job.wait(6, primitives={}, activity="compute")
    suspects = {entry.rank for entry in job.all(Suspected)}
    assert suspects
    assert len(told(job)) == len(suspects)
    assert {(e.sort, e.component, e.test) for e in job.all(Suspected)} == {("stalled", "process", "s without progress")}
    assert all(e.statistic > e.threshold for e in job.all(Suspected))
    rank = min(suspects)
    job.crash(rank)
    entries = [entry for entry in journal_of(job) if isinstance(entry, Suspected | WorkerEnded) and entry.rank == rank]
    assert [type(entry).__name__ for entry in entries] == ["Suspected", "Suspected", "WorkerEnded"]
    assert entries[1].outcome == "lost"  # type: ignore[union-attr]


def test_numbers_go_on_from_those_of_suspicions_to_be_slow() -> None:
    slow = Suspected(rank=1, node="n1", evidence="slow", kind="slow", suspicion=4, ranks=(1,))
    job = Training(nodes=3, gpus=2).run(3)
    job.job.log(slow)
    silent(job, 4, "n1", "n2")
    assert told(job) == [(5, "")]
    assert job.job.record.suspects_slow == slow, "silence says nothing of it"


def test_what_is_suspected_still_is_under_the_next_supervisor() -> None:
    before = Training(nodes=3, gpus=2).run(3)
    silent(before, 4, "n1", "n2")
    assert told(before) == [(1, "")]
    heir = TakenOver(before).all_back()
    assert list(heir.job.record.suspects_silent) == ["n3"]
    heir.wait(1)
    assert [(entry.suspicion, entry.outcome) for entry in heir.all(Suspected)] == [(1, "passed")]


def test_a_journal_replayed_gives_the_same_and_one_of_before_has_no_numbers() -> None:
    job = Training(nodes=3, gpus=2).run(3)
    silent(job, 12, "n1", "n2")
    entries: list[AnyEntry] = journal_of(job)
    assert fold(entries).suspicions == job.job.record.suspicions > 0
    assert fold(entries).suspects_silent == job.job.record.suspects_silent
    old = [Suspected(rank=0, node="n1", evidence="3 missed beats"), Suspected(rank=None, node="n2", evidence="silent")]
    record = fold([*old, msgspec.structs.replace(old[1], cleared=True)])
    assert (record.suspicions, record.suspects_silent) == (0, {})
    assert [entry.sort for entry in old] == ["stalled", "silent"]
