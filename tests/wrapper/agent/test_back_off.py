"""Agents that come back: soon, and not all at the same moment."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from resihp.wrapper.agent.supervisor_link import MAX_PAUSE_S, BackOff


def attempts(dice: Random, within_s: float) -> list[float]:
    """When an agent that is never answered tries."""
    back_off, at, times = BackOff(dice), 0.0, []
    while at < within_s:
        times.append(at)
        at += back_off.pause_s()
    return times


def test_a_small_job_is_back_soon() -> None:
    for seed in range(100):
        first = attempts(Random(seed), 60.0)
        assert first[1] == 0.0, "a connection that broke is made again at once"
        assert 0.1 <= first[2] - first[1] <= 0.2
        assert 0.15 <= first[3] - first[2] <= 0.3
        assert sum(at < 3.0 for at in first) >= 6, "a supervisor that is started again in 3 s is found"
        assert max(b - a for a, b in pairwise(first)) <= MAX_PAUSE_S


def test_two_thousand_agents_are_spread_and_grow_fewer() -> None:
    agents = [attempts(Random(seed), 10.0) for seed in range(2048)]
    times = sorted(at for agent in agents for at in agent)
    bins = [sum(1 for at in times if start / 10 <= at < (start + 1) / 10) for start in range(100)]
    assert max(bins[30:]) < 2048 / 6, "each tenth of a second another few"
    assert len(times) / 2048 < 12, "every 0.1 s it would be a hundred each"
    assert all(any(at >= 5.0 for at in agent) for agent in agents), "and nobody stays away"


def test_who_was_there_comes_back_at_once() -> None:
    back_off = BackOff(Random(1))
    assert [back_off.pause_s() > 0 for _ in range(4)] == [False, True, True, True]
    back_off.begin_anew()
    assert back_off.pause_s() == 0.0
