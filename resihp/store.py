"""The rendezvous store: a TCPStore server in a process of its own, so that it outlives every rank.

`python -P -m resihp.store --fd N --listen M --host H --parent PID`, started by the supervisor (`wrapper.store_process`)
on a socket that is already bound. Says `Listening` on N, then waits; it ends when N is closed or the parent dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from datetime import timedelta

import msgspec

from resihp.process import die_with_parent
from resihp.protocol.framing import LocalChannel

TIMEOUT_S = 300.0
BACKLOG = 4096


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    host: str
    port: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="resihp.store")
    parser.add_argument("--fd", type=int, required=True, help="socket to the supervisor")
    parser.add_argument("--listen", type=int, required=True, help="bound socket to serve on")
    parser.add_argument("--host", required=True, help="address that the socket is bound to")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = LocalChannel(socket.socket(fileno=options.fd))

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # two seconds: after the checks above

    listener = socket.socket(fileno=options.listen)
    port = listener.getsockname()[1]
    listener.listen(BACKLOG)
    store = TCPStore(
        options.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    channel.send(Listening(host=options.host, port=store.port))
    try:
        channel.recv(Listening)  # nothing is ever said: this returns when the supervisor has closed its end
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
