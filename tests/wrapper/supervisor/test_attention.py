"""The clock that stands still while nobody could be heard."""

from __future__ import annotations

import pytest

from resihp.wrapper.supervisor import attention
from resihp.wrapper.supervisor.attention import LISTEN_S, LOOK_EVERY_S, Attention


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(attention, "time", clock)
    return clock


def look(watched: Attention, clock: Clock, seconds: float, every: float = LOOK_EVERY_S) -> None:
    until = clock.now + seconds
    while clock.now < until:
        clock.now += every
        watched.look()


def test_a_loop_that_looks_in_time_hears_all_the_time(clock: Clock) -> None:
    watched = Attention()
    began = watched.seconds()
    look(watched, clock, 10.0)
    assert watched.seconds() - began == pytest.approx(10.0)
    clock.now += 0.1
    assert watched.seconds() - began == pytest.approx(10.1)


def test_what_was_not_heard_while_it_was_stopped_does_not_count(clock: Clock) -> None:
    watched = Attention()
    began = watched.seconds()
    look(watched, clock, 10.0)
    clock.now += 20.0
    before = watched.seconds()
    assert before - began == pytest.approx(10.0 + LOOK_EVERY_S)
    assert watched.look() == 20.0
    assert not watched.may_judge
    clock.now += 1.0
    assert watched.seconds() == before, "it has yet to hear what was said meanwhile"
    look(watched, clock, LISTEN_S - 1.0)
    assert watched.may_judge
    look(watched, clock, 1.0)
    assert watched.seconds() - before == pytest.approx(1.0, abs=2 * LOOK_EVERY_S)


def test_no_time_passes_while_all_agents_are_stopped(clock: Clock) -> None:
    watched = Attention()
    look(watched, clock, 10.0)
    before = watched.seconds()
    for _ in range(400):
        clock.now += LOOK_EVERY_S
        watched.look(are_agents_stopped=True)
    assert watched.seconds() == before
    look(watched, clock, LISTEN_S - LOOK_EVERY_S)
    assert not watched.may_judge, "it has yet to hear them"
    look(watched, clock, 1.0)
    assert watched.may_judge


def test_a_loop_that_is_always_late_takes_longer_to_find_a_silence_but_does(clock: Clock) -> None:
    watched = Attention()
    began = watched.seconds()
    look(watched, clock, 99.0, every=1.5)
    assert not watched.may_judge
    assert watched.seconds() - began == pytest.approx(66 * LOOK_EVERY_S)
