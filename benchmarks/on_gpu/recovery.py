"""Workers that share the GPU by way of gloo: bf16 against fp32, and what becomes of a job if one dies or hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.on_gpu.figures import Figure, Scale, at_most
from benchmarks.on_gpu.supervised import EXAMPLE, FAULTS, compared

GLOO = {"RESIHP_BACKEND": "gloo"}
SMOOTHING = 0.95
"""Of the moving average of losses."""


def measure(scale: Scale) -> Iterator[Figure]:
    yield from compared(scale, "gloo, 8 ranks", GLOO, FAULTS)
    yield precision(scale)


def precision(scale: Scale) -> Figure:
    """The same training in bf16 and in fp32, by the moving average of its losses."""
    iterations = scale.of(300, 12)
    plain, mixed = (average(losses(scale, iterations, extra)) for extra in ((), ("--bf16",)))
    return at_most(
        f"bf16 against fp32 after {iterations} iterations: moving average of the loss", off(plain, mixed), 1, " %"
    )


def off(one: float, other: float) -> float:
    return 100 * abs(other / one - 1)


def losses(scale: Scale, iterations: int, extra: tuple[str, ...]) -> list[float]:
    command = [sys.executable, str(EXAMPLE), "--iterations", str(iterations), *extra]
    command += ["--layers", "4", "--hidden", str(scale.of(512, 32)), "--tokens", str(scale.of(2048, 64))]
    done = subprocess.run(command, env={**os.environ, **GLOO}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("iteration ")]
    return [float(line.partition("loss ")[2].split()[0]) for line in lines]


def average(values: list[float]) -> float:
    mean = values[0]
    for value in values[1:]:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
    return mean
