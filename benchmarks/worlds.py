"""Worlds that a detector has to live in: healthy ones that look odd, failing ones that few detectors see.

    python -m benchmarks.worlds [WORLD OR SECTION ...] [--jobs N] [--first SEED] [--odd N] [--json FILE]

Jobs of two settings in turn (16 ranks TP2 PP2 DP4, 8K tokens, 1F1B; 8 ranks TP2 PP2 DP2, 32K tokens, zero-bubble) are
played around the production controller (`closed_loop`). Worlds are named by parts of their names; job i has seed i and
setting i modulo 2, so that `--first 7 --jobs 1` plays an odd one again.

**told**: the share of jobs in which all that is true was told in time, and nothing that is not. **first**, **last**:
iterations from the onset, its own counted, to the first and to the last verdict that was to be told, median and worst.
**found**: the same to the detector's last finding that was to be made, whatever became of it. A **false** verdict names
what is healthy, or is told before its time. Suspicions lead to measurements only.

**fleet** plays 16,384 ranks past the detector alone (`fleet`). **reliability** compares the confidence told with how
often it was right, over the findings and the verdicts of all worlds played.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import disturbances as d
from benchmarks.closed_loop import Loop
from benchmarks.disturbances import Scene
from benchmarks.many_ranks import fleet
from benchmarks.simulated_jobs import NoLengths, Setting, Timeline, simulate
from benchmarks.truth import Judged, judge, reliability
from resihp.record.journal import FailureEnded, FailureFound

ITERATIONS = 600
SETTINGS = ((Setting(budget=8192, dp=4), 4), (Setting(budget=32768, dp=2, schedule="zero-bubble"), 2))
"""And how many devices a node has."""
EARLIEST = 80
"""Nothing strikes while healthy times are learnt."""
AGAIN = 60
"""Iterations after the onset in which the plan takes effect once more at the latest, where it does."""
FLEET_ITERATIONS = 250
"""Of 16,384 ranks, for each job that is played of the worlds."""


@dataclass(frozen=True)
class World:
    """`act` disturbs a job. Failing worlds have all that is expected told `within` so many iterations."""

    name: str
    act: Callable[[Scene], None] | None = None
    within: int = 0
    workload: Callable[[np.random.Generator, Any, Any, int, int], tuple[Any, Any]] | None = None
    """Other N and S, given those that were drawn, the onset, and the budget."""
    replans: bool = False


HEALTHY = (
    World("quiet"),
    World("thermal swing 1.5 %", lambda scene: d.thermal(scene, 0.015)),
    World("level of each rank AR(.98), 1 %", lambda scene: d.wandering(scene, 0.01)),
    World("devices unlike by 2 %", lambda scene: d.unlike(scene, 0.02)),
    World("micro-batch tokens doubled", workload=lambda rng, n, s, onset, budget: d.doubled(rng, n, s, onset, budget)),
    World("data mix, S/3 at equal N", workload=lambda rng, n, s, onset, _: d.mixed(rng, n, s, onset)),
    World("shorter documents", workload=lambda rng, n, s, onset, budget: d.cut(rng, n, s, onset, budget, 0.25)),
    World("lengths in bins", workload=lambda rng, n, s, *_: d.in_bins(rng, n, s)),
    World("heavy tails, stalls", lambda scene: d.heavy_tails(scene, 0.015, 4.0)),
    World("checkpoints", lambda scene: d.checkpoints(scene, 50, 2.0)),
    World("timers of 1 ms", lambda scene: d.timers(scene, 1e-3)),
    World("start skew 0.5 ms", lambda scene: d.skew(scene, 5e-4)),
)
FAILING = (
    World("device alone +20 %", lambda scene: d.devices(scene, [scene.drawn()], 0.20), 6),
    World("link alone", lambda scene: d.link(scene, 0.25, 0.4), 20),
    World("whole node +25 %", lambda scene: d.nodes(scene, 1, 0.25), 12),
    World("two nodes +25 %", lambda scene: d.nodes(scene, 2, 0.25), 12),
    World("half the ranks +25 %", lambda scene: d.one_of_each_pair(scene, 0.25), 12),
    World("both of a TP group +25 %", lambda scene: d.group(scene, 0.25), 12),
    World("everybody +25 %", lambda scene: d.everybody(scene, 0.25), 40),
    World("everybody +8 %", lambda scene: d.everybody(scene, 0.08), 100),
    World("gets worse, .96 then .77", lambda scene: d.worse(scene, (0.96, 0.77), 100), 12),
    World("+14 %, fine probe, re-plan", lambda s: d.devices(s, [s.drawn()], 0.14, probes=False), 160, replans=True),
    World("+5 %, probe shows it", lambda scene: d.devices(scene, [scene.drawn()], 0.05), 40),
    World("+5 %, fine probe", lambda scene: d.devices(scene, [scene.drawn()], 0.05, probes=False), 40),
    World("flicker 1 of 10 at x3", lambda scene: d.flicker(scene, 1, 10, 3.0), 100),
    World("flicker 2 of 12 at x1.5", lambda scene: d.flicker(scene, 2, 12, 1.5), 100),
    World("TP collective x2", lambda scene: d.collectives(scene, 2.0), 60),
    World("gradient sums x3", lambda scene: d.sums(scene, 3.0), 60),
    World("network, ranks suffer +8 %", lambda scene: d.network(scene, 2.0, 0.08), 60),
    World("data late by a forward", lambda scene: d.late_data(scene, 1.0), 60),
)


def play(world: World, seed: int, iterations: int = ITERATIONS) -> Judged:
    """One job of a world; equal arguments give an equal one."""
    setting, devices = SETTINGS[seed % len(SETTINGS)]
    rng = np.random.default_rng([seed, 3])
    onset = int(rng.integers(EARLIEST, max(EARLIEST + 1, iterations * 3 // 5)))
    scenes: list[Scene] = []

    def disturb(line: Timeline) -> None:
        scenes.append(Scene(line, rng, onset, devices))
        if world.act is not None:
            world.act(scenes[0])

    workload = None
    if (other := world.workload) is not None:
        workload = lambda own, n, s: other(own, n, s, onset, setting.budget)  # noqa: E731
    job = simulate(setting, seed, iterations, workload_of=workload, disturb=disturb)
    scene = scenes[0]
    loop = Loop(job, devices, scene.probes, scene.links, seed)
    played = loop.play(onset + AGAIN if world.replans else None)
    places: dict[str, set[int]] = {}
    for rank, name in played.node_of.items():
        places.setdefault(name, set()).add(rank)
    node_ranks = {name: frozenset(ranks) for name, ranks in places.items()}
    judged = Judged(seed, onset, scene.expected, played, node_ranks)
    judge(judged)
    return judged


# --- tables ---------------------------------------------------------------------------------------------------------


def table(console: Console, title: str, rows: Sequence[tuple[World, list[Judged]]]) -> list[dict[str, Any]]:
    """Print worlds and what was told in each; returns the figures."""
    shown = Table(title=title)
    for name in (
        "world",
        "jobs",
        "iterations",
        "suspicions",
        "false verdicts",
        "told",
        "within",
        "found",
        "first",
        "last",
    ):
        shown.add_column(name, justify="left" if name == "world" else "right")
    figures = []
    for world, jobs in rows:
        firsts = [min(told) for job in jobs if (told := [delay for delay in job.delays if delay is not None])]
        lasts = _of_all([job.delays for job in jobs])
        found = _of_all([job.found for job in jobs])
        figure: dict[str, Any] = {
            "world": world.name,
            "jobs": len(jobs),
            "iterations": sum(job.played.iterations for job in jobs),
            "suspicions": sum(job.suspicions for job in jobs),
            "false": sum(len(job.false) for job in jobs),
        }
        cells = [str(value) for value in figure.values()]
        if world.within:
            right = statistics.mean(job.right(world.within) for job in jobs)
            figure |= {"told": right, "within": world.within, "found": found, "first": firsts, "last": lasts}
            cells += [f"{right:.2f}", str(world.within), *(_middle_and_worst(of) for of in (found, firsts, lasts))]
        shown.add_row(*cells)
        figures.append(figure)
    console.print(shown)
    return figures


def _of_all(delays: Sequence[Sequence[int | None]]) -> list[int]:
    """Of each job in which everything was told, when the last was."""
    told = [[delay for delay in of if delay is not None] for of in delays]
    return [max(own) for own, of in zip(told, delays, strict=True) if own and len(own) == len(of)]


def _middle_and_worst(delays: Sequence[Any]) -> str:
    return f"{statistics.median(delays):.0f}, {max(delays)}" if delays else "-"


def totals(console: Console, rows: Sequence[tuple[World, list[Judged]]]) -> dict[str, float]:
    """Over what is healthy: worlds in which nothing fails, and those in which everybody is slower alike."""
    iterations = healthy = false = suspicions = 0
    for world, jobs in rows:
        for job in jobs:
            common = all(one.component == "job" for one in job.expected)
            if not common:
                continue
            iterations += job.played.iterations
            healthy += job.played.iterations if not world.within else job.onset
            false += len(job.false)
            suspicions += job.healthy_suspicions
    if not healthy:
        return {}
    figures = {"false per 10,000": 1e4 * false / iterations, "suspicions per 1,000": 1e3 * suspicions / healthy}
    console.print(
        f"nobody is slow alone: {false} false verdicts in {iterations:,} iterations, "
        f"{figures['false per 10,000']:.2f} per 10,000 (limit 1); {suspicions} suspicions in {healthy:,} healthy ones, "
        f"{figures['suspicions per 1,000']:.2f} per 1,000 (limit 1)"
    )
    return figures


def oddities(worlds: Sequence[tuple[World, list[Judged]]]) -> list[str]:
    """What was told wrongly, late or not at all, with the seed that plays it again; each world's in turn."""
    lines: list[list[str]] = []
    for world, jobs in worlds:
        own = []
        for job in jobs:
            head = f"{world.name}, seed {job.seed}, onset {job.onset}"
            own += [f"{head}: false, {told}" for told in job.false]
            for expected, delay in zip(job.expected, job.delays, strict=True):
                if delay is None or delay > world.within:
                    what = f"{expected.component} {sorted(expected.ranks)}"
                    own.append(f"{head}: {what} {'not told' if delay is None else f'told after {delay}'}")
            anew = {told.at for told in job.played.told if isinstance(told.entry, FailureFound)}
            ended = [t for t in job.played.told if isinstance(t.entry, FailureEnded) and t.at not in anew]
            own += [f"{head}: ended at {told.at}, {told.entry.evidence}" for told in ended if job.expected]
        lines.append(own)
    longest = max(map(len, lines), default=0)
    return [own[i] for i in range(longest) for own in lines if i < len(own)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of worlds' names, healthy, failing, fleet; all unless given")
    parser.add_argument("--jobs", type=int, default=4, help="of each world")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--odd", type=int, default=0, help="print so many odd jobs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console(width=160)
    figures: dict[str, Any] = {}
    played: list[tuple[World, list[Judged]]] = []
    for title, worlds in (("healthy", HEALTHY), ("failing", FAILING)):
        wanted = [
            world
            for world in worlds
            if not arguments.names or any(part == title or part in world.name for part in arguments.names)
        ]
        seeds = range(arguments.first, arguments.first + arguments.jobs)
        try:
            rows = [(world, [play(world, seed) for seed in seeds]) for world in wanted]
        except NoLengths as error:
            sys.exit(str(error))
        if rows:
            figures[title] = table(console, f"{title.capitalize()} worlds, {ITERATIONS} iterations a job", rows)
            played += rows
    if played:
        figures["totals"] = totals(console, played)
        figures["reliability"] = reliability(console, [job for _, jobs in played for job in jobs])
    if not arguments.names or "fleet" in arguments.names:
        figures["fleet"] = fleet(console, FLEET_ITERATIONS * arguments.jobs)
    for line in oddities(played)[: arguments.odd]:
        console.print(line, style="dim", markup=False, highlight=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
