"""Any layout, any schedule, any chain of them: the mathematics of a serial model, and state that is never touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

CHAINS = int(os.environ.get("RESIHP_CHAINS", "8"))
"""Each is three plans on 2 to 8 ranks. 8 have each number of ranks, each kind of model with each way to recompute but
four pairs; `make soak` has 200."""


@pytest.mark.parametrize("seed", range(CHAINS))
@pytest.mark.parametrize("vacant", [False, True], ids=["", "stages-without-ranks"])
def test_a_chain_of_random_plans_equals_a_serial_model(
    chain_ranks: Ranks, tmp_path: Path, seed: int, vacant: bool
) -> None:
    answers = chain_ranks(
        "chain",
        2 + seed % 7,
        vacant=vacant,
        seed=seed,
        ranks=2 + seed % 7,
        plans=3,
        kind=("gpt", "llama", "qwen3")[seed % 3],
        recompute=("none", "layernorm", "full", "selective")[seed % 4],
        strict=seed // 2 % 2 == 0,
        cut=seed // 4 % 2 == 0,
        root=str(tmp_path),
    )
    assert sum(answer["work"] for answer in answers) > 0
    assert max(answer["worst"] for answer in answers) <= 1e-5
