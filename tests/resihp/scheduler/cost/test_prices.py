"""Prices: the same times as the timeline's, the same bytes as the list of transfers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.parallelism.layout import Layout
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.transfers import bytes_of, missing, moves
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import play
from resihp.scheduler import decide
from resihp.scheduler.cost.lacking_state import bytes_to_move
from resihp.scheduler.cost.prices import costs
from resihp.scheduler.situation import Situation
from tests.resihp.scheduler.cases import MODEL, base_of, cases, on_nodes, situation


def test_a_pipeline_takes_its_critical_path() -> None:
    """Two stages of three layers, the second with the head: all its work, and the first's one forward and backward."""
    case = situation(Layout.uniform(tp=1, pp=2, dp=1, layers=6), nodes=on_nodes(2, 1), tp=1, pp=2, micro_batches=4)
    slow = 3 + 64 * 256 / MODEL.parameters_per_layer
    assert decide(case).seconds == pytest.approx(3 + 4 * 3 * slow + 6)


@settings(max_examples=60)
@given(cases())
def test_predictions_are_the_timelines_of_the_whole_plan(case: Situation) -> None:
    decision = decide(case)
    orders = orders_of(decision.plan)
    assert play(decision.plan, orders, costs(decision.plan, case, orders)).makespan == pytest.approx(decision.seconds)


@settings(max_examples=150)
@given(cases(), st.booleans(), st.data())
def test_bytes_are_those_of_the_transfers(case: Situation, tied: bool, data: st.DataObject) -> None:
    case = msgspec.structs.replace(case, model=msgspec.structs.replace(case.model, tied_embeddings=tied))
    stale = data.draw(st.sets(st.sampled_from(case.available), max_size=1))
    case = msgspec.structs.replace(case, stale=tuple(stale))
    specs = outline(case.model)
    if missing(base_of(case), specs) is not None:
        return
    layout = decide(case).plan.layout
    names = {spec.name: spec for spec in specs}
    sent = moves(base_of(case), layout, specs, case.nodes)
    assert bytes_to_move(case, layout) == sum(bytes_of(move, names) for move in sent)
