"""Invariants of a job's end: its last journal entry, its exit code, and the state that is lost with it.

Checks the end when it is decided. Never checks the end of a job that was asked to stop: `stopping` does. Called by
`rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resihp.controller import interface as api
from resihp.controller.rounds.rollback import MAX_IN_A_ROW
from resihp.faults import Fault
from resihp.record.journal import JobEnded
from resihp.simulator.holdings import everything, needed
from resihp.simulator.invariants.beginnings import check_never_began
from resihp.simulator.invariants.violations import Violation, expect

if TYPE_CHECKING:
    from resihp.simulator.rules import Rules


def check_end(rules: Rules) -> None:
    end = rules.world.end
    assert end is not None
    check_last_entry(rules, end)
    expect(all(rules.requests.values()), "an operator was not answered")
    if rules.world.stopping.check_end(end):
        return
    if rules.signalled is None and rules.plan is None:
        check_never_began(rules, end)
    check_exit_code(rules, end)


def check_last_entry(rules: Rules, end: api.End) -> None:
    """Check that the last journal entry is the only one of the job's end, and that its contents are right."""
    code = end.exit_code
    ended = [entry for _, entry in rules.world.entries if isinstance(entry, JobEnded)]
    expect(len(ended) == 1, f"{len(ended)} ends in the journal")
    expect(ended[0].exit_code == code, f"the journal says {ended[0].exit_code}, the end {code}")
    cancelled = code in (130, 143) or (end.requeue and rules.world.stopping.is_on)
    state = "completed" if code == 0 else "cancelled" if cancelled else "failed"
    expect(ended[0].state == state, f"exit code {code} is called {ended[0].state}")
    expect(isinstance(rules.world.entries[-1][1], JobEnded), "entries after the end")


def check_exit_code(rules: Rules, end: api.End) -> None:
    """Check that the exit code fits the course of the job."""
    scenario, code = rules.world.scenario, end.exit_code
    if code == 2:
        unwilling = (scenario.objects, scenario.other_digest) != (None, None)
        expect(rules.plan is None or (unwilling and len(rules.plans) == 1), f"ends with 2: {end.reason}")
    elif scenario.early_exit == 0:  # a plain program, which does not use resihp
        expect(code == (1 if unfired_faults(rules) else 0), f"ends with {code}")
    elif code in (5, 75):
        check_too_few(rules, end)
    elif rules.plan is None:
        expect(code in ((1, 93) if rules.early_loss else (1, 2, 3, 93)), f"ends with {code}")
    elif code == 0:
        check_success(rules, end)
    elif code == 1:
        check_late_failure(rules, end)
    elif code == 93:
        raised = sum(worker.raised for worker in rules.world.workers.values() if not worker.joins or worker.plan)
        same = raised >= 2 or (raised == 1 and len(with_work(rules)) == 1)
        expect(same, "attributes to the script an error that was not raised twice")
    else:
        raise Violation(f"exit code {code}: {end.reason}")


def unfired_faults(rules: Rules) -> list[Fault]:
    return [fault for fault in rules.world.scenario.faults if fault.id not in rules.fired]


def check_success(rules: Rules, end: api.End) -> None:
    """Check that all iterations, evaluations and faults are done, and that workers have left or had enough time to."""
    world, iterations = rules.world, rules.world.scenario.iterations
    unfired = unfired_faults(rules)
    expect(rules.committed >= iterations, f"ends with 0 after {rules.committed} of {iterations}")
    expect(not unfired, f"ends with 0 though {unfired} did not fire")
    if world.scenario.evaluate_every:
        expect(rules.evaluated == iterations, f"evaluated up to {rules.evaluated}")
    spawned = [worker for worker in world.workers.values() if worker.spawned]
    still_running = any(worker.alive and not worker.halted for worker in spawned if not rules.given_up(worker))
    newcomer_left = any(worker.joins and worker.rank not in rules.known_dead for worker in spawned)
    waited = world.now - (rules.halted_at or 0.0) > 3.0
    expect(
        end.workers_leave or still_running or newcomer_left or bool(world.takeovers) or waited,
        "ends although workers are leaving",
    )


def check_late_failure(rules: Rules, end: api.End) -> None:
    """Check a job that fails after its last iteration: a worker failed late, or the reason names each fault that did
    not fire."""
    unfired = unfired_faults(rules)
    done = rules.committed >= rules.world.scenario.iterations
    # a process that dies while there is no leader may have been told to halt before
    halted = rules.halted_at is not None or bool(rules.world.takeovers)
    late = halted and any(worker.status not in (0, None) for worker in rules.world.workers.values())
    hopeless = rules.objected >= 2 or "communication failed 6 times" in end.reason
    expect(hopeless or (done and (bool(unfired) or late)), f"fails: {end.reason}")
    if late or hopeless:
        return
    for fault in unfired:
        expect(str(fault) in end.reason, f"does not name {fault}: {end.reason}")


def check_too_few(rules: Rules, end: api.End) -> None:
    """Check an end for lack of nodes. Slurm requeues the job if it has saved a checkpoint or has restarts left."""
    scenario = rules.world.scenario
    saved = rules.world.controller.job.checkpointed > 0
    again = scenario.slurm and scenario.may_requeue and (saved or scenario.restarts_left > 0)
    expect((end.exit_code, end.requeue) == ((75, True) if again else (5, False)), f"{end}, where {again=}")
    if rules.plan is not None:
        expect(is_lost(rules), f"gives up though no state is lost: {end.reason}")
    if is_state_lost(rules) and not rules.objected and "no agent reconnected" not in end.reason:
        able = [w for w in rules.world.workers.values() if w.alive and w.spawned and not rules.given_up(w)]
        is_limited = rules.rollbacks_in_a_row >= MAX_IN_A_ROW or rules.rollbacks >= scenario.max_rollbacks
        hopeless = is_limited or not able
        expect(hopeless, f"gives up, though it could go back to a checkpoint: {end.reason}")


def is_lost(rules: Rules) -> bool:
    """Return whether the job cannot continue: no agent is left, some slice has no holder, or no plan was accepted."""
    able = {w.rank for w in rules.world.workers.values() if w.spawned and not rules.given_up(w)}
    if "no agent reconnected" in (rules.world.end.reason if rules.world.end else ""):
        nodes, is_stranger = rules.world.nodes.values(), rules.world.allocation.is_stranger
        return not any(node.joined for node in nodes if not is_stranger(node.name))
    if rules.in_effect is None or rules.committed == rules.begins_after:
        return not able - rules.turned_away or rules.objected > 0
    return is_state_lost(rules) or rules.objected > 0


def is_state_lost(rules: Rules) -> bool:
    """Return whether some slice of the last committed iteration has no holder."""
    if rules.in_effect is None or rules.committed == rules.begins_after:
        return False
    workers, covered = rules.world.workers, 0
    for rank, slices in needed(rules.world.scenario.model, rules.in_effect.layout).items():
        able = workers[rank].spawned and not rules.given_up(workers[rank])
        covered |= slices if able and rules.in_effect.epoch in workers[rank].held else 0
    return covered != everything(rules.world.scenario.model)


def with_work(rules: Rules) -> set[int]:
    """Return the ranks with work under the plan in effect, or under the plan that was decided last."""
    last = None if rules.plan is None or rules.plan.epoch in rules.refused else rules.plan
    plans = [rules.in_effect or rules.plan, last]
    return {rank for plan in plans if plan is not None for rank in rules.world.active_ranks(plan)}
