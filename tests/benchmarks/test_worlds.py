"""Worlds: what is true of them is what happens in them, and what is told of them is judged by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks import disturbances as d
from benchmarks import worlds
from benchmarks.closed_loop import Played, Told
from benchmarks.disturbances import Expected, Scene
from benchmarks.many_ranks import independent, watch
from benchmarks.simulated_jobs import QUANTILES, Job, Setting, Timeline, simulate
from benchmarks.truth import Judged, judge, true_finding
from benchmarks.worlds import FAILING, HEALTHY, World
from resihp.detector.findings import Finding
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.record.journal import FailureFound, Suspected

pytestmark = pytest.mark.skipif(not QUANTILES.exists(), reason=f"no document lengths at {QUANTILES}")

QUIET = Setting(dp=4, chunk_noise=0.0, iteration_noise=0.0)
ONSET = 20


def scene(act: Callable[[Scene], None] = lambda _: None) -> tuple[Scene, Job, Job]:
    """A job of 40 iterations that something befalls, and the same one without it."""
    scenes: list[Scene] = []

    def disturb(line: Timeline) -> None:
        scenes.append(Scene(line, np.random.default_rng(7), ONSET, devices=4))
        act(scenes[0])

    def alone(line: Timeline) -> None:
        Scene(line, np.random.default_rng(7), ONSET, devices=4)

    job = simulate(QUIET, 1, 40, disturb=disturb)
    return scenes[0], job, simulate(QUIET, 1, 40, disturb=alone)


def of_rank(job: Job, array: Any, rank: int) -> Any:
    place = job.plan.layout.place(rank)
    assert place is not None
    return array[:, job.compiled.slots(place.replica, place.stage), place.t]


def world(name: str) -> World:
    return next(one for one in (*HEALTHY, *FAILING) if one.name == name)


# --- what befalls a job ---------------------------------------------------------------------------------------------


def test_slow_devices_take_longer_from_the_onset_on_and_so_do_their_probes() -> None:
    told, job, well = scene(lambda s: d.devices(s, [3, 8], 0.25))
    for rank in range(16):
        ratio = of_rank(job, job.compute, rank) / of_rank(well, well.compute, rank)
        by = 1.25 if rank in (3, 8) else 1.0
        assert np.allclose(ratio[:ONSET], 1.0)
        assert np.allclose(ratio[ONSET:], by)
        assert np.allclose(told.probes[ONSET:, rank], by)
    assert (job.seconds[ONSET:] > well.seconds[ONSET:]).all()
    assert [(one.component, set(one.ranks)) for one in told.expected] == [("device", {3}), ("device", {8})]


def test_a_whole_node_is_all_its_ranks() -> None:
    told, _, _ = scene(lambda s: d.nodes(s, 1, 0.25))
    ranks = sorted(rank for one in told.expected for rank in one.ranks)
    assert ranks == list(range(ranks[0], ranks[0] + 4))
    assert ranks[0] % 4 == 0


def test_half_the_ranks_are_one_of_each_tensor_parallel_pair() -> None:
    told, _, _ = scene(lambda s: d.one_of_each_pair(s, 0.25))
    assert [set(one.ranks) for one in told.expected] == [{rank} for rank in range(0, 16, 2)]


def test_a_slow_host_is_not_seen_by_probes() -> None:
    told, job, well = scene(lambda s: d.devices(s, [5], 0.05, probes=False))
    assert (of_rank(job, job.compute, 5)[ONSET:] > of_rank(well, well.compute, 5)[ONSET:]).all()
    assert (told.probes == 1.0).all()


def test_a_device_that_flickers_is_slow_in_its_share_of_the_iterations() -> None:
    told, job, well = scene(lambda s: d.flicker(s, 2, 10, 3.0))
    (expected,) = told.expected
    (rank,) = expected.ranks
    ratio = (of_rank(job, job.compute, rank) / of_rank(well, well.compute, rank)).mean(axis=1)
    assert np.flatnonzero(ratio > 2.9).tolist() == [20, 21, 30, 31]
    assert np.isclose(ratio, 1.0).sum() == 36


def test_slow_collectives_are_in_the_spans_of_their_group_and_in_nobodys_own_work() -> None:
    told, job, well = scene(lambda s: d.collectives(s, 2.0))
    (expected,) = told.expected
    beyond, before = (one.spans - one.compute.max(axis=-1, keepdims=True) for one in (job, well))
    for rank in range(16):
        ratio = of_rank(job, beyond, rank)[ONSET:].min(axis=1) / of_rank(well, before, rank)[ONSET:].min(axis=1)
        assert np.allclose(ratio, 2.0 if rank in expected.ranks else 1.0, rtol=0.05)
    assert np.allclose(job.compute, well.compute)


def test_slow_sums_and_late_data_are_where_they_are_said_to_be() -> None:
    told, job, well = scene(lambda s: d.sums(s, 3.0))
    stage = job.plan.layout.place(min(told.expected[0].ranks)).stage  # type: ignore[union-attr]
    longer = job.reduced - well.reduced
    assert (longer[ONSET:, stage] > 0).all()
    assert np.allclose(longer[:, 1 - stage], 0.0)
    told, job, well = scene(lambda s: d.late_data(s, 1.0))
    for rank in range(16):
        first = of_rank(job, job.starts, rank)[ONSET:, 0]
        if rank in told.expected[0].ranks:
            assert (first > 0.01).all()
        elif job.plan.layout.place(rank).stage == 0:  # type: ignore[union-attr]
            assert (first == 0).all()


def test_a_slow_link_is_slow_one_way_in_training_and_in_its_probe() -> None:
    told, job, well = scene(lambda s: d.link(s, 0.25, 0.4))
    ((ends, slow),) = told.links.items()
    assert told.expected[0].ranks == frozenset(ends)
    assert slow[ONSET - 1 :].tolist()[:2] == [1.0, 2.5]
    assert (job.seconds[ONSET:] >= well.seconds[ONSET:]).all()
    assert job.seconds[ONSET:].sum() > well.seconds[ONSET:].sum()


def test_clocks_change_what_is_reported_and_not_what_happens() -> None:
    for act in (lambda s: d.timers(s, 1e-3), lambda s: d.skew(s, 5e-4)):
        _, job, well = scene(act)
        assert np.array_equal(job.seconds, well.seconds)
        assert not np.allclose(job.starts, well.starts, atol=1e-5)
        assert np.allclose(job.starts, well.starts, atol=4e-3)
        assert (job.starts >= 0).all()


def test_other_documents_come_from_the_onset_on() -> None:
    def job(name: str) -> Job:
        other = world(name).workload
        assert other is not None
        return simulate(QUIET, 1, 40, workload_of=lambda rng, n, s: other(rng, n, s, ONSET, 8192))

    well = simulate(QUIET, 1, 40)
    doubled, mixed, short = job("micro-batch tokens doubled"), job("data mix, S/3 at equal N"), job("shorter documents")
    for one in (doubled, mixed, short):
        assert np.array_equal(one.tokens[:ONSET], well.tokens[:ONSET])
    assert 1.8 < doubled.tokens[ONSET:].mean() / well.tokens[ONSET:].mean() < 2.2
    assert np.allclose(mixed.squares[ONSET:] * 3.0, well.squares[ONSET:])
    assert short.squares[ONSET:].mean() < 0.5 * well.squares[ONSET:].mean()
    assert short.tokens.max() <= 8192
    binned = job("lengths in bins")
    assert sorted(binned.tokens.ravel()) == sorted(well.tokens.ravel())
    assert (binned.squares.std(axis=1) < 0.5 * well.squares.std()).mean() > 0.9


# --- what is told of it ---------------------------------------------------------------------------------------------


def verdict(*ranks: int, component: Any = "device", speed: float = 0.8) -> FailureFound:
    return FailureFound(
        failure=1,
        kind="fail-slow",
        component=component,
        cause="slow",
        ranks=ranks,
        node=None,
        device=None,
        iteration=1,
        epoch=1,
        evidence="",
        detect_s=None,
        speed=speed,
        confidence=0.9,
    )


def judged(expected: list[Expected], *told: tuple[int, FailureFound | Suspected], onset: int = 100) -> Judged:
    played = Played(told=[Told(at, entry) for at, entry in told])
    job = Judged(0, onset, expected, played, {"n1": frozenset({0, 1, 2, 3})})
    judge(job)
    return job


def device(rank: int, speed: float | None = None, since: int = 100) -> Expected:
    return Expected("device", frozenset({rank}), since, speed)


def test_who_is_named_rightly_and_in_time_is_told() -> None:
    job = judged([device(1), device(2)], (104, verdict(1)), (109, verdict(2)))
    assert (job.delays, job.false) == ([5, 10], [])
    assert job.right(within=10)
    assert not job.right(within=9)


def test_one_verdict_may_name_several() -> None:
    assert judged([device(1), device(2)], (104, verdict(1, 2))).delays == [5, 5]
    assert judged([device(1), device(2)], (104, verdict(1, 2, component="node"))).delays == [5, 5]


@pytest.mark.parametrize(
    ("expected", "entry", "at"),
    [
        ([device(1)], verdict(2), 104),
        ([device(1)], verdict(1, 2), 104),
        ([device(1)], verdict(1), 90),
        ([device(1)], verdict(component="job"), 104),
        ([Expected("job", frozenset(), 100)], verdict(1), 104),
        ([Expected("collective", frozenset({0, 1}), 100)], verdict(0), 104),
        ([], verdict(1), 104),
    ],
)
def test_a_verdict_that_is_not_so_is_false(expected: list[Expected], entry: FailureFound, at: int) -> None:
    job = judged(expected, (at, entry))
    assert len(job.false) == 1
    assert not job.right(within=600)


def test_what_gets_worse_is_told_with_its_new_speed() -> None:
    expected = [device(1, speed=0.77, since=200)]
    assert judged(expected, (104, verdict(1, speed=0.96))).delays == [None]
    assert judged(expected, (104, verdict(1, speed=0.96))).false == []
    assert judged(expected, (204, verdict(1, speed=0.96))).delays == [None]
    assert judged(expected, (204, verdict(1, speed=0.78))).delays == [5]


def test_suspicions_are_counted_once_and_apart_while_all_is_well() -> None:
    entry = Suspected(rank=1, node="n1", evidence="", kind="slow", suspicion=1)
    end = msgspec.structs.replace(entry, cleared=True, outcome="fine")
    other = msgspec.structs.replace(entry, suspicion=2)
    job = judged([device(1)], (50, entry), (51, entry), (52, end), (150, other))
    assert (job.suspicions, job.healthy_suspicions) == (2, 1)


def test_a_finding_is_right_if_what_it_names_first_is_slow_by_then() -> None:
    finding = Finding(
        kind="fail-slow", iteration=1, detected=2, change=0.2, confidence=0.9, ranks=(1, 2), link=None, evidence=""
    )
    job = judged([device(1)])
    assert true_finding(job, finding, 100)
    assert not true_finding(job, finding, 99)
    assert not true_finding(job, msgspec.structs.replace(finding, ranks=(2, 1)), 100)
    assert not true_finding(job, msgspec.structs.replace(finding, ranks=()), 100)


# --- played ---------------------------------------------------------------------------------------------------------


def test_a_device_alone_is_measured_by_order_of_the_controller_and_told_in_its_journal() -> None:
    for seed in (0, 1):
        job = worlds.play(world("device alone +20 %"), seed, 160)
        (expected,) = job.expected
        found = [told.entry for told in job.played.told if isinstance(told.entry, FailureFound)]
        assert [frozenset(entry.ranks) for entry in found] == [expected.ranks]
        assert job.delays[0] is not None
        assert job.delays[0] <= 6
        assert job.false == []


def test_ranks_that_suffer_from_a_slow_network_neither_hide_it_nor_are_declared_slow() -> None:
    for seed in (0, 1):
        job = worlds.play(world("network, ranks suffer +8 %"), seed, 320)
        assert job.false == []
        assert job.delays[0] is not None
        assert job.delays[0] <= 60


def components(job: Judged) -> list[str]:
    return [told.entry.component for told in job.played.told if isinstance(told.entry, FailureFound)]


@pytest.mark.parametrize("seed", range(3))
def test_what_a_slow_device_slows_beside_its_chunks_is_no_second_failure(seed: int) -> None:
    """Its step of the optimizer, say: iterations are longer by more than is predicted of it."""

    def act(scene: Scene) -> None:
        usual = float(scene.line.ended()[-1][: scene.onset].mean())
        scene.line.beside[scene.onset :] += 0.4 * usual
        d.devices(scene, [scene.drawn()], 1.0)

    assert components(worlds.play(World("", act, 60), seed, 320)) == ["device"]


def test_a_device_that_becomes_a_little_slower_long_after_the_network_did_is_told() -> None:
    def act(scene: Scene) -> None:
        later = 2.0 * scene.line.forward_s * scene.line.factor[120:]
        scene.line.transfers[120:] += later[:, None, None]
        factors = np.ones((scene.iterations, scene.ranks))
        factors[300:, scene.drawn()] += 0.15
        d.levels(scene, factors, probes=False)

    assert components(worlds.play(World("", act, 60), 0, 500)) == ["job", "device"]


def test_equal_seeds_are_told_the_same() -> None:
    one, other = (worlds.play(world("start skew 0.5 ms"), 2, 120) for _ in range(2))
    assert [(told.at, told.entry) for told in one.played.told] == [(told.at, told.entry) for told in other.played.told]


def test_a_plan_takes_effect_again_where_the_world_says_so() -> None:
    job = worlds.play(world("+14 %, fine probe, re-plan"), 0, 400)
    assert job.played.adopted_again is not None
    assert job.onset < job.played.adopted_again <= job.onset + worlds.AGAIN


def test_the_table_has_a_row_for_each_world_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["worlds", "quiet", "--jobs", "1", "--json", str(tmp_path / "figures.json")])
    worlds.main()
    figures = json.loads((tmp_path / "figures.json").read_text())
    (row,) = figures["healthy"]
    assert (row["world"], row["jobs"], row["iterations"]) == ("quiet", 1, worlds.ITERATIONS)
    assert set(figures["totals"]) == {"false per 10,000", "suspicions per 1,000"}
    assert "quiet" in capsys.readouterr().out


def test_a_fleet_of_quiet_ranks_raises_no_alarm() -> None:
    layout = Layout.uniform(tp=8, pp=4, dp=4, layers=64)
    plan = Plan(epoch=1, layout=layout, assignment=spread(32, 4))
    found, times = watch(plan, independent(128), 60)
    assert found == []
    assert len(times) == 60
