"""Situations for the planner's tests, by hand and at random."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import strategies as st

from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.transfers import Base
from resihp.scheduler import Decision, Situation

MODEL = ModelSpec(layers=6, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=256, sequence=64)
"""Its head is as heavy as a third of a layer."""


def on_nodes(ranks: int, of: int) -> dict[int, str]:
    """Ranks fill nodes of so many devices in order, as a job's do."""
    return {rank: f"n{rank // of + 1}" for rank in range(ranks)}


def situation(
    base: Layout,
    *,
    nodes: dict[int, str],
    tp: int,
    pp: int,
    lost: Iterable[int] = (),
    came: Iterable[int] = (),
    model: ModelSpec = MODEL,
    micro_batches: int = 8,
    epoch: int = 2,
    chunks: int = 1,
    schedule: str = "1f1b",
    speeds: dict[int, float] | None = None,
    memory_bytes: int | None = None,
    tokens: int = 0,
    stale: tuple[int, ...] = (),
) -> Situation:
    """`base` without those `lost`, and with those who `came`."""
    return Situation(
        epoch=epoch,
        base=base,
        available=tuple(sorted({*base.ranks, *came}.difference(lost))),
        nodes=nodes,
        model=model,
        micro_batches=micro_batches,
        tp=tp,
        pp=pp,
        chunks=chunks,
        schedule=schedule,
        speeds=speeds or {},
        memory_bytes=memory_bytes,
        tokens=tokens,
        stale=stale,
    )


def base_of(case: Situation) -> Base:
    """Where the state is, as the controller would say."""
    survivors = set(case.available).difference(case.stale).intersection(case.base.active)
    return Base(epoch=case.epoch - 1, layout=case.base, survivors=tuple(sorted(survivors)))


def check(case: Situation, decision: Decision, specs: tuple[ParameterSpec, ...] = ()) -> None:
    """What is true of every decision."""
    plan = decision.plan
    validate(plan.layout, case.model)
    assert plan.layout.ranks == tuple(sorted(case.available))
    assert plan.epoch == case.epoch
    assert plan.schedule == case.schedule
    assert plan.micro_batches == case.micro_batches
    dealt = [m for share in plan.assignment for m in share]
    assert (sorted(dealt) if plan.layout.vacant else dealt) == list(range(case.micro_batches))
    assert all(plan.assignment)
    assert len(plan.assignment) == len(plan.layout.replicas)
    for replica in plan.layout.replicas:
        tight = case.memory_bytes is not None  # where nothing else has room, a pipeline is as long as it must be
        assert len(replica.stages) <= case.most_stages or tight
        for stage in replica.stages:
            assert stage.tp <= case.tp
            assert len({case.nodes[rank] for rank in stage.ranks}) == 1 or not stage.ranks


@st.composite
def cases(draw: st.DrawFn) -> Situation:
    """Anything that may have become of a job: unequal replicas, idle ranks, losses, newcomers, slow ranks."""
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    chunks = draw(st.sampled_from([1, 1, 2]))
    layers = draw(st.integers(pp * chunks, 9))
    model = ModelSpec(
        layers=layers,
        hidden=64,
        heads=4,
        kv_groups=4,
        ffn_hidden=256,
        vocab=draw(st.sampled_from([64, 768])),
        sequence=9,
    )
    devices = draw(st.sampled_from([d for d in (1, 2, 3, 4, 8) if d >= tp]))
    free = {f"n{n + 1}": list(range(n * devices, (n + 1) * devices)) for n in range(12)}
    nodes = {rank: node for node, ranks in free.items() for rank in ranks}
    replicas = []
    for _ in range(draw(st.integers(1, 3))):
        groups: list[tuple[int, ...]] = []
        for _ in range(draw(st.sampled_from([pp, pp, draw(st.integers(1, pp))]))):
            k = draw(st.sampled_from([tp, tp, *(d for d in (1, 2, 4) if d <= tp)]))
            node = next(node for node, ranks in free.items() if len(ranks) >= k)
            groups.append(tuple(draw(st.permutations(free[node]))[:k]))
            free[node] = [rank for rank in free[node] if rank not in groups[-1]]
        depth = len(groups) * chunks
        cuts = sorted(draw(st.permutations(range(1, layers)))[: depth - 1])
        spans = [(a, b - 1) for a, b in itertools.pairwise((0, *cuts, layers))]
        replicas.append(Replica(tuple(Stage(g, tuple(spans[s :: len(groups)])) for s, g in enumerate(groups))))
    idle = sorted(itertools.chain.from_iterable(free.values()))[:8]
    standby = draw(st.sets(st.sampled_from(idle), max_size=4)) if idle else set()
    base = Layout(tuple(replicas), tuple(sorted(standby)))
    others = sorted(set(idle) - standby)
    came = draw(st.sets(st.sampled_from(others), max_size=4)) if others else set()
    lost = draw(st.sets(st.sampled_from(base.ranks), max_size=min(5, len(base.ranks) - 1)))
    left = sorted({*base.ranks, *came} - lost)
    speeds = draw(st.dictionaries(st.sampled_from(left), st.sampled_from([0.2, 0.4, 0.9, 1.0]), max_size=4))
    micro_batches = len(replicas) * draw(st.integers(1, 4)) + draw(st.integers(0, 2))
    return situation(
        base,
        nodes=nodes,
        tp=tp,
        pp=pp,
        lost=lost,
        came=came,
        model=model,
        micro_batches=micro_batches,
        chunks=chunks,
        schedule=draw(st.sampled_from(["1f1b", "1f1b", "zero-bubble"])),
        speeds=draw(st.sampled_from([{}, speeds])),
        epoch=draw(st.integers(2, 9)),
    )
