"""The table behind a rendezvous, and a rank's part in it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from resihp.errors import CommunicatorError, ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.rendezvous import BATCH_BYTES, MAX_PROBE_MEETINGS, Attendance, Meetings, Pending, batches

EPOCH = m.MeetingId(epoch=3)


def said(group: str, key: str = "0", value: bytes = b"x") -> m.Said:
    return m.Said(group, key, value)


def opened(*meetings: m.MeetingId) -> Meetings[str]:
    table: Meetings[str] = Meetings()
    for meeting in meetings or (EPOCH,):
        table.open(meeting)
    return table


# --- the table ----------------------------------------------------------------------------------------------------


def test_who_attends_hears_what_was_said_before_and_what_is_said_after() -> None:
    table = opened()
    assert table.publish(EPOCH, [said("world", "0", b"a")], "n1") == {}
    assert table.attend(EPOCH, "n2", ("world", "tensor/0/0")) == (
        [said("world", "0", b"a")],
        ("world", "tensor/0/0"),
    )
    assert table.publish(EPOCH, [said("world", "1", b"b"), said("data/0", "0")], "n1") == {
        "n2": [said("world", "1", b"b")]
    }


def test_nobody_is_told_what_it_said_itself() -> None:
    table = opened()
    for who in ("n1", "n2"):
        table.attend(EPOCH, who, ("world",))
    assert set(table.publish(EPOCH, [said("world")], "n1")) == {"n2"}


def test_a_key_is_set_once() -> None:
    table = opened()
    table.attend(EPOCH, "n2", ("world",))
    table.publish(EPOCH, [said("world", "0", b"first")], "n1")
    assert table.publish(EPOCH, [said("world", "0", b"second")], "n3") == {}
    assert table.attend(EPOCH, "n3", ("world",))[0] == [said("world", "0", b"first")]


def test_groups_that_somebody_attends_already_are_not_asked_for_again() -> None:
    table = opened()
    assert table.attend(EPOCH, "0", ("world", "a"))[1] == ("world", "a")
    assert table.attend(EPOCH, "1", ("world", "b"))[1] == ("b",)


def test_a_newer_epoch_ends_the_meetings_of_older_ones() -> None:
    table = opened(EPOCH, m.MeetingId(epoch=4))
    table.attend(EPOCH, "n2", ("world",))
    assert table.publish(EPOCH, [said("world")], "n1") == {}
    table.open(EPOCH)
    assert table.attend(EPOCH, "n2", ("world",)) == ([], ())


def test_a_meeting_that_nobody_was_ordered_to_is_none() -> None:
    table = opened()
    ahead = m.MeetingId(epoch=9)
    assert table.attend(ahead, "n1", ("world",)) == ([], ())
    assert table.publish(ahead, [said("world")], "n2") == {}


def test_a_probe_goes_on_beside_a_new_epoch_and_the_oldest_are_forgotten() -> None:
    probe = m.MeetingId(probe=1)
    table = opened(probe, m.MeetingId(epoch=4))
    table.attend(probe, "n1", ("0/0-1",))
    assert table.publish(probe, [said("0/0-1")], "n2") == {"n1": [said("0/0-1")]}
    table.open(m.MeetingId(probe=1 + MAX_PROBE_MEETINGS))
    assert table.publish(probe, [said("0/0-1", "1")], "n2") == {}


def test_a_meeting_holds_so_much_and_no_more() -> None:
    table: Meetings[str] = Meetings(most_bytes=2000)
    table.open(EPOCH)
    table.publish(EPOCH, [said("world", "0", b"x" * 1000)], "n1")
    with pytest.raises(ProtocolError, match="rendezvous of epoch 3: more than 2000 bytes"):
        table.publish(EPOCH, [said("world", "1", b"x" * 1000)], "n1")
    with pytest.raises(ProtocolError, match="more than 2000 bytes"):
        table.attend(EPOCH, "n1", tuple(f"group {n}" for n in range(10)))


def test_who_has_left_hears_nothing_more() -> None:
    table = opened()
    table.attend(EPOCH, "n2", ("world",))
    table.leave("n2")
    assert table.publish(EPOCH, [said("world")], "n1") == {}


def test_the_work_of_a_rendezvous_grows_with_what_is_said_and_heard() -> None:
    """16 times as many nodes, each with two groups of its own and one of all: 16 times the entries, not 256 times."""

    def entries(nodes: int) -> int:
        table: Meetings[int] = Meetings()
        table.open(EPOCH)
        told = 0
        for node in range(nodes):
            told += len(table.attend(EPOCH, node, ("world", f"a{node}", f"b{node // 2}"))[0])
        told += sum(len(new) for new in table.publish(EPOCH, [said("world")], 0).values())
        for node in range(nodes):
            news = table.publish(EPOCH, [said(f"a{node}"), said(f"b{node // 2}", str(node))], node)
            told += sum(len(new) for new in news.values())
        return told

    assert entries(512) <= 16 * entries(32) + 32


def test_what_waits_for_somebody_goes_in_one_message_and_fits_it() -> None:
    pending: Pending[str] = Pending()
    assert not pending
    pending.add("n1", EPOCH, [said("world")])
    pending.add("n1", EPOCH, [said("world", "1")])
    pending.add("n2", EPOCH, [])
    assert list(pending.take()) == [("n1", EPOCH, (said("world"), said("world", "1")))]
    assert not pending
    large = [said("world", str(n), b"x" * (BATCH_BYTES // 2)) for n in range(3)]
    assert [len(batch) for batch in batches(large)] == [1, 1, 1]


# --- a rank's part ------------------------------------------------------------------------------------------------


def attendance(patience_s: float = 20.0) -> tuple[Attendance, list[m.Publish]]:
    sent: list[m.Publish] = []
    return Attendance(EPOCH, sent.append, patience_s), sent


def test_a_wait_ends_when_the_last_key_is_heard() -> None:
    it, _ = attendance()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(it.values, "world", ["0", "1"])
        it.hear([said("world", "0", b"a"), said("other", "1", b"no")])
        assert not waiting.done()
        it.hear([said("world", "1", b"b")])
        assert waiting.result(10) == [b"a", b"b"]
    assert it.has("world", ["0", "1"])
    assert not it.has("world", ["2"])


def test_what_a_rank_says_it_has_heard_and_its_agent_is_told_once() -> None:
    it, sent = attendance()
    it.publish("world", {"0": b"mine"})
    assert it.values("world", ["0"]) == [b"mine"]
    assert sent == [m.Publish(meeting=EPOCH, said=(said("world", "0", b"mine"),))]


def test_whoever_waits_is_freed_when_the_rank_leaves() -> None:
    it, _ = attendance()
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(it.values, "world", ["0"]), pool.submit(it.values, "world", ["0"], 15.0)]
        it.leave()
        for wait in waits:
            with pytest.raises(CommunicatorError, match="communicators of epoch 3: woken"):
                wait.result(10)
    with pytest.raises(CommunicatorError, match="woken"):
        it.values("world", ["0"])


@pytest.mark.parametrize(("patience_s", "timeout_s"), [(0.05, None), (20.0, 0.05), (0.05, 20.0)])
def test_nobody_is_waited_for_longer_than_the_rank_is_patient(patience_s: float, timeout_s: float | None) -> None:
    it, _ = attendance(patience_s)
    began = time.monotonic()
    with pytest.raises(CommunicatorError, match="not all ranks of world came in time"):
        it.values("world", ["7"], timeout_s)
    assert 0.04 <= time.monotonic() - began < 10


def test_a_value_that_fits_no_message_is_refused_where_it_is_said() -> None:
    it, sent = attendance()
    with pytest.raises(CommunicatorError, match="epoch 3: 1048577 bytes under world/0"):
        it.publish("world", {"0": b"x" * (BATCH_BYTES + 1)})
    assert sent == []
