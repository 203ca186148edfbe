"""Invariants of processes and connections: starts and signals of workers, and nodes that are dropped.

Checks each of these actions before it is carried out, and marks the workers that the controller has given up. Never
starts or ends a process. Called by `rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.record.state import Placement
from resihp.simulator.invariants.violations import TOLERANCE_S, expect
from resihp.simulator.scenarios.scenario import SIGKILL

if TYPE_CHECKING:
    from resihp.simulator.rules import Rules


def check_start(rules: Rules, action: api.StartWorkers) -> None:
    """Check the start of a device's first process, or of another one after the last has died and the device is not the
    cause."""
    workers, scenario = rules.world.workers, rules.world.scenario
    node = rules.world.nodes[action.node]
    is_lost = node.name in rules.lost_nodes and not rules.taking_over  # the new supervisor may not know of a loss yet
    expect(not is_lost and not node.dropped, f"{action} on a node that is lost")
    placements = rules.world.record.placements
    for rank, device in action.workers:
        expect(action.nodes[rank] == node.name, f"{action} names another node")
        expect(placements[rank] == Placement(node.name, device), f"{action} is not in the journal")
        if not action.joins:
            expect(node.ranks[device] == rank, f"rank {rank} on device {device} of {action.node}")
            continue
        expect(rank not in workers, f"{action}: there is a rank {rank}")
        before = [w for w in workers.values() if w.node is node and w.device == device]
        expect(len(before) <= scenario.come_backs, f"{action}: started {len(before)} times before")
        for worker in before:
            is_gone = worker.rank in rules.known_dead or worker.rank in rules.turned_away
            expect(is_gone, f"{action}: rank {worker.rank} is still on that device")
            unheard = bool(rules.world.takeovers)  # the error may have been reported to a supervisor that died
            expect(not worker.raised or unheard, f"{action}: rank {worker.rank} raised there")
            killed = any(f.kind == "kill" and f.rank == worker.rank for f in rules.injected_faults())
            expect(not killed, f"{action}: the device is dead")


def check_signal(rules: Rules, action: api.SignalWorker) -> None:
    worker = rules.world.workers[action.rank]
    if any(action.rank == entry.rank or worker.node.name == entry.node for entry in rules.injected_now):
        worker.injected = True
        return
    expect(action.signal == SIGKILL, f"signal {action.signal} to rank {action.rank} without a fault")
    worker.fenced = True
    if action.rank in rules.turned_away:
        return
    has_declared = action.rank in rules.declared_at and not rules.taking_over  # `Declare` may still be unread
    if rules.halted_at is not None and worker.joins and not has_declared:
        return
    if not worker.alive or worker.raised or worker.frozen == "stop":
        return
    recently = rules.world.now - worker.thawed_at < 3.0
    expect(bool(worker.frozen) or recently, f"rank {action.rank} is fenced though it waits for others")
    is_ordered = worker.ordered_at >= worker.answered_at
    sign = worker.ordered_at if is_ordered else max(worker.shown_at, worker.answered_at)
    if recently:  # its last beat reported that it was stopped
        return
    expect(
        rules.world.now - sign >= rules.world.settings.hang_given_up_s - TOLERANCE_S,
        f"rank {action.rank} is fenced {rules.world.now - sign:.1f} s after a sign of life",
    )


def check_drop(rules: Rules, name: str) -> None:
    node = rules.world.nodes[name]
    if rules.world.allocation.is_refusal(name):
        return
    expect(not node.dropped, f"node {name} is dropped twice")
    if not node.alive or not node.joined:
        return
    least = rules.world.settings.silent_beats * rules.world.settings.beat_s
    heard_s, proven_s = rules.world.now - node.last_delivered, rules.world.now - rules.proofs.get(name, 0.0)
    sign_of_life = f"heard {heard_s:.2f} s ago, proven {proven_s:.2f} s ago"
    expect(min(heard_s, proven_s) >= least - TOLERANCE_S, f"node {name} is dropped too early: {sign_of_life}")
