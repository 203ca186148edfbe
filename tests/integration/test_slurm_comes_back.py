"""A job that can go on comes back, whoever sent it away: where it was, once, and it ends once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from resihp.record.journal import (
    CheckpointCommitted,
    JobEnded,
    NodeJoined,
    NodeLost,
    PlanDecided,
    RollbackDecided,
    WorkerStarted,
)
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference

pytestmark = pytest.mark.timeout(400)

STAYS_AWAY_S = 30.0 if "RESIHP_SOAK" in os.environ else 3.0
"""How long after its end a job is looked for in the queue."""
PREEMPTION = {
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "PartitionName": "low Nodes=ALL PriorityTier=0 MaxTime=INFINITE GraceTime=20",
}
LAYOUT = "--nodes 4 --tp 4 --pp 2 --checkpoint-every 100"


def submit(desk: Desk, *, nodes: int = 2, spares: int = 0, every: int = 100, **changes: str) -> str:
    """Training in two stages, each on a node of its own, so that no node's state has another holder. It does not go
    back to a checkpoint while it runs: only another run does."""
    options = {
        LAYOUT: f"--nodes {nodes - spares} --tp 1 --pp 2 --checkpoint-every {every}",
        "export RESIHP_SLURM__REPLACEMENTS=2": "export RESIHP_SLURM__REPLACEMENTS=0 RESIHP_ADAPT__MAX_RESTARTS=0",
    }
    return desk.sbatch_training(ITERATIONS, nodes=nodes, gpus=1, changes=options | changes)


def warn(desk: Desk, job: str) -> None:
    assert desk.run("scancel", "--batch", "--signal=USR2", job).returncode == 0


def requeue(desk: Desk, job: str) -> None:
    assert desk.run("scontrol", "requeue", job).returncode == 0


def lose_a_node(desk: Desk, job: str) -> None:
    desk.cluster.kill_node("n2")


def preempt(desk: Desk, job: str) -> None:
    options = ("-N3", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    other = desk.run("sbatch", "--parsable", *options).stdout.strip()
    desk.until(lambda: desk.state(other)[0] == "RUNNING", job)
    desk.run("scancel", other)


def assert_comes_back(desk: Desk, job: str, reference: Reference) -> None:
    """The second run begins where the first one's checkpoint is, ends the training, and there is no third one."""
    (first,) = desk.of(job, JobEnded)
    saved = max((entry.iteration for entry in desk.of(job, CheckpointCommitted)), default=0)
    print(f"exit code {first.exit_code}, checkpoint of iteration {saved}: {first.reason}")
    desk.pace(0.0)
    desk.start_again(job)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job), first=saved + 1)
    (last,) = desk.of(f"{job}-r1", JobEnded)
    assert last.state == "completed"
    until = time.monotonic() + STAYS_AWAY_S
    desk.until(lambda: time.monotonic() > until, job, STAYS_AWAY_S + 30)
    assert desk.run("squeue", "-h").stdout == ""
    assert desk.shown(job)["Restarts"] == "1"


def test_too_many_nodes_die_and_the_job_goes_on_from_its_checkpoint(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=3, gpus=1))
    desk.pace(0.1)
    job = submit(desk, every=3)
    desk.until(lambda: desk.of(job, CheckpointCommitted), job)
    lose_a_node(desk, job)
    (ended,) = desk.until(lambda: desk.of(job, JobEnded), job)
    assert (ended.exit_code, ended.state) == (75, "failed")
    assert "; to be run again, from the checkpoint of iteration" in ended.reason
    desk.until(lambda: desk.shown(job)["Restarts"] == "1", job)
    assert_comes_back(desk, job, reference)


@pytest.mark.every_slurm
def test_lost_state_is_loaded_from_the_checkpoint_in_the_same_allocation(
    cluster: MakeCluster, reference: Reference
) -> None:
    """The other node goes on alone until another one has come in place of the dead one."""
    desk = Desk(cluster(nodes=3, gpus=1))
    desk.pace(0.1)
    again = "export RESIHP_SLURM__REPLACEMENTS=1 RESIHP_ADAPT__MAX_RESTARTS=100"
    job = submit(desk, every=3, **{"export RESIHP_SLURM__REPLACEMENTS=2": again})
    desk.until(lambda: desk.of(job, CheckpointCommitted), job)
    lose_a_node(desk, job)
    (back,) = desk.until(lambda: desk.of(job, RollbackDecided), job)
    assert back.iteration % 3 == 0
    desk.until(lambda: {entry.node for entry in desk.of(job, NodeJoined)} == {"n1", "n2", "n3"}, job)
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job))
    assert desk.shown(job)["Restarts"] == "0"


@pytest.mark.soak
@pytest.mark.every_slurm
@pytest.mark.parametrize("sent_away", [warn, requeue, preempt, lose_a_node], ids=lambda way: way.__name__)
def test_whoever_sends_it_away_it_comes_back_once(
    cluster: MakeCluster, reference: Reference, sent_away: Callable[[Desk, str], None]
) -> None:
    desk = Desk(cluster(nodes=3, gpus=1, settings=PREEMPTION if sent_away is preempt else {}))
    desk.pace(0.1)
    partition = {"##SBATCH --partition=gpu --account=project": "#SBATCH --partition=low"}
    job = submit(desk, **partition if sent_away is preempt else {})
    desk.until_committed(job, 3)
    sent_away(desk, job)
    desk.until(lambda: desk.of(job, JobEnded), job)
    if sent_away is not lose_a_node:
        desk.until(lambda: desk.of(job, CheckpointCommitted), job)
    assert_comes_back(desk, job, reference)


def test_a_node_that_dies_before_training_begins_is_what_spares_are_for(
    cluster: MakeCluster, reference: Reference
) -> None:
    desk = Desk(cluster(nodes=3, gpus=1))
    job = submit(desk, nodes=3, spares=1)
    desk.until(lambda: len(desk.of(job, NodeJoined)) == 3, job)
    desk.cluster.kill_node("n2")
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert [entry.node for entry in desk.of(job, NodeLost)] == ["n2"]
    plan, *_ = desk.of(job, PlanDecided)
    assert {entry.node for entry in desk.of(job, WorkerStarted) if entry.rank in plan.plan.layout.ranks} == {"n1", "n3"}
    reference.check(desk.rows("iterations", job))
    assert "starting without n2" in desk.output(job)


@pytest.mark.soak
def test_without_spares_it_begins_with_the_rest(cluster: MakeCluster, reference: Reference) -> None:
    """Both stages on one node."""
    desk = Desk(cluster(nodes=3, gpus=1))
    job = submit(desk)
    desk.until(lambda: len(desk.of(job, NodeJoined)) == 2, job)
    desk.cluster.kill_node("n2")
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job))
    (failure,) = desk.rows("failures", job)
    assert (failure["component"], failure["node"]) == ("node", "n2")
    assert desk.shown(job)["Restarts"] == "0"


@pytest.mark.soak
def test_one_that_may_only_begin_whole_is_run_again_on_other_nodes(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=3, gpus=1))
    whole = "export RESIHP_SLURM__REPLACEMENTS=0 RESIHP_ADAPT__MAX_RESTARTS=0 RESIHP_ADAPT__LEAST=1"
    job = submit(desk, **{"export RESIHP_SLURM__REPLACEMENTS=2": whole})
    desk.until(lambda: len(desk.of(job, NodeJoined)) == 2, job)
    desk.cluster.kill_node("n2")
    (ended,) = desk.until(lambda: desk.of(job, JobEnded), job)
    assert ended.reason.endswith(" before training began; to be run again")
    assert desk.of(job, PlanDecided) == []
    desk.until(lambda: desk.shown(job)["Restarts"] == "1", job)
    assert_comes_back(desk, job, reference)


@pytest.mark.soak
def test_runs_that_were_stopped_do_not_use_up_the_restarts(cluster: MakeCluster, reference: Reference) -> None:
    """None of them comes to a checkpoint, and there are more of them than runs that may fail."""
    desk = Desk(cluster(nodes=2, gpus=1))
    desk.pace(0.1)
    job = submit(desk)
    for restart in range(4):
        run = f"{job}-r{restart}" if restart else job
        desk.until(lambda run=run: len(desk.of(run, NodeJoined)) == 2, job)
        requeue(desk, job)
        desk.until(lambda run=run: desk.of(run, JobEnded), job)
        desk.until(lambda restart=restart: int(desk.shown(job)["Restarts"]) > restart, job)
        desk.start_again(job)
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert desk.shown(job)["Restarts"] == "4"
    reference.check(desk.rows("iterations", job))


@pytest.mark.soak
def test_runs_that_fail_use_them_up(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=4, gpus=1), RESIHP_SLURM__RESTARTS="2")
    job = submit(desk)
    desk.until(lambda: len(desk.of(job, NodeJoined)) == 2, job)
    desk.cluster.kill_node("n2")
    desk.until(lambda: desk.of(job, JobEnded), job)
    desk.start_again(job)
    desk.until(lambda: len(desk.of(f"{job}-r1", NodeJoined)) == 2, job)
    desk.cluster.kill_node("n3")
    assert desk.wait(job) == ("FAILED", "5:0"), desk.output(job)
    (ended,) = desk.of(f"{job}-r1", JobEnded)
    assert "not requeued: this run added no checkpoint, and [slurm] restarts is used up" in ended.reason
