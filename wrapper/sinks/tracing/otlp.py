"""Sends traces to an OpenTelemetry collector with OpenTelemetry's SDK and exporter: OTLP over HTTP, configured by
`OTEL_*` variables.

Loaded by `resihp.wrapper.sinks.tracing.traces`, in its thread. The SDK's batch processor provides the queue and the
sending thread. A faulty collector cannot harm the job: redirects are not followed, bodies of responses are not read,
each attempt has a time limit, and a failure is reported once, in resihp's own words. The SDK's messages are discarded,
because they may quote `OTEL_EXPORTER_OTLP_HEADERS`.
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
from resihp.wrapper.sinks.queue import UndeliveredError
from resihp.wrapper.sinks.tracing.spans import Episode, Span, Value

MAX_ATTEMPT_S = 30.0
"""Upper limit, in seconds, on `OTEL_EXPORTER_OTLP_TIMEOUT`. The specification defines that variable in milliseconds,
but the SDK reads it as seconds."""
MIN_ATTEMPT_S = 0.001
RECORD_ATTRIBUTE = "resihp.record"


def opened(note: Callable[[int], None], say: Callable[[str], None]) -> Outlet:
    """Connect to the collector that the environment names. Raises UndeliveredError if the SDK rejects the variables.

    `note` gets the number of the last record whose trace was sent; `say` reports failures.
    """
    for name in ("opentelemetry", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    session, adapter = requests.Session(), _Adapter()
    for scheme in ("http://", "https://"):
        session.mount(scheme, adapter)
    try:
        return Outlet(_ReportingExporter(OTLPSpanExporter(session=session), adapter, note, say), say)
    except (ValueError, OSError, RuntimeError) as error:
        raise UndeliveredError(f"OpenTelemetry's variables: {error}", again=False) from None


class _Adapter(HTTPAdapter):
    """HTTP adapter that makes one attempt per call, and keeps its outcome (empty for success) and its destination."""

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
        limit_s = min(timeout, MAX_ATTEMPT_S) if isinstance(timeout, int | float) else MAX_ATTEMPT_S
        try:
            response = super().send(request, True, max(limit_s, MIN_ATTEMPT_S), verify, cert, proxies)
        except requests.Timeout:
            self.outcome = "no answer in time"
            raise
        except Exception as error:  # the error's message may contain a secret
            self.outcome = type(error).__name__
            raise
        answer = requests.Response()  # without the body, which may be of any length and take any time
        with response:
            answer.status_code, answer.reason, answer.url = response.status_code, response.reason, response.url
            answer.request = request
            if (after := response.headers.get("retry-after")) is not None:
                answer.headers["retry-after"] = after
        self.outcome = "" if 200 <= answer.status_code < 300 else f"answered {answer.status_code}"
        return answer


class _ReportingExporter(SpanExporter):
    """The OTLP exporter, with failures reported, and with the last record noted after each batch that was sent."""

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
        except Exception:  # noqa: BLE001 - reported below; its message may hold a secret
            result = SpanExportResult.FAILURE
        outcome = self._attempts.outcome
        if result is SpanExportResult.SUCCESS and not outcome:
            sequence_numbers = [
                seq for span in spans if isinstance(seq := (span.attributes or {}).get(RECORD_ATTRIBUTE), int)
            ]
            if sequence_numbers:  # the root span is the last span of a trace
                self._note(max(sequence_numbers))
            if self.failing:
                self.failing = False
                self._report("traces: work again")
            return SpanExportResult.SUCCESS
        if not self.failing:
            self.failing = True
            where = self._attempts.where
            self._report(
                f"traces: {where}: {outcome or 'refused'}; not reported again until it works, the job continues"
            )
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _report(self, text: str) -> None:
        with suppress(RuntimeError):  # raised if the event loop has ended
            self._say(text)


class _Ids(IdGenerator):
    """Ids that are derived from a trace's key, so that a trace that is sent twice has the same ids."""

    def __init__(self) -> None:
        self._key, self._spans = "", 0

    def begin(self, key: str) -> None:
        self._key, self._spans = key, 0

    def generate_trace_id(self) -> int:
        return self._number("trace", 16)

    def generate_span_id(self) -> int:
        self._spans += 1
        return self._number(f"span {self._spans}", 8)

    def _number(self, purpose: str, size: int) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._key} {purpose}".encode()).digest()[:size])


class Outlet:
    """An open connection to a collector. Call `send` from one thread; it never waits for the collector."""

    def __init__(
        self, exporter: _ReportingExporter | SpanExporter, say: Callable[[str], None] = lambda text: None
    ) -> None:
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

    def _make(self, content: Span, parent: api.Span) -> None:
        span = self._tracer.start_span(
            content.name,
            context=api.set_span_in_context(parent),
            attributes={name: _clean(value) for name, value in content.attributes.items()},
            start_time=_nanoseconds(content.start),
        )
        for at, name, words in content.events:
            span.add_event(name, {"text": _clean(words)}, timestamp=_nanoseconds(at))
        for child in content.children:
            self._make(child, span)
        if content.failed:
            span.set_status(api.Status(api.StatusCode.ERROR, _text(content.failed)))
        span.end(_nanoseconds(content.end))  # after its children: if the root was sent, the whole trace was sent

    def close(self, deadline: float) -> bool:
        """Send the waiting spans until `deadline` (monotonic seconds), unless the collector has been failing. Returns
        False if time ran out."""
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
    return [_text(item) for item in value if isinstance(item, str)] or [item for item in value if isinstance(item, int)]


def _text(words: str) -> str:
    """Return a name as valid Unicode text; the SDK would drop a whole batch for one invalid name."""
    return words.encode(errors="replace").decode()


def _nanoseconds(at: float) -> int:
    return round(at * 1e6) * 1000
