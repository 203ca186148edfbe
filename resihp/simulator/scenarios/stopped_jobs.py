"""Jobs that Slurm or an operator asks to end.

Draws the requests; `resihp.simulator.stopping` simulates and checks the consequences, never this module. Called by
tests and `harness`.
"""

from __future__ import annotations

import dataclasses
import random

from resihp.simulator.scenarios.plain_jobs import draw_plain
from resihp.simulator.scenarios.scenario import (
    NEVER_S,
    SIGINT,
    SIGTERM,
    SIGUSR1,
    SIGUSR2,
    Disturbance,
    DisturbanceKind,
    Scenario,
    Trigger,
)
from resihp.simulator.scenarios.slurm_jobs import draw_allocated


def draw_stopped(seed: int) -> Scenario:
    """Draw a job that is asked to end, at any moment and in any way; half of these jobs have no other disturbances."""
    rng = random.Random(seed + 2_000_000)
    base = draw_allocated(seed) if rng.random() < 0.2 else draw_plain(seed)
    warned: tuple[DisturbanceKind, int] = ("signal", SIGUSR2)
    kinds: list[tuple[DisturbanceKind, int]] = [warned] * 2 + [
        ("signal", SIGUSR1),
        ("signal", SIGTERM),
        ("cancel", SIGTERM),
        ("cancel", SIGTERM),
        ("cancel", rng.choice([SIGUSR1, SIGUSR2])),
        ("told", SIGTERM),
        ("told", SIGUSR1),
    ]
    moments: tuple[Trigger, ...] = (
        *("park", "parked", "propose", "go", "ready", "begin", "resumed", "sync", "sync", "step", "step", "pause"),
        *("finished", "halt", "join", "joined", "spawn", "declare", "save"),
    )
    timed: Trigger = "time"
    triggers: list[Trigger] = [*moments, *[timed] * 8]
    iterations = rng.choice([1, 2, 6]) * base.iterations
    stops: list[Disturbance] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind, status = rng.choice(kinds)
        trigger = rng.choice(triggers)
        delay = rng.uniform(3, 8 + base.iterations * base.iteration_s) if trigger == "time" else rng.uniform(0, 1)
        seconds = rng.uniform(0.1, 30.0) if kind == "told" and rng.random() < 0.7 else NEVER_S
        nth = rng.randint(1, 2 * base.iterations) if trigger in ("sync", "step") else rng.choice([1, 1, 2])
        rank = rng.randrange(base.nodes * base.gpus_per_node)
        stops.append(Disturbance(kind, trigger, nth, delay, rank, seconds, status))
    others = base.disturbances if rng.random() < 0.5 else ()
    if rng.random() < 0.1:
        others += (Disturbance("supervisor", delay=rng.uniform(4, 20), seconds=rng.choice([0.1, 1.0, 3.0])),)
    return dataclasses.replace(
        base,
        iterations=iterations,
        disturbances=(*(disturbance for disturbance in others if disturbance.kind != "signal"), *stops),
        faults=base.faults if others else (),
        slurm=base.slurm or bool(seed % 5 > 1),
        batch_node=base.batch_node or ("n1" if seed % 5 > 1 else ""),
        meaning=rng.choice(["time-limit", "cancelled", "cancelled", "preempted", "unknown", None]),
        time_left_s=rng.choice([None, None, rng.uniform(20, 400)]),
        mortality=rng.choice([0.0, 0.0, 0.1, 1.0]),
        signal_grace_s=rng.choice([20.0, 20.0, 20.0, 6.0, 3.0]),
        on_warning=rng.choice(["requeue", "requeue", "end"]),
        limit_s=3000.0,
    )


def draw_interrupted(seed: int) -> Scenario:
    """Draw a job as `draw_stopped` does, but stopped by operators: by Ctrl-C, TERM or `resihp stop`.

    Some operators request a checkpoint before.
    """
    rng = random.Random(seed + 7_000_000)
    base = draw_stopped(seed)
    stops = ("signal", "cancel", "told")
    others = tuple(
        disturbance for disturbance in base.disturbances if disturbance.kind not in stops or rng.random() < 0.1
    )
    operator_stops = [
        dataclasses.replace(
            disturbance, kind="signal", seconds=NEVER_S, status=rng.choice([SIGINT, SIGINT, SIGTERM, 0])
        )
        for disturbance in base.disturbances
        if disturbance.kind in stops and disturbance not in others
    ]
    saves = [
        dataclasses.replace(disturbance, kind="checkpoint", nth=1, delay=disturbance.delay * rng.random())
        for disturbance in operator_stops
        if rng.random() < 0.6
    ]
    if rng.random() < 0.2:
        operator_stops = []
    return dataclasses.replace(base, disturbances=(*others, *saves, *operator_stops))
