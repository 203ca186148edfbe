"""Words of messages that depend on a number."""

from __future__ import annotations

from resihp.words import count_of


def test_one_and_several() -> None:
    assert [count_of(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
