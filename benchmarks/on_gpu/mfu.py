"""Model FLOPs utilisation: arithmetic that the model asks for, over what the device's tensor cores can do in that time.

Recomputation does not count, and of attention the causal half (PaLM, appendix B, halved as causal kernels are).
"""

from __future__ import annotations

import torch

PEAK_BF16 = {
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
}
"""FLOP/s of dense bf16 by NVIDIA's data sheets. The longest name that is part of a device's name counts."""


def peak_of(device_name: str) -> float | None:
    """Return FLOP/s of dense bf16; None of a device that is not in the table."""
    words = device_name.replace("-", " ").split()
    known = [name for name in PEAK_BF16 if set(name.split()) <= set(words)]
    return PEAK_BF16[max(known, key=len)] if known else None


def shown_mfu(flops_per_s: float) -> str:
    """Return such as "MFU 48.0 %", of the first GPU of this process."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a processor"
    peak = peak_of(name)
    if peak is None:
        return f"{flops_per_s / 1e12:.4g} TFLOP/s (no MFU: the peak of {name} is not in benchmarks/on_gpu/mfu.py)"
    return f"MFU {100 * flops_per_s / peak:.1f} % of {peak / 1e12:.0f} TFLOP/s"
