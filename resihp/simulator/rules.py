"""Invariants of every run, checked at every event against the controller's actions and the simulated truth.

`Rules.learn` is called for each event before the controller handles it, `Rules.judge` for each action before it is
carried out, and `Rules.settle` after each complete answer. `Rules` records everything that the controller was told and
has decided; the invariants themselves are in `resihp.simulator.invariants`, by subject. The promises are those of
architecture.md ("Rules that make it safe") and interface.md ("Detection times", exit codes). Never acts on the
simulated world. Called by `world`, and by workers that step or free state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.faults import Fault
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound, FaultInjected
from resihp.record.state import Device
from resihp.simulator.holdings import drawn
from resihp.simulator.invariants.beginnings import check_beginning
from resihp.simulator.invariants.endings import check_end
from resihp.simulator.invariants.entries import check_entry
from resihp.simulator.invariants.idle_ranks import check_copies
from resihp.simulator.invariants.measurements import SetAside, check_set_aside, note_verdicts, wait_anew
from resihp.simulator.invariants.orders import check_order
from resihp.simulator.invariants.processes import check_drop, check_signal, check_start
from resihp.simulator.invariants.suspicions import check_blame
from resihp.simulator.invariants.violations import expect
from resihp.simulator.scenarios.scenario import SIGINT, SIGTERM

if TYPE_CHECKING:
    from resihp.simulator.machines.worker import Worker
    from resihp.simulator.world import World


class Rules:
    """Records everything that the controller has been told and has decided so far, and checks it.

    `begins_after`: the iteration of the state that ranks load while no rank has any. `rolled_back`: the epoch of the
    last rollback, 0 if there was none. `values`: the state after each committed iteration.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.plans: dict[int, Plan] = {}
        self.plan: Plan | None = None
        self.known_dead: set[int] = set()
        self.committed = self.begins_after = world.scenario.resume_from
        self.rolled_back = self.rollbacks = self.rollbacks_in_a_row = 0
        self.evaluated = 0
        self.reported = self.stepped_by_any = world.scenario.resume_from
        """Highest iteration with a step reported by any rank; `reported` excludes ranks that the controller has given
        up."""
        self.parked: dict[int, set[int]] = {}
        """Ranks that have answered an order to park, by its epoch."""
        self.last_order: dict[int, tuple[int, int]] = {}
        self.highest_epoch = 0
        self.in_effect: Plan | None = None
        self.acknowledged: dict[int, dict[int, m.Ready]] = {}
        """`Ready` messages received, by epoch and rank."""
        self.refused: set[int] = set()
        """Epochs of plans that a rank refused."""
        self.objected = 0
        """Number of refused plans since the last plan took effect."""
        self.turned_away: set[int] = set()
        self.declared_at: dict[int, int] = {}
        """Newcomers that are ready to join, with the number of iterations committed at that time."""
        self.taking_over = False
        """Whether the present answer comes from a supervisor that may still be reading inventories."""
        self.value = drawn(0, self.world.scenario.resume_from)
        """State after the last committed iteration; every holder of a slice must have it."""
        self.values = {self.committed: self.value}
        self.hurried: set[int] = set()
        """Ranks that were ordered to park at once after they had been ordered to park between two iterations."""
        self.taking_part = set(self.world.workers)
        """Recipients of the last orders to park."""
        self.parking = 0
        self.underway = False
        """Whether a transition is in progress: from its first order or plan until the plan is in effect."""
        self.bytes_planned = 0
        self.confirmed: dict[int, set[int]] = {}
        self.blamed: dict[int, int] = {}
        self.failed_nodes: set[str] = set()
        self.lost_nodes: set[str] = set()
        self.failures = 0
        self.fired: dict[int, FaultInjected] = {}
        self.injected_now: list[FaultInjected] = []
        self.suspected: set[int | str] = set()
        self.pending_blame: list[FailureFound] = []
        self.proofs: dict[str, float] = {}
        self.signalled: int | None = None
        self.early_loss = False
        self.began = False
        """Whether the first plan has been decided."""
        self.halted_at: float | None = None
        self.requests: dict[int, bool] = {}
        self.checkpoints: dict[str, set[str]] = {}
        self.exposed: tuple[tuple[int, frozenset[int]], int] | None = None
        """Epoch with state that has only one holder, the ranks that could hold a copy, and the number of iterations
        committed when this began; None if all state has two holders or no rank could hold a copy."""
        self.set_aside: dict[Device, SetAside] = {}
        """Devices on standby because of the result of a probe."""

    def took_over(self) -> None:
        """Forget everything that a new supervisor cannot know: orders and answers. The journal and its suspicions
        remain."""
        self.suspected = set(self.world.record.suspects_silent)
        self.pending_blame.clear()
        self.underway = False
        self.last_order.clear()
        self.reported = self.committed  # reports to the previous supervisor that are not in the journal are lost
        epochs = [0, *self.plans, *(node.epoch for node in self.world.nodes.values())]
        self.highest_epoch = max(epochs)  # an epoch that reached no node may be used again
        wait_anew(self, self.set_aside)

    def begin(self) -> None:
        """Prepare to check the next answer of the controller."""
        self.injected_now = []
        self.taking_over = self.world.controller.job.stage == "recovering"

    def judge(self, action: api.AnyAction) -> None:
        """Check an action before it is carried out. Raises Violation."""
        match action:
            case api.Log():
                check_entry(self, action.entry)
                note_verdicts(self, action.entry)
            case api.Order():
                expect(bool(action.ranks), "an order without recipients")
                check_order(self, action)
            case api.StartWorkers():
                check_start(self, action)
            case api.SignalWorker():
                check_signal(self, action)
            case api.SignalNode():
                ordered = any(entry.node == action.node for entry in self.injected_now)
                expect(ordered, f"{action.node} signalled without a fault in the journal")
            case api.CutConnection():
                ordered = any((e.kind, e.node) == ("disconnect", action.node) for e in self.injected_faults())
                expect(ordered, f"{action.node} is disconnected without a fault in the journal")
            case api.DropNode():
                check_drop(self, action.node)
                self.known_dead.update(self.world.nodes[action.node].ranks)
            case api.Reply():
                expect(self.requests.get(action.request) is False, f"{action} to no open request")
                self.requests[action.request] = True
            case api.CommitCheckpoint():
                expect(action.iteration <= self.committed, f"checkpoint of iteration {action.iteration} too early")
                files = {file for file, _ in action.parts}
                expect(files <= self.checkpoints.get(action.folder, set()), f"parts missing in {action.folder}")
            case _:
                pass

    def settle(self) -> None:
        """Check the state after the controller's complete answer. Raises Violation."""
        for failure in self.pending_blame:
            check_blame(self, failure)
        self.pending_blame.clear()
        if self.plan is not None and not self.began:
            self.began = True
            check_beginning(self, self.plan)
        check_set_aside(self)
        if self.taking_over:  # no supervisor could have measured them or given them work
            wait_anew(self, self.set_aside)
            self.declared_at = {rank: max(since, self.committed) for rank, since in self.declared_at.items()}
        if self.world.end is not None:
            check_end(self)
        else:
            check_copies(self)

    def learn(self, event: api.AnyEvent, again: bool) -> None:
        """Record an event before the controller handles it. `again` marks a message that is delivered a second time."""
        match event:
            case api.WorkerExited():
                self.known_dead.add(event.rank)
                if not self.plan:
                    self.early_loss = True
            case api.AgentLost():
                self.lost_nodes.add(event.node)
                self.known_dead.update(self.world.nodes[event.node].ranks)
                if not self.plan:
                    self.early_loss = True
            case api.Signalled():
                if event.signal == SIGINT or (event.signal == SIGTERM and not self.world.scenario.slurm):
                    self.signalled = event.signal
            case api.AgentJoined():
                self.world.nodes[event.node].last_beat = self.world.now
                if event.inventory is not None:
                    self._learn_inventory(event.inventory)
            case api.AgentBeat():
                self.world.nodes[event.node].last_beat = self.world.now
                self._learn_beat(event.beat)
            case api.WorkerSaid():
                worker = self.world.workers[event.rank]
                if not again:
                    self._learn_answer(worker, event.message)
                self._learn_message(worker, event.message)

    def _learn_inventory(self, inventory: m.Inventory) -> None:
        """Record the reports that an agent has stored for a new supervisor."""
        self.known_dead.update(rank for rank, _ in inventory.ended)
        self.early_loss = self.early_loss or bool(inventory.ended and not self.plan)
        for running in inventory.workers:
            worker = self.world.workers[running.rank]
            for step in running.steps:
                self.note_report(worker, step.epoch, step.outcome.iteration)
            for message in running.said:
                if isinstance(message, m.Declare | m.CheckpointPart):
                    self._learn_message(worker, message)

    def _learn_beat(self, beat: m.Beat) -> None:
        """Record the workers that have made progress since the previous heartbeat."""
        for worker_beat in beat.workers:
            progress = worker_beat.progress
            if progress is None:
                continue
            worker = self.world.workers[worker_beat.rank]
            if progress.primitives > worker.shown:
                worker.shown, worker.shown_at = progress.primitives, self.world.now
                self.prove(worker, progress.epoch, progress.iteration - 1)

    def _learn_answer(self, worker: Worker, message: m.WorkerMessage) -> None:
        """Record the time of a worker's answer to an order of the newest epoch."""
        match message:
            case m.Parked(epoch=epoch) | m.Confirm(epoch=epoch) | m.Ready(epoch=epoch) | m.Stepped(epoch=epoch):
                if epoch == self.highest_epoch:
                    worker.answered_at = self.world.now

    def _learn_message(self, worker: Worker, message: m.WorkerMessage) -> None:
        match message:
            case m.Stepped():
                self.note_report(worker, message.epoch, message.outcome.iteration)
                self.prove(worker, message.epoch, message.outcome.iteration)
            case m.Parked():
                self.note_report(worker, max(message.holds, default=0), message.stepped)
                self.parked.setdefault(message.epoch, set()).add(worker.rank)
            case m.Confirm():
                plan = self.plans.get(message.epoch)
                if plan is not None and plan.digest == message.digest:
                    self.confirmed.setdefault(message.epoch, set()).add(worker.rank)
            case m.Ready():
                if message.epoch in self.plans:
                    self.acknowledged.setdefault(message.epoch, {})[worker.rank] = message
            case m.Declare():
                if worker.joins and message.fingerprint == "same" and worker.rank not in self.known_dead:
                    self.declared_at.setdefault(worker.rank, self.committed)
            case m.CheckpointPart():
                self.checkpoints.setdefault(message.folder, set()).add(message.file)

    def prove(self, worker: Worker, epoch: int, iteration: int) -> None:
        """Record that a report of `iteration` proves that all ranks of the epoch took part in its last
        synchronisation."""
        meeting = self.world.collectives.meetings.get(("sync", epoch, iteration))
        plan = self.plans.get(epoch)
        if meeting is None or not meeting.over or plan is None:
            return
        for name in {self.world.workers[rank].node.name for rank in self.world.active_ranks(plan)}:
            if name != worker.node.name:
                self.proofs[name] = max(self.proofs.get(name, 0.0), meeting.over_at)

    def note_report(self, worker: Worker, epoch: int, iteration: int) -> None:
        """Record a step that was reported with the state of an epoch. For a rank that was given up it may or may not
        count, since its state is lost. A step before a rollback does not count."""
        if epoch < self.rolled_back:
            return
        self.stepped_by_any = max(self.stepped_by_any, iteration)
        if worker.rank not in self.known_dead:
            self.reported = max(self.reported, iteration)

    def has_stepped(self, worker: Worker, outcome: m.StepOutcome) -> None:
        """Check that a rank took the same step as other live ranks. Raises Violation."""
        for peer in self.world.workers.values():
            if not peer.alive or self.given_up(peer) or peer.outcome is None or not self.counts(peer):
                continue
            if peer.outcome.iteration == outcome.iteration:
                text = f"ranks {worker.rank} and {peer.rank} stepped {outcome.iteration} with different outcomes"
                expect(peer.outcome == outcome or self.given_up(worker), text)

    def given_up(self, worker: Worker) -> bool:
        """Return whether the controller has given the worker up."""
        return worker.fenced or worker.node.dropped or worker.rank in self.known_dead

    def counts(self, worker: Worker) -> bool:
        """Return whether the worker has state of the present course of training, not only from before a rollback."""
        return max(worker.held, default=0) >= self.rolled_back

    def injected_faults(self) -> list[Fault]:
        armed = {fault.id: fault for fault in self.world.scenario.faults}
        return [armed.get(number) or self.world.asked[number] for number in self.fired]

    def freed(self, worker: Worker, epoch: int, kept: int | None) -> None:
        """Check that a rank frees only state that the layout in effect does not need. Raises Violation."""
        if self.given_up(worker):
            return
        if self.committed == self.begins_after:
            return
        effective = self.in_effect
        expect(effective is not None and epoch != effective.epoch, f"rank {worker.rank} frees epoch {epoch} for {kept}")
