"""Rotary positions: the settings of megatron-core's GPTModel, with the same meaning, and the resulting angles.

Decides which settings are valid. Never rotates anything: megatron applies the angles to queries and keys. Called by
`trainer`, `engine` and `stage`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from resihp.errors import ModelError
from resihp.executor.tensor_group import TensorGroup


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Settings of rotary position embeddings, under the names of GPTModel's arguments."""

    rotary_base: int = 10000
    rotary_percent: float = 1.0
    """Share of each head's width that is rotated, rounded down; the rest of the width does not depend on the
    position."""
    seq_len_interpolation_factor: float | None = None
    """Factor by which positions are divided (linear interpolation); None for no interpolation."""
    rope_scaling: bool = False
    """Whether low frequencies are reduced for contexts beyond 8192 tokens, as in Llama 3.1."""
    rope_scaling_factor: float = 8.0

    def refuse_invalid(self, config: TransformerConfig) -> None:
        """Raise ModelError for a setting that is invalid for heads of width `config.kv_channels`."""
        width = int(config.kv_channels * self.rotary_percent)
        factor = self.seq_len_interpolation_factor
        for name, valid, rule in (
            ("rotary_base", self.rotary_base > 1, "must be above 1"),
            ("rotary_percent", 0 < self.rotary_percent <= 1, "must be above 0 and at most 1"),
            ("rotary_percent", width >= 2 and width % 2 == 0,
             f"turns {width} of the {config.kv_channels} columns of a head; it must be an even number, at least 2"),
            ("seq_len_interpolation_factor", factor is None or factor >= 1, "must be at least 1, or None"),
            ("rope_scaling_factor", self.rope_scaling_factor >= 1, "must be at least 1"),
        ):  # fmt: skip
            if not valid:
                raise ModelError(f"rotary positions: {name}={getattr(self, name)!r} {rule}")

    def angles(self, config: TransformerConfig, sequence: int) -> Tensor:
        """Return the angles of each position, [sequence, 1, 1, rotated width], in the layout of
        `RotaryEmbedding.get_emb`."""
        rotary = RotaryEmbedding(
            config.kv_channels,
            self.rotary_percent,
            seq_len_interpolation_factor=self.seq_len_interpolation_factor,
            rotary_base=self.rotary_base,
            rope_scaling=self.rope_scaling,
            rope_scaling_factor=self.rope_scaling_factor,
            use_cpu_initialization=True,
            cp_group=TensorGroup(),
        )
        angles = rotary.get_freqs_non_repeated(sequence)
        if config.rotary_interleaved:
            angles = torch.stack((angles, angles), dim=-1).flatten(1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]
