"""The simulated connections between agents and the supervisor: delays, repetitions and silences.

Delivers messages in order, late, twice or not at all. Never changes a message. Called by `world`, agents, workers, and
the simulated Slurm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.simulator.machines.sim_node import SimNode
from resihp.simulator.scenarios.scenario import NEVER_S, SIGKILL, SIGSTOP

if TYPE_CHECKING:
    from resihp.simulator.world import World


class Network:
    """The connections of all nodes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent: list[tuple[SimNode, api.AnyEvent]] = []
        """Messages that may be delivered a second time."""

    def latency_s(self) -> float:
        """Draw the delay of a message in seconds."""
        world = self.world
        return world.scenario.latency_s * world.rng.random() * (10.0 if world.rng.random() < 0.02 else 1.0)

    def up(self, node: SimNode, event: api.AnyEvent) -> None:
        """Send an event from an agent to the supervisor."""
        world = self.world
        if not node.alive or node.dropped or world.leaderless:
            return
        if not node.joined and not isinstance(event, api.AgentJoined):
            return
        node.up.append(event)
        node.up_at = max(node.up_at, world.now + self.latency_s())
        world.at(node.up_at - world.now, self.deliver_up, node)
        duplicates = world.scenario.duplicates
        message = event.message if isinstance(event, api.WorkerSaid) else None
        may_repeat = isinstance(event, api.WorkerSaid | api.WorkerExited) and not isinstance(message, m.Raised)
        if duplicates and may_repeat:
            self.sent.append((node, event))
            if world.rng.random() < duplicates:
                world.at(world.rng.choice([0.0, 0.3, 3.0]), self.repeat_up, node, event)

    def repeat_up(self, node: SimNode, event: api.AnyEvent) -> None:
        """Deliver a message a second time."""
        if node.alive and not node.dropped and not (node.silent or node.up):
            self.world.feed(event, again=True)

    def deliver_up(self, node: SimNode) -> None:
        world = self.world
        if world.end is not None or not node.up:
            return
        if node.silent:
            node.owed_up += 1
            return
        event = node.up.popleft()
        node.last_delivered = world.now
        world.feed(event)

    def down(self, node: SimNode, rank: int, order: m.WorkerOrder | int) -> None:
        """Send an order or a signal number from the supervisor to a worker."""
        world = self.world
        if not node.alive or node.dropped:
            return
        node.down.append((rank, order))
        node.down_at = max(node.down_at, world.now + self.latency_s())
        world.at(node.down_at - world.now, self.deliver_down, node)

    def deliver_down(self, node: SimNode) -> None:
        if not node.down or not node.alive:
            return
        if node.silent or node.frozen:
            node.owed_down += 1
            return
        rank, order = node.down.popleft()
        worker = self.world.workers[rank]
        if not worker.alive or not worker.spawned:
            return
        if isinstance(order, int):
            if order == SIGKILL:
                worker.die(-SIGKILL)
            elif order == SIGSTOP:
                worker.freeze("stop", NEVER_S)
            else:
                worker.die(-order)
        else:
            worker.hear(order)

    def hush(self, node: SimNode, seconds: float) -> None:
        """Stop the connection from delivering anything for `seconds`."""
        if not node.alive:
            return
        node.silences += 1
        if not node.silent:
            node.silent, node.silent_since = True, self.world.now
        if seconds < NEVER_S:
            self.world.at(seconds, self.unhush, node)

    def unhush(self, node: SimNode) -> None:
        world = self.world
        node.silences -= 1
        if node.silences or not node.silent:
            return
        node.silent, node.silent_since, node.frozen = False, NEVER_S, False
        for i in range(node.owed_up):
            world.at(i * 1e-4, self.deliver_up, node)
        for i in range(node.owed_down):
            world.at(i * 1e-4, self.deliver_down, node)
        node.up_at = max(node.up_at, world.now + node.owed_up * 1e-4)
        node.down_at = max(node.down_at, world.now + node.owed_down * 1e-4)
        node.owed_up = node.owed_down = 0
