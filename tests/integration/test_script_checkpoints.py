"""A script that takes the checkpoint that it is told: from a pattern of paths, or by its own report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resihp.record.journal import CheckpointCommitted, JobEnded, WorkersOrdered
from tests.integration.jobs import Job
from tests.integration.slurm_jobs import Desk, MakeCluster

pytest.importorskip("torch")

TRAINING_SCRIPT = """\
import argparse, os
import torch
import torch.distributed as dist
import resihp

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="nothing")
parser.add_argument("--fails-with", default="")
parser.add_argument("--reports", action="store_true")
arguments = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
begin = torch.load(arguments.resume)["step"] if arguments.resume != "nothing" else 0
if rank == 0:
    told = os.environ.get("RESIHP_RESUME_ITERATION"), os.path.basename(os.environ.get("RESIHP_RESUME_FROM", ""))
    print(f"begins at {begin}, was told {told}", flush=True)
for step in range(begin + 1, 61):
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step}/60 loss {3 / step:.4f}", flush=True)
        if step % 10 == 0:
            path = f"ckpt/step_{step}.pt"
            os.makedirs("ckpt", exist_ok=True)
            torch.save({"step": step}, path + ".tmp")
            os.rename(path + ".tmp", path)
            if arguments.reports:
                resihp.checkpointed(path, step)
    dist.barrier()
    if rank == 1 and step == 47 and (arguments.fails_with == "always" or begin == int(arguments.fails_with or -1)):
        raise ValueError("a bad state")
"""


def start(job: Job, *arguments: str, options: tuple[str, ...] = ()) -> Job:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "train.py").write_text(TRAINING_SCRIPT)
    command = (sys.executable, str(job.folder / "train.py"), *arguments)
    return job.start(*options, command=command, nodes=1, gpus=2, tp=1, pp=1)


def begins(job: Job) -> list[str]:
    return [line.removeprefix("begins at ") for line in job.stdout.splitlines() if line.startswith("begins at ")]


PATTERN = ("--checkpoint-latest", "ckpt/step_*")


def test_the_script_is_told_its_newest_checkpoint(job: Job) -> None:
    start(job, "--resume={checkpoint}", "--fails-with", "0", options=PATTERN).wait(60)
    assert job.status == 0, job.stderr
    assert begins(job) == ["0, was told (None, '')", "40, was told ('40', 'step_40.pt')"]
    assert {row["iteration"] for row in job.history("checkpoints")} >= {10, 20, 30, 40}


def test_the_script_reports_its_checkpoints(job: Job) -> None:
    start(job, "--resume={checkpoint}", "--fails-with", "0", "--reports").wait(60)
    assert job.status == 0, job.stderr
    assert begins(job)[1:] == ["40, was told ('40', 'step_40.pt')"]


def test_an_older_checkpoint_follows_one_that_leads_to_the_same_failure(job: Job) -> None:
    (job.folder / "ckpt").mkdir(parents=True, exist_ok=True)
    start(job, "--resume={checkpoint}", "--fails-with", "40", options=PATTERN)
    job.wait(60)
    assert job.status == 0, job.stderr
    assert begins(job) == ["0, was told (None, '')"], "undisturbed: the checkpoint of step 40 was never loaded"
    Path(job.folder, "ckpt/step_50.pt").unlink()
    Path(job.folder, "ckpt/step_60.pt").unlink()
    again = start(job, "--resume={checkpoint}", "--fails-with", "40", options=PATTERN)
    again.wait(60)
    assert again.status == 0, again.stderr
    assert [begin.partition(",")[0] for begin in begins(again)] == ["40", "40", "30"]
    assert "ckpt/step_40.pt: no longer used to resume from, it led to the same failure again" in again.stderr


def test_a_script_that_fails_from_each_checkpoint_ends(job: Job) -> None:
    start(job, "--resume={checkpoint}", "--fails-with", "always", options=PATTERN).wait(120)
    assert job.status == 93, job.stderr
    assert [begin.partition(",")[0] for begin in begins(job)][:4] == ["0", "40", "40", "30"]
    assert "made no progress" in job.stderr


# --- on Slurm -------------------------------------------------------------------------------------------------------

PACED_SCRIPT = TRAINING_SCRIPT.replace("import argparse, os", "import argparse, os, time").replace(
    "/60 loss", "/100000 loss"
)
PACED_SCRIPT = PACED_SCRIPT.replace("range(begin + 1, 61)", "range(begin + 1, 100_001)")
PACED_SCRIPT = PACED_SCRIPT.replace(
    "    dist.barrier()\n",
    "    is_last = torch.tensor([float(os.path.exists('enough'))])\n    dist.broadcast(is_last, 0)\n"
    "    if is_last.item():\n        break\n    dist.barrier()\n",
)
PACED_SCRIPT = PACED_SCRIPT.replace("    total = ", "    time.sleep(0.1)\n    total = ")
JOB = """\
#!/bin/bash
#SBATCH --no-kill --requeue
export RESIHP_SLURM__REPLACEMENTS={replacements}
exec resihp run --nnodes {nnodes} --checkpoint-latest 'ckpt/step_*' train.py --resume={{checkpoint}}
"""


def submit(desk: Desk, nnodes: str, replacements: int) -> str:
    (desk.folder / "train.py").write_text(PACED_SCRIPT)
    count = nnodes.rpartition(":")[2]
    options = [f"--nodes={count}", "--gpus-per-node=1", "--exclusive", "--output=%x-%j.out", "--open-mode=append"]
    return desk.sbatch(JOB.format(nnodes=nnodes, replacements=replacements), *options, "--time=120")


def finish(desk: Desk, job: str) -> None:
    (desk.folder / "enough").touch()
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)


@pytest.mark.every_slurm
@pytest.mark.timeout(400)
def test_on_slurm_a_script_goes_on_with_fewer_nodes_and_grows_back_at_a_checkpoint(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=5, gpus=1))
    other = desk.run("sbatch", "--parsable", "-w", "n5", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    desk.until(lambda: desk.state(other.stdout.strip())[0] == "RUNNING", other.stdout.strip())
    job = submit(desk, "3:4", replacements=1)
    desk.until(lambda: desk.of(job, CheckpointCommitted), job)
    desk.cluster.kill_node("n4")
    desk.until(lambda: restarts(desk, job, 1), job, 100)
    desk.run("scancel", other.stdout.strip())
    shrunk, grown = desk.until(lambda: restarts(desk, job, 2), job, 100)
    assert {node for _, node, _ in shrunk.workers} == {"n1", "n2", "n3"}
    assert {node for _, node, _ in grown.workers} == {"n1", "n2", "n3", "n5"}
    saved = [entry.iteration for entry in desk.of(job, CheckpointCommitted) if entry.folder == grown.checkpoint]
    desk.until(lambda: [line for line in desk.output(job).splitlines() if f"begins at {saved[-1]}," in line], job)
    finish(desk, job)
    (failure,) = desk.rows("failures", job)
    assert (failure["component"], failure["node"]) == ("node", "n4")
    (replacement,) = desk.rows("replacements", job)
    assert replacement["node"] == "n5"


def restarts(desk: Desk, job: str, count: int) -> list[WorkersOrdered]:
    """The orders of so many restarts; empty before there are so many."""
    orders = [entry for entry in desk.of(job, WorkersOrdered) if entry.round]
    return orders if len(orders) >= count else []


@pytest.mark.every_slurm
@pytest.mark.timeout(400)
def test_on_slurm_a_requeued_script_begins_with_its_checkpoint(cluster: MakeCluster) -> None:
    desk = Desk(cluster(nodes=2, gpus=1))
    job = submit(desk, "2", replacements=0)
    desk.until(lambda: desk.of(job, CheckpointCommitted), job)
    assert desk.run("scontrol", "requeue", job).returncode == 0
    desk.until(lambda: desk.of(job, JobEnded), job)
    desk.start_again(job)
    again = f"{job}-r1"
    (order, *_) = desk.until(lambda: desk.of(again, WorkersOrdered), again)
    saved = max(desk.of(job, CheckpointCommitted), key=lambda entry: entry.iteration)
    assert int(order.checkpoint.rpartition("_")[2].removesuffix(".pt")) >= saved.iteration
    finish(desk, job)
    accounts = [line for line in desk.run("squeue", "-h").stdout.splitlines() if line]
    assert not accounts
