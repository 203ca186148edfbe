"""What the trainer says and takes when it is built; how it trains is tested with jobs."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resihp import AdamW, Evaluation, MicroBatch, Trainer
from resihp.errors import CommunicatorError, DatasetError, LayoutError, ModelError
from resihp.executor import config_support  # noqa: F401 imports megatron-core quietly
from resihp.executor import engine as engine_module
from resihp.executor.engine import Engine
from resihp.executor.group_store import TorchRendezvous
from resihp.executor.supervised.worker import SupervisedWorker
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan

import megatron.core  # isort: skip
from megatron.core.transformer import TransformerConfig, mlp  # isort: skip


class OneToken:
    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        return [MicroBatch((1,), (iteration,), lambda: (np.zeros(1, np.int64), np.zeros(1, np.int64)))]


def trainer(settings: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config = TransformerConfig(**shape, **dropouts, **(settings or {}))
    given = {"vocab_size": 8, "dataset": OneToken(), "optimizer": AdamW(), "sequence": 4}
    return Trainer(config, **{**given, **arguments})


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


@pytest.mark.parametrize("installed", [False, True])
def test_transformer_engines_layers_are_refused_by_name_installed_or_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool
) -> None:
    if installed:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match="layers='transformer_engine'") as refused:
        trainer(layers="transformer_engine")
    assert ("is installed, but" if installed else "is not installed, and") in str(refused.value)
    assert str(refused.value).endswith("set layers='local'")
    assert trainer(layers="local").engine.fingerprint == trainer().engine.fingerprint


def test_layers_that_are_none_are_refused_with_those_that_are() -> None:
    with pytest.raises(ModelError, match="layers='apex': there are 'local' and 'transformer_engine'"):
        trainer(layers="apex")


def test_megatron_still_gives_transformer_engine_no_group_without_a_default_one() -> None:
    """Why its layers are refused: once this fails, they may not have to be."""
    source = Path(megatron.core.__file__).parent.joinpath("extensions", "transformer_engine.py").read_text()
    assert "tp_group=tp_group if torch.distributed.is_initialized() else None" in source
    assert "tp_group=tp_group_for_te if torch.distributed.is_initialized() else None" in source


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


@pytest.mark.parametrize("spoilt", [slice(0, 4), slice(5, None), slice(None)])
def test_a_sum_that_is_no_number_is_an_aborts_doing_and_no_error_of_the_script(
    monkeypatch: pytest.MonkeyPatch, spoilt: slice
) -> None:
    def summed(tensors: list[torch.Tensor]) -> Any:
        tensors[0][spoilt] = float("nan")
        return SimpleNamespace(wait=lambda: True)

    engine, plan = connected("nccl-like", monkeypatch)
    monkeypatch.setattr(type(engine._communicators), "world", property(lambda _: SimpleNamespace(allreduce=summed)))
    with pytest.raises(CommunicatorError, match=r"iteration 1: per-rank data statistics are not finite"):
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


class Growing(OneToken):
    """One micro-batch in iterations 1 and 2, two in 3, three from 4 on; `wrong`: one too few in that iteration."""

    ramp = ((1, 1), (3, 2), (4, 3))

    def __init__(self, wrong: int = 0) -> None:
        self.wrong = wrong

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        count = (0, 1, 1, 2)[iteration] if iteration < 4 else 3
        return [*super().micro_batches(iteration)] * (count - (iteration == self.wrong))


def growing(wrong: int = 0, **arguments: Any) -> Trainer:
    return trainer({"transformer_impl": "local"}, dataset=Growing(wrong), **arguments)


def test_a_plan_is_for_one_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever proposes another is told so, and an iteration is never run short."""
    engine = growing().engine
    layout = Layout.uniform(tp=1, pp=1, dp=1, layers=1)
    one, two = (Plan(epoch=1, layout=layout, assignment=(tuple(range(n)),)) for n in (1, 2))
    for iteration in (1, 2):
        engine.check(one, 0, None, {}, None, iteration)
    engine.check(two, 0, None, {}, None, 3)
    with pytest.raises(LayoutError, match="plan of epoch 1: deals 1 micro-batches, iteration 3 has 2"):
        engine.check(one, 0, None, {}, None, 3)
    engine.adopt(one, 0)
    engine.connect(one, 0, TorchRendezvous(torch.distributed.HashStore()), 20.0)
    pauses = []
    for iteration in (1, 2):
        outcome = engine.run(one, iteration, Unwatched())
        engine.step(outcome)
        pauses.append(outcome.pause)
    assert pauses == [False, True], "all stop where the plan does"
    with pytest.raises(LayoutError, match="iteration 3 has 2"):
        engine.run(one, 3, Unwatched())


def test_a_script_alone_trains_through_its_ramp_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    growing(checkpoint_every=3, checkpoint_folder=tmp_path).train(5)
    losses = [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert len(losses) == 5
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["iteration-000003", "iteration-000005"]
    shutil.rmtree(tmp_path / "iteration-000005")
    growing(checkpoint_folder=tmp_path, resume=True).train(5)
    resumed = [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert resumed == losses[3:]


def test_a_data_set_that_does_not_keep_to_its_ramp_up_is_told() -> None:
    with pytest.raises(DatasetError, match="iteration 1: 0 micro-batches; the data set must give 1, as its ramp-up"):
        growing(wrong=1)
    with pytest.raises(DatasetError, match="iteration 4: 2 micro-batches; the data set must give 3, as its ramp-up"):
        growing(wrong=4).engine.workload(4)


@pytest.mark.parametrize("joins", [False, True])
def test_who_joins_has_compiled_before_anybody_waits_for_it(monkeypatch: pytest.MonkeyPatch, joins: bool) -> None:
    engine = trainer({"transformer_impl": "local"}).engine
    done: list[str] = []
    monkeypatch.setattr(engine, "warm", lambda: done.append("warm"))

    class Client(SimpleNamespace):
        def declare(self, _: Any) -> None:
            done.append("declare")
            raise InterruptedError

    def nothing(*_: Any) -> None: ...

    start = SimpleNamespace(rank=0, joins=joins)
    client = Client(start=start, attend=None, on_park=nothing, on_beat=nothing, arm=nothing, speed=lambda: 1.0)
    worker = SupervisedWorker(client, engine, None, 0, 9, Path("/checkpoints"), 0)  # type: ignore[arg-type]
    with pytest.raises(InterruptedError):
        worker.run()
    assert done == (["warm"] if joins else []) + ["declare"]


def test_a_layer_is_tried_there_and_back_with_what_gpus_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than one number of tokens, or the first real micro-batch would be compiled for again."""
    fused = {"bias_activation_fusion": True, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    engine = trainer({"transformer_impl": "local", "add_bias_linear": False, **fused}).engine
    seen: list[int] = []
    swiglu = mlp.bias_swiglu_impl

    def watched(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        tokens.register_hook(lambda gradient: seen.append(-len(gradient)))
        seen.append(len(tokens))
        return swiglu(tokens, *rest)

    monkeypatch.setattr(mlp, "bias_swiglu_impl", watched)
    monkeypatch.setattr(engine_module, "WARM_UP_TOKENS", (2, 3))
    engine.warm()
    assert seen == [], "a processor compiles nothing"
    engine._pass_through_a_layer()
    assert seen == [2, -2, 3, -3]
    assert engine.state is None


class Held(OneToken):
    """Three micro-batches, as training has them in the end."""

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        return [*super().micro_batches(iteration)] * 3


def test_what_is_evaluated_has_as_many_micro_batches_as_training_has_after_its_ramp_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    growing(evaluation=Evaluation(Held(), every=1, iterations=1)).train(5)
    told = [line for line in capsys.readouterr().out.splitlines() if "validation loss" in line]
    assert len(told) == 5
    with pytest.raises(DatasetError, match=r"evaluation's global batch 1: 1 micro-batches; .* trained on has 3"):
        growing(evaluation=Evaluation(OneToken(), every=1, iterations=1))
