"""Which device is this worker's, and whether it can be trained on. What cannot is one line that names the way out.

Asked once per worker, after the fork: asking for a GPU starts CUDA, which no fork survives. A ModelError is the
configuration's fault, never the node's: nobody is drained for it. What a device says of itself goes through as it is,
to whoever reads a worker's last words (`resihp.detector.diagnosis`). Called by `backends.chosen` and the engine. Read
from torch's source (c10/cuda/CUDAFunctions.cpp); on a GPU it has not run.
"""

from __future__ import annotations

import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from resihp.errors import ModelError
from resihp.words import count_of
from resihp.worker import torch_versions

PCI_DEVICES = Path("/sys/bus/pci/devices")
LOCAL_RANK = "LOCAL_RANK"
"""Which of the node's devices is the worker's."""
SHARED = "RESIHP_SHARE_GPUS"
"""`1`: workers share the GPUs that there are; for tests on a machine with few."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables, the newer one first."""
TAKEN_SHARE = 0.05
"""Of a device's memory that others may have before it is told: contexts of monitors are small."""
RELEASE_S = 5.0
"""How long memory that others have is waited for. A process that was killed may keep its own for seconds; a worker that
takes its place comes sooner. An estimate, not measured."""
RELEASE_POLL_S = 0.1
_BUSY = "busy or unavailable"
"""Part of CUDA's message about a device in exclusive mode that another process has."""


def visible() -> int:
    """GPUs that torch can use here.

    Raises ModelError where some are given and torch cannot use them, RuntimeError where they are broken: to train on
    processors instead would take weeks to be noticed.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return count
    way_out = f"; look at nvidia-smi, or train on processors with {VISIBLE}="
    if told:
        text = str(told[0].message)
        if "too old" not in text:
            raise RuntimeError(text)
        raise ModelError(f"GPUs: torch {torch.__version__} cannot use them: {text.splitlines()[0]}{way_out}")
    given = os.environ.get(VISIBLE, "")
    if torch.version.cuda and given not in ("", "-1", "NoDevFiles"):  # the last is Slurm's word for none
        raise ModelError(f"GPUs: {VISIBLE}={given} and torch sees none of these{way_out}")
    return 0


def is_first() -> bool:
    """Whether this worker has its node's first device."""
    return int(os.environ.get(LOCAL_RANK) or 0) == 0


def own_device(gpus: int) -> torch.device:
    """The GPU of this worker, of so many that are visible. Raises ModelError if there is none, or it is taken."""
    local = int(os.environ.get(LOCAL_RANK) or 0)
    shared = os.environ.get(SHARED) == "1"
    if shared:
        local %= gpus
    if local >= gpus:
        hint = f"look at {VISIBLE} and at --gpus-per-node"
        if "MIG-" in os.environ.get(VISIBLE, ""):
            hint = "CUDA shows a process one MIG slice: ask for whole GPUs"
        raise ModelError(f"device {local}: {count_of(gpus, 'GPU')} visible here; {hint}")
    device = torch.device("cuda", local)
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # Each plan has tensors of other sizes: without this, memory that is free in pieces is of no use to the next.
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
    if not shared and taken_bytes > TAKEN_SHARE * total_bytes:
        taken = f"{taken_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB"
        print(f"device {device}: {taken} are in use by other processes; nvidia-smi shows which", flush=True)
    return device


def _released(device: torch.device, shared: bool) -> tuple[int, int]:
    """Take a device, once others have no more than a small part of its memory or `RELEASE_S` has passed.

    Returns the bytes that are taken, and all there are. Raises RuntimeError where it cannot be used.
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
            if shared or total - free <= TAKEN_SHARE * total or time.monotonic() > until:
                return total - free, total
        time.sleep(RELEASE_POLL_S)


def bind_near(device: torch.device, pci_devices: Path = PCI_DEVICES) -> None:
    """Keep this process on the processors next to its GPU: copies from another socket's memory take longer.

    Among those that it may use: where Slurm or the user has bound it elsewhere, it stays there. Does nothing where the
    kernel does not tell which processors are near.
    """
    properties: Any = torch.cuda.get_device_properties(device)  # whose stubs lack its address
    with suppress(AttributeError, OSError, ValueError):
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        near = _processors((pci_devices / address / "local_cpulist").read_text()) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)


def _processors(ranges: str) -> set[int]:
    """Numbers of processors, from the kernel's `0-15,32-47`. Raises ValueError."""
    numbers = set[int]()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= {*range(int(first), int(last or first) + 1)}
    return numbers


def memory_bytes(device: torch.device) -> int | None:
    """What a worker's device has in all; None where others may take of it, or it is a processor."""
    return None if is_shared(device) else int(torch.cuda.mem_get_info(device)[1])


def is_shared(device: torch.device) -> bool:
    """Whether other workers of the machine may compute on it as well."""
    return device.type == "cpu" or os.environ.get(SHARED) == "1"


def refuse_slices(device: torch.device) -> None:
    """NCCL connects no slices of GPUs. Raises ModelError for one, if there are others to connect with."""
    name = torch.cuda.get_device_name(device)
    if " MIG " in f"{name} " and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ModelError(
            f"device {device}: {name} is a slice of a GPU, and NCCL connects whole ones; ask for whole GPUs, or set "
            "RESIHP_BACKEND=gloo, which is slow"
        )


def refuse_precision(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ModelError for bf16 on a GPU that would only imitate it, and with a torch that lacks its attention."""
    if dtype is not torch.bfloat16 or device.type != "cuda":
        return
    if refusal := torch_versions.refusal_of_bf16(torch.__version__):
        raise ModelError(f"device {device}: {refusal}; {torch_versions.WAY_OUT}, or train with bf16=False")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ModelError(f"device {device}: {name} has no bf16 arithmetic; train with bf16=False, or on another GPU")
