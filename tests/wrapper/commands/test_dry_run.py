"""`resihp run --dry-run`: what is told of a run, and that nothing comes of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.errors import CheckpointError, LayoutError, UsageError
from resihp.protocol.messages import Declare
from resihp.record.journal import ModelDeclared
from resihp.record.journal_file import Journal
from resihp.simulator.scenarios.scenario import MODEL
from resihp.slurm.client import JobView, NodeView
from resihp.slurm.drains.exclusions import Exclusions
from resihp.worker.checkpoints import write_manifest
from resihp.wrapper.commands.dry_run import dry_run_lines
from resihp.wrapper.commands.run import Options, check, prepare
from resihp.wrapper.config.shape import devices_of
from resihp.wrapper.job_folder import home
from tests.slurm.fake_slurm import FakeSlurm
from tests.wrapper.commands.test_earlier_runs import decides
from tests.wrapper.commands.test_resume import batch, start

__all__ = ["batch"]  # the fixture: in the batch script of job 77

COMMAND = (sys.executable, "train.py")
DECLARE = Declare(model=MODEL, micro_batches=8, iterations=60, resume_from=0, fingerprint="same")


@pytest.fixture
def script(fresh_home: Path) -> Path:
    path = fresh_home / "train.py"
    path.write_text("")
    return path


def options(**others: Any) -> Options:
    return Options(**{"job": {"command": COMMAND, "nodes": 2, "gpus_per_node": 2}, "local": True} | others)


def said(**others: Any) -> list[str]:
    return list(dry_run_lines(check(options(**others))))


def test_the_layout_is_told_and_nothing_is_made(script: Path) -> None:
    before = sorted(script.parent.rglob("*"))
    assert said(layout={"pp": 2}) == [
        "layout: DP2 x PP2 x TP1, 4 ranks on n1, n2",
        "  replica 0 stage 0: rank 0 on n1",
        "  replica 0 stage 1: rank 1 on n1",
        "  replica 1 stage 0: rank 2 on n2",
        "  replica 1 stage 1: rank 3 on n2",
        "memory: unknown until the script declares its model; no earlier job here ran this command",
        "checkpoint: none, training starts from the beginning",
        "nothing was started or written",
    ]
    assert sorted(script.parent.rglob("*")) == before


def test_memory_is_estimated_where_an_earlier_job_ran_the_command(script: Path) -> None:
    earlier = prepare(options())
    earlier.save()
    journal = Journal(earlier.of_job.journal_file)
    journal.append(ModelDeclared(declare=DECLARE), 1.0)
    journal.close()
    lines = said(layout={"pp": 2})
    assert f"{MODEL.layers // 2} layers, " in lines[1]
    assert lines[1].endswith(" per device")
    assert f"model as in job {earlier.job}, 60 iterations" in lines[5]
    with pytest.raises(LayoutError, match="needs"):
        said(job={"command": COMMAND, "nodes": 2, "gpus_per_node": 2, "memory_per_device": "1MB"})


def test_the_checkpoint_that_would_be_taken_is_named(script: Path) -> None:
    folder = script.parent / "saved"
    part = folder / "iteration-000040" / "part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"1234")
    write_manifest(part.parent, 40, [("part", 4)])
    lines = said(resume="", checkpoint={"folder": str(folder)})
    assert f"checkpoint: resumes from iteration 40, {part.parent}" in lines
    with pytest.raises(CheckpointError):
        said(resume="", checkpoint={"folder": str(script.parent)})


def test_spare_nodes_stand_by(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_SLURM__SPARES", "1")
    assert "standby: n3, not used by the layout" in said()


def test_nodes_that_the_users_jobs_keep_away_from_are_named(batch: Path) -> None:
    """In an allocation, whose second node is one of them."""
    decides(start(), ("n1", "exclude", "died"))
    exclusions = Exclusions(home(), "fake")
    for node, reason, for_s in (("n2", "Xid 79", 60.0), ("n9", "slow link", 60.0), ("n8", "mended", -60.0)):
        exclusions.add(node, reason, time.time() + for_s)
    views = [NodeView(name=name, state="allocated", address="127.0.0.1") for name in ("n1", "n2")]
    slurm = FakeSlurm(views)
    slurm.job_views["77"] = JobView(id="77", name="resihp", user=slurm.user, state="running")
    slurm.scripts["77"] = "#!/bin/bash\n#SBATCH --no-kill\n"
    lines = list(dry_run_lines(check(Options(job={"command": COMMAND}), slurm)))
    assert "node n1: died during an earlier run of this job" in lines
    left_out = sorted(line for line in lines if line.startswith("excluded: "))
    assert [line.partition(" until ")[0] for line in left_out] == ["excluded: n2", "excluded: n9"]
    assert left_out[0].endswith(" UTC: Xid 79 (but it is in this allocation)")
    assert left_out[1].endswith(" UTC: slow link")


def test_all_devices_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,GPU-2,3")
    assert devices_of("auto", 1, local=True) == 4
    assert devices_of("auto", 2, local=True) == 2
    assert devices_of("auto", 2, local=False) is None
    assert devices_of(None, 1, local=True) is None
    assert devices_of("3", 1, local=True) == 3
    for said_, nodes, visible, message in (
        ("auto", 3, "0,1", "2 GPUs cannot be divided evenly among 3 virtual nodes"),
        ("auto", 1, "", "shows no GPU"),
        ("all", 1, "0", "--gpus-per-node all: a number, auto, gpu or cpu"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(UsageError, match=message):
            devices_of(said_, nodes, local=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no nvidia-smi on this machine"):
        devices_of("auto", 1, local=True)
    smi = tmp_path / "nvidia-smi"
    for content, expected in (("echo 'GPU 0: NVIDIA H100'; echo 'GPU 1: NVIDIA H100'", 2), ("exit 9", None)):
        smi.write_text(f"#!/bin/sh\n{content}\n")
        smi.chmod(0o755)
        if expected is None:
            with pytest.raises(UsageError, match="lists no GPU"):
                devices_of("auto", 1, local=True)
        else:
            assert devices_of("auto", 1, local=True) == expected


def test_a_job_of_another_command_says_nothing_of_this_one(script: Path) -> None:
    earlier = prepare(options())
    msgspec.structs.replace(earlier, command=("python", "other.py")).save()
    assert any(line.startswith("memory: unknown") for line in said())
