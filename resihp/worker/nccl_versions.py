"""Which NCCL this process has loaded, and whether its version is known to hang in what resihp asks of it.

`torch.cuda.nccl.version()` is the version that torch was compiled with: LD_PRELOAD, or another package that loads a
libnccl.so.2 first, brings another one, which is then called. So the loaded library is asked itself.

What is known of versions is torch's users' experience, by its issues: aborts from several threads (NCCL's issue 992,
mended in 2.19.1) and any abort in 2.25.1 (torch's issue 149153) did not end; communicators that do not block hang at
random in 2.26 (torch's issue 153960), for which torch stopped making them by default. Nothing like it is reported from
2.27 on. No version has run with resihp yet. Used by `resihp.executor` and `resihp doctor`, once torch is imported.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

KNOWN_GOOD = (2, 27)
MAPPED_FILES = Path("/proc/self/maps")
"""Files that are mapped into this process, the sixth column."""
_LIBRARY = re.compile(r"/\S*/libnccl\.so[.0-9]*$", re.MULTILINE)
_SONAME = "libnccl.so.2"

Version = tuple[int, ...]


def loaded() -> Version | None:
    """Version of the NCCL that calls reach, such as (2, 28, 9); None if this process has none."""
    for name, mode in ((None, ctypes.DEFAULT_MODE), (_SONAME, os.RTLD_NOLOAD | os.RTLD_LAZY)):
        with suppress(OSError, AttributeError):  # not loaded, or its symbols are hidden
            code = ctypes.c_int()
            if ctypes.CDLL(name, mode=mode).ncclGetVersion(ctypes.byref(code)) == 0:
                return _decoded(code.value)
    return _built_with()


def _decoded(code: int) -> Version:
    """NCCL_VERSION of nccl.h: 2.8.4 and before are 2804, 2.9 and later 20900."""
    scale = 10_000 if code >= 10_000 else 1_000
    return code // scale, code % scale // 100, code % 100


def _built_with() -> Version | None:
    """A torch that has NCCL inside shows no symbols of it: then it is the one that torch was compiled with."""
    import torch

    try:
        version: Sequence[int] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # built without
        return None
    return tuple(version)


def files() -> tuple[str, ...]:
    """Paths of the NCCL libraries that are mapped into this process. More than one: calls may meet the wrong one."""
    with suppress(OSError):
        return tuple(sorted(set(_LIBRARY.findall(MAPPED_FILES.read_text(errors="replace")))))
    return ()


def doubt(version: Sequence[int], paths: Sequence[str] = ()) -> str:
    """A line that says what may go wrong with this version (2, 26, 2), loaded from these files; empty for nothing."""
    if len(paths) > 1:
        both = ", ".join(paths)
        return f"{len(paths)} NCCL libraries are loaded in one process: {both}; calls reach {shown(version)}"
    if tuple(version) >= KNOWN_GOOD:
        return ""
    return (
        f"NCCL {shown(version)}: communicators that can be aborted have hung with versions before "
        f"{shown(KNOWN_GOOD)}, in use or in their aborts"
    )


def shown(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


WAY_OUT = "install a newer torch, which brings its own NCCL; LD_PRELOAD may name another one"
