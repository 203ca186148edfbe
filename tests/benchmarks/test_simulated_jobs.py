"""Simulated jobs: what they claim to be true is what happens in them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulated_jobs import QUANTILES, Failure, Job, Setting, simulate
from resihp.parallelism.plan import Stop
from resihp.pipeline.timeline import play

pytestmark = pytest.mark.skipif(not QUANTILES.exists(), reason=f"no document lengths at {QUANTILES}")

QUIET = Setting(micro_batches=4, pp=4, chunk_noise=0.0, iteration_noise=0.0)


def job(setting: Setting = QUIET, failure: Failure | None = None, iterations: int = 12) -> Job:
    return simulate(setting, 1, iterations, failure)


def test_equal_seeds_give_equal_jobs() -> None:
    one, other, third = (simulate(Setting(), seed, 50, "device", earliest=20) for seed in (1, 1, 2))
    assert one.failure == other.failure
    assert (one.seconds == other.seconds).all()
    assert (one.compute == other.compute).all()
    assert not (one.seconds == third.seconds).any()


def test_without_noise_an_iteration_takes_what_the_timeline_says() -> None:
    quiet = job()
    at = {
        (Stop(d, s, 0), p): quiet.true_chunks[3, slot]
        for (d, s) in quiet.compiled.lanes
        for p, slot in zip(quiet.orders[d][s], quiet.compiled.slots(d, s), strict=True)
    }
    timeline = play(quiet.plan, quiet.orders, lambda stop, p: at[stop, p], quiet.transfer_s)
    expected = timeline.makespan + quiet.synchronisation_s + quiet.step_s
    assert quiet.priced(quiet.true_chunks)[3] == pytest.approx(expected)
    assert quiet.seconds[3] == pytest.approx(expected, rel=0.02)  # transfers vary by 5 %


def test_observations_are_the_arrays() -> None:
    noisy = job(Setting(schedule="zero-bubble"))
    observations = list(noisy.observations())
    assert [o.iteration for o in observations] == list(range(12))
    last = observations[-1]
    assert sorted(last.times) == list(range(8))
    rank = noisy.rank(1, 0, 1)
    slots = noisy.compiled.slots(1, 0)
    m = noisy.compiled.micro_batch[slots]
    times = last.times[rank]
    assert (times.compute == noisy.compute[-1, slots, 1]).all()
    assert times.starts + times.spans == pytest.approx(noisy.starts[-1, slots, 0] + noisy.spans[-1, slots, 0])
    assert (times.tokens == noisy.tokens[-1, m]).all()
    assert (times.squares == noisy.squares[-1, m]).all()
    assert last.seconds == max(t.seconds for t in last.times.values())


def test_a_slow_device_shows_in_its_own_work_and_holds_up_its_peers() -> None:
    slow = job(failure=Failure(kind="device", speed=0.5, onset=4, until=8, rank=3))
    slots = slow.compiled.slots(0, 1)
    ratio = slow.compute[:, slots, 1] / slow.compute[:, slots, 0]
    assert ratio[4:8] == pytest.approx(2.0)
    assert np.delete(ratio, slice(4, 8), axis=0) == pytest.approx(1.0)
    ends = slow.starts + slow.spans
    assert ends[..., 0] == pytest.approx(ends[..., 1])
    assert (slow.seconds > 1.05 * slow.healthy).tolist() == slow.failing.tolist()
    assert slow.failing.sum() == 4


def test_a_slow_link_delays_what_comes_over_it_and_nothing_else() -> None:
    setting = Setting(micro_batches=4, pp=2, chunk_noise=0.0, iteration_noise=0.0)
    slow = job(setting, Failure(kind="link", speed=0.5, onset=4, link=(1, 3)))
    source, target = slow.compiled.edges
    late = (slow.starts[:, target] - (slow.starts + slow.spans)[:, source])[4:]  # (iterations, edges, t)
    over = (slow.compiled.replica[source] == 0) & (slow.compiled.stage[source] == 0)
    forward = slow.true_chunks[:, slow.compiled.kind == 0].mean()
    assert (late[:, over, 1] > 0.9 * forward).all()
    first = np.flatnonzero(over)[0]  # the first micro-batch, for which the receiver waits
    assert late[:, first, 0] == pytest.approx(slow.transfer_s, rel=0.3)
    assert (slow.compute == slow.compute[..., :1]).all()


def test_a_link_that_carries_nothing_cannot_fail() -> None:
    with pytest.raises(ValueError, match="exchange nothing"):
        job(failure=Failure(kind="link", speed=0.5, onset=4, link=(0, 1)))
