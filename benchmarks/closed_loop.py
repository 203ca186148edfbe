"""A simulated job around the production controller and detector: reports go in, probes that it orders are answered.

Called by `worlds`. The controller is the real one (`resihp.controller`), with its monitor, its probes and its journal;
time is virtual and plans stay as they are: the planner answers that no other is better. An order to measure is answered
from the truth, as workers do, after the iteration that is under way when it comes. What the controller wrote in its
journal is the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from benchmarks.simulated_jobs import Job
from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.interface import Dependencies
from resihp.detector.findings import Assessment, Finding
from resihp.detector.observation import Floats, Observation, pack
from resihp.detector.online.monitor import Monitor
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import AnyEntry, FailureEnded, FailureFound, Suspected
from resihp.scheduler.situation import Decision, Situation
from resihp.settings import Detection, Settings

REPEAT_ERROR = 0.01
"""Relative standard deviation of a probe of a device from one time to the next."""
LINK_ERROR = 0.03
"""The same of a link's."""
FLOPS, MEMORY_BYTES, LINK_S = 4e14, 2.5e12, 0.004
"""What healthy devices and links give."""


@dataclass(frozen=True)
class Told:
    """An entry of the journal, and the iteration (counted from 0) that was committed last when it was written."""

    at: int
    entry: Suspected | FailureFound | FailureEnded


@dataclass
class Played:
    """What the controller and its detector said of a job."""

    iterations: int = 0
    told: list[Told] = field(default_factory=list)
    found: list[tuple[int, Finding]] = field(default_factory=list)
    """Findings of the detector, with the iteration that each was found in."""
    node_of: dict[int, str] = field(default_factory=dict)
    adopted_again: int | None = None
    """The iteration before which the plan took effect once more."""


class Steadfast:
    """A planner for which the plan in effect is the best there is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def first_plan(self, **_: Any) -> Plan:
        return self.plan

    def decide(self, situation: Situation) -> Decision:
        plan = msgspec.structs.replace(self.plan, epoch=situation.epoch)
        return Decision(plan=plan, seconds=1.0, reason="the plan in effect")

    without_lost_replicas = decide


class _Listening(Monitor):
    """The production monitor, and what it found."""

    def __init__(self, played: Played) -> None:
        super().__init__(patience=Detection().patience)
        self._played = played

    def observe(self, observation: Observation) -> Assessment:
        assessment = super().observe(observation)
        self._played.found += [(observation.iteration - 1, finding) for finding in assessment.findings]
        return assessment


class Loop:
    """One job. `probes` (I, ranks): time over healthy as a probe of the device would show it in each iteration.

    `links`: the same for links by their ends, (I,) each; others are healthy. `devices`: of each node.
    """

    def __init__(self, job: Job, devices: int, probes: Floats, links: dict[tuple[int, int], Floats], seed: int) -> None:
        self.job, self.probes, self.links = job, probes, links
        self.rng = np.random.default_rng([seed, 2])
        self.played = Played()
        self.now = 0.0
        self.at = 0
        """The iteration that is under way, from 0."""
        self.orders: list[tuple[tuple[int, ...], m.Probe]] = []
        """To measure, that are not carried out yet."""
        setting = job.setting
        ranks = job.plan.layout.active
        self.controller = Controller(
            Settings(
                job="world-1",
                nodes=len(ranks) // devices,
                gpus_per_node=devices,
                tp=setting.tp,
                pp=setting.pp,
                schedule=setting.schedule,
                plans_ahead=False,
                search_s=0.0,
            ),
            Dependencies(planner=Steadfast(job.plan), monitor=lambda _: _Listening(self.played)),
        )
        for n in range(len(ranks) // devices):
            self._feed(api.AgentJoined(node=f"n{n + 1}", host=f"h{n + 1}", devices=devices))
        self.played.node_of = self.controller.job.node_of
        self._start(ranks)

    def play(self, adopts_again: int | None = None) -> Played:
        """All iterations. With `adopts_again` the plan takes effect once more, as after a change of layout: when a
        suspicion has ended without a verdict, and in this iteration at the latest."""
        reports = {rank: self._chunks(rank) for rank in self.job.plan.layout.active}
        for i in range(self.job.iterations):
            self.at = i
            if adopts_again is not None and self.played.adopted_again is None and self._is_due(adopts_again):
                self.controller.job.expected_epoch = 0  # the next iteration is the first that its monitor sees of it
                self.played.adopted_again = i
            due, self.orders = self.orders, []
            self.now += float(self.job.seconds[i])
            for rank, chunks in reports.items():
                self._step(rank, i, chunks[i])
            self._answer(due)
        self.played.iterations = self.job.iterations
        return self.played

    # --- what workers say -------------------------------------------------------------------------------------------

    def _start(self, ranks: tuple[int, ...]) -> None:
        job = self.job
        declare = m.Declare(
            model=job.model,
            micro_batches=job.plan.micro_batches,
            iterations=job.iterations + 1000,
            resume_from=0,
            fingerprint="same",
        )
        for rank in ranks:
            placement = self.controller.job.record.placements[rank]
            self._feed(api.WorkerSpawned(rank=rank, node=placement.node, device=placement.device, pid=1000 + rank))
        for rank in ranks:
            self._say(rank, declare)
        while self.orders:
            due, self.orders = self.orders, []
            self._answer(due)
        transition = self.controller.job.transition
        if transition is None or transition.plan is None:
            raise RuntimeError(f"the simulated job did not start: {self.controller.job.stage}")
        plan = transition.plan
        if plan.layout.replicas != job.plan.layout.replicas:
            raise RuntimeError("the simulated job started without some device")
        for rank in ranks:
            self._say(rank, m.Confirm(epoch=plan.epoch, digest=plan.digest))
        for rank in ranks:
            self._say(rank, m.Ready(epoch=plan.epoch, groups_s=0.1, state_s=0.1))

    def _chunks(self, rank: int) -> list[bytes]:
        """A rank's measurements of each iteration, as they cross the wire."""
        job = self.job
        place = job.plan.layout.place(rank)
        assert place is not None
        slots = job.compiled.slots(place.replica, place.stage)
        micro_batch = job.compiled.micro_batch[slots]
        own = [array[:, slots, place.t] for array in (job.starts, job.spans, job.compute)]
        rows = np.stack([*own, job.tokens[:, micro_batch], job.squares[:, micro_batch]], axis=1)
        return [pack(one) for one in rows]

    def _step(self, rank: int, i: int, chunks: bytes) -> None:
        job = self.job
        place = job.plan.layout.place(rank)
        assert place is not None
        outcome = m.StepOutcome(
            iteration=i + 1,
            clip=1.0,
            skip=False,
            learning_rate=1e-3,
            gradient_norm=1.0,
            loss=1.0,
            tokens=int(job.tokens[i].sum()),
            sum_squared_lengths=int(job.squares[i].sum()),
            samples=job.plan.micro_batches,
            samples_digest=f"{i + 1:016x}",
        )
        seconds = float(job.seconds[i])
        reduced_s = float(job.reduced[i, place.stage])
        report = m.Stepped(
            epoch=job.plan.epoch,
            outcome=outcome,
            seconds=seconds,
            compute_s=seconds,
            reduced_s=reduced_s,
            chunks=chunks,
        )
        self._say(rank, report)

    def _answer(self, due: list[tuple[tuple[int, ...], m.Probe]]) -> None:
        """Who was asked to measure does, if it is time."""
        for ranks, probe in due:
            if probe.after_iteration is not None and probe.after_iteration > self.at + 1:
                self.orders.append((ranks, probe))
                continue
            seconds = {pair: self._link_s(pair) for round_ in probe.pairs for pair in round_}
            for rank in ranks:
                transfers = tuple(
                    m.Transfer(peer=a if b == rank else b, seconds=s) for (a, b), s in seconds.items() if rank in (a, b)
                )
                speed = m.Speed() if probe.after_iteration is not None else self._speed(rank)
                self._say(rank, m.Probed(probe=probe.probe, speed=speed, transfers=transfers, seconds=0.2))

    def _speed(self, rank: int) -> m.Speed:
        slow = float(self.probes[self.at, rank])
        noise = np.exp(REPEAT_ERROR * self.rng.standard_normal(2)).tolist()
        return m.Speed(flops=FLOPS / slow * noise[0], memory_bytes=MEMORY_BYTES / slow * noise[1])

    def _link_s(self, pair: tuple[int, int]) -> float:
        slow = max((float(of[self.at]) for ends, of in self.links.items() if set(ends) == set(pair)), default=1.0)
        return LINK_S * slow * float(np.exp(LINK_ERROR * self.rng.standard_normal()))

    # --- what the controller answers --------------------------------------------------------------------------------

    def _say(self, rank: int, message: m.WorkerMessage) -> None:
        self._feed(api.WorkerSaid(rank=rank, message=message))

    def _feed(self, event: api.AnyEvent) -> None:
        for action in self.controller.handle(event, self.now):
            if isinstance(action, api.Log):
                self._note(action.entry)
            elif isinstance(action, api.Order) and isinstance(action.order, m.Probe):
                self.orders.append((action.ranks, action.order))
            elif isinstance(action, api.End):
                raise RuntimeError(f"the simulated job ended: {action.reason}")

    def _note(self, entry: AnyEntry) -> None:
        at = self.controller.job.record.committed - 1
        if isinstance(entry, FailureFound | FailureEnded) or (isinstance(entry, Suspected) and entry.kind == "slow"):
            self.played.told.append(Told(at, entry))

    def _is_due(self, latest: int) -> bool:
        """Whether a suspicion has ended in the 60 iterations before `latest`, or it is that late."""
        return self.at >= latest or any(
            isinstance(one.entry, Suspected) and one.entry.cleared and one.at > latest - 60 for one in self.played.told
        )
