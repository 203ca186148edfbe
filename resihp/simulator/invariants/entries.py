"""Invariants of journal entries: each entry is checked and recorded before it is written.

Plans and suspicions have modules of their own. Never compares the record with the journal: `world` does. Called by
`rules`.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from resihp.record.journal import (
    AnyEntry,
    ChangeDecided,
    CheckpointCommitted,
    EvaluationDone,
    FailureFound,
    FaultInjected,
    IterationCommitted,
    JobEnded,
    JoinRefused,
    NodeJoined,
    PlanDecided,
    PlanInEffect,
    PlanRefused,
    Reconfigured,
    RollbackDecided,
    Suspected,
    WorkerEnded,
)
from resihp.simulator.holdings import after
from resihp.simulator.invariants.endings import is_state_lost
from resihp.simulator.invariants.idle_ranks import check_newcomers
from resihp.simulator.invariants.plans import check_effect, check_plan
from resihp.simulator.invariants.suspicions import check_suspicion
from resihp.simulator.invariants.violations import TOLERANCE_S, expect

if TYPE_CHECKING:
    from resihp.simulator.rules import Rules


def check_entry(rules: Rules, entry: AnyEntry) -> None:
    match entry:
        case PlanDecided():
            check_plan(rules, entry)
        case IterationCommitted():
            check_commit(rules, entry)
        case EvaluationDone():
            check_evaluation(rules, entry)
        case FailureFound():
            check_failure(rules, entry)
        case FaultInjected():
            expect(entry.fault not in rules.fired, f"fault {entry.fault} fires twice")
            rules.fired[entry.fault] = entry
            rules.injected_now.append(entry)
        case NodeJoined():
            rules.failed_nodes.discard(entry.node)
        case RollbackDecided():
            check_rollback(rules, entry)
        case PlanInEffect():
            check_effect(rules, entry.epoch)
        case PlanRefused():
            if entry.rank is not None:
                rules.refused.add(entry.epoch)
            rules.objected += 1
        case JoinRefused():
            check_refusal(rules, entry)
        case Suspected():
            check_suspicion(rules, entry)
        case ChangeDecided():
            check_change(rules, entry)
        case WorkerEnded():
            worker = rules.world.workers[entry.rank]
            if entry.exit is not None:
                expect(entry.exit == worker.status, f"rank {entry.rank} ended with {worker.status}: {entry}")
        case Reconfigured():
            check_reconfiguration(rules, entry)
        case JobEnded():
            expect(not any(isinstance(old, JobEnded) for _, old in rules.world.entries), "two ends in the journal")
        case _:
            pass


def check_failure(rules: Rules, entry: FailureFound) -> None:
    rules.failures += 1
    expect(entry.failure == rules.failures, f"failure {entry.failure} after {rules.failures - 1}")
    rules.pending_blame.append(entry)
    noticed_s = entry.noticed_s or 0.0
    is_plausible = entry.failed_s is None or noticed_s <= entry.failed_s <= rules.world.now + TOLERANCE_S
    expect(noticed_s >= 0.0 and is_plausible, f"{entry}: noticed before its onset, or before the job began")


def check_refusal(rules: Rules, entry: JoinRefused) -> None:
    late = rules.world.workers[entry.rank].joins or rules.plan is None
    expect(late, f"{entry} of a rank that was there from the start")
    expect(entry.rank not in rules.turned_away, f"{entry} twice")
    rules.turned_away.add(entry.rank)
    rules.declared_at.pop(entry.rank, None)


def check_change(rules: Rules, entry: ChangeDecided) -> None:
    """Check that the job's settings allow a change of the plan during training."""
    observes = rules.world.scenario.observes
    if entry.tuned:
        expect(rules.world.settings.tune and not observes, f"{entry} without a request")
    elif observes:
        job = rules.world.controller.job
        at_work = {job.device_of(rank) for rank in job.record.computing}
        newcomers = not entry.links and at_work.isdisjoint(entry.devices)
        allowed = newcomers and not entry.found
        expect(allowed, f"{entry} because of slow devices, in a job that only observes them")


def check_reconfiguration(rules: Rules, entry: Reconfigured) -> None:
    """Check the times and bytes of a transition against the reports of its ranks."""
    expect(set(entry.failures) <= set(range(1, rules.failures + 1)), f"unknown failures in {entry}")
    expect(entry.attempts >= 1 and entry.seconds >= 0, f"impossible {entry}")
    built = rules.acknowledged.get(entry.epoch, {}).values()
    expect(entry.groups_s == max(r.groups_s for r in built), f"{entry}, of {built}")
    expect(entry.bytes_moved == sum(r.bytes_received for r in built), f"{entry}, of {built}")
    expect(entry.bytes_moved == rules.bytes_planned, f"{entry}, planned were {rules.bytes_planned} bytes")


def check_commit(rules: Rules, entry: IterationCommitted) -> None:
    outcome = entry.outcome
    expect(outcome.iteration == rules.committed + 1, f"commits {outcome.iteration} after {rules.committed}")
    rules.committed = outcome.iteration
    assert rules.plan is not None
    expected = rules.world.collectives.outcome_of(rules.plan, outcome.iteration)
    for name in ("samples_digest", "samples", "loss", "tokens"):
        expect(getattr(outcome, name) == getattr(expected, name), f"{name} of {outcome}")
    expect(entry.epoch in rules.plans, f"commits in epoch {entry.epoch}, which is unknown")
    same = outcome == rules.world.collectives.outcome_of(rules.plans[entry.epoch], outcome.iteration)
    expect(same, f"the outcome of {outcome.iteration} is not of epoch {entry.epoch}")
    rules.value = rules.values[rules.committed] = after(rules.value, outcome)
    took = [
        w for w in rules.world.workers.values() if w.outcome is not None and w.outcome.iteration == outcome.iteration
    ]
    for worker in took:
        if worker.alive and not rules.given_up(worker) and worker.active:
            expect(worker.outcome == outcome, f"rank {worker.rank} took another outcome than {outcome}")
    check_newcomers(rules)
    expect(outcome.iteration <= rules.stepped_by_any, f"{outcome.iteration} is committed without a reported step")


def check_rollback(rules: Rules, entry: RollbackDecided) -> None:
    """Check that a rollback is necessary and goes to the newest checkpoint; then forget the later iterations."""
    record = rules.world.record
    saved = record.rollbacks.newest
    expect(rules.world.scenario.max_rollbacks > rules.rollbacks, f"{entry}, though there were {rules.rollbacks} before")
    expect(is_state_lost(rules), f"{entry}, though no state is lost")
    expect(entry.epoch >= rules.highest_epoch, f"{entry} in epoch {rules.highest_epoch}")
    commits = [old for _, old in rules.world.entries if isinstance(old, CheckpointCommitted)]
    target = (commits[-1].iteration, commits[-1].folder) if commits else record.rollbacks.loaded(record.trains)
    expect(saved is None or saved == target, f"remembers the checkpoint {saved} instead of {target}")
    expect((entry.iteration, entry.folder) == target, f"{entry}, the newest checkpoint is {target}")
    newer = [old for _, old in rules.world.entries if isinstance(old, CheckpointCommitted | RollbackDecided)]
    since = list(takewhile(lambda old: isinstance(old, RollbackDecided), reversed(newer)))
    rules.rollbacks_in_a_row, rules.rollbacks = len(since) + 1, rules.rollbacks + 1
    rules.committed = rules.begins_after = rules.reported = rules.stepped_by_any = entry.iteration
    rules.evaluated = min(rules.evaluated, entry.iteration)
    rules.value, rules.rolled_back, rules.exposed = rules.values[entry.iteration], entry.epoch, None


def check_evaluation(rules: Rules, entry: EvaluationDone) -> None:
    interval, last = rules.world.scenario.evaluate_every, rules.world.scenario.iterations
    expect(rules.evaluated < entry.iteration <= rules.committed, f"{entry} after {rules.evaluated}, {rules.committed}")
    expect(entry.iteration % interval == 0 or entry.iteration == last, f"{entry} is not due")
    expect(entry.loss == rules.world.collectives.validation_loss(entry.iteration), f"loss of {entry}")
    rules.evaluated = entry.iteration
