"""What is still true of a worker: kept by its agent for a supervisor that did not hear it.

A supervisor that takes over learns from every agent what runs there (`messages.Inventory`). Of what a worker has said,
this keeps the last of each kind that no later order or report has overtaken, and the steps that may not have been
committed. Pure; owned by `wrapper.agent.workers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from resihp.protocol import messages as m
from resihp.protocol.forwarding import Label, report_of

MOST_STEPS = 4096
"""Steps of one worker that are kept where nobody tells that they are committed: a minute of very short iterations."""
LAST_STEPS = 32
"""Steps that are told of every worker, whatever its agent believes to be committed: a record in its copy of the journal
may be one that the new leader does not have. Of one worker of a node, all that are kept are told."""

PARTS_KEPT = 8
"""Parts of checkpoints of one worker that are kept: the last ones, complete or not for a supervisor that took over."""

_LASTING = {
    kind.__name__: kind
    for kind in (m.Declare, m.Evaluated, m.Parked, m.Stuck, m.Raised, m.Ready, m.Finished, m.FaultDue)
}


class WorkerRecord:
    """One worker's, by the labels of what it said; the reports themselves are decoded when somebody asks for them.

    `most_steps`: how many reports of steps are kept.
    """

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._steps: deque[tuple[int, bytes]] = deque(maxlen=most_steps)
        self._said: list[tuple[Label, bytes]] = []
        self._parts: deque[bytes] = deque(maxlen=PARTS_KEPT)

    def said(self, label: Label, body: bytes) -> None:
        """The worker has reported."""
        if label.type == m.Stepped.__name__:
            if label.outcome is not None:
                self._steps.append((label.outcome.iteration, body))
        elif label.type == m.CheckpointPart.__name__:
            self._parts.append(body)
        elif (kind := _LASTING.get(label.type)) is not None:
            self._drop(kind)
            self._said.append((label, body))

    def told(self, order: Label) -> None:
        """An order goes to the worker: what it ends is true no more."""
        match order.type:
            case m.Park.__name__:
                for kind in (m.Stuck, m.Ready, m.Parked):
                    self._drop(kind, lambda report: report.epoch < order.epoch)
                if not order.after_iteration:
                    self._drop(m.FaultDue)  # it will ask again
            case m.Go.__name__:
                self._drop(m.Finished)  # what is built is there to train on
            case m.Begin.__name__:
                for kind in (m.Ready, m.Parked):
                    self._drop(kind, lambda report: report.epoch <= order.epoch)
            case m.FaultGo.__name__:
                self._drop(m.FaultDue, lambda report: report.fault == order.fault)
            case _:
                pass

    def still_true(self) -> tuple[m.WorkerMessage, ...]:
        """In order of arrival, parts of checkpoints last. Raises ProtocolError for what is no report."""
        return tuple(report_of(body) for body in (*(body for _, body in self._said), *self._parts))

    @property
    def steps_kept(self) -> int:
        return len(self._steps)

    def steps(self, most: int = MOST_STEPS) -> tuple[m.Stepped, ...]:
        """The last ones. Raises ProtocolError for what is no report."""
        last = islice(self._steps, max(0, len(self._steps) - most), None)
        reports = (report_of(body) for _, body in last)
        return tuple(report for report in reports if isinstance(report, m.Stepped))

    def committed(self, iteration: int) -> None:
        """Steps up to this one need not be kept, but for the last few."""
        while len(self._steps) > LAST_STEPS and self._steps[0][0] <= iteration:
            self._steps.popleft()

    def _drop(self, kind: type[m.Message], overtaken: Callable[[Label], bool] = lambda report: True) -> None:
        self._said = [each for each in self._said if each[0].type != kind.__name__ or not overtaken(each[0])]
