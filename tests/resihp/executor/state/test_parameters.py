"""First values of parameters: the same whoever draws them, beside whatever else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from resihp.executor.compute.stage import model_spec
from resihp.executor.state.parameters import draw
from resihp.parallelism.ownership import ParameterSpec
from tests.resihp.executor.stage_scenarios import config_of, specs_for

CONFIG = config_of("gpt")
MODEL = model_spec(CONFIG, 61, 24, vocab_multiple=32)
SPECS = specs_for(CONFIG, MODEL, "rope", False)


def without_a_generator(drawn: Tensor) -> Tensor:
    """As megatron's own method is, but nobody can tell it where random numbers come from."""
    return nn.init.normal_(drawn, mean=0.0, std=CONFIG.init_method_std)


@pytest.fixture
def one_by_one() -> list[Tensor]:
    return [draw(spec, CONFIG, 7, MODEL) for spec in SPECS]


def test_first_values_are_those_of_earlier_versions(one_by_one: list[Tensor]) -> None:
    """Whoever starts again from the same seed is to see the same curve."""
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in one_by_one))
    assert digest.hexdigest() == "29b0d840c28eaf1dc5bb8678a5f96bd6fc6dc074008056fc2113044bd59a5bf3"


@pytest.mark.parametrize("method", [CONFIG.init_method, without_a_generator, partial(without_a_generator)])
def test_values_drawn_beside_each_other_are_those_drawn_one_by_one(
    one_by_one: list[Tensor], method: Callable[[Tensor], object]
) -> None:
    config = replace(CONFIG, init_method=method)
    before = torch.random.get_rng_state()

    def drawn(spec: ParameterSpec) -> Tensor:
        return draw(spec, config, 7, MODEL)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert all(map(torch.equal, threads.map(drawn, SPECS), one_by_one))
    assert torch.equal(torch.random.get_rng_state(), before), "and the script's own random numbers are left alone"
