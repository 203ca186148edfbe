"""Packed iterations: what they stand for comes back, in files a tenth as large, and nobody notices."""

from __future__ import annotations

import zlib
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec
import pytest

from resihp.errors import ProtocolError
from resihp.protocol.messages import StepOutcome
from resihp.record import journal_format
from resihp.record.fold import fold
from resihp.record.journal import (
    CheckpointCommitted,
    IterationCommitted,
    IterationsPacked,
    Record,
    Suspected,
    first_seq,
)
from resihp.record.journal_file import LEFT_UNPACKED, PACK_AFTER, Journal, read, read_packed
from resihp.record.journal_format import encode
from resihp.record.packing import MAX_PACKED_ITERATIONS, MIN_PACKED_ITERATIONS, first_of, last_commits, pack, unpack

SAVED = CheckpointCommitted(iteration=1, folder="/c", bytes=1, seconds=1.0)


def committed(seq: int, iteration: int | None = None, epoch: int = 1, *, rng: Random | None = None) -> Record:
    rng = rng or Random(seq)
    outcome = StepOutcome(
        iteration=seq if iteration is None else iteration,
        clip=rng.random(),
        skip=rng.random() < 0.1,
        learning_rate=1e-4 * rng.random(),
        gradient_norm=rng.lognormvariate(0.0, 1.0),
        loss=rng.choice([float("nan"), rng.uniform(1.0, 9.0)]),
        tokens=rng.randrange(1 << 40),
        sum_squared_lengths=rng.randrange(1 << 50),
        samples=rng.randrange(4096),
        samples_digest=rng.randbytes(8).hex(),
        updates=rng.randrange(1 << 30),
        pause=rng.random() < 0.1,
        saving=rng.random() < 0.1,
        save=rng.random() < 0.1,
    )
    seconds = rng.choice([None, rng.uniform(0.1, 90.0)])
    entry = IterationCommitted(epoch=epoch, outcome=outcome, seconds=seconds, predicted_seconds=rng.choice([None, 7.5]))
    return Record(seq, 1.7e9 + 8.0 * seq - (20.0 if seq == 7 else 0.0), entry)  # somebody set the clock back


def alike(one: Record, other: Record) -> bool:
    """To the microsecond and to seven digits; all else exactly."""
    if one.seq != other.seq or abs(one.at - other.at) > 1e-6 or type(one.entry) is not type(other.entry):
        return False
    if not isinstance(one.entry, IterationCommitted) or not isinstance(other.entry, IterationCommitted):
        return one == other
    for name in ("clip", "learning_rate", "gradient_norm", "loss"):
        a, b = getattr(one.entry.outcome, name), getattr(other.entry.outcome, name)
        if a != pytest.approx(b, rel=1e-6, nan_ok=True):
            return False
    for name in ("seconds", "predicted_seconds"):
        if getattr(one.entry, name) != pytest.approx(getattr(other.entry, name), abs=1e-6):
            return False
    same = {name: 0.0 for name in ("clip", "learning_rate", "gradient_norm", "loss")}
    return (
        msgspec.structs.replace(one.entry.outcome, **same) == msgspec.structs.replace(other.entry.outcome, **same)
        and one.entry.epoch == other.entry.epoch
    )


def all_alike(ones: list[Record], others: list[Record]) -> bool:
    return len(ones) == len(others) and all(map(alike, ones, others))


def story(count: int) -> list[Record]:
    """Commits, with something else between them now and then, another epoch, an iteration redone, a new term."""
    records: list[Record] = []
    iteration, epoch, seq = 0, 1, 0
    rng = Random(count)
    while len(records) < count:
        seq += 1
        draw = rng.random()
        if draw < 0.01:
            records.append(Record(seq, 1.7e9 + 8.0 * seq, SAVED))
            continue
        epoch += draw > 0.995
        iteration += 1 + (draw > 0.998)
        if draw > 0.999:
            seq = max(seq, first_seq(seq // first_seq(2) + 2))
        records.append(committed(seq, iteration, epoch))
    return records


def test_packed_records_come_back() -> None:
    records = story(3 * MAX_PACKED_ITERATIONS)
    packed = pack(records)
    assert len(packed) < len(records) / 10
    assert all_alike(list(unpack(packed)), records)
    numbers = [(first_of(record), record.seq) for record in packed]
    assert all(last < first for (_, last), (first, _) in pairwise(numbers))


def test_no_record_grows_too_large_for_a_message() -> None:
    packed = pack(
        [committed(seq) for seq in [*range(1, 7), *range(8, MAX_PACKED_ITERATIONS + MIN_PACKED_ITERATIONS + 8)]][6:]
    )
    assert [record.seq for record in packed] == [
        MAX_PACKED_ITERATIONS + 7,
        MAX_PACKED_ITERATIONS + MIN_PACKED_ITERATIONS + 7,
    ]
    assert len(encode(packed[0])) < 1 << 20


def test_few_iterations_or_figures_that_fit_no_column_stay_as_they_are() -> None:
    assert pack(few := [committed(seq) for seq in range(1, MIN_PACKED_ITERATIONS)]) == few
    many = [committed(seq) for seq in range(1, 40)]
    for odd in ({"loss": 1e300}, {"tokens": 1 << 70}, {"samples_digest": "?"}, {"samples_digest": "z" * 16}):
        entry = many[20].entry
        assert isinstance(entry, IterationCommitted)
        outcome = msgspec.structs.replace(entry.outcome, **odd)
        strange = Record(21, many[20].at, msgspec.structs.replace(entry, outcome=outcome))
        records = [*many[:20], strange, *many[21:]]
        assert [r for r in unpack(pack(records)) if r.seq == 21] == [strange], odd


@pytest.mark.parametrize("harm", ["cut", "too few", "garbage", "a bomb"])
def test_columns_that_are_none_are_refused(harm: str) -> None:
    (record,) = pack([committed(seq) for seq in range(1, 40)])
    assert isinstance(record.entry, IterationsPacked)
    first, *others = record.entry.columns
    columns = {
        "cut": (first[:-1], *others),
        "too few": (first, *others[:-1]),
        "garbage": (b"?", *others),
        "a bomb": (zlib.compress(bytes(1 << 24)), *others),
    }[harm]
    broken = Record(39, record.at, msgspec.structs.replace(record.entry, columns=columns))
    with pytest.raises(ProtocolError, match="packed record 39 cannot be unpacked"):
        list(unpack([broken]))


# --- files --------------------------------------------------------------------------------------------------------


def filled(path: Path, records: list[Record]) -> Journal:
    journal = Journal(path, sync=False)
    journal.write([(record, encode(record)) for record in records])
    return journal


def test_a_file_is_packed_when_it_is_worth_it_and_reads_as_before(tmp_path: Path) -> None:
    records = story(5 * PACK_AFTER)
    journal = filled(tmp_path / "journal", records[: PACK_AFTER // 2])
    assert not journal.is_to_be_packed
    for start in range(PACK_AFTER // 2, len(records), 1000):
        journal.write([(record, encode(record)) for record in records[start : start + 1000]])
        if journal.is_to_be_packed:
            journal.pack()
            assert not journal.is_to_be_packed
    assert all_alike(read(journal.path), records)
    packed = read_packed(journal.path)
    last = [record for record in packed if isinstance(record.entry, IterationCommitted)][-LEFT_UNPACKED:]
    commits = [record for record in records if isinstance(record.entry, IterationCommitted)]
    assert [encode(record) for record in last] == [encode(record) for record in commits[-LEFT_UNPACKED:]]
    whole = fold(record.entry for record in records)
    assert repr(fold(record.entry for record in packed)) == repr(whole), "also where a loss is not a number"
    assert sum(isinstance(record.entry, IterationCommitted) for record in packed) < 2 * PACK_AFTER
    journal.close()
    again = Journal(journal.path, sync=False)
    assert again.seq == records[-1].seq
    assert again.append(Suspected(rank=0, node="n", evidence=""), 0.0).seq == records[-1].seq + 1
    assert all_alike(read(journal.path)[:-1], records)
    again.close()


def test_what_follows_any_record_is_found_in_a_packed_file_too(tmp_path: Path) -> None:
    records = story(PACK_AFTER + 2 * LEFT_UNPACKED)
    journal = filled(tmp_path / "journal", records)
    journal.pack()
    for at in [*range(0, len(records), 499), len(records) - 1]:
        seq = records[at].seq
        assert journal.common(seq) == seq
        found: list[Record] = []
        while piece := journal.after(found[-1].seq if found else seq, 5000):
            found += unpack(journal_format.decode(body) for _, body in piece)
            assert piece[-1][0] == found[-1].seq
        assert all_alike(found, records[at + 1 :])
    journal.close()


@pytest.mark.parametrize("back", [1, 100, 2 * LEFT_UNPACKED, PACK_AFTER])
def test_a_packed_file_can_be_cut_anywhere(tmp_path: Path, back: int) -> None:
    """A copy that holds what nobody decided: rare, and then the iterations of it are unpacked again."""
    records = story(PACK_AFTER + 2 * LEFT_UNPACKED)
    journal = filled(tmp_path / "journal", records)
    journal.pack()
    journal.cut(records[-1 - back].seq)
    assert all_alike(read(journal.path), records[:-back])
    assert journal.seq == records[-1 - back].seq
    journal.append(SAVED, 0.0)
    journal.pack()
    assert all_alike(read(journal.path)[:-1], records[:-back])
    journal.close()


def test_three_months_fit_fifty_megabytes(tmp_path: Path) -> None:
    """A million iterations of 7.8 s; measured on a tenth."""
    records = [committed(seq, epoch=1 + seq // 20_000) for seq in range(1, 100_001)]
    journal = filled(tmp_path / "journal", records)
    journal.pack()
    assert journal.path.stat().st_size < 5e6
    journal.close()


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = story(PACK_AFTER + 2 * LEFT_UNPACKED)
    journal = filled(tmp_path / "journal", records)
    before = journal.path.read_bytes()

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="no space"):
            journal.pack()
    assert journal.path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [journal.path]
    journal.pack()
    assert all_alike(read(journal.path), records)
    journal.close()


def test_who_takes_over_knows_the_last_iterations_packed_or_not() -> None:
    """In two packed records, with another one between, and three that are not packed."""
    records = [*map(committed, range(1, 101)), Record(101, 1.7e9 + 808.0, SAVED), *map(committed, range(102, 151))]
    packed = [*pack(records), *map(committed, range(151, 154))]
    assert len(packed) == 6
    wanted = [
        (record.seq, pytest.approx(record.at, abs=1e-6), pytest.approx(record.entry.seconds, abs=1e-6))
        for record in (*records, *map(committed, range(151, 154)))
        if isinstance(record.entry, IterationCommitted)
    ]
    assert last_commits(packed, 1000) == wanted
    assert last_commits(packed, 80) == wanted[-80:]
    assert last_commits(packed, 2) == wanted[-2:]
    assert last_commits([], 5) == []


def test_iterations_that_a_script_printed_stay_so() -> None:
    records = [
        Record(seq, float(seq), IterationCommitted(
            epoch=0, outcome=StepOutcome.printed(seq, None if seq % 2 else 1.5), seconds=0.5, predicted_seconds=None
        ))
        for seq in range(1, 41)
    ]  # fmt: skip
    (packed,) = pack(records)
    outcomes = [record.entry.outcome for record in unpack([packed]) if isinstance(record.entry, IterationCommitted)]
    assert all(outcome.is_printed for outcome in outcomes)
    assert [outcome.loss_is_unknown for outcome in outcomes] == [True, False] * 20
