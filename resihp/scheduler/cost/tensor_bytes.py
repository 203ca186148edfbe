"""Bytes of a rank's state, and of the activations of a micro-batch. Pure; an estimate, never a measurement.

State is exact, except for the parameters that `resihp.parallelism.parameter_outline` leaves out. Activations are the
tensors that the executor's layers keep for their backward pass, without recomputation; each storage counts once. In the
list, q and k are the total widths of queries and of keys, f is the inner width of the MLP, and h the hidden width. A
layer keeps for each token, in numbers of the model's precision:

- not cut by tensor parallelism, only by sequence parallelism: 4 h, the inputs and outputs of the layer's two norms;
- cut by tensor parallelism: q + 2 k, the products for queries, keys and values, which the values keep alive as a whole;
- cut: q + k, a second copy of queries and keys, if they are rotated or normalised;
- cut: q, a copy of normalised queries, if a rank has several groups of them;
- cut: q, the output of attention;
- cut: 3 f for a gated MLP, because its activation keeps only its input (`resihp.executor.compute.recomputation`;
  megatron-core's fused one keeps the same), or 2 f for another MLP;
- never cut: 4 widths of a head, sine and cosine for queries and for keys.

For a model like LLaMA 2 7B in bf16, the sum is 36.4 bytes per token and hidden unit; for a model like GPT-2, with
learned positions, 32. CPU kernels keep more. Attention on CPUs, and on any device in fp32, proceeds document by
document and keeps q once more, joined from the documents. RMSNorm on CPUs keeps 8 bytes for each input number, in any
precision.

The loss keeps the logits, which their gradient then replaces, and needs `LOSS_ELEMENTS` of them in 32 bits at once.

Not counted: the sums that attention and norms keep, 4 to 8 bytes per token and head; a stage's output to the next
stage, h; copies under `activation_func_clamp_value`; the scores that attention in fp32 with grouped queries may keep on
GPUs. `tests/resihp/executor/test_activation_memory.py` counts the saved tensors and compares.

The module never determines how many micro-batches are alive at once (`memory`). Called by `memory`, and by searches
that need the parts.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.parameter_outline import layer_outline, outline

STATE_BYTES = {"fp32": 16, "bf16": 18}
"""Bytes of state per parameter, by precision. Value, gradient and Adam's two moments take 32 bits each; in bf16 the
value also exists in 16 bits. Mixed precision with 16-bit gradients takes 2 + 2 bytes, and 12 for the master copy and
the moments, which replicas share under ZeRO-1 (`zero_1`)."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of one number of an activation, by precision."""

LOSS_ELEMENTS = 1 << 23
"""Logits that the loss processes at a time: 32 MiB in float32, which fits the cache of a large GPU."""

LOSS_BYTES = 4
"""Bytes of each logit that the loss processes, in any precision."""

INDEX_BYTES = 8
"""Bytes of a token's index, and of its position."""

RMS_NORM_BYTES = 8
"""Bytes per input number of RMSNorm on a CPU, in any precision: two copies in float32. In fp32, one copy is the input
itself."""


def zero_1(replicas: int) -> int:
    """Return the bytes of state per parameter under mixed precision if `replicas` replicas share the optimizer's state
    (ZeRO, stage 1)."""
    return 4 + -(-12 // max(1, replicas))


def stage_bytes(
    model: ModelSpec,
    tp: int,
    tokens: int,
    *,
    first: bool,
    last: bool,
    sequence_parallel: bool = False,
    state_bytes: int | None = None,
) -> tuple[int, int, int]:
    """Return three sizes in bytes: everything outside the layers, each layer's state, and each layer's activations of
    one micro-batch.

    The sizes are those of `memory.capacity` and `memory.alive`. `first`, `last`: whether the stage has the embedding,
    the head.
    """
    state, activations = bytes_of_layer(model, tp, sequence_parallel, tokens, state_bytes)
    outside = bytes_per_parameter(model, state_bytes) * outside_elements(model, first, last, tp)
    return outside + outside_activations(model, first, last, tp, sequence_parallel, tokens), state, activations


def least_bytes(model: ModelSpec, tokens: int, *, state_bytes: int | None = None) -> int:
    """Return the least bytes of all devices of a replica together: state once, plus one micro-batch's activations."""
    return bytes_per_parameter(model, state_bytes) * model.parameters + model.layers * layer_activations(
        model, 1, True, tokens
    )


@lru_cache(maxsize=1024)
def bytes_of_layer(
    model: ModelSpec, tp: int, sequence_parallel: bool, tokens: int, state_bytes: int | None
) -> tuple[int, int]:
    """Return, for one rank, the bytes of a layer's state and of its activations of one micro-batch."""
    state = bytes_per_parameter(model, state_bytes) * layer_elements(model, tp)
    return state, layer_activations(model, tp, sequence_parallel, tokens)


@lru_cache(maxsize=64)
def _outside(model: ModelSpec, first: bool, last: bool) -> tuple[ParameterSpec, ...]:
    """Return the parameters outside the layers that a stage holds if it is the first, the last, or both."""
    units = {"embedding"} if first else set()
    units |= {"final", "head"} if last else set()
    bare = msgspec.structs.replace(model, layers=0)
    return tuple(spec for spec in outline(bare) if units.intersection(spec.units))


@lru_cache(maxsize=512)
def outside_elements(model: ModelSpec, first: bool, last: bool, tp: int) -> int:
    return _elements_per_rank(_outside(model, first, last), tp)


@lru_cache(maxsize=512)
def layer_elements(model: ModelSpec, tp: int) -> int:
    return _elements_per_rank(layer_outline(model, 0), tp)


def bytes_per_parameter(model: ModelSpec, declared: int | None) -> int:
    """Return the bytes of state per parameter: `declared` unless it is None, else those of the model's precision."""
    return STATE_BYTES[model.precision] if declared is None else declared


def _elements_per_rank(specs: tuple[ParameterSpec, ...], tp: int) -> int:
    """Return the elements that one rank of a group of `tp` holds."""
    return sum(spec.elements if spec.axis is None else spec.elements // tp for spec in specs)


def layer_activations(model: ModelSpec, tp: int, sequence_parallel: bool, tokens: int) -> int:
    """Return the bytes that a layer keeps of one micro-batch, on one rank. The module's docstring lists the parts."""
    element, computation = ELEMENT_BYTES[model.precision], model.computation
    query, key = (count * model.head_width for count in (model.heads, model.kv_groups))
    copied = query if model.heads != model.kv_groups and model.kv_groups > tp else 0
    cut = element * (2 * query + 2 * key)  # the products, and the output of attention
    cut += element * (3 if model.gated else 2) * model.ffn_hidden
    if computation.rotary or model.qk_layernorm:
        cut += element * (query + key)
    else:
        cut += element * copied
    if model.qk_layernorm:
        if not _copies_in_norm(model):
            cut += element * copied
        elif model.precision == "fp32":
            cut += element * copied + (RMS_NORM_BYTES - element) * (query + key)
        else:
            cut += RMS_NORM_BYTES * (query + key)
    if computation.device == "cpu" or model.precision == "fp32":
        cut += element * query
    whole = 2 * _norm_bytes(model)
    never_cut = 4 * element * model.head_width if computation.rotary else 0
    per_token = (whole + cut) / tp if sequence_parallel else whole + cut / tp
    return int(tokens * (per_token + never_cut))


def outside_activations(
    model: ModelSpec, first: bool, last: bool, tp: int, sequence_parallel: bool, tokens: int
) -> int:
    """Return the bytes of one micro-batch outside the layers, on one rank.

    On the first stage: tokens and positions. On the last stage: last norm and loss. The output of the embedding counts
    as the input of the first layer.
    """
    total = tokens * 2 * INDEX_BYTES if first else 0
    if last:
        norm = _norm_bytes(model) / tp if sequence_parallel else _norm_bytes(model)
        logits = tokens * model.vocab_rows // tp
        total += int(tokens * norm) + ELEMENT_BYTES[model.precision] * logits + LOSS_BYTES * min(logits, LOSS_ELEMENTS)
    return total


def _copies_in_norm(model: ModelSpec) -> bool:
    return model.computation.device == "cpu" and model.computation.normalization == "RMSNorm"


def _norm_bytes(model: ModelSpec) -> int:
    """Return the bytes per token that a norm of the hidden state and the layer after it keep: the norm's input and
    output."""
    element = ELEMENT_BYTES[model.precision]
    return model.hidden * ((RMS_NORM_BYTES if _copies_in_norm(model) else element) + element)
