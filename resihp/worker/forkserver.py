"""The fork server: imports the libraries for training once, then forks a worker on each request.

Each node has one fork server. It is started with the user's interpreter: `python -P -m resihp.worker.forkserver --fd N
--parent PID`. The agent (`resihp.wrapper.agent.process`) sends requests through an inherited socket; each request
carries the socket of the new worker. The fork server decides nothing. It dies with the agent, and its children die with
it. In a container it does not know its parent, and ends when the agent closes its end of the socket. It never imports
wrapper, slurm or db, so that a worker finds the user's modules with these names. It has only one thread when it forks.

Virtual nodes of one machine share the imports (`--shared`, started by `resihp.wrapper.supervisor.guardian`): the first
process forks a fork server for each node on request (`Serve`). The forked servers and their workers belong to the
process groups of their agents. A forked server ends when its agent closes its end of the socket, and may outlive the
process that forked it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from resihp.errors import ProtocolError
from resihp.process import (
    adopt_orphans,
    die_with_parent,
    inherited_socket,
    kill_children,
    name_process,
    restore_open_files,
    threads,
)
from resihp.protocol.channels import LocalChannel
from resihp.worker import stacks
from resihp.worker.early import EarlyWorkers, import_and_wait
from resihp.worker.entry import become
from resihp.worker.leaving import will_leave_with
from resihp.worker.requests import (
    Alone,
    Deliver,
    Ended,
    Fork,
    Forked,
    KillOrphans,
    NotForked,
    Ready,
    Request,
    Serve,
    Unable,
)
from resihp.worker.script_imports import library_folders

PRELOADED_MODULES = "torch,resihp.executor.trainer,resihp.datasets"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of the fork server. With more threads, libraries would start threads on import, which a fork would
lose."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm sends to every process of a job that must stop. The fork server ignores them and ends when its
agent does."""


REAP_S = 2.0
"""Seconds to wait until killed children have ended."""
KILL_ORPHANS_S = 8.0
"""The same between two rounds of a script, of which no process may be left."""


class ForkServer:
    """Receives requests and reports ended children, in one loop and one thread."""

    def __init__(self, channel: LocalChannel, own: Mapping[str, str] | None = None) -> None:
        """`own` has environment variables that workers inherit unless a request sets them."""
        self._channel = channel
        self._own = own or {}
        self._ranks: dict[int, int] = {}
        self._pid = os.getpid()
        self._libraries = library_folders()
        self._early = EarlyWorkers(self._become_early_worker)
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Serve until the agent closes the socket. A forked child also leaves this method, by `SystemExit`."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = self._early.wait(poll)
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._channel.fileno() in ready:
                try:
                    request: Request = self._channel.recv(Request)
                except (EOFError, OSError):
                    return
                match request:
                    case Fork():
                        environment = {**self._own, **request.environment}
                        self._fork(msgspec.structs.replace(request, environment=environment))
                    case Deliver() if request.pid in self._ranks:
                        os.kill(request.pid, request.signal)
                    case KillOrphans():
                        self._ranks.clear()
                        self._early.end_round()
                        if kill_children(KILL_ORPHANS_S, spare=self._early.pids):
                            self._channel.send(Alone())
                    case _:
                        pass

    def _reap(self) -> None:
        """Report workers that have ended. Orphans of workers become children of this process and are reaped without a
        report."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                self._early.note_end(pid)
                rank = self._ranks.pop(pid, None)
                if rank is not None:
                    self._channel.send(Ended(rank=rank, pid=pid, status=os.waitstatus_to_exitcode(status)))

    def _fork(self, request: Fork) -> None:
        agent_fd = self._channel.take_descriptor()
        try:
            if threads() != 1:
                raise ProtocolError(
                    f"{threads()} threads in the fork server: a preloaded module started them, and a fork would lose "
                    "them; look for an import that starts threads in sitecustomize or a .pth file"
                )
            log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                pid = self._early_worker(request, agent_fd, log) or os.fork()
                if pid == 0:
                    self._become_worker(request, agent_fd, log)
            finally:
                os.close(log)
        except (OSError, ProtocolError) as error:
            self._channel.send(NotForked(rank=request.rank, reason=str(error)))
        else:
            self._ranks[pid] = request.rank
            self._channel.send(Forked(rank=request.rank, pid=pid))
        finally:
            os.close(agent_fd)

    def _early_worker(self, request: Fork, agent_fd: int, log: int) -> int:
        """Have an early worker become the requested worker; return its process id, or 0 if none suits."""
        early = self._early.take(request)
        if early is None:
            return 0
        try:
            early.channel.send(request, [agent_fd, log])
        except OSError:  # it has just ended
            return 0
        finally:
            early.channel.close()
        return early.pid

    def _become_worker(self, request: Fork, agent_fd: int, log: int) -> NoReturn:
        """Run the worker, in the child. No code in this method may return to the server's loop."""

        def run() -> int:
            socket_fd = os.dup(agent_fd)
            attach(request, log)
            return become(request.kind, request.argv, request.cwd, request.environment, socket_fd)

        self._run(request.rank, request.processors, run)

    def _become_early_worker(self, expected: Fork, server: LocalChannel) -> NoReturn:
        """Run an early worker, in the child, as `_become_worker` runs a worker."""
        name_process(expected.job, f"early rank {expected.rank}")
        self._run(
            expected.rank,
            expected.processors,
            lambda: import_and_wait(expected, server, self._libraries, attach),
        )

    def _run(self, rank: int, processors: Sequence[int], run: Callable[[], int]) -> NoReturn:
        """Leave the server's state behind, and end with the status that `run` returns."""
        try:
            die_with_parent(self._pid)
            if processors:
                with suppress(OSError):  # the job's CPUs have changed: the worker keeps those that it has
                    os.sched_setaffinity(0, processors)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            silence = os.open(os.devnull, os.O_RDONLY)
            os.dup2(silence, 0)
            os.close(silence)
            os.close(self._wake)
            os.close(self._woken)
            self._channel.close()
            self._early.close()
            status = run()
        except BaseException as error:  # noqa: BLE001 - the child must never become a second server
            os.write(2, f"resihp: rank {rank}: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
        will_leave_with(status)
        # `SystemExit` takes the interpreter's normal exit: threads joined, atexit handlers called, files flushed.
        raise SystemExit(status)


def attach(request: Fork, log: int) -> None:
    """Name this process after its worker, and connect standard output and error to the worker's log."""
    name_process(request.job, f"rank {request.rank}")
    os.dup2(log, 1)
    os.dup2(log, 2)
    if request.heading:
        os.write(1, f"{request.heading}\n".encode())


def preload(modules: str) -> None:
    """Import the modules in a comma-separated list, and exempt their objects from garbage collection."""
    for name in filter(None, modules.split(",")):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def serve(channel: LocalChannel, greeting: Ready | Unable, own: Mapping[str, str] | None = None) -> NoReturn:
    """Run a node's fork server until it ends. A forked worker leaves this function by `SystemExit`."""
    adopt_orphans()
    channel.send(greeting)
    if isinstance(greeting, Unable):
        os._exit(1)
    try:
        ForkServer(channel, own).run()
    except OSError as error:
        print(f"resihp.worker.forkserver: {error}", file=sys.stderr)
    kill_children(REAP_S)
    os._exit(0)


def serve_nodes(launcher: LocalChannel, greeting: Ready | Unable) -> NoReturn:
    """Fork a fork server for each node that the launcher sends. End when the launcher and all these servers have ended.

    Forked servers and workers also leave this function.
    """
    adopt_orphans()
    servers: set[int] = set()
    while True:
        try:
            order: Serve = launcher.recv(Serve)
            descriptor = launcher.take_descriptor()
        except (EOFError, OSError):
            break
        pid = os.fork()
        if pid == 0:
            launcher.close()
            serve_node(order, descriptor, greeting)
        os.close(descriptor)
        servers.add(pid)
    while servers:
        servers.discard(os.wait()[0])
    kill_children(REAP_S)  # workers of a server that was killed
    os._exit(0)


def serve_node(order: Serve, descriptor: int, greeting: Ready | Unable) -> NoReturn:
    """Join the agent's process group, unless the agent has ended, and become the agent's fork server."""
    name_server(order.job, order.node)
    try:
        os.setpgid(0, order.group)
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    except OSError as error:
        print(f"resihp.worker.forkserver: process group {order.group}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    serve(LocalChannel(socket.socket(fileno=descriptor)), greeting)


def name_server(job: str, node: str) -> None:
    """Show this process in `ps` as `resihp job 6 fork server n1`. The process that forks fork servers has no node."""
    if job:
        name_process(job, f"fork server {node}".rstrip())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="resihp.worker.forkserver")
    parser.add_argument("--fd", type=int, required=True, help="socket to the agent; with --shared, to the launcher")
    parser.add_argument("--parent", type=int, required=True, help="process id of our parent; 0 in a container")
    parser.add_argument("--own", default="", help="environment variables that workers get from here, comma-separated")
    parser.add_argument("--preload", default=PRELOADED_MODULES, help="modules to import before the first fork")
    parser.add_argument("--shared", action="store_true", help="serve several virtual nodes")
    parser.add_argument("--job", default="", help="name of the job, for the process title")
    parser.add_argument("--at", default="", help="name of the node, for the process title")
    options = parser.parse_args(arguments)
    name_server(options.job, options.at)
    die_with_parent(options.parent)
    restore_open_files()
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    stacks.ignore()
    channel = LocalChannel(inherited_socket(options.fd))
    begun = time.monotonic()
    greeting: Ready | Unable
    try:
        preload(options.preload)
        greeting = Ready(seconds=time.monotonic() - begun)
    except Exception as error:  # noqa: BLE001 - reported to the agent or launcher, which is waiting
        traceback.print_exc()
        greeting = Unable(reason=f"{sys.executable}: cannot import {options.preload}: {type(error).__name__}: {error}")
    if options.shared:
        serve_nodes(channel, greeting)
    serve(channel, greeting, {name: os.environ[name] for name in options.own.split(",") if name in os.environ})


if __name__ == "__main__":
    main()
