"""Plays the disturbances of a scenario: failures of machines and communication, and requests of people.

Waits for the trigger of each disturbance and causes it. Passes requests to stop on to `stopping`. Called by `world`,
and by all code in which a trigger can occur.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.faults import Fault
from resihp.simulator.machines.sim_node import SimNode
from resihp.simulator.scenarios.scenario import Disturbance, Trigger

if TYPE_CHECKING:
    from resihp.simulator.machines.worker import Worker
    from resihp.simulator.world import World


class Disturbances:
    """The disturbances of one job."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiting_for: dict[Trigger, list[Disturbance]] = {}
        self.occurred: Counter[Trigger] = Counter()
        """Number of occurrences of each trigger so far."""

    def schedule(self) -> None:
        """Schedule the disturbances that have a time; the others wait for their trigger."""
        for disturbance in self.world.scenario.disturbances:
            if disturbance.trigger == "time":
                self.world.at(disturbance.delay, self.disturb, disturbance, 0)
            else:
                self.waiting_for.setdefault(disturbance.trigger, []).append(disturbance)

    def happens(self, trigger: Trigger, rank: int) -> None:
        """Record a trigger on a rank, and schedule the disturbances that wait for it."""
        if trigger not in self.waiting_for:
            return
        self.occurred[trigger] += 1
        for disturbance in self.waiting_for[trigger]:
            if disturbance.nth == self.occurred[trigger]:
                self.world.at(disturbance.delay, self.disturb, disturbance, rank)

    def disturb(self, disturbance: Disturbance, concerned: int) -> None:
        """Cause a disturbance. `concerned` is the rank of its trigger, used if the disturbance names no rank."""
        world = self.world
        rank = concerned if disturbance.rank is None else disturbance.rank
        if rank not in world.workers:  # nodes were left out (`number_ranks`)
            rank = min(world.workers)
        worker = world.workers[rank]
        node, seconds = worker.node, disturbance.seconds
        world.log.append((world.now, f"!!! {disturbance.kind} rank {rank} node {node.name} for {seconds} s"))
        match disturbance.kind:
            case "kill" | "stop" | "mute" | "hang" | "forget" | "broken" | "deadlock" | "raise":
                self._disturb_worker(worker, disturbance)
            case "node" | "agent" | "vanish" | "drained" | "silent" | "blackout" | "reconnect" | "raise_node":
                self._disturb_node(node, disturbance)
            case "signal" | "cancel" | "told" | "checkpoint":
                world.stopping.disturb(disturbance, node)
            case "supervisor":
                world.lose_supervisor(seconds)
            case "raise_all":
                for peer in world.workers.values():
                    if peer.spawned:
                        world.at(world.rng.uniform(0, 0.2), peer.proceed, None, peer.throw, ("ValueError: bad sample",))
            case "inject":
                self._inject(rank)

    def _disturb_worker(self, worker: Worker, disturbance: Disturbance) -> None:
        match disturbance.kind:
            case "kill":
                if worker.spawned:
                    worker.die(disturbance.status)
            case "stop" | "mute" | "hang":
                worker.freeze(disturbance.kind, disturbance.seconds)
            case "forget":
                worker.forgets = True
            case "broken" | "deadlock":
                if worker.alive and worker.active:
                    self.world.broken_epochs.add(worker.epoch)
                    self._disturb_collectives(worker, disturbance)
            case "raise":
                worker.proceed(None, worker.throw, (f"ValueError: rank {worker.rank} is odd",))

    def _disturb_collectives(self, worker: Worker, disturbance: Disturbance) -> None:
        """Break the transfer that a worker waits for, or make all collectives of its epoch hang."""
        collectives = self.world.collectives
        if disturbance.kind == "deadlock":
            collectives.cursed.add(("any", worker.epoch))
        elif worker.waits is not None and not worker.frozen:
            collectives.meetings[worker.waits].broken = True
            worker.stuck("injected: transfer failed")

    def _disturb_node(self, node: SimNode, disturbance: Disturbance) -> None:
        world, seconds = self.world, disturbance.seconds
        match disturbance.kind:
            case "node":
                world.agents.kill_node(node, announced=False)
            case "agent":
                world.agents.kill_node(node, announced=True)
            case "vanish":
                world.agents.kill_node(node, announced=False, closes_connections=False)
            case "drained":
                world.feed(api.SlurmSees(node=node.name, state="allocated+drain", reason="maintenance"))
                world.at(seconds, world.feed, api.SlurmSees(node=node.name, state="allocated", reason=""))
            case "silent":
                world.network.hush(node, seconds)
            case "blackout":
                world.agents.freeze_node(node, seconds, "mute")
            case "reconnect":
                if node.joined:
                    world.agents.connect(node)
            case "raise_node":
                for rank in node.ranks:
                    world.workers[rank].stumbles = "ImportError: no module named flash_attn"

    def _inject(self, rank: int) -> None:
        """Make an operator request an injected fault."""
        world = self.world
        if world.leaderless:
            return
        request = len(world.rules.requests)
        world.rules.requests[request] = False
        fault = Fault(id=1000 + request, kind=world.rng.choice(["kill", "stop", "crash"]), rank=rank)
        world.asked[fault.id] = fault
        world.feed(api.InjectAsked(request=request, fault=fault))
