"""Sets the activity that a rank reports with its heartbeats.

Never interprets an activity: the supervisor does. Called by the other modules of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from resihp.protocol import client as agent


@contextmanager
def during(client: agent.AgentClient, activity: agent.Activity) -> Iterator[None]:
    """Report `activity` until the end of the block, then the previous activity again."""
    before, client.activity = client.activity, activity
    try:
        yield
    finally:
        client.activity = before
