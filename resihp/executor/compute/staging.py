"""Copies from host to device that block neither host nor device. Used by all code that brings data to a chunk.

A copy from ordinary memory blocks the host until it is done, so that the GPU gets no further work meanwhile. A copy
from pinned memory is only another item in the stream; torch keeps the pinned memory until the copy has read it. The GPU
branch has not been run, for lack of a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def staged(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on the device, valid for all work that is enqueued afterwards."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
