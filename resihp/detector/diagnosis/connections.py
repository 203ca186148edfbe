"""Decides which connection an exception is about: one of the process group to a peer, or any other.

"Connection refused" is raised by a rank that lost its peer, and by one that cannot reach its tracking server. A
process group is recognised by its own words (gloo, NCCL, torch's store) and by where it raises: in `torch.distributed`,
or in C++, which makes RuntimeErrors without "[Errno 111]". Any other may be a service, or a peer that the script talks
to by itself: `CONNECTION_FAILED`, which is a cause if no rank has a better one. Called by `clues` and `outside`. Pure.
"""

from __future__ import annotations

import re

from resihp.detector.diagnosis.signatures import CONNECTION_FAILED, EXCEPTION, PEER_CLOSED, Depth, Signature

_GROUPS_WORDS = re.compile(
    r"\bgloo/|\bGloo\b|\bNCCL\b|\bnccl[A-Z]|\bc10d\b|TCPStore|ProcessGroup|torch\.distributed\.|tensorpipe|"
    r"^Dist(?:Network|Backend|Store)Error\b"
)
_GROUPS_FILES = re.compile(r"/(?:torch/distributed|deepspeed/comm|horovod|mpi4py|resihp)/")
_OF_THE_SYSTEM = re.compile(r"RuntimeError: (?:Connection (?:refused|reset by peer)|Broken pipe)")
"""The form in which torch's store of 1.x raised it."""
_LAST_ERROR = re.compile(r"\nLast error:\n[^\n]{0,200}Connection (?:refused|reset by peer|closed)")
"""Matches the text that NCCL adds to its ncclSystemError."""
_LOST = ("peer closed", "ib no path")


def of_connection(signature: Signature, error: str, raised_in: str, after: Signature | None) -> Signature:
    """Return the kind of an exception, given the kind `signature` that its words alone suggest.

    `raised_in`: the innermost file of its traceback, empty if unknown; `after`: kind of the exception that it was
    raised from, or during which.
    """
    if signature.kind in _LOST:
        return signature if is_the_groups(error, raised_in) else CONNECTION_FAILED
    follows = after is not None and (after.depth == Depth.AFTER or after is CONNECTION_FAILED)
    return CONNECTION_FAILED if follows and signature is EXCEPTION else signature


def of_system_error(signature: Signature, following: str) -> Signature:
    """Return PEER_CLOSED for an NCCL system error that, by the following lines of the log, is about a peer's
    connection; else the same signature."""
    return PEER_CLOSED if signature.kind == "nccl system" and _LAST_ERROR.search(following) else signature


def is_the_groups(error: str, raised_in: str) -> bool:
    """Whether an exception is the process group's own, by its words or by the file that raised it."""
    if _GROUPS_WORDS.search(error) or _GROUPS_FILES.search(raised_in):
        return True
    return _OF_THE_SYSTEM.match(error) is not None
