"""Commands carried out as a person would, in a process that has imported the product and is forked for each batch.

The process becomes the person (groups, uid, environment, a terminal of its own) and waits for a line that names a
command; it answers with what became of it. Between two commands the harness looks at the world. A command that takes
longer than anybody should wait is ended with its process. Called by the harness; judges nothing.
"""

from __future__ import annotations

import codecs
import contextlib
import encodings.aliases
import fcntl
import gc
import importlib
import io
import json
import os
import pty
import resource
import select
import signal
import sys
import tempfile
import termios
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tests.hostile_homes.places import Person

LIMIT_S = 5.0
"""How long a command may take, times without a processor apart."""
INTERRUPT_AFTER_S = 1.0
"""When a command without an end is interrupted, as with Ctrl-C."""
MEMORY_BYTES = 2 << 30
"""That a command may have beside what it begins with."""
OUTPUT_BYTES = 64 << 20
"""Of a file at most: output without an end, or a copy of a giant file."""
SHOWN_BYTES = 200_000
"""Of what a command printed, at its beginning and end."""
PRELOADED = ("resihp.wrapper.cli", "alembic", "jinja2", "pandas", "pyarrow.parquet", "psycopg", "rich.table")

Main = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a command. `events`: what Python did that deserves a look, as its audit hooks saw it."""

    words: tuple[str, ...]
    status: int
    """As a shell has it; negative: by what signal its process was killed."""
    seconds: float
    out: str = ""
    err: str = ""
    events: tuple[tuple[str, str], ...] = ()
    hung: bool = False


@dataclass
class Session:
    """A process that is one person, and carries out commands until it is closed or dies."""

    person: Person
    environment: dict[str, str]
    cwd: Path
    main: Main
    pid: int = 0
    _orders: int = -1
    _answers: int = -1
    _terminal: int = -1
    _buffer: bytes = b""
    _began: float = field(default=0.0)

    def run(
        self, words: Sequence[str], *, terminal: bool = False, endless: bool = False, limit_s: float = LIMIT_S
    ) -> Outcome:
        """Carry one command out. Starts the process where there is none. `terminal`: its output is shown on one."""
        if not self.pid:
            self._start()
        os.write(self._orders, json.dumps([list(words), terminal]).encode() + b"\n")
        began = time.monotonic()
        waited_before_s = self._waited_for_processor_s()
        interrupt_at = began + INTERRUPT_AFTER_S if endless else None
        while True:
            answer = self._answer(0.25)
            now = time.monotonic()
            if answer is not None:
                return Outcome(tuple(words), **answer) if answer else self._died(words, now - began)
            if interrupt_at is not None and now >= interrupt_at:
                os.kill(self.pid, signal.SIGINT)
                interrupt_at, began = None, now
            used_s = now - began - (self._waited_for_processor_s() - waited_before_s)
            if used_s > limit_s:
                where = self._where()
                os.kill(self.pid, signal.SIGKILL)
                self._end()
                return Outcome(tuple(words), -signal.SIGKILL, used_s, err=where, hung=True)

    def close(self) -> None:
        if self.pid:
            os.close(self._orders)
            self._orders = -1
            self._end()

    def _start(self) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self._terminal, terminal = pty.openpty()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._orders)
            os.close(self._answers)
            os.close(self._terminal)
            _serve(self, orders, answers, terminal)
        for descriptor in (orders, answers, terminal):
            os.close(descriptor)
        self._buffer = b""

    def _answer(self, patience_s: float) -> dict[str, Any] | None:
        """None: not yet. Empty: its process is gone."""
        ready, _, _ = select.select([self._answers], [], [], patience_s)
        if not ready:
            return None
        content = os.read(self._answers, 1 << 20)
        self._buffer += content
        if not content:
            return {}
        if not self._buffer.endswith(b"\n"):
            return None
        line, self._buffer = self._buffer, b""
        answer: dict[str, Any] = json.loads(line)
        answer["events"] = tuple(tuple(event) for event in answer["events"])
        return answer

    def _died(self, words: Sequence[str], seconds: float) -> Outcome:
        return Outcome(tuple(words), self._end(), seconds, err="its process ended without a word")

    def _end(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        for descriptor in (self._orders, self._answers, self._terminal):
            if descriptor != -1:
                os.close(descriptor)
        self.pid, self._orders, self._answers, self._terminal = 0, -1, -1, -1
        return os.waitstatus_to_exitcode(status)

    def _waited_for_processor_s(self) -> float:
        """How long it could have run and other processes did."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def _where(self) -> str:
        """What it waits for, for whoever reads that it hung: asked of the process itself, else of the kernel."""
        os.kill(self.pid, signal.SIGUSR1)
        answer = self._answer(0.5)
        if answer:
            return str(answer["err"])
        try:
            return "waits in " + Path(f"/proc/{self.pid}/wchan").read_text()
        except OSError:
            return ""


def resihp() -> None:
    """The command line, from its first line to its exit code."""
    from resihp.__main__ import main

    main()


def preload(run_all: Callable[[], Iterable[str]]) -> None:
    """Import all that commands import on their way; `run_all` carries them out in a process of its own, and names the
    modules that were there at its end."""
    for name in {*encodings.aliases.aliases.values(), "idna", "punycode", "utf-8-sig", "cp437"}:
        with contextlib.suppress(LookupError):
            codecs.lookup(name)  # Python's own files may be for root alone to read
    for name in (*PRELOADED, *run_all()):
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - one that cannot be imported alone is imported by the command
            continue
    gc.collect()
    gc.freeze()


def carried_out_quietly(words: list[str]) -> None:
    """Run a command in this process for what it imports, whatever comes of it."""
    sys.stdout, sys.stderr = _stream(1, False), _stream(2, False)
    sys.argv = ["resihp", *words]
    try:
        resihp()
    except BaseException:  # noqa: BLE001 - also SystemExit
        return


def _serve(session: Session, orders: int, answers: int, terminal: int) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.dont_write_bytecode = True
        _become(session, terminal)
        events = _watched()

        def tell_where(_: int, frame: FrameType | None) -> None:
            text = "".join(traceback.format_stack(frame)[-6:])
            os.write(answers, json.dumps({"err": text, "events": []}).encode() + b"\n")

        signal.signal(signal.SIGUSR1, tell_where)
        with os.fdopen(orders) as lines:
            for line in lines:
                answer = _carried_out(*json.loads(line), session.main, events)
                os.write(answers, json.dumps(answer).encode() + b"\n")
    except BaseException:  # noqa: BLE001 - a forked process never goes on with what its parent was doing
        os.write(answers, json.dumps(_broken(traceback.format_exc())).encode() + b"\n")
    finally:
        os._exit(0)


def _become(session: Session, terminal: int) -> None:
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.umask(0o022)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    uid = session.person.uid
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.environ.clear()
    os.environ.update(session.environment)
    tempfile.tempdir = None
    os.chdir(session.cwd)


def _carried_out(words: list[str], terminal: bool, main: Main, events: list[tuple[str, str]]) -> dict[str, Any]:
    """What `resihp` with these words does, its output in files without a name."""
    events.clear()
    out, err = os.memfd_create("out"), os.memfd_create("err")
    for descriptor, number in ((out, 1), (err, 2)):
        os.dup2(descriptor, number)
    sys.stdout = sys.__stdout__ = _stream(1, terminal)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, terminal)  # type: ignore[misc]
    sys.argv = ["resihp", *words]
    began = time.monotonic()
    status: object = 0
    try:
        main()
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException:  # noqa: BLE001 - what Python would print, and exit with 1
        traceback.print_exc()
        status = 1
    seconds = time.monotonic() - began
    found = list(events)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue
    if isinstance(status, str):
        os.write(2, status.encode(errors="replace"))
    answer = {"out": _content(out), "err": _content(err), "status": status if isinstance(status, int) else 1}
    os.close(out)
    os.close(err)
    return answer | {"seconds": seconds, "events": found}


class _Shown(io.FileIO):
    """A file that is taken for a terminal."""

    def isatty(self) -> bool:
        return True


def _stream(number: int, terminal: bool) -> io.TextIOWrapper:
    file = _Shown if terminal else io.FileIO
    buffer = io.BufferedWriter(file(number, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="surrogateescape" if number == 1 else "backslashreplace")


def _content(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    content = os.pread(descriptor, SHOWN_BYTES, 0)
    if size > SHOWN_BYTES:
        content += b"\n...\n" + os.pread(descriptor, SHOWN_BYTES, max(size - SHOWN_BYTES, SHOWN_BYTES))
    return content.decode(errors="replace")


def _broken(text: str) -> dict[str, Any]:
    return {"out": "", "err": text, "status": 1, "seconds": 0.0, "events": []}


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = frozenset(
    {"os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.symlink", "os.link", "os.chmod", "os.chown", "os.truncate"}
    | {"os.utime", "os.mkfifo", "os.mknod", "os.setxattr", "os.removexattr"}
)
STARTS = frozenset({"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.startfile", "os.fork"})


def _watched() -> list[tuple[str, str]]:
    """What the audit hook notes from now on, for ever: (`writes`, path), (`connects`, address), (`starts`, program),
    (`kills`, process)."""
    found: list[tuple[str, str]] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES and not isinstance(path, int):
                found.append(("writes", _absolute(path)))
        elif event in CHANGES and not isinstance(arguments[0], int):
            found.append(("writes", _absolute(arguments[0])))
        elif event == "socket.connect":
            found.append(("connects", str(arguments[1])))
        elif event in STARTS:
            found.append(("starts", str(arguments[0] if arguments else "")))
        elif event == "os.kill" and arguments[1]:
            found.append(("kills", str(arguments)))

    sys.addaudithook(hook)
    return found


def _absolute(path: object) -> str:
    """Where it leads; a path beside a descriptor is taken as it is."""
    try:
        return os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):
        return repr(path)
