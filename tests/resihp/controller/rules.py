"""What must hold at every moment of every run, asserted on what the controller says and on the truth beside it.

`Rules.learn` sees each event before the controller does, `Rules.judge` each action before it is carried out,
`Rules.settle` the end of each answer. The promises are those of architecture.md ("Rules that make it safe") and
interface.md ("Detection times", exit codes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.journal import (
    AnyEntry,
    FailureFound,
    FaultInjected,
    IterationCommitted,
    JobEnded,
    PlanDecided,
    Reconfigured,
    Suspected,
    WorkerEnded,
)
from resihp.layout import validate
from resihp.plan import Plan
from resihp.protocol import messages as m
from tests.resihp.controller.scenario import SIGINT, SIGKILL, SIGTERM

if TYPE_CHECKING:
    from tests.resihp.controller.machines import Worker
    from tests.resihp.controller.world import World

EPSILON = 1e-6


class Violation(AssertionError):
    """An invariant does not hold; the message has the seed and the end of the log."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


class Rules:
    """What the controller has been told and has decided so far, and what follows from it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plans: dict[int, Plan] = {}
        self.plan: Plan | None = None
        self.known_dead: set[int] = set()
        self.committed = world.scenario.resume_from
        self.reported = world.scenario.resume_from
        self.witnessed = world.scenario.resume_from
        """Highest iteration that a delivered report says was stepped: by somebody who was not given up, by anybody."""
        self.resumed: dict[int, dict[int, float]] = {}
        """Who has resumed in which epoch, and how long it says that its communicators took."""
        self.parked: dict[int, set[int]] = {}
        """Who has answered to which order to park."""
        self.last_order: dict[int, tuple[int, int]] = {}
        self.highest_epoch = 0
        self.confirmed: dict[int, set[int]] = {}
        self.blamed: dict[int, int] = {}
        self.failed_nodes: set[str] = set()
        self.lost_nodes: set[str] = set()
        self.failures = 0
        self.fired: dict[int, FaultInjected] = {}
        self.injected_now: list[FaultInjected] = []
        self.suspected: set[tuple[int | None, str | None]] = set()
        self.pending_blame: list[FailureFound] = []
        self.proofs: dict[str, float] = {}
        self.signalled: int | None = None
        self.early_loss = False
        self.halted_at: float | None = None
        self.requests: dict[int, bool] = {}
        self.checkpoints: dict[str, set[str]] = {}

    def begin(self) -> None:
        """Before each answer."""
        self.injected_now = []

    def judge(self, action: api.AnyAction) -> None:
        """Before the action is carried out."""
        match action:
            case api.Log():
                self.check_entry(action.entry)
            case api.Order():
                expect(bool(action.ranks), "an order to nobody")
                self.check_order(action)
            case api.StartWorkers():
                ranks = self.world.nodes[action.node].ranks
                for rank, device in action.workers:
                    expect(ranks[device] == rank, f"rank {rank} on device {device} of {action.node}")
            case api.SignalWorker():
                self.check_signal(action)
            case api.SignalNode():
                ordered = any(entry.node == action.node for entry in self.injected_now)
                expect(ordered, f"{action.node} signalled without a fault in the journal")
            case api.DropNode():
                self.check_drop(action.node)
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
        """After the whole answer."""
        for failure in self.pending_blame:
            self.check_blame(failure)
        self.pending_blame.clear()
        if self.world.end is not None:
            self.check_end()

    def learn(self, event: api.AnyEvent, again: bool) -> None:
        """What the controller is about to know."""
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
                if event.signal in (SIGTERM, SIGINT):
                    self.signalled = event.signal
            case api.AgentBeat():
                self.world.nodes[event.node].last_beat = self.world.now
                for beat in event.beat.workers:
                    if beat.progress is not None:
                        worker = self.world.workers[beat.rank]
                        if beat.progress.primitives > worker.shown:
                            worker.shown, worker.shown_at = beat.progress.primitives, self.world.now
                            self.prove(worker, beat.progress.epoch, beat.progress.iteration - 1)
            case api.WorkerSaid():
                worker = self.world.workers[event.rank]
                message = event.message
                match message:
                    case (
                        m.Parked(epoch=epoch) | m.Confirm(epoch=epoch) | m.Resumed(epoch=epoch) | m.Stepped(epoch=epoch)
                    ):
                        if not again and epoch == self.highest_epoch:
                            worker.answered_at = self.world.now
                if isinstance(message, m.Stepped):
                    self.note_report(worker, message.outcome.iteration)
                    self.prove(worker, message.epoch, message.outcome.iteration)
                elif isinstance(message, m.Parked):
                    self.note_report(worker, message.stepped)
                    self.parked.setdefault(message.epoch, set()).add(event.rank)
                elif isinstance(message, m.Confirm):
                    plan = self.plans.get(message.epoch)
                    if plan is not None and plan.digest == message.digest:
                        self.confirmed.setdefault(message.epoch, set()).add(event.rank)
                elif isinstance(message, m.Resumed):
                    plan = self.plans.get(message.epoch)
                    if plan is not None and event.rank in self.world.active_ranks(plan):
                        self.resumed.setdefault(message.epoch, {})[event.rank] = message.groups_s
                elif isinstance(message, m.CheckpointPart):
                    self.checkpoints.setdefault(message.folder, set()).add(message.file)

    def prove(self, worker: Worker, epoch: int, iteration: int) -> None:
        """A report of `iteration` proves that all ranks of the epoch took part in its last synchronisation."""
        meeting = self.world.meetings.get(("sync", epoch, iteration))
        plan = self.plans.get(epoch)
        if meeting is None or not meeting.over or plan is None:
            return
        for name in {self.world.workers[rank].node.name for rank in self.world.active_ranks(plan)}:
            if name != worker.node.name:
                self.proofs[name] = max(self.proofs.get(name, 0.0), meeting.over_at)

    def note_report(self, worker: Worker, iteration: int) -> None:
        """A report of somebody who was given up before may count or not: his state is lost with him."""
        self.witnessed = max(self.witnessed, iteration)
        if worker.rank not in self.known_dead:
            self.reported = max(self.reported, iteration)

    def has_stepped(self, worker: Worker, outcome: m.StepOutcome) -> None:
        for other in self.world.workers.values():
            if not other.alive or self.given_up(other) or other.outcome is None:
                continue
            if other.outcome.iteration == outcome.iteration:
                text = f"ranks {worker.rank} and {other.rank} stepped {outcome.iteration} with different outcomes"
                expect(other.outcome == outcome or self.given_up(worker), text)

    def given_up(self, worker: Worker) -> bool:
        return worker.fenced or worker.node.dropped or worker.rank in self.known_dead

    # orders

    def check_order(self, action: api.Order) -> None:
        order = action.order
        match order:
            case m.Park():
                epoch, step = order.epoch, 0
                if step == 0:
                    expect(epoch > self.highest_epoch, f"park for epoch {epoch} after epoch {self.highest_epoch}")
                    self.highest_epoch = epoch
            case m.Propose():
                epoch, step = order.plan.epoch, 1
                self.highest_epoch = max(self.highest_epoch, epoch)
                expect(epoch == self.highest_epoch, f"proposes epoch {epoch} after {self.highest_epoch}")
                expect(self.plans.get(epoch) == order.plan, f"plan of epoch {epoch} is not in the journal")
                expect(set(action.ranks) <= set(order.plan.layout.ranks), "proposes to ranks outside the plan")
            case m.Go():
                epoch, step = order.epoch, 2
                expect(epoch == self.highest_epoch, f"go to epoch {epoch} after {self.highest_epoch}")
                plan = self.plans.get(epoch)
                expect(plan is not None, f"go to epoch {epoch}, which is not in the journal")
                assert plan is not None
                missing = set(plan.layout.ranks) - self.confirmed.get(epoch, set()) - self.known_dead
                expect(not missing, f"go to epoch {epoch} though ranks {sorted(missing)} have not confirmed")
                lost = set(self.world.active_ranks(plan)) & self.known_dead
                expect(not lost, f"go to epoch {epoch} with dead ranks {sorted(lost)}")
                expect(
                    order.next_iteration == self.committed + 1,
                    f"go to iteration {order.next_iteration} with {self.committed} committed",
                )
            case m.FaultGo():
                if order.fire:
                    fired = order.fault in self.fired
                    expect(fired, f"fault {order.fault} is told to fire without an entry in the journal")
                return
            case m.Halt():
                self.halted_at = self.world.now if self.halted_at is None else self.halted_at
                return
            case _:
                raise Violation(f"the controller does not send {order}")
        for rank in action.ranks:
            before = self.last_order.get(rank, (0, 0))
            expect((epoch, step) > before, f"rank {rank}: {type(order).__name__} {epoch} after {before}")
            self.last_order[rank] = (epoch, step)
            expect(rank not in self.known_dead, f"{type(order).__name__} to rank {rank}, which is gone")
        if step != 1:
            self.check_signs(action)

    def check_signs(self, action: api.Order) -> None:
        """Nobody is disturbed on mere suspicion: a park needs a loss, a stuck transfer, or silence beyond the times."""
        if not isinstance(action.order, m.Park) or self.plan is None:
            return
        active = self.world.active_ranks(self.plan)
        lost = any(rank in self.known_dead or self.world.workers[rank].fenced for rank in self.plan.layout.ranks)
        if (
            lost
            or self.world.broken_epochs & {self.plan.epoch}
            or any(self.world.workers[rank].raised for rank in active)
        ):
            return
        loud = any(not self.world.workers[rank].alive for rank in active)
        quiet_s = self.world.now - max(self.world.workers[rank].progress_at for rank in active)
        expect(loud or quiet_s >= 15.0 - EPSILON, f"parks everybody for nothing, progress {quiet_s:.1f} s ago")

    # signals and drops

    def check_signal(self, action: api.SignalWorker) -> None:
        worker = self.world.workers[action.rank]
        if any(action.rank == entry.rank or worker.node.name == entry.node for entry in self.injected_now):
            worker.injected = True
            return
        expect(action.signal == SIGKILL, f"signal {action.signal} to rank {action.rank} without a fault")
        worker.fenced = True
        if not worker.alive or worker.raised or worker.frozen == "stop":
            return
        recently = self.world.now - worker.thawed_at < 3.0
        expect(bool(worker.frozen) or recently, f"rank {action.rank} is fenced though it is a victim")
        asked = worker.told_at >= worker.answered_at
        sign = worker.told_at if asked else max(worker.shown_at, worker.answered_at)
        if recently and not worker.frozen:
            return
        expect(
            self.world.now - sign >= self.world.settings.hang_given_up_s - EPSILON,
            f"rank {action.rank} is fenced {self.world.now - sign:.1f} s after a sign of life",
        )

    def check_drop(self, name: str) -> None:
        node = self.world.nodes[name]
        expect(not node.dropped, f"node {name} is dropped twice")
        if not node.alive:
            return
        least = self.world.settings.silent_beats * self.world.settings.beat_s
        heard_s, proven_s = self.world.now - node.last_delivered, self.world.now - self.proofs.get(name, 0.0)
        sign_of_life = f"heard {heard_s:.2f} s ago, proven {proven_s:.2f} s ago"
        expect(min(heard_s, proven_s) >= least - EPSILON, f"node {name} is dropped too early: {sign_of_life}")

    # entries

    def check_entry(self, entry: AnyEntry) -> None:
        match entry:
            case PlanDecided():
                self.check_plan(entry)
            case IterationCommitted():
                self.check_commit(entry)
            case FailureFound():
                self.failures += 1
                expect(entry.failure == self.failures, f"failure {entry.failure} after {self.failures - 1}")
                self.pending_blame.append(entry)
            case FaultInjected():
                expect(entry.fault not in self.fired, f"fault {entry.fault} fires twice")
                self.fired[entry.fault] = entry
                self.injected_now.append(entry)
            case Suspected():
                self.check_suspicion(entry)
            case WorkerEnded():
                worker = self.world.workers[entry.rank]
                if entry.exit is not None:
                    expect(entry.exit == worker.status, f"rank {entry.rank} ended with {worker.status}: {entry}")
            case Reconfigured():
                expect(set(entry.failures) <= set(range(1, self.failures + 1)), f"unknown failures in {entry}")
                expect(entry.attempts >= 1 and entry.seconds >= 0, f"impossible {entry}")
                built = self.resumed.get(entry.epoch, {})
                if self.plan is not None and set(built) >= set(self.world.active_ranks(self.plan)):
                    expect(
                        entry.groups_s == max(built.values()), f"{entry}, its slowest rank took {max(built.values())} s"
                    )
            case JobEnded():
                expect(
                    not any(isinstance(other, JobEnded) for _, other in self.world.entries), "two ends in the journal"
                )
            case _:
                pass

    def check_plan(self, decided: PlanDecided) -> None:
        plan = decided.plan
        expect(plan.epoch not in self.plans, f"two plans for epoch {plan.epoch}")
        validate(plan.layout, self.world.scenario.model)
        dead = set(plan.layout.ranks) & self.known_dead
        expect(not dead, f"plan {plan.epoch} contains the dead {sorted(dead)}")
        dealt = sorted(index for share in plan.assignment for index in share)
        expect(dealt == list(range(self.world.scenario.micro_batches)), f"plan {plan.epoch} deals {dealt}")
        expect(len(plan.assignment) == len(plan.layout.replicas), "an assignment for each replica")
        expect(
            decided.next_iteration == self.committed + 1,
            f"plan {plan.epoch} begins with {decided.next_iteration}, committed are {self.committed}",
        )
        expect(
            decided.next_iteration > self.reported,
            f"plan {plan.epoch} redoes iteration {decided.next_iteration}, of which a step was reported",
        )
        for worker in self.world.workers.values():
            if worker.alive and not self.given_up(worker) and worker.rank in plan.layout.ranks:
                expect(
                    worker.stepped < decided.next_iteration,
                    f"plan {plan.epoch} redoes {decided.next_iteration}, which rank {worker.rank} has stepped",
                )
        if decided.finish is not None:
            expect(decided.finish.iteration == self.committed, f"finishes {decided.finish.iteration}")
        if self.plan is not None:
            awaited = set(plan.layout.ranks) - self.parked.get(plan.epoch, set())
            expect(not awaited, f"plan {plan.epoch} is decided though ranks {sorted(awaited)} have not parked for it")
            gone = {*self.plan.layout.ranks} - {*plan.layout.ranks}
            unexplained = gone - self.known_dead - {rank for rank in gone if self.world.workers[rank].fenced}
            expect(not unexplained, f"plan {plan.epoch} loses {sorted(unexplained)}, which are alive")
            for replica in self.plan.layout.replicas:
                whole = all(not self.given_up(self.world.workers[rank]) for rank in replica.ranks)
                kept = not whole or replica in plan.layout.replicas
                expect(kept, f"plan {plan.epoch} drops a whole replica, ranks {replica.ranks}")
        self.plans[plan.epoch] = self.plan = plan

    def check_commit(self, entry: IterationCommitted) -> None:
        outcome = entry.outcome
        expect(outcome.iteration == self.committed + 1, f"commits {outcome.iteration} after {self.committed}")
        self.committed = outcome.iteration
        assert self.plan is not None
        expected = self.world.outcome_of(self.plan, outcome.iteration)
        for name in ("samples_digest", "samples", "loss", "tokens"):
            expect(getattr(outcome, name) == getattr(expected, name), f"{name} of {outcome}")
        expect(entry.epoch in self.plans, f"commits in epoch {entry.epoch}, which is unknown")
        same = outcome == self.world.outcome_of(self.plans[entry.epoch], outcome.iteration)
        expect(same, f"the outcome of {outcome.iteration} is not of epoch {entry.epoch}")
        took = [
            w for w in self.world.workers.values() if w.outcome is not None and w.outcome.iteration == outcome.iteration
        ]
        for worker in took:
            if worker.alive and not self.given_up(worker) and worker.active:
                expect(worker.outcome == outcome, f"rank {worker.rank} took another outcome than {outcome}")
        expect(outcome.iteration <= self.witnessed, f"{outcome.iteration} is committed, nobody reported its step")

    def check_suspicion(self, entry: Suspected) -> None:
        key = (entry.rank, None if entry.rank is not None else entry.node)
        if entry.cleared:
            expect(key in self.suspected, f"{entry} was not suspected")
            self.suspected.discard(key)
            return
        expect(key not in self.suspected, f"{entry} twice")
        self.suspected.add(key)
        least = self.world.settings.silent_beats * self.world.settings.beat_s - EPSILON
        if entry.rank is not None:
            worker = self.world.workers[entry.rank]
            quiet_s = self.world.now - max(worker.shown_at, worker.answered_at)
            stopped = worker.frozen == "stop" or self.world.now - worker.thawed_at < 2.0
            expect(quiet_s >= least or stopped, f"{entry} only {quiet_s:.1f} s after its progress")
        elif entry.node is not None:
            quiet_s = self.world.now - self.world.nodes[entry.node].last_beat
            expect(quiet_s >= least, f"{entry} only {quiet_s:.1f} s after its last beat")

    def check_blame(self, failure: FailureFound) -> None:
        """After the whole answer: whoever is named is dead, fenced, or its communication was."""
        if failure.kind == "communication":
            told = failure.epoch in self.world.broken_epochs or self.signalled is not None
            expect(told, f"blames the communication of epoch {failure.epoch}")
            return
        for rank in failure.ranks:
            worker = self.world.workers[rank]
            gone = not worker.alive or worker.fenced or worker.node.dropped or worker.raised
            expect(gone, f"failure {failure.failure} names rank {rank}, which is alive: {failure.cause}")
            expect(rank not in self.blamed, f"rank {rank} is in failures {self.blamed.get(rank)} and {failure.failure}")
            self.blamed[rank] = failure.failure
            late = worker.node.name in self.lost_nodes and worker.died_with_node and not worker.raised
            late = late and failure.component != "node"
            expect(not late, f"failure {failure.failure} is part of the loss of node {worker.node.name}")
        if failure.component == "node":
            assert failure.node is not None
            expect(bool(failure.ranks), f"failure {failure.failure} of node {failure.node} names nobody")
            expect(failure.node not in self.failed_nodes, f"node {failure.node} fails twice")
            self.failed_nodes.add(failure.node)
            node = self.world.nodes[failure.node]
            expect(not node.alive or node.dropped, f"node {failure.node} is alive")

    # the end

    def check_end(self) -> None:
        assert self.world.end is not None
        code = self.world.end.exit_code
        ended = [entry for _, entry in self.world.entries if isinstance(entry, JobEnded)]
        expect(len(ended) == 1, f"{len(ended)} ends in the journal")
        expect(ended[0].exit_code == code, f"the journal says {ended[0].exit_code}, the end {code}")
        state = "completed" if code == 0 else "cancelled" if code in (130, 143) else "failed"
        expect(ended[0].state == state, f"exit code {code} is called {ended[0].state}")
        expect(isinstance(self.world.entries[-1][1], JobEnded), "entries after the end")
        expect(all(self.requests.values()), "an operator was not answered")
        done = self.committed >= self.world.scenario.iterations
        unfired = [fault for fault in self.world.scenario.faults if fault.id not in self.fired]
        whole = self.whole_replicas()
        raised = sum(w.raised for w in self.world.workers.values())
        same = raised >= 2 or (raised == 1 and self.plan is not None and len(self.world.active_ranks(self.plan)) == 1)
        if self.signalled is not None:
            expect(code == 128 + self.signalled, f"signalled {self.signalled}, ends with {code}")
        elif code == 2:
            unwilling = (self.world.scenario.objects, self.world.scenario.other_digest) != (None, None)
            expect(self.plan is None or unwilling, f"ends with 2: {self.world.end.reason}")
        elif self.world.scenario.early_exit == 0:  # a plain program, which trains without us
            expect(code == (1 if unfired else 0), f"ends with {code}")
        elif self.plan is None:
            expect(code in ((1, 5, 93) if self.early_loss else (1, 2, 3, 5, 93)), f"ends with {code}")
        elif code == 0:
            expect(done, f"ends with 0 after {self.committed} of {self.world.scenario.iterations}")
            expect(not unfired, f"ends with 0 though {unfired} did not fire")
            left = any(
                w.alive and not w.halted for w in self.world.workers.values() if w.spawned and not self.given_up(w)
            )
            expect(
                self.world.end.workers_leave or left or self.world.now - (self.halted_at or 0.0) > 3.0,
                "they were leaving",
            )
        elif code == 1:
            late = self.halted_at is not None and any(w.status not in (0, None) for w in self.world.workers.values())
            expect(done and (bool(unfired) or late), f"fails though {whole} replicas are whole")
            for fault in unfired if not late else []:
                expect(str(fault) in self.world.end.reason, f"does not name {fault}: {self.world.end.reason}")
        elif code == 5:
            expect(whole == 0, f"gives up with {whole} whole replicas")
        elif code == 93:
            expect(same, "blames the script, which raised nowhere twice")
        else:
            raise Violation(f"exit code {code}: {self.world.end.reason}")

    def whole_replicas(self) -> int:
        if self.plan is None:
            return 0
        replicas = self.plan.layout.replicas
        return sum(all(not self.given_up(self.world.workers[rank]) for rank in replica.ranks) for replica in replicas)
