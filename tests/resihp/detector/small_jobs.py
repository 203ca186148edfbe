"""Observations of jobs of any layout, with noise and slow-downs at will, as workers would report them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from resihp.detector.observation import Floats, Observation, RankTimes
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.compiled import PRIMITIVE_KINDS, compile_orders
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Orders

MODEL = ModelSpec(layers=8, hidden=4096, heads=32, kv_groups=32, ffn_hidden=16384, vocab=32000, sequence=8192)
LAW = {"F": (0.002, 6e-6, 4e-10), "B": (0.003, 12e-6, 9e-10), "W": (0.001, 6e-6, 0.0)}
TRANSFER_S = 0.004

Slower = Callable[[int, int], float]
"""By rank and iteration: how many times as long its own work takes."""
SlowerLink = Callable[[int, int, int], float]
"""By sender, receiver and iteration: how many times as long a transfer takes."""


def plan_of(layout: Layout, *, micro_batches: int = 4, epoch: int = 1, schedule: str = "1f1b") -> tuple[Plan, Orders]:
    """`micro_batches` for each replica."""
    replicas = len(layout.replicas)
    plan = Plan(epoch=epoch, layout=layout, assignment=spread(micro_batches * replicas, replicas), schedule=schedule)
    return plan, orders_of(plan)


def uniform(tp: int, pp: int, dp: int, *, standby: tuple[int, ...] = ()) -> Layout:
    return Layout.uniform(tp=tp, pp=pp, dp=dp, layers=MODEL.layers, standby=standby)


def _same(*_: int) -> float:
    return 1.0


def observations(
    plan: Plan,
    orders: Orders,
    iterations: range,
    *,
    seed: int = 0,
    slower: Slower = _same,
    slower_link: SlowerLink = _same,
    everybody: Callable[[int], float] = _same,
    chunk_noise: float = 0.015,
    iteration_noise: float = 0.03,
    apart: bool = True,
    longer: Callable[[int], float] = _same,
) -> Iterator[Observation]:
    """`apart`: whether own work of ranks of one group is measured apart; else all seem as slow as the slowest.
    `longer`: by iteration, how many times as many tokens a micro-batch has."""
    rng = np.random.default_rng([seed, iterations.start])
    compiled = compile_orders(plan, orders)
    layers = {
        i: sum(last - first + 1 for first, last in [plan.layout.replicas[s.replica].stages[s.stage].chunks[s.chunk]])
        for i, s in enumerate(compiled.stops)
    }
    laws = np.array([LAW[PRIMITIVE_KINDS[kind]] for kind in compiled.kind])
    laws *= np.array([layers[stop] for stop in compiled.stop.tolist()])[:, None]
    source, target = compiled.edges
    factor = 0.0
    for i in iterations:
        factor = 0.5 * factor + iteration_noise * math.sqrt(0.75) * float(rng.standard_normal())
        common = math.exp(factor) * everybody(i)
        tokens = longer(i) * rng.uniform(6000.0, 8192.0, compiled.micro_batches)
        squares = tokens**2 * rng.uniform(0.1, 0.9, compiled.micro_batches)
        m = compiled.micro_batch
        healthy = common * (laws[:, 0] + laws[:, 1] * tokens[m] + laws[:, 2] * squares[m])
        own: dict[int, Floats] = {}
        longest = np.zeros(compiled.size)
        for d, s in compiled.lanes:
            slots = compiled.slots(d, s)
            for rank in plan.layout.replicas[d].stages[s].ranks:
                noise = np.exp(chunk_noise * rng.standard_normal(slots.size))
                own[rank] = healthy[slots] * noise * slower(rank, i)
                longest[slots] = np.maximum(longest[slots], own[rank])
        pairs = [
            _ends(plan, compiled.replica[e], compiled.stage[e], compiled.replica[f], compiled.stage[f])
            for e, f in zip(source.tolist(), target.tolist(), strict=True)
        ]
        arrivals = [
            {
                receiver: TRANSFER_S
                * common
                * math.exp(0.05 * rng.standard_normal())
                * slower_link(sender, receiver, i)
                for sender, receiver in ends
            }
            for ends in pairs
        ]
        _, ends = compiled.play(longest, np.array([max(one.values()) for one in arrivals]))
        before = np.append(ends, 0.0)[compiled.previous]
        edge = {slot: e for e, slot in enumerate(target.tolist())}
        times = {}
        seconds = float(ends.max()) + 0.05 * common
        for d, s in compiled.lanes:
            slots = compiled.slots(d, s)
            for rank in plan.layout.replicas[d].stages[s].ranks:
                starts = before[slots].copy()
                for at, slot in enumerate(slots.tolist()):
                    if slot in edge and rank in arrivals[edge[slot]]:
                        arrival = ends[source[edge[slot]]] + arrivals[edge[slot]][rank]
                        starts[at] = max(starts[at], arrival)
                compute = own[rank] if apart else longest[slots]
                chunks = np.stack([starts, ends[slots] - starts, compute, tokens[m[slots]], squares[m[slots]]])
                times[rank] = RankTimes(rank=rank, seconds=seconds, chunks=chunks, reduced=seconds)
        yield Observation(iteration=i, epoch=plan.epoch, seconds=seconds, times=times)


def _ends(plan: Plan, d: int, s: int, e: int, r: int) -> list[tuple[int, int]]:
    senders = plan.layout.replicas[d].stages[s].ranks
    receivers = plan.layout.replicas[e].stages[r].ranks
    wide = max(len(senders), len(receivers))
    return [(senders[c * len(senders) // wide], receivers[c * len(receivers) // wide]) for c in range(wide)]
