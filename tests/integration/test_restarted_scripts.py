"""A script that knows nothing of resihp is started again where it runs, and continues from its own checkpoint."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import psutil
import pytest

from tests.integration.jobs import Job
from tests.integration.slurm_jobs import Desk, MakeCluster

pytest.importorskip("torch")

SCRIPT = """\
import os, signal, subprocess, sys, threading, time
import torch
import torch.distributed as dist

def loads_a_batch():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

goal, mode = int(sys.argv[1]), sys.argv[2]
begin = int(open("checkpoint").read()) if os.path.exists("checkpoint") else 0
dist.init_process_group("gloo")
rank, world, restart = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 0:
    print(f"restart {restart}: {world} ranks from step {begin}, arguments {sys.argv[3:]}", flush=True)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True) if mode == "children" else None
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for step in range(begin + 1, goal + 1):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if mode == "raise" and rank == 1 and restart == 0 and step == 20:
        raise ValueError("no such token: 17")
    if mode == "lock" and rank == 2 and restart == 0 and step == 200:
        loads_a_batch()
    time.sleep(0.05)
    if rank == 0 and step % 10 == 0:
        with open("checkpoint.new", "w") as file:
            file.write(str(step))
        os.replace("checkpoint.new", "checkpoint")
        print(f"step {step} of {goal}, loss {1 / step:.4f}", flush=True)
if child is not None:
    child.kill()
dist.destroy_process_group()
"""


def start(
    job: Job, mode: str = "plain", *arguments: str, goal: int = 80, nodes: int = 2, options: tuple[str, ...] = ()
) -> Job:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "train.py").write_text(SCRIPT)
    command = (sys.executable, str(job.folder / "train.py"), str(goal), mode, *arguments)
    return job.start(*options, command=command, nodes=nodes, gpus=2, tp=1, pp=1)


def steps(job: Job) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+) of", (job.folder / "stdout").read_text(), re.MULTILINE)]


def rank_process(job: Job, rank: int) -> psutil.Process:
    (process,) = [process for process in job.processes() if process.cmdline()[0] == f"resihp job local-1 rank {rank}"]
    return process


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(job: Job) -> None:
    start(job)
    job.until(lambda: 20 in steps(job))
    rank_process(job, 3).kill()
    killed_at = time.monotonic()
    job.until(lambda: "restart 1: 4 ranks from step" in (job.folder / "stdout").read_text())
    assert time.monotonic() - killed_at < 15
    job.wait(60)
    assert job.status == 0, job.stderr
    assert steps(job)[-1] == 80
    begins = [int(step) for step in re.findall(r"ranks from step (\d+)", job.stdout)]
    assert begins[0] == 0
    assert begins[1] in (20, 30, 40)
    (failure,) = job.history("failures")
    assert (failure["component"], failure["ranks"], failure["node"], failure["device"]) == ("process", [3], "n2", 1)
    assert "restart 1: 4 ranks on n1, n2" in job.stderr
    status = job.ask("status")
    assert (status["state"], status["exit_code"]) == ("completed", 0)


def test_an_exception_of_one_rank_is_shown_once_and_the_script_continues(job: Job) -> None:
    start(job, "raise").wait(60)
    assert job.status == 0, job.stderr
    assert steps(job)[-1] == 80
    assert job.stderr.count("failure 1: rank 1 (n1 device 1) raised ValueError: no such token: 17") == 1
    assert len(job.history("failures")) == 1


def test_what_a_rank_has_started_ends_with_its_round(job: Job) -> None:
    """A data loader or daemon of the old round would hold the GPU's memory."""
    start(job, "children")
    job.until(lambda: 20 in steps(job))
    old = [child for rank in range(4) for child in rank_process(job, rank).children()]
    assert len(old) == 4
    rank_process(job, 2).kill()
    job.until(lambda: "restart 1: 4 ranks from step" in (job.folder / "stdout").read_text())
    assert not any(child.is_running() for child in old)
    job.wait(60)
    assert job.status == 0, job.stderr


def test_a_script_that_ignores_sigterm_is_killed(job: Job) -> None:
    start(job, "deaf")
    job.until(lambda: 20 in steps(job))
    old = rank_process(job, 0)
    old.suspend()  # as one that waits in a kernel of a GPU
    rank_process(job, 3).kill()
    job.wait(60)
    assert job.status == 0, job.stderr
    assert not old.is_running()
    assert steps(job)[-1] == 80


def test_a_lost_node_leaves_a_smaller_world(job: Job) -> None:
    job.environment["RESIHP_JOB__MIN_NODES"] = "2"
    start(job, "plain", "--nodes={nodes}", "dp{dp}", nodes=3)
    job.until(lambda: 20 in steps(job))
    (agent,) = [process for process in job.processes() if process.cmdline()[0] == "resihp job local-1 agent n2"]
    os.killpg(agent.pid, signal.SIGKILL)
    job.wait(60)
    assert job.status == 0, job.stderr
    assert "restart 0: 6 ranks from step 0, arguments ['--nodes=3', 'dp6']" in job.stdout
    assert re.search(r"restart 1: 4 ranks from step \d+, arguments \['--nodes=2', 'dp4'\]", job.stdout)
    assert steps(job)[-1] == 80
    (failure,) = job.history("failures")
    assert (failure["component"], failure["node"]) == ("node", "n2")


@pytest.mark.parametrize("how", ["lock", "stopped"])
def test_a_rank_that_hangs_is_found_by_its_stack(job: Job, how: str) -> None:
    job.environment["RESIHP_JOB__HANG_LIMIT"] = "8s"
    start(job, "lock" if how == "lock" else "plain", goal=260)
    job.until(lambda: 190 in steps(job))
    if how == "stopped":
        rank_process(job, 2).suspend()
    job.wait(100)
    assert job.status == 0, job.stderr
    assert steps(job)[-1] == 260
    (failure,) = job.history("failures")
    assert failure["ranks"] == [2], failure
    assert "rank 2 hung: no iteration for" in failure["cause"]
    if how == "lock":
        assert "in loads_a_batch" in failure["cause"]
    assert "all_reduce" in failure["evidence"], "where the others wait"


def test_the_supervisors_death_meanwhile_changes_nothing(job: Job) -> None:
    job.environment["RESIHP_ADAPT__SUCCESSION"] = "true"
    start(job, goal=160)
    job.until(lambda: 20 in steps(job))
    supervisor = next(process for process in job.processes() if "supervisor.process" in " ".join(process.cmdline()))
    rank_process(job, 3).kill()
    time.sleep(0.1)
    supervisor.kill()
    job.wait(120)
    assert job.status == 0, job.stderr
    assert steps(job)[-1] == 160


def test_on_slurm_a_node_dies_and_the_job_goes_on_in_its_allocation(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=3, gpus=2))
    (desk.folder / "train.py").write_text(SCRIPT)
    script = "#!/bin/bash\n#SBATCH --no-kill\nexec resihp run --nnodes 2:3 train.py 200 plain\n"
    options = ["--nodes=3", "--gpus-per-node=2", "--exclusive", "--output=%x-%j.out", "--time=5"]
    job = desk.sbatch(script, *options)
    desk.until(lambda: "step 20 of 200" in desk.output(job), job)
    desk.cluster.kill_node("n3")
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    told = desk.output(job)
    assert "restart 0: 6 ranks from step 0" in told
    assert re.search(r"restart 1: 4 ranks from step [1-9]", told)
    (failure,) = desk.rows("failures", job)
    assert (failure["component"], failure["node"]) == ("node", "n3")


def test_on_slurm_a_replacement_takes_the_place_of_a_dead_node(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=3, gpus=2))
    (desk.folder / "train.py").write_text(SCRIPT)
    script = (
        "#!/bin/bash\n#SBATCH --no-kill\nexport RESIHP_SLURM__REPLACEMENTS=1\n"
        "exec resihp run --nnodes 2 train.py 200 plain\n"
    )
    options = [
        "--nodes=2",
        "--gpus-per-node=2",
        "--exclusive",
        "--output=%x-%j.out",
        "--time=60",
    ]  # a replacement is requested only if enough time is left
    job = desk.sbatch(script, *options)
    desk.until(lambda: "step 20 of 200" in desk.output(job), job)
    desk.cluster.kill_node("n2")
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    told = desk.output(job)
    assert re.search(r"restart 1: 4 ranks from step [1-9]", told)
    assert "restart 1: 4 ranks on n1, n3" in told
    (failure,) = desk.rows("failures", job)
    assert (failure["component"], failure["node"]) == ("node", "n2")
    (replacement,) = desk.rows("replacements", job)
    assert (replacement["instead"], replacement["node"]) == ("n2", "n3")
    assert desk.status(job)["exit_code"] == 0, "sacct and the job's own record agree"
