"""What accounting lets a job take at most: limits of a user's association, of the accounts above it, and of a QOS.

sbatch takes a job that is beyond most of them, even with --test-only; then it waits for ever, and squeue says why:
AssocGrpGRES, QOSMaxNodePerJobLimit and the like. Pure: bytes of sacctmgr in, limits out. `slurm.survey` asks for them.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from slurm.errors import SlurmOutputError

Kind = Literal["nodes", "gpus", "cpus", "time", "jobs", "submitted"]
Per = Literal["job", "user", "group"]


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """`whose` at most `most` of a `kind` (time in seconds, of one job): for each job, each user, or all together.

    `setting` is what sacctmgr calls it.
    """

    whose: str
    setting: str
    kind: Kind
    per: Per
    most: float


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """All that apply to a user's next job in an account with a QOS (names empty where there is none).

    `unseen` is the account from which on nothing is shown to this user, empty if all is.
    """

    account: str
    qos: str
    found: tuple[Limit, ...]
    unseen: str = ""


class Association(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `sacctmgr show assoc`: an account's (without a user), or a user's in an account."""

    account: str
    parent: str
    user: str
    partition: str
    qos: str
    """The one that a job gets which names none; empty where that is the cluster's."""
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
"""For `sacctmgr -nP show assoc format=`."""
QOS_FORMAT = ",".join(("name", *_LIMITS_OF_QOS))
"""For `sacctmgr -nP show qos format=`."""

_OF: dict[str, Kind] = {"node": "nodes", "gres/gpu": "gpus", "cpu": "cpus"}
"""Countable resources that a job of ours asks for; others, such as gres/gpu:a100, are left out."""
_TRES = re.compile(r"([a-z][^=,]*)=([0-9][0-9.]*[A-Z]?)", re.ASCII)
_WALL = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-9]{2}):([0-9]{2})", re.ASCII)


def associations(output: bytes) -> list[Association]:
    """From `sacctmgr -nP show assoc format=ASSOCIATION_FORMAT`. Raises SlurmOutputError."""
    found = []
    for fields in _rows(output, len(_ASSOCIATION) + len(_LIMITS_OF_ASSOCIATION)):
        account, parent, user, partition, qos = fields[: len(_ASSOCIATION)]
        whose = f"user {user} in account {account}" if user else f"account {account}"
        limits = _limits(whose, _LIMITS_OF_ASSOCIATION, fields[len(_ASSOCIATION) :])
        if not user:
            # An account's maxima hold for each of its users, whose rows repeat them.
            limits = tuple(limit for limit in limits if limit.per == "group")
        found.append(
            Association(account=account, parent=parent, user=user, partition=partition, qos=qos, limits=limits)
        )
    return found


def qos(output: bytes) -> dict[str, tuple[Limit, ...]]:
    """From `sacctmgr -nP show qos format=QOS_FORMAT`, by name. Raises SlurmOutputError."""
    rows = _rows(output, 1 + len(_LIMITS_OF_QOS))
    return {name: _limits(f"QOS {name}", _LIMITS_OF_QOS, fields) for name, *fields in rows}


def _rows(output: bytes, width: int) -> list[list[str]]:
    rows = [line.split("|") for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    for row in rows:
        if len(row) != width:
            raise SlurmOutputError(f"slurm: cannot read sacctmgr's row of {len(row)} fields: {'|'.join(row)[:80]!a}")
    return rows


def _limits(whose: str, settings: dict[str, tuple[Per, Kind | None]], texts: list[str]) -> tuple[Limit, ...]:
    found = []
    for (setting, (per, kind)), text in zip(settings.items(), texts, strict=True):
        for counted, most in _amounts(whose, setting, kind, text):
            found.append(Limit(whose=whose, setting=f"{setting}={text}", kind=counted, per=per, most=most))
    return tuple(found)


def _amounts(whose: str, setting: str, kind: Kind | None, text: str) -> list[tuple[Kind, float]]:
    if not text:
        return []
    if kind is None:
        parts = [_TRES.fullmatch(part) for part in text.split(",")]
        if not all(parts):
            raise SlurmOutputError(f"slurm: {whose}: cannot read {setting}: {text[:80]!a}")
        counts = [(_OF[part[1]], part[2]) for part in parts if part is not None and part[1] in _OF]
        if not all(count.isdigit() for _, count in counts):
            raise SlurmOutputError(f"slurm: {whose}: cannot read {setting}: {text[:80]!a}")
        return [(counted, float(count)) for counted, count in counts]
    if kind == "time":
        if (wall := _WALL.fullmatch(text)) is None:
            raise SlurmOutputError(f"slurm: {whose}: cannot read {setting}: {text[:80]!a}")
        days, hours, minutes, seconds = (int(part or 0) for part in wall.groups())
        return [(kind, ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds)]
    if not text.isdigit():
        raise SlurmOutputError(f"slurm: {whose}: cannot read {setting}: {text[:80]!a}")
    return [(kind, float(text))]
