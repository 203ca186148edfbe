"""Jobs that lose nodes or processes before training begins.

Draws the job and its disturbances. Never decides whether the job can still begin. Called by tests and `harness`.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

from resihp.simulator.scenarios.plain_jobs import draw_plain
from resihp.simulator.scenarios.scenario import NEVER_S, Disturbance, DisturbanceKind, Scenario, Trigger
from resihp.simulator.scenarios.slurm_jobs import draw_allocated


def draw_decimated(seed: int) -> Scenario:
    """Draw a job with spare nodes in which some nodes are lost before training begins, or never arrive."""
    base = draw_plain(seed) if seed % 3 else draw_allocated(seed)
    rng = random.Random(seed + 3_000_000)
    nodes, spares = base.nodes + 2, rng.choice([1, 1, 2])
    ranks = nodes * base.gpus_per_node
    kinds: list[DisturbanceKind] = ["node", "node", "vanish", "vanish", "blackout", "agent"]
    triggers: list[Trigger] = ["time", "time", "time", "spawn", "spawn", "declare", "declare", "propose", "go"]
    early: list[Disturbance] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        trigger = rng.choice(triggers)
        nth = rng.randint(1, ranks) if trigger in ("spawn", "declare") else 1
        delay = rng.choice([0.0, rng.uniform(0, 1.0), rng.uniform(0, 6.0)])
        early.append(Disturbance(rng.choice(kinds), trigger, nth, delay, rng.randrange(ranks)))
    if rng.random() < 0.2:
        away_s = rng.choice([0.1, 1.0, 3.0])
        early.append(Disturbance("supervisor", rng.choice(triggers), 1, rng.uniform(0, 3.0), seconds=away_s))
    others = base.disturbances if rng.random() < 0.5 else ()
    slurm = base.slurm or rng.random() < 0.5
    return dataclasses.replace(
        base,
        nodes=nodes,
        spares=spares,
        micro_batches=3 * ranks,
        faults=(),
        disturbances=(
            *(disturbance for disturbance in others if disturbance.kind not in ("signal", "inject")),
            *early,
        ),
        slurm=slurm,
        batch_node="n1" if slurm else "",
        may_requeue=rng.random() < 0.7,
        restarts_left=rng.choice([0, 1, 2]),
        examine=rng.random() < 0.3,
        limit_s=3000.0,
    )


def draw_hindered(seed: int) -> Scenario:
    """Draw a job with failures at its start: nodes that do not arrive or vanish, and processes that cannot start.

    Often its supervisor dies as well.
    """
    base = draw_plain(seed) if seed % 3 else draw_allocated(seed)
    rng = random.Random(seed + 4_000_000)
    spares = rng.choice([0, 0, 0, 1])
    nodes = max(base.nodes, 2) + spares
    ranks = nodes * base.gpus_per_node
    late: dict[str, float] = {}
    spawns: dict[str, Literal["hang", "refused"]] = {}
    early: list[Disturbance] = []
    moments: list[tuple[Trigger, int]] = [("arrive", nodes), ("order", nodes), ("spawn", ranks), ("declare", ranks)]
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        name, (trigger, most) = f"n{rng.randint(1, nodes)}", rng.choice(moments)
        nth, delay = rng.randint(1, most), rng.choice([0.0, rng.uniform(0, 0.5), rng.uniform(0, 2.5)])
        trouble = rng.choice(["late", "late", "node", "node", "process", "process", "raise", "raise", "spawn"])
        if trouble == "late":
            late[name] = rng.choice([NEVER_S, NEVER_S, rng.uniform(1, 59), rng.uniform(60, 70), rng.uniform(60, 150)])
        elif trouble == "spawn":
            spawns[name] = rng.choice(["hang", "refused"])
        elif trouble == "node":
            kinds: list[DisturbanceKind] = ["node", "vanish", "blackout", "agent"]
            early.append(Disturbance(rng.choice(kinds), trigger, nth, delay))
        elif trouble == "process":
            kinds = ["kill", "kill", "hang", "stop", "mute"]
            early.append(Disturbance(rng.choice(kinds), "spawn", rng.randint(1, ranks), delay))
        else:
            kinds = ["raise", "raise", "raise", "raise_node", "raise_node", "raise_all"]
            early.append(Disturbance(rng.choice(kinds), "spawn", rng.randint(1, ranks), delay))
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        trigger, most = rng.choice([*moments, ("propose", 1), ("go", 1), ("ready", ranks)])
        delay, away_s = rng.choice([0.0, rng.uniform(0, 3.0)]), rng.choice([0.1, 1.0, 3.0])
        early.append(Disturbance("supervisor", trigger, rng.randint(1, most), delay, seconds=away_s))
    others = base.disturbances if rng.random() < 0.3 else ()
    slurm = base.slurm or rng.random() < 0.3
    iterations = rng.choice([2, 6]) * base.iterations
    return dataclasses.replace(
        base,
        nodes=nodes,
        spares=spares,
        micro_batches=3 * ranks,
        iterations=iterations,
        faults=(),
        disturbances=(*(d for d in others if d.kind not in ("signal", "inject")), *early),
        late=tuple(late.items()),
        spawns=tuple(spawns.items()),
        least=rng.choice([0.5, 0.5, 0.25, 0.75, 1.0]),
        refuses=rng.randrange(ranks) if rng.random() < 0.1 else None,
        slurm=slurm,
        batch_node="n1" if slurm else "",
        replacements=rng.choice([0, 1, 2, 4]) if slurm else 0,
        may_requeue=rng.random() < 0.7,
        restarts_left=rng.choice([0, 1, 2]),
        examine=rng.random() < 0.3,
        duplicates=0.0,
        leaks=False,
        limit_s=max(3000.0, 1000.0 + 4 * iterations * base.iteration_s),  # a quarter of the devices may train
    )
