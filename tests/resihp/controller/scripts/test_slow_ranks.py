"""Slow ranks of a script that measures its own work: named with their node, reported once, left out of a restart."""

from __future__ import annotations

import random

import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.describe import explain
from resihp.record.fold import fold
from resihp.record.journal import FailureEnded, FailureFound, Reconfigured, RestartDecided
from tests.resihp.controller.rounds.test_restarts import Script

ITERATION_S = 0.1


class Measuring(Script):
    """A script that calls `resihp.iteration` and measures two sections. `factors`: how much longer a device needs."""

    def __init__(self, controller: Controller | None = None, **settings: object) -> None:
        super().__init__(controller=controller, slurm=False, node_given_up_s=1e9, **settings)
        self.factors: dict[tuple[str, int], float] = {}
        self.random = random.Random(0)
        self.drops = 0.0
        self._totals: dict[int, m.ScriptTotals] = {}
        self._round = 0
        self.iteration = 0

    def trains(self, seconds: float) -> None:
        """Let iterations pass, with a heartbeat of each node each second."""
        job = self.controller.job
        if job.record.round != self._round:
            self._totals, self._round = {}, job.record.round
        for _ in range(round(seconds)):
            self.iteration += round(1.0 / ITERATION_S)
            for rank in job.live:
                self._work(rank, job.device_of(rank))
            for name in {job.members[rank].node for rank in job.live}:
                self._beat(name, [rank for rank in job.live if job.members[rank].node == name])
            self.feed(api.Tick(), 1.0)

    def _work(self, rank: int, device: tuple[str, int]) -> None:
        count = round(1.0 / ITERATION_S)
        old = self._totals.get(rank, m.ScriptTotals(iterations=0, iteration=0, own_s=0.0))
        noise = self.random.gauss(1.0, 0.02)
        forward_s = 0.04 * count * noise * self.factors.get(device, 1.0)
        sections = {name: seconds for name, seconds, _ in old.sections}
        self._totals[rank] = m.ScriptTotals(
            iterations=old.iterations + count,
            iteration=self.iteration,
            own_s=old.own_s + forward_s + 0.01 * count,
            sections=(
                ("forward", sections.get("forward", 0.0) + forward_s, old.iterations + count),
                ("data", sections.get("data", 0.0) + 0.01 * count, old.iterations + count),
            ),
        )

    def _beat(self, node: str, ranks: list[int]) -> None:
        beats = (
            m.WorkerBeat(
                rank=rank,
                age_s=0.0,
                state="S",
                progress=None,
                idle_s=0.0,
                script=None if self.random.random() < self.drops else self._totals[rank],
            )
            for rank in ranks
        )
        self.feed(api.AgentBeat(node=node, beat=m.Beat(workers=tuple(beats), met=True)), 0.0)

    def reports(self, iteration: int) -> None:
        figures = (m.PrintedFigures(iteration=iteration, seconds=ITERATION_S),)
        self.feed(api.WorkerPrinted(printed=m.Printed(rank=0, figures=figures, called=True)))


def measuring(**settings: object) -> Measuring:
    job = Measuring(**settings)
    job.begin()
    return job


def test_a_slow_device_is_reported_once_with_its_node_its_section_and_the_next_command() -> None:
    job = measuring()
    job.trains(200)
    assert not job.all(FailureFound)
    job.factors["n2", 1] = 1.5
    job.trains(300)
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.component, failure.ranks) == ("fail-slow", "device", (3,))
    assert (failure.node, failure.device) == ("n2", 1)
    assert failure.speed == pytest.approx(0.05 / 0.07, rel=0.05)
    assert failure.iteration == pytest.approx(2000, abs=200)
    assert "rank 3 (n2 device 1) takes" in explain(failure)
    assert "section forward, slow since iteration" in explain(failure)
    assert [text for text in job.texts if "resihp why-not 3" in text]
    assert not job.all(RestartDecided), "slowness alone interrupts nothing"
    assert fold(job.journal).slow.keys() == {("n2", 1)}


def test_the_verdict_ends_when_the_device_is_as_fast_as_before() -> None:
    job = measuring()
    job.trains(200)
    job.factors["n1", 0] = 1.5
    job.trains(100)
    del job.factors["n1", 0]
    job.trains(100)
    (ended,) = job.all(FailureEnded)
    assert (ended.failure, ended.node, ended.device) == (1, "n1", 0)
    assert not fold(job.journal).slow
    assert "node n1 device 0: as fast as before" in " ".join(job.texts)


def test_lost_heartbeats_and_healthy_ranks_give_no_verdict() -> None:
    job = measuring()
    job.drops = 0.5
    job.trains(1000)
    assert not job.all(FailureFound)
    job.factors["n2", 0] = 1.5
    job.trains(100)
    assert [failure.ranks for failure in job.all(FailureFound)] == [(2,)]


def test_without_detection_nothing_is_judged() -> None:
    job = measuring(detect=False)
    job.trains(200)
    job.factors["n2", 1] = 2.0
    job.trains(100)
    assert not job.all(FailureFound)


def slow_then_killed(**settings: object) -> Measuring:
    """A script with a slow device on n1, of which another rank is killed."""
    job = measuring(**settings)
    job.trains(200)
    job.factors["n1", 1] = 1.5
    job.trains(100)
    job.reports(3000)
    assert len(job.all(FailureFound)) == 1
    job.kill(2)
    job.obey()
    job.reports(3010)
    return job


def test_a_restart_leaves_a_slow_device_out_if_a_spare_node_takes_its_place() -> None:
    job = slow_then_killed(nodes=3, spares=1, spares_wait=True)
    assert job.rounds[-1] == (1, ("n2", "n2", "n3", "n3"))
    (mended,) = job.all(Reconfigured)
    assert mended.failures == (2,), "the restart has not mended the slow device"
    job.trains(200)
    assert not job.all(FailureEnded)


def test_a_restart_keeps_a_slow_device_if_all_nodes_are_needed() -> None:
    job = slow_then_killed()
    assert job.rounds[-1] == (1, ("n1", "n1", "n2", "n2"))
    job.trains(200)
    assert len(job.all(FailureFound)) == 2, "its verdict stands, and is not repeated"
    del job.factors["n1", 1]
    job.trains(100)
    assert [ended.failure for ended in job.all(FailureEnded)] == [1]


def test_a_restart_shrinks_only_if_that_costs_less_than_the_slow_device() -> None:
    job = slow_then_killed(nodes=2, min_nodes=1)
    assert job.rounds[-1] == (1, ("n1", "n1", "n2", "n2")), "70 % of the speed of two nodes beats one node"
    job = slow_then_killed(nodes=4, min_nodes=2)
    assert job.rounds[-1] == (1, ("n2", "n2", "n3", "n3", "n4", "n4")), "three of four nodes beat 70 % of their speed"


def test_another_supervisor_keeps_the_verdict_and_ends_it() -> None:
    before = measuring()
    before.trains(200)
    before.factors["n2", 1] = 1.5
    before.trains(100)
    after = Measuring(controller=Controller.recover(before.settings, before.journal))
    for name, first in (("n1", 0), ("n2", 2)):
        workers = tuple(m.RunningWorker(rank=first + d, device=d, pid=10 + first + d) for d in (0, 1))
        after.feed(api.AgentJoined(node=name, host=name, devices=2, inventory=m.Inventory(workers=workers)))
    after.factors, after.iteration = before.factors, before.iteration
    after.trains(200)
    assert not after.all(FailureFound)
    assert not after.all(FailureEnded)
    del after.factors["n2", 1]
    after.trains(100)
    assert [ended.failure for ended in after.all(FailureEnded)] == [1]
