"""Tell the processes that hold up a script from those that wait for them. Pure.

In a script with collectives almost all ranks of a hang wait: in a collective, or for the result of one. The cause is a
rank that does not wait: a stopped process, or one whose main thread is elsewhere, as in a data loader or in a lock. If
every rank waits, a rank at another place of the script than most is the cause. Without a difference, it is not known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import msgspec

from resihp.detector.hangs.stacks import StackFrame, place_in_script

STOPPED_STATES = frozenset("Tt")
"""States of a process that a signal or a debugger has stopped."""
_COLLECTIVES = re.compile(r"/torch/distributed/(?!elastic|run|launch)|/mpi4py/|/deepspeed/comm/")
_WAITS = frozenset(
    ("_engine_run_backward", "synchronize", "item", "tolist", "wait", "barrier", "wait_stream", "block_until_ready")
)
"""Functions in which a thread waits for a device or for a collective that was issued before."""
_WAITING_CALLS = re.compile(r"\.(?:wait|item|tolist|cpu|synchronize)\(")
"""Such functions that are written in C and so have no frame, as a line of source calls them. Python's own `wait`
functions have frames."""
_TORCH = re.compile(r"/(?:torch|jax)/")
_OWN_WAITS = re.compile(
    r"/(?:threading|queue|selectors|multiprocessing/\w+|concurrent/futures/\w+)\.py$|/torch/utils/data/"
)
"""Files whose waits are for threads or processes of this rank, and so no sign of a collective."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One process as it was during a hang."""

    rank: int
    state: str
    """The kernel's state of the process, as R, S, D or T."""
    frames: tuple[StackFrame, ...] = ()
    """Stack of the main thread, innermost first; empty if it is not known."""
    source: str = ""
    """Text of the innermost line of the stack; empty if it is not known."""


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that hold up the others, and the reason; no ranks if that is not known."""

    ranks: tuple[int, ...]
    reason: str


def judge(looks: Mapping[int, Look]) -> HangVerdict:
    """Return the culprits among the processes of a script that makes no progress."""
    stopped = [rank for rank, look in sorted(looks.items()) if look.state in STOPPED_STATES]
    if stopped and len(stopped) < len(looks):
        return HangVerdict(ranks=tuple(stopped), reason="stopped by a signal or a debugger")
    with_stack = {rank: look for rank, look in looks.items() if look.frames}
    busy = [rank for rank, look in sorted(with_stack.items()) if not waits(look)]
    if busy and len(busy) < len(with_stack):
        return HangVerdict(ranks=tuple(busy), reason="does not wait for other ranks, as they do")
    places = {rank: place_in_script(look.frames) for rank, look in with_stack.items()}
    (usual, count), *_ = Counter(places.values()).most_common(1) or [(None, 0)]
    odd = [rank for rank, place in sorted(places.items()) if place != usual]
    if odd and 2 * count > len(places):
        return HangVerdict(ranks=tuple(odd), reason="waits at another place of the script than the others")
    return HangVerdict(ranks=(), reason="all ranks wait at the same place" if not odd else "no rank stands out")


def waits(look: Look) -> bool:
    """Return whether a main thread waits for other ranks: in a collective, or for a device that works on one."""
    for frame in look.frames:
        if _COLLECTIVES.search(frame.file):
            return True
        if _OWN_WAITS.search(frame.file):
            return False
        if frame.name in _WAITS and _TORCH.search(frame.file):
            return True
        if frame is look.frames[0] and _WAITING_CALLS.search(look.source):
            return True
        if not frame.is_of_library:
            return False
    return False
