"""Devices that the start finds slow are measured again, beside the same witnesses, before they are set aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.detector import probes
from resihp.protocol import messages as m
from resihp.record.journal import PlanDecided, ProbesTaken
from tests.resihp.controller.fail_slow.test_slowness import Job
from tests.resihp.controller.probing.test_probing import remembered, standby

Shares = Callable[[int, int], float]
"""Of a healthy device's speed, that a rank shows in a look: 0 is the one at the start."""


class Start(Job):
    """DP3 x PP2 on three nodes of two, about to begin."""

    def __init__(self, *, shared: bool = False, **options: Any) -> None:
        super().__init__(examine=True, **options)
        self.shared = shared
        self.turns: list[tuple[int, ...]] = []
        """Who was measured at the same time, the start's probe first."""

    def answer(self, rank: int, probe: int, share: float, **told: Any) -> None:
        speed = m.Speed(flops=share * 1e14, memory_bytes=share * 1e12)
        self.say(rank, m.Probed(probe=probe, speed=speed, seconds=0.1, shared=self.shared, **told))

    def look(self, shares: Shares) -> Start:
        """Everybody answers, until nobody is asked any more."""
        seen = [0] * 6
        while len(asked := self.orders(m.Probe)) > len(self.turns):
            ranks, probe = asked[len(self.turns)]
            self.turns.append(ranks)
            for rank in ranks:
                self.answer(rank, probe.probe, shares(rank, seen[rank]))
                seen[rank] += 1
        return self

    @property
    def evidence(self) -> dict[int, str]:
        (taken,) = self.all(ProbesTaken)
        return {device.rank: device.evidence for device in taken.devices}


def test_where_all_are_well_nobody_is_measured_twice() -> None:
    job = Start().look(lambda rank, look: 0.93 if rank == 1 else 1.0)
    assert job.turns == [(0, 1, 2, 3, 4, 5)]
    (taken,) = job.all(ProbesTaken)
    assert taken.looks == 1
    assert standby(job) == ()


@pytest.mark.parametrize("shared", [False, True], ids=["own devices", "shared processors"])
def test_a_device_that_was_disturbed_once_gets_its_work(shared: bool) -> None:
    job = Start(shared=shared).look(lambda rank, look: 0.45 if (rank, look) == (1, 0) else 1.0)
    assert standby(job) == ()
    assert job.texts("warning") == []
    assert any("rank 1 (n1 device 1)" in text and "probing again" in text for text in job.texts("notice"))
    (taken,) = job.all(ProbesTaken)
    assert (taken.looks, taken.devices[1].fit, taken.devices[1].speed) == (2, True, 1.0)


@pytest.mark.parametrize("share", [0.7, 0.3])
@pytest.mark.parametrize("shared", [False, True], ids=["own devices", "shared processors"])
def test_a_slow_device_is_set_aside_once_all_looks_agree(shared: bool, share: float) -> None:
    job = Start(shared=shared).look(lambda rank, look: share if rank == 1 else 1.0)
    assert standby(job) == (1,)
    (told,) = job.texts("warning")
    assert f"matrix products at {share:.0%} of its peers" in told
    assert "best of 3 more looks" in told


def test_devices_of_their_own_are_looked_at_together_and_those_on_shared_processors_one_after_another() -> None:
    slow = {1: 0.7}
    assert Start().look(lambda rank, look: slow.get(rank, 1.0)).turns == [(0, 1, 2, 3, 4, 5)] + 3 * [(0, 1, 2, 3, 4)]
    together = Start(shared=True).look(lambda rank, look: slow.get(rank, 1.0))
    assert together.turns == [(0, 1, 2, 3, 4, 5)] + 3 * [(1,), (0,), (2,), (3,), (4,)]


def test_a_slow_device_whose_first_probe_was_nearly_good_enough_is_found() -> None:
    """Its peers were disturbed then."""
    job = Start().look(lambda rank, look: (0.7 if look else 0.85) if rank == 1 else 1.0)
    assert standby(job) == (1,)


def test_a_device_that_is_nearly_as_fast_as_its_peers_gets_its_work() -> None:
    job = Start().look(lambda rank, look: 0.84 if rank == 1 else 1.0)
    assert standby(job) == ()
    (taken,) = job.all(ProbesTaken)
    assert (taken.looks, taken.devices[1].fit, taken.devices[1].speed) == (4, True, pytest.approx(0.84))


def test_nobody_is_set_aside_beside_witnesses_that_are_disturbed_themselves() -> None:
    """Rank 0 is no faster than the one in doubt: who says which of them is at fault?"""
    job = Start().look(lambda rank, look: 0.5 if rank == 1 or (rank == 0 and look) else 1.0)
    assert standby(job) == ()
    (taken,) = job.all(ProbesTaken)
    assert taken.looks == 1 + probes.RECHECK_LOOKS[1]


def test_who_had_the_machine_to_itself_makes_nobody_else_look_slow() -> None:
    """Alone, each is twice as fast as while everybody was measured; ranks 4 and 5 were measured only then."""
    job = Start(shared=True).look(lambda rank, look: (2.0 if look else 1.0) * (0.7 if rank == 1 else 1.0))
    assert standby(job) == (1,)
    (taken,) = job.all(ProbesTaken)
    assert [device.flops for device in taken.devices] == pytest.approx([1e14, 0.7e14, 1e14, 1e14, 1e14, 1e14]), (
        "later probes are compared with what all gave at the same time"
    )


def test_two_slow_devices_are_set_aside_together() -> None:
    job = Start().look(lambda rank, look: {1: 0.5, 4: 0.6}.get(rank, 1.0))
    assert standby(job) == (1, 4)


def test_a_device_that_fails_its_second_look_stands_by() -> None:
    job = Start()
    for rank in range(6):
        job.answer(rank, 1, 0.7 if rank == 1 else 1.0)
    for rank in (0, 2, 3, 4):
        job.answer(rank, 2, 1.0)
    job.say(1, m.Probed(probe=2, error="device cuda:1: fails its probe: a product is off by 3"))
    assert standby(job) == (1,)
    assert job.evidence[1].endswith("a product is off by 3")


def test_whoever_does_not_answer_a_second_look_stands_by() -> None:
    job = Start()
    for rank in range(6):
        job.answer(rank, 1, 0.7 if rank == 1 else 1.0)
    for rank in (0, 2, 3, 4):
        job.answer(rank, 2, 1.0)
    job.wait(29)
    assert job.all(PlanDecided) == []
    job.wait(2)
    assert standby(job) == (1,)
    assert "no answer to its probe within 30 s" in job.evidence[1]


@pytest.mark.parametrize("dies", [0, 1], ids=["a witness", "the one in doubt"])
def test_whoever_dies_under_a_second_look_holds_nobody_up(dies: int) -> None:
    job = Start()
    for rank in range(6):
        job.answer(rank, 1, 0.7 if rank == 1 else 1.0)
    job.crash(dies)
    job.turns.append(tuple(range(6)))
    job.feed(api.Tick())
    job.look(lambda rank, look: 0.7 if rank == 1 else 1.0)
    assert dies not in job.plan.layout.ranks
    assert standby(job) == (() if dies == 1 else (1,))


def test_a_node_slower_than_in_former_jobs_is_looked_at_again() -> None:
    """All of its devices met others at work, and are as fast as ever when they are measured again."""
    job = Start()
    remembered(job, n1=1.0, n2=1.4, n3=1.0)
    job.look(lambda rank, look: 1.4 if look and rank in (2, 3) else 1.0)
    assert standby(job) == ()


def test_when_the_job_is_to_stop_nobody_is_looked_at_again() -> None:
    job = Start()
    job.feed(api.Signalled(signal=15))
    job.look(lambda rank, look: 0.7 if rank == 1 else 1.0)
    assert job.turns == [(0, 1, 2, 3, 4, 5)]
    assert job.all(PlanDecided) == []
