"""Nothing can run: which constraint binds, and what would lift it."""

from __future__ import annotations

import re

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.scheduler import decide
from resihp.scheduler.situation import Situation
from resihp.scheduler.what_if import catalogue, question
from resihp.scheduler.what_if.question import Question


def posed(failed: tuple[int, ...], spares: int = 0, memory_bytes: int | None = None) -> Situation:
    """llama2-30b on 16 GPUs in one replica of four stages."""
    hardware = catalogue.hardware("a100")
    asked = Question(
        model=catalogue.model("llama2-30b", 4096),
        hardware=hardware,
        tp=4,
        pp=4,
        dp=1,
        micro_batches=8,
        gpus_per_node=4,
        sequence_parallel=True,
        failed=failed,
        spares=spares,
    )
    case = question.pose(asked, question.first_plan(asked))
    return msgspec.structs.replace(case, memory_bytes=memory_bytes or hardware.memory_bytes)


def test_memory_binds_and_what_it_says_would_help_does() -> None:
    failed = tuple(range(8))
    with pytest.raises(PlanError) as caught:
        decide(posed(failed))
    said = str(caught.value)
    assert "out of memory: even one pipeline of all remaining ranks, with 2 stages, has room for" in said
    assert re.search(r"each with [\d.]+ GB of state and [\d.]+ GB of activations", said)
    more, enough = re.search(r"(\d+) more ranks", said), re.search(r"devices of ([\d.]+) GB", said)
    assert more is not None
    assert enough is not None
    assert decide(posed(failed, spares=int(more[1]) // 4)).plan.layout.replicas
    assert decide(posed(failed, memory_bytes=int((float(enough[1]) + 0.1) * 1e9))).plan.layout.replicas


def test_ranks_that_stand_still_are_told() -> None:
    case = posed(tuple(range(1, 16)))
    with pytest.raises(PlanError, match="all 1 remaining ranks have speed 0: 0; add others"):
        decide(msgspec.structs.replace(case, speeds={0: 0.0}, memory_bytes=None))
