"""Which fields of megatron-core's TransformerConfig the executor honours; all others must keep their inert value.

An allow-list: a field that a later megatron-core adds is refused by name when it is set, never silently ignored.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from resihp.errors import ModelError
from resihp.executor.compute.recomputation import MODULES

HONOURED = frozenset(
    {
        # shape
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
        # architecture, carried out by megatron's own modules
        *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "activation_func_clamp_value"),
        *("glu_linear_offset", "normalization", "layernorm_epsilon", "rotary_interleaved", "softmax_scale"),
        *("bias_activation_fusion", "bias_dropout_fusion", "deterministic_mode"),
        # initialisation
        *("init_method", "output_layer_init_method", "embedding_init_method"),
        *("init_method_std", "embedding_init_method_std"),
        # precision: bf16 with masters, moments and gradients in float32; which combinations, see `_precision`
        *("bf16", "params_dtype", "pipeline_dtype", "autocast_dtype"),
        # recomputation of activations, carried out by `recomputation`
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
        # true of us whatever they say: packed lengths vary, the loss is a mean over tokens, attention and
        # cross entropy are our own, with softmax in float32
        *("variable_seq_lengths", "calculate_per_token_loss", "attention_softmax_in_fp32", "masked_softmax_fusion"),
        *("cross_entropy_loss_fusion", "use_cpu_initialization", "clone_scatter_output_in_embedding"),
        # derived from the above when there are no experts
        "moe_ffn_hidden_size",
    }
)

HINTS = {
    "hidden_dropout": "set hidden_dropout=0.0: recomputing an iteration after a failure must give the same numbers",
    "attention_dropout": "set attention_dropout=0.0: recomputing an iteration after a failure must give the same "
    "numbers",
    "tensor_model_parallel_size": "leave it at 1: the job's layout decides (--tp)",
    "pipeline_model_parallel_size": "leave it at 1: the job's layout decides (--pp)",
    "virtual_pipeline_model_parallel_size": "leave it unset: the job's layout decides (--virtual-stages)",
    "sequence_parallel": "leave it False and use --sequence-parallel: the job's layout decides",
    "distribute_saved_activations": "leave it unset: --sequence-parallel cuts the saved activations, too",
    "fp16": "set bf16=True and params_dtype=torch.bfloat16, which need no loss scale",
    "bf16": "set bf16=True together with params_dtype=torch.bfloat16",
    "params_dtype": "torch.float32, or torch.bfloat16 together with bf16=True",
    "kv_channels": "leave it unset: heads of hidden_size / num_attention_heads",
}

_INERT: dict[str, tuple[Any, ...]] = {
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "transformer_impl": ("local", "transformer_engine"),  # the latter is megatron's default: nobody need have asked
}
"""Fields whose inert values are not just megatron's default."""


def refuse_unhonoured(config: TransformerConfig) -> None:
    """Raise ModelError naming every field that asks for something we would not do, and what to set instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inert = TransformerConfig(num_layers=1, hidden_size=config.hidden_size, num_attention_heads=1)
    refused = []
    for field in dataclasses.fields(config):
        if field.name in HONOURED:
            continue
        value = getattr(config, field.name)
        allowed = _INERT.get(field.name) or (_default(inert, field),)
        if not any(_equal(value, other) for other in allowed):
            refused.append((field.name, value, allowed[0]))
    refused += _precision(config)
    if config.kv_channels * config.num_attention_heads != config.hidden_size:
        refused.append(("kv_channels", config.kv_channels, config.hidden_size // config.num_attention_heads))
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        refused.append(("normalization", config.normalization, "LayerNorm or RMSNorm"))
    if config.recompute_granularity == "full" and config.recompute_num_layers < 1:
        refused.append(("recompute_num_layers", config.recompute_num_layers, 1))
    if config.recompute_granularity == "selective" and not set(config.recompute_modules) <= MODULES:
        refused.append(("recompute_modules", config.recompute_modules, sorted(MODULES)))
    if refused:
        reasons = [
            f"{name}={_short(value)} is not honoured; " + HINTS.get(name, f"set {name}={_short(allowed)}")
            for name, value, allowed in refused
        ]
        raise ModelError("transformer config: " + "; ".join(reasons))


def _precision(config: TransformerConfig) -> list[tuple[str, Any, Any]]:
    """Fields that do not fit together: (name, value, what is allowed)."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    if config.params_dtype != dtype:
        return [("bf16" if config.bf16 else "params_dtype", config.bf16 or config.params_dtype, dtype)]
    wrong = config.pipeline_dtype not in (None, dtype)
    return [("pipeline_dtype", config.pipeline_dtype, dtype)] if wrong else []


def layers_told(config: TransformerConfig) -> str:
    """A line for whoever expects Transformer Engine's layers; empty where nobody can."""
    if config.transformer_impl == "local":
        return ""
    return (
        f"transformer config: transformer_impl={config.transformer_impl!r}: megatron-core's local layers are used, "
        "installed or not; 'local' says so and ends this line"
    )


def describe(value: Any) -> Any:
    """A value of a configuration as plain text and numbers, equal in every process for equal settings."""
    if isinstance(value, partial):
        return [describe(value.func), describe(value.args), {k: describe(v) for k, v in value.keywords.items()}]
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


def _default(inert: TransformerConfig, field: dataclasses.Field) -> Any:
    if hasattr(inert, field.name):  # as megatron itself derives it from defaults
        return getattr(inert, field.name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
