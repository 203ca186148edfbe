"""Decide whether an error that most ranks share is tried again, and how long to wait for other ranks with the same
error. Called by `early_losses`.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.controller.fail_stop import failures, own_causes
from resihp.controller.rounds import restarts
from resihp.controller.rounds.reasons import is_same
from resihp.controller.state.job import Job

GRACE_S = 3.0
"""Seconds that the controller waits, after an exception of one rank, for the same exception on other ranks and for the
end of the process."""
RESTART_GRACE_S = 1.0
"""The same for a script that can be started again, which costs less than the wait."""


def grace_s(job: Job, failed: Sequence[int]) -> float:
    """Return how long to wait for other ranks to fail as these `failed` ranks have. If the script can be started again
    and one of them was killed, there is nothing to wait for but the end of others that resihp kills as well."""
    if restarts.obstacle(job, ""):
        return GRACE_S
    killed = any(rank in job.members and own_causes.was_killed(job.members[rank]) for rank in failed)
    is_killing = any(job.members[rank].fenced for rank in job.live)
    return 0.0 if killed and not is_killing else RESTART_GRACE_S


def begin(job: Job, ranks: Sequence[int], reason: str) -> bool:
    """Start a script again that failed in the same way on most ranks; return whether that was decided. An error of the
    script itself is tried again only if the script has made progress before: once, or after further iterations."""
    has_printed_more = job.record.committed > job.record.committed_before
    recurs = not has_printed_more and is_same(reason, job.record.last_restart_reason)
    may_pass = own_causes.may_pass(job, ranks[0]) or (restarts.has_progressed(job, reason) and not recurs)
    if job.has_declared or not may_pass or restarts.obstacle(job, reason):
        return False
    failures.explain_early(job)
    return restarts.begin(job, reason)
