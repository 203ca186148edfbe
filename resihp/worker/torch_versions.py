"""Knows which versions of torch are recent enough for which purpose.

Before 2.8 there is no `torch.AcceleratorError`, which distinguishes a device's own error from the loss of a peer, so
`resihp.executor` cannot be imported at all. Before 2.10 there is no `torch.nn.attention.varlen`, the attention kernel
for bf16 on a GPU. The calls of torch's NCCL back end in resihp were compared with 2.11 and later
(`tests/integration/nccl_contract.py`). Never imports torch. Used by `resihp.executor` and `resihp doctor`.
"""

from __future__ import annotations

import re

Version = tuple[int, int]

OLDEST_USABLE: Version = (2, 8)
OLDEST_BF16_ON_GPUS: Version = (2, 10)
OLDEST_COMPARED: Version = (2, 11)
UPGRADE_COMMAND = "pip install 'torch>=2.11'"


def parsed(version: str) -> Version:
    """Return the first two numbers of a version such as `2.11.0a0+b558c98`; (0, 0) if there are fewer.

    Builds in containers are named like pre-releases, so the rest is ignored.
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def refusal(version: str) -> str:
    """Return an error message if resihp cannot use this torch; otherwise an empty text."""
    return _too_old(version, OLDEST_USABLE, "resihp") if parsed(version) < OLDEST_USABLE else ""


def refusal_of_bf16(version: str) -> str:
    """Return an error message if this torch cannot train in bf16 on a GPU; otherwise an empty text."""
    return _too_old(version, OLDEST_BF16_ON_GPUS, "bf16 on a GPU") if parsed(version) < OLDEST_BF16_ON_GPUS else ""


def doubt(version: str) -> str:
    """Return a warning if this torch is older than the versions compared with resihp's calls of NCCL; otherwise an
    empty text."""
    if parsed(version) >= OLDEST_COMPARED:
        return ""
    return f"resihp's calls of torch's NCCL back end were compared with torch {_shown(OLDEST_COMPARED)} and later only"


def _too_old(version: str, oldest: Version, purpose: str) -> str:
    return f"torch {version} is too old: {purpose} needs {_shown(oldest)} or later"


def _shown(version: Version) -> str:
    return ".".join(map(str, version))
