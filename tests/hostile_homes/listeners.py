"""Sockets that nobody has reason to connect to, in a process of their own that counts who does."""

from __future__ import annotations

import mmap
import os
import selectors
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

POSTGRES_SOCKET = ".s.PGSQL.5432"
"""How libpq calls a server's socket in a folder that is given as the host."""


@dataclass
class Listeners:
    """A TCP port and a Unix socket. Whoever connects is counted and hung up on at once."""

    port: int
    folder: Path
    """Of the Unix socket."""
    counter: mmap.mmap

    @classmethod
    @contextmanager
    def open(cls, base: Path) -> Iterator[Listeners]:
        folder = base / "server"
        folder.mkdir(mode=0o755)
        tcp = socket.create_server(("127.0.0.1", 0), backlog=128)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(folder / POSTGRES_SOCKET))
        (folder / POSTGRES_SOCKET).chmod(0o777)
        unix.listen(128)
        counter = mmap.mmap(-1, 8)
        pid = os.fork()
        if pid == 0:
            _serve((tcp, unix), counter)
        port = tcp.getsockname()[1]
        tcp.close()
        unix.close()
        try:
            yield cls(port, folder, counter)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    @property
    def connections(self) -> int:
        """So far; a connection is counted before whoever made it hears that it was closed."""
        return int.from_bytes(self.counter[:8], "little")


def _serve(sockets: tuple[socket.socket, ...], counter: mmap.mmap) -> None:
    count = 0
    with selectors.DefaultSelector() as selector:
        for listening in sockets:
            selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                with suppress(OSError):
                    connection, _address = key.fileobj.accept()  # type: ignore[union-attr]
                    count += 1
                    counter[:8] = count.to_bytes(8, "little")
                    connection.close()
