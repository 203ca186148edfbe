"""Jobs with devices that are slow, or look slow in a probe.

Draws only the probabilities; workers draw the results of their probes. Called by tests, by `harness`, and by the
families that are based on these jobs.
"""

from __future__ import annotations

import dataclasses
import random

from resihp.simulator.scenarios.plain_jobs import draw_orphaned, draw_plain, draw_stormy
from resihp.simulator.scenarios.scenario import Disturbance, DisturbanceKind, Scenario


def draw_sluggish(seed: int) -> Scenario:
    """Draw a job with a detector that reports slow devices everywhere; some devices are in fact slow."""
    rng = random.Random(seed * 2)
    drawn = draw_plain(seed) if rng.random() < 0.7 else draw_orphaned(seed)
    return dataclasses.replace(
        drawn,
        iterations=drawn.iterations + 4,
        examine=rng.random() < 0.6,
        slow=rng.choice([0.1, 0.3, 0.6]),
        unfit=rng.choice([0.05, 0.2, 0.5]),
        shared=seed % 3 == 0,
        observes=rng.random() < 0.2,
    )


def draw_harassed(seed: int) -> Scenario:
    """Draw a job in which a rank is killed or stopped every 4 to 14 s, and healthy devices look slow in half of the
    probes.

    Every process is started again on its device; it gets no work at first if its probe was slow.
    """
    rng = random.Random(seed + 7_000_000)
    nodes, gpus, tp, pp = rng.choice([(2, 1, 1, 1), (2, 2, 1, 2), (4, 1, 1, 2), (4, 2, 2, 2), (3, 2, 1, 3)])
    iteration_s, length_s = rng.choice([0.3, 0.6]), rng.choice([40.0, 80.0])
    ranks, at = nodes * gpus, 10.0
    disturbances: list[Disturbance] = []
    while (at := at + rng.uniform(4.0, 14.0)) < length_s:
        rank = rng.randrange(ranks + len(disturbances))
        kind: DisturbanceKind = rng.choice(["kill", "kill", "stop"])
        disturbances.append(Disturbance(kind, delay=at, rank=rank))
    return Scenario(
        seed=seed,
        nodes=nodes,
        gpus_per_node=gpus,
        tp=tp,
        pp=pp,
        iterations=int(length_s / iteration_s),
        micro_batches=ranks,
        iteration_s=iteration_s,
        disturbances=tuple(disturbances),
        come_backs=99,
        examine=True,
        noise=0.5,
        limit_s=3000.0,
    )


def draw_noisy(seed: int) -> Scenario:
    """Draw a longer job with probes. All devices are healthy, but look slow in many probes."""
    rng = random.Random(seed + 8_000_000)
    drawn = rng.choice([draw_plain, draw_orphaned, draw_stormy, draw_stormy])(seed)
    return dataclasses.replace(
        drawn,
        examine=True,
        iterations=drawn.iterations + rng.choice([20, 60]),
        noise=rng.choice([0.3, 0.6, 0.9]),
        shared=rng.random() < 0.7,
        come_backs=8,
        limit_s=5 * drawn.limit_s,
    )
