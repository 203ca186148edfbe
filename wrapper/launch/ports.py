"""Listening sockets for other nodes: on one address, and on a port that the site's firewall permits.

Every listener between nodes is made by `listen`: those of the guardian, a successor, agents that listen for peers, and
the doctor. `[slurm] ports` is the range of ports; without it the kernel chooses a port. The libraries of the training
(gloo, NCCL) choose their own ports, except for the port where ranks of a script without resihp rendezvous (`KeptPort`).
Decides only which port is tried first.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from contextlib import suppress

from resihp.errors import UsageError
from resihp.protocol.serving import LISTEN_BACKLOG

Ports = tuple[int, int]
"""The first and the last port of a range."""


def listen(host: str, ports: Ports | None = None) -> socket.socket:
    """Listen on this address. Raises UsageError if the address is not this machine's, or if no port of the range is
    free.

    Starts at a random port of the range, so that jobs that share a node seldom try the same port.
    """
    if ports is None:
        return _bound(host, 0)
    first, last = ports
    count = last - first + 1
    begin = random.randrange(count)
    for i in range(count):
        try:
            return _bound(host, first + (begin + i) % count)
        except _TakenError:
            continue
    raise UsageError(
        f"{host}: no port of {format_range(ports)} is free here; widen [slurm] ports, or see which processes use them: "
        "ss -tlnp"
    )


class _TakenError(Exception):
    """Another process listens on the port."""


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port:
            raise _TakenError from None
        where = f"port {port}" if port else "any port"
        raise UsageError(
            f"{host}: cannot listen on {where}: {os.strerror(error.errno or 0)}; {_advice(error)}"
        ) from None


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.EADDRNOTAVAIL:
            return "see which addresses this machine has: ip -brief address"
        case errno.EACCES | errno.EPERM:
            return "set [slurm] ports to a range above sysctl net.ipv4.ip_unprivileged_port_start"
        case errno.EADDRINUSE:
            return "see which processes use the kernel's ephemeral ports: ss -tan"
        case _:
            return "see what this machine allows: ulimit -a"


class KeptPort:
    """A port of this machine that is reserved for another process, which learns its number later: bound, but not
    listening.

    The kernel does not assign the port to processes that ask for any port, such as stores of other jobs, and outgoing
    connections. The process that will listen on it must set SO_REUSEADDR, as torch's store does, and may listen
    repeatedly. `port` is 0 if no port is free.
    """

    def __init__(self) -> None:
        self.port = 0
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._kept = socket.socket(family, socket.SOCK_STREAM)
        self._watches = False
        with suppress(OSError):
            if family == socket.AF_INET6:
                self._kept.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._kept.bind(("", 0))
            # Set only after bind: otherwise the kernel could assign a port that another process reserves in this way.
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.port = int(self._kept.getsockname()[1])

    def watch(self) -> None:
        """Observe whether clients connect to the port, now that no process will listen on it. Clients are
        disconnected."""
        with suppress(OSError):  # a process listens after all
            self._kept.listen()
            self._kept.setblocking(False)
            self._watches = True

    def is_used(self) -> bool:
        """Return whether a process listens on the port, on any address, or whether a client has tried to connect after
        `watch`."""
        if self._watches:
            with suppress(OSError):
                self._kept.accept()[0].close()
                return True
            return False
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with suppress(OSError), open(table, encoding="ascii") as lines:
                next(lines)
                for line in lines:
                    _, local, _, state, _ = line.split(maxsplit=4)
                    if state == _LISTENS and int(local.rpartition(":")[2], 16) == self.port:
                        return True
        return False

    def close(self) -> None:
        self._kept.close()


_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp (proc(5))."""


def format_range(ports: Ports) -> str:
    """Return a range of ports in the configuration's format."""
    return f"{ports[0]}-{ports[1]}"
