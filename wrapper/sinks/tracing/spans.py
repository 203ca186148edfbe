"""Turns failures and changes of plan into spans: one trace each, from the onset, or the moment it was noticed, to the
first iteration afterwards.

`Story` computes traces from the journal's records. It is pure: all times are the journal's, so that a supervisor that
takes over computes the same spans. Called by `resihp.wrapper.sinks.tracing.traces`. Does not use OpenTelemetry's SDK.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resihp.record import journal
from resihp.record.describe import explain
from resihp.wrapper.output.job_history import JobHistory

if TYPE_CHECKING:
    from resihp.parallelism.layout import Layout

Value = str | int | float | Sequence[str] | Sequence[int]

MAX_EVENTS = 64
MIN_NOTICE_S = 1e-3
"""A failure that is noticed within this time after its onset, in seconds, gets no `notice` span."""
COMMITS_AFTER_FAILURE = 1
"""Most iterations that may be committed after a failure that ended the job: their step was taken before the failure."""

_EVENT_ENTRIES = (
    *(journal.FaultInjected, journal.WorkerEnded, journal.NodeLost, journal.Suspected, journal.FailureFound),
    *(journal.ProbesTaken, journal.ChangeDecided, journal.ChangeDeclined, journal.PlanDecided, journal.PlanRefused),
    *(journal.PlanWithdrawn, journal.PlanInEffect, journal.LeaderChosen, journal.FailureEnded, journal.JobEnded),
    journal.RollbackDecided,
)
"""Journal entries that become events of a root span."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span. Times are UTC in seconds since 1970. `failed`: the reason why the job ended; empty for any other span."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    children: tuple[Span, ...] = ()
    events: tuple[tuple[float, str, str], ...] = ()
    """(time, name of the journal entry, text) of each event."""
    failed: str = ""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The trace of one failure or change of plan.

    `seq`: number of the journal record that completed the trace. `key`: unique for each trace; every supervisor
    computes the same key for it.
    """

    seq: int
    key: str
    root: Span


@dataclass(kw_only=True)
class _Failure:
    entry: journal.FailureFound
    noticed_at: float
    onset_at: float | None
    commits: int
    """Number of iterations that the job had committed when the failure was found."""


class Story:
    """Computes traces. Call `follow` with every record of a job, in order, packed records included; it returns the
    traces that the record completes."""

    def __init__(self) -> None:
        self._history = JobHistory(plans_kept=1)
        self._of_job: dict[str, Value] = {}
        self._began = 0.0
        self._open: dict[int, _Failure] = {}
        self._before: Layout | None = None
        """Layout in effect when training last ran without interruption; None before the first layout."""
        self._decided: journal.PlanDecided | None = None
        self._in_effect: tuple[int, journal.Record] | None = None
        """(epoch, record) of the last plan that took effect; None before the first plan."""
        self._committed = self._count = self._saved = 0
        self._events: deque[tuple[float, str, str]] = deque(maxlen=MAX_EVENTS)

    def follow(self, record: journal.Record) -> list[Episode]:
        entry, at = record.entry, record.at
        self._history.follow(record)
        if self._before is None:
            self._before = self._layout
        if isinstance(entry, _EVENT_ENTRIES):
            self._events.append((at, type(entry).__name__, explain(entry)))
        match entry:
            case journal.JobStarted():
                self._start(entry, at)
            case journal.IterationCommitted():
                self._committed, self._count = entry.outcome.iteration, self._count + 1
            case journal.IterationsPacked():
                self._committed, self._count = entry.last, self._count + entry.count
            case journal.RollbackDecided():
                self._committed = entry.iteration
            case journal.CheckpointCommitted():
                self._saved = max(self._saved, entry.iteration)
            case journal.FailureFound():
                self._open[entry.failure] = self._found(entry, at)
            case journal.PlanDecided():
                self._decided = entry
                if entry.action == "start":  # from a checkpoint, or from the beginning
                    self._saved = max(self._saved, entry.next_iteration - 1)
            case journal.PlanInEffect():
                self._in_effect = entry.epoch, record
            case journal.Reconfigured():
                return [self._reconfigured(record, entry)]
            case journal.FailureEnded():
                failure = self._open.pop(entry.failure, None)
                return [] if failure is None else [self._kept(record, failure, at, "ended")]
            case journal.JobEnded():
                return list(self._at_the_end(record, entry))
        return []

    def _start(self, entry: journal.JobStarted, at: float) -> None:
        self._began = at
        self._of_job = {"resihp.job": entry.job, "resihp.run": entry.run or entry.job}
        if entry.slurm is not None:
            self._of_job |= {"slurm.job_id": str(entry.slurm.job), "slurm.cluster": entry.slurm.cluster}
            if entry.slurm.array_job is not None:
                self._of_job["slurm.array_job_id"] = f"{entry.slurm.array_job}_{entry.slurm.array_task}"

    @property
    def _layout(self) -> Layout | None:
        """Layout in effect; None before the first plan."""
        return self._history.plans[-1].layout if self._history.plans else None

    def _found(self, entry: journal.FailureFound, at: float) -> _Failure:
        noticed_at, onset_at = entry.noticed_at(at), entry.failed_at(at)
        if onset_at is not None and entry.kind != "fail-slow" and entry.detect_s is None:
            onset_at = onset_at if noticed_at - onset_at >= MIN_NOTICE_S else None
        if onset_at is not None:
            onset_at = max(min(onset_at, noticed_at), self._began)
        return _Failure(entry=entry, noticed_at=noticed_at, onset_at=onset_at, commits=self._count)

    # --- completed traces ---------------------------------------------------------------------------------------

    def _reconfigured(self, record: journal.Record, entry: journal.Reconfigured) -> Episode:
        failures = [self._open.pop(failure) for failure in entry.failures if failure in self._open]
        decided = self._decided if self._decided is not None and self._decided.plan.epoch == entry.epoch else None
        began = self._interrupted_at(record, entry)
        children = [*_before(failures, began), *_phases(entry, began)]
        attributes = {
            **_about(failures),
            "resihp.epoch": entry.epoch,
            "resihp.layout.before": _description(self._before),
            "resihp.layout.after": _description(self._layout),
            "resihp.action": entry.action,
            "resihp.attempts": entry.attempts,
            "resihp.iterations_lost": int(entry.action == "redo"),
            "resihp.bytes_moved": entry.bytes_moved,
            "resihp.seconds": entry.seconds,
        }
        if (mended := self._history.recovery(entry, record.at)) is not None:
            attributes["resihp.seconds_to_recover"] = mended.seconds_to_recover
            if mended.noticed_after is not None:
                attributes["resihp.noticed_after"] = mended.noticed_after
        self._before = self._layout
        if decided is not None:
            attributes["resihp.iteration"] = decided.next_iteration
            attributes.setdefault("resihp.cause", decided.reason)
        name = "recovery" if entry.failures else "change of plan"
        start = min(child.start for child in children)
        return self._trace(record, name, children, attributes, start, began + entry.seconds)

    def _interrupted_at(self, record: journal.Record, entry: journal.Reconfigured) -> float:
        """Return the time, in seconds since 1970, when training was interrupted.

        It is computed both from the record of the first iteration after the change of plan and from the record that the
        plan took effect. Each was written at or after its event, so the earlier of the two results is the more accurate
        one. A plan's record by another leader is not used, because that leader measured from another moment.
        """
        began = record.at - entry.seconds
        if self._in_effect is not None and self._in_effect[0] == entry.epoch:
            _, written = self._in_effect
            if journal.term_of(written.seq) == journal.term_of(record.seq):
                began = min(began, written.at - (entry.seconds - entry.first_iteration_s))
        return began

    def _kept(self, record: journal.Record, failure: _Failure, end: float, outcome: str, failed: str = "") -> Episode:
        """Return the trace of a failure that no change of plan answered. `failed`: the reason if the failure ended the
        job."""
        attributes = {
            **_about([failure]),
            "resihp.epoch": failure.entry.epoch,
            "resihp.layout.before": _description(self._layout),
            "resihp.outcome": outcome,
            "resihp.iterations_lost": max(self._committed - self._saved, 0) if failed else 0,
        }
        children = _before([failure], failure.noticed_at)
        start = failure.noticed_at if failure.onset_at is None else failure.onset_at
        part = failure.entry.failure
        return self._trace(record, "failure", children, attributes, start, end, part=part, failed=failed)

    def _at_the_end(self, record: journal.Record, entry: journal.JobEnded) -> Iterator[Episode]:
        """Yield the traces of failures that are still open at the job's end. A slow device or link stayed slow until
        the end. A dead device or process ended the job, unless training went on without it."""
        for failure in self._open.values():
            if failure.entry.kind == "fail-slow":
                yield self._kept(record, failure, record.at, "kept")
            elif entry.state == "completed" or self._count - failure.commits > COMMITS_AFTER_FAILURE:
                yield self._kept(record, failure, failure.noticed_at, "spared")
            elif entry.state == "cancelled":
                yield self._kept(record, failure, record.at, "cut short")
            else:
                yield self._kept(record, failure, record.at, "ended the job", entry.reason or entry.state)
        self._open.clear()

    def _trace(
        self,
        record: journal.Record,
        name: str,
        children: list[Span],
        attributes: dict[str, Value],
        start: float,
        end: float,
        *,
        part: int = 0,
        failed: str = "",
    ) -> Episode:
        attributes = {**self._of_job, **attributes, "resihp.record": record.seq}
        events = tuple(event for event in self._events if start <= event[0] <= end)
        root = Span(
            name=name,
            start=start,
            end=end,
            attributes=attributes,
            children=tuple(children),
            events=events,
            failed=failed,
        )
        key = f"{self._of_job.get('resihp.job', '')} {self._began!r} {record.seq} {part}"
        return Episode(seq=record.seq, key=key, root=root)


def _before(failures: Sequence[_Failure], began: float) -> list[Span]:
    """Return the spans from the known onsets to the interruption of training."""
    spans = []
    for failure in failures:
        number = {"resihp.failure": failure.entry.failure}
        if failure.onset_at is not None:
            noticed_at = min(failure.noticed_at, began) if failure.onset_at <= began else failure.noticed_at
            spans.append(Span(name="notice", start=failure.onset_at, end=noticed_at, attributes=number))
        if began - failure.noticed_at >= MIN_NOTICE_S:
            spans.append(Span(name="weigh", start=failure.noticed_at, end=began, attributes=number))
    return spans


def _phases(entry: journal.Reconfigured, began: float) -> list[Span]:
    """Return the spans of the phases in the journal entry. Ranks build groups and move state at their own pace: the
    slowest rank's time is in `resihp.seconds`, but no span extends beyond the moment when training resumed."""
    done = began + entry.seconds
    parked = began + entry.park_s
    confirmed = parked + entry.plan_s
    resumed = max(done - entry.first_iteration_s, confirmed)
    built = min(confirmed + entry.groups_s, resumed)
    moved = min(built + entry.state_s, resumed)
    decided = () if entry.planning_s is None else (Span(name="decide", start=parked, end=parked + entry.planning_s),)
    return [
        Span(name="park", start=began, end=parked),
        Span(name="plan", start=parked, end=confirmed, children=decided),
        Span(name="build communicators", start=confirmed, end=built, attributes={"resihp.seconds": entry.groups_s}),
        Span(name="move state", start=built, end=moved, attributes={"resihp.seconds": entry.state_s}),
        Span(name="first iteration", start=resumed, end=done),
    ]


def _about(failures: Sequence[_Failure]) -> dict[str, Value]:
    if not failures:
        return {}
    entries = [failure.entry for failure in failures]
    return {
        "resihp.failures": [entry.failure for entry in entries],
        "resihp.cause": "; ".join(entry.cause for entry in entries),
        "resihp.kind": ", ".join(dict.fromkeys(entry.kind for entry in entries)),
        "resihp.component": ", ".join(dict.fromkeys(entry.component for entry in entries)),
        "resihp.nodes": list(dict.fromkeys(entry.node for entry in entries if entry.node is not None)),
        "resihp.ranks": sorted({rank for entry in entries for rank in entry.ranks}),
    }


def _description(layout: Layout | None) -> str:
    return "" if layout is None else layout.describe()
