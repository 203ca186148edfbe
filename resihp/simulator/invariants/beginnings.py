"""Invariants of a job's start: no rank is left out without a reason, and no job ends although it could have begun.

Checks the first plan, and the end of a job without a plan. Never looks at later plans. Called by `rules` and by the
invariants of endings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.parallelism.plan import Plan
from resihp.simulator.invariants.violations import expect

if TYPE_CHECKING:
    from resihp.simulator.rules import Rules


def check_beginning(rules: Rules, plan: Plan) -> None:
    """Check that each rank missing from the first plan is part of a failure, or came too late for the plan."""
    record = rules.world.record
    for rank in range(len(rules.world.workers)):
        worker = rules.world.workers[rank]
        explained = rank in plan.layout.ranks or worker.joins or rank in rules.blamed
        expect(explained or worker.node.name in rules.failed_nodes, f"begins without rank {rank}, without a reason")
    for name in rules.world.settings.node_names:
        state = record.nodes.get(name)
        expect(state is not None, f"begins without node {name}, which was not given up")
        assert state is not None
        excused = any(place.node == name and rank in rules.blamed for rank, place in enumerate(record.placements))
        explained = state.alive or name in rules.failed_nodes or excused
        expect(explained, f"begins without node {name}, without a reason")


def healthy_devices(rules: Rules) -> int:
    """Return the number of devices with which a job could begin, because node and process are healthy."""
    blocked = dict(rules.world.scenario.spawns)
    return sum(
        worker.alive and not (worker.frozen or worker.fenced or worker.raised or worker.stumbles)
        and worker.rank != rules.world.scenario.refuses
        and node.alive and node.arrived and not (node.dropped or node.frozen or node.silent)
        for worker in rules.world.workers.values()
        if not worker.joins and (node := worker.node).name not in blocked
    )  # fmt: skip


def check_never_began(rules: Rules, end: api.End) -> None:
    """Check that a job that ends at its start had too few devices to begin."""
    scenario, healthy = rules.world.scenario, healthy_devices(rules)
    wide = scenario.odd_declare is not None or scenario.early_exit is not None
    hopeless = scenario.planner == "real" and "no layout fits" in end.reason
    hopeless = hopeless or scenario.planner_trouble > 0 or "no agent reconnected" in end.reason
    whole = rules.world.scenario.nodes * rules.world.scenario.gpus_per_node
    unfit = end.exit_code == 2 and healthy == whole  # no device is missing, but no layout meets the request
    if wide or hopeless or unfit or (end.exit_code == 93 and is_script_broken(rules)):
        return
    least = rules.world.settings.devices_least
    expect(healthy < least, f"does not begin with {healthy} healthy devices, {least} are enough: {end.reason}")


def is_script_broken(rules: Rules) -> bool:
    """Return whether at least half of the ranks raised an error, as in a broken script."""
    first = [worker for worker in rules.world.workers.values() if not worker.joins]
    raised = [worker for worker in first if worker.raised]
    return 2 * len(raised) >= len(first)
