"""The store that gloo and NCCL are given under an agent: what they call, what frees them, what keeps it alive."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from resihp.errors import CommunicatorError
from resihp.protocol import messages as m
from resihp.protocol.rendezvous import Attendance

torch = pytest.importorskip("torch")

from resihp.executor.group_store import GroupStore  # noqa: E402
from resihp.executor.tensor_group import guarded  # noqa: E402 - they need torch

Ranks = Callable[..., list[Any]]
EPOCH = m.MeetingId(epoch=1)


def store(group: str = "world", patience_s: float = 20.0) -> tuple[GroupStore, Attendance]:
    attendance = Attendance(EPOCH, lambda publish: None, patience_s)
    return GroupStore(attendance, group), attendance


def test_torch_calls_it_as_it_calls_its_own() -> None:
    """Through `PrefixStore`, as ProcessGroupGloo and ProcessGroupNCCL do, values with zeros and high bytes in them."""
    ours, attendance = store()
    through = torch.distributed.PrefixStore("0", ours)
    value = bytes(range(256))
    attendance.hear([m.Said("world", "0/id", value)])
    assert through.get("id") == value
    through.set("mine", "text")
    assert attendance.values("world", ["0/mine"]) == [b"text"]
    through.wait(["id", "mine"])
    through.wait(["id"], timedelta(seconds=1))
    assert through.multi_get(["id", "mine"]) == [value, b"text"]
    through.multi_set(["a", "b"], ["1", "2"])
    assert through.check(["a", "b"])
    assert not through.check(["exception_dump"])
    assert not through.has_extended_api()
    assert through.clone().get("id") == value


def test_a_rank_says_what_the_back_end_sets_under_its_own_group() -> None:
    sent: list[m.Publish] = []
    ours = GroupStore(Attendance(EPOCH, sent.append, 20.0), "tensor/0/1")
    torch.distributed.PrefixStore("0", ours).set("3", "address")
    assert sent == [m.Publish(meeting=EPOCH, said=(m.Said("tensor/0/1", "0/3", b"address"),))]


def test_a_wait_inside_torch_lets_the_interpreter_go_on_and_ends_when_the_value_comes() -> None:
    ours, attendance = store()
    through = torch.distributed.PrefixStore("0", ours)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(through.get, "id")
        attendance.hear([m.Said("world", "0/id", b"come")])  # this thread runs while that one waits
        assert waiting.result(10) == b"come"


def test_whoever_waits_inside_torch_is_freed_with_our_own_error() -> None:
    ours, attendance = store()
    begun = threading.Event()

    def connect() -> Any:
        gloo = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        begun.set()
        with guarded("communicators"):
            return gloo(ours, 0, 2, options)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect)
        assert begun.wait(10)
        attendance.leave()
        with pytest.raises(CommunicatorError, match="woken"):
            waiting.result(10)


def test_who_does_not_come_is_not_waited_for_beyond_the_ranks_patience() -> None:
    ours, _ = store(patience_s=0.05)
    with pytest.raises(CommunicatorError, match="not all ranks of world came in time"), guarded("communicators"):
        torch.distributed.PrefixStore("0", ours).wait(["1"], timedelta(seconds=60))


def test_a_back_end_may_ask_it_as_long_as_its_channel_is_there() -> None:
    """torch finds the Python half only while somebody holds it; NCCL's monitor asks for as long as a job trains."""
    from resihp.executor.compute.channels import Channel

    ours, _ = store()
    back_end: Any = torch.distributed.PrefixStore("0", ours)  # stands for what holds the other half
    channel = Channel(back_end, lambda: False, None, None, ours)
    del ours
    gc.collect()
    assert not back_end.check(["exception_dump"])
    assert channel.store is not None


def test_ranks_on_gloo_meet_and_nobody_asked_any_server(ranks: Ranks) -> None:
    answers = ranks("met", 4)
    assert [answer["sum"] for answer in answers] == [6.0] * 4
    assert all(answer["listeners"] == 1 for answer in answers), "gloo's own"
