"""Start a script again from an older checkpoint when the losses that it prints show that its state is bad.

A loss is bad if it is not finite, or if it is far above its history after the script has resumed from a checkpoint.
Once many losses in a row are bad, going on is worthless, and the script is started again. This needs a script that
resumes from the checkpoint that it is given, and a checkpoint that is older than the bad losses; else the user is
warned. Which checkpoint follows is decided by `script_checkpoints`. Called by `printed_iterations`.
"""

from __future__ import annotations

import math
import statistics

from resihp.controller.fail_stop import incidents
from resihp.controller.rounds import restarts
from resihp.controller.scripts import script_checkpoints
from resihp.controller.state.incidents import Incident
from resihp.controller.state.iterations import LossWatch
from resihp.controller.state.job import Job

MAX_BAD = 20
"""Number of bad losses in a row after which a script is started again."""
MIN_HISTORY = 20
"""Number of losses before a restart that make a history."""
SPREAD_FACTOR, LEVEL_FACTOR = 5.0, 1.5
"""A loss is far above its history if it exceeds the usual one by more than five times as much as the largest one did,
and is more than half as large again."""


def take(job: Job, iteration: int, loss: float) -> None:
    """Take a loss that the script has printed."""
    watch = job.counter.losses
    if watch.round != job.record.round:
        watch.begin_round(job.record.round, MIN_HISTORY)
    if not _is_bad(job, watch, loss):
        watch.good(job.counter.rank, loss)
        return
    watch.bad(iteration)
    if watch.bad_count >= MAX_BAD and not watch.is_refused:
        if not watch.is_hopeless:
            watch.is_hopeless = True
            script_checkpoints.look_at_once(job)  # there may be a checkpoint since the last look
        _start_again(job, watch, loss)


def _is_bad(job: Job, watch: LossWatch, loss: float) -> bool:
    if not math.isfinite(loss):
        return job.counter.rank in watch.finite_ranks  # a rank without the loss may print NaN all the time
    if job.record.checkpoints.resumed is None or not watch.history or watch.has_recovered:
        return False
    usual, largest = statistics.median(watch.history), max(watch.history)
    return loss > usual + SPREAD_FACTOR * (largest - usual) and loss > LEVEL_FACTOR * abs(usual)


def _start_again(job: Job, watch: LossWatch, loss: float) -> None:
    """Start the script again from a checkpoint before the bad losses, if there is one."""
    since = watch.bad_since
    script_checkpoints.distrust_since(job, since)
    is_older = script_checkpoints.last_before(job, since) is not None
    if not job.settings.takes_checkpoint or not is_older or job.stage != "gathering":
        return
    if math.isfinite(loss):
        usual, largest = statistics.median(watch.history), max(watch.history)
        reason = f"the loss is far above its history since iteration {since}: {loss:.4g}"
        reason += f", before the restart {usual:.4g}, at most {largest:.4g}"
    else:
        reason = f"the loss is not finite since iteration {since}"
    if not restarts.obstacle(job, reason):
        job.incidents.append(
            Incident(
                kind="program",
                component="script",
                cause=reason,
                evidence="",
                found_at=job.now,
                iteration=since,
                epoch=job.epoch,
            )
        )
        incidents.log_incidents(job)
    watch.is_refused = not restarts.begin(job, reason, is_fruitless=True)
