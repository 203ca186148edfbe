"""Starts the next round's workers in advance, up to the first line of the script, so that its imports cost no time.

A script that does not use resihp is started again when a rank fails. While a round runs, the fork server forks one
*early worker* for each of its ranks. An early worker enters the program as every worker does (`entry.enter`), with the
environment that its rank would have in the next round. It imports the libraries that the script imports first
(`script_imports`), and waits. At a restart the fork server hands the request to it, and it runs the script. If the
round ends otherwise, it is killed. It is not forked again, so libraries may start threads of C libraries, draw random
numbers or register exit functions: all that belongs to the rank that it becomes.

An early worker is used only if the import could not have told the difference: folder, CPUs and every environment
variable that was read meanwhile are the same, the arguments too if they were read, and the user's files and the list of
installed packages are unchanged. It gives up, and the rank is started as usual, if the import fails, starts a thread of
Python or a process, opens anything but files (a device, a connection), asks the CUDA driver for devices, keeps standard
output, changes the arguments, or imports a module of the user. Its output goes to the rank's log when
it is used.
"""

from __future__ import annotations

import importlib
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import msgspec

import resihp
from resihp.process import AGENT_FD, free_memory
from resihp.protocol.channels import LocalChannel
from resihp.worker import entry
from resihp.worker.requests import Fork
from resihp.worker.script_imports import ImportsAtTop, LibraryImport, imports_at_top, state_of
from resihp.worker.watched_reads import (
    ALL_NAMES,
    has_driver_loaded,
    hidden_devices,
    watched_arguments,
    watched_environment,
)

EARLY_AFTER_S = 10.0
"""Seconds from the start of a round until its early workers are started, one after the other: until then the ranks
themselves import."""
MIN_FREE_BYTES = 4 << 30
"""Memory that has to be free for an early worker. One has used up to 150 MB of its own; a script may load gigabytes."""
WORTHWHILE_S = 0.1
"""Imports that take less are left to the script."""
ROUND_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
PORT_VARIABLE = "MASTER_PORT"
"""Differs in each round, in a way that nobody knows in advance."""
RESUME_VARIABLES = "RESIHP_RESUME_"
"""Beginning of the names of the variables that name a checkpoint: it is not known in advance."""
HARMLESS_DEVICES = ("/dev/null", "/dev/urandom")
OUTPUT_NAME = "resihp-early-output"
"""Name of the file in memory to which an early worker writes."""
MOST_DISPENSABLE = "1000"
"""Value of `oom_score_adj` of a process that the kernel kills first."""


class Imported(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report of an early worker that has imported. `read`: names of the environment variables that were read meanwhile;
    `all_names`: whether the names of all variables were listed; `arguments`: whether those of the script were read.
    `files`: as `ImportsAtTop.files`, and the folders of libraries."""

    seconds: float
    read: tuple[str, ...]
    all_names: bool
    arguments: bool
    files: dict[str, tuple[int, int, int]]


class TooEarlyError(Exception):
    """The libraries of a script cannot be imported in advance; the reason is its text."""


class EarlyWorker:
    """An early worker, as its fork server sees it."""

    def __init__(self, pid: int, expected: Fork, channel: LocalChannel) -> None:
        self.pid = pid
        self.expected = expected
        self.channel = channel
        self.report: Imported | None = None

    def suits(self, request: Fork) -> bool:
        """Return whether the libraries would have found what they have found if this request's worker had imported
        them."""
        if self.report is None or not ImportsAtTop(files=self.report.files).is_current():
            return False
        if self.report.all_names and _names(request) != _names(self.expected):
            return False
        if self.report.arguments and request.argv != self.expected.argv:
            return False
        same = ("OMP_NUM_THREADS", "PYTHONPATH", *self.report.read)
        return _place_of(request) == _place_of(self.expected) and all(
            request.environment.get(name) == self.expected.environment.get(name) for name in same if name != AGENT_FD
        )


def _place_of(request: Fork) -> tuple[object, ...]:
    return request.kind, request.argv[0], request.cwd, request.processors


def _names(request: Fork) -> set[str]:
    """Return the names of the environment variables, without those of the checkpoint, which no library knows."""
    return {name for name in request.environment if not name.startswith(RESUME_VARIABLES)}


def expected_next(request: Fork) -> Fork:
    """Return the request for the same worker in the next round, as far as it is known."""
    environment = dict(request.environment)
    if environment.get(ROUND_VARIABLE, "").isdigit():
        environment[ROUND_VARIABLE] = str(int(environment[ROUND_VARIABLE]) + 1)
    return msgspec.structs.replace(request, environment=environment)


class EarlyWorkers:
    """The early workers of one fork server. At most one of them imports at a time. `run` becomes an early worker, in
    the forked child."""

    def __init__(self, run: Callable[[Fork, LocalChannel], NoReturn]) -> None:
        self._run = run
        self._requests: dict[int, Fork] = {}
        self._waiting: dict[int, EarlyWorker] = {}
        self._importing: EarlyWorker | None = None
        self._due = float("inf")

    @property
    def pids(self) -> Set[int]:
        """Process ids of the early workers that wait for a request."""
        return self._waiting.keys()

    def take(self, request: Fork) -> EarlyWorker | None:
        """Note that a worker starts, and return the early worker that may become it. The caller sends the request to
        it."""
        self._stop_importing()
        self._requests[request.rank] = request
        self._due = time.monotonic() + EARLY_AFTER_S if request.kind != "command" else float("inf")
        early = next((early for early in self._waiting.values() if early.suits(request)), None)
        if early is not None:
            del self._waiting[early.pid]
        return early

    def end_round(self) -> None:
        """Start no early worker until the next request."""
        self._stop_importing()
        self._requests.clear()
        self._due = float("inf")

    def close(self) -> None:
        """Close the sockets to all early workers. Called in a forked child, in which they would stay open."""
        for early in self._waiting.values():
            early.channel.close()

    def note_end(self, pid: int) -> None:
        """Note that a child has ended. If it is an early worker, no other is started in this round."""
        early = self._waiting.pop(pid, None)
        if early is None and self._importing is not None and self._importing.pid == pid:
            early, self._importing = self._importing, None
        if early is not None:
            early.channel.close()
            self._due = float("inf")

    def wait(self, poll: select.poll) -> set[int]:
        """Wait for events, and start or hear early workers meanwhile. Return the descriptors that are ready."""
        try:
            self._begin_one()
        except OSError as error:  # no process or descriptor is left: the ranks must go on
            self._give_up(f"nothing is imported in advance: {error}")
        importing = self._importing
        if importing is None:
            timeout_ms = None if self._due == float("inf") else max(0.0, self._due - time.monotonic()) * 1000
            return {descriptor for descriptor, _ in poll.poll(timeout_ms)}
        own = importing.channel.fileno()
        poll.register(own, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        poll.unregister(own)
        if own in ready:
            self._hear(importing)
        return ready - {own}

    def _hear(self, importing: EarlyWorker) -> None:
        self._importing = None
        try:
            importing.report = importing.channel.recv(Imported)
        except (EOFError, OSError):
            importing.channel.close()
            self._due = float("inf")
            return
        self._waiting[importing.pid] = importing
        rank = importing.expected.rank
        _log(f"rank {rank}: libraries imported in advance in {importing.report.seconds:.1f} s")

    def _begin_one(self) -> None:
        if self._importing is not None or time.monotonic() < self._due:
            return
        expected = [expected_next(request) for request in self._requests.values()]
        for early in list(self._waiting.values()):
            if not any(early.suits(request) for request in expected):
                self._waiting.pop(early.pid).channel.close()  # it then ends
        ranks = {early.expected.rank for early in self._waiting.values()}
        missing = next((request for request in expected if request.rank not in ranks), None)
        if missing is None:
            self._due = float("inf")
            return
        if free_memory() < MIN_FREE_BYTES:
            self._give_up("nothing is imported in advance: too little memory is free")
            return
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                ours.close()
                self._run(missing, LocalChannel(theirs))
        self._importing = EarlyWorker(pid, missing, LocalChannel(ours))

    def _give_up(self, reason: str) -> None:
        """Start no other early worker in this round."""
        self._due = float("inf")
        _log(reason)

    def _stop_importing(self) -> None:
        if self._importing is not None:
            self._importing.channel.close()
            with suppress(ProcessLookupError):
                os.kill(self._importing.pid, signal.SIGKILL)
            self._importing = None


def _log(line: str) -> None:
    """Write a line to the fork server's log, if it can be written: its disk may be full."""
    with suppress(OSError):
        print(line, file=sys.stderr)


def import_and_wait(
    expected: Fork, server: LocalChannel, folders: Sequence[str], attach: Callable[[Fork, int], None]
) -> int:
    """Be an early worker, and then the worker that the fork server requests; return its exit status. Ends the process
    if the script's libraries cannot be imported in advance, or if that would save no time.

    `folders`: those of libraries. `attach` names the process after its request, and connects standard output and error
    to the log. Before, the process has been prepared like every worker.
    """
    agent_fd = os.open(os.devnull, os.O_RDONLY)  # keeps the number
    output, complaints = os.memfd_create(OUTPUT_NAME), os.dup(2)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        with _first_victim():
            report, written = _import(expected, agent_fd, folders)
            server.send(report)
            request = _receive(server, agent_fd)
    except Exception as reason:  # noqa: BLE001 - an import may raise anything, and the rank starts as usual
        os.write(complaints, f"rank {expected.rank}: nothing is imported in advance: {reason}\n".encode())
        os._exit(1)
    os.close(complaints)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    log = server.take_descriptor()
    server.close()
    attach(request, log)
    os.close(log)
    os.lseek(output, 0, os.SEEK_SET)
    while part := os.read(output, 1 << 16):
        os.write(1, part)
    os.close(output)
    os.chdir(request.cwd)  # another folder may have its name now
    sys.argv[:] = request.argv
    os.environ.clear()
    os.environ.update({**request.environment, AGENT_FD: str(agent_fd)})
    for name, value in written.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    return entry.run(request.kind, request.argv)


def _receive(server: LocalChannel, agent_fd: int) -> Fork:
    """Wait for the request that this process becomes, and for the socket to its agent."""
    try:
        request: Fork = server.recv(Fork)
    except (EOFError, OSError):
        os._exit(0)  # the fork server has no use for this process
    descriptor = server.take_descriptor()
    os.dup2(descriptor, agent_fd, inheritable=False)
    os.close(descriptor)
    return request


@contextmanager
def _first_victim() -> Iterator[None]:
    """Have the kernel kill this process before any other while memory is short. Raises OSError if that could not be
    taken back."""
    file = Path("/proc/self/oom_score_adj")
    usual = file.read_text()
    file.write_text(MOST_DISPENSABLE)
    file.write_text(usual)
    file.write_text(MOST_DISPENSABLE)
    yield
    file.write_text(usual)


def _import(expected: Fork, agent_fd: int, folders: Sequence[str]) -> tuple[Imported, dict[str, str | None]]:
    """Import the libraries of a script; return the report, and the environment variables that they have set (None:
    removed). Raises TooEarlyError, and what an import raises."""
    entry.enter(expected.kind, expected.argv, expected.cwd, {**expected.environment, AGENT_FD: str(agent_fd)})
    imports = imports_at_top(expected.kind, expected.argv[0], folders)
    state_of_folders = {folder: state_of(folder) for folder in folders}  # changes when a package is installed
    modules, descriptors, had_driver = set(sys.modules), _open_files(), has_driver_loaded()
    variables, before = os.environ, dict(os.environ)
    begun = time.monotonic()
    try:
        with hidden_devices(), watched_environment() as read, watched_arguments() as arguments:
            for library in imports.libraries:
                _perform(library)
    except (Exception, SystemExit) as error:
        raise TooEarlyError(f"{type(error).__name__}: {error}") from error
    seconds = time.monotonic() - begun
    if seconds < WORTHWHILE_S:
        raise TooEarlyError(f"the libraries at the top of the script take {seconds:.2f} s")
    if os.environ is not variables or PORT_VARIABLE in read:
        raise TooEarlyError(f"a library reads {PORT_VARIABLE}, or copies the whole environment")
    if arguments.were_taken or (arguments.were_read and expected.kind == "module"):
        raise TooEarlyError("a library changes or keeps the arguments, or reads those of a module")  # its file is first
    if has_driver_loaded() and not had_driver:
        raise TooEarlyError("a library asks the CUDA driver for devices")
    if obstacle := _obstacle(modules, descriptors, folders):
        raise TooEarlyError(obstacle)
    written = {
        name: os.environ.get(name)
        for name in before.keys() | os.environ.keys()
        if before.get(name) != os.environ.get(name)
    }
    return Imported(
        seconds=seconds,
        read=tuple(read - {ALL_NAMES}),
        all_names=ALL_NAMES in read,
        arguments=arguments.were_read,
        files=imports.files | state_of_folders,
    ), written


def _perform(library: LibraryImport) -> None:
    """Import a module, and look up names in it as `from` does."""
    module = importlib.import_module(library.module)
    for name in library.names:
        if name != "*" and not hasattr(module, name):
            importlib.import_module(f"{library.module}.{name}")


def _open_files() -> set[tuple[int, str]]:
    """Return the open descriptors of this process, and what they refer to."""
    files = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            files.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return files


def _obstacle(modules: Set[str], descriptors: Set[tuple[int, str]], folders: Sequence[str]) -> str:
    """Return the reason why this process must not become a worker; empty if there is none. `modules`, `descriptors`:
    those before the imports."""
    packages = [os.path.join(os.path.dirname(str(module.__file__)), "") for module in (os, resihp)]
    for name in sys.modules.keys() - modules:
        file = getattr(sys.modules[name], "__dict__", {}).get("__file__")
        if isinstance(file, str) and not file.startswith((*folders, *packages)):
            return f"a library imports {name}, which is the user's: {file}"
    if threading.active_count() > 1:
        return f"a library starts a thread: {threading.enumerate()[-1].name}"
    for descriptor, target in _open_files() - descriptors:
        if not stat.S_ISREG(os.stat(descriptor).st_mode) and target not in HARMLESS_DEVICES:
            return f"a library opens {target}"
        if target.startswith(f"/memfd:{OUTPUT_NAME}"):
            return "a library keeps a copy of standard output, which is the log only later"
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "a library starts a process"
    return "a library starts a process" if any(resource.getrusage(resource.RUSAGE_CHILDREN)) else ""  # it has ended
