"""Finds the NCCL version loaded in this process, and knows which versions may hang with resihp.

`torch.cuda.nccl.version()` is the version that torch was compiled with. LD_PRELOAD, or another package that loads a
libnccl.so.2 first, can load a different library, which then receives the calls. So this module asks the loaded library.

The knowledge about versions comes from issues of torch's users. Aborts from several threads (NCCL's issue 992, fixed in
2.19.1) and any abort in 2.25.1 (torch's issue 149153) never returned. Non-blocking communicators hang at random in 2.26
(torch's issue 153960), so torch no longer creates them by default. There is no such report for 2.27 and later. No
version has been run with resihp yet. Never refuses a version. Used by `resihp.executor` and `resihp doctor`, after
torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

OLDEST_KNOWN_GOOD = (2, 27)
MAPPED_FILES = Path("/proc/self/maps")
"""List of the files mapped into this process; the path is in the sixth column."""
_LIBRARY = re.compile(r"/\S*/libnccl\.so[.0-9]*$", re.MULTILINE)
_SONAME = "libnccl.so.2"

Version = tuple[int, ...]


def loaded() -> Version | None:
    """Return the version of the NCCL library that receives calls, such as (2, 28, 9); None if this process has none."""
    for name, mode in ((None, ctypes.DEFAULT_MODE), (_SONAME, os.RTLD_NOLOAD | os.RTLD_LAZY)):
        with suppress(OSError, AttributeError):  # not loaded, or its symbols are hidden
            code = ctypes.c_int()
            if ctypes.CDLL(name, mode=mode).ncclGetVersion(ctypes.byref(code)) == 0:
                return _decoded(code.value)
    return _built_with()


def _decoded(code: int) -> Version:
    """Decode NCCL_VERSION of nccl.h. Up to 2.8.4 the code has four digits (2804), from 2.9 on five (20900)."""
    scale = 10_000 if code >= 10_000 else 1_000
    return code // scale, code % scale // 100, code % 100


def _built_with() -> Version | None:
    """Return the NCCL version that torch was compiled with. A torch that contains NCCL exports none of its symbols."""
    import torch

    try:
        version: Sequence[int] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # built without NCCL
        return None
    return tuple(version)


def files() -> tuple[str, ...]:
    """Return the NCCL libraries mapped into this process. With more than one, calls may go to the wrong library."""
    with suppress(OSError):
        return tuple(sorted(set(_LIBRARY.findall(MAPPED_FILES.read_text(errors="replace")))))
    return ()


def doubt(version: Sequence[int], paths: Sequence[str] = ()) -> str:
    """Return a line about possible problems with this version, such as (2, 26, 2), loaded from `paths`; empty if there
    are none."""
    if len(paths) > 1:
        names = ", ".join(paths)
        return f"{len(paths)} NCCL libraries are loaded in one process: {names}; calls reach {shown(version)}"
    if tuple(version) >= OLDEST_KNOWN_GOOD:
        return ""
    return (
        f"NCCL {shown(version)}: communicators that can be aborted have hung with versions before "
        f"{shown(OLDEST_KNOWN_GOOD)}, in use or while they were aborted"
    )


def shown(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


UPGRADE_ADVICE = "install a newer torch, which brings its own NCCL; LD_PRELOAD may name another one"
