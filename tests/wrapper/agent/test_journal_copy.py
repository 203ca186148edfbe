"""An agent's copy of the journal: it follows its leader's, whatever an earlier leader had sent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from resihp.errors import ProtocolError, UsageError
from resihp.protocol import messages as m
from resihp.record import journal_file
from resihp.record.journal import IterationCommitted, LeaderChosen, NodeJoined, Record, first_seq
from resihp.record.journal_format import encode
from resihp.wrapper.agent.succession.journal_copy import Replica, local_place
from resihp.wrapper.job_files.job import OurJob, ours
from resihp.wrapper.job_folder import Job
from tests.wrapper.agent.test_agent import outcome


def committed(seq: int) -> Record:
    return Record(seq, 0.0, IterationCommitted(epoch=1, outcome=outcome(seq), seconds=1.0, predicted_seconds=None))


def replicate(after: int, *records: Record) -> m.Replicate:
    return m.Replicate(after=after, records=tuple(encode(record) for record in records))


def test_copy_is_a_journal_that_a_successor_can_read(tmp_path: Path) -> None:
    replica = Replica(tmp_path / "n1.copy")
    joined = Record(1, 0.0, NodeJoined(node="n1", host="h", devices=1))
    replica.apply(replicate(0, joined))
    replica.apply(replicate(1, committed(2), committed(3)))
    assert journal_file.read(tmp_path / "n1.copy") == [joined, committed(2), committed(3)]
    assert (replica.log, replica.membership.committed, replica.membership.joined) == (3, 3, {"n1"})


def test_what_the_new_leader_does_not_have_is_dropped(tmp_path: Path) -> None:
    replica = Replica(tmp_path / "n1.copy")
    replica.apply(replicate(0, committed(1), committed(2), committed(3), committed(4)))
    chosen = Record(first_seq(2), 0.0, LeaderChosen(term=2, node="n2", host="h", how="elected"))
    replica.apply(replicate(2, chosen))
    assert journal_file.read(tmp_path / "n1.copy") == [committed(1), committed(2), chosen]
    assert (replica.membership.term, replica.membership.committed) == (2, 2)
    replica.apply(replicate(1))
    replica.apply(replicate(1, chosen))
    assert journal_file.read(tmp_path / "n1.copy") == [committed(1), chosen]


def test_records_that_do_not_follow_are_refused_and_the_copy_tells_what_it_has(tmp_path: Path) -> None:
    replica = Replica(tmp_path / "n1.copy")
    with pytest.raises(ProtocolError, match="ends with record 0, but the message continues 5"):
        replica.apply(replicate(5, committed(6)))
    replica.apply(replicate(0, committed(1), committed(6)))
    with pytest.raises(ProtocolError, match="ends with record 1, but the message continues 3"):
        replica.apply(replicate(3, committed(4)))
    assert replica.log == 1
    with pytest.raises(ProtocolError, match="record 1 came after 1"):
        replica.apply(replicate(1, committed(1)))
    with pytest.raises(ProtocolError, match="another version"):
        replica.apply(m.Replicate(after=1, records=(b"?",)))


def test_copy_of_an_earlier_agent_is_not_taken_over(tmp_path: Path) -> None:
    Replica(tmp_path / "n1.copy").apply(replicate(0, committed(1)))
    assert Replica(tmp_path / "n1.copy").log == 0
    assert journal_file.read(tmp_path / "n1.copy") == []


def test_full_disk_ends_neither_the_agent_nor_its_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = Replica(tmp_path / "n1.copy")
    replica.apply(replicate(0, committed(1)))

    def full(descriptor: int, content: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal_file.os, "pwrite", full)
    replica.apply(replicate(1, committed(2)))
    monkeypatch.undo()
    replica.apply(replicate(2, committed(3)))
    assert (replica.log, replica.membership.committed, replica.whole) == (3, 3, False)
    assert "No space left" in capsys.readouterr().out
    assert journal_file.read(tmp_path / "n1.copy") == [committed(1)]


def job_at(tmp_path: Path) -> OurJob:
    folder = tmp_path / "job"
    folder.mkdir()
    place = tmp_path / "local" / "job-1"
    content = f'{{"name":"j","host":"h","created_at":0.0,"journal":"{place}/journal"}}'
    (folder / "job.json").write_text(content)
    job = ours(Job("j", folder))
    assert job is not None
    return job


def test_place_on_local_disk_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    place = local_place(job_at(tmp_path))
    assert place == tmp_path / "local" / "job-1"
    assert {folder.stat().st_mode & 0o777 for folder in (place, place.parent)} == {0o700}


def test_place_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path) -> None:
    job = job_at(tmp_path)
    (tmp_path / "local").write_text("")
    with pytest.raises(UsageError, match=r"local.*RESIHP_LOCAL"):
        local_place(job)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a link to another user")
def test_a_link_of_somebody_else_to_a_folder_of_ours_is_refused(tmp_path: Path) -> None:
    """Whoever made it can have it lead elsewhere at any time."""
    job = job_at(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "local").symlink_to(tmp_path / "elsewhere")
    os.chown(tmp_path / "local", 12345, 12345, follow_symlinks=False)
    with pytest.raises(UsageError, match=r"local: belongs to another user; set RESIHP_LOCAL"):
        local_place(job)
    os.chown(tmp_path / "local", os.getuid(), os.getgid(), follow_symlinks=False)
    assert local_place(job).is_dir(), "a link of ours is our own affair"
