"""What the trainer says and takes when it is built; how it trains is tested with jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resihp import AdamW, Evaluation, MicroBatch, Trainer
from resihp.errors import CommunicatorError, DatasetError, ModelError
from resihp.executor import config_support  # noqa: F401 imports megatron-core quietly
from resihp.executor import engine as engine_module
from resihp.executor.engine import Engine
from resihp.executor.group_store import TorchRendezvous
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan

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


def test_a_trainer_without_an_agent_tells_the_validation_loss(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(evaluation=Evaluation(OneToken(), every=2, iterations=1)).train(3)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [line.split("|")[0].strip() for line in told if "validation loss" in line] == [
        "iteration 2/3",
        "iteration 3/3",
    ]
    assert len(told) == 5


def test_when_and_on_what_is_evaluated_must_be_equal_on_all_ranks() -> None:
    settings = [None, *(Evaluation(OneToken(), every=n, iterations=m) for n, m in ((2, 1), (3, 1), (2, 2)))]
    assert len({trainer(evaluation=one).engine.fingerprint for one in settings}) == len(settings)


class Unwatched:
    def enter(self, phase: str) -> None: ...
    def progressed(self) -> None: ...
    def communicating(self, waits: bool) -> None: ...


def connected(back_end: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Plan]:
    monkeypatch.setenv("RESIHP_BACKEND", back_end)
    engine = trainer({"transformer_impl": "local"}).engine
    plan = Plan(epoch=1, layout=Layout.uniform(tp=1, pp=1, dp=1, layers=1), assignment=((0,),))
    engine.adopt(plan, 0)
    engine.connect(plan, 0, TorchRendezvous(torch.distributed.HashStore()), 20.0)
    return engine, plan


def test_sums_that_do_not_fit_are_an_aborts_doing_until_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is aborted feeds its peers' kernels with anything, before these are woken themselves."""

    def differ(*_: Any, **__: Any) -> None:
        raise DatasetError("ranks computed 7 tokens, this rank's data set has 8")

    monkeypatch.setattr(engine_module, "last_synchronisation", differ)
    engine, plan = connected("nccl-like", monkeypatch)
    with pytest.raises(CommunicatorError, match="iteration 1: ranks computed 7 tokens"):
        engine.run(plan, 1, Unwatched())
    with pytest.raises(DatasetError):
        engine.run(plan, 1, Unwatched())
    engine, plan = connected("gloo", monkeypatch)  # whose sums fail, or are right
    with pytest.raises(DatasetError):
        engine.run(plan, 1, Unwatched())


def test_who_was_woken_before_the_last_sum_contributes_nothing_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plan = connected("nccl-like", monkeypatch)
    communicators = engine._communicators
    assert communicators is not None
    begun: list[Any] = []
    monkeypatch.setattr(type(communicators), "world", property(lambda _: SimpleNamespace(allreduce=begun.append)))
    monkeypatch.setattr(communicators._back_end, "settle", lambda: setattr(communicators, "_woken", True))
    with pytest.raises(CommunicatorError, match="woken"):
        engine.run(plan, 1, Unwatched())
    assert begun == []


def test_a_rank_with_another_back_end_does_not_pass_for_one_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose GPUs are gone: with gloo it would wait for peers that come with NCCL."""
    found = {}
    for name in ("gloo", "nccl-like", "gloo"):
        monkeypatch.setenv("RESIHP_BACKEND", name)
        fingerprint = trainer({"transformer_impl": "local"}).engine.fingerprint
        assert found.setdefault(name, fingerprint) == fingerprint
    assert len(set(found.values())) == 2
