"""A script that takes the checkpoint that it is told: from a pattern of paths, or by its own report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.jobs import Job

pytest.importorskip("torch")

SCRIPT = """\
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
    (job.folder / "train.py").write_text(SCRIPT)
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
