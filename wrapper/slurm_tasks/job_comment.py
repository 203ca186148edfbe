"""The text of a job's comment in Slurm: its progress, its lost nodes, and at the end its outcome.

`after` and `comment_text` compute the text from the journal alone. `JobComment` listens to the journal
(`resihp.wrapper.sinks.fanout`) and signals important news. `resihp.wrapper.slurm_tasks.comment_writer` decides how
often to write. Slurm itself knows only how its own job ended: a job that was completed under a successor counts as
cancelled there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from resihp.record import journal
from resihp.slurm.client import Slurm, commented
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.exit_codes import REQUEUE_REQUESTED


@dataclass(frozen=True)
class JobProgress:
    """Progress of a job. `iteration`: the last committed iteration, including those of earlier runs; 0 for none."""

    iteration: int = 0
    loss: float | None = None
    nodes_lost: int = 0
    ended: journal.JobEnded | None = None


def after(course: JobProgress, entry: journal.AnyEntry) -> JobProgress:
    match entry:
        case journal.IterationCommitted():
            loss = None if entry.outcome.loss_is_unknown else entry.outcome.loss
            return replace(course, iteration=entry.outcome.iteration, loss=loss)
        case journal.RollbackDecided():
            return replace(course, iteration=entry.iteration)
        case journal.NodeLost():
            return replace(course, nodes_lost=course.nodes_lost + 1)
        case journal.JobEnded():
            return replace(course, ended=entry)
        case _:
            return course


def comment_text(course: JobProgress, run: int, at: float) -> str:
    """Return a text such as `iteration 1200, loss 2.3100, 1 node lost, run 2 (2026-11-22 09:12 UTC)`. `run` counts from
    1. `at`: current time, seconds since 1970.

    The reason is appended if the outcome is not "completed".
    """
    parts = [f"iteration {course.iteration}"] if course.iteration else ["no iteration"]
    if course.loss is not None:
        parts.append(f"loss {course.loss:.4f}")
    if course.nodes_lost:
        parts.append(f"{course.nodes_lost} node{'s' if course.nodes_lost > 1 else ''} lost")
    if run > 1:
        parts.append(f"run {run}")
    if course.ended is not None:
        parts.insert(0, outcome(course.ended))
    stamp = f"({datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC)"
    why = f": {course.ended.reason}" if course.ended is not None and course.ended.state != "completed" else ""
    return f"{', '.join(parts)} {stamp}{why}"


def outcome(ended: journal.JobEnded) -> str:
    """Return the outcome of a run as text: `completed`, `to be run again`, `failed with 5`, ..."""
    if ended.exit_code == REQUEUE_REQUESTED:
        return "to be run again"
    match ended.state:
        case "failed":
            return f"failed with {ended.exit_code}"
        case "abnormal":
            return "ended abnormally"
        case state:
            return state


class JobComment:
    """Listener of the journal that keeps the comment up to date. `changed` is called for news to write soon: the first
    iteration, a lost node, or the job's end."""

    def __init__(self, request: RunRequest, past: Sequence[journal.Record] = ()) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._run = request.restart_count + 1
        self._course = JobProgress(iteration=request.begins_at)
        for record in past:
            self._course = after(self._course, record.entry)

    @property
    def ended(self) -> bool:
        return self._course.ended is not None

    def text(self, at: float) -> str:
        """Return the current text for time `at`. May be called from another thread."""
        return comment_text(self._course, self._run, at)

    def submit(self, record: journal.Record) -> None:
        before, self._course = self._course, after(self._course, record.entry)
        is_first = not before.iteration and self._course.iteration > 0
        if is_first or isinstance(record.entry, journal.NodeLost | journal.JobEnded):
            self.changed()

    def close(self, deadline: float) -> None:
        pass


def write_last_comment(request: RunRequest, records: Sequence[journal.Record], slurm: Slurm) -> None:
    """Write the last comment of a job without a live supervisor. Raises SlurmError."""
    assert request.slurm is not None
    view = slurm.job(request.slurm.job_id)
    if view is not None and request.slurm.comment:
        slurm.comment(view.id, commented(view.comment, JobComment(request, records).text(time.time())))
