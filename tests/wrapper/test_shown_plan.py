"""Which plan a job is shown with: the one in effect, whoever is asked; never one that was decided and given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.db.reading.queries import Reader
from resihp.db.writing.catch_up import catch_up
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal, journal_file
from resihp.wrapper.job_files.registered import note_end
from resihp.wrapper.job_folder import create_local_job
from resihp.wrapper.sinks.figures import followed
from resihp.wrapper.sinks.progress_file import ProgressFileWriter
from tests.db.conftest import BEGAN, started
from tests.waiting import until

LAYOUTS = {epoch: Layout.uniform(tp=1, pp=pp, dp=dp, layers=4) for epoch, (pp, dp) in enumerate(
    [(2, 2), (2, 1), (1, 2), (1, 1)], 1
)}  # fmt: skip


def decided(epoch: int) -> journal.PlanDecided:
    layout = LAYOUTS[epoch]
    plan = Plan(epoch=epoch, layout=layout, assignment=spread(4, len(layout.replicas)))
    return journal.PlanDecided(plan=plan, next_iteration=4, action="redo", finish=None, reason="")


def effect(epoch: int) -> journal.PlanInEffect:
    return journal.PlanInEffect(epoch=epoch)


def refused(epoch: int) -> journal.PlanRefused:
    return journal.PlanRefused(epoch=epoch, rank=1, reason="no")


def withdrawn(epoch: int) -> journal.PlanWithdrawn:
    return journal.PlanWithdrawn(epoch=epoch, reason="the job is to stop")


ENDED = journal.JobEnded(exit_code=130, state="cancelled", reason="INT")
IN_EFFECT = (decided(1), effect(1))


@pytest.mark.parametrize(
    ("entries", "shown"),
    [
        pytest.param((*IN_EFFECT, decided(2), withdrawn(2), ENDED), 1, id="withdrawn"),
        pytest.param((*IN_EFFECT, decided(2), decided(3), refused(3)), 1, id="overtaken-then-refused"),
        pytest.param((*IN_EFFECT, decided(2), ENDED), 1, id="on-its-way-as-the-job-ends"),
        pytest.param((*IN_EFFECT, decided(2), decided(3), effect(3)), 3, id="overtaken-then-in-effect"),
        pytest.param((decided(1),), 1, id="the-first-on-its-way"),
        pytest.param((decided(1), refused(1), decided(2)), 2, id="the-first-refused"),
    ],
)
def test_everybody_shows_the_plan_in_effect(
    fresh_home: Path, tmp_path: Path, entries: tuple[journal.AnyEntry, ...], shown: int
) -> None:
    job = create_local_job()
    written = journal_file.Journal(job.journal_file, sync=False)
    records = [written.append(entry, BEGAN + n) for n, entry in enumerate((started(job.name), *entries))]
    written.close()
    layout = LAYOUTS[shown]

    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    catch_up(url, job.folder, job.journal_file)
    with Reader.open(url) as reader:
        [plan] = reader.shown_plan(reader.jobs()[0]["id"])
        outcomes = {row["epoch"]: row["outcome"] for row in reader.rows("plans", reader.jobs()[0]["id"])}
    assert (plan["epoch"], plan["description"]) == (shown, layout.describe())
    for entry in entries:
        if isinstance(entry, journal.PlanWithdrawn):
            assert outcomes[entry.epoch] == "withdrawn"

    figures = followed(records)
    plan_followed = figures.history.shown_plan
    assert plan_followed is not None
    assert plan_followed.layout == layout
    assert figures.epoch == (shown if effect(shown) in entries else 0)

    # A writer that takes over has read all records before its first file.
    progress = ProgressFileWriter(job, records)
    until(lambda: job.progress(job.read().created_at))
    progress.close(0.0)
    file = job.progress(job.read().created_at)
    assert file is not None
    assert file.layout == layout.describe()

    known = note_end(job)
    assert known is not None
    assert known.layout == layout.describe()
