"""Know the checkpoints of a script that does not declare a model, and choose the one from which it resumes.

A checkpoint is known because the script reports it (`resihp.checkpointed`), or because it matches `[checkpoint]
latest`. The supervisor looks for them on disk and leaves out those that are not complete. The newest one is chosen,
unless it is distrusted: it is trusted by what came of it. A checkpoint is distrusted once two rounds that resumed from
it have ended with the same failure at the same place, before they completed another one. The same failure from an older
checkpoint is then enough to distrust that one as well. Failures of hardware do not count, and the last checkpoint that
is left is never distrusted, because a script without a checkpoint would begin anew.

Called by `controller` (answers, reports), `watchdog` (regular searches), `startup` and `restarts`.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.controller import interface as api
from resihp.controller.rounds.reasons import is_same
from resihp.controller.state.job import Job
from resihp.protocol.messages import ScriptSaved
from resihp.record.describe import explain
from resihp.record.journal import CheckpointCommitted, CheckpointDistrusted, RestartDecided
from resihp.record.scripts.checkpoints import RoundEnd, StoredCheckpoint, version_of

LOOK_EVERY_S = 15.0
"""Seconds between two searches while the script runs."""
MAX_WAIT_S = 10.0
"""How long a start of the script waits for a search: a file system may hang."""
MAX_REPORTED = 16
"""Number of reported paths that are remembered."""
MAX_APART = 2
"""Two rounds that failed at most so many iterations apart failed at the same place."""


def is_ready(job: Job, since: float) -> bool:
    """Return whether the checkpoints that were complete at time `since` are known, or take too long to find. Asks for
    them if need be."""
    search = job.search
    if not _looks(job) or (search.known_at is not None and search.known_at >= since):
        return True
    if search.asked_at is None:
        look(job)
    return job.now - since > MAX_WAIT_S


def watch(job: Job) -> None:
    """Look for new checkpoints every few seconds."""
    search = job.search
    last_at = search.asked_at if search.asked_at is not None else search.known_at
    if _looks(job) and (last_at is None or job.now - last_at >= LOOK_EVERY_S):
        look(job)


def look(job: Job) -> None:
    """Ask for a search; if one is under way, for another one after it."""
    search = job.search
    search.is_due = search.asked_at is not None and job.now - search.asked_at <= MAX_WAIT_S
    if search.is_due:
        return
    search.asked_at = job.now
    job.do(api.FindCheckpoints(reported=tuple(job.search.reported)))


def reported(job: Job, report: ScriptSaved) -> None:
    """Note a checkpoint that the script has reported, and look at it."""
    reported_paths = job.search.reported
    reported_paths.pop(report.path, None)
    reported_paths[report.path] = report.iteration
    while len(reported_paths) > MAX_REPORTED:
        del reported_paths[next(iter(reported_paths))]
    look(job)


def found(job: Job, event: api.CheckpointsFound) -> bool:
    """Take the result of a search; return whether a new checkpoint was found."""
    search, is_first = job.search, job.search.known_at is None
    search.known_at, search.asked_at = search.asked_at or job.now, None
    if search.is_due:
        look(job)
    if event.error and event.error != search.error:
        job.say("warning", f"[checkpoint] latest: checkpoints could not be looked for: {event.error}")
    search.error = event.error
    if event.error:
        return False
    search.stored = event.checkpoints
    if is_first:
        search.earlier = {stored.version for stored in event.checkpoints if not _is_news(job, stored)}
    old = {version_of(checkpoint) for checkpoint in job.record.checkpoints.by_path.values()} | search.earlier
    news = [stored for stored in event.checkpoints if stored.version not in old]
    for stored in reversed(news):
        _log(job, stored)
    return bool(news)


def choose(job: Job, ended: RestartDecided | None = None, reached: int = 0) -> CheckpointCommitted | None:
    """Return the checkpoint from which the next round resumes; None if there is none. `ended`: the decision that ended
    the round before it, if any; `reached`: the last iteration of that round, 0 if not known."""
    if ended is not None:
        _judge(job, ended, reached)
    trusted = [stored for stored in job.search.stored if _is_trusted(job, stored)]
    newest = next(iter(trusted or job.search.stored), None)
    if newest is None:
        return None
    checkpoint = job.record.checkpoints.by_path.get(newest.path)
    is_known = checkpoint is not None and version_of(checkpoint) == newest.version
    return checkpoint if is_known else _log(job, newest)


def _looks(job: Job) -> bool:
    return not job.has_declared and (job.settings.finds_checkpoints or bool(job.search.reported))


def _is_news(job: Job, stored: StoredCheckpoint) -> bool:
    """Return whether a checkpoint in the first answer was completed by this job: reported by the script, or, after a
    take-over, newer than those that the record has."""
    last = max((checkpoint.modified or 0.0 for checkpoint in job.record.checkpoints.by_path.values()), default=None)
    return stored.path in job.search.reported or (last is not None and stored.modified > last)


def _log(job: Job, stored: StoredCheckpoint) -> CheckpointCommitted:
    """Journal a checkpoint. Without a number in its name, its iteration is the last one that was printed."""
    iteration = job.search.reported.get(stored.path)
    if iteration is None:
        iteration = stored.iteration
    if iteration is None:
        iteration = job.counter.iteration or job.record.committed
    entry = CheckpointCommitted(
        iteration=iteration, folder=stored.path, bytes=stored.bytes, seconds=0.0, modified=stored.modified
    )
    job.log(entry)
    job.checkpointed = max(job.checkpointed, iteration)
    bad_since = job.counter.losses.bad_since
    if bad_since and iteration >= bad_since:
        _distrust(job, entry, f"it was saved after the loss had become bad in iteration {bad_since}")
    return entry


def _is_trusted(job: Job, stored: StoredCheckpoint) -> bool:
    return stored.version not in job.record.checkpoints.distrusted


def _judge(job: Job, ended: RestartDecided, reached: int) -> None:
    """Distrust the checkpoint of the round that has ended, if too many rounds ended badly after resuming from it."""
    checkpoint = job.record.checkpoints.resumed
    if checkpoint is None or not job.settings.takes_checkpoint:
        return
    ends = job.record.checkpoints.ends(ended, reached)
    others = [stored for stored in job.search.stored if stored.version != version_of(checkpoint)]
    if not any(_is_trusted(job, stored) for stored in others):
        return
    if job.record.last_failed not in ("node", "device") and _is_to_blame(job, ends):
        _distrust(job, checkpoint, "it led to the same failure again", failure=ended.reason)


def _is_to_blame(job: Job, ends: Sequence[RoundEnd]) -> bool:
    if not ends:
        return False
    failures = (failure for failure in job.record.checkpoints.distrusted.values() if failure)
    if any(is_same(ends[-1].reason, failure) for failure in failures):
        return True
    return len(ends) > 1 and _ended_alike(ends[-1], ends[-2])


def _ended_alike(end: RoundEnd, before: RoundEnd) -> bool:
    """Return whether two rounds ended with the same failure, and at the same place as far as that is known."""
    is_known = bool(end.reached and before.reached) and not end.reason.startswith("the loss ")
    is_near = not is_known or abs(end.reached - before.reached) <= MAX_APART
    return is_near and is_same(end.reason, before.reason)


def _distrust(job: Job, checkpoint: CheckpointCommitted, reason: str, failure: str = "") -> None:
    path, modified = version_of(checkpoint)
    entry = CheckpointDistrusted(folder=path, modified=modified, reason=reason, failure=failure)
    job.log(entry)
    job.say("warning", explain(entry))
