"""Parser for `scontrol show reservation --oneliner`: bytes in, reservations out, without expanding their nodes. Pure.

Fields without a value, and fields that this module does not know, differ between releases and are ignored. Called by
`resihp.slurm.commands`.
"""

from __future__ import annotations

import re

from resihp.slurm.client import Reservation
from resihp.slurm.errors import SlurmOutputError
from resihp.slurm.parsing.fields import MISSING_VALUES, decoded, time_of, unreadable
from resihp.slurm.parsing.parse import NODE_LIST

_FIELD = re.compile(r"(\w+)=(\S*)", re.ASCII)
_NAME = re.compile(r"[^\s=]{1,255}")
NONE_TEXT = "No reservations in the system"


def reservations(output: bytes) -> list[tuple[Reservation, str]]:
    """Return each reservation, without its nodes, and its node list; an empty list for a reservation of licenses.

    A reservation that cannot be parsed does not affect the others. Raises SlurmOutputError if none can be parsed.
    """
    parsed: list[tuple[Reservation, str]] = []
    refusal = None
    for line in decoded(output, "scontrol").splitlines():
        if not line.strip() or line.startswith(NONE_TEXT):
            continue
        try:
            parsed.append(_reservation(line))
        except SlurmOutputError as error:
            refusal = refusal or error
    if refusal is not None and not parsed:
        raise refusal
    return parsed


def _reservation(line: str) -> tuple[Reservation, str]:
    fields: dict[str, str] = {}
    for key, value in _FIELD.findall(line):
        fields.setdefault(key, value)
    name = fields.get("ReservationName", "")
    if not line.startswith("ReservationName=") or not _NAME.fullmatch(name) or not name.isprintable():
        raise unreadable("scontrol", "a reservation's name", line)
    begins_at = time_of(fields.get("StartTime", ""), f"when reservation {name} begins")
    ends_at = time_of(fields.get("EndTime", ""), f"when reservation {name} ends")
    if begins_at is None or ends_at is None:
        raise unreadable("scontrol", f"the times of reservation {name}", line)
    nodelist = fields.get("Nodes", "")
    if nodelist in MISSING_VALUES:
        nodelist = ""
    elif not NODE_LIST.fullmatch(nodelist):
        raise unreadable("scontrol", f"the nodes of reservation {name}", nodelist)
    flags = frozenset(filter(None, fields.get("Flags", "").split(",")))
    return Reservation(name=name, begins_at=begins_at, ends_at=ends_at, flags=flags), nodelist
