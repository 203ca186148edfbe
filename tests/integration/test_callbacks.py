"""The callbacks for Hugging Face's Trainer and for Lightning, in the scripts of examples/scripts under `resihp run`."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.integration.jobs import REPOSITORY, Job

pytest.importorskip("torch")

SCRIPTS = REPOSITORY / "examples" / "scripts"
IMPORTED = """
import resihp.reporting.{library} as reporting

def report(path, iteration):
    sent(path, iteration)
    print("checkpointed", path, iteration, flush=True)

sent, reporting.checkpointed = reporting.checkpointed, report
"""


def start(job: Job, script: str, library: str, package: str = "") -> Job:
    if importlib.util.find_spec(package or library) is None:
        pytest.skip(f"needs {package or library}: pip install 'resihp[examples]'")
    text = (SCRIPTS / f"{script}.py").read_text()
    if package:
        text = text.replace("import lightning\n", f"import {package} as lightning\n")
        text = text.replace("from lightning.pytorch", f"from {package}")
    assert text.count("callbacks=[") == 1
    text = text.replace("callbacks=[", "callbacks=[reporting.ResihpCallback(), ")
    text = text.replace("    self.print(", "    0 and self.print(")  # the printed iterations
    head, end, rest = text.partition("\nparser = ")
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / f"{script}.py"
    path.write_text(head + IMPORTED.format(library=library) + end + rest)
    command = (sys.executable, str(path), "--iterations", "12", "--checkpoint-every", "5")
    return job.start(command=(*command, "--folder", str(job.folder / "saved")), nodes=1, gpus=2, tp=1, pp=1).wait(120)


def check(job: Job, first: str, second: str) -> None:
    assert job.status == 0, job.stderr
    rows = job.history("iterations")
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    assert all(row["seconds"] for row in rows[1:])
    losses = [row["loss"] for row in rows]
    assert None not in losses
    assert losses[-1] < losses[0]
    printed = [line.split() for line in job.stdout.splitlines() if line.startswith("checkpointed")]
    assert [(path, int(number)) for _, path, number in printed][:2] == [
        (str(job.folder / "saved" / first), 5),
        (str(job.folder / "saved" / second), 10),
    ]


def test_steps_losses_and_checkpoints_of_transformers_are_reported(job: Job) -> None:
    start(job, "hf_trainer", "transformers")
    check(job, "checkpoint-5", "checkpoint-10")


@pytest.mark.parametrize("package", ["", "pytorch_lightning"])
def test_steps_losses_and_checkpoints_of_lightning_are_reported(job: Job, package: str) -> None:
    start(job, "lightning_fit", "lightning", package)
    check(job, "step_000005.ckpt", "step_000010.ckpt")
