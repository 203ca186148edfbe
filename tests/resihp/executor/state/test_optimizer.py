"""Settings of the optimizer, and the curve that every rank computes for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resihp.errors import ConfigurationError
from resihp.executor.state.optimizer import AdamW, AdamWState

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip


def test_learning_rate_warms_up_then_falls_to_the_minimum_and_stays() -> None:
    for decay, middle in (("cosine", 0.55), ("linear", 0.55)):
        settings = AdamW(lr=1.0, warmup=10, decay_iterations=110, min_lr=0.1, decay=decay)
        assert settings.learning_rate(1) == pytest.approx(0.1)
        assert settings.learning_rate(10) == pytest.approx(1.0)
        assert settings.learning_rate(60) == pytest.approx(middle)
        assert settings.learning_rate(110) == pytest.approx(0.1)
        assert settings.learning_rate(1000) == pytest.approx(0.1)
    assert AdamW(lr=1.0, warmup=10, decay_iterations=110).learning_rate(35) == pytest.approx(0.5 + 0.5 * 0.5**0.5)
    assert AdamW(lr=1.0).learning_rate(10**6) == 1.0


CURVES: list[dict[str, Any]] = [
    {"warmup": 10, "decay_iterations": 60},
    {"warmup": 0, "decay_iterations": 60, "decay": "linear", "min_lr": 0.05},
    {"warmup": 7, "decay": "constant", "decay_iterations": 60},
    {"warmup": 7, "decay": "inverse-square-root", "decay_iterations": 60, "min_lr": 0.4},
    {"warmup": 0, "decay": "inverse-square-root", "decay_iterations": 60},
    *(
        {"warmup": 5, "decay": "WSD", "decay_iterations": 60, "wsd_decay_iterations": 20, "min_lr": 0.05}
        | {"wsd_decay": style}
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    ),
    {"decay": "WSD", "decay_iterations": 60, "wsd_decay_iterations": 60, "wsd_decay": "linear"},
    *(
        {"weight_decay": 0.3, "start_weight_decay": 0.01, "weight_decay_iterations": 40}
        | {"weight_decay_increase": style, "decay_iterations": 50}
        for style in ("linear", "cosine")
    ),
]


@pytest.mark.parametrize("settings", CURVES)
def test_learning_rate_and_weight_decay_are_megatrons(settings: dict[str, Any]) -> None:
    """Its scheduler counts steps from 0; after n of them it gives what our iteration n has."""
    ours = AdamW(lr=1.5, **settings)
    group: dict[str, Any] = {}
    rises = ours.start_weight_decay is not None
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=ours.warmup,
        lr_decay_steps=ours.decay_iterations,
        lr_decay_style=ours.decay,
        start_wd=ours.start_weight_decay if rises else ours.weight_decay,
        end_wd=ours.weight_decay,
        wd_incr_steps=ours.weight_decay_iterations if rises else 0,
        wd_incr_style=ours.weight_decay_increase if rises else "constant",
        wsd_decay_steps=ours.wsd_decay_iterations,
        lr_wsd_decay_style=ours.wsd_decay,
    )
    for iteration in range(1, 70):
        theirs.step(1)
        assert ours.learning_rate(iteration) == pytest.approx(group["lr"], rel=1e-12, abs=1e-15)
        assert ours.weight_decay_of(iteration) == pytest.approx(group["weight_decay"], rel=1e-12)


def test_a_learning_rate_that_never_has_to_end() -> None:
    assert AdamW(lr=1.0, warmup=4, decay="inverse-square-root").learning_rate(400) == pytest.approx(0.1)


def test_weight_decay_is_that_of_the_iteration() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    state = AdamWState(AdamW(weight_decay=0.5), {"w": parameter})
    parameter.grad = torch.zeros(2, 2)
    for weight_decay in (0.0, 0.5):
        state.apply(1.0, 0.1, weight_decay)
    assert torch.equal(parameter, torch.full((2, 2), 1 - 0.1 * 0.5))


def test_clip_coefficient() -> None:
    assert AdamW(clip=1.0).clip_coefficient(4.0) == pytest.approx(0.25)
    assert AdamW(clip=1.0).clip_coefficient(0.5) == 1.0
    assert AdamW(clip=0.0).clip_coefficient(100.0) == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.0},
        {"betas": (0.9, 1.0)},
        {"min_lr": 1.0},
        {"warmup": 5, "decay_iterations": 5},
        {"decay": "exponential"},
        {"decay": "WSD", "decay_iterations": 10, "wsd_decay": "sqrt"},
        {"decay": "WSD", "decay_iterations": 10, "warmup": 5, "wsd_decay_iterations": 6},
        {"decay": "WSD", "wsd_decay_iterations": 1},
        {"start_weight_decay": 0.0, "weight_decay_iterations": 0},
        {"weight_decay": 0.1, "weight_decay_iterations": 9, "start_weight_decay": 0.2},
        {"start_weight_decay": 0.0, "weight_decay_iterations": 9, "weight_decay_increase": "constant"},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=list(settings)[-1]):
        AdamW(**settings)


def test_state_equals_torchs_adamw_and_norms_do_not_decay() -> None:
    settings = AdamW(lr=0.1, weight_decay=0.5)
    ours = {"w": torch.nn.Parameter(torch.ones(2, 2)), "b": torch.nn.Parameter(torch.ones(2))}
    theirs = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))]
    state = AdamWState(settings, ours)
    reference = torch.optim.AdamW(
        [{"params": theirs[:1]}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=0.1,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=0.5,
        fused=True,
    )
    for _ in range(3):
        for mine, other in zip(ours.values(), theirs, strict=True):
            mine.grad, other.grad = torch.full_like(mine, 4.0), torch.full_like(other, 2.0)
        state.apply(0.5, 0.1, 0.5)
        reference.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours.values(), theirs, strict=True))
    assert state.updates == 3
    assert torch.equal(state.tensors("b")["exp_avg"], reference.state[theirs[1]]["exp_avg"])
