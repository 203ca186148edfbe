"""A script that knows nothing of resihp, and prints its iterations as Megatron-LM does: on its last rank."""

from __future__ import annotations

import sys

import pytest

from tests.integration.jobs import Job

pytest.importorskip("torch")

SCRIPT = """\
import os, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
print("tokenizing", flush=True)
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for i in range(21 if again else 1, 61):
    time.sleep(0.05)
    dist.barrier()
    if rank == last and i % 2 == 0:
        loss = "nan" if i == 30 else f"{6 / i + 2:.6E}"
        print(f" [2026-11-28 12:00:00] iteration {i:8}/      60 | consumed samples: {64 * i} | elapsed time per "
              f"iteration (ms): 50.0 | learning rate: 1.0E-04 | lm loss: {loss} | loss scale: 1.0 |")
    if sys.argv[1] == "batches" and rank == 0 and i % 2 == 0:
        print(f"batch {i} of 60: ce={6 / i + 2:.4f}")
    if sys.argv[1] == "killed" and rank == 0 and i == 41 and not again:
        os.kill(os.getpid(), 9)
dist.destroy_process_group()
"""


def run(job: Job, how: str, *options: str) -> Job:
    script = job.folder / "train.py"
    job.folder.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT)
    command = (sys.executable, str(script), how)
    return job.start(*options, command=command, nodes=2, gpus=1, tp=1, pp=1).wait(120)


def test_its_status_and_history_have_the_figures_that_it_prints(job: Job) -> None:
    run(job, "megatron")
    assert job.status == 0, job.stderr
    status = job.ask("status")
    assert (status["iteration"], status["target"], status["state"]) == (60, 60, "completed")
    assert status["iteration_seconds"] == pytest.approx(0.05)
    assert 0.5 < status["goodput"] <= 1.0
    assert "LossNotFinite" in [event["kind"] for event in status["events"]]
    rows = job.history("iterations")
    assert [row["iteration"] for row in rows] == list(range(2, 61, 2))
    assert rows[-1]["loss"] == pytest.approx(2.1)
    assert [row["iteration"] for row in rows if row["loss"] is None] == [30]
    events = [row["text"] for row in job.history("events")]
    assert "iteration counter of rank 1: 2 of 60, read from its output" in events
    assert "iteration 30: rank 1 printed the loss nan" in events
    assert "iteration 60  loss 2.1000  0.05 s" in job.stderr, "rank 1's own output is not shown"


def test_lines_that_only_the_users_pattern_knows_are_read_and_not_shown_twice(job: Job) -> None:
    job.environment["RESIHP_PROGRESS__PATTERN"] = r"batch (?P<iteration>\d+) of (?P<goal>\d+): ce=(?P<loss>\S+)"
    run(job, "batches")
    assert job.status == 0, job.stderr
    status = job.ask("status")
    assert (status["iteration"], status["target"], status["loss"]) == (60, 60, pytest.approx(2.1))
    assert status["iteration_seconds"] == pytest.approx(0.05, rel=0.5), "by the times of the lines"
    assert "batch 60 of 60" in job.stdout
    assert "iteration 60" not in job.stderr


def test_iterations_that_a_restart_does_again_count_once(job: Job) -> None:
    run(job, "killed")
    assert job.status == 0, job.stderr
    status = job.ask("status")
    assert (status["iteration"], status["state"]) == (60, "completed")
    rows = job.history("iterations")
    assert [row["iteration"] for row in rows] == list(range(2, 61, 2))
    assert [row["epoch"] for row in rows] == [0] * 20 + [1] * 10
    assert "iteration counter of rank 1: 22 of 60, iterations up to 40 are done again" in job.stderr
    assert "recovered: restart 1, trains again" in job.stderr
    (failure,) = job.history("failures")
    assert 0.0 < failure["seconds_to_recover"] < 30.0
    assert status["lost_seconds"]["fail-stop"] > 10 * 0.05
