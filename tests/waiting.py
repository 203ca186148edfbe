"""Waiting in tests for what another thread or process does: as long as it needs, not as long as it usually needs."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {timeout_s:g} s"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Whether the process has ended: a signal that kills takes effect some time after it was sent."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
