"""What a probe asks of a device, and what it makes of one that cannot answer. GPUs are stood in for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resihp.errors import DeviceError
from resihp.executor.compute.stopwatch import full_speed
from resihp.executor.supervised import probe
from resihp.protocol import messages as m

CPU = torch.device("cpu")
FULL = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def alone() -> Any:
    """An engine of which a probe of no link sees only the device."""
    return SimpleNamespace(device=CPU, speed=full_speed)


@pytest.mark.parametrize("error", FULL)
def test_a_full_device_is_said_to_be_full_and_not_to_fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(torch, "mm", raising(error))
    answer = probe.measure(m.Probe(probe=3), 0, alone(), None)  # type: ignore[arg-type]
    assert (answer.error, answer.missed, answer.speed) == ("", "", m.Speed())
    assert answer.untried == "device cpu: has no memory left to measure it in"


def test_a_device_that_cannot_multiply_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    answer = probe.measure(m.Probe(probe=3), 0, alone(), None)  # type: ignore[arg-type]
    assert answer.untried == ""
    assert "fails its probe" in answer.error


@pytest.mark.parametrize("error", FULL)
def test_a_newcomer_is_not_turned_away_for_want_of_memory(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(torch.Tensor, "to", raising(error))
    probe.examine(CPU)
    monkeypatch.setattr(torch.Tensor, "to", raising(RuntimeError("CUDA error: device-side assert triggered")))
    with pytest.raises(DeviceError, match="fails its probe"):
        probe.examine(CPU)


def test_who_is_too_full_to_measure_its_links_does_not_come_to_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came and left again would leave them in a communication that nobody takes part in."""
    came: list[Any] = []
    engine = SimpleNamespace(device=CPU, speed=full_speed, meet=lambda *_: nullcontext(came.append(_)))
    monkeypatch.setattr(torch, "zeros", raising(FULL[0]))
    asked = m.Probe(probe=3, pairs=(((0, 1),),))
    told = probe.measure_links(asked, 0, engine, None, lambda: False)  # type: ignore[arg-type]
    assert "no memory left" in told.missed
    assert came == []


def test_a_gpu_is_measured_once_its_clocks_have_risen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes for the host only while it waits for the device; each product takes 3 ms, the first ones 30."""
    clock, queued, worked = [0.0], [0.0], [0]

    def work() -> None:
        worked[0] += 1
        queued[0] += 0.030 if clock[0] < 0.05 else 0.003

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0] + queued[0]

        def synchronize(self) -> None:
            clock[0], queued[0] = clock[0] + queued[0], 0.0

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: Event(True).synchronize())
    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])
    assert probe._fastest(torch.device("cuda"), full_speed, work) == pytest.approx((0.003,))
    assert clock[0] >= probe.WARM_UP_S + probe.REPEAT_COUNT * 0.003


def test_a_neighbour_that_is_at_work_for_a_while_does_not_meet_all_repetitions_of_one_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes 1 ms of an undisturbed device, and twice that in the first half of the time."""
    clock = [0.0]

    def work() -> None:
        clock[0] += 0.002 if clock[0] < 0.016 else 0.001

    monkeypatch.setattr(probe.time, "thread_time", lambda: clock[0])
    assert probe._fastest(CPU, full_speed, work, work) == pytest.approx((0.001, 0.001))


@pytest.mark.parametrize(("device", "share", "shared"), [("cpu", "", True), ("cuda", "", False), ("cuda", "1", True)])
def test_who_competes_with_others_on_its_machine_says_so(
    monkeypatch: pytest.MonkeyPatch, device: str, share: str, shared: bool
) -> None:
    monkeypatch.setenv("RESIHP_SHARE_GPUS", share)
    monkeypatch.setattr(probe, "examine", lambda device: None)
    monkeypatch.setattr(probe, "device_speed", lambda device, speed: m.Speed(flops=1.0))
    engine: Any = SimpleNamespace(device=torch.device(device), speed=full_speed)
    assert probe.measure(m.Probe(probe=3), 0, engine, None).shared is shared  # type: ignore[arg-type]
    links = probe.measure_links(m.Probe(probe=3, after_iteration=5), 0, engine, None, lambda: False)  # type: ignore[arg-type]
    assert links.shared is shared


@pytest.mark.parametrize(("shared", "seconds"), [(True, 1e-3), (False, 3e-3)])
def test_a_link_between_ranks_that_wait_for_processors_is_what_it_is_when_they_get_them(
    monkeypatch: pytest.MonkeyPatch, shared: bool, seconds: float
) -> None:
    """They get them for one transfer of five; where nobody else is on them, such a link is slow."""
    clock, begun = [0.0], [0]

    def allreduce(tensors: Any) -> Any:
        begun[0] += 1
        clock[0] += 1e-3 if begun[0] % 5 == 0 else 3e-3
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(probe, "is_shared", lambda device: shared)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: clock[0])
    channel: Any = SimpleNamespace(allreduce=allreduce)
    assert probe._transfer_s(channel, torch.zeros(1)) == pytest.approx(seconds)


def test_numbers_that_are_multiplied_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones draw less power than training does; and the script's own random numbers are left alone."""
    before = torch.random.get_rng_state()
    seen: list[torch.Tensor] = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.extend((left, right))
        return left @ right

    monkeypatch.setattr(torch, "mm", multiply)
    speed = probe.device_speed(CPU, full_speed)
    assert speed.flops > 0.0
    assert speed.memory_bytes > 0.0
    assert all(0.9 < float(tensor.std()) < 1.1 for tensor in seen)
    assert torch.equal(torch.random.get_rng_state(), before)
