"""Slurm wants a job to end: it is saved first, nobody is blamed, and it comes back if it is to."""

from __future__ import annotations

import sys

import pytest

from resihp.record.journal import CheckpointCommitted, FailureFound, JobEnded, JobSignalled
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference
from tests.integration.test_slurm_comment import comment
from tests.integration.test_slurm_signals import assert_ended_once

PATIENT = {"KillWait": "30"}
"""As Slurm has it: how long after TERM comes KILL."""


def saved(desk: Desk, job: str) -> int:
    """The last committed iteration, of which there must be a checkpoint."""
    (checkpoint,) = desk.until(lambda: desk.of(job, CheckpointCommitted), job)  # its manifest follows the decision
    done = desk.committed(job)
    assert checkpoint.iteration == done, desk.output(job)
    assert desk.of(job, FailureFound) == []
    return done


def test_a_cancelled_job_is_saved_before_it_ends(cluster: MakeCluster) -> None:
    """TERM reaches every process of the job at once: agents, fork servers, workers and supervisor.

    Slurm takes no comment from the moment of scancel on: what was said last stays true, for it says when it was.
    """
    desk = Desk(cluster(nodes=2, gpus=2, settings=PATIENT), forks=False)
    desk.pace(0.1)
    job = desk.sbatch_training(ITERATIONS, nodes=2)
    desk.until_committed(job, 3)
    assert desk.run("scancel", job).returncode == 0
    assert desk.wait(job, 30)[0] == "CANCELLED"
    assert comment(desk, job).startswith("resihp: no iteration ("), comment(desk, job)
    assert "comment" not in desk.output(job)
    desk.until(lambda: desk.of(job, JobEnded), job)
    assert [entry.meaning for entry in desk.of(job, JobSignalled)] == ["cancelled"], desk.output(job)
    assert desk.of(job, JobEnded)[0].exit_code == 143
    assert 3 <= saved(desk, job) < ITERATIONS
    told, ended = (next(r.at for r in desk.records(job) if isinstance(r.entry, k)) for k in (JobSignalled, JobEnded))
    print(f"saved and ended {ended - told:.1f} s after Slurm had told why")
    assert set(desk.cluster.states().values()) <= {"idle", "completing", "allocated", "mixed"}


def test_what_an_operator_stops_in_slurm_is_saved_too(cluster: MakeCluster) -> None:
    """INT to the batch step, as Ctrl-C in an interactive allocation, and `resihp stop`: nobody else hears of it."""
    desk = Desk(cluster(nodes=2, gpus=2, settings=PATIENT))
    desk.pace(0.1)
    ends = {130: ("scancel", "--batch", "--signal=INT"), 143: (sys.executable, "-m", "resihp", "stop")}
    for code, command in ends.items():
        job = desk.sbatch_training(ITERATIONS, nodes=2)
        desk.until_committed(job, 3)
        done = desk.run(*command, job)
        assert done.returncode == 0, done.stderr
        assert desk.wait(job, 30)[0] == "CANCELLED", "not FAILED, as an exit code that is not 0 would be"
        desk.until(lambda job=job: desk.of(job, JobEnded), job)
        assert [entry.meaning for entry in desk.of(job, JobSignalled)] == ["operator"], desk.output(job)
        assert desk.of(job, JobEnded)[0].exit_code == code
        iteration = saved(desk, job)
        assert 3 <= iteration < ITERATIONS
        assert f"checkpoint of iteration {iteration}: " in desk.output(job)
        again = f"unless Slurm runs job {job} again (squeue -j {job})"
        assert f"to resume from it, put this into the batch script, {again}: resihp run " in desk.output(job)


@pytest.mark.soak
def test_a_warned_job_is_saved_and_comes_back(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=2, gpus=2, settings=PATIENT), forks=False)
    desk.pace(0.1)
    job = desk.sbatch_training(ITERATIONS, nodes=2)
    desk.until_committed(job, 3)
    assert desk.run("scancel", "--batch", "--signal=USR2", job).returncode == 0
    desk.until(lambda: desk.shown(job)["Restarts"] == "1" and desk.state(job)[0] == "PENDING", job)
    assert [entry.meaning for entry in desk.of(job, JobSignalled)] == ["warning"]
    assert desk.of(job, JobEnded)[0].exit_code == 75
    done = saved(desk, job)
    reference.check(desk.rows("iterations", job), last=done)
    desk.pace(0.0)
    desk.start_again(job)
    assert_ended_once(desk, job)
    reference.check(desk.rows("iterations", job), first=done + 1)


def test_what_is_started_once_more_after_it_completed_ends_at_once(cluster: MakeCluster) -> None:
    """As Slurm itself does on some releases, and an administrator may: nothing is trained, and nothing is an error."""
    desk = Desk(cluster(nodes=2, gpus=1))
    job = desk.sbatch_training(2, nodes=2, gpus=1)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert desk.run("scontrol", "requeue", job).returncode == 0
    desk.start_again(job)
    assert_ended_once(desk, job)
    assert f"job {job}: started again by Slurm, but its run {job} has completed" in desk.output(job)
    assert [run.name for run in (desk.folder / "home" / "jobs").iterdir()] == [job]
