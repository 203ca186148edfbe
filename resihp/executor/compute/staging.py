"""Copies from the host to the device for which neither of them waits. Used by all that brings data to a chunk.

A copy from ordinary memory holds the host until it is done, and with it whatever would be handed to the GPU meanwhile;
one from pinned memory is just one more thing in the stream. torch keeps the pinned memory until the copy has read it.
The branch for GPUs has not run: none was at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def staged(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's, on the device as far as the work that follows is concerned."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
