"""Simulated ways of asking a job to stop, and the rules for the job's end.

Slurm signals agents one after the other, and their workers, which may die of the signal. It answers late or never when
asked for the reason. The rules define, independently of the controller, when a stop begins, how long it may take, which
failures it may attribute to nodes, and which state it must save. Called by `world`, `actions` and `disturbances`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import (
    AnyEntry,
    DrainDecided,
    FailureFound,
    JobSignalled,
    NodeJoined,
    NodeLost,
    PlanDecided,
    ReplacementAsked,
)
from resihp.simulator.holdings import everything
from resihp.simulator.invariants.violations import expect
from resihp.simulator.scenarios.scenario import NEVER_S, SIGCONT, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, Disturbance

if TYPE_CHECKING:
    from resihp.simulator.machines.sim_node import SimNode
    from resihp.simulator.machines.worker import Worker
    from resihp.simulator.world import World

TOGETHER_S = 2.0
TICK_S = 0.3
EARLY_S = 62.0
"""A warning until this time, with the time of its delivery, may be due to a time limit that is too short."""
WARNING_SIGNALS = (SIGUSR1, SIGUSR2)


class Stopping:
    """Slurm and operators that ask the job to end, and the rules for its end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.nodes: set[str] = set()
        """Nodes of the job according to the journal."""
        self.lost_at: dict[str, float] = {}
        """Time at which the job gave up each node."""
        self.signals: dict[str, tuple[float, int]] = {}
        """Time and number of the last signal to each agent, as far as the job knows."""
        self.began_at: float | None = None
        self.asked_at = 0.0
        self.is_warning = False
        self.operator: int | None = None
        """Signal with which an operator asks the job to end; 0 for `resihp stop`, None without a request."""
        self.at_once: int | None = None
        """Signal with which an operator asks the job to end without a checkpoint; None if no operator does."""
        self.deadline: float | None = None
        self.written: dict[str, dict[str, int]] = {}
        """Slices in each file of each checkpoint folder, as bits."""
        self.wrong: set[str] = set()
        """Files with another state than that of the last committed iteration when they were written."""
        self.meanings: list[JobSignalled] = []
        self.saving: m.Save | None = None
        self.saves: set[tuple[int, int]] = set()
        """(epoch, iteration) of each last synchronisation that told all ranks to write a checkpoint during training."""
        self.complete = 0
        """Iteration of the newest complete checkpoint."""

    # --- requests to stop -----------------------------------------------------------------------------------------

    def disturb(self, disturbance: Disturbance, node: SimNode) -> None:
        world, rng = self.world, self.world.rng
        match disturbance.kind:
            case "signal" if not disturbance.status and world.end is None and not world.leaderless:
                request = len(world.rules.requests)
                world.rules.requests[request] = False
                world.feed(api.StopAsked(request=request, at_once=False))
            case "checkpoint" if world.end is None and not world.leaderless:
                request = len(world.rules.requests)
                world.rules.requests[request] = False
                world.feed(api.CheckpointAsked(request=request))
            case "signal":
                world.feed(api.Signalled(signal=disturbance.status))
            case "cancel":
                for agent_node in list(world.nodes.values()):
                    world.at(
                        rng.choice([0.0, rng.uniform(0, 0.5), rng.uniform(0, 3)]),
                        self.signal_node,
                        agent_node,
                        disturbance,
                    )
                if rng.random() < 0.8:
                    world.at(rng.uniform(0, 0.5), world.feed, api.Signalled(signal=disturbance.status))
            case "told":
                self.signal_node(node, disturbance)
                if disturbance.seconds < NEVER_S:
                    world.at(disturbance.seconds, world.agents.kill_node, node, rng.random() < 0.5)

    def signal_node(self, node: SimNode, disturbance: Disturbance) -> None:
        """Signal a node's agent, and its workers; some workers die of the signal."""
        world, rng = self.world, self.world.rng
        if not node.alive:
            return
        if rng.random() < 0.5:
            world.network.up(node, api.AgentSignalled(node=node.name, signal=SIGCONT))
        world.at(rng.choice([0.0, 0.0, rng.uniform(0, 0.5)]), self.signal_agent, node, disturbance.status)
        for rank in node.ranks:
            worker = world.workers[rank]
            if worker.spawned and rng.random() < world.scenario.mortality:
                world.at(rng.choice([0.0, rng.uniform(0, 1.0)]), worker.die, -disturbance.status)

    def signal_agent(self, node: SimNode, number: int) -> None:
        self.world.network.up(node, api.AgentSignalled(node=node.name, signal=number))

    def answer_why(self) -> None:
        scenario, rng = self.world.scenario, self.world.rng
        expect(scenario.slurm, "asks Slurm for the reason of a stop, without Slurm")
        if scenario.meaning is not None:
            answer = api.StopMeaning(meaning=scenario.meaning)
            self.world.at(rng.choice([0.01, rng.uniform(0, 1), rng.uniform(0, 6)]), self.world.feed, answer)

    # --- consequences -----------------------------------------------------------------------------------------------

    def learn(self, event: api.AnyEvent) -> None:
        """Record an event before the controller handles it."""
        now, slurm = self.world.now, self.world.scenario.slurm
        match event:
            case api.Signalled():
                if event.signal in WARNING_SIGNALS:
                    self.begin(is_warning=True)
                elif event.signal == SIGTERM and slurm:
                    self.begin(is_warning=False)
                elif event.signal in (SIGTERM, SIGINT):
                    self.asked(event.signal)
            case api.StopAsked():
                self.asked(0)
            case api.AgentSignalled() if event.signal != SIGCONT and event.node in self.nodes:
                self.signals[event.node] = (now, event.signal)
                self.learn_of_agents(event.node)
            case api.TimeLeft():
                self.deadline = None if event.seconds is None else now + event.seconds
            case _:
                pass

    def learn_of_agents(self, node: str) -> None:
        """Begin the stop if the signals to agents are meant for the whole job. A guest has a Slurm job of its own."""
        of_the_job = self.nodes - self.world.allocation.guests.keys()
        if node not in of_the_job:
            return
        for is_warning in (False, True):
            fresh = [
                name
                for name, (at, number) in self.signals.items()
                if self.world.now - at <= TOGETHER_S
                and (number in WARNING_SIGNALS) == is_warning
                and name in of_the_job
            ]
            if len(fresh) > 1 or (fresh and len(of_the_job) == 1):
                self.begin(is_warning)

    def asked(self, number: int) -> None:
        """Record an operator's request to stop. If it is the second request and a signal, the job must end at once."""
        if self.operator is None and (self.began_at is None or self.is_warning):
            self.begin(is_warning=False)
            self.operator = number
        elif self.operator is not None and number:
            self.at_once = number

    def begin(self, is_warning: bool) -> None:
        if is_warning and (self.began_at is not None or self.world.rules.halted_at is not None):
            return
        if self.operator is not None and not is_warning and self.world.scenario.slurm:
            self.operator, self.asked_at = None, self.world.now
            return
        if self.began_at is None:
            fresh = [at for at, _ in self.signals.values() if self.world.now - at <= TOGETHER_S]
            self.began_at = min([self.world.now, *fresh])
        elif not self.is_warning:
            return
        self.asked_at, self.is_warning = self.world.now, is_warning

    def took_over(self) -> None:
        """Forget everything about the stop that a new supervisor cannot read in the journal."""
        self.signals.clear()
        self.deadline = None
        self.saving = None
        if not self.meanings:
            self.began_at = None
        else:
            self.is_warning = self.meanings[-1].meaning == "warning"
        last = self.meanings[-1] if self.meanings else None
        self.operator = last.signal if last is not None and last.meaning == "operator" else None

    @property
    def ends_at(self) -> float:
        """Time by which the job must have ended; `NEVER_S` if no limit applies."""
        if self.began_at is None or (self.is_warning and self.world.rules.halted_at is not None):
            return NEVER_S
        grace_s = self.world.scenario.signal_grace_s
        asked_at = self.asked_at
        if self.world.takeovers:
            asked_at = max(asked_at, self.world.takeovers[-1] + 36.0)
        limit = NEVER_S if self.deadline is None else max(self.deadline - 30.0, asked_at + grace_s)
        if self.operator is not None and self.operator != SIGTERM:
            return min(asked_at + 300.0, limit)
        if not self.is_warning:
            return asked_at + grace_s
        return asked_at + 120.0 if self.deadline is None else limit

    @property
    def is_on(self) -> bool:
        return self.began_at is not None

    # --- rules ----------------------------------------------------------------------------------------------------

    def judge(self, action: api.AnyAction) -> None:
        """Check an action before it is carried out. Raises Violation."""
        match action:
            case api.Log():
                self.check_entry(action.entry)
            case api.Order(order=m.Save()):
                self.check_save(action)
            case api.StartWorkers() if self.world.rules.plan is not None:
                expect(not self.is_on, f"{action} while the job is to stop")
            case api.CommitCheckpoint():
                self.check_checkpoint(action)
            case _:
                pass

    def settle(self) -> None:
        """Check the state after the controller's complete answer. Raises Violation."""
        if self.world.leaderless or self.world.end is not None:
            return
        expect(self.at_once is None, f"told to end at once by {self.at_once}, but goes on")
        late_s = self.world.now - self.ends_at
        expect(late_s <= TICK_S, f"the job should have ended {late_s:.2f} s ago")

    def check_entry(self, entry: AnyEntry) -> None:
        match entry:
            case NodeJoined():
                self.nodes.add(entry.node)
            case NodeLost():
                self.nodes.discard(entry.node)
                self.lost_at[entry.node] = self.world.now
            case DrainDecided() | ReplacementAsked():
                expect(not self.is_on, f"{entry} while the job is to stop")
            case PlanDecided():
                expect(not self.is_on or self.world.rules.plan is None, "a new plan while the job is to stop")
            case FailureFound():
                self.check_blame(entry)
            case JobSignalled():
                before = self.meanings[-1].meaning if self.meanings else None
                is_new = before is None or (before == "warning" and entry.meaning != "warning")
                is_new = is_new or (before == "operator" and entry.meaning not in ("warning", "operator"))
                expect(is_new, f"{entry} after {self.meanings}")
                expect(set(entry.nodes) <= self.signals.keys(), f"{entry}, signalled were {sorted(self.signals)}")
                self.meanings.append(entry)
                if self.world.takeovers and self.began_at is None:  # the signals came during the take-over
                    self.began_at = self.asked_at = self.world.now
                    self.is_warning = entry.meaning == "warning"
                    self.operator = entry.signal if entry.meaning == "operator" else None

    def check_blame(self, entry: FailureFound) -> None:
        """Check that the job blames no node for processes that died because of the stop."""
        if entry.node is None:
            return
        workers = [self.world.workers[rank] for rank in entry.ranks]
        died_at = [min(worker.died_at, self.lost_at.get(worker.node.name, NEVER_S)) for worker in workers]
        if self.began_at is not None:
            early = [at for at in died_at if at < self.began_at - TOGETHER_S]
            expect(bool(early), f"{entry.cause}: attributes to {entry.node} a stop that began at {self.began_at:.3f}")
        if entry.node in self.signals:
            after_s = min(died_at) - self.signals[entry.node][0]
            expect(
                not 0.0 <= after_s < 45.0, f"{entry.cause}: attributed to {entry.node} after a stop signal to its agent"
            )

    def check_save(self, action: api.Order) -> None:
        order, rules = action.order, self.world.rules
        assert isinstance(order, m.Save)
        expect(self.is_on, f"{order} though the job is not to stop")
        plan = rules.in_effect
        expect(plan is not None and plan.epoch == order.epoch, f"{order}, in effect is {plan and plan.epoch}")
        assert plan is not None
        expect(action.ranks == plan.layout.model_copy(order.replica).ranks, f"{order} to ranks {action.ranks}")
        expect(order.finish.iteration == rules.committed, f"{order}, committed is {rules.committed}")
        for rank in action.ranks:
            expect(rank not in rules.known_dead, f"{order} to rank {rank}, which is gone")
            last, _ = rules.last_order.get(rank, (0, 0))
            expect(rank in rules.parked.get(last, ()), f"{order} to rank {rank}, which has not parked for {last}")
        self.saving = order

    def write(self, worker: Worker, epoch: int, folder: str, file: str) -> None:
        """Record that a rank has written its state under the layout of an epoch."""
        holding, rules = worker.held[epoch], self.world.rules
        self.written.setdefault(folder, {})[file] = holding.slices
        right = (holding.iteration, holding.value) == (rules.value.iteration, rules.value.value)
        if self.saving is not None and not right:
            self.wrong.add(file)

    def check_checkpoint(self, action: api.CommitCheckpoint) -> None:
        """Check that a committed checkpoint is complete, and, if the job saves at its end, that it is of the last
        committed iteration."""
        files = self.written.get(action.folder, {})
        slices = 0
        for file, _ in action.parts:
            slices |= files.get(file, 0)
        expect(slices == everything(self.world.scenario.model), f"{action} lacks slices")
        self.complete = max(self.complete, action.iteration)
        if self.saving is not None:
            expect(action.iteration == self.world.rules.committed, f"{action}, {self.world.rules.committed} are done")
            wrong = self.wrong & {file for file, _ in action.parts}
            expect(not wrong, f"{action}: {sorted(wrong)} hold another state")

    def check_end(self, end: api.End) -> bool:
        """Check the end of a job that was asked to stop. Return whether the stop explains the end."""
        if not self.is_on or end.exit_code == 2 or "no agent reconnected" in end.reason:
            return False
        if self.at_once is not None:
            expect(end.exit_code == 128 + self.at_once, f"{end}, told to end at once by {self.at_once}")
            return True
        rules = self.world.rules
        done = rules.committed >= self.world.scenario.iterations
        if done and rules.halted_at is not None and end.exit_code in (0, 1):
            return False
        self.check_reason(end)
        self.check_saved(end)
        return True

    def check_reason(self, end: api.End) -> None:
        """Check that the exit code follows from the last reason in the journal, and that workers were told to leave."""
        expect(bool(self.meanings), "ends without a reason in the journal")
        again = self.meanings[-1].meaning in ("warning", "time-limit", "preempted")
        again = again and self.world.scenario.on_warning == "requeue"
        if again and "not run again: each run would be warned" in end.reason:
            expect(self.meanings[-1].meaning == "warning", f"{end} after {self.meanings}")
            limited = self.world.scenario.time_left_s is not None and not self.world.takeovers
            expect(limited and self.asked_at <= EARLY_S, f"{end}: not warned at once")
            again = False
        number = SIGINT if self.meanings[-1].signal == SIGINT else SIGTERM
        right = (75, True) if again else (128 + number, False)
        expect((end.exit_code, end.requeue) == right, f"{end} after {self.meanings}")
        expect(not end.workers_leave, f"{end}: the workers were not told to leave")

    def check_saved(self, end: api.End) -> None:
        """Check that the last committed iteration was saved, if nothing prevented this."""
        rules, scenario = self.world.rules, self.world.scenario
        calm = not [d for d in scenario.disturbances if d.kind not in ("signal", "cancel")] and not scenario.faults
        calm = calm and not scenario.mortality and scenario.iteration_s < 2 and scenario.signal_grace_s >= 10
        calm = calm and scenario.latency_s < 0.1 and not self.world.takeovers
        if calm and rules.in_effect is not None and rules.committed > scenario.resume_from and rules.halted_at is None:
            expect(self.complete == rules.committed, f"saves {self.complete} of {rules.committed}: {end.reason}")
