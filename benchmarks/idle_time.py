"""How one slow GPU makes others idle, what the paper's planner and ours leave of it, and the paper's delta.

    python benchmarks/idle_time.py [--sequence-length 8192] [--speed 0.5] [--schedule 1f1b] [--json FILE]

LLaMA2-13B on 32 A100 by the catalogue's arithmetic, (TP, DP, PP) = (4, 2, 4), 8 micro-batches a replica, one GPU at
half speed. Published: idle GPU time relative to that GPU's own loss is 4.75 / 19.13 / 25.43 within TP / PP / DP
unmitigated, 2.03 / 8.72 / 11.14 with ResiHP. The paper does not say which GPU, nor how either is counted.

The definition used: a GPU is *idle* in an iteration while it computes nothing for it, be it in a bubble, behind a
slower member of its group, in communication, or standing by. A level's figure counts the GPUs that this level ties to
the slow one and no smaller level does: 3 of its tensor-parallel group, 12 of the other stages of its replica, 16 of the
other replica, by where they stood when the job was whole. The GPU's *own loss* is the time by which its work of an
iteration takes longer than on a healthy one, unmitigated, for all plans alike. Of eight candidates (idle time all or
beyond the healthy iteration's; levels apart or cumulative; own loss as said or (1 - p) of the iteration) this one comes
nearest to the published unmitigated figures with the slow GPU in the last stage, itself the nearest of the four stages.
How near depends on the length of sequences, which is not published either: the first tables show two. Planners' figures
took no part in the choice, and are shown for a slow GPU in each stage.

`healthy` is the same count for the job without a slow GPU: bubbles and communication that no replanning removes while
the schedule stays. `reachable` is what the fastest of some hundred plans has where the slow group's ranks go on as the
stages named (4 ranks; 2 of the healthy ones; 2 and the third one as a fifth stage), the layers of its replica and the
micro-batches of both being varied around their proportional share. Both are there to read the planners' figures by.

The last tables sweep delta of Algorithm 1, over random slow GPUs, and time the paper's planner.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan, Stop, spread
from resihp.pipeline.schedules import orders_of
from resihp.scheduler import Situation, decide
from resihp.scheduler.cost.prices import costs, iteration_seconds
from resihp.scheduler.layouts.paper_planner import STEP_NAMES, progressive
from resihp.scheduler.orders.migration import migrate
from resihp.scheduler.what_if import catalogue

TP, DP, PP, MICRO_BATCHES = 4, 2, 4, 8
PUBLISHED = (4.75, 19.13, 25.43)
PUBLISHED_MITIGATED = (2.03, 8.72, 11.14)
TARGET = 0.42
LEVELS = ("TP", "PP", "DP")


@dataclass(frozen=True)
class Shown:
    """One plan: seconds of an iteration, idle GPU time by level over the own loss, and that of ranks standing by."""

    job: str
    orders: str
    slow_rank: int
    plan: str
    layers: str
    seconds: float
    idle: tuple[float, ...]
    standby: float
    ratio: tuple[float, ...]


def situation(
    model_name: str,
    tp: int,
    dp: int,
    pp: int,
    micro_batches: int,
    schedule: str,
    sequence: int,
    speeds: dict[int, float],
) -> Situation:
    """Megatron's grid of a known model on nodes of eight A100."""
    model = catalogue.model(model_name, sequence)
    a100 = catalogue.KNOWN_HARDWARE["a100"]
    ranks = tuple(range(tp * dp * pp))
    return Situation(
        epoch=2,
        base=Layout.uniform(tp=tp, pp=pp, dp=dp, layers=model.layers),
        available=ranks,
        nodes={rank: f"n{rank // 8 + 1}" for rank in ranks},
        model=model,
        micro_batches=micro_batches * dp,
        tp=tp,
        pp=pp,
        schedule=schedule,
        speeds=speeds,
        memory_bytes=a100.memory_bytes,
        tokens=sequence // 2,  # 16-bit activations, which the planner counts as 32-bit ones of half as many tokens
        profile=catalogue.profile(model, a100, sequence_length=sequence, tp=tp, pp=pp, dp=dp),
    )


def as_it_is(case: Situation) -> Plan:
    dp = len(case.base.replicas)
    return Plan(epoch=2, layout=case.base, assignment=spread(case.micro_batches, dp), schedule=case.schedule)


def computing(plan: Plan, case: Situation) -> dict[int, float]:
    """Seconds of an iteration in which each rank computes: its part of its group's work, at its own speed."""
    orders = orders_of(plan)
    seconds = costs(plan, case, orders)
    found = dict.fromkeys(case.base.ranks, 0.0)
    for d, replica in enumerate(plan.layout.replicas):
        for s, stage in enumerate(replica.stages):
            group = math.fsum(seconds(Stop(d, s, p.chunk), p) for p in orders[d][s])
            slowest = min((case.speeds.get(rank, 1.0) for rank in stage.ranks), default=1.0)
            found |= {rank: group * slowest / case.speeds.get(rank, 1.0) for rank in stage.ranks}
    return found


def members(case: Situation, slow: int) -> tuple[tuple[int, ...], ...]:
    """Whom each level ties to the slow rank: of its group, of other stages, of other replicas."""
    place = case.base.place(slow)
    assert place is not None
    home = case.base.replicas[place.replica]
    group = home.stages[place.stage].ranks
    return (
        tuple(rank for rank in group if rank != slow),
        tuple(rank for rank in home.ranks if rank not in group),
        tuple(rank for replica in case.base.replicas if replica is not home for rank in replica.ranks),
    )


def idle(plan: Plan, case: Situation, ranks: tuple[int, ...]) -> float:
    """GPU-seconds of an iteration in which `ranks` compute nothing."""
    lasts, busy = iteration_seconds(plan, case), computing(plan, case)
    return math.fsum(lasts - busy[rank] for rank in ranks)


def own_loss(case: Situation, slow: int) -> float:
    """Seconds by which the work of the slow rank takes longer than on a healthy one, if nothing is done."""
    busy = computing(as_it_is(case), case)[slow]
    return busy * (1 - case.speeds[slow])


def candidates(case: Situation, slow: int) -> dict[str, tuple[float, ...]]:
    """The unmitigated figures by every candidate definition."""
    plan, healthy = as_it_is(case), msgspec.structs.replace(case, speeds={})
    lasts = iteration_seconds(plan, case)
    apart = members(case, slow)
    found: dict[str, tuple[float, ...]] = {}
    for beyond, cumulative, share in itertools.product((False, True), repeat=3):
        groups = tuple(itertools.accumulate(apart)) if cumulative else apart
        idles = [idle(plan, case, group) - (idle(plan, healthy, group) if beyond else 0.0) for group in groups]
        loss = (1 - case.speeds[slow]) * lasts if share else own_loss(case, slow)
        name = ", ".join(
            (
                "idle beyond the healthy iteration's" if beyond else "all idle time",
                "levels cumulative" if cumulative else "levels apart",
                "own loss (1 - p) T" if share else "own loss extra busy time",
            )
        )
        found[name] = tuple(time_s / loss for time_s in idles)
    return found


def distance(figures: tuple[float, ...]) -> float:
    """From the published figures: root mean square of the relative errors."""
    return math.sqrt(statistics.fmean((a / b - 1) ** 2 for a, b in zip(figures, PUBLISHED, strict=True)))


def plans(case: Situation, slow: int) -> dict[str, tuple[Plan, Situation]]:
    """Each plan, and the situation that it is played in."""
    found = {"unmitigated": as_it_is(case)}
    for n in range(1, len(STEP_NAMES) + 1):
        found["paper's: " + ", ".join(STEP_NAMES[:n])] = progressive(case, STEP_NAMES[:n]).plan
    found["ours"] = decide(case).plan
    told = {name: (plan, case) for name, plan in found.items()}
    told["healthy"] = (as_it_is(case), msgspec.structs.replace(case, speeds={}))
    for name, plan in reachable(case, slow).items():
        told[f"reachable, {name}"] = (plan, case)
    return told


def shown(case: Situation, slow: int) -> list[Shown]:
    loss, levels = own_loss(case, slow), members(case, slow)
    first = [idle(as_it_is(case), case, group) for group in levels]
    rows = []
    for name, (plan, played) in plans(case, slow).items():
        idles = [idle(plan, played, group) for group in levels]
        lasts = iteration_seconds(plan, played)
        waiting = [rank for group in levels for rank in group if rank not in plan.layout.active]
        rows.append(
            Shown(
                job=case.schedule,
                orders="its own" if plan.orders else plan.schedule,
                slow_rank=slow,
                plan=name,
                layers=described(plan),
                seconds=lasts,
                idle=tuple(time_s / loss for time_s in idles),
                standby=len(waiting) * lasts / loss,
                ratio=tuple(now / before for now, before in zip(idles, first, strict=True)),
            )
        )
    return rows


def described(plan: Plan) -> str:
    """Layers of each stage, with the ranks where these are not four, and micro-batches of each replica."""
    replicas = [
        " ".join(f"{len(stage.layers)}" + (f"x{stage.tp}" if stage.tp != TP else "") for stage in replica.stages)
        for replica in plan.layout.replicas
    ]
    shares = "+".join(str(len(share)) for share in plan.assignment)
    return f"{' | '.join(replicas)}, {shares}" + (f", {len(plan.migrations)} moved" if plan.migrations else "")


def around(speeds: list[float], layers: int) -> Iterator[tuple[int, ...]]:
    """Layers of each stage, each within two of its proportional share."""
    due = [int(layers * speed / sum(speeds)) for speed in speeds]
    for counts in itertools.product(*(range(max(1, n - 2), n + 3) for n in due[:-1])):
        last = layers - sum(counts)
        if max(1, due[-1] - 2) <= last <= due[-1] + 2:
            yield (*counts, last)


def reachable(case: Situation, slow: int) -> dict[str, Plan]:
    """The fastest plans found, by the groups that the four ranks of the slow stage form."""
    first, *others = case.base.replicas
    place = case.base.place(slow)
    assert place is not None
    stages = [stage.ranks for stage in first.stages]
    healthy = tuple(rank for rank in stages[place.stage] if rank != slow)
    found: dict[str, Plan] = {}
    before, after = stages[: place.stage], stages[place.stage + 1 :]
    for name, whole in {
        "4": stages,
        "2, two stand by": [*before, healthy[:2], *after],
        "2, and 1 next to it": [*before, healthy[:2], healthy[2:], *after],
        "2, and 1 behind all": [*before, healthy[:2], *after, healthy[2:]],
    }.items():
        idle_ranks = tuple(sorted(set(first.ranks).difference(rank for ranks in whole for rank in ranks)))
        best = math.inf
        partitions = sorted(
            around([case.speed(ranks) for ranks in whole], case.model.layers),
            key=lambda counts: slowest_s(case, whole, counts),
        )
        for counts, own in itertools.product(partitions[:40], (6, 7, 8)):
            ends = list(itertools.accumulate(counts))
            spans = [(end - count, end - 1) for count, end in zip(counts, ends, strict=True)]
            mine = Replica(tuple(Stage(ranks, (span,)) for ranks, span in zip(whole, spans, strict=True)))
            plan = msgspec.structs.replace(
                as_it_is(case),
                layout=Layout((mine, *others), idle_ranks),
                assignment=(tuple(range(own)), tuple(range(own, case.micro_batches))),
            )
            lasts = iteration_seconds(plan, case)
            if lasts < best:
                best, found[name] = lasts, plan
    return found


def slowest_s(case: Situation, groups: list[tuple[int, ...]], counts: tuple[int, ...]) -> float:
    """A bound that prunes: the slowest stage's time for a micro-batch."""
    ends = list(itertools.accumulate(counts))
    return max(
        case.times.span(end - count, end - 1).total / case.speed(ranks)
        for ranks, count, end in zip(groups, counts, ends, strict=True)
    )


DELTAS = (0, 1, 2, 3)


def sweep(count: int) -> dict[str, list[float]]:
    """Geometric mean of an iteration's time over the healthy one's: without migration, and for each delta."""
    rng = random.Random(1)
    logs: dict[str, list[list[float]]] = {}
    for n in range(count):
        dp, pp, micro_batches = rng.choice((2, 2, 4)), rng.choice((4, 8)), rng.choice((8, 16))
        schedule = ("1f1b", "zero-bubble")[n % 2]
        victims = rng.sample(range(dp * pp), rng.choice((1, 1, 2, 3)))
        speeds = {victim: rng.choice((0.2, 0.4, 0.5, 0.7, 0.8)) for victim in victims}
        case = situation("llama2-13b", 1, dp, pp, micro_batches, schedule, 8192, speeds)
        case = msgspec.structs.replace(case, memory_bytes=None)  # of one device a stage, the model is too large
        healthy = iteration_seconds(as_it_is(case), msgspec.structs.replace(case, speeds={}))
        lost = rng.randrange(dp * pp)
        missing = msgspec.structs.replace(case, available=tuple(r for r in case.available if r != lost))
        starts = {
            "slow stages": (as_it_is(case), case),
            "slow stages, after repartition": (progressive(case, STEP_NAMES[:2]).plan, case),
            "slow stages and a lost one": (without(as_it_is(case), lost), missing),
        }
        for name, (start, told) in starts.items():
            plans = [start, *(migrate(start, told, delta=delta) for delta in DELTAS)]
            times = [iteration_seconds(plan, told) for plan in plans]
            logs.setdefault(f"{name}, {schedule}", []).append([math.log(time_s / healthy) for time_s in times])
    return {
        name: [math.exp(statistics.fmean(column)) for column in zip(*rows, strict=True)]
        for name, rows in sorted(logs.items())
    }


def without(plan: Plan, lost: int) -> Plan:
    """With a stage that has no ranks where `lost` was."""
    replicas = tuple(
        Replica(tuple(Stage(() if lost in stage.ranks else stage.ranks, stage.chunks) for stage in replica.stages))
        for replica in plan.layout.replicas
    )
    return msgspec.structs.replace(plan, layout=Layout(replicas))


def planning_ms(model: str, tp: int, dp: int, pp: int) -> tuple[float, int]:
    """Median of five whole decisions, warm, and the migrations of the plan: one stage lost, one GPU slow elsewhere."""
    case = situation(model, tp, dp, pp, MICRO_BATCHES, "zero-bubble", 8192, {tp * pp: 0.4})
    lost = case.base.replicas[0].stages[1].ranks
    case = msgspec.structs.replace(case, available=tuple(rank for rank in case.available if rank not in lost))
    took = []
    for _ in range(6):
        start = time.perf_counter()
        plan = progressive(case).plan
        took.append((time.perf_counter() - start) * 1000)
    return statistics.median(took[1:]), len(plan.migrations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence-length", type=int, default=8192)
    parser.add_argument("--speed", type=float, default=0.5)
    parser.add_argument("--schedule", choices=("1f1b", "zero-bubble"), help="default: one after the other")
    parser.add_argument("--sweep", type=int, default=60, help="random situations for delta")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=190)
    victims = [stage.ranks[0] for stage in Layout.uniform(tp=TP, pp=PP, dp=DP, layers=PP).replicas[0].stages]

    def case(slow: int, schedule: str) -> Situation:
        speeds = {slow: args.speed}
        return situation("llama2-13b", TP, DP, PP, MICRO_BATCHES, schedule, args.sequence_length, speeds)

    definitions: dict[int, dict[str, tuple[float, ...]]] = {}
    for length in (2048, args.sequence_length):
        last = situation("llama2-13b", TP, DP, PP, MICRO_BATCHES, "1f1b", length, {victims[-1]: args.speed})
        ranked = sorted(candidates(last, victims[-1]).items(), key=lambda entry: distance(entry[1]))
        title = f"Unmitigated under 1F1B, sequences of {length}, the slow GPU in the last stage"
        table = Table("definition", *LEVELS, "distance", title=title)
        table.add_row("published", *(f"{x:.2f}" for x in PUBLISHED))
        for name, figures in ranked:
            table.add_row(name, *(f"{x:.2f}" for x in figures), f"{distance(figures):.0%}")
        console.print(table)
        definitions[length] = dict(ranked)

    rows: list[Shown] = []
    for schedule in (args.schedule,) if args.schedule else ("1f1b", "zero-bubble"):
        table = Table(
            *("slow GPU", "plan", "layers (x ranks), micro-batches", "orders", "s", *LEVELS, "standing by"),
            *(f"{level} ratio" for level in LEVELS),
            title=f"Idle GPU time over the slow GPU's own loss, job under {schedule}; target {TARGET} for ours",
        )
        ratios = [b / a for a, b in zip(PUBLISHED, PUBLISHED_MITIGATED, strict=True)]
        table.add_row("?", "published unmitigated", "", "", "", *(f"{x:.2f}" for x in PUBLISHED))
        table.add_row(
            *("?", "published ResiHP", "", "", "", *(f"{x:.2f}" for x in PUBLISHED_MITIGATED), ""),
            *(f"{x:.2f}" for x in ratios),
            end_section=True,
        )
        for slow in victims:
            found = shown(case(slow, schedule), slow)
            rows += found
            for row in found:
                table.add_row(
                    *(f"{row.slow_rank}, stage {victims.index(slow)}", row.plan, row.layers, row.orders),
                    *(f"{row.seconds:.3f}", *(f"{x:.2f}" for x in row.idle), f"{row.standby:.2f}"),
                    *(f"{x:.2f}" for x in row.ratio),
                    end_section=row is found[-1],
                )
        console.print(table)
        for level, name in enumerate(LEVELS):
            ratios = [row.ratio[level] for row in rows if row.plan == "ours" and row.job == schedule]
            verdict = "met" if max(ratios) <= TARGET else "MISSED"
            told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            console.print(f"{schedule}, {name}: ours over unmitigated, slow stage 0 to {PP - 1}: {told}; {verdict}")

    swept = sweep(args.sweep)
    table = Table(
        "situation, schedule", "no migration", *(f"delta {delta}" for delta in DELTAS), title="Iteration over healthy"
    )
    for name, means in swept.items():
        table.add_row(name, *("cannot run" if math.isinf(mean) else f"{mean:.3f}" for mean in means))
    console.print(table)
    shapes = {"llama2-13b": (4, 2, 4), "qwen2.5-32b": (4, 2, 8), "qwen2.5-72b": (4, 4, 16)}
    times = {}
    for name, shape in shapes.items():
        gpus = math.prod(shape)
        try:
            took, moved = times[name] = planning_ms(name, *shape)
        except PlanError as error:
            console.print(f"paper's planner, {name} on {gpus} GPUs, a stage lost, a GPU slow: no plan, {error}")
            continue
        console.print(f"paper's planner, {name} on {gpus} GPUs, a stage lost, a GPU slow: {took:.1f} ms, {moved} moved")
    console.print("published: 1440 ms for 32B on 64 GPUs")
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "definitions": definitions,
                    "plans": [asdict(row) for row in rows],
                    "deltas": swept,
                    "planning_ms": {name: took for name, (took, _) in times.items()},
                },
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
