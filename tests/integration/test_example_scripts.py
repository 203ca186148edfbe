"""The scripts of examples/scripts under `resihp run`: undisturbed, and started again after a rank was killed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys

import pytest

from tests.integration.jobs import REPOSITORY, Job

pytest.importorskip("torch")

SCRIPTS = REPOSITORY / "examples" / "scripts"
ITERATIONS, CHECKPOINT_EVERY = 12, 5
LAST_LOSS = {
    "actors_and_learners": 0.0048,
    "ddp": 0.3979,
    "ddp_loader_processes": 0.4033,
    "fsdp2_dcp": 0.4310,
    "hf_trainer": 3.606,
    "lightning_fit": 0.3979,
    "megatron_gpt": 3.698,
}
"""After iteration 12: measured with torchrun on a CPU, that of actors_and_learners with four ranks, others with two."""
REQUIRED = {
    "megatron_gpt": ("megatron.core",),
    "hf_trainer": ("transformers", "accelerate"),
    "lightning_fit": ("lightning",),
}
PRINTED_LOSS = re.compile(r"loss'?:? '?(-?[\d.E+-]+)")


def start(job: Job, script: str, *options: str, tp: int = 1, iterations: int = ITERATIONS) -> Job:
    for module in REQUIRED.get(script, ()):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            pytest.skip(f"needs {module}: pip install 'resihp[examples]'")
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--iterations", str(iterations)]
    command += ["--checkpoint-every", str(CHECKPOINT_EVERY), "--folder", str(job.folder / "checkpoints"), *options]
    return job.start(command=tuple(command), nodes=2, gpus=2, tp=tp, pp=1)


def losses(job: Job) -> list[float]:
    return [float(match[1]) for match in PRINTED_LOSS.finditer(job.stdout)]


@pytest.mark.parametrize("script", sorted(LAST_LOSS))
def test_it_trains_under_resihp_run_without_a_change(job: Job, script: str) -> None:
    tensor_parallel = script == "megatron_gpt"
    options = ("--tp", "{tp}") if tensor_parallel else ()
    start(job, script, *options, tp=2 if tensor_parallel else 1).wait(120)
    assert job.status == 0, job.stderr
    printed = losses(job)[:ITERATIONS]
    assert len(printed) == ITERATIONS, job.stdout
    assert printed[-1] == pytest.approx(LAST_LOSS[script], abs=0.005)
    assert any((job.folder / "checkpoints").iterdir())


def test_every_script_has_its_launch_lines_and_imports_nothing_of_resihp() -> None:
    scripts = sorted(SCRIPTS.glob("*.py"))
    assert [path.stem for path in scripts] == sorted(LAST_LOSS)
    for path in scripts:
        text = path.read_text()
        launch = f"examples/scripts/{path.name}"
        assert f"torchrun --standalone --nproc-per-node 4 {launch}" in text
        assert f"-- python {launch}" in text
        assert not re.search(r"^\s*(import|from) resihp", text, re.MULTILINE)


@pytest.mark.parametrize("script", ["ddp", "ddp_loader_processes", "actors_and_learners"])
def test_a_killed_rank_is_started_again_and_the_losses_are_those_of_an_undisturbed_run(job: Job, script: str) -> None:
    start(job, script, "--sleep", "0.1")
    job.until(lambda: f"iteration {CHECKPOINT_EVERY + 2}/" in (job.folder / "stdout").read_text())
    rank_2 = [process for process in job.processes() if process.cmdline()[0].startswith("resihp job local-1 rank 2")]
    victim = min(process.pid for process in rank_2)  # not one that it started
    os.kill(victim, signal.SIGKILL)
    job.wait(120)
    assert job.status == 0, job.stderr
    assert "continuing from" in job.stdout
    assert job.stdout.count(f"iteration {CHECKPOINT_EVERY + 1}/") == 2
    assert losses(job)[-1] == pytest.approx(LAST_LOSS[script], abs=0.005)
