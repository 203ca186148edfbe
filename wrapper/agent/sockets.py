"""An agent's sockets to its own processes: one to each worker, and one to the fork server that starts the workers.

Callbacks in the agent's event loop. Nothing here waits, and nothing is decided. Owned by
`resihp.wrapper.agent.workers`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from resihp.errors import ProtocolError
from resihp.process import OPEN_FILES
from resihp.protocol.channels import MAX_UNSENT_BYTES, LocalChannel
from resihp.protocol.framing import LocalCodec, LocalFrames, local_frame
from resihp.worker.forkserver import KILL_ORPHANS_S, ONE_THREAD
from resihp.worker.requests import Alone, Deliver, Ended, Fork, Forked, KillOrphans, NotForked, Ready, Report, Unable
from resihp.wrapper.config import container
from resihp.wrapper.config.run_spec import Container, Program
from resihp.wrapper.launch.launcher import own_environment
from resihp.wrapper.strict_modes import private

CHUNK_BYTES = 1 << 16
ORPHANS_TIMEOUT_S = KILL_ORPHANS_S + 2.0


class WorkerPipe:
    """The agent's end of one worker's socket, which carries encoded messages both ways.

    Orders are queued, so that a stopped worker blocks nothing. `received` handles a report; if it raises ProtocolError
    because the report is invalid, the worker is disconnected.
    """

    def __init__(self, sock: socket.socket, received: Callable[[bytes], None]) -> None:
        self._sock = sock
        self._received = received
        self._frames = LocalFrames()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self._open = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    def send(self, order: bytes) -> None:
        """Queue an order, which must fit into a frame. The order is dropped if the worker is disconnected or has too
        many unread bytes."""
        if not self._open or len(self._unsent) > MAX_UNSENT_BYTES:
            return
        self._unsent += local_frame(order)
        self._flush()

    def drain(self) -> None:
        """Read all remaining messages of a worker that has exited, before its exit is reported."""
        while self._open and self._read():
            pass

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        try:
            chunk = self._sock.recv(CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return False
        try:
            for body in self._frames.feed(chunk):
                self._received(body)
        except ProtocolError as error:
            self.hang_up(str(error))
        return True

    def hang_up(self, reason: str) -> None:
        """Close the socket because of an invalid message. A worker that loses its agent exits."""
        print(f"worker socket closed: {reason}", flush=True)
        self.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError:
            self._unsent.clear()  # the worker has ended, and its exit will be reported
        self._loop.remove_writer(self._sock)


class ForkServerLink:
    """The agent's connection to its fork server. Requests wait until the fork server has finished its imports."""

    def __init__(
        self,
        program: Program,
        log: Path,
        report: Callable[[Forked | NotForked | Ended], None],
        unable: Callable[[str], None],
        inside: Container | None = None,
        shared: socket.socket | None = None,
        *,
        job: str = "",
        node: str = "",
    ) -> None:
        """`report` receives the fork server's reports; `unable` receives the reason if the fork server ends. `inside`:
        container of the workers, None for none. `shared`: socket to a running fork server that virtual nodes share.
        `job` and `node` are for the process name."""
        self._program = program
        self._container = inside
        self._log = log
        self._report = report
        self._unable = unable
        self._codec: LocalCodec[Report] = LocalCodec(Report)
        self._waiting: list[tuple[Fork, socket.socket]] = []
        self._ready = False
        self._reason: str | None = None
        self._sock = shared
        self._channel: LocalChannel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._name_options = ("--job", job, "--at", node)
        self._leaving = False
        self._has_ended = asyncio.Event()
        self._alone = asyncio.Event()
        """Set once the fork server has answered that no orphan is left."""

    async def start(self) -> None:
        """Start the fork server, unless it is shared. Raises OSError if the interpreter does not exist."""
        if self._sock is None:
            self._sock = await self._start_process()
        self._channel = LocalChannel(self._sock)
        asyncio.get_running_loop().add_reader(self._sock, self._readable)

    async def _start_process(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        preload = "" if self._program.kind == "command" else self._program.preload
        inside = self._container
        parent = 0 if inside else os.getpid()
        command = [
            self._program.interpreter,
            "-P",
            "-m",
            "resihp.worker.forkserver",
            "--fd",
            "0",
            "--parent",
            str(parent),
        ]
        command += ["--preload", preload, *(["--own", ",".join(container.PLACE_VARIABLES)] if inside else [])]
        command += self._name_options
        with theirs, open(self._log, "ab", opener=private) as log:
            self._process = await asyncio.create_subprocess_exec(
                *container.wrap(inside, command, (*ONE_THREAD, OPEN_FILES)),
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=container.environment(inside, own_environment() | ONE_THREAD),
            )
        return ours

    def fork(self, request: Fork, worker_end: socket.socket) -> None:
        """Request a worker process with `worker_end` as its socket; takes ownership of `worker_end`."""
        if self._ready:
            with worker_end:
                self._send(request, [worker_end.fileno()])
        else:
            self._waiting.append((request, worker_end))

    @property
    def is_ready(self) -> bool:
        """Whether the fork server has finished its imports, so that requests do not wait."""
        return self._ready

    def forget_waiting(self) -> None:
        """Drop the requests that wait for the fork server's imports."""
        for _, worker_end in self._waiting:
            worker_end.close()
        self._waiting.clear()

    async def kill_orphans(self) -> bool:
        """Kill all processes of workers that are left; return whether none is left, `ORPHANS_TIMEOUT_S` later at the
        latest."""
        if self._channel is None or not self._ready:
            return True
        self._alone.clear()
        self._send(KillOrphans())
        with suppress(TimeoutError):
            async with asyncio.timeout(ORPHANS_TIMEOUT_S):
                await self._alone.wait()
        return self._alone.is_set()

    def deliver(self, pid: int, number: int) -> None:
        self._send(Deliver(pid=pid, signal=number))

    def close(self) -> None:
        """Close this end of the socket: the fork server then kills its children and exits."""
        self._leaving = True
        if self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    async def gone(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the fork server's exit."""
        if self._sock is None or self._channel is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_ended.wait()
                if self._process is not None:
                    await self._process.wait()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._channel.close()

    def _send(self, request: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        assert self._channel is not None, "it was never started"
        try:
            self._channel.send(request, descriptors)
        except OSError as error:
            print(f"fork server: {error}", flush=True)  # the reader will notice its exit

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            chunk = self._sock.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._has_ended.set()
            if not self._leaving:
                self._unable(self._reason or f"the fork server ended; see {self._log}")
            return
        if self._leaving:
            return
        for report in self._codec.feed(chunk):
            match report:
                case Ready():
                    print(f"fork server ready after {report.seconds:.1f} s", flush=True)
                    self._ready = True
                    waiting, self._waiting = self._waiting, []
                    for request, worker_end in waiting:
                        self.fork(request, worker_end)
                case Unable():
                    self._reason = report.reason
                case Alone():
                    self._alone.set()
                case _:
                    self._report(report)
