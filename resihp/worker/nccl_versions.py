"""Versions of NCCL that are known to hang in what resihp asks of it. Says so; refuses none.

What is known is torch's users' experience, by its issues: aborts from several threads (NCCL's issue 992, mended in
2.19.1) and any abort in 2.25.1 (torch's issue 149153) did not end; communicators that do not block hang at random in
2.26 (torch's issue 153960), for which torch stopped making them by default. Nothing like it is reported from 2.27 on.
No version has run with resihp yet. Used by `resihp.executor.backends` and by `resihp doctor`.
"""

from __future__ import annotations

from collections.abc import Sequence

KNOWN_GOOD = (2, 27)


def doubt(version: Sequence[int]) -> str:
    """What is to be feared of this version (2, 26, 2), in a line without its way out; empty for nothing."""
    if tuple(version) >= KNOWN_GOOD:
        return ""
    good = ".".join(map(str, KNOWN_GOOD))
    return (
        f"NCCL {'.'.join(map(str, version))}: communicators that can be aborted have hung with versions before {good}, "
        "in use or in their aborts"
    )


WAY_OUT = "install a newer torch, which brings its own NCCL; LD_LIBRARY_PATH or LD_PRELOAD may name an older one"
