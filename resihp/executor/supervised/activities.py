"""The activity that a rank reports with its heartbeats.

Sets it for a while. Never decides what an activity means: the supervisor does. Called by the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from resihp.protocol import client as agent


@contextmanager
def during(client: agent.AgentClient, activity: agent.Activity) -> Iterator[None]:
    """Report `activity` until the end of the block, and then the one before it."""
    before, client.activity = client.activity, activity
    try:
        yield
    finally:
        client.activity = before
