"""Bytes that a rank needs under a plan, and whether its device has them. Pure; an estimate, never a measurement.

`tensor_bytes` gives the sizes of state and activations, `device_memory` the memory of CUDA, NCCL and gaps,
`transition_memory` the second copy of state during a transition. The module never knows the memory of a device: callers
pass it. Called by the planner, and by the executor before it agrees to a plan.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import msgspec

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Order, Plan
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.cost.device_memory import NO_OVERHEAD, Overhead
from resihp.scheduler.cost.tensor_bytes import (
    bytes_of_layer,
    bytes_per_parameter,
    layer_activations,
    layer_elements,
    outside_activations,
    outside_elements,
)


class StageSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that determine the memory of a stage, except for its number of layers."""

    stage: int
    stages: int
    tp: int
    chunks: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    sequence_parallel: bool = False
    state_bytes: int | None = None
    """Bytes of state per parameter; None for those of the model's precision."""


def sharing(layout: Layout) -> int:
    """Return how many replicas can share the optimizer's state: the number of holders of the layer with the fewest
    holders."""
    if not layout.vacant:
        return len(layout.replicas)
    holders = Counter(
        layer for replica in layout.replicas for stage in replica.stages if stage.ranks for layer in stage.layers
    )
    return min(holders.values(), default=0)


def needed_bytes(plan: Plan, rank: int, model: ModelSpec, tokens: int, *, state_bytes: int | None = None) -> int:
    """Return the bytes of state plus the peak of live activations of a rank; 0 for a rank without work.

    `tokens` is the length of the longest micro-batch; 0 if unknown, in which case activations are not counted.
    `state_bytes`: bytes of state per parameter; None for those of the model's precision.
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
    """Return a message about the rank that most exceeds its device's `memory_bytes`, with its needs by part.

    None if all ranks fit.
    """
    needed, rank = most_needed(plan, model, tokens, state_bytes=state_bytes)
    if needed <= overhead.room(memory_bytes):
        return None
    return lacking(plan, rank, model, memory_bytes, tokens, needed, state_bytes=state_bytes, overhead=overhead)


def most_needed(plan: Plan, model: ModelSpec, tokens: int, *, state_bytes: int | None = None) -> tuple[int, int]:
    """Return the bytes of state and activations of the rank that needs most, and the rank."""
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
    """Return the plan with only the first replica of each kind, because thousands of replicas may have equal needs.

    A plan with its own orders, migrations or vacant stages is returned unchanged.
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
    """Describe, part by part, the memory of a rank that needs more than its device has.

    `needed`: bytes of state and activations.
    """
    state = needed_bytes(plan, rank, model, 0, state_bytes=state_bytes)
    return (
        f"rank {rank}: needs {overhead.with_gaps(needed) / 1e9:.3g} GB under the plan of epoch {plan.epoch}, "
        f"its device has {memory_bytes / 1e9:.3g} GB: {overhead.describe(state, needed - state)}"
    )


def expected(plan: Plan, rank: int, model: ModelSpec, tokens: int, overhead: Overhead = NO_OVERHEAD) -> str:
    """Describe the memory that a rank needs, and remedies if its device has less. `tokens` must be known."""
    state, whole = (needed_bytes(plan, rank, model, longest) for longest in (0, tokens))
    uncounted = "" if overhead.parts else "memory of libraries, communication and gaps is not counted; "
    return (
        f"rank {rank}: expected under the plan of epoch {plan.epoch}: {overhead.describe(state, whole - state)}, with "
        f"micro-batches of {tokens} tokens; {uncounted}next: smaller micro-batches, more pipeline stages, or a "
        "--memory-per-device that leaves room for the parts that were larger than expected"
    )


def capacity(model: ModelSpec, setup: StageSetup, memory_bytes: int, tokens: int) -> int:
    """Return the most layers that a stage has memory for; approximate with several chunks, because their sizes may
    differ."""
    first, last = setup.stage == 0, setup.stage == setup.stages - 1
    state_bytes = bytes_per_parameter(model, setup.state_bytes)
    fixed = state_bytes * outside_elements(model, first, last, setup.tp)
    per_layer = state_bytes * layer_elements(model, setup.tp)
    if tokens:
        alive = _most_alive(setup.schedule, setup.stage, setup.stages, setup.chunks, setup.micro_batches)
        fixed += outside_activations(model, first, last, setup.tp, setup.sequence_parallel, tokens)
        per_layer += -(-alive * layer_activations(model, setup.tp, setup.sequence_parallel, tokens) // setup.chunks)
    return max(0, (memory_bytes - fixed) // per_layer)


def layer_bytes(model: ModelSpec, setup: StageSetup, tokens: int) -> tuple[int, int]:
    """Return the bytes of each layer of a stage: its state, and the activations of all micro-batches alive at once."""
    state, per_micro_batch = bytes_of_layer(model, setup.tp, setup.sequence_parallel, tokens, setup.state_bytes)
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
    """Return whether every stage of a replica has memory for `micro_batches` micro-batches, in the order of `schedule`.

    False for a replica with a vacant stage; True if `memory_bytes` is None (unknown).
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
        inside, per_layer = bytes_of_layer(model, stage.tp, sequence_parallel, tokens, state_bytes)
        outside = bytes_per_parameter(model, state_bytes) * outside_elements(model, first, last, stage.tp)
        needed = outside + len(stage.layers) * inside
        if tokens:
            needed += outside_activations(model, first, last, stage.tp, sequence_parallel, tokens)
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
    """Return, for each stage, how many micro-batches' activations fit into its memory at once; infinite if unknown."""
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
    """Return how many micro-batches' activations fit at once into the memory of a stage of `layers` layers.

    Infinite if the memory or the number of tokens is unknown.
    """
    if memory_bytes is None or not tokens:
        return float("inf")
    inside, per_layer = bytes_of_layer(model, tp, sequence_parallel, tokens, state_bytes)
    state = bytes_per_parameter(model, state_bytes) * outside_elements(model, first, last, tp) + layers * inside
    outside = outside_activations(model, first, last, tp, sequence_parallel, tokens)
    return (memory_bytes - state - outside) // (per_layer * layers)


@lru_cache(maxsize=256)
def _orders_alone(
    schedule: str, virtual: tuple[tuple[int, int], ...], stages: int, micro_batches: int
) -> tuple[Order, ...]:
    """Return the orders of one replica, as in a job without other replicas."""
    spans: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    for v, (s, _) in enumerate(virtual):
        spans[s].append((v, v))
    layout = Layout((Replica(tuple(Stage((s,), tuple(chunks)) for s, chunks in enumerate(spans))),))
    return orders_of(Plan(epoch=0, layout=layout, assignment=(tuple(range(micro_batches)),), schedule=schedule))[0]


def smallest_degree(model: ModelSpec, setup: StageSetup, memory_bytes: int | None, tokens: int) -> int:
    """Return k_min of Eq. 3: the smallest tensor-parallel degree at which a stage has memory for one layer in each
    chunk.

    The degrees tried are powers of two and `setup.tp`. The result is `setup.tp` + 1 if none suffices.
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
    outside = outside_elements(model, first, last, stage.tp)
    state = outside + len(stage.layers) * layer_elements(model, stage.tp)
    if not order:
        return bytes_per_parameter(model, state_bytes) * state
    per_layer = layer_activations(model, stage.tp, sequence_parallel, tokens)
    sizes = [(last_layer - first_layer + 1) * per_layer for first_layer, last_layer in stage.chunks]
    outside = outside_activations(model, first, last, stage.tp, sequence_parallel, tokens)
    return bytes_per_parameter(model, state_bytes) * state + outside + _peak(order, sizes)


def _peak(order: Order, sizes: list[int]) -> int:
    """Return the most bytes alive at once. F allocates `sizes[chunk]`; the W, or the B if it has no W, frees it."""
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
    """Return the most chunks of micro-batches that a stage keeps alive at once.

    From a certain number of micro-batches on, it no longer grows, so at most that many are played.
    """
    count = min(micro_batches, 2 * stages * chunks)
    spans = tuple(tuple((c * stages + s, c * stages + s) for c in range(chunks)) for s in range(stages))
    layout = Layout((Replica(tuple(Stage((s,), spans[s]) for s in range(stages))),))
    plan = Plan(epoch=0, layout=layout, assignment=(tuple(range(count)),), schedule=schedule)
    return _peak(orders_of(plan)[0][stage], [1] * chunks)
