"""Passes each record of the journal to all listeners of a job: ledger, metrics, hooks, TensorBoard, traces.

`asked` checks the configured listeners before anything is started. `listeners` opens the listeners in the supervisor,
including a supervisor that takes over. `Listeners` has the interface of a ledger (`LedgerLike`). A listener that fails
affects neither the job nor the ledger.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from resihp.errors import ConfigurationError
from resihp.wrapper.config.run_spec import ListenerSettings, RunRequest
from resihp.wrapper.config.values import expanded

if TYPE_CHECKING:
    from resihp.db.telemetry import report_rows
    from resihp.record.journal import Record
    from resihp.wrapper.config.schema import Configuration
    from resihp.wrapper.output.job_history import JobHistory
    from resihp.wrapper.sinks.figures import Figures
    from resihp.wrapper.sinks.metrics import Outside

CLOSE_TIMEOUT_S = 5.0
"""How long the end of a job waits for all of its listeners together."""

_log = logging.getLogger("resihp.listeners")


class LedgerLike(Protocol):
    """The part of `resihp.db.writer.Ledger` that a supervisor uses."""

    def submit(self, record: Record) -> None: ...
    def telemetry(self, rows: list[report_rows.Report]) -> None: ...
    def scores(self, iteration: int, scores: Sequence[tuple[int, float | None, float]]) -> None: ...
    def close(self) -> object: ...


class Listener(Protocol):
    def submit(self, record: Record) -> None:
        """Take the next record of the journal. Returns at once."""

    def close(self, deadline: float) -> object:
        """Deliver the remaining records until `deadline`, in monotonic seconds."""


class Listeners:
    """All listeners of a job, its ledger included, behind the interface of a ledger."""

    def __init__(self, ledger: LedgerLike, others: Sequence[Listener]) -> None:
        self._ledger = ledger
        self._others = list(others)

    def submit(self, record: Record) -> None:
        self._ledger.submit(record)
        for listener in list(self._others):
            try:
                listener.submit(record)
            except Exception:  # noqa: BLE001 - logged; the listener is removed, and the job goes on
                _log.exception("%s: failed, and gets no record from %d on", type(listener).__name__, record.seq)
                self._others.remove(listener)

    def telemetry(self, rows: list[report_rows.Report]) -> None:
        self._ledger.telemetry(rows)

    def scores(self, iteration: int, scores: Sequence[tuple[int, float | None, float]]) -> None:
        self._ledger.scores(iteration, scores)

    def close(self) -> object:
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for listener in self._others:
            try:
                listener.close(deadline)
            except Exception:  # noqa: BLE001 - logged; the ledger must be closed all the same
                _log.exception("%s", type(listener).__name__)
        return self._ledger.close()


def asked(configuration: Configuration) -> ListenerSettings:
    """Return the settings of `[metrics]` and `[hooks]`. Raises ConfigurationError for a listener that cannot work, for
    example because a package is missing."""
    metrics, hooks = configuration.metrics, configuration.hooks
    for key in ("port", "textfile"):
        if getattr(metrics, key) and find_spec("prometheus_client") is None:
            raise ConfigurationError(
                f"[metrics] {key}: the package prometheus-client is not installed; pip install 'resihp[metrics]', "
                "or leave it out"
            )
    if metrics.tensorboard:
        from resihp.wrapper.sinks.tensorboard import check

        check()
    traces = False
    if metrics.traces:
        from resihp.wrapper.sinks.tracing.traces import asked_of

        traces = asked_of(os.environ)
    webhook = hooks.webhook.get_secret_value()
    if webhook and hooks.webhook_file:
        raise ConfigurationError("[hooks] webhook_file: webhook is set too; leave one of them out")
    if hooks.webhook_file:
        from resihp.wrapper.sinks.hooks import url_in

        url_in(expanded(hooks.webhook_file).absolute())
    return ListenerSettings(
        metrics_port=metrics.port,
        textfile=_absolute(metrics.textfile),
        tensorboard=_absolute(metrics.tensorboard),
        traces=traces,
        webhook=webhook,
        webhook_file=_absolute(hooks.webhook_file),
        command=hooks.command,
        events=hooks.events,
        timeout_s=hooks.timeout,
        audit=configuration.site.audit,
        share=configuration.site.share,
    )


def _absolute(path: str) -> str:
    return str(expanded(path).absolute()) if path else ""


def listeners(
    request: RunRequest,
    ledger: object,
    say: Callable[[str], None],
    past: Sequence[Record] = (),
    history: JobHistory | None = None,
) -> list[Listener]:
    """Open the requested listeners; a listener that cannot be opened is reported and left out.

    `past`: the records written under earlier leaders. `history`: the job's history, which the listeners share. `say`
    reports errors, also from other threads. Opening never waits for a file.
    """
    opened_listeners: list[Listener] = []
    figures = cache(partial(_figures, past))  # computed once, and only on demand, as it may read a million iterations
    openers: dict[str, Callable[[], list[Listener]]] = {
        "hooks": lambda: _hooks(request, say, past, history),
        "audit": lambda: _audit(request, say, past, history),
        "share": lambda: _shared_summary(request, say, past, history),
        "tensorboard": lambda: _tensorboard(request, say, figures),
        "traces": lambda: _traces(request, say, past),
        "metrics": lambda: _metrics(request, say, figures, past, lambda: standing(ledger, opened_listeners)),
    }
    for name, opener in openers.items():
        try:
            opened_listeners += opener()
        except Exception as error:  # noqa: BLE001 - any error is reported, and the job goes on
            _log.exception("%s", name)
            say(f"{name}: {error}; the job continues without")
    return opened_listeners


def notify_of_end(request: RunRequest, records: Sequence[Record], say: Callable[[str], None]) -> None:
    """Notify the listeners of a job after all of its supervisors have died, mainly of the job's end. Takes at most
    `CLOSE_TIMEOUT_S`."""
    again = msgspec.structs.replace(request, listening=msgspec.structs.replace(request.listening, metrics_port=0))
    Listeners(_NoLedger(), listeners(again, None, say, records)).close()


class _NoLedger:
    def submit(self, record: Record) -> None:
        pass

    def telemetry(self, rows: list[report_rows.Report]) -> None:
        pass

    def scores(self, iteration: int, scores: Sequence[tuple[int, float | None, float]]) -> None:
        pass

    def close(self) -> None:
        pass


def _hooks(
    request: RunRequest, say: Callable[[str], None], past: Sequence[Record], history: JobHistory | None
) -> list[Listener]:
    wanted = request.listening
    if not (wanted.command or wanted.webhook or wanted.webhook_file):
        return []
    from resihp.wrapper.sinks.hooks import Hook, command, entries_of, url_in, webhook

    ways: dict[str, Callable[[bytes], None]] = {}
    if wanted.command:
        ways["command"] = command(wanted.command, wanted.timeout_s)
    if wanted.webhook or wanted.webhook_file:
        ways["webhook"] = webhook(lambda: wanted.webhook or url_in(Path(wanted.webhook_file)), wanted.timeout_s)
    folder = request.of_job.folder
    return [
        Hook(
            *(name, way, request.job, entries_of(wanted.events)),
            noted=folder / f"{name}.told",
            say=say,
            past=past,
            history=history,
        )
        for name, way in ways.items()
    ]


def _audit(
    request: RunRequest, say: Callable[[str], None], past: Sequence[Record], history: JobHistory | None
) -> list[Listener]:
    if not request.listening.audit or request.slurm is None:
        return []
    from resihp.wrapper.sinks.audit import DECISION_ENTRIES, line_of
    from resihp.wrapper.sinks.hooks import Hook
    from resihp.wrapper.site_folders.audit import append

    cluster = request.slurm.cluster
    return [
        Hook(
            *("audit", partial(append, Path(request.listening.audit)), request.job, DECISION_ENTRIES),
            noted=request.of_job.folder / "audit.told",
            say=say,
            past=past,
            history=history,
            encode=lambda record, mended: line_of(cluster, request.job, record),
        )
    ]


def _shared_summary(
    request: RunRequest, say: Callable[[str], None], past: Sequence[Record], history: JobHistory | None
) -> list[Listener]:
    if not request.listening.share or request.slurm is None:
        return []
    from resihp.wrapper.sinks.shared_summary import SharedSummary

    folder, cluster = Path(request.listening.share), request.slurm.cluster
    return [SharedSummary(folder, cluster, request.job, say=say, past=past, history=history)]


def _figures(past: Sequence[Record]) -> Figures:
    from resihp.wrapper.sinks.figures import followed

    return followed(past)


def _tensorboard(request: RunRequest, say: Callable[[str], None], past: Callable[[], Figures]) -> list[Listener]:
    if not request.listening.tensorboard:
        return []
    from resihp.wrapper.sinks.tensorboard import TensorBoard

    return [TensorBoard(Path(request.listening.tensorboard, request.job), say=say, past=past())]


def _traces(request: RunRequest, say: Callable[[str], None], past: Sequence[Record]) -> list[Listener]:
    if not request.listening.traces:
        return []
    from resihp.wrapper.sinks.tracing.traces import Traces

    return [Traces(noted=request.of_job.folder / "traces.told", say=say, past=past)]


def _metrics(
    request: RunRequest,
    say: Callable[[str], None],
    past: Callable[[], Figures],
    records: Sequence[Record],
    outside: Outside,
) -> list[Listener]:
    wanted = request.listening
    if not (wanted.metrics_port or wanted.textfile):
        return []
    from resihp.wrapper.sinks.metrics import Metrics

    metrics = Metrics(request.job, past(), say=say, records=records, outside=outside)
    if wanted.metrics_port:
        metrics.serve(wanted.metrics_port)
    if wanted.textfile:
        metrics.write_to(Path(wanted.textfile.replace("{job}", request.job)))
    return [metrics]


def standing(ledger: object, others: Sequence[object]) -> Mapping[str, float]:
    """Return metrics about the ledger and the hooks themselves, such as the number of failed deliveries, as
    `resihp.wrapper.sinks.metrics.Outside`."""
    from resihp.wrapper.sinks.hooks import Hook

    values: dict[str, float] = {}
    for name, attribute in (("telemetry_dropped", "dropped"), ("ledger_behind", "behind")):
        value = getattr(ledger, attribute, None)  # a ledger that is not open yet has neither attribute
        if isinstance(value, int):
            values[name] = value
    for hook in others:
        if isinstance(hook, Hook):
            values |= {f"{hook.name}.{outcome}": count for outcome, count in hook.counts.items()}
    return values
