"""Decides for each field of megatron-core's TransformerConfig whether it is honoured, ignored or refused.

This is an allow-list: a field that a later megatron-core adds is refused by name when it is set, never silently
ignored. Ignored fields are named once in the log. `docs/interface.md` has the lists of honoured and ignored fields.
Called by the engine, by the trainer, and by stages, which hide ignored fields from megatron.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import warnings
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import torch
from megatron.core.transformer import TransformerConfig

from resihp.errors import ModelError
from resihp.executor.compute.recomputation import RECOMPUTABLE_MODULES

HONOURED_FIELDS = frozenset(
    {
        # shape
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
        # architecture, carried out by megatron's own modules
        *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "activation_func_clamp_value"),
        *("glu_linear_offset", "normalization", "layernorm_epsilon", "rotary_interleaved", "softmax_scale"),
        *("bias_activation_fusion", "bias_dropout_fusion", "deterministic_mode", "qk_layernorm"),
        # the attention window, implemented in `compute.attention`
        *("window_size", "window_attn_skip_freq"),
        # initialisation
        *("init_method", "output_layer_init_method", "embedding_init_method"),
        *("init_method_std", "embedding_init_method_std"),
        # precision: bf16 with masters, moments and gradients in float32; see `_precision` for valid combinations
        *("bf16", "params_dtype", "pipeline_dtype", "autocast_dtype"),
        # recomputation of activations, carried out by `recomputation`
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
        # always true here, regardless of their values: packed lengths vary, the loss is a mean over tokens, attention
        # and cross entropy are our own, with softmax in float32
        *("variable_seq_lengths", "calculate_per_token_loss", "attention_softmax_in_fp32", "masked_softmax_fusion"),
        *("cross_entropy_loss_fusion", "use_cpu_initialization", "clone_scatter_output_in_embedding"),
        # derived from the above when there are no experts
        "moe_ffn_hidden_size",
    }
)

IGNORED_FIELDS = {
    "a plan decides how stages exchange activations, and in which order": (
        *("overlap_p2p_comm", "overlap_p2p_comm_warmup_flush", "batch_p2p_comm", "batch_p2p_sync"),
        *("use_ring_exchange_p2p", "deallocate_pipeline_outputs", "microbatch_group_size_per_vp_stage"),
        *("wgrad_deferral_limit",),
    ),
    "collectives of tensor parallelism are our own": (
        *("tp_comm_overlap", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs"),
        *("tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs"),
        *("tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1"),
        *("tp_comm_bootstrap_backend", "async_tensor_model_parallel_allreduce"),
    ),
    "asks for another kernel of the same function": (
        *("gradient_accumulation_fusion", "persist_layer_norm", "memory_efficient_layer_norm", "apply_rope_fusion"),
        *("fused_single_qkv_rope", "use_fused_weighted_squared_relu", "cross_entropy_fusion_impl"),
        *("attention_backend", "use_te_activation_func", "disable_parameter_transpose_cache"),
    ),
    "about random numbers, timers and inference, of which there are none": (
        *("use_te_rng_tracker", "inference_rng_tracker", "inference_sampling_seed", "barrier_with_L1_time"),
        *("flash_decode", "mlp_chunks_for_prefill"),
    ),
    "options of features that are refused (experts, FP8, offloading, CUDA graphs, ...)": (
        *("moe_extended_tp", "moe_layer_freq", "moe_router_load_balancing_type", "moe_router_topk"),
        *("moe_router_topk_limited_devices", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_score_function"),
        *("moe_router_dtype", "moe_router_bias_update_rate", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("moe_grouped_gemm", "moe_token_dispatcher_type", "moe_token_drop_policy", "moe_permute_fusion"),
        *("moe_router_fusion", "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_flex_dispatcher_backend"),
        *("moe_per_layer_logging", "cp_comm_type", "mtp_loss_scaling_factor"),
        *("fp8_recipe", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad"),
        *("tp_only_amax_red", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp4_recipe"),
        *("cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights"),
        *("cpu_offloading_double_buffering", "min_offloaded_tensor_size", "qk_clip_alpha", "qk_clip_threshold"),
        *("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps"),
        *("cuda_graph_scope",),
    ),
}
"""Fields without any effect in resihp, regardless of their values, by the reason."""

FIELD_HINTS = {
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
}

Layers = Literal["local", "transformer_engine"]
"""Implementations of layers that a user may name. `transformer_impl` does not show whether the user has set it."""

_INERT: dict[str, tuple[Any, ...]] = {
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "transformer_impl": ("local", "transformer_engine"),  # megatron's default is the latter: users may not have set it
}
"""Values without effect, for fields in which megatron's default is not the only value without effect."""


def refuse_unhonoured(config: TransformerConfig) -> None:
    """Raise ModelError if a field asks for a function that resihp lacks. The message names all such fields, with
    remedies."""
    ignored_names = _ignored_names()
    refused: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(config):
        if field.name in HONOURED_FIELDS or field.name in ignored_names:
            continue
        value = getattr(config, field.name)
        allowed = _INERT.get(field.name) or (_default(field),)
        if not any(_equal(value, inert) for inert in allowed):
            refused.append((field.name, value, allowed[0]))
    refused += _precision(config)
    refused += _invalid_windows(config)
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        refused.append(("normalization", config.normalization, "LayerNorm or RMSNorm"))
    if config.recompute_granularity == "full" and config.recompute_num_layers < 1:
        refused.append(("recompute_num_layers", config.recompute_num_layers, 1))
    if config.recompute_granularity == "selective" and not set(config.recompute_modules) <= RECOMPUTABLE_MODULES:
        refused.append(("recompute_modules", config.recompute_modules, sorted(RECOMPUTABLE_MODULES)))
    if refused:
        reasons = [
            f"{name}={_short(value)} is not honoured; " + FIELD_HINTS.get(name, f"set {name}={_short(allowed)}")
            for name, value, allowed in refused
        ]
        raise ModelError("transformer config: " + "; ".join(reasons))


def _precision(config: TransformerConfig) -> list[tuple[str, Any, Any]]:
    """Return (name, value, allowed value) of a field that contradicts the other precision fields."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    if config.params_dtype != dtype:
        return [("bf16" if config.bf16 else "params_dtype", config.bf16 or config.params_dtype, dtype)]
    wrong = config.pipeline_dtype not in (None, dtype)
    return [("pipeline_dtype", config.pipeline_dtype, dtype)] if wrong else []


def refuse_layers(layers: str) -> None:
    """Raise ModelError for Transformer Engine's layers, whether or not it is installed, and for unknown names.

    megatron-core (0.16.1, extensions/transformer_engine.py) passes these layers their tensor-parallel group only if
    `torch.distributed` has a default group. resihp has none, since communicators live for one epoch: layers cut by
    tensor parallelism would omit their sums without an error.
    """
    if layers == "local":
        return
    if layers not in get_args(Layers):
        raise ModelError(f"layers={layers!r}: there are {' and '.join(map(repr, get_args(Layers)))}")
    installed = "is installed, but" if importlib.util.find_spec("transformer_engine") else "is not installed, and"
    raise ModelError(
        f"layers={layers!r}: Transformer Engine {installed} its layers cannot be used here: they take part in tensor "
        "parallelism only with torch.distributed's default group, and communicators are replaced with every plan; "
        "leave layers out, or set layers='local'"
    )


def layers_message(config: TransformerConfig) -> str:
    """Return a notice for users that may expect Transformer Engine's layers; empty if the configuration asks for local
    layers."""
    if config.transformer_impl == "local":
        return ""
    return (
        f"transformer config: transformer_impl={config.transformer_impl!r}: megatron-core's local layers are used, "
        "whether or not Transformer Engine is installed (Trainer(layers='transformer_engine') explains why); set it to "
        "'local' to silence this line"
    )


def ignored(config: TransformerConfig) -> tuple[str, ...]:
    """Return the fields that the user has set although they have no effect, as "name=value"."""
    names = _ignored_names()
    return tuple(
        f"{field.name}={_short(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if field.name in names and not _equal(getattr(config, field.name), _default(field))
    )


def without_ignored(config: TransformerConfig) -> TransformerConfig:
    """Return a copy of the configuration in which ignored fields have no effect on megatron's own modules either."""
    plain = copy.copy(config)
    names = _ignored_names()
    for field in dataclasses.fields(config):
        if field.name in names:
            setattr(plain, field.name, _default(field))
    return plain


def _ignored_names() -> frozenset[str]:
    return frozenset(name for names in IGNORED_FIELDS.values() for name in names)


def _invalid_windows(config: TransformerConfig) -> list[tuple[str, Any, Any]]:
    """Return window settings that are not causal or do not match the layers: (field, value, suggested value)."""
    window, skipped = config.window_size, config.window_attn_skip_freq
    invalid: list[tuple[str, Any, Any]] = []
    if window is not None and not (len(window) == 2 and window[0] >= -1 and window[1] == 0):
        invalid.append(("window_size", window, (max(window[0], 0), 0)))
    if isinstance(skipped, list) and len(skipped) != config.num_layers:
        invalid.append(("window_attn_skip_freq", skipped, [1] * config.num_layers))
    elif isinstance(skipped, int) and skipped < 1:
        invalid.append(("window_attn_skip_freq", skipped, None))
    return invalid


def describe(value: Any) -> Any:
    """Return a configuration value as plain text and numbers. Equal settings give equal results in every process."""
    if isinstance(value, partial):
        return [describe(value.func), describe(value.args), {k: describe(v) for k, v in value.keywords.items()}]
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


@lru_cache(maxsize=1)
def _inert_config() -> TransformerConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)


def _default(field: dataclasses.Field) -> Any:
    inert = _inert_config()
    if hasattr(inert, field.name):  # megatron derives some values from the defaults of other fields
        return getattr(inert, field.name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
