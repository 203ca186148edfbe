"""From the detector's finding to a verdict and another plan; the detector is a script, the rest is real."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.detector.findings import Assessment, Finding
from resihp.detector.observation import Observation, pack
from resihp.detector.online.monitor import Monitor
from resihp.faults import parse
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import (
    ChangeDecided,
    FailureEnded,
    FailureFound,
    FaultInjected,
    IterationCommitted,
    PlanDecided,
    ProbesTaken,
    Reconfigured,
    Suspected,
)
from resihp.record.state import ChangeCost, Slow
from tests.resihp.controller.direct import DECLARE, Direct, outcome
from tests.resihp.controller.test_takeover import TakenOver

LONG = msgspec.structs.replace(DECLARE, iterations=1000)

EVEN = dict.fromkeys(range(4), 12)
"""Work of DP2 x PP2 while all is well."""


def finding(*ranks: int, detected: int = 5, **changes: Any) -> Finding:
    """These ranks take twice their time since iteration 3, unless told otherwise."""
    given: dict[str, Any] = {
        "kind": "fail-slow",
        "iteration": 3,
        "detected": detected,
        "change": 1.0,
        "confidence": 0.98,
        "ranks": ranks,
        "link": None,
        "evidence": "own work takes longer than its peers'",
    }
    return Finding(**given | changes)


class Scripted:
    """A detector that finds each of these in the iteration in which it is `detected`, and remembers what it heard."""

    def __init__(self, *findings: Finding) -> None:
        self.findings = list(findings)
        self.estimates: dict[int, float] = {}
        self.adopted: list[int] = []
        self.settled = False
        self.heard: list[tuple[Any, ...]] = []
        self.seen: list[list[int]] = []
        """Ranks whose chunks were shown, by iteration."""

    def adopt(self, plan: Plan, *_: Any) -> None:
        self.adopted.append(plan.epoch)

    def observe(self, observation: Observation) -> Assessment:
        self.seen.append(sorted(observation.times))
        found = tuple(each for each in self.findings if each.detected == observation.iteration)
        return Assessment(predicted_s=0.4, findings=found, known="workload")

    def forecast(self, tokens: Any, squares: Any) -> float | None:
        return None

    def coverage(self) -> dict[int, int]:
        return {}

    def scores(self) -> None:
        return None

    def speeds(self) -> dict[int, float]:
        return self.estimates

    def confirmed(self, rank: int, speed: float) -> None:
        self.heard.append(("confirmed", rank, speed))

    def cleared(self, rank: int) -> None:
        self.heard.append(("cleared", rank))

    def job_is_slow(self) -> None:
        self.heard.append(("the job is slow",))

    def cleared_link(self, sender: int, receiver: int) -> None:
        self.heard.append(("cleared link", sender, receiver))


CHEAP = [ChangeCost(busiest_bytes=0, communicators=3, seconds=1e-3)] * 20
"""Transitions as they have been: another plan is worth it at once."""
DEAR = [ChangeCost(busiest_bytes=0, communicators=3, seconds=5.0)] * 20


class Job(Direct):
    """DP3 x PP2 on three nodes of two unless told otherwise, with a detector that finds these."""

    def __init__(self, *findings: Finding, **options: Any) -> None:
        given: dict[str, Any] = {"nodes": 3, "declare": LONG}
        records = options.pop("records", CHEAP)
        super().__init__(**given | options)
        self.monitor = Scripted(*findings)
        self.job.monitor = self.monitor  # type: ignore[assignment]
        self.job.record.costs[:] = records

    def find(self, *found: Finding) -> list[api.AnyAction]:
        """The next iteration, in which the detector finds these."""
        iteration = self.job.record.committed + 1
        self.monitor.findings = [msgspec.structs.replace(each, detected=iteration) for each in found]
        return self.step(iteration)

    @property
    def asked(self) -> tuple[int, ...]:
        """Whom the last probe measures."""
        ranks: tuple[int, ...] = self.orders(m.Probe)[-1][0]
        return ranks

    def run(self, iterations: int = 0) -> Job:
        super().run(iterations)
        return self

    def measure(self, speeds: dict[int, float] | None = None, silent: tuple[int, ...] = ()) -> list[api.AnyAction]:
        """Those who are asked by the last probe, and by more looks at some of them, answer: `speeds` of a healthy
        device's, 1 if left out."""
        answer: list[api.AnyAction] = []
        last = None
        while (asked := self.orders(m.Probe)[-1]) != last and (last is None or not asked[1].pairs):
            last = ranks, probe = asked
            for rank in (rank for rank in ranks if rank not in silent):
                share = (speeds or {}).get(rank, 1.0)
                speed = m.Speed(flops=share * 1e14, memory_bytes=share * 1e12)
                answer = self.say(rank, m.Probed(probe=probe.probe, speed=speed, seconds=0.2))
        return answer

    def train(self, seconds: float) -> None:
        """Time passes, and iterations with it, about half a second each."""
        until = self.now + seconds
        while self.now < until:
            for name in [name for name, node in self.job.nodes.items() if node.alive]:
                self.feed(api.AgentBeat(node=name, beat=m.Beat(workers=())), 0.0)
            self.feed(api.Tick(), 0.5)
            if self.job.training and self.job.pause is None:
                self.step(self.job.record.committed + 1)

    def paused(self) -> None:
        """Everybody stops after the next iteration, as asked, and training goes on under another plan."""
        assert self.job.pause is not None
        epoch, done = self.job.pause.epoch, self.job.record.committed + 1
        self.step(done, pause=True)
        active = self.job.record.active
        for rank in self.job.ready:
            if rank not in active:
                self.park(rank, stepped=0, epoch=epoch)
        self.park(active[0], stepped=done, epoch=epoch)
        self.park(stepped=done)
        self.run(1)

    def slow_by_verdict(self, rank: int, speed: float) -> None:
        """A finding, its probe, the verdict, and whatever plan follows."""
        self.find(finding(rank, iteration=self.job.record.committed))
        self.measure({rank: speed})
        self.feed(api.Tick(), 0.1)
        if self.job.pause is not None:
            self.paused()

    def texts(self, level: str) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, api.Say) and action.level == level]

    @property
    def work(self) -> dict[int, int]:
        """Layers times micro-batches of each rank with work, by the plan in effect."""
        plan = self.job.record.plan
        assert plan is not None
        return {
            rank: len(share) * sum(end - begin + 1 for begin, end in stage.chunks)
            for replica, share in zip(plan.layout.replicas, plan.assignment, strict=True)
            for stage in replica.stages
            for rank in stage.ranks
        }


def suspected(job: Direct) -> list[tuple[int | None, bool]]:
    return [(entry.rank, entry.cleared) for entry in job.all(Suspected) if entry.kind == "slow"]


def slow_ones(job: Direct) -> list[FailureFound]:
    return [entry for entry in job.all(FailureFound) if entry.kind == "fail-slow"]


# --- suspicion ----------------------------------------------------------------------------------------------------


def test_a_suspect_is_measured_beside_witnesses_of_its_own_node_first() -> None:
    job = Job(finding(3), nodes=4).run(4)
    assert job.orders(m.Probe) == []
    job.step(5)
    (entry,) = job.all(Suspected)
    assert (entry.rank, entry.node, entry.kind, entry.cleared) == (3, "n2", "slow", False)
    assert "+100% since iteration 3" in entry.evidence
    assert "own work takes longer" in entry.evidence
    assert job.orders(m.Probe) == [((0, 1, 2, 3, 4), m.Probe(probe=1))]
    assert job.all(FailureFound) == []
    assert job.orders(m.Park) == [], "a suspicion interrupts nothing"


def test_witnesses_are_not_slow_themselves() -> None:
    job = Job().run(2)
    job.slow_by_verdict(0, 0.93)
    job.find(finding(1))
    assert job.asked == (1, 2, 3, 4, 5)


def test_one_suspicion_follows_the_other() -> None:
    job = Job(finding(1), finding(3, detected=6)).run(7)
    assert suspected(job) == [(1, False)]
    assert len(job.orders(m.Probe)) == 1
    job.measure()
    job.find(finding(3))
    assert suspected(job) == [(1, False), (1, True), (3, False)]
    assert len(job.orders(m.Probe)) == 2


def test_of_two_findings_of_one_iteration_the_first_is_looked_into() -> None:
    job = Job().run(1)
    job.find(finding(1), finding(3))
    assert suspected(job) == [(1, False)]


def test_of_ranks_that_cannot_be_told_apart_the_slowest_is_the_slow_one() -> None:
    job = Job().run(1)
    job.find(finding(2, 3))
    assert {2, 3} <= set(job.asked)
    job.measure({3: 0.6})
    assert [entry.ranks for entry in slow_ones(job)] == [(3,)]
    assert suspected(job) == [(2, False), (2, True), (2, True)], "nobody is shown as suspected for good"
    assert [(e.ranks, e.outcome) for e in job.all(Suspected) if e.cleared] == [((3,), "slow"), ((2,), "fine")]


def test_a_change_of_the_workload_is_nobodys_fault() -> None:
    job = Job(finding(1, kind="workload")).run(6)
    assert (suspected(job), job.orders(m.Probe)) == ([], [])


def test_nothing_is_looked_for_when_the_job_does_not_want_to_know() -> None:
    job = Job(finding(1), detect=False).run(6)
    assert (suspected(job), job.monitor.adopted) == ([], [])
    assert {entry.predicted_seconds for entry in job.all(IterationCommitted)} == {None}


def test_what_an_iteration_should_have_taken_is_told_with_it() -> None:
    job = Job().run(2)
    assert [entry.predicted_seconds for entry in job.all(IterationCommitted)] == [0.4, 0.4]
    assert job.monitor.adopted == [1]


# --- verdicts -----------------------------------------------------------------------------------------------------


def test_what_its_probe_confirms_is_a_failure_that_began_with_the_first_slow_iteration() -> None:
    job = Job(finding(3)).run(5)
    job.measure({3: 0.5})
    (entry,) = job.all(FailureFound)
    assert (entry.failure, entry.kind, entry.component, entry.ranks) == (1, "fail-slow", "device", (3,))
    assert (entry.node, entry.device, entry.iteration, entry.epoch) == ("n2", 1, 3, 1)
    assert (entry.speed, entry.detect_s, entry.link) == (pytest.approx(0.5), None, None)
    assert entry.confidence is not None
    assert entry.confidence > 0.98, "the probe makes it surer"
    assert entry.cause == "rank 3 works at 50% of a healthy device's speed"
    assert "at 50% of its peers" in entry.evidence
    assert "own work takes longer" in entry.evidence
    assert job.monitor.heard == [("confirmed", 3, pytest.approx(0.5))]
    (taken,) = job.all(ProbesTaken)
    assert (taken.probe, taken.occasion, taken.seconds) == (1, "suspicion", 0.2)
    assert [(probe.rank, probe.fit) for probe in taken.devices] == [(r, r != 3) for r in job.asked]
    assert any(text.startswith("rank 3 (n2 device 1): slow since iteration 3") for text in job.texts("warning"))


def twelve_times_as_slow(*found: Finding, since: int = 6) -> Job:
    """A tenth of a second each, and 1.2 s from iteration 6 on, in which the detector finds these."""
    job = Job()
    job.iteration_s = 0.1
    job.run(since - 1)
    job.iteration_s = 1.2
    for _ in range(3):
        job.step(job.job.record.committed + 1)
    job.find(*found)
    return job


def test_a_device_that_cannot_explain_the_size_is_not_called_the_cause() -> None:
    """Predictions are four times too high, which does not matter: what iterations took before is the measure."""
    job = twelve_times_as_slow(finding(3, iteration=6, change=0.1))
    job.monitor.estimates = {3: 0.92}
    job.measure({3: 0.92})
    (entry,) = slow_ones(job)
    assert entry.cause == (
        "rank 3 works at 92% of a healthy device's speed, which accounts for up to 0.0087 s of the 1.1 s excess per "
        "iteration; 1.09 s unexplained"
    )
    told = job.texts("warning")
    unexplained = (
        "job: iterations take 1.1 s longer, 1.09 s of it unexplained: the slow devices and links found account for up "
        "to 0.0087 s"
    )
    assert told.index(unexplained) < told.index("rank 3 (n2 device 1): slow since iteration 6, at 92% of its speed")


@pytest.mark.parametrize(("since", "unexplained"), [(2, True), (18, False)])
def test_what_was_slow_long_before_does_not_explain_what_iterations_take_longer_now(
    since: int, unexplained: bool
) -> None:
    """Iterations have been as slow as that device all the time; what is slow since about then may explain it."""
    job = twelve_times_as_slow(finding(3, iteration=20, change=0.1), since=20)
    job.job.record.slow["n1", 0] = Slow(failure=9, speed=0.1, since=since)
    job.monitor.estimates = {3: 0.92}
    job.measure({3: 0.92})
    (entry,) = slow_ones(job)
    assert ("unexplained" in entry.cause) is unexplained


def test_a_device_that_explains_the_size_is_the_cause_and_how_much_it_explains_is_evidence() -> None:
    job = twelve_times_as_slow(finding(3, iteration=6, change=11.0))
    job.monitor.estimates = {3: 0.1}
    job.measure({3: 0.1})
    (entry,) = slow_ones(job)
    assert entry.cause == "rank 3 works at 10% of a healthy device's speed"
    assert entry.evidence.endswith("; accounts for up to 0.9 s of the 1.1 s excess per iteration")
    assert not any("unexplained" in text for text in job.texts("warning"))


def test_what_a_slow_device_leaves_unexplained_of_whole_iterations_is_told_once_it_has_lasted() -> None:
    job = twelve_times_as_slow(finding(3, iteration=6, change=0.1), finding(iteration=6, change=11.0))
    job.monitor.estimates = {3: 0.92}
    job.measure({3: 0.92})
    for _ in range(22):
        job.step(job.job.record.committed + 1)
        if job.job.record.suspects_slow is not None:
            job.measure({3: 0.92})
    found = [(entry.component, entry.evidence.partition(",")[0]) for entry in slow_ones(job)]
    assert found[0][0] == "device"
    assert ("job", "the known slow devices and links do not explain it") in found


@pytest.mark.parametrize(("change", "declared_slow"), [(0.1, False), (0.6, True)])
def test_a_slightly_slower_device_beside_a_far_larger_unexplained_slowdown_is_not_declared_slow_by_training_alone(
    change: float, declared_slow: bool
) -> None:
    """Longer transfers take processors from it, its clock falls while it waits: that is what it suffers, not does."""
    job = twelve_times_as_slow(finding(3, iteration=6, change=0.05))
    job.measure()
    job.find(finding(3, iteration=8, change=change))
    job.monitor.estimates = {3: 1 / (1 + change)}
    job.measure()
    assert bool(slow_ones(job)) == declared_slow
    suspicions = [entry for entry in job.all(Suspected) if entry.cleared]
    assert [entry.outcome for entry in suspicions] == ["fine", "slow" if declared_slow else "fine"]
    if not declared_slow:
        told = "its probe is fine, and it accounts for little of the excess iteration time"
        assert suspicions[-1].evidence == told
        assert job.texts("notice")[-1] == f"rank 3 (n2 device 1): no longer suspected to be slow, {told}"


def test_the_speed_in_training_counts_more_than_the_probes() -> None:
    job = Job(finding(3)).run(4)
    job.monitor.estimates = {3: 0.7}
    job.step(5)
    job.measure({3: 0.5})
    assert [entry.speed for entry in slow_ones(job)] == [0.7]


def test_training_pauses_between_two_iterations_for_a_plan_that_gains() -> None:
    job = Job(finding(3), nodes=2).run(5)
    assert job.work == EVEN
    answer = job.measure({3: 0.5})
    ((ranks, park),) = job.orders(m.Park, answer)
    assert (ranks, park.epoch, park.after_iteration) == ((0, 1, 2, 3), 2, True)
    job.paused()
    assert job.work[3] < EVEN[3]
    (entry,) = job.all(Reconfigured)
    assert (entry.epoch, entry.failures, entry.action) == (2, (1,), "between")
    assert "rank 3 is slow" in job.all(PlanDecided)[-1].reason
    assert [e.outcome.iteration for e in job.all(IterationCommitted)] == list(range(1, 8))
    assert job.monitor.adopted == [1, 2]


@pytest.mark.parametrize("speed", [0.92, 0.94])
def test_the_plan_stays_where_another_would_gain_too_little(speed: float) -> None:
    job = Job(finding(3), nodes=2).run(5)
    job.measure({3: speed})
    assert [entry.speed for entry in slow_ones(job)] == [pytest.approx(speed)]
    assert (job.job.pause, job.orders(m.Park)) == (None, [])
    assert any("rank 3 is slow: the plan stays" in text for text in job.texts("notice"))
    job.step(6)
    assert job.job.record.committed == 6


def test_nobody_pauses_for_the_last_iteration() -> None:
    job = Job(finding(3), nodes=2, declare=DECLARE).run(5)
    job.measure({3: 0.5})
    assert len(slow_ones(job)) == 1
    assert job.job.pause is None


def test_a_verdict_in_the_first_iteration_of_a_plan_is_acted_on_afterwards() -> None:
    job = Job(finding(3), nodes=2).run(5)
    job.say(1, m.Stuck(epoch=1, error="connection reset"))
    job.wait(2)
    job.park(stepped=5)
    job.run()
    job.measure({3: 0.5})
    assert len(slow_ones(job)) == 1
    job.train(1)
    assert job.job.pause is not None


def test_a_crash_during_the_pause_answers_to_what_is_slow_as_well() -> None:
    job = Job(finding(3)).run(5)
    job.measure({3: 0.5})
    assert job.job.pause is not None
    job.crash(0)
    job.park(stepped=5)
    job.run(1)
    assert [entry.failures for entry in job.all(Reconfigured)] == [(1, 2)]


def test_a_device_is_found_slow_once() -> None:
    job = Job().run(1)
    job.slow_by_verdict(3, 0.93)
    assert suspected(job) == [(3, False), (3, True)], "its failure has ended the suspicion"
    job.find(finding(3, change=0.07))
    assert [(entry.outcome, entry.cleared) for entry in job.all(Suspected)][2:] == [("dropped", True)]
    assert len(job.orders(m.Probe)) == 1
    assert len(slow_ones(job)) == 1


def test_a_suspect_whose_probe_is_fine_is_cleared() -> None:
    job = Job(finding(3)).run(5)
    job.measure({3: 0.97})
    assert suspected(job) == [(3, False), (3, True)]
    assert job.monitor.heard == [("cleared", 3)]
    assert job.all(FailureFound) == []
    assert job.job.pause is None


def test_what_is_found_again_though_its_probe_was_fine_is_slow_in_training() -> None:
    job = Job(finding(3), finding(3, detected=9)).run(5)
    job.measure()
    job.step(6)
    for iteration in (7, 8, 9):
        job.step(iteration)
    job.measure()
    (entry,) = job.all(FailureFound)
    assert (entry.kind, entry.ranks, entry.speed) == ("fail-slow", (3,), 0.5), "twice the time is half the speed"
    assert entry.evidence.startswith("its probe is fine")
    assert suspected(job) == [(3, False), (3, True)] * 2
    assert [entry.outcome for entry in job.all(Suspected) if entry.cleared] == ["fine", "slow"]


def test_after_a_verdict_that_has_ended_a_fine_probe_clears_once_more() -> None:
    job = Job(finding(3), records=DEAR).run(5)
    job.measure()
    job.find(finding(3))
    job.measure()
    job.find(finding(3, kind="recovered"))
    job.find(finding(3))
    job.measure()
    assert len(job.all(FailureFound)) == 1
    assert suspected(job)[-2:] == [(3, False), (3, True)]


def test_a_rank_that_was_cleared_does_not_answer_for_another() -> None:
    job = Job(finding(3)).run(5)
    job.measure()
    job.find(finding(1))
    job.measure()
    assert job.all(FailureFound) == []


def test_a_device_that_fails_its_probe_outright_is_slow_at_what_training_shows() -> None:
    job = Job(finding(3)).run(5)
    job.measure(silent=(3,))
    job.say(3, m.Probed(probe=1, error="device cuda:1: fails its probe: a product is off by 3"))
    (entry,) = job.all(FailureFound)
    assert (entry.ranks, entry.speed) == ((3,), 0.5)
    assert "a product is off by 3" in entry.evidence


def test_a_suspect_that_is_too_full_to_be_measured_is_judged_by_training_alone() -> None:
    """Its probe says nothing, neither for it nor against it: what training shows a second time decides."""
    job = Job(finding(3)).run(5)
    full = "device cuda:1: has no memory left to measure it in"
    job.measure(silent=(3,))
    job.say(3, m.Probed(probe=1, untried=full))
    assert job.all(FailureFound) == []
    assert any("no longer suspected" in text and full in text for text in job.texts("notice"))
    job.find(finding(3))
    job.measure(silent=(3,))
    job.say(3, m.Probed(probe=2, untried=full))
    (entry,) = job.all(FailureFound)
    assert entry.ranks == (3,)
    assert full in entry.evidence
    assert "fine" not in entry.evidence


def test_answers_to_no_question_change_nothing() -> None:
    job = Job(finding(3)).run(5)
    before = len(job.actions)
    job.say(3, m.Probed(probe=7))
    job.say(5, m.Probed(probe=1))
    assert len(job.actions) == before
    job.measure()
    before = len(job.actions)
    job.measure({3: 0.1})
    assert len(job.actions) == before, "it is over"


# --- suspicions that come to nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(3,), ()])
def test_a_suspicion_without_an_answer_is_dropped(ranks: tuple[int, ...]) -> None:
    """Training answers between two iterations: a long one answers late, and that is nobody's fault."""
    job = Job(finding(*ranks)).run(5)
    job.train(31)
    assert suspected(job)[-1][1]
    assert job.all(FailureFound) == []


def test_after_a_suspicion_without_an_answer_others_are_looked_into() -> None:
    job = Job(finding(3)).run(5)
    job.train(29)
    assert job.all(ProbesTaken) == []
    job.train(2)
    assert len(job.all(ProbesTaken)) == 1
    if job.job.pause is not None:
        job.paused()
    job.find(finding(1))
    assert suspected(job)[-1] == (1, False)
    assert len(job.orders(m.Probe)) == 2


def test_a_witness_that_does_not_answer_is_not_blamed() -> None:
    job = Job(finding(3), probe_budget_s=5.0).run(5)
    job.measure({3: 0.5}, silent=(0,))
    assert job.all(FailureFound) == []
    job.train(6)
    assert [entry.ranks for entry in job.all(FailureFound)] == [(3,)]


def test_a_suspect_that_dies_is_dead_and_not_slow() -> None:
    job = Job(finding(3)).run(5)
    job.crash(3)
    job.measure(silent=(3,))
    assert suspected(job) == [(3, False), (3, True)]
    job.park(stepped=5)
    job.run(1)
    assert [(entry.kind, entry.ranks) for entry in job.all(FailureFound)] == [("fail-stop", (3,))]
    job.find(finding(1))
    assert suspected(job)[-1] == (1, False)


@pytest.mark.parametrize("speed", [1.0, 0.93])
def test_witnesses_of_a_suspect_that_died_are_not_found_slow_in_its_place(speed: float) -> None:
    job = Job(finding(3)).run(5)
    job.crash(3)
    job.park(stepped=5)
    job.run(1)
    job.measure({0: speed}, silent=(3,))
    assert slow_ones(job) == []
    assert suspected(job) == [(3, False), (3, True)]


def test_a_transition_that_begins_meanwhile_ends_the_suspicion() -> None:
    job = Job(finding(3)).run(5)
    job.crash(4)
    job.measure({3: 0.5})
    assert suspected(job) == [(3, False), (3, True)]
    assert slow_ones(job) == []


# --- nobody stands out --------------------------------------------------------------------------------------------


def test_everybody_is_measured_when_nobody_stands_out() -> None:
    job = Job(finding()).run(5)
    (entry,) = job.all(Suspected)
    assert (entry.rank, entry.node, entry.kind) == (None, None, "slow")
    assert job.asked == job.job.record.active
    job.measure({4: 0.5})
    assert [(entry.ranks, entry.iteration, entry.speed) for entry in slow_ones(job)] == [((4,), 3, pytest.approx(0.5))]


def test_a_suspicion_of_nobody_in_particular_ends_when_all_are_fine() -> None:
    job = Job(finding()).run(5)
    job.measure()
    assert suspected(job) == [(None, False), (None, True)]
    assert job.all(FailureFound) == []
    job.find(finding())
    job.measure()
    assert job.all(FailureFound) == [], "also when it is found again"


@pytest.mark.parametrize("ranks", [(), (1, 3)])
def test_a_suspicion_that_leads_to_a_device_known_to_be_slow_ends(ranks: tuple[int, ...]) -> None:
    job = Job().run(1)
    job.slow_by_verdict(3, 0.93)
    job.find(finding(*ranks))
    job.measure({3: 0.93})
    job.find(finding(5))
    assert job.all(Suspected)[-1].rank == 5


# --- links --------------------------------------------------------------------------------------------------------


def linked(*found: Finding, **options: Any) -> Job:
    """A job of four nodes of two whose fifth iteration shows these; an iteration takes half a second."""
    return Job(*found, **({"nodes": 4} | options)).run(5)


def announced(job: Job) -> tuple[tuple[int, ...], m.Probe]:
    """The last probe of links: whom it is told to, and what."""
    ranks, probe = next((r, p) for r, p in reversed(job.orders(m.Probe)) if p.after_iteration is not None)
    return ranks, probe


def measure_links(
    job: Job, slow: dict[tuple[int, int], float] | None = None, silent: tuple[int, ...] = (), shared: bool = False
) -> None:
    """Train up to the moment that was announced, and answer: 1 ms, unless `slow` has more for a pair."""
    ranks, probe = announced(job)
    assert probe.after_iteration is not None
    while job.job.record.committed < probe.after_iteration:
        job.step(job.job.record.committed + 1)
    seconds = {pair: (slow or {}).get(pair, 1e-3) for round_ in probe.pairs for pair in round_}
    for rank in (rank for rank in ranks if rank not in silent):
        transfers = tuple(m.Transfer(peer=a + b - rank, seconds=s) for (a, b), s in seconds.items() if rank in (a, b))
        job.say(rank, m.Probed(probe=probe.probe, transfers=transfers, seconds=0.05, shared=shared))


def test_a_link_under_suspicion_is_measured_beside_others_at_a_moment_announced_to_all_of_them() -> None:
    job = linked(finding(link=(2, 1), change=3.0))
    ranks, probe = announced(job)
    assert probe == m.Probe(probe=1, pairs=(((1, 2), (4, 6)),), after_iteration=7)
    assert ranks == (1, 2, 4, 6)
    (entry,) = job.all(Suspected)
    assert (entry.rank, entry.node, entry.kind, entry.cleared) == (None, None, "slow", False)
    assert entry.evidence.startswith("link n2-n1 (ranks 2 and 1): slow, +300% since iteration 3: ")
    assert (job.all(FailureFound), job.orders(m.Park)) == ([], []), "a suspicion interrupts nothing"


def test_a_link_of_a_rank_that_stands_by_is_not_looked_into() -> None:
    job = Job(nodes=3, spares=1).run(4)
    assert 4 not in job.job.record.active
    job.find(finding(link=(1, 4), change=3.0))
    assert [entry.outcome for entry in job.all(Suspected)] == ["dropped"]
    assert job.orders(m.Probe) == []


def test_what_its_measurement_confirms_is_a_links_failure() -> None:
    job = linked(finding(link=(1, 2), change=3.0))
    measure_links(job, {(1, 2): 5e-3})
    (entry,) = job.all(FailureFound)
    assert (entry.kind, entry.component, entry.link, entry.ranks) == ("fail-slow", "link", (1, 2), (1, 2))
    assert (entry.device, entry.iteration, entry.confidence) == (None, 3, 0.98)
    assert entry.speed == pytest.approx(0.2), "as it was measured"
    assert entry.evidence == "transfers at 20% of another link's; own work takes longer than its peers'"
    assert "n1-n2" in entry.cause
    (taken,) = job.all(ProbesTaken)
    assert (taken.occasion, taken.devices) == ("suspicion", ())
    told = {link.ranks: (link.speed, link.fit, link.seconds) for link in taken.links}
    assert told[1, 2] == (pytest.approx(0.2), False, 5e-3)
    assert told[4, 6] == (None, True, 1e-3)
    assert job.orders(m.Park) == []
    job.find(finding(link=(1, 2)))
    assert len(job.all(FailureFound)) == 1, "it is known"
    assert [entry.outcome for entry in job.all(Suspected)] == ["", "slow", "dropped"]


def test_a_link_that_measures_healthy_is_cleared() -> None:
    job = linked(finding(link=(1, 2), change=3.0))
    measure_links(job, {(1, 2): 1.1e-3})
    assert job.all(FailureFound) == []
    assert suspected(job) == [(None, False), (None, True)]
    assert job.monitor.heard == [("cleared link", 1, 2)]
    assert any("no longer suspected to be slow, transfers at 91%" in text for text in job.texts("notice"))


def test_on_shared_processors_a_link_is_slow_if_it_is_in_each_of_three_looks() -> None:
    """Which pair of ranks gets the processors stays so for as long as one look takes."""
    job = linked(finding(link=(1, 2), change=3.0))
    for look, seconds in enumerate((5e-3, 1e-2, 4e-3), start=1):
        assert slow_ones(job) == []
        assert suspected(job) == [(None, False)], "one suspicion, however often it is looked at"
        assert announced(job)[1].probe == look
        measure_links(job, {(1, 2): seconds}, shared=True)
    (entry,) = slow_ones(job)
    assert entry.speed == pytest.approx(0.2), "the middle one"
    assert entry.evidence.startswith("transfers at 20% of another link's, slow in each of 3 looks; ")
    assert [[(link.ranks, link.fit) for link in taken.links] for taken in job.all(ProbesTaken)] == [
        [((1, 2), False), ((4, 6), True)]
    ] * 3
    assert suspected(job) == [(None, False), (None, True)]


@pytest.mark.parametrize("well", [1, 2, 3])
def test_on_shared_processors_one_look_that_finds_a_link_well_clears_it(well: int) -> None:
    job = linked(finding(link=(1, 2), change=3.0))
    for look in range(1, well + 1):
        measure_links(job, {(1, 2): 1.1e-3 if look == well else 5e-3}, shared=True)
    assert (slow_ones(job), suspected(job)) == ([], [(None, False), (None, True)])
    assert job.monitor.heard == [("cleared link", 1, 2)]


def test_a_link_that_cannot_be_looked_at_again_is_not_slow() -> None:
    job = Job(finding(link=(1, 2)), nodes=4, declare=msgspec.structs.replace(DECLARE, iterations=9)).run(5)
    measure_links(job, {(1, 2): 5e-3}, shared=True)
    assert (slow_ones(job), suspected(job)) == ([], [(None, False), (None, True)])
    assert any("no longer suspected to be slow, slow in 1 look, training ends before" in t for t in job.texts("notice"))


def test_a_link_is_measured_again_each_time_it_is_found() -> None:
    """Unlike a device, of which training may show what a matrix product does not."""
    job = linked(finding(link=(1, 2)))
    measure_links(job)
    job.find(finding(link=(1, 2)))
    measure_links(job)
    assert job.all(FailureFound) == []
    assert suspected(job) == [(None, False), (None, True)] * 2


def test_a_link_with_nothing_to_compare_it_with_is_as_slow_as_training_shows() -> None:
    job = linked(finding(link=(0, 1), change=3.0), nodes=1)
    measure_links(job, {(0, 1): 5e-3})
    (entry,) = job.all(FailureFound)
    assert entry.speed == 0.25
    assert entry.evidence.startswith("measured, but there is nothing to compare it with; ")


def test_between_two_nodes_a_link_is_compared_with_what_it_was_at_the_start() -> None:
    job = Job(examine=True, nodes=2)
    ranks, probe = job.orders(m.Probe)[-1]
    for rank in ranks:
        peers = [a + b - rank for round_ in probe.pairs for a, b in round_ if rank in (a, b)]
        transfers = tuple(m.Transfer(peer=peer, seconds=1e-3) for peer in peers)
        job.say(rank, m.Probed(probe=1, speed=m.Speed(flops=1e14), transfers=transfers))
    job.run(5)
    job.find(finding(link=(1, 2)))
    heir = TakenOver(job).all_back()
    assert (
        heir.job.record.link_seconds
        == job.job.record.link_seconds
        == {(0, 1): 1e-3, (0, 3): 1e-3, (1, 2): 1e-3, (2, 3): 1e-3}
    )
    measure_links(job, {(1, 2): 4e-3, (0, 3): 4e-3})
    assert [entry.speed for entry in slow_ones(job)] == [pytest.approx(0.25)]


def test_ends_that_do_not_answer_or_come_too_late_are_nobodys_fault() -> None:
    job = linked(finding(link=(1, 2)))
    ranks, probe = announced(job)
    for rank in ranks:
        job.say(rank, m.Probed(probe=probe.probe, missed="order received after iteration 8"))
    assert suspected(job) == [(None, False), (None, True)]
    job.find(finding(link=(1, 2)))
    job.train(40)
    assert suspected(job) == [(None, False), (None, True)] * 2
    assert job.all(FailureFound) == []
    assert [len(taken.links) for taken in job.all(ProbesTaken)] == [0, 0]


def test_the_moment_is_far_enough_ahead_for_orders_to_arrive_before_it() -> None:
    job = Job(nodes=4).run(5)
    job.job.record.recent.extend([0.01] * 20)
    job.find(finding(link=(1, 2)))
    _, probe = announced(job)
    assert probe.after_iteration == 6 + 50, "half a second ahead"


def test_iterations_that_nobody_could_report_are_counted() -> None:
    """Found by the fuzz (sluggish 2272): reports of a silent node were held back, and the moment had passed there."""
    job = Job(nodes=4).run(5)
    job.job.record.recent.extend([0.5] * 20)
    job.job.findings = (finding(link=(1, 2)),)
    job.feed(api.Tick(), later_s=2.6)
    _, probe = announced(job)
    assert probe.after_iteration == job.job.furthest + 5 + 2


def test_a_long_iteration_is_waited_for() -> None:
    job = Job(nodes=4, probe_budget_s=5.0).run(5)
    job.job.record.recent.extend([60.0] * 20)
    job.find(finding(link=(1, 2)))
    job.wait(100)
    assert suspected(job) == [(None, False)]
    measure_links(job, {(1, 2): 5e-3})
    assert len(slow_ones(job)) == 1


def test_a_link_suspected_beside_somebody_else_is_measured_afterwards() -> None:
    job = linked(finding(3), finding(link=(1, 2)))
    assert suspected(job) == [(3, False)]
    job.measure()
    job.feed(api.Tick())
    assert suspected(job) == [(3, False), (3, True), (None, False)]
    measure_links(job, {(1, 2): 5e-3})
    assert [entry.link for entry in slow_ones(job)] == [(1, 2)]


def test_a_link_that_recovers_before_it_could_be_measured_is_not() -> None:
    job = linked(finding(3), finding(link=(1, 2)))
    job.find(finding(kind="recovered", link=(1, 2)))
    job.measure()
    job.feed(api.Tick())
    told = [(entry.suspicion, entry.component, entry.outcome) for entry in job.all(Suspected)]
    assert told == [(1, "device", ""), (2, "link", "passed"), (1, "device", "fine")]
    assert len(job.orders(m.Probe)) == 1


def test_a_crash_in_the_midst_ends_the_suspicion_of_a_link() -> None:
    job = linked(finding(link=(1, 2)))
    ranks, probe = announced(job)
    job.crash(2)
    for rank in ranks:
        if rank != 2:
            job.say(rank, m.Probed(probe=probe.probe, missed="does not train now"))
    assert suspected(job) == [(None, False), (None, True)]
    job.park(stepped=5)
    job.run(1)
    assert [entry.kind for entry in job.all(FailureFound)] == ["fail-stop"]
    job.find(finding(link=(0, 4)))
    assert announced(job)[1].probe == probe.probe + 1


def test_no_link_is_measured_when_training_ends_before() -> None:
    job = Job(finding(link=(1, 2)), nodes=4, declare=DECLARE).run(5)
    assert (job.orders(m.Probe), suspected(job)) == ([], [(None, True)])
    assert job.monitor.heard == [("cleared link", 1, 2)]


def test_a_link_that_recovers_has_its_failure_ended() -> None:
    job = linked(finding(link=(1, 2)))
    measure_links(job, {(1, 2): 5e-3})
    job.find(finding(kind="recovered", link=(1, 2), iteration=7))
    assert job.all(FailureEnded) == [
        FailureEnded(failure=1, node=None, device=None, iteration=7, evidence="own work takes longer than its peers'")
    ]
    job.find(finding(link=(1, 2)))
    measure_links(job, {(1, 2): 5e-3})
    assert [entry.failure for entry in slow_ones(job)] == [1, 2]


# --- as fast as before --------------------------------------------------------------------------------------------


def test_what_is_fast_again_at_work_gets_its_work_back() -> None:
    job = Job(nodes=2).run(2)
    job.slow_by_verdict(3, 0.6)
    assert 3 in job.job.record.active
    assert job.work[3] < EVEN[3]
    job.find(finding(3, kind="recovered", iteration=4, evidence="as before"))
    assert job.all(FailureEnded) == [FailureEnded(failure=1, node="n2", device=1, iteration=4, evidence="as before")]
    job.paused()
    assert job.work == EVEN
    assert [entry.failures for entry in job.all(Reconfigured)] == [(1,), ()]
    job.find(finding(3))
    job.measure({3: 0.6})
    assert [entry.failure for entry in slow_ones(job)] == [1, 2], "it may become slow again"


def test_a_suspect_that_recovers_before_its_verdict_has_no_failure_to_end() -> None:
    job = Job(finding(3), finding(3, kind="recovered", detected=6)).run(6)
    assert job.all(FailureEnded) == []


# --- devices that stand by ----------------------------------------------------------------------------------------


def standing_by() -> Job:
    """Rank 3 is so slow that it has no work."""
    job = Job(nodes=2).run(2)
    job.slow_by_verdict(3, 0.05)
    assert job.job.record.plan is not None
    assert job.job.record.plan.layout.standby == (3,)
    return job


def test_a_slow_device_that_stands_by_is_measured_now_and_then_and_comes_back() -> None:
    job = standing_by()
    job.train(60)
    before = len(job.orders(m.Probe))
    assert job.asked == (3,)
    job.measure({3: 0.05})
    assert job.all(FailureEnded) == []
    job.train(55)
    assert len(job.orders(m.Probe)) == before
    job.train(6)
    assert len(job.orders(m.Probe)) == before + 1
    job.measure()
    (entry,) = job.all(FailureEnded)
    assert (entry.failure, entry.node, entry.device, entry.iteration) == (1, "n2", 1, job.job.record.committed + 1)
    job.train(2)
    job.paused()
    assert job.work == EVEN
    assert [taken.occasion for taken in job.all(ProbesTaken)][-2:] == ["standby", "standby"]
    job.train(200)
    assert len(job.orders(m.Probe)) == before + 1, "nobody stands by any more"


def test_plans_tell_what_is_slow_and_has_no_work_under_them() -> None:
    job = standing_by()
    assert [plan.unaffected_by for plan in job.all(PlanDecided)] == [(), (1,)]
    job.crash(0)
    job.park(stepped=job.job.record.committed)
    assert job.all(PlanDecided)[-1].unaffected_by == ((1,) if 3 not in job.job.record.active else ())
    back = standing_by()
    back.train(60)
    back.measure()
    back.train(2)
    back.paused()
    assert back.work == EVEN
    assert back.all(PlanDecided)[-1].unaffected_by == ()


def test_a_device_that_recovers_in_the_first_iteration_of_a_plan_comes_back_afterwards() -> None:
    job = standing_by()
    job.train(60)
    job.say(1, m.Stuck(epoch=2, error="connection reset"))
    job.wait(2)
    job.park(stepped=job.job.record.committed)
    job.run()
    job.measure()
    assert len(job.all(FailureEnded)) == 1
    job.train(1)
    assert job.job.pause is not None


def test_a_device_that_stands_by_and_does_not_answer_is_asked_again() -> None:
    job = standing_by()
    job.train(200)
    probes = [ranks for ranks, _ in job.orders(m.Probe)][1:]
    assert len(probes) >= 3
    assert set(probes) == {(3,)}
    assert job.all(FailureEnded) == []
    assert [entry.kind for entry in job.all(FailureFound)] == ["fail-slow"]


def test_a_device_that_dies_while_it_stands_by_is_not_measured() -> None:
    job = standing_by()
    job.crash(3)
    before = len(job.orders(m.Probe))
    job.train(100)
    assert len(job.orders(m.Probe)) == before


# --- Slurm --------------------------------------------------------------------------------------------------------


def test_nothing_is_drained_for_being_slow() -> None:
    job = Job(nodes=4, slurm=True, drains_left=4, replacements=4, batch_node="n1").run(2)
    job.slow_by_verdict(3, 0.05)
    job.find(finding(link=(0, 4)))
    measure_links(job, {(0, 4): 5e-3})
    job.train(60)
    assert len(slow_ones(job)) == 2
    unwanted = (api.DrainNode, api.ReleaseNode, api.AskReplacement, api.DropNode)
    assert [action for action in job.actions if isinstance(action, unwanted)] == []


# --- a new supervisor ---------------------------------------------------------------------------------------------


def test_a_new_supervisor_knows_what_is_slow() -> None:
    before = Job(nodes=2).run(2)
    before.slow_by_verdict(3, 0.6)
    before.find(finding(link=(0, 2)))
    measure_links(before)
    heir = TakenOver(before).all_back()
    assert heir.job.record.slow == before.job.record.slow
    assert heir.job.record.slow_links == before.job.record.slow_links
    assert heir.job.record.reference == before.job.record.reference
    assert heir.all(Suspected) == []
    heir.crash(0)
    heir.park(stepped=heir.job.record.committed)
    heir.run(1)
    assert heir.all(FailureFound)[-1].failure == 3, "numbers go on"


def test_a_new_supervisor_plans_with_the_speeds_that_the_last_one_found() -> None:
    before = Job(nodes=2).run(2)
    before.slow_by_verdict(3, 0.6)
    heir = TakenOver(before).all_back()
    heir.say(2, m.Stuck(epoch=2, error="connection reset"))
    heir.wait(2)
    heir.park(stepped=heir.job.record.committed)
    assert heir.plan.assignment == before.plan.assignment
    assert heir.plan.layout == before.plan.layout


def test_a_new_supervisor_does_not_know_as_slow_what_is_fast_again() -> None:
    before = Job(nodes=2).run(2)
    before.slow_by_verdict(3, 0.6)
    before.find(finding(3, kind="recovered"))
    heir = TakenOver(before).all_back()
    assert heir.job.record.slow == {}


def test_a_new_supervisor_clears_a_suspicion_that_nobody_answers_any_more() -> None:
    heir = TakenOver(Job(finding(3)).run(5)).all_back()
    (entry,) = heir.all(Suspected)
    assert (entry.rank, entry.node, entry.kind, entry.cleared) == (3, "n2", "slow", True)
    heir.job.monitor = Scripted(finding(3, detected=6))  # type: ignore[assignment]
    heir.step(6)
    assert suspected(heir) == [(3, True), (3, False)], "and looks into it itself"


def test_a_new_supervisor_takes_no_answer_to_a_probe_of_the_last_one_for_its_own() -> None:
    heir = TakenOver(Job(finding(3)).run(5)).all_back()
    heir.job.monitor = Scripted(finding(3, detected=6))  # type: ignore[assignment]
    heir.step(6)
    ranks, _ = heir.orders(m.Probe)[-1]
    for rank in ranks:
        heir.say(rank, m.Probed(probe=1, speed=m.Speed(flops=1e14, memory_bytes=1e12), seconds=0.2))
    assert suspected(heir) == [(3, True), (3, False)], "it is still to be measured"


@pytest.mark.parametrize("cleared", [True, False])
def test_a_new_supervisor_clears_no_suspicion_that_is_over(cleared: bool) -> None:
    before = Job(finding(3)).run(5)
    before.measure({} if cleared else {3: 0.93})
    assert TakenOver(before).all_back().all(Suspected) == []


def test_a_new_supervisors_detector_knows_what_is_slow() -> None:
    before = Job(nodes=2).run(2)
    before.slow_by_verdict(3, 0.6)
    heir = TakenOver(before).all_back()
    heir.step(heir.job.record.committed + 1)
    assert heir.job.monitor.speeds() == {3: pytest.approx(0.6)}


# --- faults on purpose --------------------------------------------------------------------------------------------


def test_slowness_that_is_injected_is_told_to_its_rank_which_goes_on() -> None:
    fault = parse("slow:rank=3,speed=0.5@iteration=3,until=9", 1)
    job = Job(faults=(fault,)).run(2)
    answer = job.say(3, m.FaultDue(fault=1))
    assert job.orders(m.Slow, answer) == [((3,), m.Slow(speed=0.5, until=9))]
    assert job.orders(m.FaultGo, answer) == [((3,), m.FaultGo(fault=1, fire=False))]
    (entry,) = job.all(FaultInjected)
    assert (entry.rank, entry.text) == (3, str(fault))
    for iteration in range(3, 6):
        job.step(iteration)
    job.find(finding(3))
    job.measure({3: 0.5})
    (found,) = slow_ones(job)
    assert found.detect_s is not None
    assert 0 < found.detect_s < 1


def test_a_whole_node_is_slow_at_an_operators_word() -> None:
    job = Job().run(2)
    fault = msgspec.structs.replace(parse("slow:node=n2,speed=0.5@iteration=3", 1), iteration=None)
    answer = job.feed(api.InjectAsked(request=1, fault=fault))
    assert job.orders(m.Slow, answer) == [((2, 3), m.Slow(speed=0.5))]
    assert [action.ok for action in answer if isinstance(action, api.Reply)] == [True]


def test_a_link_is_slow_for_all_ranks_at_its_ends_until_that_ends() -> None:
    fault = parse("slow:link=n1-n2,speed=0.2@iteration=3,until=12", 1)
    job = Job(faults=(fault,)).run(2)
    answer = job.say(2, m.FaultDue(fault=1))
    slow = m.Slow(speed=0.2, until=12, link=("n1", "n2"))
    assert job.orders(m.Slow, answer) == [((0, 1, 2, 3), slow)]
    assert job.orders(m.FaultGo, answer) == [((2,), m.FaultGo(fault=1, fire=False))]
    job.find(finding(link=(1, 2)))
    for iteration in range(job.job.record.committed + 1, 12):
        job.step(iteration)
    assert [order for _, order in job.orders(m.Slow)] == [slow]
    job.step(12)
    assert job.orders(m.Slow)[-1] == ((0, 1, 2, 3), m.Slow(speed=1.0, link=("n1", "n2")))


@pytest.mark.parametrize(("text", "why"), [("n1-n9", "there is no node n9; the job has n1, n2, n3"), ("n1-n3", "gone")])
def test_a_link_to_nowhere_cannot_be_slow(text: str, why: str) -> None:
    job = Job().run(2)
    job.feed(api.AgentLost(node="n3", reason="gone"))
    fault = msgspec.structs.replace(parse(f"slow:link={text},speed=0.5@iteration=3", 1), iteration=None)
    answer = job.feed(api.InjectAsked(request=1, fault=fault))
    (reply,) = [action for action in answer if isinstance(action, api.Reply)]
    assert not reply.ok
    assert why in reply.text
    assert job.orders(m.Slow) == []


def test_who_stands_by_is_told_when_its_injected_slowness_is_over() -> None:
    job = Job(faults=(parse("slow:rank=3,speed=0.05@iteration=2,until=6", 1),), nodes=2).run(1)
    job.say(3, m.FaultDue(fault=1))
    job.slow_by_verdict(3, 0.05)
    assert 3 not in job.job.record.active
    while job.job.record.committed < 5:
        job.step(job.job.record.committed + 1)
    assert [order.speed for _, order in job.orders(m.Slow)] == [0.05]
    for iteration in (6, 7):
        job.step(iteration)
    assert [(ranks, order.speed) for ranks, order in job.orders(m.Slow)] == [((3,), 0.05), ((3,), 1.0)]


@pytest.mark.parametrize("killed", [True, False])
def test_slowness_that_was_injected_is_not_the_beginning_of_a_later_crash(killed: bool) -> None:
    """`detect_s` is the figure by which fail-stop detection is measured."""
    faults = (parse("slow:rank=3,speed=0.9@iteration=2", 1), parse("kill:rank=3@iteration=100", 2))
    job = Job(faults=faults).run(1)
    job.say(3, m.FaultDue(fault=1))
    job.train(30)
    if killed:
        job.say(3, m.FaultDue(fault=2))
    job.crash(3)
    job.park(stepped=job.job.record.committed)
    (entry,) = job.all(FailureFound)
    if killed:
        assert entry.detect_s is not None
        assert entry.detect_s < 1.0
    else:
        assert entry.detect_s is None, "nobody knows when it began"


# --- measurements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [b"1234567", b"\0" * 20, b"\xff" * 40])
def test_measurements_that_make_no_sense_cost_no_iteration(chunks: bytes) -> None:
    job = Job().run(1)
    job.job.monitor = Monitor()
    job.job.expected_epoch = 0
    for iteration in range(2, 8):
        for rank in job.job.record.active:
            told = chunks if rank == 3 else b""
            step = m.Stepped(epoch=1, outcome=outcome(iteration), seconds=0.5, compute_s=0.4, chunks=told)
            job.say(rank, step)
    assert job.job.record.committed == 7
    warned = [text for text in job.texts("warning") if text.startswith("rank 3: 7 bytes of measurements")]
    assert len(warned) == (6 if len(chunks) == 7 else 0)


# --- whether another plan is worth its price --------------------------------------------------------------------------


def told(job: Job) -> list[str]:
    return [action.text for action in job.actions if isinstance(action, api.Say)]


def test_what_recovers_takes_the_place_of_its_own_slow_down() -> None:
    job = Job(records=DEAR).run(5)
    job.find(finding(3))
    job.measure({3: 0.5})
    job.find(finding(3, kind="recovered"))
    last = [action.text for action in job.actions if isinstance(action, api.Say)][-1]
    assert last == "node n2 device 1 is as fast as before: the plan stays, no other is faster"


def test_on_whose_account_a_plan_is_changed_is_in_the_journal() -> None:
    job = Job().run(5)
    job.find(finding(3))
    job.measure({3: 0.5})
    assert job.job.pause is not None
    assert [(entry.devices, entry.links) for entry in job.all(ChangeDecided)] == [((("n2", 1),), ())]


def test_what_made_plans_change_often_lately_has_to_gain_more() -> None:
    job = Job().run(5)
    job.job.changed_at["n2", 1] = [job.now] * 20
    job.find(finding(3))
    job.measure({3: 0.5})
    assert len(job.all(FailureFound)) == 1
    assert job.job.pause is None


def test_reports_without_measurements_are_not_worth_a_word() -> None:
    job = Job().run(3)
    assert not any("judged without" in a.text for a in job.actions if isinstance(a, api.Say))


def test_a_slow_down_is_borne_until_it_has_cost_what_another_plan_does() -> None:
    """Nobody knows how long it lasts: acting then is never more than twice as dear as having known (ski rental)."""
    job = Job(records=DEAR).run(2)
    onset = job.job.record.committed + 1
    job.slow_by_verdict(3, 0.5)
    assert job.job.pause is None
    assert any("may be temporary" in said for said in told(job))
    while job.job.pause is None and job.now < 60:
        job.train(0.5)
    assert job.job.pause is not None
    borne_s = (job.job.record.committed + 1 - onset) * job.job.usual_s
    assert borne_s > 5.0


def test_what_recovers_meanwhile_changes_nothing() -> None:
    job = Job(records=DEAR).run(2)
    before = job.work
    job.slow_by_verdict(3, 0.5)
    job.find(finding(3, kind="recovered", iteration=job.job.record.committed + 1))
    job.train(120)
    assert job.job.pause is None
    assert job.work == before


def test_near_the_end_no_plan_is_worth_a_change() -> None:
    job = Job(records=DEAR, declare=msgspec.structs.replace(LONG, iterations=20)).run(2)
    job.slow_by_verdict(3, 0.5)
    job.train(5)
    assert job.job.pause is None
    assert any("until the job's end" in said for said in told(job))


def test_a_new_supervisor_bears_what_the_last_one_bore_and_then_acts() -> None:
    before = Job(records=DEAR).run(2)
    before.slow_by_verdict(3, 0.5)
    assert before.job.pause is None
    heir = TakenOver(before)
    heir.job.record.costs[:] = DEAR
    heir.all_back()
    assert [one.device for one in heir.job.reconsider] == [("n2", 1)]


def test_the_detector_is_shown_who_measured_and_nobody_else() -> None:
    """A report without measurements is a rank that was not measured, not one that computed nothing."""
    job = Job().run(1)
    iteration = job.job.record.committed + 1
    for rank in job.job.record.active:
        chunks = pack([[0.1, 0.1]] * 5) if rank in (1, 4) else b""
        told = outcome(iteration)
        job.say(rank, m.Stepped(epoch=job.job.epoch, outcome=told, seconds=0.5, compute_s=0.4, chunks=chunks))
    assert job.job.record.committed == iteration
    assert job.monitor.seen[-1] == [1, 4]


def test_answers_are_waited_for_as_long_as_nobody_had_the_chance_to_give_them() -> None:
    """Ranks that train answer between two iterations: a long one, or an evaluation before it, is nobody's silence."""
    job = Job(finding(3)).run(5)
    job.wait(40, primitives=dict.fromkeys(range(6), 5))
    assert job.all(ProbesTaken) == []
    job.measure({3: 0.5})
    assert [entry.ranks for entry in slow_ones(job)] == [(3,)]
