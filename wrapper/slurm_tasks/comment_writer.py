"""Writes a job's progress into its comment in Slurm at intervals, behind the text that others have written there.

Stops after Slurm has refused once. `resihp.wrapper.slurm_tasks.job_comment` makes the text. Called by
`resihp.wrapper.slurm_tasks.desk`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from resihp.controller import interface as api
from resihp.slurm.client import commented
from resihp.slurm.errors import SlurmError, SlurmRefusedError
from resihp.slurm.rate_limited import Polite
from resihp.wrapper.slurm_tasks.agenda import Done
from resihp.wrapper.slurm_tasks.job_comment import JobComment
from resihp.wrapper.slurm_tasks.own_job import OwnJob

COMMENT_EVERY_S = 600.0
MIN_COMMENT_PAUSE_S = 60.0
"""Shortest pause before the comment about the first iteration or a lost node. The comment about the job's end is
written at once."""

_log = logging.getLogger("slurm")


class CommentWriter:
    """Writer of one job's comment. `is_finished`: the last comment was written, or Slurm has refused."""

    def __init__(
        self,
        comment: JobComment,
        job_id: str,
        slurm: Polite,
        own_job: OwnJob,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self.is_finished = False
        self._comment = comment
        self._job_id = job_id
        self._slurm = slurm
        self._own_job = own_job
        self._clock = clock
        self._now = now
        self._theirs: str | None = None
        """The comment in Slurm as last seen; None if it was never seen."""
        self._commented_at = float("-inf")

    def pause_s(self) -> float:
        """Return the seconds until the comment about the first iteration, a lost node or the job's end may be
        written."""
        return 0.0 if self._comment.ended else max(0.0, self._commented_at + MIN_COMMENT_PAUSE_S - self._clock())

    def write(self) -> Done:
        """Write the comment, unless the last one was written, and plan the next one."""
        if self.is_finished:
            return Done()
        events: list[api.AnyEvent] = []
        self.is_finished = self._comment.ended
        self._commented_at = self._clock()
        try:
            if self._theirs is None or not self.is_finished:  # at the end, the comment as last seen will do
                view = self._slurm.job(self._job_id)
                self._theirs = None if view is None else view.comment
                events += [] if view is None else self._own_job.time_left_events(view.seconds_left)
            if self._theirs is not None:
                self._slurm.comment(self._job_id, commented(self._theirs, self._comment.text(self._now())))
        except SlurmRefusedError as error:
            _log.warning("comment: %s", error)
            self.is_finished = True
            return Done(events)
        except SlurmError as error:
            _log.warning("comment: %s", error)
        return Done(events, [("comment", COMMENT_EVERY_S, self.write)])
