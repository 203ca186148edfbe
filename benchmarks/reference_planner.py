"""A planner to measure ours against: annealing of whole layouts with restarts, a program of its own.

It shares no search with `resihp.scheduler`: moves and times are compiled (`reference_moves`,
`reference_kernel`). It starts from the instant answer, from what is left of the layout in effect and from layouts drawn
at random. What it finds is made a plan, given orders by the product's refinement, held to be legal (layout, programs,
memory) and priced by the product's own `iteration_seconds`: what it reports is what the product would say of that plan.
One chunk a stage, groups within a node, of at most the degree that the job was started with.

    reference = ReferencePlanner(situation, seed=1, instant=plan)
    found = reference.search(seconds=30.0)     # of this process' own processor time
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.reference_kernel import BEST, NOW, Job, State, copy
from benchmarks.reference_moves import MOVES, WEIGHTS, anneal, settle
from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.parallelism.plan import Plan
from resihp.pipeline import checker
from resihp.scheduler.candidates import transition_obstacle
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Prices, iteration_seconds
from resihp.scheduler.layouts.labels import relabelled
from resihp.scheduler.orders import refinement
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.situation import Situation

MORE_STAGES = 4
"""Of a replica than the job was started with, at most."""
MORE_REPLICAS = 3
BUCKET_BYTES = 32 << 20
"""Of gradients that the executor sums at once."""
SEARCHED = 0.7
"""Part of the time for layouts; the rest is for orders of their own, for the fastest layouts first."""
HOPED = 1.06
"""How much longer than the best known a layout may take before it gets orders of its own."""
RUNS = 30
"""Annealings in the time, about."""
HEAT = (0.01, 0.03, 0.02, 0.06, 0.005)
SMOOTH = (0.5, 0.8, 0.2)

Pipes = list[list[tuple[tuple[int, ...], int]]]
"""Of each pipe its groups, by index of rank, and their layers; 0 where these are to be laid."""


class Found(msgspec.Struct, frozen=True):
    """The best plan; `plain_s`: before it got orders of its own. `model_off`: what the reference's own model said of
    it, relative to the product's, less 1. `won`: by move, how often it led to a best that is better than `bound`."""

    plan: Plan
    seconds: float
    plain_s: float
    start: str
    trials: int
    model_off: float
    won: dict[str, tuple[int, float]]


def legal_seconds(plan: Plan, situation: Situation) -> float:
    """Predicted time of a plan. Raises LayoutError for one that is none, or for which a device has no memory."""
    validate(plan.layout, situation.model)
    known = set(situation.available)
    if plan.layout.ranks != tuple(sorted(known)):
        raise LayoutError("not all live ranks, or dead ones, have a place")
    checker.check(plan)
    lacking = overfull(plan, situation) or transition_obstacle(situation, plan)
    if lacking is not None:
        raise LayoutError(lacking)
    return iteration_seconds(plan, situation)


class ReferencePlanner:
    def __init__(self, situation: Situation, *, seed: int = 0, instant: Plan | None = None) -> None:
        self._s, self._random = situation, random.Random(f"reference {seed}")
        self._ranks = [rank for rank in situation.available if situation.speeds.get(rank, 1.0) > 0.0]
        self.job = job_of(situation, self._ranks)
        most = min(situation.micro_batches, len(situation.base.replicas) + MORE_REPLICAS, len(self._ranks))
        self.state = _empty(most, self.job.most_stages, situation.micro_batches)
        self._starts: list[tuple[str, Pipes]] = []
        if instant is not None and not instant.layout.vacant:
            self._starts.append(("instant", self.pipes(instant.layout.replicas)))
        self._starts.append(("what is left", self._left()))
        self._layouts: dict[tuple[Replica, ...], tuple[float, tuple[int, ...], str]] = {}
        self._won = np.zeros((len(MOVES), 3))
        self._won[:, 2] = WEIGHTS
        self._trials = 0

    def search(self, seconds: float, *, bound: float = math.inf) -> Found | None:
        """The best plan that is found in so many seconds of processor time; None if there is none that is legal."""
        anneal(self.job, self._load(self._starts[-1][1]), 1, 1, 0.01, 0.5, 0.0, self._won.copy())  # compiles
        began = time.process_time()
        trials, run = 500, 0
        while (spent := time.process_time() - began) < SEARCHED * seconds:
            self._run(run, trials, bound)
            took = time.process_time() - began - spent
            left = SEARCHED * seconds - spent - took
            trials = int(max(500.0, trials / max(took, 1e-3) * min(seconds * SEARCHED / RUNS, left)))
            run += 1
        return self._refined(began + seconds)

    def _run(self, run: int, trials: int, bound: float) -> None:
        """One annealing: from each start once, then from the best, from random layouts and from starts in turn."""
        if run < len(self._starts):
            name, pipes = self._starts[run]
        elif run % 3 == 0 or not self._layouts:
            name, pipes = "random", self._drawn()
        elif run % 3 == 1:
            name, pipes = self._random.choice(self._starts)
        else:
            replicas = min(self._layouts, key=lambda one: self._layouts[one][0])
            name, pipes = (
                f"{self._layouts[replicas][2]}, again".replace(", again, again", ", again"),
                self.pipes(replicas),
            )
        state = self._load(pipes)
        seconds = anneal(
            self.job,
            state,
            self._random.randrange(2**31),
            trials,
            HEAT[run % len(HEAT)],
            SMOOTH[run % len(SMOOTH)],
            bound,
            self._won,
        )
        self._trials += trials
        if math.isfinite(seconds):
            replicas, share = self._read(BEST)
            if seconds < self._layouts.get(replicas, (math.inf,))[0]:
                self._layouts[replicas] = (float(seconds), share, name)

    def _refined(self, until: float) -> Found | None:
        """With orders of their own, the fastest first, as long as there is time."""
        best: Found | None = None
        prices = Prices(self._s)
        won = {name: (int(n), round(float(gain), 4)) for name, (n, gain, _) in zip(MOVES, self._won, strict=True)}
        ranked = sorted(self._layouts.items(), key=lambda item: item[1][0])
        for i, (replicas, (own_s, share, start)) in enumerate(ranked):
            if i and (time.process_time() > until or (best is not None and own_s > HOPED * best.seconds)):
                break
            try:
                plan, plain = self._priced(replicas, share)
                refined = refinement.refined(self._s, plan, plain, prices, thorough=True)
                seconds = legal_seconds(refined.plan, self._s)
            except LayoutError:
                continue
            plan, at = (refined.plan, seconds) if seconds < plain else (plan, plain)
            if best is None or at < best.seconds:
                best = Found(plan, at, plain, start, self._trials, own_s / plain - 1.0, won)
        return best

    def _priced(self, replicas: tuple[Replica, ...], share: tuple[int, ...]) -> tuple[Plan, float]:
        """A layout's plan; where there is no room on the way to it, that of ranks that receive less. Raises
        LayoutError."""
        plan = self._plan(replicas, share)
        try:
            return plan, legal_seconds(plan, self._s)
        except LayoutError:
            plan = self._plan(relabelled(replicas, self._s), share)
            return plan, legal_seconds(plan, self._s)

    # --- layouts and arrays ---------------------------------------------------------------------------------------

    def _plan(self, replicas: tuple[Replica, ...], share: tuple[int, ...]) -> Plan:
        used = {rank for replica in replicas for rank in replica.ranks}
        ends = np.cumsum(share).tolist()
        return Plan(
            epoch=self._s.epoch,
            layout=Layout(replicas, tuple(sorted(set(self._s.available) - used))),
            assignment=tuple(tuple(range(end - count, end)) for end, count in zip(ends, share, strict=True)),
            schedule=self._s.schedule,
            sequence_parallel=self._s.sequence_parallel,
        )

    def pipes(self, replicas: Sequence[Replica]) -> Pipes:
        at = {rank: i for i, rank in enumerate(self._ranks)}
        return [
            [(tuple(at[rank] for rank in stage.ranks), len(stage.layers)) for stage in replica.stages]
            for replica in replicas
        ]

    def _left(self) -> Pipes:
        """Of the layout in effect: of each stage the largest group that its live ranks still make."""
        at = {rank: i for i, rank in enumerate(self._ranks)}
        pipes: Pipes = []
        for replica in self._s.base.replicas:
            groups = []
            for stage in replica.stages:
                live = [at[rank] for rank in stage.ranks if rank in at]
                size = max((k for k in self.job.degrees.tolist() if k <= len(live)), default=0)
                live.sort(key=lambda i: -self.job.speed[i])
                if size:
                    groups.append((tuple(live[:size]), 0))
            if groups:
                pipes.append(groups)
        return pipes or self._drawn()

    def _drawn(self) -> Pipes:
        """A layout by chance: groups of each node, mostly large ones, dealt out."""
        by_node: dict[int, list[int]] = {}
        for i in range(len(self._ranks)):
            by_node.setdefault(int(self.job.node[i]), []).append(i)
        groups: list[tuple[int, ...]] = []
        for mine in by_node.values():
            mine.sort(key=lambda i: (-self.job.speed[i], self._random.random()))
            while mine:
                able = [k for k in self.job.degrees.tolist() if k <= len(mine)]
                if not able:
                    break
                size = able[-1] if self._random.random() < 0.8 else self._random.choice(able)
                groups.append(tuple(mine[:size]))
                del mine[:size]
        self._random.shuffle(groups)
        most = min(len(groups), self.state.stages.shape[1] - 1, len(self._s.base.replicas) + 1)
        dp = self._random.randint(max(1, most // 2), most)
        deep = min(self.job.most_stages, self._s.model.layers)
        pipes: Pipes = [[] for _ in range(dp)]
        for i, group in enumerate(groups):
            if len(pipes[i % dp]) < deep:
                pipes[i % dp].append((group, 0))
        return pipes

    def _load(self, pipes: Pipes) -> State:
        dirty = self.write(pipes)
        settle(self.job, self.state, NOW, dirty, 0.0)
        copy(self.state, NOW, BEST)
        return self.state

    def write(self, pipes: Pipes) -> np.ndarray:
        """Into state NOW; 1 for each pipe whose layers are to be laid."""
        state = self.state
        pipes = pipes[: state.stages.shape[1] - 1]
        state.pipes[NOW] = len(pipes)
        state.times[NOW] = -1.0
        state.lacking[NOW] = 0
        dirty = np.zeros(state.stages.shape[1], np.int64)
        for d, pipe in enumerate(pipes):
            pipe = pipe[: self.job.most_stages]
            state.stages[NOW, d] = len(pipe)
            dirty[d] = sum(layers for _, layers in pipe) != self._s.model.layers
            for s, (ranks, layers) in enumerate(pipe):
                state.size[NOW, d, s] = len(ranks)
                state.ranks[NOW, d, s, : len(ranks)] = ranks
                state.layers[NOW, d, s] = layers
        return dirty

    def _read(self, k: int) -> tuple[tuple[Replica, ...], tuple[int, ...]]:
        state, replicas = self.state, []
        for d in range(state.pipes[k]):
            first, stages = 0, []
            for s in range(state.stages[k, d]):
                ranks = state.ranks[k, d, s, : state.size[k, d, s]].tolist()
                last = first + int(state.layers[k, d, s]) - 1
                stages.append(Stage(tuple(sorted(self._ranks[i] for i in ranks)), ((first, last),)))
                first = last + 1
            replicas.append(Replica(tuple(stages)))
        return tuple(replicas), tuple(state.share[k, : len(replicas)].tolist())


def job_of(situation: Situation, ranks: Sequence[int]) -> Job:
    """A situation as numbers, of the ranks that work."""
    times, obstacle = situation.times, situation.model.tensor_parallel_obstacle
    names = sorted({situation.nodes[rank] for rank in ranks})
    node = {name: i for i, name in enumerate(names)}
    link = np.ones((len(names), len(names)))
    for (a, b), speed in situation.links.items():
        if a in node and b in node:
            link[node[a], node[b]] = link[node[b], node[a]] = speed
    each = np.array([[layer.f, layer.b, layer.w] for layer in times.layers]).T
    degrees = [k for k in sorted({1, 2, 4, 8, situation.tp}) if k <= situation.tp and obstacle(k) is None]
    most = min(situation.model.layers, situation.pp + MORE_STAGES)
    replicas = len(situation.base.replicas) + MORE_REPLICAS if situation.zero_1 else 0  # that share state
    return Job(
        speed=np.array([situation.speeds.get(rank, 1.0) for rank in ranks]),
        node=np.array([node[situation.nodes[rank]] for rank in ranks]),
        sums=np.concatenate([np.zeros((3, 1)), np.cumsum(each, axis=1)], axis=1),
        outside=np.array([[part.f, part.b, part.w] for part in (times.embedding, times.head)]),
        inside_s=times.inside_s,
        transfer_s=times.transfer_s,
        link=link,
        room=np.stack([_rooms(situation, most, degrees, n) for n in range(replicas + 1)]),
        degrees=np.array(degrees),
        gradient_s=times.gradient_s,
        bucket_layers=BUCKET_BYTES / (4.0 * situation.model.parameters_per_layer),
        step_s=times.step_s,
        split=int(situation.schedule == "zero-bubble"),
        micro_batches=situation.micro_batches,
        most_stages=most,
        slow_links=int(bool(situation.links)),
    )


def _rooms(situation: Situation, most: int, degrees: Sequence[int], replicas: int) -> np.ndarray:
    """Most layers of a stage of so many replicas, (stages, stage, degree, micro-batches up to the stages)."""
    found = np.full((most + 1, most, 9, most + 1), situation.model.layers)
    if situation.room_bytes is None:
        return found
    for stages in range(1, most + 1):
        for stage in range(stages):
            for tp in degrees:
                setup = situation.stage_setup(stage, stages, tp, replicas)
                for m in range(1, stages + 1):
                    setup = msgspec.structs.replace(setup, micro_batches=m)
                    room = memory.capacity(situation.model, setup, situation.room_bytes, situation.tokens)
                    found[stages, stage, tp, m] = room
    return found


def _empty(pipes: int, stages: int, micro_batches: int) -> State:
    """One pipe more than there may be: a move may need it."""
    pipes += 1
    return State(
        pipes=np.zeros(3, np.int64),
        stages=np.zeros((3, pipes), np.int64),
        size=np.zeros((3, pipes, stages), np.int64),
        ranks=np.zeros((3, pipes, stages, 8), np.int64),
        layers=np.zeros((3, pipes, stages), np.int64),
        lacking=np.zeros((3, pipes), np.int64),
        times=np.full((3, pipes, micro_batches + 2), -1.0),
        share=np.zeros((3, pipes), np.int64),
    )
