"""Batch ramp-up in real jobs: whatever dies at a step, losses are those of one process, every sample counts once."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from resihp.datasets import ByteFiles, PackedDataset, RampUp
from resihp.parallelism.workload import samples_digest
from tests.integration.jobs import BACKEND, EXAMPLE, TINY, Job

ITERATIONS = 9
RAMP_UP = ("--rampup-batch-size", "4", "2", "24")
EVALUATED = ("--eval-interval", "3", "--eval-iters", "1")
NUMBERS = [4, 4, 4, 6, 6, 8, 8, 8, 8]
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """By one process, without a supervisor."""
    command = [sys.executable, str(EXAMPLE), *TINY, "--iterations", str(ITERATIONS), *RAMP_UP, *EVALUATED]
    done = subprocess.run(
        command, cwd=tmp_path_factory.mktemp("alone"), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(printed: str) -> dict[int, float]:
    return losses(printed, "loss")


def losses(printed: str, name: str) -> dict[int, float]:
    return {int(i): float(loss) for i, loss in re.findall(rf"^iteration (\d+)/\d+ \| {name} (\S+)", printed, re.M)}


def data() -> PackedDataset:
    source = ByteFiles(Path(sysconfig.get_paths()["stdlib"]), ".py")
    ramp_up = RampUp(start=4, increment=2, micro_batches=24)
    return PackedDataset(source, budget=64, micro_batches_per_iteration=8, ramp_up=ramp_up)


def assert_trained_once(job: Job, alone: dict[int, float]) -> None:
    assert job.status == 0, job.stderr
    rows = job.history("iterations")
    assert {row["iteration"]: row["loss"] for row in rows} == pytest.approx(alone, rel=1e-4)
    assert len(alone) == ITERATIONS
    batches = [data().micro_batches(i) for i in range(1, ITERATIONS + 1)]
    assert [len(batch) for batch in batches] == NUMBERS
    for row, batch in zip(rows, batches, strict=True):
        samples = [sample for one in batch for sample in one.samples]
        assert (row["samples"], row["samples_digest"]) == (len(samples), f"{samples_digest(samples):016x}")


def dealt(job: Job) -> list[tuple[int, int]]:
    """(first iteration, micro-batches) of each plan that took effect."""
    rows = [row for row in job.history("plans") if row["outcome"] in ("in effect", "superseded")]
    return [(row["next_iteration"], sum(map(len, row["assignment"]))) for row in rows]


def test_nothing_but_the_number_of_micro_batches_changes_at_a_step(
    job: Job, alone: dict[int, float], printed: str
) -> None:
    """What is evaluated has all micro-batches from the first iteration on."""
    job.train(script=(*RAMP_UP, *EVALUATED), iterations=ITERATIONS, tp=1, pp=2, nodes=2, gpus=2).wait()
    assert_trained_once(job, alone)
    validated = {row["iteration"]: row["validation_loss"] for row in job.history("iterations")}
    validated = {iteration: loss for iteration, loss in validated.items() if loss is not None}
    assert validated == pytest.approx(losses(printed, "validation loss"), rel=1e-4)
    assert list(validated) == [3, 6, 9]
    assert dealt(job) == [(1, 4), (4, 6), (6, 8)]
    assert len({str(row["layout"]) for row in job.history("plans")}) == 1
    assert job.history("failures") == []


@pytest.mark.parametrize(
    ("moment", "setting"),
    [
        ("iteration=3,phase=step", {}),
        pytest.param("iteration=4,phase=groups", {}, marks=SOAK),
        pytest.param("iteration=4,phase=transfer", {BACKEND: "nccl-like"}, marks=SOAK),
        pytest.param("iteration=4,phase=forward", {}, marks=SOAK),
        pytest.param("iteration=3,phase=reduce", {BACKEND: "nccl-like"}, marks=SOAK),
        pytest.param("iteration=6,phase=resume", {BACKEND: "nccl-like"}, marks=SOAK),
    ],
)
def test_a_kill_at_a_step_loses_nothing(
    job: Job, alone: dict[int, float], moment: str, setting: dict[str, str]
) -> None:
    job.environment |= setting
    job.train("--fault", f"kill:rank=6@{moment}", script=RAMP_UP, iterations=ITERATIONS).wait()
    assert_trained_once(job, alone)
    assert len(job.history("failures")) == 1
    assert {number for first, number in dealt(job) if first >= 6} == {8}


@SOAK
def test_a_run_from_a_checkpoint_inside_the_ramp_goes_on_with_its_number(job: Job, alone: dict[int, float]) -> None:
    where = {"tp": 1, "pp": 2, "nodes": 1, "gpus": 2}
    first = job.train("--checkpoint-every", "5", script=RAMP_UP, iterations=5, **where).wait()
    assert first.status == 0, first.stderr
    job.train("--checkpoint-every", "5", "--resume", "local-1", script=RAMP_UP, iterations=ITERATIONS, **where).wait()
    assert job.status == 0, job.stderr
    rows = job.history("iterations")
    assert {row["iteration"]: row["loss"] for row in rows} == pytest.approx(
        {i: loss for i, loss in alone.items() if i > 5}, rel=1e-4
    )
    assert dealt(job) == [(6, 8)]
