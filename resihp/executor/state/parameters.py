"""Parameters of the whole model by layout-free name: how each is cut, how it begins, and views of its slices.

Names are those of `StageModule` with layers counted over the whole model: `embedding.word_embeddings.weight`,
`layers.7.mlp.linear_fc1.weight`, `final_layernorm.weight`, `output_layer.weight`.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import threading
from collections.abc import Callable, Mapping

import msgspec
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec, Slice, share

DRAWERS = 8
"""Threads that draw first values, each with a whole parameter in its hands."""
_global_generator = threading.Lock()

_HEADS = re.compile(r"\.[qk]_layernorm\.")
"""In the name of a parameter that belongs to each head alike."""


def specs_of(
    whole: nn.Module, layers: int, *, tied: bool = False, sequence_parallel: bool = False
) -> tuple[ParameterSpec, ...]:
    """Specifications of a model of `layers` equal layers, read off one that has only layer 0, uncut (tp 1).

    Which axis is cut follows from the kind of megatron's module: column-parallel ones cut their outputs (weight and
    bias), row-parallel ones their inputs (weight only), the vocabulary embedding its rows. Under sequence parallelism
    norms and row-parallel biases, which are added after the reduce-scatter, see a part of the tokens on each rank. The
    norms of queries and keys see a part of the heads, with and without it.
    """
    first: list[ParameterSpec] = []
    for path, module in whole.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            axis: int | None = None
            if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
                axis = 0
            elif isinstance(module, RowParallelLinear) and local == "weight":
                axis = 1
            gated = path.endswith(".linear_fc1") and module.config.gated_linear_unit
            name = f"{path}.{local}"
            first.append(
                ParameterSpec(
                    name,
                    unit_of(name),
                    tuple(parameter.shape),
                    axis,
                    2 if gated else 1,
                    tied="head" if tied and isinstance(module, VocabParallelEmbedding) else None,
                    partial=_HEADS.search(name) is not None
                    or (
                        sequence_parallel
                        and isinstance(module, RowParallelLinear | nn.LayerNorm | nn.RMSNorm)
                        and axis is None
                    ),
                )
            )
    inside = [spec for spec in first if spec.unit == "layer.0"]
    before = [spec for spec in first if spec.unit == "embedding"]
    after = [spec for spec in first if spec.unit in ("final", "head")]
    every = [
        msgspec.structs.replace(spec, name=spec.name.replace("layers.0.", f"layers.{i}.", 1), unit=f"layer.{i}")
        for i in range(layers)
        for spec in inside
    ]
    return (*before, *every, *after)


def unit_of(name: str) -> str:
    """Unit of `resihp.parallelism.ownership` that a parameter belongs to, by its name."""
    top, _, rest = name.partition(".")
    if top == "layers":
        return f"layer.{rest.partition('.')[0]}"
    return {"embedding": "embedding", "final_layernorm": "final", "output_layer": "head"}[top]


def draw(spec: ParameterSpec, config: TransformerConfig, seed: int, model: ModelSpec) -> Tensor:
    """The whole parameter's first value: a function of (seed, name) alone, so that any layout starts from the same.

    Follows megatron-core: the config's init methods (normal(0, init_method_std), divided by sqrt(2 layers) for the
    projections that end in the residual stream), ones for norms' weights, zeros for biases. Rows that pad the
    vocabulary are zero, and the others do not depend on how many these are. Drawn on the host: what a GPU draws depends
    on how many multiprocessors it has. May be called from several threads.
    """
    whole = torch.zeros(spec.shape, dtype=torch.float32)
    path, _, kind = spec.name.rpartition(".")
    if kind == "bias":
        return whole
    if path.endswith("layernorm"):
        return whole.fill_(1.0)
    method: Callable[[Tensor], object] = config.init_method
    if path.endswith(("linear_proj", "linear_fc2")):
        method = config.output_layer_init_method
    elif spec.unit == "embedding":
        method = config.embedding_init_method
    drawn = whole[: model.vocab] if path.endswith(("word_embeddings", "output_layer")) else whole
    digest = hashlib.blake2b(f"{seed}/{spec.name}".encode(), digest_size=8).digest()
    own_seed = int.from_bytes(digest, "big") >> 1
    with torch.no_grad():
        if "generator" in inspect.signature(method).parameters:
            method(drawn, generator=torch.Generator().manual_seed(own_seed))  # type: ignore[call-arg]
            return whole
        # A method of the user's that takes no generator is lent the global one for a moment: the same numbers.
        with _global_generator, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(own_seed)
            method(drawn)
    return whole


def place(module: nn.Module, kept: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Give a module that was built on the meta device its parameters: those `kept`, by name, and the others without
    values, on `device`."""
    for name, parameter in list(module.named_parameters()):
        path, _, local = name.rpartition(".")
        if name in kept:
            chosen = kept[name]
        else:
            chosen = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            vars(chosen).update(vars(parameter))  # megatron's marks
        module.get_submodule(path).register_parameter(local, chosen)


def view(tensor: Tensor, spec: ParameterSpec, t: int, tp: int, piece: Slice) -> Tensor:
    """`piece` of a parameter inside the tensor that index `t` of `tp` ranks holds (also of its gradient or moments).

    A view of shape [..., parts, stop - start, ...]; of the whole tensor when the parameter is not cut.
    """
    if spec.axis is None:
        return tensor
    held = share(spec, t, tp)
    parts = tensor.unflatten(spec.axis, (spec.parts, held.stop - held.start))
    return parts.narrow(spec.axis + 1, piece.start - held.start, piece.stop - piece.start)


def fill(tensor: Tensor, spec: ParameterSpec, t: int, tp: int, whole: Tensor) -> None:
    """Copy what index `t` of `tp` ranks holds of a whole parameter into its own tensor."""
    held = share(spec, t, tp)
    with torch.no_grad():
        view(tensor, spec, t, tp, held).copy_(view(whole, spec, 0, 1, held))
