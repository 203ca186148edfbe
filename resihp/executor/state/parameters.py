"""All parameters of the model by names that do not depend on the layout: how they are cut, initial values, views of
slices.

Names are those of `StageModule`, with layers counted over the whole model: `embedding.word_embeddings.weight`,
`layers.7.mlp.linear_fc1.weight`, `final_layernorm.weight`, `output_layer.weight`. Decides nothing. Used by the other
modules of this package.
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

DRAWING_THREADS = 8
"""Number of threads that draw initial values. Each of them has a whole parameter in memory."""
_global_generator = threading.Lock()

_PER_HEAD_NORM = re.compile(r"\.[qk]_layernorm\.")
"""Matches the names of norm parameters that all attention heads share."""


def specs_of(
    whole: nn.Module, layers: int, *, tied: bool = False, sequence_parallel: bool = False
) -> tuple[ParameterSpec, ...]:
    """Return the specifications of all parameters of a model with `layers` equal layers. `whole` is a module with only
    layer 0, without tensor parallelism.

    The cut axis depends on megatron's class of the module: column-parallel modules are cut along their outputs (weight
    and bias), row-parallel modules along their inputs (weight only), the vocabulary embedding along its rows. Under
    sequence parallelism, each rank applies norms and row-parallel biases (added after the reduce-scatter) to only part
    of the tokens. With or without it, each rank applies the norms of queries and keys to only part of the heads.
    """
    first: list[ParameterSpec] = []
    for path, module in whole.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            axis = _cut_axis(module, local)
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
                    partial=_PER_HEAD_NORM.search(name) is not None
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
    layer_specs = [
        msgspec.structs.replace(spec, name=spec.name.replace("layers.0.", f"layers.{i}.", 1), unit=f"layer.{i}")
        for i in range(layers)
        for spec in inside
    ]
    return (*before, *layer_specs, *after)


def _cut_axis(module: nn.Module, parameter: str) -> int | None:
    """Return the axis along which tensor parallelism cuts a parameter of a module; None if it is not cut."""
    if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
        return 0
    if isinstance(module, RowParallelLinear) and parameter == "weight":
        return 1
    return None


def unit_of(name: str) -> str:
    """Return the unit (`resihp.parallelism.ownership`) of the parameter with this name."""
    top, _, rest = name.partition(".")
    if top == "layers":
        return f"layer.{rest.partition('.')[0]}"
    return {"embedding": "embedding", "final_layernorm": "final", "output_layer": "head"}[top]


def draw(spec: ParameterSpec, config: TransformerConfig, seed: int, model: ModelSpec) -> Tensor:
    """Return the initial value of a whole parameter. It depends only on (seed, name), so it is equal in all layouts.

    Follows megatron-core: the configuration's init methods (normal(0, init_method_std), divided by sqrt(2 layers) for
    projections into the residual stream), ones for weights of norms, zeros for biases. Padding rows of the vocabulary
    are zero, and their number does not affect the other rows. Values are drawn on the host, since those of a GPU depend
    on its number of multiprocessors. Several threads may call this function.
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
        # A user's init method without a `generator` argument uses the global one, seeded here to give equal values.
        with _global_generator, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(own_seed)
            method(drawn)
    return whole


def place(module: nn.Module, kept: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Give a module that was built on the meta device its parameters on `device`: existing ones from `kept`, by name,
    and for the rest new ones without values."""
    for name, parameter in list(module.named_parameters()):
        path, _, local = name.rpartition(".")
        if name in kept:
            chosen = kept[name]
        else:
            chosen = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            vars(chosen).update(vars(parameter))  # attributes set by megatron
        module.get_submodule(path).register_parameter(local, chosen)


def view(tensor: Tensor, spec: ParameterSpec, t: int, tp: int, piece: Slice) -> Tensor:
    """Return a view of `piece` of a parameter in the tensor of rank `t` of `tp`. Also for gradients and moments.

    The view has the shape [..., parts, stop - start, ...]; it is the whole tensor if the parameter is not cut.
    """
    if spec.axis is None:
        return tensor
    own = share(spec, t, tp)
    parts = tensor.unflatten(spec.axis, (spec.parts, own.stop - own.start))
    return parts.narrow(spec.axis + 1, piece.start - own.start, piece.stop - piece.start)


def fill(tensor: Tensor, spec: ParameterSpec, t: int, tp: int, whole: Tensor) -> None:
    """Copy the share of rank `t` of `tp` from a whole parameter to the rank's own tensor."""
    own = share(spec, t, tp)
    with torch.no_grad():
        view(tensor, spec, t, tp, own).copy_(view(whole, spec, 0, 1, own))
