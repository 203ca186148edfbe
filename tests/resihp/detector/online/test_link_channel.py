"""Which link is slow: read from what ranks measured, only where somebody waited, and named with its direction."""

from __future__ import annotations

import numpy as np
import pytest

from resihp.detector.findings import Finding
from resihp.detector.observation import Floats, Observation
from resihp.detector.online.link_channel import Links, LinkTest
from resihp.detector.online.plan_arrays import SPANS, STARTS, Stacked
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.pipeline.compiled import compile_orders
from tests.resihp.detector.small_jobs import TRANSFER_S, SlowerLink, observations, plan_of, uniform

UNEQUAL = Layout(
    (
        Replica((Stage((0, 1, 2, 3), ((0, 3),)), Stage((4, 5), ((4, 7),)))),
        Replica((Stage((6,), ((0, 3),)), Stage((7, 8), ((4, 7),)))),
    )
)


class Watch:
    """A job whose links are watched."""

    def __init__(self, layout: Layout, *, nodes: dict[int, str] | None = None, seed: int = 0) -> None:
        self.plan, self.orders = plan_of(layout)
        self.stacked = Stacked(self.plan, compile_orders(self.plan, self.orders))
        self.links = Links(self.stacked, nodes)
        self.test = LinkTest(self.links, {}, 10_000, 500)
        self.seed = seed

    def measured(self, observation: Observation) -> tuple[Floats, Floats, Floats]:
        return self.links.measured(self.stacked.columns(observation.times))

    def run(self, iterations: range, slower: SlowerLink, excused: dict[int, int] | None = None) -> list[Finding]:
        found: list[Finding] = []
        for observation in observations(self.plan, self.orders, iterations, seed=self.seed, slower_link=slower):
            measured = self.measured(observation)
            found += self.test.update(observation.iteration, *measured, excused or {})
        return found


def slow_from(pair: tuple[int, int], factor: float, onset: int, until: int = 10_000) -> SlowerLink:
    return lambda sender, receiver, i: factor if (sender, receiver) == pair and onset <= i < until else 1.0


def test_every_pair_that_exchanges_activations_or_gradients_is_a_link() -> None:
    pairs = {tuple(pair) for pair in Watch(uniform(2, 2, 2)).links.pairs.tolist()}
    assert pairs == {(0, 2), (1, 3), (2, 0), (3, 1), (4, 6), (5, 7), (6, 4), (7, 5)}


def test_parts_between_unequal_groups_go_where_the_transfers_go() -> None:
    pairs = [tuple(pair) for pair in Watch(UNEQUAL).links.pairs.tolist()]
    forward = {pair for pair in pairs if pair[0] < pair[1]}
    assert forward == {(0, 4), (1, 4), (2, 5), (3, 5), (6, 7), (6, 8)}
    assert {(b, a) for a, b in forward} == {pair for pair in pairs if pair[0] > pair[1]}


def test_transfers_are_measured_where_the_receiver_waited_for_them() -> None:
    for layout in (uniform(2, 4, 2), UNEQUAL):
        watch = Watch(layout)
        for observation in observations(watch.plan, watch.orders, range(5), iteration_noise=0.0):
            delays, tokens, counts = watch.measured(observation)
            seen = counts > 0
            assert seen.mean() > 0.6
            assert np.isnan(delays[~seen]).all()
            assert delays[seen] == pytest.approx(TRANSFER_S, rel=0.2)
            assert ((tokens[seen] > 6000) & (tokens[seen] < 8192)).all()


def test_a_receiver_that_was_busy_tells_nothing() -> None:
    watch = Watch(uniform(1, 2, 1))
    (observation,) = observations(watch.plan, watch.orders, range(1))
    columns = watch.stacked.columns(observation.times)
    ends = columns[STARTS] + columns[SPANS]
    for row in range(2):  # whoever begins does so as soon as it can, however long the data have been there
        own = slice(int(watch.stacked.first_column[row]), int(watch.stacked.first_column[row + 1]))
        columns[STARTS, own][1:] = ends[own][:-1]
    _, _, counts = watch.links.measured(columns)
    assert counts.sum() <= 1  # the first forward of the last stage


@pytest.mark.parametrize("pair", [(0, 2), (7, 5)])
@pytest.mark.parametrize("factor", [1.5, 4.0, 150.0])
def test_a_slow_link_is_named_with_its_direction(pair: tuple[int, int], factor: float) -> None:
    watch = Watch(uniform(2, 2, 2))
    (finding,) = watch.run(range(140), slow_from(pair, factor, 100))
    assert finding.kind == "fail-slow"
    assert finding.link == pair
    assert finding.ranks == ()
    assert abs(finding.iteration - 100) <= 1
    assert finding.detected <= 104
    assert 1 + finding.change == pytest.approx(factor, rel=0.15)
    assert f"rank {pair[0]} to rank {pair[1]}" in finding.evidence
    assert watch.test.slow[pair] == pytest.approx(np.log(factor), abs=0.1)


def test_it_recovers() -> None:
    watch = Watch(uniform(2, 2, 2))
    findings = watch.run(range(180), slow_from((4, 6), 3.0, 100, 140))
    assert [(finding.kind, finding.link) for finding in findings] == [("fail-slow", (4, 6)), ("recovered", (4, 6))]
    assert abs(findings[1].iteration - 140) <= 1
    assert watch.test.slow == {}


def test_healthy_links_are_left_alone() -> None:
    for layout in (uniform(2, 2, 2), uniform(1, 4, 2), UNEQUAL):
        assert Watch(layout).run(range(600), slow_from((-1, -1), 1.0, 0)) == []


def test_both_directions_of_a_cable_are_one_finding() -> None:
    watch = Watch(uniform(2, 2, 2))
    (finding,) = watch.run(range(140), lambda a, b, i: 3.0 if {a, b} == {1, 3} and i >= 100 else 1.0)
    assert finding.link in ((1, 3), (3, 1))
    assert set(watch.test.slow) == {(1, 3), (3, 1)}


def test_all_links_of_one_rank_are_one_finding_that_names_it() -> None:
    watch = Watch(uniform(1, 3, 3))
    (finding,) = watch.run(range(140), lambda a, b, i: 3.0 if 4 in (a, b) and i >= 100 else 1.0)
    assert finding.ranks == (4,)
    assert finding.link is not None
    assert 4 in finding.link


def test_what_hits_all_links_is_no_single_one() -> None:
    watch = Watch(uniform(2, 2, 2))
    assert watch.run(range(200), lambda a, b, i: 2.0 if i >= 100 else 1.0) == []


def test_late_transfers_of_a_slow_rank_are_excused() -> None:
    watch = Watch(uniform(2, 2, 2))
    assert watch.run(range(140), slow_from((0, 2), 3.0, 100), excused={0: 99}) == []


def test_links_of_a_kind_are_compared_from_the_start_where_nodes_are_known() -> None:
    nodes = {rank: f"n{rank // 2}" for rank in range(8)}
    slow = slow_from((4, 6), 2.0, 0)
    assert Watch(uniform(2, 2, 2)).run(range(100), slow) == []
    (finding,) = Watch(uniform(2, 2, 2), nodes=nodes).run(range(100), slow)
    assert finding.link == (4, 6)


def test_links_within_nodes_are_not_compared_with_those_between() -> None:
    layout = uniform(1, 3, 2)
    nodes = {rank: "a" if rank in (0, 1) else "b" if rank in (3, 4) else f"n{rank}" for rank in range(6)}
    watch = Watch(layout, nodes=nodes)
    within = ({0, 1}, {3, 4})
    assert watch.run(range(200), lambda a, b, _: 1.0 if {a, b} in within else 8.0) == []


def test_nonsense_is_ignored() -> None:
    watch = Watch(uniform(2, 2, 2))
    watch.run(range(60), slow_from((-1, -1), 1.0, 0))
    nothing = np.full(watch.links.size, np.nan)
    for i, value in enumerate((np.nan, 0.0, -1.0, np.inf, 1e12)):
        delays = np.full(watch.links.size, 0.004)
        delays[3] = value
        assert watch.test.update(60 + i, delays, np.full(watch.links.size, 8000.0), np.ones(8), {}) == ()
    assert watch.test.update(70, nothing, nothing, np.zeros(8), {}) == ()


def told_by_coarse_clocks(watch: Watch, iterations: range, slower: SlowerLink) -> list[Finding]:
    """Starts of iterations half a millisecond apart, times rounded to a millisecond."""
    rng = np.random.default_rng(watch.seed)
    found: list[Finding] = []
    for observation in observations(watch.plan, watch.orders, iterations, seed=watch.seed, slower_link=slower):
        columns = watch.stacked.columns(observation.times)
        ends = columns[STARTS] + columns[SPANS]
        skew = np.repeat(rng.normal(0.0, 5e-4, len(watch.stacked.ranks)), watch.stacked.lengths)
        columns[STARTS] = np.round(columns[STARTS] + skew, 3)
        columns[SPANS] = np.round(ends + skew, 3) - columns[STARTS]
        found += watch.test.update(observation.iteration, *watch.links.measured(columns), {})
    return found


@pytest.mark.parametrize("seed", range(3))
def test_coarse_clocks_and_skewed_starts_make_no_link_slow(seed: int) -> None:
    watch = Watch(uniform(2, 2, 2), seed=seed)
    assert told_by_coarse_clocks(watch, range(500), slow_from((-1, -1), 1.0, 0)) == []
    assert watch.links.resolution_s == pytest.approx(1e-3)


def test_a_link_that_is_slower_by_more_than_clocks_blur_is_found_all_the_same() -> None:
    watch = Watch(uniform(2, 2, 2))
    (finding,) = told_by_coarse_clocks(watch, range(140), slow_from((0, 2), 3.0, 100))
    assert finding.link == (0, 2)
    assert finding.detected <= 106


def test_what_one_way_gains_and_the_other_loses_is_skew() -> None:
    watch = Watch(uniform(2, 2, 2))
    shifted = {(0, 2): 1.6, (2, 0): 0.4}
    assert watch.run(range(160), lambda a, b, i: shifted.get((a, b), 1.0) if i >= 100 else 1.0) == []


def test_without_a_pipeline_there_are_no_links() -> None:
    watch = Watch(uniform(2, 1, 2))
    assert watch.links.size == 0
    assert watch.run(range(20), slow_from((0, 1), 2.0, 5)) == []
