"""Computes a job's progress from its last iterations and its goal: how far it is, whether it advances, and when it will
be done. Pure.

`status` and `jobs` show it for a running job. It decides nothing: a job that looks stuck is only shown with a question
mark, since only the supervisor can tell, and acts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.wrapper.output.render import duration

if TYPE_CHECKING:
    from resihp.wrapper.job_files.contents import ProgressFile

Row = dict[str, Any]

RECENT_ITERATIONS = 20
"""Number of last iterations from which the pace is computed."""
AVERAGED_PAUSES = 6
"""Number of neighbouring pauses that are averaged, because several iterations may be committed at once, without a pause
between them."""
STUCK_FACTOR = 5
"""A job looks stuck after this many times the longest of its last pauses. Pauses include evaluations, checkpoints and
recoveries."""
MIN_STUCK_S = 60.0
NO_ITERATION_KNOWN = (
    "no iteration is known; of a script without resihp.Trainer, resihp knows those that it prints ([progress] pattern)"
)
"""Words for a job without committed iterations, which may have had some."""


class Goal(msgspec.Struct, frozen=True):
    """A job's declared goal: its last iteration, None before it is declared, and the iteration from which it
    resumes."""

    iterations: int | None = None
    resume_from: int = 0


def goal(model: str | None) -> Goal:
    """Return a job's goal from the column `model` of its row in the ledger."""
    try:
        return msgspec.json.decode(model or "{}", type=Goal)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return Goal()


def progress(goal: Goal, iterations: Sequence[Row], now: datetime, *, running: bool) -> Row:
    """Return the progress of a job: `iteration`, `loss`, `target`, `last_iteration_at` and `tokens_per_second`; for a
    running job also `seconds_since_iteration`, `eta_seconds` and `stuck`.

    `iterations`: the last committed iterations, oldest first. Before the first one, `iteration` is the one from which
    the job resumes. Tokens per second and remaining time follow from the pace of the last iterations, pauses included,
    except for an unusual pause.
    """
    last = iterations[-1] if iterations else None
    recent = iterations[-RECENT_ITERATIONS:]
    pace_s = _pace_of(recent)
    tokens = statistics.fmean(row["tokens"] for row in recent) if recent else 0.0
    values: Row = {
        "iteration": last["iteration"] if last else goal.resume_from,
        "loss": last["loss"] if last else None,
        "target": goal.iterations,
        "last_iteration_at": last["finished_at"] if last else None,
        "seconds_since_iteration": None,
        "tokens_per_second": tokens / pace_s if tokens and pace_s else None,
        "eta_seconds": None,
        "stuck": False,
    }
    if not running or last is None:
        return values
    age_s = max((now - last["finished_at"]).total_seconds(), 0.0)
    values["seconds_since_iteration"] = age_s
    remaining = (values["target"] or 0) - values["iteration"]
    if remaining > 0:
        values["stuck"] = age_s > longest_s(recent)
        values["eta_seconds"] = None if pace_s is None or values["stuck"] else max(remaining * pace_s - age_s, 0.0)
    return values


def recent_rows(file: ProgressFile) -> list[Row]:
    """Return the last iterations in a progress file as rows. Raises ValueError, OverflowError or OSError for a time
    that the calendar cannot express."""
    return [
        {**msgspec.structs.asdict(iteration), "finished_at": datetime.fromtimestamp(iteration.finished_at, UTC)}
        for iteration in file.recent
    ]


def progress_in(file: ProgressFile, now_s: float) -> Row | None:
    """Return the progress of a running job, and its nodes and layout, from its progress file; None for a file with
    impossible times."""
    trains = Goal(iterations=file.target, resume_from=file.resumed_from)
    try:
        figures = progress(trains, recent_rows(file), datetime.fromtimestamp(now_s, UTC), running=True)
    except (ValueError, OverflowError, OSError):
        return None
    return {
        **figures,
        "stuck": figures["stuck"] and not file.redone,
        "nodes": file.nodes,
        "gpus_per_node": file.gpus_per_node,
        "layout": file.layout or None,
    }


def longest_s(recent: Sequence[Row]) -> float:
    """Return the seconds since the last commit after which a job with these last iterations looks stuck."""
    usual_s = max(_pauses(recent), default=(recent[-1]["seconds"] if recent else None) or 0.0)
    return max(MIN_STUCK_S, STUCK_FACTOR * usual_s)


def _pace_of(recent: Sequence[Row]) -> float | None:
    """Return the seconds from one iteration to the next, pauses included; None before the first iteration."""
    if len(recent) < 2:
        return recent[0]["seconds"] if recent else None
    paces = [pause / _iterations(a, b) for pause, (a, b) in zip(_pauses(recent), pairwise(recent), strict=True)]
    if any(row["tokens"] for row in recent):
        return _pace_s(paces)
    # as a script has printed them, which are read together, once a second
    return max(_pace_s(paces), statistics.median(row["seconds"] or 0.0 for row in recent))


def _pace_s(paces: Sequence[float]) -> float:
    """Return the pace in seconds: the median of the means of neighbouring iterations."""
    width = min(AVERAGED_PAUSES, (len(paces) + 1) // 2)
    return statistics.median(statistics.fmean(paces[n : n + width]) for n in range(len(paces) - width + 1))


def _iterations(before: Row, row: Row) -> int:
    """Return the number of iterations that a row stands for: a script may print only every tenth."""
    return max(int(row["iteration"]) - int(before["iteration"]), 1)


def _pauses(recent: Sequence[Row]) -> list[float]:
    return [(b["finished_at"] - a["finished_at"]).total_seconds() for a, b in pairwise(recent)]


def ago(seconds: float) -> str:
    """Format the time since an event: `3 s ago`, `4 min 05 s ago`."""
    return f"{seconds:.0f} s ago" if seconds < 59.5 else f"{duration(seconds)} ago"


def of_target(values: Mapping[str, Any]) -> str:
    """Format an iteration with the target: `36 of 60`, or `36` without a target."""
    last = values.get("target")
    return f"{values['iteration']} of {last}" if last else str(values["iteration"])
