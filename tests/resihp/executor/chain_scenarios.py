"""Chains of random plans on real ranks, each compared with a serial model. Loaded by the fork server (`ranks.py`)."""

from __future__ import annotations

import functools
import itertools
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from meeting_place import Line
from megatron.core.transformer import TransformerConfig
from scenarios import CONFIGS, MICRO_BATCHES, SEQUENCE, TIMEOUT_S, VOCAB, Corpus, Watcher

from resihp.executor.engine import Engine
from resihp.executor.group_store import TorchRendezvous
from resihp.executor.state import checkpoint
from resihp.executor.state.optimizer import AdamW
from resihp.parallelism import transfers
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Migration, Order, Plan, Primitive, spread
from resihp.parallelism.transfers import Base
from resihp.parallelism.workload import Evaluation
from resihp.pipeline import program
from resihp.pipeline.program import Compute
from resihp.worker import checkpoints

LAYERS = 6


def random_layout(rng: random.Random, world: int, chunks: int) -> Layout:
    """Replicas of stages of any degree, any cut of the layers, and whoever is left as standby."""
    ranks = rng.sample(range(world), world)
    replicas = []
    while ranks and (not replicas or rng.random() < 0.7):
        pp = rng.choice([1, 2, 2, 3][: max(1, LAYERS // chunks)])
        degrees = [rng.choice([1, 1, 2, 2, 4]) for _ in range(pp)]
        while degrees and sum(degrees) > len(ranks):
            degrees.pop()
        if not degrees:
            degrees = [1]
        pp = len(degrees)
        bounds = [0, *sorted(rng.sample(range(1, LAYERS), pp * chunks - 1)), LAYERS]
        spans = [(first, after - 1) for first, after in itertools.pairwise(bounds)]
        replicas.append(
            Replica(
                tuple(Stage(tuple(ranks.pop() for _ in range(tp)), tuple(spans[s::pp])) for s, tp in enumerate(degrees))
            )
        )
    return Layout(tuple(replicas), tuple(sorted(ranks)))


def random_vacant_layout(rng: random.Random, world: int, chunks: int) -> Layout:
    """Replicas with the same cut of the layers, each of their stages without ranks in some, but not in all."""
    ranks = rng.sample(range(world), world)
    pp = rng.choice([2, 2, 3]) if world > 2 else 2
    dp = rng.choice([2, 2, 3])
    holding = [set(rng.sample(range(dp), rng.randint(1, dp - 1))) for _ in range(pp)]
    holding[0] |= {d for d in range(dp) if not any(d in held for held in holding)}  # each replica has somebody
    places = [(d, s) for s, held in enumerate(holding) for d in held]
    if len(places) > world:
        return random_vacant_layout(rng, world, chunks)
    degrees = dict.fromkeys(places, 1)
    for place in places:
        if sum(degrees.values()) < world and rng.random() < 0.5:
            degrees[place] = 2
    bounds = [0, *sorted(rng.sample(range(1, LAYERS), pp * chunks - 1)), LAYERS]
    spans = [(first, after - 1) for first, after in itertools.pairwise(bounds)]
    replicas = tuple(
        Replica(
            tuple(
                Stage(tuple(ranks.pop() for _ in range(degrees.get((d, s), 0))), tuple(spans[s::pp])) for s in range(pp)
            )
        )
        for d in range(dp)
    )
    found = Layout(replicas, tuple(sorted(ranks)))
    return found if found.vacant else random_vacant_layout(rng, world, chunks)


def random_migrations(rng: random.Random, plan: Plan) -> tuple[Migration, ...]:
    """All that would pass a stage without ranks, and some of the rest."""
    found = []
    for m, path in plan.paths().items():
        for v, stop in enumerate(path):
            stage = plan.layout.replicas[stop.replica].stages[stop.stage]
            hosts = [d for d in plan.layout.hosts(stage.chunks[stop.chunk]) if d != stop.replica]
            if hosts and (not stage.ranks or rng.random() < 0.3):
                found.append(Migration(m, v, rng.choice(hosts)))
    return tuple(found)


def random_orders(rng: random.Random, plan: Plan) -> tuple[tuple[Order, ...], ...]:
    """Any order in which the work can be done at all: whatever is ready is taken at random."""
    split = rng.random() < 0.5
    paths = plan.paths()
    orders: list[list[list[Primitive]]] = [[[] for _ in replica.stages] for replica in plan.layout.replicas]
    ready = [("F", m, 0) for m in paths]
    while ready:
        kind, m, v = ready.pop(rng.randrange(len(ready)))
        stop = paths[m][v]
        orders[stop.replica][stop.stage].append(Primitive(kind, m, stop.chunk))  # type: ignore[arg-type]
        if kind == "F":
            ready.append(("F", m, v + 1) if v + 1 < len(paths[m]) else ("B", m, v))
        elif kind == "B":
            ready += [("B", m, v - 1)] if v else []
            ready += [("W", m, v)] if split else []
    return tuple(tuple(tuple(order) for order in replica) for replica in orders)


def random_plan(rng: random.Random, epoch: int, world: int, *, vacant: bool = False) -> Plan:
    schedule = rng.choice(["1f1b", "interleaved", "zero-bubble", "explicit"])
    make = random_vacant_layout if vacant else random_layout
    layout = make(rng, world, 2 if schedule == "interleaved" else 1)
    shares = [list(share) for share in spread(MICRO_BATCHES, len(layout.replicas))]
    if len(shares) > 1 and rng.random() < 0.5:
        shares[0].append(shares[-1].pop())
    plan = Plan(
        epoch=epoch,
        layout=layout,
        assignment=tuple(map(tuple, shares)),
        schedule="1f1b" if schedule == "explicit" else schedule,
        sequence_parallel=rng.random() < 0.5,
    )
    if vacant or rng.random() < 0.5:
        plan = Plan(
            **{**{f: getattr(plan, f) for f in plan.__struct_fields__}, "migrations": random_migrations(rng, plan)}
        )
    if schedule == "explicit":
        plan = Plan(**{**{f: getattr(plan, f) for f in plan.__struct_fields__}, "orders": random_orders(rng, plan)})
    return random_mirror(rng, plan)


def random_mirror(rng: random.Random, plan: Plan) -> Plan:
    """Ranks on standby hold a copy of one stage of a whole replica, cut as many ways as they like."""
    standby = list(plan.layout.standby)
    whole = [replica for replica in plan.layout.replicas if not replica.vacant]
    if not standby or not whole:
        return plan
    source = rng.choice(whole)
    copied, tp = rng.randrange(len(source.stages)), rng.choice([1, 2] if len(standby) > 1 else [1])
    stages = tuple(
        Stage(tuple(standby[:tp]) if s == copied else (), stage.chunks) for s, stage in enumerate(source.stages)
    )
    return msgspec.structs.replace(
        plan,
        layout=Layout((*plan.layout.replicas, Replica(stages)), tuple(standby[tp:])),
        assignment=(*plan.assignment, ()),
        orders=(*plan.orders, tuple(() for _ in stages)) if plan.orders else (),
    )


def random_survivors(rng: random.Random, plan: Plan, engine: Engine, world: int) -> tuple[int, ...]:
    """Some ranks lose what they hold, as long as somebody else has it; they may work again in the next plan."""
    survivors = list(range(world))
    for rank in rng.sample(range(world), rng.randrange(world)):
        fewer = tuple(r for r in survivors if r != rank)
        if transfers.missing(Base(epoch=plan.epoch, layout=plan.layout, survivors=fewer), engine.specs) is None:
            survivors.remove(rank)
    return tuple(survivors)


def engine_for(rng: random.Random, kind: str, recompute: str) -> Engine:
    recomputation: dict[str, Any] = {
        "none": {},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    }[recompute]
    config = TransformerConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **CONFIGS[kind],
            **({"num_query_groups": 4} if kind == "llama" else {}),
            **recomputation,
        }
    )
    return Engine(
        config,
        vocab_size=VOCAB - 3,
        dataset=_SmallerVocabulary(),
        optimizer=AdamW(lr=1e-2),
        seed=7,
        sequence=SEQUENCE,
        tied=rng.random() < 0.5,
        vocab_multiple=16,
        evaluation=Evaluation(_SmallerVocabulary(), every=1, iterations=2),
    )


class _SmallerVocabulary(Corpus):
    """Tokens below VOCAB - 3, so that the tables are padded."""

    def micro_batches(self, iteration: int) -> list[Any]:
        def fold(load: Any) -> Any:
            return lambda: tuple(array % (VOCAB - 3) for array in load())

        return [
            type(micro_batch)(micro_batch.lengths, micro_batch.samples, fold(micro_batch.load))
            for micro_batch in super().micro_batches(iteration)
        ]


def chain(
    rank: int,
    store: Line,
    *,
    seed: int,
    ranks: int,
    plans: int,
    kind: str,
    recompute: str,
    strict: bool,
    cut: bool,
    root: str,
    vacant: bool = False,
) -> dict[str, Any]:
    """Train one iteration under each of a chain of random plans; compare everything with a serial model.

    `cut`: buckets are so small that last backward passes come in parts, with sums between them. `vacant`: stages of
    every other plan have no ranks.
    """
    if cut:
        program.buckets = functools.partial(program.buckets, bucket_bytes=4000)
    rng, world = random.Random(seed), ranks
    keys = store.keys()
    state = rng.getstate()
    engine = engine_for(rng, kind, recompute)
    rng.setstate(state)
    serial = engine_for(rng, kind, "none")
    engine._strict = strict
    alone = Plan(epoch=1, layout=Layout.uniform(tp=1, pp=1, dp=1, layers=LAYERS), assignment=spread(MICRO_BATCHES, 1))
    serial.adopt(alone, 0)
    serial.connect(alone, 0, TorchRendezvous(torch.distributed.HashStore()), TIMEOUT_S)
    nodes = {r: f"n{r // 2}" for r in range(world)}
    base: Base | None = None
    worst, moved, told, work, mirrors = 0.0, 0, [], 0, 0
    for k in range(1, plans + 1):
        plan = random_plan(rng, k, world, vacant=vacant and k % 2 == 1)
        told.append(
            f"{plan.layout.describe()} {plan.schedule} sp={plan.sequence_parallel} {len(plan.migrations)} moved"
        )
        mirrors += len(plan.mirrors)
        engine.check(plan, rank, base, nodes, None)
        engine.adopt(plan, rank, base, nodes)
        engine.connect(plan, rank, store, TIMEOUT_S)
        if base is not None:
            moved += engine.move(plan, Watcher(), k - 1, serial.updates)
            engine.begin(k)
        _equal_to_the_bit(engine, serial, told)
        if engine.state is not None:
            programs = engine.prepare(plan, rank).programs
            work += sum(isinstance(i, Compute) for i in programs[rank])
            found, tokens = engine.evaluate(plan, Watcher())
            due, its_tokens = serial.evaluate(alone, Watcher())
            assert (tokens, abs(found - due) <= 1e-5 * due) == (its_tokens, True), (told, found, due)
            outcome = engine.run(plan, k, Watcher())
            expected = serial.run(alone, k, Watcher())
            assert abs(outcome.loss - expected.loss) <= 1e-5 * abs(expected.loss), (told, outcome, expected)
            worst = max(worst, _compare_gradients(engine, serial, told))
            engine.step(outcome)
        folder = checkpoints.folder_of(Path(root), k)
        writer = k % len(plan.layout.replicas)  # with any replica all of the state can be written
        if rank in plan.layout.model_copy(writer).ranks:
            checkpoint.save_part(engine, plan, folder, writer)
        _barrier(keys, f"saved/{k}", world)
        if rank == 0:
            files = [(path.name, path.stat().st_size) for path in sorted(folder.glob("part-*"))]
            checkpoints.write_manifest(folder, k, files)
        _barrier(keys, f"written/{k}", world)
        serial.disconnect()
        checkpoint.load(serial, folder)
        serial.connect(alone, 0, TorchRendezvous(torch.distributed.HashStore()), TIMEOUT_S)
        _equal_to_the_bit(engine, serial, told)
        engine.disconnect()
        survivors = random_survivors(rng, plan, engine, world)
        base = Base(epoch=k, layout=plan.layout, survivors=survivors)
    return {"worst": worst, "moved": moved, "told": told, "work": work, "mirrors": mirrors}


def _equal_to_the_bit(engine: Engine, serial: Engine, told: list[str]) -> None:
    """Every slice of value and moments that this rank holds is the one that stayed."""
    if engine.state is None:
        return
    assert serial.state is not None
    for spec in engine.state.specs.values():
        piece = engine.state.share(spec)
        expected = serial.state.tensors(spec, piece)
        for kind, tensor in engine.state.tensors(spec, piece).items():
            assert torch.equal(tensor, expected[kind]), (told, spec.name, kind, engine.rank)


def _compare_gradients(engine: Engine, serial: Engine, told: list[str]) -> float:
    """Largest difference from the serial model's gradients, relative to the largest gradient of the model."""
    assert engine.state is not None
    assert serial.state is not None
    pieces = [(spec, engine.state.share(spec)) for spec in engine.state.specs.values()]
    largest = max(float(serial.state.gradient(serial.state.share(s)).abs().max()) for s in serial.state.specs.values())
    worst = 0.0
    for _, piece in pieces:
        difference = float((engine.state.gradient(piece) - serial.state.gradient(piece)).abs().max()) / largest
        assert difference <= 1e-5, (told, piece, difference)
        worst = max(worst, difference)
    return worst


def _barrier(keys: Any, name: str, world: int) -> None:
    if keys.add(name, 1) == world:
        keys.set(f"{name}/all", "1")
    keys.wait([f"{name}/all"], timedelta(seconds=TIMEOUT_S))
