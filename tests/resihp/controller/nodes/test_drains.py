"""Nodes with a verdict are drained, lost ones given back, new ones asked for: when, how often, and when not."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.nodes import replacements
from resihp.controller.nodes.replacements import LEAVING_S, RETRY_AFTER_S
from resihp.controller.nodes.upkeep import DRAIN_PATIENCE_S
from resihp.controller.planning import first_plan, next_plan
from resihp.detector.diagnosis.clues import read_log
from resihp.errors import NotEnoughDevicesError
from resihp.faults import parse
from resihp.protocol import messages as m
from resihp.record.journal import (
    AnyEntry,
    ChangeDeclined,
    DrainAnswered,
    DrainDecided,
    DrainWaived,
    FailureFound,
    NodeJoined,
    NodeLost,
    NodeReleased,
    ReplacementAsked,
    ReplacementChanged,
    SlurmSaw,
    Suspected,
    WorkerStarted,
)
from resihp.simulator.scenarios.scenario import SIGTERM, SIGUSR2
from tests.resihp.controller.direct import DECLARE, Direct

AGENT = "its agent was killed by SIGKILL"
LONG = msgspec.structs.replace(DECLARE, iterations=1000)


class Job(Direct):
    """A job in a Slurm allocation: TP2 x PP2 x DP2 on four nodes of two unless told otherwise, n1 is the batch host."""

    def __init__(self, **changes: Any) -> None:
        options: dict[str, Any] = {
            "nodes": 4,
            "tp": 2,
            "pp": 2,
            "declare": LONG,
            "slurm": True,
            "drains_left": 2,
            "replacements": 2,
            "batch_node": "n1",
            "replacement_wait_s": 5.0,
        }
        super().__init__(**options | changes)

    def lose(self, *names: str, reason: str = "connection closed for 1 s", stepped: int | None = None) -> None:
        """These nodes are gone, everybody else parks, and training goes on."""
        for name in names:
            how: Any = "agent" if reason.startswith("its agent ") else "silent"
            self.feed(api.AgentLost(node=name, reason=reason, how=how))
        self.settle(stepped)

    def settle(self, stepped: int | None = None) -> None:
        self.park(stepped=self.job.record.committed if stepped is None else stepped)
        self.run(1)

    def train(self, seconds: float) -> None:
        """Time passes, and iterations with it, about half a second each."""
        until = self.now + seconds
        while self.now < until:
            for name in [name for name, node in self.job.nodes.items() if node.alive]:
                self.feed(api.AgentBeat(node=name, beat=m.Beat(workers=())), 0.0)
            self.feed(api.Tick(), 0.5)
            if self.job.training and self.job.pause is None:
                self.step(self.job.record.committed + 1)

    def asked(self, kind: type) -> list[Any]:
        """Actions of a kind."""
        return [action for action in self.actions if isinstance(action, kind)]

    def news(self, replacement: int, state: Any, slurm_job: str | None = "17", node: str | None = None) -> None:
        text = "" if state in ("pending", "running") else "no such partition"
        self.feed(api.ReplacementNews(replacement=replacement, state=state, slurm_job=slurm_job, node=node, text=text))

    def arrive(self, node: str, lease: int, hardware: str = "") -> list[api.AnyAction]:
        inventory = m.Inventory()
        return self.feed(
            api.AgentJoined(node=node, host="h", devices=2, lease=lease, hardware=hardware, inventory=inventory)
        )

    def let_in(self, *ranks: int) -> None:
        """Newcomers declare, everybody pauses for them, and training goes on with them."""
        for rank in ranks:
            self.join(rank)
        epoch = self.job.epoch + 1
        done = self.job.record.committed + 1
        self.step(done, pause=True)
        active = self.job.record.active
        for rank in self.job.ready:
            if rank not in active:
                self.park(rank, stepped=0, epoch=epoch)
        self.park(active[0], stepped=done, epoch=epoch)
        self.park(stepped=done)
        self.run(1)


def trained(**changes: Any) -> Job:
    job = Job(**changes)
    job.run(1)
    job.train(5)
    return job


def breaks(job: Job, rank: int) -> None:
    """The process of a rank dies, and says that its device is broken."""
    line = f"NVRM: Xid (PCI:0000:b3:00): 79, pid={job.job.members[rank].pid}, GPU has fallen off the bus."
    job.feed(api.WorkerExited(rank=rank, status=-6, clues=read_log(line)))


def decisions(job: Job) -> list[tuple[str, str, str]]:
    return [(entry.node, entry.measure, entry.grounds) for entry in job.all(DrainDecided)]


def states(job: Direct, replacement: int = 1) -> list[str]:
    return [entry.state for entry in job.all(ReplacementChanged) if entry.replacement == replacement]


# --- drains -------------------------------------------------------------------------------------------------------


def test_a_node_that_died_is_left_out_of_its_users_jobs_and_not_drained() -> None:
    """Slurm marks it down, and takes it back after a reboot: a drain would keep it out until a human comes."""
    job = trained()
    job.lose("n3")
    assert job.asked(api.DrainNode) == [], "another node may yet tell that something else is behind it"
    job.train(3)
    (drain,) = job.asked(api.DrainNode)
    reason = "job local-1 lost rank 4, 5: connection closed for 1 s"
    assert drain == api.DrainNode(drain=1, node="n3", reason=reason, measure="exclude", grounds="died")
    assert any("n3: excluded from your next jobs, not drained" in action.text for action in job.asked(api.Say))


def test_a_node_that_dies_again_under_the_same_slurm_job_is_drained() -> None:
    job = trained(died_before=("n2", "n3"))
    job.lose("n3")
    job.train(3)
    assert decisions(job) == [("n3", "drain", "died again")]


def test_a_node_whose_device_is_broken_is_drained_with_a_reason_that_its_owner_can_use() -> None:
    job = trained()
    breaks(job, 5)
    job.settle()
    job.train(3)
    (drain,) = job.asked(api.DrainNode)
    reason = "job local-1 lost rank 5: GPU has fallen off the bus (Xid 79)"
    assert drain == api.DrainNode(drain=1, node="n3", reason=reason)
    (failure,) = job.all(FailureFound)
    assert job.all(DrainDecided) == [DrainDecided(drain=1, node="n3", failure=failure.failure, reason=drain.reason)]
    decided = next(i for i, a in enumerate(job.actions) if isinstance(a, api.Log) and isinstance(a.entry, DrainDecided))
    assert decided < job.actions.index(drain), "written ahead"


def test_a_node_with_a_dead_device_is_drained_and_works_on_with_the_others() -> None:
    job = trained(faults=(parse("kill:rank=5@iteration=30", 0),))
    job.say(5, m.FaultDue(fault=0))
    job.crash(5)
    job.settle()
    job.train(20)
    assert [(d.node, d.reason) for d in job.asked(api.DrainNode)] == [
        ("n3", "job local-1 lost rank 5: killed by signal 9 (SIGKILL)")
    ]
    assert job.asked(api.ReleaseNode) == []
    assert job.job.nodes["n3"].alive


def test_a_process_that_dies_is_no_verdict_on_its_node() -> None:
    job = trained()
    job.crash(5)
    job.settle()
    job.train(20)
    assert len(job.all(FailureFound)) == 1
    assert job.asked(api.DrainNode) == []


def test_a_suspicion_drains_nobody() -> None:
    job = trained()
    for _ in range(20):
        job.feed(api.Tick(), 0.25)
    assert "n3" in [entry.node for entry in job.all(Suspected)]
    assert job.asked(api.DrainNode) == []


@pytest.mark.parametrize("together", [False, True])
def test_a_node_that_goes_with_its_device_is_drained_for_the_device(together: bool) -> None:
    job = trained()
    breaks(job, 5)
    if not together:
        job.settle()
    job.lose("n3")
    job.train(5)
    assert decisions(job) == [("n3", "drain", "hardware")]
    assert "Xid 79" in job.all(DrainDecided)[0].reason


@pytest.mark.parametrize("changes", [{"slurm": False}, {"batch_node": "n3"}])
def test_nothing_is_done_without_slurm_and_to_the_batch_host(changes: dict[str, Any]) -> None:
    job = trained(**changes)
    job.lose("n3")
    job.train(20)
    assert job.job.training
    assert job.asked(api.DrainNode) == []
    assert job.all(DrainDecided) == []


def test_a_job_drains_no_more_nodes_than_it_may() -> None:
    job = trained(nodes=6, drains_left=1)
    job.lose("n2")
    job.train(5)
    for rank in (5, 7):
        breaks(job, rank)
        job.settle()
        job.train(5)
    assert decisions(job) == [("n2", "exclude", "died"), ("n3", "drain", "hardware"), ("n4", "exclude", "hardware")]


@pytest.mark.parametrize("reason", ["its agent was killed by SIGKILL", "silent for 6.0 s, no progress without it"])
def test_nodes_that_are_lost_together_are_not_to_blame(reason: str) -> None:
    job = trained(nodes=6)
    job.lose("n3", "n4", reason=reason)
    job.train(20)
    assert job.asked(api.DrainNode) == []


def test_a_node_that_answers_is_left_out_for_its_agents_end_and_never_drained() -> None:
    job = trained(died_before=("n3",))
    job.lose("n3", reason="its agent was killed by SIGKILL")
    job.train(5)
    assert decisions(job) == [("n3", "exclude", "agent")]


def test_a_node_is_decided_about_once() -> None:
    """It is drained for its device; that it dies later adds nothing."""
    job = trained()
    breaks(job, 5)
    job.settle()
    job.train(5)
    job.lose("n3")
    job.train(5)
    assert decisions(job) == [("n3", "drain", "hardware")]
    assert [entry.node for entry in job.all(DrainWaived)] == ["n3"]
    assert len(job.asked(api.DrainNode)) == 1


def test_what_was_decided_about_is_no_common_cause_for_a_new_supervisor() -> None:
    job = trained(nodes=6)
    job.lose("n3")
    job.train(5)
    job.lose("n4")
    recovered(job)
    job.train(3)
    assert [action.node for action in job.asked(api.DrainNode) if action.node == "n4"] == ["n4"]


def test_what_the_rungs_answer_is_remembered_once() -> None:
    job = trained()
    job.lose("n3")
    job.train(3)
    step = api.DrainStep(drain=1, node="n3", step="slurm", outcome="refused", text="not an operator")
    asked = msgspec.structs.replace(step, step="spool", outcome="done", text="requested")
    for event in (step, step, asked, msgspec.structs.replace(asked, outcome="unknown"), asked):
        job.feed(event)
    job.feed(msgspec.structs.replace(step, drain=9))
    assert [(e.step, e.outcome) for e in job.all(DrainAnswered)] == [("slurm", "refused"), ("spool", "done")]


# --- giving nodes back --------------------------------------------------------------------------------------------


def test_a_lost_node_is_given_back_once_it_is_drained() -> None:
    job = trained(died_before=("n3",))
    job.lose("n3")
    job.feed(api.SlurmSees(node="n3", state="down", reason="Not responding"))
    job.train(3)
    job.feed(api.DrainStep(drain=1, node="n3", step="slurm", outcome="refused", text="not an operator"))
    assert job.asked(api.ReleaseNode) == []
    answer = job.feed(api.DrainStep(drain=1, node="n3", step="spool", outcome="done", text=""))
    assert api.ReleaseNode(node="n3", keep=("n1", "n2", "n4")) in answer
    job.feed(api.ReleaseAnswered(node="n3", outcome="done", text=""))
    job.train(500)
    assert len(job.asked(api.ReleaseNode)) == 1
    assert job.all(NodeReleased) == [NodeReleased(node="n3", outcome="done", text="")]


def test_a_drain_that_is_not_answered_does_not_hold_a_node_for_ever() -> None:
    job = trained(died_before=("n3",))
    job.lose("n3")
    job.feed(api.SlurmSees(node="n3", state="down+not_responding", reason="Not responding"))
    job.train(9)
    assert job.asked(api.ReleaseNode) == []
    job.train(5)
    assert len(job.asked(api.ReleaseNode)) == 1


def test_a_dead_node_is_kept_until_slurm_knows_that_it_is_dead() -> None:
    """Given back sooner, it would be the next job's, whoever's that is."""
    job = trained()
    job.lose("n3")
    job.train(60)
    assert job.asked(api.ReleaseNode) == []
    job.feed(api.SlurmSees(node="n3", state="allocated+not_responding", reason=""))
    assert [action.node for action in job.asked(api.ReleaseNode)] == ["n3"]


def test_a_node_of_which_slurm_never_says_that_it_is_dead_is_given_back_in_the_end() -> None:
    job = trained()
    job.lose("n3")
    job.train(320)
    assert job.asked(api.ReleaseNode) == []
    job.train(15)
    assert [action.node for action in job.asked(api.ReleaseNode)] == ["n3"]


def test_a_node_that_answers_is_given_back_at_once() -> None:
    job = trained()
    job.lose("n3", reason="its agent was killed by SIGKILL")
    job.train(3)
    assert [action.node for action in job.asked(api.ReleaseNode)] == ["n3"]


def test_a_refusal_is_not_now() -> None:
    job = trained(drains_left=0)
    job.lose("n3", reason=AGENT)
    times = []
    for _ in range(600):
        seen = len(job.asked(api.ReleaseNode))
        job.train(1)
        if len(job.asked(api.ReleaseNode)) > seen:
            times.append(job.now)
            job.feed(api.ReleaseAnswered(node="n3", outcome="refused", text="DB index is being set"))
    pauses = [later - sooner for sooner, later in pairwise(times)]
    assert [round(pause, -1) for pause in pauses] == [10, 60, 300]
    assert [entry.outcome for entry in job.all(NodeReleased)] == ["refused"]
    assert job.job.training


def test_a_later_try_may_succeed() -> None:
    job = trained(drains_left=0)
    job.lose("n3", reason=AGENT)
    job.train(3)
    job.feed(api.ReleaseAnswered(node="n3", outcome="unknown", text="no answer"))
    job.train(12)
    job.feed(api.ReleaseAnswered(node="n3", outcome="done", text=""))
    assert [entry.outcome for entry in job.all(NodeReleased)] == ["unknown", "done"]


def test_the_batch_host_is_never_given_back_and_always_kept() -> None:
    job = trained(nodes=6, batch_node="n3", drains_left=0)
    job.lose("n3", reason=AGENT)
    job.train(20)
    assert job.asked(api.ReleaseNode) == []
    job.lose("n4", reason=AGENT)
    job.train(20)
    assert [(a.node, a.keep) for a in job.asked(api.ReleaseNode)] == [("n4", ("n1", "n2", "n3", "n5", "n6"))]


def test_a_node_whose_last_device_died_is_given_back() -> None:
    job = trained(nodes=4, gpus=1, tp=1, pp=2, faults=(parse("kill:rank=2@iteration=30", 0),))
    job.say(2, m.FaultDue(fault=0))
    assert job.all(NodeLost) == [], "its process is still there"
    job.crash(2)
    job.settle()
    job.train(20)
    assert [entry.node for entry in job.all(NodeLost)] == ["n3"]
    assert [action.node for action in job.asked(api.DropNode)] == ["n3"]
    assert [action.node for action in job.asked(api.DrainNode)] == ["n3"]
    assert [action.keep for action in job.asked(api.ReleaseNode)] == [("n1", "n2", "n4")]
    assert len(job.all(FailureFound)) == 1
    assert [entry.node for entry in job.all(ReplacementAsked)] == ["n3"]


# --- Slurm's view -------------------------------------------------------------------------------------------------


def test_slurm_is_asked_about_a_lost_node_and_its_view_is_remembered_when_it_changes() -> None:
    job = trained()
    job.lose("n3")
    assert [action.node for action in job.asked(api.WatchNode)] == ["n3"]
    for state in ("allocated", "allocated", "down", "down", "idle"):
        job.feed(api.SlurmSees(node="n3", state=state, reason="Not responding" if state == "down" else ""))
    assert [(e.state, e.text) for e in job.all(SlurmSaw)] == [("down", "Not responding"), ("idle", "")]
    assert not job.job.nodes["n3"].alive, "a node that comes back stays left out"
    assert any("Slurm reports it idle again" in a.text for a in job.asked(api.Say))


@pytest.mark.parametrize("state", ["down", "down+not_responding", "idle+fail", "allocated+drain"])
def test_our_own_observation_of_a_node_wins_over_slurms(state: str) -> None:
    job = trained()
    before = len(job.actions)
    job.feed(api.SlurmSees(node="n3", state=state, reason="health check"))
    kinds = [type(action).__name__ for action in job.actions[before:]]
    assert kinds == ["Log", "Say"]
    assert job.job.nodes["n3"].alive


def test_a_node_that_is_well_again_for_slurm_was_never_done_without() -> None:
    job = trained()
    for state in ("allocated+drain", "allocated"):
        job.feed(api.SlurmSees(node="n3", state=state, reason=""))
    assert [e.state for e in job.all(SlurmSaw)] == ["allocated+drain", "allocated"]
    assert not any("goes on without it" in a.text for a in job.asked(api.Say))


def administrator_drains(job: Job, node: str = "n3", reason: str = "disk is failing") -> None:
    job.feed(api.SlurmSees(node=node, state="allocated+drain", reason=reason))


def pauses(job: Job) -> None:
    """Everybody stops after the iteration under way, and goes on with the next plan."""
    assert job.job.pause is not None
    done = job.job.record.committed + 1
    job.step(done, pause=True)
    for rank in job.job.ready:
        job.park(rank, stepped=done if rank in job.job.record.active else 0, epoch=job.job.epoch + 1)
        if job.job.pause is None:
            break
    job.park(stepped=done)
    job.run(1)


def test_a_node_that_an_administrator_drains_is_left_between_two_iterations_and_given_back() -> None:
    job = trained(on_drain="vacate")
    administrator_drains(job)
    assert any(order.order.after_iteration for order in job.asked(api.Order) if isinstance(order.order, m.Park))
    assert job.job.nodes["n3"].alive
    pauses(job)
    job.train(5)
    assert {4, 5}.isdisjoint(job.job.record.active)
    reason = "released because an administrator drains it: disk is failing"
    assert [(entry.node, entry.reason) for entry in job.all(NodeLost)] == [("n3", reason)]
    assert [action.node for action in job.asked(api.DropNode)] == ["n3"]
    assert [(a.node, a.keep) for a in job.asked(api.ReleaseNode)] == [("n3", ("n1", "n2", "n4"))]
    assert job.all(FailureFound) == []
    assert job.all(DrainDecided) == []
    assert [entry.node for entry in job.all(ReplacementAsked)] == ["n3"], "as for any node that is missing"
    recovered(job)
    job.train(3)
    assert job.all(FailureFound) == [], "nor does a new supervisor see one"
    assert job.job.training


def test_who_stands_by_on_a_node_that_is_drained_no_longer_has_work_again() -> None:
    """Found by the fuzz (allocated 2969): the plan that does without it was on its way already."""
    job = trained(on_drain="vacate", declare=msgspec.structs.replace(DECLARE, iterations=10_000))
    administrator_drains(job)
    done = job.job.record.committed + 1
    job.step(done, pause=True)
    for rank in job.job.ready:
        job.park(rank, stepped=done, epoch=job.job.epoch + (job.job.pause is not None))
    assert {4, 5}.isdisjoint(job.plan.layout.active)
    job.feed(api.SlurmSees(node="n3", state="allocated", reason=""))
    job.run(1)
    assert job.job.pause is not None
    assert job.job.pause.reason.startswith("node n3 is no longer drained: saves ")
    pauses(job)
    assert {4, 5} <= set(job.job.record.active)
    assert job.all(NodeLost) == []


def test_a_node_is_not_left_that_the_job_drains_itself_or_that_is_undrained_in_time() -> None:
    job = trained(on_drain="vacate")
    administrator_drains(job, reason="resihp: job local-1 lost rank 4: Xid 79")
    job.train(5)
    assert job.job.pause is None
    administrator_drains(job, node="n2")
    job.feed(api.SlurmSees(node="n2", state="allocated", reason=""))
    pauses(job)
    job.train(5)
    assert job.all(NodeLost) == []


@pytest.mark.parametrize("changes", [{"on_drain": "stay"}, {"batch_node": "n3"}])
def test_a_drained_node_trains_on(changes: dict[str, Any]) -> None:
    job = trained(**{"on_drain": "vacate", **changes})
    administrator_drains(job)
    job.train(20)
    assert job.all(NodeLost) == []
    assert len(job.job.record.active) == 8
    assert any(a.text.endswith("; its agent answers, it keeps training") for a in job.asked(api.Say))


def test_a_drained_node_that_the_layout_cannot_do_without_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(*_: object) -> None:
        raise NotEnoughDevicesError("the model does not fit")

    job = trained(on_drain="vacate")
    monkeypatch.setattr(next_plan, "best", impossible)
    administrator_drains(job)
    job.train(20)
    assert job.job.pause is None
    assert len(job.job.record.active) == 8
    told = [a.text for a in job.asked(api.Say) if "the layout needs it" in a.text]
    assert told == ["node n3: is drained, but the layout needs it; it keeps training"]


def test_a_drained_node_that_trains_on_is_part_of_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(*_: object) -> None:
        raise NotEnoughDevicesError("the model does not fit")

    job = trained(on_drain="vacate")
    with monkeypatch.context() as patched:
        patched.setattr(next_plan, "best", impossible)
        administrator_drains(job)
    job.crash(0)
    job.settle()
    assert {4, 5} <= set(job.job.record.active)


def test_a_drained_node_that_is_needed_after_all_trains_on() -> None:
    """All others are lost on the way."""
    job = trained(nodes=2, pp=1, on_drain="vacate", replacements=0)
    administrator_drains(job, node="n2")
    assert job.job.pause is not None
    job.lose("n1")
    job.train(5)
    assert job.job.record.active == (2, 3)
    assert job.job.training
    assert [entry.node for entry in job.all(NodeLost)] == ["n1"]
    told = [a.text for a in job.asked(api.Say) if "the layout needs it" in a.text]
    assert told == ["node n2: is drained, but the layout needs it; it keeps training"]


def test_a_healthy_view_is_not_worth_a_word() -> None:
    job = trained()
    for node in ("n1", "n2", "n3", "n4"):
        job.feed(api.SlurmSees(node=node, state="mixed", reason=""))
    assert job.all(SlurmSaw) == []


# --- replacements -------------------------------------------------------------------------------------------------


def test_a_node_is_asked_for_when_training_is_below_its_first_layout() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    (asked,) = job.all(ReplacementAsked)
    assert (asked.replacement, asked.node, asked.excluded) == (1, "n3", ("n1", "n2", "n3", "n4"))
    assert re.fullmatch(
        r"6 of 8 ranks have work; another node after 5 s of waiting and 10 s of joining: saves \d+.\d % per iteration, "
        r"[\d.]+ s of the remaining time; switching costs 0.\d+ s",
        asked.reason,
    )
    assert job.asked(api.AskReplacement) == [api.AskReplacement(replacement=1, exclude=("n1", "n2", "n3", "n4"))]
    job.train(100)
    assert len(job.all(ReplacementAsked)) == 1, "one open request for a missing node"


@pytest.mark.parametrize("changes", [{"slurm": False}, {"replacements": 0}])
def test_no_node_is_asked_for_that_the_job_may_not_have(changes: dict[str, Any]) -> None:
    job = trained(**changes)
    job.lose("n3")
    job.train(100)
    assert job.all(ReplacementAsked) == []


def test_no_node_is_asked_for_when_a_spare_fills_the_gap() -> None:
    job = trained(nodes=5, spares=1)
    assert len(job.job.record.active) == 8
    job.lose("n3")
    job.train(100)
    assert len(job.job.record.active) == 8
    assert job.all(ReplacementAsked) == []


def test_no_node_is_asked_for_when_only_a_process_died() -> None:
    job = trained(come_backs=0)
    job.crash(5)
    job.settle()
    job.train(100)
    assert len(job.job.record.active) < 8
    assert job.all(ReplacementAsked) == []


@pytest.mark.parametrize(("left_s", "asked"), [(None, 1), (2000.0, 1), (1000.0, 0)])
def test_no_node_is_asked_for_when_too_little_time_is_left(left_s: float | None, asked: int) -> None:
    job = trained()
    job.feed(api.TimeLeft(seconds=left_s))
    job.lose("n3")
    job.train(20)
    assert len(job.all(ReplacementAsked)) == asked
    why = "less than 30 min is left until the job's time limit (slurm.replacement_min_left)"
    told = [(entry.reason, entry.why) for entry in job.all(ChangeDeclined) if entry.about == "node"]
    assert told == ([] if asked else [("node n3 lost", why)])


def test_no_node_is_asked_for_in_the_last_iterations() -> None:
    job = trained(declare=msgspec.structs.replace(DECLARE, iterations=25))
    job.lose("n3")
    job.train(3)
    assert 0 < job.job.record.goal - job.job.record.committed < 20
    assert job.all(ReplacementAsked) == []


def test_whether_a_node_is_worth_it_is_weighed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the planner; and events are many."""
    asked_at: list[float] = []
    weigh = first_plan.choose_again
    job = trained(replacement_wait_s=1e6)
    monkeypatch.setattr(first_plan, "choose_again", lambda of: asked_at.append(of.now) or weigh(of))
    job.lose("n3")
    job.train(2 * RETRY_AFTER_S)
    assert len(asked_at) == 2
    assert asked_at[1] - asked_at[0] >= RETRY_AFTER_S


def test_no_node_is_asked_for_that_would_come_too_late() -> None:
    """About 20 s of training are left; 5 s of waiting and 10 s of joining leave some use, 50 s none."""
    few = msgspec.structs.replace(DECLARE, iterations=100)
    for wait_s, asked in ((5.0, 1), (50.0, 0)):
        job = trained(declare=few, replacement_wait_s=wait_s)
        job.lose("n3")
        job.train(20)
        assert len(job.all(ReplacementAsked)) == asked
        told = [(entry.about, entry.reason) for entry in job.all(ChangeDeclined) if entry.about == "node"]
        assert told == ([] if asked else [("node", "node n3 lost")]), "once, however often it is weighed"


def test_how_long_nodes_took_to_come_tells_whether_to_ask_for_the_next_one() -> None:
    job = trained(declare=msgspec.structs.replace(DECLARE, iterations=600), replacements=3)
    job.lose("n3")
    job.train(60)
    job.news(1, "running", node="n9")
    job.arrive("n9", lease=1)
    job.let_in(8, 9)
    job.train(60)
    assert len(job.all(ReplacementAsked)) == 1
    while job.job.record.goal - job.job.record.committed > 90:
        job.train(1)
    job.lose("n9")
    job.train(10)
    assert job.job.record.goal - job.job.record.committed > 60, (
        "half a minute: long enough had the last one come at once"
    )
    assert len(job.all(ReplacementAsked)) == 1, "but it took a minute"


def test_as_many_nodes_are_asked_for_as_are_missing() -> None:
    job = trained(nodes=6, replacements=5)
    job.lose("n3", "n5")
    job.train(50)
    assert [(e.replacement, e.node) for e in job.all(ReplacementAsked)] == [(1, "n3"), (2, "n5")]


def test_the_new_nodes_ranks_bring_the_full_layout_back() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    job.news(1, "pending")
    job.news(1, "running", node="n9")
    answer = job.arrive("n9", lease=1)
    nodes = ("n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4", "n9", "n9")
    assert api.StartWorkers(node="n9", workers=((8, 0), (9, 1)), nodes=nodes, joins=True) in answer
    assert job.all(NodeJoined)[-1] == NodeJoined(node="n9", host="h", devices=2)
    assert states(job) == ["pending", "running", "joined"]
    assert job.all(ReplacementChanged)[-1].node == "n9"
    job.let_in(8, 9)
    assert {8, 9} < set(job.job.record.active)
    assert job.job.record.plan is not None
    assert job.job.record.plan.layout.describe() == "DP2 x PP2 x TP2"
    assert [entry.rank for entry in job.all(WorkerStarted)][-2:] == [8, 9]
    job.train(50)
    assert len(job.all(ReplacementAsked)) == 1


def test_a_node_that_joins_before_slurm_tells_of_its_job_is_taken_in() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    job.arrive("n9", lease=1)
    job.news(1, "running", node="n9")
    assert [(e.state, e.slurm_job) for e in job.all(ReplacementChanged)] == [("joined", None), ("joined", "17")]


def test_a_supervisor_that_finds_out_from_the_beginning_tells_nothing_new() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    for state in ("pending", "running", "pending", "running"):
        job.news(1, state, node=None if state == "pending" else "n9")
    assert states(job) == ["pending", "running"]


def test_a_request_whose_node_is_here_is_not_refused_any_more() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    job.arrive("n9", lease=1)
    job.news(1, "refused")
    assert states(job) == ["joined"]


def test_why_a_request_waits_is_told_once() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    texts = ("", "Priority", "Resources", "Priority", "Resources", "ReqNodeNotAvail", "Priority")
    for text in texts:
        job.feed(api.ReplacementNews(replacement=1, state="pending", slurm_job="17", node=None, text=text))
    told = [entry.text for entry in job.all(ReplacementChanged)]
    assert told == ["", "Priority", "Resources", "ReqNodeNotAvail"]
    job.news(1, "running", node="n9")
    job.feed(api.ReplacementNews(replacement=1, state="pending", slurm_job="17", node=None, text="Licenses"))
    assert states(job)[-1] == "running"


A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


def of_hardware(name: str) -> Job:
    """A job that knows what its first nodes are, and has lost one of them."""
    job = trained()
    for node in job.job.nodes.values():
        node.known.hardware = name
    job.lose("n3")
    job.train(2)
    return job


def test_a_node_of_another_kind_is_let_go_and_not_given_to_the_next_request() -> None:
    job = of_hardware(A100)
    job.news(1, "running", node="n9")
    answer = job.arrive("n9", lease=1, hardware=H100)
    assert api.DropNode(node="n9") in answer
    assert any(isinstance(a, api.CancelReplacement) and a.replacement == 1 for a in answer)
    assert "n9" not in {entry.node for entry in job.all(NodeJoined)}
    last = job.all(ReplacementChanged)[-1]
    assert (last.state, last.node) == ("refused", "n9")
    assert last.text == f"node n9 does not join: its devices are {H100}, the job's are {A100}"
    job.train(32)
    assert job.asked(api.AskReplacement)[-1].exclude == ("n1", "n2", "n3", "n4", "n9")
    job.arrive("n8", lease=2, hardware=A100)
    assert job.all(NodeJoined)[-1] == NodeJoined(node="n8", host="h", devices=2, hardware=A100)


@pytest.mark.parametrize(("first", "newcomer"), [("", H100), (A100, ""), ("", ""), (A100, A100)])
def test_where_devices_are_not_known_nobody_is_refused(first: str, newcomer: str) -> None:
    job = of_hardware(first)
    job.arrive("n9", lease=1, hardware=newcomer)
    assert job.all(NodeJoined)[-1].node == "n9"


def test_a_request_that_slurm_does_not_accept_costs_none_of_the_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission plugin may say no for a while. It is not asked for ever."""
    monkeypatch.setattr(replacements, "MAX_REFUSALS", 3)
    job = trained(replacements=1)
    job.lose("n3")
    job.train(2)
    for number in (1, 2, 3):
        assert len(job.all(ReplacementAsked)) == number
        job.news(number, "refused", slurm_job=None)
        job.train(RETRY_AFTER_S * 2 ** (number - 1) + 2)
    assert len(job.all(ReplacementAsked)) == 3


def test_after_a_refusal_one_node_at_a_time_is_asked_for() -> None:
    """Of a rack, for example: as many refusals at once would leave nothing to be asked for."""
    job = trained(nodes=8, replacements=4)
    job.lose("n3", "n4", reason=AGENT)
    job.train(3)
    assert len(job.all(ReplacementAsked)) == 2
    for number in (1, 2):
        job.news(number, "refused", slurm_job=None)
    job.train(70)
    assert len(job.all(ReplacementAsked)) == 3
    job.news(3, "pending")
    job.train(5)
    assert len(job.all(ReplacementAsked)) == 4


def test_a_request_that_comes_to_nothing_is_made_again_after_a_while() -> None:
    job = trained(replacements=2)
    job.lose("n3")
    job.train(2)
    for number, pause_s in ((1, 30), (2, 60)):
        assert len(job.all(ReplacementAsked)) == number
        job.news(number, "refused" if number == 1 else "ended", slurm_job=None)
        job.train(pause_s - 2)
        assert len(job.all(ReplacementAsked)) == number
        job.train(4)
    assert len(job.all(ReplacementAsked)) == 3
    job.news(3, "refused")
    job.train(1000)
    assert len(job.all(ReplacementAsked)) == 3, "no more than the job may have"


def test_a_new_node_that_is_lost_is_given_back_and_another_one_asked_for() -> None:
    job = trained()
    job.lose("n3", reason=AGENT)
    job.train(2)
    job.arrive("n9", lease=1)
    job.let_in(8, 9)
    job.train(2)
    job.lose("n9")
    job.train(60)
    assert [a.replacement for a in job.asked(api.CancelReplacement)] == [1]
    assert states(job) == ["joined", "ended"]
    assert [(e.node, "n9" in e.excluded) for e in job.all(ReplacementAsked)] == [("n3", False), ("n3", True)]
    assert [a.node for a in job.asked(api.ReleaseNode)] == ["n3"], "it is not part of the job's own allocation"


def test_a_node_that_came_later_is_no_part_of_the_jobs_own_allocation() -> None:
    job = trained()
    job.lose("n3", reason=AGENT)
    job.train(2)
    job.arrive("n9", lease=1)
    job.let_in(8, 9)
    job.train(3)
    job.lose("n4", reason=AGENT)
    job.train(5)
    assert [(a.node, a.keep) for a in job.asked(api.ReleaseNode)][-1] == ("n4", ("n1", "n2"))


def test_nobody_is_asked_for_in_place_of_a_node_that_was_replaced() -> None:
    job = trained(replacements=5)
    job.lose("n3")
    job.train(2)
    job.arrive("n9", lease=1)
    job.let_in(8, 9)
    job.train(3)
    job.lose("n4")
    job.train(20)
    assert [entry.node for entry in job.all(ReplacementAsked)] == ["n3", "n4"]


def test_a_node_that_came_later_is_itself_not_replaced() -> None:
    """What is missing is the one in whose place it came."""
    job = trained(replacements=5)
    job.lose("n3", reason=AGENT)
    job.train(2)
    job.arrive("n9", lease=1)
    job.let_in(8, 9)
    job.train(3)
    job.lose("n9", "n4", reason=AGENT)
    job.train(60)
    assert {entry.node for entry in job.all(ReplacementAsked)} == {"n3", "n4"}


def replaced(**changes: Any) -> Job:
    """A job that lost n3 and has n9, with ranks 8 and 9, in its place."""
    job = trained(**changes)
    job.lose("n3", reason=AGENT)
    job.train(2)
    job.news(1, "running", node="n9")
    job.arrive("n9", lease=1)
    job.let_in(8, 9)
    job.train(3)
    assert {8, 9} <= set(job.job.record.active)
    return job


@pytest.mark.parametrize("signal", [SIGTERM, SIGUSR2])
def test_a_replacement_whose_slurm_job_ends_leaves_between_two_iterations_and_nobody_is_blamed(signal: int) -> None:
    job = replaced()
    job.feed(api.AgentSignalled(node="n9", signal=signal))
    assert job.job.stop_request is None, "the job's own Slurm job goes on"
    assert len(job.asked(api.WatchReplacements)) == 1, "Slurm knows why"
    pauses(job)
    job.train(5)
    assert {8, 9}.isdisjoint(job.job.record.active)
    assert [(entry.node, entry.how) for entry in job.all(NodeLost)][1:] == [("n9", "vacated")]
    assert job.asked(api.DropNode)[1:] == [api.DropNode(node="n9", in_order=True)]
    assert [entry.node for entry in job.all(FailureFound)] == ["n3"]
    assert [entry.node for entry in job.all(DrainDecided)] == ["n3"]
    assert not any("the job goes on" in action.text for action in job.asked(api.Say))


def taken(job: Job, state: Any) -> None:
    """Slurm says that it ended or suspended the Slurm job of n9."""
    job.feed(api.ReplacementNews(replacement=1, state=state, slurm_job="17", node="n9", text="so it is", by_slurm=True))


@pytest.mark.parametrize(
    ("state", "asked"), [("running", ["n3", "n3"]), ("ended", ["n3", "n3"]), ("withdrawn", ["n3"])]
)
def test_a_replacement_that_slurm_takes_away_without_notice_is_not_blamed(state: str, asked: list[str]) -> None:
    """Suspended (`running`), preempted, or cancelled: with control groups, Slurm kills all at once."""
    job = replaced(replacements=3)
    job.lose("n9")
    assert len(job.asked(api.WatchReplacements)) == 1
    taken(job, state)
    job.train(60)
    assert [entry.node for entry in job.all(DrainDecided)] == ["n3"]
    assert [entry.node for entry in job.all(DrainWaived)] == ["n9"]
    assert [entry.node for entry in job.all(ReplacementAsked)] == asked


def test_a_replacement_that_was_lost_while_suspended_is_not_blamed_once_slurm_resumes_it() -> None:
    job = replaced(replacements=3)
    taken(job, "running")
    job.lose("n9")
    job.news(1, "running", node="n9")
    job.train(20)
    assert [entry.node for entry in job.all(DrainDecided)] == ["n3"]


def test_a_replacement_that_dies_is_blamed_unless_slurm_says_otherwise_soon() -> None:
    job = replaced(replacements=3)
    taken(job, "running")
    job.news(1, "running", node="n9")  # resumed
    job.lose("n9")
    job.train(8)
    assert [entry.node for entry in job.all(DrainDecided)] == ["n3"]
    job.train(4)
    assert [entry.node for entry in job.all(DrainDecided)] == ["n3", "n9"]
    assert [action.replacement for action in job.asked(api.CancelReplacement)] == [1]


def test_a_replacement_is_kept_when_the_whole_job_is_about_to_end_as_well() -> None:
    """Its limit is the job's, so the job is warned, too: another layout would not pay for its change."""
    job = replaced()
    job.feed(api.TimeLeft(seconds=300.0))
    job.feed(api.AgentSignalled(node="n9", signal=SIGUSR2))
    job.train(5)
    assert {8, 9} <= set(job.job.record.active)
    job.feed(api.TimeLeft(seconds=90000.0))  # the job's own limit is extended
    job.feed(api.AgentSignalled(node="n9", signal=SIGUSR2))
    pauses(job)
    job.train(5)
    assert {8, 9}.isdisjoint(job.job.record.active)


@pytest.mark.parametrize(("state", "asked"), [("withdrawn", ["n3"]), ("ended", ["n3", "n3"])])
def test_a_node_is_asked_for_again_unless_somebody_cancelled_the_replacement(state: str, asked: list[str]) -> None:
    job = replaced(replacements=3)
    job.feed(api.AgentSignalled(node="n9", signal=SIGTERM))
    pauses(job)
    job.news(1, state, node="n9")
    job.train(200)
    assert [entry.node for entry in job.all(ReplacementAsked)] == asked
    assert job.asked(api.CancelReplacement) == [], "its Slurm job has ended"


def test_a_replacement_that_is_cancelled_while_it_waits_is_not_asked_for_again() -> None:
    job = trained(replacements=3)
    job.lose("n3")
    job.train(2)
    job.news(1, "pending")
    job.news(1, "withdrawn")
    job.train(200)
    assert [entry.node for entry in job.all(ReplacementAsked)] == ["n3"]
    assert any("no other node is requested in place of n3" in action.text for action in job.asked(api.Say))


def test_a_replacement_that_leaves_and_whose_slurm_job_does_not_end_is_cancelled() -> None:
    job = replaced()
    job.feed(api.AgentSignalled(node="n9", signal=SIGTERM))
    pauses(job)
    job.train(LEAVING_S - 10)
    assert job.asked(api.CancelReplacement) == []
    job.train(20)
    assert [action.replacement for action in job.asked(api.CancelReplacement)] == [1]


def test_two_replacements_that_end_together_do_not_stop_the_job() -> None:
    job = replaced(replacements=3)
    job.lose("n4", reason=AGENT)
    job.train(3)
    job.arrive("n8", lease=2)
    job.let_in(10, 11)
    job.train(3)
    for node in ("n8", "n9"):
        job.feed(api.AgentSignalled(node=node, signal=SIGTERM), 0.1)
    assert job.job.stop_request is None
    while job.job.nodes["n8"].alive or job.job.nodes["n9"].alive:
        pauses(job)
        job.train(2)
    assert [entry.node for entry in job.all(FailureFound)] == ["n3", "n4"]


def test_a_replacement_that_ends_and_that_the_layout_needs_trains_until_slurm_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def impossible(*_: object) -> None:
        raise NotEnoughDevicesError("too few")

    job = replaced()
    with monkeypatch.context() as patched:
        patched.setattr(next_plan, "best", impossible)
        job.feed(api.AgentSignalled(node="n9", signal=SIGTERM))
        job.train(10)
    assert job.job.nodes["n9"].alive
    job.lose("n9", reason=AGENT)
    job.train(3)
    blamed = [(entry.node, entry.component) for entry in job.all(FailureFound)]
    assert blamed == [("n3", "node"), (None, "process")]
    assert [entry.node for entry in job.all(DrainDecided)] == ["n3"]


def test_the_jobs_only_own_node_speaks_for_the_job_beside_a_replacement() -> None:
    job = replaced()
    for node in ("n2", "n4"):
        job.lose(node, reason=AGENT)
        job.train(1)
    job.feed(api.AgentSignalled(node="n1", signal=SIGTERM))
    assert job.job.stop_request is not None


def test_a_request_is_cancelled_when_the_first_layout_is_back_without_it() -> None:
    """A crashed process and a lost node: the node's work goes to a spare."""
    job = trained(nodes=5, spares=1)
    job.crash(5)
    job.settle()
    job.lose("n4")
    job.train(2)
    assert [entry.node for entry in job.all(ReplacementAsked)] == ["n4"]
    job.let_in(10)
    assert len(job.job.record.active) == 8
    assert states(job) == ["cancelled"]
    assert [a.replacement for a in job.asked(api.CancelReplacement)] == [1]
    job.news(1, "ended")
    assert states(job) == ["cancelled"]


def test_a_request_is_cancelled_when_the_job_ends() -> None:
    job = trained(come_backs=0)
    job.lose("n3")
    job.train(2)
    job.feed(api.AgentLost(node="n1", reason="gone"))
    job.feed(api.AgentLost(node="n2", reason="gone"))
    job.feed(api.AgentLost(node="n4", reason="gone"))
    job.wait(3)
    assert job.end is not None
    assert states(job) == ["cancelled"]
    kinds = [type(action) for action in job.actions]
    assert kinds.index(api.CancelReplacement) < kinds.index(api.End)


def test_a_request_is_cancelled_when_training_is_done() -> None:
    job = trained(declare=msgspec.structs.replace(DECLARE, iterations=60))
    job.lose("n3")
    job.train(2)
    assert len(job.all(ReplacementAsked)) == 1
    while job.job.record.committed < 60:
        job.train(0.1)
    for rank in job.job.record.active:
        job.say(rank, m.Finished(iteration=60))
    assert job.job.stage == "halting"
    assert states(job) == ["cancelled"]


def test_a_pending_request_is_cancelled_when_the_time_limit_comes_near() -> None:
    job = trained()
    job.feed(api.TimeLeft(seconds=1830.0))
    job.lose("n3")
    job.train(2)
    job.news(1, "pending")
    job.train(60)
    assert states(job) == ["pending", "cancelled"]


# --- a job that is to stop ----------------------------------------------------------------------------------------


def test_a_job_that_is_to_stop_drains_nobody_and_asks_for_nothing() -> None:
    job = trained(nodes=6)
    job.lose("n3")
    job.feed(api.Signalled(signal=SIGTERM))
    assert job.job.stop_request is not None
    for name in ("n4", "n5"):
        job.feed(api.AgentLost(node=name, reason="gone"))
    for _ in range(10):
        job.feed(api.Tick(), 1.0)
    for kind in (api.DrainNode, api.ReleaseNode, api.AskReplacement):
        assert job.asked(kind) == []


def test_a_request_is_cancelled_when_the_job_is_to_stop() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    job.feed(api.Signalled(signal=SIGTERM))
    assert states(job) == ["cancelled"]
    assert api.DropNode(node="n9") in job.arrive("n9", lease=1)


def test_a_supervisor_without_a_quorum_leaves_requests_to_its_successor() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    job.feed(api.QuorumLost(reason="2 of 4 agents answer"))
    assert job.end is not None
    assert job.asked(api.CancelReplacement) == []


# --- who may join -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease", [0, 2])
def test_a_node_that_nobody_asked_for_is_refused(lease: int) -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    answer = job.arrive("n9", lease=lease)
    assert [type(action) for action in answer] == [api.Say, api.DropNode]
    assert "n9" not in job.job.nodes


def test_a_lost_node_that_comes_back_under_its_name_is_refused() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    answer = job.arrive("n3", lease=1)
    assert api.DropNode(node="n3") in answer
    assert states(job) == ["cancelled"]
    assert not job.job.nodes["n3"].alive


def test_two_nodes_with_one_lease_are_one_too_many() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    job.arrive("n8", lease=1)
    assert api.DropNode(node="n9") in job.arrive("n9", lease=1)


def test_a_node_may_join_in_the_middle_of_a_transition() -> None:
    job = trained()
    job.lose("n3")
    job.train(2)
    job.crash(7)
    assert job.job.changing
    job.arrive("n9", lease=1)
    for rank in (job.job.record.placements.index(p) for p in job.job.record.placements if p.node == "n9"):
        job.join(rank)
    job.settle()
    assert job.job.pause is not None, "they are considered when that is over"


# --- a new supervisor ---------------------------------------------------------------------------------------------


def recovered(job: Job) -> list[api.AnyAction]:
    """What a new supervisor does first, from the journal alone."""
    entries: list[AnyEntry] = [action.entry for action in job.actions if isinstance(action, api.Log)]
    heir = Controller.recover(job.controller.job.settings, entries)
    actions: list[api.AnyAction] = []
    for name, node in job.job.nodes.items():
        if not node.alive:
            continue
        running = tuple(
            m.RunningWorker(rank=rank, device=member.device, pid=member.pid, said=(LONG,))
            for rank, member in job.job.members.items()
            if member.alive and member.node == name
        )
        inventory = m.Inventory(workers=running, epoch=job.job.epoch)
        actions += heir.handle(api.AgentJoined(node=name, host="h", devices=2, inventory=inventory), job.now)
    job.controller, job.job, job.actions = heir, heir.job, actions
    return actions


def test_a_new_supervisor_asks_again_for_what_was_never_answered() -> None:
    job = trained()
    job.lose("n3", reason=AGENT)
    job.train(3)
    (drain,), (asked,) = job.asked(api.DrainNode), job.asked(api.AskReplacement)
    answer = recovered(job)
    assert drain in answer
    assert asked in answer
    assert api.WatchNode(node="n3") in answer
    job.train(20)
    assert [len(job.asked(kind)) for kind in (api.DrainNode, api.AskReplacement, api.ReleaseNode)] == [1, 1, 1]


def test_a_new_supervisor_does_not_do_again_what_was_answered() -> None:
    job = trained()
    job.lose("n3")
    job.train(3)
    job.feed(api.DrainStep(drain=1, node="n3", step="slurm", outcome="done", text=""))
    job.feed(api.ReleaseAnswered(node="n3", outcome="done", text=""))
    job.news(1, "running", node="n9")
    job.arrive("n9", lease=1)
    job.let_in(8, 9)
    recovered(job)
    job.train(20)
    kinds = (api.DrainNode, api.ReleaseNode, api.AskReplacement, api.CancelReplacement, api.StartWorkers)
    assert [len(job.asked(kind)) for kind in kinds] == [0, 0, 0, 0, 0]


def test_a_new_supervisor_cancels_again_what_was_cancelled() -> None:
    """Whether Slurm was ever told is not known."""
    job = trained(nodes=5, spares=1)
    job.crash(5)
    job.settle()
    job.lose("n4")
    job.train(2)
    job.let_in(10)
    assert states(job) == ["cancelled"]
    assert [a.replacement for a in recovered(job) if isinstance(a, api.CancelReplacement)] == [1]


def test_a_new_supervisor_starts_the_workers_of_a_node_that_had_just_joined() -> None:
    job = trained()
    job.lose("n3")
    job.train(3)
    job.arrive("n9", lease=1)
    recovered(job)
    (start,) = job.asked(api.StartWorkers)
    assert (start.node, start.workers, start.joins) == ("n9", ((8, 0), (9, 1)), True)


def test_a_new_supervisor_asks_nothing_of_slurm_where_there_is_none() -> None:
    job = trained(slurm=False)
    job.lose("n3")
    recovered(job)
    job.train(5)
    assert job.asked(api.WatchNode) == job.asked(api.DrainNode) == []


def test_a_new_supervisor_gives_a_node_back_whose_drain_nobody_answers() -> None:
    job = trained()
    breaks(job, 5)
    job.settle()
    job.train(3)
    job.lose("n3", reason=AGENT)
    assert decisions(job) == [("n3", "drain", "hardware")]
    recovered(job)
    job.train(DRAIN_PATIENCE_S - 1)
    assert job.asked(api.ReleaseNode) == []
    job.train(2)
    assert [action.node for action in job.asked(api.ReleaseNode)] == ["n3"]


def test_a_verdict_that_was_not_acted_on_yet_is_not_forgotten() -> None:
    job = trained()
    job.lose("n3")
    recovered(job)
    job.train(3)
    assert [action.node for action in job.asked(api.DrainNode)] == ["n3"]


def test_a_node_with_a_device_that_is_not_known_to_be_broken_is_kept() -> None:
    """Nothing runs there: one device is broken, and the process of the other had its chances."""
    job = trained(come_backs=0)
    breaks(job, 4)
    job.settle()
    job.train(2)
    job.crash(5)
    job.settle()
    job.train(5)
    assert {rank for rank in job.job.live if job.job.members[rank].node == "n3"} == set()
    assert job.all(NodeLost) == []


@pytest.mark.parametrize(("batch_node", "left"), [("n3", []), ("n1", ["n3"])])
def test_a_node_without_a_device_is_left_unless_the_batch_script_runs_there(batch_node: str, left: list[str]) -> None:
    job = trained(batch_node=batch_node)
    for rank in (4, 5):
        breaks(job, rank)
        job.settle()
    job.train(5)
    assert [entry.node for entry in job.all(NodeLost)] == left
