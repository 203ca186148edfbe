"""What befalls simulated jobs: slow devices, collectives, sums of gradients and data, drifts, clocks, other documents.

A `Scene` is one job about to be played. Each function here changes its timeline, what its probes will show, and what is
true of it: `expected` is what a detector has to tell. Called by `worlds`; the times come from `simulated_jobs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.simulated_jobs import POOL, Timeline, autoregressive, workload
from resihp.detector.observation import Floats
from resihp.record.journal import Component

COLLECTIVE = 0.08
"""Of a chunk's time, its tensor-parallel collectives where all is well."""
COLLECTIVE_NOISE = 0.05
PERIODS = (120, 480)
"""Iterations that a device takes to become warmer and colder again."""


@dataclass(frozen=True)
class Expected:
    """Something that is to be told: this component, of these ranks (any, for a job), slow from iteration `since`."""

    component: Component
    ranks: frozenset[int]
    since: int
    speed: float | None = None
    """Where it has to be told anew, because it is not what it was."""


@dataclass
class Scene:
    """A job about to be played. Iterations count from 0; `onset` is the one that something strikes in, if it does."""

    line: Timeline
    rng: np.random.Generator
    onset: int
    devices: int
    """Of each node."""
    probes: Floats = field(init=False)
    """(I, ranks): time over healthy as a probe of the device shows it."""
    links: dict[tuple[int, int], Floats] = field(default_factory=dict)
    """The same of links that are slow, (I,)."""
    expected: list[Expected] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.probes = np.ones((self.iterations, self.ranks))
        for where in self.line.compiled.lanes.values():
            slots = self.line.compiled.in_order[where]
            noise = self.rng.standard_normal((self.iterations, slots.size))
            own = self.line.compute[:, slots].mean(axis=-1)
            self.line.collectives[:, slots] = COLLECTIVE * own * np.exp(COLLECTIVE_NOISE * noise)

    @property
    def iterations(self) -> int:
        return len(self.line.factor)

    @property
    def ranks(self) -> int:
        return len(self.line.plan.layout.active)

    def place(self, rank: int) -> tuple[int, int, int]:
        place = self.line.plan.layout.place(rank)
        assert place is not None
        return place.replica, place.stage, place.t

    def drawn(self) -> int:
        """Any rank."""
        return int(self.rng.integers(self.ranks))

    def after(self, since: int) -> Floats:
        """(I,): 1 from that iteration on, 0 before."""
        return (np.arange(self.iterations) >= since).astype(float)


# --- what is slow ---------------------------------------------------------------------------------------------------


def levels(scene: Scene, factors: Floats, *, probes: bool = True) -> None:
    """Every rank's own work takes `factors` (I, ranks) as long; `probes`: a probe shows it."""
    for rank in range(scene.ranks):
        d, s, t = scene.place(rank)
        scene.line.compute[:, scene.line.compiled.slots(d, s), t] *= factors[:, rank, None]
    if probes:
        scene.probes *= factors


def devices(scene: Scene, ranks: Iterable[int], by: float, *, probes: bool = True) -> None:
    """Devices slower `by` that share of their time, from the onset on."""
    slow = sorted(ranks)
    factors = np.ones((scene.iterations, scene.ranks))
    factors[:, slow] += by * scene.after(scene.onset)[:, None]
    levels(scene, factors, probes=probes)
    scene.expected += [Expected("device", frozenset([rank]), scene.onset) for rank in slow]


def nodes(scene: Scene, count: int, by: float) -> None:
    names = scene.rng.permutation(scene.ranks // scene.devices)[:count]
    devices(scene, [int(n) * scene.devices + i for n in names for i in range(scene.devices)], by)


def one_of_each_pair(scene: Scene, by: float) -> None:
    """Half the ranks: of each tensor-parallel group the first half."""
    groups = [stage.ranks for replica in scene.line.plan.layout.replicas for stage in replica.stages]
    devices(scene, [rank for ranks in groups for rank in ranks[: len(ranks) // 2]], by)


def group(scene: Scene, by: float) -> None:
    d, s, _ = scene.place(scene.drawn())
    devices(scene, scene.line.plan.layout.replicas[d].stages[s].ranks, by)


def worse(scene: Scene, speeds: tuple[float, float], after: int) -> None:
    """A device of the first speed, and so many iterations later of the second."""
    rank, later = scene.drawn(), scene.onset + after
    factors = np.ones((scene.iterations, scene.ranks))
    factors[scene.onset :, rank] = 1.0 / speeds[0]
    factors[later:, rank] = 1.0 / speeds[1]
    levels(scene, factors)
    scene.expected.append(Expected("device", frozenset([rank]), later, speeds[1]))


def flicker(scene: Scene, slow: int, of: int, factor: float) -> None:
    """A device that is slow in the first `slow` of every `of` iterations."""
    rank = scene.drawn()
    at = np.arange(scene.iterations)
    there = (at >= scene.onset) & ((at - scene.onset) % of < slow)
    factors = np.ones((scene.iterations, scene.ranks))
    factors[there, rank] = factor
    levels(scene, factors)
    scene.expected.append(Expected("device", frozenset([rank]), scene.onset))


def everybody(scene: Scene, by: float) -> None:
    factors = np.ones((scene.iterations, scene.ranks)) + by * scene.after(scene.onset)[:, None]
    levels(scene, factors)
    scene.expected.append(Expected("job", frozenset(), scene.onset))


def collectives(scene: Scene, factor: float) -> None:
    """The tensor-parallel collectives of one group."""
    d, s, _ = scene.place(scene.drawn())
    slots = scene.line.compiled.slots(d, s)
    scene.line.collectives[scene.onset :, slots] *= factor
    ranks = scene.line.plan.layout.replicas[d].stages[s].ranks
    scene.expected.append(Expected("collective", frozenset(ranks), scene.onset))


def sums(scene: Scene, factor: float) -> None:
    """The sums of gradients of one stage, over all its replicas."""
    _, s, _ = scene.place(scene.drawn())
    scene.line.sums[scene.onset :, s] *= factor
    ranks = {rank for replica in scene.line.plan.layout.replicas for rank in replica.stages[s].ranks}
    scene.expected.append(Expected("reduction", frozenset(ranks), scene.onset))


def late_data(scene: Scene, forwards: float) -> None:
    """One replica's first stage gets its first micro-batch late, by so many forwards."""
    d, _, _ = scene.place(scene.drawn())
    first = scene.line.compiled.slots(d, 0)[0]
    scene.line.late[scene.onset :, first] = forwards * scene.line.forward_s * scene.line.factor[scene.onset :]
    ranks = scene.line.plan.layout.replicas[d].stages[0].ranks
    scene.expected.append(Expected("data", frozenset(ranks), scene.onset))


def link(scene: Scene, forwards: float, speed: float) -> None:
    """Transfers over one link longer by that share of a forward; a probe finds it at `speed`."""
    d, _, t = scene.place(scene.drawn())
    s = int(scene.rng.integers(len(scene.line.plan.layout.replicas[d].stages) - 1))
    compiled = scene.line.compiled
    source, target = compiled.edges
    here = (compiled.replica[source] == d) & (compiled.stage[source] == s) & (compiled.stage[target] == s + 1)
    added = forwards * scene.line.forward_s * scene.line.factor[scene.onset :]
    scene.line.transfers[scene.onset :, here, t] += added[:, None]
    stages = scene.line.plan.layout.replicas[d].stages
    ends = (stages[s].ranks[t], stages[s + 1].ranks[t])
    scene.links[ends] = 1.0 + (1.0 / speed - 1.0) * scene.after(scene.onset)
    scene.expected.append(Expected("link", frozenset(ends), scene.onset))


def network(scene: Scene, forwards: float, suffering: float) -> None:
    """All transfers longer by so many forwards. A third of the ranks are slower by `suffering` meanwhile: no probe
    shows it, for it is what they suffer, no failure of their own."""
    added = forwards * scene.line.forward_s * scene.line.factor[scene.onset :]
    scene.line.transfers[scene.onset :] += added[:, None, None]
    factors = np.ones((scene.iterations, scene.ranks))
    factors[scene.onset :, sorted(scene.rng.permutation(scene.ranks)[: scene.ranks // 3])] += suffering
    levels(scene, factors, probes=False)
    scene.expected.append(Expected("job", frozenset(), scene.onset))


# --- what is healthy, and looks odd ---------------------------------------------------------------------------------


def thermal(scene: Scene, amplitude: float) -> None:
    """Devices become slower and faster by that, slowly, each in its own time."""
    period = scene.rng.uniform(*PERIODS, scene.ranks)
    phase = scene.rng.uniform(0.0, 2.0 * np.pi, scene.ranks)
    at = np.arange(scene.iterations)[:, None]
    levels(scene, 1.0 + amplitude * np.sin(2.0 * np.pi * at / period + phase))


def wandering(scene: Scene, deviation: float, correlation: float = 0.98) -> None:
    """Each rank's level is an AR(1) process of its own: its training's, or its host's; no probe shows it."""
    levels(scene, _drifts(scene, deviation, correlation), probes=False)


def _drifts(scene: Scene, deviation: float, correlation: float) -> Floats:
    each = [autoregressive(scene.rng, scene.iterations, deviation, correlation) for _ in range(scene.ranks)]
    return np.stack(each, axis=1)


def unlike(scene: Scene, deviation: float) -> None:
    """Devices that were never quite the same, from the first iteration on."""
    levels(scene, np.broadcast_to(np.exp(deviation * scene.rng.standard_normal(scene.ranks)), scene.probes.shape))


def heavy_tails(scene: Scene, deviation: float, stall: float) -> None:
    """Chunks' noise of Student's t with 3 degrees of freedom, and one in 2,000 stalls for `stall` times its time."""
    shape = scene.line.compute.shape
    noise = np.clip(deviation * scene.rng.standard_t(3, shape), -0.3, 1.0)
    scene.line.compute *= np.exp(noise) + stall * (scene.rng.random(shape) < 1 / 2000)


def checkpoints(scene: Scene, every: int, iterations: float) -> None:
    """One iteration in so many takes longer by so many usual ones, once gradients are summed."""
    usual = float(scene.line.ended()[-1].mean())
    scene.line.beside[every - 1 :: every] += iterations * usual


def timers(scene: Scene, resolution_s: float) -> None:
    scene.line.resolution_s = resolution_s


def skew(scene: Scene, deviation_s: float) -> None:
    """Ranks begin apart by so much: half of it anew in each iteration, half for tens of them."""
    drifts = np.log(_drifts(scene, 1.0, 0.95))
    scene.line.skew += deviation_s * np.sqrt(0.5) * (drifts + scene.rng.standard_normal(drifts.shape))


# --- other documents ------------------------------------------------------------------------------------------------

Workload = Callable[[np.random.Generator, Floats, Floats], tuple[Floats, Floats]]
"""N and S (I, micro-batches) from those that were drawn."""


@functools.lru_cache(maxsize=16)
def shorter(budget: int, share: float) -> tuple[Floats, Floats]:
    """N and S of POOL micro-batches of that budget, of documents cut to at most that share of it."""
    tokens, squares = workload(max(64, round(budget * share)))
    rng = np.random.default_rng(budget)
    picked = rng.integers(0, POOL, (POOL, round(1.0 / share)))
    return tokens[picked].sum(axis=1), squares[picked].sum(axis=1)


def doubled(
    rng: np.random.Generator, tokens: Floats, squares: Floats, onset: int, budget: int
) -> tuple[Floats, Floats]:
    """From the onset on, micro-batches of twice as many tokens."""
    return _from(onset, tokens, squares, workload(2 * budget), rng)


def mixed(_: np.random.Generator, tokens: Floats, squares: Floats, onset: int) -> tuple[Floats, Floats]:
    """From the onset on a third of S, at equal N."""
    squares = squares.copy()
    squares[onset:] /= 3.0
    return tokens, squares


def cut(
    rng: np.random.Generator, tokens: Floats, squares: Floats, onset: int, budget: int, share: float
) -> tuple[Floats, Floats]:
    """From the onset on documents of at most that share of a micro-batch."""
    return _from(onset, tokens, squares, shorter(budget, share), rng)


def _from(
    onset: int, tokens: Floats, squares: Floats, pool: tuple[Floats, Floats], rng: np.random.Generator
) -> tuple[Floats, Floats]:
    picked = rng.integers(0, POOL, tokens[onset:].shape)
    tokens, squares = tokens.copy(), squares.copy()
    tokens[onset:], squares[onset:] = (of[picked] for of in pool)
    return tokens, squares


def in_bins(rng: np.random.Generator, tokens: Floats, squares: Floats) -> tuple[Floats, Floats]:
    """Micro-batches of like lengths come together: iterations of short documents, iterations of long ones."""
    by_length = np.argsort(squares / tokens, axis=None)
    mixed_up = rng.permutation(by_length.reshape(tokens.shape))
    return tokens.reshape(-1)[mixed_up], squares.reshape(-1)[mixed_up]
