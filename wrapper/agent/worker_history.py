"""What is still true of a worker: kept by its agent for a supervisor that did not hear it.

A supervisor that takes over learns from every agent what runs there (`messages.Inventory`). Of what a worker has said,
this keeps the last of each kind that no later order or report has overtaken, and the steps that may not have been
committed. Pure; owned by `wrapper.agent.workers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from resihp.protocol import messages as m

MOST_STEPS = 4096
"""Steps of one worker that are kept where nobody tells that they are committed: a minute of very short iterations."""
LAST_STEPS = 32
"""Steps that are told of every worker, whatever its agent believes to be committed: a record in its copy of the journal
may be one that the new leader does not have. Of one worker of a node, all that are kept are told."""


class WorkerRecord:
    """One worker's. `most_steps`: how many reports of steps are kept."""

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._steps: deque[m.Stepped] = deque(maxlen=most_steps)
        self._said: list[m.WorkerMessage] = []

    def said(self, message: m.WorkerMessage) -> None:
        """The worker has reported."""
        match message:
            case m.Stepped():
                self._steps.append(message)
            case m.Declare() | m.Parked() | m.Stuck() | m.Raised() | m.Ready() | m.Finished() | m.FaultDue():
                self._said = [earlier for earlier in self._said if type(earlier) is not type(message)]
                self._said.append(message)
            case _:
                pass

    def told(self, order: m.WorkerOrder) -> None:
        """An order goes to the worker: what it ends is true no more."""
        match order:
            case m.Park():
                self._drop(lambda x: isinstance(x, m.Stuck | m.Ready | m.Parked) and x.epoch < order.epoch)
                if not order.after_iteration:
                    self._drop(lambda x: isinstance(x, m.FaultDue))  # it will ask again
            case m.Go():
                self._drop(lambda x: isinstance(x, m.Finished))  # what is built is there to train on
            case m.Begin():
                self._drop(lambda x: isinstance(x, m.Ready | m.Parked) and x.epoch <= order.epoch)
            case m.FaultGo():
                self._drop(lambda x: isinstance(x, m.FaultDue) and x.fault == order.fault)
            case _:
                pass

    @property
    def still_true(self) -> tuple[m.WorkerMessage, ...]:
        """In order of arrival."""
        return tuple(self._said)

    @property
    def steps(self) -> tuple[m.Stepped, ...]:
        return tuple(self._steps)

    def committed(self, iteration: int) -> None:
        """Steps up to this one need not be kept, but for the last few."""
        while len(self._steps) > LAST_STEPS and self._steps[0].outcome.iteration <= iteration:
            self._steps.popleft()

    def _drop(self, overtaken: Callable[[m.WorkerMessage], bool]) -> None:
        self._said = [message for message in self._said if not overtaken(message)]
