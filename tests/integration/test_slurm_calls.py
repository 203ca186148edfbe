"""What a healthy job asks of Slurm: little, for there may be many such jobs, and one slurmctld."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from pathlib import Path

import pytest

from resihp.record.journal import FailureFound
from tests.integration.slurm_jobs import Desk, MakeCluster

WATCHED_S = float(os.environ.get("RESIHP_CALLS_S", "20"))
"""From the start of training on; `make soak` watches for ten minutes."""
NODES = 8 if "RESIHP_SOAK" in os.environ else 4
MOST_CALLS = 12
"""In ten minutes, the start included."""
MOST_WITH_COMMENT = 20
PROGRAMS = ("scontrol", "squeue", "sinfo", "sbatch", "scancel", "sacct", "sdiag")
"""srun, which starts the agents, is not among them: that is the job itself."""

pytestmark = pytest.mark.timeout(300 + WATCHED_S)


def counting(folder: Path, search: str) -> None:
    """Programs of these names that note each call in `calls` before they do it."""
    folder.mkdir()
    for name in PROGRAMS:
        for each in search.split(":"):
            real = os.path.join(each, name)
            if os.access(real, os.X_OK):
                path = folder / name
                path.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\nexec {real} "$@"\n')
                path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
                break


def noted(calls: Path) -> list[str]:
    """One for each call; formats have control characters in them, line feeds too."""
    return [line for line in calls.read_text().splitlines() if line.startswith(PROGRAMS)]


@pytest.mark.parametrize(
    ("comment", "most"), [("true", MOST_WITH_COMMENT), pytest.param("false", MOST_CALLS, marks=pytest.mark.soak)]
)
def test_a_healthy_job_hardly_asks_anything(cluster: MakeCluster, comment: str, most: int) -> None:
    made = cluster(nodes=NODES, gpus=1)
    counting(made.folder / "counting", made.environment["PATH"])
    desk = Desk(made, RESIHP_SLURM__COMMENT=comment)
    mine = desk.environment["PATH"]
    desk.environment["PATH"] = f"{made.folder / 'counting'}:{mine}"
    desk.pace(0.1)
    changes = {"--gpus-per-node=8": "--gpus-per-node=1", "--nodes 4 --tp 4 --pp 2 --checkpoint-every 100": "--pp 2"}
    script = desk.script(100_000, nodes=NODES, changes=changes)
    (desk.folder / "job.sbatch").write_text(script)
    job = desk.run("sbatch", "--parsable", "job.sbatch").stdout.strip()
    desk.environment["PATH"] = mine  # what the test asks from here on does not count
    calls = made.folder / "counting" / "calls"
    submitted = len(noted(calls))
    desk.until_committed(job, 1, timeout_s=120)
    until = time.monotonic() + WATCHED_S
    desk.until(lambda: time.monotonic() > until, job, WATCHED_S + 60)
    made_calls = noted(calls)[submitted:]
    print(f"{len(made_calls)} calls in {WATCHED_S:.0f} s:", *made_calls, sep="\n  ")
    assert desk.of(job, FailureFound) == []
    assert desk.committed(job) > 2
    assert len(made_calls) <= most, Counter(line.split()[0] for line in made_calls)
    assert ("Comment=resihp: " in desk.run("scontrol", "show", "job", job).stdout) == (comment == "true")
    desk.run("scancel", job)
    desk.wait(job)
