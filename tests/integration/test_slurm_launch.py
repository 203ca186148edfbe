"""Jobs that start in a real Slurm: by the shipped template, by `resihp submit`, on 64 nodes, and where they cannot."""

from __future__ import annotations

import os
import re
from typing import Any

import psutil
import pytest

from resihp.record.journal import JobStarted, NodeJoined, WorkerStarted
from resihp.slurm.render import TEMPLATES, template
from tests.integration.jobs import RESIHP
from tests.integration.slurm_jobs import Desk, MakeCluster, edited, job_file, on_node, training

FOREVER = "import time\ntime.sleep(3600)\n"
WITHIN_S = 10.0
"""How soon 64 agents must be there."""


@pytest.mark.every_slurm
def test_slurm_takes_every_shipped_template_as_it_is(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=5, gpus=8), forks=False)
    for name in TEMPLATES:
        path = made.folder / f"{name}.sbatch"
        path.write_text(template(name))
        done = made.run("sbatch", "--test-only", str(path))
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "to start at" in done.stderr


def test_the_shipped_template_trains_on_four_nodes(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=4, gpus=2), forks=False)
    changes = {
        "--gpus-per-node=8": "--gpus-per-node=2",
        "--time=24:00:00": "--time=00:10:00",
        "--tp 4 --pp 2 --checkpoint-every 100": "--tp 2 --pp 2 --checkpoint-every 3",
        "python train.py": " ".join(training(5)),
    }
    job = made.sbatch(edited("nodes", changes))
    assert made.wait(job) == ("COMPLETED", "0:0"), made.output(job)
    assert [row["iteration"] for row in made.rows("iterations", job)] == [1, 2, 3, 4, 5]
    workers = made.rows("workers", job)
    assert [(row["node"], row["device"]) for row in workers] == [(f"n{i}", d) for i in (1, 2, 3, 4) for d in (0, 1)]
    assert "--no-kill" not in made.output(job), "no warning"
    assert (made.job(job).checkpoints / "iteration-000003").is_dir()


def test_a_submitted_job_keeps_its_spare_node_at_hand(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=3, gpus=2))
    sections = {
        "job": {"nodes": 2, "gpus_per_node": 2},
        "layout": {"tp": 2},
        "slurm": {"spares": 1, "partition": "main"},
    }
    done = made.submit(job_file(training(3), **sections))
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert f"submitted job {job}: 2 nodes of 2 GPUs and 1 spare" in done.stderr
    assert made.wait(job) == ("COMPLETED", "0:0"), made.output(job)
    plans = made.rows("plans", job)
    assert plans[0]["layout"]["standby"] == [4, 5], "the spare node's"


def test_the_next_job_of_a_chain_goes_on_where_the_last_one_ended(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=2, gpus=2))
    sections = {"job": {"nodes": 2, "gpus_per_node": 2}, "layout": {"tp": 2}, "checkpoint": {"folder": "saved"}}
    made.pace(0.05)
    done = made.submit(job_file(made.training(1000), **sections), "--chain", "2")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    made.until_committed(first, 3)
    assert made.state(second)[0] == "PENDING", "jobs of a chain run one after the other"
    assert made.run("scancel", "--batch", "--signal=USR2", first).returncode == 0  # as before the time limit
    assert made.wait(first) == ("FAILED", "143:0"), made.output(first)
    last = made.committed(first)
    made.until_committed(second, last + 2)
    first_row, *_ = made.until(lambda: made.rows("iterations", second), second)  # the ledger may lag by some seconds
    assert first_row["iteration"] == last + 1
    made.run("scancel", second)
    made.wait(second)


def test_agents_have_what_the_node_has_and_write_their_own_logs(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=2, gpus=2, cpus=4), forks=False)
    (made.folder / "train.py").write_text(FOREVER)
    script = "#!/bin/bash\nexec resihp run -- python train.py\n"
    options = ["--nodes=2", "--gpus-per-node=2", "--exclusive", "--no-kill", "--output=%x-%j.out", "--time=5"]
    job = made.sbatch(script, *options, "--export=ALL,PYTHONPATH=/mine")
    made.until(lambda: len([e for e in made.entries(job) if isinstance(e, WorkerStarted)]) == 4, job)
    assert "no --no-kill in the batch script" in made.output(job), "it was on the command line, which nobody can see"
    for node in made.cluster.nodes:
        agents, workers = (
            on_node(made.cluster, node, "resihp.wrapper.agent.process"),
            on_node(made.cluster, node, "resihp.worker.forkserver"),
        )
        (agent,) = agents
        assert agent.environ()["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert "PYTHONPATH" not in agent.environ()
        assert len(workers) == 3, "the fork server and a worker on each GPU"
        for process in (agent, *workers):
            assert process.cpu_affinity() == psutil.Process().cpu_affinity(), "all CPUs of the node"
        assert agent.environ()["SLURM_CPUS_ON_NODE"] == "4"
        assert (made.job(job).logs / f"{node}.agent.log").stat().st_size > 0
    made.run("scancel", job)
    made.wait(job)


@pytest.mark.alone
def test_64_agents_are_there_within_10_seconds(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=64, gpus=1), forks=False)
    script = "#!/bin/bash\nexec resihp run -- sleep 3600\n"
    job = made.sbatch(
        script, "--nodes=64", "--gpus-per-node=1", "--exclusive", "--no-kill", "--output=%x-%j.out", "--time=5"
    )
    made.until(lambda: sum(isinstance(e, NodeJoined) for e in made.entries(job)) == 64, job)
    records = made.job(job).records()
    began = next(record.at for record in records if isinstance(record.entry, JobStarted))
    joined = sorted(record.at - began for record in records if isinstance(record.entry, NodeJoined))
    print(
        f"64 agents: first {joined[0]:.1f} s, last {joined[-1]:.1f} s after the step's start; load {os.getloadavg()[0]}"
    )
    made.run("scancel", job)
    assert joined[-1] <= WITHIN_S
    made.wait(job)


def test_a_node_without_the_shared_folder_is_told_of(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=3, gpus=1, isolate=True), forks=False)
    (made.folder / "home" / "jobs").mkdir(parents=True)
    hidden = made.cluster.folder / "hidden"
    hidden.mkdir()
    made.cluster.run("mount", "--bind", str(hidden), str(made.folder / "home"), node="n2")
    done = made.submit(job_file(["sleep", "600"], job={"nodes": 3}))
    job = done.stdout.strip()
    state, code = made.wait(job)
    assert (state, code) == ("FAILED", "5:0"), made.output(job)
    # Its log by Slurm, or its job's file by the agent itself: releases differ in which comes first.
    missing = rf"node n2: cannot open {made.job(job).folder}/\S+ there; put RESIHP_HOME into"
    assert len(re.findall(missing, made.output(job))) == 1


def test_an_allocation_that_is_too_small_is_refused_with_the_command_that_mends_it(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=2, gpus=2), forks=False)
    script = "#!/bin/bash\n#SBATCH --no-kill\nexec resihp run --nodes 4 -- sleep 600\n"
    job = made.sbatch(script, "--nodes=2", "--gpus-per-node=2", "--output=%x-%j.out")
    assert made.wait(job) == ("FAILED", "2:0")
    assert f"resihp: job {job}: Slurm gave 2 nodes, the layout needs 4; sbatch --nodes=4" in made.output(job)
    script = script.replace("exec resihp", "exec srun resihp")
    job = made.sbatch(script, "--nodes=2", "--gpus-per-node=2", "--output=%x-%j.out")
    assert made.wait(job)[0] == "FAILED"
    assert "resihp run was started 2 times by srun; call it in the batch script without srun" in made.output(job)


@pytest.mark.parametrize(
    ("job", "slurm", "message"),
    [
        ({}, {"partition": "gpu2"}, "sinfo -o '%P %a %l %D' lists partitions; set partition in [slurm]"),
        ({"gpus_per_node": 8}, {}, "sinfo -o '%P %D %c %m %G %f' lists the nodes; change [job]"),
        ({}, {"constraint": "a100"}, "sinfo -o '%P %f' lists features; set constraint in [slurm]"),
        ({}, {"reservation": "mine"}, "scontrol show reservation lists them; set reservation in [slurm]"),
    ],
)
def test_what_slurm_refuses_is_told_with_the_command_that_tells_more(
    cluster: MakeCluster, job: dict[str, Any], slurm: dict[str, Any], message: str
) -> None:
    made = Desk(cluster(nodes=2, gpus=2), forks=False)
    done = made.submit(job_file(["sleep", "600"], job={"nodes": 2, **job}, slurm=slurm))
    assert message in done.stderr
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("resihp: job.toml: ")


def test_outside_of_an_allocation_the_ways_in_are_named(cluster: MakeCluster) -> None:
    made = Desk(cluster(nodes=1), forks=False)
    done = made.run(*RESIHP, "run", "--", "sleep", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("resihp: not in a Slurm allocation: resihp submit job.toml submits a job")
