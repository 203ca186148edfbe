"""The ledger of suspicions: each has its row, whatever became of it. Beside it how ranks stood, and who was watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import text

from resihp.db.engine import make_engine, resolve
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.record import journal
from tests.db.conftest import BEGAN, started, write_journal
from tests.db.test_projection import SLOW, SLOW_LINK

Told = Iterator[tuple[journal.AnyEntry, float]]
Opener = Callable[..., Ledger]


def suspected(number: int, *ranks: int, **changes: Any) -> journal.Suspected:
    given: dict[str, Any] = {
        "rank": ranks[0] if ranks else None,
        "node": f"n{ranks[0] // 4 + 1}" if ranks else None,
        "evidence": "slow, +60% since iteration 12: own work takes longer",
        "kind": "slow",
        "suspicion": number,
        "ranks": ranks,
        "iteration": 12,
        "detected": 14,
        "change": 0.6,
        "confidence": 0.97,
    }
    return journal.Suspected(**given | changes)


def ended(entry: journal.Suspected, outcome: journal.Outcome, evidence: str, probe: int = 0) -> journal.Suspected:
    return msgspec.structs.replace(entry, cleared=True, outcome=outcome, evidence=evidence, probe=probe)


def beginning() -> Told:
    yield started(), BEGAN
    for n in range(2):
        yield journal.NodeJoined(node=f"n{n + 1}", host="here", devices=4), BEGAN
        for device in range(4):
            rank = 4 * n + device
            yield journal.WorkerStarted(rank=rank, node=f"n{n + 1}", device=device, pid=1, epoch=0), BEGAN


def suspicious_story() -> Told:
    """Rank 5 is slow, rank 2's probe is fine, a link is slow, rank 6 is dropped, all are never settled."""
    yield from beginning()
    yield suspected(1, 5), BEGAN + 8
    yield SLOW, BEGAN + 9
    yield suspected(2, 2, change=0.12, confidence=0.8), BEGAN + 10
    yield ended(suspected(2, 2, change=0.12, confidence=0.3), "fine", "its probe is fine", probe=3), BEGAN + 11
    link = suspected(3, 3, 4, component="link", rank=None, node=None)
    yield link, BEGAN + 12
    yield SLOW_LINK, BEGAN + 13
    yield ended(link, "slow", "a verdict", probe=4), BEGAN + 13
    yield ended(suspected(4, 6), "dropped", "rank 5 explains it"), BEGAN + 14
    yield suspected(5), BEGAN + 15


def written(open_ledger: Opener, tmp_path: Path, told: Told) -> list[dict[str, Any]]:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", told):
        ledger.submit(record)
    assert ledger.close(30)
    with Reader.open(ledger.url) as reader:
        return reader.rows("suspicions", reader.job()["id"])


def test_each_suspicion_has_its_row_with_what_became_of_it(open_ledger: Opener, tmp_path: Path) -> None:
    rows = written(open_ledger, tmp_path, suspicious_story())
    told = [(row["suspicion"], row["component"], row["ranks"], row["outcome"], row["failure"]) for row in rows]
    assert told == [
        (1, "device", [5], "slow", 1),
        (2, "device", [2], "fine", None),
        (3, "link", [3, 4], "slow", 2),
        (4, "device", [6], "dropped", None),
        (5, "device", [], None, None),
    ]
    assert [(row["node"], row["device"], row["probe"]) for row in rows[:4]] == [
        *(("n2", 1, None), ("n1", 2, 3), (None, None, 4), ("n2", 2, None))
    ]
    fine = rows[1]
    assert (fine["iteration"], fine["detected"], fine["change"], fine["confidence"]) == (12, 14, 0.12, 0.3)
    assert fine["evidence"].startswith("slow, +60%")
    assert fine["outcome_evidence"] == "its probe is fine"
    assert [(row["ended_at"] - row["raised_at"]).total_seconds() for row in rows[:4]] == [1.0, 1.0, 1.0, 0.0]
    assert rows[4]["ended_at"] is None


def test_a_verdict_settles_only_suspicions_of_what_it_is_about(open_ledger: Opener, tmp_path: Path) -> None:
    def told() -> Told:
        yield from beginning()
        yield suspected(1, 2), BEGAN + 8
        yield suspected(2), BEGAN + 8
        yield SLOW, BEGAN + 9  # of rank 5
        yield ended(suspected(2), "passed", "over"), BEGAN + 10

    rows = written(open_ledger, tmp_path, told())
    assert [(row["outcome"], row["failure"]) for row in rows] == [(None, None), ("passed", None)]


def test_a_slow_device_is_no_verdict_on_what_its_group_does_together(open_ledger: Opener, tmp_path: Path) -> None:
    def told() -> Told:
        yield from beginning()
        yield suspected(1, 4, 5, component="collective", rank=None), BEGAN + 8
        yield suspected(2, component="job"), BEGAN + 8
        yield SLOW, BEGAN + 9  # of rank 5's device, which is why whole iterations are longer

    rows = written(open_ledger, tmp_path, told())
    assert [(row["outcome"], row["failure"]) for row in rows] == [(None, None), ("slow", 1)]


def silent(number: int, node: str, rank: int | None = None, **changes: Any) -> journal.Suspected:
    given: dict[str, Any] = {
        "rank": rank,
        "node": node,
        "evidence": "3 missed heartbeats, last 3.2 s ago",
        "suspicion": number,
        "component": "node" if rank is None else "process",
        "ranks": () if rank is None else (rank,),
        "iteration": 12,
        "detected": 12,
        "sign": "silent" if rank is None else "mute",
        "test": "s without a beat" if rank is None else "s without progress",
        "statistic": 3.2,
        "threshold": 3.0,
    }
    return journal.Suspected(**given | changes)


def loss(failure: int, component: journal.Component, ranks: tuple[int, ...], node: str) -> journal.FailureFound:
    return journal.FailureFound(
        failure=failure,
        kind="fail-stop",
        component=component,
        cause=f"{component} of {node} lost",
        ranks=ranks,
        node=node,
        device=None,
        iteration=12,
        epoch=2,
        evidence="",
        detect_s=None,
    )


def test_silence_has_rows_as_slowness_has_in_one_sequence(open_ledger: Opener, tmp_path: Path) -> None:
    """Node n2 beats again, then is lost with rank 5; rank 2 hangs and is given up; rank 3 is slow meanwhile."""

    def told() -> Told:
        yield from beginning()
        yield silent(1, "n2"), BEGAN + 8
        yield ended(silent(1, "n2"), "passed", "beats again"), BEGAN + 9
        yield suspected(2, 3, test="log evidence", statistic=15.25, threshold=14.5), BEGAN + 10
        yield silent(3, "n1", 2), BEGAN + 11
        yield ended(silent(3, "n1", 2), "lost", "hung: its interpreter does not answer"), BEGAN + 12
        yield loss(1, "process", (2,), "n1"), BEGAN + 13
        yield silent(4, "n2"), BEGAN + 14
        yield ended(silent(4, "n2"), "lost", "silent for 6.2 s"), BEGAN + 15
        yield loss(2, "node", (4, 5, 6, 7), "n2"), BEGAN + 16
        yield silent(5, "n1"), BEGAN + 17

    rows = written(open_ledger, tmp_path, told())
    assert [(row["suspicion"], row["kind"], row["outcome"], row["failure"]) for row in rows] == [
        (1, "silent", "passed", None),
        (2, "slow-compute", None, None),
        (3, "mute", "lost", 1),
        (4, "silent", "lost", 2),
        (5, "silent", None, None),
    ]
    assert [(row["test"], row["statistic"], row["threshold"]) for row in rows[1:4]] == [
        ("log evidence", 15.25, 14.5),
        ("s without progress", 3.2, 3.0),
        ("s without a beat", 3.2, 3.0),
    ]
    mute = rows[2]
    assert (mute["node"], mute["device"], mute["ranks"], mute["change"], mute["confidence"]) == (
        "n1",
        2,
        [2],
        None,
        None,
    )
    assert (mute["evidence"], mute["outcome_evidence"]) == (
        "3 missed heartbeats, last 3.2 s ago",
        "hung: its interpreter does not answer",
    )
    assert mute["meaning"] == "a process's interpreter does not answer"
    assert [(row["ended_at"] - row["raised_at"]).total_seconds() for row in (rows[0], *rows[2:4])] == [1.0, 1.0, 1.0]


def test_a_kind_that_is_new_is_a_row_more_and_can_be_asked_for(open_ledger: Opener, tmp_path: Path) -> None:
    def told() -> Told:
        yield from beginning()
        yield silent(1, "n1", 2, sign="too-hot", test="degrees", statistic=91.0, threshold=90.0), BEGAN + 8
        yield silent(2, "n1", 3, sign="too-hot", test="degrees", statistic=92.0, threshold=90.0), BEGAN + 8
        yield suspected(3, 3), BEGAN + 9

    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", told()):
        ledger.submit(record)
    assert ledger.close(30)
    with Reader.open(ledger.url) as reader:
        job = reader.job()["id"]
        rows = reader.rows("suspicions", job, kind="too-hot")
        assert [(row["suspicion"], row["kind"], row["meaning"]) for row in rows] == [
            (1, "too-hot", "too hot"),
            (2, "too-hot", "too hot"),
        ]
        assert [row["suspicion"] for row in reader.rows("suspicions", job, kind="slow-compute")] == [3]


def test_what_an_older_client_wrote_has_a_kind(open_ledger: Opener, tmp_path: Path) -> None:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", suspicious_story()):
        ledger.submit(record)
    assert ledger.close(30)
    engine = make_engine(resolve(ledger.url), write=True)
    with engine.begin() as connection:
        connection.execute(text("UPDATE suspicions SET kind = NULL"))
    engine.dispose()
    with Reader.open(ledger.url) as reader:
        job = reader.job()["id"]
        kinds = [row["kind"] for row in reader.rows("suspicions", job)]
        assert kinds == ["slow-compute", "slow-compute", "slow-link", "slow-compute", "slow-compute"]
        assert [row["suspicion"] for row in reader.rows("suspicions", job, kind="slow-link")] == [3]


def test_of_journals_that_do_not_number_them_and_of_silence_there_are_events_alone(
    open_ledger: Opener, tmp_path: Path
) -> None:
    def told() -> Told:
        yield from beginning()
        yield journal.Suspected(rank=5, node="n2", evidence="slow, +60%", kind="slow"), BEGAN + 8
        yield journal.Suspected(rank=5, node="n2", evidence="no progress for 3.0 s"), BEGAN + 9

    assert written(open_ledger, tmp_path, told()) == []


def test_scores_come_once_and_those_that_cannot_be_kept_are_left_out(open_ledger: Opener, tmp_path: Path) -> None:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", beginning()):
        ledger.submit(record)
    scores = [(0, 1.02, 0.4), (1, None, 0.1), (2, float("nan"), 0.2), (3, 1.0, float("inf")), (-1, 1.0, 0.0)]
    for _ in range(2):
        ledger.scores(20, scores)
        assert ledger.flush(30)
    ledger.scores(10, scores[:1])
    assert ledger.close(30)
    with Reader.open(ledger.url) as reader:
        job = reader.job()["id"]
        rows = [tuple(row.values()) for row in reader.rows("scores", job)]
        assert rows == [(10, 0, 1.02, 0.4), (20, 0, 1.02, 0.4), (20, 1, None, 0.1), (20, 2, None, 0.2)]
        assert [row["iteration"] for row in reader.rows("scores", job, rank=0, last=1)] == [20]


def test_what_the_detector_sees_is_the_job_s(open_ledger: Opener, tmp_path: Path) -> None:
    def told() -> Told:
        yield from beginning()
        yield journal.CoverageChanged(iteration=32, detector="workload", unwatched=()), BEGAN + 8
        yield journal.CoverageChanged(iteration=208, detector="workload", unwatched=(5, 6)), BEGAN + 9

    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", told()):
        ledger.submit(record)
    assert ledger.close(30)
    with Reader.open(ledger.url) as reader:
        job = reader.job()
        assert (job["detector"], job["unwatched"]) == ("workload", "[5, 6]")
        [_, event] = reader.events(job["id"], ["CoverageChanged"], 9)
        assert event["text"] == "detector: judges each rank's own work; not watched: ranks 5-6"
