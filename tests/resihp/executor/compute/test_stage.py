"""A stage computes what the serial model computes, however it is cut, split or recomputed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from resihp.errors import CommunicatorError
from resihp.executor.compute.attention import PackedAttention
from resihp.executor.compute.recomputation import spans
from resihp.executor.compute.stage import IGNORED_LABEL, StageModule, model_spec
from resihp.executor.state.parameters import draw
from resihp.executor.tensor_group import TensorGroup
from tests.resihp.executor.stage_scenarios import (
    LAYERS,
    RECOMPUTED,
    Case,
    batch,
    config_of,
    iterate,
    specs_for,
    stages_of,
    unfinished,
    with_main_gradients,
)

from megatron.core.transformer import TransformerConfig  # isort: skip

Ranks = Callable[..., list[Any]]
KINDS = ("gpt", "llama")
INSIDE_ATTENTION = ("qwen", "qwen3", "normed")
"""Kinds that differ from the others inside attention alone."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"split": True},
    "sequence": {"sequence_parallel": True},
    "uniform": {"recompute": "uniform"},
    "block": {"recompute": "block"},
    "core_attn": {"recompute": "core_attn"},
    "mlp": {"recompute": "mlp"},
    "layernorm": {"recompute": "layernorm"},
    "split sequence layernorm": {"split": True, "sequence_parallel": True, "recompute": "layernorm"},
    "split sequence layernorm mlp": {"split": True, "sequence_parallel": True, "recompute": "layernorm mlp"},
    "split sequence": {"split": True, "sequence_parallel": True},
    "split uniform": {"split": True, "recompute": "uniform"},
    "split mlp": {"split": True, "recompute": "mlp"},
    "split sequence uniform": {"split": True, "sequence_parallel": True, "recompute": "uniform"},
    "split sequence block": {"split": True, "sequence_parallel": True, "recompute": "block"},
    "split sequence mlp": {"split": True, "sequence_parallel": True, "recompute": "mlp"},
    "sequence core_attn": {"sequence_parallel": True, "recompute": "core_attn"},
    "cut": {"cut": True},
    "cut split sequence uniform": {"cut": True, "split": True, "sequence_parallel": True, "recompute": "uniform"},
    "cut tied two stages all": {"cut": True, "tied": True, "stages": (((0, 0),), ((1, 2),)), "split": True}
    | {"sequence_parallel": True, "recompute": "layernorm mlp"},
    "two stages": {"stages": (((0, 0),), ((1, 1), (2, 2)))},
    "padded": {"vocab": 61, "vocab_multiple": 32},
    "a rank of padding": {"vocab": 33, "vocab_multiple": 32, "split": True, "sequence_parallel": True},
    "tied": {"tied": True},
    "tied split": {"tied": True, "split": True},
    "tied all": {"tied": True, "split": True, "sequence_parallel": True, "recompute": "uniform", "vocab": 61}
    | {"vocab_multiple": 32},
    "tied two stages": {"tied": True, "stages": (((0, 1),), ((2, 2),)), "vocab": 61, "vocab_multiple": 32},
    "tied two stages all": {"tied": True, "stages": (((0, 1),), ((2, 2),)), "split": True, "recompute": "block"}
    | {"sequence_parallel": True},
    "other positions": {"positions": "other", "split": True, "sequence_parallel": True},
}
FEWER = ("plain", "split", "split sequence mlp", "a rank of padding", "tied two stages all")
"""What four ranks are worth asking: on few cores their collectives take most of the time."""
GROUPED = ("plain", "split sequence mlp")
"""Their cases if embedding and head are those of another kind."""
HEADS = ("plain", "split sequence mlp", "split sequence layernorm", "core_attn")
"""The cases of the kinds in `INSIDE_ATTENTION`."""
ASKED = {
    **{(kind, tp): tuple(CASES) for kind in KINDS for tp in (1, 2)},
    **{(kind, tp): HEADS for kind in INSIDE_ATTENTION for tp in (1, 2)},
    ("gpt", 4): FEWER,
    ("llama", 4): GROUPED,
    ("qwen", 4): GROUPED,
}
"""The cases of each kind and number of ranks."""
OTHER = {"gpt": "rope", "llama": "learned_absolute"}


@pytest.fixture(scope="module")
def results(stage_ranks: Ranks) -> Callable[[str, int], list[dict[str, Any]]]:
    """For (kind, tp) the answers of each rank by case; all cases are run at once."""

    @functools.cache
    def ask(kind: str, tp: int) -> list[dict[str, Any]]:
        names = ASKED[kind, tp]
        cases = [CASES[name] | ({"positions": OTHER[kind]} if "positions" in CASES[name] else {}) for name in names]
        answers = stage_ranks("compare", tp, kind=kind, tp=tp, cases=cases)
        return [dict(zip(names, answer, strict=True)) for answer in answers]

    return ask


@pytest.mark.parametrize(
    ("kind", "tp", "case"), [(kind, tp, case) for (kind, tp), cases in ASKED.items() for case in cases]
)
def test_loss_and_gradients_are_those_of_the_serial_model(results: Any, kind: str, tp: int, case: str) -> None:
    for answer in results(kind, tp):
        found = answer[case]
        assert found["loss"] < 1e-6
        assert found["gradients"]["absolute"] < 1e-5
        assert found["gradients"]["relative"] < 1e-5
        assert found["split"] < 1e-6
        assert found["names"]
        assert found["marked"], "megatron and the specifications disagree on which gradients are partial"
        assert found["losses"] == results(kind, tp)[0][case]["losses"]


def test_rows_that_pad_the_vocabulary_have_no_gradient_at_all(results: Any) -> None:
    for case in ("padded", "a rank of padding", "tied all", "tied two stages"):
        assert results("gpt", 1)[0][case]["padding"] == 0.0
        assert [answer[case]["padding"] for answer in results("gpt", 2)] == [None, 0.0]
    assert [answer["a rank of padding"]["padding"] for answer in results("gpt", 4)] == [None, None, 0.0, 0.0]


def test_time_spent_waiting_for_the_group_is_kept_apart(results: Any) -> None:
    for case in ("plain", "split sequence uniform"):
        assert results("gpt", 1)[0][case]["waited_s"] == 0.0
        for answer in results("gpt", 2):
            assert answer[case]["waited_s"] > 0.0
            assert answer[case]["waits"], "on_wait must be called with True and False in turn"


@pytest.mark.parametrize("kind", ["gpt", "llama", "qwen"])
@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_each_architecture_is_what_its_name_says(kind: str, positions: str) -> None:
    """Loss and gradients against a plain rendering of the architecture, document by document."""
    case = Case(positions=positions, stages=(((0, LAYERS - 1),),))
    (stage,), _ = stages_of(kind, case, TensorGroup())
    lengths, tokens, labels = batch(0, case.vocab)
    named = dict(stage.named_parameters())
    loss = stage(0, lengths, tokens, labels)
    gradients = torch.autograd.grad(loss, list(named.values()))
    expected = torch.zeros(())
    for document, answer in zip(tokens.split(list(lengths)), labels.split(list(lengths)), strict=True):
        logits = plain_model(kind, named, document)
        expected = expected + F.cross_entropy(logits, answer, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, right in zip(gradients, torch.autograd.grad(expected, list(named.values())), strict=True):
        assert (ours - right).abs().max() <= 1e-5 * right.abs().max()


def plain_model(kind: str, named: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits of one document, written down from the architectures' papers; fused weights lie as megatron has them."""
    heads, groups, width = 8, 8 if kind == "gpt" else 4, 4

    def norm(name: str, x: Tensor) -> Tensor:
        if kind == "gpt":
            return F.layer_norm(x, x.shape[-1:], named[f"{name}.weight"], named[f"{name}.bias"], 1e-5)
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * named[f"{name}.weight"]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, named[f"{name}.weight"], named.get(f"{name}.bias"))

    def rotate(x: Tensor) -> Tensor:
        if "embedding.position_embeddings.weight" in named:
            return x
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(len(tokens)), frequencies)[:, None]
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)

    x = named["embedding.word_embeddings.weight"][tokens]
    if "embedding.position_embeddings.weight" in named:
        x = x + named["embedding.position_embeddings.weight"][: len(tokens)]
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        fused = linear(at + "self_attention.linear_qkv", norm(at + "input_layernorm", x))
        grouped = fused.view(len(tokens), groups, heads // groups + 2, width)
        query = rotate(grouped[:, :, :-2].reshape(len(tokens), heads, width))
        key = rotate(grouped[:, :, -2]).repeat_interleave(heads // groups, dim=1)
        value = grouped[:, :, -1].repeat_interleave(heads // groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / width**0.5
        future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), value)
        x = x + linear(at + "self_attention.linear_proj", seen.flatten(1))
        inner = linear(at + "mlp.linear_fc1", norm(at + "pre_mlp_layernorm", x))
        if kind == "gpt":
            inner = F.gelu(inner)
        else:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        x = x + linear(at + "mlp.linear_fc2", inner)
    return linear("output_layer", norm("final_layernorm", x))


def test_ignored_labels_and_padding_columns_take_no_part_in_the_loss() -> None:
    case = Case(vocab=33, vocab_multiple=32, stages=(((0, LAYERS - 1),),))
    (stage,), _ = stages_of("gpt", case, TensorGroup())
    lengths, tokens, labels = batch(0, case.vocab)
    stage.output_layer.weight.data[case.vocab :] = 1e3  # rows that would win every softmax
    whole = stage(0, lengths, tokens, labels).item()
    some = torch.arange(len(labels)) % 3 == 0
    kept = stage(0, lengths, tokens, labels.masked_fill(some, IGNORED_LABEL)).item()
    dropped = stage(0, lengths, tokens, labels.masked_fill(~some, IGNORED_LABEL)).item()
    assert kept + dropped == pytest.approx(whole, rel=1e-6)
    assert min(kept, dropped) > 0.1 * whole
    stage(0, lengths, tokens, torch.full_like(labels, IGNORED_LABEL)).backward()
    assert all(not parameter.grad.any() for parameter in stage.parameters())


# --- recomputation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "layers", "expected"),
    [
        ({}, 3, ((0, 3, False),)),
        (RECOMPUTED["uniform"], 5, ((0, 2, True), (2, 4, True), (4, 5, True))),
        (RECOMPUTED["block"], 3, ((0, 1, True), (1, 3, False))),
        (RECOMPUTED["block"] | {"recompute_num_layers": 9}, 2, ((0, 1, True), (1, 2, True))),
        (RECOMPUTED["mlp"], 2, ((0, 2, False),)),
    ],
)
def test_which_layers_of_a_chunk_are_recomputed(settings: dict[str, Any], layers: int, expected: Any) -> None:
    config = TransformerConfig(num_layers=8, hidden_size=32, num_attention_heads=8, **settings)
    assert spans(config, layers) == expected


@pytest.mark.parametrize(
    ("recompute", "attention", "mlp"),
    [("", 3, 3), ("uniform", 6, 6), ("block", 4, 4), ("core_attn", 6, 3), ("mlp", 6, 6)],
)
@pytest.mark.parametrize("split", [False, True])
def test_recomputed_parts_run_twice(
    monkeypatch: pytest.MonkeyPatch, recompute: str, attention: int, mlp: int, split: bool
) -> None:
    runs = {"attention": 0, "mlp": 0}
    forward = PackedAttention.forward

    def count(part: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            runs[part] += 1
            return function(*arguments, **keywords) if function else None

        return counted

    monkeypatch.setattr(PackedAttention, "forward", count("attention", forward))
    stage = alone("llama", recompute=recompute)
    for layer in stage.layers.values():
        layer.mlp.linear_fc1.register_forward_pre_hook(count("mlp"))
    loss = stage(0, *batch(0, 64))
    with stage.weights.collecting(0) if split else nullcontext():
        loss.backward()
    assert runs == {"attention": attention, "mlp": mlp}


def test_what_is_recomputed_is_not_kept() -> None:
    def kept(recompute: str) -> int:
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        stage = alone("llama", recompute=recompute)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = stage(0, *batch(0, 64))
        del loss
        return sum(storages.values())

    assert kept("uniform") < kept("block") < kept("")
    assert kept("mlp") < kept("core_attn") < kept("")


@pytest.mark.parametrize(("recompute", "kept"), [("", 6), ("mlp", 6), ("layernorm", 0), ("layernorm mlp", 0)])
def test_what_norms_put_out_is_kept_or_not(recompute: str, kept: int) -> None:
    stage = alone("llama", recompute=recompute)
    seen: list[weakref.ref[Tensor]] = []
    for layer in stage.layers.values():
        for reader in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            reader.register_forward_pre_hook(lambda _, arguments: seen.append(weakref.ref(arguments[0])))
    loss = stage(0, *batch(0, 64))
    assert len(seen) == 2 * LAYERS
    assert sum(reference() is not None for reference in seen) == kept
    loss.backward()


# --- graphs in pieces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("kind", ["gpt", "llama", "qwen3"])
@pytest.mark.parametrize("split", [False, True])
def test_a_cut_graph_gives_the_uncut_ones_gradients_to_the_bit(kind: str, recompute: str, split: bool) -> None:
    def gradients(cut: bool) -> dict[str, Tensor]:
        case = Case(recompute=recompute, split=split, cut=cut, stages=(((0, LAYERS - 1),),))
        return iterate(stages_of(kind, case, TensorGroup())[0], case)[1]

    expected, found = gradients(False), gradients(True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_piece_ends_below_each_border_and_nowhere_else() -> None:
    """Also within a run of layers that is recomputed as one; at the chunk's beginning there is nothing to cut."""
    for recompute in ("", "uniform"):
        stage = alone("gpt", recompute=recompute)
        assert [len(stage.in_pieces(0, *batch(0, 64), borders)) for borders in ((), (0,), (1,), (1, 2))] == [1, 1, 2, 3]
        first, second, _ = stage.in_pieces(0, *batch(0, 64), (1, 2))
        assert first[1].data_ptr() == second[0].data_ptr(), "nothing is copied"
        assert second[0].grad_fn is None


# --- weight gradients of their own ----------------------------------------------------------------------------


def test_weight_gradients_wait_for_their_key() -> None:
    stage = with_main_gradients(alone("gpt"))
    fc1, bias = stage.layers["0"].mlp.linear_fc1.weight, stage.layers["0"].mlp.linear_fc2.bias
    for key in ("a", "b"):
        with stage.weights.collecting(key):
            stage(0, *batch(0, 64)).backward()
    assert unfinished(stage) == ("a", "b")
    assert not fc1.main_grad.any()
    assert not stage.output_layer.weight.main_grad.any()
    assert bias.grad.any()
    assert stage.embedding.word_embeddings.weight.grad.any()
    stage.weights.finish("b")
    once = fc1.main_grad.clone()
    assert once.any()
    stage.weights.finish("a")
    assert torch.equal(fc1.main_grad, 2 * once)
    assert unfinished(stage) == ()
    with pytest.raises(KeyError):
        stage.weights.finish("a")


def test_finished_and_discarded_gradients_let_go_of_activations() -> None:
    stage = with_main_gradients(alone("gpt"))
    for let_go in (lambda: stage.weights.finish(0), stage.weights.discard):
        seen: list[weakref.ref[Tensor]] = []

        def remember(module: Any, arguments: Any, output: Any, seen: Any = seen) -> None:
            seen.append(weakref.ref(arguments[0]))

        hook = stage.layers["1"].mlp.linear_fc2.register_forward_hook(remember)
        with stage.weights.collecting(0):
            stage(0, *batch(0, 64)).backward()
        hook.remove()
        assert unfinished(stage) == (0,)
        let_go()
        assert seen[0]() is None
        assert unfinished(stage) == ()


def test_a_peer_lost_in_the_middle_leaves_nothing_behind() -> None:
    """A group whose other rank answers nothing, and then is gone in the middle of a backward pass."""
    for sequence_parallel in (False, True):
        group = TensorGroup(2, 0)
        case = Case(sequence_parallel=sequence_parallel, stages=(((0, LAYERS - 1),),))
        (stage,), _ = stages_of("llama", case, group)
        with_main_gradients(stage)
        with pytest.raises(CommunicatorError, match="no communicator is connected"):
            stage(0, *batch(0, 64, 2))
        group.bind(Deaf())
        loss = stage(0, *batch(0, 64, 2))
        group.bind(Deaf(answers=3))
        with pytest.raises(CommunicatorError, match="gone"), stage.weights.collecting(0):
            loss.backward()
        assert unfinished(stage) == (0,)
        stage.weights.discard()
        group.bind(Deaf())
        with stage.weights.collecting(0):
            stage(0, *batch(0, 64, 2)).backward()
        stage.weights.finish(0)


class Deaf:
    """A communicator that does nothing, and fails after so many collectives."""

    def __init__(self, answers: int = 1000) -> None:
        self.answers = answers

    def allreduce(self, *_: Any) -> Deaf:
        self.answers -= 1
        return self

    all_gather = reduce_scatter = allreduce

    def wait(self) -> bool:
        if self.answers < 0:
            raise RuntimeError("gone")
        return True


# --- parameters -----------------------------------------------------------------------------------------------


def test_first_values_do_not_depend_on_the_padding() -> None:
    config = config_of("gpt")
    plain, padded = (model_spec(config, 61, 24, vocab_multiple=multiple) for multiple in (1, 32))
    for few, many in zip(
        specs_for(config, plain, "rope", False), specs_for(config, padded, "rope", False), strict=True
    ):
        value, other = draw(few, config, 7, plain), draw(many, config, 7, padded)
        if few.shape == many.shape:
            assert torch.equal(value, other)
        else:
            assert many.shape == (64, 32)
            assert torch.equal(value, other[:61])
            assert value.std() > 0.1
            assert not other[61:].any()


def test_tied_and_partial_parameters_are_marked() -> None:
    config = config_of("gpt")
    model = model_spec(config, 64, 24, tied=True)
    specs = {spec.name: spec for spec in specs_for(config, model, "learned_absolute", True)}
    assert "output_layer.weight" not in specs
    assert [name for name, spec in specs.items() if spec.tied] == ["embedding.word_embeddings.weight"]
    assert specs["embedding.word_embeddings.weight"].units == ("embedding", "head")
    layer = "layers.2."
    assert {name for name, spec in specs.items() if spec.partial and not name.startswith(("layers.0", "layers.1"))} == {
        *(f"{layer}{norm}_layernorm.{kind}" for norm in ("input", "pre_mlp") for kind in ("weight", "bias")),
        *(f"{layer}{linear}.bias" for linear in ("self_attention.linear_proj", "mlp.linear_fc2")),
        *(f"final_layernorm.{kind}" for kind in ("weight", "bias")),
    }
    assert not any(spec.partial for spec in specs_for(config, model, "rope", False))


def test_the_users_configuration_is_left_alone() -> None:
    config = config_of("gpt", "uniform")
    before = dict(vars(config))
    StageModule(config, model_spec(config, 64, 24), ((0, 2),), True, True, TensorGroup(2, 0), sequence_parallel=True)
    assert vars(config) == before


def alone(kind: str, **settings: Any) -> StageModule:
    """The whole model in one chunk of one stage of one rank."""
    (stage,), _ = stages_of(kind, Case(stages=(((0, LAYERS - 1),),), **settings), TensorGroup())
    return stage
