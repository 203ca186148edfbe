"""Where the device's time of one iteration goes, by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.on_gpu.contestants import Settled
from benchmarks.on_gpu.figures import Figure, Scale

ROWS_SHOWN = 12
"""Kernels that are figures; `profile-NAME.txt` has `ROWS_WRITTEN`."""
ROWS_WRITTEN = 60
LONGEST_NAME = 70


def by_kernel(scale: Scale, name: str, contestant: Settled) -> Iterator[Figure]:
    """Profile one iteration of ours. To be called last: it is not among the contestant's losses."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if scale.full else [])]
    with profile(activities=activities) as profiled:
        contestant.inner.iterate(len(contestant.losses) + 1)
        scale.settle()
    events: Any = profiled.key_averages()
    column = "self_device_time_total" if scale.full else "self_cpu_time_total"
    _file(scale, name).write_text(events.table(sort_by=column, row_limit=ROWS_WRITTEN, max_name_column_width=100))
    kernels = [event for event in events if _is_kernel(event) or not scale.full]
    kernels.sort(key=lambda kernel: -getattr(kernel, column))
    total = sum(getattr(kernel, column) for kernel in kernels) or 1.0
    for kernel in kernels[:ROWS_SHOWN]:
        share = 100 * getattr(kernel, column) / total
        yield Figure(f"{name}, kernel {_short(kernel.key)}", f"{share:.1f} %, {kernel.count} times")


def _is_kernel(event: Any) -> bool:
    """Operations of the host have their kernels' time as well, and annotations that of all under them."""
    return event.device_type.name != "CPU" and not event.is_user_annotation


def _file(scale: Scale, name: str) -> Path:
    scale.folder.mkdir(parents=True, exist_ok=True)
    return scale.folder / f"profile-{name.replace(' ', '-')}.txt"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
