"""What the trainer says and takes when it is built; how it trains is tested with jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from resihp import AdamW, MicroBatch, Trainer
from resihp.errors import ModelError
from resihp.executor import config_support  # noqa: F401 imports megatron-core quietly

from megatron.core.transformer import TransformerConfig  # isort: skip


class OneToken:
    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        return [MicroBatch((1,), (iteration,), lambda: (np.zeros(1, np.int64), np.zeros(1, np.int64)))]


def trainer(settings: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config = TransformerConfig(**shape, **dropouts, **(settings or {}))
    return Trainer(config, vocab_size=8, dataset=OneToken(), optimizer=AdamW(), sequence=4, **arguments)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RANK", raising=False)


def test_flags_without_meaning_are_named_by_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"persist_layer_norm": True, "batch_p2p_comm": False, "transformer_impl": "local"}
    trainer(flags)
    assert capsys.readouterr().out == "transformer config: ignored: batch_p2p_comm=False, persist_layer_norm=True\n"
    trainer({"transformer_impl": "local"})
    monkeypatch.setenv("RANK", "1")
    trainer(flags)
    assert capsys.readouterr().out == ""


def test_rotary_positions_are_part_of_what_must_be_equal_on_all_ranks() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"rotary_base": 500_000},
        {"rotary_percent": 0.5},
        {"rope_scaling": True},
        {"rope_scaling": True, "rope_scaling_factor": 32.0},
        {"seq_len_interpolation_factor": 4.0},
    ]
    assert len({trainer(**one).engine.fingerprint for one in settings}) == len(settings)
    with pytest.raises(ModelError, match="rotary_percent"):
        trainer(rotary_percent=0.0)
