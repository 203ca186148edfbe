"""What is installed, and whether workers that are forks of one process can each use the GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.on_gpu.figures import Figure, Scale, all_of
from resihp.process import threads
from resihp.worker import nccl_versions
from resihp.worker.forkserver import PRELOADED_MODULES

WORKERS = 8
PROGRAM_S = 15.0
"""How long a program of the machine may take to answer."""
LONGEST_ANSWER = 300
PACKAGES = ("megatron-core", "transformer-engine", "apex", "flash-attn", "triton")
_GPU_FIELDS = "name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current,clocks.max.sm,power.limit"
PROGRAMS = {
    "GPU, by nvidia-smi": ("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"),
    "CUDA's compiler": ("nvcc", "--version"),
    "memory for tensors that processes share": ("df", "-h", "/dev/shm"),
    "network interfaces": ("ip", "-brief", "address"),
}


def facts(scale: Scale) -> Iterator[Figure]:
    """The last rows begin CUDA in this process; all others come before, in case it does not begin."""
    yield Figure("Python, cores, Linux", f"{platform.python_version()}, {os.cpu_count()}, {platform.release()}")
    for name, command in PROGRAMS.items():
        yield Figure(name, _answer(command))
    mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists()
    yield Figure("MPS", "on" if mps else "off")
    yield Figure("torch, its CUDA", f"{torch.__version__}, {torch.version.cuda}")
    for package in PACKAGES:
        try:
            yield Figure(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Figure(package, "not installed")
    yield Figure("NCCL that is loaded", loaded_nccl())
    if scale.full:
        device = torch.cuda.get_device_properties(0)
        yield Figure("GPU", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {device.major}.{device.minor}")
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        yield Figure("device memory in use once CUDA has begun", f"{(total_bytes - free_bytes) / 1e6:.0f} MB")


def loaded_nccl() -> str:
    version = nccl_versions.loaded()
    if version is None:
        return "none"
    return f"{nccl_versions.shown(version)} of {', '.join(nccl_versions.files()) or 'torch'}"


def _answer(command: tuple[str, ...]) -> str:
    """Return the last words of a program's answer, in one line."""
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROGRAM_S:g} s"
    lines = (answer.stdout + answer.stderr).strip().splitlines()
    return "; ".join(" ".join(line.split()) for line in lines)[-LONGEST_ANSWER:]


def forks(scale: Scale) -> Iterator[Figure]:
    for name in PRELOADED_MODULES.split(","):
        importlib.import_module(name)
    count = threads()
    yield Figure("threads of the fork server once it has imported all", str(count), "1", count == 1)
    yield all_of("forks of it that allocate and multiply", _forks_that_work(scale), WORKERS)


def _forks_that_work(scale: Scale) -> int:
    """Each takes its device as a worker does. Before this process asks for a GPU: after that none could."""
    pids = []
    for local in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.environ |= {"LOCAL_RANK": str(local), "RESIHP_SHARE_GPUS": "1", "RESIHP_BACKEND": "gloo"}
                _work(scale)
                status = 0
            except Exception as error:  # noqa: BLE001 this process ends here, and what it met is a figure of its parent
                print(f"fork {local}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        pids.append(pid)
    return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in pids)


def _work(scale: Scale) -> None:
    from resihp.executor import backends

    back_end = backends.chosen()
    assert back_end.device.type == scale.device.type, f"works on {back_end.device}"
    size = scale.of(8192, 64)
    square = torch.ones(size, size, device=back_end.device)
    assert float((square @ square)[0, 0]) == size
