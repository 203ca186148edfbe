"""A chain of jobs: one that finds its training program broken spares the others that wait the trouble."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from resihp.errors import TrainingProgramError
from resihp.record.journal import JobEnded, Record
from resihp.wrapper.exit_codes import exit_code_of
from resihp.wrapper.slurm_tasks.chain import NOTE_FILE, check, leave_note
from tests.slurm.fake_slurm import FakeSlurm
from tests.wrapper.run_requests import run_request


def broken(folder: Path, says: list[str]) -> None:
    """Job 55 of the chain ends with 93."""
    request = run_request("55", folder, checkpoint_folder=str(folder / "saved"), chained=True)
    ended = JobEnded(exit_code=93, state="failed", reason="every rank: ZeroDivisionError")
    leave_note(request, [Record(1, 1.0, ended)], says.append)


@pytest.fixture
def slurm() -> FakeSlurm:
    fake = FakeSlurm(["n1"])
    fake.add_job("n1", id="57", submitted_at=time.time() - 3600)
    return fake


def test_a_job_that_was_submitted_before_ends_at_once(tmp_path: Path, slurm: FakeSlurm) -> None:
    said: list[str] = []
    check(tmp_path / "saved", "57", slurm, said.append)
    assert slurm.calls["jobs"] == 0
    broken(tmp_path, said)
    with pytest.raises(TrainingProgramError) as ended:
        check(tmp_path / "saved", "57", slurm, said.append)
    assert exit_code_of(ended.value) == 93
    text = str(ended.value)
    assert text.startswith("job 57: not started: job 55 of this chain found the training program broken at 20")
    assert "UTC: every rank: ZeroDivisionError; fix it and submit the chain again" in text
    assert said == []


def test_one_that_is_submitted_anew_goes_ahead(tmp_path: Path, slurm: FakeSlurm) -> None:
    said: list[str] = []
    broken(tmp_path, said)
    slurm.set_job("57", submitted_at=time.time() + 1)
    check(tmp_path / "saved", "57", slurm, said.append)
    assert said == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"job": "55"}', b'{"job": "5", "at": 1e300, "reason": ""}', b"\xff"])
def test_a_note_that_cannot_be_read_stops_nothing(content: bytes, tmp_path: Path, slurm: FakeSlurm) -> None:
    said: list[str] = []
    (tmp_path / NOTE_FILE).write_bytes(content)
    check(tmp_path, "57", slurm, said.append)
    (text,) = said
    assert f"{tmp_path / NOTE_FILE}: cannot be read" in text


def test_a_slurm_that_does_not_tell_stops_nothing(tmp_path: Path, slurm: FakeSlurm) -> None:
    said: list[str] = []
    broken(tmp_path, said)
    slurm.set_job("57", submitted_at=None)
    check(tmp_path / "saved", "57", slurm, said.append)
    slurm.unavailable = True
    check(tmp_path / "saved", "57", slurm, said.append)
    assert [text.endswith("going ahead") for text in said] == [True, True]


def test_a_note_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("not a folder")
    said: list[str] = []
    broken(tmp_path, said)
    (text,) = said
    assert "the next jobs of the chain will start, and fail the same way" in text
