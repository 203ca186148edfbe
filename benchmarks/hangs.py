"""Whether a rank that hangs is found in a script that knows nothing of resihp, and whether no healthy one is blamed.

python -m benchmarks.hangs --hangs 100 --jobs 4
python -m benchmarks.hangs --healthy 10000

Runs `benchmarks/hanging_script.py` with four ranks under `resihp run --local`. Each hang comes from its seed: its kind,
its rank or ranks, its iteration and its place in the loop. A job has five of them, one for each start of the script.
Of each hang a row is printed: which ranks the failure names, whether its evidence has the function that hangs, seconds
from the hang to the kill, and to the first iteration of the next round. A rank that is stopped cannot write its stack;
its evidence must say that it is stopped.

`--healthy` runs `benchmarks/pausing_script.py` in its place, and prints what was reported of it: nothing, if all is
well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LOCAL_KINDS = (
    "sleep",
    "lock",
    "deadlock",
    "event",
    "queue",
    "polling",
    "join",
    "future",
    "pipe",
    "fifo",
    "socket",
    "http",
    "subprocess",
    "flock",
    "library",
    "library_with_gil",
    "stop",
    "store",
    "loader",
)
"""Hangs of one or two ranks outside of collectives."""
MISMATCHED_KINDS = ("all_gather", "scatter", "broadcast", "recv", "objects", "async")
"""Collectives of one rank that no other rank enters."""
PLACES = ("forward", "backward", "optimizer", "evaluation", "save")
PLACES_OF_COLLECTIVES = ("forward", "evaluation", "save")
WORLD, HANGS_PER_JOB = 4, 5
HEALTHY_ITERATIONS = 500
"""Iterations of a healthy job. Only its first long pause is inspected: later ones are no longer unusual."""
HANG_LIMIT_S, IDLE_LIMIT_S = 10, 60
JOB_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Hang:
    """What hangs in one round of the script."""

    kind: str
    ranks: tuple[int, ...]
    place: str
    after: int
    """Number of iterations of the round before it hangs."""
    is_async: bool
    """Whether the other ranks wait in `Work.wait`, not in the collective itself."""

    @property
    def mark(self) -> str:
        """What the evidence of the failure must contain."""
        if self.kind == "stop":
            return "(stopped)"
        return f"in hang_in_{self.kind}"


def hang_of(seed: int) -> Hang:
    draw = random.Random(seed)
    is_mismatched = draw.random() < 0.25
    kind = draw.choice(MISMATCHED_KINDS if is_mismatched else LOCAL_KINDS)
    count = 2 if not is_mismatched and draw.random() < 0.25 else 1
    return Hang(
        kind=kind,
        ranks=tuple(sorted(draw.sample(range(WORLD), count))),
        place=draw.choice(PLACES_OF_COLLECTIVES if is_mismatched else PLACES),
        after=draw.randint(160, 200) if seed % HANGS_PER_JOB == 0 else draw.randint(10, 50),
        is_async=draw.random() < 0.5,
    )


@dataclass
class Run:
    """A finished job."""

    folder: Path
    exit_code: int | None
    output: str
    failures: list[dict[str, Any]]

    def time_of(self, name: str) -> float | None:
        path = self.folder / name
        return path.stat().st_mtime if path.exists() else None


def run(folder: Path, script: str, *arguments: str) -> Run:
    """Run a script to its end, and read its failures from the ledger."""
    folder.mkdir(parents=True)
    environment = os.environ | {
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_LOCAL": str(folder / "local"),
        "RESIHP_JOB__HANG_LIMIT": f"{HANG_LIMIT_S}s",
        "RESIHP_JOB__IDLE_LIMIT": f"{IDLE_LIMIT_S}s",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "PYTHONWARNINGS": "ignore",
    }
    resihp = [sys.executable, "-m", "resihp"]
    command = [*resihp, "run", "--local", "--nodes", "2", "--nproc-per-node", str(WORLD // 2), script, *arguments]
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            exit_code = job.wait(JOB_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            exit_code = None
            job.terminate()
            job.wait()
    listed = subprocess.run(
        [*resihp, "history", "failures", "--json"], cwd=folder, env=environment, capture_output=True, text=True
    )
    rows = json.loads(listed.stdout)["rows"] if listed.returncode == 0 else []
    return Run(folder, exit_code, (folder / "output").read_text(), rows)


@dataclass(frozen=True)
class Finding:
    """What became of one hang."""

    hang: Hang
    fired: bool
    named: tuple[int, ...] = ()
    has_stack: bool = False
    cause: str = ""
    noticed_s: float | None = None
    resumed_s: float | None = None

    @property
    def is_right(self) -> bool:
        return self.named == self.hang.ranks


def findings_of(done: Run, hangs: list[Hang]) -> Iterator[Finding]:
    for start, hang in enumerate(hangs):
        times = [done.time_of(f"hung.{start}.{rank}") for rank in hang.ranks]
        if None in times:
            yield Finding(hang, fired=False)
            continue
        hung_at = max(time for time in times if time is not None)
        next_at = done.time_of(f"begun.{start + 1}.0")
        failures = [row for row in done.failures if hung_at <= at_of(row) <= (next_at or float("inf"))]
        named = sorted({int(rank) for row in failures for rank in re.findall(r"^rank (\d+)", row["cause"])})
        evidence = "\n".join(f"{row['cause']}\n{row['evidence']}" for row in failures)
        yield Finding(
            hang=hang,
            fired=True,
            named=tuple(named),
            has_stack=hang.mark in evidence,
            cause="; ".join(row["cause"] for row in failures),
            noticed_s=at_of(failures[0]) - hung_at if failures else None,
            resumed_s=next_at - hung_at if next_at is not None else None,
        )


def at_of(failure: dict[str, Any]) -> float:
    return datetime.fromisoformat(failure["noticed_at"]).timestamp()


ROW_FORMAT = "{:>5} {:17} {:10} {:6} {:6} {:6} {:>6} {:>8} {:>8}  {}"
COLUMN_HEADINGS = ("seed", "kind", "place", "hung", "named", "right", "stack", "noticed", "resumed", "cause")


def row_of(seed: int, finding: Finding) -> str:
    hang = finding.hang
    if not finding.fired:
        return f"{seed:>5} {hang.kind:17} {hang.place:10} did not hang: the job ended before"
    return ROW_FORMAT.format(
        seed,
        hang.kind,
        hang.place + (" a" if hang.is_async else ""),
        ",".join(map(str, hang.ranks)),
        ",".join(map(str, finding.named)) or "-",
        "yes" if finding.is_right else "NO",
        "yes" if finding.has_stack else "NO",
        "-" if finding.noticed_s is None else f"{finding.noticed_s:.1f}",
        "-" if finding.resumed_s is None else f"{finding.resumed_s:.1f}",
        re.sub(r"/\S*/", "", finding.cause)[:100],
    )


def hurt(folder: Path, seeds: list[int], kind: str | None) -> list[Finding]:
    """Run one job with a hang for each seed."""
    hangs = [hang_of(seed) for seed in seeds]
    if kind is not None:
        hangs = [Hang(**asdict(hang) | {"kind": kind}) for hang in hangs]
    done = run(folder, str(FOLDER / "hanging_script.py"), str(folder), json.dumps([asdict(hang) for hang in hangs]))
    if done.exit_code != 0:
        print(f"seeds {seeds[0]} to {seeds[-1]}: exit code {done.exit_code}\n{done.output[-1500:]}", flush=True)
    return list(findings_of(done, hangs))


def print_findings(folder: Path, first: int, count: int, jobs: int, kind: str | None) -> None:
    batches = [
        list(range(begin, min(begin + HANGS_PER_JOB, first + count)))
        for begin in range(first, first + count, HANGS_PER_JOB)
    ]
    print(ROW_FORMAT.format(*COLUMN_HEADINGS), flush=True)
    findings: list[Finding] = []
    with ThreadPoolExecutor(jobs) as pool:
        for seeds, found in zip(
            batches, pool.map(lambda seeds: hurt(folder / str(seeds[0]), seeds, kind), batches), strict=True
        ):
            findings += found
            for seed, finding in zip(seeds, found, strict=True):
                print(row_of(seed, finding), flush=True)
    noticed = [finding.noticed_s for finding in findings if finding.noticed_s is not None]
    resumed = [finding.resumed_s for finding in findings if finding.resumed_s is not None]
    print(
        f"{len(findings)} hangs, {sum(finding.fired for finding in findings)} took place: "
        f"right ranks {sum(finding.is_right for finding in findings)}, "
        f"stack of the script {sum(finding.has_stack for finding in findings)}, "
        f"went on {len(resumed)}"
    )
    for name, seconds in (("noticed", noticed), ("resumed", resumed)):
        if seconds:
            print(f"{name} after {min(seconds):.1f} to {max(seconds):.1f} s, median {statistics.median(seconds):.1f} s")


def print_healthy(folder: Path, iterations: int, jobs: int) -> None:
    script = str(FOLDER / "pausing_script.py")
    numbers = range(iterations // HEALTHY_ITERATIONS)
    with ThreadPoolExecutor(jobs) as pool:
        runs = pool.map(lambda number: run(folder / str(number), script, str(HEALTHY_ITERATIONS), str(number)), numbers)
        for number, done in enumerate(runs):
            looks = len(re.findall("looking at the stacks", done.output))
            printed = len(re.findall(r"^iteration \d+/", done.output, re.MULTILINE))
            causes = [row["cause"] for row in done.failures]
            print(
                f"job {number}: exit code {done.exit_code}, {printed} iterations, {looks} pauses inspected, "
                f"failures: {causes or 'none'}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", type=int, default=0, help="number of hangs")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--kind", choices=(*LOCAL_KINDS, *MISMATCHED_KINDS, "spin"), help="only hangs of this kind")
    parser.add_argument("--healthy", type=int, default=0, help="number of iterations without a hang")
    parser.add_argument("--jobs", type=int, default=4, help="jobs that run at the same time")
    parser.add_argument("--keep", type=Path, help="folder for the jobs, which must not exist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hangs-") as temporary:
        folder = options.keep or Path(temporary)
        if options.hangs:
            print_findings(folder, options.first, options.hangs, options.jobs, options.kind)
        if options.healthy:
            print_healthy(folder / "healthy", options.healthy, options.jobs)


if __name__ == "__main__":
    main()
