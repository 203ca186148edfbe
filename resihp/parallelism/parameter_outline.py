"""The parameters of a model that planning needs: their real names and cuts, without building a module.

They are derived from a `ModelSpec` alone, so that the controller and the scheduler can ask
`resihp.parallelism.transfers` which state a transition would move and whether any state is lost. The executor works
with the complete list (`resihp.executor.state.parameters`). The list here leaves out biases, learned positions, and all
norms except one in each layer and the last: below 0.1 % of the elements. The stages that hold these parameters are the
stages of the listed norms.
"""

from __future__ import annotations

from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec


def outline(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Return the model's parameters in the order of the executor's list: embedding, layers, last norm, head (unless
    tied).
    """
    embedding = ParameterSpec(
        "embedding.word_embeddings.weight",
        "embedding",
        (model.vocab_rows, model.hidden),
        0,
        tied="head" if model.tied_embeddings else None,
    )
    last_norm = ParameterSpec("final_layernorm.weight", "final", (model.hidden,))
    inside = tuple(spec for layer in range(model.layers) for spec in layer_outline(model, layer))
    if model.tied_embeddings:
        return (embedding, *inside, last_norm)
    return (
        embedding,
        *inside,
        last_norm,
        ParameterSpec("output_layer.weight", "head", (model.vocab_rows, model.hidden), 0),
    )


def layer_outline(model: ModelSpec, layer: int) -> tuple[ParameterSpec, ...]:
    """Return the parameters of layer `layer`, counted from 0. The parameters of two layers differ only in their
    names."""
    path, unit = f"layers.{layer}", f"layer.{layer}"
    width = model.head_width
    parts = 2 if model.gated else 1
    return (
        ParameterSpec(f"{path}.input_layernorm.weight", unit, (model.hidden,)),
        ParameterSpec(f"{path}.self_attention.linear_proj.weight", unit, (model.hidden, model.heads * width), 1),
        ParameterSpec(
            f"{path}.self_attention.linear_qkv.weight",
            unit,
            ((model.heads + 2 * model.kv_groups) * width, model.hidden),
            0,
        ),
        ParameterSpec(f"{path}.mlp.linear_fc1.weight", unit, (parts * model.ffn_hidden, model.hidden), 0, parts),
        ParameterSpec(f"{path}.mlp.linear_fc2.weight", unit, (model.hidden, model.ffn_hidden), 1),
    )
