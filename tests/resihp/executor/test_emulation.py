"""Emulated devices take the times that the planner takes them to take, and the detector sees that they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from resihp.errors import ConfigurationError
from resihp.executor import emulation
from resihp.executor.compute import stopwatch
from resihp.executor.emulation import HEAD_LAYERS, LAYER_MS, Work, pace_of, wires_of
from resihp.executor.state.rank_state import HeldPart
from resihp.faults import LINK_MS
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, Primitive, Stop, spread
from resihp.pipeline.program import GroupSpec
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.cost.prices import costs
from resihp.scheduler.situation import Situation

CPU = torch.device("cpu")
MODEL = ModelSpec(layers=6, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=256, sequence=64)


class Clock:
    """Stands in for `time`: threads work only where told, sleeping takes exactly as long as asked."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.worked

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("slow", [{}, {3: 0.5}])
def test_every_chunk_takes_what_the_planner_takes_it_to_take(
    clock: Clock, schedule: str, slow: dict[int, float]
) -> None:
    plan = Plan(
        epoch=1,
        layout=Layout.uniform(tp=2, pp=2, dp=1, layers=6),
        assignment=spread(4, 1),
        schedule=schedule,
    )
    situation = Situation(
        epoch=1,
        base=plan.layout,
        available=(0, 1, 2, 3),
        nodes={},
        model=MODEL,
        micro_batches=4,
        tp=2,
        pp=2,
        speeds=slow,
    )
    orders = orders_of(plan)
    predicted = costs(plan, situation, orders)
    pace = pace_of({LAYER_MS: "40"}, MODEL, CPU)
    assert pace is not None
    for rank in (1, 3):
        place, holding = plan.layout.place(rank), HeldPart.of(plan, rank)
        assert place is not None
        assert holding is not None
        measured = stopwatch.Stopwatch(at(slow.get(rank, 1.0)))
        order = orders[0][place.stage]
        for primitive in order:
            measured.begin()
            clock.work(0.004)
            measured.emulate(pace(work_of(primitive, order), holding, primitive.chunk))
            measured.end()
        seconds = [predicted(Stop(0, place.stage, p.chunk), p) * 0.040 for p in order]
        _, spans, own = measured.read().tolist()
        assert spans == pytest.approx(seconds)
        assert own == pytest.approx(seconds)


def at(speed: float) -> stopwatch.Speed:
    return lambda: speed


def work_of(primitive: Primitive, order: tuple[Primitive, ...]) -> Work:
    split = any(other.kind == "W" for other in order)
    return "BW" if primitive.kind == "B" and not split else primitive.kind


def test_waiting_for_a_slow_peer_is_not_own_work_of_an_emulated_device(clock: Clock) -> None:
    slow, peer = stopwatch.Stopwatch(at(0.5)), stopwatch.Stopwatch()
    for each, waits_s in ((slow, 0.0), (peer, 0.090)):
        each.begin()
        clock.work(0.005)
        each.collective()
        clock.sleep(waits_s)
        each.resumed()
        clock.work(0.005)
        each.emulate(0.060)
        each.end()
    assert slow.read()[1:, 0].tolist() == pytest.approx([0.120, 0.120])
    assert peer.read()[1:, 0].tolist() == pytest.approx([0.100, 0.060])


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        (GroupSpec("edge/0-2", (0, 2), "edge"), 0.04),
        (GroupSpec("3/0-2", (0, 2), "edge"), 0.04),
        (GroupSpec("edge/0-4", (0, 4), "edge"), 0.02),
        (GroupSpec("edge/0-1", (0, 1), "edge"), None),
        (GroupSpec("group/0-2", (0, 2)), None),
        (GroupSpec("group/0-1", (0, 1), "tensor"), None),
        (GroupSpec("world", (0, 1, 2, 3, 4, 5)), None),
    ],
    ids=lambda value: value.name if isinstance(value, GroupSpec) else "",
)
def test_transfers_and_measurements_between_two_nodes_take_what_their_link_does(
    group: GroupSpec, seconds: float | None
) -> None:
    wires = wires_of({LINK_MS: "20"}, CPU)
    assert wires is not None
    wires.nodes.update(enumerate(("n1", "n1", "n2", "n2", "n3", "n3")))
    wires.speed = lambda a, b: 0.5 if {a, b} == {"n1", "n2"} else 1.0
    now = wires.of(group)
    assert (None if now is None else now()) == seconds


def test_nothing_is_emulated_unless_asked_for() -> None:
    assert pace_of({}, MODEL, CPU) is None
    assert wires_of({}, CPU) is None


def of_layers(environment: dict[str, str], device: torch.device) -> object:
    return pace_of(environment, MODEL, device)


EMULATED = pytest.mark.parametrize(("name", "made"), [(emulation.LAYER_MS, of_layers), (LINK_MS, wires_of)])


@EMULATED
@pytest.mark.parametrize("given", ["", "fast", "0", "-3", "nan", "inf"])
def test_times_that_are_none_are_refused(
    name: str, made: Callable[[dict[str, str], torch.device], object], given: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={given}: must be milliseconds above 0"):
        made({name: given}, CPU)


@EMULATED
def test_a_gpu_is_never_slowed_down(name: str, made: Callable[[dict[str, str], torch.device], object]) -> None:
    with pytest.raises(ConfigurationError, match="not on a GPU; unset it"):
        made({name: "40"}, torch.device("cuda"))


def test_a_head_may_take_other_times_than_its_operations_say() -> None:
    head = HeldPart(tp=1, t=0, chunks=((4, 5),), first=False, last=True)
    pace = pace_of({LAYER_MS: "10", HEAD_LAYERS: "3"}, MODEL, CPU)
    assert pace is not None
    assert pace("F", head, 0) == pytest.approx(0.05)
    with pytest.raises(ConfigurationError, match="must be a number above 0"):
        pace_of({LAYER_MS: "10", HEAD_LAYERS: "none"}, MODEL, CPU)
