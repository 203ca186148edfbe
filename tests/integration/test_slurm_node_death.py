"""A node dies under a job: found in seconds, left out, given back, replaced; what is computed does not notice."""

from __future__ import annotations

import time

import pytest

from resihp.record.journal import (
    DrainAnswered,
    IterationCommitted,
    JobEnded,
    NodeJoined,
    NodeReleased,
    PlanDecided,
    PlanInEffect,
    Reconfigured,
    ReplacementChanged,
)
from resihp.slurm.client import PREFIX
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference
from tests.integration.test_site_hook import ALICE, BOB, Site, uid

pytestmark = pytest.mark.timeout(400)

WITHIN_S = 6.0
"""How soon after a node's death training goes on; one iteration comes on top."""
LEAVES_WITHIN_S = 20.0
"""How soon after training the nodes are Slurm's again."""


def until_replaced(desk: Desk, job: str) -> None:
    """Wait until as many ranks train as in the beginning, on other nodes, and do so."""

    def replaced() -> bool:
        plans = {entry.plan.epoch: entry.plan for entry in desk.of(job, PlanDecided)}
        last = plans[desk.of(job, PlanInEffect)[-1].epoch]
        return last.epoch > 1 and len(last.layout.active) == len(plans[1].layout.active)

    desk.until(replaced, job, timeout_s=90)
    desk.until_committed(job, desk.committed(job) + 2)


def seconds_without_training(desk: Desk, job: str, killed_at: float) -> tuple[float, float]:
    """From a node's death to the first iteration that is committed without it, and how long that took by itself."""
    first = next(
        (record.at, record.entry)
        for record in desk.records(job)
        if record.at > killed_at and isinstance(record.entry, IterationCommitted) and record.entry.epoch > 1
    )
    return first[0] - killed_at, first[1].seconds or 0.0


def test_a_node_dies_and_another_one_takes_its_place(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=5, gpus=2))
    desk.pace(0.1)
    job = desk.sbatch_training(ITERATIONS)
    desk.until_committed(job, 3)
    killed_at = time.time()
    desk.cluster.kill_node("n3")
    desk.until(lambda: desk.of(job, Reconfigured), job)
    desk.pace(0.4)
    until_replaced(desk, job)
    shells = desk.status(job)["shells"]
    assert list(shells) == ["n1", "n2", "n4", "n5"]
    for node, command in shells.items():
        there = desk.run(*command.removesuffix("--pty bash").split(), "sh", "-c", "echo $SLURMD_NODENAME")
        assert there.stdout.split() == [node], f"{command}: {there.stderr}"
    gap_s, iteration_s = seconds_without_training(desk, job, killed_at)
    print(f"next committed iteration after {gap_s:.1f} s, its own time {iteration_s:.1f} s")
    assert gap_s < WITHIN_S + iteration_s

    (released,) = desk.until(lambda: desk.of(job, NodeReleased), job)
    assert desk.nodes(job) == ["n1", "n2", "n4"]
    desk.cluster.wait_state("n3", "down*", timeout_s=60)  # as soon as Slurm has noticed
    assert desk.reason("n3") == "Not responding", "Slurm's own words: it takes the node back after a reboot"
    assert (released.node, released.outcome) == ("n3", "done")
    (joined,) = [entry for entry in desk.of(job, NodeJoined) if entry.node == "n5"]
    assert joined.devices == 2

    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job))
    (failure,) = desk.rows("failures", job)
    assert (failure["component"], failure["node"], failure["ranks"]) == ("node", "n3", [4, 5])
    (drain,) = desk.rows("drains", job)
    assert (drain["node"], drain["failure"], drain["step"], drain["outcome"]) == (
        "n3",
        failure["failure"],
        "exclusion",
        "done",
    )
    (replacement,) = desk.rows("replacements", job)
    assert (replacement["instead"], replacement["node"]) == ("n3", "n5")
    assert replacement["joined_at"] is not None
    assert desk.state(replacement["slurm_job"])[0] in ("COMPLETED", "CANCELLED"), "the replacement ends with the job"
    first, *_, last = desk.rows("plans", job)
    assert (first["active"], last["active"]) == (8, 8)


def test_a_user_who_may_not_drain_asks_for_it(cluster: MakeCluster, reference: Reference) -> None:
    made = cluster(nodes=5, gpus=2)
    site = Site(made)
    site.hold_on(BOB, "n5")
    desk = Desk(made, ALICE, RESIHP_SLURM__SPOOL=str(site.spool))
    desk.pace(1.0)  # whoever looks at another user's job as root sees its ledger late
    job = desk.sbatch_training(ITERATIONS)
    desk.until_committed(job, 3)
    for rank in (4, 5):  # all that n3 has
        desk.kill(job, rank)
    desk.until(lambda: [e for e in desk.of(job, DrainAnswered) if e.step == "spool"], job)
    (request,) = site.spool.iterdir()
    assert request.stat().st_uid == uid(ALICE)
    assert f"drained node n3: {PREFIX}job {job} lost rank " in site.hook()
    assert desk.cluster.states()["n3"].startswith("drain")
    assert desk.reason("n3").endswith(f" (asked by uid {uid(ALICE)}, job {job})")
    desk.until(lambda: desk.of(job, NodeReleased), job)
    assert desk.nodes(job) == ["n1", "n2", "n4"]
    asked = desk.until(lambda: [e for e in desk.of(job, ReplacementChanged) if e.state == "pending"], job)
    assert desk.state(asked[0].slurm_job)[0] == "PENDING", "n5 is taken"

    desk.pace(0.0)
    (ended,) = desk.until(lambda: [r for r in desk.records(job) if isinstance(r.entry, JobEnded)], job)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    assert time.time() - ended.at < LEAVES_WITHIN_S, "nobody waits for the node that was left"
    reference.check(desk.rows("iterations", job))
    (drain,) = desk.rows("drains", job)
    assert [(step["step"], step["outcome"]) for step in drain["answers"]] == [
        ("slurm", "refused"),
        ("spool", "done"),
        ("exclusion", "done"),
    ]
    (replacement,) = desk.rows("replacements", job)
    assert replacement["outcome"] == "cancelled"
    assert desk.state(replacement["slurm_job"])[0] == "CANCELLED"
