"""What a job that Slurm starts again may still have drained, and which nodes died under it."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.errors import OwnershipError
from resihp.record.journal import DrainDecided, NodeJoined
from resihp.record.journal_file import Journal
from resihp.wrapper.commands.earlier_runs import EarlierRuns, of
from resihp.wrapper.config.run_spec import RunRequest
from tests.wrapper.commands.test_resume import batch, checkpoint, start

__all__ = ["batch"]  # the fixture: in the batch script of job 77


def decides(request: RunRequest, *decisions: tuple[str, str, str]) -> None:
    """The run's journal, with what it decided: node, measure and grounds."""
    journal = Journal(request.of_job.journal_file, sync=False)
    journal.append(NodeJoined(node="n1", host="n1", devices=2), 1.0)
    for number, (node, measure, grounds) in enumerate(decisions, 1):
        entry = DrainDecided(drain=number, node=node, failure=number, reason="", measure=measure, grounds=grounds)  # type: ignore[arg-type]
        journal.append(entry, 2.0)
    journal.close()


def test_a_job_that_is_run_again_has_what_is_left_of_its_drains(batch: Path) -> None:
    first = start()
    assert (first.settings.drains_left, first.settings.died_before) == (2, ())
    decides(first, ("n3", "drain", "hardware"), ("n4", "exclude", "died"), ("n5", "exclude", "agent"))
    checkpoint(first, 10)
    again = start(1)
    assert (again.settings.drains_left, again.settings.died_before) == (1, ("n4",))
    decides(again, ("n4", "drain", "died again"))
    checkpoint(again, 20)
    third = start(2)
    assert (third.settings.drains_left, third.settings.died_before) == (0, ("n4",))
    decides(third)
    checkpoint(third, 30)
    assert start(3).settings.drains_left == 0, "never less"


def test_a_run_whose_journal_is_lost_may_have_used_all(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start()
    assert start(1).settings.drains_left == 0
    assert "77: its journal cannot be read; assuming that it had 2 nodes drained" in capsys.readouterr().err


def test_a_run_file_that_others_could_have_written_ends_the_start(batch: Path) -> None:
    """How many nodes the run had drained is not guessed from it."""
    start().of_job.run_file.chmod(0o666)
    with pytest.raises(OwnershipError, match="others"):
        of("77", print)


def test_other_jobs_do_not_count(batch: Path) -> None:
    decides(start(), ("n3", "drain", "hardware"))
    assert of("78", print) == EarlierRuns()
