"""What only some releases of Slurm do, and what a site makes of sbatch: expedited requeues, plugins, requeue off."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resihp.record.journal import CheckpointCommitted
from tests.integration.cluster import Cluster, requires_slurm
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference, job_file
from tests.integration.test_slurm_signals import assert_ended_once

pytestmark = pytest.mark.timeout(400)

EXPEDITES = "26.05"
FEW = 12
"""Iterations."""
ALLOWED = {"SlurmctldParameters": "enable_expedited_requeue"}
EXPEDITED = {"#SBATCH --requeue": "#SBATCH --requeue=expedite"}


def test_an_expedited_requeue_begins_at_once(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=2, gpus=1, release=EXPEDITES, settings=ALLOWED))
    desk.pace(0.1)
    job = desk.sbatch_training(FEW, nodes=2, gpus=1, changes=EXPEDITED)
    desk.until_committed(job, 3, timeout_s=150)
    assert desk.run("scancel", "--batch", "--signal=USR2", job).returncode == 0
    (checkpoint,) = desk.until(lambda: desk.of(job, CheckpointCommitted), job)
    desk.pace(0.0)
    desk.until(lambda: desk.job(f"{job}-r1").folder.exists(), job, timeout_s=30)  # Slurm usually waits two minutes
    assert_ended_once(desk, job)
    reference.check(desk.rows("iterations", job), first=checkpoint.iteration + 1, last=FEW)


@pytest.mark.parametrize("epilog", [pytest.param("/bin/true", marks=pytest.mark.soak), "/bin/false"])
def test_an_expedited_job_whose_program_is_broken_ends(cluster: MakeCluster, epilog: str) -> None:
    """Slurm would hold a job with such an exit code, or run it again for ever where the epilog finds a node bad."""
    desk = Desk(cluster(nodes=2, gpus=1, release=EXPEDITES, settings={**ALLOWED, "Epilog": epilog}))
    broken = desk.folder / "broken.py"
    broken.write_text("raise ValueError('broken for everyone')\n")
    script = desk.script(ITERATIONS, nodes=2, gpus=1, changes=EXPEDITED)
    job = desk.sbatch(script.replace(" ".join(desk.training(ITERATIONS)), f"{sys.executable} {broken}"))
    assert desk.wait(job) == ("FAILED", "93:0"), desk.output(job)
    desk.until(lambda: not desk.run("squeue", "-h").stdout, job, timeout_s=30)
    assert (desk.state(job), desk.shown(job)["Restarts"]) == (("FAILED", "93:0"), "0")


def test_a_site_that_does_not_allow_it_is_named(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=1, gpus=1, release=EXPEDITES))
    job = {"nodes": 1, "gpus_per_node": 1}
    done = desk.submit(job_file(desk.training(1), job=job, slurm={"requeue": "expedite"}))
    assert done.returncode == 2
    assert "enable_expedited_requeue is not set at this site" in done.stderr
    assert len(done.stderr.splitlines()) == 1


PLUGIN = """
function slurm_job_submit(job, partition, user)
  if job.name == "refused" then
    slurm.log_user("jobs of the project pilot end in June")
    return slurm.ERROR
  end
  slurm.log_user("your job will not be requeued here")
  job.requeue = 0
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partition, user)
  return slurm.SUCCESS
end
return slurm.SUCCESS
"""


@pytest.fixture
def plugged(slurm_release: str) -> Cluster:
    """A site whose plugin refuses some jobs, and changes the others; it talks while it does."""
    requires_slurm(release=slurm_release)
    made = Cluster(nodes=1, gpus=1, release=slurm_release, settings={"JobSubmitPlugins": "lua"})
    Path(made.folder / "job_submit.lua").write_text(PLUGIN)
    return made


def test_a_sites_plugin_may_refuse_a_job_or_change_it(plugged: Cluster) -> None:
    with plugged:
        desk = Desk(plugged)
        job = {"nodes": 1, "gpus_per_node": 1}
        refused = desk.submit(job_file(desk.training(1), job={**job, "name": "refused"}))
        assert refused.returncode == 2
        assert "jobs of the project pilot end in June" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
        assert desk.run("squeue", "-h").stdout == ""

        desk.pace(0.1)
        done = desk.submit(job_file(desk.training(ITERATIONS), job=job))
        assert done.returncode == 0, done.stderr
        name = done.stdout.strip()
        desk.until_committed(name, 2, timeout_s=150)
        assert desk.run("scancel", "--batch", "--signal=USR2", name).returncode == 0
        assert desk.wait(name) == ("FAILED", "75:0"), desk.output(name)
        said = desk.output(name)
        assert f"job {name}: not requeued: scontrol: " in said
        assert "submit it again to continue from its last checkpoint" in said
        assert desk.of(name, CheckpointCommitted)
