"""Resolution of names: decides which job or node a name means, and suggests known names for an unknown one.

Implements the methods of `Reader` with the same names; the docstrings there describe the results.
"""

from __future__ import annotations

import difflib
import getpass
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Select, case, literal, or_, select

from resihp.db.models import JobRow, NodeRow
from resihp.db.reading.tables import Row
from resihp.errors import JobNotFoundError, UsageError

if TYPE_CHECKING:
    from resihp.db.reading.reader import Reader

MAX_SUGGESTIONS = 3
"""Limit on the names that are suggested for an unknown one."""
UUID_PREFIX = 4
"""Fewest letters of a uuid that can name a job; `UUID_SHOWN` letters are shown in messages."""
UUID_SHOWN = 8
MAX_CHOICES = 6
"""Limit on the jobs that are listed for an ambiguous name."""
MIN_FOREIGN_DIGITS = 19
"""Numbers with this many digits or more are not numbers of Slurm jobs."""
MAX_NAMES_SEARCHED = 20_000
"""Limit on the names that are searched for suggestions."""
MAX_CLOCK_DIFFERENCE = timedelta(minutes=1)
"""Largest difference between the clocks of two hosts, or between two times of a clock that was set in the meantime."""


def nearest(name: str, known_names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, such as `; did you mean n1 or n2?` or `, which holds ...`."""
    names = list(dict.fromkeys(known_names))
    folded = {candidate.casefold(): candidate for candidate in reversed(names)}
    near = [
        folded[candidate] for candidate in difflib.get_close_matches(name.casefold(), list(folded), n=MAX_SUGGESTIONS)
    ]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f", which holds {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ", which has none"


@dataclass(frozen=True)
class NamedJob:
    """A name that a user gave for a job: `1234`, also `1234_5` or `1234-r1`; `user/1234`; or the beginning of a
    uuid."""

    name: str
    user: str | None

    @classmethod
    def of(cls, text: str) -> NamedJob:
        user, slash, name = text.rpartition("/")
        return cls(name, user if slash else None)

    def _of_user(self, reader: Reader, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return condition if self.user is None else condition & reader.is_of(self.user)

    def named(self, reader: Reader) -> ColumnElement[bool]:
        return self._of_user(reader, JobRow.__table__.c.name == self.name)

    def numbered(self, reader: Reader) -> ColumnElement[bool]:
        """Match restarts of a Slurm job, and jobs with another name and this Slurm number."""
        columns = JobRow.__table__.c
        again = columns.name.like(f"{_escaped_for_like(self.name)}-r%", escape="\\")
        number = int(self.name) if self.name.isdecimal() and len(self.name) < MIN_FOREIGN_DIGITS else None
        return self._of_user(reader, again if number is None else again | (columns.slurm_job == number))

    def prefix(self, reader: Reader) -> ColumnElement[bool] | None:
        """Match jobs with a uuid that begins with the name; None if the name cannot be the beginning of a uuid."""
        if len(self.name) < UUID_PREFIX or not set(self.name) <= set("0123456789abcdef-"):
            return None
        return self._of_user(reader, JobRow.__table__.c.uuid.startswith(self.name))


def node_name(clusters: Sequence[str], node: ColumnElement[Any], job: ColumnElement[int]) -> ColumnElement[Any]:
    if len(clusters) < 2:
        return node
    jobs = JobRow.__table__.c
    return case(
        *((job.in_(select(jobs.id).where(jobs.cluster == name)), literal(f"{name}/") + node) for name in clusters),
        else_=node,
    )


def nodes(reader: Reader, job_id: int | None) -> list[str]:
    columns = NodeRow.__table__.c
    if job_id is not None:
        query = select(columns.node).distinct().where(columns.job_id == job_id)
    else:
        query = select(reader.node_name(columns.node, columns.job_id).label("node")).distinct()
    return [row["node"] for row in reader.fetch(query.order_by("node").limit(MAX_NAMES_SEARCHED))]


def is_asked(
    clusters: Sequence[str], wanted: str, node: ColumnElement[Any], job: ColumnElement[int]
) -> ColumnElement[bool]:
    jobs = JobRow.__table__.c
    named = [node == wanted]
    for cluster in clusters if len(clusters) > 1 else ():
        if wanted.startswith(f"{cluster}/"):  # not `node_name`, which would have to be computed for every row
            own = job.in_(select(jobs.id).where(jobs.cluster == cluster))
            named.append((node == wanted[len(cluster) + 1 :]) & own)
    return or_(*named)


def is_node(wanted: str | None, name: str, clusters: Iterable[str]) -> bool:
    """Decide whether `name`, a node's name as in `Reader.node_name`, matches `wanted`, which may include the cluster;
    None matches all nodes. A node's own name may contain a slash, too."""
    return wanted is None or name == wanted or any(name == f"{cluster}/{wanted}" for cluster in clusters)


def _escaped_for_like(name: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", name)


def _reader_name() -> str:
    """Return the name of the user who runs this process, as the user's jobs record it
    (`resihp.wrapper.job_files.registered.user_name`)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container has no name for us
        return str(os.geteuid())


def _choices(name: str, jobs: Sequence[Row]) -> str:
    descriptions = [
        f"{job['uuid'][:UUID_SHOWN]} ({job['owner']}, {job['cluster'] or job['host']}, began "
        f"{job['started_at']:%Y-%m-%d %H:%M}, {job['state']})"
        for job in jobs[:MAX_CHOICES]
    ]
    more = f", and {len(jobs) - MAX_CHOICES} older ones" if len(jobs) > MAX_CHOICES else ""
    how = f"{jobs[0]['owner']}/{name} or its id" if len({job["owner"] for job in jobs}) > 1 else "its id"
    return f"job {name}: {len(jobs)} jobs have that name; name one by {how}: {', '.join(descriptions)}{more}"


def job(
    reader: Reader,
    name: str | None = None,
    *,
    host: str | None = None,
    started: datetime | None = None,
    uuid: str | None = None,
) -> Row:
    columns = [reader.owner() if column.key == "owner" else column for column in JobRow.__table__.columns]
    query = select(*columns).order_by(JobRow.started_at.desc(), JobRow.id.desc())
    if uuid is not None:
        return _job_of_folder(reader, reader.fetch(query.where(JobRow.uuid == uuid)), name or uuid, None, None)
    if name is None and host is None:
        return _newest_job(reader, query)
    if host is not None or started is not None:
        return _job_of_folder(reader, reader.fetch(query.where(JobRow.name == name)), name or "", host, started)
    return _named_job(reader, query, name or "")


def _newest_job(reader: Reader, query: Select[Any]) -> Row:
    """Return the user's newest job, or the newest job of all if the user has none."""
    matches = (
        reader.fetch(query.where(reader.is_of(_reader_name())).limit(1))
        or reader.fetch(query.where(reader.is_written_by_reader()).limit(1))
        or reader.fetch(query.limit(1))
    )
    if not matches:
        raise JobNotFoundError(f"ledger {reader.name}: holds no job yet")
    return matches[0]


def _named_job(reader: Reader, query: Select[Any], name: str) -> Row:
    """Return the job that a name means. The user's own jobs take precedence; of several attempts of one run, the newest
    is returned."""
    wanted = NamedJob.of(name)
    matches = _matches(reader, query, name, wanted)
    if not matches:
        raise JobNotFoundError(f"job {name}: not in ledger {reader.name}{nearest(wanted.name, _names(reader))}")
    own = _own_jobs(reader, matches)
    candidates = own if own and wanted.user is None else matches
    newest = {job["run"] or job["uuid"]: job for job in reversed(candidates)}
    if len(newest) > 1:
        raise UsageError(_choices(name, [*newest.values()][::-1]))
    return candidates[0]


def _matches(reader: Reader, query: Select[Any], name: str, wanted: NamedJob) -> list[Row]:
    """Return the jobs with that name; if there are none, those that match it as user and name, as a Slurm number, or as
    a uuid."""
    matches = (
        reader.fetch(query.where(JobRow.name == name))
        or reader.fetch(query.where(wanted.named(reader)))
        or reader.fetch(query.where(wanted.numbered(reader)))
    )
    if not matches and (prefix := wanted.prefix(reader)) is not None:
        matches = reader.fetch(query.where(prefix))
    return matches


def _own_jobs(reader: Reader, jobs: list[Row]) -> list[Row]:
    """Return the jobs that name the user as their owner; if there are none, those that the current database user
    wrote."""
    reader_name = _reader_name()
    own = [job for job in jobs if job["owner"] == reader_name]
    if own or len(jobs) == 1:
        return own
    written = select(JobRow.uuid).where(reader.is_written_by_reader(), JobRow.uuid.in_([job["uuid"] for job in jobs]))
    uuids = {row["uuid"] for row in reader.fetch(written)}
    return [job for job in jobs if job["uuid"] in uuids]


def _job_of_folder(reader: Reader, matches: list[Row], name: str, host: str | None, started: datetime | None) -> Row:
    matches = [job for job in matches if job["host"] == host] or matches if host is not None else matches
    if started is not None:  # a job that began before this folder was created belongs to another folder
        matches = [job for job in matches if job["started_at"] > started - MAX_CLOCK_DIFFERENCE]
    if not matches:
        raise JobNotFoundError(f"job {name}: not in ledger {reader.name}{nearest(name, _names(reader))}")
    if started is not None:
        return min(matches, key=lambda job: abs((job["started_at"] - started).total_seconds()))
    return matches[0]


def _names(reader: Reader) -> list[str]:
    query = select(JobRow.name).order_by(JobRow.started_at.desc()).limit(MAX_NAMES_SEARCHED)
    return [row["name"] for row in reader.fetch(query)]
