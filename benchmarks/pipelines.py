"""One pipeline with a slow link, and pipelines of uneven layers: what adapted orders and tuned layouts gain.

    python benchmarks/pipelines.py warm-up|tuner [--evaluations N] [--profiles FILE]

**warm-up.** A 14B model (46 layers, 8 stages of one GPU, 24 micro-batches) with 0 to 60 ms of extra delay on one link.
Measured on real hardware by others: the logs that PipeMorph (Adaptra) publishes, experiments/increasing-delay, whose
slow link is the one between stages 6 and 7, counted from 0; medians of the iterations with the delay. Fitted: one
constant, the seconds of one micro-batch on a stage, from the iteration without delay, which is 31 of them: 24
micro-batches and 7 stages to fill. Everything else is arithmetic on the timeline. How those seconds divide into F, B
and W makes no difference to 1F1B; adapted orders take 9:10:6, the profile that the same logs give of a middle stage.
Micro-batches alive are the most of any stage; 1F1B's first stage keeps 8, and the published system's 24 in its plans.

**tuner.** Three uneven models of ../shared/data/layer_profiles.json (arithmetic from public shapes). The baseline is
Megatron's interleaved 1F1B: layers spread evenly whatever they cost, the remainder to the first virtual stages,
embedding and head where they are, W with its B, transfers free. Twice: with the virtual degree that is fastest on the
timeline, of all that there are layers for, and with degree 2. Ours: without a limit on activations, and with the most
that any stage of that baseline keeps alive. The bound is of any pipeline: `least_seconds`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.cost.prices import Priced
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.orders.list_scheduling import ListScheduler, StageRules
from resihp.scheduler.orders.tuner import Task, Tuned, megatron, tune
from resihp.scheduler.orders.warm_up import Adapted, adapted, published_depths

STAGES, MICRO_BATCHES, SLOW_LINK = 8, 24, (6, 7)
DELAYS_MS = (0, 10, 20, 30, 40, 50, 60)
MEASURED_MS = (873, 1082, 1331, 1581, 1832, 2107, 2334)
PUBLISHED_MS = (None, 848, 854, 877, 853, 876, 895)
"""Of the published system: medians of iterations 10 to 15, which follow its change of orders."""
SPLIT = (9, 10, 6)
CAPS = (None, 16, 12, 8)

PROFILES = Path("../shared/data/layer_profiles.json")
PUBLISHED_MEAN, PUBLISHED_BEST = 1.42, 2.14
NODES = 1000
"""Nodes that `least_seconds` visits at most; where that is too few, its bound is a little lower than need be."""


def least_seconds(profile: Profile, speeds: Sequence[float], micro_batches: int, *, nodes: int = NODES) -> float:
    """No pipeline on stages of these speeds is faster, whatever its placement, cut and orders: a bound, never a price.

    A stage's own work for all micro-batches comes after the first of them has reached it. The stages in the order of
    their first virtual stages: the i-th is reached after one layer's forward on each of the i before it, at least (used
    where all speeds are equal). Layers may go to any stage, in any order, the last with the head and the first with the
    embedding, but are not cut: a mixed-integer program, whose own lower bound counts when it is cut short. Never below
    perfect balance, nor below the largest layer.
    """
    layers = len(profile.layers)
    items: dict[float, int] = {}
    for i in range(layers):
        total = profile.span(i, i).total
        items[total] = items.get(total, 0) + 1
    times, counts = [*items], [*items.values()]
    stages, kinds = len(speeds), len(items)
    perfect = max(sum(t * n for t, n in items.items()) / sum(speeds), max(times) / max(speeds)) * micro_batches
    if not perfect:
        return 0.0
    step = min(profile.span(i, i).f for i in range(layers)) / max(speeds) if len(set(speeds)) == 1 else 0.0
    size = stages * kinds + 1  # layers of each kind on each stage, then the time of all
    rows = lil_matrix((stages + kinds, size))
    lower, upper = np.full(stages + kinds, -np.inf), np.zeros(stages + kinds)
    for s in range(stages):
        for k, t in enumerate(times):
            rows[s, s * kinds + k] = micro_batches * t / perfect / speeds[s]
            rows[stages + k, s * kinds + k] = 1.0
        rows[s, size - 1] = -1.0
        upper[s] = -s * step / perfect
    lower[stages:] = upper[stages:] = counts
    objective = np.zeros(size)
    objective[-1] = 1.0
    result = milp(
        objective,
        integrality=np.array([*[1] * (size - 1), 0]),
        bounds=Bounds(np.array([*[0.0] * (size - 1), 1.0]), np.array([*counts * stages, math.inf])),
        constraints=LinearConstraint(rows.tocsr(), lower, upper),
        options={"node_limit": nodes, "mip_rel_gap": 1e-6},
    )
    bound = result.mip_dual_bound
    return perfect * max(1.0, float(bound) * (1 - 1e-6) if bound is not None and math.isfinite(bound) else 1.0)


def slow_pipeline(delay_ms: float) -> Priced:
    """The measured job, in milliseconds."""
    one = MEASURED_MS[0] / (MICRO_BATCHES + STAGES - 1)
    f, b, w = (one * part / sum(SPLIT) for part in SPLIT)
    late = tuple(
        tuple(float(delay_ms) if (min(a, b), max(a, b)) == SLOW_LINK else 0.0 for b in range(STAGES))
        for a in range(STAGES)
    )
    replica = Layout.uniform(tp=1, pp=STAGES, dp=1, layers=STAGES).replicas[0]
    return Priced(replica, ((Times(f, b, w),),) * STAGES, late)


def published_rule(priced: Priced, delay_ms: float) -> tuple[float, float]:
    """Adaptra's rule, replayed with each assumed delay 0, 5, ... ms: least milliseconds, and what they keep alive."""
    plan = Plan(epoch=0, layout=Layout((priced.replica,)), assignment=(tuple(range(MICRO_BATCHES)),))
    lists = ListScheduler(plan, (priced.shape,), lambda a, b: priced.late[a.stage][b.stage])
    found = []
    for assumed in range(0, int(delay_ms) + 1, 5):
        depths = published_depths(priced, assumed / delay_ms if delay_ms else 0.0)
        orders = lists.run(StageRules(split=True, limits=depths))
        found.append((lists.play(orders).makespan, max(lists.alive(orders))))
    return min(found)


def one_forward_one_backward(priced: Priced) -> float:
    plan = Plan(epoch=0, layout=Layout((priced.replica,)), assignment=(tuple(range(MICRO_BATCHES)),))
    lists = ListScheduler(plan, (priced.shape,), lambda a, b: priced.late[a.stage][b.stage])
    return lists.play(orders_of(plan)).makespan


def warm_up(console: Console, evaluations: int) -> None:
    table = Table(title="14B, 8 stages, 24 micro-batches, delay on the link 6-7: ms an iteration (most alive)")
    for name in ("delay", "measured", "timeline", "error", "published", "its rule", "ours, any memory"):
        table.add_column(name, justify="right")
    for name in ("at most 16", "at most 12", "at most 8", "ours, W with B"):
        table.add_column(name, justify="right")
    worst, above = 0.0, 0
    for delay, measured, published in zip(DELAYS_MS, MEASURED_MS, PUBLISHED_MS, strict=True):
        priced = slow_pipeline(delay)
        predicted = one_forward_one_backward(priced)
        worst = max(worst, abs(predicted / measured - 1))
        ours = [
            adapted(
                priced,
                range(MICRO_BATCHES),
                split=True,
                most_alive=() if cap is None else (cap,) * STAGES,
                evaluations=evaluations,
            )
            for cap in CAPS
        ]
        whole = adapted(priced, range(MICRO_BATCHES), evaluations=evaluations)
        above += published is not None and ours[0].seconds > published
        rule_ms, rule_alive = published_rule(priced, delay)
        table.add_row(
            f"{delay} ms",
            str(measured),
            f"{predicted:.0f}",
            f"{predicted / measured - 1:+.1%}",
            "-" if published is None else str(published),
            f"{rule_ms:.0f} ({rule_alive:.0f})",
            *map(_shown, ours),
            _shown(whole),
        )
    console.print(table)
    console.print(
        f"fitted: {MEASURED_MS[0] / 31:.2f} ms for a micro-batch on a stage; largest error {worst:.1%}, limit 3 %; "
        f"delays at which ours is above the published system: {above} of {len(DELAYS_MS) - 1}"
    )


def _shown(found: Adapted) -> str:
    return f"{found.seconds:.0f} ({max(found.alive):.0f})"


def profiles(path: Path) -> dict[str, Profile]:
    """Models of the file, by name, in seconds."""

    def times(entry: dict[str, float]) -> Times:
        return Times(entry["f"] / 1e3, entry["b"] / 1e3, entry["w"] / 1e3)

    return {
        name: Profile(
            layers=tuple(times(layer) for layer in model["layers"]),
            embedding=times(model["embedding"]),
            head=times(model["head"]),
        )
        for name, model in json.loads(path.read_text())["models"].items()
    }


class Comparison(msgspec.Struct, frozen=True):
    """Ours against one baseline, without and with its memory as the limit."""

    baseline: Tuned
    free: Tuned
    same_memory: Tuned
    bound_s: float

    def gains(self) -> tuple[float, float, float]:
        """Without a limit, with the baseline's memory, and the most that is possible."""
        base = self.baseline.seconds
        return base / self.free.seconds, base / self.same_memory.seconds, base / self.bound_s


def compare(task: Task, evaluations: int) -> tuple[Comparison, Comparison]:
    """Against Megatron's fastest virtual degree, and against degree 2."""
    degrees = range(1, len(task.profile.layers) // task.stages + 1)
    found = [megatron(task, chunks) for chunks in degrees]
    bound = least_seconds(task.profile, (1.0,) * task.stages, task.micro_batches, nodes=20_000)
    free = tune(task, evaluations=evaluations)
    comparisons = []
    for baseline in (min(found, key=lambda tuned: tuned.seconds), found[1]):
        cap = (max(baseline.alive),) * task.stages
        limited = tune(msgspec.structs.replace(task, most_alive=cap), evaluations=evaluations)
        comparisons.append(Comparison(baseline, free, limited, bound))
    return comparisons[0], comparisons[1]


def tuner(console: Console, path: Path, evaluations: int) -> None:
    if not path.exists():
        console.print(f"{path} is not there: nothing to tune")
        return
    tables, gains = [], []
    for title in ("fastest virtual degree", "virtual degree 2"):
        table = Table(title=f"Tuned pipelines against Megatron's interleaved 1F1B, {title}")
        for name in ("model", "stages", "micro-batches", "degree", "baseline s", "alive", "ours s", "alive", "gain"):
            table.add_column(name, justify="left" if name == "model" else "right")
        for name in ("same memory s", "gain", "bound s", "its gain", "reached"):
            table.add_column(name, justify="right")
        tables.append(table)
        gains.append([])
    for name, profile in profiles(path).items():
        for stages in (4, 8):
            for per_stage in (2, 4):
                task = Task(profile=profile, stages=stages, micro_batches=per_stage * stages)
                for table, row, compared in zip(tables, gains, compare(task, evaluations), strict=True):
                    base, free, same = compared.baseline, compared.free, compared.same_memory
                    free_gain, same_gain, most = compared.gains()
                    row.append((free_gain, same_gain, most))
                    table.add_row(
                        name,
                        str(stages),
                        str(task.micro_batches),
                        str(len(base.chunks[0])),
                        f"{base.seconds:.3f}",
                        f"{max(base.alive):.0f}",
                        f"{free.seconds:.3f}",
                        f"{max(free.alive):.0f}",
                        f"{free_gain:.3f}",
                        f"{same.seconds:.3f}",
                        f"{same_gain:.3f}",
                        f"{compared.bound_s:.3f}",
                        f"{most:.3f}",
                        f"{free_gain / most:.1%}",
                    )
    for table, row in zip(tables, gains, strict=True):
        console.print(table)
        for label, values in zip(("without a limit", "same memory", "bound"), zip(*row, strict=True), strict=True):
            console.print(f"  {label}: mean {statistics.fmean(values):.3f}, best {max(values):.3f}")
    console.print(
        f"alive: layers' activations of one micro-batch, most of any stage; published on real machines: mean "
        f"{PUBLISHED_MEAN}, best {PUBLISHED_BEST}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("warm-up", "tuner"))
    parser.add_argument("--evaluations", type=int, help="orders made and played for each figure")
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    options = parser.parse_args(arguments)
    console = Console(width=180)
    if options.what == "warm-up":
        warm_up(console, 120 if options.evaluations is None else options.evaluations)
    else:
        tuner(console, options.profiles, 800 if options.evaluations is None else options.evaluations)


if __name__ == "__main__":
    main()
