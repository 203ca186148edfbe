"""Attention over packed documents: each token attends only to the past of its own document.

Replaces `core_attention` in megatron-core's layers, whose local implementation refuses packed input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from resihp.errors import ModelError
from resihp.executor.compute.staging import staged

CPU_DEVICE = torch.device("cpu")


@dataclass(kw_only=True)
class Packing(PackedSeqParams):
    """The documents of a packed micro-batch. Passed through the layers as megatron's `packed_seq_params`.

    `qkv_format` stays "sbhd": activations keep the shape [N, 1, H], and positions already restart with each document.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    """Position of each token within its document, int64 [N]."""
    bounds: Tensor
    """Starts of the documents, and the end of the last one, int32 [documents + 1]."""
    rotation: Tensor | None
    """Angles of each token, [N, 1, 1, head width]; None for learned positions."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device = CPU_DEVICE, angles: Tensor | None = None) -> Packing:
        """Describe documents of these `lengths`; `angles`, by position, are on the device, which is not waited for."""
        positions = staged(torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])), device)
        bounds = staged(torch.from_numpy(np.cumsum((0, *lengths), dtype=np.int32)), device)
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
            positions=positions,
            bounds=bounds,
            rotation=None if angles is None else angles[positions],
        )


class PackedAttention(torch.nn.Module):
    """Causal attention inside each document; its cost grows with the sum of squared lengths.

    In a layer with a window, set by `window_size` (w, 0) in the configuration, a token sees itself and the w tokens
    before it.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        narrow = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = int(config.window_size[0]) if narrow else -1
        """Number of tokens before its own that a token sees; -1 for all."""

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
        """Attend: [N, 1, heads, width] and twice [N, 1, groups, width] -> [N, 1, heads * width]."""
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            return self._varlen(query, key, value, packed_seq_params)
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
        """Return arguments of torch's attention that select the visible tokens of a document [..., length, width]."""
        length = query.shape[-2]
        if self.window < 0 or length <= self.window + 1:
            return {"is_causal": True}
        past = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        return {"attn_mask": past.triu(-self.window)}

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Use one kernel for all documents, [N, heads, width] in half precision. Written from torch's documentation;
        not run, for lack of a GPU."""
        from torch.nn.attention.varlen import varlen_attn

        query, key, value, options = causal_options(
            varlen_attn, query.squeeze(1), key.squeeze(1), value.squeeze(1), self.softmax_scale, self.window
        )
        longest = packing.max_seqlen_q
        out = varlen_attn(query, key, value, packing.bounds, packing.bounds, longest, longest, **options)
        assert isinstance(out, Tensor)
        return out.reshape(out.shape[0], 1, -1)


def causal_options(
    varlen_attn: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int = -1
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return the tensors and options with which this torch's `varlen_attn` computes causal attention with that scale,
    where a token sees itself and at most `window` tokens before it; -1: all before it.

    torch 2.10 has `is_causal`, a fixed scale, and as many groups as heads; 2.11 has `window_size` and `scale`; 2.12
    has `enable_gqa`, too. Missing options are made up for by changing the tensors [N, heads, width].

    2.11 is given fewer groups than heads unchanged: its wrapper does not check the number of heads, and passes the
    tensors to `_flash_attention_forward` and `_backward`, whose `num_heads_k` may differ from `num_heads`
    (flash_api.h). 2.12 does the same; there `enable_gqa` merely permits it. Read in torch's sources; not run on a GPU.
    """
    parameters = inspect.signature(varlen_attn).parameters
    if window >= 0 and "window_size" not in parameters:
        raise ModelError(f"transformer config: window_size on GPUs needs torch 2.11; this is {torch.__version__}")
    # `window` tokens before, none after
    options: dict[str, Any] = {"window_size": (window, 0)} if "window_size" in parameters else {"is_causal": True}
    if "scale" in parameters:
        options["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in parameters:
            options["enable_gqa"] = True
        elif "window_size" not in parameters:
            key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    return query, key, value, options
