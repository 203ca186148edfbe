"""A worker's reports that are still valid: kept by its agent for a supervisor that has not received them.

A supervisor that takes over gets an inventory from every agent (`messages.Inventory`). Of a worker's reports, this
keeps the last of each kind that no later order or report has made obsolete, and the steps that may not have been
committed. Pure; owned by `wrapper.agent.workers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from resihp.protocol import messages as m
from resihp.protocol.forwarding import Label, report_of

MAX_STEPS = 4096
"""Most steps that are kept of one worker while no commit is reported: a minute of very short iterations."""
REPORTED_STEPS = 32
"""Steps that are reported of every worker, even if the agent takes them to be committed: a record in its copy of the
journal may be missing at the new leader. Of one worker of a node, all kept steps are reported."""

MAX_PARTS = 8
"""Most parts of checkpoints that are kept of one worker: the last ones, as a supervisor that took over may lack
them."""

_LASTING = {
    kind.__name__: kind
    for kind in (m.Declare, m.Evaluated, m.Parked, m.Stuck, m.Raised, m.Ready, m.Finished, m.FaultDue)
}


class WorkerRecord:
    """Reports of one worker, by their labels; the reports themselves are decoded only on request.

    `max_steps`: how many reports of steps are kept.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._steps: deque[tuple[int, bytes]] = deque(maxlen=max_steps)
        self._reports: list[tuple[Label, bytes]] = []
        self._parts: deque[bytes] = deque(maxlen=MAX_PARTS)

    def add_report(self, label: Label, body: bytes) -> None:
        """Add a report of the worker."""
        if label.type == m.Stepped.__name__:
            if label.outcome is not None:
                self._steps.append((label.outcome.iteration, body))
        elif label.type == m.CheckpointPart.__name__:
            self._parts.append(body)
        elif (kind := _LASTING.get(label.type)) is not None:
            self._drop(kind)
            self._reports.append((label, body))

    def note_order(self, order: Label) -> None:
        """Note an order to the worker, and drop the reports that it makes obsolete."""
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
        """Return the valid reports in order of arrival, parts of checkpoints last. Raises ProtocolError for an invalid
        report."""
        return tuple(report_of(body) for body in (*(body for _, body in self._reports), *self._parts))

    @property
    def steps_kept(self) -> int:
        return len(self._steps)

    def steps(self, most: int = MAX_STEPS) -> tuple[m.Stepped, ...]:
        """Return the last steps. Raises ProtocolError for an invalid report."""
        last = islice(self._steps, max(0, len(self._steps) - most), None)
        reports = (report_of(body) for _, body in last)
        return tuple(report for report in reports if isinstance(report, m.Stepped))

    def committed(self, iteration: int) -> None:
        """Drop steps up to this iteration, except for the last few."""
        while len(self._steps) > REPORTED_STEPS and self._steps[0][0] <= iteration:
            self._steps.popleft()

    def _drop(self, kind: type[m.Message], overtaken: Callable[[Label], bool] = lambda report: True) -> None:
        self._reports = [entry for entry in self._reports if entry[0].type != kind.__name__ or not overtaken(entry[0])]
