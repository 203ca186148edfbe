"""When what failed did fail: the rules, and that journals tell it of whatever befalls a job."""

from __future__ import annotations

import pytest

from resihp.controller import interface as api
from resihp.controller.fail_stop.onsets import Commit, Onsets
from resihp.faults import Fault
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound
from resihp.simulator.scenarios.scenario import Disturbance, Scenario
from resihp.simulator.world import World
from tests.resihp.controller.direct import Direct
from tests.resihp.controller.fail_slow.test_slowness import Job, finding, slow_ones
from tests.resihp.controller.test_takeover import TakenOver


def each_second(count: int, inherited: int = 0) -> Onsets:
    found = Onsets(inherited=inherited)
    for i in range(1, count + 1):
        found.add(i, float(i), 1.0)
    return found


def before_s(commits: Onsets, at: float, fault_s: float | None = None, silent_s: float | None = None) -> float | None:
    found = commits.before_notice_s(at, fault_s=fault_s, silent_s=silent_s)
    return None if found is None else round(found, 6)


def test_what_went_by_beyond_a_usual_iteration_was_not_computed_in() -> None:
    commits = each_second(30)
    assert before_s(commits, 30.4) == 0.0, "its agent saw it end"
    assert before_s(commits, 34.0) == 3.0
    # A commit after the notice, of the iteration that counted, tells nothing.
    commits.add(31, 34.5, 1.0)
    assert before_s(commits, 34.0) == 3.0


def test_the_last_sign_that_was_heard_tells_better_if_it_was_earlier() -> None:
    assert before_s(each_second(30), 34.0, silent_s=3.6) == 3.6
    assert before_s(each_second(30), 34.0, silent_s=0.2) == 3.0
    assert before_s(each_second(30), 34.0, silent_s=9.0) == 4.0, "it took part in the last commit"


def test_of_an_injected_fault_its_own_moment_counts() -> None:
    assert before_s(each_second(30), 34.0, fault_s=0.3) == 0.3
    assert before_s(each_second(30), 34.0, fault_s=9.0) == 4.0


def test_between_two_supervisors_it_was_the_last_commit() -> None:
    assert before_s(each_second(30, inherited=30), 40.0) == 10.0
    assert before_s(each_second(30, inherited=29), 40.0) == 9.0, "it has committed since"


def test_with_nothing_to_tell_by_it_is_not_told() -> None:
    assert before_s(Onsets(), 40.0) is None
    assert before_s(Onsets(), 40.0, silent_s=3.0) == 3.0
    assert before_s(Onsets(), 40.0, fault_s=0.5, silent_s=3.0) == 0.5
    assert Onsets().slow_for_s(5, 40.0) is None


def test_what_is_slow_is_so_since_the_last_healthy_iteration() -> None:
    assert each_second(30).slow_for_s(21, 30.5) == 10.5
    assert each_second(30).slow_for_s(21, 30.5, fault_s=10.2) == 10.2
    assert each_second(5000).slow_for_s(2, 5000.5) is None, "too long ago"


def test_commits_of_before_are_told_by_their_age() -> None:
    commits = Onsets.before_us([Commit(7, -12.0, 1.0), Commit(8, -11.0, None)])
    commits.begin(100.0)
    assert before_s(commits, 100.5) == 11.5
    assert commits.slow_for_s(8, 100.0) == 12.0


def test_a_slow_device_tells_since_when() -> None:
    job = Job(finding(3), nodes=2).run(5)
    job.measure({3: 0.5})
    job.train(30)
    [entry] = slow_ones(job)
    assert entry.detect_s is None
    assert entry.failed_s is not None
    assert entry.failed_s > 0.0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_the_moment_that_is_told_is_near_the_true_one(seed: int, kind: str) -> None:
    """A rank of four ends, or stands still, in an iteration of about 1.1 s: nobody can know it better than by that."""
    scenario = Scenario(seed=seed, disturbances=(Disturbance(kind, "step", nth=9, delay=0.2),))  # type: ignore[arg-type]
    world = World(scenario)
    result = world.run()
    assert result.exit_code == 0
    [(found_at, failure)] = [(at, entry) for at, entry in world.entries if isinstance(entry, FailureFound)]
    [true_at] = [at for at, told in world.log if str(told).startswith(f"!!! {kind} rank")]
    assert failure.failed_at(found_at) == pytest.approx(true_at, abs=1.6)
    assert failure.noticed_at(found_at) >= true_at


def test_a_batch_host_that_died_failed_at_its_last_commit() -> None:
    """Its ranks are gone with it, and its successor leads 10 s after the last commit."""
    job = TakenOver(Direct(nodes=3).run(2))
    job.job.onsets = Onsets.before_us([Commit(1, -10.5, 0.5), Commit(2, -10.0, 0.5)])
    job.back("n1")
    job.back("n3")
    job.feed(api.AgentLost(node="n2", reason="its host is gone"))
    job.park(stepped=2, holds=(1,))
    [failure] = job.all(FailureFound)
    assert failure.node == "n2"
    assert failure.failed_s is not None
    assert failure.failed_s - failure.noticed_s == pytest.approx(10.0, abs=0.1)


def test_of_a_node_whose_processes_ended_first_the_fault_is_before_the_first_of_them() -> None:
    """It was found 5 s after them that the node is lost; noticed was the first end, and the fault was just before."""
    job = Direct(nodes=3, faults=(Fault(id=1, kind="kill", node="n2", iteration=3, phase="forward"),)).run(2)
    job.say(2, m.FaultDue(fault=1))
    job.crash(2)
    job.crash(3)
    job.wait(5.0)
    job.feed(api.AgentLost(node="n2", reason="its host is gone"))
    job.park(stepped=2, holds=(1,))
    [failure] = job.all(FailureFound)
    assert (failure.node, failure.ranks) == ("n2", (2, 3))
    assert failure.detect_s == pytest.approx(0.01, abs=0.01)
    assert failure.failed_s is not None
    assert failure.noticed_s is not None
    assert failure.failed_s - failure.noticed_s == pytest.approx(failure.detect_s, abs=1e-5)


def test_a_loss_is_noticed_with_the_communication_that_broke_with_it() -> None:
    """A peer's transfer broke, and everybody parked for that; a second later its node's connection was found closed."""
    job = Direct(nodes=3).run(2)
    job.say(0, m.Stuck(epoch=1, error="connection reset by peer"))
    job.wait(1)
    parked_at = job.now
    assert job.orders(m.Park), "training did not stop for the transfer"
    job.wait(1)
    job.feed(api.AgentLost(node="n2", reason="connection closed"))
    job.park(stepped=2, holds=(1,))
    [failure] = job.all(FailureFound)
    assert (failure.kind, failure.node) == ("fail-stop", "n2")
    assert failure.noticed_s == pytest.approx(job.now - parked_at, abs=0.05)
    assert failure.failed_s is not None
    assert failure.failed_s >= failure.noticed_s


def test_communication_that_broke_before_a_fault_told_nothing_of_it() -> None:
    fault = Fault(id=1, kind="kill", node="n2", iteration=3, phase="forward")
    job = Direct(nodes=3, faults=(fault,)).run(2)
    job.say(0, m.Stuck(epoch=1, error="connection reset by peer"))
    job.wait(1)
    job.say(2, m.FaultDue(fault=1))
    job.feed(api.AgentLost(node="n2", reason="connection closed"))
    job.park(stepped=2, holds=(1,))
    [failure] = job.all(FailureFound)
    assert failure.detect_s == pytest.approx(0.01, abs=0.01)
    assert failure.failed_s is not None
    assert failure.noticed_s is not None
    assert failure.failed_s - failure.noticed_s == pytest.approx(failure.detect_s, abs=1e-5)
