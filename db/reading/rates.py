"""Failure rates over time of service: before and after a date, or with and without a trait such as a driver; and
repairs.

Reads only. *Device-days* are the time that devices spent in jobs, from joining to the node's loss or the job's end.
Injected faults do not count. Called by `resihp history` and `resihp.db.reading.queries`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Select, case, func, select

from resihp.db.models import DeviceRow, DrainRow, FailureRow, JobRow, MembershipRow
from resihp.db.reading import hardware
from resihp.db.reading.health import unprovoked
from resihp.db.reading.naming import is_node
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import Row
from resihp.errors import UsageError

DEFAULT_DAYS = 30.0
"""Default number of days considered before and after a date."""
REPAIR_WINDOW = timedelta(days=7)
DAY_S = 86400.0
OF_STAYS = ("driver", "kernel", "image", "host")
OF_DEVICES = ("vbios", "name", "board")
OF_JOBS = ("torch", "megatron_core", "cuda", "nccl", "version", "partition", "cluster")
TRAITS = (*OF_STAYS, *OF_DEVICES, *OF_JOBS)
"""Traits by which service can be compared."""
EQUAL_PROBABILITY = 1e-7
"""Relative difference below which two probabilities count as equal."""


def rate_around(reader: Reader, at: datetime, days: float = DEFAULT_DAYS, user: str | None = None) -> list[Row]:
    """Return failures per 1,000 device-days in the `days` before and after `at`.

    One row for each `which` (`all`, `hardware`, each kind that occurs) and `when` (`before`, `after`): `failures`,
    `device_days`, `rate`. Rows of `after` also have the `ratio` of the rates and `p`: the probability of counts at
    least as unequal if both rates were equal (exact, conditional on the sum of the counts).
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
    """Compare stays that have `value` of a trait (`TRAITS`) with all other stays, in the last `days`. Rows are those of
    `rate_around`, with `when` as `without` or `with`. Stays with an unknown trait are omitted."""
    since = now - timedelta(days=days)
    exposure = {"without": 0.0, "with": 0.0}
    whens_of_node: dict[tuple[int, str], list[tuple[float, str]]] = {}
    all_stays = _stays(reader, since, now, user, trait)
    if trait == "host":
        value = _resolved_host(value, {stay["trait"] for stay in all_stays}, reader.clusters())
    for stay in all_stays:
        if not stay["trait"]:
            continue
        when = "with" if stay["trait"] == value else "without"
        exposure[when] += max(stay["until"] - max(stay["since"], since.timestamp()), 0.0) * stay["devices"]
        whens_of_node.setdefault((stay["job_id"], stay["node"]), []).append((stay["since"], when))
    counts: dict[str, dict[str, int]] = {}
    for row in _failures(reader, since, now, user):
        stays = whens_of_node.get((row["job_id"], row["node"]), [])
        period = next((name for begin, name in reversed(stays) if begin <= row["at"]), None)
        if period is not None:
            _count(counts, row, period)
    return _compared(counts, exposure, ("without", "with"))


def _resolved_host(host: str, known_hosts: set[str], clusters: Sequence[str]) -> str:
    """Return the full name of a host, with its cluster if hosts of several clusters are known. Raises UsageError if the
    name is ambiguous."""
    matching = sorted(name for name in known_hosts if is_node(host, name, clusters))
    if len(matching) > 1 and host not in known_hosts:
        raise UsageError(f"history rate: --having host={host}: it may be {', '.join(matching)}; name one")
    return matching[0] if len(matching) == 1 else host


def together(rows: Sequence[Row]) -> list[Row]:
    """Combine the results of `rate_around` or `rate_with` from several ledgers, as if they were one ledger."""
    names = tuple(dict.fromkeys(row["when"] for row in rows))
    exposure = dict.fromkeys(names, 0.0)
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        if row["which"] == "all":
            exposure[row["when"]] += row["device_days"] * DAY_S
        by_period = counts.setdefault(row["which"], {})
        by_period[row["when"]] = by_period.get(row["when"], 0) + row["failures"]
    return _compared(counts, exposure, (names[0], names[1])) if names else []


def _count(counts: dict[str, dict[str, int]], failure: Row, when: str) -> None:
    hardware = failure["hardware"]
    broken = hardware if hardware is not None else failure["kind"] in ("fail-stop", "fail-slow")
    for group in ("all", *(("hardware",) if broken else ()), failure["kind"]):
        by_period = counts.setdefault(group, {})
        by_period[when] = by_period.get(when, 0) + 1


def _compared(
    counts: Mapping[str, Mapping[str, int]], exposure: Mapping[str, float], names: tuple[str, str]
) -> list[Row]:
    rows: list[Row] = []
    first, second = names
    total = exposure[first] + exposure[second]
    for group in sorted(counts, key=lambda name: (name != "all", name != "hardware", name)) or ["all"]:
        by_period = counts.get(group, {})
        numbers = {name: by_period.get(name, 0) for name in names}
        rates = {
            name: numbers[name] * 1000.0 * DAY_S / exposure[name] if exposure[name] > 0.0 else None for name in names
        }
        both = sum(numbers.values())
        p = two_sided(numbers[second], both, exposure[second] / total) if both and total > 0.0 else None
        before, after = rates[first], rates[second]
        for name in names:
            is_second = name == second
            rows.append(
                {
                    "when": name,
                    "which": group,
                    "failures": numbers[name],
                    "device_days": exposure[name] / DAY_S,
                    "rate": rates[name],
                    "ratio": after / before if is_second and before and after is not None else None,
                    "p": p if is_second else None,
                }
            )
    return rows


def two_sided(count: int, of: int, chance: float) -> float:
    """Return the probability of outcomes that are at most as likely as `count` successes in `of` trials with this
    chance: the exact test of `scipy.stats.binomtest`, which takes longer to import than to compute."""
    from scipy import special

    number = np.arange(of + 1.0)
    ways = special.gammaln(of + 1.0) - special.gammaln(number + 1.0) - special.gammaln(of - number + 1.0)
    probabilities = np.exp(ways + special.xlogy(number, chance) + special.xlog1py(of - number, -chance))
    return min(float(probabilities[probabilities <= probabilities[count] * (1.0 + EQUAL_PROBABILITY)].sum()), 1.0)


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
    return reader.fetch(_of_user(reader, query, user))


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
    return unprovoked(reader, reader.fetch(_of_user(reader, query, user)), "at")


def _of_user(reader: Reader, query: Select[Any], user: str | None) -> Select[Any]:
    return query if user is None else query.where(reader.is_of(user))


# --- repairs --------------------------------------------------------------------------------------------------------


def repairs(reader: Reader, since: datetime | None = None, until: datetime | None = None) -> list[Row]:
    """Return nodes and devices with recent hardware failures (of the last week, unless `since` is given) and without
    maintenance since the last failure, those with most failures first.

    `node`, `device` (None for the node as a whole), `uuid`, `failures`, `codes` (found in logs), `last` and `cause` of
    the last failure, `drained` (step of the drain ladder that succeeded, None if not drained), `maintained_at` (time of
    the last maintenance before these failures).
    """
    since = since or datetime.now(UTC) - REPAIR_WINDOW
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
    repairs_of: dict[tuple[str, int | None], Row] = {}
    for row in rows:
        meant = (None, row["uuid"], str(row["device"]))  # a device without a UUID is recorded by its number
        mended = max((at for device_key, at in done.get(row["node"], ()) if device_key in meant), default=None)
        if mended is not None and mended >= row["noticed_at"]:
            continue
        repair = repairs_of.setdefault(
            (row["node"], row["device"]),
            {"node": row["node"], "device": row["device"], "failures": 0, "codes": set(), "maintained_at": mended},
        )
        repair["failures"] += 1
        repair["codes"] |= {row["code"]} - {None}
        repair |= {"uuid": row["uuid"] or None, "last": row["noticed_at"], "cause": row["cause"]}
        repair["drained"] = drained.get(row["node"])
    listed = [{**repair, "codes": ", ".join(sorted(repair["codes"])) or None} for repair in repairs_of.values()]
    return sorted(listed, key=lambda repair: (-repair["failures"], repair["node"], repair["device"] or 0))


def repairs_together(rows: Iterable[Row]) -> list[Row]:
    """Combine the results of `repairs` from several ledgers, into one row for each node or device."""
    repairs_of: dict[tuple[str, int | None], Row] = {}
    for row in sorted(rows, key=lambda row: row["last"]):
        before = repairs_of.get((row["node"], row["device"]), row)
        codes = {code for result in (before, row) for code in (result["codes"] or "").split(", ")} - {""}
        number = row["failures"] + (before["failures"] if before is not row else 0)
        latest = {name: row[name] or before[name] for name in ("uuid", "drained", "maintained_at")}
        repairs_of[row["node"], row["device"]] = (
            row | latest | {"failures": number, "codes": ", ".join(sorted(codes)) or None}
        )
    return sorted(repairs_of.values(), key=lambda repair: (-repair["failures"], repair["node"], repair["device"] or 0))


def _maintained(reader: Reader) -> dict[str, list[tuple[str | None, datetime]]]:
    """Return the maintenance of nodes that counts, by node: (UUID or number of the device, time)."""
    maintained: dict[str, list[tuple[str | None, datetime]]] = {}
    several = len(reader.clusters()) > 1
    for row in hardware.maintenance_rows(reader):
        if row["counts"]:
            maintained.setdefault(hardware.named(row, several), []).append((row["device_uuid"], row["at"]))
    return maintained


def _drained(reader: Reader, since: datetime) -> dict[str, str]:
    drains = DrainRow.__table__.c
    query = select(reader.node_name(drains.node, drains.job_id).label("node"), drains.step).where(
        drains.drained_at >= since, drains.outcome == "done", drains.undrained_at.is_(None)
    )
    rows = reader.fetch(reader.believed(query, drains.job_id).order_by(drains.drained_at))
    return {row["node"]: row["step"] for row in rows}
