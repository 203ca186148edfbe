"""How far a job is, written into its comment in Slurm now and then, behind what somebody else has put there.

Once a refusal is known, no more is written. What is written is `wrapper.slurm_tasks.job_comment`'s. Called by
`wrapper.slurm_tasks.desk`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from resihp.controller import interface as api
from slurm.client import commented
from slurm.errors import SlurmError, SlurmRefusedError
from slurm.rate_limited import Polite
from wrapper.slurm_tasks.agenda import Done
from wrapper.slurm_tasks.job_comment import JobComment
from wrapper.slurm_tasks.own_job import OwnJob

COMMENT_EVERY_S = 600.0
COMMENT_AGAIN_S = 60.0
"""After a node was lost, since the last one; of the end Slurm is told at once."""

_log = logging.getLogger("slurm")


class CommentWriter:
    """`last_said`: nothing is left to be written."""

    def __init__(
        self,
        comment: JobComment,
        job_id: str,
        slurm: Polite,
        own_job: OwnJob,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self.last_said = False
        self._comment = comment
        self._job_id = job_id
        self._slurm = slurm
        self._own_job = own_job
        self._clock = clock
        self._now = now
        self._theirs: str | None = None
        """What the job's comment says, as it was last seen; None if it never was."""
        self._commented_at = float("-inf")

    def pause_s(self) -> float:
        """Until the next one, when a node was lost or the job has ended."""
        return 0.0 if self._comment.ended else max(0.0, self._commented_at + COMMENT_AGAIN_S - self._clock())

    def say(self) -> Done:
        """Write it, unless all has been said."""
        if self.last_said:
            return Done()
        told: list[api.AnyEvent] = []
        self.last_said = self._comment.ended
        self._commented_at = self._clock()
        try:
            if self._theirs is None or not self.last_said:  # the end waits for no question
                view = self._slurm.job(self._job_id)
                self._theirs = None if view is None else view.comment
                told += [] if view is None else self._own_job.tell_time_left(view.seconds_left)
            if self._theirs is not None:
                self._slurm.comment(self._job_id, commented(self._theirs, self._comment.text(self._now())))
        except SlurmRefusedError as error:
            _log.warning("comment: %s", error)
            self.last_said = True
            return Done(told)
        except SlurmError as error:
            _log.warning("comment: %s", error)
        return Done(told, [("comment", COMMENT_EVERY_S, self.say)])
