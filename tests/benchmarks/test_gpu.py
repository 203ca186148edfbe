"""`make gpu` where there is no GPU, and its blocks rehearsed on a processor: that they run, not what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
REPOSITORY = Path(__file__).parents[2]


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def rehearsed(folder: Path, block: str) -> dict[str, Any]:
    done = gpu("--rehearse", block, "--folder", str(folder))
    (found,) = json.loads((folder / "gpu.json").read_text())
    assert (found["broken"], found["trouble"]) == (False, ""), done.stderr
    assert found["figures"]
    assert found["name"] in (folder / "gpu.md").read_text()
    missed = [figure["name"] for figure in found["figures"] if figure["met"] is False]
    assert done.returncode == (1 if missed else 0)
    return {figure["name"]: figure for figure in found["figures"]}


def test_without_a_gpu_it_says_so_in_a_line_and_that_is_no_failure() -> None:
    done = gpu()
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert "nothing is measured" in done.stdout


def test_a_block_that_is_none_is_told() -> None:
    done = gpu("kernel")
    assert done.returncode == 2
    assert "kernel: no block; there are inventory, kernels" in done.stderr


def test_a_block_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    done = gpu("--rehearse", "kernels", "--minutes", "0.01", "--folder", str(tmp_path))
    assert done.returncode == 1
    (found,) = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["broken"], found["trouble"]) == (True, "did not end within 0.01 minutes")


def test_forks_of_what_workers_come_from_can_work(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "inventory")
    assert found["forks of it that allocate and multiply"]["value"] == "8 of 8"


def test_communicators_of_one_rank(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "one-rank")
    assert found["a synchronous collective, waited for"]["met"]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", ["kernels", "throughput", "recovery", "shared"])
def test_each_block_runs(tmp_path: Path, block: str) -> None:
    rehearsed(tmp_path, block)
