"""How long it took from each failure until training was back: noticing, and what came after. Reads what it needs of a
ledger for failures whose rows are given, of one job or many; `db.reading.reader` asks it.

`seconds_to_recover` is from the moment of the failure to the first commit after it. What the moment is, where nobody
can know it, `db.reading.costs.goodput.noticed_after_s` says; of what is slow it is the end of the last healthy
iteration. `noticed_after_seconds` of it went by until it was noticed, and `seconds_without_noticing` from there: what
`reconfigurations` splits into phases. Usual is the median of up to `RECENT` iterations before; where there are more
than `MANY` failures the mean, which the database reckons.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, FromClause, Select, and_, case, func, select, tuple_

from db.models import EventRow, FailureRow, IterationRow, ReconfigurationRow, SuspicionRow
from db.reading.costs.goodput import RECENT, is_leaderless, noticed_after_s

Row = dict[str, Any]
Fetch = Callable[[Select[Any]], list[Row]]
SILENT = ("s without a beat", "s without progress")
"""Tests of suspicions whose statistic is how long nothing had been heard."""
MANY = 2000
"""Failures of which each iteration before is looked at here."""
AT_ONCE = 400
"""Jobs, or failures, that are asked about together."""


def mark(fetch: Fetch, rows: Sequence[Row], job: str = "job_id") -> None:
    """Put into rows of failures what `noticed_after_s` wants beside their own columns: `silent_since`, when the last
    sign was heard of what was suspected of being silent and led to it, and `led_at`, when a supervisor last took over
    before it was noticed. `job`: the column with the job's number."""
    for row in rows:
        row["silent_since"] = row["led_at"] = None
    jobs = sorted({row[job] for row in rows if row["kind"] != "fail-slow"})
    of: dict[int, dict[int, Row]] = {}
    for row in rows:
        of.setdefault(row[job], {})[row["failure"]] = row
    suspicions, events = SuspicionRow.__table__.c, EventRow.__table__.c
    for begin in range(0, len(jobs), AT_ONCE):
        ids = jobs[begin : begin + AT_ONCE]
        query = select(suspicions.job_id, suspicions.failure, suspicions.raised_at, suspicions.statistic)
        silent = suspicions.failure.is_not(None) & suspicions.statistic.is_not(None) & suspicions.test.in_(SILENT)
        for one in fetch(query.where(suspicions.job_id.in_(ids), silent)):
            since = one["raised_at"] - timedelta(seconds=one["statistic"])
            if (known := of[one["job_id"]].get(one["failure"])) is not None:
                known["silent_since"] = min(since, known["silent_since"] or since)
        chosen = select(events.job_id, events.at).where(events.job_id.in_(ids), events.kind == "LeaderChosen")
        for one in fetch(chosen.order_by(events.at)):
            for row in of[one["job_id"]].values():
                if one["at"] <= row["noticed_at"]:
                    row["led_at"] = one["at"]


def tell(fetch: Fetch, rows: Sequence[Row]) -> None:
    """Fill in the three columns of rows of failures that have `job_id`, `recovery_seconds` and `back_at` of the change
    of plan that mended each, if one did."""
    mark(fetch, rows)
    commits = _commits_before(fetch, {row["job_id"] for row in rows}, rows)
    for row in rows:
        row["noticed_after_seconds"] = noticed = _noticed(row, commits.get((row["job_id"], row["failure"]), []))
        row["seconds_without_noticing"] = took = row["recovery_seconds"]
        whole = None if took is None else took + (noticed or 0.0)
        if row["kind"] == "fail-slow" and whole is not None and noticed is not None:  # it was weighed in between
            noticed_at = row["noticed_at"] - timedelta(seconds=noticed)
            whole = max(whole, (row["back_at"] - noticed_at).total_seconds())
        row["seconds_to_recover"] = whole


def _noticed(row: Row, commits: Sequence[Row]) -> float | None:
    """None where there is no commit before it to tell by, nor anything else."""
    noticed_at: datetime = row["noticed_at"]
    if row["kind"] == "fail-slow":
        onset = commits[-1]["finished_at"] if commits else None
        return None if onset is None else max((noticed_at - onset).total_seconds(), 0.0)
    if row["back_at"] is not None and row["recovery_seconds"] is not None:  # one change may mend several
        noticed_at = min(noticed_at, row["back_at"] - timedelta(seconds=row["recovery_seconds"]))
    last_at = commits[-1]["finished_at"] if commits else None
    silent_s = None if row["silent_since"] is None else (noticed_at - row["silent_since"]).total_seconds()
    if last_at is None:
        known = row["detect_seconds"] if row["detect_seconds"] is not None else silent_s
        return None if known is None else max(known, 0.0)
    unnoticed_s = max((noticed_at - last_at).total_seconds(), 0.0)
    seconds = [each["seconds"] for each in commits if each["seconds"] is not None]
    return noticed_after_s(
        unnoticed_s,
        statistics.median(seconds) if seconds else unnoticed_s,
        fault_s=row["detect_seconds"],
        silent_s=silent_s,
        leaderless=is_leaderless(row, last_at),
    )


def _commits_before(fetch: Fetch, jobs: Collection[int], rows: Iterable[Row]) -> dict[tuple[int, int], list[Row]]:
    """The last iterations before each failure, in order: `finished_at`, `seconds`; of many failures one row, with the
    mean of these."""
    iterations, failures = IterationRow.__table__, FailureRow.__table__
    near = and_(
        iterations.c.job_id == failures.c.job_id,
        iterations.c.iteration < failures.c.iteration,
        iterations.c.iteration >= failures.c.iteration - RECENT,
    )
    wanted = {(row["job_id"], row["failure"]) for row in rows}
    each, ended, took = (failures.c.job_id, failures.c.failure), iterations.c.finished_at, iterations.c.seconds
    if len(wanted) > MANY:
        query = select(*each, func.max(ended).label("finished_at"), func.avg(took).label("seconds")).group_by(*each)
    else:
        query = select(*each, ended, took).order_by(iterations.c.iteration)
    query = query.select_from(failures.join(iterations, near))
    found: dict[tuple[int, int], list[Row]] = {}
    asked = sorted(jobs) if len(wanted) > MANY else sorted(wanted)
    column = failures.c.job_id if len(wanted) > MANY else tuple_(*each)
    for begin in range(0, len(asked), AT_ONCE):
        for one in fetch(query.where(column.in_(asked[begin : begin + AT_ONCE]))):
            found.setdefault((one["job_id"], one["failure"]), []).append(one)
    return found


def in_all(seconds: Callable[[ColumnElement[Any]], ColumnElement[float]]) -> tuple[FromClause, ColumnElement[float]]:
    """The time to recover of each failure, as the database reckons it where there are more than `MANY`: joined with
    the iteration before, which is the usual one there. What was silent, or had no leader, counts as others do.
    `seconds`: of a time, since 1970."""
    iterations, failures, back = IterationRow.__table__, FailureRow.__table__.c, ReconfigurationRow.__table__.c
    ended = seconds(iterations.c.finished_at)
    unnoticed = seconds(back.finished_at) - back.seconds - ended
    noticed = case(
        (failures.detect_seconds.is_not(None), failures.detect_seconds),
        (failures.kind == "fail-slow", unnoticed),
        else_=unnoticed - func.coalesce(iterations.c.seconds, unnoticed),
    )
    return iterations, back.seconds + case((noticed > 0.0, noticed), else_=0.0)
