"""A clock that stops while the supervisor cannot receive messages of agents, so that neither its own stalls nor a stop
of the whole job look like silent agents.

After its event loop was stopped or overloaded, the supervisor finds unread messages, and agents that have disconnected
because the supervisor was silent. It first receives messages for a while before it judges any agent, and all its
timeouts, such as the longest break of a connection, resume where they stopped.

`scancel --signal=STOP` stops all agents and workers of a Slurm job, but not its batch script and this supervisor. That
is no fault of the nodes, and the clock stands still until `scancel --signal=CONT`. Owned by
`resihp.wrapper.supervisor.shell`; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import psutil

if TYPE_CHECKING:
    from resihp.protocol.messages import Join
    from resihp.wrapper.config.run_spec import RunRequest

LOOK_EVERY_S = 0.25
STALL_S = 1.0
"""A call of `look` that is this many seconds late means that the event loop was stopped since the last call."""
LISTEN_S = 2.0
"""How long to receive messages after a stall before agents are judged: agents send a heartbeat once a second."""

SILENCE_S = 1.5
"""Seconds without a heartbeat of any agent after which all of them may have been stopped."""


class Attention:
    """The clock that stops during stalls. `look` is to be called every `LOOK_EVERY_S`."""

    def __init__(self) -> None:
        self._seconds = self._looked_at = time.monotonic()
        self._listens_until = 0.0

    def look(self, *, are_agents_stopped: bool = False) -> float:
        """Return for how many seconds the event loop was stopped since the last call; 0 if it was not stopped. The
        clock stands still while `are_agents_stopped`, too."""
        now = time.monotonic()
        since_s, self._looked_at = now - self._looked_at, now
        stopped = since_s > LOOK_EVERY_S + STALL_S
        if stopped:
            self._listens_until = now + LISTEN_S
            self._seconds += LOOK_EVERY_S  # so that a loop that is always late still detects lost agents
        elif are_agents_stopped:
            self._listens_until = now + LISTEN_S
        elif self.may_judge:
            self._seconds += since_s
        return since_s if stopped else 0.0

    @property
    def may_judge(self) -> bool:
        return self._looked_at >= self._listens_until

    def seconds(self) -> float:
        """Return the seconds, from an arbitrary start, in which the supervisor could receive messages of agents."""
        return self._seconds + (min(LOOK_EVERY_S, time.monotonic() - self._looked_at) if self.may_judge else 0.0)


class StoppedJob:
    """Recognises that all agents of a Slurm job were stopped: the kernel says so of the agent on this node, and no
    other agent sends heartbeats. Outside of Slurm, nothing counts as stopped. `resumed` is called when they go on."""

    def __init__(self, request: RunRequest, resumed: Callable[[], None]) -> None:
        self._resumed = resumed
        self._job = request.slurm.job_id if request.slurm is not None else ""
        self._node = request.settings.batch_node
        self._pid = 0
        self._is_stopped = False
        self._heard_at = time.monotonic()

    def joined(self, join: Join) -> None:
        if self._job and join.node == self._node:
            self._pid = join.pid

    def heard(self) -> None:
        """Note a heartbeat of any agent."""
        self._heard_at = time.monotonic()

    def look(self, say: Callable[[Literal["notice"], str], None]) -> bool:
        """Return whether the agents are stopped, and report a change of that."""
        was_stopped = self._is_stopped
        is_silent = self._pid > 0 and time.monotonic() - self._heard_at > SILENCE_S
        self._is_stopped = is_silent and _is_stopped(self._pid)
        if self._is_stopped and not was_stopped:
            resume = f"scancel --signal=CONT {self._job}"
            say("notice", f"the job's processes are stopped; training waits, no node is blamed; try: {resume}")
        elif was_stopped and not self._is_stopped:
            say("notice", "the job's processes go on")
            self._resumed()
        return self._is_stopped


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
