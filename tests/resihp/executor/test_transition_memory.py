"""What a rank holds while a transition is under way: what is allocated, and what the model of memory says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama-bf16", False), ("llama", True)])
def test_what_is_held_at_once_is_what_the_model_says(ranks: Callable[..., list[Any]], kind: str, tied: bool) -> None:
    (answer,) = ranks("held_in_a_transition", 1, kind=kind, tied=tied, layouts=16)
    for held in answer:
        assert held["old"] == pytest.approx(held["old_said"], rel=0.02)
        assert held["both"] == pytest.approx(held["both_said"], rel=0.02)
    assert sum(held["both"] > held["old"] for held in answer) > 8
    assert any(held["both"] < 1.9 * held["old"] for held in answer if held["both"] > held["old"]), "some is shared"
