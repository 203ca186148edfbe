"""What jobs of many ranks cost their controller, in bytecodes: no machine is too slow for these tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType
from typing import Any

import msgspec
import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import AnyEntry, ProbesTaken
from resihp.settings import Settings
from tests.resihp.controller.direct import outcome

GPUS = 8
MODEL = ModelSpec(layers=64, hidden=8192, heads=64, kv_groups=8, ffn_hidden=28672, vocab=128_000, sequence=8192)


def work(call: Callable[[], object]) -> int:
    """Bytecodes that a call executes."""
    executed = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return executed


class Large:
    """A job of many nodes with TP8 PP8, event by event; what an event in the middle of many costs is counted."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.names = tuple(f"n{i + 1}" for i in range(nodes))
        self.ranks = range(nodes * GPUS)
        settings = Settings(
            job="large",
            nodes=nodes,
            node_names=self.names,
            gpus_per_node=GPUS,
            tp=8,
            pp=8,
            plans_ahead=False,
            search_s=0.0,
        )
        self.controller = Controller(settings)
        self.entries: list[AnyEntry] = []
        self.orders: list[m.WorkerOrder] = []
        self.costs: dict[str, int] = {}
        self.now = 0.0

    def feed(self, event: api.AnyEvent) -> None:
        self.now += 1e-5
        for action in self.controller.handle(event, self.now):
            if isinstance(action, api.Log):
                self.entries.append(action.entry)
            elif isinstance(action, api.Order):
                self.orders.append(action.order)

    def all(self, what: str, events: Iterable[api.AnyEvent]) -> None:
        """Feed these; the one in the middle is counted."""
        given = list(events)
        for i, event in enumerate(given):
            if i == len(given) // 2:
                self.costs[what] = work(lambda event=event: self.feed(event))  # type: ignore[misc]
            else:
                self.feed(event)

    def say(self, what: str, answer: Callable[[int], m.WorkerMessage], ranks: Iterable[int] | None = None) -> None:
        told = self.ranks if ranks is None else ranks
        self.all(what, (api.WorkerSaid(rank=rank, message=answer(rank)) for rank in told))

    def last(self, kind: type) -> Any:
        return next(each for each in reversed(self.orders) if isinstance(each, kind))

    def gather(self) -> None:
        self.all(
            "join",
            (
                api.AgentJoined(node=name, host=name, devices=GPUS, hardware="H", inventory=m.Inventory())
                for name in self.names
            ),
        )
        self.all(
            "spawned",
            (
                api.WorkerSpawned(rank=rank, node=self.names[rank // GPUS], device=rank % GPUS, pid=rank + 2)
                for rank in self.ranks
            ),
        )
        declare = m.Declare(
            model=MODEL, micro_batches=self.nodes, iterations=1000, resume_from=0, fingerprint="the same"
        )
        self.say("declared", lambda rank: declare)

    def begin(self) -> None:
        self.gather()
        self.say("probed", self.probed)
        self.agree()

    def probed(self, rank: int) -> m.Probed:
        near = tuple(m.Transfer(peer=(rank + side) % len(self.ranks), seconds=0.001) for side in (1, -1))
        speed = m.Speed(flops=4e14 + rank, memory_bytes=2e12, hardware="a device of some maker")
        return m.Probed(probe=1, speed=speed, transfers=near, seconds=1.0)

    def agree(self) -> None:
        plan: Plan = self.last(m.Propose).plan
        ranks = plan.layout.ranks
        self.say("confirmed", lambda rank: m.Confirm(epoch=plan.epoch, digest=plan.digest), ranks)
        self.say("ready", lambda rank: m.Ready(epoch=plan.epoch, groups_s=1.0, state_s=1.0), ranks)

    def train(self, iteration: int) -> None:
        report = m.Stepped(
            epoch=self.controller.job.epoch, outcome=outcome(iteration, loss=1.0), seconds=9.0, compute_s=8.0
        )
        self.say("stepped", lambda rank: report, self.last(m.Propose).plan.layout.active)

    def beat(self, primitives: int) -> None:
        progress = m.Progress(epoch=1, iteration=1, primitives=primitives, activity="compute")
        self.all(
            "beat",
            (
                api.AgentBeat(
                    node=name,
                    beat=m.Beat(
                        workers=tuple(
                            m.WorkerBeat(rank=n * GPUS + i, age_s=0.3, state="S", progress=progress)
                            for i in range(GPUS)
                        )
                    ),
                )
                for n, name in enumerate(self.names)
            ),
        )

    def lose_a_node(self) -> None:
        lost = range(len(self.ranks) - GPUS, len(self.ranks))
        self.feed(api.AgentLost(node=self.names[-1], reason="gone"))
        parked = m.Parked(
            epoch=self.controller.job.epoch, holds=(1,), stepped=1, outcome=outcome(1, loss=1.0), ready=False
        )
        self.say("parked", lambda rank: parked, [rank for rank in self.ranks if rank not in lost])
        self.agree()


@cache
def trained(nodes: int) -> Large:
    """From the start to an iteration after a node was lost."""
    job = Large(nodes)
    job.begin()
    job.beat(1)
    job.beat(2)
    job.train(1)
    job.lose_a_node()
    job.train(2)
    job.all("tick", [api.Tick()] * 3)
    assert job.controller.job.stage == "running"
    return job


@pytest.mark.parametrize(
    "what", ["join", "spawned", "declared", "probed", "confirmed", "ready", "stepped", "beat", "parked"]
)
def test_what_one_event_costs_does_not_depend_on_the_number_of_ranks(what: str) -> None:
    small, large = trained(16).costs[what], trained(64).costs[what]
    assert large <= 1.3 * small, f"{small} bytecodes at 128 ranks, {large} at 512"


def test_a_tick_looks_at_each_node_and_asks_no_rank_how_it_is() -> None:
    """Four times a second: what beats said was looked at when they came."""
    cost, ranks = trained(64).costs["tick"], 64 * GPUS
    assert cost <= 15 * ranks, f"{cost / ranks:.0f} bytecodes a rank"


def test_no_entry_of_the_journal_is_too_large_for_a_frame_at_16384_ranks() -> None:
    """Copies of the journal travel in frames of 4 MB, some records together."""
    job = Large(2048)
    job.begin()
    job.train(1)
    sizes: dict[str, int] = {}
    for entry in job.entries:
        name = type(entry).__name__
        sizes[name] = max(sizes.get(name, 0), len(msgspec.msgpack.encode(entry)))
    assert {"WorkersOrdered", "ProbesTaken", "PlanDecided", "ModelDeclared", "PlanInEffect"} <= sizes.keys()
    assert max(sizes.values()) <= 1 << 20, sizes
    taken = [entry for entry in job.entries if isinstance(entry, ProbesTaken)]
    assert sum(len(entry.devices) for entry in taken) == len(job.ranks)
    assert sum(len(entry.links) for entry in taken) == len(job.ranks)
    assert len(job.controller.job.record.link_seconds) == len(job.ranks)
    assert len(job.controller.job.record.reference) == len(job.ranks)
