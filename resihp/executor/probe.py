"""Is a device fit for work? A short examination before a new process on it joins a job that is under way.

Right or wrong only; how fast the device is, compared with its peers, is the detector's question.
"""

from __future__ import annotations

import torch

from resihp.errors import DeviceError

SIZE = 256
SEED = 20260507


def examine(device: torch.device) -> None:
    """Multiply matrices twice on the device and compare with the processor's result. Raises DeviceError."""
    generator = torch.Generator().manual_seed(SEED)
    left, right = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    expected = left.double() @ right.double()
    try:
        results = [(left.to(device) @ right.to(device)).cpu() for _ in range(2)]
    except RuntimeError as error:
        raise DeviceError(f"device {device}: fails its probe: {error}") from error
    if not torch.equal(results[0], results[1]):
        raise DeviceError(f"device {device}: fails its probe: the same product comes out differently")
    worst = float((results[0].double() - expected).abs().max())
    if not worst < 1e-2 * SIZE**0.5:
        raise DeviceError(f"device {device}: fails its probe: a product is off by {worst:g}")
