"""Attention over packed documents: each token attends only to earlier tokens of its own document, and to itself.

Replaces `core_attention` in megatron-core's layers, because megatron's local implementation refuses packed input. Used
by `stage`.
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
    """Describes the documents of a packed micro-batch. Passed through the layers as megatron's `packed_seq_params`.

    `qkv_format` stays "sbhd": activations keep the shape [N, 1, H], and positions already restart with each document.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    """Position of each token within its document, int64 [N]."""
    bounds: Tensor
    """Starts of all documents and the end of the last document, int32 [documents + 1]."""
    rotation: Tensor | None
    """Rotary angles of each token, [N, 1, 1, head width]; None for learned positions."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device = CPU_DEVICE, angles: Tensor | None = None) -> Packing:
        """Return the packing of documents with these `lengths`. `angles`, by position, are on the device. Does not wait
        for the device."""
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
    """Causal attention within each document. Its cost grows with the sum of squared lengths.

    If a layer has a window, set by `window_size` (w, 0) in the configuration, a token attends to itself and the w
    tokens before it.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        narrow = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = int(config.window_size[0]) if narrow else -1
        """Number of earlier tokens that a token attends to; -1 for all."""

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
        """Compute attention: query [N, 1, heads, width], key and value [N, 1, groups, width] -> [N, 1, heads *
        width]."""
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
        """Return the arguments of torch's attention that select the tokens a token of [..., length, width] attends
        to."""
        length = query.shape[-2]
        if self.window < 0 or length <= self.window + 1:
            return {"is_causal": True}
        past = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        return {"attn_mask": past.triu(-self.window)}

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """Compute all documents, [N, heads, width] in half precision, by one kernel. Written from torch's
        documentation; not run, for lack of a GPU."""
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
    """Return the tensors and options for causal attention by the `varlen_attn` of this version of torch.

    `scale` is the factor of the scores, None for the default. A token attends to itself and at most `window` earlier
    tokens; -1 means all. torch 2.10 has `is_causal`, a fixed scale, and as many groups as heads; 2.11 has `window_size`
    and `scale`; 2.12 has `enable_gqa` as well. Where an option is missing, the tensors [N, heads, width] are changed
    instead.

    With 2.11, fewer groups than heads need no change: its wrapper does not check the number of heads, and passes the
    tensors to `_flash_attention_forward` and `_backward`, which allow `num_heads_k` to differ from `num_heads`
    (flash_api.h). 2.12 does the same; there `enable_gqa` merely permits it. Read in torch's sources; not run on a GPU.
    """
    parameters = inspect.signature(varlen_attn).parameters
    if window >= 0 and "window_size" not in parameters:
        raise ModelError(f"transformer config: window_size on GPUs needs torch 2.11; this is {torch.__version__}")
    # `window` earlier tokens, no later ones
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
