"""How long `resihp report` takes and how large its page is: 100,000 iterations, 200 failures, 1,024 ranks.

A journal of such a job is written (every fourth failure is a slow device, after each of the others a replica goes on
with unequal stages until the device is back), a ledger made of it, and the command run on it as a user would, three
times. Targets: at most 5 s and 3 MB.

    python benchmarks/report.py [--iterations 100000] [--failures 200] [--keep FOLDER]

Printed: seconds of the whole command, of what its parts take in one process, bytes of the page, of `--markdown`.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from resihp.db.reading.queries import Reader
from resihp.db.writing.catch_up import catch_up
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import StepOutcome
from resihp.record import journal, journal_file

TP, PP, DP, LAYERS = 8, 8, 16, 64
MOST_S, MOST_BYTES = 5.0, 3_000_000
RUNS = 3
BEGAN = 1_750_000_000.0
WHOLE = Layout.uniform(tp=TP, pp=PP, dp=DP, layers=LAYERS)


def without(rank: int) -> Layout:
    """The whole layout, but `rank`'s stage goes on with half of its ranks and fewer layers; the rest stands by."""
    place = WHOLE.place(rank)
    assert place is not None
    stages = list(WHOLE.replicas[place.replica].stages)
    first, second = (place.stage, place.stage + 1) if place.stage + 1 < PP else (place.stage - 1, place.stage)
    left = [other for other in stages[place.stage].ranks if other != rank]
    middle = stages[first].chunks[0][0] + (2 if first == place.stage else 10)
    ends = stages[first].chunks[0][0], stages[second].chunks[0][1]
    stages[first] = Stage(stages[first].ranks, ((ends[0], middle),))
    stages[second] = Stage(stages[second].ranks, ((middle + 1, ends[1]),))
    stages[place.stage] = Stage(tuple(left[:4]), stages[place.stage].chunks)
    replicas = list(WHOLE.replicas)
    replicas[place.replica] = Replica(tuple(stages))
    return Layout(replicas=tuple(replicas), standby=tuple(left[4:]))


def story(iterations: int, failures: int, seed: int = 0) -> Iterator[tuple[journal.AnyEntry, float]]:
    """(entry, time) of the job's journal."""
    draw = random.Random(seed)
    nodes = WHOLE.active[-1] // 8 + 1
    yield (
        journal.JobStarted(
            job="long",
            command=("python", "train.py"),
            nodes=nodes,
            gpus_per_node=8,
            tp=TP,
            pp=PP,
            schedule="1f1b",
            host="here",
            user="me",
            restart_count=0,
            version="0.1.0",
            configuration={"layout": {"tp": TP, "pp": PP}},
        ),
        BEGAN,
    )
    for node in range(nodes):
        yield journal.NodeJoined(node=f"gpu-{node:03d}", host=f"gpu-{node:03d}", devices=8), BEGAN
        for device in range(8):
            rank = 8 * node + device
            started = journal.WorkerStarted(rank=rank, node=f"gpu-{node:03d}", device=device, pid=rank, epoch=0)
            yield started, BEGAN
    at, epoch, number, usual_s = BEGAN + 60, 1, 0, 4.0

    def decided(layout: Layout, following: int, reason: str) -> Iterator[tuple[journal.AnyEntry, float]]:
        plan = Plan(epoch=epoch, layout=layout, assignment=spread(128, DP))
        action = "start" if epoch == 1 else "redo"
        predicted, present = (34.0, None) if layout is WHOLE else (36.5, 48.0)
        yield (
            journal.PlanDecided(
                plan=plan,
                next_iteration=following,
                action=action,  # type: ignore[arg-type]
                finish=None,
                reason=reason,
                predicted=predicted,
                present=present,
            ),
            at,
        )
        yield journal.PlanInEffect(epoch=epoch), at + 0.5

    yield from decided(WHOLE, 1, "start from the beginning")
    every = iterations // failures
    slow_until, slow = 0, 0
    for i in range(1, iterations + 1):
        hit = i % every == every // 2 and number < failures
        back = i % every == every - 1 and epoch > 1
        if hit:
            number += 1
            rank = draw.randrange(len(WHOLE.active))
            kind = "fail-slow" if number % 4 == 0 else "fail-stop"
            epoch += 1
            yield (
                journal.FailureFound(
                    failure=number,
                    kind=kind,  # type: ignore[arg-type]
                    component="device" if kind == "fail-slow" else "process",
                    cause=f"rank {rank} works at 40% of a healthy device's speed"
                    if kind == "fail-slow"
                    else f"rank {rank} killed by signal 9 (SIGKILL)",
                    ranks=(rank,),
                    node=f"gpu-{rank // 8:03d}",
                    device=rank % 8,
                    iteration=i,
                    epoch=epoch,
                    evidence="own work at 2.554 of its healthy time, before at 1.000; relative to 7 others. " * 6,
                    detect_s=None,
                    speed=0.4 if kind == "fail-slow" else None,
                    confidence=0.99 if kind == "fail-slow" else None,
                ),
                at,
            )
            slow, slow_until = (number, i + every // 3) if kind == "fail-slow" else (slow, slow_until)
            yield from decided(without(rank), i, f"rank {rank} is gone or slow; progressive")
        elif back:
            epoch += 1
            yield from decided(WHOLE, i, "the device is back")
        changed = hit or back
        predicted = usual_s * (1.0 if epoch % 2 else 1.07) * (1 + 0.05 * math.sin(i / 900))
        seconds = predicted * draw.lognormvariate(0.0, 0.02) * (1.8 if i < slow_until and draw.random() < 0.03 else 1.0)
        at += seconds + (8.0 if changed else 0.0)
        outcome = StepOutcome(
            iteration=i,
            clip=1.0,
            skip=False,
            learning_rate=1e-3,
            gradient_norm=2.0,
            loss=2.0 + 8.0 / (1 + i / 500),
            tokens=1 << 20,
            sum_squared_lengths=1 << 40,
            samples=17,
            samples_digest="00ff00ff00ff00ff",
        )
        yield journal.IterationCommitted(epoch=epoch, outcome=outcome, seconds=seconds, predicted_seconds=predicted), at
        if changed:
            yield (
                journal.Reconfigured(
                    epoch=epoch,
                    failures=(number,) if hit else (),
                    attempts=1,
                    action="redo",
                    park_s=1.0,
                    plan_s=2.0,
                    groups_s=3.0,
                    state_s=2.0,
                    first_iteration_s=seconds,
                    seconds=8.0 + seconds,
                    bytes_moved=3_400_000_000,
                ),
                at,
            )
        if slow and i == slow_until:
            ended = journal.FailureEnded(failure=slow, node=None, device=None, iteration=i, evidence="as before")
            yield ended, at
            slow = 0
        if i % 1000 == 0:
            yield journal.CheckpointCommitted(iteration=i, folder=f"checkpoints/{i}", bytes=10**11, seconds=9.0), at
    yield journal.JobEnded(exit_code=0, state="completed", reason=f"{iterations} iterations done"), at + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--failures", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="folder that keeps ledger and page")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{folder / 'ledger.db'}"
        if not (folder / "ledger.db").exists():
            writer = journal_file.Journal(folder / "journal", sync=False)
            for entry, at in story(asked.iterations, asked.failures):
                writer.append(entry, at)
            writer.close()
            began = time.perf_counter()
            catch_up(url, folder, folder / "journal")
            print(f"ledger of {asked.iterations:,} iterations made in {time.perf_counter() - began:.1f} s")
        page = folder / "report.html"
        command = [sys.executable, "-m", "resihp", "report", "--ledger", url, "-o", str(page)]
        seconds, computed = [], []
        for _ in range(RUNS):
            began, before = time.perf_counter(), computing_s()
            subprocess.run(command, check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
            computed.append(computing_s() - before)
        size = page.stat().st_size
        parts(url)
        print(
            f"resihp report: {min(seconds):.2f} to {max(seconds):.2f} s in {RUNS} runs (at most {MOST_S:g} s), "
            f"of which computing {min(computed):.2f} to {max(computed):.2f} s; "
            f"{size / 1e6:.2f} MB (at most {MOST_BYTES / 1e6:g} MB)"
        )
        sys.exit(max(seconds) > MOST_S or size > MOST_BYTES)


def computing_s() -> float:
    """CPU seconds of all processes that we have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parts(url: str) -> None:
    """Print what reading and each kind of text take, imports left out."""
    from resihp.wrapper.commands.report.facts import read
    from resihp.wrapper.commands.report.markdown import markdown
    from resihp.wrapper.commands.report.page import html

    began = time.perf_counter()
    with Reader.open(url) as reader:
        facts = read(reader, reader.job(), datetime.now(UTC))
    read_s = time.perf_counter() - began
    began = time.perf_counter()
    html(facts)
    html_s = time.perf_counter() - began
    text = markdown(facts)
    print(f"reading and accounts {read_s:.2f} s, page {html_s:.2f} s; Markdown {len(text) / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
