"""Settings of the optimizer, and the curve that every rank computes for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resihp.errors import ConfigurationError
from resihp.executor.state.optimizer import AdamW, AdamWState


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
        state.apply(0.5, 0.1)
        reference.step()
    assert all(torch.equal(mine, other) for mine, other in zip(ours.values(), theirs, strict=True))
    assert state.updates == 3
    assert torch.equal(state.tensors("b")["exp_avg"], reference.state[theirs[1]]["exp_avg"])
