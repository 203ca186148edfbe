"""Invariants of orders to workers: their sequence, their recipients, and the reasons for stopping training.

Checks each order before it is sent. Never checks orders to write a checkpoint: `stopping` does. Called by `rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import AnyEntry, ChangeDecided, FailureFound, ProbesTaken, SlurmSaw
from resihp.scheduler.layouts.mirrors import layers_held_once
from resihp.simulator.invariants.measurements import wait_anew
from resihp.simulator.invariants.violations import TOLERANCE_S, Violation, expect

if TYPE_CHECKING:
    from resihp.simulator.machines.worker import Worker
    from resihp.simulator.rules import Rules

TransitionOrder = m.Park | m.Propose | m.Go | m.Begin
"""The orders of a transition. Each rank receives them in this sequence."""

PAUSE_STEP, PARK_STEP, PROPOSE_STEP, GO_STEP, BEGIN_STEP = range(5)
"""Steps of a transition in their sequence. PAUSE_STEP is the order to park after an iteration."""


def check_order(rules: Rules, action: api.Order) -> None:
    order = action.order
    match order:
        case m.Park():
            check_park(rules, action.ranks, order)
        case m.Propose():
            check_proposal(rules, action.ranks, order)
        case m.Go():
            check_go(rules, order)
        case m.Begin():
            plan = rules.plans.get(order.epoch)
            in_effect = plan is not None and plan is rules.in_effect
            expect(in_effect, f"begins epoch {order.epoch}, which is not in effect")
            assert plan is not None
            expect(action.ranks == plan.layout.ranks, f"begins epoch {order.epoch} with ranks {action.ranks}")
        case m.FaultGo():
            if order.fire:
                fired = order.fault in rules.fired
                expect(fired, f"fault {order.fault} is told to fire without an entry in the journal")
        case m.Probe():
            check_probe(rules, action.ranks, order)
        case m.Slow():
            pass
        case m.Save() | m.SaveNext():
            pass  # see stopping.py
        case m.Halt():
            rules.halted_at = rules.world.now if rules.halted_at is None else rules.halted_at
        case _:
            raise Violation(f"the controller does not send {order}")
    if isinstance(order, TransitionOrder):
        check_sequence(rules, action, order)


def step_of(order: TransitionOrder) -> tuple[int, int]:
    """Return the epoch of an order, and the order's step in the transition."""
    match order:
        case m.Park():
            return order.epoch, PAUSE_STEP if order.after_iteration else PARK_STEP
        case m.Propose():
            return order.plan.epoch, PROPOSE_STEP
        case m.Go():
            return order.epoch, GO_STEP
        case m.Begin():
            return order.epoch, BEGIN_STEP


def check_park(rules: Rules, ranks: tuple[int, ...], order: m.Park) -> None:
    epoch, step = step_of(order)
    urged = step == PARK_STEP and all(rules.last_order.get(rank) == (epoch, PAUSE_STEP) for rank in ranks)
    rules.hurried = set(ranks) if urged else set()
    if rules.world.takeovers:  # nodes that received a later epoch may have been dropped since
        joined = [node.epoch for node in rules.world.nodes.values() if node.joined and not node.dropped]
        rules.highest_epoch = min(rules.highest_epoch, max([0, *rules.plans, *joined]))
    is_fresh = rules.committed == rules.begins_after
    joins = is_fresh and epoch == rules.highest_epoch and step == PARK_STEP  # processes that were started again
    expect(epoch > rules.highest_epoch or urged or joins, f"park for epoch {epoch} after epoch {rules.highest_epoch}")
    if order.after_iteration:
        expect(rules.in_effect is not None and not rules.underway, "pauses while a transition is under way")
        expect(epoch == rules.highest_epoch + 1, f"pauses for epoch {epoch} in epoch {rules.highest_epoch}")
    else:
        rules.highest_epoch = epoch
        rules.underway = True


def check_proposal(rules: Rules, ranks: tuple[int, ...], order: m.Propose) -> None:
    epoch = order.plan.epoch
    rules.underway = True
    check_base(rules, order)
    rules.highest_epoch = max(rules.highest_epoch, epoch)
    expect(epoch == rules.highest_epoch, f"proposes epoch {epoch} after {rules.highest_epoch}")
    expect(rules.plans.get(epoch) == order.plan, f"plan of epoch {epoch} is not in the journal")
    expect(set(ranks) <= set(order.plan.layout.ranks), "proposes to ranks outside the plan")


def check_go(rules: Rules, order: m.Go) -> None:
    """Check that all ranks of the plan are alive and have confirmed it, and that it repeats no committed iteration."""
    epoch = order.epoch
    expect(epoch not in rules.refused, f"go to epoch {epoch}, which was refused")
    expect(epoch == rules.highest_epoch, f"go to epoch {epoch} after {rules.highest_epoch}")
    plan = rules.plans.get(epoch)
    expect(plan is not None, f"go to epoch {epoch}, which is not in the journal")
    assert plan is not None
    missing = set(plan.layout.ranks) - rules.confirmed.get(epoch, set()) - rules.known_dead
    expect(not missing, f"go to epoch {epoch} though ranks {sorted(missing)} have not confirmed")
    dead = set(plan.layout.ranks) & rules.known_dead
    expect(not dead, f"go to epoch {epoch} with dead ranks {sorted(dead)}")
    expect(
        order.next_iteration == rules.committed + 1,
        f"go to iteration {order.next_iteration} with {rules.committed} committed",
    )


def check_sequence(rules: Rules, action: api.Order, order: TransitionOrder) -> None:
    """Check that each recipient is alive, and that the order follows the recipient's last order; then record the
    order."""
    epoch, step = step_of(order)
    for rank in action.ranks:
        before = rules.last_order.get(rank, (0, 0))
        expect((epoch, step) > before, f"rank {rank}: {type(order).__name__} {epoch} after {before}")
        expect(rank not in rules.known_dead, f"{type(order).__name__} to rank {rank}, which is gone")
    if isinstance(order, m.Park):
        check_reasons(rules, action.ranks, order)
    rules.last_order.update(dict.fromkeys(action.ranks, (epoch, step)))
    if isinstance(order, m.Park):  # several orders for the same epoch go to different ranks
        rules.taking_part = set(action.ranks) | (rules.taking_part if epoch == rules.parking else set())
        rules.parking = epoch


def check_base(rules: Rules, propose: m.Propose) -> None:
    base = propose.base
    if rules.in_effect is None or rules.committed == rules.begins_after:
        expect(base is None, f"{base} though every rank can draw its state")
        return
    expect(base is not None, "no base though iterations are committed")
    assert base is not None
    effective = rules.in_effect
    expect((base.epoch, base.layout) == (effective.epoch, effective.layout), f"{base}, in effect is {effective}")
    expect(set(base.survivors) <= set(effective.layout.active), f"survivors {base.survivors} without work")
    for rank in base.survivors:
        worker = rules.world.workers[rank]
        if rules.given_up(worker) or not worker.alive:
            continue
        expect(base.epoch in worker.held, f"survivor {rank} holds {list(worker.held)}, base is {base.epoch}")
    named = {rank: node for rank, node in propose.nodes.items() if node}
    truth = {rank: worker.node.name for rank, worker in rules.world.workers.items()}
    if rules.world.takeovers:  # some ranks were lost with a supervisor, but their numbers stay in use
        truth = {rank: place.node for rank, place in enumerate(rules.world.record.placements)} | truth
    expect(named == truth, f"names other nodes: {named.items() ^ truth.items()}")


def check_reasons(rules: Rules, ranks: tuple[int, ...], order: m.Park) -> None:
    """Check that training stops only for a loss, a failed transfer, silence beyond the time limits, or a reason to
    pause."""
    plan = rules.plan
    if plan is None or plan.epoch in rules.refused:
        return
    if rules.world.stopping.is_on:
        return
    if order.after_iteration:
        check_pause(rules, plan)
    else:
        check_interruption(rules, ranks, plan)


def check_pause(rules: Rules, plan: Plan) -> None:
    """Check that an order to park after an iteration has a reason."""
    world = rules.world
    entries = [entry for _, entry in world.entries]
    newcomers = {rank for rank in rules.declared_at if rank not in plan.computing}
    reasons = (
        bool(newcomers - rules.known_dead),
        any(reports_slow_device(entry) for entry in entries),
        world.scenario.on_drain == "vacate" and any(isinstance(e, SlurmSaw) and "drain" in e.state for e in entries),
        bool(world.allocation.ending),
        world.scenario.batch_sizes.at(rules.stepped_by_any + 1) != plan.micro_batches,
        any(isinstance(entry, ChangeDecided) and entry.tuned for entry in entries),
        bool(layers_held_once(plan.layout)),
        world.thinking.has_found(plan),
    )
    expect(
        any(reasons),
        "pauses without a newcomer, a slow device, a node to vacate, another batch size, a better plan, or "
        "state with a single holder",
    )


def reports_slow_device(entry: AnyEntry) -> bool:
    """Return whether a journal entry is a reason to change the plan because of devices' speeds."""
    match entry:
        case FailureFound(kind="fail-slow") | ProbesTaken(occasion="standby"):
            return True
        case _:
            return False


def check_interruption(rules: Rules, ranks: tuple[int, ...], plan: Plan) -> None:
    """Check that an order to park at once has a reason."""
    world = rules.world
    if world.takeovers and world.now - world.takeovers[-1] < 12.0:
        return  # a change was in progress, or may have been
    active = world.active_ranks(plan)
    has_lost = any(rank in rules.known_dead or world.workers[rank].fenced for rank in rules.taking_part)
    if has_lost or plan.epoch in world.broken_epochs or any(world.workers[rank].raised for rank in active):
        return
    _, last_step = rules.last_order.get(ranks[0], (0, PAUSE_STEP))
    if last_step == PAUSE_STEP:
        return  # an order to park after the iteration becomes an order to park at once
    loud = any(not world.workers[rank].alive for rank in {*active, *rules.taking_part})
    quiet_s = world.now - max(world.workers[rank].progress_at for rank in active)
    expect(loud or quiet_s >= 15.0 - TOLERANCE_S, f"parks all ranks without cause, progress {quiet_s:.1f} s ago")


def check_probe(rules: Rules, ranks: tuple[int, ...], order: m.Probe) -> None:
    """Check a probe. Devices may be probed at any time; during training, link probes must be announced."""
    if order.after_iteration is not None:
        check_announcement(rules, ranks, order)
    wait_anew(rules, [rules.world.controller.job.device_of(rank) for rank in ranks])


def check_announcement(rules: Rules, ranks: tuple[int, ...], order: m.Probe) -> None:
    """Check an announced link probe: early enough, to both ends of every link, in disjoint pairs.

    Early enough refers to the reports delivered so far, since the controller cannot know of reports that are delayed. A
    rank that is already past the iteration reports this when the order arrives; its peer waits 2 s.
    """
    assert order.after_iteration is not None
    steps = [reported_step(rules, worker) for worker in rules.world.workers.values() if worker.alive]
    expect(order.after_iteration > max(steps), f"{order} is announced to ranks that are past it")
    expect(order.after_iteration < rules.world.scenario.iterations, f"{order} is announced for after the end")
    expect(len(order.pairs) <= 3, f"{order} takes {len(order.pairs)} rounds")
    for round_ in order.pairs:
        ends = [rank for pair in round_ for rank in pair]
        expect(len(ends) == len(set(ends)), f"{round_}: pairs are not disjoint")
        expect(set(ends) <= set(ranks), f"{round_}: not all ends receive the order")


def reported_step(rules: Rules, worker: Worker) -> int:
    """Return the last step in a worker's delivered reports; newer reports may still be on their way."""
    for event in worker.node.up:
        if isinstance(event, api.WorkerSaid) and event.rank == worker.rank and isinstance(event.message, m.Stepped):
            return event.message.outcome.iteration - 1
    return worker.stepped
