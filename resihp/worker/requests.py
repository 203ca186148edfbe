"""Messages between a fork server, its agent, and the launcher of virtual nodes.

Nothing here decides. The conversation is described in `resihp.worker.forkserver`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ProgramKind = Literal["script", "module", "command"]


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to fork the fork server of one virtual node; the frame carries the socket to the node's agent.

    `group` is the agent's process group, which the server joins; 0 creates a new group. `job` and `node` are names for
    process lists.
    """

    group: int
    log: str
    job: str = ""
    node: str = ""


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to start one worker; the frame carries the socket to the worker's agent.

    `kind` is a Python script (`argv[0]` is its path), a module (`argv[0]` is its name), or any other command.
    `environment` is complete, except for the server's `--own` variables. Standard output and error are appended to
    `log`. `job` is a name for process lists. `processors`: the CPUs to run on; empty: those of the server.
    """

    rank: int
    job: str = ""
    kind: ProgramKind
    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    log: str
    processors: tuple[int, ...] = ()
    heading: str = ""
    """Line that is written to the log before the worker's output; empty for none."""


class Deliver(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to send a signal to a child that has not ended. Never signals another process that reuses the process
    id."""

    pid: int
    signal: int


class KillOrphans(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to kill all processes that ended workers have left behind, and workers that were forked too late for
    their agent to know them. Answered with `Alone`, unless a process cannot be killed within `KILL_ORPHANS_S`."""


class Alone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `KillOrphans`: the fork server has no child left."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    seconds: float


class Unable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report that the fork server cannot work, and exits."""

    reason: str


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    rank: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    rank: int
    reason: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report that a worker has ended. `status` is as in subprocess: negative for a signal."""

    rank: int
    pid: int
    status: int


Request = Fork | Deliver | KillOrphans
Report = Ready | Unable | Forked | NotForked | Ended | Alone
