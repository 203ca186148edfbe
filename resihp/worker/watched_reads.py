"""Record which environment variables code reads, and whether it reads the arguments of the script; hide GPUs from it.

Used by `resihp.worker.early` while it imports libraries in advance, for a worker whose variables and arguments may
differ from those that it has now.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ALL_NAMES = "*"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
USED_BY = {"fsspec.config": "FSSPEC"}
"""Modules that copy the whole environment, and the beginning of the names of those variables that they use."""


@contextmanager
def watched_environment() -> Iterator[set[str]]:
    """Record the names of the environment variables that are read through `os.environ`, and ALL_NAMES if all names are
    listed."""
    read: set[str] = set()

    class RecordedEnvironment(os._Environ):  # type: ignore[type-arg]
        def __getitem__(self, name: str | bytes) -> Any:
            text = os.fsdecode(name)
            if text.startswith(USED_BY.get(_reader(), "")):
                read.add(text)
            return super().__getitem__(name)

        def __iter__(self) -> Iterator[Any]:
            if _reader() not in USED_BY:
                read.add(ALL_NAMES)
            return super().__iter__()

    usual = type(os.environ)
    mappings: tuple[Any, ...] = (os.environ, os.environb)
    for mapping in mappings:
        mapping.__class__ = RecordedEnvironment
    try:
        yield read
    finally:
        for mapping in mappings:
            mapping.__class__ = usual


class RecordedArguments(list[str]):
    """Arguments of the script that note whether anything has read them, or has kept a reference to them.

    `were_taken`: whether they were changed, replaced or kept, so that the script would find others, or its own list
    would not be the one that a library knows."""

    were_read = False
    were_taken = False

    def __getattribute__(self, name: str) -> Any:
        if name not in ("were_read", "were_taken"):
            object.__setattr__(self, "were_read", True)
        return super().__getattribute__(name)


def _recorded(name: str) -> Callable[..., Any]:
    def method(self: RecordedArguments, *arguments: Any) -> Any:
        self.were_read = True
        return getattr(list, name)(self, *arguments)

    return method


for _name in ("getitem", "iter", "len", "contains", "add", "mul", "eq", "ne", "lt", "gt", "repr", "reversed"):
    setattr(RecordedArguments, f"__{_name}__", _recorded(f"__{_name}__"))


@contextmanager
def watched_arguments() -> Iterator[RecordedArguments]:
    """Record whether `sys.argv` is read, and put its list back afterwards."""
    usual, recorded = sys.argv, RecordedArguments(sys.argv)
    sys.argv = recorded
    references = sys.getrefcount(recorded) + 1  # the caller's
    try:
        yield recorded
    finally:
        is_kept = sys.argv is not recorded or sys.getrefcount(recorded) > references
        recorded.were_taken = is_kept or list.__ne__(recorded, usual)
        recorded.were_read = recorded.were_read or recorded.were_taken
        sys.argv = usual


@contextmanager
def hidden_devices() -> Iterator[None]:
    """Let the CUDA driver find no device meanwhile, so that no import takes memory of the device that the rank uses.

    Only C code, and processes that are started, see the variable changed; those that ask the driver are noticed
    afterwards (`_obstacle`). Nothing is hidden if the driver is loaded already, because a request to it would not
    be noticed then.
    """
    if has_driver_loaded():
        yield
        return
    os.putenv(DEVICES_VARIABLE, "")
    try:
        yield
    finally:
        if DEVICES_VARIABLE in os.environ:
            os.putenv(DEVICES_VARIABLE, os.environ[DEVICES_VARIABLE])
        else:
            os.unsetenv(DEVICES_VARIABLE)


def has_driver_loaded() -> bool:
    """Return whether the CUDA driver is loaded into this process."""
    return "/libcuda.so" in Path("/proc/self/maps").read_text(errors="replace")


def _reader() -> str:
    """Return the name of the module that reads the environment now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))
