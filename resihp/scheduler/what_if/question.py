"""A planning question: a layout, a model, hardware and failures. Pure.

The module refuses contradictions, and builds the planner's `Situation` from a question. The planner decides, and
`resihp.scheduler.what_if.answer` reports the results. Called by `resihp plan`, and by the simulator for the layouts of
its scenarios.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from resihp.errors import LayoutError, PlanError, UsageError
from resihp.parallelism.layout import Layout, Replica, validate
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Order, Plan, spread
from resihp.parallelism.transfers import Base, missing
from resihp.pipeline.schedules import SCHEDULE_NAMES, orders_of
from resihp.scheduler.cost import memory, tensor_bytes
from resihp.scheduler.cost.device_memory import Overhead, overhead
from resihp.scheduler.cost.profile import Profile
from resihp.scheduler.situation import Situation
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.catalogue import Hardware

Link = tuple[str, str]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it was started (Megatron's grid on nodes n1, n2, ..., filled in order), and the failures since then.

    `micro_batches` is the number per replica. `spares` is the number of further nodes with all devices on standby.
    """

    model: ModelSpec
    hardware: Hardware
    tp: int
    pp: int
    dp: int
    micro_batches: int
    gpus_per_node: int
    micro_batch_size: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    zero_1: bool = False
    """Whether replicas share the optimizer's state."""
    ignore_memory: bool = False
    """Whether planning ignores memory. It also does if `first_plan` does not fit into memory."""
    spares: int = 0
    failed: tuple[int, ...] = ()
    failed_nodes: tuple[str, ...] = ()
    slow: dict[int, float] = {}
    slow_links: dict[Link, float] = {}
    places: dict[int, str] = {}
    """Node of each rank, for a real job; if empty, ranks fill n1, n2, ... in order."""
    devices: dict[int, int] = {}
    """Index of each rank's device on its node, for a real job."""
    overhead: Overhead = overhead("cuda", "nccl")
    """Memory of a device that is not available for state and activations."""
    profile: Profile | None = None
    """Measured times of a real job; None if they are to be computed from `hardware`."""

    @property
    def world(self) -> int:
        """Number of ranks of the layout, without spares."""
        return self.tp * self.pp * self.dp

    @property
    def nodes(self) -> dict[int, str]:
        """Node of each rank. The last node of the layout has only the devices that the layout needs."""
        if self.places:
            return self.places
        used = -(-self.world // self.gpus_per_node)
        first_spare = self.world
        spare = {
            first_spare + i: f"n{used + 1 + i // self.gpus_per_node}" for i in range(self.spares * self.gpus_per_node)
        }
        return {rank: f"n{rank // self.gpus_per_node + 1}" for rank in range(self.world)} | spare


# --- asking ---------------------------------------------------------------------------------------------------------


def first_plan(question: Question) -> Plan:
    """Return the plan of epoch 1, before any failure.

    Raises LayoutError, naming the conflict with the model or the batch.
    """
    check(question)
    standby = tuple(sorted(question.nodes))[question.world :]
    layout = Layout.uniform(
        tp=question.tp,
        pp=question.pp,
        dp=question.dp,
        layers=question.model.layers,
        chunks=question.chunks,
        standby=standby,
    )
    validate(layout, question.model)
    return Plan(
        epoch=1,
        layout=layout,
        assignment=spread(question.micro_batches * question.dp, question.dp),
        schedule=question.schedule,
        sequence_parallel=question.sequence_parallel,
    )


def check(question: Question) -> None:
    """Raise UsageError or LayoutError for a question that contradicts itself."""
    for name, value, minimum in (
        ("--micro-batches", question.micro_batches, 1),
        ("--micro-batch-size", question.micro_batch_size, 1),
        ("--sequence-length", question.model.sequence, 1),
        ("--gpus-per-node", question.gpus_per_node, 1),
        ("--virtual-stages", question.chunks, 1),
        ("--spares", question.spares, 0),
    ):
        if value < minimum:
            raise UsageError(f"{name} {value}: must be at least {minimum}")
    if question.schedule not in SCHEDULE_NAMES:
        raise UsageError(
            f"--schedule {question.schedule}: not known; {catalogue.nearest(question.schedule, SCHEDULE_NAMES)}"
        )
    layout_text = f"layout tp={question.tp},dp={question.dp},pp={question.pp}"
    stages = question.pp * question.chunks
    if stages > question.model.layers:
        noun = "stages" if question.chunks == 1 else "virtual stages"
        raise LayoutError(
            f"{layout_text}: {stages} {noun} for {question.model.layers} layers, each needs one; "
            f"choose pp={question.model.layers // question.chunks or 1} or less"
        )
    obstacle = question.model.tensor_parallel_obstacle(question.tp)
    if obstacle:
        possible_degrees = [k for k in range(1, question.tp) if question.model.tensor_parallel_obstacle(k) is None]
        raise LayoutError(f"{layout_text}: {obstacle}; possible are tp={', '.join(map(str, possible_degrees))}")
    if question.tp > question.gpus_per_node:
        raise LayoutError(
            f"{layout_text}: a tensor-parallel group of {question.tp} does not fit a node of {question.gpus_per_node}; "
            f"raise --gpus-per-node, or choose tp={question.gpus_per_node} or less"
        )
    check_failures(question)


def check_failures(question: Question) -> None:
    """Raise UsageError for unknown ranks and nodes, PlanError if no rank is left."""
    nodes = question.nodes
    node_names = list(dict.fromkeys(nodes.values()))
    for option, rank in (*(("--fail", r) for r in question.failed), *(("--slow", r) for r in question.slow)):
        if rank not in nodes:
            is_listed = question.places and len(nodes) <= 16
            valid_names = ", ".join(map(str, nodes)) if is_listed else f"{min(nodes)} to {max(nodes)}"
            raise UsageError(f"{option} {rank}: no such rank; there are ranks {valid_names}")
    linked = [(f"--slow-link {a}-{b}", end) for a, b in question.slow_links for end in (a, b)]
    for option, node in (*((f"--fail-node {n}", n) for n in question.failed_nodes), *linked):
        if node not in node_names:
            valid_names = (
                ", ".join(node_names)
                if question.places and len(node_names) <= 16
                else f"{node_names[0]} to {node_names[-1]}"
            )
            raise UsageError(f"{option}: no node {node}; there are {valid_names}")
    failed = gone(question)
    for rank in question.slow:
        if rank in failed:
            raise UsageError(f"rank {rank}: given as slow and as failed; choose one")
    if len(failed) == len(nodes):
        raise PlanError(f"nothing is left: all {len(nodes)} ranks have failed")
    for subject, speed in (*question.slow.items(), *question.slow_links.items()):
        if not (0 < speed <= 1):
            raise UsageError(f"speed of {subject}: {speed}, must be more than 0 and at most 1")


def device_of(question: Question, rank: int) -> int:
    """Return the index of a rank's device on its node."""
    if question.places:
        return question.devices[rank]
    return (rank if rank < question.world else rank - question.world) % question.gpus_per_node


def gone(question: Question) -> set[int]:
    """Return the ranks that have failed, by themselves or with their node."""
    nodes = question.nodes
    return set(question.failed) | {rank for rank, node in nodes.items() if node in question.failed_nodes}


def pose(question: Question, base: Plan) -> Situation:
    """Return the planner's situation after all failures at once; `base` (`first_plan`) was in effect before them."""
    return situation_of(question, base, gone(question), question.slow, question.slow_links)


def situation_of(
    question: Question, base: Plan, failed: Collection[int], slow: dict[int, float], slow_links: dict[Link, float]
) -> Situation:
    profile = question.profile or catalogue.profile(
        question.model,
        question.hardware,
        sequence_length=question.model.sequence,
        micro_batch_size=question.micro_batch_size,
        tp=question.tp,
        pp=question.pp,
        dp=question.dp,
        gradients_inside=question.world <= question.gpus_per_node,
    )
    survivors = tuple(rank for rank in base.layout.active if rank not in failed)
    state_base = Base(epoch=base.epoch, layout=base.layout, survivors=survivors)
    fits = not question.ignore_memory and worst(question, base)[0] <= question.hardware.memory_bytes
    return Situation(
        epoch=base.epoch + 1,
        base=base.layout,
        available=tuple(rank for rank in sorted(question.nodes) if rank not in failed),
        nodes=question.nodes,
        model=question.model,
        micro_batches=base.micro_batches,
        tokens=tokens_of(question),
        tp=question.tp,
        pp=question.pp,
        chunks=question.chunks,
        schedule=question.schedule,
        sequence_parallel=question.sequence_parallel,
        speeds={rank: speed for rank, speed in sorted(slow.items()) if speed < 1},
        memory_bytes=question.hardware.memory_bytes if fits else None,
        overhead=question.overhead,
        zero_1=question.zero_1,
        profile=profile,
        fresh=len(survivors) < len(base.layout.active) and missing(state_base, outline(question.model)) is not None,
        links={pair: speed for pair, speed in sorted(slow_links.items()) if speed < 1},
    )


# --- memory ---------------------------------------------------------------------------------------------------------


def state_bytes_of(question: Question, layout: Layout) -> int:
    """Return the bytes of state per parameter. Under ZeRO-1, the replicas share the optimizer's state."""
    if not question.zero_1:
        return tensor_bytes.STATE_BYTES[question.model.precision]
    return tensor_bytes.zero_1(memory.sharing(layout))


def tokens_of(question: Question) -> int:
    """Return the number of tokens of a micro-batch."""
    return question.model.sequence * question.micro_batch_size


def stage_bytes(question: Question, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the memory that each rank's device needs, [replica][stage], in bytes; 0 for a stage without ranks.

    Equal replicas are computed once.
    """
    if plan.migrations and not plan.orders:
        plan = msgspec.structs.replace(plan, orders=orders_of(plan))
    bytes_of_kind: dict[object, tuple[int, ...]] = {}
    all_bytes: list[tuple[int, ...]] = []
    for d, replica in enumerate(plan.layout.replicas):
        shape = tuple((stage.tp, stage.chunks) for stage in replica.stages)
        alone = not plan.migrations
        orders = plan.orders[d] if plan.orders else ()
        key = (shape, len(plan.assignment[d]), _renumbered(orders, plan.assignment[d])) if alone else d
        if key not in bytes_of_kind:
            bytes_of_kind[key] = _needs(question, plan, d, replica, alone)
        all_bytes.append(bytes_of_kind[key])
    return tuple(all_bytes)


def _needs(question: Question, plan: Plan, d: int, replica: Replica, alone: bool) -> tuple[int, ...]:
    tokens, state_bytes = tokens_of(question), state_bytes_of(question, plan.layout)
    if alone:
        plan = msgspec.structs.replace(
            plan,
            layout=Layout((replica,)),
            assignment=(plan.assignment[d],),
            orders=(plan.orders[d],) if plan.orders else (),
        )
    return tuple(
        question.overhead.with_gaps(
            memory.needed_bytes(plan, stage.ranks[0], question.model, tokens, state_bytes=state_bytes)
        )
        if stage.ranks
        else 0
        for stage in replica.stages
    )


def _renumbered(orders: Iterable[Order], share: tuple[int, ...]) -> object:
    """Return orders with micro-batches numbered from 0, so that the orders of equal replicas are equal."""
    index_of = {m: i for i, m in enumerate(share)}
    return tuple(tuple((p.kind, index_of[p.micro_batch], p.chunk) for p in order) for order in orders)


def worst(question: Question, plan: Plan) -> tuple[int, int]:
    """Return the most bytes that any rank needs, and the first such rank, negated for sorting."""
    needs = stage_bytes(question, plan)
    return max(
        (need, -stage.ranks[0])
        for replica, bytes_needed in zip(plan.layout.replicas, needs, strict=True)
        for stage, need in zip(replica.stages, bytes_needed, strict=True)
        if stage.ranks
    )


def check_memory(question: Question, base: Plan) -> None:
    """Raise PlanError if devices have too little memory even before any failure, unless memory is ignored."""
    needed, rank = worst(question, base)
    if question.ignore_memory or needed <= question.hardware.memory_bytes:
        return
    savings = [] if question.sequence_parallel or question.tp == 1 else ["--sequence-parallel"]
    savings += [] if question.zero_1 or question.dp == 1 else ["--zero-1"]
    raise PlanError(
        f"rank {-rank}: needs {needed / 1e9:.1f} GB before anything fails, its device has "
        f"{question.hardware.memory_bytes / 1e9:.1f} GB: {parts(question, base, -rank)}; reduce it with "
        f"{', '.join([*savings, 'a larger tp or pp'])} or shorter sequences; --ignore-memory plans without any limit"
    )


def parts(question: Question, plan: Plan, rank: int) -> str:
    """Describe the memory that a rank's device needs, by purpose."""
    state, whole = (
        memory.needed_bytes(plan, rank, question.model, tokens, state_bytes=state_bytes_of(question, plan.layout))
        for tokens in (0, tokens_of(question))
    )
    return question.overhead.describe(state, whole - state)
