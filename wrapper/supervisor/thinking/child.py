"""A child process that is started by its own thread, so that a slow start does not block the event loop.

Between fork and exec, a child closes its inherited files, which takes long if a file system hangs, and the starting
thread waits for the exec. The thread lives as long as the child, because the kernel ends the child when the thread that
forked it exits (`resihp.process.die_with_parent`).
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Child:
    """A running child process. `reader` reads its output and `writer` writes its input, over one socket."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def end(self) -> None:
        """Kill the child without waiting for its exit; its thread waits."""
        self.writer.close()
        self.process.kill()


async def start(command: Sequence[str], environment: Mapping[str, str]) -> Child:
    """Start a command in its own session, with this process's stderr. Raises OSError if the start fails."""
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()
    ours, theirs = socket.socketpair()

    def settle(process: subprocess.Popen[bytes] | OSError) -> None:
        if isinstance(process, OSError):
            if not started.done():
                started.set_exception(process)
        elif started.done():  # the caller was cancelled
            process.kill()
        else:
            started.set_result(process)

    def run() -> None:
        try:
            end = theirs.fileno()
            process = subprocess.Popen(command, stdin=end, stdout=end, env=environment, start_new_session=True)
        except OSError as error:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, error)
            return
        finally:
            theirs.close()
        try:
            loop.call_soon_threadsafe(settle, process)
        except RuntimeError:
            process.kill()
        process.wait()

    threading.Thread(target=run, name=f"starts {command[-1]}", daemon=True).start()
    try:
        process = await started
    except BaseException:
        ours.close()
        raise
    return Child(process, *await asyncio.open_connection(sock=ours))
