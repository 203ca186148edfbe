"""Traces to an OpenTelemetry collector, by its own SDK and exporter: OTLP over HTTP, as `OTEL_*` variables say.

Loaded by `wrapper.sinks.tracing.traces` in its thread. The SDK's batch processor has the queue and the thread that
sends. What a collector does costs us nothing: no redirect is followed, no answer's body is read, an attempt has its
time, and what is wrong is said once, in our words. The SDK's own messages go nowhere: they may quote
`OTEL_EXPORTER_OTLP_HEADERS`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from requests.adapters import HTTPAdapter

import resihp
from wrapper.sinks.queue import UndeliveredError
from wrapper.sinks.tracing.spans import Episode, Span, Value

LONGEST_ATTEMPT_S = 30.0
"""Whatever `OTEL_EXPORTER_OTLP_TIMEOUT` says: its specification has milliseconds, the SDK takes it for seconds."""
SHORTEST_ATTEMPT_S = 0.001
RECORD = "resihp.record"


def opened(note: Callable[[int], None], say: Callable[[str], None]) -> Outlet:
    """To the collector that the environment names. Raises UndeliveredError for variables that the SDK refuses."""
    for name in ("opentelemetry", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    session, adapter = requests.Session(), _Adapter()
    for scheme in ("http://", "https://"):
        session.mount(scheme, adapter)
    try:
        return Outlet(_Heard(OTLPSpanExporter(session=session), adapter, note, say), say)
    except (ValueError, OSError, RuntimeError) as error:
        raise UndeliveredError(f"OpenTelemetry's variables: {error}", again=False) from None


class _Adapter(HTTPAdapter):
    """One attempt each: remembers how the last one went, and where to."""

    outcome = "no answer"
    where = "the collector"

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        parts = urlsplit(request.url or "")
        self.where = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        limit_s = min(timeout, LONGEST_ATTEMPT_S) if isinstance(timeout, int | float) else LONGEST_ATTEMPT_S
        try:
            found = super().send(request, True, max(limit_s, SHORTEST_ATTEMPT_S), verify, cert, proxies)
        except requests.Timeout:
            self.outcome = "no answer in time"
            raise
        except Exception as error:  # whose words may hold a secret
            self.outcome = type(error).__name__
            raise
        answer = requests.Response()  # without a body, which may be of any length and take any time
        with found:
            answer.status_code, answer.reason, answer.url = found.status_code, found.reason, found.url
            answer.request = request
            if (after := found.headers.get("retry-after")) is not None:
                answer.headers["retry-after"] = after
        self.outcome = "" if 200 <= answer.status_code < 300 else f"answered {answer.status_code}"
        return answer


class _Heard(SpanExporter):
    """The exporter, with what becomes of its batches noted and said."""

    def __init__(
        self, exporter: SpanExporter, attempts: _Adapter, note: Callable[[int], None], say: Callable[[str], None]
    ) -> None:
        self.failing = False
        self._exporter = exporter
        self._attempts = attempts
        self._note = note
        self._say = say

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._attempts.outcome = "no answer"
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 - said below; its words may hold a secret
            result = SpanExportResult.FAILURE
        outcome = self._attempts.outcome
        if result is SpanExportResult.SUCCESS and not outcome:
            told = [seq for span in spans if isinstance(seq := (span.attributes or {}).get(RECORD), int)]
            if told:  # a root span is the last of its trace
                self._note(max(told))
            if self.failing:
                self.failing = False
                self._tell("traces: work again")
            return SpanExportResult.SUCCESS
        if not self.failing:
            self.failing = True
            where = self._attempts.where
            self._tell(f"traces: {where}: {outcome or 'not taken'}; not told again until it works, the job goes on")
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _tell(self, text: str) -> None:
        with suppress(RuntimeError):  # whoever would tell it is gone
            self._say(text)


class _Ids(IdGenerator):
    """Ids that follow from a trace's key: one that is sent again is the same one."""

    def __init__(self) -> None:
        self._key, self._spans = "", 0

    def begin(self, key: str) -> None:
        self._key, self._spans = key, 0

    def generate_trace_id(self) -> int:
        return self._number("trace", 16)

    def generate_span_id(self) -> int:
        self._spans += 1
        return self._number(f"span {self._spans}", 8)

    def _number(self, what: str, size: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._key} {what}".encode()).digest()[:size])


class Outlet:
    """`send` from one thread, never waits for a collector."""

    def __init__(self, exporter: _Heard | SpanExporter, say: Callable[[str], None] = lambda text: None) -> None:
        ours = {"service.name": "resihp", "service.version": resihp.__version__}
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())
        self._ids = _Ids()
        self._exporter = exporter
        self._say = say
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("resihp", resihp.__version__)

    def send(self, trace: Episode) -> None:
        self._ids.begin(trace.key)
        self._make(trace.root, api.INVALID_SPAN)

    def _make(self, told: Span, parent: api.Span) -> None:
        span = self._tracer.start_span(
            told.name,
            context=api.set_span_in_context(parent),
            attributes={name: _clean(value) for name, value in told.attributes.items()},
            start_time=_nanoseconds(told.start),
        )
        for at, name, words in told.events:
            span.add_event(name, {"text": _clean(words)}, timestamp=_nanoseconds(at))
        for child in told.children:
            self._make(child, span)
        if told.failed:
            span.set_status(api.Status(api.StatusCode.ERROR, _text(told.failed)))
        span.end(_nanoseconds(told.end))  # after its children: a root that is sent has sent all of its trace

    def close(self, deadline: float) -> bool:
        """Send what waits until then (monotonic seconds), if a collector takes anything at all."""
        if getattr(self._exporter, "failing", False):
            self._exporter.shutdown()
        ending = threading.Thread(target=self._provider.shutdown, name="traces end", daemon=True)
        ending.start()
        ending.join(max(0.0, deadline - time.monotonic()))
        if not ending.is_alive():
            return True
        self._exporter.shutdown()
        with suppress(RuntimeError):
            self._say("traces: the job has ended before all were sent")
        return False


def _clean(value: Value) -> Value:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return value
    return [_text(each) for each in value if isinstance(each, str)] or [each for each in value if isinstance(each, int)]


def _text(words: str) -> str:
    """A name that is no text would have the SDK drop the whole batch."""
    return words.encode(errors="replace").decode()


def _nanoseconds(at: float) -> int:
    return round(at * 1e6) * 1000
