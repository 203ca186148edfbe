"""One scenario after the other: what the controller does when this happens at that moment."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.faults import parse
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import spread
from resihp.protocol import messages as m
from resihp.protocol.inventory import DeviceInventory, NodeInventory, Software
from resihp.record.journal import (
    FaultInjected,
    IterationCommitted,
    JobEnded,
    ModelDeclared,
    NodeJoined,
    NodeLost,
    PlanDecided,
    Reconfigured,
    Suspected,
    WorkerEnded,
    WorkerStarted,
)
from resihp.settings import Settings
from resihp.simulator.harness import Disturbance, Result, Scenario, play
from resihp.simulator.scenarios.scenario import SIGINT, SIGKILL, SIGTERM, DisturbanceKind
from tests.resihp.controller.direct import DECLARE, PLAIN, Direct

FEW = range(5)
"""Seeds of each scenario: delays and orders differ, what is asserted does not."""


def run(seed: int, *disturbances: Disturbance, faults: tuple[str, ...] = (), **options: Any) -> Result:
    """2 nodes of 2 GPUs, 2 stages, 2 replicas (0, 1) and (2, 3), 6 iterations, unless told otherwise.

    Replicas that lose a rank are dropped and nobody comes back, unless told otherwise: see `adapt`.
    """
    options = {"planner": "cautious", "come_backs": 0} | options
    armed = tuple(parse(text, number) for number, text in enumerate(faults))
    return play(Scenario(seed=seed, faults=armed, disturbances=disturbances, **options))


def adapt(seed: int, *disturbances: Disturbance, faults: tuple[str, ...] = (), **options: Any) -> Result:
    """The same with the real planner, and devices that get another process."""
    return run(seed, *disturbances, faults=faults, **{"planner": "real", "come_backs": 3} | options)


def committed(result: Result) -> list[int]:
    return [entry.outcome.iteration for entry in result.all(IterationCommitted)]


def left(decided: PlanDecided) -> list[tuple[int, ...]]:
    return [replica.ranks for replica in decided.plan.layout.replicas]


# --- start and end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", FEW)
def test_undisturbed_run_goes_from_start_to_end(seed: int) -> None:
    result = run(seed)
    assert (result.exit_code, result.workers_leave) == (0, True)
    assert committed(result) == [1, 2, 3, 4, 5, 6]
    assert [(p.action, p.next_iteration, p.finish) for p in result.plans] == [("start", 1, None)]
    layout = result.plans[0].plan.layout
    assert layout == Layout.uniform(tp=1, pp=2, dp=2, layers=6)
    assert result.plans[0].plan.assignment == spread(8, 2)
    assert result.failures == []
    assert result.all(Suspected) == []
    assert result.all(Reconfigured) == []
    assert result.orders(m.Park) == []
    assert sorted(entry.node for entry in result.all(NodeJoined)) == ["n1", "n2"]
    started = [(e.rank, e.node, e.device) for e in result.all(WorkerStarted)]
    assert sorted(started) == [(0, "n1", 0), (1, "n1", 1), (2, "n2", 0), (3, "n2", 1)]
    assert sorted((e.rank, e.exit) for e in result.all(WorkerEnded)) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert result.all(JobEnded) == [JobEnded(exit_code=0, state="completed", reason=result.reason)]


@pytest.mark.parametrize("seed", FEW)
def test_a_committed_iteration_knows_its_slowest_rank(seed: int) -> None:
    result = run(seed)
    reports = [
        e.message for _, e in result.events if isinstance(e, api.WorkerSaid) and isinstance(e.message, m.Stepped)
    ]
    for entry in result.all(IterationCommitted):
        seconds = [report.seconds for report in reports if report.outcome == entry.outcome]
        assert len(seconds) == 4
        assert entry.seconds == max(seconds)


def test_resumes_after_the_checkpoint_that_the_ranks_declare() -> None:
    result = run(0, resume_from=4)
    assert committed(result) == [5, 6]
    assert result.plans[0].next_iteration == 5


def test_devices_that_fill_no_replica_are_standby() -> None:
    result = run(0, nodes=1, gpus_per_node=5)
    assert result.plans[0].plan.layout.standby == (4,)
    assert result.exit_code == 0


def test_ranks_fill_nodes_in_their_natural_order() -> None:
    result = run(0, nodes=11, gpus_per_node=1, pp=1, micro_batches=11)
    started = {entry.rank: entry.node for entry in result.all(WorkerStarted)}
    assert [started[rank] for rank in range(11)] == [f"n{i}" for i in range(1, 12)]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pp": 8, "nodes": 4}, "only 6 layers"),
        ({"tp": 4, "pp": 1, "nodes": 1, "gpus_per_node": 4}, "query groups cannot be divided"),
        ({"micro_batches": 1}, "cannot feed 2 replicas"),
        ({"tp": 2, "pp": 4}, "devices"),
    ],
)
def test_a_layout_that_does_not_fit_ends_with_one_message(options: dict[str, Any], told: str) -> None:
    result = run(0, **options)
    assert result.exit_code == 2
    assert told in result.reason
    assert [text for text in result.said if told in text] == [result.reason]
    assert result.plans == []


def test_ranks_that_declare_different_models_end_the_run() -> None:
    result = run(0, odd_declare=2)
    assert result.exit_code == 2
    assert "rank 2" in result.reason


def test_a_script_that_refuses_to_start_ends_with_its_reason() -> None:
    result = run(0, refuses=0, nodes=1, gpus_per_node=1, pp=1)
    assert (result.exit_code, result.reason) == (2, "the data set is empty; choose another")


def test_a_script_that_refuses_on_one_rank_alone_is_done_without_that_rank() -> None:
    result = run(0, refuses=3)
    assert result.exit_code == 0
    (failure,) = result.failures
    assert (failure.kind, failure.component, failure.node, failure.ranks) == ("fail-stop", "process", "n2", (3,))
    assert failure.cause == "rank 3 cannot start: the data set is empty; choose another"


@pytest.mark.parametrize("seed", range(20))
def test_a_plain_program_that_never_declares_is_done_when_all_its_processes_are(seed: int) -> None:
    result = run(seed, early_exit=0)
    assert result.exit_code == 0
    assert sorted((entry.rank, entry.exit) for entry in result.all(WorkerEnded)) == [(rank, 0) for rank in range(4)]
    assert result.plans == []


def test_a_plain_program_that_fails_fails_the_job() -> None:
    assert run(0, early_exit=3).exit_code == 93


def test_a_rank_that_cannot_carry_out_the_first_plan_ends_the_run() -> None:
    result = run(0, objects=1)
    assert result.exit_code == 2
    assert "rank 1" in result.reason
    assert "too little memory" in result.reason
    assert result.orders(m.Go) == []


@pytest.mark.parametrize("seed", FEW)
def test_a_rank_that_computes_another_digest_is_never_told_to_go(seed: int) -> None:
    result = run(seed, other_digest=1)
    assert result.exit_code == 2
    assert "rank 1" in result.reason
    assert "digest" in result.reason
    assert result.orders(m.Go) == []


def test_what_a_node_is_made_of_is_on_record_from_its_joining() -> None:
    controller = Controller(Settings(job="local-1", nodes=1, gpus_per_node=1, tp=1, pp=1, **PLAIN))
    machine = NodeInventory(serial="S1", devices=(DeviceInventory(device=0, uuid="GPU-0"),))
    actions = controller.handle(api.AgentJoined(node="n1", host="h", devices=1, machine=machine), 0.0)
    joined = NodeJoined(node="n1", host="h", devices=1, inventory=machine)
    assert joined in [action.entry for action in actions if isinstance(action, api.Log)]


def test_the_record_has_the_versions_that_the_first_rank_told_and_ranks_need_not_tell_the_same() -> None:
    controller = Controller(Settings(job="local-1", nodes=2, gpus_per_node=2, tp=1, pp=2, **PLAIN))
    actions: list[api.AnyAction] = []
    for node in ("n1", "n2"):
        actions += controller.handle(api.AgentJoined(node=node, host="h", devices=2), 0.0)
    told = {0: None, 1: None, 2: Software(torch="2.8.0", script_commit="1" * 40), 3: Software(torch="2.8.0")}
    for rank, software in told.items():
        where = {"node": f"n{rank // 2 + 1}", "device": rank % 2}
        actions += controller.handle(api.WorkerSpawned(rank=rank, pid=1000 + rank, **where), 0.1)
        declare = msgspec.structs.replace(DECLARE, software=software)
        actions += controller.handle(api.WorkerSaid(rank=rank, message=declare), 0.2)
    entries = [action.entry for action in actions if isinstance(action, api.Log)]
    assert [entry for entry in entries if isinstance(entry, ModelDeclared)] == [
        ModelDeclared(declare=DECLARE, software=told[2])
    ]
    assert any(isinstance(entry, PlanDecided) for entry in entries)


def test_a_spawn_that_is_refused_ends_the_run() -> None:
    controller = Controller(Settings(job="local-1", nodes=1, gpus_per_node=1, tp=1, pp=1, **PLAIN))
    controller.handle(api.AgentJoined(node="n1", host="h", devices=1), 0.0)
    end = controller.handle(api.SpawnRefused(node="n1", reason="no such file: trian.py"), 0.5)[-1]
    assert isinstance(end, api.End)
    assert end.exit_code != 0
    assert "trian.py" in end.reason


@pytest.mark.parametrize("status", [-SIGKILL, 1])
def test_a_worker_lost_before_the_first_plan_is_a_failure_like_any_other(status: int) -> None:
    result = adapt(0, Disturbance("kill", "declare", rank=2, status=status))
    assert result.exit_code == 0
    (failure,) = result.failures
    assert (failure.kind, failure.component, failure.node, failure.ranks) == ("fail-stop", "process", "n2", (2,))
    assert result.plans[0].plan.layout.ranks == (0, 1, 3)
    again = [a.workers for _, a in result.actions if isinstance(a, api.StartWorkers) and a.joins]
    assert again == [((4, 0),)], "its device is tried again once training has begun"


def test_a_worker_that_never_declares_uses_up_the_start_budget_and_is_done_without() -> None:
    result = adapt(0, Disturbance("hang", "spawn", nth=4, rank=2), come_backs=0)
    assert result.exit_code == 0
    (failure,) = result.failures
    assert failure.cause == "rank 2 not ready to train within 60 s of the start"
    assert 60.0 <= result.when(PlanDecided)[0] < 65.0


# --- one death in each phase --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("phase", ["forward", "backward", "reduce"])
def test_killed_before_the_last_synchronisation_the_iteration_is_redone(seed: int, phase: str) -> None:
    result = run(seed, faults=(f"kill:rank=1@iteration=3,phase={phase}",))
    assert result.exit_code == 0
    assert committed(result) == [1, 2, 3, 4, 5, 6]
    assert [plan.next_iteration for plan in result.plans] == [1, 3]
    assert left(result.plans[1]) == [(2, 3), (0,)]
    assert result.plans[1].plan.mirroring == {0}, "which has no pipeline of its own any more"
    assert result.plans[1].plan.layout.standby == ()
    assert result.plans[1].plan.assignment == (tuple(range(8)), ())
    (failure,) = result.failures
    assert (failure.kind, failure.component, failure.ranks, failure.node) == ("fail-stop", "device", (1,), "n1")
    assert (failure.iteration, failure.device) == (3, 1)
    assert [entry.iteration for entry in result.all(FaultInjected)] == [3]
    assert failure.detect_s is not None
    assert failure.detect_s < 1.0


@pytest.mark.parametrize("seed", range(20))
def test_killed_once_a_rank_has_stepped_the_iteration_counts(seed: int) -> None:
    """The victim is the first to step; its report is on the way before it dies, so the others finish that step."""
    result = run(seed, Disturbance("kill", "step", nth=2 * 4 + 1), pp=1, gpus_per_node=2)
    assert result.exit_code == 0
    assert committed(result) == [1, 2, 3, 4, 5, 6]
    replan = result.plans[1]
    assert replan.next_iteration == 4
    assert replan.finish is not None
    assert replan.finish.iteration == 3
    assert [a.order.finish for a in result.orders(m.Go)[1:] if isinstance(a.order, m.Go)] == [replan.finish]


def test_both_ways_to_count_are_seen_after_a_death_in_the_step() -> None:
    actions = set()
    for seed in range(40):
        result = run(seed, faults=("kill:rank=1@iteration=3,phase=step",))
        assert result.exit_code == 0
        assert committed(result) == [1, 2, 3, 4, 5, 6]
        actions.add(result.plans[1].action)
    assert actions == {"redo", "commit"}


@pytest.mark.parametrize("seed", FEW)
def test_survivors_are_told_to_park_in_the_answer_to_the_exit(seed: int) -> None:
    result = run(seed, faults=("kill:rank=1@iteration=3",))
    exits = [at for at, e in result.events if isinstance(e, api.WorkerExited) and e.rank == 1]
    parks = [(at, a) for at, a in result.actions if isinstance(a, api.Order) and isinstance(a.order, m.Park)]
    assert [(at, a.ranks) for at, a in parks] == [(exits[0], (0, 2, 3))]


@pytest.mark.parametrize("seed", FEW)
def test_an_interruption_is_accounted_once_when_it_is_over(seed: int) -> None:
    result = run(seed, faults=("kill:rank=1@iteration=3",))
    (entry,) = result.all(Reconfigured)
    assert (entry.failures, entry.attempts, entry.action) == ((1,), 1, result.plans[1].action)
    exits = [at for at, e in result.events if isinstance(e, api.WorkerExited) and e.rank == 1]
    ended = result.when(Reconfigured)[0]
    assert entry.seconds == pytest.approx(ended - exits[0])
    assert min(entry.park_s, entry.plan_s, entry.first_iteration_s) > 0
    assert entry.park_s + entry.plan_s + entry.first_iteration_s < entry.seconds
    commits = dict(zip(committed(result), result.when(IterationCommitted), strict=True))
    assert ended == commits[3]


@pytest.mark.parametrize("seed", FEW)
def test_the_journal_goes_ahead_of_what_it_tells(seed: int) -> None:
    result = run(seed, faults=("kill:rank=1@iteration=3",))
    actions = [action for _, action in result.actions]

    def first(holds: Any) -> int:
        return next(i for i, action in enumerate(actions) if holds(action))

    injected = first(lambda a: isinstance(a, api.Log) and isinstance(a.entry, FaultInjected))
    assert injected < first(lambda a: isinstance(a, api.SignalWorker))
    decided = first(lambda a: isinstance(a, api.Log) and isinstance(a.entry, PlanDecided) and a.entry.plan.epoch == 2)
    assert decided < first(
        lambda a: isinstance(a, api.Order) and isinstance(a.order, m.Propose) and a.order.plan.epoch == 2
    )


# --- nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["node", "vanish"])
def test_a_node_that_dies_is_one_failure(seed: int, kind: DisturbanceKind) -> None:
    result = run(seed, Disturbance(kind, "sync", nth=6, delay=0.1, rank=2), nodes=3, micro_batches=6)
    (failure,) = result.failures
    assert (failure.component, failure.node, failure.ranks) == ("node", "n2", (2, 3))
    assert [entry.node for entry in result.all(NodeLost)] == ["n2"]
    assert left(result.plans[-1]) == [(0, 1), (4, 5)]
    assert result.exit_code == 0
    ended = {entry.rank: entry.exit for entry in result.all(WorkerEnded)}
    assert (ended[2], ended[3]) == (None, None)


@pytest.mark.parametrize("seed", range(20))
def test_exits_that_the_agent_still_tells_of_belong_to_the_loss_of_its_node(seed: int) -> None:
    result = run(seed, Disturbance("agent", "sync", nth=6, delay=0.1, rank=2), nodes=3, micro_batches=6)
    named = [rank for entry in result.failures for rank in entry.ranks]
    assert sorted(named) == [2, 3]
    assert result.exit_code == 0


@pytest.mark.parametrize("seed", FEW)
def test_a_silent_node_is_suspected_then_given_up_within_six_seconds(seed: int) -> None:
    blackout = Disturbance("blackout", "sync", nth=6, delay=0.05, rank=2)
    result = run(seed, blackout, nodes=3, micro_batches=6, iterations=20)
    beat = max(at for at, e in result.events if isinstance(e, api.AgentBeat) and e.node == "n2")
    heard = max(beat, *(at for at, e in result.events if isinstance(e, api.WorkerSaid) and e.rank in (2, 3)))
    suspected = [at for at, e in result.entries if isinstance(e, Suspected) and e.node == "n2" and e.rank is None]
    assert suspected[0] - beat >= 3.0
    assert suspected[0] - heard <= 3.5
    assert suspected[0] < result.when(NodeLost)[0] <= heard + 6.5
    assert result.failures[0].component == "node"
    assert result.exit_code == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("iteration_s", [0.3, 1.0, 2.0])
def test_a_silent_control_connection_while_collectives_progress_is_left_alone(seed: int, iteration_s: float) -> None:
    silent = Disturbance("silent", "sync", nth=8, rank=2, seconds=20.0)
    result = run(seed, silent, iteration_s=iteration_s, iterations=round(40 / iteration_s))
    assert result.exit_code == 0
    assert result.failures == []
    assert result.orders(m.Park) == []
    assert not [a for _, a in result.actions if isinstance(a, api.DropNode | api.SignalWorker)]
    marks = [(entry.node, entry.cleared) for entry in result.all(Suspected) if entry.rank is None]
    assert marks == [("n2", False), ("n2", True)]


@pytest.mark.parametrize("seed", range(10))
def test_a_node_that_was_silent_while_it_computed_is_given_up_once_it_stops(seed: int) -> None:
    """That its peers went on proves that it computed then, not that it still does."""
    silent = Disturbance("silent", "sync", nth=8, rank=2)
    vanish = Disturbance("vanish", "sync", nth=8, delay=10.0, rank=2)
    result = run(seed, silent, vanish, nodes=3, micro_batches=6, iterations=60)
    assert [entry.node for entry in result.failures] == ["n2"]
    assert result.exit_code == 0


def test_a_reconnecting_agent_is_the_same_node() -> None:
    result = run(0, Disturbance("reconnect", "sync", nth=6, rank=2))
    assert len(result.all(NodeJoined)) == 2
    assert result.exit_code == 0
    assert result.failures == []


# --- failures during a transition ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("trigger", ["park", "parked", "propose", "go", "resumed"])
@pytest.mark.parametrize("kind", ["kill", "node"])
def test_a_second_death_during_the_transition(seed: int, trigger: Any, kind: DisturbanceKind) -> None:
    """Of four replicas the first loses rank 1, then the third is hit at each stage of the transition."""
    nth = {"park": 1, "parked": 1, "propose": 2, "go": 2, "resumed": 9}[trigger]
    first = Disturbance("kill", "sync", nth=9, delay=0.1, rank=1)
    second = Disturbance(kind, trigger, nth=nth, delay=0.01, rank=5)
    result = run(seed, first, second, nodes=4, iterations=8)
    assert result.exit_code == 0
    assert committed(result) == list(range(1, 9))
    assert left(result.plans[-1]) == [(2, 3), (6, 7)]
    assert {rank for failure in result.failures for rank in failure.ranks} == ({1, 5} if kind == "kill" else {1, 4, 5})
    epochs = [decided.plan.epoch for decided in result.plans]
    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize("seed", range(10))
def test_an_iteration_that_was_declared_committed_stays_so_when_its_only_witness_dies(seed: int) -> None:
    """Rank 0 steps first and reports it, the plan says `commit`; then rank 0 dies before the others have finished."""
    step = Disturbance("kill", "step", nth=2 * 8 + 1, rank=7)
    witness = Disturbance("kill", "propose", nth=2, delay=0.0, rank=0)
    result = run(seed, step, witness, nodes=4, pp=1, iterations=5)
    assert committed(result) == [1, 2, 3, 4, 5]
    assert result.exit_code == 0
    assert result.plans[-1].finish is not None


@pytest.mark.parametrize("seed", FEW)
def test_a_report_that_comes_after_the_decision_to_redo_is_void(seed: int) -> None:
    """Rank 1 died and iteration 3 is redone; a report of its step in the old epoch turns up afterwards."""
    fault = "kill:rank=1@iteration=3,phase=backward"
    result = run(seed, faults=(fault,))
    settings = Settings(job="local-1", nodes=2, gpus_per_node=2, tp=1, pp=2, faults=(parse(fault, 0),), **PLAIN)
    controller = Controller(settings, result.dependencies)
    third = next(entry.outcome for entry in result.all(IterationCommitted) if entry.outcome.iteration == 3)
    old = msgspec.structs.replace(third, gradient_norm=123.0)
    late = api.WorkerSaid(rank=1, message=m.Stepped(epoch=1, outcome=old, seconds=0.5, compute_s=0.5))
    gone = [at for at, a in result.actions if isinstance(a, api.Order) and isinstance(a.order, m.Go)][1]
    actions: list[tuple[float, api.AnyAction]] = []
    for at, event in result.events:
        actions += [(at, action) for action in controller.handle(event, at)]
        if at == gone:
            actions += [(at, action) for action in controller.handle(late, at)]
    assert actions == result.actions


@pytest.mark.parametrize("seed", FEW)
def test_the_last_replica_lost_ends_with_5_and_says_what_each_lost(seed: int) -> None:
    """Nobody is left who could have held a copy."""
    faults = ("kill:rank=0@iteration=2", "kill:rank=1@iteration=3", "kill:rank=2@iteration=4")
    result = run(seed, faults=faults, max_restarts=0)
    assert result.exit_code == 5
    assert committed(result) == [1, 2, 3]
    assert "was lost with rank" in result.reason
    assert "there is no checkpoint to continue from (--checkpoint-every N writes them)" in result.reason
    assert [text for text in result.said if text == result.reason] == [result.reason]
    assert len(result.failures) == 3


@pytest.mark.parametrize("seed", FEW)
def test_the_last_replica_may_lose_a_rank_while_another_one_holds_its_copy(seed: int) -> None:
    faults = ("kill:rank=1@iteration=3", "kill:rank=2@iteration=4")
    result = run(seed, faults=faults, planner="real")
    assert result.exit_code == 0
    assert committed(result) == [1, 2, 3, 4, 5, 6]
    assert set(result.plans[2].plan.layout.active) == {0, 3}
    assert len(result.failures) == 2


@pytest.mark.parametrize("seed", FEW)
def test_ten_deaths_at_once_are_no_reason_to_give_up_while_a_replica_is_whole(seed: int) -> None:
    deaths = [Disturbance("kill", "sync", nth=30, delay=0.01 * rank, rank=rank) for rank in range(10)]
    result = run(seed, *deaths, nodes=3, gpus_per_node=4, pp=1, micro_batches=12)
    assert result.exit_code == 0
    assert committed(result) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", FEW)
def test_a_standby_rank_that_dies_disturbs_nobody(seed: int) -> None:
    result = run(seed, Disturbance("kill", "sync", nth=6, rank=4), nodes=1, gpus_per_node=5)
    assert result.exit_code == 0
    assert result.orders(m.Park) == []


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("kind", ["kill", "stop", "hang"])
def test_a_loss_after_the_last_step_costs_no_iteration(seed: int, kind: DisturbanceKind) -> None:
    result = run(seed, Disturbance(kind, "finished", nth=1, rank=2))
    assert committed(result) == [1, 2, 3, 4, 5, 6]
    assert result.exit_code == 0


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("kind", ["stop", "hang", "vanish"])
def test_a_worker_that_does_not_leave_cannot_hold_the_end(seed: int, kind: DisturbanceKind) -> None:
    result = run(seed, Disturbance(kind, "halt", nth=1, rank=2))
    assert result.exit_code == 0
    assert committed(result) == [1, 2, 3, 4, 5, 6]


# --- hangs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_an_interpreter_held_for_ten_seconds_is_suspected_and_nothing_more(seed: int) -> None:
    result = run(seed, Disturbance("mute", "sync", nth=9, rank=2, seconds=10.0))
    assert result.exit_code == 0
    assert result.failures == []
    assert result.orders(m.Park) == []
    assert not [a for _, a in result.actions if isinstance(a, api.SignalWorker)]
    marks = [(entry.rank, entry.cleared) for entry in result.all(Suspected)]
    assert (2, False) in marks
    assert sorted(marks) == sorted((rank, cleared) for rank in {r for r, _ in marks} for cleared in (False, True))


@pytest.mark.parametrize("seed", range(10))
def test_a_stopped_process_is_fenced_then_a_failure(seed: int) -> None:
    result = run(seed, faults=("stop:rank=2@iteration=3",))
    (at,) = result.when(FaultInjected)
    fences = [(t, a) for t, a in result.actions if isinstance(a, api.SignalWorker) and a.signal == SIGKILL]
    assert [a.rank for _, a in fences] == [2]
    assert fences[0][0] - at < 8.0
    (failure,) = result.failures
    assert failure.ranks == (2,)
    assert "stopped" in failure.cause
    assert " is stopped, no progress for " in failure.evidence
    assert failure.evidence.endswith("; then killed by resihp (SIGKILL)"), "its end is our doing"
    assert result.exit_code == 0
    ended = {entry.rank: entry.exit for entry in result.all(WorkerEnded)}
    assert ended[2] == -SIGKILL


@pytest.mark.parametrize("seed", range(10))
def test_a_hang_is_given_up_after_fifteen_seconds_and_its_victims_are_spared(seed: int) -> None:
    result = run(seed, faults=("hang:rank=2@iteration=3",))
    (at,) = result.when(FaultInjected)
    fences = [(t, a) for t, a in result.actions if isinstance(a, api.SignalWorker)]
    assert [a.rank for _, a in fences] == [2]
    assert 15.0 <= fences[0][0] - at + 1.0 <= 18.0
    suspects = {entry.rank for entry in result.all(Suspected)}
    assert 2 in suspects
    assert result.exit_code == 0


@pytest.mark.parametrize("seed", FEW)
def test_a_rank_stopped_while_it_writes_a_checkpoint_is_noticed(seed: int) -> None:
    disturbance = Disturbance("stop", "step", nth=4 * 3, delay=0.05, rank=0)
    result = run(seed, disturbance, checkpoint_every=1)
    assert result.exit_code == 0
    assert [failure.ranks for failure in result.failures] == [(0,)]


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("trigger", ["park", "propose", "go"])
def test_a_rank_that_stops_answering_in_a_transition_is_fenced(seed: int, trigger: Any) -> None:
    first = Disturbance("kill", "sync", nth=9, delay=0.1, rank=1)
    second = Disturbance("hang", trigger, nth=1 if trigger == "park" else 2, rank=5)
    result = run(seed, first, second, nodes=4, iterations=8)
    assert result.exit_code == 0
    assert left(result.plans[-1]) == [(2, 3), (6, 7)]


# --- communication ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["broken", "deadlock"])
def test_broken_communication_with_everybody_alive_is_rebuilt_with_everybody(seed: int, kind: DisturbanceKind) -> None:
    result = run(seed, Disturbance(kind, "sync", nth=9, delay=0.3, rank=2), iteration_s=1.0)
    assert result.exit_code == 0
    assert committed(result) == [1, 2, 3, 4, 5, 6]
    if len(result.plans) == 1:
        assert kind == "broken"  # the rank was computing, and its transfers never broke
        return
    (failure,) = result.failures
    assert (failure.kind, failure.component) == ("communication", "link")
    assert result.plans[1].plan.layout == result.plans[0].plan.layout
    if kind == "broken":
        stuck = [at for at, e in result.events if isinstance(e, api.WorkerSaid) and isinstance(e.message, m.Stuck)]
        parks = [at for at, a in result.actions if isinstance(a, api.Order) and isinstance(a.order, m.Park)]
        assert parks[0] - stuck[0] < 1.5


@pytest.mark.parametrize("seed", range(20))
def test_peers_that_get_stuck_on_a_dead_rank_make_no_failure_of_their_own(seed: int) -> None:
    result = run(seed, Disturbance("kill", "sync", nth=9, delay=0.2, rank=1), breaks_loudly=1.0, latency_s=0.2)
    assert [failure.kind for failure in result.failures] == ["fail-stop"]


def test_a_stuck_report_of_an_older_epoch_changes_nothing() -> None:
    result = run(0, faults=("kill:rank=1@iteration=3",))
    controller = Controller(
        Settings(
            job="local-1", nodes=2, gpus_per_node=2, tp=1, pp=2, faults=(parse("kill:rank=1@iteration=3", 0),), **PLAIN
        )
    )
    resumed = next(at for at, a in result.actions if isinstance(a, api.Say) and "resumed" in a.text)
    for at, event in result.events:
        controller.handle(event, at)
        if at == resumed:
            break
    late = api.WorkerSaid(rank=2, message=m.Stuck(epoch=1, error="late"))
    assert controller.handle(late, resumed) == []
    assert not [a for a in controller.handle(api.Tick(), resumed + 1.0) if isinstance(a, api.Order)]


# --- the training script ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("trigger", ["declare", "sync"])
@pytest.mark.parametrize("shape", [(2, 2), (3, 4)])
def test_the_same_exception_everywhere_ends_with_93_and_blames_no_device(
    seed: int, trigger: Any, shape: tuple[int, int]
) -> None:
    nodes, gpus = shape
    nth = 1 if trigger == "sync" else nodes * gpus
    result = run(seed, Disturbance("raise_all", trigger, nth=nth), nodes=nodes, gpus_per_node=gpus, micro_batches=12)
    assert result.exit_code == 93
    assert "ValueError: bad sample" in result.reason
    assert any("Traceback" in text for text in result.said)
    assert all(failure.kind == "program" and failure.node is None for failure in result.failures)


@pytest.mark.parametrize("seed", FEW)
def test_an_exception_on_one_rank_is_a_failure_of_the_script_and_costs_its_replica(seed: int) -> None:
    result = run(seed, faults=("raise:rank=1@iteration=3",))
    assert result.exit_code == 0
    (failure,) = result.failures
    assert (failure.kind, failure.component, failure.ranks) == ("program", "script", (1,))
    assert (failure.node, failure.device) == (None, None)
    assert left(result.plans[-1]) == [(2, 3), (0,)]
    assert result.plans[-1].plan.mirroring == {0}


@pytest.mark.parametrize("seed", FEW)
def test_an_exception_that_follows_the_sample_to_another_rank_ends_with_93(seed: int) -> None:
    first = Disturbance("raise_all", "sync", nth=9)
    result = run(seed, first)
    assert result.exit_code == 93


def test_an_exception_on_one_rank_before_training_is_its_devices_and_not_the_scripts() -> None:
    result = adapt(0, Disturbance("raise", "declare", nth=1, rank=2))
    assert result.exit_code == 0
    (failure,) = result.failures
    assert (failure.kind, failure.component, failure.node, failure.device) == ("fail-stop", "process", "n2", 0)
    assert failure.cause == "rank 2 raised ValueError: rank 2 is odd"
    assert not [a for _, a in result.actions if isinstance(a, api.StartWorkers) and a.joins]


@pytest.mark.parametrize("another", [True, False])
def test_the_only_rank_with_work_raises_while_another_is_about_to_get_some_and_the_script_is_not_to_blame(
    another: bool,
) -> None:
    """93 has nobody run it again, nor any later job of its chain: one that might not have raised has to be tried."""
    long = msgspec.structs.replace(DECLARE, iterations=1000)
    job = Direct(nodes=1, pp=1, declare=long, iteration_s=5.0).run(1)
    job.crash(1)
    job.park(stepped=1)
    job.run(1)
    assert job.job.record.active == (0,)
    if another:
        job.join(2)
        job.step(3, pause=True)
        job.park(2, stepped=0, epoch=3)
        job.park(0, stepped=3, epoch=3)
        assert job.plan.layout.active == (0, 2)
        job.confirm()
    job.say(0, m.Raised(iteration=4, error="ValueError: odd", traceback="Traceback"))
    job.crash(0, 1)
    job.park(stepped=0)
    assert job.end is not None
    assert job.end.exit_code == (5 if another else 93)


@pytest.mark.parametrize("seed", FEW)
def test_an_old_exception_does_not_put_the_blame_for_a_later_death_on_the_script(seed: int) -> None:
    """Rank 1 raises in iteration 2 and training goes on without it; rank 2, alone by then, is killed in iteration 5."""
    faults = ("raise:rank=1@iteration=2", "kill:rank=0@iteration=5")
    result = run(seed, faults=faults, nodes=1, gpus_per_node=2, pp=1)
    assert result.exit_code == 5


# --- faults on purpose --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill:rank=1@iteration=9", "kill:node=n7@iteration=2", "kill:rank=77@iteration=2"])
def test_a_fault_that_never_fired_fails_the_run_and_is_named(fault: str) -> None:
    result = run(0, faults=(fault,))
    assert result.exit_code == 1
    assert str(parse(fault, 0)) in result.reason
    assert committed(result) == [1, 2, 3, 4, 5, 6]


def test_a_fault_whose_target_was_already_gone_did_not_fire() -> None:
    result = run(0, faults=("kill:rank=1@iteration=3", "kill:rank=1@iteration=4"))
    assert result.exit_code == 1
    assert "kill:rank=1@iteration=4" in result.reason
    assert "iteration=3" not in result.reason
    assert [entry.fault for entry in result.all(FaultInjected)] == [0]


@pytest.mark.parametrize("seed", range(10))
def test_a_fault_fires_once_however_often_its_moment_comes(seed: int) -> None:
    """Iteration 3 is redone after the fault, and every report of its moment is delivered twice."""
    result = run(seed, faults=("kill:rank=1@iteration=3",), duplicates=1.0)
    assert len(result.all(FaultInjected)) == 1
    assert len([a for _, a in result.actions if isinstance(a, api.SignalWorker)]) == 1
    assert result.exit_code == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_fault_on_a_standby_rank_is_carried_out_when_the_first_rank_comes_by(seed: int, kind: str) -> None:
    result = run(seed, faults=(f"{kind}:rank=4@iteration=2",), nodes=1, gpus_per_node=5)
    assert [entry.rank for entry in result.all(FaultInjected)] == [4]
    assert committed(result) == [1, 2, 3, 4, 5, 6]
    assert result.exit_code == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["kill", "crash"])
def test_a_fault_on_a_node_takes_the_node(seed: int, kind: str) -> None:
    result = run(seed, faults=(f"{kind}:node=n2@iteration=3,phase=backward",), nodes=3, micro_batches=6)
    assert len(result.all(FaultInjected)) == 1
    assert {rank for failure in result.failures for rank in failure.ranks} == {2, 3}
    assert result.exit_code == 0
    assert left(result.plans[-1]) == [(0, 1), (4, 5)]


def test_an_operator_is_answered() -> None:
    result = run(0, Disturbance("inject", "sync", nth=9, rank=1))
    (reply,) = [a for _, a in result.actions if isinstance(a, api.Reply)]
    assert reply.ok
    assert "rank=1" in reply.text
    assert len(result.all(FaultInjected)) == 1
    twice = run(
        0, Disturbance("kill", "sync", nth=5, rank=1), Disturbance("inject", "sync", nth=15, rank=1), iterations=10
    )
    (reply,) = [a for _, a in twice.actions if isinstance(a, api.Reply)]
    assert not reply.ok
    assert "already gone" in reply.text


# --- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(SIGTERM, 143), (SIGINT, 130)])
@pytest.mark.parametrize("trigger", ["spawn", "go", "sync", "park", "parked"])
def test_a_signal_ends_the_run_and_blames_nobody(number: int, code: int, trigger: Any) -> None:
    kill = Disturbance("kill", "sync", nth=9, delay=0.1, rank=1)
    result = run(0, kill, Disturbance("signal", trigger, nth=1, delay=0.01, status=number))
    assert result.exit_code == code
    assert result.all(JobEnded)[0].state == "cancelled"
    assert all(failure.ranks == (1,) for failure in result.failures)
    assert not result.workers_leave


def test_a_signal_that_means_nothing_here_is_ignored() -> None:
    assert run(0, Disturbance("signal", "sync", nth=3, status=1)).exit_code == 0


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", FEW)
def test_a_checkpoint_is_complete_once_its_writers_are_and_its_iteration_counts(seed: int) -> None:
    result = run(seed, checkpoint_every=2)
    commits = dict(zip(committed(result), result.when(IterationCommitted), strict=True))
    done = [(at, a) for at, a in result.actions if isinstance(a, api.CommitCheckpoint)]
    assert [a.iteration for _, a in done] == [2, 4, 6]
    for at, action in done:
        assert sorted(file for file, _ in action.parts) == ["epoch-1-rank-0", "epoch-1-rank-1"]
        assert at >= commits[action.iteration]
