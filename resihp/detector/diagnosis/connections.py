"""Decides whether an exception concerns a connection of the process group to a peer, or any other connection.

A rank that lost its peer raises "Connection refused", and so does a rank that cannot reach its tracking server. An
exception of the process group is recognised by its words (gloo, NCCL, torch's store) and by its origin: a file of
`torch.distributed`, or C++, which raises RuntimeErrors without "[Errno 111]". Any other connection may be to a service,
or to a peer that the script contacts by itself; such an exception is `CONNECTION_FAILED`, which is the cause if no rank
has a better one. Called by `clues` and `outside`. Pure.
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
"""Form of a lost connection in the store of torch 1.x."""
_LAST_ERROR = re.compile(r"\nLast error:\n[^\n]{0,200}Connection (?:refused|reset by peer|closed)")
"""Matches the text that NCCL adds to its ncclSystemError."""
_LOST = ("peer closed", "ib no path")


def of_connection(signature: Signature, error: str, raised_in: str, after: Signature | None) -> Signature:
    """Return the kind of an exception with regard to connections. `signature`: the kind by its words alone.

    `raised_in`: innermost file of the traceback, empty if unknown; `after`: kind of the preceding exception in the
    chain, None without one.
    """
    if signature.kind in _LOST:
        return signature if is_the_groups(error, raised_in) else CONNECTION_FAILED
    follows = after is not None and (after.depth == Depth.AFTER or after is CONNECTION_FAILED)
    return CONNECTION_FAILED if follows and signature is EXCEPTION else signature


def of_system_error(signature: Signature, following: str) -> Signature:
    """Return PEER_CLOSED for an NCCL system error about a connection to a peer; else `signature`.

    `following`: the text of the log from the error on, which shows the connection.
    """
    return PEER_CLOSED if signature.kind == "nccl system" and _LAST_ERROR.search(following) else signature


def is_the_groups(error: str, raised_in: str) -> bool:
    """Return whether the process group raised an exception, by its words or by the file that raised it."""
    if _GROUPS_WORDS.search(error) or _GROUPS_FILES.search(raised_in):
        return True
    return _OF_THE_SYSTEM.match(error) is not None
