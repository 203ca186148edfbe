"""Run a command for at most so many seconds, and leave none of its processes behind. Imports nothing of CUDA."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

WAIT_FOR_DEAD_S = 10.0


def run_within(
    command: Sequence[str],
    seconds: float,
    log: Path,
    environment: Mapping[str, str],
    line: Callable[[str], object] | None = None,
) -> int | None:
    """Return the command's exit code, or None if it was ended because its time was over.

    Appends its standard error to `log`; `line` gets each line of its standard output as soon as it is there. Without
    `line` standard output goes to `log`, too.
    """
    with log.open("a") as words:
        process = subprocess.Popen(
            command,
            stdout=words if line is None else subprocess.PIPE,
            stderr=words,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        with _ended_after(process, seconds) as was_late:
            _read(process.stdout, line)
            code = process.wait()
    return None if was_late.is_set() else code


def _read(output: IO[str] | None, line: Callable[[str], object] | None) -> None:
    if output is None or line is None:
        return
    for text in output:
        line(text)


@contextmanager
def _ended_after(process: subprocess.Popen[str], seconds: float) -> Iterator[threading.Event]:
    """The event is set if the process had to be ended. An exception in the body ends it as well."""
    was_late = threading.Event()

    def end() -> None:
        was_late.set()
        end_with_children(process)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield was_late
    except BaseException:
        end_with_children(process)
        raise
    finally:
        timer.cancel()
        timer.join()  # it may be at its work: nothing is left behind when this returns


def end_with_children(process: subprocess.Popen[str]) -> None:
    """Kill the process, its session, and all that descends from it: agents of a job have sessions of their own."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=WAIT_FOR_DEAD_S)


def keep_logs(source: Path, target: Path) -> None:
    """Copy the logs of a folder that is about to go."""
    for log in source.rglob("*.log"):
        copy = target / log.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, copy)
