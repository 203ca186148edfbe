"""What tells a slow device from the peers that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from resihp.detector import probes
from resihp.executor.compute import stopwatch
from resihp.executor.compute.stopwatch import CudaStopwatch
from resihp.protocol.messages import Speed

Ranks = Callable[..., list[Any]]


def test_only_own_work_tells_a_slow_rank_from_its_tensor_parallel_peers(ranks: Ranks) -> None:
    answers = ranks("slow_peer", 4, grid_of=(4, 1, 1), slow=2, speed=0.25)
    spans = [answer["spans"] for answer in answers]
    compute = [answer["compute"] for answer in answers]
    healthy = [seconds for rank, seconds in enumerate(compute) if rank != 2]
    assert max(spans) < 1.1 * min(spans), "whole chunks look alike on all of them"
    assert compute[2] > 2.0 * max(healthy), "its own work takes four times as long"
    assert max(healthy) < 2.0 * min(healthy), "and theirs does not, although they wait for it"


def test_primitives_are_measured_in_order_with_their_workload(ranks: Ranks) -> None:
    answers = ranks("slow_peer", 4, grid_of=(1, 2, 2), slow=-1, speed=1.0)
    for answer in answers:
        assert answer["primitives"] == 2 * 3
        assert answer["ordered"]
        assert answer["reduced"]
        assert answer["squares"] > answer["tokens"] > 0


def test_probes_find_the_slow_device_and_meet_every_neighbour(ranks: Ranks) -> None:
    pairs = [[list(pair) for pair in round_] for round_ in probes.ring(range(4))]
    answers = ranks("probe_devices", 4, pairs=pairs, slow=1, speed=0.25)
    assert all(answer["error"] == "" for answer in answers)
    assert [sorted(answer["peers"]) for answer in answers] == [[1, 3], [0, 2], [1, 3], [0, 2]]
    judged = probes.judge_devices({rank: Speed(**answer["speed"]) for rank, answer in enumerate(answers)}, {})
    # Four ranks and other tests share two cores' caches and memory: a copy takes up to twice as long for a neighbour.
    speed = judged[1].speed
    assert speed is not None
    assert 0.25 / 2.5 < speed < 0.25 * 2.5
    assert not judged[1].fit


@pytest.mark.parametrize("strict", [False, True])
def test_links_are_measured_between_two_iterations_while_the_plan_stands(ranks: Ranks, strict: bool) -> None:
    """Everybody else trains on, and nothing of the training is changed by it; nor by a peer that does not come."""
    answers = ranks("probe_links_in_training", 8, grid_of=(2, 2, 2), strict=strict)
    undisturbed = ranks("train", 8, grid_of=(2, 2, 2))
    assert [answer["losses"] for answer in answers] == [[one["loss"] for one in u["outcomes"]] for u in undisturbed]
    assert [answer["digest"] for answer in answers] == [one["digest"] for one in undisturbed]
    measured = [answer["answers"][0] for answer in answers[:4]]
    assert [one["missed"] for one in measured] == [""] * 4
    assert [[transfer["peer"] for transfer in one["transfers"]] for one in measured] == [[2], [3], [0], [1]]
    assert all(one["transfers"][0]["seconds"] > 0.0 for one in measured)
    in_vain = answers[0]["answers"][1]
    assert "came in time" in in_vain["missed"]
    assert 0.3 <= in_vain["seconds"] < 1.5
    print(f"training waits {max(one['seconds'] for one in measured):.3f} s for two links")


def test_a_peer_that_dies_while_its_link_is_measured_holds_nobody(serve: Callable[..., list[dict[str, Any]]]) -> None:
    answers = serve("peer_dies_in_a_probe", 2, called_off=False)
    assert answers[1] == {"killed": 9}
    survivor = answers[0]["result"]
    assert survivor["missed"]
    assert survivor["seconds"] < 2.5
    assert survivor["error"], "and then it is free to park"


def test_whoever_was_asked_to_park_before_does_not_begin_to_measure(ranks: Ranks) -> None:
    answer = ranks("peer_dies_in_a_probe", 2, called_off=True)[0]
    assert answer["missed"].endswith("called off")
    assert answer["seconds"] < 0.5


@pytest.mark.parametrize("back_end", ["gloo", "nccl-like"])
def test_a_peer_that_does_not_come_is_an_answer(ranks: Ranks, back_end: str) -> None:
    """NCCL's first rank would wait for it for ever."""
    (answer,) = ranks("probe_alone", 1, back_end=back_end)
    assert "came in time" in answer["missed"]
    assert answer["error"] == ""
    assert answer["speed"] > 0


class Stream:
    """A GPU's order of work: hands nothing back before `done` is called, and counts what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_ms = 0.0
        self.done = False
        self.events = 0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                stream.events += 1

            def record(self) -> None:
                self.at_ms = stream.at_ms

            def synchronize(self) -> None:
                stream.done = True

            def elapsed_time(self, other: Event) -> float:
                assert stream.done, "read before the device was done"
                return other.at_ms - self.at_ms

        monkeypatch.setattr(torch.cuda, "Event", Event)

    def work(self, ms: float) -> None:
        self.at_ms += ms


def test_what_a_gpu_computes_beside_a_collective_is_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights' gradients, while inputs' are summed over the group: only the wait at their end is not its own."""
    stream = Stream(monkeypatch)
    watch = CudaStopwatch()
    stream.work(1.0)  # waits for another stage
    watch.begin()
    stream.work(5.0)
    watch.collective()
    stream.work(3.0)
    watch.waits()
    stream.work(7.0)
    watch.resumed()
    stream.work(2.0)
    watch.end()
    stream.work(4.0)
    watch.begin()
    stream.work(6.0)
    watch.end()
    stream.work(20.0)  # sums of gradients
    watch.reduced()
    stream.done = True
    assert watch.read() == pytest.approx(np.array([[1.0, 22.0], [17.0, 6.0], [10.0, 6.0]]) / 1e3)
    assert watch.reduced_s() == pytest.approx(0.048), "when the device had them, not when it was told to"
    assert stream.events == 1 + (2 + 2) + 2 + 1, "each collective takes the two events of its wait"


def test_what_is_begun_between_two_parts_of_a_primitive_is_not_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 100.0, "thread": 10.0}

    def pass_(wall: float, thread: float) -> None:
        now["wall"] += wall
        now["thread"] += thread

    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(stopwatch.time, "thread_time", lambda: now["thread"])
    monkeypatch.setattr(stopwatch.time, "sleep", lambda seconds: pass_(seconds, 0.0))
    for speed, rows in ((1.0, [[1.0], [7.0], [5.0]]), (0.5, [[1.0], [12.0], [10.0]])):
        watch = stopwatch.Stopwatch(lambda speed=speed: speed)
        pass_(1.0, 0.0)
        watch.begin()
        pass_(4.0, 3.0)
        watch.pause()
        pass_(9.0, 8.0)  # begins a sum, for which it copies
        watch.go_on()
        pass_(3.0, 2.0)
        watch.end()
        assert watch.read() == pytest.approx(np.array(rows))
    watch = stopwatch.Stopwatch()
    watch.begin()
    watch.emulate(2.0)
    watch.pause()
    pass_(9.0, 0.0)
    watch.go_on()
    watch.emulate(4.0)
    watch.end()
    assert watch.read()[1:] == pytest.approx(np.array([[4.0], [4.0]])), "of all parts together"


def test_on_a_gpu_parts_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(monkeypatch)
    watch = CudaStopwatch()
    watch.begin()
    stream.work(5.0)
    watch.pause()
    stream.work(1.0)  # a copy
    watch.go_on()
    stream.work(2.0)
    watch.end()
    stream.done = True
    assert watch.read() == pytest.approx(np.array([[0.0], [8.0], [7.0]]) / 1e3)


def test_a_gpu_that_is_made_slow_works_longer_and_waits_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(monkeypatch)
    monkeypatch.setattr(stopwatch.time, "sleep", lambda seconds: stream.work(1e3 * seconds))
    watch = CudaStopwatch(lambda: 0.5)
    watch.begin()
    stream.work(5.0)
    watch.collective()
    stream.work(3.0)
    watch.waits()
    stream.work(7.0)
    watch.resumed()
    stream.work(2.0)
    watch.end()
    _, spans, own = watch.read()[:, 0]
    assert own == pytest.approx(0.017)  # 5 and 5 slept, 3 beside the collective, 2 and 2 slept
    assert spans == pytest.approx(0.024)


def test_an_iteration_is_over_before_its_times_are_read(ranks: Ranks) -> None:
    (answer,) = ranks("reads_its_stopwatch")
    assert answer["early"] == []
    assert set(answer["read"]) == {"times", "sums"}
    assert answer["primitives"] > 0
    assert answer["reduced_s"] > 0.0
