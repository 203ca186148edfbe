"""Bytes that a rank needs under a plan, and whether it has them. Pure; an estimate, never a measurement.

State is exact except for the parameters that `resihp.parallelism.parameter_outline` leaves out. Activations are the
tensors that the executor's layers keep for their backward pass, without recomputation, each storage once. For each
token, in numbers of the model's precision, with q and k the widths of queries and of keys (all heads), f that of the
MLP inside, h the hidden one:

- not cut by tensor parallelism, but by sequence parallelism: 4 h, inputs and outputs of a layer's two norms;
- cut: q + 2 k, the products for queries, keys and values, all of which the values keep alive; q + k, a second copy of
  queries and keys where they are rotated or normalised; q, the output of attention; 3 f for a gated MLP, whose
  activation keeps its input alone (`resihp.executor.compute.recomputation`; megatron-core's fused one keeps the same),
  2 f for another;
- cut, of normalised queries in several groups on a rank: q, which then had to be copied;
- never cut: 4 widths of a head, sine and cosine for queries and for keys.

For a model like LLaMA 2 7B in bf16 that is 36.4 bytes a token and hidden unit, for one like GPT-2 with learned
positions 32. CPU kernels keep more: attention, as on any device in fp32, goes document by document, and keeps q once
more, put together from the documents; RMSNorm keeps 8 bytes for each input number, whatever the precision.

The loss keeps logits, which their gradient then replaces, and needs `LOSS_ELEMENTS` of them in 32 bits at once.

Not counted: attention's sums and those of norms, 4 to 8 bytes a token and head; a stage's output to the next one, h;
copies under `activation_func_clamp_value`. Attention in fp32 of grouped queries on GPUs may keep its scores, which are
not counted either. `tests/resihp/executor/test_activation_memory.py` counts saved tensors and compares. The memory of
CUDA, NCCL and gaps is in `device_memory`; the second copy of state during a transition in `transition_memory`.

Called by the planner, and by the executor before it agrees to a plan.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import msgspec

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.parameter_outline import layer_outline, outline
from resihp.parallelism.plan import Order, Plan
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.cost.device_memory import NO_OVERHEAD, Overhead

STATE_BYTES = {"fp32": 16, "bf16": 18}
"""Bytes of state per parameter, by precision: value, gradient and Adam's two moments in 32 bits; in bf16 also the value
in 16 bits. Mixed precision with 16-bit gradients takes 2 + 2, and 12 for the master copy and the moments, which the
replicas share under ZeRO-1 (`zero_1`)."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a number among activations, by precision."""

LOSS_ELEMENTS = 1 << 23
"""Logits that the loss works on at a time: 32 MiB in float32, which the cache of a large GPU holds."""

LOSS_BYTES = 4
"""Bytes of each of these logits, in any precision."""

INDEX_BYTES = 8
"""Bytes of a token's number, and of its position."""

RMS_NORM_BYTES = 8
"""Bytes per input number of a CPU's RMSNorm, in any precision: two copies in float32, one of them the number itself if
it is of float32."""


class StageSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that decide how much memory a stage needs, apart from the number of its layers."""

    stage: int
    stages: int
    tp: int
    chunks: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    sequence_parallel: bool = False
    state_bytes: int | None = None
    """Bytes of state per parameter; None: those of the model's precision."""


def zero_1(replicas: int) -> int:
    """Return the bytes of each parameter under mixed precision if replicas share the optimizer's state (ZeRO, stage
    1)."""
    return 4 + -(-12 // max(1, replicas))


def sharing(layout: Layout) -> int:
    """Return how many replicas can share the optimizer's state: the holders of the layer with the fewest holders."""
    if not layout.vacant:
        return len(layout.replicas)
    holders = Counter(
        layer for replica in layout.replicas for stage in replica.stages if stage.ranks for layer in stage.layers
    )
    return min(holders.values(), default=0)


def needed_bytes(plan: Plan, rank: int, model: ModelSpec, tokens: int, *, state_bytes: int | None = None) -> int:
    """Return the bytes of state and of the most activations alive at once; 0 for a rank without work.

    `tokens` is the length of the longest micro-batch; 0 if unknown, and then activations do not count.
    """
    place = plan.layout.place(rank)
    if place is None:
        return 0
    order = orders_of(plan)[place.replica][place.stage] if tokens else ()
    return _stage_bytes(
        plan.layout.replicas[place.replica],
        place.stage,
        order,
        model,
        tokens,
        plan.sequence_parallel,
        state_bytes,
    )


def obstacle(
    plan: Plan,
    model: ModelSpec,
    memory_bytes: int,
    tokens: int,
    *,
    state_bytes: int | None = None,
    overhead: Overhead = NO_OVERHEAD,
) -> str | None:
    """Return which rank most exceeds its device's `memory_bytes`, and by which parts; None if all ranks fit."""
    needed, rank = most_needed(plan, model, tokens, state_bytes=state_bytes)
    if needed <= overhead.room(memory_bytes):
        return None
    return lacking(plan, rank, model, memory_bytes, tokens, needed, state_bytes=state_bytes, overhead=overhead)


def most_needed(plan: Plan, model: ModelSpec, tokens: int, *, state_bytes: int | None = None) -> tuple[int, int]:
    """Return the bytes of state and activations of the fullest rank, and the rank."""
    plan = _one_of_each_kind(plan)
    orders = orders_of(plan) if tokens else ()
    needs_of_ranks: list[tuple[int, int]] = []
    for d, replica in enumerate(plan.layout.replicas):
        for s, stage in enumerate(replica.stages):
            if not stage.ranks:
                continue
            order = orders[d][s] if tokens else ()
            needed = _stage_bytes(replica, s, order, model, tokens, plan.sequence_parallel, state_bytes)
            needs_of_ranks.append((needed, -stage.ranks[0]))
    needed, rank = max(needs_of_ranks, default=(0, 0))
    return needed, -rank


def _one_of_each_kind(plan: Plan) -> Plan:
    """Return the plan with the first replica of each kind with equal needs, since thousands are equal.

    A plan with its own orders, migrations or vacant stages is returned whole.
    """
    if plan.orders or plan.migrations or plan.layout.vacant or not plan.assignment:
        return plan
    first: dict[object, int] = {}
    for d, (replica, share) in enumerate(zip(plan.layout.replicas, plan.assignment, strict=True)):
        first.setdefault((tuple((stage.tp, stage.chunks) for stage in replica.stages), len(share)), d)
    return msgspec.structs.replace(
        plan,
        layout=Layout(tuple(plan.layout.replicas[d] for d in first.values())),
        assignment=tuple(plan.assignment[d] for d in first.values()),
    )


def lacking(
    plan: Plan,
    rank: int,
    model: ModelSpec,
    memory_bytes: int,
    tokens: int,
    needed: int,
    *,
    state_bytes: int | None,
    overhead: Overhead,
) -> str:
    """Describe that a rank needs more memory than its device has, part by part.

    `needed`: bytes of state and activations.
    """
    state = needed_bytes(plan, rank, model, 0, state_bytes=state_bytes)
    return (
        f"rank {rank}: needs {overhead.with_gaps(needed) / 1e9:.3g} GB under the plan of epoch {plan.epoch}, "
        f"its device has {memory_bytes / 1e9:.3g} GB: {overhead.describe(state, needed - state)}"
    )


def expected(plan: Plan, rank: int, model: ModelSpec, tokens: int, overhead: Overhead = NO_OVERHEAD) -> str:
    """Describe the memory that a rank needs, and remedies if a device has less; `tokens` is known."""
    state, whole = (needed_bytes(plan, rank, model, longest) for longest in (0, tokens))
    uncounted = "" if overhead.parts else "memory of libraries, communication and gaps is not counted; "
    return (
        f"rank {rank}: expected under the plan of epoch {plan.epoch}: {overhead.describe(state, whole - state)}, with "
        f"micro-batches of {tokens} tokens; {uncounted}next: smaller micro-batches, more pipeline stages, or a "
        "--memory-per-device that leaves room for the parts that were larger than expected"
    )


def stage_bytes(
    model: ModelSpec,
    tp: int,
    tokens: int,
    *,
    first: bool,
    last: bool,
    sequence_parallel: bool = False,
    state_bytes: int | None = None,
) -> tuple[int, int, int]:
    """Return three sizes in bytes, as in `capacity` and `alive`: everything besides the layers, each layer's state, and
    each layer's activations of one micro-batch."""
    state, activations = _layer_bytes(model, tp, sequence_parallel, tokens, state_bytes)
    outside = _bytes_per_parameter(model, state_bytes) * _outside_elements(model, first, last, tp)
    return outside + _outside_activations(model, first, last, tp, sequence_parallel, tokens), state, activations


def capacity(model: ModelSpec, setup: StageSetup, memory_bytes: int, tokens: int) -> int:
    """Return the most layers that a stage can hold; approximate with several chunks, as their sizes may differ."""
    first, last = setup.stage == 0, setup.stage == setup.stages - 1
    state_bytes = _bytes_per_parameter(model, setup.state_bytes)
    fixed = state_bytes * _outside_elements(model, first, last, setup.tp)
    per_layer = state_bytes * _layer_elements(model, setup.tp)
    if tokens:
        alive = _most_alive(setup.schedule, setup.stage, setup.stages, setup.chunks, setup.micro_batches)
        fixed += _outside_activations(model, first, last, setup.tp, setup.sequence_parallel, tokens)
        per_layer += -(-alive * _layer_activations(model, setup.tp, setup.sequence_parallel, tokens) // setup.chunks)
    return max(0, (memory_bytes - fixed) // per_layer)


def least_bytes(model: ModelSpec, tokens: int, *, state_bytes: int | None = None) -> int:
    """Return the least bytes of all devices of a replica together: state once, and one micro-batch's activations."""
    return _bytes_per_parameter(model, state_bytes) * model.parameters + model.layers * _layer_activations(
        model, 1, True, tokens
    )


def layer_bytes(model: ModelSpec, setup: StageSetup, tokens: int) -> tuple[int, int]:
    """Return the bytes of each layer of a stage: state, and the activations of all micro-batches alive at once."""
    state, per_micro_batch = _layer_bytes(model, setup.tp, setup.sequence_parallel, tokens, setup.state_bytes)
    alive = _most_alive(setup.schedule, setup.stage, setup.stages, setup.chunks, setup.micro_batches)
    return state, -(-alive * per_micro_batch // setup.chunks)


def fits(
    replica: Replica,
    micro_batches: int,
    model: ModelSpec,
    memory_bytes: int | None,
    tokens: int,
    *,
    schedule: str = "1f1b",
    sequence_parallel: bool = False,
    state_bytes: int | None = None,
) -> bool:
    """Return whether every stage of a replica has memory for so many micro-batches, in the order of a schedule.

    A stage without ranks has no memory.
    """
    if memory_bytes is None:
        return True
    if replica.vacant:
        return False
    virtual = replica.virtual_stages
    stages = len(replica.stages)
    orders: tuple[Order, ...] = ()
    if tokens and len(virtual) > stages:
        orders = _orders_alone(schedule, virtual, stages, micro_batches)
    for s, stage in enumerate(replica.stages):
        first, last = virtual[0][0] == s, virtual[-1][0] == s
        inside, per_layer = _layer_bytes(model, stage.tp, sequence_parallel, tokens, state_bytes)
        outside = _bytes_per_parameter(model, state_bytes) * _outside_elements(model, first, last, stage.tp)
        needed = outside + len(stage.layers) * inside
        if tokens:
            needed += _outside_activations(model, first, last, stage.tp, sequence_parallel, tokens)
            if orders:
                needed += _peak(orders[s], [(b - a + 1) * per_layer for a, b in stage.chunks])
            else:
                needed += _most_alive(schedule, s, stages, 1, micro_batches) * len(stage.layers) * per_layer
        if needed > memory_bytes:
            return False
    return True


def most_alive(
    replica: Replica,
    model: ModelSpec,
    memory_bytes: int | None,
    tokens: int,
    *,
    sequence_parallel: bool = False,
    state_bytes: int | None = None,
) -> tuple[float, ...]:
    """Return for each stage the number of micro-batches whose activations it can keep at once; infinite if unknown."""
    virtual = replica.virtual_stages
    return tuple(
        alive(
            model,
            stage.tp,
            len(stage.layers),
            memory_bytes,
            tokens,
            first=virtual[0][0] == s,
            last=virtual[-1][0] == s,
            sequence_parallel=sequence_parallel,
            state_bytes=state_bytes,
        )
        for s, stage in enumerate(replica.stages)
    )


def alive(
    model: ModelSpec,
    tp: int,
    layers: int,
    memory_bytes: int | None,
    tokens: int,
    *,
    first: bool,
    last: bool,
    sequence_parallel: bool = False,
    state_bytes: int | None = None,
) -> float:
    """Return the number of micro-batches whose activations a stage of so many layers can keep; infinite if unknown."""
    if memory_bytes is None or not tokens:
        return float("inf")
    inside, per_layer = _layer_bytes(model, tp, sequence_parallel, tokens, state_bytes)
    state = _bytes_per_parameter(model, state_bytes) * _outside_elements(model, first, last, tp) + layers * inside
    outside = _outside_activations(model, first, last, tp, sequence_parallel, tokens)
    return (memory_bytes - state - outside) // (per_layer * layers)


@lru_cache(maxsize=1024)
def _layer_bytes(
    model: ModelSpec, tp: int, sequence_parallel: bool, tokens: int, state_bytes: int | None
) -> tuple[int, int]:
    """Return for one rank a layer's state, and its activations of one micro-batch."""
    state = _bytes_per_parameter(model, state_bytes) * _layer_elements(model, tp)
    return state, _layer_activations(model, tp, sequence_parallel, tokens)


@lru_cache(maxsize=256)
def _orders_alone(
    schedule: str, virtual: tuple[tuple[int, int], ...], stages: int, micro_batches: int
) -> tuple[Order, ...]:
    """Return the orders of a replica that has the job for itself."""
    spans: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    for v, (s, _) in enumerate(virtual):
        spans[s].append((v, v))
    layout = Layout((Replica(tuple(Stage((s,), tuple(chunks)) for s, chunks in enumerate(spans))),))
    return orders_of(Plan(epoch=0, layout=layout, assignment=(tuple(range(micro_batches)),), schedule=schedule))[0]


def smallest_degree(model: ModelSpec, setup: StageSetup, memory_bytes: int | None, tokens: int) -> int:
    """Return k_min of Eq. 3: the smallest degree at which a stage holds a layer in each chunk.

    Degrees are powers of two and `post.tp`; the result is `post.tp` + 1 if there is none.
    """
    if memory_bytes is None:
        return 1
    for k in sorted({1 << q for q in range(setup.tp.bit_length())} | {setup.tp}):
        place = msgspec.structs.replace(setup, tp=k)
        if k <= setup.tp and capacity(model, place, memory_bytes, tokens) >= setup.chunks:
            return k
    return setup.tp + 1


def _stage_bytes(
    replica: Replica,
    s: int,
    order: Order,
    model: ModelSpec,
    tokens: int,
    sequence_parallel: bool,
    state_bytes: int | None,
) -> int:
    stage = replica.stages[s]
    virtual = replica.virtual_stages
    first, last = virtual[0][0] == s, virtual[-1][0] == s
    outside = _outside_elements(model, first, last, stage.tp)
    state = outside + len(stage.layers) * _layer_elements(model, stage.tp)
    if not order:
        return _bytes_per_parameter(model, state_bytes) * state
    per_layer = _layer_activations(model, stage.tp, sequence_parallel, tokens)
    sizes = [(last_layer - first_layer + 1) * per_layer for first_layer, last_layer in stage.chunks]
    outside = _outside_activations(model, first, last, stage.tp, sequence_parallel, tokens)
    return _bytes_per_parameter(model, state_bytes) * state + outside + _peak(order, sizes)


def _peak(order: Order, sizes: list[int]) -> int:
    """Return the most bytes alive at once; F allocates `sizes[chunk]`, and its W, or its B without a W, frees it."""
    split = {(p.micro_batch, p.chunk) for p in order if p.kind == "W"}
    alive = most = 0
    for p in order:
        if p.kind == "F":
            alive += sizes[p.chunk]
            most = max(most, alive)
        elif p.kind == "W" or (p.micro_batch, p.chunk) not in split:
            alive -= sizes[p.chunk]
    return most


@lru_cache(maxsize=4096)
def _most_alive(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Return the chunks of micro-batches that a stage keeps at once, which soon stops growing with their number."""
    count = min(micro_batches, 2 * stages * chunks)
    spans = tuple(tuple((c * stages + s, c * stages + s) for c in range(chunks)) for s in range(stages))
    layout = Layout((Replica(tuple(Stage((s,), spans[s]) for s in range(stages))),))
    plan = Plan(epoch=0, layout=layout, assignment=(tuple(range(count)),), schedule=schedule)
    return _peak(orders_of(plan)[0][stage], [1] * chunks)


@lru_cache(maxsize=64)
def _outside(model: ModelSpec, first: bool, last: bool) -> tuple[ParameterSpec, ...]:
    """Return the parameters outside the layers that a first, last, or only stage holds."""
    units = {"embedding"} if first else set()
    units |= {"final", "head"} if last else set()
    bare = msgspec.structs.replace(model, layers=0)
    return tuple(spec for spec in outline(bare) if units.intersection(spec.units))


@lru_cache(maxsize=512)
def _outside_elements(model: ModelSpec, first: bool, last: bool, tp: int) -> int:
    return _elements_per_rank(_outside(model, first, last), tp)


@lru_cache(maxsize=512)
def _layer_elements(model: ModelSpec, tp: int) -> int:
    return _elements_per_rank(layer_outline(model, 0), tp)


def _bytes_per_parameter(model: ModelSpec, declared: int | None) -> int:
    """Return the bytes of state per parameter: `declared` by the caller, or those of the model's precision."""
    return STATE_BYTES[model.precision] if declared is None else declared


def _elements_per_rank(specs: tuple[ParameterSpec, ...], tp: int) -> int:
    """Return the elements of one rank of a group."""
    return sum(spec.elements if spec.axis is None else spec.elements // tp for spec in specs)


def _layer_activations(model: ModelSpec, tp: int, sequence_parallel: bool, tokens: int) -> int:
    """Return the bytes that a layer keeps of one micro-batch; the module's docstring lists them."""
    element, computation = ELEMENT_BYTES[model.precision], model.computation
    query, key = (count * model.head_width for count in (model.heads, model.kv_groups))
    copied = query if model.heads != model.kv_groups and model.kv_groups > tp else 0
    cut = element * (2 * query + 2 * key)  # the products, and the output of attention
    cut += element * (3 if model.gated else 2) * model.ffn_hidden
    if computation.rotary or model.qk_layernorm:
        cut += element * (query + key)
    else:
        cut += element * copied
    if model.qk_layernorm:
        if not _copies_in_norm(model):
            cut += element * copied
        elif model.precision == "fp32":
            cut += element * copied + (RMS_NORM_BYTES - element) * (query + key)
        else:
            cut += RMS_NORM_BYTES * (query + key)
    if computation.device == "cpu" or model.precision == "fp32":
        cut += element * query
    whole = 2 * _norm_bytes(model)
    never_cut = 4 * element * model.head_width if computation.rotary else 0
    per_token = (whole + cut) / tp if sequence_parallel else whole + cut / tp
    return int(tokens * (per_token + never_cut))


def _outside_activations(
    model: ModelSpec, first: bool, last: bool, tp: int, sequence_parallel: bool, tokens: int
) -> int:
    """Return the bytes of one micro-batch outside the layers: tokens and positions of the embedding; last norm and
    loss.

    The output of the embedding is the first layer's input, which is counted there.
    """
    total = tokens * 2 * INDEX_BYTES if first else 0
    if last:
        norm = _norm_bytes(model) / tp if sequence_parallel else _norm_bytes(model)
        logits = tokens * model.vocab_rows // tp
        total += int(tokens * norm) + ELEMENT_BYTES[model.precision] * logits + LOSS_BYTES * min(logits, LOSS_ELEMENTS)
    return total


def _copies_in_norm(model: ModelSpec) -> bool:
    return model.computation.device == "cpu" and model.computation.normalization == "RMSNorm"


def _norm_bytes(model: ModelSpec) -> int:
    """Return the bytes per token that a norm of the hidden state keeps with its next layer: its input and its
    output."""
    element = ELEMENT_BYTES[model.precision]
    return model.hidden * ((RMS_NORM_BYTES if _copies_in_norm(model) else element) + element)
