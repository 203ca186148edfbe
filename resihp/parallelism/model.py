"""A model's size and the degrees that divide its tensors, as the planner needs them. No torch here."""

from __future__ import annotations

from typing import Literal

import msgspec


class Computation(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the computation, besides the shape, that decide which activations a pass keeps.

    They change neither parameters nor state.
    """

    device: Literal["cpu", "cuda"] = "cuda"
    """Kind of device that computes. Some CPU kernels keep more activations than their CUDA counterparts."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    rotary: bool = True
    """Whether queries and keys are rotated by their positions (RoPE). If not, learned positions are added to the
    embeddings."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only transformer, as declared by the training script when it starts.

    All counts are for the whole model. `kv_groups` is the number of key/value heads (equal to `heads` without grouped
    queries). `kv_channels` is the width of a head if it differs from `hidden / heads`. With `qk_layernorm`, queries and
    keys are normalised. `ffn_hidden` is the width of the MLP's inner layer; `gated` marks a gated MLP (SwiGLU). The
    rows of embedding and head are padded to a multiple of `vocab_multiple`, so that tensor parallelism can cut them;
    the padding never takes part in the loss. `precision` is the precision of parameters and activations in the passes;
    the values that the optimizer updates, and all state that is moved or stored, are always float32. `computation`
    matters only for memory.
    """

    layers: int
    hidden: int
    heads: int
    kv_groups: int
    ffn_hidden: int
    vocab: int
    sequence: int
    gated: bool = False
    tied_embeddings: bool = False
    vocab_multiple: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    kv_channels: int | None = None
    qk_layernorm: bool = False
    computation: Computation = Computation()

    @property
    def head_width(self) -> int:
        """Width of one query, key or value."""
        return self.kv_channels or self.hidden // self.heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head, padding included."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def parameters_per_layer(self) -> int:
        """Weights of one transformer layer, without biases and norms, which are below 0.1 % of the weights."""
        attention = 2 * self.hidden * (self.heads + self.kv_groups) * self.head_width
        mlp = self.hidden * self.ffn_hidden * (3 if self.gated else 2)
        return attention + mlp

    @property
    def parameters(self) -> int:
        """Weights of the whole model, embedding and head included."""
        return self.layers * self.parameters_per_layer + self.vocab_rows * self.hidden * (
            1 if self.tied_embeddings else 2
        )

    def tensor_parallel_obstacle(self, degree: int) -> str | None:
        """Return why this model cannot be split for tensor-parallel degree `degree`, or None if it can."""
        for name, count in (
            ("attention heads", self.heads),
            ("query groups", self.kv_groups),
            ("vocabulary rows", self.vocab_rows),
            ("MLP width", self.ffn_hidden),
        ):
            if count % degree:
                return f"{count} {name} cannot be divided by tensor-parallel degree {degree}"
        return None
