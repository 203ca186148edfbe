"""The rendezvous store: a TCPStore server in a process of its own, so that it outlives every rank.

`python -P -m resihp.worker.store --fd N --parent PID`, started by the supervisor (`wrapper.supervisor.store`). A bound
socket comes with `Serve` on N; it says `Listening` there, then waits, and ends when N is closed or the parent dies.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from datetime import timedelta

import msgspec

from resihp.process import die_with_parent, inherited_socket
from resihp.protocol.framing import LocalChannel

TIMEOUT_S = 300.0
BACKLOG = 4096


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Serve on the socket that comes with this, which is bound to this address."""

    host: str


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    host: str
    port: int


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="resihp.worker.store")
    parser.add_argument("--fd", type=int, required=True, help="socket to the supervisor")
    parser.add_argument("--parent", type=int, required=True, help="process id of the supervisor; 0 in a container")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm tells every process of a job to stop: the supervisor decides when
    channel = LocalChannel(inherited_socket(options.fd))
    serve: Serve = channel.recv(Serve)

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # two seconds: after the checks above

    listener = socket.socket(fileno=channel.take_descriptor())
    port = listener.getsockname()[1]
    listener.listen(BACKLOG)
    store = TCPStore(
        serve.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    channel.send(Listening(host=serve.host, port=store.port))
    try:
        channel.recv(Listening)  # nothing is ever said: this returns when the supervisor has closed its end
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
