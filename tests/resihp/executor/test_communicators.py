"""How communicators come to be: what a rank says before it hears anything, and who is free when it is woken."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from resihp.errors import CommunicatorError
from resihp.pipeline.program import GroupSpec
from resihp.protocol import messages as m
from resihp.protocol.rendezvous import Attendance
from tests.waiting import until

torch = pytest.importorskip("torch")

from resihp.executor.backends import BackEnd, Gloo  # noqa: E402 - it needs torch
from resihp.executor.communicators import Communicators  # noqa: E402
from resihp.executor.group_store import AgentRendezvous, JoinedMeeting  # noqa: E402

EPOCH = m.MeetingId(epoch=1)
GROUPS = tuple(GroupSpec(f"data/{other}", (0, other)) for other in range(1, 7))


class Place:
    """Where rank 0 meets peers that say nothing. `at_once`: as under an agent; else as under torchrun."""

    def __init__(self, at_once: bool = True) -> None:
        self.said: list[str] = []
        """In which groups, in order."""
        self._at_once = at_once

    def attend(self, meeting: m.MeetingId, groups: Sequence[str], patience_s: float) -> JoinedMeeting:
        attended = AgentRendezvous(
            lambda meeting, groups, patience_s: Attendance(meeting, self._hear, patience_s)
        ).attend(meeting, groups, patience_s)
        attended.at_once = self._at_once
        return attended

    def _hear(self, publish: m.Publish) -> None:
        self.said += [said.group for said in publish.said]


@contextmanager
def opening(place: Place, strict: bool = False) -> Iterator[Communicators]:
    """All of `GROUPS`, until whoever uses it has seen enough."""
    communicators = Communicators(EPOCH, 0, GROUPS, 60.0, Gloo(torch.device("cpu")), strict=strict)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(communicators.open, place)
        try:
            yield communicators
        finally:
            communicators.close()
        with pytest.raises(CommunicatorError, match="woken"):
            opened.result(20)


def test_a_rank_tells_all_its_peers_at_once_where_it_is() -> None:
    """Each answer takes its way over two agents and the supervisor: peers are waited for once, not once a group."""
    place = Place()
    with opening(place):
        until(lambda: set(place.said) == {group.name for group in GROUPS})


@pytest.mark.parametrize(("at_once", "strict"), [(True, True), (False, False)])
def test_where_order_matters_groups_are_built_one_after_the_other(at_once: bool, strict: bool) -> None:
    """Under NCCL's rules, and in torch's own store, in which nobody says anything while somebody waits."""
    place = Place(at_once)
    with opening(place, strict) as communicators:
        until(lambda: place.said)
        assert communicators.names == ()
    assert set(place.said) == {GROUPS[0].name}


def test_no_thread_waits_on_for_a_rank_that_was_woken() -> None:
    place = Place()
    with opening(place):
        until(lambda: len(set(place.said)) == len(GROUPS))
    until(lambda: not [each for each in threading.enumerate() if each.name == "resihp-connecting"])


def test_one_that_cannot_be_built_fails_them_all() -> None:
    """And those that were built by then are let go."""
    place = Place()
    broken = Communicators(
        EPOCH, 0, (*GROUPS, GroupSpec("alone", (0,))), 60.0, Gloo(torch.device("cpu")), patience_s=0.2
    )
    with pytest.raises(CommunicatorError, match=r"not all ranks of data/\d came in time"):
        broken.open(place)
    broken.close()
    assert broken.names == ()
    until(lambda: not [each for each in threading.enumerate() if each.name == "resihp-connecting"])


class Slow(BackEnd):
    """Aborts only when it is let; notes which thread destroys what it made."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.let = threading.Event()
        self.destroyed_by: list[str] = []

    def connect(self, *_: Any) -> Any:
        made = type("Made", (), {})()
        weakref.finalize(made, lambda: self.destroyed_by.append(threading.current_thread().name))
        return made

    def abort(self, communicators: Sequence[Any], connecting: Sequence[Any] = ()) -> bool:
        return self.let.wait(20)


def test_what_is_being_aborted_is_destroyed_by_whom_the_rank_waits_for_at_its_end() -> None:
    """In a thread that outlives the interpreter, torch's destructors would end the process with SIGABRT."""
    kind = Slow()
    communicators = Communicators(EPOCH, 0, (GroupSpec("alone", (0,)),), 60.0, kind)
    communicators.open(Place())
    communicators.close()
    kind.let.set()
    until(lambda: kind.destroyed_by)
    assert kind.destroyed_by == ["resihp-closing"]


def test_a_rank_whose_abort_does_not_end_ends_itself_by_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Gloo):
        aborts = True

        def abort(self, communicators: Sequence[Any], connecting: Sequence[Any] = ()) -> bool:
            return False

    ended: list[int] = []
    monkeypatch.setattr("resihp.executor.communicators.os._exit", ended.append)
    Communicators(EPOCH, 0, GROUPS, 60.0, Stuck(torch.device("cpu"))).wake()
    until(lambda: ended == [m.ABORT_STATUS])


class Destroys(Slow):
    """Notes what is destroyed without having been aborted: NCCL waits there for peers that may be gone."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted: set[int] = set()
        self.waited: list[int] = []
        self.made = 0

    def connect(self, *arguments: Any) -> Any:
        self.made += 1
        made = type("Made", (), {"number": self.made})()
        weakref.finalize(made, lambda number=self.made: number in self.aborted or self.waited.append(number))
        arguments[-1].begun(made)
        return made

    def abort(self, communicators: Sequence[Any], connecting: Sequence[Any] = ()) -> bool:
        self.aborted |= {each.number for each in (*communicators, *connecting)}
        return True


def alone(kind: BackEnd, *names: str) -> Communicators:
    return Communicators(EPOCH, 0, [GroupSpec(name, (0,)) for name in names], 60.0, kind)


def test_no_communicator_is_destroyed_that_was_not_aborted() -> None:
    """Neither those that only move state, once a plan is in effect, nor the others at the end."""
    kind = Destroys()
    communicators = alone(kind, "world", "state/1-0", "state/2-0")
    communicators.open(Place())
    communicators.release("state/")
    assert communicators.names == ("world",)
    until(lambda: kind.aborted == {2, 3})
    communicators.close()
    until(lambda: kind.aborted == {1, 2, 3})
    gc.collect()
    assert kind.waited == []
