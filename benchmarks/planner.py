"""The planner: how near to the best there is, and how long it takes.

    python -m benchmarks.planner best [--instances 200]    against all layouts there are, for up to 8 devices
    python -m benchmarks.planner time                      64, 256 and 16,384 devices
    python -m benchmarks.planner search [--seconds 1]      a search after the instant plan, against another program's
    python -m benchmarks.planner anneal [--jobs 200] [--seconds 60] [--workers 2] [--resume FILE]
                                                           random jobs, against an independent planner

`benchmarks/idle_time.py` has the amplification of idle time, `benchmarks/pipelines.py` the tuner and slow links.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import near_best
from benchmarks.exhaustive import Exhaustive
from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, validate
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler import decide
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts.paper_planner import progressive
from resihp.scheduler.situation import Situation
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.question import Question, first_plan, pose

TINY = ModelSpec(layers=8, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=64, sequence=64)
GRIDS = ((1, 2, 4), (1, 4, 2), (2, 2, 2), (2, 1, 4), (4, 2, 1), (2, 4, 1), (4, 1, 2), (1, 8, 1), (1, 3, 2), (2, 3, 1))
ROOM = (1.0, 1.3, 1.6, 2.2, 100.0)
"""Memory of a device, in what the fullest one needs at first."""


def instance(seed: int) -> Situation:
    """Up to 8 devices, 8 layers, 8 micro-batches; some devices dead, some slow, memory tight or ample."""
    rng = random.Random(seed)
    tp, pp, dp = rng.choice(GRIDS)
    devices = tp * pp * dp
    per_node = rng.choice((4, 8)) if tp < 4 else 4 * rng.choice((1, 2))
    base = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=8)
    dead = rng.sample(range(devices), rng.choice((0, 1, 1, 2, 3)))
    left = [rank for rank in range(devices) if rank not in dead]
    slow = rng.sample(left, rng.choice((0, 1, 1, 2, 3) if dead else (1, 1, 2, 3)))
    plan = Plan(epoch=1, layout=base, assignment=spread(8, dp))
    need = max(memory.needed_bytes(plan, rank, TINY, TINY.sequence) for rank in base.active)
    return Situation(
        epoch=2,
        base=base,
        available=tuple(rank for rank in range(devices) if rank not in dead),
        nodes={rank: f"n{rank // per_node + 1}" for rank in range(devices)},
        model=TINY,
        micro_batches=8,
        tp=tp,
        pp=pp,
        speeds={rank: round(rng.uniform(0.2, 0.95), 2) for rank in slow},
        memory_bytes=int(need * rng.choice(ROOM)),
        tokens=TINY.sequence,
        fresh=True,  # all layouts are looked at, however much has to move
    )


class Compared(msgspec.Struct, frozen=True):
    seed: int
    best: float
    ours: float
    progressive: float
    seconds: float

    @property
    def gap(self) -> float:
        """Relative; negative where ours also has orders or migrations that the search over layouts has not."""
        if math.isinf(self.best):
            return 0.0 if math.isinf(self.ours) else -1.0
        return self.ours / self.best - 1


def compared(seed: int) -> Compared:
    """One instance; raises AssertionError if our plan is none, does not fit, or takes longer than it says."""
    case = instance(seed)
    best = Exhaustive(case).best_seconds()
    began = time.perf_counter()
    ours = paper = math.inf
    try:
        decision = decide(case)
        ours = decision.seconds
    except LayoutError:
        decision = None
    took = time.perf_counter() - began
    if decision is not None:
        validate(decision.plan.layout, case.model)
        assert case.memory_bytes is not None
        assert memory.obstacle(decision.plan, case.model, case.memory_bytes, case.tokens) is None, seed
        assert math.isclose(iteration_seconds(decision.plan, case), ours, rel_tol=1e-9), seed
    with contextlib.suppress(LayoutError):
        paper = progressive(case).seconds
    return Compared(seed, best, ours, paper, took)


def best(instances: int) -> None:
    found = [compared(seed) for seed in range(instances)]
    runnable = [one for one in found if math.isfinite(one.best)]
    gaps = [one.gap for one in found]
    table = Table("instances", "can run", "within 1 %", "worst", "mean", "worse than progressive", "median s", "most s")
    table.add_row(
        str(len(found)),
        str(len(runnable)),
        f"{sum(gap <= 0.01 for gap in gaps) / len(gaps):.1%}",
        f"{max(gaps):+.2%}",
        f"{statistics.fmean(one.gap for one in runnable):+.2%}",
        str(sum(one.ours > one.progressive * (1 + 1e-9) for one in found)),
        f"{statistics.median(one.seconds for one in found):.3f}",
        f"{max(one.seconds for one in found):.3f}",
    )
    Console().print(table)
    for one in found:
        if one.gap > 0.01 or one.ours > one.progressive * (1 + 1e-9):
            print(f"seed {one.seed}: best {one.best:.4g}, ours {one.ours:.4g}, progressive {one.progressive:.4g}")


class Sized(msgspec.Struct, frozen=True):
    model: str
    hardware: str
    tp: int
    dp: int
    pp: int
    micro_batches: int
    failures: int


SIZES = (
    Sized("llama2-30b", "a100", 4, 2, 8, 8, 2),
    Sized("llama2-70b", "a100", 4, 4, 16, 16, 4),
    Sized("llama3-405b", "h100", 8, 128, 16, 16, 32),
)


def sized(size: Sized, sequence: int = 2048) -> Situation:
    model = catalogue.model(size.model, sequence)
    hardware = catalogue.HARDWARE[size.hardware]
    devices = size.tp * size.dp * size.pp
    dead = random.Random(1).sample(range(devices), size.failures)
    return Situation(
        epoch=2,
        base=Layout.uniform(tp=size.tp, pp=size.pp, dp=size.dp, layers=model.layers),
        available=tuple(sorted(set(range(devices)).difference(dead))),
        nodes={rank: f"n{rank // 8 + 1:04d}" for rank in range(devices)},
        model=model,
        micro_batches=size.micro_batches * size.dp,
        tokens=sequence // 2,  # 16-bit activations
        tp=size.tp,
        pp=size.pp,
        sequence_parallel=True,
        memory_bytes=hardware.memory_bytes,
        profile=catalogue.profile(model, hardware, sequence_length=sequence, tp=size.tp, pp=size.pp, dp=size.dp),
    )


def one_more(case: Situation, plan: Plan) -> Situation:
    """The same job under `plan`, when a further device dies."""
    victim = plan.layout.replicas[-1].stages[0].ranks[0]
    left = tuple(rank for rank in case.available if rank != victim)
    return msgspec.structs.replace(case, epoch=3, base=plan.layout, available=left)


class Posed(msgspec.Struct, frozen=True):
    """A question, and the best answer that an annealing of minutes in another program found."""

    model: str
    question: Question
    best: float


def posed(model: str, tp: int, dp: int, pp: int, best: float, sequence: int = 4096, **more: Any) -> Posed:
    given: dict[str, Any] = {"micro_batches": 8, "gpus_per_node": 8, "sequence_parallel": True}
    shape = catalogue.model(model, sequence)
    return Posed(
        model, Question(model=shape, hardware=catalogue.hardware("a100"), tp=tp, dp=dp, pp=pp, **given | more), best
    )


POSED = (
    posed("llama2-13b", 4, 2, 2, 2.543, failed=(15,), slow={11: 0.5}),
    posed("llama2-13b", 4, 4, 2, 2.903, failed=(1, 10, 19, 24)),
    posed("llama2-13b", 4, 2, 4, 1.512, failed=(1, 6, 9, 14)),
    posed("llama2-13b", 4, 2, 4, 1.326, failed=(1, 6, 9, 14), schedule="zero-bubble"),
    posed("llama2-13b", 4, 2, 4, 1.435, failed=(16, 28)),
    posed("llama2-13b", 4, 2, 4, 1.435, failed=(5, 22)),
    posed("llama2-30b", 4, 2, 8, 2.358, failed=(5, 37)),
    posed("llama2-30b", 4, 2, 8, 6.273, failed=(5, 37), micro_batches=32),
    posed("llama2-30b", 4, 2, 8, 4.876, sequence=8192, zero_1=True, failed=(12, 13, 45)),
)


def timed(case: Situation, repeats: int = 5) -> tuple[float, Plan]:
    """Median seconds of `decide`, and its plan."""
    seconds: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        decision = decide(case)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), decision.plan


def rows() -> Iterator[tuple[str, ...]]:
    decide(instance(1))
    for size in SIZES:
        case = sized(size)
        healthy = (
            iteration_seconds(
                Plan(epoch=1, layout=case.base, assignment=spread(case.micro_batches, size.dp)),
                msgspec.structs.replace(case, available=case.base.ranks),
            )
            if size.dp < 100
            else math.nan
        )
        seconds, plan = timed(case)
        again, _ = timed(one_more(case, plan))
        decision = decide(case)
        yield (
            f"{size.tp * size.dp * size.pp:,}",
            f"{size.model} ({size.tp},{size.dp},{size.pp})",
            str(size.failures),
            f"{1000 * seconds:.1f}",
            f"{1000 * again:.1f}",
            f"{decision.seconds:.3f}" + ("" if math.isnan(healthy) else f" ({healthy:.3f} healthy)"),
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}",
        )


def times() -> None:
    table = Table("devices", "job", "failures", "plan ms", "one more ms", "iteration s", "most MB so far")
    for row in rows():
        table.add_row(*row)
    Console().print(table)


def search(seconds: float) -> None:
    """Three seeds each, the median: seconds are a processor's own."""
    table = Table("job", "gone or slow", "at once, s", f"after {seconds:g} s", "best known", "off", "trials")
    off = []
    for posed in POSED:
        question = posed.question
        case = pose(question, first_plan(question))
        instant = decide(case)
        found, trials = [], []
        for seed in range(3):
            began = time.process_time()
            anytime = Anytime(case, instant, seed)
            tried = 0
            while time.process_time() - began < seconds:
                anytime.run(20)
                tried += 20
            found.append(anytime.decision().seconds)
            trials.append(tried)
        after = statistics.median(found)
        off.append(after / posed.best - 1.0)
        happened = [*map(str, question.failed), *(f"{rank}:{speed}" for rank, speed in question.slow.items())]
        table.add_row(
            f"{posed.model} ({question.tp},{question.dp},{question.pp}) x {question.micro_batches}",
            " ".join(happened),
            f"{instant.seconds:.3f}",
            f"{after:.3f}",
            f"{posed.best:.3f}",
            f"{off[-1]:+.1%}",
            f"{statistics.median(trials):.0f}",
        )
    Console().print(table)
    print(f"within 1 % of the best known: {sum(one <= 0.01 for one in off)} of {len(off)}; worst {max(off):+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    choices = ("best", "time", "search", "anneal")
    parser.add_argument("what", nargs="?", choices=choices, help="default: best, time and search")
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--seconds", type=float, help="of a search: 1; of anneal's reference, for each job: 60")
    parser.add_argument("--jobs", type=int, default=200, help="anneal: how many")
    parser.add_argument("--first", type=int, default=1, help="anneal: the first seed")
    parser.add_argument("--large", action="store_true", help="anneal: jobs of 256 devices")
    parser.add_argument("--workers", type=int, default=1, help="anneal: processes")
    parser.add_argument("--resume", "--json", type=Path, help="anneal: results, a line for each job; those there stay")
    parser.add_argument("--known", type=Path, help="anneal: results of an earlier run, whose plans count as known")
    args = parser.parse_args()
    if args.what in ("best", None):
        best(args.instances)
    if args.what in ("time", None):
        times()
    if args.what in ("search", None):
        search(args.seconds or 1.0)
    if args.what == "anneal":
        seeds = range(args.first, args.first + args.jobs)
        seconds = 60.0 if args.seconds is None else args.seconds
        near_best.report(
            near_best.run(seeds, seconds, large=args.large, workers=args.workers, out=args.resume, known=args.known)
        )


if __name__ == "__main__":
    main()
