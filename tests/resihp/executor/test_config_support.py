"""A configuration is either carried out or refused, never half."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from resihp.errors import ModelError
from resihp.executor.compute.stage import StageModule, model_spec
from resihp.executor.config_support import (
    FIELD_HINTS,
    HONOURED_FIELDS,
    IGNORED_FIELDS,
    ignored,
    refuse_unhonoured,
    without_ignored,
)
from resihp.executor.state.optimizer import AdamW
from resihp.executor.tensor_group import TensorGroup
from resihp.executor.trainer import Trainer
from resihp.parallelism.workload import MicroBatch

from megatron.core.transformer import TransformerConfig  # isort: skip


def config(**settings: Any) -> TransformerConfig:
    base = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**{**base, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_query_groups": 2, "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu},
        {"add_bias_linear": False, "ffn_hidden_size": 96, "init_method_std": 0.01, "layernorm_epsilon": 1e-6},
        {"add_qkv_bias": True, "bias_dropout_fusion": True, "calculate_per_token_loss": True},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9},
        {"recompute_granularity": "selective"},
        {"transformer_impl": "local"},
        {"bf16": True, "params_dtype": torch.bfloat16},
        {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
        {"qk_layernorm": True, "kv_channels": 16},
        {"window_size": (8, 0), "window_attn_skip_freq": [1, 0, 1, 1]},
    ],
)
def test_honoured_settings_pass(settings: dict[str, Any]) -> None:
    refuse_unhonoured(config(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_dropout": 0.1},
        {"attention_dropout": 0.1},
        {"tensor_model_parallel_size": 2},
        {"context_parallel_size": 2},
        {"num_moe_experts": 4, "add_bias_linear": False},
        {"mtp_num_layers": 1},
        {"sequence_parallel": True, "tensor_model_parallel_size": 2},
        {"recompute_num_layers": 0, "recompute_granularity": "full", "recompute_method": "uniform"},
        {"recompute_modules": ["mlp", "moe_act"], "recompute_granularity": "selective", "num_moe_experts": 2}
        | {"add_bias_linear": False, "moe_grouped_gemm": True},
        {"distribute_saved_activations": True},
        {"virtual_pipeline_model_parallel_size": 2},
        {"fp16": True, "params_dtype": torch.float16},
        {"bf16": True},
        {"params_dtype": torch.bfloat16},
        {"pipeline_dtype": torch.bfloat16},
        {"qk_l2_norm": True},
        {"apply_query_key_layer_scaling": True},
        {"layernorm_zero_centered_gamma": True},
        {"window_size": (8, 8)},
        {"window_size": (8,)},
        {"window_attn_skip_freq": [1, 0], "window_size": (8, 0)},
        {"window_attn_skip_freq": 0, "window_size": (8, 0)},
        {"no_rope_freq": 2},
        {"test_mode": True},
        {"perform_initialization": False},
    ],
)
def test_each_other_setting_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as error:
        refuse_unhonoured(config(**settings))
    assert next(iter(settings)) in str(error.value)


def test_megatrons_default_dropout_is_refused_with_what_to_set() -> None:
    with pytest.raises(ModelError, match=r"set hidden_dropout=0\.0.*set attention_dropout=0\.0"):
        refuse_unhonoured(TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4))


def test_what_the_layout_decides_is_refused_with_the_option_to_use() -> None:
    with pytest.raises(ModelError, match=r"tensor_model_parallel_size=2 .*\(--tp\)") as error:
        refuse_unhonoured(config(sequence_parallel=True, tensor_model_parallel_size=2))
    assert "sequence_parallel=True is not honoured; leave it False and use --sequence-parallel" in str(error.value)


def test_what_means_nothing_here_is_named_and_kept_from_megatrons_modules() -> None:
    flags = {"persist_layer_norm": True, "batch_p2p_comm": False, "deallocate_pipeline_outputs": True}
    said = config(**flags, barrier_with_L1_time=False, gradient_accumulation_fusion=True, qk_layernorm=True)
    refuse_unhonoured(said)
    assert set(ignored(said)) == {
        *(f"{name}={value}" for name, value in flags.items()),
        "barrier_with_L1_time=False",
        "gradient_accumulation_fusion=True",
    }
    assert ignored(config()) == ()
    plain = without_ignored(said)
    assert ignored(plain) == ()
    assert plain.qk_layernorm
    assert said.persist_layer_norm, "the user's own is left alone"
    # megatron's norms and linear layers assert that these are off
    StageModule(said, model_spec(said, 64, 24), ((0, 3),), True, True, TensorGroup())


GONE_IN_0_19 = {"async_tensor_model_parallel_allreduce", "moe_extended_tp"}


def test_every_field_that_is_named_exists_and_stands_in_one_list() -> None:
    named = [*HONOURED_FIELDS, *(name for names in IGNORED_FIELDS.values() for name in names), *FIELD_HINTS]
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(named) - fields in (set(), GONE_IN_0_19)
    sorted_out = [name for name in named if name not in FIELD_HINTS]
    assert len(sorted_out) == len(set(sorted_out))


def test_the_documentation_lists_what_is_honoured_and_ignored() -> None:
    table = (Path(__file__).parents[3] / "docs" / "interface.md").read_text()
    table = table.partition("### Fields of TransformerConfig")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    listed = {(cells[0].strip().split(":")[0], name) for cells in rows for name in re.findall(r"`(\w+)`", cells[1])}
    assert {name for group, name in listed if group == "honoured"} == HONOURED_FIELDS
    for reason, names in IGNORED_FIELDS.items():
        cells = next(cells for cells in rows if reason in cells[0])
        assert set(re.findall(r"`(\w+)`", cells[1])) == set(names)


def test_a_field_of_a_later_megatron_is_refused_once_it_is_set() -> None:
    @dataclasses.dataclass
    class Later(TransformerConfig):
        warp_drive: bool = False

    base = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    refuse_unhonoured(Later(**base))
    with pytest.raises(ModelError, match="warp_drive=True is not honoured; set warp_drive=False"):
        refuse_unhonoured(Later(**base, warp_drive=True))


def test_importing_the_executor_starts_no_thread_and_nothing_of_the_wrapper() -> None:
    program = (
        "import os, sys, torch; compiler = torch.compile; import resihp.executor.engine; "
        "assert torch.compile is compiler; "
        "assert not {'wrapper', 'slurm', 'db', 'sqlalchemy'} & set(sys.modules); "
        "import threading; print(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


class OneMicroBatch:
    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        tokens = np.zeros(8, dtype=np.int64)
        return [MicroBatch((8,), (iteration,), lambda: (tokens, tokens))]


@pytest.mark.parametrize(("implementation", "lines"), [("transformer_engine", 1), ("local", 0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_who_expects_transformer_engines_layers_is_told_once_which_are_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], implementation: str, lines: int, rank: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RANK", str(rank))
    Trainer(
        config(transformer_impl=implementation),
        vocab_size=64,
        dataset=OneMicroBatch(),
        optimizer=AdamW(),
        sequence=32,
    )
    told = [line for line in capsys.readouterr().out.splitlines() if "local layers are used" in line]
    assert len(told) == (lines if rank == 0 else 0)
