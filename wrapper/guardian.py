"""The guardian: what `resihp run` is while the job runs.

Starts the supervisor as its child, passes signals on, returns its exit code. When the supervisor itself dies by a
signal, it is started once more to write the job's end. Decides nothing else, and imports little.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from resihp.process import ending
from wrapper.launcher import own_environment

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def supervisor_command(run_file: Path, recover: str | None) -> list[str]:
    command = [sys.executable, "-P", "-m", "wrapper.supervisor", "--run", str(run_file), "--parent", str(os.getpid())]
    return command if recover is None else [*command, "--recover", recover]


def guard(run_file: Path, command: Callable[[Path, str | None], Sequence[str]] = supervisor_command) -> int:
    """Run the job to its end; returns the exit code. `command(run_file, how the first died)` starts a supervisor."""
    status = _watch(command(run_file, None))
    if status >= 0:
        return status
    return max(1, _watch(command(run_file, ending(status))))


def _watch(command: Sequence[str]) -> int:
    """Run one supervisor, in a process group of its own: Ctrl-C reaches it through us, once."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    previous = {number: signal.signal(number, forward) for number in (*FORWARDED, signal.SIGHUP)}
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=own_environment(), process_group=0)
        for number in early:
            forward(number, None)
        return child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
