"""Chains of random plans on real ranks, each compared with a serial model. Loaded by the fork server (`ranks.py`)."""

from __future__ import annotations

import functools
import itertools
import random
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from meeting_place import Line
from megatron.core.transformer import TransformerConfig
from scenarios import CONFIGS, MICRO_BATCHES, SEQUENCE, TIMEOUT_S, VOCAB, Corpus, Watcher

from resihp.executor.engine import Engine
from resihp.executor.group_store import TorchRendezvous
from resihp.executor.state import checkpoint, parameters
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


def engine_for(kind: str, recompute: str, *, tied: bool) -> Engine:
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
        tied=tied,
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
    tied = rng.random() < 0.5
    engine = engine_for(kind, recompute, tied=tied)
    serial = SerialModel(engine_for(kind, "none", tied=tied) if rank == 0 else None, keys, Path(root))
    engine._strict = strict
    nodes = {r: f"n{r // 2}" for r in range(world)}
    base: Base | None = None
    worst, moved, told, work, mirrors = 0.0, 0, [], 0, 0
    held = serial.hold(0)
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
            moved += engine.move(plan, Watcher(), k - 1, held.updates)
            engine.begin(k)
        _compare_state(engine, held, told)
        if engine.state is not None:
            programs = engine.prepare(plan, rank).programs
            work += sum(isinstance(i, Compute) for i in programs[rank])
            expected = serial.train(k)
            found, tokens = engine.evaluate(plan, Watcher())
            close = abs(found - expected.evaluated) <= 1e-5 * expected.evaluated
            assert (tokens, close) == (expected.tokens, True), (told, found, expected.evaluated)
            outcome = engine.run(plan, k, Watcher())
            assert abs(outcome.loss - expected.loss) <= 1e-5 * abs(expected.loss), (told, outcome, expected.loss)
            worst = max(worst, _compare_gradients(engine, expected.gradients, told))
            engine.step(outcome)
        elif rank == 0:
            serial.train(k)
        folder = checkpoints.folder_of(Path(root), k)
        writer = k % len(plan.layout.replicas)  # with any replica all of the state can be written
        if rank in plan.layout.model_copy(writer).ranks:
            checkpoint.save_part(engine, plan, folder, writer)
        _barrier(keys, f"saved/{k}", world)
        if rank == 0:
            files = [(path.name, path.stat().st_size) for path in sorted(folder.glob("part-*"))]
            checkpoints.write_manifest(folder, k, files)
            serial.load(folder)
        held = serial.hold(k)
        _compare_state(engine, held, told)
        engine.disconnect()
        survivors = random_survivors(rng, plan, engine, world)
        base = Base(epoch=k, layout=plan.layout, survivors=survivors)
    return {"worst": worst, "moved": moved, "told": told, "work": work, "mirrors": mirrors}


class Held(NamedTuple):
    """State of the serial model: updates made so far, and each parameter's value and moments, by name and kind."""

    updates: int
    tensors: dict[str, dict[str, torch.Tensor]]


class Trained(NamedTuple):
    """One iteration of the serial model: its evaluation and the tokens of it, its loss, and whole gradients by name."""

    evaluated: float
    tokens: int
    loss: float
    gradients: dict[str, torch.Tensor]


class SerialModel:
    """The model that everything is compared with. Rank 0 trains it; the other ranks read its files below `root`.

    `keys` is the store in which rank 0 says that a file is there. Each method is called by all ranks that want its
    answer, and by rank 0.
    """

    def __init__(self, engine: Engine | None, keys: Any, root: Path) -> None:
        self._engine, self._keys, self._root = engine, keys, root
        self._plan = Plan(
            epoch=1, layout=Layout.uniform(tp=1, pp=1, dp=1, layers=LAYERS), assignment=spread(MICRO_BATCHES, 1)
        )
        if engine is not None:
            engine.adopt(self._plan, 0)
            self._connect(engine)

    def hold(self, k: int) -> Held:
        """Return the state after iteration `k`."""
        if self._engine is None:
            return Held(*self._read(f"state-{k}"))
        state = self._engine.state
        assert state is not None
        tensors = {
            name: {kind: tensor.detach().clone() for kind, tensor in state.optimizer.tensors(name).items()}
            for name in state.specs
        }
        held = Held(self._engine.updates, tensors)
        self._write(f"state-{k}", held)
        return held

    def train(self, k: int) -> Trained:
        """Evaluate the model and compute iteration `k`, without its step."""
        if self._engine is None:
            return Trained(*self._read(f"trained-{k}"))
        evaluated, tokens = self._engine.evaluate(self._plan, Watcher())
        loss = self._engine.run(self._plan, k, Watcher()).loss
        state = self._engine.state
        assert state is not None
        gradients = {name: state.gradients.of(name) for name in state.specs}
        trained = Trained(evaluated, tokens, loss, gradients)
        self._write(f"trained-{k}", trained)
        return trained

    def load(self, folder: Path) -> None:
        """Replace the state with a checkpoint's. Rank 0 only."""
        assert self._engine is not None
        self._engine.disconnect()
        checkpoint.load(self._engine, folder)
        self._connect(self._engine)

    def _connect(self, engine: Engine) -> None:
        engine.connect(self._plan, 0, TorchRendezvous(torch.distributed.HashStore()), TIMEOUT_S)

    def _write(self, name: str, content: tuple[Any, ...]) -> None:
        torch.save(tuple(content), self._root / name)
        self._keys.set(name, "1")

    def _read(self, name: str) -> tuple[Any, ...]:
        self._keys.wait([name], timedelta(seconds=TIMEOUT_S))
        content: tuple[Any, ...] = torch.load(self._root / name, weights_only=False)  # which this test wrote itself
        return content


def _compare_state(engine: Engine, held: Held, told: list[str]) -> None:
    """Each slice of value and moments that this rank holds equals the serial model's, to the bit."""
    if engine.state is None:
        return
    for spec in engine.state.specs.values():
        piece = engine.state.share(spec)
        for kind, tensor in engine.state.tensors(spec, piece).items():
            expected = parameters.view(held.tensors[spec.name][kind], spec, 0, 1, piece)
            assert torch.equal(tensor, expected), (told, spec.name, kind, engine.rank)


def _compare_gradients(engine: Engine, gradients: dict[str, torch.Tensor], told: list[str]) -> float:
    """Largest difference from the serial model's gradients, relative to the largest gradient of the model."""
    assert engine.state is not None
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    worst = 0.0
    for spec in engine.state.specs.values():
        piece = engine.state.share(spec)
        expected = parameters.view(gradients[spec.name], spec, 0, 1, piece)
        difference = float((engine.state.gradient(piece) - expected).abs().max()) / largest
        assert difference <= 1e-5, (told, piece, difference)
        worst = max(worst, difference)
    return worst


def _barrier(keys: Any, name: str, world: int) -> None:
    if keys.add(name, 1) == world:
        keys.set(f"{name}/all", "1")
    keys.wait([f"{name}/all"], timedelta(seconds=TIMEOUT_S))
