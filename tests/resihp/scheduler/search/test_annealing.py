"""A search at the edges of what it is told: tables that are full, ranks that stand still."""

from __future__ import annotations

import math

import pytest

from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.search import pipelines
from resihp.scheduler.search.annealing import Search
from resihp.scheduler.situation import Situation
from tests.resihp.scheduler.cases import MODEL, on_nodes, situation

ROOM = 1 << 40


def narrow() -> Situation:
    """A grid of more groups than a table has places at first."""
    model = ModelSpec(layers=64, hidden=64, heads=4, kv_groups=4, ffn_hidden=64, vocab=64, sequence=8)
    base = Layout.uniform(tp=1, pp=64, dp=32, layers=64)
    return situation(base, nodes=on_nodes(2048, 8), tp=1, pp=64, model=model, micro_batches=8192, memory_bytes=ROOM)


def test_more_groups_than_rows_have_their_places() -> None:
    case = narrow()
    search = Search(case, [case.base.replicas])
    assert math.isfinite(search.seconds)
    assert search.best().replicas == case.base.replicas


@pytest.mark.parametrize("times", [Times(1.0, 2.0, 0.0), Times(1.0, 0.0, 0.0)])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_rank_that_stands_still_gets_no_work_whatever_the_profile_leaves_out(times: Times, schedule: str) -> None:
    base = Layout.uniform(tp=1, pp=2, dp=2, layers=MODEL.layers)
    case = Situation(
        epoch=1,
        base=base,
        available=base.ranks,
        nodes=on_nodes(4, 2),
        model=MODEL,
        micro_batches=4,
        tp=1,
        pp=2,
        schedule=schedule,
        memory_bytes=ROOM,
        profile=Profile(layers=(times,) * MODEL.layers, gradient_s=0.1),
        speeds={1: 0.0},
    )
    search = Search(case, [base.replicas])
    assert search.seconds == math.inf
    search.run(300)
    assert 0.0 < search.seconds < math.inf
    assert not any(1 in replica.ranks for replica in search.best().replicas)


def test_former_layouts_end_where_tables_are_begun_anew_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Layout.uniform(tp=2, pp=4, dp=2, layers=12)
    model = ModelSpec(layers=12, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=256, sequence=64)
    case = situation(
        base, nodes=on_nodes(16, 8), tp=2, pp=4, model=model, speeds={3: 0.5, 9: 0.7, 12: 0.8}, memory_bytes=ROOM
    )
    search = Search(case, [base.replicas])
    search.run(600)
    former = search.former()
    next(former)
    monkeypatch.setattr(pipelines.Pipelines, "full", True)
    search.priced(base.replicas)
    assert list(former) == []
