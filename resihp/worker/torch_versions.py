"""Which versions of torch are enough, and for what.

Before 2.8 there is no `torch.AcceleratorError`, by which a device's own error is told from a lost peer's, so nothing of
`resihp.executor` can be imported. Before 2.10 there is no `torch.nn.attention.varlen`, the attention that bf16 takes on
a GPU. What resihp calls of torch's NCCL back end was compared with 2.11 and with later ones
(`tests/integration/nccl_contract.py`). Used by `resihp.executor` and `resihp doctor`; imports no torch.
"""

from __future__ import annotations

import re

Version = tuple[int, int]

OLDEST: Version = (2, 8)
OLDEST_BF16_ON_GPUS: Version = (2, 10)
OLDEST_COMPARED: Version = (2, 11)
WAY_OUT = "pip install 'torch>=2.11'"


def parsed(version: str) -> Version:
    """Return the first two numbers of a version such as `2.11.0a0+b558c98`; a container's own builds are pre-releases
    by their name."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def refusal(version: str) -> str:
    """Return a line that says why resihp cannot use this torch; empty if it can."""
    return _too_old(version, OLDEST, "resihp") if parsed(version) < OLDEST else ""


def refusal_of_bf16(version: str) -> str:
    """Return a line that says why this torch cannot train in bf16 on a GPU; empty if it can."""
    return _too_old(version, OLDEST_BF16_ON_GPUS, "bf16 on a GPU") if parsed(version) < OLDEST_BF16_ON_GPUS else ""


def doubt(version: str) -> str:
    """Return a line for a torch whose NCCL back end was never compared with our calls; empty for any other."""
    if parsed(version) >= OLDEST_COMPARED:
        return ""
    return f"what resihp calls of NCCL's back end was compared with torch {_shown(OLDEST_COMPARED)} and later only"


def _too_old(version: str, least: Version, purpose: str) -> str:
    return f"torch {version} is too old: {purpose} needs {_shown(least)} or later"


def _shown(version: Version) -> str:
    return ".".join(map(str, version))
