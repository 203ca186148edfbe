"""A job's figures for Prometheus: a page on loopback, and a textfile for node_exporter.

`families` turns the figures (`resihp.wrapper.sinks.figures`) into metrics. Labels are the job, its nodes, and words
from closed sets; an iteration is never a label.

While something changes, the textfile is replaced every few seconds, never written in place. After the job has ended it
keeps the job's last state; node_exporter's own `node_textfile_mtime_seconds` shows the age of the file.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resihp.record import journal
from resihp.wrapper.sinks.figures import BUCKETS_S, Figures, follow, snapshot
from resihp.wrapper.sinks.lost_time import LostTime

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import CollectorRegistry

LOOPBACK_ADDRESS = "127.0.0.1"
JOB_LABEL = "job_id"
"""Label of each metric that identifies the job. The name is not `job`, as Prometheus uses that for the scraped
target."""
WRITE_EVERY_S = 5.0
MAX_CONNECTIONS = 8
REQUEST_TIMEOUT_S = 5.0
"""How long a client of the page may be silent before it is disconnected."""
MAX_LABEL_CHARACTERS = 128
MAX_WAITING_RECORDS = 1024
"""Number of unprocessed records up to which the lost time is computed during a request; for more records, a separate
thread computes it."""
REST_S = 0.005
"""How long the separate thread sleeps after each few milliseconds of work."""
JOB_STATES = ("running", "completed", "failed", "cancelled", "abnormal")
DETECTOR_STATES = ("warming up", "workload", "iterations", "plain times")
REPLACEMENT_STATES = ("asked", "pending", "running", "joined", "refused", "cancelled", "ended", "withdrawn")


_log = logging.getLogger("resihp.listeners")


# --- as metrics -----------------------------------------------------------------------------------------------------

Outside = Callable[[], Mapping[str, float]]
"""Function that returns figures that are not in the journal: `telemetry_dropped`, `ledger_behind` and `HOOK.OUTCOME`.
Unknown figures are left out."""


class _Families:
    """Creates the metric families of one job. A value of None creates no family."""

    def __init__(self, job: str) -> None:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        self._job = label(job)
        self._gauge, self._counter = GaugeMetricFamily, CounterMetricFamily
        self._histogram = HistogramMetricFamily

    def gauge(self, name: str, text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            yield from self.gauges(name, text, (), {(): value})

    def counter(self, name: str, text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            yield from self.counters(name, text, (), {(): value})

    def gauges(self, name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Iterator[Metric]:
        return self._by(self._gauge, name, text, labels, values)

    def counters(self, name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Iterator[Metric]:
        return self._by(self._counter, name, text, labels, values)

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], sum_: float
    ) -> Iterator[Metric]:
        """Yield a histogram. `counts`: number of values in the bucket below each upper bound, and last the number of
        values above all bounds. The family exists even before the first value."""
        family = self._histogram(f"resihp_{name}", text, labels=[JOB_LABEL])
        counted = list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))
        family.add_metric([self._job], counted, sum_)
        yield family

    def _by(
        self, kind: type[Any], name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]
    ) -> Iterator[Metric]:
        """Create one sample for each key of `values`; a key is one label value or a tuple of label values."""
        family = kind(f"resihp_{name}", text, labels=[JOB_LABEL, *labels])
        for key, value in values.items():
            parts = key if isinstance(key, tuple) else (key,)
            family.add_metric([self._job, *map(label, parts)], value)
        yield family


def families(
    figures: Figures, now: float, outside: Mapping[str, float], lost_s: Mapping[str, float] | None = None
) -> Iterator[Metric]:
    """Yield all metrics of a job whose values are known. `lost_s`: lost seconds by cause; None while unknown."""
    make = _Families(figures.job)
    yield from _progress(make, figures, now)
    if lost_s is not None:
        yield from make.counters(
            "lost_seconds",
            "Seconds lost, by the causes of `resihp history cost`; some iterations late.",
            ("cause",),
            lost_s,
        )
    yield from _disturbances(make, figures)
    dropped = outside.get("telemetry_dropped")
    yield from make.counter("telemetry_dropped", "Rank reports that were not written to the ledger.", dropped)
    behind = outside.get("ledger_behind")
    yield from make.gauge("ledger_behind_records", "Journal records that are not in the ledger yet.", behind)
    hooks = {tuple(key.split(".", 1)): value for key, value in outside.items() if "." in key}
    if hooks:
        yield from make.counters("hook_events", "Events by outcome of their delivery.", ("hook", "outcome"), hooks)


def _progress(make: _Families, figures: Figures, now: float) -> Iterator[Metric]:
    about = {"user": figures.user, "version": figures.version}
    yield from make.gauges("job_info", "The job; always 1.", tuple(about), {tuple(about.values()): 1})
    states = {state: float(state == figures.state) for state in JOB_STATES}
    yield from make.gauges("job_state", "1 for the present state of the job.", ("state",), states)
    yield from make.gauge("job_start_timestamp_seconds", "When the job started.", figures.started_at)
    yield from make.gauge("job_exit_code", "Exit code of the job.", figures.exit_code)
    yield from make.gauge("epoch", "Epoch of the plan in effect.", figures.epoch)
    yield from make.gauge("iteration", "Last committed iteration.", figures.iteration)
    yield from make.gauge("last_commit_timestamp_seconds", "Time of the last commit.", figures.committed_at)
    yield from make.gauge(
        "last_iteration_seconds", "Time of the last committed iteration, by the slowest rank.", figures.last_seconds
    )
    yield from make.gauge(
        "iteration_predicted_seconds", "Predicted time of the last committed iteration.", figures.predicted_seconds
    )
    yield from make.histogram(
        "iteration_seconds",
        "Times of committed iterations, by the slowest rank.",
        *(BUCKETS_S, figures.buckets, figures.seconds_us / 1e6),
    )
    yield from make.gauge("loss", "Loss of the last committed iteration.", figures.loss)
    yield from make.gauge("validation_loss", "Loss of the last evaluation.", figures.validation_loss)
    yield from make.counter("iterations", "Committed iterations.", figures.iterations)
    yield from make.counter("tokens", "Tokens of committed iterations.", figures.tokens)
    # Without iterations of unknown time: they count as the median, which can decrease, and a counter must not.
    useful_s = (figures.known_us - figures.unused_us) / 1e6
    yield from make.counter(
        "useful_seconds", "Seconds that committed iterations would have taken on all requested devices.", useful_s
    )
    lost_s = max(figures.wall_s(now) - figures.useful_s(), 0.0)
    yield from make.gauge(
        "wall_lost_seconds", "Wall time since the first iteration began, minus useful seconds.", lost_s
    )
    yield from make.gauge(
        "goodput_ratio", "Useful share of the wall time since the first iteration began.", figures.goodput(now)
    )


def _disturbances(make: _Families, figures: Figures) -> Iterator[Metric]:
    yield from make.gauges("ranks", "Ranks by state.", ("state",), figures.ranks())
    yield from make.gauge("nodes", "Nodes that have joined and were not lost.", figures.nodes())
    yield from make.counter("nodes_lost", "Nodes that were lost.", figures.nodes_lost)
    yield from make.counters("failures", "Failures found.", ("kind", "component", "node"), figures.failures)
    yield from make.counter(
        "failures_over", "Slow devices and links that have recovered their speed.", figures.recovered
    )
    yield from make.counters(
        "suspicions", "Suspicions of being slow, confirmed or not.", ("component",), figures.suspicions
    )
    judging = {state: float(state == figures.detector) for state in DETECTOR_STATES}
    yield from make.gauges("detector_state", "1 for the present basis of the detector.", ("state",), judging)
    yield from make.gauge(
        "unwatched_ranks", "Ranks with work that the detector has not heard from for long.", figures.unwatched
    )
    yield from make.counters(
        "reconfigurations",
        "Changes of plan, by the fate of the iteration in progress.",
        ("action",),
        figures.reconfigurations,
    )
    yield from make.counters(
        "reconfiguration_seconds",
        "From the interruption of training to the next commit.",
        ("action",),
        figures.reconfiguration_seconds,
    )
    yield from make.counters(
        "recovery_seconds",
        "Seconds from failures to the next commits, including the time to notice them.",
        ("action",),
        figures.recovery_seconds,
    )
    yield from make.counter(
        "reconfiguration_moved_bytes", "Bytes of state that ranks received in changes of plan.", figures.bytes_moved
    )
    yield from make.counter("drains", "Decisions to drain a node.", figures.drains)
    yield from make.counters(
        "drain_answers", "Steps of the drain ladder, by outcome.", ("step", "outcome"), figures.drain_answers
    )
    wanted = Counter(figures.replacements.values())
    replacements = {state: wanted[state] for state in REPLACEMENT_STATES}
    yield from make.gauges("replacements", "Requests for nodes, by state.", ("state",), replacements)
    yield from make.counter("checkpoints", "Complete checkpoints written.", figures.checkpoints)
    yield from make.gauge("checkpoint_iteration", "Iteration of the newest checkpoint.", figures.checkpoint_iteration)
    yield from make.counter("takeovers", "Supervisors that took over from another.", figures.takeovers)


def label(text: str) -> str:
    """Return the text as a label value: shortened, and with characters that cannot be encoded replaced by question
    marks.

    Quotes and line breaks are escaped later, when the metrics are written. Lone surrogates come from file names.
    """
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:MAX_LABEL_CHARACTERS]


class Metrics:
    """A listener of the journal (`resihp.wrapper.sinks.fanout`) that keeps the metrics of a job. Thread-safe.

    Metrics are served only after `serve`, and written only after `write_to`. `past`: the figures under earlier leaders;
    `records`: the journal records under earlier leaders.
    """

    def __init__(
        self,
        job: str,
        past: Figures | None = None,
        *,
        say: Callable[[str], None],
        records: Iterable[journal.Record] = (),
        outside: Outside = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._figures = snapshot(past or Figures())
        self._figures.job = job
        self._lock = threading.Lock()
        self._say = say
        self._outside = outside
        self._clock = clock
        self._server: _Page | None = None
        self._textfile: _Textfile | None = None
        self._lost = _LostTimeInBackground(records)

    def submit(self, record: journal.Record) -> None:
        with self._lock:
            follow(self._figures, record)
        self._lost.submit(record)
        if self._textfile is not None:
            self._textfile.changed.set()

    def close(self, deadline: float) -> bool:
        """Write the last state and stop serving. Returns False if the textfile could not be written in time."""
        written = self._textfile.close(deadline) if self._textfile is not None else True
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        return written

    def collect(self) -> list[Metric]:
        """Return all metrics, for a registry of prometheus_client."""
        outside = self._outside()
        with self._lock:  # as short as possible, because `submit` waits for the lock
            figures = snapshot(self._figures)
        return list(families(figures, self._clock(), outside, self._lost.by_cause()))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry())

    def serve(self, port: int) -> int | None:
        """Serve the page on loopback and return its port. If the port is not available, report that and return None."""
        try:
            self._server = _Page((LOOPBACK_ADDRESS, port), self._registry())
        except OSError as error:
            self._say(
                f"metrics: {LOOPBACK_ADDRESS}:{port} is not available ({error.strerror}); "
                "set port in [metrics] to another"
            )
            return None
        threading.Thread(target=self._server.serve_forever, name="metrics page", daemon=True).start()
        return int(self._server.server_port)

    def write_to(self, path: Path) -> None:
        """Keep this textfile up to date, from a separate thread."""
        self._textfile = _Textfile(path, self.text, self._say)

    def _registry(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry


class _LostTimeInBackground:
    """`LostTime` in the background: `submit` must not wait while many records are processed.

    No value is returned until all earlier records are processed: a counter that suddenly rose by the past losses would
    look like a present loss.
    """

    def __init__(self, past: Iterable[journal.Record]) -> None:
        self._lost = LostTime(past)
        self._at_work = threading.Lock()
        self._busy = False
        self._by_cause: dict[str, float] | None = None
        if self._lost.waiting:
            self._catch_up()

    def submit(self, record: journal.Record) -> None:
        self._lost.submit(record)
        if self._lost.waiting > MAX_WAITING_RECORDS and not self._busy:
            self._catch_up()

    def by_cause(self) -> dict[str, float] | None:
        """Return the lost seconds by cause; None while they are unknown."""
        if not self._busy and self._at_work.acquire(blocking=False):
            try:
                self._work(rest_s=0.0)
            finally:
                self._at_work.release()
        return self._by_cause

    def _catch_up(self) -> None:
        def run() -> None:
            with self._at_work:
                self._work(rest_s=REST_S)
            self._busy = False

        self._busy = True
        threading.Thread(target=run, name="metrics lost time", daemon=True).start()

    def _work(self, rest_s: float) -> None:
        try:
            while self._lost.step():
                if rest_s:
                    time.sleep(rest_s)
            self._by_cause = self._lost.by_cause()
        except Exception:  # noqa: BLE001 - logged; the other figures are served all the same
            _log.exception("lost seconds are no longer computed")
            self._lost, self._by_cause = LostTime(), None


class _Page(ThreadingHTTPServer):
    """The HTTP server of the page. It serves only a few connections at a time, since any user of this machine can
    connect and each connection costs a thread."""

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        from prometheus_client import MetricsHandler

        class Handler(MetricsHandler):
            timeout = REQUEST_TIMEOUT_S

        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, Handler.factory(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or do not send HTTP."""


class _Textfile:
    """A file that is replaced in the background after changes, at most every `WRITE_EVERY_S`."""

    def __init__(self, path: Path, text: Callable[[], bytes], say: Callable[[str], None]) -> None:
        self.changed = threading.Event()
        self._path = path
        self._text = text
        self._say = say
        self._closing = threading.Event()
        self._failing = False
        # A daemon thread, so that a file system that hangs cannot keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="metrics textfile", daemon=True)
        self.changed.set()
        self._thread.start()

    def close(self, deadline: float) -> bool:
        self._closing.set()
        self.changed.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive() and not self._failing

    def _run(self) -> None:
        while True:
            self.changed.wait()
            last = self._closing.is_set()
            self.changed.clear()
            self._write()
            if last:
                return
            self._closing.wait(WRITE_EVERY_S)

    def _write(self) -> None:
        try:
            replace_readable(self._path, self._text())
        except OSError as error:
            if not self._failing:
                text = f"metrics: {self._path}: {error.strerror}; not reported again until it works, the job continues"
                self._report(text)
            self._failing = True
            return
        if self._failing:
            self._failing = False
            self._report(f"metrics: {self._path}: writable again")

    def _report(self, text: str) -> None:
        with suppress(RuntimeError):  # raised if the event loop has ended
            self._say(text)


def replace_readable(path: Path, content: bytes) -> None:
    """Write a file that other users may read, such as node_exporter's, completely or not at all. Raises OSError.

    The name of the temporary file does not end with .prom, so that node_exporter ignores it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()  # of a process that was killed while writing
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # independent of our umask
            file.write(content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
