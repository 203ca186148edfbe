"""What is drained, and by whom, when agents, slurmds and nodes die: nobody healthy; what was rebooted serves again."""

from __future__ import annotations

import time

import pytest

from resihp.record.journal import (
    DrainAnswered,
    DrainDecided,
    FailureFound,
    JobEnded,
    NodeLost,
    NodeReleased,
    Reconfigured,
)
from tests.integration.slurm_jobs import Desk, MakeCluster, Reference, on_node
from tests.integration.test_site_hook import BOB

pytestmark = pytest.mark.timeout(300)

LAST = 20
AGENT = "resihp.wrapper.agent.process"
PAUSE_S = 0.1


def begun(desk: Desk) -> str:
    """A job on four nodes of one device that trains."""
    desk.pace(PAUSE_S)
    job = desk.sbatch_training(LAST, gpus=1)
    desk.until_committed(job, 3)
    return job


def ended(desk: Desk, job: str, reference: Reference) -> None:
    desk.pace(0.0)
    desk.until(lambda: desk.of(job, JobEnded), job)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job), last=LAST)


def decided(desk: Desk, job: str) -> list[tuple[str, str, str]]:
    return [(entry.node, entry.measure, entry.grounds) for entry in desk.of(job, DrainDecided)]


def left_out(desk: Desk, job: str) -> None:
    """Until that has been done, and nothing else."""
    steps = desk.until(lambda: desk.of(job, DrainAnswered), job)
    assert [(entry.node, entry.step, entry.outcome) for entry in steps] == [("n3", "exclusion", "done")]


def serves_others(desk: Desk, node: str) -> None:
    """Another user's next job runs there, and nobody has done anything to the node."""
    done = desk.cluster.run("srun", f"--nodelist={node}", "--time=1", "hostname", user=BOB, timeout_s=60)
    assert done.stdout.strip(), done.stderr
    assert "drain" not in desk.cluster.states()[node]
    assert desk.reason(node) == "none"


def test_a_node_whose_agent_was_killed_is_not_drained(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=4, gpus=1))
    job = begun(desk)
    (agent,) = on_node(desk.cluster, "n3", AGENT)
    agent.kill()
    desk.until(lambda: desk.of(job, Reconfigured), job)
    left_out(desk, job)
    assert decided(desk, job) == [("n3", "exclude", "agent")]
    assert "n3: excluded from your next jobs, not drained (the node answers, only its agent ended)" in desk.output(job)
    (released,) = desk.until(lambda: desk.of(job, NodeReleased), job)
    assert released.outcome == "done"
    serves_others(desk, "n3")
    ended(desk, job, reference)


@pytest.mark.parametrize("returns", ["1", pytest.param("2", marks=pytest.mark.soak)])
def test_a_node_that_is_rebooted_serves_again_by_itself(
    cluster: MakeCluster, reference: Reference, returns: str
) -> None:
    desk = Desk(cluster(nodes=4, gpus=1, settings={"ReturnToService": returns}))
    job = begun(desk)
    killed_at = time.monotonic()
    desk.cluster.kill_node("n3")
    desk.until(lambda: desk.of(job, Reconfigured), job)
    left_out(desk, job)
    assert decided(desk, job) == [("n3", "exclude", "died")]
    desk.cluster.wait_state("n3", "down*")
    print(f"Slurm says down* after {time.monotonic() - killed_at:.1f} s: {desk.reason('n3')}")
    assert desk.reason("n3") == "Not responding"
    started_at = time.monotonic()
    desk.cluster.start_node("n3")
    desk.cluster.wait_state("n3", "idle")
    print(f"idle {time.monotonic() - started_at:.1f} s after it started")
    serves_others(desk, "n3")
    ended(desk, job, reference)
    assert [entry.node for entry in desk.of(job, NodeLost)] == ["n3"]
    for node in desk.cluster.nodes:
        desk.cluster.wait_state(node, "idle")


@pytest.mark.soak
def test_a_dead_slurmd_is_no_reason_to_do_anything(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=4, gpus=1))
    job = begun(desk)
    desk.pace(0.5)
    killed_at = time.monotonic()
    desk.cluster.kill_slurmd("n3")
    desk.cluster.wait_state("n3", "down*")
    print(f"Slurm says down* after {time.monotonic() - killed_at:.1f} s: {desk.reason('n3')}")
    desk.until_committed(job, desk.committed(job) + 1)
    assert desk.of(job, NodeLost) == []
    assert decided(desk, job) == []
    desk.pace(0.0)
    desk.until(lambda: desk.of(job, JobEnded), job)
    desk.cluster.start_node("n3")  # without it, Slurm cannot end the job
    ended(desk, job, reference)
    desk.cluster.wait_state("n3", "idle")
    serves_others(desk, "n3")


@pytest.mark.soak
@pytest.mark.timeout(500)
def test_a_node_that_an_administrator_drains_is_left_and_given_back(cluster: MakeCluster) -> None:
    """The job looks at its nodes a minute after it began, and every three from then on."""
    desk = Desk(cluster(nodes=4, gpus=1), RESIHP_SLURM__ON_DRAIN="vacate")
    job = begun(desk)
    desk.pace(4.0)
    desk.cluster.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=disk is failing")
    (lost,) = desk.until(lambda: desk.of(job, NodeLost), job, 260)
    assert (lost.node, lost.reason) == ("n3", "released because an administrator drains it: disk is failing")
    (released,) = desk.until(lambda: desk.of(job, NodeReleased), job)
    assert released.outcome == "done"
    desk.cluster.wait_state("n3", "drained")
    assert desk.reason("n3") == "disk is failing"
    assert desk.nodes(job) == ["n1", "n2", "n4"]
    assert "node n3: released and given back, because it is drained" in desk.output(job)
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert desk.of(job, FailureFound) == []
    assert decided(desk, job) == []
