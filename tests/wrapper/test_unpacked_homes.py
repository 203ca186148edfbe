"""A home that came out of an archive or a repository belongs to whoever unpacked it, and somebody else wrote it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.db.writing.catch_up import catch_up
from resihp.errors import LedgerError
from resihp.wrapper import registry
from resihp.wrapper.cli import app
from resihp.wrapper.job_files.dead_jobs import copy_journal, finish_dead_job
from resihp.wrapper.job_folder import Job, create_local_job, ours, take_lock, write_private
from tests.db.conftest import story, write_journal
from tests.wrapper.run_requests import run_request


def resihp(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def written_by(who: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, ended: bool) -> Job:
    """A job of that user's, in `folder/.resihp`, with places and a registry of the user's own."""
    monkeypatch.setenv("RESIHP_HOME", str(folder / ".resihp"))
    monkeypatch.setenv("RESIHP_LOCAL", str(folder.parent / f"{who}-local"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.parent / f"{who}-state"))
    job = create_local_job()
    write_journal(job.journal_file, story(ended))
    run_request(job.name, job.folder, checkpoint_folder=str(job.checkpoints)).save()
    return job


def names(job: Job, **fields: object) -> None:
    write_private(job.folder / "job.json", msgspec.json.encode(msgspec.structs.replace(job.read(), **fields)))


@pytest.fixture
def unpacked(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, Job]:
    """The job in the archive, with what its author left of it, and one of the user's own that runs."""
    theirs = written_by("author", fresh_home / "archive", monkeypatch, ended=True)
    copy_journal(theirs)
    mine = written_by("user", fresh_home / "project", monkeypatch, ended=False)
    shutil.rmtree(fresh_home / "author-local")
    monkeypatch.delenv("RESIHP_HOME")
    monkeypatch.chdir(fresh_home / "archive")
    return theirs, mine


def test_unpacked_job_writes_no_ledger_outside_its_home(unpacked: tuple[Job, Job], fresh_home: Path) -> None:
    theirs, _ = unpacked
    names(theirs, ledger=f"sqlite:///{fresh_home}/authorized_keys2")
    theirs.exit_code_file.write_text("0\n")
    for words in (("status",), ("history", "failures"), ("report", "--markdown"), ("db", "upgrade", theirs.name)):
        result = resihp(*words)
        assert isinstance(result.exception, LedgerError), (words, result.output)
        assert f"there is no record in {registry.place()} that you started this job" in str(result.exception)
        assert "If you trust it: --ledger URL" in str(result.exception)
    assert not (fresh_home / "authorized_keys2").exists()


def test_looking_at_an_unpacked_job_does_not_make_it_a_job_of_ones_own(
    unpacked: tuple[Job, Job], fresh_home: Path
) -> None:
    """`resihp jobs` notes how jobs ended. A note about an unpacked job would be the proof that the user started it."""
    theirs, _ = unpacked
    names(theirs, ledger=f"sqlite:///{fresh_home}/authorized_keys2")
    theirs.exit_code_file.write_text("0\n")
    for _ in range(2):
        assert resihp("jobs", "--all").exit_code == 0
        result = resihp("db", "upgrade", theirs.name)
        assert isinstance(result.exception, LedgerError), result.output
    assert not (fresh_home / "authorized_keys2").exists()


def test_unpacked_job_ends_no_other_jobs_journal(unpacked: tuple[Job, Job]) -> None:
    theirs, mine = unpacked
    before = mine.journal_file.read_bytes()
    names(theirs, journal=str(mine.journal_file))
    theirs.journal_copy.unlink()
    lock = take_lock(mine)
    assert lock is not None
    resihp("status")
    resihp("jobs")
    os.close(lock)
    assert mine.journal_file.read_bytes() == before


def test_unpacked_job_restores_its_journal_over_no_file(unpacked: tuple[Job, Job], fresh_home: Path) -> None:
    """A journal that has ended takes the place of one that is damaged, and any file is damaged as a journal."""
    theirs, _ = unpacked
    (fresh_home / "bashrc").write_text("umask 022\n")
    names(theirs, journal=str(fresh_home / "bashrc"))
    resihp("status")
    resihp("jobs")
    assert (fresh_home / "bashrc").read_text() == "umask 022\n"


def test_job_of_ones_own_that_was_moved_still_names_its_ledger(
    unpacked: tuple[Job, Job], fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, mine = unpacked
    url = f"sqlite:///{fresh_home}/shared.db"
    catch_up(url, mine.folder, mine.journal_file)
    names(mine, ledger=url)
    os.rename(mine.home, fresh_home / "moved")
    monkeypatch.setenv("RESIHP_HOME", str(fresh_home / "moved"))
    result = resihp("status", mine.name)
    assert result.exception is None or isinstance(result.exception, SystemExit), "its exit code is the job's"
    assert "abnormal" in result.output


def test_the_end_of_a_job_that_its_ledger_lacks_is_said(
    unpacked: tuple[Job, Job], capsys: pytest.CaptureFixture[str]
) -> None:
    _, mine = unpacked
    names(mine, ledger="postgresql://me:secret@db/ledger?service=x")
    own = ours(mine)
    assert own is not None
    assert finish_dead_job(own)
    warning = capsys.readouterr().err
    assert "resihp: warning: the end of job local-1 is not in its ledger: ledger postgresql" in warning
    assert "secret" not in warning


def test_a_job_that_the_registry_cannot_have_says_what_will_not_be_believed_of_it(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (fresh_home / "file").touch()
    monkeypatch.setenv("RESIHP_STATE", str(fresh_home / "file"))
    job = create_local_job()
    assert f"a ledger outside of {job.home} is shown only with --ledger URL" in capsys.readouterr().err
    monkeypatch.setenv("RESIHP_STATE", str(fresh_home / "state"))
    job.set_ledger(url := f"sqlite:///{fresh_home}/shared.db")
    assert job.ledger_url == url, "its supervisor can write it there later"
