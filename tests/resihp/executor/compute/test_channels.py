"""Communicators seen from one rank: waits end when it is woken, and strict order is strict."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from resihp.errors import CommunicatorError
from resihp.executor.compute.channels import Channel, SingleFile


class Work:
    """A communication that is done when its test says so; its wait looks up as gloo's does."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self, timeout: timedelta) -> bool:
        if not self.done.wait(min(timeout.total_seconds(), 0.01)):
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Backend:
    """Notes what is begun."""

    def __init__(self) -> None:
        self.begun: list[Work] = []
        self.began = threading.Semaphore(0)

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Any], *options: Any) -> Work:
        self.begun.append(Work())
        self.began.release()
        return self.begun[-1]


def test_a_woken_rank_stops_waiting_though_the_transfer_never_ends() -> None:
    woken = threading.Event()
    transfer = Channel(Backend(), woken.is_set).allreduce([torch.zeros(1)])
    woken.set()
    with pytest.raises(CommunicatorError, match="woken in the middle of a message"):
        transfer.wait()


def test_other_communicators_run_beside_each_other_unless_order_is_strict() -> None:
    first, second = Backend(), Backend()
    for backend in (first, second):
        Channel(backend, lambda: False).allreduce([torch.zeros(1)])
    assert [len(first.begun), len(second.begun)] == [1, 1]


def test_strict_order_begins_nothing_before_what_came_earlier_is_done() -> None:
    first, second, single_file = Backend(), Backend(), SingleFile()
    earlier = Channel(first, lambda: False, single_file).allreduce([torch.zeros(1)])
    later = Channel(second, lambda: False, single_file).allreduce([torch.zeros(1)])
    assert first.began.acquire(timeout=5)
    assert not second.begun
    assert not earlier.is_completed()
    first.begun[0].done.set()
    assert earlier.wait()
    assert second.began.acquire(timeout=5)
    second.begun[0].done.set()
    assert later.wait()
    single_file.close()


def test_over_an_emulated_link_each_transfer_follows_the_one_before_and_takes_its_time() -> None:
    backend, slept = Backend(), threading.Semaphore(0)

    def wire() -> float:
        slept.release()
        return 0.0

    channel = Channel(backend, lambda: False, None, wire)
    transfers = [channel.allreduce([torch.zeros(1)]) for _ in range(2)]
    assert backend.began.acquire(timeout=5)
    assert len(backend.begun) == 1, "the second begins when the first is through"
    backend.begun[0].done.set()
    assert transfers[0].wait()
    assert slept.acquire(timeout=5)
    assert backend.began.acquire(timeout=5)
    assert not transfers[1].is_completed()
    backend.begun[1].done.set()
    assert transfers[1].wait()
    assert channel.detach() is backend


def test_a_scattered_sum_is_this_ranks_part_once_it_is_waited_for() -> None:
    backend = Backend()
    output = torch.zeros(2)
    transfer = Channel(backend, lambda: False).reduce_scatter(output, torch.tensor([1.0, 1.0, 3.0, 3.0]))
    backend.begun[0].done.set()
    assert transfer.wait()
    assert output.tolist() == [3.0, 3.0]


def test_a_closed_channel_keeps_no_back_end_alive_and_says_so() -> None:
    backend = Backend()
    channel = Channel(backend, lambda: False)
    assert channel.detach() is backend
    with pytest.raises(CommunicatorError, match="closed"):
        channel.allreduce([torch.zeros(1)])
