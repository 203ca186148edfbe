"""Selective exclusion: the paper's Eq. 3 and 4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.scheduler.layouts.tp_groups import degrees, exclude, overlap, speed


def group(*throughputs: float) -> list[tuple[int, float]]:
    return list(enumerate(throughputs))


@pytest.mark.parametrize(
    ("candidates", "k_min", "started_with", "expected"),
    [
        (4, 1, None, (1, 2, 4)),
        (3, 1, None, (1, 2)),
        (8, 2, None, (2, 4, 8)),
        (8, 3, None, (4, 8)),
        (8, 1, 4, (1, 2, 4)),
        (6, 1, 6, (1, 2, 4, 6)),
        (5, 1, 6, (1, 2, 4)),
        (3, 4, None, ()),
        (0, 1, 4, ()),
    ],
)
def test_degrees_are_powers_of_two_and_the_one_that_the_job_was_started_with(
    candidates: int, k_min: int, started_with: int | None, expected: tuple[int, ...]
) -> None:
    assert degrees(candidates, k_min, started_with=started_with) == expected


def test_degrees_that_the_model_cannot_be_cut_by_are_left_out() -> None:
    assert degrees(8, 1, obstacle=lambda k: "no" if k == 4 else None) == (1, 2, 8)


@pytest.mark.parametrize("x", [0.5, 0.51, 0.9, 1.0])
def test_a_rank_of_half_the_speed_or_more_stays(x: float) -> None:
    """The paper's TP4 with p = (1, 1, 1, x); at exactly one half the larger group stays."""
    assert exclude(group(1, 1, 1, x), before=(0, 1, 2, 3)) == (0, 1, 2, 3)


@pytest.mark.parametrize("x", [0.49, 0.3, 0.0])
def test_a_slower_rank_goes_and_one_healthy_rank_with_it(x: float) -> None:
    found = exclude(group(1, 1, 1, x), before=(0, 1, 2, 3))
    assert len(found) == 2
    assert 3 not in found


def test_no_degree_no_group() -> None:
    assert exclude(group(1, 1), 4) == ()
    assert exclude([], 1) == ()
    assert exclude(group(0.0, 0.0), 1) == ()


def test_those_stay_who_hold_part_of_what_they_will_hold() -> None:
    assert exclude([(0, 1), (2, 1), (3, 1)], before=(0, 1, 2, 3)) == (0, 2)
    assert exclude([(1, 1), (2, 1), (3, 1)], before=(0, 1, 2, 3)) == (1, 2)
    assert exclude([(0, 1), (1, 1), (2, 1)], before=(0, 1, 2, 3)) == (0, 2)


def test_a_newcomer_takes_the_place_of_the_dead() -> None:
    assert exclude([(0, 1), (2, 1), (3, 1), (9, 1)], before=(0, 1, 2, 3)) == (0, 9, 2, 3)
    assert exclude([(0, 1), (2, 1), (7, 1), (9, 1)], before=(0, 2)) == (0, 7, 2, 9)


def test_a_healthy_idle_rank_replaces_a_slow_one() -> None:
    assert exclude([(0, 1), (1, 0.7), (9, 1)], started_with=2, before=(0, 1)) == (0, 9)


def test_an_idle_rank_is_not_preferred_to_an_equal_member() -> None:
    assert exclude([(4, 1), (5, 1), (1, 1), (9, 1)], started_with=2, before=(4, 5)) == (4, 5)


def test_overlap_is_the_part_that_two_shares_have_in_common() -> None:
    assert [overlap(1, 2, t, 4) * 4 for t in range(4)] == [0, 0, 1, 1]
    assert overlap(0, 3, 0, 2) * 3 == 1


@given(
    st.lists(st.sampled_from([0.1, 0.3, 0.5, 0.7, 1.0]), max_size=9),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 8)),
    st.data(),
)
def test_nothing_in_k_is_faster(
    throughputs: list[float], k_min: int, started_with: int | None, data: st.DataObject
) -> None:
    candidates = data.draw(st.permutations(group(*throughputs)))
    before = data.draw(st.permutations(range(12)))[: data.draw(st.integers(0, 8))]
    found = exclude(candidates, k_min, started_with=started_with, before=before)
    p = dict(candidates)
    fastest = sorted(throughputs, reverse=True)
    every = {k: k * fastest[k - 1] for k in degrees(len(candidates), k_min, started_with=started_with)}
    if not every:
        assert found == ()
        return
    assert len(set(found)) == len(found)
    assert speed([(rank, p[rank]) for rank in found]) == max(every.values())
    assert len(found) == max(k for k, value in every.items() if value == max(every.values()))
    assert sorted((p[rank] for rank in found), reverse=True) == fastest[: len(found)]
    members = [rank for rank in found if rank in before]
    assert members == [rank for rank in before if rank in members]
    again = exclude(candidates, k_min, started_with=started_with, before=found)
    assert again == found
