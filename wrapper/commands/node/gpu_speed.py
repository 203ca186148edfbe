"""Measures the GPUs of this machine for `resihp node check`, as the probe at a job's start does.

`main` is a program of its own: it loads torch, which takes seconds and may crash if a driver is broken. `check` starts
it, and compares the GPUs of the node with each other. Never measures a GPU that another process uses.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from resihp.settings import ProbeLimits
from resihp.words import count_of
from resihp.wrapper.commands.doctor.machine import CheckResult, run_command

if TYPE_CHECKING:
    import torch

CHECK_NAME = "gpu speed"
MEASUREMENT_TIMEOUT_S = 120.0
ROWS_PREFIX = "resihp-gpus "


class GpuSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. Speeds are per second; 0 with an `error`."""

    gpu: int
    flops: float = 0.0
    memory_bytes: float = 0.0
    error: str = ""


def check() -> Iterator[CheckResult]:
    """Measure each GPU, and compare it with the others of the node."""
    if shutil.which("nvidia-smi") is None:
        yield CheckResult(check=CHECK_NAME, outcome="skipped", text="no NVIDIA GPU on this machine")
        return
    used = run_command(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], timeout_s=20)
    if isinstance(used, str):
        yield CheckResult(check=CHECK_NAME, outcome="unknown", text=f"nvidia-smi: {used}", advice="dmesg | grep -i xid")
        return
    if used.stdout.strip():
        text = "not measured: other processes use the GPUs"
        yield CheckResult(check=CHECK_NAME, outcome="skipped", text=text, advice="nvidia-smi")
        return
    done = run_command([sys.executable, "-P", "-m", __name__], timeout_s=MEASUREMENT_TIMEOUT_S)
    if isinstance(done, str):
        yield CheckResult(check=CHECK_NAME, outcome="unknown", text=f"the measurement: {done}")
        return
    rows = [line.removeprefix(ROWS_PREFIX) for line in done.stdout.splitlines() if line.startswith(ROWS_PREFIX)]
    if not rows:
        problem = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        yield CheckResult(check=CHECK_NAME, outcome="unknown", text=problem[:200], advice="resihp doctor checks torch")
        return
    yield judge(msgspec.json.decode(rows[0], type=list[GpuSpeed]))


def judge(gpus: Sequence[GpuSpeed], limits: ProbeLimits | None = None) -> CheckResult:
    """Return the result for the measured GPUs of one node."""
    if not gpus:
        return CheckResult(check=CHECK_NAME, outcome="skipped", text="torch can use no GPU here")
    fit = (limits or ProbeLimits()).fit
    problems = [f"GPU {gpu.gpu}: {gpu.error}" for gpu in gpus if gpu.error]
    working = [gpu for gpu in gpus if not gpu.error]
    for quantity, unit, scale in (("flops", "TFLOP/s", 1e12), ("memory_bytes", "GB/s", 1e9)):
        usual = statistics.median_high([getattr(gpu, quantity) for gpu in working]) if working else 0.0
        problems += [
            f"GPU {gpu.gpu}: {getattr(gpu, quantity) / scale:.3g} {unit}, the others {usual / scale:.3g}"
            for gpu in working
            if getattr(gpu, quantity) < fit * usual
        ]
    if problems:
        advice = "nvidia-smi -q -d PERFORMANCE,CLOCK,ECC; dcgmi diag -r 3"
        return CheckResult(check=CHECK_NAME, outcome="failed", text="; ".join(problems), advice=advice)
    slowest = min(gpu.flops for gpu in gpus) / 1e12, min(gpu.memory_bytes for gpu in gpus) / 1e9
    text = f"{count_of(len(gpus), 'GPU')}, each at least {slowest[0]:.3g} TFLOP/s and {slowest[1]:.3g} GB/s"
    return CheckResult(check=CHECK_NAME, outcome="ok", text=text)


def measure(devices: Sequence[torch.device]) -> list[GpuSpeed]:
    """Check that each device computes correctly, and measure its speed."""
    from resihp.errors import DeviceError
    from resihp.executor.supervised import probe

    rows = []
    for index, device in enumerate(devices):
        try:
            probe.examine(device)
            speed = probe.device_speed(device, lambda: 1.0)
        except (DeviceError, probe.DeviceFullError) as error:
            rows.append(GpuSpeed(gpu=index, error=str(error)[:200]))
        else:
            rows.append(GpuSpeed(gpu=index, flops=speed.flops, memory_bytes=speed.memory_bytes))
    return rows


def main() -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rows = measure([torch.device("cuda", index) for index in range(count)])
    print(f"{ROWS_PREFIX}{msgspec.json.encode(rows).decode()}", flush=True)


if __name__ == "__main__":
    main()
