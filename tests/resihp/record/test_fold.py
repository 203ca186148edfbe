"""What journals add up to: an old one, one that was cut off, and entries that say what older ones left to words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from resihp.controller import Controller
from resihp.errors import ProtocolError
from resihp.protocol.messages import Speed
from resihp.record.fold import fold
from resihp.record.journal import (
    ChangeDecided,
    DeviceProbe,
    DrainDecided,
    FailureFound,
    FaultInjected,
    JoinRefused,
    NodeLost,
    PlanInEffect,
    ProbesTaken,
    Record,
    WorkerStarted,
)
from resihp.record.journal_file import Journal, read, torn_bytes
from resihp.record.journal_format import MAGIC, decode, encode
from resihp.settings import Settings
from tests.resihp.record.test_journal import ENTRIES

OLD = Path(__file__).with_name("old-journal")
"""Written by a development version: a simulated job that lost nodes, drained one, and was given others."""


def test_a_journal_of_a_development_version_adds_up() -> None:
    entries = [record.entry for record in read(OLD)]
    record = fold(entries)
    started = [entry for entry in entries if isinstance(entry, WorkerStarted)]
    assert sorted(record.workers) == sorted({entry.rank for entry in started})
    assert [(record.placements[e.rank].node, record.placements[e.rank].device) for e in started] == [
        (entry.node, entry.device) for entry in started
    ]
    *_, last = [entry for entry in entries if isinstance(entry, PlanInEffect)]
    assert record.plan is not None
    assert record.plan.epoch == last.epoch
    assert record.failures == max(entry.failure for entry in entries if isinstance(entry, FailureFound))
    lost = {entry.node for entry in entries if isinstance(entry, NodeLost)}
    assert {name for name, node in record.nodes.items() if not node.alive} == lost == set(record.lost)
    drained = [entry.node for entry in entries if isinstance(entry, DrainDecided)]
    assert [drain.node for drain in record.drains.values()] == drained
    assert record.replacements
    assert record.dead_devices
    assert record.ended is not None
    settings = Settings(job="old", nodes=1, node_names=("n1",), gpus_per_node=1, tp=1, pp=1)
    with pytest.raises(ProtocolError, match="has ended"):
        Controller.recover(settings, entries)


def test_a_journal_cut_in_mid_entry_is_read_to_the_cut(tmp_path: Path) -> None:
    content = OLD.read_bytes()
    whole = read(OLD)
    (tmp_path / "journal").write_bytes(content[:-3])
    assert read(tmp_path / "journal") == whole[:-1]
    assert torn_bytes(tmp_path / "journal") > 0
    assert fold(record.entry for record in read(tmp_path / "journal")) == fold(r.entry for r in whole[:-1])


def test_an_entry_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", sync=False)
    journal.append(NodeLost(node="n1", reason="gone"), at=1.0)
    journal.close()
    content = (tmp_path / "journal").read_bytes()
    import zlib

    body = content[len(MAGIC) + 8 :].replace(b"NodeLost", b"NodeSold")
    frame = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
    (tmp_path / "journal").write_bytes(content + frame)
    with pytest.raises(ProtocolError, match=r"is of another version.*NodeSold"):
        read(tmp_path / "journal")


def test_what_a_device_gives_first_while_all_have_lost_something_is_taken_for_what_it_gives_otherwise() -> None:
    def probed(occasion: Literal["start", "join"], node: str, flops: float) -> ProbesTaken:
        device = DeviceProbe(
            rank=0, node=node, device=0, flops=flops, memory_bytes=flops / 100, speed=1.0, fit=True, evidence=""
        )
        return ProbesTaken(probe=1, occasion=occasion, devices=(device,), links=(), seconds=0.2)

    share = Speed(flops=0.8, memory_bytes=0.5)
    lost = ProbesTaken(probe=2, occasion="suspicion", devices=(), links=(), seconds=0.2, share=share)
    record = fold((probed("start", "n1", 1e14), lost, probed("join", "n2", 1e14)))
    assert record.reference["n1", 0].flops == 1e14
    assert record.reference["n2", 0] == Speed(flops=1e14 / 0.8, memory_bytes=1e12 / 0.5)


def test_a_probe_that_could_not_be_made_does_not_make_a_device_fit() -> None:
    def probed(occasion: Literal["join", "standby"], *, fit: bool, speed: float | None) -> ProbesTaken:
        device = DeviceProbe(
            rank=0, node="n1", device=0, flops=None, memory_bytes=None, speed=speed, fit=fit, evidence=""
        )
        return ProbesTaken(probe=1, occasion=occasion, devices=(device,), links=(), seconds=0.2)

    set_aside = probed("join", fit=False, speed=0.4)
    not_measured = probed("standby", fit=True, speed=None)
    assert fold((set_aside, not_measured)).unfit == {("n1", 0)}
    assert fold((set_aside, probed("standby", fit=True, speed=1.0))).unfit == set()


def test_a_node_was_lost_silently_unless_the_entry_says_otherwise() -> None:
    """Journals of development versions hold an empty word; one such record made a whole journal unreadable."""
    record = decode(encode(Record(1, 0.0, NodeLost(node="n1", reason="connection closed for 5 s", how=""))))
    assert fold([record.entry]).lost["n1"].how == "silent"
    assert fold([NodeLost(node="n1", reason="drained", how="vacated")]).lost["n1"].how == "vacated"


def test_what_older_entries_left_to_words() -> None:
    started = WorkerStarted(rank=0, node="n1", device=2, pid=7, epoch=1)
    killed = FaultInjected(fault=1, text="kill:rank=0@iteration=3", rank=0, node=None, iteration=3)
    assert fold([started, killed]).dead_devices == {("n1", 2)}
    refused = JoinRefused(rank=4, node="n1", device=1, reason="exited with status 1 before it was ready")
    assert fold([refused]).dead_devices == {("n1", 1)}, "as older supervisors took it"
    lost = NodeLost(node="n1", reason="connection closed for 5 s")
    found = FailureFound(
        failure=1,
        kind="fail-stop",
        component="node",
        cause="node n1: connection closed for 5 s",
        ranks=(0,),
        node="n1",
        device=None,
        iteration=3,
        epoch=1,
        evidence="",
        detect_s=None,
    )
    assert not fold([lost, found]).verdicts["n1"].hardware
    assert fold([found]).verdicts["n1"].hardware


def test_every_entry_can_be_applied() -> None:
    fold([*ENTRIES, *ENTRIES])


def found(**changes: Any) -> FailureFound:
    given: dict[str, Any] = {"failure": 1, "kind": "fail-stop", "component": "device", "cause": "", "ranks": (3,)}
    given |= {"node": "n2", "device": 1, "iteration": 3, "epoch": 1, "evidence": "", "detect_s": None}
    return FailureFound(**given | changes)


def test_only_what_stopped_is_laid_to_a_node() -> None:
    """What a script did on a device is not the device's doing."""
    record = fold([found(kind="program")])
    assert (record.failures, record.dead_devices, record.verdicts) == (1, set(), {})
    record = fold([found()])
    assert record.dead_devices == {("n2", 1)}
    assert list(record.verdicts) == ["n2"]


def test_how_often_plans_were_changed_for_what_is_counted() -> None:
    """Each change makes the next one dearer, also for a supervisor that takes over."""
    change = ChangeDecided(reason="slow", devices=(("n2", 1),), links=((1, 2),))
    assert fold([change, change]).changes == {("n2", 1): 2, (1, 2): 2}
    assert fold([ChangeDecided(reason="saves", tuned=True)] * 2).changes == {"tuned": 2}
    assert fold([ChangeDecided(reason="saves", found=True)]).changes == {"found": 1}


def test_numbers_of_probes_are_not_given_twice() -> None:
    taken = [ProbesTaken(probe=probe, occasion="join", devices=(), links=(), seconds=0.1) for probe in (2, 1)]
    assert fold(taken).probes == 2


def test_without_a_speed_nothing_is_known_to_be_slow() -> None:
    record = fold([found(kind="fail-slow")])
    assert (record.failures, record.slow) == (1, {})
    assert list(fold([found(kind="fail-slow", speed=0.5)]).slow) == [("n2", 1)]
