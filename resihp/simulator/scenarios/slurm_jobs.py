"""Jobs in a Slurm allocation, which lose nodes and may request replacements.

Draws the job and its disturbances; never answers a request: `resihp.simulator.allocation` does. Called by tests, by
`harness`, and by the families that are based on these jobs.
"""

from __future__ import annotations

import dataclasses
import random

from resihp.simulator.scenarios.plain_jobs import draw_plain
from resihp.simulator.scenarios.scenario import NEVER_S, Disturbance, DisturbanceKind, Scenario


def draw_allocated(seed: int) -> Scenario:
    """Draw a longer job in a Slurm allocation that loses nodes and may request replacements."""
    base = draw_plain(seed)
    rng = random.Random(seed + 1_000_000)
    nodes = max(base.nodes, 2)
    iterations = rng.choice([2, 6, 6]) * base.iterations
    length_s = 4 + iterations * base.iteration_s
    kinds: tuple[DisturbanceKind, ...] = ("node", "agent", "vanish", "blackout", "kill")
    ranks = nodes * base.gpus_per_node
    more = tuple(
        Disturbance(rng.choice(kinds), delay=rng.uniform(4, length_s), rank=rng.randrange(ranks))
        for _ in range(rng.choice([1, 1, 2, 3]))
    )
    if rng.random() < 0.3:
        away_s = rng.choice([0.1, 1.0, 3.0])
        more += (Disturbance("supervisor", delay=rng.uniform(4, 2 * length_s), seconds=away_s),)
    if rng.random() < 0.4:
        drained_s = rng.choice([1.0, 20.0, NEVER_S])
        drained = Disturbance("drained", delay=rng.uniform(4, length_s), rank=rng.randrange(ranks))
        more += (dataclasses.replace(drained, seconds=drained_s),)
    return dataclasses.replace(
        base,
        nodes=nodes,
        iterations=iterations,
        micro_batches=3 * ranks,
        disturbances=(*base.disturbances, *more),
        slurm=True,
        batch_node=rng.choice(["n1", "n1", "n2"]),
        drains=rng.choice([0, 1, 2, 4]),
        died_before=tuple(f"n{i + 1}" for i in range(nodes) if rng.random() < 0.3),
        on_drain=rng.choice(["stay", "vacate", "vacate"]),
        replacements=rng.choice([0, 1, 2, 4]),
        may_requeue=rng.random() < 0.7,
        restarts_left=rng.choice([0, 1, 2]),
        limit_s=3000.0,
        reserved_s=rng.choice([None, None, None, rng.uniform(1, 620)]),
    )
