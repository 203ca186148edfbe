"""A clock that runs only while the supervisor can hear its agents, so that its own stalls do not look like their
silence.

After its event loop was stopped or overloaded, the supervisor finds unread messages, and agents that have disconnected
because it was silent. It first listens for a while before it judges any agent, and all its timeouts, such as the
longest break of a connection, continue from where they were. Owned by `wrapper.supervisor.shell`; decides nothing.
"""

from __future__ import annotations

import time

LOOK_EVERY_S = 0.25
STALL_S = 1.0
"""A look that comes this much too late means that the event loop was stopped since the last one."""
LISTEN_S = 2.0
"""How long to listen after a stall: agents send a heartbeat once a second."""


class Attention:
    """The clock. `look` is to be called every `LOOK_EVERY_S`."""

    def __init__(self) -> None:
        self._seconds = self._looked_at = time.monotonic()
        self._listens_until = 0.0

    def look(self) -> float:
        """Return for how long the event loop was stopped since the last look; 0 if it was not."""
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
        """Return the seconds, from some start on, in which agents could be heard."""
        return self._seconds + (min(LOOK_EVERY_S, time.monotonic() - self._looked_at) if self.may_judge else 0.0)
