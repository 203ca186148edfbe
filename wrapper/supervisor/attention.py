"""A clock that stops while the supervisor cannot receive messages of agents, so that its own stalls do not look like
silent agents.

After its event loop was stopped or overloaded, the supervisor finds unread messages, and agents that have disconnected
because the supervisor was silent. It first receives messages for a while before it judges any agent, and all its
timeouts, such as the longest break of a connection, resume where they stopped. Owned by
`resihp.wrapper.supervisor.shell`; decides nothing.
"""

from __future__ import annotations

import time

LOOK_EVERY_S = 0.25
STALL_S = 1.0
"""A call of `look` that is this many seconds late means that the event loop was stopped since the last call."""
LISTEN_S = 2.0
"""How long to receive messages after a stall before agents are judged: agents send a heartbeat once a second."""


class Attention:
    """The clock that stops during stalls. `look` is to be called every `LOOK_EVERY_S`."""

    def __init__(self) -> None:
        self._seconds = self._looked_at = time.monotonic()
        self._listens_until = 0.0

    def look(self) -> float:
        """Return for how many seconds the event loop was stopped since the last call; 0 if it was not stopped."""
        now = time.monotonic()
        since_s, self._looked_at = now - self._looked_at, now
        stopped = since_s > LOOK_EVERY_S + STALL_S
        if stopped:
            self._listens_until = now + LISTEN_S
            self._seconds += LOOK_EVERY_S  # so that a loop that is always late still detects lost agents
        elif self.may_judge:
            self._seconds += since_s
        return since_s if stopped else 0.0

    @property
    def may_judge(self) -> bool:
        return self._looked_at >= self._listens_until

    def seconds(self) -> float:
        """Return the seconds, from an arbitrary start, in which the supervisor could receive messages of agents."""
        return self._seconds + (min(LOOK_EVERY_S, time.monotonic() - self._looked_at) if self.may_judge else 0.0)
