"""What the models of the blocks have in common: LLaMA's layers, without dropout."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

LLAMA: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
