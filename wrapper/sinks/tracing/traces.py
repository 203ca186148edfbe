"""Sends the trace of each completed failure or change of plan to an OpenTelemetry collector.

Listens to the journal (`resihp.wrapper.sinks.fanout`); `resihp.wrapper.sinks.tracing.spans` computes the traces. A
thread (`resihp.wrapper.sinks.queue`) loads the SDK with the first trace and passes traces to
`resihp.wrapper.sinks.tracing.otlp`. The number of the last record whose trace the collector accepted is saved in the
job's folder; a supervisor that takes over continues after that record. A trace always has the same ids. Decides nothing
about the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from resihp.errors import ConfigurationError
from resihp.record import journal
from resihp.wrapper.job_folder import write_private
from resihp.wrapper.sinks.queue import MAX_WAITING, BackgroundQueue
from resihp.wrapper.sinks.tracing.spans import Episode, Story


class TraceOutlet(Protocol):
    """An open connection to a collector: `resihp.wrapper.sinks.tracing.otlp.Outlet`."""

    def send(self, trace: Episode) -> None: ...
    def close(self, deadline: float) -> bool: ...


class Traces:
    """A listener that sends traces, in the background. `noted`: file with the number of the last record whose trace a
    collector accepted. `past`: records written under earlier leaders; traces after the noted record are sent now."""

    def __init__(
        self,
        *,
        noted: Path,
        say: Callable[[str], None],
        past: Sequence[journal.Record] = (),
    ) -> None:
        self._story = Story()
        self._noted = noted
        self._taken = 0 if not past else None
        self._say = say
        self._outlet: TraceOutlet | None = None
        self._queue = BackgroundQueue("traces", self._send, say)
        former = [trace for record in past for trace in self._story.follow(record)]
        for trace in former[-MAX_WAITING:]:
            self._queue.put(trace)

    def submit(self, record: journal.Record) -> None:
        for trace in self._story.follow(record):
            self._queue.put(trace)

    def close(self, deadline: float) -> bool:
        """Send the remaining traces until `deadline`; return False if the collector did not accept all of them."""
        if not self._queue.close(deadline):
            return False
        return self._outlet is None or self._outlet.close(deadline)

    def _send(self, trace: Episode) -> None:
        if self._taken is None:  # read in the queue's thread, since the file system may hang
            self._taken = _number(self._noted)
        if trace.seq <= self._taken:
            return
        if self._outlet is None:
            self._outlet = _opened(self._note, self._say)
        self._outlet.send(trace)

    def _note(self, seq: int) -> None:
        with suppress(OSError):  # if this fails, a later supervisor sends the trace again, with the same ids
            write_private(self._noted, str(seq).encode())


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _opened(note: Callable[[int], None], say: Callable[[str], None]) -> TraceOutlet:
    from resihp.wrapper.sinks.tracing import otlp

    return otlp.opened(note, say)


def asked_of(environment: Mapping[str, str]) -> bool:
    """Return whether to send traces that the configuration requests: False if OpenTelemetry's own variables switch
    traces off.

    Raises ConfigurationError if traces cannot be sent.
    """
    subject = "[metrics] traces"
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    if not all(_is_there(name) for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")):
        raise ConfigurationError(
            f"{subject}: OpenTelemetry's SDK and its exporter are not installed; pip install 'resihp[otel]', "
            "or leave it out"
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environment.get(name, "").strip():
            if protocol != "http/protobuf":
                raise ConfigurationError(
                    f"{subject}: {name} is {protocol}, but only http/protobuf is supported; "
                    "export OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf, and the endpoint for it"
                )
            break
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if endpoint := environment.get(name, ""):
            _check(subject, name, endpoint)
            break
    return True


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package does not exist either
        return False


def _check(subject: str, name: str, endpoint: str) -> None:
    from resihp.wrapper.sinks.hooks import checked

    try:
        checked(endpoint)
    except ValueError as error:
        words = str(error).replace("https://example.org/hook", "http://localhost:4318")
        raise ConfigurationError(f"{subject}: {name} {words}") from None
