"""Selects the worker's device and checks whether it can train. Reports each obstacle in one line with a remedy.

Called once per worker, after the fork: querying a GPU starts CUDA, which does not survive a fork. A ModelError means
that the configuration is wrong, not the node, so no node is drained for it. The device's own error messages are passed
on unchanged, for the analysis of a worker's last output (`resihp.detector.diagnosis`). Never decides about a failed
device. Called by `backends.chosen` and the engine. Written from torch's source (c10/cuda/CUDAFunctions.cpp); not run on
a GPU.
"""

from __future__ import annotations

import os
import time
import warnings

import torch

from resihp.errors import ModelError
from resihp.words import count_of
from resihp.worker import torch_versions

LOCAL_RANK_VARIABLE = "LOCAL_RANK"
"""Environment variable: index of the worker's device on its node."""
SHARED_GPUS_VARIABLE = "RESIHP_SHARE_GPUS"
"""Environment variable: if `1`, several workers share each visible GPU, for tests on a machine with few GPUs."""
VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of torch's allocator, the newer name first."""
MAX_TAKEN_SHARE = 0.05
"""Share of a device's memory that other processes may use without a notice, since monitoring tools use a little."""
RELEASE_S = 5.0
"""Seconds to wait until other processes release memory. A killed process may occupy memory for seconds, and the worker
that replaces it may start sooner. An estimate, not measured."""
RELEASE_POLL_S = 0.1
_BUSY = "busy or unavailable"
"""Part of CUDA's error message if another process uses a device in exclusive mode."""


def visible() -> int:
    """Return the number of GPUs that torch can use here; 0 if none were assigned.

    Raises ModelError if GPUs were assigned but torch cannot use them, RuntimeError if they are broken. Without these
    errors, training would silently use CPUs, perhaps for weeks.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return count
    advice = f"; look at nvidia-smi, or train on processors with {VISIBLE_GPUS_VARIABLE}="
    if caught:
        text = str(caught[0].message)
        if "too old" not in text:
            raise RuntimeError(text)
        raise ModelError(f"GPUs: torch {torch.__version__} cannot use them: {text.splitlines()[0]}{advice}")
    given = os.environ.get(VISIBLE_GPUS_VARIABLE, "")
    if torch.version.cuda and given not in ("", "-1", "NoDevFiles"):  # Slurm sets NoDevFiles for no GPUs
        raise ModelError(f"GPUs: {VISIBLE_GPUS_VARIABLE}={given} and torch sees none of these{advice}")
    return 0


def is_first() -> bool:
    """Return whether this worker has the first device of its node."""
    return int(os.environ.get(LOCAL_RANK_VARIABLE) or 0) == 0


def own_device(gpus: int) -> torch.device:
    """Return this worker's GPU among `gpus` visible ones. Raises ModelError if it does not exist or another process
    uses it exclusively."""
    local = int(os.environ.get(LOCAL_RANK_VARIABLE) or 0)
    shared = os.environ.get(SHARED_GPUS_VARIABLE) == "1"
    if shared:
        local %= gpus
    if local >= gpus:
        hint = f"look at {VISIBLE_GPUS_VARIABLE} and at --gpus-per-node"
        if "MIG-" in os.environ.get(VISIBLE_GPUS_VARIABLE, ""):
            hint = "CUDA shows a process one MIG slice: ask for whole GPUs"
        raise ModelError(f"device {local}: {count_of(gpus, 'GPU')} visible here; {hint}")
    device = torch.device("cuda", local)
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # Tensor sizes differ between plans: without this setting, the next plan cannot use fragmented free memory.
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    try:
        taken_bytes, total_bytes = _released(device, shared)
    except (RuntimeError, torch.AcceleratorError) as error:
        if _BUSY not in str(error):
            raise
        raise ModelError(
            f"device {device}: a process has it to itself (exclusive mode); nvidia-smi shows which, and "
            "nvidia-smi -c DEFAULT lets others in"
        ) from error
    if not shared and taken_bytes > MAX_TAKEN_SHARE * total_bytes:
        taken = f"{taken_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB"
        print(f"device {device}: {taken} are in use by other processes; nvidia-smi shows which", flush=True)
    return device


def _released(device: torch.device, shared: bool) -> tuple[int, int]:
    """Select a device, and wait until other processes have released nearly all of its memory, or until `RELEASE_S` has
    passed.

    Returns the bytes in use and the total bytes. Raises RuntimeError if the device cannot be used.
    """
    until = time.monotonic() + RELEASE_S
    while True:
        try:
            torch.cuda.set_device(device)
            free, total = torch.cuda.mem_get_info(device)
        except (RuntimeError, torch.AcceleratorError) as error:
            if _BUSY not in str(error) or time.monotonic() > until:
                raise
        else:
            if shared or total - free <= MAX_TAKEN_SHARE * total or time.monotonic() > until:
                return total - free, total
        time.sleep(RELEASE_POLL_S)


def memory_bytes(device: torch.device) -> int | None:
    """Return the total memory of a worker's device in bytes; None for a CPU or a shared device."""
    return None if is_shared(device) else int(torch.cuda.mem_get_info(device)[1])


def is_shared(device: torch.device) -> bool:
    """Return whether other workers of the node may compute on the same device."""
    return device.type == "cpu" or os.environ.get(SHARED_GPUS_VARIABLE) == "1"


def refuse_slices(device: torch.device) -> None:
    """Raise ModelError if a job of several ranks uses a MIG slice of a GPU: NCCL cannot connect slices."""
    name = torch.cuda.get_device_name(device)
    if " MIG " in f"{name} " and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ModelError(
            f"device {device}: {name} is a slice of a GPU, and NCCL connects whole ones; ask for whole GPUs, or set "
            "RESIHP_BACKEND=gloo, which is slow"
        )


def refuse_precision(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError for bf16 on a GPU that only emulates it, or with a torch that lacks the attention kernel for
    it."""
    if dtype is not torch.bfloat16 or device.type != "cuda":
        return
    if refusal := torch_versions.refusal_of_bf16(torch.__version__):
        raise ModelError(f"device {device}: {refusal}; {torch_versions.UPGRADE_COMMAND}, or train with bf16=False")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ModelError(f"device {device}: {name} has no bf16 arithmetic; train with bf16=False, or on another GPU")
