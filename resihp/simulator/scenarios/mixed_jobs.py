"""Jobs of other families with one more feature: a batch ramp-up, plans made ahead, or a single replica.

Changes a job that another module has drawn, and never plays it. Called by tests and `harness`.
"""

from __future__ import annotations

import dataclasses
import random

from resihp.simulator.scenarios.plain_jobs import draw_orphaned, draw_plain, draw_stormy
from resihp.simulator.scenarios.probed_jobs import draw_sluggish
from resihp.simulator.scenarios.scenario import Scenario
from resihp.simulator.scenarios.slurm_jobs import draw_allocated
from resihp.simulator.scenarios.stopped_jobs import draw_stopped
from resihp.simulator.scenarios.troubled_starts import draw_hindered


def draw_ramped(seed: int) -> Scenario:
    """Draw a job of any other family that has fewer micro-batches in its first iterations."""
    rng = random.Random(seed + 5_000_000)
    kinds = (
        draw_plain,
        draw_plain,
        draw_orphaned,
        draw_stormy,
        draw_allocated,
        draw_stopped,
        draw_sluggish,
        draw_hindered,
    )
    base = rng.choice(kinds)(seed)
    most = base.nodes * base.gpus_per_node  # the largest possible number of replicas
    last = rng.choice([1, 2, 3, base.iterations])
    firsts = sorted({1, *(rng.randint(2, base.iterations + 1) for _ in range(last))})
    counts = sorted(rng.sample(range(most, most + 3 * len(firsts)), len(firsts)))
    return dataclasses.replace(
        base, micro_batches=counts[-1], ramp=tuple(zip(firsts, counts, strict=True)) if len(firsts) > 1 else ()
    )


def draw_foreseeing(seed: int) -> Scenario:
    """Draw a longer job of any other family that makes plans ahead for possible losses."""
    rng = random.Random(seed + 6_000_000)
    kinds = (draw_plain, draw_plain, draw_orphaned, draw_stormy, draw_allocated, draw_ramped, draw_sluggish)
    base = rng.choice(kinds)(seed)
    return dataclasses.replace(
        base,
        thinks=True,
        iterations=base.iterations + rng.choice([4, 12]),
        iteration_s=max(base.iteration_s, rng.choice([0.0, 0.0, 3.0])),
        limit_s=5 * base.limit_s,
        planner=base.planner if rng.random() < 0.8 else "wild",
    )


def draw_unreplicated(seed: int) -> Scenario:
    """Draw a job with a single replica, which goes back to a checkpoint, or to the beginning, after most losses."""
    rng = random.Random(seed + 7_000_000)
    base = rng.choice((draw_plain, draw_stormy, draw_orphaned))(seed)
    nodes, gpus = rng.choice([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 2), (3, 1), (4, 1)])
    ranks = nodes * gpus
    tp = rng.choice([1, gpus]) if gpus == 2 else 1
    disturbances = tuple(
        event if event.rank is None else dataclasses.replace(event, rank=event.rank % ranks)
        for event in base.disturbances
    )
    return dataclasses.replace(
        base,
        nodes=nodes,
        gpus_per_node=gpus,
        tp=tp,
        pp=ranks // tp,
        iterations=base.iterations + rng.choice([4, 8]),
        micro_batches=rng.randint(2, 8),
        disturbances=disturbances,
        faults=(),
        checkpoint_every=rng.choice([0, 1, 1, 2, 3]),
        max_restarts=rng.choice([100, 100, 100, 1]),
        come_backs=rng.choice([3, 3, 1]),
        limit_s=3000.0,
    )
