"""The node whose failure ends a run is dealt with before the run ends, so that the next run does not get it again."""

from __future__ import annotations

from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.controller.fail_stop import endings
from resihp.record.journal import DrainDecided, DrainWaived, FailureFound, JobEnded, NodeLost
from resihp.simulator.scenarios.scenario import SIGTERM
from tests.resihp.controller.direct import Direct
from tests.resihp.controller.nodes.test_drains import Job, breaks, decisions, recovered

REQUEUE_ENDING = (75, True)


def on_two_nodes(**changes: Any) -> Job:
    """TP2 x PP2 on two nodes: neither node can do without the other."""
    job = Job(**{"nodes": 2, "replacements": 0, "restarts_left": 3, "may_requeue": True, "batch_node": "n1"} | changes)
    job.run(1)
    job.train(5)
    return job


def lose(job: Job, name: str = "n2", reason: str = "connection closed for 1 s") -> None:
    job.feed(api.AgentLost(node=name, reason=reason, how="silent"))
    job.park(stepped=job.job.record.committed)


def ended(job: Direct) -> tuple[int, bool] | None:
    return None if job.end is None else (job.end.exit_code, job.end.requeue)


def test_a_node_whose_death_ends_the_run_is_excluded_from_the_next() -> None:
    job = on_two_nodes()
    lose(job)
    assert ended(job) is None, "another node may yet turn out to be lost as well"
    job.wait(3)
    assert ended(job) == REQUEUE_ENDING
    assert decisions(job) == [("n2", "exclude", "died")]
    kinds = [type(action.entry) for action in job.actions if isinstance(action, api.Log)]
    assert kinds.index(DrainDecided) < kinds.index(JobEnded)
    assert [action.node for action in job.asked(api.DrainNode)] == ["n2"]
    assert kinds[-1] is JobEnded


def test_a_node_that_ends_a_second_run_is_drained() -> None:
    job = on_two_nodes(died_before=("n2",))
    lose(job)
    job.wait(3)
    assert decisions(job) == [("n2", "drain", "died again")]
    assert ended(job) == REQUEUE_ENDING


def test_a_broken_device_that_ends_the_run_is_reason_for_a_drain() -> None:
    job = on_two_nodes()
    breaks(job, 3)
    job.park(stepped=job.job.record.committed)
    job.wait(3)
    assert decisions(job) == [("n2", "drain", "hardware")]
    assert ended(job) == REQUEUE_ENDING


def test_a_node_that_dies_before_training_begins_is_excluded() -> None:
    job = Direct(
        nodes=2, tp=2, pp=2, slurm=True, batch_node="n1", restarts_left=3, may_requeue=True, least=1.0, declares=False
    )
    job.feed(api.AgentLost(node="n2", reason="connection closed for 1 s", how="silent"))
    job.wait(3)
    assert ended(job) == REQUEUE_ENDING
    assert [(entry.node, entry.measure) for entry in job.all(DrainDecided)] == [("n2", "exclude")]


def test_nodes_that_go_within_two_seconds_of_each_other_are_not_excluded() -> None:
    job = on_two_nodes(nodes=4, tp=2, pp=4)
    lose(job, "n2")
    job.wait(1)
    job.feed(api.AgentLost(node="n3", reason="connection closed for 1 s", how="silent"))
    job.wait(3)
    assert ended(job) == REQUEUE_ENDING
    assert job.all(DrainDecided) == []
    assert [entry.node for entry in job.all(NodeLost)] == ["n2", "n3"]
    assert [entry.node for entry in job.all(DrainWaived)] == ["n2", "n3"]


def test_a_node_that_is_lost_while_the_run_ends_is_dealt_with_as_well() -> None:
    job = on_two_nodes(nodes=4, tp=2, pp=4)
    breaks(job, 3)
    job.park(stepped=job.job.record.committed)
    job.wait(1)
    job.feed(api.AgentLost(node="n3", reason="connection closed for 1 s", how="silent"))
    job.wait(4)
    assert ended(job) == REQUEUE_ENDING
    assert decisions(job) == [("n2", "drain", "hardware"), ("n3", "exclude", "died")]


def test_a_run_ends_in_time_however_many_nodes_are_lost_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "CLOSING_S", 3.0)
    job = on_two_nodes(nodes=4, tp=2, pp=4)
    lose(job)
    job.wait(1)
    job.feed(api.AgentLost(node="n3", reason="connection closed for 1 s", how="silent"))
    job.wait(1)
    job.feed(api.AgentLost(node="n4", reason="connection closed for 1 s", how="silent"))
    assert ended(job) is None
    job.wait(1)
    assert ended(job) == REQUEUE_ENDING


def test_a_run_that_is_cancelled_meanwhile_is_not_requeued_and_excludes_nobody() -> None:
    job = on_two_nodes()
    lose(job)
    job.feed(api.Signalled(signal=SIGTERM))
    job.feed(api.StopMeaning(meaning="cancelled"))
    assert ended(job) == (143, False)
    assert job.all(DrainDecided) == []
    assert job.end is not None
    assert "the job is cancelled" in job.end.reason


def test_an_operator_who_stops_it_meanwhile_is_answered() -> None:
    job = on_two_nodes()
    lose(job)
    job.feed(api.StopAsked(request=7, at_once=False))
    assert ended(job) == (143, False)
    (reply,) = job.asked(api.Reply)
    assert reply.ok


def test_in_observe_mode_it_only_says_what_would_be_done() -> None:
    job = on_two_nodes(observes=True)
    lose(job)
    job.wait(3)
    assert ended(job) is not None
    assert job.all(DrainDecided) == []
    assert any("n2: would be excluded from your next jobs" in action.text for action in job.asked(api.Say))


def test_a_job_outside_slurm_ends_at_once() -> None:
    job = on_two_nodes(slurm=False)
    lose(job)
    assert ended(job) == (5, False)


@pytest.mark.parametrize("batch_node", ["n2"])
def test_the_batch_host_is_never_excluded(batch_node: str) -> None:
    job = on_two_nodes(batch_node=batch_node)
    lose(job)
    job.wait(3)
    assert ended(job) == REQUEUE_ENDING
    assert job.all(DrainDecided) == []


def test_messages_of_ranks_no_longer_count() -> None:
    job = on_two_nodes()
    lose(job)
    job.crash(0)
    job.wait(3)
    assert ended(job) == REQUEUE_ENDING
    assert [entry.node for entry in job.all(FailureFound)] == ["n2"]


def test_a_successor_decides_what_its_predecessor_had_not_decided() -> None:
    job = on_two_nodes()
    lose(job)
    recovered(job)
    job.park(stepped=job.job.record.committed)
    assert ended(job) is None
    job.wait(3)
    assert ended(job) == REQUEUE_ENDING
    assert decisions(job) == [("n2", "exclude", "died")]
