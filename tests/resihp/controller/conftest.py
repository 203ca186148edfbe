"""Simulated jobs bring a planner and a checker of their own; after each test, the real ones are back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resihp.controller import planning


@pytest.fixture(autouse=True)
def _own_planner() -> Iterator[None]:
    real = (planning.planner, planning.checker, planning.moves, planning.outline)
    yield
    planning.planner, planning.checker, planning.moves, planning.outline = real
