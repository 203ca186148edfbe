"""Known models and hardware, and their `Profile`, computed without measurements.

`resihp plan` and `resihp simulate` have no job to measure. The time of a layer is computed from its floating-point
operations, the time of a transfer from its bytes. These times are estimates: measurements of a running job are better,
and replace them. Pure except for reading the given TOML files.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from resihp.errors import ConfigurationError
from resihp.parallelism.model import ModelSpec
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.cost.tensor_bytes import ELEMENT_BYTES

ACTIVATION_BYTES = 2
"""Bytes of a number that stages exchange: 16 bits."""
GRADIENT_BYTES = 2
"""Bytes of a number that replicas sum: 16 bits. Megatron-LM's sums in 32 bits take twice as long."""
STEP_BYTES = 28
"""Bytes read and written per parameter in Adam's step. Read: gradient (2), master copy and moments (12). Written:
master copy and moments (12), weight (2)."""
BACKWARD_OF_ATTENTION = 2.5
"""Time of attention's backward pass relative to its forward pass: five matrix products instead of two, because scores
are recomputed (Dao, "FlashAttention-2", 2023, section 4)."""
LOSS_PASSES = 4
"""Passes of a cross-entropy over its 32-bit logits in the forward pass (write, maximum, sum, pick). The backward pass
has two."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """A device, its memory, and its bandwidth within the node and to other nodes. Rates are achieved rates, not peak
    rates.

    `flops`: operations per second in bf16 in the matrix products of a whole training iteration, without bubbles and
    with tensor-parallel collectives. `memory_bytes_per_s`: bandwidth of the device's own memory. `inside_bytes_per_s`:
    bandwidth in one direction, per device, to devices of its node. `between_bytes_per_s`: the same to devices of other
    nodes.
    """

    flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    inside_bytes_per_s: float
    between_bytes_per_s: float


KNOWN_HARDWARE: Mapping[str, Hardware] = {
    "a100": Hardware(
        flops=172e12,
        memory_bytes=80_000_000_000,
        memory_bytes_per_s=1.5e12,
        inside_bytes_per_s=235e9,
        between_bytes_per_s=20e9,
    ),
    "h100": Hardware(
        flops=445e12,
        memory_bytes=80_000_000_000,
        memory_bytes_per_s=2.5e12,
        inside_bytes_per_s=360e9,
        between_bytes_per_s=40e9,
    ),
}
"""NVIDIA's specification sheets, times the share that is usually achieved.

- A100 SXM 80 GB: 312 TFLOP/s of dense bf16, of which 55 % (54.2 % for 530 billion parameters on 2240 of them,
  Korthikanti et al., "Reducing Activation Recomputation", 2022); 2.04 TB/s of memory; NVLink 600 GB/s both ways
  together; DGX A100: a 200 Gb/s adapter for each device.
- H100 SXM: 989 TFLOP/s, of which 45 % (Megatron-LM's README reports 41 to 48 %); 3.35 TB/s; NVLink 900 GB/s; DGX H100:
  a 400 Gb/s adapter for each device.
- Memory at 75 %, NVLink at 78 to 80 % of one way, the network at 80 % of its line rate: assumptions."""

_LLAMA: dict[str, Any] = {"vocab": 32_000, "gated": True, "vocab_multiple": 128, "precision": "bf16"}
_QWEN: dict[str, Any] = {"vocab": 152_064, "gated": True, "vocab_multiple": 128, "precision": "bf16"}

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    name: {**common, **dict(zip(("layers", "hidden", "heads", "kv_groups", "ffn_hidden"), shape, strict=True))}
    for name, shape, common in (
        ("llama2-7b", (32, 4096, 32, 32, 11_008), _LLAMA),
        ("llama2-13b", (40, 5120, 40, 40, 13_824), _LLAMA),
        ("llama2-30b", (60, 6656, 52, 52, 17_920), _LLAMA),
        ("llama2-70b", (80, 8192, 64, 8, 28_672), _LLAMA),
        ("qwen2.5-7b", (28, 3584, 28, 4, 18_944), _QWEN),
        ("qwen2.5-14b", (48, 5120, 40, 8, 13_824), _QWEN),
        ("qwen2.5-32b", (64, 5120, 40, 8, 27_648), _QWEN),
        ("qwen2.5-72b", (80, 8192, 64, 8, 29_568), _QWEN),
        ("llama3-405b", (126, 16_384, 128, 8, 53_248), {**_LLAMA, "vocab": 128_256}),
    )
}
"""Models as published by their authors (config.json of each model). LLaMA 2 has no 30B model: `llama2-30b` is LLaMA
1's."""

_MODEL_KEYS = ("layers", "hidden", "heads", "ffn_hidden", "vocab")
_MODEL_OPTIONS = ("kv_groups", "gated", "tied_embeddings", "vocab_multiple", "kv_channels", "qk_layernorm", "precision")


def model(name: str, sequence_length: int) -> ModelSpec:
    """Return a known model by its name, or the model that a TOML file describes. Raises ConfigurationError.

    The file has the keys `layers`, `hidden`, `heads`, `ffn_hidden` and `vocab`, and may have `kv_groups`, `gated`,
    `tied_embeddings`, `vocab_multiple`, `kv_channels`, `qk_layernorm` and `precision` (see `ModelSpec`).
    """
    if name in KNOWN_MODELS:
        return ModelSpec(sequence=sequence_length, **KNOWN_MODELS[name])
    content = _read(
        name, "model", KNOWN_MODELS, "layers = 40\nhidden = 5120\nheads = 40\nffn_hidden = 13824\nvocab = 32000"
    )
    _check_keys(name, content, _MODEL_KEYS, _MODEL_OPTIONS)
    for key in content:
        value = content[key]
        if key in ("gated", "tied_embeddings", "qk_layernorm"):
            if not isinstance(value, bool):
                raise ConfigurationError(f"{name}: {key} is true or false, got {value!r}")
        elif key == "precision":
            if value not in ELEMENT_BYTES:
                raise ConfigurationError(f"{name}: precision is {' or '.join(map(repr, ELEMENT_BYTES))}, got {value!r}")
        elif type(value) is not int or value < 1:
            raise ConfigurationError(f"{name}: {key} is a whole number of at least 1, got {value!r}")
    spec = ModelSpec(sequence=sequence_length, **{"kv_groups": content["heads"], **content})
    for total, part in (("hidden", "heads"), ("heads", "kv_groups")):
        if total == "hidden" and spec.kv_channels:
            continue
        if getattr(spec, total) % getattr(spec, part):
            raise ConfigurationError(
                f"{name}: {total} {getattr(spec, total)} cannot be divided by {part} {getattr(spec, part)}"
            )
    return spec


def hardware(name: str) -> Hardware:
    """Return known hardware by its name, or the hardware that a TOML file with the keys of `Hardware` describes.

    Raises ConfigurationError.
    """
    if name in KNOWN_HARDWARE:
        return KNOWN_HARDWARE[name]
    keys = Hardware.__struct_fields__
    content = _read(
        name, "hardware", KNOWN_HARDWARE, "\n".join(f"{k} = {getattr(KNOWN_HARDWARE['a100'], k):g}" for k in keys)
    )
    _check_keys(name, content, keys)
    for key, value in content.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise ConfigurationError(f"{name}: {key} is a number above 0, got {value!r}")
    return msgspec.convert({**content, "memory_bytes": int(content["memory_bytes"])}, Hardware)


def profile(
    model: ModelSpec,
    hardware: Hardware,
    *,
    sequence_length: int,
    micro_batch_size: int = 1,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    gradients_inside: bool = False,
) -> Profile:
    """Return the times of one micro-batch of `micro_batch_size` sequences, each a document of `sequence_length` tokens.

    The forward pass of a layer takes 2 operations per weight and token, and 2 s h per token for causal attention (half
    of the 4 s h of its two products). The gradients of inputs and of weights each take as many operations as the
    forward pass. Attention is the exception: it has no weights, and the gradients of its inputs take
    `BACKWARD_OF_ATTENTION` times its forward pass. The head takes 2 operations per weight and token, and its loss makes
    passes over memory; the embedding only makes passes over memory.

    `tp`, `pp` and `dp` are the degrees of the layout. A stage sends each of its activations once, a `tp`-th from each
    rank, and the receiving group gathers them within its node. Replicas sum gradients in a ring: 2 (dp - 1) / dp of
    their bytes pass each device, over the network unless `gradients_inside` (all replicas are on one node). The
    optimizer's step passes once over a device's parameters. Nothing overlaps with computation.
    """
    tokens = sequence_length * micro_batch_size
    linear_s = 2.0 * model.parameters_per_layer * tokens / hardware.flops
    attention_s = 2.0 * sequence_length * model.heads * model.head_width * tokens / hardware.flops
    layer = Times(linear_s + attention_s, linear_s + BACKWARD_OF_ATTENTION * attention_s, linear_s)
    row_s = tokens * model.hidden * ACTIVATION_BYTES / hardware.memory_bytes_per_s
    head_s = 2.0 * model.hidden * model.vocab_rows * tokens / hardware.flops
    logits_s = 4.0 * tokens * model.vocab_rows / hardware.memory_bytes_per_s
    activation_bytes = tokens * model.hidden * ACTIVATION_BYTES
    gather_s = activation_bytes * (tp - 1) / tp / hardware.inside_bytes_per_s
    gradient_bytes = model.parameters_per_layer * GRADIENT_BYTES * 2 * (dp - 1) / dp
    return Profile(
        layers=(layer,) * model.layers,
        embedding=Times(2 * row_s, 0.0, 3 * row_s),
        head=Times(head_s + LOSS_PASSES * logits_s, head_s + 2 * logits_s, head_s),
        transfer_s=activation_bytes / tp / hardware.between_bytes_per_s + gather_s,
        inside_s=activation_bytes / tp / hardware.inside_bytes_per_s + gather_s,
        gradient_s=gradient_bytes / (hardware.inside_bytes_per_s if gradients_inside else hardware.between_bytes_per_s),
        step_s=model.parameters / (tp * pp) * STEP_BYTES / hardware.memory_bytes_per_s,
    )


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return a hint for an unknown word: `did you mean llama2-13b?`, or the list of all valid words."""
    words = list(valid)
    matches = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {matches[0]}?" if matches else f"valid: {', '.join(words)}"


def _read(name: str, kind: str, valid_names: Mapping[str, object], example: str) -> dict[str, Any]:
    if not name.endswith(".toml"):
        raise ConfigurationError(
            f"{kind} {name}: not known; {nearest(name, valid_names)} A file's name ends with .toml"
        )
    try:
        return tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(f"{kind} {name}: cannot be read: {reason}; a file has, say:\n{example}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{kind} {name}: not TOML: {error}; a file has, say:\n{example}") from None


def _check_keys(name: str, content: Mapping[str, Any], needed: Collection[str], more: Collection[str] = ()) -> None:
    for key in content:
        if key not in needed and key not in more:
            raise ConfigurationError(f"{name}: unknown key {key}; {nearest(key, (*needed, *more))}")
    lacking = [key for key in needed if key not in content]
    if lacking:
        raise ConfigurationError(f"{name}: {', '.join(lacking)} missing; needed are {', '.join(needed)}")
