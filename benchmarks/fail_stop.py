"""GPUs fail one after the other, as in the paper's Table 6: `python -m benchmarks.planner fail-stop`.

LLaMA2-13B and Qwen2.5-14B at (TP, DP, PP) = (4, 2, 4) on 32 A100, LLaMA2-30B at (4, 2, 8) on 64, sequences of 8K, one
GPU an event, nobody comes back. A session has as many events as make an eighth, a quarter, half of the GPUs (every 2 h,
1 h and 30 min). Each event is planned from the plan before: the instant answer, then a second of search on one core.
The paper does not say how many micro-batches; here 8 a replica, 1F1B.

**Shares.** What is published is the average throughput of a session over that of the job without faults: here the mean
over equal times between events, the last event ending the session. Also told is what is left after the last event.

**Fault-free** is the job as it was started, layers even, Megatron's 1F1B: the paper's is not tuned, either. Even layers
leave the last stage with the head on top, so a plan made anew may be faster with fewer GPUs; what the same search gains
while nothing has failed is told, too.

**Bound.** No planner can be above it in the same model of time (`least_seconds`): a stage begins once the first
micro-batch has passed those before it and ends before the last one goes back through them, no group has more than TP
GPUs, and a replica has room for the model. A group of fewer GPUs is priced as slower in proportion: what real ones gain
there, less to be gathered, is neither in ours nor in the bound, but in what is published.
"""

from __future__ import annotations

import random
import statistics

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.near_best import searched
from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.scheduler import decide
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.situation import Situation
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.question import Question, first_plan, pose

SEQUENCE = 8192
MICRO_BATCHES = 8
"""Of a replica."""


class Setting(msgspec.Struct, frozen=True):
    """`published`: by the part of the GPUs that have failed at the end of a session."""

    model: str
    tp: int
    dp: int
    pp: int
    published: dict[float, float]


SETTINGS = (
    Setting("llama2-13b", 4, 2, 4, {0.125: 0.988, 0.25: 0.898, 0.5: 0.739}),
    Setting("llama2-30b", 4, 2, 8, {0.125: 0.950, 0.25: 0.867, 0.5: 0.699}),
    Setting("qwen2.5-14b", 4, 2, 4, {0.125: 0.949, 0.25: 0.859, 0.5: 0.756}),
)


def asked(setting: Setting) -> Question:
    return Question(
        model=catalogue.model(setting.model, SEQUENCE),
        hardware=catalogue.KNOWN_HARDWARE["a100"],
        tp=setting.tp,
        dp=setting.dp,
        pp=setting.pp,
        micro_batches=MICRO_BATCHES,
        gpus_per_node=8,
        sequence_parallel=True,
    )


def session(setting: Setting, seed: int, seconds: float) -> list[float]:
    """GPUs die in an order drawn by `seed` until half of them are gone: shares of fault-free throughput after 0, 1, ...
    of them."""
    question = asked(setting)
    start = first_plan(question)
    case = pose(question, start)
    fault_free = iteration_seconds(start, case)
    order = random.Random(f"fail-stop {seed}").sample(case.available, len(case.available) // 2)
    shares = [1.0]
    for rank in order:
        left = tuple(other for other in case.available if other != rank)
        case = msgspec.structs.replace(case, epoch=case.epoch + 1, available=left)
        try:
            decision = searched(case, decide(case), seconds, seed)
        except LayoutError:
            shares.append(0.0)
            continue
        shares.append(fault_free / decision.seconds)
        case = msgspec.structs.replace(case, base=decision.plan.layout)
    return shares


def least_seconds(case: Situation, gpus: int) -> float:
    """What an iteration of a plan takes at least: whole pipelines of healthy GPUs, one chunk a stage, W with its B.

    Let t_s be what stage s of a replica of m micro-batches takes for one. The first has to pass the stages before it,
    and go back through them: T >= t_0 + ... + t_(s-1) + m t_s, and so t_s <= T / m * (1 - 1 / m)^s at best. The work w
    of a micro-batch is the sum of v_s t_s over groups of speeds v_s, TP at most, powers of two, the largest first. From
    this follows how many micro-batches so many GPUs can do in T, one replica of them needing room for the state and
    one micro-batch's activations, and by trying all numbers of GPUs for replicas, how many all can do together.
    """
    work = case.times.span(0, case.model.layers - 1).total
    least = _least_gpus(case)
    low, high = 0.0, 4.0 * work * case.micro_batches / least
    while high - low > 1e-4 * high:
        seconds = (low + high) / 2
        alone = [0] * least + [_most_micro_batches(work / seconds, n, case) for n in range(least, gpus + 1)]
        together = [0] * (gpus + 1)
        for n in range(1, gpus + 1):
            together[n] = max(together[n - mine] + alone[mine] for mine in range(1, n + 1))
        low, high = (low, seconds) if together[gpus] >= case.micro_batches else (seconds, high)
    return low + case.times.step_s


def _most_micro_batches(work: float, gpus: int, case: Situation) -> int:
    """Of one replica in a time of 1."""
    speeds = [case.tp] * (gpus // case.tp)
    speeds += [1 << q for q in reversed(range(case.tp.bit_length())) if (gpus % case.tp) >> q & 1]
    found = 0
    for m in range(1, case.micro_batches + 1):
        if sum(speed / m * (1 - 1 / m) ** s for s, speed in enumerate(speeds)) < work:
            break
        found = m
    return found


def _least_gpus(case: Situation) -> int:
    """That have room for the state and one micro-batch's activations together."""
    if case.room_bytes is None:
        return 1
    plan = Plan(
        epoch=1,
        layout=Layout.uniform(tp=1, pp=1, dp=1, layers=case.model.layers),
        assignment=((0,),),
        sequence_parallel=case.sequence_parallel,
    )
    return -(-memory.needed_bytes(plan, 0, case.model, case.tokens) // case.room_bytes)


def fail_stop(orders: int, seconds: float) -> None:
    both = ("a session", "its end")
    table = Table(
        "model", "GPUs gone", "published", *(f"{what}, {when}" for what in ("ours", "bound") for when in both)
    )
    notes = []
    for setting in SETTINGS:
        question = asked(setting)
        case = pose(question, start := first_plan(question))
        fault_free, world = iteration_seconds(start, case), question.world
        sessions = [session(setting, seed, seconds) for seed in range(orders)]
        bounds = [fault_free / least_seconds(case, world - gone) for gone in range(world // 2 + 1)]
        for part, published in setting.published.items():
            events = int(part * world)
            cells = (
                statistics.median(statistics.fmean(shares[:events]) for shares in sessions),
                statistics.median(shares[events] for shares in sessions),
                statistics.fmean(bounds[:events]),
                bounds[events],
            )
            row = (f"{events} of {world}", f"{published:.3f}", *(f"{cell:.3f}" for cell in cells))
            table.add_row(setting.model, *row)
        tuned = fault_free / searched(case, decide(case), seconds).seconds
        notes.append(f"{setting.model}: {tuned:.3f} if it were tuned while nothing has failed, {bounds[0]:.3f} at most")
    Console(width=140).print(table)
    for note in notes:
        print(note)
