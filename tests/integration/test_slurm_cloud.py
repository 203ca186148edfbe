"""Nodes of a cloud come and go under their names: what a job found of one ends with its instance."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from resihp.slurm.commands import CommandLine
from resihp.slurm.drains.exclusions import Exclusions
from tests.integration.cluster import Cluster
from tests.integration.slurm_jobs import MakeCluster

POWER = {"SuspendProgram": "/bin/true", "ResumeProgram": "/bin/true", "SuspendTime": "3600"}


def in_a_cloud(cluster: Cluster, node: str) -> None:
    """From now on it is one of a cloud's, which is up."""
    cluster.stop_controller()
    lines = cluster.configuration.read_text().splitlines()
    changed = [line.replace("State=UNKNOWN", "State=CLOUD") if f"NodeName={node} " in line else line for line in lines]
    cluster.configuration.write_text("\n".join(changed) + "\n")
    cluster.start_controller()


@pytest.mark.timeout(200)
def test_an_instance_that_is_powered_down_takes_its_exclusion_along(cluster: MakeCluster, tmp_path: Path) -> None:
    made = cluster(nodes=2, settings={**POWER, "SuspendTimeout": "3", "ResumeTimeout": "600"})
    in_a_cloud(made, "n2")
    slurm = CommandLine(environment=made.environment)
    made.wait(lambda: "cloud" in slurm.nodes(["n2"])["n2"].flags, "n2 to be a cloud's")
    exclusions = Exclusions(tmp_path, "resihp-test")
    exclusions.add("n1", "silent", time.time() + 600, job_id="1")
    exclusions.add("n2", "silent", time.time() + 600, job_id="1")
    assert exclusions.to_avoid(slurm, time.time()) == ("n1", "n2")
    made.run("scontrol", "update", "NodeName=n2", "State=POWER_DOWN")
    assert exclusions.to_avoid(slurm, time.time()) == ("n1",)
    made.wait(lambda: not is_up(slurm), "n2 to be powered down")
    assert exclusions.to_avoid(slurm, time.time()) == ("n1",)

    # It takes its time to come up again: a job that waits for it is not over.
    job = made.run("sbatch", "--parsable", "--nodelist=n2", "--wrap", "true").stdout.strip()
    made.wait(lambda: (view := slurm.job(job)) is not None and view.state == "configuring", "the job to wait for n2")
    view = slurm.job(job)
    assert view is not None
    assert view.active
    assert exclusions.to_avoid(slurm, time.time()) == ("n1",)


def is_up(slurm: CommandLine) -> bool:
    """22.05 does not list what is powered down."""
    view = slurm.nodes(["n2"]).get("n2")
    return view is not None and not view.flags & {"powered_down"}
