"""Observe mode: what is slow or broken is found and told, and nothing is done that the job would not do without us."""

from __future__ import annotations

import pytest

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import (
    ChangeDecided,
    DrainDecided,
    DrainWaived,
    FailureEnded,
    NodeReleased,
    ProbesTaken,
    Reconfigured,
    ReplacementAsked,
)
from tests.resihp.controller.fail_slow.test_slowness import (
    DEAR,
    EVEN,
    Job,
    finding,
    measure_links,
    slow_ones,
    suspected,
)
from tests.resihp.controller.nodes.test_drains import AGENT, breaks, trained


def only_told(job: Job) -> None:
    """Nobody was asked to stop for what is slow."""
    assert job.job.pause is None
    assert job.all(ChangeDecided) == []
    assert job.orders(m.Park) == []


def test_a_slow_device_is_a_verdict_and_what_could_be_saved_is_told_once() -> None:
    job = Job(finding(3), nodes=2, observes=True).run(5)
    job.measure({3: 0.5})
    job.train(30)
    only_told(job)
    assert [(entry.ranks, entry.speed) for entry in slow_ones(job)] == [((3,), pytest.approx(0.5))]
    assert suspected(job)[0] == (3, False)
    (told,) = [text for text in job.texts("notice") if text.startswith("rank 3 is slow")]
    assert told.startswith("rank 3 is slow: another plan saves ")
    assert told.endswith("observe mode, the plan stays")
    assert job.work == EVEN


def test_what_no_plan_helps_against_is_told_as_always() -> None:
    job = Job(finding(3), nodes=2, observes=True).run(5)
    job.measure({3: 0.92})
    job.train(30)
    only_told(job)
    (told,) = [text for text in job.texts("notice") if text.startswith("rank 3 is slow")]
    assert told.startswith("rank 3 is slow: the plan stays")
    assert "observe" not in told


def test_what_may_pass_is_told_when_a_change_would_have_been_worth_it() -> None:
    job = Job(finding(3), nodes=2, observes=True, records=DEAR).run(5)
    job.measure({3: 0.5})
    job.train(60)
    only_told(job)
    first, *_, then = (text for text in job.texts("notice") if text.startswith("rank 3 is slow"))
    assert "the plan stays: would save" in first
    assert then.endswith("observe mode, the plan stays")


def test_the_end_of_a_slow_down_is_told_and_changes_nothing() -> None:
    job = Job(finding(3), nodes=2, observes=True).run(5)
    job.measure({3: 0.5})
    job.find(finding(3, kind="recovered", iteration=6))
    job.train(5)
    only_told(job)
    assert [entry.failure for entry in job.all(FailureEnded)] == [1]


def test_a_slow_link_is_a_verdict_and_no_plan_is_made_for_it() -> None:
    job = Job(nodes=4, observes=True).run(2)
    job.find(finding(link=(0, 4)))
    measure_links(job, {(0, 4): 5e-3})
    job.train(30)
    only_told(job)
    assert [entry.link for entry in slow_ones(job)] == [(0, 4)]


def test_a_job_survives_a_crash_and_its_new_plan_knows_nothing_of_who_is_slow() -> None:
    """Without us it would be dead: that is not what was asked for. But the new plan is not made for the slow one."""

    def work_after_the_crash(slow: bool) -> dict[int, int]:
        job = Job(observes=True).run(2)
        if slow:
            job.slow_by_verdict(3, 0.5)
        else:
            job.step(3)
        assert len(slow_ones(job)) == slow
        job.crash(0)
        job.park(stepped=job.job.record.committed)
        job.run(1)
        assert len(job.all(Reconfigured)) == 1
        return job.work

    assert work_after_the_crash(slow=True) == work_after_the_crash(slow=False)


def test_who_comes_back_after_a_crash_has_work_again() -> None:
    job = Job(observes=True).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.run(1)
    job.join(6)
    job.train(3)
    assert job.job.pause is not None
    job.paused()
    assert 6 in job.job.record.active


def test_a_device_that_fails_its_first_probe_has_work_all_the_same() -> None:
    job = Job(examine=True, observes=True)
    job.measure({1: 0.5})
    assert job.plan.layout.active == (0, 1, 2, 3, 4, 5)
    (told,) = job.texts("warning")
    assert told.startswith("rank 1 (n1 device 1): fails its probe: ")
    assert told.endswith("observe mode: it gets work all the same")
    (taken,) = job.all(ProbesTaken)
    assert [probe.rank for probe in taken.devices if not probe.fit] == [1]


def test_a_newcomer_that_fails_its_probe_is_given_work_all_the_same() -> None:
    job = Job(examine=True, observes=True)
    job.measure()
    job.run(1)
    job.crash(1)
    job.park(stepped=1)
    job.run(1)
    job.join(6)
    job.measure({6: 0.5})
    job.train(3)
    assert any("rank 6 (n1 device 1): fails its probe" in text for text in job.texts("warning"))
    assert job.job.pause is not None
    job.paused()
    assert 6 in job.job.record.active


ACTED = (api.DrainNode, api.ReleaseNode, api.AskReplacement)


def test_a_broken_node_is_neither_drained_nor_left_out_and_that_it_would_be_is_told() -> None:
    job = trained(observes=True)
    breaks(job, 3)
    job.settle()
    job.train(20)
    assert [action for action in job.actions if isinstance(action, ACTED)] == []
    assert job.all(DrainDecided) == []
    assert [entry.node for entry in job.all(DrainWaived)] == ["n2"]
    told = [action.text for action in job.actions if isinstance(action, api.Say) and "would be drained" in action.text]
    assert len(told) == 1
    assert told[0].startswith("node n2: would be drained (")


@pytest.mark.parametrize("reason", ["connection closed for 1 s", AGENT])
def test_a_lost_node_is_neither_given_back_nor_replaced(reason: str) -> None:
    job = trained(observes=True)
    job.lose("n4", reason=reason)
    job.train(400)
    assert [action for action in job.actions if isinstance(action, ACTED)] == []
    assert job.all(ReplacementAsked) == job.all(NodeReleased) == []
    assert job.job.record.committed > 100


def test_a_node_that_an_administrator_drains_trains_on() -> None:
    job = trained(observes=True, on_drain="vacate")
    job.feed(api.SlurmSees(node="n4", state="allocated+drain", reason="fan"))
    job.train(10)
    assert job.job.pause is None
    assert job.job.nodes["n4"].alive
    assert [action for action in job.actions if isinstance(action, ACTED)] == []
