"""megatron-core's fused functions are compiled where that pays, on GPUs, and by workers alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from resihp.executor import _imports

from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train  # isort: skip
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu, swiglu  # isort: skip


SEEDS_MEGATRON = """\
import resihp.executor.trainer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
get_cuda_rng_tracker().reset()
print(type(get_cuda_rng_tracker()).__name__)
"""
"""Begins as `model_parallel_cuda_manual_seed` does, which queries a GPU later."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What was compiled, by name, and how; a stand-in for the compiler."""
    found: list[tuple[str, dict[str, Any]]] = []

    def compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        found.append((function.__name__, options))
        return function

    monkeypatch.setattr(_imports, "_compile", compile)
    return found


def test_on_a_processor_nothing_is_compiled(compiled: list[Any]) -> None:
    halves = torch.randn(4, 6)
    expected = torch.nn.functional.silu(halves[:, :3]) * halves[:, 3:]
    assert torch.allclose(swiglu(halves), expected)
    assert bias_dropout_add_fused_train((halves, None), halves, 0.0).equal(2 * halves)
    assert compiled == []


def test_on_a_gpu_each_function_is_compiled_once(compiled: list[Any]) -> None:
    with FakeTensorMode():
        halves = torch.empty(4, 6, device="cuda")
        for _ in range(3):
            assert swiglu(halves).shape == (4, 3)
            assert bias_dropout_add_fused_train((halves, None), halves, 0.0).is_cuda
    assert [name for name, _ in compiled] == ["swiglu", "bias_dropout_add_fused_train"]


def test_one_inside_another_is_compiled_with_it(compiled: list[Any]) -> None:
    """Dynamo, without the compiler behind it."""
    whole = torch.compile(bias_swiglu.__wrapped__, backend="eager", fullgraph=True)
    halves, bias = torch.randn(4, 6), torch.randn(6)
    assert torch.equal(whole(halves, bias), bias_swiglu(halves, bias))
    assert compiled == []


def test_how_it_is_to_be_compiled_is_not_forgotten(compiled: list[Any]) -> None:
    @_imports.compiled_on_gpus(dynamic=True)
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor

    with FakeTensorMode():
        doubled(tensor=torch.empty(2, device="cuda"))
    assert compiled == [("doubled", {"dynamic": True})]


def test_users_have_the_compiler_as_it_is() -> None:
    assert torch.compile is _imports._compile


def test_a_script_with_a_loop_of_its_own_can_seed_megatrons_random_states() -> None:
    """It is forked from a process that has imported the executor."""
    done = subprocess.run([sys.executable, "-c", SEEDS_MEGATRON], capture_output=True, text=True, check=False)
    assert done.stdout == "CudaRNGStatesTracker\n", done.stderr
