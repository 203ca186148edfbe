"""Limits that accounting sets on a job: those of the user's association, of the accounts above it, and of a QOS.

sbatch accepts a job that exceeds most of these limits, even with --test-only. The job then waits forever, and squeue
shows the reason: AssocGrpGRES, QOSMaxNodePerJobLimit and similar. Pure: parses the output of sacctmgr. Called by
`resihp.slurm.survey`, which runs sacctmgr.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from resihp.slurm.errors import SlurmOutputError

Kind = Literal["nodes", "gpus", "cpus", "time", "jobs", "submitted"]
Per = Literal["job", "user", "group"]


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit. `whose`: the user, account or QOS that has the limit. `most`: the maximum of `kind` (for `time`,
    seconds for each job).

    `per`: whether the limit applies to each job, to each user, or to all jobs of the group together. `setting`:
    sacctmgr's name and value of the limit.
    """

    whose: str
    setting: str
    kind: Kind
    per: Per
    most: float


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """All limits on a user's next job in an account with a QOS. The names are empty if there is none.

    `unseen`: the first account up the tree that this user may not see; empty if all are visible.
    """

    account: str
    qos: str
    found: tuple[Limit, ...]
    unseen: str = ""


class Association(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `sacctmgr show assoc`, about an account (`user` is empty), or about a user in an account."""

    account: str
    parent: str
    user: str
    partition: str
    qos: str
    """QOS of a job that requests none; empty if the cluster's default applies."""
    limits: tuple[Limit, ...]


_ASSOCIATION = ("account", "parentname", "user", "partition", "defaultqos")
_LIMITS_OF_ASSOCIATION: dict[str, tuple[Per, Kind | None]] = {
    "grptres": ("group", None),
    "grpjobs": ("group", "jobs"),
    "grpsubmit": ("group", "submitted"),
    "maxtres": ("job", None),
    "maxjobs": ("user", "jobs"),
    "maxsubmit": ("user", "submitted"),
    "maxwall": ("job", "time"),
}
_LIMITS_OF_QOS: dict[str, tuple[Per, Kind | None]] = {
    "grptres": ("group", None),
    "grpjobs": ("group", "jobs"),
    "grpsubmit": ("group", "submitted"),
    "maxtres": ("job", None),
    "maxtrespu": ("user", None),
    "maxtrespa": ("group", None),
    "maxjobspu": ("user", "jobs"),
    "maxsubmitpu": ("user", "submitted"),
    "maxwall": ("job", "time"),
}
ASSOCIATION_FORMAT = ",".join((*_ASSOCIATION, *_LIMITS_OF_ASSOCIATION))
"""Fields for `sacctmgr -nP show assoc format=`."""
QOS_FORMAT = ",".join(("name", *_LIMITS_OF_QOS))
"""Fields for `sacctmgr -nP show qos format=`."""

_KIND_OF_RESOURCE: dict[str, Kind] = {"node": "nodes", "gres/gpu": "gpus", "cpu": "cpus"}
"""Countable resources that jobs of resihp request. Others, such as gres/gpu:a100, are ignored."""
_TRES = re.compile(r"([a-z][^=,]*)=([0-9][0-9.]*[A-Z]?)", re.ASCII)
_WALL = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-9]{2}):([0-9]{2})", re.ASCII)


def associations(output: bytes) -> list[Association]:
    """Parse the output of `sacctmgr -nP show assoc format=ASSOCIATION_FORMAT`. Raises SlurmOutputError."""
    rows = []
    for fields in _rows(output, len(_ASSOCIATION) + len(_LIMITS_OF_ASSOCIATION)):
        account, parent, user, partition, qos = fields[: len(_ASSOCIATION)]
        holder = f"user {user} in account {account}" if user else f"account {account}"
        limits = _limits(holder, _LIMITS_OF_ASSOCIATION, fields[len(_ASSOCIATION) :])
        if not user:
            # An account's maxima apply to each of its users, and are repeated in the users' own rows.
            limits = tuple(limit for limit in limits if limit.per == "group")
        rows.append(Association(account=account, parent=parent, user=user, partition=partition, qos=qos, limits=limits))
    return rows


def qos(output: bytes) -> dict[str, tuple[Limit, ...]]:
    """Parse the output of `sacctmgr -nP show qos format=QOS_FORMAT`: limits by QOS name. Raises SlurmOutputError."""
    rows = _rows(output, 1 + len(_LIMITS_OF_QOS))
    return {name: _limits(f"QOS {name}", _LIMITS_OF_QOS, fields) for name, *fields in rows}


def _rows(output: bytes, width: int) -> list[list[str]]:
    rows = [line.split("|") for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    for row in rows:
        if len(row) != width:
            raise SlurmOutputError(f"slurm: cannot read sacctmgr's row of {len(row)} fields: {'|'.join(row)[:80]!a}")
    return rows


def _limits(holder: str, settings: dict[str, tuple[Per, Kind | None]], texts: list[str]) -> tuple[Limit, ...]:
    limits = []
    for (setting, (per, kind)), text in zip(settings.items(), texts, strict=True):
        for counted, most in _amounts(holder, setting, kind, text):
            limits.append(Limit(whose=holder, setting=f"{setting}={text}", kind=counted, per=per, most=most))
    return tuple(limits)


def _amounts(holder: str, setting: str, kind: Kind | None, text: str) -> list[tuple[Kind, float]]:
    if not text:
        return []
    if kind is None:
        parts = [_TRES.fullmatch(part) for part in text.split(",")]
        if not all(parts):
            raise SlurmOutputError(f"slurm: {holder}: cannot read {setting}: {text[:80]!a}")
        counts = [
            (_KIND_OF_RESOURCE[part[1]], part[2]) for part in parts if part is not None and part[1] in _KIND_OF_RESOURCE
        ]
        if not all(count.isdigit() for _, count in counts):
            raise SlurmOutputError(f"slurm: {holder}: cannot read {setting}: {text[:80]!a}")
        return [(counted, float(count)) for counted, count in counts]
    if kind == "time":
        if (wall := _WALL.fullmatch(text)) is None:
            raise SlurmOutputError(f"slurm: {holder}: cannot read {setting}: {text[:80]!a}")
        days, hours, minutes, seconds = (int(part or 0) for part in wall.groups())
        return [(kind, ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds)]
    if not text.isdigit():
        raise SlurmOutputError(f"slurm: {holder}: cannot read {setting}: {text[:80]!a}")
    return [(kind, float(text))]
