"""The supervisor's handle on the rendezvous store (`resihp.worker.store`): starts it, tells when it listens, restarts
it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from resihp.errors import ResihpError
from resihp.process import ending
from resihp.protocol.framing import LocalChannel, LocalCodec
from resihp.worker.store import Listening, Serve
from wrapper.config import container
from wrapper.config.run_spec import Container
from wrapper.launch.launcher import own_environment
from wrapper.launch.ports import Ports, listen

MAX_FAILED_STARTS = 3


class StoreProcess:
    """One store at a time. `run` ends when the job does, or raises ResihpError if the store cannot start at all."""

    def __init__(
        self,
        host: str,
        interpreter: str,
        log: Path,
        container: Container | None = None,
        ports: Ports | None = None,
    ) -> None:
        """`ports`: the range to listen in (`wrapper.launch.ports`)."""
        self._host = host
        self._ports = ports
        self._interpreter = interpreter
        self._log = log
        self._container = container

    async def run(self, ready: Callable[[str, int], None]) -> None:
        """Keep a store running; call `ready(host, port)` each time a new one listens. Cancel to stop it."""
        failed = 0
        while True:
            listened, status = await self._one(ready)
            failed = 0 if listened else failed + 1
            if failed >= MAX_FAILED_STARTS:
                raise ResihpError(f"store: {ending(status)} before it listened, {failed} times; see {self._log}")

    async def _one(self, ready: Callable[[str, int], None]) -> tuple[bool, int]:
        ours, theirs = socket.socketpair()
        listener = listen(self._host, self._ports)
        environment = own_environment() | {"OMP_NUM_THREADS": "1"}
        parent = 0 if self._container else os.getpid()
        command = [self._interpreter, "-P", "-m", "resihp.worker.store", "--fd", "0", "--parent", str(parent)]
        with ours, theirs, listener, self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *container.wrap(self._container, command, ["OMP_NUM_THREADS"]),
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=container.environment(self._container, environment),
                process_group=0,
            )
            theirs.close()
            try:
                with suppress(OSError):
                    LocalChannel(ours).send(Serve(host=self._host), [listener.fileno()])
                listener.close()
                listened = await self._announce(ours, ready)
                return listened, await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _announce(self, sock: socket.socket, ready: Callable[[str, int], None]) -> bool:
        sock.setblocking(False)
        codec: LocalCodec[Listening] = LocalCodec(Listening)
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while chunk := await loop.sock_recv(sock, 4096):
                for message in codec.feed(chunk):
                    ready(message.host, message.port)
                    return True
        return False
