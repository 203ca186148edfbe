"""`make gpu` where there is no GPU, and its blocks rehearsed on a processor: that they run, not what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import gone

torch = pytest.importorskip("torch")
REPOSITORY = Path(__file__).parents[2]


def gpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    settings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, cwd=REPOSITORY, env=settings, capture_output=True, text=True, check=False)


def rehearsed(folder: Path, *blocks: str) -> list[dict[str, Any]]:
    """The figures of each block, by name; one command runs them all."""
    done = gpu("--rehearse", *blocks, "--folder", str(folder))
    results = json.loads((folder / "gpu.json").read_text())
    assert [result["name"] for result in results] == list(blocks)
    figures = [figure for result in results for figure in result["figures"]]
    for result in results:
        assert (result["broken"], result["trouble"]) == (False, ""), done.stderr
        assert result["figures"]
        assert result["name"] in (folder / "gpu.md").read_text()
    lines = [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == [figure["name"] for figure in figures]
    assert not [figure for figure in figures if figure["value"].startswith("failed: ")], done.stderr
    missed = [figure["name"] for figure in figures if figure["met"] is False]
    assert done.returncode == (1 if missed else 0)
    return [{figure["name"]: figure for figure in result["figures"]} for result in results]


def test_without_a_gpu_it_says_so_in_a_line_and_that_is_no_failure() -> None:
    done = gpu()
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert "nothing is measured" in done.stdout


OLD_DRIVER = """
    __version__ = "2.11.0+cu130"
    class version:
        cuda, hip = "13.0", None
    class cuda:
        def init():
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.")
"""
NO_TORCH = """
    raise ModuleNotFoundError("No module named 'torch'", name="torch")
"""


@pytest.mark.parametrize(
    ("stand_in", "line"),
    [
        (
            OLD_DRIVER,
            "torch 2.11.0+cu130 sees no GPU: The NVIDIA driver on your system is too old (found version 11040)",
        ),
        (NO_TORCH, "torch is not installed for "),
    ],
)
def test_what_is_missing_is_named_in_a_line(tmp_path: Path, stand_in: str, line: str) -> None:
    (tmp_path / "torch.py").write_text(textwrap.dedent(stand_in))
    done = gpu(PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert line in done.stdout


def test_an_unknown_block_is_named() -> None:
    done = gpu("kernel")
    assert done.returncode == 2
    assert "kernel: no block; there are facts, forks, micro" in done.stderr


def test_a_block_is_stopped_when_its_time_is_over_and_the_next_one_is_not_begun(tmp_path: Path) -> None:
    done = gpu("--rehearse", "micro", "kernels", "--minutes", "0.005", "--folder", str(tmp_path))
    assert done.returncode == 1
    stopped, not_run = json.loads((tmp_path / "gpu.json").read_text())
    assert (stopped["broken"], stopped["trouble"]) == (True, "stopped: its 0.3 s were over")
    assert (not_run["broken"], not_run["trouble"]) == (False, "not run: no time was left")


def test_what_is_stopped_leaves_no_process_behind(tmp_path: Path) -> None:
    from benchmarks.on_gpu.processes import run_within

    script = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
    """
    pids: list[int] = []
    command = [sys.executable, "-c", textwrap.dedent(script)]
    code = run_within(command, 3.0, tmp_path / "log", os.environ, lambda line: pids.append(int(line)))
    assert code is None
    (pid,) = pids
    assert gone(pid)


def test_a_job_that_ends_badly_keeps_its_losses_and_logs(tmp_path: Path) -> None:
    from benchmarks.on_gpu import supervised
    from benchmarks.on_gpu.figures import Scale

    scale = Scale(full=False, folder=tmp_path)
    shape = supervised.Shape(nodes=1, workers=2, tp=1, pp=2)
    faults = ("kill:rank=1@iteration={at},phase=backward",)  # the only holder of its stage: the job cannot go on
    environment = {"RESIHP_BACKEND": "gloo", "RESIHP_ADAPT__MAX_RESTARTS": "0"}
    outcome = supervised.job(scale, "one replica", environment, faults, shape=shape)
    assert outcome.trouble.startswith("exit 5: ")
    assert list(outcome.losses) == list(range(1, supervised.AT))
    assert json.loads((tmp_path / "jobs" / "one-replica.json").read_text())["outcome"]["trouble"] == outcome.trouble
    assert list((tmp_path / "jobs" / "one-replica").rglob("*.log"))
    (figure,) = supervised.judged("one replica", faults, outcome, outcome)
    assert figure.met is False
    assert "in iterations 1 to 5; exit 5" in figure.value


def test_contestants_that_do_not_fit_together_do_not_share_a_device() -> None:
    from benchmarks.on_gpu.throughput import SIZES

    h100_bytes, h200_bytes = 84_900_000_000, 150_000_000_000
    assert SIZES["1.3B"].both_fit(h100_bytes)
    assert not SIZES["8 layers of 7B"].both_fit(h100_bytes)
    assert SIZES["8 layers of 7B"].both_fit(h200_bytes)


def test_a_contestant_that_is_done_gives_its_memory_back() -> None:
    import weakref

    from benchmarks.contest import TIMEOUT, Corpus, in_turn
    from benchmarks.on_gpu import contestants, throughput
    from benchmarks.on_gpu.figures import Scale
    from resihp.executor.tensor_group import dist

    scale, size = Scale(full=False), throughput.REHEARSED["tiny"]
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=TIMEOUT, wait_for_workers=False)

    def trained() -> list[Any]:
        corpus = Corpus(size.micro_batches, size.length, size.vocab)
        ours = contestants.Settled(scale, contestants.ours(size, corpus, ("127.0.0.1", store.port)))
        in_turn({"ours": ours}, 1, 1, 1, scale.settle, speaks=False)
        state = ours.inner.engine.state
        return [weakref.ref(tensor) for tensor in state.storages()]

    tensors = trained()
    contestants.give_memory_back(scale)
    assert tensors
    assert not [tensor for tensor in tensors if tensor() is not None]


def test_a_devices_peak_is_that_of_the_longest_name_which_it_has() -> None:
    from benchmarks.on_gpu.mfu import peak_of

    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("Tesla T4") is None


def test_forks_calls_communicators_and_training_can_be_rehearsed_on_a_processor(tmp_path: Path) -> None:
    forks, micro, train, one_rank = rehearsed(tmp_path, "forks", "micro", "train", "one-rank")
    assert forks["forks of it that allocate and multiply"]["value"] == "8 of 8"
    assert micro["NCCL: parent and child aborted together"]["met"]
    assert one_rank["a synchronous collective, waited for"]["met"]
    assert train["losses of both"]["met"]
    assert "time of megatron-core without Transformer Engine, apex and fused Adam over ours" in train
    assert "aten::mm" in (tmp_path / "profile-ours.txt").read_text()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", ["gloo", "nccl", "kernels", "throughput", "recovery", "shared"])
def test_each_block_runs(tmp_path: Path, block: str) -> None:
    rehearsed(tmp_path, block)
