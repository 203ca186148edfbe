"""A new user on a real cluster: `resihp init`, then the batch script that it wrote, as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.integration.cluster import Cluster
from tests.integration.jobs import EXAMPLE, RESIHP, TINY
from tests.integration.slurm_jobs import Desk

MakeCluster = Callable[..., Cluster]


def test_what_init_writes_trains(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2, gpus=2))
    command = [sys.executable, str(EXAMPLE), *TINY, "--iterations", "3"]
    done = desk.run(*RESIHP, "init", "--time", "20m", "--", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["job.toml", "job.sbatch"]
    text = (desk.folder / "job.toml").read_text()
    assert "from Slurm: partition main has 2 nodes of 2 GPUs" in text
    printed = desk.run(*RESIHP, "submit", "job.toml", "--dry-run")
    assert printed.returncode == 0, printed.stderr
    job = desk.run("sbatch", "--parsable", "job.sbatch").stdout.strip()
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert desk.committed(job) == 3
