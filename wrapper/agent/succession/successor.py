"""The guardian of a supervisor that an agent has started as successor.

It decides only one thing: a supervisor that dies by a signal is started again, a few times, on the same socket and with
the next term. Owned by `resihp.wrapper.agent.peers`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from resihp.process import ending
from resihp.wrapper.exit_codes import CANNOT_LEAD
from resihp.wrapper.job_folder import lock_file
from resihp.wrapper.launch.launcher import own_environment

MAX_RESTARTS = 3
RESTART_PAUSE_S = 0.2
"""Pause between a supervisor's exit and the next start."""


class Successor:
    """The supervisor that an agent starts as its child process, including restarts. `copy`: the agent's copy of the
    journal, from which the supervisor starts."""

    def __init__(self, run_file: Path, node: str, copy: Path, listener: socket.socket, term: int) -> None:
        self._run_file = run_file
        self._node = node
        self._copy = copy
        self._listener = listener
        self._term = term
        self._process: asyncio.subprocess.Process | None = None
        self._is_needless = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> bool:
        """Start the supervisor, and watch it until it exits; return False if it cannot start on this node."""
        lock = lock_file(self._copy.with_suffix(".lock"))  # shows commands on this machine that the job has a leader
        self._copy.with_suffix(".journal").unlink(missing_ok=True)  # from an earlier term: the copy has more records
        try:
            for life in range(MAX_RESTARTS + 1):
                status = await self._live(self._term + life)
                print(f"successor: {ending(status)}", flush=True)
                if status >= 0 or self._is_needless:
                    return status != CANNOT_LEAD
                await asyncio.sleep(RESTART_PAUSE_S)
        except OSError as error:
            print(f"successor: cannot be started: {error.strerror}", flush=True)
        finally:
            if lock is not None:
                os.close(lock)
        return False

    def kill(self) -> None:
        """Kill the supervisor, which nobody follows, and do not start it again."""
        self._is_needless = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _live(self, term: int) -> int:
        descriptor = self._listener.fileno()
        self._process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-P", "-m", "resihp.wrapper.supervisor.process", "--run", str(self._run_file)],
            *["--parent", str(os.getpid()), "--successor", self._node, "--term", str(term)],
            *["--copy", str(self._copy), "--listen", str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=own_environment(),
        )
        return await self._process.wait()
