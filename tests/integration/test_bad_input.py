"""What goes wrong before, beside and around training: clear words, the right exit code, nothing left behind."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import DETECTION, TINY, Job
from tests.integration.slurm_jobs import PACED

SMALL = {"nodes": 1, "gpus": 2, "tp": 1, "pp": 1}
SILENT_S = DETECTION.hang_given_up_s + 1.0
"""Longer than anybody is waited for who does not work."""


SCRIPT = """
import sys, time, ctypes
import numpy as np
import resihp
from resihp.datasets import PackedDataset
from megatron.core.transformer import TransformerConfig

class Documents:
    lengths = [40] * 4000
    def read(self, document, start, count):
        return (np.arange(start, start + count) + document) % 64

class Hooked(PackedDataset):
    def micro_batches(self, iteration):
        hook(iteration)
        return super().micro_batches(iteration)

{hook}

config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, attention_dropout=0.0,
                           hidden_dropout=0.0, use_cpu_initialization=True)
resihp.Trainer(
    config, vocab_size=64, optimizer=resihp.AdamW(lr=1e-3), sequence=64,
    dataset=Hooked(Documents(), budget=64, micro_batches_per_iteration=4),
).train(iterations={iterations})
"""


def script(folder: Path, hook: str, iterations: int = 4) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.py"
    path.write_text(SCRIPT.format(hook=hook, iterations=iterations))
    return (sys.executable, str(path))


def complaints(job: Job) -> list[str]:
    """Lines that say an error, without progress."""
    return [line for line in job.stderr.splitlines() if line.startswith("resihp: ")]


@pytest.mark.parametrize(
    ("options", "script", "message"),
    [
        ({"tp": 3}, (), "tp=3"),
        ({"tp": 2, "pp": 2}, (), "needs 4 devices"),
        ({"pp": 2}, ("--layers", "1"), "1 layers"),
        ({"tp": 2}, ("--heads", "1"), "attention heads"),
        ({}, ("--micro-batches", "1"), "1 micro-batches"),
        ({}, ("--corpus", "/nonexistent/corpus"), "/nonexistent/corpus"),
    ],
)
def test_what_cannot_start_is_said_once(
    job: Job, options: dict[str, int], script: tuple[str, ...], message: str
) -> None:
    job.train(script=script, **{**SMALL, **options}).wait()
    assert job.status == 2, job.stderr
    assert job.stderr.count(message) == 1, job.stderr
    assert "Traceback" not in job.stderr


def test_unknown_configuration_key_names_the_nearest(job: Job) -> None:
    job.folder.mkdir()
    (job.folder / "job.toml").write_text("[layout]\ntq = 2\n")
    job.train("--config", "job.toml", **SMALL).wait()
    assert job.status == 2
    assert "tq" in job.stderr
    assert "tp" in job.stderr
    assert not (job.folder / "home" / "jobs").exists() or not list((job.folder / "home" / "jobs").iterdir())


def test_ledger_that_cannot_be_opened_stops_before_anything_starts(job: Job) -> None:
    job.folder.mkdir()
    (job.folder / "garbage.db").write_bytes(b"this is not a database" * 100)
    job.train("--ledger", f"sqlite:///{job.folder}/garbage.db", **SMALL).wait()
    assert job.status == 2
    assert "garbage.db" in job.stderr
    assert "Traceback" not in job.stderr


def test_script_that_fails_everywhere_is_not_requeued_and_blames_no_node(job: Job) -> None:
    command = script(job.folder, "def hook(iteration):\n    if iteration == 3: raise KeyError('no such tokenizer')")
    job.start(command=command, **SMALL).wait()
    assert job.status == 93, job.stderr
    assert job.stderr.count("Traceback (most recent call last)") == 1
    assert "no such tokenizer" in job.stderr
    assert all(row["node"] is None for row in job.history("failures"))


def test_script_that_cannot_be_imported_is_broken_too(job: Job) -> None:
    job.folder.mkdir()
    (job.folder / "train.py").write_text("import no_such_module_anywhere\n")
    job.start(command=(sys.executable, str(job.folder / "train.py")), **SMALL).wait()
    assert job.status == 93, job.stderr
    assert job.stderr.count("no_such_module_anywhere") >= 1


def test_interpreter_frozen_for_ten_seconds_is_only_suspected(job: Job) -> None:
    hook = (
        "def hook(iteration):\n"
        "    import os\n"
        "    if iteration == 3 and os.environ['RANK'] == '1' and not hasattr(hook, 'done'):\n"
        "        hook.done = True\n"
        "        ctypes.PyDLL(None).sleep(10)  # keeps the GIL\n"
    )
    job.start(command=script(job.folder, hook), **SMALL).wait()
    assert job.status == 0, job.stderr
    assert "suspected" in job.stderr
    assert job.history("failures") == []
    assert {row["exit"] for row in job.history("workers")} == {0}


def test_control_connection_silent_while_collectives_progress_is_left_alone(job: Job) -> None:
    job.folder.mkdir()
    pace = job.folder / "pace"
    pace.write_text("0.05\n")  # some iterations a second: enough to be seen at work
    command = (sys.executable, str(PACED), str(pace), *TINY, "--iterations", "100000")
    job.start(command=command, nodes=2, gpus=1, tp=1, pp=1)
    job.until(lambda: "iteration 3" in (job.folder / "stderr").read_text())
    agents = [p for p in job.processes() if "resihp.wrapper.agent.process" in p.cmdline() and "n2" in p.cmdline()]
    assert len(agents) == 1, [p.cmdline() for p in job.processes()]
    agents[0].suspend()
    try:
        job.until(lambda: "node n2: suspected" in (job.folder / "stderr").read_text())
        silent_until = time.monotonic() + SILENT_S
        job.until(lambda: time.monotonic() > silent_until, timeout_s=40)
    finally:
        agents[0].resume()
    before = len(job.history("iterations"))
    job.until(lambda: len(job.history("iterations")) > before + 5)
    assert job.process is not None
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(30).status == 143, job.stderr
    assert job.history("failures") == []
    assert len(job.history("plans")) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_workers_and_close_the_ledger(job: Job, number: int, status: int) -> None:
    job.train(iterations=100_000, **SMALL)
    job.until(lambda: "iteration 3" in (job.folder / "stderr").read_text())
    job.until(lambda: [(row["state"], row["target"]) for row in job.ask("jobs")["rows"]] == [("running", 100_000)])
    assert job.process is not None
    job.process.send_signal(number)
    job.wait(30)
    assert job.status == status, job.stderr
    told = job.ask("status")
    assert told["state"] == "cancelled"
    assert set(told["health"].values()) == {"active"}, "they were told to go"
    [row] = job.ask("jobs")["rows"]
    assert (row["state"], row["exit_code"], row["target"]) == ("cancelled", status, 100_000)
    assert row["iteration"] == told["iteration"] >= 3
    assert job.processes() == []


def test_killing_guardian_and_supervisor_leaves_nothing_but_the_truth(job: Job) -> None:
    job.train(iterations=100_000, **SMALL)
    job.until(lambda: "iteration 3" in (job.folder / "stderr").read_text())
    assert job.process is not None
    guardian = psutil.Process(job.process.pid)
    for process in [guardian, *guardian.children()]:
        if process == guardian or "resihp.wrapper.supervisor.process" in " ".join(process.cmdline()):
            process.kill()
    job.process.wait(10)
    deadline = time.monotonic() + 10
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.processes() == []
    status = job.ask("status")
    assert status["state"] == "abnormal"
    assert len(job.history("iterations")) >= 3


def test_users_own_modules_win_over_ours(job: Job) -> None:
    folder = job.folder
    (folder / "slurm").mkdir(parents=True)
    for name in ("db", "wrapper", "resihp_config"):
        (folder / f"{name}.py").write_text(f"OWNER = 'user {name}'\n")
    (folder / "slurm" / "__init__.py").write_text("OWNER = 'user slurm'\n")
    hook = (
        "import db, slurm, wrapper, resihp_config\n"
        "assert [m.OWNER for m in (db, slurm, wrapper, resihp_config)] == "
        "['user db', 'user slurm', 'user wrapper', 'user resihp_config']\n"
        "def hook(iteration): pass"
    )
    job.start(command=script(folder, hook), **SMALL).wait()
    assert job.status == 0, job.stderr
