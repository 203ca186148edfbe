"""A job's figures for Prometheus: a page on loopback, and a textfile that node_exporter reads.

`families` makes metrics of what the journal tells (`wrapper.sinks.figures`). Labels are the job, its nodes, and words
of closed sets: there is never one for an iteration.

The textfile is replaced every few seconds while something changes, never written in place. It keeps the job's last
state when the job has ended; node_exporter's own `node_textfile_mtime_seconds` tells how old it is.
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
from wrapper.sinks.figures import BUCKETS_S, Figures, follow, snapshot
from wrapper.sinks.lost_time import LostTime

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import CollectorRegistry

LOOPBACK = "127.0.0.1"
JOB = "job_id"
"""The label of each metric that names the job. Not `job`: that is Prometheus's own, for where it scrapes."""
BETWEEN_WRITES_S = 5.0
MOST_AT_ONCE = 8
PATIENCE_S = 5.0
"""How long who connects to the page may say nothing."""
MAX_LABEL = 128
MOST_WAITING = 1024
"""Records whose lost time is reckoned with when somebody asks; more of them are by a thread of its own."""
BREATH_S = 0.005
"""How long that thread rests after each few milliseconds of work."""
STATES = ("running", "completed", "failed", "cancelled", "abnormal")
DETECTOR_STATES = ("warming up", "workload", "iterations", "plain times")
REPLACEMENT_STATES = ("asked", "pending", "running", "joined", "refused", "cancelled", "ended")


_log = logging.getLogger("resihp.listeners")


# --- as metrics -----------------------------------------------------------------------------------------------------

Outside = Callable[[], Mapping[str, float]]
"""What the journal does not tell: `telemetry_dropped`, `ledger_behind` and `HOOK.OUTCOME`; what is not known is left
out."""


class _Families:
    """Makes families of one job's metrics; a value that is not known gives none."""

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
        self, name: str, text: str, bounds: Sequence[float], taken: Sequence[int], sum_: float
    ) -> Iterator[Metric]:
        """`taken`: by the upper `bounds`, and one more for all above. Nothing before there is one."""
        family = self._histogram(f"resihp_{name}", text, labels=[JOB])
        counted = list(zip([*map(str, bounds), "+Inf"], accumulate(taken), strict=True))
        family.add_metric([self._job], counted, sum_)
        yield family

    def _by(
        self, kind: type[Any], name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]
    ) -> Iterator[Metric]:
        """One for each key, which are the labels' values: one string, or several."""
        family = kind(f"resihp_{name}", text, labels=[JOB, *labels])
        for key, value in values.items():
            parts = key if isinstance(key, tuple) else (key,)
            family.add_metric([self._job, *map(label, parts)], value)
        yield family


def families(
    figures: Figures, now: float, outside: Mapping[str, float], lost_s: Mapping[str, float] | None = None
) -> Iterator[Metric]:
    """All metrics of a job; those that are not known yet are left out. `lost_s`: by cause."""
    of = _Families(figures.job)
    yield from _progress(of, figures, now)
    if lost_s is not None:
        yield from of.counters(
            "lost_seconds",
            "Seconds lost, by the causes of `resihp history cost`; some iterations behind.",
            ("cause",),
            lost_s,
        )
    yield from _disturbances(of, figures)
    dropped = outside.get("telemetry_dropped")
    yield from of.counter("telemetry_dropped", "Rank reports that the ledger did not take.", dropped)
    behind = outside.get("ledger_behind")
    yield from of.gauge("ledger_behind_records", "Journal records that the ledger lacks so far.", behind)
    hooks = {tuple(key.split(".", 1)): value for key, value in outside.items() if "." in key}
    if hooks:
        yield from of.counters("hook_events", "Events told.", ("hook", "outcome"), hooks)


def _progress(of: _Families, figures: Figures, now: float) -> Iterator[Metric]:
    about = {"user": figures.user, "version": figures.version}
    yield from of.gauges("job_info", "The job; always 1.", tuple(about), {tuple(about.values()): 1})
    states = {state: float(state == figures.state) for state in STATES}
    yield from of.gauges("job_state", "1 for the state that the job is in.", ("state",), states)
    yield from of.gauge("job_start_timestamp_seconds", "When the job started.", figures.started_at)
    yield from of.gauge("job_exit_code", "How the job ended.", figures.exit_code)
    yield from of.gauge("epoch", "Epoch of the plan in effect.", figures.epoch)
    yield from of.gauge("iteration", "Last committed iteration.", figures.iteration)
    yield from of.gauge("last_commit_timestamp_seconds", "When it was committed.", figures.committed_at)
    yield from of.gauge("last_iteration_seconds", "How long it took, by the slowest rank.", figures.last_seconds)
    yield from of.gauge("iteration_predicted_seconds", "How long it was to take.", figures.predicted_seconds)
    yield from of.histogram(
        "iteration_seconds",
        "How long committed iterations took, by the slowest rank.",
        *(BUCKETS_S, figures.buckets, figures.seconds_us / 1e6),
    )
    yield from of.gauge("loss", "Its loss.", figures.loss)
    yield from of.gauge("validation_loss", "Of the last evaluation.", figures.validation_loss)
    yield from of.counter("iterations", "Committed iterations.", figures.iterations)
    yield from of.counter("tokens", "Tokens of committed iterations.", figures.tokens)
    # Not those that nobody timed: they count as the median, which falls as well.
    useful_s = (figures.known_us - figures.unused_us) / 1e6
    yield from of.counter(
        "useful_seconds", "Seconds that committed iterations would have taken on all devices asked for.", useful_s
    )
    lost_s = max(figures.wall_s(now) - figures.useful_s(), 0.0)
    yield from of.gauge("wall_lost_seconds", "Wall time since the first iteration began, less what was useful.", lost_s)
    yield from of.gauge("goodput_ratio", "Useful share of the wall time since then.", figures.goodput(now))


def _disturbances(of: _Families, figures: Figures) -> Iterator[Metric]:
    yield from of.gauges("ranks", "Ranks by state.", ("state",), figures.ranks())
    yield from of.gauge("nodes", "Nodes that have joined and were not lost.", len(figures.nodes))
    yield from of.counter("nodes_lost", "Nodes that were lost.", figures.nodes_lost)
    yield from of.counters("failures", "Failures found.", ("kind", "component", "node"), figures.failures)
    yield from of.counter(
        "failures_over", "Slow devices and links that are as fast as before again.", figures.recovered
    )
    yield from of.counters(
        "suspicions", "Suspicions of being slow, whatever became of them.", ("component",), figures.suspicions
    )
    judging = {state: float(state == figures.detector) for state in DETECTOR_STATES}
    yield from of.gauges("detector_state", "1 for what the detector judges by.", ("state",), judging)
    yield from of.gauge("unwatched_ranks", "Ranks with work that it has not heard of for long.", figures.unwatched)
    yield from of.counters(
        "reconfigurations",
        "Transitions to another plan, by what became of the iteration under way.",
        ("action",),
        figures.reconfigurations,
    )
    yield from of.counters(
        "reconfiguration_seconds",
        "From the interruption of training to the next commit.",
        ("action",),
        figures.reconfiguration_seconds,
    )
    yield from of.counters(
        "recovery_seconds",
        "From failures to the next commits, noticing included.",
        ("action",),
        figures.recovery_seconds,
    )
    yield from of.counter("reconfiguration_moved_bytes", "State that ranks received in them.", figures.bytes_moved)
    yield from of.counter("drains", "Nodes that were to be drained.", figures.drains)
    yield from of.counters("drain_answers", "How rungs went.", ("step", "outcome"), figures.drain_answers)
    wanted = Counter(figures.replacements.values())
    replacements = {state: wanted[state] for state in REPLACEMENT_STATES}
    yield from of.gauges("replacements", "Requests for nodes, by state.", ("state",), replacements)
    yield from of.counter("checkpoints", "Complete checkpoints written.", figures.checkpoints)
    yield from of.gauge("checkpoint_iteration", "Iteration of the newest.", figures.checkpoint_iteration)
    yield from of.counter("takeovers", "Supervisors that took over.", figures.takeovers)


def label(text: str) -> str:
    """A label's value that can be encoded and is not too long; quotes and line breaks are escaped where it is written.

    Lone surrogates, which file names may hold, become question marks.
    """
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:MAX_LABEL]


class Metrics:
    """A listener of the journal (`wrapper.sinks.fanout`) that Prometheus can ask. Safe to use from several threads.

    `past`: what the job had come to under those who led before us, `records` what tells so. Nothing is served or
    written before `serve` and `write_to`.
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
        self._lost = _LostBehind(records)

    def submit(self, record: journal.Record) -> None:
        with self._lock:
            follow(self._figures, record)
        self._lost.submit(record)
        if self._textfile is not None:
            self._textfile.changed.set()

    def close(self, deadline: float) -> bool:
        """Write the last state, and serve no more."""
        written = self._textfile.close(deadline) if self._textfile is not None else True
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        return written

    def collect(self) -> list[Metric]:
        """For a registry of prometheus_client."""
        outside = self._outside()
        with self._lock:  # not for long: `submit` waits for it
            figures = snapshot(self._figures)
        return list(families(figures, self._clock(), outside, self._lost.by_cause()))

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry())

    def serve(self, port: int) -> int | None:
        """Answer on loopback; the port, None when that one cannot be had, which is said."""
        try:
            self._server = _Page((LOOPBACK, port), self._registry())
        except OSError as error:
            self._say(f"metrics: {LOOPBACK}:{port} cannot be had ({error.strerror}); set port in [metrics] to another")
            return None
        threading.Thread(target=self._server.serve_forever, name="metrics page", daemon=True).start()
        return int(self._server.server_port)

    def write_to(self, path: Path) -> None:
        """Keep this file up to date, from a thread of its own."""
        self._textfile = _Textfile(path, self.text, self._say)

    def _registry(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry


class _LostBehind:
    """`LostTime`, which takes a while for many records: whoever submits them does not wait for it.

    Until it has come to the end of a long past, nothing is told of it: counters that went up by all of that at once
    would look like a loss of just now.
    """

    def __init__(self, past: Iterable[journal.Record]) -> None:
        self._lost = LostTime(past)
        self._at_work = threading.Lock()
        self._busy = False
        self._told: dict[str, float] | None = None
        if self._lost.waiting:
            self._catch_up()

    def submit(self, record: journal.Record) -> None:
        self._lost.submit(record)
        if self._lost.waiting > MOST_WAITING and not self._busy:
            self._catch_up()

    def by_cause(self) -> dict[str, float] | None:
        """Seconds by cause; None while they are not known yet."""
        if not self._busy and self._at_work.acquire(blocking=False):
            try:
                self._work(rest_s=0.0)
            finally:
                self._at_work.release()
        return self._told

    def _catch_up(self) -> None:
        def run() -> None:
            with self._at_work:
                self._work(rest_s=BREATH_S)
            self._busy = False

        self._busy = True
        threading.Thread(target=run, name="metrics lost time", daemon=True).start()

    def _work(self, rest_s: float) -> None:
        try:
            while self._lost.step():
                if rest_s:
                    time.sleep(rest_s)
            self._told = self._lost.by_cause()
        except Exception:  # noqa: BLE001 - logged; the other figures are told all the same
            _log.exception("lost seconds are told no more")
            self._lost, self._told = LostTime(), None


class _Page(ThreadingHTTPServer):
    """Answers a few at a time: anybody on this machine can connect, and each connection costs a thread."""

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        from prometheus_client import MetricsHandler

        class Handler(MetricsHandler):
            timeout = PATIENCE_S

        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)
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
        """Who asked has gone, or asks what is no HTTP: not ours to report."""


class _Textfile:
    """Replaces a file when something has changed, every `BETWEEN_WRITES_S` at most."""

    def __init__(self, path: Path, text: Callable[[], bytes], say: Callable[[str], None]) -> None:
        self.changed = threading.Event()
        self._path = path
        self._text = text
        self._say = say
        self._closing = threading.Event()
        self._failing = False
        # A hung file system must not keep the process from ending, hence a daemon.
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
            self._closing.wait(BETWEEN_WRITES_S)

    def _write(self) -> None:
        try:
            replace_readable(self._path, self._text())
        except OSError as error:
            if not self._failing:
                text = f"metrics: {self._path}: {error.strerror}; not told again until it works, the job goes on"
                self._tell(text)
            self._failing = True
            return
        if self._failing:
            self._failing = False
            self._tell(f"metrics: {self._path}: written again")

    def _tell(self, text: str) -> None:
        with suppress(RuntimeError):  # whoever would tell it is gone
            self._say(text)


def replace_readable(path: Path, content: bytes) -> None:
    """Write a file that others may read (node_exporter is another user), whole or not at all. Raises OSError.

    Its name while it is written does not end with .prom: node_exporter leaves it alone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()  # of one that was killed here
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # whatever our umask is
            file.write(content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
