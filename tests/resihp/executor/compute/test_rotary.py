"""Rotary positions: what settings mean is megatron-core's (see test_oracle.py); which of them make sense is ours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from resihp.errors import ModelError
from resihp.executor.compute.rotary import Rotary  # imports megatron-core quietly

from megatron.core.transformer import TransformerConfig  # isort: skip


def config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, **settings})


def test_each_pair_of_columns_turns_at_its_own_pace() -> None:
    angles = Rotary(rotary_base=100).angles(config(), 3)[:, 0, 0]
    pace = 100.0 ** -torch.arange(0, 8, 2).div(8)
    torch.testing.assert_close(angles, torch.outer(torch.arange(3.0), pace.repeat(2)))
    interleaved = Rotary(rotary_base=100).angles(config(rotary_interleaved=True), 3)[:, 0, 0]
    torch.testing.assert_close(interleaved, torch.outer(torch.arange(3.0), pace.repeat_interleave(2)))


def test_a_share_of_wide_heads_is_turned() -> None:
    assert Rotary(rotary_percent=0.5).angles(config(kv_channels=24), 5).shape == (5, 1, 1, 12)


def test_positions_are_interpolated() -> None:
    plain, slower = (Rotary(seq_len_interpolation_factor=factor).angles(config(), 9) for factor in (None, 4.0))
    torch.testing.assert_close(slower, plain / 4)


def test_scaling_slows_low_frequencies_alone() -> None:
    """Llama 3.1: what turns in less than 2048 tokens stays, what needs more than 8192 turns `factor` times slower."""
    wide = config(kv_channels=128)
    plain, scaled = (Rotary(rotary_base=500_000, rope_scaling=on).angles(wide, 2)[1, 0, 0, :64] for on in (False, True))
    period, ratio = 2 * math.pi / plain, plain / scaled
    assert (ratio[period < 2048] == 1).all()
    torch.testing.assert_close(ratio[period > 8192], torch.full_like(ratio[period > 8192], 8.0))
    between = ratio[(period >= 2048) & (period <= 8192)]
    assert len(between) > 3
    assert ((between > 1) & (between < 8)).all()
    assert (between.diff() > 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rotary_base": 1}, "rotary_base=1 must be above 1"),
        ({"rotary_percent": 0.0}, r"rotary_percent=0\.0 must be above 0"),
        ({"rotary_percent": 1.5}, r"rotary_percent=1\.5 must be above 0 and at most 1"),
        ({"rotary_percent": 0.4}, "turns 3 of the 8 columns of a head; it must be an even number"),
        ({"seq_len_interpolation_factor": 0.5}, "seq_len_interpolation_factor=0.5 must be at least 1"),
        ({"rope_scaling": True, "rope_scaling_factor": 0.0}, "rope_scaling_factor=0.0 must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Rotary(**settings).refuse_invalid(config())
