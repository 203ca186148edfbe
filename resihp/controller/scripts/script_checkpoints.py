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

LOOK_EVERY_S, LOOK_SELDOM_S, LOOK_FACTOR = 15.0, 300.0, 10.0
"""Seconds between two searches while the script runs: ten times as long as the last search took, within these limits. A
search in a large folder is a load for a shared file system."""
RETRY_S = 1.0
"""Seconds after which a failed search is repeated while a start of the script waits for it."""
MAX_WAIT_S, MAX_FIRST_WAIT_S = 10.0, 60.0
"""How long a start of the script waits for a search, because a file system may hang: with and without a checkpoint that
is already known. The script would begin anew without one."""
MAX_REPORTED = 16
"""Number of reported paths that are remembered."""
MAX_ITERATION = 10**15
"""Largest iteration that a script may report."""
MAX_APART = 2
"""Two rounds that failed at most so many iterations apart failed at the same place."""


def is_ready(job: Job, since: float) -> bool:
    """Return whether the checkpoints that were complete at time `since` are known, or take too long to find. Asks for
    them if need be."""
    search = job.search
    if not _looks(job) or (search.known_at is not None and search.known_at >= since):
        return True
    has_just_failed = bool(search.error) and job.now - (search.answered_at or 0.0) < RETRY_S
    if search.asked_at is None and not has_just_failed:
        look(job)
    limit_s = MAX_WAIT_S if search.stored or search.known_at is not None else MAX_FIRST_WAIT_S
    if job.now - since <= limit_s:
        return False
    if not search.is_overdue:
        search.is_overdue = True
        remark = f"the newest known one is {search.stored[0].path}" if search.stored else "none is known"
        problem = search.error or "the file system does not answer"
        job.say("warning", f"the search for checkpoints has not succeeded within {limit_s:.0f} s: {problem}; {remark}")
    return True


def watch(job: Job) -> None:
    """Look for new checkpoints every few seconds."""
    search = job.search
    every_s = min(max(LOOK_EVERY_S, LOOK_FACTOR * search.took_s), LOOK_SELDOM_S)
    is_time = search.answered_at is None or job.now - search.answered_at >= every_s
    if _looks(job) and search.asked_at is None and is_time:
        look(job)


def look_at_once(job: Job) -> None:
    """Look for new checkpoints, though the next look is not due."""
    if _looks(job):
        look(job)


def look(job: Job) -> None:
    """Ask for a search; if one is under way, for another one after it."""
    search = job.search
    search.is_due = search.asked_at is not None
    if search.is_due:
        return
    checkpoints = job.record.checkpoints.by_path
    paths = search.reported if job.settings.finds_checkpoints else checkpoints.keys() | search.reported
    versions = frozenset(map(version_of, checkpoints.values()))
    job.do(api.FindCheckpoints(reported=tuple(sorted(paths)), fresh=frozenset(search.fresh), complete=versions))
    search.asked_at, search.fresh = job.now, set()


def reported(job: Job, report: ScriptSaved) -> None:
    """Note a checkpoint that the script has reported, and look at it."""
    search, reported_paths = job.search, job.search.reported
    if not report.path.isprintable():
        return  # no variable or message could hold it
    if report.path in search.fresh and reported_paths.get(report.path) == report.iteration:
        return  # another rank has reported it
    reported_paths.pop(report.path, None)
    is_possible = report.iteration is not None and 0 <= report.iteration <= MAX_ITERATION
    reported_paths[report.path] = report.iteration if is_possible else None
    search.fresh.add(report.path)
    while len(reported_paths) > MAX_REPORTED:
        search.fresh.discard(oldest := next(iter(reported_paths)))
        del reported_paths[oldest]
    look(job)


def found(job: Job, event: api.CheckpointsFound) -> bool:
    """Take the result of a search; return whether the newest checkpoint that can be trusted is new."""
    search, is_first = job.search, job.search.known_at is None
    asked_at = job.now if search.asked_at is None else search.asked_at
    search.answered_at, search.took_s, search.asked_at, search.is_overdue = job.now, job.now - asked_at, None, False
    if search.is_due:
        look(job)
    if event.error and event.error != search.error:
        job.say("warning", f"[checkpoint] latest: checkpoints could not be looked for: {event.error}")
    search.error = event.error
    if event.error:
        return False
    if search.stored and not event.checkpoints:
        job.say("warning", f"no checkpoint is left: {search.stored[0].path} and those before it are gone")
    search.known_at, search.stored = asked_at, event.checkpoints
    if is_first:
        search.earlier = {stored.version for stored in event.checkpoints if not _is_news(job, stored)}
    old = {version_of(checkpoint) for checkpoint in job.record.checkpoints.by_path.values()} | search.earlier
    news = [stored for stored in event.checkpoints if stored.version not in old]
    for stored in reversed(news):
        _log(job, stored)
    return _newest_trusted(job) in news


def choose(job: Job, ended: RestartDecided | None = None, reached: int = 0) -> CheckpointCommitted | None:
    """Return the checkpoint from which the next round resumes; None if there is none. `ended`: the decision that ended
    the round before it, if any; `reached`: the last iteration of that round, 0 if not known."""
    if ended is not None:
        _judge(job, ended, reached)
    newest = _newest_trusted(job) or next(iter(job.search.stored), None)
    if newest is None:
        return None
    checkpoint = job.record.checkpoints.by_path.get(newest.path)
    is_known = checkpoint is not None and version_of(checkpoint) == newest.version
    return checkpoint if is_known else _log(job, newest)


def distrust_since(job: Job, iteration: int) -> None:
    """Distrust the checkpoints that were saved after the loss had become bad in an iteration."""
    checkpoints = job.record.checkpoints
    for checkpoint in [*checkpoints.by_path.values()]:
        if version_of(checkpoint) in checkpoints.saved_in_round and checkpoint.iteration >= iteration:
            _distrust(job, checkpoint, f"it was saved after the loss had become bad in iteration {iteration}")


def last_before(job: Job, iteration: int) -> StoredCheckpoint | None:
    """Return the newest trusted checkpoint on disk that was saved before an iteration; None if there is none."""
    return next(
        (stored for stored in job.search.stored if _is_trusted(job, stored) and _iteration(job, stored) < iteration),
        None,
    )


def _iteration(job: Job, stored: StoredCheckpoint) -> int:
    """Return the last iteration in a checkpoint on disk; 0 if it is not known."""
    checkpoint = job.record.checkpoints.by_path.get(stored.path)
    if checkpoint is not None and version_of(checkpoint) == stored.version:
        return checkpoint.iteration
    return stored.iteration or 0


def _looks(job: Job) -> bool:
    is_reported = bool(job.search.reported or job.record.checkpoints.by_path)
    return not job.has_declared and (job.settings.finds_checkpoints or is_reported)


def _newest_trusted(job: Job) -> StoredCheckpoint | None:
    return next((stored for stored in job.search.stored if _is_trusted(job, stored)), None)


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
    if job.counter.losses.is_hopeless:
        distrust_since(job, job.counter.losses.bad_since)
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
