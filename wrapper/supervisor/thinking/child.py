"""A process that is started by a thread of its own, so that nobody else waits where that takes long.

Between fork and exec a child closes what it has inherited: descriptors of a file on a file system that hangs keep it
there, and whoever started it waits for the exec. The thread stays as long as the process, for the kernel ends who asked
for it with the thread that forked him (`resihp.process.die_with_parent`).
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
    """`reader` has what it writes to its output, `writer` what it reads from its input: both ends of one socket."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def end(self) -> None:
        """Does not wait for it; its thread does."""
        self.writer.close()
        self.process.kill()


async def start(command: Sequence[str], environment: Mapping[str, str]) -> Child:
    """In a session of its own, with our stderr. Raises OSError where it cannot be started."""
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()
    ours, theirs = socket.socketpair()

    def settle(process: subprocess.Popen[bytes] | OSError) -> None:
        if isinstance(process, OSError):
            if not started.done():
                started.set_exception(process)
        elif started.done():  # nobody waits any more
            process.kill()
        else:
            started.set_result(process)

    def run() -> None:
        try:
            end = theirs.fileno()
            process = subprocess.Popen(command, stdin=end, stdout=end, env=environment, start_new_session=True)
        except OSError as error:
            with suppress(RuntimeError):  # the loop is over
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
