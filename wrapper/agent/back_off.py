"""How long an agent waits before it tries again to reach who leads: not at all at first, then longer and longer.

All agents of a job lose their leader at the same moment. Each waits for times of its own, so that they do not all come
back at the same moment again and again, to a supervisor that has just begun to answer the last ones. Knows no clock.
Used by `wrapper.agent.supervisor_link`.
"""

from __future__ import annotations

from random import Random

FIRST_S = 0.2
"""At most so long is waited after the second attempt in vain; after the first one, not at all."""
GROWTH = 1.5
LONGEST_S = 3.0


class BackOff:
    def __init__(self, dice: Random | None = None) -> None:
        self._dice = dice or Random()
        self._attempts = 0

    def pause_s(self) -> float:
        """How long to wait now that another attempt was in vain."""
        self._attempts += 1
        if self._attempts == 1:
            return 0.0
        most_s = min(LONGEST_S, FIRST_S * GROWTH ** (self._attempts - 2))
        return self._dice.uniform(most_s / 2, most_s)

    def begin_anew(self) -> None:
        """It was not in vain."""
        self._attempts = 0
