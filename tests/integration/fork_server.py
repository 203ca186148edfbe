"""Fork the worker processes of a whole run of tests from one process that has imported what training needs.

`python -P fork_server.py FD PARENT`: jobs connect to the listening socket FD. A local job gets a process that does what
`resihp.worker.forkserver --shared` does. An agent on a node of a test cluster gets a fork server of its own, forked
into that node's namespaces, so that whatever kills the node kills it as well. `fork_server()` starts the process and
returns the value for RESIHP_FORK_SERVER.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import NoReturn

from resihp.process import die_with_parent, inherited_socket
from resihp.protocol.channels import LocalChannel
from resihp.worker.forkserver import ONE_THREAD, PRELOADED_MODULES, STOP_SIGNALS, preload, serve_node, serve_nodes
from resihp.worker.requests import Ready, Serve

READY = Ready(seconds=0.0)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x4000000, 0x20000000, 0x40000000
"""From linux/sched.h; Python 3.11 has no `os.setns`."""


@functools.cache
def fork_server() -> str:
    """Start it; returns the name of its socket at once. It ends with this process."""
    folder = tempfile.mkdtemp(prefix="resihp-fork-server-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    name = os.path.join(folder, "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(64)
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD,
            pass_fds=[listener.fileno()],
        )
    atexit.register(process.wait)
    atexit.register(process.kill)
    return name


def _is_in_a_node(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        os._exit(0)  # that process has ended


def _serve_in_a_node(pid: int, agent: LocalChannel) -> NoReturn:
    """Fork a fork server into the namespaces of the agent with process id `pid`; the node's first process adopts it."""
    order = agent.recv(Serve)
    descriptor = agent.take_descriptor()
    agent.close()
    namespaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWNET
    if ctypes.CDLL(None).setns(os.pidfd_open(pid), namespaces) == 0 and os.fork() == 0:
        serve_node(order, descriptor, READY)
    os._exit(0)


def main() -> None:
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    listener = inherited_socket(int(sys.argv[1]))
    preload(PRELOADED_MODULES)
    while True:
        connection, _ = listener.accept()
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and os.fork() == 0:
            listener.close()
            if _is_in_a_node(pid):
                _serve_in_a_node(pid, LocalChannel(connection))
            serve_nodes(LocalChannel(connection), READY)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
