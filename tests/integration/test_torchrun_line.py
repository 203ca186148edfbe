"""torchrun's own command line, with `resihp run` in place of `torchrun`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.integration.jobs import RESIHP, Job
from tests.integration.slurm_jobs import Desk, MakeCluster

SCRIPT = """\
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print(*(os.environ[name] for name in names), __name__, *sys.argv[1:], flush=True)
"""


def run(job: Job, line: str) -> subprocess.CompletedProcess[str]:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in job.environment.items() if not name.startswith("SLURM_")}
    command = [*RESIHP, "run", *line.split()]
    return subprocess.run(
        command, cwd=job.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def log(job: Job, number: int, rank: int) -> str:
    return Path(job.folder, "home", "jobs", f"local-{number}", "logs", f"n1.rank{rank}.log").read_text()


def test_each_line_of_torchruns_runs_its_script(job: Job) -> None:
    done = run(job, "--standalone --nproc-per-node 2 train.py --x 1")
    assert (done.returncode, done.stdout) == (0, "0 0 2 2 __main__ --x 1\n"), done.stderr
    assert log(job, 1, rank=1) == "1 1 2 2 __main__ --x 1\n"

    done = run(job, "--nnodes=1 --nproc_per_node=2 --rdzv_backend c10d --tee 3 --max-restarts 3 -m train -- --x")
    assert (done.returncode, done.stdout) == (0, "0 0 2 2 __main__ -- --x\n"), done.stderr
    assert log(job, 2, rank=1) == "1 1 2 2 __main__ -- --x\n"
    said = re.findall("resihp: (not .*?):", done.stderr)
    assert said == ["not needed", "not in a Slurm allocation"], done.stderr


def test_in_a_batch_script_it_uses_the_nodes_of_the_allocation(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2, gpus=2))
    (desk.folder / "train.py").write_text(SCRIPT)
    meeting = "--rdzv-backend c10d --rdzv-endpoint $(hostname):29500"
    line = f"resihp run --nnodes 1:2 --nproc-per-node gpu {meeting} train.py --x"
    options = ["--nodes=2", "--gpus-per-node=2", "--exclusive", "--output=%x-%j.out", "--time=5"]
    job = desk.sbatch(f"#!/bin/bash\n#SBATCH --no-kill\nexec {line}\n", *options)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert "not needed: --rdzv-backend, --rdzv-endpoint" in desk.output(job)
    assert "\n0 0 4 2 __main__ --x\n" in desk.output(job)
    logs = (desk.folder / "home" / "jobs" / job / "logs").glob("*.rank*.log")
    assert sorted(log.read_text().split()[0] for log in logs) == ["0", "1", "2", "3"]
