"""The state of a simulated node, with the messages on its connection. Data only.

Never moves a message: the network does. Created by `world` and `allocation`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.simulator.scenarios.scenario import NEVER_S


@dataclass(eq=False)
class SimNode:
    """One node with its agent and connection. Messages are first in, first out in each direction."""

    name: str
    ranks: list[int]
    devices: int
    alive: bool = True
    dropped: bool = False
    silent: bool = False
    frozen: bool = False
    up: deque[api.AnyEvent] = field(default_factory=deque)
    down: deque[tuple[int, m.WorkerOrder | int]] = field(default_factory=deque)
    up_at: float = 0.0
    down_at: float = 0.0
    owed_up: int = 0
    owed_down: int = 0
    silent_since: float = NEVER_S
    silences: int = 0
    last_delivered: float = 0.0
    last_beat: float = 0.0
    loss_reported: bool = False
    arrived: bool = True
    """Whether the agent has connected to a supervisor, or is about to connect for the first time."""
    joined: bool = False
    """Whether the agent has joined the present supervisor."""
    ended: dict[int, int] = field(default_factory=dict)
    epoch: int = 0
    """Newest epoch in any order that has arrived."""
