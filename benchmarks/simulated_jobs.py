"""Simulated jobs of known truth: real document lengths, noise, at most one failure. What detectors are measured with.

    python benchmarks/simulated_jobs.py [--jobs 10] [--iterations 600]

prints what it generates, and how fast. Others call `simulate`.

**Workload.** Documents have the lengths of source files (`shared/data/source_file_bytes_quantiles.csv` beside the
repository; log-linear between quantiles, 3.3 bytes a token). `resihp.datasets.packing` cuts and packs them into
micro-batches; a job draws its micro-batches from a pool of those.

**Truth.** A chunk takes c + alpha N + beta S seconds (Eq. 1), coefficients from the FLOPs of a transformer whose width,
vocabulary and kernel overhead differ from job to job: with 8K to 32K tokens attention is 5 to 40 % of a layer. First
and last stage also hold embedding and head. B of a schedule without W does the work of both.

**Noise.** 1.5 % for each chunk on each rank, lognormal; times an AR(1) factor of the iteration (3 %, rho 0.5) that all
share: chunks, transfers, synchronisation and step.

**Timeline.** Eq. 2 (`resihp.pipeline.compiled`). Ranks of a tensor-parallel group end a chunk together, with the
slowest; `compute` is each rank's own. Rank t of a stage receives from rank t of the other stage, at its own time.
The gradient synchronisation begins when the last replica has come; then everybody steps.

**Other worlds.** `workload_of` and `disturb` change what is drawn, before it is played (`disturbances`, `worlds`).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from resihp.datasets.packing import cut, pack
from resihp.detector.observation import Floats, Observation, RankTimes
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.compiled import PRIMITIVE_KINDS, CompiledOrders, compile_orders
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Orders

QUANTILES = Path(__file__).resolve().parents[2] / "shared" / "data" / "source_file_bytes_quantiles.csv"
BYTES_PER_TOKEN = 3.3
POOL = 4096
"""Micro-batches of each budget that jobs draw from."""

BUDGETS = (8192, 16384, 32768)
SLOWDOWNS = (0.05, 0.10, 0.20, 0.35, 0.55, 0.70)
"""By how much a slow device's speed is lower."""


class NoLengths(Exception):
    """The file of document lengths is not there."""


@dataclass(frozen=True)
class Setting:
    """What a job trains, and where."""

    budget: int = 8192
    """Tokens of a micro-batch, at most."""
    micro_batches: int = 4
    """Of each replica."""
    schedule: str = "1f1b"
    tp: int = 2
    pp: int = 2
    dp: int = 2
    layers: int = 4
    """Of each stage."""
    chunk_noise: float = 0.015
    iteration_noise: float = 0.03
    correlation: float = 0.5
    """Of the iterations' factors, from one to the next."""


@dataclass(frozen=True)
class Failure:
    """One persistent fail-slow, from iteration `onset` to before `until`."""

    kind: Literal["device", "link", "everybody"]
    speed: float
    """What is left of it: 0.8 for a device that is 20 % slower in speed. A link's transfers last longer by what a
    device of this speed would add to a mean forward chunk."""
    onset: int
    until: int | None = None
    rank: int | None = None
    link: tuple[int, int] | None = None
    """(sender, receiver)."""


@dataclass(eq=False)
class Timeline:
    """What is about to be played, I iterations of it; `disturb` changes it in place. Arrays are (I, ...), seconds."""

    plan: Plan
    compiled: CompiledOrders
    forward_s: float
    """Of a mean forward chunk."""
    factor: Floats
    """(I,): what noise all share."""
    compute: Floats
    """(I, V, T)."""
    transfers: Floats
    """(I, E, T)."""
    collectives: Floats
    """(I, V): how long a slot's tensor-parallel collectives take, beyond waiting for its slowest rank; 0 at first."""
    late: Floats
    """(I, V): how long a slot waits for what is nobody's work, before it begins; 0 at first."""
    sums: Floats
    """(I, stages): the sum of gradients, once the last replica has come."""
    beside: Floats
    """(I,): what comes after that."""
    skew: Floats
    """(I, ranks): how much later than others a rank begins the iteration, which only its clock shows; 0 at first."""
    resolution_s: float = 0.0
    """Of the ranks' clocks."""

    def ended(self) -> tuple[Floats, Floats, Floats]:
        """(I, V), (I, stages), (I,): when slots are done, gradients summed, the iteration over."""
        longest = self.compute.max(axis=-1) + self.collectives + self.late
        _, ends = self.compiled.play(longest, self.transfers.max(axis=-1))
        reduced = np.zeros(self.sums.shape)
        for (_, s), where in self.compiled.lanes.items():
            last = ends[:, self.compiled.in_order[where][-1]]
            reduced[:, s] = np.maximum(reduced[:, s], last)
        reduced += self.sums
        return ends, reduced, reduced.max(axis=-1) + self.beside

    def reported(self, ends: Floats) -> tuple[Floats, Floats, Floats]:
        """(I, V, T): starts, spans and compute as clocks show them, given when slots end."""
        source, target = self.compiled.edges
        before = np.concatenate([ends, np.zeros((len(ends), 1))], axis=1)[:, self.compiled.previous]
        starts = np.repeat(before[..., None], self.compute.shape[-1], axis=-1)
        starts[:, target] = np.maximum(starts[:, target], ends[:, source, None] + self.transfers)
        starts += self.late[..., None]
        spans, compute = ends[..., None] - starts, self.compute
        if self.skew.any():
            for (d, s), where in self.compiled.lanes.items():
                ranks = list(self.plan.layout.replicas[d].stages[s].ranks)
                starts[:, self.compiled.in_order[where]] -= self.skew[:, None, ranks]
            starts = np.maximum(starts, 0.0)
        if self.resolution_s:
            begun, done, worked = (
                np.floor(one / self.resolution_s) * self.resolution_s
                for one in (starts, starts + spans, starts + compute)
            )
            starts, spans, compute = begun, done - begun, worked - begun
        return starts, spans, compute


@dataclass(frozen=True, eq=False)
class Job:
    """A job of I iterations over V slots (those of `compiled`) on groups of T ranks; arrays are (I, ...), seconds."""

    setting: Setting
    plan: Plan
    model: ModelSpec
    orders: Orders
    compiled: CompiledOrders
    failure: Failure | None
    coefficients: Floats
    """(V, 3): true c, alpha, beta of each slot."""
    transfer_s: float
    """True seconds of a transfer between stages, of the gradient synchronisation, and of the optimizer step."""
    synchronisation_s: float
    step_s: float
    tokens: Floats
    """(I, micro-batches of the global batch): N, and S below."""
    squares: Floats
    factor: Floats
    """(I,): what noise all share."""
    starts: Floats
    """(I, V, T), as the three below, as a RankTimes has them."""
    spans: Floats
    compute: Floats
    reduced: Floats
    """(I, stages), equal for all replicas."""
    seconds: Floats
    """(I,): what the iteration took."""
    healthy: Floats
    """(I,): what it would have taken with the same noise and no failure."""

    @property
    def iterations(self) -> int:
        return len(self.seconds)

    @property
    def true_chunks(self) -> Floats:
        """(I, V): healthy seconds of each slot without noise, what an oracle knows."""
        return true_chunks(self.coefficients, self.tokens, self.squares, self.compiled)

    def priced(self, chunks: Floats) -> Floats:
        """(I,): Eq. 2 over seconds of chunks (I, V), with the true transfers, synchronisation and step."""
        return self.compiled.iteration_seconds(
            chunks, self.transfer_s, synchronisation_s=self.synchronisation_s, optimizer_s=self.step_s
        )

    @property
    def failing(self) -> npt.NDArray[np.bool_]:
        """(I,): whether the failure is there."""
        at = np.arange(self.iterations)
        if self.failure is None:
            return np.zeros(self.iterations, dtype=bool)
        until = self.iterations if self.failure.until is None else self.failure.until
        return (at >= self.failure.onset) & (at < until)

    def rank(self, replica: int, stage: int, t: int) -> int:
        return self.plan.layout.replicas[replica].stages[stage].ranks[t]

    def observations(self) -> Iterator[Observation]:
        """One for each iteration, counted from 0, as workers would have reported it."""
        rows: list[tuple[int, int, Floats]] = []
        for d, replica in enumerate(self.plan.layout.replicas):
            for s, stage in enumerate(replica.stages):
                slots = self.compiled.slots(d, s)
                m = self.compiled.micro_batch[slots]
                tokens, squares = self.tokens[:, m], self.squares[:, m]
                for t, rank in enumerate(stage.ranks):
                    own = [array[:, slots, t] for array in (self.starts, self.spans, self.compute)]
                    rows.append((rank, s, np.stack([*own, tokens, squares], axis=1)))
        for i, (seconds, reduced) in enumerate(zip(self.seconds.tolist(), self.reduced.tolist(), strict=True)):
            yield Observation(
                iteration=i,
                epoch=self.plan.epoch,
                seconds=seconds,
                times={
                    rank: RankTimes(rank=rank, seconds=seconds, chunks=chunks[i], reduced=reduced[s])
                    for rank, s, chunks in rows
                },
            )


def simulate(
    setting: Setting,
    seed: int,
    iterations: int = 600,
    failure: Failure | Literal["device", "link", "everybody"] | None = None,
    *,
    slowdown: float = 0.2,
    earliest: int = 60,
    workload_of: Callable[[np.random.Generator, Floats, Floats], tuple[Floats, Floats]] | None = None,
    disturb: Callable[[Timeline], None] | None = None,
) -> Job:
    """A job; equal arguments give an equal one. A failure named by its kind only strikes at random.

    It strikes from `earliest` on, in the first two thirds of the job, and stays; the speed is lower by `slowdown`.
    `workload_of` makes other N and S (I, micro-batches) of those that were drawn, with a generator of its own.
    Raises NoLengths where the document lengths are missing.
    """
    rng = np.random.default_rng(seed)
    plan, model, orders, compiled = _built(setting)
    micro_batches = setting.micro_batches * setting.dp
    tokens, squares = (pool[rng.integers(0, POOL, (iterations, micro_batches))] for pool in workload(setting.budget))
    if workload_of is not None:
        tokens, squares = workload_of(np.random.default_rng([seed, 1]), tokens, squares)
    coefficients = _coefficients(setting, compiled, rng)
    chunks = true_chunks(coefficients, tokens, squares, compiled)
    forward = float(chunks[:, compiled.kind == PRIMITIVE_KINDS.index("F")].mean())
    transfer_s, synchronisation_s, step_s = forward * rng.uniform((0.01, 0.2, 0.05), (0.05, 0.6, 0.3))

    if isinstance(failure, str):
        failure = _drawn(failure, setting, plan, iterations, slowdown, earliest, rng)
    if failure is not None and failure.onset >= iterations:
        failure = None

    factor = autoregressive(rng, iterations, setting.iteration_noise, setting.correlation)
    shape = (iterations, compiled.size, setting.tp)
    compute = chunks[..., None] * factor[:, None, None] * np.exp(setting.chunk_noise * rng.standard_normal(shape))
    source, _ = compiled.edges
    transfers = (
        transfer_s * factor[:, None, None] * np.exp(0.05 * rng.standard_normal((iterations, len(source), setting.tp)))
    )

    ranks = len(plan.layout.active)
    line = Timeline(
        plan=plan,
        compiled=compiled,
        forward_s=forward,
        factor=factor,
        compute=compute,
        transfers=transfers,
        collectives=np.zeros(shape[:2]),
        late=np.zeros(shape[:2]),
        sums=np.repeat((synchronisation_s * factor)[:, None], setting.pp, axis=1),
        beside=step_s * factor,
        skew=np.zeros((iterations, ranks)),
    )
    ends, reduced, seconds = line.ended()
    healthy = seconds
    if disturb is not None:
        disturb(line)
    if failure is not None:
        _fail(line, failure, setting)
    if disturb is not None or failure is not None:
        ends, reduced, seconds = line.ended()
    starts, spans, compute = line.reported(ends)
    return Job(
        setting=setting,
        plan=plan,
        model=model,
        orders=orders,
        compiled=compiled,
        failure=failure,
        coefficients=coefficients,
        transfer_s=float(transfer_s),
        synchronisation_s=float(synchronisation_s),
        step_s=float(step_s),
        tokens=tokens,
        squares=squares,
        factor=factor,
        starts=starts,
        spans=spans,
        compute=compute,
        reduced=reduced,
        seconds=seconds,
        healthy=healthy,
    )


def _fail(line: Timeline, failure: Failure, setting: Setting) -> None:
    at, compiled = slice(failure.onset, failure.until), line.compiled
    if failure.kind == "everybody":
        line.compute[at] /= failure.speed
    elif failure.kind == "device":
        d, s, t = _place(line.plan, failure.rank)
        slow = compiled.slots(d, s)
        line.compute[at, slow, t] = line.compute[at, slow, t] / failure.speed
    else:
        assert failure.link is not None, "a failing link has two ends"
        (d, s, t), (e, r, u) = (_place(line.plan, rank) for rank in failure.link)
        if (d, t, abs(r - s)) != (e, u, 1):
            raise ValueError(f"ranks {failure.link[0]} and {failure.link[1]} exchange nothing in the simulated job")
        source, target = compiled.edges
        here = (compiled.replica[source] == d) & (compiled.stage[source] == s) & (compiled.stage[target] == r)
        added = (1.0 / failure.speed - 1.0) * line.forward_s
        line.transfers[at, here, t] += added * line.factor[at, None]


def true_chunks(coefficients: Floats, tokens: Floats, squares: Floats, compiled: CompiledOrders) -> Floats:
    """(I, V): Eq. 1 with the coefficients (V, 3) of each slot, for N and S of shape (I, micro-batches)."""
    m = compiled.micro_batch
    return coefficients[:, 0] + coefficients[:, 1] * tokens[:, m] + coefficients[:, 2] * squares[:, m]


def autoregressive(rng: np.random.Generator, count: int, deviation: float, correlation: float) -> Floats:
    """exp of a stationary AR(1) process of that standard deviation: (count,), around 1."""
    innovations = rng.standard_normal(count) * deviation * math.sqrt(1.0 - correlation**2)
    innovations[0] = rng.standard_normal() * deviation
    for i in range(1, count):
        innovations[i] += correlation * innovations[i - 1]
    return np.exp(innovations)


@functools.lru_cache(maxsize=8)
def workload(budget: int) -> tuple[Floats, Floats]:
    """N and S of POOL micro-batches of at most `budget` tokens, packed from documents of the real lengths."""
    rng = np.random.default_rng(budget)
    micro_batches = pack(cut(_documents(rng), budget), budget)
    lengths = [np.array([piece.length for piece in next(micro_batches)], dtype=np.float64) for _ in range(POOL)]
    return np.array([own.sum() for own in lengths]), np.array([(own**2).sum() for own in lengths])


def _documents(rng: np.random.Generator) -> Iterator[int]:
    """Lengths in tokens, without end."""
    try:
        with QUANTILES.open() as file:
            rows = [(float(row["percentile"]) / 100.0, float(row["bytes"])) for row in csv.DictReader(file)]
    except FileNotFoundError:
        raise NoLengths(f"document lengths: no file {QUANTILES}; nothing can be simulated without it") from None
    at, size = np.array(rows).T
    while True:
        length = np.exp(np.interp(rng.random(10_000), at, np.log(size))) / BYTES_PER_TOKEN
        yield from np.maximum(1, length).astype(int).tolist()


@functools.lru_cache(maxsize=64)
def _built(setting: Setting) -> tuple[Plan, ModelSpec, Orders, CompiledOrders]:
    model = ModelSpec(
        layers=setting.layers * setting.pp,
        hidden=4096,
        heads=32,
        kv_groups=32,
        ffn_hidden=16384,
        vocab=32000,
        sequence=setting.budget,
    )
    plan = Plan(
        epoch=1,
        layout=Layout.uniform(tp=setting.tp, pp=setting.pp, dp=setting.dp, layers=model.layers),
        assignment=spread(setting.micro_batches * setting.dp, setting.dp),
        schedule=setting.schedule,
    )
    orders = orders_of(plan)
    return plan, model, orders, compile_orders(plan, orders)


def _coefficients(setting: Setting, compiled: CompiledOrders, rng: np.random.Generator) -> Floats:
    """(V, 3): c, alpha, beta, from FLOPs. A layer's forward: 24 h^2 N for matrices, 2 h S for causal attention."""
    hidden = rng.choice([2560.0, 4096.0, 5120.0])
    vocab = rng.choice([32_000.0, 64_000.0])
    flops = 1.5e14 * setting.tp
    attention_flops = flops * rng.uniform(0.6, 1.0)  # attention kernels are further from the peak
    overhead_s = rng.uniform(1e-4, 5e-4)  # launches, norms: for each layer
    split = "W" in {PRIMITIVE_KINDS[kind] for kind in np.unique(compiled.kind)}
    last = setting.pp - 1
    table: dict[tuple[str, int], tuple[float, float, float]] = {}
    for s in range(setting.pp):
        matrices = (setting.layers * 24.0 * hidden**2 + (s == last) * 2.0 * hidden * vocab) / flops
        lookup = (s == 0) * hidden * 400.0 / flops  # bound by memory, not by FLOPs
        attention = setting.layers * 2.0 * hidden / attention_flops
        c = setting.layers * overhead_s
        table["F", s] = (c, matrices + lookup, attention)
        if split:
            table["B", s] = (c, matrices, 2.5 * attention)
            table["W", s] = (0.5 * c, matrices + lookup, 0.0)
        else:
            table["B", s] = (1.5 * c, 2.0 * matrices + lookup, 2.5 * attention)
    slots = zip(compiled.kind.tolist(), compiled.stage.tolist(), strict=True)
    return np.array([table[PRIMITIVE_KINDS[kind], s] for kind, s in slots])


def _drawn(
    kind: Literal["device", "link", "everybody"],
    setting: Setting,
    plan: Plan,
    iterations: int,
    slowdown: float,
    earliest: int,
    rng: np.random.Generator,
) -> Failure:
    onset = int(rng.integers(earliest, max(earliest + 1, iterations * 2 // 3)))
    failure = Failure(kind=kind, speed=1.0 - slowdown, onset=onset)
    d, t = int(rng.integers(setting.dp)), int(rng.integers(setting.tp))
    stages = plan.layout.replicas[d].stages
    if kind == "device":
        return dataclasses.replace(failure, rank=stages[int(rng.integers(setting.pp))].ranks[t])
    if kind == "link":
        s = int(rng.integers(setting.pp - 1))
        ends = (stages[s].ranks[t], stages[s + 1].ranks[t])
        return dataclasses.replace(failure, link=ends if rng.random() < 0.5 else ends[::-1])
    return failure


def _place(plan: Plan, rank: int | None) -> tuple[int, int, int]:
    place = None if rank is None else plan.layout.place(rank)
    if place is None:
        raise ValueError(f"rank {rank} has no work in the simulated job")
    return place.replica, place.stage, place.t


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=600)
    arguments = parser.parse_args()
    try:
        for budget in BUDGETS:
            tokens, squares = workload(budget)
            print(
                f"{budget} tokens: filled to {tokens.mean() / budget:.3f}, sd of N {tokens.std() / tokens.mean():.3f}, "
                f"S/N {squares.sum() / tokens.sum():.0f} tokens, sd of S {squares.std() / squares.mean():.2f}"
            )
    except NoLengths as error:
        sys.exit(str(error))
    for budget in BUDGETS:
        for pp, schedule in ((2, "1f1b"), (4, "zero-bubble")):
            setting = Setting(budget=budget, micro_batches=8, pp=pp, schedule=schedule)
            began = time.perf_counter()
            jobs = [simulate(setting, seed, arguments.iterations, "device") for seed in range(arguments.jobs)]
            generated = time.perf_counter()
            count = sum(1 for job in jobs for _ in job.observations())
            observed = time.perf_counter()
            spread_of = np.mean([job.healthy.std() / job.healthy.mean() for job in jobs])
            shares = [
                float(np.mean(job.coefficients[:, 2] * job.squares.mean() / job.true_chunks.mean(axis=0)))
                for job in jobs
            ]
            print(
                f"{budget} tokens, PP{pp}, {schedule}: healthy iterations {jobs[0].healthy.mean():.2f} s, vary by "
                f"{spread_of:.1%}; attention {min(shares):.0%} to {max(shares):.0%}; "
                f"{(generated - began) / len(jobs) * 1e3:.0f} ms a job, "
                f"{(observed - generated) / count * 1e6:.0f} us an observation"
            )


if __name__ == "__main__":
    main()
