"""Slow-downs in plain iteration times: a small version of the operating curve, workload, ranks against peers."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import numpy as np
import pytest

from resihp.detector.offline.analysis import Analysis, SpeedChange, as_json
from resihp.detector.offline.iteration_model import IterationModel, Point
from resihp.detector.offline.series import (
    SKIPPED_ITERATIONS,
    SeriesDetector,
    TimedRun,
    _healthy_seconds,
    analyse,
    detect,
    detect_ranks,
)
from tests.resihp.detector.synthetic_runs import KINDS, Floats, noise, tallies

DATA = Path(__file__).parents[5] / "shared" / "data"


def points(seconds: Floats) -> tuple[Point, ...]:
    return tuple(Point(iteration, float(value)) for iteration, value in enumerate(seconds))


def slowed(seed: int, change: float, deviation: float = 0.03, count: int = 250) -> Floats:
    logs = noise(np.random.default_rng(seed), "gaussian", count, deviation, 0.2)
    logs[120:190] += math.log1p(change)
    return 2.0 * np.exp(logs)


@pytest.mark.parametrize(("deviation", "found", "false_alarms"), [(0.015, 0.999, 0.1), (0.03, 0.97, 0.2)])
def test_slow_downs_are_found_within_three_iterations(deviation: float, found: float, false_alarms: float) -> None:
    """Noise of six kinds; spikes, slow starts, drifts and rounding among the runs."""
    for kind, correlation in KINDS:
        for change, tally in tallies(kind, correlation, deviation, 4):
            where = f"{kind} {correlation}, {change:.0%}"
            assert tally.onsets >= math.floor(found * tally.slow_downs), where
            assert tally.recoveries >= math.floor(found * tally.slow_downs), where
            assert tally.per_thousand <= false_alarms, where


def test_large_slow_downs_are_found_in_loud_noise() -> None:
    for kind, correlation in KINDS:
        for change, tally in tallies(kind, correlation, 0.11, 4):
            if change >= 1:
                assert tally.onsets >= 0.85 * tally.slow_downs, f"{kind} {correlation}, {change:.0%}"


def test_an_event_says_since_when_until_when_and_how_much() -> None:
    events, known = detect(points(slowed(0, 0.31)))
    assert known == "plain times"
    slow, well = events
    assert (slow.verdict, slow.iteration, slow.end) == ("fail-slow", 120, 190)
    assert slow.change == pytest.approx(0.31, abs=0.04)
    assert 120 < slow.detected_at <= 123
    assert (well.verdict, well.iteration, well.end) == ("recovered", 190, None)
    assert well.change == pytest.approx(1 / 1.31 - 1, abs=0.04)
    assert 190 < well.detected_at <= 193


def test_a_slow_down_that_lasts_has_no_end() -> None:
    (event,), _ = detect(points(slowed(1, 0.6, count=180)))
    assert event.end is None


def test_a_step_inside_a_slow_down_is_the_same_one_with_a_new_size() -> None:
    seconds = slowed(2, 0.3, count=300)
    seconds[150:190] *= 2.5 / 1.3
    seconds[190:240] *= 2.5
    slow, well = detect(points(seconds))[0]
    assert (slow.verdict, slow.iteration, slow.end) == ("fail-slow", 120, 240)
    assert (well.verdict, well.iteration) == ("recovered", 240)
    assert [iteration for iteration, _ in slow.sizes] == [120, 150]
    assert [size for _, size in slow.sizes] == pytest.approx([0.3, 1.5], abs=0.1)
    assert slow.change == pytest.approx((30 * 0.3 + 90 * 1.5) / 120, abs=0.1)
    assert slow.cost_seconds == pytest.approx(2.0 * 120 * slow.change, rel=0.05)


def test_a_hiccup_of_a_few_iterations_is_no_fail_slow() -> None:
    seconds = slowed(3, 0.0)
    seconds[60:64] *= 1.8
    assert [event.verdict for event in detect(points(seconds))[0]] in ([], ["workload"])


def test_times_that_cannot_be_are_left_out() -> None:
    good = points(slowed(4, 0.5))
    bad = [Point(10_000 + i, value) for i, value in enumerate((math.nan, 0.0, -1.0, math.inf))]
    mixed = [point for number, point in enumerate(good) for point in (point, *bad[number % 4 : number % 4 + 1])]
    assert detect(mixed)[0] == detect(good)[0]


def test_what_the_workload_explains_is_workload() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.uniform(8e4, 1.2e5, 300)
    squares = tokens * rng.uniform(1e3, 6e3, 300)
    squares[150:220] *= 4
    seconds = 0.2 + 1e-5 * tokens + 4e-9 * squares
    seconds *= np.exp(noise(rng, "gaussian", 300, 0.015))
    made = [
        Point(i, float(s), float(n), float(q)) for i, (s, n, q) in enumerate(zip(seconds, tokens, squares, strict=True))
    ]
    events, known = detect(made)
    assert known == "workload"
    assert {event.verdict for event in events} <= {"workload", "recovered"}
    assert any(event.verdict == "workload" for event in events)
    plain = detect([Point(p.iteration, p.seconds) for p in made])[0]
    assert any(event.verdict == "fail-slow" for event in plain)


def test_with_the_workload_known_small_slow_downs_show_in_uneven_iterations() -> None:
    found = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        tokens = np.full(260, 1e5)
        squares = tokens * np.exp(rng.normal(7.5, 0.6, 260))
        seconds = (0.5 + 1e-5 * tokens + 3e-9 * squares) * np.exp(noise(rng, "gaussian", 260, 0.02))
        seconds[150:] *= 1.25
        events, _ = detect(
            [Point(i, float(s), 1e5, float(q)) for i, (s, q) in enumerate(zip(seconds, squares, strict=True))]
        )
        slow = [event for event in events if event.verdict == "fail-slow"]
        found += len(slow) == 1 and abs(slow[0].iteration - 150) <= 1 and slow[0].detected_at <= 153
    assert found >= 9


def test_a_growing_batch_is_no_fail_slow() -> None:
    """Batch-size ramp-up: time grows with the tokens of an iteration."""
    rng = np.random.default_rng(6)
    batch = np.repeat([128.0, 256.0, 384.0, 512.0], 60)
    seconds = (0.4 + 0.01 * batch) * np.exp(noise(rng, "gaussian", 240, 0.02))
    events, known = detect([Point(i, float(s), float(b)) for i, (s, b) in enumerate(zip(seconds, batch, strict=True))])
    assert known == "workload"
    assert not [event for event in events if event.verdict == "fail-slow"]


def test_the_workload_model_leaves_outliers_out() -> None:
    rng = np.random.default_rng(7)
    model = IterationModel()
    for i in range(100):
        tokens, squares = rng.uniform(5e4, 1e5), rng.uniform(1e7, 9e8)
        seconds = (0.3 + 2e-5 * tokens + 1e-9 * squares) * (5 if i % 20 == 7 else 1)
        model.learn(Point(i, seconds, tokens, squares))
    predicted = model.predict(Point(200, 1, 8e4, 5e8))
    assert predicted == pytest.approx(0.3 + 1.6 + 0.5, rel=0.03)


def test_a_slow_rank_is_told_by_its_peers_and_constant_differences_are_not() -> None:
    rng = np.random.default_rng(8)
    common = noise(rng, "gaussian", 250, 0.1)  # what hits everybody
    ranks = {}
    for rank in range(6):
        logs = common + noise(rng, "gaussian", 250, 0.02) + 0.1 * rank
        if rank == 4:
            logs[120:190] += math.log(1.3)
        ranks[rank] = points(np.exp(logs))
    events, known = detect_ranks(ranks)
    assert known == "peers"
    slow = [event for event in events if event.verdict == "fail-slow"]
    assert [(event.iteration, event.end, event.where.rank if event.where else None) for event in slow] == [
        (120, 190, 4)
    ]


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_of_two_ranks_the_one_that_became_slower_is_named(slow_rank: int) -> None:
    rng = np.random.default_rng(9)
    ranks = {}
    for rank in range(2):
        logs = noise(rng, "gaussian", 250, 0.02) + 0.3 * (1 - rank)
        logs[120:190] += math.log(1.5) * (rank == slow_rank)
        ranks[rank] = points(np.exp(logs))
    slow = [event for event in detect_ranks(ranks)[0] if event.verdict == "fail-slow"]
    assert [event.where.rank for event in slow if event.where] == [slow_rank]


def test_all_ranks_slow_at_once_is_one_event_without_a_place() -> None:
    rng = np.random.default_rng(10)
    ranks = {}
    for rank in range(4):
        logs = noise(rng, "gaussian", 250, 0.02)
        logs[120:] += 0.5
        ranks[rank] = points(np.exp(logs))
    (event,) = detect_ranks(ranks)[0]
    assert (event.verdict, event.where, event.iteration) == ("fail-slow", None, 120)


def test_each_run_starts_afresh() -> None:
    fast, slow = points(slowed(11, 0.0, count=150)), points(2 * slowed(12, 0.0, count=150))
    made = analyse("megatron-log", (TimedRun(points=fast), TimedRun(points=slow)))
    assert (made.runs, made.iterations, made.events) == (2, 300, ())


def test_a_run_too_short_to_judge_is_said_to_be() -> None:
    made = analyse("series", (TimedRun(points=points(np.full(5, 1.5))),))
    assert made.events == ()
    assert made.healthy_seconds == 1.5
    assert any("too short" in remark for remark in made.remarks)


def test_onset_in_means_over_an_interval_is_the_first_iteration_of_the_first_slow_one() -> None:
    made = tuple(Point(10 * (i + 1), float(s)) for i, s in enumerate(slowed(13, 0.8)))
    slow = analyse("megatron-log", (TimedRun(points=made, interval=10),)).events[0]
    assert slow.iteration == 1201
    assert slow.end == 1901


def test_the_json_has_exactly_the_keys_of_the_interface() -> None:
    made = as_json(analyse("series", (TimedRun(points=points(slowed(14, 0.5))),)))
    assert list(made) == [
        *("schema", "kind", "runs", "iterations", "healthy_seconds", "events", "ranks"),
        *("slowdown", "ideal_seconds", "mw", "ms"),
    ]
    assert list(made["events"][0]) == [
        *("run", "iteration", "detected_at", "end", "change", "verdict", "where", "cost_seconds", "ranks", "sizes")
    ]
    assert (made["schema"], made["kind"], made["runs"], made["iterations"]) == (1, "series", 1, 250)
    assert made["healthy_seconds"] == pytest.approx(2.0, rel=0.02)


def test_whoever_watches_the_times_is_told_the_same_as_by_the_file() -> None:
    made = points(slowed(15, 0.5))
    detector = SeriesDetector()
    told = [event for event in map(detector.update, made) if event is not None]
    of_file = detect(made)[0]
    assert [(e.iteration, e.detected_at) for e in told] == [(e.iteration, e.detected_at) for e in of_file]
    assert [e.end for e in detector.events] == [e.end for e in of_file]


def alibaba(job: int) -> Analysis:
    path = DATA / f"alibaba_job_{job}.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    ranks: dict[int, list[Point]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            made = ranks.setdefault(int(row["worker"]), [])
            if not made or made[-1].iteration < int(row["time"]):
                made.append(Point(int(row["time"]), float(row["batch_time_norm"]) / 1000))
    return analyse("series", (TimedRun(ranks={rank: tuple(made) for rank, made in ranks.items()}),))


def test_the_straggler_of_a_production_job_is_named() -> None:
    slow = [event for event in alibaba(1).events if event.verdict == "fail-slow"]
    assert {event.where.rank for event in slow if event.where} == {6}
    assert all(event.where for event in slow)
    assert slow[0].iteration == 1811
    assert slow[-1].end == 1951


def test_constant_heterogeneity_of_a_production_job_is_no_change() -> None:
    assert alibaba(2).events == ()


def family(name: str, rng: np.random.Generator, count: int) -> Floats:
    """Noise of 9 % that is no bell."""
    if name == "levels":
        return np.asarray(0.09 * (rng.choice([-1.2, 0.0, 1.2], count) + 0.2 * rng.standard_normal(count)))
    if name == "bimodal":
        return np.asarray(0.09 * (2.1 * ((rng.random(count) < 0.3) - 0.3) + 0.25 * rng.standard_normal(count)))
    if name == "heavy tails":
        return np.asarray(0.09 * rng.standard_t(3, count) / math.sqrt(3))
    values = noise(rng, "gaussian", count, 0.09, 0.5 if name == "correlated" else 0.0)
    if name == "checkpoints":
        values[30::35] += math.log(3)
    return values


FAMILIES = ("levels", "correlated", "heavy tails", "bimodal", "checkpoints")


@pytest.mark.parametrize("name", FAMILIES)
def test_in_nasty_noise_slow_downs_are_found_and_nothing_else(name: str) -> None:
    """Both slow-downs of each run, within a few iterations, and at most one false event in all."""
    quick = false = 0
    for seed in range(6):
        logs = family(name, np.random.default_rng([seed, len(name)]), 460)
        logs[120:180] += math.log(1.3)
        logs[300:380] += math.log(1.3)
        slow = [event for event in detect(points(np.exp(logs)))[0] if event.verdict == "fail-slow"]
        for first in (120, 300):
            mine = [event for event in slow if abs(event.iteration - first) <= 10]
            assert mine, f"seed {seed}: slow from {first}"
            quick += mine[0].detected_at <= first + 4
            false -= 1
        false += len(slow)
    assert quick >= 10
    assert false <= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_healthy_times_in_nasty_noise_have_no_events(name: str) -> None:
    logs = family(name, np.random.default_rng(len(name)), 1500)
    logs[:5] += np.linspace(math.log(1.3), 0.05, 5)
    assert [event for event in detect(points(np.exp(logs)))[0] if event.verdict == "fail-slow"] == []


def test_a_mild_slow_down_that_lasts_is_found() -> None:
    logs = family("bimodal", np.random.default_rng(3), 700)
    logs[300:600] += math.log(1.13)
    (slow,) = (event for event in detect(points(np.exp(logs)))[0] if event.verdict == "fail-slow")
    assert abs(slow.iteration - 300) <= 15
    assert slow.change == pytest.approx(0.13, abs=0.04)


def test_settling_after_restarts_is_no_event() -> None:
    logs = noise(np.random.default_rng(4), "gaussian", 900, 0.02)
    for first in (0, 300, 600):
        logs[first : first + 6] += np.linspace(math.log(1.3), 0.03, 6)
    assert detect(points(np.exp(logs)))[0] == []


@pytest.mark.parametrize(("name", "size"), [("normal", 8), ("heavy tails", 16), ("bimodal", 8), ("bimodal", 24)])
def test_workers_that_slow_down_come_first_and_those_that_shift_together_are_one(name: str, size: int) -> None:
    rng = np.random.default_rng([size, len(name)])
    logs = {rank: family(name, rng, 420) + rng.normal(0, 0.1) for rank in range(size)}
    logs[3][120:] += math.log(1.5)
    logs[5][180:] += math.log(1.8)
    lot = (0, 1) if size == 8 else (0, 1, 2, 4)
    for rank in lot:
        logs[rank][280:360] += math.log(1.35)
    made = analyse("series", (TimedRun(ranks={rank: points(np.exp(values)) for rank, values in logs.items()}),))
    slow = [event for event in as_json(made)["events"] if event["verdict"] == "fail-slow"]
    assert {event["where"]["rank"] for event in slow[:2]} == {3, 5}
    assert slow[0]["cost_seconds"] > slow[1]["cost_seconds"] > slow[2]["cost_seconds"]
    assert slow[2]["ranks"] == list(lot)
    assert slow[2]["where"] is None
    assert len(slow) == 3


def test_a_worker_that_is_alone_is_said_to_be() -> None:
    made = analyse("series", (TimedRun(ranks={7: points(slowed(16, 0.5))}),))
    assert any("rank 7 is the only rank" in remark for remark in made.remarks)
    apart = {rank: tuple(Point(2 * i + rank, 1.0) for i in range(100)) for rank in range(2)}
    remarks = analyse("series", (TimedRun(ranks=apart),)).remarks
    assert sum("hardly any iteration in common" in remark for remark in remarks) == 2


def test_healthy_times_are_found_in_one_pass_however_many_slow_downs_there_were() -> None:
    """The same as by a look at every event for every iteration, which took a minute of a million iterations."""
    times = np.random.default_rng(2).uniform(1.0, 2.0, 40_000)
    times[7::500] = math.nan
    many = points(times)
    events = [
        SpeedChange(
            run=0, iteration=i, detected_at=i + 1, end=i + 3 if i < 39_990 else None, change=1.0, verdict=verdict
        )
        for verdict, first in (("fail-slow", 100), ("recovered", 104), ("workload", 108))
        for i in range(first, 40_000, 10)
    ]
    began = time.process_time()
    found = _healthy_seconds(many, events)
    assert time.process_time() - began < 2.0
    wrong = {i for event in events if event.verdict != "recovered" for i in range(event.iteration, event.end or 40_000)}
    expected = [p.seconds for p in many[SKIPPED_ITERATIONS:] if p.seconds > 0 and p.iteration not in wrong]
    assert list(found) == expected


def test_where_nothing_is_healthy_all_times_are_taken() -> None:
    many = points(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    slow = [SpeedChange(run=0, iteration=0, detected_at=1, change=1.0, verdict="fail-slow")]
    assert list(_healthy_seconds(many, slow)) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert list(_healthy_seconds(many[:3], [])) == [1.0, 2.0, 3.0], "of a short run the first ones as well"
    assert list(_healthy_seconds((), [])) == []
