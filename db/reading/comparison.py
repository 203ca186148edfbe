"""Comparison of two jobs: their differences, and the time of their iterations at equal work. Reads only.

Called by `resihp compare` and `resihp.db.reading.queries`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import select

from resihp.db.models import DeviceRow, MembershipRow
from resihp.db.reading.plans import promises
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import Row, object_in

SIGNIFICANT_ERRORS = 2.0
"""Number of standard errors that a difference must exceed to be reported as a difference."""
FROM_JOBS = {
    **{"nodes": "nodes", "GPUs a node": "gpus_per_node", "TP": "tp", "PP": "pp", "schedule": "schedule"},
    **{"cluster": "cluster", "partition": "partition", "resihp": "version", "torch": "torch"},
    **{"megatron-core": "megatron_core", "CUDA": "cuda", "NCCL": "nccl", "commit of the script": "script_commit"},
}
"""Column of `jobs` for each compared property."""


def compare(reader: Reader, first: Row, others: Reader, second: Row) -> list[Row]:
    """Return the differences between two jobs, and then the times of their iterations. `first` and `second` are rows of
    `Reader.job`, of one ledger or of two.

    Columns: `what`, `first` and `second` (texts), and `difference` (for a figure, relative to the first job; else
    None). The last row is the verdict: device-seconds for a million tokens, as medians over the iterations under each
    job's first plan, before anything was slow. A difference of less than twice its standard error is reported as no
    difference. The verdict is omitted if a job has too few such iterations.
    """
    jobs = ((reader, first), (others, second))
    rows = [row for row in _facts(*jobs) if row["first"] != row["second"]]
    first_rows, second_rows = (_iterations(*job) for job in jobs)
    rows.append(_figure("iterations compared", len(first_rows), len(second_rows), "{:.0f}"))
    if min(len(first_rows), len(second_rows)) < promises.MIN_ITERATIONS:
        return rows
    same = _work(first) == _work(second)
    rows.append(
        _figure("tokens of an iteration", _median(first_rows, "tokens"), _median(second_rows, "tokens"), "{:,.0f}")
    )
    rows.append(
        _figure("seconds of an iteration", _median(first_rows, "seconds"), _median(second_rows, "seconds"), "{:.4g}")
    )
    ratio, error = promises.ratio(_rates(second_rows), _rates(first_rows))
    assert ratio is not None
    sure = abs(ratio - 1.0) > SIGNIFICANT_ERRORS * error * ratio
    how = "slower" if ratio > 1.0 else "faster"
    change = (
        f"{abs(ratio - 1.0):.1%} {how}, give or take {SIGNIFICANT_ERRORS * error * ratio:.1%}"
        if sure
        else "no difference"
    )
    label = "device-seconds for a million tokens" + ("" if same else ", models differ")
    rows.append({**_figure(label, _middle(first_rows), _middle(second_rows), "{:.4g}"), "difference": change})
    return rows


def _facts(*jobs: tuple[Reader, Row]) -> Iterator[Row]:
    for label, column in FROM_JOBS.items():
        yield _row(label, *(job[column] for _, job in jobs))
    for label, model, column in (
        ("hardware", DeviceRow, "name"),
        ("GPU driver", MembershipRow, "driver"),
        ("VBIOS", DeviceRow, "vbios"),
        ("kernel", MembershipRow, "kernel"),
        ("operating system", MembershipRow, "image"),
        ("NIC firmware", MembershipRow, "nic_firmware"),
    ):
        yield _row(label, *(_kinds(reader, model, column, job) for reader, job in jobs))
    mine, theirs = (dict(_flat(object_in(job["configuration"]))) for _, job in jobs)
    for name in sorted({*mine, *theirs}):
        yield _row(name, mine.get(name), theirs.get(name))


def _row(label: str, first: object = None, second: object = None) -> Row:
    def text(value: object) -> str:
        return "-" if value in (None, "", []) else str(value)

    return {"what": label, "first": text(first), "second": text(second), "difference": None}


def _figure(label: str, first: float, second: float, form: str) -> Row:
    change = f"{second / first - 1.0:+.1%}" if first else None
    return {"what": label, "first": form.format(first), "second": form.format(second), "difference": change}


def _kinds(reader: Reader, model: type[Any], column: str, job: Row) -> str:
    columns = model.__table__.c
    query = select(columns[column].label("name")).where(columns.job_id == job["id"]).distinct()
    return ", ".join(sorted(row["name"] for row in reader.fetch(query) if row["name"] not in ("", "{}")))


def _flat(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _work(job: Row) -> object:
    return object_in(job["model"]).get("model")


def _iterations(reader: Reader, job: Row) -> list[Row]:
    """Return the iterations under the first plan that took effect, before anything was slow, each with its number of
    `devices`."""
    plans = [row for row in reader.narrow("plans", job["id"]) if row["in_effect_at"] is not None]
    if not plans:
        return []
    began = min(plans, key=lambda row: int(row["epoch"]))
    rows = reader.narrow("iterations", job["id"], ("iteration", "epoch", "seconds", "tokens"))
    slow = sorted(row["iteration"] for row in reader.narrow("failures", job["id"]) if row["kind"] == "fail-slow")
    under = promises.iterations_before_change([row for row in rows if row["epoch"] == began["epoch"]], slow)
    return [{**row, "devices": began["active"]} for row in under if row["seconds"] and row["tokens"]]


def _rates(rows: list[Row]) -> list[float]:
    return [row["seconds"] / row["tokens"] * row["devices"] * 1e6 for row in rows]


def _middle(rows: list[Row]) -> float:
    return sorted(_rates(rows))[len(rows) // 2]


def _median(rows: list[Row], column: str) -> float:
    return float(sorted(row[column] for row in rows)[len(rows) // 2])
