"""A clock that counts the time in which the supervisor could hear others: whose silence it was.

A loop that was stopped, or had too much to do, finds what agents have said meanwhile still unread, and agents that have
broken off because it said nothing. It listens for a while before it judges anybody, and what it judges by, as how long
a connection may be gone, goes on from where it was. Owned by `wrapper.supervisor.shell`; decides nothing.
"""

from __future__ import annotations

import time

LOOK_EVERY_S = 0.25
STALL_S = 1.0
"""A look that comes so much later: the silence since the last one was ours."""
LISTEN_S = 2.0
"""Agents beat once a second."""


class Attention:
    """`look` is to be called every `LOOK_EVERY_S`."""

    def __init__(self) -> None:
        self._seconds = self._looked_at = time.monotonic()
        self._listens_until = 0.0

    def look(self) -> float:
        """For how long we were stopped since the last look, if we were."""
        now = time.monotonic()
        since_s, self._looked_at = now - self._looked_at, now
        stopped = since_s > LOOK_EVERY_S + STALL_S
        if stopped:
            self._listens_until = now + LISTEN_S
            self._seconds += LOOK_EVERY_S  # a loop that is always late is to find who is gone, too
        elif self.may_judge:
            self._seconds += since_s
        return since_s if stopped else 0.0

    @property
    def may_judge(self) -> bool:
        return self._looked_at >= self._listens_until

    def seconds(self) -> float:
        """For how long we have been able to hear, from some time on."""
        return self._seconds + (min(LOOK_EVERY_S, time.monotonic() - self._looked_at) if self.may_judge else 0.0)
