"""Invariants of every run, checked at every moment against the controller's actions and the simulated truth.

`Rules.learn` sees each event before the controller does, `Rules.judge` each action before it is carried out,
`Rules.settle` the end of each answer. The promises are those of architecture.md ("Rules that make it safe") and
interface.md ("Detection times", exit codes).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from resihp.controller import interface as api
from resihp.controller import replan_policy
from resihp.controller.planning import next_plan, situations
from resihp.faults import Fault
from resihp.parallelism.layout import validate
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import (
    AnyEntry,
    ChangeDecided,
    EvaluationDone,
    FailureEnded,
    FailureFound,
    FaultInjected,
    IterationCommitted,
    JobEnded,
    JoinRefused,
    NodeJoined,
    PlanDecided,
    PlanInEffect,
    PlanRefused,
    ProbesTaken,
    Reconfigured,
    SlurmSaw,
    Suspected,
    WorkerEnded,
)
from resihp.record.state import Device, Placement
from resihp.scheduler.layouts.mirrors import layers_held_once, with_mirrors
from resihp.simulator.holdings import after, drawn, everything, needed
from resihp.simulator.scenario import SIGINT, SIGKILL, SIGTERM

if TYPE_CHECKING:
    from resihp.simulator.machines import Worker
    from resihp.simulator.world import World

TOLERANCE_S = 1e-6

RECHECK_S = 2.0
"""Allowed delay, in seconds, until a device that a probe set aside is measured again: it takes a tick, and a second if
a measurement was in progress."""
MAX_IDLE_ITERATIONS = 6
"""Number of iterations after which a newcomer must have been given work that exists for it."""

LONGEST_CHANGE_S = 15.0
"""Remaining training time below which no change of layout is required any more: longer than any change takes here."""


class SetAside(NamedTuple):
    """A device on standby because of a probe's result."""

    times: int
    """Number of consecutive probes that found it unfit."""
    since: float
    """Time of the last such probe, of the request for the next one, or of the start of training after it."""


class Violation(AssertionError):
    """An invariant does not hold; the message contains the seed and the end of the log."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


class Rules:
    """Everything that the controller has been told and has decided so far, and the conditions that follow."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plans: dict[int, Plan] = {}
        self.plan: Plan | None = None
        self.known_dead: set[int] = set()
        self.committed = world.scenario.resume_from
        self.evaluated = 0
        self.reported = world.scenario.resume_from
        self.stepped_by_any = world.scenario.resume_from
        """Highest iteration whose step a delivered report confirms: `reported` by ranks not given up, this by any."""
        self.parked: dict[int, set[int]] = {}
        """Ranks that have answered each order to park, by epoch."""
        self.last_order: dict[int, tuple[int, int]] = {}
        self.highest_epoch = 0
        self.in_effect: Plan | None = None
        self.acknowledged: dict[int, dict[int, m.Ready]] = {}
        """Reports of ranks that are ready, by epoch and rank."""
        self.refused: set[int] = set()
        """Epochs whose plan was refused."""
        self.objected = 0
        """Number of refusals since the last plan took effect."""
        self.turned_away: set[int] = set()
        self.declared_at: dict[int, int] = {}
        """Newcomers that are ready to join, with the number of committed iterations at that time."""
        self.taking_over = False
        """Whether this answer comes from a supervisor that may still be reading inventories."""
        self.value = drawn(0, self.world.scenario.resume_from)
        """State after the last committed iteration; every holder of any slice must have it."""
        self.hurried: set[int] = set()
        """Ranks asked to park at once, after they were asked to park between two iterations."""
        self.taking_part = set(self.world.workers)
        """Ranks that the last orders to park were sent to."""
        self.parking = 0
        self.underway = False
        """Whether a transition is in progress: from its first order or plan until its plan is in effect."""
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
        """Whether the first plan was decided."""
        self.halted_at: float | None = None
        self.requests: dict[int, bool] = {}
        self.checkpoints: dict[str, set[str]] = {}
        self.exposed: tuple[tuple[int, frozenset[int]], int] | None = None
        """Epoch in which state has only one holder, the ranks that could hold a copy, and the number of iterations
        committed when that began."""
        self.set_aside: dict[Device, SetAside] = {}
        """Devices on standby because of a probe's result."""

    def took_over(self) -> None:
        """Keep only the knowledge of a new supervisor: the journal with its suspicions, but no orders or answers."""
        self.suspected = set(self.world.record.suspects_silent)
        self.pending_blame.clear()
        self.underway = False
        self.last_order.clear()
        self.reported = self.committed  # reports to the previous supervisor that are not in the journal are lost
        epochs = [0, *self.plans, *(node.epoch for node in self.world.nodes.values())]
        self.highest_epoch = max(epochs)  # an epoch that no node was told of never existed
        self._wait_anew(self.set_aside)

    def begin(self) -> None:
        """Prepare for an answer of the controller."""
        self.injected_now = []
        self.taking_over = self.world.controller.job.stage == "recovering"

    def judge(self, action: api.AnyAction) -> None:
        """Check an action before it is carried out."""
        match action:
            case api.Log():
                self.check_entry(action.entry)
                self.note_verdicts(action.entry)
            case api.Order():
                expect(bool(action.ranks), "an order without recipients")
                self.check_order(action)
            case api.StartWorkers():
                self.check_start(action)
            case api.SignalWorker():
                self.check_signal(action)
            case api.SignalNode():
                ordered = any(entry.node == action.node for entry in self.injected_now)
                expect(ordered, f"{action.node} signalled without a fault in the journal")
            case api.CutConnection():
                ordered = any((e.kind, e.node) == ("disconnect", action.node) for e in self.injected_faults())
                expect(ordered, f"{action.node} is disconnected without a fault in the journal")
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
        """Check the state after the controller's whole answer."""
        for failure in self.pending_blame:
            self.check_blame(failure)
        self.pending_blame.clear()
        if self.plan is not None and not self.began:
            self.began = True
            self.check_beginning(self.plan)
        self.check_set_aside()
        if self.taking_over:  # no supervisor could have measured them or given them work
            self._wait_anew(self.set_aside)
            self.declared_at = {rank: max(since, self.committed) for rank, since in self.declared_at.items()}
        if self.world.end is not None:
            self.check_end()
        else:
            self.check_copies()

    def learn(self, event: api.AnyEvent, again: bool) -> None:
        """Note an event before the controller sees it."""
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
                    self.known_dead.update(rank for rank, _ in event.inventory.ended)
                    self.early_loss = self.early_loss or bool(event.inventory.ended and not self.plan)
                for running in event.inventory.workers if event.inventory else ():
                    for step in running.steps:
                        self.note_report(self.world.workers[running.rank], step.outcome.iteration)
                    for message in running.said:
                        if isinstance(message, m.Declare | m.CheckpointPart):
                            self.learn(api.WorkerSaid(rank=running.rank, message=message), again=True)
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
                    case m.Parked(epoch=epoch) | m.Confirm(epoch=epoch) | m.Ready(epoch=epoch) | m.Stepped(epoch=epoch):
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
                elif isinstance(message, m.Ready):
                    if message.epoch in self.plans:
                        self.acknowledged.setdefault(message.epoch, {})[event.rank] = message
                elif isinstance(message, m.Declare):
                    if worker.joins and message.fingerprint == "same" and worker.rank not in self.known_dead:
                        self.declared_at.setdefault(worker.rank, self.committed)
                elif isinstance(message, m.CheckpointPart):
                    self.checkpoints.setdefault(message.folder, set()).add(message.file)

    def prove(self, worker: Worker, epoch: int, iteration: int) -> None:
        """Note that a report of `iteration` proves that all ranks of the epoch joined its last synchronisation."""
        meeting = self.world.meetings.get(("sync", epoch, iteration))
        plan = self.plans.get(epoch)
        if meeting is None or not meeting.over or plan is None:
            return
        for name in {self.world.workers[rank].node.name for rank in self.world.active_ranks(plan)}:
            if name != worker.node.name:
                self.proofs[name] = max(self.proofs.get(name, 0.0), meeting.over_at)

    def note_report(self, worker: Worker, iteration: int) -> None:
        """Note a report; that of a rank given up before may count or not, since its state is lost with it."""
        self.stepped_by_any = max(self.stepped_by_any, iteration)
        if worker.rank not in self.known_dead:
            self.reported = max(self.reported, iteration)

    def has_stepped(self, worker: Worker, outcome: m.StepOutcome) -> None:
        for peer in self.world.workers.values():
            if not peer.alive or self.given_up(peer) or peer.outcome is None:
                continue
            if peer.outcome.iteration == outcome.iteration:
                text = f"ranks {worker.rank} and {peer.rank} stepped {outcome.iteration} with different outcomes"
                expect(peer.outcome == outcome or self.given_up(worker), text)

    def given_up(self, worker: Worker) -> bool:
        return worker.fenced or worker.node.dropped or worker.rank in self.known_dead

    # orders

    def check_order(self, action: api.Order) -> None:
        order = action.order
        match order:
            case m.Park():
                epoch, step = order.epoch, 0 if order.after_iteration else 1
                urged = step == 1 and all(self.last_order.get(rank) == (epoch, 0) for rank in action.ranks)
                self.hurried = set(action.ranks) if urged else set()
                if self.world.takeovers:  # nodes that heard of a later epoch may have been left out by now
                    joined = [node.epoch for node in self.world.nodes.values() if node.joined and not node.dropped]
                    self.highest_epoch = min(self.highest_epoch, max([0, *self.plans, *joined]))
                expect(epoch > self.highest_epoch or urged, f"park for epoch {epoch} after epoch {self.highest_epoch}")
                if order.after_iteration:
                    expect(self.in_effect is not None and not self.underway, "pauses while a transition is under way")
                    expect(epoch == self.highest_epoch + 1, f"pauses for epoch {epoch} in epoch {self.highest_epoch}")
                else:
                    self.highest_epoch = epoch
                    self.underway = True
            case m.Propose():
                epoch, step = order.plan.epoch, 2
                self.underway = True
                self.check_base(order)
                self.highest_epoch = max(self.highest_epoch, epoch)
                expect(epoch == self.highest_epoch, f"proposes epoch {epoch} after {self.highest_epoch}")
                expect(self.plans.get(epoch) == order.plan, f"plan of epoch {epoch} is not in the journal")
                expect(set(action.ranks) <= set(order.plan.layout.ranks), "proposes to ranks outside the plan")
            case m.Go():
                epoch, step = order.epoch, 3
                expect(epoch not in self.refused, f"go to epoch {epoch}, which was refused")
                expect(epoch == self.highest_epoch, f"go to epoch {epoch} after {self.highest_epoch}")
                plan = self.plans.get(epoch)
                expect(plan is not None, f"go to epoch {epoch}, which is not in the journal")
                assert plan is not None
                missing = set(plan.layout.ranks) - self.confirmed.get(epoch, set()) - self.known_dead
                expect(not missing, f"go to epoch {epoch} though ranks {sorted(missing)} have not confirmed")
                dead = set(plan.layout.ranks) & self.known_dead
                expect(not dead, f"go to epoch {epoch} with dead ranks {sorted(dead)}")
                expect(
                    order.next_iteration == self.committed + 1,
                    f"go to iteration {order.next_iteration} with {self.committed} committed",
                )
            case m.Begin():
                epoch, step = order.epoch, 4
                plan = self.plans.get(epoch)
                expect(plan is not None and plan is self.in_effect, f"begins epoch {epoch}, which is not in effect")
                assert plan is not None
                expect(action.ranks == plan.layout.ranks, f"begins epoch {epoch} with ranks {action.ranks}")
            case m.FaultGo():
                if order.fire:
                    fired = order.fault in self.fired
                    expect(fired, f"fault {order.fault} is told to fire without an entry in the journal")
                return
            case m.Probe():
                self.check_probe(action.ranks, order)
                return
            case m.Slow():
                return
            case m.Save() | m.SaveNext():
                return  # see stopping.py
            case m.Halt():
                self.halted_at = self.world.now if self.halted_at is None else self.halted_at
                return
            case _:
                raise Violation(f"the controller does not send {order}")
        for rank in action.ranks:
            before = self.last_order.get(rank, (0, 0))
            expect((epoch, step) > before, f"rank {rank}: {type(order).__name__} {epoch} after {before}")
            expect(rank not in self.known_dead, f"{type(order).__name__} to rank {rank}, which is gone")
        if step < 2:
            self.check_signs(action)
        self.last_order.update(dict.fromkeys(action.ranks, (epoch, step)))
        if step < 2:  # several orders for the same epoch go to different ranks
            self.taking_part = set(action.ranks) | (self.taking_part if epoch == self.parking else set())
            self.parking = epoch

    def check_probe(self, ranks: tuple[int, ...], order: m.Probe) -> None:
        """Check a probe. Devices may be probed at any time; probes of links are announced during training."""
        if order.after_iteration is not None:
            self.check_announcement(ranks, order)
        self._wait_anew([self.world.controller.job.device_of(rank) for rank in ranks])

    def check_announcement(self, ranks: tuple[int, ...], order: m.Probe) -> None:
        """Check an announced link probe: announced early enough, to both ends of every link, in disjoint pairs.

        Early enough according to the reports delivered so far: if reports are held back, the controller cannot know
        better. A rank that is already past the iteration says so when the order arrives; its peer waits 2 s.
        """
        assert order.after_iteration is not None
        steps = [self.reported_step(worker) for worker in self.world.workers.values() if worker.alive]
        expect(order.after_iteration > max(steps), f"{order} is announced to ranks that are past it")
        expect(order.after_iteration < self.world.scenario.iterations, f"{order} is announced for after the end")
        expect(len(order.pairs) <= 3, f"{order} takes {len(order.pairs)} rounds")
        for round_ in order.pairs:
            ends = [rank for pair in round_ for rank in pair]
            expect(len(ends) == len(set(ends)), f"{round_}: pairs are not disjoint")
            expect(set(ends) <= set(ranks), f"{round_}: not all ends receive the order")

    def reported_step(self, worker: Worker) -> int:
        """Return the last step in a worker's delivered reports; newer reports may be on their way."""
        for event in worker.node.up:
            if isinstance(event, api.WorkerSaid) and event.rank == worker.rank and isinstance(event.message, m.Stepped):
                return event.message.outcome.iteration - 1
        return worker.stepped

    def check_signs(self, action: api.Order) -> None:
        """Check that training stops only for a loss, a stuck transfer, or silence beyond the time limits."""
        if not isinstance(action.order, m.Park) or self.plan is None or self.plan.epoch in self.refused:
            return
        if self.world.stopping.is_on:
            return
        if action.order.after_iteration:
            slow = any(
                (isinstance(e, FailureFound) and e.kind == "fail-slow")
                or (isinstance(e, ProbesTaken) and e.occasion == "standby")
                for _, e in self.world.entries
            )
            new = {rank for rank in self.declared_at if rank not in self.plan.computing}
            exposed = bool(layers_held_once(self.plan.layout))
            vacating = self.world.scenario.on_drain == "vacate" and any(
                isinstance(e, SlurmSaw) and "drain" in e.state for _, e in self.world.entries
            )
            batch_changes = self.world.scenario.batch_sizes.at(self.stepped_by_any + 1) != self.plan.micro_batches
            tuned = any(isinstance(e, ChangeDecided) and e.tuned for _, e in self.world.entries)
            expect(
                bool(new - self.known_dead)
                or slow
                or vacating
                or batch_changes
                or tuned
                or exposed
                or self.world.thinking.has_found(self.plan),
                "pauses without a newcomer, a slow device, a node to vacate, another batch size, a better plan, or "
                "state with a single holder",
            )
            return
        if self.world.takeovers and self.world.now - self.world.takeovers[-1] < 12.0:
            return  # a change was in progress, or may have been
        active = self.world.active_ranks(self.plan)
        has_lost = any(rank in self.known_dead or self.world.workers[rank].fenced for rank in self.taking_part)
        if (
            has_lost
            or self.world.broken_epochs & {self.plan.epoch}
            or any(self.world.workers[rank].raised for rank in active)
        ):
            return
        if self.last_order.get(action.ranks[0], (0, 0))[1] == 0:
            return  # hurried, after a request to stop between two iterations
        loud = any(not self.world.workers[rank].alive for rank in {*active, *self.taking_part})
        quiet_s = self.world.now - max(self.world.workers[rank].progress_at for rank in active)
        expect(loud or quiet_s >= 15.0 - TOLERANCE_S, f"parks all ranks without cause, progress {quiet_s:.1f} s ago")

    # signals and drops

    def check_signal(self, action: api.SignalWorker) -> None:
        worker = self.world.workers[action.rank]
        if any(action.rank == entry.rank or worker.node.name == entry.node for entry in self.injected_now):
            worker.injected = True
            return
        expect(action.signal == SIGKILL, f"signal {action.signal} to rank {action.rank} without a fault")
        worker.fenced = True
        if action.rank in self.turned_away:
            return
        has_declared = action.rank in self.declared_at and not self.taking_over  # a declaration may still be unread
        if self.halted_at is not None and worker.joins and not has_declared:
            return
        if not worker.alive or worker.raised or worker.frozen == "stop":
            return
        recently = self.world.now - worker.thawed_at < 3.0
        expect(bool(worker.frozen) or recently, f"rank {action.rank} is fenced though it waits for others")
        is_ordered = worker.ordered_at >= worker.answered_at
        sign = worker.ordered_at if is_ordered else max(worker.shown_at, worker.answered_at)
        if recently:  # its last beat reported that it was stopped
            return
        expect(
            self.world.now - sign >= self.world.settings.hang_given_up_s - TOLERANCE_S,
            f"rank {action.rank} is fenced {self.world.now - sign:.1f} s after a sign of life",
        )

    def check_drop(self, name: str) -> None:
        node = self.world.nodes[name]
        if self.world.allocation.is_refusal(name):
            return
        expect(not node.dropped, f"node {name} is dropped twice")
        if not node.alive or not node.joined:
            return
        least = self.world.settings.silent_beats * self.world.settings.beat_s
        heard_s, proven_s = self.world.now - node.last_delivered, self.world.now - self.proofs.get(name, 0.0)
        sign_of_life = f"heard {heard_s:.2f} s ago, proven {proven_s:.2f} s ago"
        expect(min(heard_s, proven_s) >= least - TOLERANCE_S, f"node {name} is dropped too early: {sign_of_life}")

    # entries

    def check_entry(self, entry: AnyEntry) -> None:
        match entry:
            case PlanDecided():
                self.check_plan(entry)
            case IterationCommitted():
                self.check_commit(entry)
            case EvaluationDone():
                self.check_evaluation(entry)
            case FailureFound():
                self.failures += 1
                expect(entry.failure == self.failures, f"failure {entry.failure} after {self.failures - 1}")
                self.pending_blame.append(entry)
                noticed_s = entry.noticed_s or 0.0
                is_plausible = entry.failed_s is None or noticed_s <= entry.failed_s <= self.world.now + TOLERANCE_S
                expect(noticed_s >= 0.0 and is_plausible, f"{entry}: noticed before its onset, or before the job began")
            case FaultInjected():
                expect(entry.fault not in self.fired, f"fault {entry.fault} fires twice")
                self.fired[entry.fault] = entry
                self.injected_now.append(entry)
            case NodeJoined():
                self.failed_nodes.discard(entry.node)
            case PlanInEffect():
                self.check_effect(entry.epoch)
            case PlanRefused():
                if entry.rank is not None:
                    self.refused.add(entry.epoch)
                self.objected += 1
            case JoinRefused():
                late = self.world.workers[entry.rank].joins or self.plan is None
                expect(late, f"{entry} of a rank that was there from the start")
                expect(entry.rank not in self.turned_away, f"{entry} twice")
                self.turned_away.add(entry.rank)
                self.declared_at.pop(entry.rank, None)
            case Suspected():
                self.check_suspicion(entry)
            case ChangeDecided() if entry.tuned:
                expect(self.world.settings.tune and not self.world.scenario.observes, f"{entry} without a request")
            case ChangeDecided() if self.world.scenario.observes:
                job = self.world.controller.job
                at_work = {job.device_of(rank) for rank in job.record.computing}
                newcomers = not entry.links and at_work.isdisjoint(entry.devices)
                allowed = newcomers and not entry.found
                expect(allowed, f"{entry} because of slow devices, in a job that only observes them")
            case WorkerEnded():
                worker = self.world.workers[entry.rank]
                if entry.exit is not None:
                    expect(entry.exit == worker.status, f"rank {entry.rank} ended with {worker.status}: {entry}")
            case Reconfigured():
                expect(set(entry.failures) <= set(range(1, self.failures + 1)), f"unknown failures in {entry}")
                expect(entry.attempts >= 1 and entry.seconds >= 0, f"impossible {entry}")
                built = self.acknowledged.get(entry.epoch, {}).values()
                expect(entry.groups_s == max(r.groups_s for r in built), f"{entry}, of {built}")
                expect(entry.bytes_moved == sum(r.bytes_received for r in built), f"{entry}, of {built}")
                expect(entry.bytes_moved == self.bytes_planned, f"{entry}, planned were {self.bytes_planned} bytes")
            case JobEnded():
                expect(not any(isinstance(old, JobEnded) for _, old in self.world.entries), "two ends in the journal")
            case _:
                pass

    def check_unaffected(self, decided: PlanDecided) -> None:
        """Check that a plan lists exactly the failures of slow devices that have no work in it."""
        entries = [entry for _, entry in self.world.entries]
        ended = {entry.failure for entry in entries if isinstance(entry, FailureEnded)}
        verdicts = [entry for entry in entries if isinstance(entry, FailureFound)]
        slow = [failure for failure in verdicts if failure.kind == "fail-slow" and failure.component == "device"]
        placements, active = self.world.record.placements, decided.plan.computing
        working = {(placements[rank].node, placements[rank].device) for rank in active}
        idle = {
            failure.failure
            for failure in slow
            if failure.failure not in ended and (failure.node, failure.device) not in working
        }
        named = {failure.failure for failure in slow} & set(decided.unaffected_by)
        expect(named == idle, f"plan {decided.plan.epoch}: lists failures {named} as idle, but {idle} are")

    def check_plan(self, decided: PlanDecided) -> None:
        plan = decided.plan
        expect(plan.epoch not in self.plans, f"two plans for epoch {plan.epoch}")
        validate(plan.layout, self.world.scenario.model)
        dead = set(plan.layout.ranks) & self.known_dead
        expect(not dead, f"plan {plan.epoch} contains dead ranks {sorted(dead)}")
        dealt = sorted(index for share in plan.assignment for index in share)
        due = self.world.scenario.batch_sizes.at(decided.next_iteration)
        expect(dealt == list(range(due)), f"plan {plan.epoch} deals {dealt}")
        expect(len(plan.assignment) == len(plan.layout.replicas), "not one assignment for each replica")
        self.check_unaffected(decided)
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
        self.bytes_planned = decided.bytes_planned
        expect(not self.plans or plan.epoch > max(self.plans), f"plan {plan.epoch} after {max(self.plans, default=0)}")
        if self.plan is not None:
            awaited = set(plan.layout.ranks) - self.parked.get(plan.epoch, set())
            expect(not awaited, f"plan {plan.epoch} is decided though ranks {sorted(awaited)} have not parked for it")
            dropped_ranks = {*self.plan.layout.ranks} - {*plan.layout.ranks}
            unexplained = (
                dropped_ranks - self.known_dead - {rank for rank in dropped_ranks if self.world.workers[rank].fenced}
            )
            unexplained -= self.turned_away
            expect(not unexplained, f"plan {plan.epoch} loses {sorted(unexplained)}, which are alive")
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
        self.value = after(self.value, outcome)
        took = [
            w for w in self.world.workers.values() if w.outcome is not None and w.outcome.iteration == outcome.iteration
        ]
        for worker in took:
            if worker.alive and not self.given_up(worker) and worker.active:
                expect(worker.outcome == outcome, f"rank {worker.rank} took another outcome than {outcome}")
        self.check_newcomers()
        expect(outcome.iteration <= self.stepped_by_any, f"{outcome.iteration} is committed without a reported step")

    def check_evaluation(self, entry: EvaluationDone) -> None:
        interval, last = self.world.scenario.evaluate_every, self.world.scenario.iterations
        expect(self.evaluated < entry.iteration <= self.committed, f"{entry} after {self.evaluated}, {self.committed}")
        expect(entry.iteration % interval == 0 or entry.iteration == last, f"{entry} is not due")
        expect(entry.loss == self.world.validation_loss(entry.iteration), f"loss of {entry}")
        self.evaluated = entry.iteration

    def check_newcomers(self) -> None:
        """Check that newcomers that have been ready for a while are in the plan, unless the planner has no work for
        them, or the change was not worth an interruption and will be reconsidered."""
        assert self.in_effect is not None
        if self.world.stopping.is_on:
            return
        idle = {
            rank
            for rank, since in self.declared_at.items()
            if self.committed - since > MAX_IDLE_ITERATIONS
            and rank not in self.known_dead | set(self.in_effect.layout.ranks)
        }
        job, scenario = self.world.controller.job, self.world.scenario
        if (
            not idle
            or self.taking_over
            or not job.training
            or job.pause is not None  # a plan for all ready ranks is about to be made
            or self.committed + 2 >= job.record.goal
            or scenario.slow  # a change that is not worth an interruption waits
            or scenario.planner_trouble
            or scenario.checker_trouble
        ):
            return
        if job.reconsider and job.reconsider_at > self.world.now:
            return  # the pending question covers all ready ranks, regardless of its occasion
        better = next_plan.best_while_running(job).plan
        unused = better.computing == self.in_effect.computing
        expect(unused, f"ranks {sorted(idle)} have no work, though {better.layout} has some for them")

    def check_copies(self) -> None:
        """Check that state with one holder gets a second one within a few iterations if an idle live rank can hold it.

        Not near the end, when the remaining time would not pay for a change, nor after copies were refused.
        """
        job, scenario = self.world.controller.job, self.world.scenario
        plan = job.record.plan
        settled = job.stage == "running" and not self.taking_over and not self.world.stopping.is_on
        if plan is None or not settled or not layers_held_once(plan.layout):
            self.exposed = None
            return
        able = {
            rank for rank in job.ready if rank not in job.record.working and replan_policy.could_hold_copies(job, rank)
        }
        near_end = replan_policy.remaining_s(job) < LONGEST_CHANGE_S
        if not able or near_end or self.objected or scenario.planner_trouble or scenario.checker_trouble:
            self.exposed = None
            return
        now = (plan.epoch, frozenset(able))
        if self.exposed is None or self.exposed[0] != now:
            self.exposed = now, self.committed
            return
        if self.committed - self.exposed[1] <= MAX_IDLE_ITERATIONS:
            return
        better = with_mirrors(plan, situations.now(job), able)
        gained = layers_held_once(plan.layout) - layers_held_once(better.layout)
        often = any(
            len(job.changed_at.get(job.device_of(rank), ())) >= replan_policy.MAX_PROTECTIVE_CHANGES for rank in able
        )
        expect(not gained or often, f"layers {sorted(gained)} have one holder, and ranks {sorted(able)} hold no copy")

    def note_verdicts(self, entry: AnyEntry) -> None:
        """Note the devices that a probe sets aside, and how often in a row."""
        if isinstance(entry, PlanInEffect):
            self._wait_anew(self.set_aside)
        if not isinstance(entry, ProbesTaken) or entry.occasion == "suspicion":
            return
        for probe in entry.devices:
            device = probe.node, probe.device
            before = self.set_aside.pop(device, None)
            if not probe.fit and (before is not None or entry.occasion != "standby"):
                times = 1 if before is None else before.times + 1
                self.set_aside[device] = SetAside(times, self.world.now)

    def _wait_anew(self, devices: Iterable[Device]) -> None:
        """Restart the waiting time of devices that are being measured, or could not have been measured."""
        for device in devices:
            if device in self.set_aside:
                self.set_aside[device] = self.set_aside[device]._replace(since=self.world.now)

    def check_set_aside(self) -> None:
        """Check that no live device stands by for a probe beyond the time of the next one: 5 s after the first, twice
        that after the second, and so on up to ten times `recheck_s`."""
        job = self.world.controller.job
        if not job.training or self.taking_over or self.world.leaderless or self.world.stopping.is_on:
            return
        busy = {rank for examination in job.examinations.values() for rank in examination.asked}
        busy |= {rank for looks in job.rechecks.second_looks.values() for rank in looks.doubted}
        for rank in set(job.ready) - set(job.record.computing) - busy - job.unmeasured:
            aside = self.set_aside.get(job.device_of(rank))
            if aside is None:
                continue
            due_s = min(5.0 * 2 ** (aside.times - 1), 10 * job.settings.recheck_s)
            idle_s = self.world.now - aside.since
            expect(
                idle_s <= due_s + RECHECK_S, f"rank {rank}: stands by for {idle_s:.1f} s, to be measured in {due_s} s"
            )

    def check_suspicion(self, entry: Suspected) -> None:
        """Check that silence and slowness are numbered in one sequence, and that each suspicion ends with an
        outcome."""
        before = [earlier for earlier in self.entries_before(entry) if isinstance(earlier, Suspected)]
        last = max((earlier.suspicion for earlier in before), default=0)
        about = [earlier for earlier in before if earlier.suspicion == entry.suspicion]
        expect(entry.cleared == bool(entry.outcome), f"{entry}: cleared without an outcome, or the reverse")
        if not entry.cleared or not about:
            expect(entry.suspicion == last + 1, f"{entry} after suspicion {last}")
        else:
            expect(not any(earlier.cleared for earlier in about), f"{entry} has ended before")
        if entry.kind == "slow":
            self.check_slow(entry, [earlier for earlier in before if earlier.kind == "slow"])
            return
        expect(entry.statistic is not None and entry.threshold is not None, f"{entry} was not tested")
        expect((entry.statistic or 0.0) > (entry.threshold or 0.0), f"{entry} does not exceed its threshold")
        key = entry.node or "" if entry.rank is None else entry.rank
        if entry.cleared:
            expect(key in self.suspected, f"{entry} was not suspected")
            self.suspected.discard(key)
            return
        expect(key not in self.suspected, f"{entry} twice")
        self.suspected.add(key)
        least = self.world.settings.silent_beats * self.world.settings.beat_s - TOLERANCE_S
        if entry.rank is not None:
            worker = self.world.workers[entry.rank]
            quiet_s = self.world.now - max(worker.shown_at, worker.answered_at)
            stopped = worker.frozen == "stop" or self.world.now - worker.thawed_at < 2.0
            expect(quiet_s >= least or stopped, f"{entry} only {quiet_s:.1f} s after its progress")
        elif entry.node is not None:
            quiet_s = self.world.now - self.world.nodes[entry.node].last_beat
            expect(quiet_s >= least, f"{entry} only {quiet_s:.1f} s after its last beat")

    def check_slow(self, entry: Suspected, before: list[Suspected]) -> None:
        """Check that at most one suspicion of slowness is open at a time. `before`: those logged earlier."""
        if all(earlier.suspicion != entry.suspicion for earlier in before):
            at_once = ("dropped", "passed", "unconfirmed", "fine")
            expect(not entry.cleared or entry.outcome in at_once, f"{entry} was never examined")
        closed = {earlier.suspicion for earlier in before if earlier.cleared}
        is_open = {earlier.suspicion for earlier in before} - closed - {entry.suspicion}
        expect(entry.cleared or not is_open, f"{entry} while suspicions {is_open} are open")

    def suspects_slow(self, verdict: FailureFound) -> bool:
        """Return whether a suspicion that included the slow ranks, or no ranks, was confirmed just before."""
        for entry in reversed(self.entries_before(verdict)):
            match entry:
                case FailureFound(kind="fail-slow") | FailureEnded():
                    continue
                case Suspected(kind="slow", outcome="slow"):
                    return not entry.ranks or set(entry.ranks).issuperset(verdict.ranks)
                case _:
                    return False
        return False

    def entries_before(self, entry: AnyEntry) -> list[AnyEntry]:
        entries = [logged for _, logged in self.world.entries]
        here = next((i for i in reversed(range(len(entries))) if entries[i] is entry), len(entries))
        return entries[:here]

    def check_blame(self, failure: FailureFound) -> None:
        """Check, after the whole answer, that ranks named in a failure are dead or fenced, or that a transfer broke."""
        if failure.kind == "fail-slow":
            expect(self.suspects_slow(failure), f"{failure} without a suspicion")
            return
        if failure.kind == "communication":
            explained = failure.epoch in self.world.broken_epochs or self.signalled is not None
            expect(explained, f"attributes a failure to the communication of epoch {failure.epoch}")
            return
        for rank in failure.ranks:
            worker = self.world.workers[rank]
            is_gone = not worker.alive or worker.fenced or worker.node.dropped or worker.raised or not worker.spawned
            expect(is_gone, f"failure {failure.failure} names rank {rank}, which is alive: {failure.cause}")
            expect(rank not in self.blamed, f"rank {rank} is in failures {self.blamed.get(rank)} and {failure.failure}")
            self.blamed[rank] = failure.failure
            late = worker.node.name in self.lost_nodes and worker.died_with_node and not worker.raised
            late = late and failure.component != "node" and not self.world.stopping.signals
            expect(not late, f"failure {failure.failure} is part of the loss of node {worker.node.name}")
        if failure.component == "node":
            assert failure.node is not None
            nobody = not failure.ranks and failure.epoch > 0
            expect(not nobody, f"failure {failure.failure} of node {failure.node} names no rank")
            expect(failure.node not in self.failed_nodes, f"node {failure.node} fails twice")
            self.failed_nodes.add(failure.node)
            node = self.world.nodes[failure.node]
            is_gone = not node.alive or node.dropped or failure.node in self.world.allocation.lost
            expect(is_gone, f"node {failure.node} is alive")

    def check_beginning(self, plan: Plan) -> None:
        """Check that ranks missing from the first plan are in a failure, or came too late for it."""
        record = self.world.record
        for rank in range(len(self.world.workers)):
            worker = self.world.workers[rank]
            explained = rank in plan.layout.ranks or worker.joins or rank in self.blamed
            expect(explained or worker.node.name in self.failed_nodes, f"begins without rank {rank}, without a reason")
        for name in self.world.settings.node_names:
            state = record.nodes.get(name)
            expect(state is not None, f"begins without node {name}, which was not given up")
            assert state is not None
            excused = any(place.node == name and rank in self.blamed for rank, place in enumerate(record.placements))
            explained = state.alive or name in self.failed_nodes or excused
            expect(explained, f"begins without node {name}, without a reason")

    def healthy_devices(self) -> int:
        """Return the number of devices with which a job could begin because their nodes and processes are healthy."""
        blocked = dict(self.world.scenario.spawns)
        return sum(
            worker.alive and not (worker.frozen or worker.fenced or worker.raised or worker.stumbles)
            and worker.rank != self.world.scenario.refuses
            and node.alive and node.arrived and not (node.dropped or node.frozen or node.silent)
            for worker in self.world.workers.values()
            if not worker.joins and (node := worker.node).name not in blocked
        )  # fmt: skip

    def check_never_began(self, end: api.End) -> None:
        """Check that no job ends at its start although it had enough devices to begin."""
        scenario, healthy = self.world.scenario, self.healthy_devices()
        wide = scenario.odd_declare is not None or scenario.early_exit is not None
        hopeless = scenario.planner == "real" and "no layout fits" in end.reason
        hopeless = hopeless or scenario.planner_trouble > 0 or "no agent reconnected" in end.reason
        whole = self.world.scenario.nodes * self.world.scenario.gpus_per_node
        unfit = end.exit_code == 2 and healthy == whole  # no device is missing: the request cannot be met
        if wide or hopeless or unfit or (end.exit_code == 93 and self.is_script_broken()):
            return
        least = self.world.settings.devices_least
        expect(healthy < least, f"does not begin with {healthy} healthy devices, {least} are enough: {end.reason}")

    def is_script_broken(self) -> bool:
        """Return whether half of the ranks raised an error, as in a broken script."""
        first = [worker for worker in self.world.workers.values() if not worker.joins]
        raised = [worker for worker in first if worker.raised]
        return 2 * len(raised) >= len(first)

    def with_work(self) -> set[int]:
        """Return the ranks that have work, or would have if the plan that was decided last took effect."""
        last = None if self.plan is None or self.plan.epoch in self.refused else self.plan
        plans = [self.in_effect or self.plan, last]
        return {rank for plan in plans if plan is not None for rank in self.world.active_ranks(plan)}

    # the end

    def check_end(self) -> None:
        assert self.world.end is not None
        code = self.world.end.exit_code
        ended = [entry for _, entry in self.world.entries if isinstance(entry, JobEnded)]
        expect(len(ended) == 1, f"{len(ended)} ends in the journal")
        expect(ended[0].exit_code == code, f"the journal says {ended[0].exit_code}, the end {code}")
        cancelled = code in (130, 143) or (self.world.end.requeue and self.world.stopping.is_on)
        state = "completed" if code == 0 else "cancelled" if cancelled else "failed"
        expect(ended[0].state == state, f"exit code {code} is called {ended[0].state}")
        expect(isinstance(self.world.entries[-1][1], JobEnded), "entries after the end")
        expect(all(self.requests.values()), "an operator was not answered")
        done = self.committed >= self.world.scenario.iterations
        unfired = [fault for fault in self.world.scenario.faults if fault.id not in self.fired]
        raised = sum(w.raised for w in self.world.workers.values() if not w.joins or w.plan)
        same = raised >= 2 or (raised == 1 and len(self.with_work()) == 1)
        if self.world.stopping.check_end(self.world.end):
            return
        if self.signalled is None and self.plan is None:
            self.check_never_began(self.world.end)
        if code == 2:
            unwilling = (self.world.scenario.objects, self.world.scenario.other_digest) != (None, None)
            expect(self.plan is None or (unwilling and len(self.plans) == 1), f"ends with 2: {self.world.end.reason}")
        elif self.world.scenario.early_exit == 0:  # a plain program, which does not use resihp
            expect(code == (1 if unfired else 0), f"ends with {code}")
        elif code in (5, 75):
            self.check_too_few(self.world.end)
        elif self.plan is None:
            expect(code in ((1, 93) if self.early_loss else (1, 2, 3, 93)), f"ends with {code}")
        elif code == 0:
            expect(done, f"ends with 0 after {self.committed} of {self.world.scenario.iterations}")
            expect(not unfired, f"ends with 0 though {unfired} did not fire")
            if self.world.scenario.evaluate_every:
                expect(self.evaluated == self.world.scenario.iterations, f"evaluated up to {self.evaluated}")
            still_running = any(
                w.alive and not w.halted for w in self.world.workers.values() if w.spawned and not self.given_up(w)
            ) or any(w.spawned and w.joins and w.rank not in self.known_dead for w in self.world.workers.values())
            expect(
                self.world.end.workers_leave
                or still_running
                or bool(self.world.takeovers)
                or self.world.now - (self.halted_at or 0.0) > 3.0,
                "ends although workers are leaving",
            )
        elif code == 1:
            # a process that dies while there is no leader may have been told to halt before
            halted = self.halted_at is not None or bool(self.world.takeovers)
            late = halted and any(w.status not in (0, None) for w in self.world.workers.values())
            hopeless = self.objected >= 2 or "communication failed 6 times" in self.world.end.reason
            expect(hopeless or (done and (bool(unfired) or late)), f"fails: {self.world.end.reason}")
            for fault in unfired if not late and not hopeless else []:
                expect(str(fault) in self.world.end.reason, f"does not name {fault}: {self.world.end.reason}")
        elif code == 93:
            expect(same, "attributes to the script an error that was not raised twice")
        else:
            raise Violation(f"exit code {code}: {self.world.end.reason}")

    def check_too_few(self, end: api.End) -> None:
        """Check the end without enough nodes: Slurm requeues the job if that adds a checkpoint, or restarts are
        left."""
        scenario = self.world.scenario
        saved = self.world.controller.job.checkpointed > 0
        again = scenario.slurm and scenario.may_requeue and (saved or scenario.restarts_left > 0)
        expect((end.exit_code, end.requeue) == ((75, True) if again else (5, False)), f"{end}, where {again=}")
        if self.plan is not None:
            expect(self.is_lost(), f"gives up though no state is lost: {end.reason}")

    def is_lost(self) -> bool:
        """Return whether no agent is left, or a slice has no holder any more, or no plan was accepted."""
        able = {w.rank for w in self.world.workers.values() if w.spawned and not self.given_up(w)}
        if "no agent reconnected" in (self.world.end.reason if self.world.end else ""):
            nodes, is_stranger = self.world.nodes.values(), self.world.allocation.is_stranger
            return not any(node.joined for node in nodes if not is_stranger(node.name))
        if self.in_effect is None or self.committed == self.world.scenario.resume_from:
            return not able - self.turned_away or self.objected > 0
        covered = 0
        for rank, slices in needed(self.world.scenario.model, self.in_effect.layout).items():
            covered |= slices if rank in able and self.in_effect.epoch in self.world.workers[rank].held else 0
        return covered != everything(self.world.scenario.model) or self.objected > 0

    # the transaction

    def check_start(self, action: api.StartWorkers) -> None:
        """Check a device's first process, or a respawn where the last one died and the device is not the cause."""
        workers, scenario = self.world.workers, self.world.scenario
        node = self.world.nodes[action.node]
        is_lost = node.name in self.lost_nodes and not self.taking_over  # a loss may still be unheard
        expect(not is_lost and not node.dropped, f"{action} on a node that is lost")
        placements = self.world.record.placements
        for rank, device in action.workers:
            expect(action.nodes[rank] == node.name, f"{action} names another node")
            expect(placements[rank] == Placement(node.name, device), f"{action} is not in the journal")
            if not action.joins:
                expect(node.ranks[device] == rank, f"rank {rank} on device {device} of {action.node}")
                continue
            expect(rank not in workers, f"{action}: there is a rank {rank}")
            before = [w for w in workers.values() if w.node is node and w.device == device]
            expect(len(before) <= scenario.come_backs, f"{action}: started {len(before)} times before")
            for worker in before:
                is_gone = worker.rank in self.known_dead or worker.rank in self.turned_away
                expect(is_gone, f"{action}: rank {worker.rank} is still on that device")
                unheard = bool(self.world.takeovers)  # its error may have been reported to a supervisor that died
                expect(not worker.raised or unheard, f"{action}: rank {worker.rank} raised there")
                killed = any(f.kind == "kill" and f.rank == worker.rank for f in self.injected_faults())
                expect(not killed, f"{action}: the device is dead")

    def injected_faults(self) -> list[Fault]:
        armed = {fault.id: fault for fault in self.world.scenario.faults}
        return [armed.get(number) or self.world.asked[number] for number in self.fired]

    def check_base(self, propose: m.Propose) -> None:
        base = propose.base
        if self.in_effect is None or self.committed == self.world.scenario.resume_from:
            expect(base is None, f"{base} though every rank can draw its state")
            return
        expect(base is not None, "no base though iterations are committed")
        assert base is not None
        effective = self.in_effect
        expect((base.epoch, base.layout) == (effective.epoch, effective.layout), f"{base}, in effect is {effective}")
        expect(set(base.survivors) <= set(effective.layout.active), f"survivors {base.survivors} without work")
        for rank in base.survivors:
            worker = self.world.workers[rank]
            if self.given_up(worker) or not worker.alive:
                continue
            expect(base.epoch in worker.held, f"survivor {rank} holds {list(worker.held)}, base is {base.epoch}")
        named = {rank: node for rank, node in propose.nodes.items() if node}
        truth = {rank: worker.node.name for rank, worker in self.world.workers.items()}
        if self.world.takeovers:  # some ranks vanished with a supervisor, but their numbers are taken
            truth = {rank: place.node for rank, place in enumerate(self.world.record.placements)} | truth
        expect(named == truth, f"names other nodes: {named.items() ^ truth.items()}")

    def check_effect(self, epoch: int) -> None:
        """Check the commit: all ranks have acknowledged, and every held slice is of the last committed iteration."""
        plan = self.plans.get(epoch)
        expect(plan is not None and epoch == self.highest_epoch, f"epoch {epoch} takes effect out of order")
        expect(epoch not in self.refused, f"epoch {epoch} takes effect, though it was refused")
        assert plan is not None
        missing = set(plan.layout.ranks) - self.acknowledged.get(epoch, {}).keys()
        expect(not missing, f"epoch {epoch} takes effect before ranks {sorted(missing)} are ready")
        need = needed(self.world.scenario.model, plan.layout)
        for rank in plan.layout.active:
            worker = self.world.workers[rank]
            if not worker.alive or self.given_up(worker):
                continue
            holding = worker.held.get(epoch)
            expect(holding is not None and holding.slices == need[rank], f"rank {rank} lacks slices of epoch {epoch}")
            assert holding is not None
            right = (holding.iteration, holding.value) == (self.value.iteration, self.value.value)
            expect(right, f"rank {rank} holds iteration {holding.iteration}, committed is {self.value.iteration}")
        self.in_effect = plan
        self.underway = False
        self.objected = 0

    def freed(self, worker: Worker, epoch: int, kept: int | None) -> None:
        """Check that a rank frees only state that the layout in effect does not need."""
        if self.given_up(worker):
            return
        if self.committed == self.world.scenario.resume_from:
            return
        effective = self.in_effect
        expect(effective is not None and epoch != effective.epoch, f"rank {worker.rank} frees epoch {epoch} for {kept}")
