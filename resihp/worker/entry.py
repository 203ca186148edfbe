"""How a forked process becomes the user's program: as `python script.py` would have started it.

Called in the child by `resihp.worker.forkserver`. What python itself does before a script (its folder first on
sys.path, then PYTHONPATH, `sys.argv`, `__main__`) is done here by hand; nothing of the program is wrapped or patched.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal

from resihp.errors import ResihpError
from resihp.process import AGENT_FD


def become(
    kind: Literal["script", "module", "command"],
    argv: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    agent_fd: int,
) -> int:
    """Run the program to its end; returns its exit status. Does not return for `command`, which is exec'd."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    os.environ[AGENT_FD] = str(agent_fd)
    os.chdir(cwd)
    if kind == "command":
        _execute(argv, agent_fd)
    sys.argv[:] = argv
    entries = [_first_entry(kind, argv[0], cwd), *_python_path(environment.get("PYTHONPATH", ""), cwd)]
    sys.path[:0] = [entry for i, entry in enumerate(entries) if i == 0 or entry not in entries[:i]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _settle(threads, environment.get("OMP_NUM_THREADS"))
    try:
        if kind == "module":
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        return _status(error)
    except BaseException as error:  # noqa: BLE001 - the end of the program: as python does, print and exit with 1
        _print(error)
        _report(error)
        return 1
    return 0


def _execute(argv: Sequence[str], agent_fd: int) -> None:
    """Replace the process. A script deeper down may still find its agent, so the socket stays open."""
    os.set_inheritable(agent_fd, True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))
    except OSError as error:
        os.write(2, f"resihp: {argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _first_entry(kind: str, program: str, cwd: str) -> str:
    """sys.path[0]: the script's folder with links resolved; the script itself if it is a folder or an archive."""
    if kind == "module":
        return cwd
    if os.path.isdir(program) or program.endswith((".zip", ".pyz")):
        return os.path.abspath(program)
    return os.path.dirname(os.path.realpath(program))


def _python_path(value: str, cwd: str) -> list[str]:
    return [os.path.join(cwd, entry) for entry in value.split(os.pathsep)] if value else []


def _settle(inherited: str | None, wanted: str | None) -> None:
    """Give the worker what a fork shares and should not: numpy's random state, and the user's number of threads."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and wanted != inherited and (wanted or "").isdigit() and int(wanted or 0) > 0:
        torch.set_num_threads(int(wanted or 1))


def _status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on, without the machinery that ran it."""
    machinery = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in machinery:
        frames = frames.tb_next
    return frames


def _print(error: BaseException) -> None:
    error.__traceback__ = _own_frames(error.__traceback__)
    sys.stdout.flush()
    traceback.print_exception(error)


def _report(error: BaseException) -> None:
    """Tell the supervisor, also when the program ended before it had anything to do with us."""
    from resihp.protocol import client

    try:
        client.report_exception(error)
    except (OSError, EOFError, ResihpError) as failure:
        print(f"resihp: the exception could not be reported: {failure}", file=sys.stderr)
