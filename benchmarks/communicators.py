"""How long it takes to build all communicators of a plan, and how many there are, with gloo between processes.

    python -m benchmarks.communicators [--grid 4 4 4] [--runs 3] [--json FILE]

TP x PP x DP processes, 64 by default, forked from one; they find each other by way of one more, as ranks do by way of
their agents. Two kinds of lists, in turn, in the same run: a plan's own, with one communicator for each direction of an
edge, and one in which both directions share one, which is fewer, but where an activation that is awaited early holds up
the gradient behind it. Each is built all at once, as gloo's are, and one after the
other in the order of splits, as NCCL's are (whose splits gloo does not have). The time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from resihp.executor.backends import Gloo
from resihp.executor.communicators import Communicators
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.program import GroupSpec, buckets, memberships, programs
from resihp.pipeline.splits import rounds as rounds_of
from resihp.protocol import messages as m

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.resihp.executor.meeting_place import Line, serve

TIMEOUT_S = 120.0
ORDERS = ("at once", "in order")


def plan_groups(layout: Layout) -> tuple[GroupSpec, ...]:
    model = ModelSpec(layers=8, hidden=64, heads=8, kv_groups=8, ffn_hidden=256, vocab=256, sequence=64)
    replicas = len(layout.replicas)
    plan = Plan(epoch=1, layout=layout, assignment=spread(2 * replicas, replicas))
    cut = buckets(layout, outline(model))
    return memberships(plan, programs(plan, cut), cut)


def shared(groups: tuple[GroupSpec, ...]) -> tuple[GroupSpec, ...]:
    """With one communicator for both directions of an edge."""
    pairs = sorted({tuple(sorted(group.ranks)) for group in groups if group.use == "edge"})
    edges = (GroupSpec(f"edge/{a}-{b}", (a, b), "edge") for a, b in pairs)
    return (*(group for group in groups if group.use != "edge"), *edges)


def per_rank(groups: tuple[GroupSpec, ...], layout: Layout) -> str:
    each = [sum(rank in group.ranks for group in groups) for rank in layout.active]
    return f"{min(each)} to {max(each)}"


class InOrder(Gloo):
    in_order = True


def build(rank: int, line: Line, rounds: list[tuple[int, str, tuple[GroupSpec, ...]]], ranks: int) -> list[float]:
    """Seconds that each list takes this rank, all of them having begun together."""
    keys: Any = line.keys()
    device = torch.device("cpu")
    kinds = {"at once": Gloo(device), "in order": InOrder(device)}
    took = []
    for epoch, order, groups in rounds:
        communicators = Communicators(m.MeetingId(epoch=epoch), rank, groups, TIMEOUT_S, kinds[order])
        for gate in ("ready", "built"):
            if keys.add(f"{gate}/{epoch}", 1) == ranks:
                keys.set(f"all {gate}/{epoch}", "1")
            keys.wait([f"all {gate}/{epoch}"], timedelta(seconds=TIMEOUT_S))
            if gate == "ready":
                began = time.perf_counter()
                communicators.open(line)
                took.append(time.perf_counter() - began)
        communicators.close()
    return took


def measure(ranks: int, rounds: list[tuple[int, str, tuple[GroupSpec, ...]]]) -> list[float]:
    """Seconds of the slowest rank, for each list."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
    server.close()
    helpers, workers, pipes = [], [], []
    pairs = [socket.socketpair() for _ in range(ranks)]
    if (pid := os.fork()) == 0:
        store = torch.distributed.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        signal.pause()
        del store
    helpers.append(pid)
    if (pid := os.fork()) == 0:
        for _, theirs in pairs:
            theirs.close()
        serve([ours for ours, _ in pairs])
        signal.pause()
    helpers.append(pid)
    for rank in range(ranks):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            for other, (ours, theirs) in enumerate(pairs):
                ours.close()
                if other != rank:
                    theirs.close()
            took = build(rank, Line(pairs[rank][1], port), rounds, ranks)
            os.write(writing, json.dumps(took).encode())
            os._exit(0)
        os.close(writing)
        workers.append(pid)
        pipes.append(reading)
    for pair in pairs:
        for end in pair:
            end.close()
    answers = []
    for reading in pipes:
        with os.fdopen(reading, "rb") as pipe:
            answers.append(json.loads(pipe.read() or b"null"))
    for pid in workers:
        os.waitpid(pid, 0)
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if None in answers:
        raise SystemExit(f"rank {answers.index(None)} did not come through; its last lines are above")
    return [max(times) for times in zip(*answers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grid", type=int, nargs=3, default=[4, 4, 4], metavar=("TP", "PP", "DP"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    tp, pp, dp = arguments.grid
    layout = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=8)
    own = plan_groups(layout)
    lists = {"one for each direction": own, "shared by both": shared(own)}
    wanted = [(name, order) for _ in range(arguments.runs) for order in ORDERS for name in lists]
    rounds = [(epoch, order, lists[name]) for epoch, (name, order) in enumerate(wanted, 1)]
    took = measure(len(layout.active), rounds)
    rows = []
    for name, groups in lists.items():
        row: dict[str, Any] = {"edges": name, "communicators": len(groups), "of a rank": per_rank(groups, layout)}
        for order in ORDERS:
            times = [seconds for key, seconds in zip(wanted, took, strict=True) if key == (name, order)]
            row[f"{order} s"] = statistics.median(times)
        rows.append(row)
    table = Table(title=f"communicators of TP{tp} PP{pp} DP{dp} over gloo, medians of {arguments.runs}")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)
    large = Layout.uniform(tp=8, pp=4, dp=8, layers=8)
    for name, groups in (("own", plan_groups(large)), ("shared", shared(plan_groups(large)))):
        counted = f"{len(groups)} communicators, {per_rank(groups, large)} a rank"
        print(f"TP8 PP4 DP8, {name}: {counted}, made in {len(rounds_of(groups[1:]))} splits of the world's")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
