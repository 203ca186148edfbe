"""A cluster whose nodes differ: a node in place of a lost one is like it, or there is none."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.record.journal import NodeJoined, Reconfigured, ReplacementChanged
from resihp.slurm import replacement
from resihp.slurm.client import JobRequest
from resihp.slurm.commands import CommandLine
from resihp.slurm.errors import SlurmUsageError
from resihp.slurm.replacement import ReplacementJob
from tests.integration import slurm_releases
from tests.integration.cluster import Cluster
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference, job_file
from tests.integration.test_slurm_desk import Desk as Upkeep
from tests.integration.test_slurm_desk import impatient
from tests.integration.test_slurm_node_death import until_replaced

__all__ = ["impatient"]

pytestmark = pytest.mark.timeout(600)

TYPES = {**dict.fromkeys(("n1", "n2", "n3", "n4", "n5"), "a100"), "n6": "h100"}
FEATURES = {**dict.fromkeys(TYPES, "fast,ib"), "n6": "fast"}


@pytest.mark.soak
def test_a_replacement_waits_for_a_node_of_the_jobs_kind(cluster: MakeCluster, reference: Reference) -> None:
    settings = {"Licenses": "matlab:10", "SelectTypeParameters": "CR_CPU_Memory"}
    made = cluster(nodes=6, gpus=2, gpu_type=TYPES, features=FEATURES, settings=settings)
    desk = Desk(made)
    desk.pace(0.1)
    other = made.run("sbatch", "--parsable", "-w", "n5", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    made.wait_state("n5", "allocated")
    wants = ("--gpus-per-node=a100:2", "--licenses=matlab:2", "--wckey=run", "--constraint=fast")
    job = desk.sbatch_training(
        ITERATIONS, changes={"--gpus-per-node=8": "\n#SBATCH ".join(wants), "--mem=0": "--mem=12000"}
    )
    desk.until_committed(job, 3, timeout_s=180)
    assert desk.nodes(job) == ["n1", "n2", "n3", "n4"]
    made.kill_node("n3")
    desk.until(lambda: desk.of(job, Reconfigured), job, timeout_s=120)
    desk.pace(0.4)

    (asked,) = desk.until(lambda: [e for e in desk.of(job, ReplacementChanged) if e.state == "pending"][:1], job)
    desk.until(lambda: desk.shown(asked.slurm_job)["Reason"] in ("Resources", "Priority"), job)
    assert made.states()["n6"] == "idle", "of the wrong type, and free"
    shown, main = desk.shown(asked.slurm_job), desk.shown(job)
    for field in ("TresPerNode", "Licenses", "MinMemoryNode", "Features", "OverSubscribe", "Partition"):
        assert shown[field] == main[field], field
    assert (shown["Licenses"], shown["MinMemoryNode"], shown["Features"]) == ("matlab:2", "12000M", "fast")
    assert shown["TresPerNode"].endswith("gpu:a100:2")
    assert desk.slurm_says(asked.slurm_job, "WCKey") == "run"
    assert shown["Deadline"] != "N/A"

    made.run("scancel", other.stdout.strip())
    until_replaced(desk, job)
    assert [entry.node for entry in desk.of(job, NodeJoined)][-1] == "n5"
    assert made.states()["n6"] == "idle"
    desk.pace(0.0)
    assert desk.wait(job, timeout_s=180) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job))


def test_what_is_asked_for_in_place_of_a_node_is_what_the_job_asked_for(cluster: MakeCluster, impatient: None) -> None:
    """The same without training: Slurm gives it no node of another kind, and one of its own as soon as one is free."""
    settings = {"Licenses": "matlab:10", "SelectTypeParameters": "CR_CPU_Memory"}
    types = {"n1": "a100", "n2": "a100", "n3": "a100", "n4": "h100"}
    made = cluster(nodes=4, gpus=2, gpu_type=types, features=dict.fromkeys(types, "fast"), settings=settings)
    other = made.run("sbatch", "--parsable", "-w", "n3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    made.wait_state("n3", "allocated")
    wants = ("--gpus-per-node=a100:2", "--licenses=matlab:2", "--mem=12000", "--wckey=run", "--constraint=fast")
    upkeep, desk = Upkeep(made, 2, wants), Desk(made)
    assert upkeep.names == ("n1", "n2")

    def asked() -> str:
        return str(upkeep.of(api.ReplacementNews)[-1].slurm_job)

    upkeep.do(
        api.AskReplacement(replacement=1, exclude=upkeep.names),
        until=lambda: "pending" in upkeep.state_of(1) and desk.shown(asked())["Reason"] in ("Resources", "Priority"),
    )
    assert made.states()["n4"] == "idle", "of the wrong type, and free"
    shown, main = desk.shown(asked()), desk.shown(upkeep.job)
    for field in ("TresPerNode", "Licenses", "MinMemoryNode", "Features", "OverSubscribe", "Partition"):
        assert shown[field] == main[field], field
    assert (shown["Licenses"], shown["MinMemoryNode"], shown["Features"]) == ("matlab:2", "12000M", "fast")
    assert shown["TresPerNode"].endswith("gpu:a100:2")
    assert desk.slurm_says(asked(), "WCKey") == "run"
    assert shown["Deadline"] != "N/A"
    made.run("scancel", other.stdout.strip())
    upkeep.do(until=lambda: "running" in upkeep.state_of(1))
    assert upkeep.of(api.ReplacementNews)[-1].node == "n3"
    upkeep.close()


def test_a_job_is_submitted_for_gpus_of_one_type(cluster: MakeCluster) -> None:
    made = cluster(nodes=3, gpus=2, gpu_type={"n1": "a100", "n2": "h100", "n3": "a100"})
    desk = Desk(made)
    parts = {"job": {"nodes": 1, "gpus_per_node": 2}, "slurm": {"gpu_type": "h100"}}
    done = desk.submit(job_file(desk.training(1000), **parts))
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    desk.until(lambda: desk.state(job)[0] == "RUNNING", job)
    assert desk.nodes(job) == ["n2"]
    assert desk.shown(job)["TresPerNode"].endswith("gpu:h100:2")
    # An agent is started there, with the node's GPUs, whatever they are called.
    desk.until(lambda: [entry.devices for entry in desk.of(job, NodeJoined)] == [2], job, timeout_s=120)
    made.run("scancel", job)
    parts["slurm"]["gpu_type"] = "b200"
    refused = desk.submit(job_file(desk.training(1000), **parts))
    assert refused.returncode != 0
    assert "or gpu_type and constraint in [slurm]" in refused.stderr


BLOCKS = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2\n"


@pytest.mark.parametrize("release", slurm_releases.RELEASES)
def test_segments_of_blocks_are_of_the_job_and_not_of_one_node_more(cluster: MakeCluster, release: str) -> None:
    """24.11 refuses a segment that is larger than the job."""
    made = cluster(
        nodes=4, gpus=2, release=release, settings={"TopologyPlugin": "topology/block"}, files={"topology.conf": BLOCKS}
    )
    desk = Desk(made)
    wanted = a_replacement(made, extra=("--segment=2",), asked=JobRequest(exclusive="node"), gpus=2)
    job = replacement.submit(wanted, environment=made.environment)
    desk.until(lambda: desk.state(job)[0] == "RUNNING", job)
    slurm = {"spares": 1, "extra": ["--segment=2"]}
    refused = desk.submit(job_file(desk.training(1), job={"nodes": 2, "gpus_per_node": 2}, slurm=slurm))
    assert refused.returncode != 0
    assert "nodes in [job] and spares in [slurm] together must be a multiple of it" in refused.stderr


@pytest.mark.soak
@pytest.mark.every_slurm
def test_options_of_the_agents_step_are_read_by_srun_before_anything_waits(cluster: MakeCluster) -> None:
    made = cluster(nodes=1)
    slurm = CommandLine(bin=made.commands(), environment=made.environment)
    slurm.check_step(("--network=instances=2", "--mem-bind=local"))
    with pytest.raises(SlurmUsageError, match=r"step_extra: .*srun: unrecognized option '--memm=local'; correct"):
        slurm.check_step(("--mem-bind=local", "--memm=local"))
    with pytest.raises(SlurmUsageError, match='unrecognized --mem-bind argument "foo"'):
        slurm.check_step(("--mem-bind=foo",))


@pytest.mark.every_slurm
def test_a_request_that_nobody_cancels_ends_by_itself(cluster: MakeCluster) -> None:
    """As long as the main job could have used the node; 22.05 takes what can never be, and ends it at once."""
    made = cluster(nodes=1, gpus=2)
    desk = Desk(made)
    made.run("sbatch", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    made.wait_state("n1", "allocated")
    job = replacement.submit(a_replacement(made, asked=JobRequest(exclusive="node")), environment=made.environment)
    began = time.monotonic()
    desk.until(lambda: desk.state(job)[0] == "DEADLINE", job, timeout_s=120)
    assert time.monotonic() - began > 50
    slurm = CommandLine(bin=made.commands(), environment=made.environment)
    view = slurm.job(job)
    assert view is not None
    assert not view.active


def a_replacement(cluster: Cluster, **changes: Any) -> ReplacementJob:
    folder = str(cluster.shared / "r1")
    wanted = ReplacementJob(
        folder=folder,
        name="resihp-1-r1",
        comment="",
        command=("/bin/sleep", "1000"),
        seconds=60,
        wait_s=60,
        asked=JobRequest(),
    )
    return msgspec.structs.replace(wanted, **changes)
