"""Bytes of a rank's state, and of the activations of a micro-batch. Pure; an estimate, never a measurement.

State is exact except for the parameters that `resihp.parallelism.parameter_outline` leaves out. Activations are the
tensors that the executor's layers keep for their backward pass, without recomputation, each storage once. For each
token, in numbers of the model's precision, with q and k the widths of queries and of keys (all heads), f that of the
MLP inside, h the hidden one:

- not cut by tensor parallelism, but by sequence parallelism: 4 h, inputs and outputs of a layer's two norms;
- cut: q + 2 k, the products for queries, keys and values, all of which the values keep alive; q + k, a second copy of
  queries and keys where they are rotated or normalised; q, the output of attention; 3 f for a gated MLP, whose
  activation keeps its input alone (`resihp.executor.compute.recomputation`; megatron-core's fused one keeps the same),
  2 f for another;
- cut, of normalised queries in several groups on a rank: q, which then had to be copied;
- never cut: 4 widths of a head, sine and cosine for queries and for keys.

For a model like LLaMA 2 7B in bf16 that is 36.4 bytes a token and hidden unit, for one like GPT-2 with learned
positions 32. CPU kernels keep more: attention, as on any device in fp32, goes document by document, and keeps q once
more, put together from the documents; RMSNorm keeps 8 bytes for each input number, whatever the precision.

The loss keeps logits, which their gradient then replaces, and needs `LOSS_ELEMENTS` of them in 32 bits at once.

Not counted: attention's sums and those of norms, 4 to 8 bytes a token and head; a stage's output to the next one, h;
copies under `activation_func_clamp_value`. Attention in fp32 of grouped queries on GPUs may keep its scores, which are
not counted either. `tests/resihp/executor/test_activation_memory.py` counts saved tensors and compares.

Never says how many micro-batches are alive at once (`memory`). Called by `memory`, and where a search needs the parts.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.parameter_outline import layer_outline, outline

STATE_BYTES = {"fp32": 16, "bf16": 18}
"""Bytes of state per parameter, by precision: value, gradient and Adam's two moments in 32 bits; in bf16 also the value
in 16 bits. Mixed precision with 16-bit gradients takes 2 + 2, and 12 for the master copy and the moments, which the
replicas share under ZeRO-1 (`zero_1`)."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a number among activations, by precision."""

LOSS_ELEMENTS = 1 << 23
"""Logits that the loss works on at a time: 32 MiB in float32, which the cache of a large GPU holds."""

LOSS_BYTES = 4
"""Bytes of each of these logits, in any precision."""

INDEX_BYTES = 8
"""Bytes of a token's number, and of its position."""

RMS_NORM_BYTES = 8
"""Bytes per input number of a CPU's RMSNorm, in any precision: two copies in float32, one of them the number itself if
it is of float32."""


def zero_1(replicas: int) -> int:
    """Return the bytes of each parameter under mixed precision if replicas share the optimizer's state (ZeRO, stage
    1)."""
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
    """Return three sizes in bytes, as in `memory.capacity` and `memory.alive`: everything besides the layers, each
    layer's state, and each layer's activations of one micro-batch."""
    state, activations = bytes_of_layer(model, tp, sequence_parallel, tokens, state_bytes)
    outside = bytes_per_parameter(model, state_bytes) * outside_elements(model, first, last, tp)
    return outside + outside_activations(model, first, last, tp, sequence_parallel, tokens), state, activations


def least_bytes(model: ModelSpec, tokens: int, *, state_bytes: int | None = None) -> int:
    """Return the least bytes of all devices of a replica together: state once, and one micro-batch's activations."""
    return bytes_per_parameter(model, state_bytes) * model.parameters + model.layers * layer_activations(
        model, 1, True, tokens
    )


@lru_cache(maxsize=1024)
def bytes_of_layer(
    model: ModelSpec, tp: int, sequence_parallel: bool, tokens: int, state_bytes: int | None
) -> tuple[int, int]:
    """Return for one rank a layer's state, and its activations of one micro-batch."""
    state = bytes_per_parameter(model, state_bytes) * layer_elements(model, tp)
    return state, layer_activations(model, tp, sequence_parallel, tokens)


@lru_cache(maxsize=64)
def _outside(model: ModelSpec, first: bool, last: bool) -> tuple[ParameterSpec, ...]:
    """Return the parameters outside the layers that a first, last, or only stage holds."""
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
    """Return the bytes of state per parameter: `declared` by the caller, or those of the model's precision."""
    return STATE_BYTES[model.precision] if declared is None else declared


def _elements_per_rank(specs: tuple[ParameterSpec, ...], tp: int) -> int:
    """Return the elements of one rank of a group."""
    return sum(spec.elements if spec.axis is None else spec.elements // tp for spec in specs)


def layer_activations(model: ModelSpec, tp: int, sequence_parallel: bool, tokens: int) -> int:
    """Return the bytes that a layer keeps of one micro-batch; the module's docstring lists them."""
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
    """Return the bytes of one micro-batch outside the layers: tokens and positions of the embedding; last norm and
    loss.

    The output of the embedding is the first layer's input, which is counted there.
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
    """Return the bytes per token that a norm of the hidden state keeps with its next layer: its input and its
    output."""
    element = ELEMENT_BYTES[model.precision]
    return model.hidden * ((RMS_NORM_BYTES if _copies_in_norm(model) else element) + element)
