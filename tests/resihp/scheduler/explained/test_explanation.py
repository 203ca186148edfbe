"""What limits a plan, as data."""

from __future__ import annotations

import json

import numpy as np

from resihp.scheduler.explained.explanation import Explanation, Healthy, Limiting, as_json


def test_numbers_of_a_search_without_numba_are_plain_data() -> None:
    number = np.float64(0.5)
    found = Explanation(
        seconds=number,
        unit="s",
        limiting=Limiting(0, 0, (0,), ((0, 1),), number, 0, 1.0),
        beside=number,
        idle=(),
        bound=number,
        healthy=Healthy(number, number, number),
    )
    assert json.loads(json.dumps(as_json(found)))["limiting"]["share"] == 0.5
