"""Which job, or node, a name means, and which names are near one that is not known.

`Reader`, whose methods have these names, says what they answer.
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

from sqlalchemy import ColumnElement, case, literal, or_, select

from db.models import JobRow
from db.reading.tables import Row
from resihp.errors import JobNotFoundError, UsageError

if TYPE_CHECKING:
    from db.reading.reader import Reader

NEAR = 3
"""Names told when one is not known."""
UUID_PREFIX = 4
"""Letters of a uuid by which a job may be named, at least; and those told of it."""
UUID_SHOWN = 8
CHOICES = 6
"""Jobs told where several are meant."""
DIGITS = 19
"""A number of so many is none of Slurm's."""
NAMES = 20_000
"""Names looked through for near ones."""
CLOCKS_APART = timedelta(minutes=1)
"""Between the clocks of two hosts, or of one that was set meanwhile, at most."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The rest of a message on a name that is not known: `; did you mean n1 or n2?`, `, which holds ...`."""
    names = list(dict.fromkeys(known))
    folded = {each.casefold(): each for each in reversed(names)}
    near = [folded[each] for each in difflib.get_close_matches(name.casefold(), list(folded), n=NEAR)]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f", which holds {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ", which has none"


@dataclass(frozen=True)
class NamedJob:
    """Which job a name means: `1234`, also `1234_5`, `1234-r1`; `user/1234`; the beginning of a uuid."""

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
        """Runs again of a Slurm job, and what is called otherwise and has its number."""
        columns = JobRow.__table__.c
        again = columns.name.like(f"{_plain(self.name)}-r%", escape="\\")
        number = int(self.name) if self.name.isdecimal() and len(self.name) < DIGITS else None
        return self._of_user(reader, again if number is None else again | (columns.slurm_job == number))

    def prefix(self, reader: Reader) -> ColumnElement[bool] | None:
        """None where it cannot be the beginning of a uuid that somebody meant."""
        if len(self.name) < UUID_PREFIX or not set(self.name) <= set("0123456789abcdef-"):
            return None
        return self._of_user(reader, JobRow.__table__.c.uuid.startswith(self.name))


def node_name(clusters: Sequence[str], node: ColumnElement[Any], job: ColumnElement[int]) -> ColumnElement[Any]:
    if len(clusters) < 2:
        return node
    of = JobRow.__table__.c
    return case(
        *((job.in_(select(of.id).where(of.cluster == name)), literal(f"{name}/") + node) for name in clusters),
        else_=node,
    )


def is_asked(
    clusters: Sequence[str], asked: str, node: ColumnElement[Any], job: ColumnElement[int]
) -> ColumnElement[bool]:
    of = JobRow.__table__.c
    named = [node == asked]
    for cluster in clusters if len(clusters) > 1 else ():
        if asked.startswith(f"{cluster}/"):  # not `node_name`, for which every row would be looked at
            own = job.in_(select(of.id).where(of.cluster == cluster))
            named.append((node == asked[len(cluster) + 1 :]) & own)
    return or_(*named)


def is_node(asked: str | None, name: str, clusters: Iterable[str]) -> bool:
    """Whether a node of this name (`Reader.node_name`) is asked for, with its cluster or without; None asks for all.
    A node's own name may have a slash, too."""
    return asked is None or name == asked or any(name == f"{cluster}/{asked}" for cluster in clusters)


def _plain(name: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", name)


def _me() -> str:
    """Return the reader's name, as his jobs tell it (`wrapper.job_files.user_name`)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container has no name for us
        return str(os.geteuid())


def _choices(name: str, found: Sequence[Row]) -> str:
    told = [
        f"{job['uuid'][:UUID_SHOWN]} ({job['owner']}, {job['cluster'] or job['host']}, began "
        f"{job['started_at']:%Y-%m-%d %H:%M}, {job['state']})"
        for job in found[:CHOICES]
    ]
    more = f", and {len(found) - CHOICES} older ones" if len(found) > CHOICES else ""
    how = f"{found[0]['owner']}/{name} or its id" if len({job["owner"] for job in found}) > 1 else "its id"
    return f"job {name}: {len(found)} jobs have that name; name one by {how}: {', '.join(told)}{more}"


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
    if name is None and host is None:
        found = (
            reader.fetch(query.where(reader.is_of(_me())).limit(1))
            or reader.fetch(query.where(reader.is_written_by_reader()).limit(1))
            or reader.fetch(query.limit(1))
        )
        if not found:
            raise JobNotFoundError(f"ledger {reader.name}: holds no job yet")
        return found[0]
    if uuid is not None:
        return _job_of_folder(reader, reader.fetch(query.where(JobRow.uuid == uuid)), name or "", None, None)
    if host is not None or started is not None:
        return _job_of_folder(reader, reader.fetch(query.where(JobRow.name == name)), name or "", host, started)
    wanted = NamedJob.of(name or "")
    found = (
        reader.fetch(query.where(JobRow.name == name))
        or reader.fetch(query.where(wanted.named(reader)))
        or reader.fetch(query.where(wanted.numbered(reader)))
    )
    if not found and (prefix := wanted.prefix(reader)) is not None:
        found = reader.fetch(query.where(prefix))
    if not found:
        raise JobNotFoundError(f"job {name}: not in ledger {reader.name}{nearest(wanted.name, _names(reader))}")
    mine = [job for job in found if job["owner"] == _me()]
    if not mine and len(found) > 1:
        own = select(JobRow.uuid).where(reader.is_written_by_reader(), JobRow.uuid.in_([job["uuid"] for job in found]))
        uuids = {row["uuid"] for row in reader.fetch(own)}
        mine = [job for job in found if job["uuid"] in uuids]
    candidates = mine if mine and wanted.user is None else found
    newest = {job["run"] or job["uuid"]: job for job in reversed(candidates)}
    if len(newest) > 1:
        raise UsageError(_choices(name or "", [*newest.values()][::-1]))
    return candidates[0]


def _job_of_folder(reader: Reader, found: list[Row], name: str, host: str | None, started: datetime | None) -> Row:
    found = [job for job in found if job["host"] == host] or found if host is not None else found
    if started is not None:  # one that began before this one's folder was made is another folder's
        found = [job for job in found if job["started_at"] > started - CLOCKS_APART]
    if not found:
        raise JobNotFoundError(f"job {name}: not in ledger {reader.name}{nearest(name, _names(reader))}")
    if started is not None:
        return min(found, key=lambda job: abs((job["started_at"] - started).total_seconds()))
    return found[0]


def _names(reader: Reader) -> list[str]:
    query = select(JobRow.name).order_by(JobRow.started_at.desc()).limit(NAMES)
    return [row["name"] for row in reader.fetch(query)]
