"""Injected faults of a simulated worker: the worker stops at the phase of each fault until the controller answers.

Reports that a fault is due, and carries out the kinds that a worker inflicts on itself. Never arms a fault. Called by
the other parts of a worker at the beginning of each phase.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from resihp.faults import Fault
from resihp.protocol import messages as m
from resihp.simulator.scenarios.scenario import NEVER_S

if TYPE_CHECKING:
    from resihp.simulator.machines.worker import Worker


class WorkerFaults:
    """The armed faults of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.world = worker, worker.world
        self.armed = {fault.id: fault for fault in worker.world.scenario.faults}
        self.held_by: int | None = None
        """Number of the fault for which this rank waits for an answer; None if it waits for none."""
        self.resume: tuple[Callable[..., None], tuple[Any, ...]] | None = None

    def enter_phase(self, phase: str, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function`, which begins a phase. If a fault is due in this phase, report it and wait for the controller
        first."""
        worker = self.worker
        for fault in self.armed.values():
            coming = worker.transition.upcoming if phase in ("groups", "transfer", "resume") else worker.stepped + 1
            if fault.iteration == coming and fault.phase == phase and self._concerns(fault):
                self.held_by, self.resume = fault.id, (self.enter_phase, (phase, function, *arguments))
                worker.say(m.FaultDue(fault=fault.id))
                return
        function(*arguments)

    def _concerns(self, fault: Fault) -> bool:
        """Return whether this rank is the fault's target, or replaces a target without work."""
        worker = self.worker
        active = self.world.active_ranks(worker.plan) if worker.plan is not None else ()
        if fault.rank is not None:
            return fault.rank == worker.rank or fault.rank not in active
        return fault.node == worker.node.name or not any(self.world.workers[r].node.name == fault.node for r in active)

    def fault_go(self, order: m.FaultGo) -> None:
        """Carry out a fault, or continue without it."""
        worker = self.worker
        fault = self.armed.pop(order.fault, None)
        if fault is None:
            return
        if order.fire and fault.kind == "hang":
            worker.injected = True
            worker.freeze("hang", NEVER_S)
        elif order.fire and fault.kind == "raise":
            worker.injected = True
            worker.throw("injected by resihp")
        elif not order.fire and self.held_by == order.fault and self.resume is not None:
            self.held_by = None
            (function, arguments), self.resume = self.resume, None
            function(*arguments)
