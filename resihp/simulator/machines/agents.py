"""The simulated agents: they connect, send heartbeats, and die or freeze together with their workers.

Covers the agents of all nodes. Never decides about the consequences of a loss: the controller does. Called by `world`,
disturbances, and the simulated Slurm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.simulator.machines.sim_node import SimNode
from resihp.simulator.scenarios.scenario import SIGKILL

if TYPE_CHECKING:
    from resihp.simulator.world import World


class Agents:
    """The agents of all nodes."""

    def __init__(self, world: World) -> None:
        self.world = world

    def connect(self, node: SimNode) -> None:
        """Send the first message of an agent, without an inventory."""
        host = f"host-{node.name}"
        self.world.network.up(node, api.AgentJoined(node=node.name, host=host, devices=node.devices, hardware="A"))

    def join(self, node: SimNode) -> None:
        """Connect an agent for the first time, as soon as there is a supervisor."""
        world = self.world
        if world.leaderless:
            world.at(0.5, self.join, node)
            return
        if node.joined:  # it has joined another supervisor meanwhile
            return
        node.arrived = node.joined = True
        self.connect(node)
        world.at(world.rng.uniform(0.0, 1.0), self.beat, node)
        if node.ranks:
            world.disturbances.happens("arrive", node.ranks[0])

    def beat(self, node: SimNode) -> None:
        """Send a heartbeat now and every second."""
        world = self.world
        if not node.alive or node.dropped:
            return
        world.at(1.0, self.beat, node)
        if node.frozen:
            return
        beats = []
        for rank in node.ranks:
            worker = world.workers[rank]
            if not worker.spawned or not worker.alive:
                continue
            mute = worker.frozen in ("stop", "mute")
            age = world.now - worker.frozen_at if mute else 0.0
            progress = m.Progress(
                epoch=worker.epoch,
                iteration=worker.stepped + 1,
                primitives=worker.primitives,
                activity="compute" if worker.frozen == "hang" else worker.activity,
            )
            beats.append(m.WorkerBeat(rank=rank, age_s=age + world.rng.random(), state=worker.state, progress=progress))
        world.network.up(node, api.AgentBeat(node=node.name, beat=m.Beat(workers=tuple(beats))))

    def join_again(self, node: SimNode) -> None:
        """Connect an agent to the new supervisor, with the agent's inventory."""
        world = self.world
        if node.silent or node.frozen:
            world.at(0.5, self.join_again, node)
            return
        if not node.alive or node.dropped or world.leaderless or node.joined:
            return
        node.joined = True
        running = tuple(
            m.RunningWorker(
                rank=rank,
                device=world.workers[rank].device,
                pid=1000 + rank,
                steps=tuple(world.workers[rank].steps),
                said=tuple(world.workers[rank].said.values()),
            )
            for rank in node.ranks
            if world.workers[rank].spawned and world.workers[rank].alive
        )
        inventory = m.Inventory(workers=running, ended=tuple(node.ended.items()), epoch=node.epoch)
        host, lease = f"host-{node.name}", world.allocation.guests.get(node.name, 0)
        joined = api.AgentJoined(node=node.name, host=host, devices=node.devices, lease=lease, inventory=inventory)
        world.network.up(node, joined)

    def kill_node(self, node: SimNode, announced: bool, closes_connections: bool = True) -> None:
        """Kill a node with all its processes. If `announced`, the agent first reports the exits of some of its workers.

        Without `closes_connections`, nobody notices the end, as if the machine or the network had lost power.
        """
        world = self.world
        if not node.alive:
            return
        if announced:
            for rank in node.ranks:
                if world.workers[rank].spawned and world.workers[rank].alive and world.rng.random() < 0.6:
                    world.workers[rank].died_with_node = True
                    world.workers[rank].die(-SIGKILL)
            world.at(world.rng.uniform(0.0, 0.05), self.kill_node, node, False)
            return
        if not node.silent:
            keep = world.rng.randint(0, len(node.up))
            for _ in range(len(node.up) - keep):
                node.up.pop()
        else:
            node.up.clear()
        node.alive = False
        for rank in node.ranks:
            worker = world.workers[rank]
            if worker.spawned:
                worker.die(-SIGKILL, closes_connections=closes_connections)
            worker.alive = False
        if closes_connections:
            delay = max(node.up_at - world.now, 0.0) + world.rng.choice([0.001, 0.05, world.rng.uniform(0.0, 1.0)])
            world.at(delay, self.agent_lost, node)

    def agent_lost(self, node: SimNode) -> None:
        if not node.loss_reported and self.world.end is None:
            node.loss_reported = True
            node.up.clear()
            self.world.feed(api.AgentLost(node=node.name, reason="agent process ended"))

    def freeze_node(self, node: SimNode, seconds: float, kind: Literal["stop", "mute"]) -> None:
        node.frozen = True
        self.world.network.hush(node, seconds)
        for rank in node.ranks:
            self.world.workers[rank].freeze(kind, seconds)
