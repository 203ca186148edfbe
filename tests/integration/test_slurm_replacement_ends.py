"""The Slurm job of a replacement ends apart from the job that asked for it: nothing is left on its node, and nobody
healthy is blamed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil
import pytest

from resihp.record.journal import ReplacementChanged
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference
from tests.integration.test_slurm_node_death import until_replaced

pytestmark = pytest.mark.timeout(400)

GUEST = "n5"
"""Node of the replacement."""
GONE_WITHIN_S = 10.0
"""How soon nothing of the replacement runs on its node, once Slurm says that its job has ended."""
LOW_PRIORITY = {
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "CANCEL",
    "PartitionName": "low Nodes=ALL PriorityTier=0 MaxTime=INFINITE GraceTime=5",
}


def cancel(desk: Desk, job: str) -> None:
    desk.run("scancel", job)


def warn(desk: Desk, job: str) -> None:
    desk.run("scancel", "--batch", "--signal=USR2", job)


def terminate(desk: Desk, job: str) -> None:
    desk.run("scancel", "--full", "--signal=TERM", job)


def kill(desk: Desk, job: str) -> None:
    desk.run("scancel", "--full", "--signal=KILL", job)


def reach_the_limit(desk: Desk, job: str) -> None:
    desk.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")


def preempt(desk: Desk, job: str) -> None:
    desk.run("sbatch", "-p", "main", "-w", GUEST, "--exclusive", "--output=/dev/null", "--wrap=sleep 5")


def suspend_and_cancel(desk: Desk, job: str) -> None:
    desk.run("scontrol", "suspend", job)
    desk.until(lambda: desk.state(job)[0] == "SUSPENDED", job)
    desk.run("scancel", job)


def reboot(desk: Desk, job: str) -> None:
    desk.cluster.kill_node(GUEST)
    desk.cluster.start_node(GUEST)


def set_down(desk: Desk, job: str) -> None:
    desk.run("scontrol", "update", f"NodeName={GUEST}", "State=DOWN", "Reason=repair")


def close_partition(desk: Desk, job: str) -> None:
    """Running jobs go on in a partition that is down; the replacement is cancelled later."""
    desk.run("scontrol", "update", "PartitionName=low", "State=DOWN")
    committed = desk.committed(job_of(desk))
    desk.until_committed(job_of(desk), committed + 2)
    desk.run("scancel", job)


def job_of(desk: Desk) -> str:
    """The job that asked for the replacement."""
    return min(desk.run("squeue", "-h", "-n", "train", "-o", "%A").stdout.split() or ["1"], key=int)


NODE_LOST = (reboot, set_down)
"""Endings in which the node itself is lost, and may be avoided."""
CANCELLED = (cancel, suspend_and_cancel, close_partition)
ENDINGS = (cancel, warn, terminate, kill, reach_the_limit, preempt, suspend_and_cancel, *NODE_LOST, close_partition)
OF_EACH_RUN = (cancel, warn)


@pytest.mark.parametrize(
    "proctrack", ["linuxproc", pytest.param("cgroup", marks=[pytest.mark.soak, pytest.mark.every_slurm])]
)
@pytest.mark.parametrize(
    "end",
    [pytest.param(end, id=end.__name__, marks=[] if end in OF_EACH_RUN else [pytest.mark.soak]) for end in ENDINGS],
)
def test_a_replacement_whose_slurm_job_ends_leaves_nothing_on_its_node(
    cluster: MakeCluster, reference: Reference, end: Callable[[Desk, str], None], proctrack: str
) -> None:
    made = cluster(nodes=5, gpus=2, settings={"ProctrackType": f"proctrack/{proctrack}", **LOW_PRIORITY})
    desk = Desk(made, RESIHP_SLURM__REPLACEMENT_PARTITION="low")
    desk.pace(0.1)
    job = desk.sbatch_training(ITERATIONS)
    desk.until_committed(job, 3)
    desk.cluster.kill_node("n3")
    desk.pace(0.4)
    until_replaced(desk, job)
    (joined,) = [entry for entry in desk.of(job, ReplacementChanged) if entry.state == "joined"]
    guest = str(joined.slurm_job)
    assert processes_of(desk, guest)

    end(desk, guest)
    running = ("RUNNING", "SUSPENDED", "COMPLETING")
    desk.until(lambda: desk.state(guest)[0] not in running, job, timeout_s=150)
    desk.until(lambda: not processes_of(desk, guest), job, timeout_s=GONE_WITHIN_S)
    desk.until(lambda: states_of(desk, job, guest)[-1] in ("withdrawn", "ended", "lost"), job)
    desk.until_committed(job, desk.committed(job) + 3)

    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job))
    lost = {"n3", GUEST} if end in NODE_LOST else {"n3"}
    if end in (cancel, warn):
        assert {failure["node"] for failure in desk.rows("failures", job)} == {"n3"}, "the guest leaves in order"
    assert {drain["node"] for drain in desk.rows("drains", job)} <= lost
    replacements = desk.rows("replacements", job)
    print(end.__name__, [(row["node"], row["outcome"], row["text"]) for row in replacements])
    if end in CANCELLED:
        assert len(replacements) == 1, "nothing is asked for against an administrator's cancel"


def states_of(desk: Desk, job: str, slurm_job: str) -> list[str]:
    """What became of the replacement with this Slurm job, step by step."""
    return [entry.state for entry in desk.of(job, ReplacementChanged) if entry.slurm_job == slurm_job]


def processes_of(desk: Desk, slurm_job: str) -> list[str]:
    """The command lines of the processes of a Slurm job, on all virtual nodes of this cluster: another test's cluster
    may have a job of the same number."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            is_here = any(str(desk.folder) in value for value in environment.values())
            if is_here and environment.get("SLURM_JOB_ID") == slurm_job and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found
