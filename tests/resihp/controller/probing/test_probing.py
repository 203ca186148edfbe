"""Devices and links are measured before they get work: who begins, who stands by, and what is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound, JoinRefused, PlanDecided, ProbesTaken
from tests.resihp.controller.fail_slow.test_slowness import EVEN, Job
from tests.resihp.controller.test_takeover import TakenOver


def examined(speeds: dict[int, float] | None = None, silent: tuple[int, ...] = (), **options: Any) -> Job:
    """A job all of whose devices are measured first, and have answered; DP3 x PP2 on three nodes of two."""
    job = Job(examine=True, **options)
    job.measure(speeds, silent)
    return job


def standby(job: Job) -> tuple[int, ...]:
    return job.plan.layout.standby


# --- the start ----------------------------------------------------------------------------------------------------


def test_every_device_and_the_links_around_the_ring_are_measured_before_the_first_plan() -> None:
    job = Job(nodes=2, examine=True)
    ((ranks, probe),) = job.orders(m.Probe)
    assert ranks == (0, 1, 2, 3)
    assert probe == m.Probe(probe=1, pairs=(((0, 1), (2, 3)), ((1, 2), (0, 3))))
    job.feed(api.Tick())
    assert job.all(PlanDecided) == []
    job.measure(silent=(2,))
    assert job.all(PlanDecided) == [], "one answer is still to come"
    job.say(2, m.Probed(probe=1, speed=m.Speed(flops=1e14, memory_bytes=1e12)))
    assert job.plan.layout.ranks == (0, 1, 2, 3)
    job.run(3)
    assert job.work == EVEN


def test_nobody_is_measured_unless_the_job_wants_it() -> None:
    job = Job().run(1)
    assert job.orders(m.Probe) == []
    assert job.all(ProbesTaken) == []


def test_what_was_measured_is_in_the_journal_before_the_plan() -> None:
    job = examined({1: 0.5}, nodes=2)
    kinds = [type(action.entry) for action in job.actions if isinstance(action, api.Log)]
    assert kinds.index(ProbesTaken) < kinds.index(PlanDecided)
    (taken,) = job.all(ProbesTaken)
    assert (taken.probe, taken.occasion, taken.seconds, taken.links) == (1, "start", 0.2, ())
    assert [(d.rank, d.node, d.device, d.fit) for d in taken.devices] == [
        (0, "n1", 0, True),
        (1, "n1", 1, False),
        (2, "n2", 0, True),
        (3, "n2", 1, True),
    ]
    assert [(d.flops, d.memory_bytes, d.speed) for d in taken.devices][1] == (0.5e14, 0.5e12, 0.5)


def test_a_link_that_is_slower_than_the_others_of_its_kind_is_told_and_used() -> None:
    job = Job(examine=True)
    _, probe = job.orders(m.Probe)[-1]
    for rank in range(6):
        peers = [a + b - rank for round_ in probe.pairs for a, b in round_ if rank in (a, b)]
        transfers = tuple(
            m.Transfer(peer=peer, seconds=4e-3 if {rank, peer} == {1, 2} else 1e-3) for peer in sorted(peers)
        )
        job.say(rank, m.Probed(probe=1, speed=m.Speed(flops=1e14), transfers=transfers))
    (taken,) = job.all(ProbesTaken)
    assert len(taken.links) == 6
    assert [(link.ranks, link.nodes, link.speed) for link in taken.links if not link.fit] == [
        ((1, 2), ("n1", "n2"), 0.25)
    ]
    assert "link n1-n2 (ranks 1 and 2): at 25% of its peers" in job.texts("warning")
    assert standby(job) == ()


# --- who is not fit -----------------------------------------------------------------------------------------------


def test_a_device_that_is_not_fit_stands_by_and_the_others_begin() -> None:
    job = examined({1: 0.5})
    assert standby(job) == (1,)
    assert job.plan.layout.active == (0, 2, 3, 4, 5)
    (told,) = job.texts("warning")
    assert told.startswith("rank 1 (n1 device 1): fails its probe: ")
    assert "at 50% of its peers" in told
    job.run(3)
    assert job.job.record.committed == 3
    assert job.all(FailureFound) == []


def test_a_device_that_cannot_be_measured_stands_by() -> None:
    job = examined(silent=(4,))
    job.say(4, m.Probed(probe=1, error="device cuda:0: fails its probe: a product is off by 3"))
    assert standby(job) == (4,)
    assert "a product is off by 3" in job.texts("warning")[0]


def test_a_device_that_was_too_full_to_be_measured_is_not_judged() -> None:
    job = examined(silent=(4,))
    job.say(4, m.Probed(probe=1, untried="device cuda:0: has no memory left to measure it in"))
    assert standby(job) == ()
    assert job.texts("warning") == []
    assert any("rank 4" in text and "no memory left" in text for text in job.texts("notice"))
    (entry,) = [device for taken in job.all(ProbesTaken) for device in taken.devices if device.rank == 4]
    assert (entry.fit, entry.speed, entry.flops) == (True, None, 0.0)
    assert "not measured" in entry.evidence
    assert not {job.job.device_of(4)} & set(job.job.record.reference), "and no later probe is compared with it"


def test_links_that_could_not_be_measured_make_nobody_unfit() -> None:
    job = examined(silent=(4,))
    job.say(4, m.Probed(probe=1, speed=m.Speed(flops=1e14, memory_bytes=1e12), missed="probe of a link: peer is gone"))
    assert standby(job) == ()


def test_a_spare_takes_the_place_of_a_device_that_is_not_fit() -> None:
    job = examined({1: 0.5}, spares=1)
    assert 1 in standby(job)
    assert {4, 5} & set(job.plan.layout.active)


def test_no_spare_of_another_node_takes_a_place_in_a_tensor_parallel_group() -> None:
    job = examined({1: 0.5}, tp=2)
    assert 1 in standby(job)
    stages = [stage.ranks for replica in job.plan.layout.replicas for stage in replica.stages]
    assert all(len({job.job.members[rank].node for rank in ranks}) == 1 for ranks in stages)


def test_with_enough_spares_the_first_layout_is_what_was_asked_for() -> None:
    """`Settings.spares`: nodes beyond what the first layout uses."""
    job = examined({1: 0.5}, spares=1)
    assert len(job.plan.layout.active) == 4
    assert job.plan.layout.describe().startswith("DP2 x PP2 x TP1")


@pytest.mark.parametrize("tp", [1, 2])
def test_where_all_are_fit_the_grid_is_as_without_an_examination(tp: int) -> None:
    assert examined(tp=tp).plan == Job(tp=tp).plan


def test_when_no_device_is_fit_all_of_them_are_used() -> None:
    job = Job(nodes=2, examine=True)
    for rank in range(4):
        job.say(rank, m.Probed(probe=1, error="device cuda: fails its probe"))
    assert job.plan.layout.active == (0, 1, 2, 3)
    assert any("not enough devices pass their probe" in text for text in job.texts("warning"))
    job.run(2)
    assert job.job.record.committed == 2


def test_a_device_that_is_used_all_the_same_is_not_said_to_stand_by() -> None:
    job = Job(nodes=2, examine=True)
    for rank in range(4):
        job.say(rank, m.Probed(probe=1, error="device cuda: fails its probe"))
    assert [text for text in job.texts("warning") if "on standby" in text] == []


def test_a_device_that_never_answers_stands_by() -> None:
    job = examined(silent=(3,))
    job.wait(29)
    assert job.all(PlanDecided) == []
    job.wait(2)
    assert standby(job) == (3,)
    assert "no answer to its probe within 30 s" in job.texts("warning")[0]
    job.run(1)
    job.say(3, m.Probed(probe=1, speed=m.Speed(flops=1e14, memory_bytes=1e12)))
    assert job.job.record.committed == 1, "too late to matter"


def test_a_device_that_stands_by_stays_out_of_later_plans() -> None:
    job = examined({1: 0.5})
    job.run(2)
    job.crash(4)
    job.park(stepped=2)
    assert 1 in standby(job)
    job.run(1)
    assert job.job.record.committed == 3


def test_a_device_that_stood_by_joins_once_its_probe_is_fine() -> None:
    job = examined({1: 0.5}, nodes=2)
    job.run(1)
    job.train(62)
    assert job.asked == (1,)
    job.measure()
    assert job.all(ProbesTaken)[-1].occasion == "standby"
    job.train(1)
    job.paused()
    assert job.work == EVEN


# --- newcomers ----------------------------------------------------------------------------------------------------


def crashed(**options: Any) -> Job:
    """Rank 1 died and training goes on without it; rank 6 is being started in its place."""
    job = examined(**options)
    job.run(1)
    job.crash(1)
    job.park(stepped=1)
    job.run(1)
    return job


def test_a_newcomer_that_passes_its_probe_joins() -> None:
    job = crashed()
    answer = job.join(6)
    assert job.orders(m.Probe, answer) == [((6,), m.Probe(probe=2))]
    assert job.job.pause is None
    job.measure()
    job.feed(api.Tick())
    assert job.job.pause is not None
    job.paused()
    assert 6 in job.job.record.active
    assert [(taken.occasion, len(taken.devices)) for taken in job.all(ProbesTaken)] == [("start", 6), ("join", 1)]


def test_a_newcomer_that_fails_its_probe_stands_by() -> None:
    job = crashed()
    job.join(6)
    job.measure({6: 0.5})
    job.train(10)
    assert job.job.pause is None
    assert any(text.startswith("rank 6 (n1 device 1): failed its probe") for text in job.texts("warning"))
    assert job.all(JoinRefused) == []
    job.crash(3)
    job.park(stepped=job.job.record.committed)
    assert 6 in standby(job)


def test_a_newcomer_is_compared_with_what_all_devices_gave_at_the_start() -> None:
    job = crashed()
    job.join(6)
    job.measure({6: 0.7})
    (device,) = job.all(ProbesTaken)[-1].devices
    assert (device.speed, device.fit) == (pytest.approx(0.7), False)


def test_a_newcomer_that_never_answers_stands_by() -> None:
    job = crashed()
    job.join(6)
    job.train(32)
    assert job.job.pause is None
    assert any("no answer to its probe" in text for text in job.texts("warning"))


def test_a_newcomer_that_dies_under_its_probe_is_forgotten() -> None:
    job = crashed()
    job.join(6)
    job.crash(6)
    job.train(40)
    assert 6 not in job.plan.layout.ranks
    assert job.job.training


def test_a_newcomer_gets_no_work_before_it_has_been_measured() -> None:
    job = crashed()
    job.join(6)
    job.crash(3)
    job.park(stepped=2)
    assert 6 not in job.plan.layout.active


# --- against former jobs ------------------------------------------------------------------------------------------


def remembered(job: Job, hosts: str = "h", hardware: str = "", **shares: float) -> None:
    """What the devices of nodes usually gave: these shares of what healthy ones give in these tests."""
    usual = {
        (node, hosts, hardware): m.Speed(flops=share * 1e14, memory_bytes=share * 1e12)
        for node, share in shares.items()
    }
    job.feed(api.NodesRemembered(usual=usual))


def test_a_node_that_is_slower_than_in_former_jobs_stands_by_though_its_peers_are_no_faster() -> None:
    """A cluster of two kinds of nodes: beside the slower kind, nobody would notice."""
    job = Job(examine=True)
    remembered(job, n1=1.0, n2=1.4, n3=1.0)
    job.measure()
    assert standby(job) == (2, 3)
    told = [text for text in job.texts("warning") if "former jobs" in text]
    assert [text.partition(":")[0] for text in told] == ["rank 2 (n2 device 0)", "rank 3 (n2 device 1)"]
    assert "at 71% of this node's speed in former jobs" in told[0]
    (taken,) = job.all(ProbesTaken)
    assert [(d.rank, d.fit) for d in taken.devices] == [(r, r not in (2, 3)) for r in range(6)]
    assert [d.speed for d in taken.devices if not d.fit] == [pytest.approx(1 / 1.4)] * 2
    job.run(2)
    assert job.job.record.committed == 2


def test_one_device_that_is_as_fast_as_ever_speaks_for_its_node() -> None:
    job = Job(examine=True)
    remembered(job, n1=1.0, n2=1.0, n3=1.0)
    job.measure({2: 0.81})
    assert standby(job) == ()


def test_where_most_nodes_are_slower_than_in_former_jobs_it_is_told_and_nobody_is_kept_out() -> None:
    job = Job(examine=True)
    remembered(job, n1=1.5, n2=2.0, n3=1.0)
    job.measure()
    assert standby(job) == ()
    (told,) = job.texts("warning")
    assert told.startswith("2 of 3 nodes are slower than in former jobs, node n2: matrix products at 50%")


@pytest.mark.parametrize("nodes", [1, 3])
def test_where_all_nodes_are_slower_nobody_is_kept_out(nodes: int) -> None:
    job = Job(examine=True, nodes=nodes)
    remembered(job, **{f"n{n + 1}": 1.5 for n in range(nodes)})
    job.measure()
    assert standby(job) == ()
    assert len(job.texts("warning")) == 1


@pytest.mark.parametrize(("hosts", "hardware"), [("elsewhere", ""), ("h", "H100")])
def test_a_node_of_that_name_elsewhere_or_with_other_devices_is_another_one(hosts: str, hardware: str) -> None:
    job = Job(examine=True)
    remembered(job, hosts, hardware, n1=1.0, n2=1.4, n3=1.0)
    job.measure()
    assert standby(job) == ()


def test_what_is_remembered_too_late_holds_nothing_up() -> None:
    job = examined()
    assert standby(job) == ()
    remembered(job, n1=1.0, n2=1.4, n3=1.0)
    job.run(2)
    assert job.job.record.committed == 2


def test_a_node_slower_than_in_former_jobs_stays_out_until_it_is_as_fast_again() -> None:
    job = Job(examine=True)
    remembered(job, n1=1.0, n2=1.4, n3=1.0)
    job.measure()
    job.run(1)
    job.train(7)
    assert job.asked == (2, 3)
    job.measure()
    job.train(12)
    assert job.job.record.unfit == {("n2", 0), ("n2", 1)}
    job.measure({2: 1.38, 3: 1.4})
    job.train(1)
    job.paused()
    assert standby(job) == ()


def test_newcomers_of_a_node_that_is_slower_than_in_former_jobs_stand_by() -> None:
    job = crashed()
    remembered(job, n1=1.4, n2=1.0, n3=1.0)
    job.job.record.reference.pop(("n1", 0))
    job.join(6)
    job.measure()
    assert any(text.startswith("rank 6 (n1 device 1): failed its probe") for text in job.texts("warning"))


# --- a new supervisor ---------------------------------------------------------------------------------------------


def test_a_new_supervisor_knows_who_stands_by_for_failing_the_probe() -> None:
    before = examined({1: 0.5}, nodes=2).run(2)
    heir = TakenOver(before).all_back()
    assert heir.job.record.unfit == before.job.record.unfit == {("n1", 1)}
    assert heir.job.record.reference == before.job.record.reference
    heir.crash(3)
    heir.park(stepped=2)
    assert 1 in heir.plan.layout.standby


def test_a_new_supervisor_measures_again_what_was_never_answered() -> None:
    before = Job(nodes=2, examine=True)
    heir = TakenOver(before).all_back()
    ((ranks, probe),) = heir.orders(m.Probe)
    assert ranks == (0, 1, 2, 3)
    for rank in ranks:
        heir.say(rank, m.Probed(probe=probe.probe, speed=m.Speed(flops=1e14)))
    assert heir.plan.layout.active == (0, 1, 2, 3)


def test_a_new_supervisor_agrees_on_a_device_that_is_only_nearly_as_fast() -> None:
    before = examined({1: 0.5}, nodes=2)
    before.run(1)
    before.train(62)
    before.measure({1: 0.9})
    heir = TakenOver(before).all_back()
    assert heir.job.record.unfit == before.job.record.unfit


def test_a_new_supervisor_measures_newcomers_before_they_join() -> None:
    before = crashed()
    before.join(6)
    heir = TakenOver(before).all_back()
    heir.feed(api.Tick())
    assert heir.job.pause is None
    assert [ranks for ranks, _ in heir.orders(m.Probe)] == [(6,)]
