"""Speak to a controller by hand, message by message, where the exact moment is what a test is about."""

from __future__ import annotations

from typing import Any

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.interface import Dependencies
from resihp.faults import Fault
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.settings import Settings
from resihp.simulator.scenarios.scenario import MODEL

DECLARE = m.Declare(model=MODEL, micro_batches=8, iterations=6, resume_from=0, fingerprint="same")
PLAIN: dict[str, Any] = {"examine": False, "plans_ahead": False, "search_s": 0.0, "max_restarts": 0}
"""Settings of a job that neither probes devices as they join nor plans ahead, nor starts a plain script again."""


def outcome(iteration: int, **changes: Any) -> m.StepOutcome:
    """What all ranks know at the end of an iteration."""
    given: dict[str, Any] = {
        "iteration": iteration,
        "clip": 1.0,
        "skip": False,
        "learning_rate": 1e-3,
        "gradient_norm": 1.0,
        "loss": 10.0 / iteration,
        "tokens": 512,
        "sum_squared_lengths": 32768,
        "samples": 8,
        "samples_digest": f"{iteration:016x}",
    }
    return m.StepOutcome(**given | changes)


class Direct:
    """A controller, the time, and everything that it answered. `iteration_s`: what ranks say that an iteration takes;
    where it is long, another plan is worth an interruption."""

    iteration_s = 0.5

    def __init__(
        self,
        nodes: int = 2,
        gpus: int = 2,
        tp: int = 1,
        pp: int = 2,
        declare: m.Declare = DECLARE,
        faults: tuple[Fault, ...] = (),
        dependencies: Dependencies | None = None,
        iteration_s: float = 0.5,
        declares: bool = True,
        **settings: Any,
    ) -> None:
        self.declare = declare
        self.iteration_s = iteration_s
        self.controller = Controller(
            Settings(job="local-1", nodes=nodes, gpus_per_node=gpus, tp=tp, pp=pp, faults=faults, **(PLAIN | settings)),
            dependencies,
        )
        self.job = self.controller.job
        self.now = 0.0
        self.actions: list[api.AnyAction] = []
        for n in range(1, nodes + 1):
            self.feed(api.AgentJoined(node=f"n{n}", host="h", devices=gpus))
        for rank in range(nodes * gpus):
            self.spawn(rank)
        for rank in range(nodes * gpus if declares else 0):
            self.say(rank, declare)

    def feed(self, event: api.AnyEvent, later_s: float = 0.01) -> list[api.AnyAction]:
        self.now += later_s
        answer = self.controller.handle(event, self.now)
        self.controller.check()
        self.actions += answer
        return answer

    def say(self, rank: int, message: m.WorkerMessage) -> list[api.AnyAction]:
        return self.feed(api.WorkerSaid(rank=rank, message=message))

    def spawn(self, rank: int) -> list[api.AnyAction]:
        placement = self.job.record.placements[rank]
        return self.feed(api.WorkerSpawned(rank=rank, node=placement.node, device=placement.device, pid=1000 + rank))

    def join(self, rank: int) -> list[api.AnyAction]:
        """A newcomer comes up, and declares the same as the others."""
        self.spawn(rank)
        return self.say(rank, self.declare)

    def crash(self, rank: int, status: int = -9) -> list[api.AnyAction]:
        return self.feed(api.WorkerExited(rank=rank, status=status))

    def wait(self, seconds: float, primitives: dict[int, int] | None = None, activity: Any = "communication") -> None:
        """Time passes, with beats of all agents and workers; `primitives` grow by so much a second."""
        grown = dict.fromkeys(self.job.members, 1000) if primitives is None else {}
        for second in range(round(seconds)):
            for name, node in self.job.nodes.items():
                if not node.alive:
                    continue
                beats = tuple(
                    m.WorkerBeat(
                        rank=rank,
                        age_s=0.1,
                        state="S",
                        progress=m.Progress(
                            epoch=self.job.epoch,
                            iteration=1,
                            primitives=grown.get(rank, 1000 + (primitives or {}).get(rank, 0) * second),
                            activity=activity,
                        ),
                    )
                    for rank in self.job.live
                    if self.job.members[rank].node == name
                )
                self.feed(api.AgentBeat(node=name, beat=m.Beat(workers=beats)), 0.0)
            self.feed(api.Tick(), 1.0)

    def all(self, kind: type) -> list[Any]:
        """Entries of the journal."""
        return [a.entry for a in self.actions if isinstance(a, api.Log) and isinstance(a.entry, kind)]

    def orders(self, kind: type, among: list[api.AnyAction] | None = None) -> list[Any]:
        """(ranks, order) of a kind."""
        actions = self.actions if among is None else among
        return [(a.ranks, a.order) for a in actions if isinstance(a, api.Order) and isinstance(a.order, kind)]

    @property
    def plan(self) -> Plan:
        """The plan proposed last."""
        return self.orders(m.Propose)[-1][1].plan

    @property
    def end(self) -> api.End | None:
        return next((action for action in self.actions if isinstance(action, api.End)), None)

    def confirm(self, *ranks: int) -> None:
        for rank in ranks or self.plan.layout.ranks:
            self.say(rank, m.Confirm(epoch=self.plan.epoch, digest=self.plan.digest))

    def ready(self, *ranks: int, **figures: Any) -> list[api.AnyAction]:
        answer: list[api.AnyAction] = []
        for rank in ranks or self.plan.layout.ranks:
            answer = self.say(rank, m.Ready(epoch=self.plan.epoch, groups_s=0.1, state_s=0.1, **figures))
        return answer

    def park(self, *ranks: int, stepped: int, epoch: int | None = None, **figures: Any) -> list[api.AnyAction]:
        """These (or all) ranks answer the order to park; `holds` is the plan in effect unless told otherwise."""
        answer: list[api.AnyAction] = []
        active = () if self.job.record.plan is None else self.job.record.plan.layout.active
        for rank in ranks or tuple(sorted(self.job.transition.waiting if self.job.transition else ())):
            own = {
                "holds": (self.job.record.plan.epoch,) if self.job.record.plan and rank in active else (),
                "ready": False,
            } | figures
            answer = self.say(
                rank,
                m.Parked(
                    epoch=self.job.epoch if epoch is None else epoch,
                    stepped=stepped if rank in active else 0,
                    outcome=outcome(stepped) if stepped and rank in active else None,
                    **own,
                ),
            )
        return answer

    def step(self, iteration: int, *ranks: int, **changes: Any) -> list[api.AnyAction]:
        answer: list[api.AnyAction] = []
        assert self.job.record.plan is not None
        for rank in ranks or self.job.record.plan.layout.active:
            told, seconds = outcome(iteration, **changes), self.iteration_s
            report = m.Stepped(epoch=self.job.epoch, outcome=told, seconds=seconds, compute_s=0.8 * seconds)
            answer = self.say(rank, report)
        return answer

    def run(self, iterations: int = 0) -> Direct:
        """Through the plan under way, and some iterations."""
        self.confirm()
        self.ready()
        for _ in range(iterations):
            self.step(self.job.record.committed + 1)
        return self
