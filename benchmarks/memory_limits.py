"""Whether plans stay within memory, and whether jobs are refused that have a plan.

    python -m benchmarks.memory_limits [--jobs 300] [--first 1] [--seconds 10] [--search 0.5] [--json FILE]

Random jobs of 16 to 64 devices (`benchmarks.random_jobs`), those with tight memory. Each is answered at once and after
a short search; neither plan may need more than a device has, in an iteration or on the way to it. A job that is refused
goes to the reference planner (`benchmarks.reference_planner`) for `--seconds`: if that finds a plan that is legal, also
on the way to it, the refusal was wrong.

What the model of memory says of state, in an iteration and on the way, is compared with what the executor allocates
for the same plans, of the job's real model: tensors without memory (torch's "meta" device), each counted once. The
executor does not share optimizer state (ZeRO-1): such jobs are counted as if it were not shared.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import torch
from megatron.core.transformer import TransformerConfig
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.random_jobs import kinds, random_question, told
from benchmarks.reference_planner import ReferencePlanner
from resihp.errors import LayoutError
from resihp.executor.engine import Engine
from resihp.executor.state.optimizer import AdamW
from resihp.executor.state.rank_state import HeldPart, State
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.parallelism.workload import MicroBatch
from resihp.scheduler import decide
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.candidates import transition_obstacle
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.held_state import holdings
from resihp.scheduler.cost.transition_memory import beside
from resihp.scheduler.orders.lanes import overfull
from resihp.scheduler.situation import Situation
from resihp.scheduler.what_if.question import Question, first_plan, pose

TIGHT = "tight memory"
RANKS = 3
"""Of each job whose state is allocated: those that hold the most on the way, or change at all."""


class Result(msgspec.Struct, kw_only=True):
    """One job: what was refused or too large, and how far the model of memory is off the executor's account."""

    seed: int
    job: str
    refused: str = ""
    wrongly: bool = False
    """Refused, and the reference has a plan."""
    seconds: float | None = None
    too_large: list[str] = []
    off: list[float] = []
    moved: int = 0
    """Of the ranks that were compared, how many hold something else than before."""


class Accountant(Engine):
    """An executor's engine that allocates state without memory."""

    def __init__(self, model: ModelSpec) -> None:
        bf16 = {"bf16": True, "params_dtype": torch.bfloat16} if model.precision == "bf16" else {}
        config = TransformerConfig(
            num_layers=model.layers,
            hidden_size=model.hidden,
            num_attention_heads=model.heads,
            num_query_groups=model.kv_groups,
            ffn_hidden_size=model.ffn_hidden,
            gated_linear_unit=model.gated,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **bf16,
        )
        super().__init__(
            config,
            vocab_size=model.vocab,
            vocab_multiple=model.vocab_multiple,
            tied=model.tied_embeddings,
            dataset=_OneToken(),
            optimizer=AdamW(),
            seed=1,
            sequence=model.sequence,
        )
        self.device = self._builder.device = torch.device("meta")

    def held(self, old: Plan, new: Plan, rank: int) -> tuple[int, int]:
        """Bytes that a rank has in an iteration of `new`, activations left out, and on the way there from `old`."""
        before, after = HeldPart.of(old, rank), HeldPart.of(new, rank)
        assert after is not None
        self.state = None
        self.state = None if before is None else self._builder.build(old, before, None)
        to_come = self._builder.build(new, after, self.state)
        gradients = sum(4 * master.numel() for master in to_come.optimizer.parameters.values())
        return at_once(to_come) + gradients, at_once(self.state, to_come)


class _OneToken:
    """A data set, since an engine has one."""

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        token = np.zeros(1, np.int64)
        return [MicroBatch((1,), (iteration,), lambda: (token, token))]


@lru_cache
def accountant_of(model: ModelSpec) -> Accountant:
    return Accountant(model)


def at_once(*states: State | None) -> int:
    tensors = (tensor for state in states if state is not None for tensor in state.storages())
    return sum({tensor.untyped_storage()._cdata: tensor.nbytes for tensor in tensors}.values())


def measured(seed: int, question: Question, seconds: float, search_s: float) -> Result:
    base = first_plan(question)
    case = pose(question, base)
    found = Result(seed=seed, job=told(question))
    try:
        instant = decide(case)
    except LayoutError as error:
        found.refused = str(error)
        other = ReferencePlanner(case, seed=seed).search(seconds)
        found.wrongly = other is not None
        found.seconds = None if other is None else other.seconds
        return found
    anytime = Anytime(case, instant)
    until = time.process_time() + search_s
    while time.process_time() < until:
        anytime.run(20)
    for name, decision in (("at once", instant), ("searched", anytime.decision())):
        found.too_large += [f"{name}: {obstacle}" for obstacle in obstacles(case, decision.plan)]
    found.seconds = instant.seconds
    compare(found, case, base, instant.plan)
    return found


def obstacles(case: Situation, plan: Plan) -> Iterator[str]:
    """Why a plan does not fit, in an iteration and on the way to it."""
    for obstacle in (overfull(plan, case), transition_obstacle(case, plan)):
        if obstacle is not None:
            yield obstacle


def compare(found: Result, case: Situation, base: Plan, plan: Plan) -> None:
    """The model of memory with the executor's account, for the ranks that hold most on the way and some others."""
    before, after = dict(holdings(base.layout.replicas)), dict(holdings(plan.layout.replicas))

    def on_the_way(rank: int) -> int:
        old = before.get(rank)
        both = beside(after[rank] if old is None else old, after[rank], case.model)
        return both.total

    ranks = sorted(after, key=lambda rank: (before.get(rank) == after[rank], -on_the_way(rank), rank))
    chosen = [*ranks[:RANKS], random.Random(found.seed).choice(ranks)]
    accountant = accountant_of(msgspec.structs.replace(case.model, sequence=1))
    for rank in chosen:
        steady, both = accountant.held(base, plan, rank)
        said = memory.needed_bytes(plan, rank, case.model, 0)
        found.off += [said / steady - 1.0, on_the_way(rank) / both - 1.0]
        found.moved += before.get(rank) != after[rank]


def questions(first: int) -> Iterator[tuple[int, Question]]:
    seed = first
    while True:
        question = random_question(seed)
        if TIGHT in kinds(question):
            yield seed, question
        seed += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the reference, for a job that is refused")
    parser.add_argument("--search", type=float, default=0.5, help="seconds of search, for each job")
    parser.add_argument("--json", type=Path, help="a line for each job")
    options = parser.parse_args()
    results: list[Result] = []
    for seed, question in questions(options.first):
        result = measured(seed, question, options.seconds, options.search)
        results.append(result)
        if result.wrongly or result.too_large or any(abs(off) > 0.02 for off in result.off):
            print(f"{seed}: {result.job}: {msgspec.json.encode(result).decode()}", flush=True)
        if options.json is not None:
            with options.json.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
        if len(results) == options.jobs:
            break
    off = [off for result in results for off in result.off]
    table = Table(
        "jobs", "plans above the limit", "refused", "of them wrongly", "off the executor's account", "of ranks"
    )
    table.add_row(
        str(len(results)),
        str(sum(bool(result.too_large) for result in results)),
        str(sum(bool(result.refused) for result in results)),
        str(sum(result.wrongly for result in results)),
        f"{min(off, default=0.0):+.3%} to {max(off, default=0.0):+.3%}",
        f"{len(off) // 2}, {sum(result.moved for result in results)} of them with something else to hold",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
