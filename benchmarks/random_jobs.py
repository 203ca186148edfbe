"""Random jobs to measure a planner on: a model, a grid on nodes, a schedule, memory, and what has happened to it.

`random_question(seed)` is what `resihp plan` would be asked, `random_job(seed)` the planner's situation of it; both are
the same for the same seed. 16 to 64 devices; `large_question` and `large_job`: 256. Jobs whose healthy layout has no
room are not drawn. Called by `benchmarks.planner`.
"""

from __future__ import annotations

import random

import msgspec

from resihp.errors import ResihpError
from resihp.scheduler.situation import Situation
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.question import Question, check, first_plan, pose, worst

TP = (1, 2, 4, 8)
MICRO_BATCHES = (8, 16, 32)
"""Of a replica."""
SEQUENCES = (2048, 4096, 8192)
SMALL = (16, 64)
"""Devices: at least, at most."""
LARGE = 256
LARGE_GRIDS = ((4, 16, 4), (4, 8, 8), (8, 16, 2), (8, 8, 4), (4, 4, 16), (2, 16, 8), (8, 4, 8))
"""TP, PP, DP."""

TIGHT = (1.02, 1.3)
"""Memory of a device, in what the fullest one of the healthy job needs: at least, at most."""
AMPLE = 1.3
"""The least of it where memory is that of the hardware."""
LARGEST_BYTES = 192e9
"""Of a device: tight memory is scaled to the job, and no device has more."""


def random_job(seed: int) -> Situation:
    question = random_question(seed)
    return pose(question, first_plan(question))


def large_job(seed: int) -> Situation:
    question = large_question(seed)
    return pose(question, first_plan(question))


def random_question(seed: int) -> Question:
    return _drawn(random.Random(f"job {seed}"), large=False)


def large_question(seed: int) -> Question:
    return _drawn(random.Random(f"large job {seed}"), large=True)


def kinds(question: Question) -> tuple[str, ...]:
    """What a job is counted under: the rows of the benchmark's table."""
    found = [f"{question.micro_batches} micro-batches", question.schedule]
    found.append("tight memory" if question.hardware not in catalogue.KNOWN_HARDWARE.values() else "ample memory")
    has = {
        "ZeRO-1": question.zero_1,
        "dead ranks": bool(question.failed),
        "dead node": bool(question.failed_nodes),
        "slow ranks": bool(question.slow),
        "spares": bool(question.spares),
        "slow links": bool(question.slow_links),
    }
    return (*found, *(name for name, true in has.items() if true))


def told(question: Question) -> str:
    """A job in one line."""
    parts = [f"{question.model.layers}x{question.model.hidden} s{question.model.sequence}"]
    parts += [f"tp{question.tp} dp{question.dp} pp{question.pp} x {question.micro_batches}"]
    parts += [", ".join(kinds(question)[1:])]
    return "; ".join(parts)


def _drawn(rng: random.Random, *, large: bool) -> Question:
    tight = rng.random() < 0.5
    while True:
        question = _healthy(rng, large=large, tight=tight)
        if question is None:
            continue
        damaged = _damaged(rng, question)
        try:
            check(damaged)
        except ResihpError:
            continue  # nothing left of it
        return damaged


def _healthy(rng: random.Random, *, large: bool, tight: bool) -> Question | None:
    """A job that fits its devices; None for a draw that is none."""
    per_node = rng.choice((4, 8, 8))
    tp, pp, dp = rng.choice(LARGE_GRIDS) if large else (rng.choice(TP), rng.randint(2, 8), rng.randint(2, 8))
    shape = catalogue.model(rng.choice([*catalogue.KNOWN_MODELS]), rng.choice(SEQUENCES))
    known = catalogue.KNOWN_HARDWARE[rng.choice([*catalogue.KNOWN_HARDWARE])]
    world = tp * pp * dp
    if tp > per_node or shape.tensor_parallel_obstacle(tp) or not (large or SMALL[0] <= world <= SMALL[1]):
        return None
    question = Question(
        model=shape,
        hardware=known,
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batches=rng.choice(MICRO_BATCHES),
        gpus_per_node=per_node,
        schedule=rng.choice(("1f1b", "1f1b", "zero-bubble")),
        sequence_parallel=tp > 1 and rng.random() < 0.8,
        zero_1=rng.random() < 0.3,
        spares=rng.choice((0, 0, 0, 1)),
    )
    need, _ = worst(question, first_plan(question))
    if not tight:
        return question if need * AMPLE <= known.memory_bytes else None
    memory_bytes = int(need * rng.uniform(*TIGHT))
    if memory_bytes > LARGEST_BYTES:
        return None
    return msgspec.structs.replace(question, hardware=msgspec.structs.replace(known, memory_bytes=memory_bytes))


def _damaged(rng: random.Random, question: Question) -> Question:
    """Something has happened to it: at least one of dead ranks, a dead node, slow ranks, a slow link."""
    happened = rng.choice(
        (
            ("dead",),
            ("dead",),
            ("slow",),
            ("dead", "slow"),
            ("dead", "slow"),
            ("node",),
            ("node", "slow"),
            ("dead", "node"),
        )
    )
    nodes = question.nodes
    used = sorted({nodes[rank] for rank in range(question.world)})
    few = max(1, question.world // 16)
    lost = (rng.choice(used),) if "node" in happened else ()
    left = [rank for rank in range(question.world) if nodes[rank] not in lost]
    failed = rng.sample(left, min(len(left) - 1, rng.randint(1, 2 * few))) if "dead" in happened else []
    left = [rank for rank in left if rank not in failed]
    slow = rng.sample(left, min(len(left), rng.randint(1, 2 * few))) if "slow" in happened else []
    links: dict[tuple[str, str], float] = {}
    if rng.random() < 0.2:
        for _ in range(rng.randint(1, 2)):
            a, b = sorted(rng.sample(sorted(set(nodes.values()).difference(lost)), 2)) if len(used) > 2 else used[:2]
            links[a, b] = round(rng.uniform(0.1, 0.7), 2)
    return msgspec.structs.replace(
        question,
        failed=tuple(sorted(failed)),
        failed_nodes=lost,
        slow={rank: round(rng.choice((rng.uniform(0.2, 0.5), rng.uniform(0.5, 0.95))), 2) for rank in sorted(slow)},
        slow_links=links,
    )
