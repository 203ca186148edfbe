"""What is installed, and whether workers that are forks of one process can each use the GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterator

import torch

from benchmarks.on_gpu.figures import Figure, Scale, all_of
from resihp.process import threads
from resihp.worker import nccl_versions
from resihp.worker.forkserver import PRELOAD

WORKERS = 8


def measure(scale: Scale) -> Iterator[Figure]:
    for name in PRELOAD.split(","):
        importlib.import_module(name)
    count = threads()
    yield Figure("threads of the fork server once it has imported all", str(count), "1", count == 1)
    yield all_of("forks of it that allocate and multiply", _forks_that_work(scale), WORKERS)
    yield from _versions(scale)


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


def _versions(scale: Scale) -> Iterator[Figure]:
    yield Figure("torch, its CUDA", f"{torch.__version__}, {torch.version.cuda}")
    for package in ("megatron-core", "transformer-engine", "flash-attn", "triton"):
        try:
            yield Figure(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Figure(package, "not installed")
    if not scale.full:
        return
    files = ", ".join(nccl_versions.files())
    yield Figure("NCCL", f"{nccl_versions.shown(nccl_versions.loaded() or ())} of {files or 'torch'}")
    device = torch.cuda.get_device_properties(0)
    yield Figure("GPU", f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {device.major}.{device.minor}")
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        yield Figure("driver, compute mode, MIG", answer.stdout.strip() or answer.stderr.strip()[:200])
    mps = os.path.exists(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    yield Figure("MPS", "on" if mps else "off")
