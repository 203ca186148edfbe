"""Small jobs with a few disturbances, jobs with many disturbances, and jobs that lose their supervisor.

Draws the disturbances of all families, and never causes them. Called by tests, by `harness`, and by the families that
are based on these jobs.
"""

from __future__ import annotations

import dataclasses
import random

from resihp.faults import Fault, Phase
from resihp.simulator.scenarios.scenario import (
    NEVER_S,
    SIGINT,
    SIGKILL,
    SIGTERM,
    Disturbance,
    DisturbanceKind,
    Fate,
    Scenario,
    Trigger,
)

DISTURBANCE_WEIGHTS: dict[DisturbanceKind, int] = {
    "kill": 30,
    "node": 8,
    "agent": 6,
    "vanish": 3,
    "silent": 8,
    "blackout": 4,
    "stop": 7,
    "mute": 8,
    "hang": 5,
    "broken": 5,
    "deadlock": 2,
    "forget": 3,
    "reconnect": 2,
    "raise": 3,
    "signal": 1,
    "inject": 3,
}
"""Relative frequency of each kind of disturbance."""

FAULT_PHASES: tuple[Phase, ...] = ("forward", "backward", "reduce", "step", "park", "groups", "transfer", "resume")

FATE_WEIGHTS: dict[Fate, int] = {"fine": 60, "odd": 8, "refuses": 7, "dies": 8, "raises": 6, "hangs": 3, "spawn": 5}


def draw_plain(seed: int) -> Scenario:
    """Draw a small job with up to five disturbances and up to two injected faults."""
    rng = random.Random(seed * 2 + 1)
    nodes, gpus = rng.choice([(1, 4), (2, 2), (2, 2), (2, 4), (3, 2), (3, 4), (4, 1), (4, 2), (4, 3), (6, 2), (2, 3)])
    ranks = nodes * gpus
    grids = [(tp, pp) for tp in (1, 2) for pp in (1, 2, 3) if gpus % tp == 0 and ranks // (tp * pp) >= 2]
    tp, pp = rng.choice(grids)
    dp = ranks // (tp * pp)
    iterations = rng.randint(3, 10)
    iteration_s = rng.choice([0.2, 0.4, 0.4, 0.8, 1.2]) if rng.random() < 0.95 else rng.uniform(3, 5)
    length_s = 4 + iterations * iteration_s
    disturbances = _draw_disturbances(rng, length_s, ranks, iterations)
    faults = _draw_faults(rng, nodes, ranks, iterations)
    return Scenario(
        seed=seed,
        nodes=nodes,
        gpus_per_node=gpus,
        tp=tp,
        pp=pp,
        iterations=iterations,
        micro_batches=rng.randint(dp, 3 * dp),
        iteration_s=iteration_s,
        resume_from=rng.randint(1, iterations - 1) if rng.random() < 0.1 else 0,
        checkpoint_every=rng.randint(1, 3) if rng.random() < 0.15 else 0,
        faults=faults,
        disturbances=disturbances,
        latency_s=rng.choice([0.002, 0.02, 0.02, 0.2]),
        duplicates=rng.choice([0.0, 0.0, 0.05, 0.2]),
        breaks_loudly=rng.choice([1.0, 1.0, 0.5, 0.0]),
        leaks=rng.random() < 0.3,
        objects=rng.randrange(ranks + 4) if rng.random() < 0.06 else None,
        other_digest=rng.randrange(ranks + 4) if rng.random() < 0.03 else None,
        agrees_up_to=rng.choice([1, 1, 2]),
        objections=rng.choice([1, 1, 2, 99]),
        fates=tuple(rng.choices(list(FATE_WEIGHTS), list(FATE_WEIGHTS.values()), k=8)),
        come_backs=rng.choice([3, 3, 3, 1, 0]),
        chunk_s=rng.choice([0.1, 0.3, 0.3, 8.0]),
        evaluate_every=seed % 15 // 5 + 1 if seed % 5 == 0 else 0,
        planner="wild" if seed % 4 else "real",
        planner_trouble=rng.choice([0.0, 0.0, 0.0, 0.2]),
        checker_trouble=rng.choice([0.0, 0.0, 0.0, 0.2]),
    )


def _draw_disturbances(rng: random.Random, length_s: float, ranks: int, iterations: int) -> tuple[Disturbance, ...]:
    """Draw the disturbances of a plain job: an error on all ranks, or up to five others."""
    if rng.random() < 0.02:
        trigger: Trigger = "sync" if rng.random() < 0.8 else "declare"
        return (Disturbance("raise_all", trigger, nth=rng.randint(1, 3)),)
    disturbances: list[Disturbance] = []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5])):
        disturbances += draw_disturbance(rng, length_s, ranks, iterations)
    return tuple(disturbances)


def _draw_faults(rng: random.Random, nodes: int, ranks: int, iterations: int) -> tuple[Fault, ...]:
    """Draw the injected faults of a plain job; most jobs have none."""
    if rng.random() >= 0.3:
        return ()
    faults: list[Fault] = []
    for number in range(rng.choice([1, 1, 2])):
        kind = rng.choice(["kill", "kill", "crash", "crash", "stop", "hang", "raise", "disconnect"])
        on_node = kind == "disconnect" or (kind not in ("hang", "raise") and rng.random() < 0.3)
        faults.append(
            Fault(
                id=number,
                kind=kind,  # type: ignore[arg-type]
                rank=None if on_node else rng.randrange(ranks),
                node=f"n{rng.randint(1, nodes)}" if on_node else None,
                iteration=rng.randint(1, iterations + (rng.random() < 0.1)),
                phase=rng.choice(FAULT_PHASES if rng.random() < 0.3 else FAULT_PHASES[:4]),
            )
        )
    return tuple(faults)


def draw_stormy(seed: int) -> Scenario:
    """Draw a longer job with several more disturbances than a plain job, many duplicate messages, and late messages of
    dropped nodes."""
    base = draw_plain(seed)
    rng = random.Random(seed)
    ranks = base.nodes * base.gpus_per_node
    length_s = 4 + 2 * base.iterations * base.iteration_s
    more: list[Disturbance] = []
    for _ in range(rng.randint(2, 8)):
        more += draw_disturbance(rng, length_s, ranks, 2 * base.iterations)
    return dataclasses.replace(
        base,
        disturbances=(*base.disturbances, *(disturbance for disturbance in more if disturbance.kind != "signal")),
        iterations=2 * base.iterations,
        pp=1 if seed % 2 else base.pp,
        micro_batches=3 * ranks,
        duplicates=0.2,
        leaks=True,
        limit_s=3000.0,
    )


def draw_orphaned(seed: int) -> Scenario:
    """Draw a job that loses its supervisor once or more, at critical moments; without signals and injected faults."""
    base = draw_plain(seed)
    rng = random.Random(seed + 1)
    triggers: list[Trigger] = [
        *("spawn", "declare", "park", "parked", "propose", "go", "ready", "begin", "resumed", "sync", "step"),
        *("finished", "halt", "pause", "join", "joined", "time"),
    ]
    deaths = tuple(
        Disturbance(
            "supervisor",
            rng.choice(triggers),
            rng.choice([1, 1, 2, 3, 8]),
            rng.choice([0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 2.0)]),
            seconds=rng.choice([0.1, 1.0, 3.0]),
        )
        for _ in range(rng.choice([1, 1, 2, 3]))
    )
    kept = tuple(disturbance for disturbance in base.disturbances if disturbance.kind not in ("signal", "inject"))
    return dataclasses.replace(base, disturbances=(*kept, *deaths), duplicates=0.0, leaks=False)


def draw_disturbance(rng: random.Random, length_s: float, ranks: int, iterations: int) -> list[Disturbance]:
    """Draw one disturbance, and others that accompany it."""
    kind = rng.choices(list(DISTURBANCE_WEIGHTS), list(DISTURBANCE_WEIGHTS.values()))[0]
    trigger: Trigger = "time"
    nth, delay = 1, rng.uniform(0, length_s)
    if rng.random() < 0.6:
        trigger = rng.choice(
            [
                *("park", "parked", "propose", "go", "ready", "begin", "resumed", "sync", "sync", "step", "step"),
                *("finished", "halt", "pause", "join", "joined"),
            ]
        )
        nth = {"sync": rng.randint(1, iterations), "step": rng.randint(1, iterations * ranks)}.get(
            trigger, rng.choice([1, 1, 2, 3]) if trigger != "parked" else rng.randint(1, ranks)
        )
        delay = rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 1.0)])
    elif rng.random() < 0.95:
        delay = max(delay, 5.0)
    seconds = NEVER_S
    if kind == "silent":
        seconds = rng.uniform(0.5, 20)
    elif kind == "mute":
        seconds = rng.uniform(5, 12)
    elif kind in ("stop", "hang", "blackout") and rng.random() < 0.4:
        seconds = rng.uniform(0.5, 20)
    status = rng.choice([-SIGKILL, -SIGKILL, -11, -6, 1, 1, 0]) if kind == "kill" else -SIGKILL
    if kind == "signal":
        status = rng.choice([SIGTERM, SIGINT])
    rank = rng.randrange(ranks) if trigger == "time" or rng.random() < 0.7 else None
    several = rng.choice([2, 3]) if kind == "kill" and rng.random() < 0.15 else 1
    first = Disturbance(kind, trigger, nth, delay, rank, seconds, status)
    others = [
        Disturbance(kind, trigger, nth, delay + rng.choice([0.0, 0.05]), rng.randrange(ranks), seconds, status)
        for _ in range(several - 1)
    ]
    if kind == "vanish" and rng.random() < 0.5:  # the connection is silent first, while the node still computes
        before = rng.uniform(0.0, 8.0)
        others.append(Disturbance("silent", trigger, nth, delay, rank))
        first = dataclasses.replace(first, delay=delay + before)
    return [first, *others]
