"""Verdicts on per-operation traces: who, since when, until when; and silence where only the workload varies."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest

from resihp.detector.offline.analysis import Analysis, SpeedChange, Where
from resihp.detector.offline.operations import analyse, raw_alarms
from resihp.detector.offline.traces import COLUMNS, FORWARD, read
from resihp.detector.offline.what_if import Graph
from resihp.errors import UsageError
from tests.resihp.detector.made_traces import COLLECTIVE_S, DATA, made_trace, slowed


def verdicts(analysis: Analysis, verdict: str = "fail-slow") -> list[SpeedChange]:
    return [event for event in analysis.events if event.verdict == verdict]


def label(step: int) -> int:
    """Of a step of `made_trace`."""
    return 100 + 3 * step


@pytest.fixture(scope="module")
def recorded() -> pd.DataFrame:
    path = DATA / "bytedance_trace_SE.parquet"
    if not path.exists():
        pytest.skip(f"{path} is absent: recorded traces are not part of the repository")
    return pd.read_parquet(path)


def test_recorded_imbalance_of_lengths_is_no_fault(recorded: pd.DataFrame) -> None:
    begun = time.process_time()
    analysis = analyse(recorded)
    assert time.process_time() - begun < 10
    assert not verdicts(analysis)
    assert analysis.kind == "operations"
    assert (analysis.runs, analysis.iterations) == (1, 43)
    assert analysis.healthy_seconds == pytest.approx(9.05, abs=0.01)
    scores = [score.slowdown for score in analysis.ranks]
    assert len(scores) == 64
    assert scores == sorted(scores, reverse=True)
    raw = raw_alarms(read(recorded))
    assert len(raw.steps) >= 3
    assert raw.rank_steps >= 500
    assert raw.ranks == 64
    assert {event.iteration for event in verdicts(analysis, "workload")} <= set(raw.steps)


def with_slow_rank(frame: pd.DataFrame, rank: int, factor: float, onset: int, end: int | None) -> pd.DataFrame:
    """Computation of one rank multiplied from one step label until another; the peers wait for it."""
    trace = read(frame)
    graph = Graph.from_trace(trace)
    steps = np.array(trace.steps)[trace.step]
    slow = trace.is_compute & (trace.rank == rank) & (steps >= onset) & (steps < (end or np.inf))
    seconds = np.where(slow, factor * graph.seconds, graph.seconds)
    ends = graph.ends(seconds)
    made = frame.sort_values(["step", "dp_rank", "stage", "rank", "start_ts", "seq_id"], kind="stable")
    return made.assign(start_ts=ends - seconds, duration=seconds)


@pytest.mark.parametrize(
    ("rank", "factor", "onset", "end"),
    [
        (34, 1.2, 35, None),
        (10, 1.2, 406, 816),
        (126, 1.5, 24, 403),
        (0, 2.0, 417, 434),
        (64, 3.5, 17, 830),
        (50, 1.3, 16, 39),
    ],
)
def test_slow_rank_in_a_recorded_trace(
    recorded: pd.DataFrame, rank: int, factor: float, onset: int, end: int | None
) -> None:
    analysis = analyse(with_slow_rank(recorded, rank, factor, onset, end))
    steps = np.sort(recorded["step"].unique()).tolist()
    (found,) = verdicts(analysis)
    assert found.where == Where(dp=rank % 64 // 2, stage=rank // 64, rank=rank)
    assert abs(steps.index(found.iteration) - steps.index(onset)) <= 1
    assert steps.index(found.detected_at) - steps.index(onset) <= 4
    assert found.change == pytest.approx(factor - 1, rel=0.15)
    assert found.end == end
    assert [event.iteration for event in verdicts(analysis, "recovered")] == ([] if end is None else [end])


@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.parametrize(("stages", "chunks", "tp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (4, 2, 1), (3, 1, 2)])
@pytest.mark.parametrize("factor", [1.2, 3.5])
def test_slow_rank_in_any_layout(stages: int, chunks: int, tp: int, spread: float, factor: float) -> None:
    slow = slowed(1, stages - 1, factor, 10, 22, shard=0)
    analysis = analyse(made_trace(stages=stages, chunks=chunks, tp=tp, spread=spread, slow=slow, micro_batches=8))
    (found,) = verdicts(analysis)
    assert found.where == Where(dp=1, stage=stages - 1, rank=(1 * stages + stages - 1) * tp)
    assert (found.iteration, found.end) == (label(10), label(22))
    assert found.change == pytest.approx(factor - 1, rel=0.1)
    assert [event.iteration for event in verdicts(analysis, "recovered")] == [label(22)]


@pytest.mark.parametrize(("dps", "stages"), [(4, 1), (8, 2), (2, 2)])
def test_healthy_traces_stay_silent(dps: int, stages: int) -> None:
    for seed in range(5):
        for spread in (0.0, 0.4):
            frame = made_trace(dps=dps, stages=stages, spread=spread, head=1.7, steps=40, micro_batches=8, seed=seed)
            assert not verdicts(analyse(frame))


def test_slow_in_all_steps() -> None:
    analysis = analyse(made_trace(spread=0.3, slow=slowed(2, 1, 1.5)))
    (found,) = verdicts(analysis)
    assert (found.iteration, found.end) == (label(0), None)
    assert found.where == Where(dp=2, stage=1, rank=5)
    healthy = analyse(made_trace(spread=0.3)).healthy_seconds
    assert analysis.healthy_seconds == pytest.approx(healthy, rel=0.05)


@pytest.mark.parametrize("steps", [1, 3])
def test_few_steps(steps: int) -> None:
    assert not verdicts(analyse(made_trace(steps=steps, spread=0.3)))
    (found,) = verdicts(analyse(made_trace(steps=steps, spread=0.3, slow=slowed(2, 1, 1.5))))
    assert found.where == Where(dp=2, stage=1, rank=5)


def test_a_replica_slow_as_a_whole() -> None:
    (found,) = verdicts(analyse(made_trace(stages=3, slow=slowed(3, None, 1.5, 12, 24), micro_batches=8)))
    assert found.where == Where(dp=3)
    assert (found.iteration, found.end) == (label(12), label(24))


def test_without_pipeline_and_with_uneven_work() -> None:
    frame = made_trace(dps=8, stages=1, spread=0.3, micro_batches=12, slow=slowed(3, 0, 2.0, 15, 32), steps=45)
    (found,) = verdicts(analyse(frame))
    assert found.where == Where(dp=3, stage=0, rank=3)
    assert abs(found.iteration - label(15)) <= 3 * 3
    assert found.end is not None
    assert abs(found.end - label(32)) <= 3 * 3


@pytest.mark.parametrize("stages", [1, 3])
def test_a_single_replica_has_its_own_past(stages: int) -> None:
    frame = made_trace(dps=1, stages=stages, slow=slowed(0, 0, 1.5, 20, 32), steps=45)
    (found,) = verdicts(analyse(frame))
    assert found.where == Where(dp=0, stage=0, rank=0)
    assert (found.iteration, found.end) == (label(20), label(32))


def test_a_tensor_parallel_group_that_waits_for_one_of_its_ranks() -> None:
    """Where collectives are part of the computation measured, the ranks of a group look alike."""
    (found,) = verdicts(analyse(made_trace(tp=4, slow=slowed(2, 0, 1.6, 10), micro_batches=8)))
    assert found.where == Where(dp=2, stage=0)


def test_two_slow_ranks() -> None:
    one, other = slowed(0, 0, 1.4, 8), slowed(3, 1, 2.0, 18, 25)
    events = verdicts(analyse(made_trace(slow=lambda *at: one(*at) * other(*at), micro_batches=8, spread=0.3)))
    assert [(event.where, event.iteration, event.end) for event in events] == [
        (Where(dp=0, stage=0, rank=0), label(8), None),
        (Where(dp=3, stage=1, rank=7), label(18), label(25)),
    ]


def test_a_long_step_is_workload_if_its_computation_says_so() -> None:
    frame = made_trace(slow=lambda step, dp, stage, shard: 1.5 if step == 20 and dp == 2 else 1.0)
    analysis = analyse(frame)
    assert not verdicts(analysis)
    (found,) = verdicts(analysis, "workload")
    assert (found.iteration, found.end, found.where) == (label(20), label(21), Where(dp=2))
    assert found.change > 0.2


def test_slow_communication_has_no_rank() -> None:
    frame = made_trace(steps=50, collective_s=lambda step: COLLECTIVE_S + (0.5 if 25 <= step < 40 else 0.0))
    (found,) = verdicts(analyse(frame))
    assert found.where is None
    assert (found.iteration, found.end) == (label(25), label(40))


def test_order_of_rows_and_repetitions_do_not_matter() -> None:
    frame = made_trace(slow=slowed(1, 1, 1.5, 10, 22), spread=0.3)
    shuffled = pd.concat([frame, frame.sample(frac=0.1, random_state=2)]).sample(frac=1.0, random_state=3)
    expected, found = analyse(frame), analyse(shuffled)
    assert found.events == expected.events
    assert found.ideal_seconds == pytest.approx(expected.ideal_seconds)
    assert "repeated" in found.remarks[0]


def test_columns_that_are_not_needed_and_other_types() -> None:
    frame = made_trace(slow=slowed(1, 1, 1.5, 10, 22))
    expected = analyse(frame)
    for other in (
        frame[list(COLUMNS)],
        frame.astype({"start_ts": "float32", "duration": "float32", "optype": "category", "dp_rank": "int8"}),
        frame.assign(start_ts=frame["start_ts"] + 1.7e9 + 100 * frame["step"]),
        frame.assign(step=frame["step"].astype("Int64"), another="x"),
    ):
        assert [event.where for event in analyse(other).events] == [event.where for event in expected.events]
        assert analyse(other).slowdown == pytest.approx(expected.slowdown, rel=1e-3)


def test_unsound_durations_are_told_and_do_not_count() -> None:
    frame = made_trace(slow=slowed(1, 1, 1.5, 10, 22), micro_batches=8)
    rng = np.random.default_rng(0)
    rows = rng.choice(len(frame), 120, replace=False)
    frame.loc[rows[:40], "duration"] = np.nan
    frame.loc[rows[40:80], "duration"] = -1.0
    frame.loc[rows[80:], "start_ts"] = np.inf
    analysis = analyse(frame)
    (found,) = verdicts(analysis)
    assert found.where == Where(dp=1, stage=1, rank=3)
    assert (found.iteration, found.end) == (label(10), label(22))
    assert any(
        "without a valid duration; what-if figures use the median of similar operations" in remark
        for remark in analysis.remarks
    )
    zero = frame.assign(duration=np.where(frame.index % 50 == 0, 0.0, frame["duration"]))
    assert verdicts(analyse(zero))[0].where == found.where


def test_ranks_missing_from_steps() -> None:
    frame = made_trace(slow=slowed(1, 1, 1.5, 10, 22))
    rng = np.random.default_rng(1)
    lost = {(int(rng.integers(8)), label(int(rng.integers(30)))) for _ in range(30)}
    kept = [pair not in lost for pair in zip(frame["rank"], frame["step"], strict=True)]
    analysis = analyse(frame[kept])
    (found,) = verdicts(analysis)
    assert found.where == Where(dp=1, stage=1, rank=3)
    assert abs(found.iteration - label(10)) <= 2 * 3
    assert any("lack ranks" in remark for remark in analysis.remarks)


def test_computation_alone_is_enough() -> None:
    frame = made_trace(slow=slowed(1, 1, 1.5, 10, 22))
    (found,) = verdicts(analyse(frame[frame["optype"].str.endswith("compute")]))
    assert (found.where, found.iteration, found.end) == (Where(dp=1, stage=1, rank=3), label(10), label(22))
    (found,) = verdicts(analyse(frame[frame["optype"] == FORWARD]))
    assert found.where == Where(dp=1, stage=1, rank=3)


def test_what_is_no_trace() -> None:
    frame = made_trace(steps=2)
    with pytest.raises(
        UsageError, match=r"trace: no column 'stage', 'mb_id'; it has dp_rank, rank,.* and needs dp_rank"
    ):
        analyse(frame.drop(columns=["stage", "mb_id"]))
    with pytest.raises(UsageError, match=r"no column 'dp_rank'.*it has none"):
        analyse(pd.DataFrame())
    with pytest.raises(UsageError, match="no row of computation"):
        analyse(frame[frame["optype"] == "optimizer"])
    with pytest.raises(UsageError, match="no row of computation"):
        analyse(frame.head(0))
    with pytest.raises(UsageError, match="no computation has a duration above zero"):
        analyse(frame.assign(duration=np.nan))
    with pytest.raises(UsageError, match="column 'duration' does not hold numbers"):
        analyse(frame.assign(duration="soon"))
    with pytest.raises(UsageError, match=r"'start_ts' is float32 and resolves only steps of 128 s"):
        analyse(frame.assign(start_ts=(frame["start_ts"] + 1.7e9).astype("float32")))
