"""Words of messages that depend on a number."""

from __future__ import annotations

from resihp.words import count_of, natural


def test_one_and_several() -> None:
    assert [count_of(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_names_are_ordered_by_their_numbers_however_long() -> None:
    assert sorted(["n10", "n2", "m"], key=natural) == ["m", "n2", "n10"]
    assert sorted(["9" * 5000, "n1", "12"], key=natural)[0] == "12"
