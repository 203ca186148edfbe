"""What ranks do in the executor's tests. Loaded by the fork server (`ranks.py`), called once per rank."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
import torch.nn.functional as F
from counting import Allocated, BackEndCalls, HiddenReads, HostWaits
from meeting_place import Line
from megatron.core.transformer import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode

from resihp.errors import CommunicatorError, DatasetError, ResihpError
from resihp.executor import backends
from resihp.executor import engine as engine_module
from resihp.executor.communicators import Communicators
from resihp.executor.compute.attention import PackedAttention, Packing
from resihp.executor.compute.channels import Channel
from resihp.executor.compute.stopwatch import Stopwatch
from resihp.executor.engine import Engine
from resihp.executor.group_store import TorchRendezvous
from resihp.executor.state import checkpoint
from resihp.executor.state.optimizer import AdamW
from resihp.executor.supervised import probe
from resihp.executor.trainer import Trainer
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.ownership import counted, size_of
from resihp.parallelism.plan import Plan, spread
from resihp.parallelism.transfers import Base
from resihp.parallelism.workload import Evaluation, MicroBatch
from resihp.pipeline import program
from resihp.pipeline.program import Compute, GroupSpec
from resihp.protocol import messages as m
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.held_state import holdings
from resihp.scheduler.cost.transition_memory import beside
from resihp.worker import checkpoints

VOCAB, SEQUENCE, MICRO_BATCHES = 64, 32, 6
TIMEOUT_S = 60.0

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": {"add_qkv_bias": True},
    "llama": {
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "ffn_hidden_size": 48,
    },
    "qwen3": {
        "qk_layernorm": True,
        "kv_channels": 12,
        "window_size": (4, 0),
        "window_attn_skip_freq": 2,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    },
}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
CONFIGS |= {f"{kind}-bf16": {**settings, **BF16} for kind, settings in CONFIGS.items()}


class Corpus:
    """Packed documents of uneven lengths with a rule that can be learned; `broken` gives ranks different data."""

    def __init__(self, broken: int = 0) -> None:
        self._broken = broken

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        return [self._micro_batch(iteration, m) for m in range(MICRO_BATCHES)]

    def _micro_batch(self, iteration: int, m: int) -> MicroBatch:
        generator = np.random.default_rng((iteration, m))
        lengths = tuple(int(n) for n in generator.integers(1, SEQUENCE, size=1 + m % 3))
        tokens = generator.integers(0, VOCAB, size=sum(lengths))
        samples = tuple(1000 * iteration + 10 * m + i + self._broken for i in range(len(lengths)))
        return MicroBatch(lengths, samples, lambda: (tokens, (tokens * 5 + 1) % VOCAB))


class Watcher:
    """Observer that remembers, and may do something on entering a phase or on waiting."""

    def __init__(self, on_enter: Any = None, on_wait: Any = None) -> None:
        self.phases: list[str] = []
        self.primitives = 0
        self.waits: list[bool] = []
        self._on_enter, self._on_wait = on_enter, on_wait

    def enter(self, phase: str) -> None:
        self.phases.append(phase)
        if self._on_enter:
            self._on_enter(phase)

    def progressed(self) -> None:
        self.primitives += 1

    def communicating(self, waits: bool) -> None:
        self.waits.append(waits)
        if self._on_wait and waits:
            self._on_wait()


def engine_of(
    kind: str, *, broken: int = 0, optimizer: AdamW | None = None, hidden_size: int = 32, **extra: Any
) -> Engine:
    config = TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": hidden_size,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **CONFIGS[kind],
        }
    )
    return Engine(
        config,
        vocab_size=VOCAB,
        dataset=Corpus(broken),
        optimizer=optimizer or AdamW(lr=2e-2, warmup=2, decay_iterations=20),
        seed=7,
        sequence=SEQUENCE,
        **extra,
    )


def plan_of(epoch: int, layout: Layout, assignment: Any = None) -> Plan:
    shares = assignment or spread(MICRO_BATCHES, len(layout.replicas))
    return Plan(epoch=epoch, layout=layout, assignment=tuple(tuple(share) for share in shares))


def grid(tp: int, pp: int, dp: int) -> Layout:
    return Layout.uniform(tp=tp, pp=pp, dp=dp, layers=4)


def state_digest(engine: Engine) -> dict[str, str]:
    """Digest of each held slice's value and moments, by name and interval."""
    assert engine.state is not None
    digests = {}
    for spec in engine.state.specs.values():
        piece = engine.state.share(spec)
        content = b"".join(t.contiguous().numpy().tobytes() for t in engine.state.tensors(spec, piece).values())
        digests[f"{spec.name}:{piece.start}"] = hashlib.sha256(content).hexdigest()
    return digests


def called_off(rank: int, store: Line) -> str:
    """What comes of building communicators when the rank was asked to park before."""
    engine, plan = engine_of("gpt"), plan_of(1, Layout.uniform(tp=1, pp=1, dp=2, layers=4))
    engine.adopt(plan, rank)
    try:
        engine.connect(plan, rank, store, TIMEOUT_S, lambda: True)
    except CommunicatorError as error:
        return str(error)
    return "connected"


def freed_and_connected(rank: int, store: Line) -> list[str]:
    """The order in which cached memory is freed and a communicator is made."""
    engine, plan = engine_of("gpt"), plan_of(1, Layout.uniform(tp=1, pp=1, dp=2, layers=4))
    back_end, calls = engine._back_end, list[str]()
    free, connect = back_end.free_cached_memory, back_end.connect
    back_end.free_cached_memory = lambda: (calls.append("freed"), free())[1]  # type: ignore[method-assign]
    back_end.connect = lambda *given: (calls.append("connected"), connect(*given))[1]  # type: ignore[method-assign]
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    engine.run(plan, 1, Watcher())  # no rank ends while another still connects
    return calls


def train(
    rank: int,
    store: Line,
    *,
    kind: str = "gpt",
    grid_of: tuple[int, int, int] = (1, 1, 1),
    stages: list[Any] | None = None,
    iterations: int = 4,
    assignment: Any = None,
    extra: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    bucket_bytes: int | None = None,
    cut: bool = True,
) -> dict[str, Any]:
    """`extra` settings of the engine, `plan` of the plan; without `cut` no backward pass comes in parts."""
    if bucket_bytes is not None:
        program.buckets = functools.partial(program.buckets, bucket_bytes=bucket_bytes)
    if not cut:
        program.cuts = lambda *_: {}
    engine = engine_of(kind, **(extra or {}))
    layout = grid(*grid_of)
    if stages is not None:  # [replica][stage] = (ranks, (first, last))
        layout = Layout(
            tuple(Replica(tuple(Stage(tuple(r), (tuple(span),)) for r, span in replica)) for replica in stages)
        )
    carried_out = msgspec.structs.replace(plan_of(1, layout, assignment), **(plan or {}))
    engine.adopt(carried_out, rank)
    engine.connect(carried_out, rank, store, TIMEOUT_S)
    outcomes, watcher = [], Watcher()
    for iteration in range(1, iterations + 1):
        outcome = engine.run(carried_out, iteration, watcher)
        assert engine.ready == iteration
        engine.step(outcome)
        outcomes.append(msgspec.to_builtins(outcome))
    gathered = engine.gather([rank, "x" * rank])
    own = engine.prepare(carried_out, rank).programs[rank]
    engine.disconnect()
    return {
        "outcomes": outcomes,
        "phases": watcher.phases,
        "primitives": watcher.primitives,
        "waits": len(watcher.waits),
        "compute_s": float(engine.measured[2].sum()),
        "gathered": gathered,
        "digest": state_digest(engine),
        "parts": sum(isinstance(i, program.Compute) and i.layers is not None for i in own),
    }


def evaluated(rank: int, store: Line, *, grid_of: tuple[int, int, int], plan: dict[str, Any]) -> dict[str, Any]:
    """Losses of the iterations that an evaluation goes over, each trained on from the same first weights; its own; and
    what is held before and after it, gradients of a step that others may still have to finish among it."""
    last = engine_of("gpt", evaluation=Evaluation(Corpus(), every=1, iterations=3))
    layout = Layout.uniform(tp=grid_of[0], pp=grid_of[1], dp=grid_of[2], layers=4, chunks=plan.pop("chunks", 1))
    carried_out = msgspec.structs.replace(plan_of(1, layout), **plan)
    last.adopt(carried_out, rank)
    last.connect(carried_out, rank, store, TIMEOUT_S)
    first, watcher = last.evaluate(carried_out, Watcher()), Watcher()
    alone = engine_of("gpt")
    whole = plan_of(1, grid(1, 1, 1))
    alone.adopt(whole, 0)
    alone.connect(whole, 0, TorchRendezvous(torch.distributed.HashStore()), TIMEOUT_S)
    outcomes = []
    for iteration in (1, 2, 3):
        assert alone.state is not None
        alone.state.stepped = iteration - 1
        outcomes.append(alone.run(whole, iteration, Watcher()))
    last.run(carried_out, 1, Watcher())
    assert last.state is not None
    gradients = {name: p.grad.clone() for name, p in last.state.optimizer.parameters.items()}
    before = state_digest(last), last.measured.tobytes(), last.ready
    again = last.evaluate(carried_out, watcher)
    kept = all(torch.equal(p.grad, gradients[name]) for name, p in last.state.optimizer.parameters.items())
    programs = last.prepare(carried_out, rank).programs
    last.disconnect()
    return {
        "first": first,
        "again": again,
        "expected": sum(o.loss * o.tokens for o in outcomes) / sum(o.tokens for o in outcomes),
        "tokens": sum(o.tokens for o in outcomes),
        "kept": kept and before == (state_digest(last), last.measured.tobytes(), last.ready),
        "phases": watcher.phases,
        "primitives": watcher.primitives,
        "forwards": sum(isinstance(i, Compute) and i.primitive.kind == "F" for i in programs[rank]),
    }


def transition_allocations(rank: int, store: Line, *, away: bool) -> dict[str, float]:
    """A stage gives up one of its two layers and gets another one: bytes of its state that are new, and allocated
    where. `away`: the device is none of the host's (meta stands in for a GPU)."""
    engine = engine_of("llama")
    if away:
        engine.device = engine._builder.device = torch.device("meta")
    before, after = (
        Layout(tuple(Replica((Stage((2 * r,), (first,)), Stage((2 * r + 1,), (second,)))) for r in range(2)))
        for first, second in (((0, 1), (2, 3)), ((0, 0), (1, 3)))
    )
    engine.adopt(plan_of(1, before), 1)
    assert engine.state is not None
    held = set(engine.state.specs)
    engine.state.begin((), 1)  # as an iteration does
    flat = weakref.ref(engine.state.gradients.of(next(iter(held)))._base)
    base = Base(epoch=1, layout=before, survivors=(0, 1, 2, 3))
    with Allocated() as allocated:
        allocated.beside = lambda: flat() is not None
        engine.adopt(plan_of(2, after), 1, base, dict.fromkeys(range(4), "node"))
    assert engine.next is not None
    new = [name for name in engine.next.specs if name not in held]
    tensors = [tensor for name in new for tensor in engine.next.optimizer.tensors(name).values()]
    angles = SEQUENCE * 8 * 4
    return {
        "new": sum(tensor.nbytes for tensor in tensors),
        "angles": angles,
        "host": allocated.bytes["cpu"],
        "beside_gradients": allocated.bytes_beside,
    }


def reads_its_stopwatch(rank: int, store: Line) -> dict[str, Any]:
    """Whether an iteration's times are read before the step after it is under way, and what they are then."""
    engine = engine_of("gpt")
    plan = plan_of(1, grid(1, 1, 1))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    read: list[str] = []

    class Watched(Stopwatch):
        def read(self) -> Any:
            read.append("times")
            return super().read()

        def reduced_s(self) -> float:
            read.append("sums")
            return super().reduced_s()

    engine_module.stopwatch_of = lambda device, speed: Watched(speed)
    engine.step(engine.run(plan, 1, Watcher()))
    early = list(read)
    return {"early": early, "primitives": engine.measured.shape[1], "reduced_s": engine.reduced_s, "read": read}


def host_waits(rank: int, store: Line, *, grid_of: tuple[int, int, int]) -> list[dict[str, int]]:
    """What the host would wait for a GPU for, in each of some iterations with their steps."""
    engine = engine_of("llama")
    plan = plan_of(1, grid(*grid_of))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    counted = []
    for iteration in range(1, 4):
        with HostWaits() as waits:
            engine.step(engine.run(plan, iteration, Watcher()))
        counted.append(dict(waits.calls))
    engine.disconnect()
    return counted


def counted_calls(rank: int, store: Line) -> dict[str, Any]:
    """Communicators that a rank of TP2 PP2 DP2 makes over NCCL, and what its host waits for in an iteration.

    Replica 1 loses rank 7, goes on with one rank in its last stage, and gets rank 7 back: two changes of layout.
    """
    os.environ[backends.BACKEND_VARIABLE] = "nccl-like"
    engine = engine_of("llama")
    calls = BackEndCalls(engine._back_end, backends._NcclLikeWork)
    whole = grid(2, 2, 2)
    first, second = whole.replicas
    reduced = Layout((first, Replica((second.stages[0], Stage((6,), second.stages[1].chunks)))), standby=(7,))
    plans = [plan_of(epoch, layout) for epoch, layout in enumerate((whole, reduced, whole), 1)]
    communicators, host_waits = [], []
    for before, plan in zip((None, *plans), plans, strict=False):
        base = None
        if before is not None:
            engine.disconnect()
            survivors = tuple(range(8) if before is not whole else range(7))
            base = Base(epoch=before.epoch, layout=before.layout, survivors=survivors)
        calls.made.clear()
        engine.adopt(plan, rank, base, dict.fromkeys(range(8), "n1"))
        engine.connect(plan, rank, store, TIMEOUT_S)
        communicators.append(dict(calls.made))
        if base is not None:
            engine.move(plan, Watcher(), 3 * (plan.epoch - 1), 3 * (plan.epoch - 1))
            engine.begin(plan.epoch)
        if rank not in plan.layout.active:
            continue
        for iteration in range(engine.stepped + 1, engine.stepped + 4):
            calls.waits.clear()
            with HostWaits() as read, HiddenReads() as hidden:
                engine.step(engine.run(plan, iteration, Watcher()))
            host_waits.append(dict(read.calls + hidden.calls + calls.waits))
    engine.disconnect()
    return {"communicators": communicators, "host waits": host_waits}


def slow_peer(rank: int, store: Line, *, grid_of: tuple[int, int, int], slow: int, speed: float) -> dict[str, Any]:
    """Medians over iterations of each rank's time in chunks and of its own work in them, with one slow device."""
    engine = engine_of("gpt")
    if rank == slow:
        engine.speed = lambda: speed
    plan = plan_of(1, grid(*grid_of))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    rows = []
    for iteration in range(1, 9):
        engine.step(engine.run(plan, iteration, Watcher()))
        rows.append(engine.measured.sum(axis=1))
    measured = engine.measured
    engine.disconnect()
    _, spans, compute, tokens, squares = np.median(rows, axis=0).tolist()
    ends = measured[0] + measured[1]
    return {
        "spans": spans,
        "compute": compute,
        "tokens": tokens,
        "squares": squares,
        "primitives": measured.shape[1],
        "ordered": bool((measured[0][1:] >= ends[:-1] - 1e-6).all()),
        "reduced": bool(engine.reduced_s >= ends[-1]),
    }


def probe_devices(rank: int, store: Line, *, pairs: list[list[list[int]]], slow: int, speed: float) -> dict[str, Any]:
    engine = engine_of("gpt")
    if rank == slow:
        engine.speed = lambda: speed
    rounds = tuple(tuple((a, b) for a, b in round_) for round_ in pairs)
    answers = [probe.measure(m.Probe(probe=n, pairs=rounds), rank, engine, store) for n in (1, 2)]
    return {
        "speed": msgspec.to_builtins(answers[1].speed),
        "error": "".join(answer.error + answer.missed for answer in answers),
        "peers": [transfer.peer for transfer in answers[1].transfers],
    }


def peer_dies_while_it_connects(rank: int, store: Line, *, dies: int, back_end: str) -> dict[str, Any]:
    """Seconds from being woken to being free, when the peer has told its address and then died, and whether a thread
    still connects then."""
    os.environ[backends.BACKEND_VARIABLE] = back_end
    world = GroupSpec("world", (0, 1))
    communicators = Communicators(m.MeetingId(epoch=1), rank, [world], TIMEOUT_S, backends.chosen())
    keys = store.keys()
    if rank == dies:
        threading.Thread(target=communicators.open, args=(store,), daemon=True).start()
        keys.wait(["heard"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.attend(m.MeetingId(epoch=1), ["world"], TIMEOUT_S).store("world").wait([f"0/{dies}"])
    keys.set("heard", "1")
    time.sleep(0.2)
    woken = []

    def wake() -> None:
        woken.append(time.monotonic())
        communicators.wake()

    threading.Timer(0.3, wake).start()
    try:
        communicators.open(store)
    except CommunicatorError:
        free_s = time.monotonic() - woken[0] if woken else 0.0
        busy = [each for each in threading.enumerate() if each.name == "resihp-connecting"]
        return {"free_s": free_s, "connects": bool(busy)}
    raise AssertionError("connected to the dead")


def probe_alone(rank: int, store: Line, *, back_end: str) -> dict[str, Any]:
    """Ask for a peer that is not there."""
    os.environ[backends.BACKEND_VARIABLE] = back_end
    engine_module.MEETING_TIMEOUT_S = 0.3
    answer = probe.measure(m.Probe(probe=1, pairs=(((0, 1),),)), rank, engine_of("gpt"), store)
    return {"error": answer.error, "missed": answer.missed, "speed": answer.speed.flops}


def probe_links_in_training(rank: int, store: Line, *, grid_of: tuple[int, int, int], strict: bool) -> dict[str, Any]:
    """Train four iterations. After the second, two pairs measure their links; after the third, rank 0 waits in vain."""
    os.environ["RESIHP_STRICT_ORDER"] = str(int(strict))
    engine = engine_of("gpt")
    plan = plan_of(1, grid(*grid_of))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    pairs = (((0, 2), (1, 3)),)
    answers, losses = [], []
    for iteration in range(1, 5):
        outcome = engine.run(plan, iteration, Watcher())
        engine.step(outcome)
        losses.append(outcome.loss)
        asked = m.Probe(probe=iteration, pairs=pairs, after_iteration=iteration)
        if (iteration == 2 and rank in (0, 1, 2, 3)) or (iteration == 3 and rank == 0):
            probe.ANNOUNCED_TIMEOUT_S = 2.0 if iteration == 2 else 0.3
            answers.append(msgspec.to_builtins(probe.measure_links(asked, rank, engine, store, lambda: False)))
    engine.disconnect()
    return {"losses": losses, "answers": answers, "digest": state_digest(engine)}


def peer_dies_in_a_probe(rank: int, store: Line, *, called_off: bool) -> dict[str, Any]:
    """Rank 1 comes to measure its link with rank 0, and dies; rank 0 is woken. Or it was called off before."""
    engine = engine_of("gpt")
    plan = plan_of(1, grid(1, 2, 1))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    engine.step(engine.run(plan, 1, Watcher()))
    if rank == 1:
        if not called_off:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        return {}
    asked = m.Probe(probe=1, pairs=(((0, 1),),), after_iteration=1)
    threading.Timer(0.8, engine.wake).start()
    answer = probe.measure_links(asked, rank, engine, store, lambda: called_off)
    error = ""
    if not called_off:
        try:
            engine.run(plan, 2, Watcher())
        except CommunicatorError as caught:
            error = str(caught)
    return {"missed": answer.missed, "seconds": answer.seconds, "error": error}


def attention(rank: int, store: Line, *, groups: int, window: int) -> dict[str, float]:
    """Largest differences of packed attention and its gradients from a block mask over the whole micro-batch."""
    heads, width, lengths = 4, 8, (5, 1, 17, 9)
    torch.manual_seed(1)
    total = sum(lengths)
    tensors = [torch.randn(total, 1, n, width, dtype=torch.float64) for n in (heads, groups, groups)]
    packed = [tensor.clone().requires_grad_() for tensor in tensors]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    if window >= 0:
        config.window_size = (window, 0)
    module = PackedAttention(config, 1)
    out = module(*packed, None, packed_seq_params=Packing.of(lengths))
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in plain)
    k, v = (tensor.repeat_interleave(heads // groups, dim=1) for tensor in (k, v))
    document = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    allowed = (document[:, None] == document[None]) & torch.ones(total, total).tril().bool()
    if window >= 0:
        allowed &= torch.arange(total)[:, None] - torch.arange(total)[None] <= window
    scores = (q @ k.transpose(-1, -2) / width**0.5).masked_fill(~allowed, float("-inf"))
    expected = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    return {
        "shape": list(out.shape) == [total, 1, heads * width],
        "output": (out - expected).abs().max().item(),
        "gradients": max((a.grad - b.grad).abs().max().item() for a, b in zip(packed, plain, strict=True)),
    }


def packing_is_invisible(rank: int, store: Line, *, positions: str) -> list[float]:
    """Loss sums of two documents packed together, and each alone."""
    engine = engine_of("gpt", position_embedding=positions)
    engine.adopt(plan_of(1, grid(1, 1, 1)), 0)
    stage = engine.state.stage
    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, VOCAB, size=30))
    both = stage(0, (11, 19), tokens, tokens.roll(-1)).item()
    halves = zip(tokens.split([11, 19]), tokens.roll(-1).split([11, 19]), strict=True)
    return [both, sum(stage(0, (len(half),), half, labels).item() for half, labels in halves)]


def save(rank: int, store: Line, *, kind: str, grid_of: tuple[int, int, int], root: str, iterations: int) -> Any:
    """Train, save, and go on for two iterations more."""
    engine = engine_of(kind)
    plan = plan_of(1, grid(*grid_of))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    for iteration in range(1, iterations + 1):
        engine.step(engine.run(plan, iteration, Watcher()))
    folder = checkpoints.folder_of(Path(root), iterations)
    part = checkpoint.save_part(engine, plan, folder) if rank in plan.layout.replicas[0].ranks else None
    parts = [part for part in engine.gather(part) if part is not None]
    if rank == 0:
        checkpoints.write_manifest(folder, iterations, [(file, size) for file, size in parts])
    digest = state_digest(engine)
    losses = []
    for iteration in (iterations + 1, iterations + 2):
        outcome = engine.run(plan, iteration, Watcher())
        engine.step(outcome)
        losses.append(outcome.loss)
    engine.disconnect()
    return {"digest": digest, "losses": losses}


def restore(rank: int, store: Line, *, kind: str, grid_of: tuple[int, int, int], root: str) -> Any:
    """Load the newest checkpoint, save it again next to it, and go on for two iterations."""
    engine = engine_of(kind)
    plan = plan_of(2, grid(*grid_of))
    engine.adopt(plan, rank)
    folder = checkpoints.newest_complete(Path(root))
    assert folder is not None
    checkpoint.load(engine, folder)
    digest = state_digest(engine)
    engine.connect(plan, rank, store, TIMEOUT_S)
    losses = []
    for iteration in (engine.stepped + 1, engine.stepped + 2):
        outcome = engine.run(plan, iteration, Watcher())
        engine.step(outcome)
        losses.append(outcome.loss)
    engine.disconnect()
    return {"digest": digest, "losses": losses, "updates": engine.updates}


def restore_error(rank: int, store: Line, *, kind: str, folder: str, forget: tuple[str, ...] = ()) -> str:
    """What comes of loading a checkpoint from whose model some fields are taken out first."""
    engine = engine_of(kind)
    for part in Path(folder).glob("part-*") if forget else ():
        content = torch.load(part)
        model = msgspec.json.decode(content["model"])
        content["model"] = msgspec.json.encode({key: model[key] for key in model if key not in forget}).decode()
        torch.save(content, part)
        checkpoints.write_manifest(Path(folder), content["iteration"], [(part.name, part.stat().st_size)], "")
    engine.adopt(plan_of(1, grid(1, 1, 1)), 0)
    try:
        checkpoint.load(engine, Path(folder))
    except ResihpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def woken(rank: int, store: Line) -> dict[str, Any]:
    """Rank 0 waits for a peer that does not come, is woken by a thread, and finishes under the next epoch."""
    keys = store.keys()
    engine = engine_of("gpt")
    plan = plan_of(1, grid(1, 1, 2))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    error = ""
    if rank == 0:
        waits = threading.Event()
        threading.Thread(target=lambda: (waits.wait(), engine.wake()), daemon=True).start()
        try:
            engine.run(plan, 1, Watcher(on_wait=waits.set))
        except CommunicatorError as caught:
            error = str(caught)
        keys.set("woken", "1")
    else:
        keys.wait(["woken"], timedelta(seconds=TIMEOUT_S))
    engine.disconnect()
    engine.disconnect()
    plan = plan_of(2, grid(1, 1, 2))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    outcome = engine.run(plan, 1, Watcher())
    engine.step(outcome)
    engine.disconnect()
    return {"error": error, "loss": outcome.loss}


def woken_while_connecting(rank: int, store: Line) -> str:
    """The only rank that comes, of two."""
    engine = engine_of("gpt")
    plan = plan_of(1, grid(1, 1, 2))
    engine.adopt(plan, 0)
    done = threading.Event()
    threading.Thread(target=_wake_until_done, args=(engine, done), daemon=True).start()
    try:
        engine.connect(plan, 0, store, TIMEOUT_S)
    except CommunicatorError as caught:
        return str(caught)
    finally:
        done.set()
    return ""


def _wake_until_done(engine: Engine, done: threading.Event) -> None:
    while not done.wait(0.01):
        engine.wake()


def survive(rank: int, store: Line, *, phase: str, bucket_bytes: int) -> dict[str, Any]:
    """Rank 3 of TP1 PP2 DP2 dies in `phase` of iteration 2; replica 0 goes on alone and redoes or finishes it."""
    program.buckets = functools.partial(program.buckets, bucket_bytes=bucket_bytes)
    keys = store.keys()
    alarms = store.keys()
    engine = engine_of("gpt")
    plan = plan_of(1, grid(1, 2, 2))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)

    def watch() -> None:
        alarms.wait(["alarm"], timedelta(seconds=TIMEOUT_S))
        engine.wake()

    def die(entered: str) -> None:
        if entered == phase:
            if os.environ.get(backends.BACKEND_VARIABLE) == "nccl-like":
                keys.set("alarm", "1")  # no survivor is told by its communicators
            os.kill(os.getpid(), signal.SIGKILL)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    losses, error, iteration = [], "", 1
    try:
        for iteration in range(1, 5):
            outcome = engine.run(plan, iteration, Watcher(die if (rank, iteration) == (3, 2) else None))
            engine.step(outcome)
            losses.append(outcome.loss)
    except CommunicatorError as caught:
        error = str(caught)
        keys.set("alarm", "1")
        watcher.join(TIMEOUT_S)  # else it may wake us while we connect under the next plan
    engine.disconnect()
    if rank == 2:
        return {"error": error}
    base = Base(epoch=1, layout=plan.layout, survivors=(0, 1, 2))
    plan = plan_of(2, Layout(plan.layout.replicas[:1], standby=(2,)))
    engine.adopt(plan, rank, base, dict.fromkeys(range(4), "n1"))
    engine.connect(plan, rank, store, TIMEOUT_S)
    engine.move(plan, Watcher(), engine.stepped, engine.updates)
    engine.begin(2)
    for again in range(iteration, 5):
        outcome = engine.run(plan, again, Watcher())
        engine.step(outcome)
        losses.append(outcome.loss)
    engine.disconnect()
    return {"error": error, "losses": losses}


def impure(rank: int, store: Line) -> str:
    """Ranks whose data sets disagree: where that could be an abort's doing, it is believed when it comes again."""
    engine = engine_of("gpt", broken=rank)
    plan = plan_of(1, grid(1, 1, 2))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    for _ in range(2):
        try:
            engine.run(plan, 1, Watcher())
        except CommunicatorError:
            continue
        except DatasetError as error:
            return str(error)
    return ""


def runs_out_of_memory(rank: int, store: Line) -> list[str]:
    """What a script is told whose device is full in the second iteration."""

    class Hungry(Corpus):
        def micro_batches(self, iteration: int) -> list[MicroBatch]:
            return super().micro_batches(iteration) if iteration == 1 else [self._hungry(iteration)] * MICRO_BATCHES

        def _hungry(self, iteration: int) -> MicroBatch:
            return msgspec.structs.replace(super().micro_batches(iteration)[0], load=_full)

    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
    )
    trainer = Trainer(config, vocab_size=VOCAB, dataset=Hungry(), optimizer=AdamW(), sequence=SEQUENCE)
    try:
        trainer.train(2)
    except torch.OutOfMemoryError as error:
        return [str(error), *error.__notes__]
    return []


def _full() -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def not_finite(rank: int, store: Line) -> dict[str, Any]:
    """One rank's parameters are broken before iteration 2."""
    engine = engine_of("gpt")
    plan = plan_of(1, grid(2, 1, 2))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    engine.step(engine.run(plan, 1, Watcher()))
    if rank == 2:
        engine.state.optimizer.parameters["layers.1.mlp.linear_fc2.weight"].data[0, 0] = float("inf")
    before = state_digest(engine)
    outcome = engine.run(plan, 2, Watcher())
    engine.step(outcome)
    return {
        "skip": outcome.skip,
        "clip": outcome.clip,
        "unchanged": state_digest(engine) == before,
        "stepped": engine.stepped,
        "updates": engine.updates,
    }


def rules(rank: int, store: Line) -> list[str]:
    """Messages of everything an engine refuses after a step."""
    engine = engine_of("gpt")
    plan = plan_of(1, grid(1, 1, 1))
    engine.adopt(plan, 0)
    engine.connect(plan, 0, TorchRendezvous(torch.distributed.HashStore()), TIMEOUT_S)
    outcome = engine.run(plan, 1, Watcher())
    engine.step(outcome)
    attempts = (
        lambda: engine.step(outcome),
        lambda: engine.run(plan, 1, Watcher()),
        lambda: (engine.disconnect(), engine.adopt(plan_of(2, grid(3, 1, 1)), 0)),
        lambda: engine.run(plan, 2, Watcher()),
    )
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("")
        except ResihpError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def met(rank: int, line: Line) -> dict[str, Any]:
    """Two communicators of four ranks each, and what this process listens on."""
    groups = [GroupSpec("world", (0, 1, 2, 3)), GroupSpec("data/0", (0, 1, 2, 3))]
    communicators = Communicators(m.MeetingId(epoch=1), rank, groups, TIMEOUT_S, backends.chosen())
    communicators.open(line)
    total = torch.tensor([float(rank)])
    for group in groups:
        summed = total.clone()
        communicators.channel(group.name).allreduce([summed]).wait()
    connections = psutil.Process().net_connections("tcp")
    listeners = sum(each.status == psutil.CONN_LISTEN for each in connections)
    communicators.channel("world").allreduce([torch.zeros(1)]).wait()
    communicators.close()
    return {"sum": float(summed), "listeners": listeners}


def sums_in_place(rank: int, store: Line, *, grid_of: tuple[int, int, int]) -> dict[str, int]:
    """Over two iterations: tensors summed over replicas that are not the rank's gradient buffer, and its buffers."""
    engine, plan = engine_of("gpt"), plan_of(1, grid(*grid_of))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    summed: list[torch.Tensor] = []
    begin = Channel.allreduce

    def noted(channel: Channel, tensors: list[torch.Tensor], *options: Any) -> Any:
        summed.extend(tensor for tensor in tensors if tensor.dtype == torch.float32)
        return begin(channel, tensors, *options)

    Channel.allreduce = noted
    for iteration in (1, 2):
        engine.step(engine.run(plan, iteration, Watcher()))
    engine.disconnect()
    ours = {engine.state.gradients.of(name).untyped_storage().data_ptr() for name in engine.state.specs}
    found = [tensor.untyped_storage().data_ptr() for tensor in summed]
    assert found
    return {"copies": sum(one not in ours for one in found), "buffers": len(ours)}


def broken_buffer(rank: int, store: Line) -> dict[str, bool]:
    """An iteration that breaks when its gradients are there, then the same one again."""
    engine, plan = engine_of("gpt"), plan_of(1, grid(1, 1, 1))
    whole, again = engine_of("gpt"), TorchRendezvous(torch.distributed.HashStore())
    for one in (engine, whole):
        one.adopt(plan, 0)
        one.connect(plan, 0, again, TIMEOUT_S)
    name = "layers.1.mlp.linear_fc2.weight"
    left: list[torch.Tensor] = []

    def broken(phase: str) -> None:
        if phase == "reduce":
            left.append(engine.state.gradients.of(name))
            raise CommunicatorError("broken")

    try:
        engine.run(plan, 1, Watcher(on_enter=broken))
    except CommunicatorError:
        left[0].fill_(float("nan"))  # as what was given up may do at any time
    for one in (engine, whole):
        one.step(one.run(plan, 1, Watcher()))
    new = engine.state.gradients.of(name)
    return {
        "new": new.data_ptr() != left[0].data_ptr(),
        "equal": state_digest(engine) == state_digest(whole),
    }


def derived(rank: int, store: Line) -> dict[str, bool]:
    """TP2, then a transition to PP2 that is called off, then one that is not: are parameters their rounded masters?"""

    def rounded() -> bool:
        return all(
            parameter.dtype == torch.bfloat16
            and torch.equal(parameter, engine.state.optimizer.parameters[name].bfloat16())
            for name, parameter in engine.state.stage.named_parameters()
        )

    engine = engine_of("llama-bf16")
    plan = plan_of(1, grid(2, 1, 1))
    engine.adopt(plan, rank)
    found = {"drawn": rounded()}
    engine.connect(plan, rank, store, TIMEOUT_S)
    engine.step(engine.run(plan, 1, Watcher()))
    found["stepped"] = rounded()
    outcome = engine.run(plan, 2, Watcher())
    engine.disconnect()
    base = Base(epoch=1, layout=plan.layout, survivors=(0, 1))
    nodes = dict.fromkeys(range(2), "n1")
    engine.adopt(plan_of(2, grid(1, 2, 1)), rank, base, nodes)
    shared = "layers.0.input_layernorm.weight" if rank == 0 else "final_layernorm.weight"
    found["shared"] = engine.next.optimizer.parameters[shared] is engine.state.optimizer.parameters[
        shared
    ] and engine.next.stage.get_parameter(shared) is engine.state.stage.get_parameter(shared)
    engine.step(outcome)  # which the others took before the failure: gradients are kept beside the next state
    found["called off"] = rounded()
    plan = plan_of(3, grid(1, 2, 1))
    engine.adopt(plan, rank, base, nodes)
    engine.connect(plan, rank, store, TIMEOUT_S)
    engine.move(plan, Watcher(), engine.stepped, engine.updates)
    engine.begin(3)
    found["moved"] = rounded()
    engine.step(engine.run(plan, 3, Watcher()))
    found["on"] = rounded() and engine.stepped == 3
    engine.disconnect()
    return found


def allocated(rank: int, store: Line, *, kind: str) -> dict[str, int]:
    """Bytes of all tensors that a rank's state holds in an iteration, and what the memory model says; TP2 PP2."""
    engine, plan = engine_of(kind, hidden_size=64), plan_of(1, grid(2, 2, 1))
    engine.adopt(plan, rank)
    engine.connect(plan, rank, store, TIMEOUT_S)
    engine.step(engine.run(plan, 1, Watcher()))
    engine.disconnect()
    state = engine.state
    tensors = [parameter for _, parameter in state.stage.named_parameters()]
    for name in state.specs:
        tensors += [*state.optimizer.tensors(name).values(), state.gradients.of(name)]
        tensors += [t for t in (state.stage.get_parameter(name).grad,) if t is not None]
    part = checkpoint.part_of(engine, plan)
    stored = [tensor for kinds in part.content["slices"].values() for tensor in kinds.values()]
    return {
        "state": sum(
            {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values()
        ),
        "predicted": memory.needed_bytes(plan, rank, engine.model, 0),
        "elements": sum(parameter.numel() for parameter in state.stage.parameters()),
        "checkpoint": sum(tensor.nbytes for tensor in stored),
        "written": sum(size_of(state.specs[piece.name], piece) for piece in counted(plan.layout, engine.specs)[rank]),
    }


def held_in_a_transition(
    rank: int, store: Line, *, kind: str, layouts: int, tied: bool = False
) -> list[dict[str, int]]:
    """Bytes of all tensors of a rank's state before, and of both states while it changes from one layout of 8 ranks to
    another, drawn at random; and what the model of memory says of them."""
    rng, found = random.Random(kind), []
    for _ in range(layouts):
        old, new = drawn_layout(rng), drawn_layout(rng)
        before, after = dict(holdings(old.replicas)), dict(holdings(new.replicas))
        own = rng.choice(sorted(before.keys() & after.keys()))
        engine = engine_of(kind, hidden_size=64, tied=tied)
        engine.adopt(plan_of(1, old), own)
        one = bytes_of_all(engine.state)
        engine.adopt(
            plan_of(2, new), own, Base(epoch=1, layout=old, survivors=old.active), dict.fromkeys(range(8), "n1")
        )
        both = beside(before[own], after[own], engine.model)
        held = {"old": one, "both": bytes_of_all(engine.state, engine.next)}
        found.append({**held, "old_said": both.old, "both_said": both.total})
    return found


def drawn_layout(rng: random.Random) -> Layout:
    ranks, replicas = rng.sample(range(8), 8), []
    for _ in range(2):
        degrees = rng.choice([(1,), (2,), (1, 1), (2, 2), (2, 1), (1, 2), (1, 1, 2)])
        cuts = [0, *sorted(rng.sample(range(1, 4), len(degrees) - 1)), 4]
        stages = [
            Stage(tuple(ranks.pop() for _ in range(k)), ((cuts[s], cuts[s + 1] - 1),)) for s, k in enumerate(degrees)
        ]
        replicas.append(Replica(tuple(stages)))
    return Layout(tuple(replicas), tuple(sorted(ranks)))


def bytes_of_all(*states: Any) -> int:
    """Of these states' tensors, each counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for state in states for tensor in state.storages()}.values())


def asked_at_the_end(rank: int, store: Line) -> dict[str, int]:
    """How often the last synchronisation reads a single number back from the device, and over how many slices."""
    engine, plan = engine_of("gpt"), plan_of(1, grid(1, 1, 1))
    engine.adopt(plan, 0)
    engine.connect(plan, 0, TorchRendezvous(torch.distributed.HashStore()), TIMEOUT_S)
    native, reads = engine_module.last_synchronisation, []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._local_scalar_dense.default:
                reads.append(1)
            return function(*args, **(kwargs or {}))

    def counted_out(*arguments: Any, **keywords: Any) -> Any:
        with Counting():
            return native(*arguments, **keywords)

    engine_module.last_synchronisation = counted_out
    engine.run(plan, 1, Watcher())
    return {"reads": len(reads), "slices": len(engine.prepare(plan, 0).counted)}
