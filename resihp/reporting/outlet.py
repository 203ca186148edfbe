"""Sends messages of a script to the agent of its node, without a thread and without waiting.

The agent that started the process holds the other end of an inherited socket. A message is dropped when the socket is
full, because a slow agent must not delay training; callers therefore send totals or facts that the next message repeats
or replaces. This module never reads from the socket: `resihp.protocol.client` does so once a script ends by an
exception.
"""

from __future__ import annotations

import errno
import os
import socket
import threading

import msgspec

from resihp.process import AGENT_FD
from resihp.protocol.framing import encode, local_frame

_lock = threading.Lock()
_socket: socket.socket | None = None
_is_forked = False
"""Whether the script has forked this process, a data loader for example, which has its parent's rank."""


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)


def is_watched() -> bool:
    """Return whether this process was started by `resihp run` and may report."""
    return not _is_forked and AGENT_FD in os.environ


def send(message: msgspec.Struct) -> bool:
    """Send one message; return whether it was sent. Any thread."""
    if not is_watched():
        return False
    with _lock:
        try:
            frame = local_frame(encode(message))
            sock = _open_socket()
            sent = sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            if sent < len(frame):  # the agent must get whole frames
                sock.sendall(frame[sent:])
        except (OSError, ValueError, OverflowError):  # full, or closed; or text or a number that no message can hold
            return False
    return True


def _open_socket() -> socket.socket:
    """Return the socket to the agent. Raises OSError or ValueError if the script has closed it, or if this is another
    program, started by the script, that has something else under that number."""
    global _socket
    if _socket is None:
        sock = socket.socket(fileno=os.dup(int(os.environ[AGENT_FD])))
        if sock.family != socket.AF_UNIX:
            sock.close()
            raise OSError(errno.ENOTSOCK, "not the agent's socket")
        _socket = sock
    return _socket
