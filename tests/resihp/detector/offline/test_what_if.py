"""What-if figures against the published ones, against the project's timeline, and on traces whose answer is known."""

from __future__ import annotations

import json
import time

import numpy as np
import pandas as pd
import pytest

from resihp.detector.offline.traces import OPTYPE_CODES, read
from resihp.detector.offline.what_if import Graph, WhatIf, what_if
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import play
from tests.resihp.detector.made_traces import (
    BACKWARD_S,
    COLLECTIVE_S,
    DATA,
    FORWARD_S,
    TRANSFER_S,
    made_plan,
    made_trace,
    slowed,
)


def cost_of(frame: pd.DataFrame) -> WhatIf:
    cost = what_if(read(frame))
    assert cost is not None
    return cost


def test_published_figures() -> None:
    path = DATA / "bytedance_trace_SE.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent: recorded traces are not part of the repository")
    mw, ms = (json.loads((DATA / f"bytedance_{name}_SE.json").read_text()) for name in ("mw", "ms"))
    frame = pd.read_parquet(path)
    begun = time.process_time()
    cost = cost_of(frame)
    assert time.process_time() - begun < 10
    assert cost.original_s == pytest.approx(mw["tori"], rel=1e-5)
    assert cost.ideal_s == pytest.approx(mw["tideal"], rel=1e-5)
    assert cost.without_worst_s == pytest.approx(mw["trem"], rel=1e-5)
    assert cost.without_last_stage_s == pytest.approx(ms["trem"], rel=1e-5)
    assert cost.mw == pytest.approx(mw["Mw"], abs=1e-5)
    assert cost.ms == pytest.approx(ms["Ms"], abs=1e-5)


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(1, 1, 3), (2, 1, 4), (4, 1, 8), (2, 2, 4), (4, 3, 8)])
def test_computation_alone_takes_what_the_timeline_says(stages: int, chunks: int, micro_batches: int) -> None:
    frame = made_trace(
        dps=2, stages=stages, chunks=chunks, micro_batches=micro_batches, steps=2, noise=0.2, spread=0.3, transfer_s=0.0
    )
    frame = frame[frame["optype"].str.endswith("compute")]
    graph = Graph.from_trace(read(frame))
    plan = made_plan(2, stages, chunks, micro_batches)
    for i, (_, of_step) in enumerate(frame.groupby("step")):
        keys = ["dp_rank", "stage", "optype", "mb_id", "mc"]
        seconds = of_step.set_index(keys)["duration"].to_dict()
        names = {"F": "forward-compute", "B": "backward-compute"}

        def cost(stop, p, seconds=seconds, names=names):  # type: ignore[no-untyped-def]
            mb = p.micro_batch - stop.replica * micro_batches
            return seconds[stop.replica, stop.stage, names[p.kind], mb, stop.chunk]

        expected = play(plan, orders_of(plan), cost).makespan
        assert graph.step_seconds(graph.seconds)[i] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("stages", "chunks", "idle"),
    [(2, 1, False), (4, 1, False), (4, 1, True), (2, 2, False), (2, 2, True), (4, 2, True)],
)
def test_waiting_is_no_part_of_a_transfer(stages: int, chunks: int, idle: bool) -> None:
    frame = made_trace(dps=2, stages=stages, chunks=chunks, micro_batches=8, steps=2, idle_rows=idle, spread=0.3)
    trace = read(frame)
    graph = Graph.from_trace(trace)
    assert not graph.circular.any()
    for name in ("forward-send", "forward-recv", "backward-send", "backward-recv"):
        own = graph.seconds[trace.kind == OPTYPE_CODES[name]]
        assert own.size
        assert np.median(own) == pytest.approx(TRANSFER_S, rel=1e-6)
        assert own.max() < 1.01 * TRANSFER_S
    scatters = graph.seconds[trace.kind == OPTYPE_CODES["grads-reduce-scatter"]]
    assert scatters == pytest.approx(COLLECTIVE_S)


def test_nothing_slow_costs_nothing() -> None:
    cost = cost_of(made_trace(noise=0.0, steps=3))
    assert cost.slowdown == pytest.approx(1.0)
    assert cost.mw is None
    assert cost.ms is None
    assert cost.scores == pytest.approx(np.ones((4, 2)))


def test_the_slow_rank_explains_the_slow_down() -> None:
    cost = cost_of(made_trace(dps=16, stages=4, steps=4, slow=slowed(2, 1, 2.0)))
    assert cost.scores.argmax() == 2 * 4 + 1
    assert cost.scores[2, 1] > 1.2
    assert np.sort(cost.scores.ravel())[-2] < 1.1
    assert cost.mw == pytest.approx(1.0, abs=0.05)
    assert cost.ms == pytest.approx(0.0, abs=0.05)


def test_a_long_last_stage_is_told_from_a_slow_rank() -> None:
    cost = cost_of(made_trace(dps=4, stages=4, steps=4, head=2.0))
    assert cost.ms is not None
    assert cost.mw is not None
    assert cost.ms > 0.9
    assert cost.mw < 0.3
    assert cost.by_stage.argmax() == 3


def test_a_late_replica_keeps_the_others_waiting() -> None:
    cost = cost_of(made_trace(dps=2, stages=1, micro_batches=2, steps=1, noise=0.0, slow=slowed(1, 0, 3.0)))
    healthy = 2 * (FORWARD_S + BACKWARD_S)
    assert cost.original_s == pytest.approx(3 * healthy + COLLECTIVE_S + 0.01)
    assert cost.ideal_s == pytest.approx(2 * healthy + COLLECTIVE_S + 0.01)


def test_figures_do_not_depend_on_transfers_recorded_on_one_end_only() -> None:
    frame = made_trace(dps=2, stages=4, micro_batches=6, steps=3, slow=slowed(0, 1, 2.0))
    whole = cost_of(frame)
    for lost in (["forward-recv"], ["forward-send", "backward-send"], ["forward-send", "forward-recv"]):
        part = cost_of(frame[~frame["optype"].isin(lost)])
        assert part.original_s == pytest.approx(whole.original_s, rel=0.05)
        assert part.scores.argmax() == whole.scores.argmax()


def test_some_rows_missing() -> None:
    frame = made_trace(dps=2, stages=4, micro_batches=6, steps=6, slow=slowed(0, 1, 2.0))
    whole = cost_of(frame)
    part = cost_of(frame.drop(index=frame.sample(frac=0.02, random_state=1).index))
    assert part.original_s == pytest.approx(whole.original_s, rel=0.1)
    assert part.scores.argmax() == whole.scores.argmax()


def test_tensor_parallel_ranks_count_as_their_slowest() -> None:
    cost = cost_of(made_trace(dps=2, stages=2, tp=4, steps=3, noise=0.0, slow=slowed(1, 0, 2.0, shard=3)))
    assert cost.scores.shape == (2, 2)
    assert cost.scores.argmax() == 2


def test_steps_without_some_rank_are_left_out() -> None:
    frame = made_trace(steps=6)
    cost = cost_of(frame[~((frame["rank"] == 3) & (frame["step"] == frame["step"].min()))])
    assert cost.steps.tolist() == [1, 2, 3, 4, 5]


def backwards_first(frame: pd.DataFrame, steps: int) -> pd.DataFrame:
    """The first stage hands back gradients before anything went forward: no order that could end."""
    labels = np.sort(frame["step"].unique())[:steps]
    wrong = (frame["stage"] == 0) & (frame["optype"] == "backward-compute") & frame["step"].isin(labels)
    return frame.assign(start_ts=np.where(wrong, -100.0, frame["start_ts"]))


def test_steps_that_contradict_themselves_are_left_out() -> None:
    frame = made_trace(steps=6)
    assert cost_of(backwards_first(frame, 2)).steps.tolist() == [2, 3, 4, 5]
    assert what_if(read(backwards_first(frame, 6))) is None
