"""A node whose death ends a run is not used by the next run of the same Slurm job, which may be given any node."""

from __future__ import annotations

import json
import time

import pytest

from resihp.record.journal import DrainDecided, JobEnded, NodeJoined
from tests.integration.jobs import RESIHP
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster
from tests.integration.test_slurm_comes_back import submit

pytestmark = pytest.mark.timeout(400)


def die_and_come_back(desk: Desk, job: str, run: str) -> str:
    """The node that is not the batch host dies, which ends the run; then it boots, and Slurm uses it again."""
    desk.until_committed(run, 3)
    node = desk.nodes(job)[1]
    desk.cluster.kill_node(node)
    (ended,) = desk.until(lambda: desk.of(run, JobEnded), run)
    assert (ended.exit_code, ended.state) == (75, "failed")
    assert [(entry.node, entry.measure, entry.grounds) for entry in desk.of(run, DrainDecided)] == [
        (node, "exclude", "died")
    ]
    desk.until(lambda: desk.state(job)[0] == "PENDING", job)
    desk.cluster.start_node(node)
    desk.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    desk.until(lambda: desk.cluster.states()[node] == "idle", job)
    desk.until(lambda: node in excluded(desk, job) or "its next run may get" in desk.output(job), job)
    desk.start_again(job)  # Slurm would have waited two minutes, and the request for other nodes takes a few seconds
    return node


def excluded(desk: Desk, job: str) -> list[str]:
    """The nodes that the job may not get, for Slurm."""
    return desk.run("scontrol", "show", "hostnames", desk.shown(job)["ExcNodeList"]).stdout.split()


@pytest.mark.every_slurm
def test_nodes_that_die_in_turn_are_each_used_once(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=4, gpus=1))
    desk.pace(0.1)
    job = submit(desk, every=3)
    dead = [die_and_come_back(desk, job, run) for run in (job, f"{job}-r1")]
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    used = [entry.node for run in (job, f"{job}-r1", f"{job}-r2") for entry in desk.of(run, NodeJoined)]
    assert len(used) == 6
    assert [used.count(node) for node in dead] == [1, 1]
    assert excluded(desk, job) == sorted(dead), desk.output(job)
    assert max(entry["iteration"] for entry in desk.rows("iterations", job)) == ITERATIONS


def test_a_job_that_cannot_do_without_the_node_gets_it_again(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2, gpus=1))
    desk.pace(0.1)
    job = submit(desk, every=3)
    die_and_come_back(desk, job, job)
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert "its next run may get n2 again: it needs 2 nodes, and without them only 1 of their kind" in desk.output(job)


@pytest.mark.every_slurm
def test_a_node_with_a_memory_error_is_drained_before_the_run_ends(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=3, gpus=1))
    desk.pace(0.1)
    job = submit(desk, every=3)
    desk.until_committed(job, 3)
    node = desk.nodes(job)[1]
    (desk.folder / "pace.ecc").write_text(node)
    (ended,) = desk.until(lambda: desk.of(job, JobEnded), job)
    assert (ended.exit_code, ended.state) == (75, "failed")
    assert [(entry.node, entry.measure) for entry in desk.of(job, DrainDecided)] == [(node, "drain")]
    desk.until(lambda: desk.cluster.states()[node].startswith("drain"), job)
    assert "GPU memory had an uncorrectable error" in desk.reason(node)
    desk.start_again(job)
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert node not in [entry.node for entry in desk.of(f"{job}-r1", NodeJoined)]
    assert max(entry["iteration"] for entry in desk.rows("iterations", job)) == ITERATIONS


@pytest.mark.parametrize("away_s", [20, pytest.param(600, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])])
def test_a_job_is_requeued_when_slurmctld_is_back(cluster: MakeCluster, away_s: int) -> None:
    """With accounting: without it, this slurmctld would change no requeued job before its last process has ended."""
    desk = Desk(cluster(nodes=3, gpus=1, dbd=True))
    desk.pace(0.1)
    job = submit(desk, every=3)
    desk.until_committed(job, 3)
    node = desk.nodes(job)[1]
    desk.cluster.stop_controller()
    stopped = time.monotonic()
    desk.cluster.kill_node(node)
    (ended,) = desk.until(lambda: desk.of(job, JobEnded), job)
    assert (ended.exit_code, ended.state) == (75, "failed")
    desk.until(lambda: time.monotonic() - stopped > away_s, job, timeout_s=away_s + 30)
    desk.cluster.start_controller()
    desk.until(lambda: desk.state(job)[0] == "PENDING", job)
    desk.start_again(job)
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert node not in [entry.node for entry in desk.of(f"{job}-r1", NodeJoined)]


def test_a_suspect_node_is_checked_by_a_job_of_its_own(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2))
    done = desk.run(*RESIHP, "node", "check", "n2", "--json", timeout_s=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["healthy"]
    assert {"gpus", "home", "journal", "health command", "gpu speed"} <= {row["check"] for row in answer["rows"]}
    home = str(desk.folder / "home")
    assert next(row["text"] for row in answer["rows"] if row["check"] == "home").startswith(home)
    assert not list((desk.folder / "home").glob("check-*"))
    desk.cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=fan")
    refusal = desk.run(*RESIHP, "node", "check", "n2")
    assert refusal.returncode == 69
    assert "Slurm starts no job there, it is idle+drain (fan)" in refusal.stderr
