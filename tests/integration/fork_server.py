"""One process for all local jobs of a run of tests: it has imported what training needs, and is forked for each job.

`python -P fork_server.py FD PARENT`; FD is where jobs connect to. Each gets what `resihp.worker.forkserver --shared`
is. `fork_server()` starts it, and returns what RESIHP_FORK_SERVER is to say.
"""

from __future__ import annotations

import atexit
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

from resihp.process import die_with_parent, inherited_socket
from resihp.protocol.framing import LocalChannel
from resihp.worker.forkserver import ONE_THREAD, PRELOAD, STOP_SIGNALS, Ready, preload, serve_nodes

READY = Ready(seconds=0.0)


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


def main() -> None:
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]))
    listener = inherited_socket(int(sys.argv[1]))
    preload(PRELOAD)
    while True:
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and os.fork() == 0:
            listener.close()
            serve_nodes(LocalChannel(connection), READY)
        connection.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
