"""Several that are slow, all that are, slower still, now and then, and what is no device: from finding to verdict.

The detector is a script (`test_slowness.Scripted`), the rest is real.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.controller.fail_slow.thresholds import CLEARED_ITERATIONS, MIN_LASTING_ITERATIONS
from resihp.detector.findings import Finding, Intermittent
from resihp.protocol import messages as m
from resihp.record.describe import explain
from resihp.record.journal import ChangeDecided, FailureEnded, FailureFound, Reconfigured, Suspected
from tests.resihp.controller.fail_slow.test_slowness import DEAR, LONG, Job, Scripted, finding, slow_ones
from tests.resihp.controller.test_size import Large
from tests.resihp.controller.test_takeover import TakenOver


def outcomes(job: Any) -> list[tuple[int, str]]:
    """(number, outcome) of each entry of a suspicion to be slow."""
    return [(entry.suspicion, entry.outcome) for entry in job.all(Suspected) if entry.kind == "slow"]


def known(**options: Any) -> Job:
    """A job whose devices' pasts are known: all gave the same before the first iteration."""
    job = Job(examine=True, records=DEAR, **options)
    job.measure()
    return job.run(4)


def of_nobody(**changes: Any) -> Finding:
    return finding(**{"change": 0.25, "evidence": "iterations take longer", **changes})


def of_part(component: str, *ranks: int, **changes: Any) -> Finding:
    return finding(*ranks, **{"component": component, "change": 0.2, "evidence": "they wait longer", **changes})


# --- told whole ---------------------------------------------------------------------------------------------------


def test_a_suspicion_is_numbered_and_told_whole() -> None:
    job = known()
    job.find(finding(3, change=0.5))
    job.measure({3: 0.66})
    job.find(finding(1, iteration=5))
    job.measure()
    first, slow, second, fine = job.all(Suspected)
    assert (first.suspicion, first.component, first.ranks, first.iteration, first.detected) == (1, "device", (3,), 3, 5)
    assert (first.change, first.confidence, first.probe, first.outcome) == (0.5, 0.98, 0, "")
    assert (slow.suspicion, slow.probe, slow.outcome, slow.cleared, slow.change) == (1, 2, "slow", True, 0.5)
    assert (second.suspicion, fine.suspicion, fine.probe, fine.outcome) == (2, 2, 3, "fine")
    assert explain(slow) == "suspicion 1: rank 3: found slow, rank 3"


def test_numbers_go_on_under_a_new_supervisor_which_could_confirm_nothing() -> None:
    heir = TakenOver(Job(finding(3)).run(5)).all_back()
    assert outcomes(heir) == [(1, "unconfirmed")]
    assert heir.job.record.suspicions == 1
    assert heir.job.record.suspects_slow is None


def test_a_suspect_that_did_not_answer_is_neither_cleared_nor_declared_slow() -> None:
    job = Job(finding(3), probe_budget_s=5.0).run(5)
    job.train(6)
    assert outcomes(job) == [(1, ""), (1, "unconfirmed")]
    assert slow_ones(job) == []


def test_what_is_dropped_is_told_once_and_leaves_the_open_suspicion_open() -> None:
    job = Job(records=DEAR).run(2)
    job.slow_by_verdict(3, 0.5)
    job.find(finding(1), finding(link=(0, 2)))
    job.find(finding(kind="recovered", link=(0, 2)))
    assert outcomes(job)[2:] == [(2, ""), (3, "passed")]
    assert job.job.record.suspects_slow is not None
    for _ in range(3):
        job.feed(api.Tick())
    assert len(outcomes(job)) == 4
    job.measure()
    assert outcomes(job)[4:] == [(2, "fine")]


# --- several at once ----------------------------------------------------------------------------------------------


def test_all_devices_that_the_probe_confirms_are_declared_slow_at_once_and_one_plan_answers() -> None:
    job = Job(nodes=2, gpus=4).run(4)
    answer = job.find(finding(4), finding(5), finding(6), finding(7))
    assert [entry.ranks for entry in job.all(Suspected)] == [(4, 5, 6, 7)]
    assert len(job.orders(m.Probe, answer)) == 1
    job.measure(dict.fromkeys(range(4, 8), 0.8))
    assert [(entry.ranks, entry.failure) for entry in slow_ones(job)] == [((4,), 1), ((5,), 2), ((6,), 3), ((7,), 4)]
    assert [text for text in job.texts("warning") if "node n2" in text] == [
        "node n2: its 4 devices work at 80%, slow since iteration 3"
    ]
    assert sum("node n2 is slow" in text for level in ("notice", "progress") for text in job.texts(level)) == 1


def test_a_plan_is_changed_once_on_account_of_all_of_them() -> None:
    job = Job(nodes=2).run(4)
    job.find(finding(1), finding(3))
    job.measure({1: 0.4, 3: 0.4})
    assert [entry.devices for entry in job.all(ChangeDecided)] == [(("n1", 1), ("n2", 1))]
    job.paused()
    assert [entry.failures for entry in job.all(Reconfigured)] == [(1, 2)]


def test_half_a_node_is_told_by_its_ranks() -> None:
    job = Job(nodes=2, gpus=4, records=DEAR).run(4)
    job.find(finding(4), finding(6))
    job.measure({4: 0.8, 6: 0.7})
    assert any(
        text == "node n2: 2 of its 4 devices (ranks 4, 6) work at 70% to 80%, slow since iteration 3"
        for text in job.texts("warning")
    )


def test_of_many_nodes_one_line_tells() -> None:
    job = Job(nodes=20, declare=msgspec.structs.replace(LONG, micro_batches=40), records=DEAR).run(4)
    slow = list(range(0, 20))
    job.find(*[finding(rank) for rank in slow])
    job.measure(dict.fromkeys(slow, 0.8))
    assert len(slow_ones(job)) == 20
    (told,) = job.texts("warning")
    assert told.startswith("20 devices of 10 nodes: slow since iteration 3, at 80% of their speed")


def test_a_thousand_groups_of_eight_are_judged_within_seconds() -> None:
    """Half of 16,384 ranks are suspects, and half of each group is slow."""
    large = Large(2048)
    large.begin()
    large.train(1)
    job = large.controller.job
    job.monitor = Scripted()  # type: ignore[assignment]
    assert job.record.plan is not None
    groups = [stage.ranks for replica in job.record.plan.layout.replicas for stage in replica.stages][::2]
    job.findings = tuple(finding(*ranks) for ranks in groups)
    slow = {rank for ranks in groups for rank in ranks[:4]}
    began = time.process_time()
    large.feed(api.Tick())
    (examination,) = job.examinations.values()
    for rank in examination.asked:
        share = 0.8 if rank in slow else 1.0
        speed = m.Speed(flops=share * 1e14, memory_bytes=share * 1e12)
        examination.answered(rank, m.Probed(probe=examination.probe, speed=speed, seconds=0.2))
    large.feed(api.Tick())
    assert set(job.record.slow) == {job.device_of(rank) for rank in slow}
    job.findings = tuple(finding(*ranks, kind="recovered") for ranks in groups)
    large.feed(api.Tick())
    assert job.record.slow == {}
    assert time.process_time() - began < 6.0
    fine = [entry for entry in large.entries if isinstance(entry, Suspected) and entry.outcome == "fine"]
    assert [entry.ranks for entry in fine] == [ranks[4:] for ranks in groups]
    assert max(len(entry.evidence) for entry in fine) < 200


def test_the_rest_of_a_suspects_group_is_measured_and_declared_slow_with_it() -> None:
    job = Job(nodes=4, gpus=2, tp=2, pp=1, records=DEAR).run(4)
    job.find(finding(2))
    assert 3 in job.asked
    job.measure({2: 0.8, 3: 0.8})
    assert [entry.ranks for entry in slow_ones(job)] == [(2,), (3,)]


def test_the_rest_of_a_group_is_slow_since_its_own_suspect_is() -> None:
    job = Job(nodes=4, gpus=2, tp=2, pp=1, records=DEAR).run(4)
    job.find(finding(2), finding(4, iteration=4, evidence="another group's"))
    job.measure(dict.fromkeys(range(2, 6), 0.8))
    assert [(entry.ranks[0], entry.iteration) for entry in slow_ones(job)] == [(2, 3), (3, 3), (4, 4), (5, 4)]
    assert slow_ones(job)[-1].evidence.endswith("another group's")


def test_of_a_group_whose_slow_member_is_found_the_others_just_wait() -> None:
    job = Job(nodes=4, gpus=2, tp=2, pp=1, records=DEAR).run(4)
    job.find(finding(2, 3))
    job.measure({3: 0.5})
    for _ in range(2):
        job.find(finding(2))
    assert [entry.ranks for entry in slow_ones(job)] == [(3,)]
    assert [outcome for _, outcome in outcomes(job)] == ["", "slow", "fine", "dropped", "dropped"]
    assert ("cleared", 2) in job.monitor.heard


def test_a_suspect_that_may_just_wait_takes_no_other_suspect_with_it() -> None:
    job = Job(nodes=4, gpus=2, tp=2, pp=1, records=DEAR).run(4)
    job.find(finding(2, 3))
    job.measure({3: 0.5})
    job.find(finding(2, 5))
    assert {2, 5} <= set(job.asked)
    job.measure({5: 0.6})
    assert [entry.ranks for entry in slow_ones(job)] == [(3,), (5,)]


def test_a_suspect_that_may_just_wait_is_not_declared_slow_where_no_other_suspect_is_slow() -> None:
    job = Job(nodes=4, gpus=2, tp=2, pp=1, records=DEAR).run(4)
    job.find(finding(2, 3))
    job.measure({3: 0.5})
    job.find(finding(2, 5))
    job.measure()
    assert [entry.ranks for entry in slow_ones(job)] == [(3,)]
    assert outcomes(job)[-1] == (3, "fine")


def test_who_was_found_well_long_ago_is_measured_again_though_its_group_has_a_slow_device() -> None:
    job = Job(nodes=4, gpus=2, tp=2, pp=1, records=DEAR).run(4)
    job.find(finding(2, 3))
    job.measure({3: 0.5})
    for _ in range(CLEARED_ITERATIONS + 1):
        job.find()
    job.find(finding(2))
    assert len(job.orders(m.Probe)) == 2


def test_what_is_found_of_who_is_being_measured_joins_the_suspicion() -> None:
    job = Job(records=DEAR).run(4)
    job.find(finding(3))
    assert 2 in job.asked
    job.find(finding(2))
    job.measure({2: 0.7, 3: 0.7})
    assert [entry.ranks for entry in slow_ones(job)] == [(2,), (3,)]
    assert [entry.ranks for entry in job.all(Suspected)] == [(3,), (3, 2)]
    assert len(job.orders(m.Probe)) == 1


def test_what_is_found_of_others_meanwhile_is_measured_next() -> None:
    job = Job(nodes=6, records=DEAR).run(4)
    job.find(finding(1))
    assert 11 not in job.asked
    job.find(finding(11))
    job.measure({1: 0.7, 11: 0.7})
    assert [entry.ranks for entry in slow_ones(job)] == [(1,), (11,)]
    assert outcomes(job) == [(1, ""), (1, "slow"), (2, ""), (2, "slow")]


def test_a_finding_outlives_the_change_of_plans_that_came_between() -> None:
    job = Job().run(4)
    job.find(finding(3))
    job.say(1, m.Stuck(epoch=1, error="connection reset"))
    job.wait(2)
    job.measure({3: 0.5})
    assert outcomes(job) == [(1, ""), (1, "unconfirmed")]
    job.park(stepped=5)
    job.run(1)
    job.feed(api.Tick())
    job.measure({3: 0.5})
    assert [entry.ranks for entry in slow_ones(job)] == [(3,)]


def test_a_finding_of_nobody_outlives_the_change_of_plans_as_well() -> None:
    job = known(nodes=8)
    job.find(of_nobody())
    job.say(1, m.Stuck(epoch=1, error="connection reset"))
    job.wait(2)
    job.measure(dict.fromkeys(range(16), 0.8))
    assert outcomes(job) == [(1, ""), (1, "unconfirmed")]
    job.park(stepped=job.job.record.committed)
    job.run(1)
    job.feed(api.Tick())
    job.measure(dict.fromkeys(range(16), 0.8))
    assert [entry.component for entry in slow_ones(job)] == ["job"]


def test_what_may_last_is_measured_again_under_another_plan_once() -> None:
    job = known(nodes=8)
    job.find(of_nobody())
    job.measure()
    job.crash(3)
    job.park(stepped=job.job.record.committed)
    job.run(1)
    job.feed(api.Tick())
    assert job.asked == job.job.record.active
    job.measure()
    probes = len(job.orders(m.Probe))
    for _ in range(MIN_LASTING_ITERATIONS):
        job.find()
    (entry,) = slow_ones(job)
    assert (entry.component, entry.epoch) == ("job", job.job.epoch)
    assert len(job.orders(m.Probe)) == probes


def test_all_of_a_finding_that_recover_have_their_failures_ended() -> None:
    job = Job(records=DEAR).run(4)
    job.find(finding(2, 3))
    job.measure({2: 0.5, 3: 0.5})
    job.find(finding(2, 3, kind="recovered", iteration=7))
    assert [entry.failure for entry in job.all(FailureEnded)] == [1, 2]
    assert job.job.record.slow == {}


def test_a_suspect_that_recovers_while_it_is_measured_is_not_declared_slow() -> None:
    job = Job(records=DEAR).run(4)
    job.find(finding(3))
    job.find(finding(3, kind="recovered"))
    job.measure({3: 0.5})
    assert outcomes(job) == [(1, ""), (1, "passed")]
    assert slow_ones(job) == []


# --- everybody ----------------------------------------------------------------------------------------------------


def test_a_loss_of_all_devices_is_the_jobs_with_its_cost_and_no_device_is_declared_slow() -> None:
    job = known(nodes=8)
    job.find(of_nobody())
    job.measure(dict.fromkeys(range(16), 0.8) | {3: 0.79, 5: 0.81})
    (entry,) = job.all(FailureFound)
    assert (entry.component, entry.ranks, entry.node, entry.device) == ("job", (), None, None)
    assert entry.speed == pytest.approx(0.8)
    assert "+25%, 0.1 s per iteration" in entry.cause
    assert entry.evidence.startswith("every device's probe is at 80% of what it was; ")
    assert (job.job.record.slow, job.orders(m.Park)) == ({}, [])
    assert job.job.record.slow_job is not None
    job.find(of_nobody(kind="recovered", iteration=9))
    assert [(ended.failure, ended.iteration) for ended in job.all(FailureEnded)] == [(1, 9)]
    assert job.job.record.slow_job is None


def test_a_device_that_stands_out_among_slower_ones_is_declared_slow() -> None:
    job = known(nodes=8)
    job.find(of_nobody())
    job.measure(dict.fromkeys(range(16), 0.9) | {3: 0.6})
    one, all_of_them = job.all(FailureFound)
    assert (one.component, one.ranks, one.speed) == ("device", (3,), pytest.approx(0.6 / 0.9))
    assert (all_of_them.component, all_of_them.speed) == ("job", pytest.approx(0.9))
    assert job.job.record.slow_job is not None


def test_a_slow_down_of_everybody_that_is_known_is_told_as_known_and_no_failure_again() -> None:
    job = known(nodes=8)
    for iteration in (4, 60):
        job.find(of_nobody(iteration=iteration))
        job.measure(dict.fromkeys(range(16), 0.8))
    (entry,) = job.all(FailureFound)
    assert outcomes(job)[-1] == (2, "dropped")
    assert [one.evidence for one in job.all(Suspected)][-1] == f"known, see failure {entry.failure}"


def test_who_joins_a_suspicion_and_is_found_well_is_in_its_row() -> None:
    job = known(nodes=4)
    job.find(finding(3))
    assert 2 in job.asked
    job.find(finding(2))
    job.measure()
    (end,) = [entry for entry in job.all(Suspected) if entry.cleared]
    assert (end.ranks, end.outcome) == ((3, 2), "fine")


def test_a_new_supervisor_does_not_take_what_is_slow_now_and_then_for_slow_all_the_time() -> None:
    job = known(nodes=4)
    job.find(finding(3, change=0.2, intermittent=Intermittent(share=0.1, factor=3.0)))
    job.measure()
    (entry,) = job.all(FailureFound)
    assert entry.intermittent
    heir = TakenOver(job).all_back()
    assert heir.job.record.slow == {}, "its detector will tell it anew"
    assert 3 not in heir.job.monitor.speeds()


def test_what_no_probe_shows_and_lasts_is_the_jobs_as_well() -> None:
    job = known()
    job.find(of_nobody())
    job.measure()
    assert outcomes(job)[-1] == (1, "fine")
    for _ in range(MIN_LASTING_ITERATIONS - 1):
        job.find()
    assert job.all(FailureFound) == []
    job.find()
    (entry,) = job.all(FailureFound)
    assert (entry.component, entry.speed) == ("job", pytest.approx(0.8))
    assert entry.evidence.startswith("every device's probe is fine, and it lasts")
    for _ in range(MIN_LASTING_ITERATIONS + 5):
        job.find()
    assert len(job.all(FailureFound)) == 1


@pytest.mark.parametrize("first", ["recovers", "device"])
def test_what_does_not_last_or_has_another_cause_is_not_the_jobs(first: str) -> None:
    job = known()
    job.find(of_nobody())
    job.measure()
    if first == "recovers":
        job.find(of_nobody(kind="recovered"))
    else:
        job.find(finding(3))
        job.measure({3: 0.6})
    for _ in range(MIN_LASTING_ITERATIONS + 5):
        job.find()
    assert "job" not in {entry.component for entry in job.all(FailureFound)}


def test_what_lasts_is_not_the_jobs_where_a_wait_explains_it() -> None:
    job = known()
    job.find(of_nobody())
    job.measure()
    job.find(of_part("reduction", iteration=5))
    for _ in range(MIN_LASTING_ITERATIONS + 5):
        job.find()
    assert [entry.component for entry in job.all(FailureFound)] == ["reduction"]


def test_what_lasts_and_is_told_by_then_is_not_told_again() -> None:
    job = known(nodes=8)
    job.find(of_nobody())
    job.measure()
    job.find(of_nobody(iteration=5))
    job.measure(dict.fromkeys(range(16), 0.8))
    for _ in range(MIN_LASTING_ITERATIONS + 5):
        job.find()
    assert [entry.component for entry in job.all(FailureFound)] == ["job"]


def test_what_all_have_lost_is_not_held_against_who_is_measured_later() -> None:
    job = known(nodes=8)
    job.find(of_nobody())
    job.measure(dict.fromkeys(range(16), 0.8))
    job.find(finding(3, iteration=20))
    job.measure(dict.fromkeys(range(16), 0.8))
    assert [entry.component for entry in job.all(FailureFound)] == ["job"]
    assert outcomes(job)[-1] == (2, "fine")


def test_a_new_supervisor_knows_what_all_have_lost_until_that_ends() -> None:
    job = known(nodes=8)
    job.find(of_nobody())
    job.measure(dict.fromkeys(range(16), 0.8))
    heir = TakenOver(job).all_back()
    share = heir.job.record.common_share
    assert share is not None
    assert (share.flops, share.memory_bytes) == (pytest.approx(0.8), pytest.approx(0.8))
    job.find(of_nobody(kind="recovered", iteration=9))
    assert TakenOver(job).job.record.common_share is None


def test_when_all_become_slower_still_what_is_left_for_them_is_known() -> None:
    job = known(nodes=8)
    for iteration, share in ((4, 0.8), (60, 0.6)):
        job.find(of_nobody(iteration=iteration, change=1.0 / share - 1.0))
        job.measure(dict.fromkeys(range(16), share))
    assert [ended.failure for ended in job.all(FailureEnded)] == [1]
    assert job.job.record.slow_job is not None
    assert job.job.record.slow_job.failure == 2
    assert job.job.record.common_share is not None
    assert job.job.record.common_share.flops == pytest.approx(0.6)


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_what_all_have_lost_is_known_though_somebody_stands_out_later(share: float) -> None:
    job = known(nodes=8)
    job.find(of_nobody())
    job.measure(dict.fromkeys(range(16), 0.8))
    job.find(of_nobody(iteration=8, change=0.6))
    job.measure(dict.fromkeys(range(16), share) | {3: 0.3})
    assert [entry.ranks for entry in slow_ones(job) if entry.component == "device"] == [(3,)]
    assert job.job.record.slow_job is not None
    assert job.job.record.slow_job.speed == pytest.approx(share)
    assert job.job.record.common_share is not None
    assert job.job.record.common_share.flops == pytest.approx(share)


def test_what_some_have_lost_is_not_taken_for_what_all_have() -> None:
    job = known(nodes=8)
    job.find(finding(3))
    job.measure(dict.fromkeys(job.asked, 0.8))
    assert job.job.record.common_share is None


def test_who_stands_by_is_well_again_when_it_is_as_slow_as_all_others() -> None:
    job = Job(examine=True, nodes=2)
    job.measure()
    job.run(2)
    job.slow_by_verdict(3, 0.05)
    assert 3 not in job.job.record.active
    job.find(of_nobody())
    job.measure(dict.fromkeys(range(4), 0.8))
    job.train(60)
    assert job.asked == (3,)
    job.measure({3: 0.8})
    assert [entry.failure for entry in job.all(FailureEnded)] == [1]


def test_of_many_findings_that_one_device_explains_none_is_told_beside_it() -> None:
    job = known()
    job.find(finding(3), of_nobody(), of_part("collective", 2, 3))
    job.measure({3: 0.6})
    job.feed(api.Tick())
    assert [entry.component for entry in job.all(FailureFound)] == ["device"]
    assert sorted(outcome for _, outcome in outcomes(job)) == ["", "dropped", "dropped", "slow"]


# --- slower still -------------------------------------------------------------------------------------------------


def test_a_device_that_gets_slower_after_its_verdict_has_another_and_the_plan_is_reconsidered() -> None:
    job = Job(records=DEAR).run(4)
    job.find(finding(3, change=0.04))
    job.measure({3: 0.93})
    before = len(job.texts("notice"))
    job.monitor.estimates = {3: 0.77}
    job.find(finding(3, change=0.3, iteration=5))
    assert [(entry.failure, entry.speed) for entry in slow_ones(job)] == [(1, pytest.approx(0.93)), (2, 0.77)]
    (ended,) = job.all(FailureEnded)
    assert (ended.failure, ended.node, ended.device, ended.iteration) == (1, "n2", 1, 5)
    assert job.job.record.slow["n2", 1].failure == 2
    assert len(job.orders(m.Probe)) == 1, "it is known to be slow"
    assert any("rank 3 is slow: the plan stays" in text for text in job.texts("notice")[before:])
    assert outcomes(job)[-2:] == [(2, ""), (2, "slow")]
    assert job.monitor.heard[-1] == ("confirmed", 3, 0.77)


def test_a_speed_that_is_nearly_the_verdicts_is_no_news() -> None:
    job = Job(records=DEAR).run(4)
    job.find(finding(3))
    job.measure({3: 0.5})
    job.find(finding(3, change=0.93))
    assert len(slow_ones(job)) == 1
    assert outcomes(job)[-1] == (2, "dropped")


# --- what the probe shows, and training --------------------------------------------------------------------------


def test_five_percent_that_the_probe_shows_are_enough_for_who_is_found() -> None:
    job = known()
    job.find(finding(3, change=0.05))
    job.measure({3: 0.95})
    assert [entry.ranks for entry in slow_ones(job)] == [(3,)]
    assert slow_ones(job)[0].confidence == pytest.approx(1.0, abs=1e-3)


def test_that_a_suspect_was_cleared_is_forgotten_after_a_while() -> None:
    job = Job(records=DEAR).run(4)
    job.find(finding(3, change=0.05))
    job.measure()
    for _ in range(CLEARED_ITERATIONS + 1):
        job.find()
    job.find(finding(3, change=0.05))
    job.measure()
    assert slow_ones(job) == []
    job.find(finding(3, change=0.05))
    job.measure()
    (entry,) = slow_ones(job)
    assert entry.cause == "rank 3 works at 95% of a healthy device's speed, in its training, not in a matrix product"


def test_a_little_that_training_shows_alone_is_no_verdict_however_often_it_is_found() -> None:
    """Devices are unlike by so much, and wander by it."""
    job = Job(records=DEAR).run(4)
    for change in (0.039, 0.035, 0.037):
        job.find(finding(3, change=change))
        job.measure()
    assert [outcome for _, outcome in outcomes(job)] == ["", "fine"] * 3
    assert slow_ones(job) == []


def test_a_large_change_is_believed_where_the_probe_leans_to_it_and_not_against_a_fine_one() -> None:
    noisy = {0: 0.7, 1: 1.0, 2: 1.0, 4: 0.75}
    for share, declared_slow in ((0.4, True), (1.0, False)):
        job = known()
        job.find(finding(3, change=1.5, confidence=1.0 - 1e-9))
        job.measure({rank: noisy.get(rank, 1.0) for rank in range(6)} | {3: share})
        assert bool(slow_ones(job)) == declared_slow


def test_a_device_that_is_slow_now_and_then_is_declared_slow_though_its_probe_is_fine() -> None:
    job = Job(records=DEAR).run(4)
    job.find(finding(3, change=0.2, intermittent=Intermittent(share=0.1, factor=3.0)))
    job.measure()
    (entry,) = slow_ones(job)
    assert entry.speed == pytest.approx(1 / 1.2)
    assert entry.cause == (
        "rank 3 is slow now and then: 10% of the iterations at 3.0 times, on average 83% of its speed"
    )
    assert job.monitor.heard == [], "its level is not that of a device that is slow all the time"
    assert any("rank 3 is slow: the plan stays" in text for text in job.texts("notice"))


# --- what is no device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", ["collective", "reduction", "data"])
def test_what_ranks_do_together_or_wait_for_is_told_with_what_it_costs_until_it_ends(component: str) -> None:
    job = Job().run(4)
    job.find(of_part(component, 2, 3))
    (entry,) = job.all(FailureFound)
    assert (entry.component, entry.ranks, entry.node, entry.device) == (component, (2, 3), "n2", None)
    assert (entry.speed, entry.iteration, entry.confidence) == (pytest.approx(1 / 1.2), 3, 0.98)
    assert "ranks 2-3" in entry.cause
    assert entry.cause.endswith("+20%, 0.08 s per iteration")
    assert (job.orders(m.Probe), job.orders(m.Park)) == ([], [])
    job.find(of_part(component, 2, 3))
    assert len(job.all(FailureFound)) == 1, "it is known"
    assert outcomes(job) == [(1, ""), (1, "slow"), (2, "dropped")]
    job.find(of_part(component, 2, 3, kind="recovered", iteration=7))
    assert [(ended.failure, ended.iteration) for ended in job.all(FailureEnded)] == [(1, 7)]
    assert job.job.record.slow_parts == {}


def test_where_predictions_are_far_off_costs_are_those_of_what_iterations_took() -> None:
    """They took three times what was predicted, and half as long again since iteration 7."""
    took = [(n, 1.2 if n < 7 else 1.8, 0.4) for n in range(1, 11)]
    part = Job().run(10)
    part.job.inquiry.judged.clear()
    part.job.inquiry.judged.extend(took)
    part.find(of_part("reduction", 2, 3, change=0.9, iteration=7))
    (entry,) = part.all(FailureFound)
    assert entry.cause.endswith("+30%, 0.36 s per iteration"), "0.9 of what was predicted"
    assert entry.speed == pytest.approx(1 / 1.3)
    whole = known(nodes=8)
    whole.job.inquiry.judged.clear()
    whole.job.inquiry.judged.extend(took)
    whole.find(of_nobody(change=0.5, iteration=7))
    whole.measure(dict.fromkeys(range(16), 0.8))
    (entry,) = whole.all(FailureFound)
    assert "+50%, 0.6 s per iteration" in entry.cause


def test_what_all_groups_wait_for_is_told_of_all_ranks() -> None:
    job = Job().run(4)
    job.find(of_part("reduction"))
    (entry,) = job.all(FailureFound)
    assert (entry.component, entry.ranks, entry.node) == ("reduction", (0, 1, 2, 3, 4, 5), None)
    assert "of all ranks" in entry.cause
    job.find(of_part("reduction", kind="recovered"))
    assert job.job.record.slow_parts == {}


@pytest.mark.parametrize("first", [True, False])
def test_a_group_that_waits_for_its_slow_device_is_no_failure_of_its_own(first: bool) -> None:
    job = known()
    if first:
        job.find(of_part("collective", 2, 3))
    job.find(finding(3))
    job.measure({3: 0.6})
    if not first:
        job.find(of_part("collective", 2, 3))
    assert job.job.record.slow_parts == {}
    assert list(job.job.record.slow) == [("n2", 1)]
    assert len(job.all(FailureFound)) == (2 if first else 1)
    assert [ended.evidence for ended in job.all(FailureEnded)] == (["failure 2 explains it"] if first else [])


def test_a_part_that_the_next_plan_does_not_have_is_over() -> None:
    job = known(nodes=8)
    job.find(of_part("data", 2, 3))
    job.find(of_part("data", 4, 5))
    job.crash(3)
    job.park(stepped=job.job.record.committed)
    job.run(job.job.record.committed + 1)
    (ended,) = job.all(FailureEnded)
    assert ended.evidence == "new plan: usual times are learned again"
    assert list(job.job.record.slow_parts) == [("data", (4, 5))]


def test_a_part_ends_with_its_group_though_its_ranks_have_work_still() -> None:
    job = known(nodes=8)
    parts = (("data", (4, 5)), ("data", (5,)), ("collective", (4, 5)), ("reduction", (4, 6)))
    for component, ranks in parts:
        job.find(of_part(component, *ranks))
    job.crash(3)
    job.park(stepped=job.job.record.committed)
    job.run(1)
    assert list(job.job.record.slow_parts) == [("data", (4, 5)), ("reduction", (4, 6))]


def test_a_tensor_parallel_group_that_stays_keeps_its_verdict() -> None:
    job = Job(nodes=4, gpus=2, tp=2, pp=1).run(4)
    job.find(of_part("collective", 2, 3))
    job.find(of_part("reduction", 4))
    job.crash(7)
    job.park(stepped=job.job.record.committed)
    job.run(1)
    assert list(job.job.record.slow_parts) == [("collective", (2, 3))]


def test_of_many_ranks_the_first_are_named() -> None:
    job = known(nodes=20, declare=msgspec.structs.replace(LONG, micro_batches=40))
    job.find(of_part("reduction", *range(20)))
    (entry,) = job.all(FailureFound)
    assert entry.ranks == tuple(range(20))
    assert "sums of gradients of ranks 0-15 and 4 more take longer" in entry.cause


def test_what_becomes_slow_much_later_than_its_device_has_another_cause() -> None:
    job = known()
    job.find(finding(3))
    job.measure({3: 0.6})
    job.find(of_part("collective", 2, 3, iteration=60))
    assert [entry.component for entry in job.all(FailureFound)] == ["device", "collective"]


def test_a_new_supervisor_knows_what_is_slow_and_no_device() -> None:
    before = known(nodes=8)
    before.find(of_part("data", 2, 3))
    before.find(of_nobody(iteration=50))
    before.measure(dict.fromkeys(range(16), 0.8))
    slow_job, slow_parts = before.job.record.slow_job, dict(before.job.record.slow_parts)
    heir = TakenOver(before).all_back()
    assert heir.job.record.slow_job == slow_job is not None
    (part,) = slow_parts.values()
    assert heir.job.record.slow_parts == {}, "its detector learns anew what is usual for them"
    assert [entry.failure for entry in heir.all(FailureEnded)] == [part.failure]
