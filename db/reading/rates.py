"""Failures in a given time of service: before and after a date, with and without a driver; and what to repair.

Reads only. *Device-days* are those that devices spent in jobs, from joining to the node's loss or the job's end.
Injected faults do not count. Called by `resihp history` and `db.reading.queries`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Select, case, func, select

from db.models import DeviceRow, DrainRow, FailureRow, JobRow, MembershipRow
from db.reading import hardware
from db.reading.health import unprovoked
from db.reading.naming import is_node
from db.reading.reader import Reader
from db.reading.tables import Row
from resihp.errors import UsageError

DAYS = 30.0
"""Looked at on either side of a date."""
WEEK = timedelta(days=7)
DAY_S = 86400.0
OF_STAYS = ("driver", "kernel", "image", "host")
OF_DEVICES = ("vbios", "name", "board")
OF_JOBS = ("torch", "megatron_core", "cuda", "nccl", "version", "partition", "cluster")
TRAITS = (*OF_STAYS, *OF_DEVICES, *OF_JOBS)
"""What service is told apart by."""
ROUNDED = 1e-7
"""Probabilities that differ by less are the same."""


def rate_around(reader: Reader, at: datetime, days: float = DAYS, user: str | None = None) -> list[Row]:
    """Failures for 1,000 device-days in the `days` before `at` and after it.

    One row for each `which` (`all`, `hardware`, each kind that there is) and `when` (`before`, `after`): `failures`,
    `device_days`, `rate`; with `after`, `ratio` of the rates and `p`, how probable so unequal counts are if the rate
    was the same (exact, conditional on their sum).
    """
    since, until = at - timedelta(days=days), at + timedelta(days=days)
    stays, failures = _stays(reader, since, until, user), _failures(reader, since, until, user)
    split = at.timestamp()
    exposure = {"before": 0.0, "after": 0.0}
    for stay in stays:
        begin, end = max(stay["since"], since.timestamp()), min(stay["until"], until.timestamp())
        exposure["before"] += max(min(end, split) - begin, 0.0) * stay["devices"]
        exposure["after"] += max(end - max(begin, split), 0.0) * stay["devices"]
    counts: dict[str, dict[str, int]] = {}
    for row in failures:
        _count(counts, row, "before" if row["at"] < split else "after")
    return _compared(counts, exposure, ("before", "after"))


def rate_with(reader: Reader, trait: str, value: str, days: float, now: datetime, user: str | None = None) -> list[Row]:
    """The same of stays that have `value` of a trait (`TRAITS`) against all others, in the last `days`; `when` is
    `without`, `with`. Stays of which the trait is not known are left out."""
    since = now - timedelta(days=days)
    exposure = {"without": 0.0, "with": 0.0}
    held: dict[tuple[int, str], list[tuple[float, str]]] = {}
    there = _stays(reader, since, now, user, trait)
    if trait == "host":
        value = _meant(value, {stay["trait"] for stay in there}, reader.clusters())
    for stay in there:
        if not stay["trait"]:
            continue
        when = "with" if stay["trait"] == value else "without"
        exposure[when] += max(stay["until"] - max(stay["since"], since.timestamp()), 0.0) * stay["devices"]
        held.setdefault((stay["job_id"], stay["node"]), []).append((stay["since"], when))
    counts: dict[str, dict[str, int]] = {}
    for row in _failures(reader, since, now, user):
        stays = held.get((row["job_id"], row["node"]), [])
        found = next((name for begin, name in reversed(stays) if begin <= row["at"]), None)
        if found is not None:
            _count(counts, row, found)
    return _compared(counts, exposure, ("without", "with"))


def _meant(host: str, known: set[str], clusters: Sequence[str]) -> str:
    """A host by its name, with the cluster's where hosts of several are known. Raises UsageError where several are
    meant."""
    found = sorted(name for name in known if is_node(host, name, clusters))
    if len(found) > 1 and host not in known:
        raise UsageError(f"history rate: --having host={host}: there are {', '.join(found)}; name one")
    return found[0] if len(found) == 1 else host


def together(rows: Sequence[Row]) -> list[Row]:
    """What several ledgers said of the same, by `rate_around` or `rate_with`, as one would."""
    names = tuple(dict.fromkeys(row["when"] for row in rows))
    exposure = dict.fromkeys(names, 0.0)
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        if row["which"] == "all":
            exposure[row["when"]] += row["device_days"] * DAY_S
        of = counts.setdefault(row["which"], {})
        of[row["when"]] = of.get(row["when"], 0) + row["failures"]
    return _compared(counts, exposure, (names[0], names[1])) if names else []


def _count(counts: dict[str, dict[str, int]], failure: Row, when: str) -> None:
    hardware = failure["hardware"]
    broken = hardware if hardware is not None else failure["kind"] in ("fail-stop", "fail-slow")
    for which in ("all", *(("hardware",) if broken else ()), failure["kind"]):
        of = counts.setdefault(which, {})
        of[when] = of.get(when, 0) + 1


def _compared(
    counts: Mapping[str, Mapping[str, int]], exposure: Mapping[str, float], names: tuple[str, str]
) -> list[Row]:
    found: list[Row] = []
    one, other = names
    total = exposure[one] + exposure[other]
    for which in sorted(counts, key=lambda name: (name != "all", name != "hardware", name)) or ["all"]:
        of = counts.get(which, {})
        seen = {name: of.get(name, 0) for name in names}
        rates = {name: seen[name] * 1000.0 * DAY_S / exposure[name] if exposure[name] > 0.0 else None for name in names}
        both = sum(seen.values())
        p = two_sided(seen[other], both, exposure[other] / total) if both and total > 0.0 else None
        before, after = rates[one], rates[other]
        for name in names:
            last = name == other
            found.append(
                {
                    "when": name,
                    "which": which,
                    "failures": seen[name],
                    "device_days": exposure[name] / DAY_S,
                    "rate": rates[name],
                    "ratio": after / before if last and before and after is not None else None,
                    "p": p if last else None,
                }
            )
    return found


def two_sided(count: int, of: int, chance: float) -> float:
    """How probable what is at most as probable as `count` of so many is, each with this chance: the exact test, as
    `scipy.stats.binomtest`, whose import takes longer than the question."""
    from scipy import special

    number = np.arange(of + 1.0)
    ways = special.gammaln(of + 1.0) - special.gammaln(number + 1.0) - special.gammaln(of - number + 1.0)
    each = np.exp(ways + special.xlogy(number, chance) + special.xlog1py(of - number, -chance))
    return min(float(each[each <= each[count] * (1.0 + ROUNDED)].sum()), 1.0)


def _stays(reader: Reader, since: datetime, until: datetime, user: str | None, trait: str | None = None) -> list[Row]:
    stays, jobs = MembershipRow.__table__.c, JobRow.__table__.c
    over = case((jobs.ended_at.is_(None) | (jobs.state == "abnormal"), jobs.last_entry_at), else_=jobs.ended_at)
    end = func.coalesce(stays.lost_at, over)
    query = (
        select(
            stays.job_id,
            stays.node,
            stays.devices,
            reader.seconds(stays.joined_at).label("since"),
            reader.seconds(end).label("until"),
            *((_trait(reader, trait).label("trait"),) if trait is not None else ()),
        )
        .join(JobRow, jobs.id == stays.job_id)
        .where(stays.joined_at <= until, jobs.last_entry_at >= since)
        .order_by(stays.job_id, stays.node, stays.joined_at)
    )
    return reader.fetch(_of(reader, query, user))


def _trait(reader: Reader, name: str) -> ColumnElement[Any]:
    stays, devices = MembershipRow.__table__.c, DeviceRow.__table__.c
    if name == "host":
        return reader.node_name(stays.host, stays.job_id)
    if name in OF_STAYS:
        return stays[name]
    if name in OF_JOBS:
        return JobRow.__table__.c[name]
    here = (devices.job_id == stays.job_id) & (devices.node == stays.node) & (devices.joined_at == stays.joined_at)
    return select(func.max(devices[name])).where(here).scalar_subquery()


def _failures(reader: Reader, since: datetime, until: datetime, user: str | None) -> list[Row]:
    failures = FailureRow.__table__.c
    query = (
        select(
            failures.job_id,
            failures.node,
            failures.kind,
            failures.hardware,
            failures.code,
            reader.seconds(failures.noticed_at).label("at"),
        )
        .join(JobRow, JobRow.__table__.c.id == failures.job_id)
        .where(failures.noticed_at >= since, failures.noticed_at <= until, failures.detect_seconds.is_(None))
    )
    return unprovoked(reader, reader.fetch(_of(reader, query, user)), "at")


def _of(reader: Reader, query: Select[Any], user: str | None) -> Select[Any]:
    return query if user is None else query.where(reader.is_of(user))


# --- repairs --------------------------------------------------------------------------------------------------------


def repairs(reader: Reader, since: datetime | None = None, until: datetime | None = None) -> list[Row]:
    """Nodes and devices with failures of hardware lately (a week, unless `since` says otherwise) and no maintenance
    since, the ones with most first.

    `node`, `device` (None of the node as a whole), `uuid`, `failures`, `codes` (what logs said), `last` and `cause` of
    the last one, `drained` (by which rung of the ladder, None if not), `maintained_at` (before).
    """
    since = since or datetime.now(UTC) - WEEK
    failures, devices = FailureRow.__table__.c, DeviceRow.__table__.c
    uuid = (
        select(devices.uuid)
        .where(devices.job_id == failures.job_id, devices.node == failures.node, devices.device == failures.device)
        .where(devices.joined_at <= failures.noticed_at)
        .order_by(devices.joined_at.desc())
        .limit(1)
        .scalar_subquery()
    )
    query = select(
        failures.job_id,
        reader.node_name(failures.node, failures.job_id).label("node"),
        failures.device,
        failures.noticed_at,
        failures.cause,
        failures.code,
        uuid.label("uuid"),
    ).where(
        failures.node.is_not(None),
        failures.noticed_at >= since,
        failures.detect_seconds.is_(None),
        failures.kind.in_(("fail-stop", "fail-slow")),
        failures.hardware.is_not(False),
        failures.component.in_(("device", "node", "link")),
    )
    if until is not None:
        query = query.where(failures.noticed_at < until)
    rows = reader.fetch(reader.believed(query, failures.job_id).order_by(failures.noticed_at))
    rows = unprovoked(reader, rows, "noticed_at")
    done, drained = _maintained(reader), _drained(reader, since)
    found: dict[tuple[str, int | None], Row] = {}
    for row in rows:
        meant = (None, row["uuid"], str(row["device"]))  # a number is kept of a device that has no UUID
        mended = max((at for of, at in done.get(row["node"], ()) if of in meant), default=None)
        if mended is not None and mended >= row["noticed_at"]:
            continue
        one = found.setdefault(
            (row["node"], row["device"]),
            {"node": row["node"], "device": row["device"], "failures": 0, "codes": set(), "maintained_at": mended},
        )
        one["failures"] += 1
        one["codes"] |= {row["code"]} - {None}
        one |= {"uuid": row["uuid"] or None, "last": row["noticed_at"], "cause": row["cause"]}
        one["drained"] = drained.get(row["node"])
    listed = [{**one, "codes": ", ".join(sorted(one["codes"])) or None} for one in found.values()]
    return sorted(listed, key=lambda one: (-one["failures"], one["node"], one["device"] or 0))


def repairs_together(rows: Iterable[Row]) -> list[Row]:
    """What several ledgers said, by `repairs`, each node and device once."""
    found: dict[tuple[str, int | None], Row] = {}
    for row in sorted(rows, key=lambda row: row["last"]):
        before = found.get((row["node"], row["device"]), row)
        codes = {code for each in (before, row) for code in (each["codes"] or "").split(", ")} - {""}
        number = row["failures"] + (before["failures"] if before is not row else 0)
        told = {name: row[name] or before[name] for name in ("uuid", "drained", "maintained_at")}
        found[row["node"], row["device"]] = row | told | {"failures": number, "codes": ", ".join(sorted(codes)) or None}
    return sorted(found.values(), key=lambda one: (-one["failures"], one["node"], one["device"] or 0))


def _maintained(reader: Reader) -> dict[str, list[tuple[str | None, datetime]]]:
    """What was done to nodes, as far as it counts."""
    found: dict[str, list[tuple[str | None, datetime]]] = {}
    several = len(reader.clusters()) > 1
    for row in hardware.maintenance_rows(reader):
        if row["counts"]:
            found.setdefault(hardware.named(row, several), []).append((row["device_uuid"], row["at"]))
    return found


def _drained(reader: Reader, since: datetime) -> dict[str, str]:
    drains = DrainRow.__table__.c
    query = select(reader.node_name(drains.node, drains.job_id).label("node"), drains.step).where(
        drains.drained_at >= since, drains.outcome == "done", drains.undrained_at.is_(None)
    )
    found = reader.fetch(reader.believed(query, drains.job_id).order_by(drains.drained_at))
    return {row["node"]: row["step"] for row in found}
