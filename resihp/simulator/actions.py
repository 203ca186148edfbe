"""Carries out the controller's actions in the simulated world: processes, orders, connections, requests to Slurm.

Draws the time at which each action takes effect, and the result of an action that may or may not work. Every action is
checked before. Called by `world`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import CheckpointCommitted
from resihp.simulator.invariants.violations import expect
from resihp.simulator.machines.sim_node import SimNode
from resihp.simulator.machines.worker import Worker
from resihp.simulator.scenarios.scenario import NEVER_S, SIGKILL, Trigger

if TYPE_CHECKING:
    from resihp.simulator.world import World

ORDER_TRIGGERS: dict[type, Trigger] = {
    m.Park: "park",
    m.Propose: "propose",
    m.Go: "go",
    m.Begin: "begin",
    m.Halt: "halt",
    m.Save: "save",
}


def carry_out(world: World, action: api.AnyAction) -> None:
    match action:
        case api.Log():
            world.write(action.entry)
        case api.StartWorkers():
            _start_workers(world, action)
        case api.Order():
            _send_order(world, action)
        case api.SignalWorker():
            world.network.down(world.workers[action.rank].node, action.rank, action.signal)
        case api.SignalNode():
            node = world.nodes[action.node]
            if action.signal == SIGKILL:
                world.at(world.network.latency_s(), world.agents.kill_node, node, world.rng.random() < 0.5)
            else:
                world.at(world.network.latency_s(), world.agents.freeze_node, node, NEVER_S, "stop")
        case api.CutConnection():
            node = world.nodes[action.node]
            if world.rng.random() < 0.8:
                world.network.hush(node, world.rng.uniform(0.0, 0.5))
            else:
                world.agents.kill_node(node, announced=False)
        case api.DropNode():
            _drop_node(world, world.nodes[action.node])
        case api.End():
            world.allocation.check_end(action.exit_code)
            world.end = action
        case api.AskWhy():
            world.stopping.answer_why()
        case api.AskTimeLeft():
            expect(world.scenario.slurm, f"{action} without Slurm")
            if world.scenario.time_left_s is not None and world.rng.random() < 0.5:
                left_s = max(0.0, world.scenario.time_left_s * world.rng.choice([0.5, 1.0, 2.0]) - world.now)
                world.at(world.rng.uniform(0.0, 2.0), world.feed, api.TimeLeft(seconds=left_s))
        case api.DrainNode() | api.ReleaseNode() | api.AskReplacement() | api.CancelReplacement() | api.WatchNode():
            expect(world.scenario.slurm, f"{action} without Slurm")
            world.allocation.carry_out(action)
        case api.CommitCheckpoint():
            entry = CheckpointCommitted(
                iteration=action.iteration, folder=action.folder, bytes=0, seconds=action.seconds
            )
            world.write(entry)
            world.events.append((world.now, entry))
            world.controller.journaled(entry)
        case api.Think():
            world.thinking.accept(action)
        case api.Reply() | api.Say() | api.TellScores():
            pass


def _start_workers(world: World, action: api.StartWorkers) -> None:
    node = world.nodes[action.node]
    for rank, device in action.workers:
        if rank not in world.workers:
            world.rules.known_dead.discard(rank)
            world.workers[rank] = Worker(world, rank, node, device, joins=True)
            node.ranks.append(rank)
        delay_s = world.rng.uniform(0.05, 0.5)
        fails = None if action.joins else dict(world.scenario.spawns).get(node.name)
        if fails == "refused":
            refusal = api.SpawnRefused(node=node.name, reason="cannot fork", rank=rank)
            world.at(delay_s, world.network.up, node, refusal)
        elif fails == "hang":
            pass
        elif world.workers[rank].fate == "spawn":
            world.workers[rank].alive = False
            whom = rank if world.rng.random() < 0.7 else None
            refusal = api.SpawnRefused(node=node.name, reason="cannot fork", rank=whom)
            world.at(delay_s, world.network.up, node, refusal)
        else:
            world.at(delay_s, world.workers[rank].start)
    if not action.joins:
        world.disturbances.happens("order", action.workers[0][0])


def _send_order(world: World, action: api.Order) -> None:
    for rank in action.ranks:
        worker = world.workers[rank]
        again = isinstance(action.order, m.Park) and (action.order.after_iteration or rank in world.rules.hurried)
        if isinstance(action.order, m.Park | m.Propose | m.Go | m.Begin) and not again:
            worker.ordered_at = world.now
        world.network.down(worker.node, rank, action.order)
    name = ORDER_TRIGGERS.get(type(action.order))
    if isinstance(action.order, m.Park) and action.order.after_iteration:
        name = "pause"
    if name is not None and world.network.sent and world.rng.random() < 3 * world.scenario.duplicates:
        for node, event in world.rng.choices(world.network.sent, k=5):  # old answers may be mistaken for new ones
            world.at(world.rng.uniform(0.0, 0.1), world.network.repeat_up, node, event)
    if name is not None:
        world.disturbances.happens(name, action.ranks[world.rng.randrange(len(action.ranks))])


def number_ranks(world: World, names: tuple[str, ...]) -> None:
    """Assign rank numbers anew if nodes were left out before the first ranks were assigned."""
    if names == tuple(world.workers[rank].node.name for rank in sorted(world.workers)):
        return
    expect(not any(worker.spawned for worker in world.workers.values()), "ranks are assigned again")
    for node in world.nodes.values():
        node.ranks.clear()
    world.workers.clear()
    for rank, name in enumerate(names):
        node = world.nodes[name]
        world.workers[rank] = Worker(world, rank, node, len(node.ranks))
        node.ranks.append(rank)
    world.rules.known_dead.clear()
    world.rules.taking_part = set(world.workers)


def _drop_node(world: World, node: SimNode) -> None:
    """Close a node's connection. Its processes end later, or never."""
    node.dropped = True
    if world.scenario.leaks and node.alive and world.rng.random() < 0.7:
        delay = world.rng.choice([0.0, 0.1, 0.5])
        for number, event in enumerate(node.up):
            world.at(delay + number * 1e-4, world.feed, event)
    node.up.clear()
    if node.alive and world.rng.random() < 0.3:
        world.at(world.rng.uniform(0, 2.0), world.agents.agent_lost, node)
    for rank in node.ranks:
        if node.alive and world.rng.random() < 0.5:
            world.at(world.rng.uniform(0, 10.0), world.workers[rank].die, -SIGKILL)
