"""Attention over packed documents: each token sees its own document's past and nothing else.

Takes the place of `core_attention` in megatron-core's layers, whose local implementation refuses packed input.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor


@dataclass
class Packing(PackedSeqParams):
    """How documents lie in a packed micro-batch. Passed through the layers as megatron's `packed_seq_params`.

    `qkv_format` stays "sbhd": activations keep the shape [N, 1, H], and positions come already restarted.
    """

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: tuple[int, ...]) -> Packing:
        return cls(qkv_format="sbhd", max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), lengths=lengths)

    def positions(self, device: torch.device) -> Tensor:
        """Position of each token within its document, int64 [N]."""
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])


class PackedAttention(torch.nn.Module):
    """Causal attention inside each document; cost follows the sum of squared lengths.

    In a layer with a window, of a configuration's `window_size` (w, 0), a token sees itself and w before it.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        narrow = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = int(config.window_size[0]) if narrow else -1
        """How many tokens before its own a token sees; -1 for all."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Tensor:
        """[N, 1, heads, width] and twice [N, 1, groups, width] -> [N, 1, heads * width]."""
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            return self._varlen(query, key, value, packed_seq_params.lengths)
        lengths = list(packed_seq_params.lengths)
        # [N, 1, heads, width] -> one [1, heads, length, width] for each document
        segments = (tensor.permute(1, 2, 0, 3).split(lengths, dim=2) for tensor in (query, key, value))
        attended = [
            F.scaled_dot_product_attention(
                q, k, v, **self._seen(q), scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            for q, k, v in zip(*segments, strict=True)
        ]
        return torch.cat(attended, dim=2).permute(2, 0, 1, 3).flatten(2)

    def _seen(self, query: Tensor) -> dict[str, Any]:
        """Which tokens of a document of [..., length, width] each of them sees, in the words of torch's attention."""
        length = query.shape[-2]
        if self.window < 0 or length <= self.window + 1:
            return {"is_causal": True}
        past = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        return {"attn_mask": past.triu(-self.window)}

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """One kernel for all documents. Untested: needs CUDA, and half precision, which the executor refuses so far."""
        from torch.nn.attention.varlen import varlen_attn

        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)
        longest = max(lengths)
        out = varlen_attn(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            ends,
            ends,
            longest,
            longest,
            scale=self.softmax_scale,
            window_size=(self.window, 0),  # (everything) before, nothing after: causal
            enable_gqa=query.shape[2] != key.shape[2],
        )
        assert isinstance(out, Tensor)
        return out.reshape(out.shape[0], 1, -1)
