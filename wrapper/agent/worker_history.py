"""A worker's reports that are still valid: its agent keeps them for a new leader, which has not received them.

A supervisor that takes over receives an inventory from every agent (`messages.Inventory`). For each worker, it includes
the last report of each kind, unless a later order or report made it obsolete, and the steps that may not be committed
yet. Owned by `resihp.wrapper.agent.workers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from resihp.protocol import messages as m
from resihp.protocol.forwarding import Label, report_of
from resihp.wrapper.agent.sockets import WorkerPipe

MAX_STEPS = 4096
"""Limit on the steps that are kept for one worker while no commit is reported; enough for a minute of very short
iterations."""
REPORTED_STEPS = 32
"""Number of steps that an inventory includes for every worker, even if the agent regards them as committed: the new
leader may lack a record that is in the agent's copy of the journal. For one worker of the node, the inventory includes
all kept steps."""

MAX_PARTS = 8
"""Limit on the checkpoint parts that are kept for one worker. A supervisor that takes over may lack the most recent
parts."""

_LASTING = {
    kind.__name__: kind
    for kind in (m.Declare, m.Evaluated, m.Parked, m.Stuck, m.Raised, m.Ready, m.Finished, m.FaultDue)
}


class WorkerRecord:
    """Reports of one worker, with their labels. The reports themselves are decoded only on request.

    `max_steps`: limit on the reports of steps that are kept.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._steps: deque[tuple[int, bytes]] = deque(maxlen=max_steps)
        self._reports: list[tuple[Label, bytes]] = []
        self._parts: deque[bytes] = deque(maxlen=MAX_PARTS)

    def add_report(self, label: Label, body: bytes) -> None:
        """Add a report of the worker. Of most kinds, only the last report is kept."""
        if label.type == m.Stepped.__name__:
            if label.outcome is not None:
                self._steps.append((label.outcome.iteration, body))
        elif label.type == m.CheckpointPart.__name__:
            self._parts.append(body)
        elif (kind := _LASTING.get(label.type)) is not None:
            self._drop(kind)
            self._reports.append((label, body))

    def note_order(self, order: Label) -> None:
        """Note an order to the worker, and drop the reports that the order makes obsolete."""
        match order.type:
            case m.Park.__name__:
                for kind in (m.Stuck, m.Ready, m.Parked):
                    self._drop(kind, lambda report: report.epoch < order.epoch)
                if not order.after_iteration:
                    self._drop(m.FaultDue)  # the worker will ask again
            case m.Go.__name__:
                self._drop(m.Finished)  # training goes on under the new plan
            case m.Begin.__name__:
                for kind in (m.Ready, m.Parked):
                    self._drop(kind, lambda report: report.epoch <= order.epoch)
            case m.FaultGo.__name__:
                self._drop(m.FaultDue, lambda report: report.fault == order.fault)
            case _:
                pass

    def still_true(self) -> tuple[m.WorkerMessage, ...]:
        """Return the valid reports in order of arrival, checkpoint parts last. Raises ProtocolError for an invalid
        report."""
        return tuple(report_of(body) for body in (*(body for _, body in self._reports), *self._parts))

    @property
    def steps_kept(self) -> int:
        return len(self._steps)

    def steps(self, most: int = MAX_STEPS) -> tuple[m.Stepped, ...]:
        """Return the last `most` steps that are kept. Raises ProtocolError for an invalid report."""
        last = islice(self._steps, max(0, len(self._steps) - most), None)
        reports = (report_of(body) for _, body in last)
        return tuple(report for report in reports if isinstance(report, m.Stepped))

    def committed(self, iteration: int) -> None:
        """Drop steps up to `iteration`, except for the last `REPORTED_STEPS`."""
        while len(self._steps) > REPORTED_STEPS and self._steps[0][0] <= iteration:
            self._steps.popleft()

    def _drop(self, kind: type[m.Message], overtaken: Callable[[Label], bool] = lambda report: True) -> None:
        self._reports = [entry for entry in self._reports if entry[0].type != kind.__name__ or not overtaken(entry[0])]


@dataclass
class Worker:
    """One worker of this node, from the order to start it until its exit."""

    start: m.Start
    pipe: WorkerPipe
    pid: int = 0
    progress: m.Progress | None = None
    beat_at: float = 0.0
    log_begin: int = 0
    """Size of the log when the worker was started; what is before is of an earlier round."""
    record: WorkerRecord = field(default_factory=WorkerRecord)
    totals: m.ScriptTotals | None = None
    """The last totals of a script that calls `resihp.iteration`."""
    _totals_sent: m.ScriptTotals | None = None

    def new_totals(self) -> m.ScriptTotals | None:
        """Return the totals if they have changed since the last call; else None."""
        if self.totals is self._totals_sent:
            return None
        self._totals_sent = self.totals
        return self.totals


def size_of(log: Path) -> int:
    """Return the size of a log in bytes; 0 if there is none."""
    try:
        return log.stat().st_size
    except OSError:
        return 0
