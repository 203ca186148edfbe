"""Metrics follow the journal and agree with the ledger; odd names, full disks and taken ports harm nobody."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

import resihp.wrapper.sinks.metrics
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.record import journal
from resihp.record.packing import pack, unpack
from resihp.wrapper.sinks.figures import follow, followed, snapshot
from resihp.wrapper.sinks.lost_time import LostTime
from resihp.wrapper.sinks.metrics import MAX_CONNECTIONS, MAX_WAITING_RECORDS, Metrics
from tests.db.conftest import BEGAN, any_layout_story, node_story, outcome, started, story, write_journal
from tests.resihp.record.test_packing import committed
from tests.waiting import until

LATER = BEGAN + 3600


def told(entries: Any, path: Path) -> list[journal.Record]:
    return write_journal(path / "told", entries)


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """(name, labels but the job's) -> value."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = [f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "job_id"]
            found[sample.name, *labels] = sample.value
    return found


def scraped(records: list[journal.Record], **arguments: Any) -> dict[tuple[str, ...], float]:
    return samples(Metrics("j", followed(records), say=pytest.fail, clock=lambda: LATER, **arguments).text())


def test_a_story_of_one_failure(tmp_path: Path) -> None:
    found = scraped(told(story(), tmp_path), outside=lambda: {"ledger_behind": 3, "webhook.told": 2})
    expected = {
        ("resihp_iteration",): 20,
        ("resihp_iterations_total",): 20,
        ("resihp_last_iteration_seconds",): 0.6,
        ("resihp_iteration_seconds_bucket", "le=0.4"): 0,
        ("resihp_iteration_seconds_bucket", "le=0.5"): 11,
        ("resihp_iteration_seconds_bucket", "le=0.63"): 20,
        ("resihp_iteration_seconds_bucket", "le=+Inf"): 20,
        ("resihp_iteration_seconds_count",): 20,
        ("resihp_iteration_seconds_sum",): 11 * 0.5 + 9 * 0.6,
        ("resihp_iteration_predicted_seconds",): 0.59,
        ("resihp_epoch",): 2,
        ("resihp_useful_seconds_total",): 11 * 0.5 + 9 * 0.6 * 8 / 12,  # four of twelve devices had no work any more
        ("resihp_goodput_ratio",): 9.1 / 11.6,
        ("resihp_failures_total", "component=process", "kind=fail-stop", "node=n2"): 1,
        ("resihp_reconfigurations_total", "action=redo"): 1,
        ("resihp_reconfiguration_seconds_total", "action=redo"): 1.0,
        ("resihp_recovery_seconds_total", "action=redo"): 1.02,
        ("resihp_checkpoints_total",): 1,
        ("resihp_job_state", "state=completed"): 1,
        ("resihp_job_state", "state=running"): 0,
        ("resihp_ranks", "state=ended"): 12,
        ("resihp_ledger_behind_records",): 3,
        ("resihp_hook_events_total", "hook=webhook", "outcome=told"): 2,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_prometheus_takes_it_in_both_of_its_formats(tmp_path: Path) -> None:
    """No name is used twice, histograms are whole, counters are named as they should be: the strict parser says so."""
    records = told(story(), tmp_path)
    metrics = Metrics("j", followed(records), say=pytest.fail, clock=lambda: LATER)
    for record in records:
        metrics._lost.submit(record)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    plain = list(text_string_to_metric_families(metrics.text().decode()))
    strict = list(openmetrics_families(exposition.generate_latest(registry).decode()))
    assert {sample.name for family in strict for sample in family.samples} == {
        sample.name for family in plain for sample in family.samples
    }
    assert {family.type for family in strict if family.name == "resihp_lost_seconds"} == {"counter"}
    assert {family.type for family in strict if family.name == "resihp_iteration_seconds"} == {"histogram"}
    names = [family.name for family in plain]
    assert len(names) == len(set(names))


def long_past(committed: int) -> Iterator[tuple[journal.AnyEntry, float]]:
    yield from islice(story(ended=False), 17)
    for i in range(1, committed + 1):
        entry = journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=0.1234567, predicted_seconds=None)
        yield entry, BEGAN + 10 + i * 0.3333333


def test_counters_go_on_where_they_were_for_a_supervisor_that_takes_over(tmp_path: Path) -> None:
    """To the last bit: one that is a little less than before is a counter that began anew, to Prometheus."""
    records = told(long_past(3000), tmp_path)
    lived = Metrics("j", say=pytest.fail, clock=lambda: LATER)
    for record in records:
        lived.submit(record)
    packed = [*records[:17], *pack(records[17:2000]), *pack(records[2000:])]
    assert len(packed) < 100
    taken_over = Metrics("j", followed(packed), say=pytest.fail, records=packed, clock=lambda: LATER)

    def counters(metrics: Metrics) -> dict[str, list[float]]:
        return {
            family.name: [sample.value for sample in family.samples]
            for family in text_string_to_metric_families(metrics.text().decode())
            if family.type in ("counter", "histogram")
        }

    until(lambda: "resihp_lost_seconds" in counters(taken_over))
    until(lambda: any(counters(lived).get("resihp_lost_seconds", ())))
    until(lambda: counters(lived) == counters(taken_over))
    assert counters(lived)["resihp_useful_seconds"] == [3000 * 0.123457]


def test_a_long_past_is_told_once_all_of_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not step by step: to `rate` it would have been lost just now."""
    go_on = threading.Event()
    monkeypatch.setattr(resihp.wrapper.sinks.metrics.time, "sleep", lambda _: go_on.wait(30))
    metrics = Metrics("j", say=pytest.fail, records=told(long_past(1000), tmp_path))
    assert not [key for key in samples(metrics.text()) if key[0].startswith("resihp_lost")]
    go_on.set()
    until(lambda: ("resihp_lost_seconds_total", "cause=other") in samples(metrics.text()))
    found = samples(metrics.text())
    assert found["resihp_lost_seconds_total", "cause=start"] > 0.0


def test_nobody_who_submits_works_out_what_was_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hung = threading.Event()
    monkeypatch.setattr(LostTime, "step", lambda _: hung.wait(30) and False)
    metrics = Metrics("j", say=pytest.fail)
    for record in told(long_past(MAX_WAITING_RECORDS + 100), tmp_path):
        metrics.submit(record)
    assert ("resihp_iterations_total",) in samples(metrics.text())
    hung.set()


def overlapping() -> Iterator[tuple[journal.AnyEntry, float]]:
    """The story, in which ranks begin each iteration a little before the last one is committed, and one comes late."""
    for n, (entry, at) in enumerate(story()):
        if isinstance(entry, journal.IterationCommitted) and entry.seconds is not None:
            yield msgspec.structs.replace(entry, seconds=entry.seconds + 0.02), at + 0.1 * (n % 7 == 0)
        else:
            yield entry, at
        if isinstance(entry, journal.PlanDecided):
            yield journal.PlanInEffect(epoch=entry.plan.epoch), at + 0.01


def slow_with_fewer() -> Iterator[tuple[journal.AnyEntry, float]]:
    """A GPU that died is followed by another that works at half its speed."""
    for entry, at in story():
        if isinstance(entry, journal.IterationCommitted) and entry.epoch == 2:
            entry = msgspec.structs.replace(entry, predicted_seconds=0.3)
        yield entry, at
        if isinstance(entry, journal.PlanDecided) and entry.plan.epoch == 2:
            slow = journal.FailureFound(
                failure=2, kind="fail-slow", component="device", cause="", ranks=(0,), node="n1", device=0,
                iteration=entry.next_iteration, epoch=2, evidence="", detect_s=None, speed=0.5,
            )  # fmt: skip
            yield slow, at


def set_back() -> Iterator[tuple[journal.AnyEntry, float]]:
    """The clock is set back by an hour between two iterations, as where another host leads whose clock is late."""
    late = 0.0
    for entry, at in story():
        if isinstance(entry, journal.IterationCommitted) and entry.outcome.iteration == 6:
            late = 3600.0
        yield entry, at - late


@pytest.mark.parametrize("until", [None, 30, 45])
@pytest.mark.parametrize("of", [story, overlapping, slow_with_fewer, set_back])
def test_goodput_is_the_ledger_s(
    tmp_path: Path, of: Callable[[], Iterator[tuple[journal.AnyEntry, float]]], until: int | None
) -> None:
    records = told(of(), tmp_path)[:until]
    now = records[-1].at + 7
    found = followed(records)
    assert followed(pack(records)).goodput(now) == pytest.approx(found.goodput(now))
    with Ledger.open("sqlite", tmp_path) as ledger:
        for record in records:
            ledger.submit(record)
        assert ledger.flush()
    with Reader.open(f"sqlite:///{tmp_path / 'ledger.db'}") as reader:
        summary = reader.summary(reader.job()["id"], datetime.fromtimestamp(now, UTC))
    assert found.goodput(now) == pytest.approx(summary["goodput"])
    assert found.useful_s() == pytest.approx(summary["useful_seconds"])
    assert found.wall_s(now) == pytest.approx(summary["wall_seconds"])


def test_an_iteration_that_nobody_timed_counts_as_the_median(tmp_path: Path) -> None:
    def entries() -> Any:
        for i, seconds in enumerate((1.0, 2.0, None, 9.0), 1):
            yield (
                journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=seconds, predicted_seconds=None),
                BEGAN + 10 * i,
            )

    assert followed(told(entries(), tmp_path)).useful_s() == 1.0 + 2.0 + 2.0 + 9.0


def test_each_rank_is_in_one_state(tmp_path: Path) -> None:
    records = told(any_layout_story(), tmp_path)
    found = scraped(records)
    ranks = {key[1]: value for key, value in found.items() if key[0] == "resihp_ranks"}
    assert ranks == {
        "state=active": 12,
        "state=standby": 0,
        "state=starting": 0,
        "state=slow": 0,
        "state=suspected": 0,
        "state=ended": 2,
    }
    before = records.index(next(r for r in records if isinstance(r.entry, journal.WorkerEnded)))
    assert followed(records[:before]).ranks()["active"] == 12


def test_nodes_drains_and_replacements(tmp_path: Path) -> None:
    found = scraped(told(node_story(), tmp_path))
    assert found[("resihp_drains_total",)] == 2
    assert found["resihp_drain_answers_total", "outcome=done", "step=slurm"] == 1
    assert found["resihp_replacements", "state=joined"] == 1
    assert found["resihp_replacements", "state=refused"] == 1
    assert (found[("resihp_nodes",)], found[("resihp_nodes_lost_total",)]) == (3, 1)


def test_nothing_is_claimed_before_there_is_something(tmp_path: Path) -> None:
    found = scraped(told(iter([(started(), BEGAN)]), tmp_path))
    for name in (
        "resihp_goodput_ratio",
        "resihp_last_iteration_seconds",
        "resihp_loss",
        "resihp_ledger_behind_records",
    ):
        assert (name,) not in found


ODD = 'a"b\\c\nd}é\udc80' + "x" * 500


def test_odd_names_come_out_as_they_are(tmp_path: Path) -> None:
    failure = journal.FailureFound(
        failure=1,
        kind="fail-stop",
        component="node",
        cause="",
        ranks=(),
        node=ODD,
        device=None,
        iteration=1,
        epoch=1,
        evidence="",
        detect_s=None,
    )
    metrics = Metrics("j", say=pytest.fail)
    metrics.submit(journal.Record(1, BEGAN, started(user=ODD)))
    metrics.submit(journal.Record(2, BEGAN, failure))
    found = samples(metrics.text())
    (node,) = [key[-1] for key in found if key[0] == "resihp_failures_total"]
    assert node == "node=" + ODD.replace("\udc80", "?")[: resihp.wrapper.sinks.metrics.MAX_LABEL_CHARACTERS]


@pytest.mark.parametrize("seed", range(20))
def test_packed_iterations_come_to_what_they_would_one_by_one(seed: int) -> None:
    """Some of unknown seconds, some bunched, under three plans, and a clock that was set back."""
    rng = Random(seed)
    at, epoch, records = BEGAN, 1, []
    for n in range(1, 301):
        record = committed(n, rng=rng)
        assert isinstance(record.entry, journal.IterationCommitted)
        seconds = rng.choice([None, rng.uniform(1.0, 9.0), 8.0])
        at = round(at + rng.choice([8.0, 8.3, 0.01, rng.uniform(0.0, 30.0), 8.0 if n % 50 else -4.0]), 6)
        epoch += n in {90, 200}
        outcome = msgspec.structs.replace(record.entry.outcome, loss=float(n))
        predicted_s = record.entry.predicted_seconds
        entry = journal.IterationCommitted(epoch=epoch, outcome=outcome, seconds=seconds, predicted_seconds=predicted_s)
        records.append(journal.Record(n, at, entry))
    packed = [each for part in (records[:89], records[89:129], records[129:]) for each in pack(part)]
    assert len(packed) == 4
    one_by_one, by_column = vars(followed(unpack(packed))), vars(followed(packed))
    assert vars(by_column.pop("counting")) == pytest.approx(vars(one_by_one.pop("counting")), abs=1e-5)
    assert by_column == one_by_one


def test_a_snapshot_does_not_change(tmp_path: Path) -> None:
    records = told(any_layout_story(), tmp_path)
    found = followed(records[:20])
    before, text = snapshot(found), repr(found)
    for record in records[20:]:
        follow(found, record)
    assert repr(found) != text
    assert repr(before) == text


def test_labels_do_not_grow_with_the_job(tmp_path: Path) -> None:
    metrics = Metrics("j", followed(told(story(ended=False), tmp_path)), say=pytest.fail)
    before = len(samples(metrics.text()))
    for i in range(100):
        entry = journal.IterationCommitted(epoch=2, outcome=outcome(i), seconds=0.1, predicted_seconds=0.1)
        metrics.submit(journal.Record(1000 + i, BEGAN + i, entry))
    assert len(samples(metrics.text())) == before


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_it_answers_on_loopback_while_the_job_runs(tmp_path: Path) -> None:
    metrics = Metrics("j", followed(told(story(ended=False), tmp_path)), say=pytest.fail)
    port = metrics.serve(free_port())
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert samples(answer.read())[("resihp_iteration",)] == 20
    finally:
        metrics.close(time.monotonic() + 10)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_connections_that_say_nothing_cost_a_few_threads_and_not_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resihp.wrapper.sinks.metrics, "REQUEST_TIMEOUT_S", 0.5)
    metrics = Metrics("j", say=print)
    port = metrics.serve(free_port())
    assert port is not None
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    try:
        hung_up = 0
        for each in idle[MAX_CONNECTIONS:]:
            each.settimeout(10)
            hung_up += not each.recv(1)
        assert hung_up == 60 - MAX_CONNECTIONS
        assert threading.active_count() - before <= MAX_CONNECTIONS

        def answers() -> bool:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return ("resihp_iterations_total",) in samples(answer.read())
            return False

        until(answers)
    finally:
        for each in idle:
            each.close()
        metrics.close(time.monotonic() + 10)


def test_a_port_that_is_taken_is_said_and_no_more() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        metrics = Metrics("j", say=said.append)
        assert metrics.serve(port) is None
        metrics.submit(journal.Record(1, BEGAN, started()))
    assert said == [
        f"metrics: 127.0.0.1:{port} is not available (Address already in use); set port in [metrics] to another"
    ]
    metrics.close(time.monotonic() + 10)


# --- the textfile ---------------------------------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resihp.wrapper.sinks.metrics, "WRITE_EVERY_S", 0.0)


@pytest.mark.usefixtures("eager")
def test_the_textfile_is_others_to_read_and_holds_the_end(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        path = tmp_path / "resihp.prom"
        metrics = Metrics("j", say=pytest.fail)
        metrics.write_to(path)
        for record in told(story(), tmp_path):
            metrics.submit(record)
        assert metrics.close(time.monotonic() + 10)
    finally:
        os.umask(old)
    assert samples(path.read_bytes())["resihp_job_state", "state=completed"] == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resihp.prom", "told"]


@pytest.mark.usefixtures("eager")
def test_whoever_reads_it_never_sees_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "resihp.prom"
    metrics = Metrics("j", followed(told(story(ended=False), tmp_path)), say=pytest.fail)
    metrics.write_to(path)
    until(path.exists)
    whole = set(samples(path.read_bytes()))
    for i in range(200):
        entry = journal.IterationCommitted(epoch=2, outcome=outcome(i), seconds=0.1, predicted_seconds=0.1)
        metrics.submit(journal.Record(1000 + i, BEGAN + i, entry))
        assert set(samples(path.read_bytes())) == whole
    metrics.close(time.monotonic() + 10)


@pytest.mark.usefixtures("eager")
def test_a_folder_that_is_not_there_is_said_once_and_so_is_that_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "later" / "resihp.prom"
    metrics = Metrics("j", say=said.append)
    metrics.write_to(path)
    until(lambda: said)
    for i, record in enumerate(told(story(ended=False), tmp_path)):
        if i == 10:
            path.parent.mkdir()
        metrics.submit(record)
        until(lambda: not metrics._textfile or not metrics._textfile.changed.is_set())
    assert metrics.close(time.monotonic() + 10)
    assert [text.split(": ", 2)[2].split(";")[0] for text in said] == ["No such file or directory", "writable again"]


@pytest.mark.usefixtures("eager")
def test_a_hung_file_system_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung, release = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hung.set()
        release.wait(30)

    monkeypatch.setattr(resihp.wrapper.sinks.metrics, "replace_readable", hang)
    metrics = Metrics("j", say=pytest.fail)
    metrics.write_to(tmp_path / "x.prom")
    assert hung.wait(10)
    for record in told(story(), tmp_path):
        metrics.submit(record)
    assert not metrics.close(time.monotonic())
    assert samples(metrics.text())[("resihp_iteration",)] == 20
    release.set()


def test_a_blind_watcher_does_not_look_healthy(tmp_path: Path) -> None:
    def entries() -> Any:
        yield started(), BEGAN
        yield journal.Suspected(rank=5, node="n2", evidence="", kind="slow", suspicion=1, ranks=(5,)), BEGAN
        yield journal.Suspected(rank=5, node="n2", evidence="", kind="slow", suspicion=1, cleared=True), BEGAN
        yield journal.CoverageChanged(iteration=208, detector="plain times", unwatched=(5, 6)), BEGAN

    found = scraped(told(entries(), tmp_path))
    assert found["resihp_unwatched_ranks",] == 2
    assert found["resihp_detector_state", "state=plain times"] == 1
    assert found["resihp_detector_state", "state=workload"] == 0
    assert found["resihp_suspicions_total", "component=device"] == 1
