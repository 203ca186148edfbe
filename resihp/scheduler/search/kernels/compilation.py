"""Compiles a function of the search with numba, and keeps the machine code on disk.

The module decides where the machine code is kept and when it is outdated. Numba alone compares only the function's own
file; here all files of this folder count, because a compiled function contains the functions and constants that it
uses. The machine code is kept beside the file or in the user's cache, never at a place that a file in the current
folder names. If neither place can be written, each process compiles again. Without numba, the functions run as plain
Python, a hundred times slower. Nothing is compiled before the first call. Called by the other modules of this folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
CACHE_VARIABLES = ("NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES")
"""Environment variables that give the place of numba's compiled functions, and the class that locates it."""


def machine_code(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function such that its first call compiles it."""
    with _cache_of_the_environment():
        try:
            from numba import njit
        except Exception:  # noqa: BLE001 - not installed, or an unreadable file of settings in this folder
            return function
        compiled: Any = njit(error_model="numpy", nogil=True)(function)
        # Another version of numba, with a different cache, or no place for the cache can be written.
        with suppress(ImportError, AttributeError, RuntimeError):
            compiled._cache = _lasting_cache()(function)
        return cast("Callable[P, R]", compiled)


@contextmanager
def _cache_of_the_environment() -> Iterator[None]:
    """Make numba choose the place of its cache by environment variables alone.

    Numba also reads settings from `.numba_config.yaml` in the current folder, which anybody may have written, and
    unpickles the files that it finds in the cache. A variable that is set, even to an empty value, overrules that file.
    """
    absent = [name for name in CACHE_VARIABLES if name not in os.environ]
    os.environ |= dict.fromkeys(absent, "")
    try:
        _reload_settings()
        yield
    finally:
        for name in absent:
            del os.environ[name]
        _reload_settings()


def _reload_settings() -> None:
    """Make numba read the environment variables again, if it has been imported."""
    if (config := sys.modules.get("numba.core.config")) is not None:
        with suppress(Exception):  # unreadable settings in the current folder
            config.reload_config()


def _lasting_cache() -> Callable[..., Any]:
    """Return numba's cache class, made robust against a full disk, truncated files and changes of other files.

    If its entry cannot be read, a function is compiled again, and kept if possible. Numba itself ignores such errors
    only on Windows. Raises ImportError.
    """
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__(function)  # type: ignore[no-untyped-call]
            file = self._cache_file
            file._source_stamp = (file._source_stamp, _stamp_of_the_folder())

        @contextmanager
        def _guard_against_spurious_io_errors(self) -> Iterator[None]:
            try:
                yield
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                with suppress(OSError):
                    self.flush()  # type: ignore[no-untyped-call]

    return cast("Callable[..., Any]", Cache)


@functools.cache
def _stamp_of_the_folder() -> str:
    """Return a hash of all files of this folder: compiled functions contain the functions that they call."""
    stamp = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        stamp.update(path.read_bytes())
    return stamp.hexdigest()
