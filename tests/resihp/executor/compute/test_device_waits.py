"""What ranks tell of themselves where hosts do not block in their waits: who keeps the others waiting is to blame."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resihp.controller.fail_stop.liveness import blocking_ranks
from resihp.executor.compute import device_waits
from resihp.executor.compute.channels import PendingWork
from resihp.executor.compute.device_waits import DeviceWaits, DeviceWatch
from resihp.executor.compute.iteration import waiting
from resihp.executor.supervised import worker as supervised_worker
from resihp.executor.tensor_group import TensorGroup
from resihp.faults import Phase
from tests.resihp.controller.fail_stop.test_liveness import SETTINGS, member
from tests.waiting import until


class Device:
    """Does what it is given, in order, as far as it is let; `work` and `waits` return at once, as a GPU's do."""

    def __init__(self) -> None:
        self._given = self._done = 0
        self.device_waits = DeviceWaits(self._mark)

    def _mark(self) -> Any:
        place = self._given

        class Mark:
            def query(_) -> bool:
                return self._done >= place

        return Mark()

    def work(self) -> None:
        """A kernel of its own."""
        self._given += 1

    def waits(self) -> None:
        """For a peer."""
        with waiting(self, "a wait that returns at once"):
            self._given += 1

    def does(self, count: int) -> Device:
        self._done += count
        return self

    @property
    def activity(self) -> str:
        return "communication" if self.device_waits.under_way() else "compute"

    def communicating(self, waits: bool) -> None:
        (self.device_waits.begin if waits else self.device_waits.end)()

    def enter(self, phase: Phase) -> None: ...
    def progressed(self) -> None: ...


def an_iteration(of: int = 3) -> Device:
    """Handed over from end to end: its host stands in `tolist()`."""
    device = Device()
    for _ in range(of):
        device.work()
        device.waits()
    return device


def test_the_one_whose_kernel_does_not_end_is_the_culprit_and_not_its_peers() -> None:
    culprit = an_iteration().does(2)
    peers = [an_iteration().does(3) for _ in range(3)]
    ranks = [member(rank, activity=device.activity) for rank, device in enumerate([*peers, culprit])]
    assert [found.rank for found in blocking_ranks(ranks, 0.0, SETTINGS)] == [3]


def test_the_one_whose_host_hands_over_no_more_is_the_culprit_and_not_its_peers() -> None:
    culprit = an_iteration(of=1).does(2)
    peers = [an_iteration().does(3) for _ in range(3)]
    ranks = [member(rank, activity=device.activity) for rank, device in enumerate([culprit, *peers])]
    assert [found.rank for found in blocking_ranks(ranks, 0.0, SETTINGS)] == [0]


def test_where_all_devices_wait_for_each_other_nobody_is_the_culprit() -> None:
    ranks = [member(rank, activity=an_iteration().does(1).activity) for rank in range(4)]
    assert blocking_ranks(ranks, 0.0, SETTINGS) == []


def test_each_step_of_a_device_is_told_as_what_it_is() -> None:
    device = an_iteration(of=2)
    told = [device.activity, *(device.does(1).activity for _ in range(4))]
    assert told == ["compute", "communication", "compute", "communication", "compute"]


def test_a_wait_in_which_the_host_blocks_is_told_while_it_lasts() -> None:
    """As on a processor."""
    device = Device()
    device.communicating(True)
    assert device.activity == "communication"
    device.communicating(False)
    assert device.activity == "compute"


def test_a_synchronous_call_is_told_as_the_wait_that_it_can_be() -> None:
    """NCCL orders behind it on the stream of what calls; its imitation blocks in it."""
    group, told = TensorGroup(2, 0), []
    meanwhile: list[list[bool]] = []

    class Communicator:
        def allreduce(self, tensors: list[Any], options: Any) -> PendingWork:
            meanwhile.append(list(told))
            return PendingWork(None, lambda: False)

    group.on_wait = told.append
    group.bind(Communicator())
    torch.distributed.all_reduce(torch.zeros(1), group=group)
    assert meanwhile == [[True]]
    assert told == [True, False], "one wait, which is two marks on a device"
    group.start_all_reduce(torch.zeros(1))
    assert meanwhile[1] == told, "what is begun is not yet waited for"
    assert told[-1] is False


def test_a_device_that_fails_keeps_the_others_waiting() -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: unspecified launch failure")

    waits = DeviceWaits(Broken)
    waits.begin()
    waits.end()
    assert not waits.under_way()
    waits.begin()  # what it raises for is the next kernel's to say


def test_a_worker_whose_wait_returned_at_once_waits_as_long_as_its_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(supervised_worker, "mark_on", lambda _: device._mark())
    start = SimpleNamespace(rank=0)
    client = SimpleNamespace(start=start, activity="compute", attend=None)
    engine = SimpleNamespace(device=None)
    worker = supervised_worker.SupervisedWorker(client, engine, None, 0, 9, Path("/checkpoints"), 0)  # type: ignore[arg-type]
    with waiting(worker, "last synchronisation"):
        device.work()
    assert worker._waits.under_way()
    device.does(1)
    assert not worker._waits.under_way()


class StuckDriver:
    """Stands in for CUDA's library: whoever asks for an event waits in it, as long as nobody lets it answer."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._let, self._post = ctypes.create_string_buffer(64), libc.sem_post
        libc.sem_init(self._let, 0, 0)
        self.asked: list[int] = []
        self._wait = libc.sem_wait
        self.contexts: dict[int, int | None] = {threading.get_ident(): 42}
        """Of each thread that has one; the thread that made this has used the device."""

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.contexts.get(threading.get_ident())
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.contexts[threading.get_ident()] = context.value
        return 0

    def cuEventQuery(self, event: ctypes.c_void_p) -> int:
        self.asked.append(event.value or 0)
        return int(self._wait(self._let))

    def answer(self) -> None:
        self._post(self._let)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StuckDriver:
    """On a machine with a GPU, as far as events go; torch's own question must not be asked."""
    stuck = StuckDriver()
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, cuda_event=73))
    monkeypatch.setattr(device_waits, "_driver", lambda: stuck)
    monkeypatch.setattr(device_waits, "ANSWER_TIMEOUT_S", 0.05)
    return stuck


def test_a_driver_that_is_stuck_silences_no_beat_and_its_silence_is_told(driver: StuckDriver) -> None:
    now = [10.0]
    waits = DeviceWaits(lambda: device_waits.mark_on(torch.device("cuda", 0)))
    waits.begin()
    waits.end()
    asking = DeviceWatch(waits.under_way, lambda: now[0])
    asking.ask()
    until(lambda: driver.asked == [73])
    now[0] = 17.0
    assert asking.ask() == (False, 7.0)
    assert driver.asked == [73], "who is stuck is not asked twice"
    for _ in range(99):
        driver.answer()
    until(lambda: asking.ask() == (False, 0.0))


def test_a_device_that_answers_is_asked_anew_at_each_beat() -> None:
    device = an_iteration().does(1)
    asking = DeviceWatch(device.device_waits.under_way)
    told = [asking.ask(), (device.does(1), asking.ask())[1], (device.does(1), asking.ask())[1]]
    assert told == [(True, 0.0), (False, 0.0), (True, 0.0)]


def test_the_thread_that_asks_has_the_context_of_the_one_that_trains(
    driver: StuckDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, the driver would answer CUDA_ERROR_INVALID_CONTEXT, and every wait would pass for a hang."""
    invalid_context = 201

    def answer(event: ctypes.c_void_p) -> int:
        return 600 if driver.contexts.get(threading.get_ident()) == 42 else invalid_context

    monkeypatch.setattr(driver, "cuEventQuery", answer)
    mark = device_waits.mark_on(torch.device("cuda", 0))
    with ThreadPoolExecutor(1) as another:
        assert another.submit(mark.query).result() is False


def test_errors_of_an_event_are_the_devices(driver: StuckDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = device_waits.mark_on(torch.device("cuda", 0))
    for code, told in ((0, True), (600, False)):
        monkeypatch.setattr(driver, "cuEventQuery", lambda event, code=code: code)
        assert mark.query() is told
    monkeypatch.setattr(driver, "cuEventQuery", lambda event: 719)
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        mark.query()
