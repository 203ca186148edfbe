"""Traces: what they are made of, that each is told once, and that no collector holds a job up or learns its secrets."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from resihp.errors import ConfigurationError
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from resihp.record.packing import pack
from resihp.wrapper.config.run_spec import ListenerSettings
from resihp.wrapper.config.sources import read
from resihp.wrapper.job_folder import create_local_job
from resihp.wrapper.sinks import fanout
from resihp.wrapper.sinks.fanout import notify_of_end
from resihp.wrapper.sinks.tracing import otlp
from resihp.wrapper.sinks.tracing.spans import Episode, Span, Story
from resihp.wrapper.sinks.tracing.traces import Traces, asked_of
from tests.db.conftest import BEGAN, DP3, any_layout_story, outcome, started, story, write_journal
from tests.waiting import until
from tests.wrapper.conftest import StubJob
from tests.wrapper.supervisor.test_shell import request_of
from tests.wrapper.test_processes import UNTIL_TOLD, led_by, running, supervisor_of

SLURM = journal.SlurmIdentity(cluster="alps", job=4711, submitted_at=BEGAN - 60)
PHASES = ["park", "plan", "build communicators", "move state", "first iteration"]


def traces_of(records: list[journal.Record]) -> list[Episode]:
    told = Story()
    return [trace for record in records for trace in told.follow(record)]


def numbered(told: list[tuple[journal.AnyEntry, float]]) -> list[journal.Record]:
    return [journal.Record(i + 1, at, entry) for i, (entry, at) in enumerate(told)]


def moments(span: Span) -> tuple[str, float, float]:
    return span.name, round(span.start - BEGAN, 3), round(span.end - BEGAN, 3)


def slow(iteration: int, found: int, failed_s: float | None, failure: int = 1) -> journal.FailureFound:
    return journal.FailureFound(
        failure=failure, kind="fail-slow", component="device", cause="works at 40%", ranks=(3,), node="n1", device=3,
        iteration=iteration, epoch=1, evidence=f"seen in {found}", detect_s=None, failed_s=failed_s, speed=0.4,
        confidence=0.9,
    )  # fmt: skip


def iterations(first: int, last: int) -> list[tuple[journal.AnyEntry, float]]:
    """One ends each second."""
    return [
        (journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=1.0, predicted_seconds=None), BEGAN + i)
        for i in range(first, last + 1)
    ]


# --- what a trace is ------------------------------------------------------------------------------------------------


def test_a_recovery_from_the_fault_to_the_first_iteration_after_it() -> None:
    (trace,) = traces_of(numbered([(msgspec.structs.replace(started(), slurm=SLURM), BEGAN), *list(story())[1:]]))
    root = trace.root
    assert moments(root) == ("recovery", 7.78, 8.8)
    assert [moments(child) for child in root.children] == [
        ("notice", 7.78, 7.8),
        ("park", 7.8, 7.9),
        ("plan", 7.9, 7.95),
        ("build communicators", 7.95, 8.15),
        ("move state", 8.15, 8.2),
        ("first iteration", 8.2, 8.8),
    ]
    assert [name for _, name, _ in root.events] == ["FaultInjected", "WorkerEnded", "FailureFound", "PlanDecided"]
    expected = {
        "resihp.job": "local-1",
        "slurm.job_id": "4711",
        "slurm.cluster": "alps",
        "resihp.epoch": 2,
        "resihp.failures": [1],
        "resihp.cause": "rank 5 killed by signal 9 (SIGKILL)",
        "resihp.nodes": ["n2"],
        "resihp.ranks": [5],
        "resihp.layout.before": "DP3 x PP2 x TP2",
        "resihp.layout.after": "DP2 x PP2 x TP2 + 3 standby",
        "resihp.iterations_lost": 1,
        "resihp.iteration": 12,
    }
    assert {key: root.attributes[key] for key in expected} == expected


def test_a_change_of_plan_without_a_failure_and_what_deciding_took() -> None:
    told = list(any_layout_story())
    entry, at = told[-1]
    assert isinstance(entry, journal.Reconfigured)
    told[-1] = msgspec.structs.replace(entry, planning_s=0.04), at
    first, second = traces_of(numbered(told))
    assert first.root.attributes["resihp.attempts"] == 3
    assert "PlanRefused" in [name for _, name, _ in first.root.events]
    assert moments(second.root) == ("change of plan", 3.8, 4.8)
    assert [child.name for child in second.root.children] == PHASES
    assert moments(second.root.children[1].children[0]) == ("decide", 3.9, 3.94)
    attributes = second.root.attributes
    assert attributes["resihp.cause"] == "rank 12 joined"
    assert attributes["resihp.layout.before"] == first.root.attributes["resihp.layout.after"] == "2x TP2,2 | TP2,1"
    assert attributes["resihp.layout.after"] == "DP3 x PP2 x TP2"
    assert attributes["resihp.iterations_lost"] == 0


def test_a_record_that_was_written_late_moves_no_phase() -> None:
    """That of the change came 50 ms late in a real job. What another leader wrote was counted from another moment."""
    told = list(any_layout_story())[:-1]
    plan = next(at for entry, at in told if isinstance(entry, journal.PlanInEffect) and entry.epoch == 5)
    change, _ = list(any_layout_story())[-1]
    late = numbered([*told, (change, plan + 0.6 + 0.05)])
    root = traces_of(late)[-1].root
    assert moments(root) == ("change of plan", 3.9, 4.9)
    assert moments(root.children[-1]) == ("first iteration", 4.3, 4.9)
    late[-1] = msgspec.structs.replace(late[-1], seq=journal.first_seq(2) + 1)
    assert moments(traces_of(late)[-1].root) == ("change of plan", 3.95, 4.95)


def test_what_the_slowest_ranks_took_is_no_longer_than_until_training_went_on() -> None:
    told = list(any_layout_story())
    change, at = told[-1]
    assert isinstance(change, journal.Reconfigured)
    told[-1] = msgspec.structs.replace(change, state_s=0.5), at
    built, moved, first = traces_of(numbered(told))[-1].root.children[-3:]
    assert [moments(span)[1:] for span in (built, moved, first)] == [(3.95, 4.15), (4.15, 4.2), (4.2, 4.8)]
    assert (built.attributes["resihp.seconds"], moved.attributes["resihp.seconds"]) == (0.2, 0.5)


def test_what_is_slow_begins_where_the_journal_says() -> None:
    told: list[tuple[journal.AnyEntry, float]] = [(started(), BEGAN), *iterations(1, 40)]
    told += [(slow(31, 40, 10.2), BEGAN + 40.2), *iterations(41, 44)]
    change = journal.Reconfigured(
        epoch=2, failures=(1,), attempts=1, action="between", park_s=0.1, plan_s=0.1, groups_s=0.1, state_s=0.1,
        first_iteration_s=1.0, seconds=2.0,
    )  # fmt: skip
    told.append((change, BEGAN + 46))
    (trace,) = traces_of(numbered(told))
    assert moments(trace.root) == ("recovery", 30.0, 46.0)
    assert [moments(child) for child in trace.root.children][:3] == [
        ("notice", 30.0, 40.2),
        ("weigh", 40.2, 44.0),
        ("park", 44.0, 44.1),
    ]


def test_what_was_slow_and_is_well_again_without_a_change_of_plan() -> None:
    told = [(started(), BEGAN), *iterations(1, 10), (slow(6, 10, 5.5), BEGAN + 10.5), *iterations(11, 20)]
    well = journal.FailureEnded(failure=1, node="n1", device=3, iteration=18, evidence="as fast as before")
    (trace,) = traces_of(numbered([*told, (well, BEGAN + 20.5)]))
    assert moments(trace.root) == ("failure", 5.0, 20.5)
    assert trace.root.attributes["resihp.outcome"] == "ended"
    assert not trace.root.failed


def died(failure: int, iteration: int) -> journal.FailureFound:
    found = slow(iteration, iteration, None, failure)
    return msgspec.structs.replace(found, kind="fail-stop", cause=f"rank {failure} died", speed=None, confidence=None)


def test_failures_at_the_end_of_a_job_that_failed() -> None:
    """One cost nothing, one was slow to the end, one ended the job, with what came after the last checkpoint."""
    told: list[tuple[journal.AnyEntry, float]] = [(started(), BEGAN), *iterations(1, 3), (died(1, 4), BEGAN + 3.5)]
    told += [*iterations(4, 20), (slow(10, 20, 11.1, 2), BEGAN + 20.1)]
    told += [(journal.CheckpointCommitted(iteration=20, folder="c", bytes=1, seconds=0.1), BEGAN + 20.2)]
    told += [*iterations(21, 25), (died(3, 26), BEGAN + 25.5)]
    told += [(journal.JobEnded(exit_code=5, state="failed", reason="stage 1 is lost"), BEGAN + 27)]
    spared, kept, fatal = traces_of(numbered(told))
    assert moments(spared.root) == ("failure", 3.5, 3.5)
    assert moments(kept.root) == ("failure", 9.0, 27.0)
    assert moments(fatal.root) == ("failure", 25.5, 27.0)
    assert [trace.root.failed for trace in (spared, kept, fatal)] == ["", "", "stage 1 is lost"]
    assert fatal.root.attributes["resihp.iterations_lost"] == 5
    assert len({trace.key for trace in (spared, kept, fatal)}) == 3


@pytest.mark.parametrize(
    ("state", "outcome", "failed"), [("failed", "ended the job", "why"), ("cancelled", "cut short", "")]
)
def test_a_job_that_went_on_from_a_checkpoint_lost_what_came_after_it(
    state: Literal["failed", "cancelled"], outcome: str, failed: str
) -> None:
    plan = Plan(epoch=1, layout=DP3, assignment=spread(12, 3))
    start = journal.PlanDecided(plan=plan, next_iteration=101, action="start", finish=None, reason="start")
    told: list[tuple[journal.AnyEntry, float]] = [(started(), BEGAN), (start, BEGAN + 1), *iterations(101, 103)]
    told += [(died(1, 104), BEGAN + 104), (journal.JobEnded(exit_code=5, state=state, reason="why"), BEGAN + 105)]
    (episode,) = traces_of(numbered(told))
    assert episode.root.attributes["resihp.outcome"] == outcome
    assert episode.root.attributes["resihp.iterations_lost"] == (3 if failed else 0)
    assert episode.root.failed == failed


# --- by the SDK -----------------------------------------------------------------------------------------------------


def by_the_sdk(traces: list[Episode]) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    outlet = otlp.Outlet(exporter)
    for trace in traces:
        outlet.send(trace)
    assert outlet.close(soon())
    return list(exporter.get_finished_spans())


def soon() -> float:
    return time.monotonic() + 20


def test_the_sdk_has_the_journals_times_and_whoever_tells_it_the_same_ids(tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", story())
    spans = by_the_sdk(traces_of(records))
    assert [span.name for span in spans] == ["notice", *PHASES, "recovery"]
    root = spans[-1]
    assert root.parent is None
    assert {(span.parent and span.parent.span_id) for span in spans[:-1]} == {root.context.span_id}
    assert len({span.context.span_id for span in spans}) == len(spans)
    assert len({span.context.trace_id for span in spans}) == 1
    assert (root.start_time, root.end_time) == (int((BEGAN + 7.78) * 1000) * 10**6, int((BEGAN + 8.8) * 1000) * 10**6)
    assert (spans[0].start_time, spans[0].end_time) == (root.start_time, root.start_time + 20_000_000)
    assert root.resource.attributes["service.name"] == "resihp"
    again = by_the_sdk(traces_of(pack(records)))
    assert [span.context for span in again] == [span.context for span in spans]
    different = by_the_sdk(traces_of([msgspec.structs.replace(record, at=record.at + 1) for record in records]))
    assert different[-1].context.trace_id != root.context.trace_id


def test_a_failure_that_ended_the_job_is_an_error() -> None:
    told = [(started(), BEGAN), (died(1, 1), BEGAN + 1)]
    ended = journal.JobEnded(exit_code=5, state="failed", reason="stage 1 is lost")
    spans = by_the_sdk(traces_of(numbered([*told, (ended, BEGAN + 2)])))
    assert [(span.status.status_code, span.status.description) for span in spans] == [
        (StatusCode.ERROR, "stage 1 is lost")
    ]


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "pretraining")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=llm")
    (*_, root) = by_the_sdk(traces_of(numbered(list(story()))))
    assert (root.resource.attributes["service.name"], root.resource.attributes["team"]) == ("pretraining", "llm")


# --- to a collector -------------------------------------------------------------------------------------------------


@dataclass
class Collector:
    """A collector on loopback, which answers as told."""

    url: str = ""
    status: int = 200
    answer: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    stall: threading.Event | None = None
    """Until then it does not answer."""
    endless: bool = False
    """The answer's body never ends."""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def spans(self) -> list[Sent]:
        scopes = [scope for one in self.requests for spans in one.resource_spans for scope in spans.scope_spans]
        return [span for scope in scopes for span in scope.spans]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            if made.stall is not None:
                made.stall.wait(20)
            if made.status == 200:
                made.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(made.status)
            for name, value in made.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(made.answer)
            while made.endless and not over.wait(0.01):
                self.wfile.write(b"x" * 1000)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # we hang up on what never ends

    with Server(("127.0.0.1", 0), Handler) as server:
        made.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=SECRET")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield made
        over.set()
        if made.stall is not None:
            made.stall.set()
        server.shutdown()
        thread.join()


def test_a_collector_gets_them(collector: Collector, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    it = Traces(noted=tmp_path / "told", say=said.append)
    with caplog.at_level(logging.DEBUG):
        for record in write_journal(tmp_path / "journal", story()):
            it.submit(record)
        assert it.close(soon())
    assert [span.name for span in collector.spans] == ["notice", *PHASES, "recovery"]
    root = collector.spans[-1]
    assert root.parent_span_id == b""
    assert {span.parent_span_id for span in collector.spans[:-1]} == {root.span_id}
    assert root.start_time_unix_nano == int((BEGAN + 7.78) * 1000) * 10**6
    values = {each.key: each.value for each in root.attributes}
    assert values["resihp.cause"].string_value == "rank 5 killed by signal 9 (SIGKILL)"
    assert [each.int_value for each in values["resihp.ranks"].array_value.values] == [5]
    assert [event.name for event in root.events][-1] == "PlanDecided"
    path, headers = collector.asked[0]
    assert (path, headers["api-key"]) == ("/v1/traces", "SECRET")
    assert (said, "SECRET" in caplog.text) == ([], False)


def test_names_that_are_no_text_keep_nothing_back(collector: Collector, tmp_path: Path) -> None:
    """The SDK drops a whole batch for one."""
    bad = msgspec.structs.replace(died(1, 1), node="n\udc80", cause="\udc80 died")
    ended = journal.JobEnded(exit_code=1, state="failed", reason="\udc80")
    it = Traces(noted=tmp_path / "told", say=pytest.fail)
    for record in numbered([(started(), BEGAN), (bad, BEGAN + 1), (ended, BEGAN + 2)]):
        it.submit(record)
    assert it.close(soon())
    (root,) = collector.spans
    assert root.status.message == "?"
    assert {each.key: each.value for each in root.attributes}["resihp.cause"].string_value == "? died"


def test_who_takes_over_tells_what_was_not_told_and_nothing_twice(collector: Collector, tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", any_layout_story())
    middle = next(i for i, record in enumerate(records) if isinstance(record.entry, journal.Reconfigured)) + 1
    noted = tmp_path / "told"
    first = Traces(noted=noted, say=pytest.fail)
    for record in records[:middle]:
        first.submit(record)
    until(lambda: noted.exists() and len(collector.spans) == 7)
    second = Traces(
        noted=noted, say=pytest.fail, past=records
    )  # the first one was killed before it could tell the rest
    assert second.close(soon())
    third = Traces(noted=noted, say=pytest.fail, past=records)
    assert third.close(soon())
    roots = [span for span in collector.spans if not span.parent_span_id]
    assert [span.name for span in roots] == ["recovery", "change of plan"]
    assert len(collector.spans) == len({span.span_id for span in collector.spans}) == 13


def tell(records: list[journal.Record], folder: Path, said: list[str], within_s: float) -> tuple[float, float]:
    """How long telling took, and the close."""
    it = Traces(noted=folder / "told", say=said.append)
    began = time.monotonic()
    for record in records:
        it.submit(record)
    told = time.monotonic()
    it.close(told + within_s)
    return told - began, time.monotonic() - told


@pytest.mark.parametrize("trouble", ["refuses", "answers nonsense", "redirects", "is down", "hangs", "never ends"])
def test_a_collector_that_is_not_well_costs_one_line(
    collector: Collector,
    trouble: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    nonsense = None
    match trouble:
        case "refuses":
            collector.status, collector.answer = 401, b"api-key SECRET is not known"
        case "redirects":
            collector.status, collector.headers = 302, {"Location": f"{collector.url}/SECRET"}
        case "hangs":
            collector.stall = threading.Event()
        case "never ends":
            collector.status, collector.endless = 500, True
        case "is down":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        case "answers nonsense":
            nonsense = socket.create_server(("127.0.0.1", 0))
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nonsense.getsockname()[1]}")
            threading.Thread(target=babble, args=(nonsense,), daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    said: list[str] = []
    records = write_journal(tmp_path / "journal", any_layout_story())
    with caplog.at_level(logging.DEBUG):
        it = Traces(noted=tmp_path / "told", say=said.append)
        for record in records[:-5]:
            it.submit(record)
        until(lambda: said)
        for record in records[-5:]:
            it.submit(record)
        began = time.monotonic()
        it.close(began + 3)
        assert time.monotonic() - began < 4
    if nonsense is not None:
        nonsense.close()
    (line,) = said
    assert line.startswith("traces: http://127.0.0.1:")
    assert line.endswith("; not reported again until it works, the job continues")
    assert "SECRET" not in line + caplog.text + "".join(capfd.readouterr())
    assert not (tmp_path / "told").exists(), "who takes over tells them"
    assert len([path for path, _ in collector.asked if "SECRET" in path]) == 0


def babble(server: socket.socket) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        with client:
            client.recv(100)
            client.sendall(b"\x00SECRET no HTTP\r\n\r\n")


def test_the_end_of_a_job_waits_for_a_collector_that_hangs_no_longer_than_it_may(
    collector: Collector, tmp_path: Path
) -> None:
    collector.stall = threading.Event()
    said: list[str] = []
    told_s, closed_s = tell(write_journal(tmp_path / "journal", story()), tmp_path, said, within_s=0.7)
    assert told_s < 1
    assert closed_s < 2
    assert said == ["traces: the job has ended before all were sent"]


def test_it_works_again(collector: Collector, tmp_path: Path) -> None:
    said: list[str] = []
    collector.status = 400
    records = write_journal(tmp_path / "journal", any_layout_story())
    it = Traces(noted=tmp_path / "told", say=said.append)
    for record in records[:-1]:
        it.submit(record)
    until(lambda: said)
    collector.status = 200
    it.submit(records[-1])
    until(lambda: len(said) == 2)
    assert it.close(soon())
    assert [span.name for span in collector.spans] == [*PHASES, "change of plan"]
    assert said[1] == "traces: work again"


def test_variables_that_the_sdk_does_not_take(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    said: list[str] = []
    tell(write_journal(tmp_path / "journal", any_layout_story()), tmp_path, said, within_s=10)
    (line,) = said
    assert line.startswith(
        "traces: OpenTelemetry's variables: max_queue_size must be a positive integer.; not reported"
    )


def test_headers_that_are_none_are_not_repeated(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK's own warning quotes them."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "SECRET, api-key=SE\x07CRET")
    said: list[str] = []
    tell(write_journal(tmp_path / "journal", story()), tmp_path, said, within_s=10)
    assert "CRET" not in caplog.text + "".join(said)


# --- who asks for them ----------------------------------------------------------------------------------------------


def settings(fresh_home: Path, text: str) -> ListenerSettings:
    path = fresh_home / "job.toml"
    path.write_text(text)
    return fanout.asked(read({}, path))


def test_a_key_asks_for_them_and_opentelemetrys_switches_come_first(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert not settings(fresh_home, "").traces, "the variables may be the training script's"
    assert settings(fresh_home, "[metrics]\ntraces = true\n").traces
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not settings(fresh_home, "[metrics]\ntraces = true\n").traces


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, but only http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "must be a URL such as http://localhost:4318"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://me:SECRET@host"}, "must not hold a user and a password"),
    ],
)
def test_what_cannot_be_sent_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"\[metrics\] traces: .*{message}") as caught:
        asked_of(environment)
    assert "SECRET" not in str(caught.value)


def test_variables_for_traces_come_before_those_for_everything() -> None:
    assert asked_of({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert not asked_of({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("resihp.wrapper.sinks.tracing.traces.find_spec", missing)
    with pytest.raises(ConfigurationError, match=r"pip install 'resihp\[otel\]', or leave it out"):
        asked_of({})


def test_nobody_loads_it_unasked(tmp_path: Path) -> None:
    script = """
import importlib, json, pkgutil, sys
import resihp, wrapper, resihp.wrapper.sinks
for name in ("resihp.wrapper.cli", "resihp.wrapper.supervisor.process", "resihp.wrapper.agent.process"):
    importlib.import_module(name)
for module in pkgutil.iter_modules(resihp.wrapper.sinks.__path__):
    if module.name != "otlp":
        importlib.import_module(f"resihp.wrapper.sinks.{module.name}")
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "requests")]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_supervisors_that_die_tell_each_failure_once(stub_job: StubJob, collector: Collector) -> None:
    stub_job.start(UNTIL_TOLD, nodes=2, listening=ListenerSettings(traces=True))
    workers = running(stub_job, 2)
    for term in (2, 3):
        supervisor_of(stub_job).kill()
        stub_job.until(partial(led_by, stub_job, term))
    for worker in workers:
        psutil.Process(worker.pid).kill()
    assert stub_job.wait() != 0
    found = [entry.cause for entry in stub_job.entries() if isinstance(entry, journal.FailureFound)]
    roots = [{each.key: each.value for each in span.attributes} for span in collector.spans if not span.parent_span_id]
    assert found
    assert sorted(root["resihp.cause"].string_value for root in roots) == sorted(found)
    assert {root["resihp.job"].string_value for root in roots} == {stub_job.job.name}


def test_a_job_whose_supervisors_are_all_dead(
    collector: Collector, fresh_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written of its end is told to the collector, too; where no trace is, the SDK is not loaded."""
    told: list[Any] = list(story(ended=False))
    told += [(died(2, 21), BEGAN + 20), (journal.JobEnded(exit_code=1, state="abnormal", reason="killed"), BEGAN + 21)]
    job = create_local_job()
    request = msgspec.structs.replace(request_of(job), listening=ListenerSettings(traces=True))
    notify_of_end(request, numbered(told), pytest.fail)
    roots = [span for span in collector.spans if not span.parent_span_id]
    assert [span.name for span in roots] == ["recovery", "failure"]
    assert (job.folder / "traces.told").stat().st_mode & 0o077 == 0
    monkeypatch.setattr(otlp, "opened", lambda *_: pytest.fail("loaded for nothing"))
    quiet = Traces(noted=tmp_path / "told", say=pytest.fail)
    for record in numbered([(started(), BEGAN), *iterations(1, 5)]):
        quiet.submit(record)
    assert quiet.close(soon())
