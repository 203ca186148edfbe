"""Is attention right, does a layer take what the detector says it takes, and does the probe say the same twice?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.on_gpu.figures import Figure, Scale, at_least, at_most
from benchmarks.on_gpu.models import LLAMA
from resihp.errors import DeviceError
from resihp.executor.compute.attention import PackedAttention, Packing
from resihp.executor.compute.stage import StageModule, model_spec
from resihp.executor.compute.stopwatch import full_speed
from resihp.executor.supervised import probe
from resihp.executor.tensor_group import TensorGroup

PACKINGS = 60
GEMMS = 100
BRIEF_PACKINGS = 24
BRIEF_GEMMS = 20
LEFT_BYTES = 200 << 20
"""Of the device's memory when it is full."""


def attention(scale: Scale) -> Iterator[Figure]:
    """Errors against double precision of bf16: ours over one call of torch's fused attention for each document."""
    heads, groups, width = scale.of(32, 4), scale.of(8, 2), scale.of(128, 16)
    lengths = tuple(scale.of(8, 1) * length for length in (17, 300, 40, 129, 512))
    generator = torch.Generator(device=scale.device).manual_seed(1)
    n = sum(lengths)
    q, k, v = (
        torch.randn(n, 1, count, width, generator=generator, device=scale.device).bfloat16()
        for count in (heads, groups, groups)
    )
    with torch.no_grad():
        config = TransformerConfig(num_layers=1, hidden_size=heads * width, num_attention_heads=heads)
        ours = PackedAttention(config, 1)(q, k, v, packed_seq_params=Packing.of(lengths, scale.device))
        each = by_document(q, k, v, lengths)
        exact = by_document(q.double(), k.double(), v.double(), lengths)
    ratio = float((ours.double() - exact).abs().max() / (each.double() - exact).abs().max())
    yield at_most("packed attention: largest error over that of one call a document", ratio, 2.0)


def by_document(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    segments = (tensor.permute(1, 2, 0, 3).split(list(lengths), dim=2) for tensor in (q, k, v))
    done = [
        F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True) for each in zip(*segments, strict=True)
    ]
    return torch.cat(done, dim=2).permute(2, 0, 1, 3).flatten(2)


def layer(scale: Scale) -> Iterator[Figure]:
    """Forward and backward of one layer of a 7B model, against a + b N + c sum(l^2), which the detector goes by."""
    hidden, heads = scale.of(4096, 64), scale.of(32, 4)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=scale.of(11008, 172),
        **LLAMA,
        use_cpu_initialization=True,
    )
    longest = scale.of(32768, 512)
    model = model_spec(config, vocab=256, sequence=longest)
    stage = StageModule(config, model, ((0, 0),), False, False, TensorGroup()).to(scale.device, torch.bfloat16)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rng = np.random.default_rng(2)
    rows, seconds = [], []
    for _ in range(scale.count(PACKINGS, BRIEF_PACKINGS, 6)):
        lengths = documents(rng, int(rng.integers(longest // 4, longest + 1)))
        rows.append((1.0, float(sum(lengths)), float(sum(length**2 for length in lengths))))
        inputs = torch.randn(sum(lengths), 1, hidden, device=scale.device).bfloat16().requires_grad_()

        def both(lengths: tuple[int, ...] = lengths, inputs: Tensor = inputs) -> None:
            stage.zero_grad(set_to_none=True)
            stage(0, lengths, inputs).sum().backward()

        both()
        seconds.append(statistics.median(timed(scale, both) for _ in range(3)))
    known = np.array(rows)
    coefficients, *_ = np.linalg.lstsq(known / known.max(axis=0), np.array(seconds), rcond=None)
    off = known / known.max(axis=0) @ coefficients - seconds
    r2 = 1.0 - float(off @ off) / float(np.sum((seconds - np.mean(seconds)) ** 2))
    yield at_least(f"a layer's time by N and sum(l^2), {len(rows)} packings: R^2", r2, 0.995)
    yield at_most("the same: median error", float(np.median(np.abs(off) / seconds)) * 100, 2.0, " %")


def documents(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    """Lengths that sum to n, a few long and many short."""
    found: list[int] = []
    while (left := n - sum(found)) > 0:
        found.append(min(left, 1 + int(n * rng.beta(0.4, 1.6))))
    return tuple(found)


def timed(scale: Scale, work: Callable[[], object]) -> float:
    """Seconds of it, by the device's own events where it has any."""
    if not scale.full:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def gemm(scale: Scale) -> Iterator[Figure]:
    """The probe's matrix product, again and again, and after a rest."""

    def flops() -> float:
        return float(probe.device_speed(scale.device, full_speed).flops)

    warm = [flops() for _ in range(scale.count(GEMMS, BRIEF_GEMMS, 5))]
    cold = []
    for _ in range(scale.of(5, 1)):
        time.sleep(scale.of(3, 0))
        cold.append(flops())
    spread = 100 * statistics.stdev(warm) / statistics.mean(warm)
    yield at_most(f"GEMM probe, {len(warm)} in a row: standard deviation over mean", spread, 1.0, " %")
    apart = 100 * abs(1 - statistics.median(cold) / statistics.median(warm))
    yield at_most("GEMM probe after a rest: difference from that", apart, 2.0, " %")
    yield Figure("GEMM probe", f"{statistics.median(warm) / 1e12:.4g} TFLOP/s")


def full_memory(scale: Scale) -> Iterator[Figure]:
    """A healthy device that has no room for a probe is not to be condemned."""
    held = []
    if scale.full:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        held.append(torch.empty(max(0, free - LEFT_BYTES), dtype=torch.uint8, device=scale.device))
    told = "no verdict"
    try:
        probe.examine(scale.device)
        probe.device_speed(scale.device, full_speed)
    except DeviceError as error:
        told = f"condemned: {error}"[:120]
    except probe.DeviceFullError:
        pass
    yield Figure("probe of a device whose memory is full", told, "no verdict", told == "no verdict")
    held.clear()
