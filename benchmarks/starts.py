"""Do probes at the start set healthy devices aside, and slow ones? Local starts of eight workers on busy processors.

Each start is a job of its own, TP2 PP2 DP2 on this machine, that trains one iteration. Processes that multiply and copy
by fits and starts keep the processors busy. In the second kind of start, rank 5 is a device of 70 % of its speed from
the start on: what an injected fault would make it, before the first iteration.

    python benchmarks/starts.py [--healthy 50] [--slow 10] [--busy 2]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from resihp.record.journal import IterationCommitted, ModelDeclared, PlanDecided, ProbesTaken
from resihp.record.journal_file import read

EXAMPLE = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
SIZES = ["--layers", "4", "--hidden", "64", "--tokens", "256", "--micro-batches", "8", "--iterations", "1"]
SLOW, SPEED = 5, 0.7
SLOWED = f"""
import os, runpy, sys
from resihp.protocol.client import AgentClient
if os.environ["RANK"] == "{SLOW}":
    AgentClient.speed = lambda self: {SPEED}
sys.argv = [{str(EXAMPLE)!r}, *sys.argv[1:]]
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
BUSY = """
import random, time
import torch
torch.set_num_threads(1)
square, long = torch.randn(512, 512), torch.randn(4 << 20)
while True:
    until = time.monotonic() + random.uniform(0.05, 0.8)
    work = random.choice((lambda: square @ square, long.clone))
    while time.monotonic() < until:
        work()
    time.sleep(random.uniform(0.0, 0.2))
"""


@dataclass(frozen=True, kw_only=True)
class Start:
    aside: tuple[int, ...]
    """Ranks whose device is not fit, as the last probe before the first plan has it."""
    worst: float
    """The smallest share of its peers for which a device was judged."""
    looks: int
    probes_s: float
    """From the declaration of the model to the first plan."""
    iteration_s: float
    """From the same to the first committed iteration."""


def start(script: Path) -> Start:
    folder = Path(tempfile.mkdtemp(prefix="resihp-starts-"))
    environment = {
        **os.environ,
        "RESIHP_HOME": str(folder / "home"),
        "RESIHP_STATE": str(folder / "state"),
        "RESIHP_LOCAL": str(folder / "local"),
    }
    command = [
        *[sys.executable, "-m", "resihp", "run", "--local", "--nodes", "2", "--gpus-per-node", "4"],
        *["--tp", "2", "--pp", "2", "--", sys.executable, str(script), *SIZES],
    ]
    try:
        subprocess.run(
            command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300
        )
        (journal,) = folder.glob("home/jobs/*/journal")
        records = read(journal)
    finally:
        shutil.rmtree(folder)
    declared_at = next(record.at for record in records if isinstance(record.entry, ModelDeclared))
    planned_at = next(record.at for record in records if isinstance(record.entry, PlanDecided))
    committed_at = next(record.at for record in records if isinstance(record.entry, IterationCommitted))
    probes = [record.entry for record in records if isinstance(record.entry, ProbesTaken) and record.at <= planned_at]
    fit = {device.rank: device.fit for probe in probes for device in probe.devices}
    return Start(
        aside=tuple(rank for rank in sorted(fit) if not fit[rank]),
        worst=min(device.speed for probe in probes for device in probe.devices if device.speed is not None),
        looks=max(probe.looks for probe in probes),
        probes_s=planned_at - declared_at,
        iteration_s=committed_at - declared_at,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--healthy", type=int, default=50)
    parser.add_argument("--slow", type=int, default=10)
    parser.add_argument("--busy", type=int, default=2, help="processes that keep processors busy")
    options = parser.parse_args()

    scripts = Path(tempfile.mkdtemp(prefix="resihp-starts-"))
    slowed = scripts / "slowed.py"
    slowed.write_text(SLOWED)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.busy)]
    found: dict[str, list[Start]] = {"healthy": [], f"one at {SPEED:.0%}": []}
    try:
        for name, script, count in zip(found, (EXAMPLE, slowed), (options.healthy, options.slow), strict=True):
            for number in range(count):
                one = start(script)
                found[name].append(one)
                print(f"{name} {number + 1}: {one}", file=sys.stderr, flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
        shutil.rmtree(scripts)

    table = Table(title=f"Local starts of 8 workers, {options.busy} processes beside them")
    columns = (
        "",
        "starts",
        "healthy aside",
        "slow aside",
        "with a second look",
        "least share",
        "to plan s",
        "max s",
    )
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for name, starts in found.items():
        victim = {SLOW} if starts is not found["healthy"] else set()
        if starts:
            table.add_row(
                name,
                str(len(starts)),
                str(sum(bool(set(one.aside) - victim) for one in starts)),
                str(sum(bool(set(one.aside) & victim) for one in starts)) if victim else "",
                str(sum(one.looks > 1 for one in starts)),
                f"{min(one.worst for one in starts):.0%}",
                f"{statistics.median(one.probes_s for one in starts):.2f}",
                f"{max(one.probes_s for one in starts):.2f}",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
