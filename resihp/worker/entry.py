"""Turns a forked process into the user's program, which starts and ends exactly as under `python script.py`.

Called in the child by `resihp.worker.forkserver`. This module repeats python's own preparations for a script: the
script's folder first on sys.path, then PYTHONPATH, `sys.argv`, `__main__`. It never wraps or patches the program.

It also makes the end of the process the same as under python. Objects in a script's `__main__` live until the
interpreter shuts down, when other threads no longer run python. If a process group were freed earlier, it would wait
for its thread while holding the GIL, and the thread would wait for the GIL. So the program runs in a `__main__` of its
own, which stays in `sys.modules`.
"""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from resihp.process import AGENT_FD
from resihp.worker import stacks
from resihp.worker.requests import ProgramKind

INTERRUPTED_STATUS = 130
"""Exit status after KeyboardInterrupt, as reported by a shell when python ends itself by SIGINT."""
OVERFLOW_STATUS = 255
"""Exit status after `sys.exit` with a number that does not fit a C long, which python treats as -1."""


def become(
    kind: ProgramKind,
    argv: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    agent_fd: int,
) -> int:
    """Run the program to its end and return its exit status. A `command` replaces the process: the function does not
    return."""
    enter(kind, argv, cwd, {**environment, AGENT_FD: str(agent_fd)})
    if kind == "command":
        _execute(argv, agent_fd)
    return run(kind, argv)


def enter(kind: ProgramKind, argv: Sequence[str], cwd: str, environment: Mapping[str, str]) -> None:
    """Prepare this process for the program, up to a fresh `__main__`. `environment` is complete."""
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if kind == "command":
        return
    sys.argv[:] = argv
    entries = [_first_entry(kind, argv[0], cwd), *_python_path(environment.get("PYTHONPATH", ""), cwd)]
    sys.path[:0] = [entry for i, entry in enumerate(entries) if i == 0 or entry not in entries[:i]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _settle(threads, environment.get("OMP_NUM_THREADS"))
    stacks.register()
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    if kind == "script" and not _is_searched(argv[0]):
        main.__file__ = os.path.abspath(argv[0])


def run(kind: ProgramKind, argv: Sequence[str]) -> int:
    """Run the program in the `__main__` that `enter` made, and return its exit status."""
    try:
        if kind == "module":
            _run_module(argv[0])
        else:
            _run_script(argv[0])
    except SystemExit as error:
        return _status(error)
    except BaseException as error:  # noqa: BLE001 - the end of the program: python prints any exception and exits
        uncaught: BaseException | None = error
    else:
        uncaught = None
    # Outside of the `except` block, so that an exception raised by sys.excepthook is not chained to this one.
    return 0 if uncaught is None else _fail(uncaught)


def _run_module(name: str) -> None:
    """Run a module as `python -m` does. Raises ImportError if it does not exist."""
    _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]  # as `python -m` itself does
    sys.argv[0] = spec.origin
    exec(code, _main_of(spec))


def _run_script(path: str) -> None:
    """Run a file as `python PATH` does, or the `__main__` of a folder or an archive."""
    if _is_searched(path):
        _, spec, code = runpy._get_main_module_details()  # type: ignore[attr-defined]  # searches sys.path
        exec(code, _main_of(spec))
        return
    file = os.path.abspath(path)
    code, is_compiled = _code_of(file)
    main = sys.modules["__main__"]
    main.__dict__["__cached__"] = None
    main.__loader__ = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", file)
    exec(code, main.__dict__)


def _is_searched(path: str) -> bool:
    """Return whether a path is a folder or an archive, in which python searches for `__main__.py`."""
    return pkgutil.get_importer(path) is not None


def _code_of(file: str) -> tuple[CodeType, bool]:
    """Return a file's code object, and whether the file was already compiled."""
    with io.open_code(file) as opened:
        compiled: Any = pkgutil.read_code(opened)  # reads .pyc, as runpy does
    if compiled is not None:
        return compiled, True
    with io.open_code(file) as opened:
        return compile(opened.read(), file, "exec", dont_inherit=True), False


def _main_of(spec: ModuleSpec) -> dict[str, Any]:
    """Give `__main__` python's usual attributes of a module or package, and return its namespace."""
    namespace = sys.modules["__main__"].__dict__
    namespace.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return namespace


def _execute(argv: Sequence[str], agent_fd: int) -> None:
    """Replace the process by a command. The socket stays open, so that a python script started by the command can use
    it."""
    os.set_inheritable(agent_fd, True)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))
    except OSError as error:
        os.write(2, f"resihp: {argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _first_entry(kind: ProgramKind, program: str, cwd: str) -> str:
    """Return sys.path[0]: the script's folder with links resolved; for a folder or an archive the path itself."""
    if kind == "module":
        return cwd
    if _is_searched(program):
        return os.path.abspath(program)
    return os.path.dirname(os.path.realpath(program))


def _python_path(value: str, cwd: str) -> list[str]:
    return [os.path.join(cwd, entry) for entry in value.split(os.pathsep)] if value else []


def _settle(inherited: str | None, wanted: str | None) -> None:
    """Undo effects of the fork: random states of numpy and torch shared by all workers of all rounds, and the fork
    server's number of threads."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # torch drew the first seed when it was imported; GPUs have no generator yet
    if torch is not None and wanted != inherited and (wanted or "").isdigit() and int(wanted or 0) > 0:
        torch.set_num_threads(int(wanted or 1))


def _status(error: SystemExit) -> int:
    """Return the exit status that python derives from `sys.exit`. A text is printed, with status 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF if -(1 << 63) <= error.code < 1 << 63 else OVERFLOW_STATUS
    with suppress(Exception):  # the script may have closed or replaced standard error: python ignores errors here
        print(error.code, file=sys.stderr or sys.__stderr__, flush=True)
    return 1


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the program's first frame on, without the frames of this module and of runpy."""
    machinery = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in machinery:
        frames = frames.tb_next
    return frames


def _fail(error: BaseException) -> int:
    """End the program as python does after an uncaught exception, and return the exit status.

    The exception is reported to the supervisor first, since the script's own hook may end the process.
    """
    trace = error.__traceback__ = _own_frames(error.__traceback__)
    _report(error)
    with suppress(Exception):  # standard output may be full, closed, or replaced by the script
        sys.stdout.flush()
    # These variables keep objects in the exception's frames alive until the interpreter shuts down, as python does.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as left:
        return _status(left)
    except BaseException as broken:  # noqa: BLE001 - the hook is the script's
        broken.__traceback__ = _own_frames(broken.__traceback__)
        with suppress(Exception):
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exception(broken)
            print("\nOriginal exception was:", file=sys.stderr)
            traceback.print_exception(error)
    return INTERRUPTED_STATUS if isinstance(error, KeyboardInterrupt) else 1


def _report(error: BaseException) -> None:
    """Report an exception to the supervisor, even if the program has never used resihp."""
    from resihp.protocol import client

    try:
        client.report_exception(error)
    except Exception as failure:  # noqa: BLE001 - from the connection, or from an exception that has no text
        with suppress(Exception):
            print(f"resihp: the exception could not be reported: {failure!r}", file=sys.stderr)
