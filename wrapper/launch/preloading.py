"""A process that imports the training libraries once for all virtual nodes of one machine.

It is the first process that the guardian starts, and ends with the guardian. The launcher announces each agent to it,
and it forks that agent's fork server (`resihp.worker.forkserver --shared`). Decides nothing. Under Slurm, and with
containers, each node starts its own fork server instead.

The environment variable FOR_TESTS names the socket of such a process that already runs, so that a run of tests imports
the libraries once. Local jobs use it, and so do agents that Slurm started. The process must belong to the same user and
have the same interpreter and the usual imports.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from resihp.protocol.channels import LocalChannel
from resihp.worker.forkserver import ONE_THREAD, PRELOADED_MODULES
from resihp.worker.requests import Serve
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.launch.launcher import own_environment
from resihp.wrapper.strict_modes import private

FOR_TESTS = "RESIHP_FORK_SERVER"
EXIT_TIMEOUT_S = 2.0
"""How long the process may take to exit after all nodes have ended."""


@contextmanager
def preloading(request: RunRequest) -> Iterator[socket.socket | None]:
    """Run the process, and yield its socket for the launcher; yield None if each node starts its own fork server."""
    if request.slurm is not None or request.container is not None:
        yield None
        return
    existing = _running(request)
    if existing is not None:
        with existing:
            yield existing
        return
    ours, theirs = socket.socketpair()
    with ours:
        try:
            process = _start(request, theirs)
        except OSError:
            process = None  # the interpreter does not start; agents will report why
        theirs.close()
        if process is None:
            yield None
            return
        try:
            yield ours
        finally:
            ours.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_TIMEOUT_S)
            process.kill()
            process.wait()


def _start(request: RunRequest, theirs: socket.socket) -> subprocess.Popen[bytes]:
    program = request.program
    command = [program.interpreter, "-P", "-m", "resihp.worker.forkserver", "--shared", "--fd", "0"]
    command += ["--parent", str(os.getpid()), "--preload", "" if program.kind == "command" else program.preload]
    command += ["--job", request.job]
    with open(request.of_job.logs / "forkserver.log", "ab", opener=private) as log:
        return subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=log,
            stderr=log,
            env=own_environment() | ONE_THREAD,
            process_group=0,
        )


def for_agent(request: RunRequest, node: str) -> socket.socket | None:
    """Return the socket to a fork server for this node, forked by the process that FOR_TESTS names; None if there is no
    such process."""
    running = _running(request)
    if running is None:
        return None
    ours, theirs = socket.socketpair()
    with running, theirs:
        log = request.of_job.logs / f"{node}.forkserver.log"
        order = Serve(group=0, log=str(log), job=request.job, node=node)
        LocalChannel(running).send(order, [theirs.fileno()])
    return ours


def _running(request: RunRequest) -> socket.socket | None:
    path, program = os.environ.get(FOR_TESTS), request.program
    usual = (program.interpreter, program.preload) == (sys.executable, PRELOADED_MODULES) and program.kind != "command"
    if not path or not usual or request.container is not None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            return connection
    except OSError:
        pass
    connection.close()
    return None
