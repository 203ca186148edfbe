"""The planner: how near to the best there is, and how long it takes.

    python -m benchmarks.planner best [--instances 200]    against all layouts there are, for up to 8 devices
    python -m benchmarks.planner time                      up to 8, 64, 256 and 16,384 devices, damaged by chance
    python -m benchmarks.planner search [--seconds 1]      a search after the instant plan, against another program's
    python -m benchmarks.planner anneal [--jobs 200] [--seconds 60] [--workers 2] [--resume FILE]
                                                           random jobs, against an independent planner
    python -m benchmarks.planner fail-stop [--orders 3] [--seconds 1]
                                                           GPUs fail one after the other, against the paper's figures

`benchmarks/idle_time.py` has the amplification of idle time, `benchmarks/pipelines.py` the tuner and slow links.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import fail_stop, near_best
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
    """`micro_batches`: of a replica. `failures`: at most, and as many where `exactly`. `limit_s`: what a decision may
    take."""

    model: str
    hardware: str
    tp: int
    dp: int
    pp: int
    micro_batches: int
    failures: int
    limit_s: float
    exactly: bool = False
    sequence: int = 2048


SIZES = (
    Sized("llama2-30b", "a100", 4, 2, 8, 8, 4, 0.02),
    Sized("llama2-70b", "a100", 4, 4, 16, 64, 8, 0.06),
    Sized("llama3-405b", "h100", 8, 128, 16, 16, 32, 0.5, exactly=True, sequence=1024),
)
FEW_DEVICES = tuple(Sized("llama2-7b", "a100", 2, 2, 2, count, 3, 0.3) for count in (8, 32, 128, 512))
TINY_MICRO_BATCHES = (8, 32, 128, 512)
"""Of a whole batch, for `instance`."""
TINY_LIMIT_S = 0.3
DAMAGES = 20
ENOUGH_S = 20.0
"""Of one row: after it, three damages will do."""


def sized(size: Sized, seed: int = 1) -> Situation:
    """Some devices dead, and where not all failures are deaths, some slow."""
    sequence = size.sequence
    model = catalogue.model(size.model, sequence)
    hardware = catalogue.KNOWN_HARDWARE[size.hardware]
    devices = size.tp * size.dp * size.pp
    rng = random.Random(seed)
    happened = rng.sample(range(devices), size.failures if size.exactly else rng.randint(1, size.failures))
    dead = happened if size.exactly else happened[: rng.randint(0 if len(happened) > 1 else 1, len(happened))]
    return Situation(
        epoch=2,
        base=Layout.uniform(tp=size.tp, pp=size.pp, dp=size.dp, layers=model.layers),
        available=tuple(sorted(set(range(devices)).difference(dead))),
        nodes={rank: f"n{rank // 8 + 1:04d}" for rank in range(devices)},
        model=model,
        micro_batches=size.micro_batches * size.dp,
        tokens=sequence,
        tp=size.tp,
        pp=size.pp,
        sequence_parallel=True,
        speeds={rank: round(rng.uniform(0.2, 0.95), 2) for rank in happened if rank not in dead},
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


def timed(case: Situation) -> tuple[float, Plan | None]:
    """Seconds of processor time of `decide`, and its plan if there is one."""
    began = time.process_time()
    try:
        plan = decide(case).plan
    except LayoutError:
        plan = None
    return time.process_time() - began, plan


def rows() -> Iterator[tuple[str, ...]]:
    """The first decision, which fills what is remembered from one to the next, is told apart from the others."""
    for size in (*SIZES, *FEW_DEVICES):
        cold = timed(sized(size, seed=0))[0]
        yield (
            f"{size.tp * size.dp * size.pp:,}",
            f"{size.model} ({size.tp},{size.dp},{size.pp}) x {size.micro_batches}",
            *_cells(cold, [sized(size, seed=1 + i) for i in range(DAMAGES)], size.limit_s),
        )
    for count in TINY_MICRO_BATCHES:
        first, *few = (msgspec.structs.replace(instance(i), micro_batches=count) for i in range(1 + DAMAGES))
        yield ("up to 8", f"instances of 8 layers, {count} in all", *_cells(timed(first)[0], few, TINY_LIMIT_S))


def _cells(cold: float, cases: list[Situation], limit: float) -> tuple[str, ...]:
    seconds, again = [], []
    for case in cases:
        took, plan = timed(case)
        seconds.append(took)
        if plan is not None:
            again.append(timed(one_more(case, plan))[0])
        if sum(seconds) + sum(again) > ENOUGH_S and len(seconds) >= 3:
            break
    return (
        str(len(seconds)),
        f"{1000 * cold:.0f}",
        f"{1000 * statistics.median(seconds):.1f}",
        f"{1000 * max(seconds):.1f}",
        f"{1000 * max(again, default=math.nan):.1f}",
        f"{1000 * limit:.0f}",
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}",
    )


def times() -> None:
    """Milliseconds of processor time."""
    table = Table("devices", "job", "damages", "first", "median", "worst", "one more, worst", "limit", "most MB so far")
    for row in rows():
        print("  ".join(row), flush=True)
        table.add_row(*row)
    Console(width=140).print(table)


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
    choices = ("best", "time", "search", "anneal", "fail-stop")
    parser.add_argument("what", nargs="?", choices=choices, help="default: best, time and search")
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--seconds", type=float, help="of a search: 1; of anneal's reference, for each job: 60")
    parser.add_argument("--jobs", type=int, default=200, help="anneal: how many")
    parser.add_argument("--first", type=int, default=1, help="anneal: the first seed")
    parser.add_argument("--large", action="store_true", help="anneal: jobs of 256 devices")
    parser.add_argument("--workers", type=int, default=1, help="anneal: processes")
    parser.add_argument("--resume", "--json", type=Path, help="anneal: results, a line for each job; those there stay")
    parser.add_argument("--orders", type=int, default=3, help="fail-stop: of failures")
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
    if args.what == "fail-stop":
        fail_stop.fail_stop(args.orders, 1.0 if args.seconds is None else args.seconds)


if __name__ == "__main__":
    main()
