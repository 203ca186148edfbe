"""A cluster with accounting: what sacct says of jobs, nodes given back in turn, who may drain, what limits refuse."""

from __future__ import annotations

import pytest

from resihp.controller import interface as api
from resihp.journal import JobEnded
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference
from tests.integration.test_slurm_desk import Desk as Upkeep
from tests.integration.test_slurm_node_death import until_replaced
from tests.integration.test_slurm_signals import PREEMPTION

pytestmark = pytest.mark.timeout(400)


def runs(desk: Desk, job: str) -> list[tuple[str, str]]:
    """State and exit code of each run of a job, and of each of its sizes, as sacct has them, oldest first."""
    argv = ["sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", "--jobs", job]
    lines = desk.run(*argv, "--format=start,state,exitcode").stdout.splitlines()
    found = sorted(line.split("|") for line in lines)
    return [(state, code) for _, state, code in found]


def test_sacct_of_a_preempted_job_and_of_a_replacement(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=5, gpus=1, dbd=True, settings=PREEMPTION))
    desk.pace(0.1)
    changes = {"##SBATCH --partition=gpu --account=project": "#SBATCH --partition=low"}
    job = desk.sbatch_training(ITERATIONS, nodes=4, gpus=1, changes=changes)
    desk.until_committed(job, 3)
    other = desk.run("sbatch", "--parsable", "-N4", "--exclusive", "--output=/dev/null", "--wrap=sleep 600").stdout
    desk.until(lambda: desk.of(job, JobEnded), job)
    desk.until(lambda: desk.state(other.strip())[0] == "RUNNING", job)
    desk.run("scancel", other.strip())
    desk.start_again(job, "TimeLimit=10")
    again = f"{job}-r1"
    desk.until_committed(again, desk.committed(job) + 3)
    desk.cluster.kill_node("n3")
    until_replaced(desk, again)
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    (replacement,) = desk.rows("replacements", again)
    desk.wait(replacement["slurm_job"])
    for name in (job, replacement["slurm_job"]):
        print(
            desk.run(
                "sacct", "-D", "-P", "-j", name, "-o", "jobid,state,exitcode,start,end,nnodes,nodelist,comment"
            ).stdout
        )
    raise SystemExit


def test_nodes_are_given_back_one_after_the_other(cluster: MakeCluster) -> None:
    """Without accounting, Slurm 22.05 lets a job shrink once only."""
    desk = Upkeep(cluster(nodes=4, gpus=2, dbd=True), 4)
    for left in (3, 2, 1):
        release = api.ReleaseNode(node=desk.names[left], keep=desk.names[:left])
        desk.do(release, until=lambda left=left: len(desk.of(api.ReleaseAnswered)) == 4 - left)
        assert desk.view().nodes == desk.names[:left]
    assert [answer.outcome for answer in desk.of(api.ReleaseAnswered)] == ["done"] * 3
    desk.close()
