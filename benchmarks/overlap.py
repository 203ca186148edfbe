"""Sums of gradients inside the last backward: an iteration with it in parts, and with it in one piece.

    python benchmarks/overlap.py [--quick] [--json FILE]

Two replicas of one stage (PP1 DP2), whose computing is emulated by sleeping, as is the link between them: each sum of a
bucket takes the same time, one after the other, however fast the machine. A bucket is about a layer, and the sums take
half as long as the last backward: all but those of its last part can hide behind it, or none where it is in one piece.
Both programs run in the same two processes in turn, from the same plan and the same first parameters, and their losses
must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from megatron.core.transformer import TransformerConfig
from rich.console import Console
from rich.table import Table

from benchmarks import forks
from benchmarks.contest import Corpus, Ours, in_turn, slowest
from resihp.executor.emulation import Wires, Work
from resihp.executor.engine import Engine
from resihp.executor.state.optimizer import AdamW
from resihp.executor.state.rank_state import HeldPart
from resihp.parallelism.layout import Layout
from resihp.parallelism.ownership import size_of
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline import program
from resihp.pipeline.program import Compute, GroupSpec, Reduce

NAMES = ("in parts", "in one piece")


@dataclass(frozen=True)
class Emulation:
    layers: int = 8
    micro_batches: int = 4
    unit_s: float = 0.04
    """Of F, B and W of one layer."""
    iterations: int = 12
    hidden: int = 32
    vocab: int = 64
    length: int = 16

    @property
    def bucket_bytes(self) -> int:
        return 4 * 12 * self.hidden**2

    @property
    def sum_s(self) -> float:
        """Of a bucket: those of all layers take half of a backward."""
        return self.unit_s

    def pace(self, work: Work, holding: HeldPart, chunk: int) -> float:
        first, last = holding.chunks[chunk]
        return self.unit_s * (last - first + 1) * (2 if work == "BW" else 1)

    def plan(self) -> Plan:
        layout = Layout.uniform(tp=1, pp=1, dp=2, layers=self.layers)
        return Plan(epoch=1, layout=layout, assignment=spread(self.micro_batches, 2))


class SlowSums(Wires):
    """What all ranks do together takes so many seconds."""

    def of(self, group: GroupSpec) -> Callable[[], float] | None:
        return lambda: self._healthy_s


def emulate(emulation: Emulation, rank: int, store: tuple[str, int]) -> dict[str, Any]:
    """What one rank does: both programs in turn, and the share of bytes that it begins before the last part."""
    corpus = Corpus(emulation.micro_batches, emulation.length, emulation.vocab)
    config = TransformerConfig(
        num_layers=emulation.layers,
        hidden_size=emulation.hidden,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    plan, contestants, early = emulation.plan(), {}, {}
    small = functools.partial(program.buckets, bucket_bytes=emulation.bucket_bytes)
    for name in NAMES:
        engine = Engine(
            config,
            vocab_size=emulation.vocab,
            dataset=corpus,
            optimizer=AdamW(lr=1e-3),
            seed=5,
            sequence=emulation.length,
            pace=emulation.pace,
        )
        engine.wires = SlowSums(emulation.sum_s)
        cuts = program.cuts if name == NAMES[0] else lambda *_: {}
        with mock.patch.multiple(program, buckets=small, cuts=cuts):
            contestants[name] = Ours(engine, plan, rank, (store[0], store[1]))
        early[name] = begun_early(engine, plan, rank)
    barrier = functools.partial(contestants[NAMES[0]].engine.gather, None)
    return in_turn(contestants, emulation.iterations, 1, 1, barrier, speaks=rank == 0) | {"early": early}


def begun_early(engine: Engine, plan: Plan, rank: int) -> float:
    """Share of the bytes that are summed whose sums begin before the last computation."""
    prepared = engine.prepare(plan, rank)
    own = prepared.programs[rank]
    by_name = {spec.name: spec for spec in engine.specs}
    sizes = [sum(size_of(by_name[piece.name], piece) for piece in bucket.slices) for bucket in prepared.buckets]
    last = max(i for i, entry in enumerate(own) if isinstance(entry, Compute))
    return sum(sizes[entry.bucket] for entry in own[:last] if isinstance(entry, Reduce)) / sum(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few iterations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    emulation = Emulation(iterations=3) if args.quick else Emulation()
    answers = forks.answers(functools.partial(emulate, emulation), 2, 300.0)
    losses = answers[0]["losses"]
    if losses[NAMES[0]] != losses[NAMES[1]]:
        raise SystemExit(f"losses differ: {losses}")
    found: dict[str, Any] = {}
    table = Table(
        title=f"PP1 DP2, {emulation.layers} layers, {emulation.micro_batches} micro-batches; F, B and W of a layer and "
        f"a sum {1000 * emulation.unit_s:.0f} ms each; {emulation.iterations} iterations of each in turn"
    )
    for column in ("last backward", "median s", "fastest s", "bytes begun before its last part"):
        table.add_column(column, justify="left" if column == "last backward" else "right")
    for name in NAMES:
        seconds = slowest([answer["seconds"][name] for answer in answers], 1)
        early = answers[0]["early"][name]
        found[name] = {"median_s": statistics.median(seconds), "fastest_s": min(seconds), "early": early}
        table.add_row(name, f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f}", f"{100 * early:.0f} %")
    Console(width=100).print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
