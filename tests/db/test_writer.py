"""The writer: everything of the journal arrives, once, whatever the database does meanwhile."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import resihp.db.engine
import resihp.db.writer
from resihp.db.reading.fleet import NodeRecord
from resihp.db.reading.health import services
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import LedgerError
from resihp.record import journal, journal_file, journal_format
from tests.db.conftest import (
    BEGAN,
    Listener,
    absent_story,
    any_layout_story,
    everything,
    held,
    node_story,
    on_sqlite,
    outcome,
    rank_reports,
    started,
    story,
    write_journal,
)

Opener = Callable[..., Ledger]


def test_a_whole_journal(records: list[journal.Record], open_ledger: Opener) -> None:
    ledger = open_ledger()
    for record in records:
        ledger.submit(record)
    assert ledger.close()
    found = everything(ledger)
    assert found["job"]["state"] == "completed"
    assert found["job"]["exit_code"] == 0
    assert [row["iteration"] for row in found["iterations"]] == list(range(1, 21))
    assert list(found["iterations"][0])[:10] == [
        *("iteration", "epoch", "seconds", "predicted_seconds", "tokens", "sum_squared_lengths", "samples"),
        *("samples_digest", "loss", "finished_at"),
    ]
    assert list(found["workers"][0])[:7] == ["rank", "node", "device", "pid", "epoch_joined", "epoch_left", "exit"]
    assert [row["exit"] for row in found["workers"]] == [0, 0, 0, 0, 0, -9, 0, 0, 0, 0, 0, 0]
    assert found["plans"][1]["layout"]["standby"] == [4, 6, 7]
    assert found["plans"][0]["layout"]["replicas"][0][1] == {"ranks": [2, 3], "layers": [4, 7]}
    [failure] = found["failures"]
    assert failure["ranks"] == [5]
    assert (failure["seconds_to_recover"], failure["seconds_without_noticing"]) == (1.02, 1.0)
    assert failure["noticed_at"].timestamp() == pytest.approx(BEGAN + 2.0 + 11 * 0.5 + 0.3)
    [transition] = found["reconfigurations"]
    assert transition["epoch"] == failure["recovered_epoch"] == 2
    assert "rank 3: suspected, no progress for 3.0 s" in [row["text"] for row in found["events"]]


def test_plans_that_take_effect_and_those_that_do_not(open_ledger: Opener, tmp_path: Path) -> None:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", any_layout_story()):
        ledger.submit(record)
    assert ledger.close()
    found = everything(ledger)
    plans = found["plans"]
    assert [row["outcome"] for row in plans] == ["in effect", "refused", "superseded", "in effect", "in effect"]
    assert [row["in_effect_at"] and row["in_effect_at"].timestamp() - BEGAN for row in plans] == [
        *(pytest.approx(1.5), None, None, pytest.approx(2.9), pytest.approx(4.3))
    ]
    assert (plans[1]["refused_reason"], plans[1]["refused_by"]) == ("79.1 GB needed, 79.0 GB there", 3)
    assert [row["bytes_planned"] for row in plans] == [0, *[3_400_000_000] * 3, 1_200_000]
    assert plans[4]["action"] == "between"
    assert plans[3]["layout"]["replicas"][1] == [{"ranks": [4, 7], "layers": [0, 4]}, {"ranks": [6], "layers": [5, 7]}]
    recovered, joined = found["reconfigurations"]
    assert (recovered["bytes_moved"], recovered["extra_bytes"]) == (3_400_000_000, 850_000_000)
    assert joined["action"] == "between"
    assert found["failures"][0]["component"] == "device"
    assert found["failures"][0]["recovered_epoch"] == 4
    newcomers = [(row["rank"], row["epoch_joined"], row["epoch_left"], row["exit"]) for row in found["workers"][12:]]
    assert newcomers == [(12, 4, None, None), (13, 4, 4, -9)]
    told = {row["kind"]: row["text"] for row in found["events"]}
    assert told["PlanRefused"] == "epoch 2: plan refused by rank 3: 79.1 GB needed, 79.0 GB there"
    assert told["JoinRefused"] == "rank 13 (n3 device 3): not accepted, not ready within 600 s"
    assert told["PlanInEffect"] == "epoch 5: in effect"
    assert told["Reconfigured"] == "epoch 5: layout changed in 1.00 s, 1.2 MB moved"
    assert told["PlanDecided"].endswith("iteration 3 next, 1.2 MB to move: rank 12 joined")
    assert [row["rank"] for row in found["events"] if row["kind"] in ("JoinRefused", "PlanRefused")] == [3, 13]


def test_a_bad_node_its_drain_and_the_node_that_came_in_its_place(open_ledger: Opener, tmp_path: Path) -> None:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", node_story()):
        ledger.submit(record)
    assert ledger.close()
    found = everything(ledger)

    def after(moment: Any) -> Any:
        return moment and pytest.approx(moment.timestamp() - BEGAN)

    first, second = found["drains"]
    assert (first["drain"], first["node"], first["failure"], first["reason"][:11]) == (1, "n3", 1, "job local-1")
    assert (first["step"], first["outcome"]) == ("slurm", "done"), "of several rungs that hold, the first"
    assert [(each["step"], each["outcome"]) for each in first["answers"]] == [
        ("spool", "done"),
        ("exclusion", "done"),
        ("slurm", "done"),
    ]
    assert (after(first["drained_at"]), after(first["undrained_at"])) == (7, 40)
    assert (second["step"], second["outcome"], second["undrained_at"]) == ("slurm", "refused", None)
    refused, joined = found["replacements"]
    assert (refused["outcome"], refused["text"], refused["slurm_job"]) == ("refused", "invalid partition", None)
    assert (after(refused["asked_at"]), after(refused["ended_at"]), refused["joined_at"]) == (8, 9, None)
    assert (joined["replacement"], joined["instead"], joined["node"], joined["slurm_job"]) == (2, "n3", "n9", "42")
    assert (joined["outcome"], after(joined["joined_at"]), joined["ended_at"]) == ("joined", 20, None)
    assert joined["excluded"] == ["n1", "n2", "n3"]
    assert [(row["node"], row["replacement"], after(row["released_at"])) for row in found["nodes"]] == [
        ("n1", None, None),
        ("n2", None, None),
        ("n3", None, 19),
        ("n9", 2, None),
    ]


def test_a_node_that_never_came_has_its_row_and_served_nobody(tmp_path: Path, open_ledger: Opener) -> None:
    """It is the one that an operator asks for."""
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", absent_story()):
        ledger.submit(record)
    assert ledger.close()
    found = {row["node"]: row for row in everything(ledger)["nodes"]}
    assert list(found) == ["n1", "n2", "n3", "n4", "n5", "n9"]
    never = found["n3"]
    assert (never["joined_at"], never["host"], never["devices"]) == (None, "", 0)
    assert (never["lost_at"].timestamp(), never["lost_reason"]) == (BEGAN + 600, "has not joined within 600 s")
    assert [row["replaced_by"] for row in found.values()] == [None, None, "n9", None, None, None]
    late = found["n4"]
    assert (late["joined_at"].timestamp(), late["lost_at"], late["devices"]) == (BEGAN + 630, None, 4)
    with Reader.open(ledger.url) as reader:
        since = datetime.fromtimestamp(BEGAN - 60, UTC)
        assert [service.node for service in services(reader, since)] == ["n1", "n2", "n4", "n9"]
        record = NodeRecord()
        record.read(reader, since, injected=True)
        assert set(record.jobs) == {"n1", "n2", "n4", "n9"}
        assert reader.rows("nodes", reader.job()["id"], node="n5")[0]["joined_at"] is None


def test_a_plan_that_our_own_check_refused_is_an_event(records: list[journal.Record], open_ledger: Opener) -> None:
    ledger = open_ledger()
    refused = journal.PlanRefused(epoch=9, rank=None, reason="would deadlock")
    for record in (*records, journal.Record(len(records) + 1, BEGAN + 99, refused)):
        ledger.submit(record)
    assert ledger.close()
    found = everything(ledger)
    assert found["events"][-1]["text"] == "epoch 9: plan refused by our own check: would deadlock"
    assert len(found["plans"]) == 2


def test_a_plan_on_its_way_is_pending(open_ledger: Opener, tmp_path: Path) -> None:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", any_layout_story()):
        ledger.submit(record)
        if isinstance(record.entry, journal.PlanDecided) and record.entry.plan.epoch == 5:
            break
    assert ledger.close()
    assert [row["outcome"] for row in everything(ledger)["plans"]][-2:] == ["in effect", "pending"]


def test_applying_twice_changes_nothing(records: list[journal.Record], open_ledger: Opener) -> None:
    ledger = open_ledger()
    for record in records:
        ledger.submit(record)
    assert ledger.flush()
    before = everything(ledger)
    for record in records:
        ledger.submit(record)
    assert ledger.close()
    second = open_ledger()
    for record in records:
        second.submit(record)
    assert second.close()
    assert everything(ledger) == before
    with Reader.open(ledger.url) as reader:
        assert len(reader.jobs()) == 1


def test_catch_up_brings_in_what_is_missing(records: list[journal.Record], open_ledger: Opener, tmp_path: Path) -> None:
    ledger = open_ledger()
    for record in records[:20]:
        ledger.submit(record)
    assert ledger.close()
    second = open_ledger()
    second.catch_up(tmp_path / "journal")
    assert second.close()
    found = everything(ledger)
    assert len(found["iterations"]) == 20
    assert found["job"]["state"] == "completed"


def test_records_before_the_journal_is_known_wait_for_it(
    records: list[journal.Record], open_ledger: Opener, tmp_path: Path
) -> None:
    ledger = open_ledger()
    ledger.submit(records[-1])
    ledger.catch_up(tmp_path / "journal")
    assert ledger.close()
    assert len(everything(ledger)["iterations"]) == 20


def test_a_gap_is_filled_from_the_journal(records: list[journal.Record], open_ledger: Opener, tmp_path: Path) -> None:
    ledger = open_ledger(journal_path=tmp_path / "journal")
    for record in (*records[:10], *records[30:]):
        ledger.submit(record)
    assert ledger.close()
    assert len(everything(ledger)["iterations"]) == 20


def test_a_gap_without_journal_is_not_skipped(records: list[journal.Record], open_ledger: Opener) -> None:
    listener = Listener()
    ledger = open_ledger(say=listener)
    for record in (*records[:20], *records[30:]):
        ledger.submit(record)
    assert not ledger.close()
    assert "incomplete" in listener.heard[-1]
    with Reader.open(ledger.url) as reader:
        assert reader.applied(reader.job()["id"]) == 20


# --- leaders that change ------------------------------------------------------------------------------------------


def taken_over(path: Path, records: list[journal.Record], after: int, term: int = 2) -> list[journal.Record]:
    """The journal of a successor that has the records up to number `after` only, and goes on to the end from there."""
    kept = [record for record in records if record.seq <= after]
    chosen = journal.LeaderChosen(term=term, node="n2", host="there", how="elected", after=after)
    writer = journal_file.Journal(path, sync=False)
    for record in kept:
        writer.copy(journal_format.encode(record))
    writer.append(chosen, kept[-1].at + 5.0)
    for record in records[len(kept) :]:
        writer.append(record.entry, record.at + 5.0)
    writer.close()
    return journal_file.read(path)


def told(found: dict[str, Any]) -> dict[str, Any]:
    """What is known of a job, without when and by whom it was told."""

    def bare(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name != "seq" and not isinstance(value, datetime)}

    tables = {name: [bare(row) for row in rows] for name, rows in found.items() if isinstance(rows, list)}
    for row in tables["failures"]:  # by when records were written
        row["seconds_to_recover"] = row["seconds_without_noticing"] = None
    tables["events"] = [row for row in tables["events"] if row["kind"] != "LeaderChosen"]
    for row in tables["events"]:
        if row["kind"] == "Reconfigured":
            row["text"] = re.sub(r"[\d.]+ s\b", "... s", row["text"])  # the same seconds
    return {"state": found["job"]["state"], "exit_code": found["job"]["exit_code"], **tables}


@pytest.mark.parametrize("after", [14, 17, 33, 40, 45])
def test_the_numbers_of_a_new_term_are_no_gap(
    records: list[journal.Record],
    open_ledger: Opener,
    ledger_urls: Callable[[], str],
    tmp_path: Path,
    after: int,
) -> None:
    whole = open_ledger()
    for record in records:
        whole.submit(record)
    assert whole.close()
    before = everything(whole)
    ledger = open_ledger(url=ledger_urls())
    for record in taken_over(tmp_path / "n2.journal", records, after):
        ledger.submit(record)
    assert ledger.close()
    assert told(everything(ledger)) == told(before)
    [event] = [row for row in everything(ledger)["events"] if row["kind"] == "LeaderChosen"]
    assert "term 2" in event["text"]


def test_a_successor_brings_in_what_is_missing_once(
    records: list[journal.Record], open_ledger: Opener, tmp_path: Path
) -> None:
    first = open_ledger()
    for record in records[:25]:
        first.submit(record)
    assert first.close()
    again = taken_over(tmp_path / "n2.journal", records, 30)
    for _ in range(2):
        second = open_ledger(journal_path=tmp_path / "n2.journal")
        second.catch_up(tmp_path / "n2.journal")
        for record in again:
            second.submit(record)
        assert second.close()
    found = everything(second)
    assert [row["iteration"] for row in found["iterations"]] == list(range(1, 21))
    assert len(found["events"]) == len([r for r in again if not isinstance(r.entry, journal.IterationCommitted)])
    with Reader.open(second.url) as reader:
        assert len(reader.jobs()) == 1
        assert reader.applied(reader.job()["id"]) == again[-1].seq


def test_what_a_leader_wrote_that_was_never_decided_is_taken_out_again(
    records: list[journal.Record], open_ledger: Opener, ledger_urls: Callable[[], str], tmp_path: Path
) -> None:
    """It was cut off: it lost nodes, found failures, committed, gave up, while the others went on without all that."""
    reference = open_ledger()
    expected = taken_over(tmp_path / "n2.journal", records, 25)
    for record in expected:
        reference.submit(record)
    assert reference.close()
    before = everything(reference)
    url = ledger_urls()

    lonely: list[journal.AnyEntry] = [
        journal.IterationCommitted(epoch=1, outcome=outcome(12, 9.9), seconds=0.5, predicted_seconds=None),
        journal.NodeLost(node="n2", reason="cut off"),
        journal.WorkerEnded(rank=4, exit=None, epoch=1),
        journal.FailureFound(
            failure=7,
            kind="fail-stop",
            component="node",
            cause="node n2: cut off",
            ranks=(4,),
            node="n2",
            device=None,
            iteration=13,
            epoch=1,
            evidence="",
            detect_s=None,
        ),
        journal.DrainDecided(drain=1, node="n2", failure=7, reason="cut off"),
        journal.JobEnded(exit_code=5, state="failed", reason="not enough devices"),
    ]
    old = open_ledger(url=url)
    for record in records[:25]:
        old.submit(record)
    for number, entry in enumerate(lonely, 26):
        old.submit(journal.Record(number, BEGAN + 99, entry))
    old.telemetry([{"iteration": 1, "epoch": 1, "rank": 0, "seconds": 0.5, "compute_seconds": 0.4}])
    assert old.close()
    assert everything(old)["job"]["state"] == "failed"

    ledger = open_ledger(url=url, journal_path=tmp_path / "n2.journal")
    ledger.catch_up(tmp_path / "n2.journal")
    assert ledger.close()
    assert everything(ledger) == before | {"job": everything(ledger)["job"]}
    assert told(everything(ledger)) == told(before)
    late = open_ledger(url=url)
    for number, entry in enumerate(lonely, 26):  # the old one is back
        late.submit(journal.Record(number, BEGAN + 99, entry))
    late.submit(records[0])
    assert late.close()
    assert told(everything(ledger)) == told(before)
    assert len(rank_reports(ledger.url)) == 1


def test_a_job_that_goes_on_under_another_leader_runs(
    records: list[journal.Record], open_ledger: Opener, tmp_path: Path
) -> None:
    """Somebody found it dead while its agents were choosing."""
    ledger = open_ledger()
    for record in records[:25]:
        ledger.submit(record)
    ledger.submit(journal.Record(26, BEGAN + 99, journal.JobEnded(exit_code=1, state="abnormal", reason="found dead")))
    assert ledger.close()
    assert everything(ledger)["job"]["state"] == "abnormal"
    successor = open_ledger()
    chosen = journal.LeaderChosen(term=2, node="n2", host="there", how="elected", after=25)
    successor.submit(records[0])
    successor.submit(journal.Record(journal.first_seq(2), BEGAN + 100, chosen))
    assert successor.close()
    job = everything(successor)["job"]
    assert (job["state"], job["exit_code"], job["reason"], job["ended_at"]) == ("running", None, None, None)


def test_locked_database_loses_nothing(
    records: list[journal.Record], open_ledger: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.05)
    failed = threading.Event()
    heard: list[str] = []

    def say(text: str) -> None:
        heard.append(text)
        failed.set()

    ledger = open_ledger(say=say)
    with held(ledger.url):
        for record in records[:30]:
            ledger.submit(record)
        ledger.telemetry([{"iteration": 1, "epoch": 1, "rank": 0, "seconds": 0.5, "compute_seconds": 0.4}])
        assert not ledger.flush(0.1)
        assert failed.wait(20)
        assert "lock" in heard[0]
        assert heard[0].endswith("; retrying, the job continues")
        for record in records[30:]:
            ledger.submit(record)
        assert not ledger.flush(0.1)
    assert ledger.flush(20)
    assert ledger.close()
    assert len(heard) == 2
    assert "written again" in heard[1]
    found = everything(ledger)
    assert len(found["iterations"]) == 20
    assert found["job"]["state"] == "completed"
    assert len(rank_reports(ledger.url)) == 1


def test_locked_until_after_close_is_caught_up_later(
    records: list[journal.Record], open_ledger: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.05)
    listener = Listener()
    ledger = open_ledger(say=listener)
    with held(ledger.url):
        for record in records:
            ledger.submit(record)
        assert not ledger.close(0.3)
    catch_up(ledger.url, tmp_path, tmp_path / "journal")
    assert len(everything(ledger)["iterations"]) == 20


def test_too_many_waiting_records_are_read_again(
    records: list[journal.Record], open_ledger: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.05)
    ledger = open_ledger(journal_path=tmp_path / "journal", records_in_memory=5, say=Listener())
    with held(ledger.url):
        for record in records:
            ledger.submit(record)
        assert len(ledger._records) <= 5
    assert ledger.close()
    assert len(everything(ledger)["iterations"]) == 20


def test_telemetry_is_dropped_and_counted(records: list[journal.Record], open_ledger: Opener) -> None:
    ledger = open_ledger(telemetry_rows=3)
    # The job is not known yet, so that nothing is written in between.
    ledger.telemetry(
        [{"iteration": 1, "epoch": 1, "rank": r, "seconds": 0.5, "compute_seconds": 0.4, "odd": r} for r in range(5)]
    )
    assert ledger.dropped == 2
    ledger.submit(records[0])
    assert ledger.close()
    with Reader.open(ledger.url) as reader:
        assert reader.job()["telemetry_dropped"] == 2
    assert [(row["rank"], row["compute_seconds"]) for row in rank_reports(ledger.url)] == [(0, 0.4), (1, 0.4), (2, 0.4)]


def test_bad_telemetry_holds_nothing_up(records: list[journal.Record], open_ledger: Opener) -> None:
    listener = Listener()
    ledger = open_ledger(say=listener)
    ledger.telemetry([{"rank": None}])
    for record in records:
        ledger.submit(record)
    assert ledger.close()
    assert ledger.dropped == 1
    assert len(everything(ledger)["iterations"]) == 20


def test_a_record_that_fits_no_table_becomes_an_event(open_ledger: Opener) -> None:
    listener = Listener()
    ledger = open_ledger(say=listener)
    entries: list[journal.AnyEntry] = [
        started(),
        journal.WorkerStarted(rank=0, node="never joined", device=0, pid=1, epoch=0),
        journal.IterationCommitted(epoch=1, outcome=outcome(1), seconds=0.5, predicted_seconds=None),
    ]
    for seq, entry in enumerate(entries, 1):
        ledger.submit(journal.Record(seq, BEGAN, entry))
    assert ledger.close()
    found = everything(ledger)
    assert len(found["iterations"]) == 1
    assert found["workers"] == []
    [event] = [row for row in found["events"] if row["kind"] == "UnprojectedWorkerStarted"]
    assert "does not fit the ledger" in event["text"]
    assert any("record 2 fits no table" in text for text in listener.heard)


def test_figures_that_no_column_holds_do_not_stop_the_writer(open_ledger: Opener) -> None:
    listener = Listener()
    ledger = open_ledger(say=listener)
    odd = journal.WorkerStarted(rank=1 << 70, node="n\x001", device=0, pid=1, epoch=0)
    entries = [(started(), BEGAN), (odd, BEGAN), (odd, 1e30), (odd, float("nan"))]
    for seq, (entry, at) in enumerate([*entries, (started(), BEGAN + 5)], 1):
        ledger.submit(journal.Record(seq, at, entry))
    assert ledger.close()
    found = everything(ledger)["events"]
    assert [row["kind"] for row in found] == ["JobStarted", *["UnprojectedWorkerStarted"] * 3, "JobStarted"]
    assert len(listener.heard) == 3


def test_names_of_nodes_hold_no_nul(open_ledger: Opener) -> None:
    ledger = open_ledger()
    ledger.submit(journal.Record(1, BEGAN, started()))
    ledger.submit(journal.Record(2, BEGAN, journal.NodeJoined(node="n\x001", host="h", devices=1)))
    assert ledger.close()
    assert everything(ledger)["events"][-1]["node"] == "n\\01"


def test_rank_reports_come_once_and_bad_ones_take_none_with_them(open_ledger: Opener) -> None:
    listener = Listener()
    ledger = open_ledger(say=listener)
    ledger.submit(journal.Record(1, BEGAN, started()))
    nan, inf = float("nan"), float("inf")
    ledger.telemetry([(1, 1, rank, 0.5, 0.4) for rank in range(100)])
    assert ledger.flush()
    ledger.telemetry([(1, 1, rank, 9.0, 9.0) for rank in range(90, 130)])
    ledger.telemetry([{"iteration": 2, "epoch": 1, "rank": 0, "seconds": nan, "compute_seconds": inf}])
    ledger.telemetry([(3, 1, 1 << 40, 0.5, 0.4), (3, 1, -1, 0.5, 0.4), (3, None, 0, 0.5, 0.4), (3, 1, 0, "x", 0.4)])  # type: ignore[list-item]
    assert ledger.close()
    found = rank_reports(ledger.url)
    assert [row["rank"] for row in found if row["iteration"] == 1] == list(range(130))
    assert {row["seconds"] for row in found if row["rank"] < 100 and row["iteration"] == 1} == {0.5}
    assert [(row["seconds"], row["compute_seconds"]) for row in found if row["iteration"] == 2] == [(None, None)]
    assert [row for row in found if row["iteration"] == 3] == []
    assert ledger.dropped == 4
    with Reader.open(ledger.url) as reader:
        assert reader.job()["telemetry_dropped"] == 4


def test_what_is_not_a_number_is_null(open_ledger: Opener) -> None:
    ledger = open_ledger()
    ledger.submit(journal.Record(1, BEGAN, started()))
    odd = journal.IterationCommitted(epoch=1, outcome=outcome(1, float("nan")), seconds=None, predicted_seconds=None)
    ledger.submit(journal.Record(2, BEGAN, odd))
    assert ledger.close()
    [row] = everything(ledger)["iterations"]
    assert row["loss"] is None
    assert row["seconds"] is None


def test_two_users_jobs_of_one_name_do_not_collide(open_ledger: Opener) -> None:
    for n, user in enumerate(("me", "you")):
        ledger = open_ledger()
        ledger.submit(journal.Record(1, BEGAN + n, started(user=user)))
        ledger.submit(journal.Record(2, BEGAN + n, journal.NodeJoined(node="n1", host="here", devices=1 + n)))
        assert ledger.close()
    with Reader.open(ledger.url) as reader:
        assert [(row["name"], row["owner"]) for row in reader.jobs()] == [("local-1", "you"), ("local-1", "me")]
        assert [reader.rows("nodes", row["id"])[0]["devices"] for row in reader.jobs()] == [2, 1]


def test_a_job_marked_dead_later_ended_when_it_fell_silent(open_ledger: Opener) -> None:
    ledger = open_ledger()
    seq = 0
    for entry, at in story(ended=False):
        seq += 1
        ledger.submit(journal.Record(seq, at, entry))
    dead = journal.JobEnded(exit_code=1, state="abnormal", reason="found dead")
    ledger.submit(journal.Record(seq + 1, at + 86400, dead))
    assert ledger.close()
    with Reader.open(ledger.url) as reader:
        figures = reader.summary(reader.job()["id"])
    assert figures["state"] == "abnormal"
    assert figures["wall_seconds"] < 20


def test_names_and_reasons_that_databases_dislike(open_ledger: Opener) -> None:
    ledger = open_ledger()
    reason = 'it\'s "gone"; DROP TABLE jobs; -- [red] \x00 \udcff'
    ledger.submit(journal.Record(1, BEGAN, started()))
    ledger.submit(journal.Record(2, BEGAN, journal.NodeJoined(node="n'1\"[b]", host="h", devices=1)))
    ledger.submit(journal.Record(3, BEGAN, journal.NodeLost(node="n'1\"[b]", reason=reason)))
    assert ledger.close()
    [row] = everything(ledger)["nodes"]
    assert row["node"] == "n'1\"[b]"
    assert row["lost_reason"] == reason.replace("\x00", "\\0").replace("\udcff", "\\udcff")


def test_a_listener_that_raises_stops_nothing(records: list[journal.Record], open_ledger: Opener) -> None:
    def say(text: str) -> None:
        raise RuntimeError("gone")

    ledger = open_ledger(say=say)
    ledger.telemetry([{"rank": None}])
    for record in records:
        ledger.submit(record)
    assert ledger.close()


@on_sqlite
def test_no_wal_on_network_file_systems(
    tmp_path: Path, open_ledger: Opener, monkeypatch: pytest.MonkeyPatch, records: list[journal.Record]
) -> None:
    def mode() -> str:
        connection = sqlite3.connect(tmp_path / "ledger.db")
        [value] = connection.execute("PRAGMA journal_mode").fetchone()
        connection.close()
        return str(value)

    open_ledger().close()
    assert mode() == "wal"
    (tmp_path / "ledger.db").unlink()
    monkeypatch.setattr(resihp.db.engine, "file_system", lambda path: "lustre")
    monkeypatch.setattr(resihp.db.writer, "file_system", lambda path: "lustre")
    listener = Listener()
    open_ledger(say=listener).close()
    assert mode() == "delete"
    assert "on lustre, opened without WAL" in listener.heard[0]


def test_a_reader_sees_the_job_while_it_runs(records: list[journal.Record], open_ledger: Opener) -> None:
    ledger = open_ledger()
    ledger.submit(records[0])
    assert ledger.flush()
    with Reader.open(ledger.url) as reader:
        job = reader.job()["id"]
        assert reader.summary(job)["iteration"] == 0
        for record in records[1:30]:
            ledger.submit(record)
        assert ledger.flush()
        assert reader.summary(job)["iteration"] == 11


def test_a_table_that_was_replaced_by_a_view_is_told_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    records = list(write_journal(tmp_path / "journal", story()))
    with Ledger.open(url, tmp_path) as ledger:
        ledger.submit(records[0])
        assert ledger.flush(30)
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.executescript("DROP TABLE iterations; CREATE VIEW iterations AS SELECT * FROM jobs;")
    began = time.monotonic()
    with pytest.raises(LedgerError, match=r"cannot be written, .*view"):
        catch_up(url, tmp_path, tmp_path / "journal")
    assert time.monotonic() - began < 20, "it waited for a minute"
