"""The journal's file: what is appended is read back, a torn tail costs the record it tore and nothing else."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from resihp.errors import ProtocolError
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import Declare, StepOutcome
from resihp.record.journal import (
    AnyEntry,
    ChangeDecided,
    ChangeDeclined,
    CheckpointCommitted,
    CheckpointDistrusted,
    CounterSeen,
    CoverageChanged,
    DeviceProbe,
    DrainAnswered,
    DrainDecided,
    DrainWaived,
    EvaluationDone,
    FailureEnded,
    FailureFound,
    FaultInjected,
    IterationCommitted,
    IterationsPacked,
    IterationsUnreported,
    JobEnded,
    JobSignalled,
    JobStarted,
    JoinRefused,
    LeaderChosen,
    LearnedTimes,
    LinkProbe,
    LossNotFinite,
    ModelDeclared,
    NodeJoined,
    NodeLost,
    NodeReleased,
    OtherPlan,
    PlanBasis,
    PlanDecided,
    PlanInEffect,
    PlanRefused,
    PlanWithdrawn,
    ProbesTaken,
    Reconfigured,
    ReplacementAsked,
    ReplacementChanged,
    ReservationSeen,
    RestartDecided,
    RollbackDecided,
    SlurmSaw,
    Suspected,
    WorkerEnded,
    WorkersOrdered,
    WorkerStarted,
    first_seq,
)
from resihp.record.journal_file import MAX_APPENDED_BYTES, Journal, read_packed
from resihp.record.journal_file import read_packed as read
from resihp.record.journal_format import MAGIC, encode

OUTCOME = StepOutcome(
    iteration=6,
    clip=0.5,
    skip=False,
    learning_rate=1e-3,
    gradient_norm=2.0,
    loss=3.25,
    tokens=4096,
    sum_squared_lengths=1 << 20,
    samples=17,
    samples_digest="00ff00ff00ff00ff",
)

ENTRIES: list[AnyEntry] = [
    JobStarted(
        job="local-1",
        command=("python", "train.py"),
        nodes=2,
        gpus_per_node=2,
        tp=1,
        pp=2,
        schedule="1f1b",
        host="here",
        user="me",
        restart_count=0,
        version="0.1.0",
        configuration={"layout": {"tp": 1, "pp": 2}, "faults": ["kill:rank=1@iteration=3"]},
    ),
    NodeJoined(node="n1", host="here", devices=2),
    WorkerStarted(rank=0, node="n1", device=0, pid=41, epoch=0),
    PlanDecided(
        plan=Plan(epoch=2, layout=Layout.uniform(tp=1, pp=2, dp=2, layers=4), assignment=spread(8, 2)),
        next_iteration=7,
        action="commit",
        finish=OUTCOME,
        reason="rank 1 killed by signal 9 (SIGKILL)",
        bytes_planned=1 << 33,
        basis=PlanBasis(
            speeds=((1, 0.5),),
            links=(("n1", "n2", 0.25),),
            kept_out=(3,),
            times=LearnedTimes(layers=((0.1, 0.1, 0.1),), embedding=(0.0, 0.0, 0.0), head=(0.2, 0.2, 0.2), step_s=0.5),
        ),
    ),
    PlanRefused(epoch=2, rank=None, reason="ranks 0 and 2 wait for each other"),
    PlanWithdrawn(epoch=3, reason="the job is to stop"),
    ChangeDecided(reason="gains 10% for 2 s", devices=(("n1", 0),), links=((1, 4),)),
    ChangeDeclined(
        about="plan",
        reason="rank 5 joined",
        why="saves 2 s, and costs 3 s",
        iteration=30,
        failures=(2,),
        layout="2 x tp2 pp2",
        predicted=0.5,
        present=0.51,
        unit="s",
        considered=(OtherPlan(name="all devices", predicted=0.6),),
    ),
    WorkersOrdered(workers=((4, "n1", 1), (5, "n2", 0)), round=2),
    RestartDecided(round=2, reason="rank 1 (n1 device 1): killed by signal 9 (SIGKILL)", progressed=True),
    RollbackDecided(epoch=3, iteration=40, folder="/ckpt/i40", reason="the state of a layer was lost with rank 1"),
    IterationsUnreported(first=7, last=9),
    CounterSeen(rank=0, iteration=31, furthest=40, goal=100),
    CheckpointDistrusted(folder="/ckpt/step_30", modified=1.5, reason="it led to the same failure again", failure="x"),
    LossNotFinite(rank=0, iteration=32, loss="nan"),
    IterationsPacked(epoch=3, first=10, count=1, columns=(b"?",)),
    DrainWaived(node="n3", failure=2),
    PlanInEffect(epoch=2),
    JoinRefused(rank=4, node="n1", device=1, reason="declares another model than the job"),
    IterationCommitted(epoch=2, outcome=OUTCOME, seconds=None, predicted_seconds=0.25),
    Suspected(rank=None, node="n2", evidence="3 missed beats"),
    CoverageChanged(iteration=208, detector="workload", unwatched=(5, 6)),
    FailureEnded(failure=1, node="n2", device=1, iteration=9, evidence="as fast as before"),
    ProbesTaken(
        probe=1,
        occasion="start",
        devices=(
            DeviceProbe(
                rank=3, node="n2", device=1, flops=1e9, memory_bytes=1e9, speed=0.5, fit=False, evidence="at 50 %"
            ),
        ),
        links=(LinkProbe(ranks=(0, 3), nodes=("n1", "n2"), speed=0.9, fit=True),),
        seconds=0.2,
    ),
    FailureFound(
        failure=1,
        kind="fail-stop",
        component="node",
        cause="node n2 lost",
        ranks=(2, 3),
        node="n2",
        device=None,
        iteration=7,
        epoch=2,
        evidence="connection closed",
        detect_s=0.1,
    ),
    Reconfigured(
        epoch=2,
        failures=(1,),
        attempts=1,
        action="redo",
        park_s=0.1,
        plan_s=0.1,
        groups_s=0.2,
        state_s=0.0,
        first_iteration_s=0.5,
        seconds=0.9,
        bytes_moved=1 << 33,
        extra_bytes=12345,
    ),
    FaultInjected(fault=0, text="kill:node=n2@iteration=7,phase=forward", rank=None, node="n2", iteration=7),
    EvaluationDone(epoch=1, iteration=6, loss=2.5, tokens=1024),
    CheckpointCommitted(iteration=6, folder="/tmp/c", bytes=123, seconds=1.5),
    WorkerEnded(rank=3, exit=-9, epoch=2),
    NodeLost(node="n2", reason="agent process ended"),
    ModelDeclared(
        declare=Declare(
            model=ModelSpec(layers=4, hidden=32, heads=4, kv_groups=4, ffn_hidden=128, vocab=256, sequence=64),
            micro_batches=8,
            iterations=12,
            resume_from=0,
            fingerprint="abcd",
        )
    ),
    JobSignalled(signal=15, nodes=("n1", "n3"), meaning="preempted"),
    DrainDecided(drain=1, node="n2", failure=1, reason="node n2 lost"),
    DrainAnswered(drain=1, node="n2", step="slurm", outcome="refused", text="not an operator"),
    NodeReleased(node="n2", outcome="done", text=""),
    ReplacementAsked(replacement=1, node="n2", excluded=("n2",), reason="2 of 4 replicas are left"),
    ReplacementChanged(replacement=1, state="joined", slurm_job="18", node="n5", text=""),
    SlurmSaw(node="n2", state="down", text="not responding"),
    ReservationSeen(reservation="maint", nodes=("n1", "n2"), seconds=7200.0),
    JobEnded(exit_code=0, state="completed", reason="done"),
    LeaderChosen(term=2, node="n3", host="here", how="elected"),  # last: its number begins the term's
]


def filled(path: Path, entries: list[AnyEntry] = ENTRIES) -> Path:
    journal = Journal(path, sync=False)
    for at, entry in enumerate(entries):
        journal.append(entry, float(at))
    journal.close()
    return path


def test_every_kind_of_entry_reads_back_as_it_was_written(tmp_path: Path) -> None:
    assert {type(entry) for entry in ENTRIES} == set(get_args(AnyEntry)), "an entry is missing in this test"
    records = read(filled(tmp_path / "journal"))
    assert [record.entry for record in records] == ENTRIES
    assert [record.seq for record in records] == [*range(1, len(ENTRIES)), first_seq(2)]
    assert [record.at for record in records] == [float(at) for at in range(len(ENTRIES))]


def test_records_are_readable_while_the_writer_goes_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "journal")
    for count, entry in enumerate(ENTRIES, start=1):
        record = journal.append(entry, 1.0)
        assert journal.after(record.seq - 1, 1) == [(record.seq, encode(record))]
        assert len(read(tmp_path / "deep" / "journal")) == count
    journal.close()


def test_journal_is_private(tmp_path: Path) -> None:
    assert (filled(tmp_path / "journal").stat().st_mode & 0o077) == 0


def test_reopening_continues_the_numbers(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    journal = Journal(path, sync=False)
    last = journal.seq
    assert last == first_seq(2)
    journal.append(ENTRIES[1], 99.0)
    journal.close()
    records = read(path)
    assert len(records) == len(ENTRIES) + 1
    assert (records[-1].seq, records[-1].entry) == (last + 1, ENTRIES[1])


def test_reopening_changes_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal")
    before = path.read_bytes()
    Journal(path, sync=False).close()
    assert path.read_bytes() == before


def test_torn_tail_at_every_byte_of_the_last_record(tmp_path: Path) -> None:
    whole = filled(tmp_path / "whole").read_bytes()
    start = len(filled(tmp_path / "shorter", ENTRIES[:-1]).read_bytes())
    path = tmp_path / "journal"
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert [record.entry for record in read(path)] == ENTRIES[:-1], f"cut at byte {end}"
        journal = Journal(path, sync=False)
        assert journal.seq == len(ENTRIES) - 1, f"cut at byte {end}"
        journal.append(ENTRIES[-1], float(len(ENTRIES) - 1))
        journal.close()
        assert path.read_bytes() == whole, f"cut at byte {end}"


def test_torn_tail_that_was_extended_with_zeros(tmp_path: Path) -> None:
    """What some file systems leave after a power cut: the length is there, the content is not."""
    whole = filled(tmp_path / "journal").read_bytes()
    start = len(filled(tmp_path / "shorter", ENTRIES[:-1]).read_bytes())
    path = tmp_path / "journal"
    for end in (start, start + 4, start + 8, start + 20):
        path.write_bytes(whole[:end] + bytes(len(whole) - end))
        assert [record.entry for record in read(path)] == ENTRIES[:-1], f"zeros from byte {end}"


def test_every_damaged_byte_of_the_last_record_is_noticed(tmp_path: Path) -> None:
    whole = filled(tmp_path / "journal").read_bytes()
    start = len(filled(tmp_path / "shorter", ENTRIES[:-1]).read_bytes())
    path = tmp_path / "journal"
    for at in range(start, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert [record.entry for record in read(path)] == ENTRIES[:-1], f"byte {at} damaged"


def test_damage_before_the_last_record_is_refused_and_the_file_kept(tmp_path: Path) -> None:
    """A journal that loses what was decided, in silence, is worse than none."""
    start = len(filled(tmp_path / "shorter", ENTRIES[:4]).read_bytes())
    path = filled(tmp_path / "journal")
    whole = path.read_bytes()
    path.write_bytes(whole[: start + 8] + bytes([whole[start + 8] ^ 1]) + whole[start + 9 :])
    damaged = path.read_bytes()
    for opened in (read, read_packed, Journal):
        with pytest.raises(ProtocolError, match=f"journal.*damaged at byte {start}, and whole records follow"):
            opened(path)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("length", range(len(MAGIC) + 1))
def test_a_file_torn_within_its_first_bytes_is_an_empty_journal(tmp_path: Path, length: int) -> None:
    path = tmp_path / "journal"
    path.write_bytes(MAGIC[:length])
    assert read(path) == []
    journal = Journal(path, sync=False)
    assert journal.seq == 0
    journal.append(ENTRIES[0], 0.0)
    journal.close()
    assert [record.entry for record in read(path)] == ENTRIES[:1]


@pytest.mark.parametrize("content", [b"SQLite format 3\x00" + bytes(100), b"RESIHPJ2", b"x", b"\x00" * 8])
def test_refuses_what_is_no_journal_and_leaves_it_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ProtocolError, match="not a resihp journal"):
        read(path)
    with pytest.raises(ProtocolError, match="not a resihp journal"):
        Journal(path, sync=False)
    assert path.read_bytes() == content


def test_refuses_a_whole_record_of_another_version(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal", ENTRIES[:2])
    body = msgspec.msgpack.encode([3, 0.0, {"type": "Unheard"}])
    crc = zlib.crc32(body)
    path.write_bytes(path.read_bytes() + len(body).to_bytes(4, "little") + crc.to_bytes(4, "little") + body)
    with pytest.raises(ProtocolError, match="another version"):
        read(path)


def test_a_record_that_agents_could_not_be_sent_is_not_written(tmp_path: Path) -> None:
    path = filled(tmp_path / "journal", ENTRIES[:2])
    before = path.read_bytes()
    journal = Journal(path, sync=False)
    with pytest.raises(ProtocolError, match=r"Suspected of .* bytes cannot be copied"):
        journal.append(Suspected(rank=1, node="n", evidence="x" * MAX_APPENDED_BYTES), 0.0)
    assert path.read_bytes() == before
    assert journal.append(ENTRIES[2], 0.0).seq == 3
    journal.close()


def test_a_full_disk_is_told_and_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, sync=False)
    journal.append(ENTRIES[0], 0.0)
    before = path.read_bytes()
    write, room = os.pwrite, [20]

    def full(fd: int, body: bytes, at: int) -> int:
        if not room:
            raise OSError(28, "no space left on device")
        return write(fd, body[: room.pop()], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="no space"):
            journal.append(ENTRIES[1], 1.0)
    assert path.read_bytes() == before
    assert journal.append(ENTRIES[1], 1.0).seq == 2
    journal.close()
    assert [record.entry for record in read(path)] == ENTRIES[:2]
