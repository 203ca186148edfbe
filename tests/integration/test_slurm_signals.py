"""Slurm takes a job's nodes away for another one, or its time is up: it is saved, nobody is blamed, it comes back."""

from __future__ import annotations

import time

import pytest

from resihp.record.journal import CheckpointCommitted, DrainDecided, FailureFound, JobEnded, JobSignalled, NodeLost
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference

pytestmark = pytest.mark.timeout(400)

PREEMPTION = {
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "PartitionName": "low Nodes=ALL PriorityTier=0 MaxTime=INFINITE GraceTime=20",
}
"""Jobs in the usual partition take nodes from those in this one, which have so many seconds left then."""


def assert_saved(desk: Desk, job: str, meaning: str) -> int:
    """The job was stopped for this reason, with a checkpoint of all that was done, which is returned; nobody failed."""
    assert [entry.meaning for entry in desk.of(job, JobSignalled)] == [meaning], desk.output(job)
    assert [entry.exit_code for entry in desk.of(job, JobEnded)] == [75]
    desk.until(lambda: desk.of(job, CheckpointCommitted), job)  # its manifest follows the decision
    done = desk.committed(job)
    assert [entry.iteration for entry in desk.of(job, CheckpointCommitted)] == [done]
    assert desk.of(job, FailureFound) == []
    assert desk.of(job, DrainDecided) == []
    assert not [state for state in desk.cluster.states().values() if "drain" in state or "down" in state]
    return done


def assert_goes_on(desk: Desk, job: str, done: int, reference: Reference) -> None:
    """The second run begins where the first one ended, and computes the same."""
    reference.check(desk.rows("iterations", job), last=done)
    desk.pace(0.0)
    desk.start_again(job, "TimeLimit=10")
    assert_ended_once(desk, job)
    reference.check(desk.rows("iterations", job), first=done + 1)


def assert_ended_once(desk: Desk, job: str) -> None:
    """It has completed after one restart, and Slurm has nothing more to do with it."""
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    desk.until(lambda: not desk.run("squeue", "-h").stdout, job, timeout_s=30)
    assert (desk.state(job), desk.shown(job)["Restarts"]) == (("COMPLETED", "0:0"), "1")


def test_a_preempted_job_is_saved_and_comes_back(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=2, gpus=1, settings=PREEMPTION), forks=False)
    desk.pace(0.1)
    changes = {"##SBATCH --partition=gpu --account=project": "#SBATCH --partition=low"}
    job = desk.sbatch_training(ITERATIONS, nodes=2, gpus=1, changes=changes)
    desk.until_committed(job, 3)
    other = desk.run("sbatch", "--parsable", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600").stdout
    desk.until(lambda: desk.of(job, JobEnded), job)
    done = assert_saved(desk, job, "preempted")
    desk.until(lambda: desk.state(other.strip())[0] == "RUNNING", job)
    desk.run("scancel", other.strip())
    assert_goes_on(desk, job, done, reference)


@pytest.mark.soak
def test_a_job_whose_time_is_up_is_saved_and_comes_back(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=2, gpus=1), forks=False)
    desk.pace(0.5)
    changes = {"--signal=B:USR2@300": "--signal=B:USR2@90"}
    job = desk.sbatch_training(ITERATIONS, nodes=2, gpus=1, changes=changes)
    desk.until_committed(job, 3)
    # Slurm looks at time limits twice a minute, and counts them in minutes.
    assert desk.run("scontrol", "update", f"JobId={job}", "TimeLimit=2").returncode == 0
    desk.until(lambda: desk.of(job, JobEnded), job, timeout_s=150)
    assert_goes_on(desk, job, assert_saved(desk, job, "warning"), reference)


STOPPED_S = 12.0
"""Longer than a silent node is waited for."""


def test_a_job_that_is_stopped_goes_on_when_it_is_continued(cluster: MakeCluster, reference: Reference) -> None:
    """STOP reaches agents and workers, but not the batch script: nobody is silent for a fault of their own."""
    desk = Desk(cluster(nodes=2, gpus=2), forks=False)
    desk.pace(0.1)
    job = desk.sbatch_training(ITERATIONS, nodes=2)
    desk.until_committed(job, 3)
    assert desk.run("scancel", "--signal=STOP", job).returncode == 0
    until = time.monotonic() + STOPPED_S
    desk.until(lambda: time.monotonic() > until, job, STOPPED_S + 60)
    before = desk.committed(job)
    assert f"training waits, no node is blamed; try: scancel --signal=CONT {job}" in desk.output(job)
    assert desk.run("scancel", "--signal=CONT", job).returncode == 0
    desk.until_committed(job, before + 2)
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job))
    assert desk.of(job, NodeLost) == []
    assert desk.of(job, FailureFound) == []
