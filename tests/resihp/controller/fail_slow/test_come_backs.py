"""A device that comes back gets as many looks as at the start; one that a probe set aside is looked at again, soon."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.controller.probing import probe_orders
from resihp.detector import probes
from resihp.faults import parse
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound, PlanDecided, ProbesTaken
from tests.resihp.controller.fail_slow.test_slowness import Job, finding, slow_ones
from tests.resihp.controller.test_takeover import TakenOver

Shares = Callable[[int, int], float]
"""Of a healthy device's speed, that a rank shows in a look while others train: 0 is the first one at it."""
NEWCOMER = 6
TRAINING = dict.fromkeys(range(6), 10)
"""So much work ranks get done in a second, in the middle of an iteration."""


class ComeBack(Job):
    """DP3 x PP2 on three nodes of two: rank 1 has died, and rank 6 has come in its place."""

    def __init__(self, *, shared: bool = True, **options: Any) -> None:
        super().__init__(examine=True, **options)
        self.shared = shared
        self.answered = 0
        self.seen: dict[int, int] = {}
        self.answer(lambda rank, look: 1.0)
        self.seen.clear()
        self.run(1)
        self.crash(1)
        self.park(stepped=1)
        self.run(1)
        self.join(NEWCOMER)

    def answer(self, shares: Shares) -> ComeBack:
        """Everybody who was asked answers, until nobody is asked any more."""
        while len(asked := self.orders(m.Probe)) > self.answered:
            ranks, probe = asked[self.answered]
            self.answered += 1
            for rank in ranks:
                look = self.seen[rank] = self.seen.get(rank, -1) + 1
                share = shares(rank, look)
                speed = m.Speed(flops=share * 1e14, memory_bytes=share * 1e12)
                self.say(rank, m.Probed(probe=probe.probe, speed=speed, seconds=0.1, shared=self.shared))
        return self

    def live(self, seconds: float, shares: Shares) -> ComeBack:
        """Time passes, in which training goes on and probes are answered."""
        until = self.now + seconds
        while self.now < until:
            self.train(0.5)
            self.answer(shares)
            if self.job.pause is not None:
                self.paused()
        return self

    @property
    def works(self) -> bool:
        return NEWCOMER in self.job.record.active

    @property
    def measured(self) -> list[ProbesTaken]:
        return [taken for taken in self.all(ProbesTaken) if taken.occasion in ("join", "standby")]


def newcomer_at(share: float) -> Shares:
    return lambda rank, look: share if rank == NEWCOMER else 1.0


@pytest.mark.parametrize("shared", [True, False], ids=["shared processors", "own devices"])
def test_a_device_that_was_disturbed_as_it_came_back_gets_its_work(shared: bool) -> None:
    job = ComeBack(shared=shared).live(2, lambda rank, look: 0.54 if (rank, look) == (NEWCOMER, 0) else 1.0)
    assert job.works
    assert job.job.record.unfit == set()
    (taken,) = job.measured
    assert (taken.looks, taken.devices[0].fit, taken.devices[0].speed) == (2, True, 1.0)


def test_a_newcomer_in_doubt_is_measured_at_the_same_time_as_devices_that_train() -> None:
    """One after another, each witness would have the machine to itself while the others wait for it."""
    job = ComeBack()
    alone, together = job.orders(m.Probe)[-1][0], (0, 2, 3, 4, NEWCOMER)
    job.answer(lambda rank, look: 0.6 if rank == NEWCOMER and look < 3 else 1.0)
    assert [ranks for ranks, _ in job.orders(m.Probe)][1:] == [alone, together, together, together]


def test_who_is_slower_only_because_others_train_beside_it_gets_its_work() -> None:
    """All are at 60 % of what they gave at the start, when nobody trained."""
    assert ComeBack().live(2, lambda rank, look: 0.6).works


@pytest.mark.parametrize("shared", [True, False], ids=["shared processors", "own devices"])
def test_a_device_at_70_percent_that_comes_back_stands_by(shared: bool) -> None:
    job = ComeBack(shared=shared).live(60, newcomer_at(0.7))
    assert not job.works
    evidence = job.measured[0].devices[0].evidence
    assert evidence.startswith("matrix products at 70% of its peers")
    looks = probes.SHARED_LOOKS[0] if shared else probes.RECHECK_LOOKS[0]
    assert f"best of {looks} more looks" in evidence
    assert any(text.endswith("; measured again in 5 s") for text in job.texts("warning"))


def test_a_device_that_a_probe_set_aside_is_measured_soon_then_ever_more_rarely() -> None:
    """It has its processor to itself: one look tells that it is as slow as before, and disturbs nobody who trains."""
    job = ComeBack(shared=False)
    asked_at: list[float] = []
    ends = job.now + 1500
    while job.now < ends:
        before = len(job.orders(m.Probe))
        job.train(0.5)
        job.answer(newcomer_at(0.7))
        if len(job.orders(m.Probe)) > before:
            asked_at.append(job.now)
    waits = [round(after - at) for at, after in pairwise(asked_at)]
    assert waits[:6] == pytest.approx([5, 10, 20, 40, 80, 160], abs=2)
    assert {ranks for ranks, _ in job.orders(m.Probe)[-5:]} == {(NEWCOMER,)}
    assert probes.again_in_s(8, 60.0) == probes.again_in_s(50, 60.0) == 600.0


def test_a_device_that_a_probe_set_aside_gets_its_work_as_soon_as_it_is_well() -> None:
    job = ComeBack().answer(newcomer_at(0.7))
    assert job.job.record.unfit == {("n1", 1)}
    job.live(4, newcomer_at(1.0))
    assert not job.works, "it is not measured again yet"
    job.live(4, newcomer_at(1.0))
    assert job.works
    assert job.job.record.unfit == set()
    assert job.job.record.unfit_probes == {}


def test_a_new_supervisor_waits_as_long_as_the_last_one_would_have() -> None:
    job = ComeBack(shared=False).live(25, newcomer_at(0.7))
    assert job.job.record.unfit_probes == {("n1", 1): 3}
    job.crash(3)  # the plan after this one knows rank 6: nobody takes it for a newcomer
    job.park(stepped=job.job.record.committed)
    job.run(1)
    heir = TakenOver(job).all_back()
    assert heir.job.record.unfit_probes == {("n1", 1): 3}
    asked = len(heir.orders(m.Probe))
    heir.wait(18, TRAINING, "compute")
    assert len(heir.orders(m.Probe)) == asked
    heir.wait(5, TRAINING, "compute")
    assert heir.orders(m.Probe)[-1][0] == (NEWCOMER,)


def test_on_shared_processors_one_look_without_witnesses_is_not_held_against_a_newcomer() -> None:
    job = Job(examine=True, nodes=1, gpus=2, tp=1, pp=1)
    job.measure()
    job.run(1)
    job.crash(1)
    job.park(stepped=1)
    job.run(1)
    job.slow_by_verdict(0, 0.5)  # nobody to compare with
    job.join(2)
    probe = job.orders(m.Probe)[-1][1].probe
    job.say(2, m.Probed(probe=probe, speed=m.Speed(flops=6e13, memory_bytes=6e11), seconds=0.1, shared=True))
    assert job.job.record.unfit == set()
    assert any("to compare it with: ignored" in text for text in job.texts("notice"))


def test_a_witness_in_a_long_iteration_is_waited_for_and_the_newcomer_is_not_blamed() -> None:
    job = ComeBack()
    job.answered += 1
    job.say(NEWCOMER, m.Probed(probe=2, speed=m.Speed(flops=6e13, memory_bytes=6e11), seconds=0.1, shared=True))
    job.say(NEWCOMER, m.Probed(probe=3, speed=m.Speed(flops=1e14, memory_bytes=1e12), seconds=0.1, shared=True))
    job.wait(40, TRAINING, "compute")
    assert job.measured == []
    job.answer(newcomer_at(1.0))
    job.feed(api.Tick())
    assert job.measured[0].devices[0].fit


def test_a_newcomer_whose_witness_has_died_is_measured_beside_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_orders, "MAX_REFERENCE_DEVICES", 1)
    job = ComeBack()
    job.answered += 1
    speed = m.Speed(flops=7e13, memory_bytes=7e11)
    job.say(NEWCOMER, m.Probed(probe=2, speed=speed, seconds=0.1, shared=True))
    asked, looks = job.orders(m.Probe)[-1]
    (witness,) = set(asked) - {NEWCOMER}
    job.crash(witness)
    job.say(NEWCOMER, m.Probed(probe=looks.probe, speed=speed, seconds=0.1, shared=True))
    asked, _ = job.orders(m.Probe)[-1]
    assert len(asked) == 2
    assert witness not in asked
    assert job.measured == []


def test_a_newcomer_that_dies_in_doubt_leaves_its_device_unjudged() -> None:
    job = ComeBack()
    job.answered += 1
    job.say(NEWCOMER, m.Probed(probe=2, speed=m.Speed(flops=6e13, memory_bytes=6e11), seconds=0.1, shared=True))
    job.crash(NEWCOMER)
    job.feed(api.Tick())
    job.answer(newcomer_at(1.0))
    job.feed(api.Tick())
    assert job.job.record.unfit == set()


@pytest.mark.parametrize("looks", [1, 3])
def test_on_shared_processors_a_suspect_is_declared_slow_by_three_looks_and_not_by_one(looks: int) -> None:
    """Rank 3 trains at half its speed for a while, and its probe shows as much in the first `looks` of them."""
    job = ComeBack().live(2, newcomer_at(1.0))
    plans = len(job.all(PlanDecided))
    job.seen.clear()
    job.find(finding(3, iteration=job.job.record.committed))
    job.answer(lambda rank, look: 0.5 if rank == 3 and look < looks else 1.0)
    assert [failure.ranks for failure in slow_ones(job)] == ([(3,)] if looks == 3 else [])
    if looks == 3:
        assert "the best of 3 looks" in slow_ones(job)[0].evidence
    else:
        assert len(job.all(PlanDecided)) == plans


def test_a_suspect_that_computes_wrongly_in_one_look_is_not_fit_whatever_the_next_one_says() -> None:
    """Rank 3 looks slow in the first look, so that all are asked again; rank 2 answers with an error in that one."""
    job = ComeBack().live(2, newcomer_at(1.0))
    job.seen.clear()
    job.find(finding(3, iteration=job.job.record.committed), finding(2, iteration=job.job.record.committed))
    ranks, probe = job.orders(m.Probe)[-1]
    assert {2, 3} <= set(ranks)
    job.answered = len(job.orders(m.Probe))
    for rank in ranks:
        speed = m.Speed(flops=1e14 if rank != 3 else 5e13, memory_bytes=1e12 if rank != 3 else 5e11)
        error = "a product is wrong" if rank == 2 else ""
        job.say(rank, m.Probed(probe=probe.probe, speed=speed, seconds=0.1, shared=True, error=error))
    assert len(job.orders(m.Probe)) > job.answered, "another look"
    job.answer(lambda rank, look: 1.0)
    assert [failure.ranks for failure in job.all(FailureFound) if "wrong" in failure.evidence] == [(2,)]


def test_a_process_on_a_device_that_an_injected_fault_made_slow_is_slow_as_well() -> None:
    faults = (parse("slow:rank=1,speed=0.7@iteration=2", 1), parse("slow:rank=3,speed=0.7@iteration=2,until=4", 2))
    job = Job(examine=True, faults=faults)
    job.measure()
    job.run(1)
    for rank, fault in ((1, 1), (3, 2)):
        job.say(rank, m.FaultDue(fault=fault))
    job.crash(1)
    job.park(stepped=1)
    job.run(1)
    answer = job.join(NEWCOMER)
    assert job.orders(m.Slow, answer) == [((NEWCOMER,), m.Slow(speed=0.7))]
    kinds = [type(order.order) for order in answer if isinstance(order, api.Order)]
    assert kinds.index(m.Slow) < kinds.index(m.Probe), "before it is measured"
    job.train(4)
    job.crash(3)
    job.park(stepped=job.job.record.committed)
    job.run(1)
    assert job.orders(m.Slow, job.join(7)) == [], "that one is over"
