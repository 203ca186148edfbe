"""Recognises that a part of a node recovered from a problem: a port came up again, a file server answered again.

Compares a line that reports a problem with the later lines of the same text. If a later line reports the recovery,
`clues` reports a weaker kind of clue. The clue is not dropped, because the problem may have broken a connection. Never
judges an incident. Pure.

Texts are those of the Linux kernel's network, bonding, NFS, NVMe and PCIe code, of mlx5, Lustre, and of NCCL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

MAX_LINES = 256
"""Number of later lines that are examined for each literal."""
_LINE_CHARACTERS = 600


class TroubleEnd(msgspec.Struct, frozen=True):
    """The form of lines that report the recovery from one kind of problem.

    `kind`: the weaker kind of clue; `needles`: literals of which such a line contains one; `ended`: pattern of such a
    line; `part`: pattern with the name of the port, server or disk in one of its groups, for both lines. Lines about
    different parts are unrelated.
    """

    kind: str
    needles: tuple[str, ...]
    ended: re.Pattern[str]
    part: re.Pattern[str]


_PORT = TroubleEnd(
    "link recovered",
    ("ink is Up", "ink is up", "Link up", "Link Up", "link status definitely up", "Cable plugged", "becomes ready"),
    re.compile(r"[Ll]ink is [Uu]p|Link [Uu]p|link status definitely up|Cable plugged|link becomes ready"),
    re.compile(
        r"(?:slave|backup) ([^\s)]{1,32})|for interface ([^\s,]{1,32})|mlx5_core (\S{1,32}): Port module|"
        r"NETDEV WATCHDOG: (?:CPU: \d{1,5}: )?(\S{1,32}) \(|([^\s:]{1,32}):? (?:NIC )?[Ll]ink (?:is |becomes |up|down)"
    ),
)
_FILE_SERVER = TroubleEnd(
    "storage recovered",
    ("Connection restored", "nfs: server "),
    re.compile(r"Connection restored|nfs: server \S{1,255} OK"),
    re.compile(r"nfs: server (\S{1,255})|([\w.-]{1,64}-(?:OST|MDT)[0-9a-fA-F]{4})|(MG)[CS]"),
)
_PCIE = TroubleEnd(
    "pcie recovered",
    ("evice recovery successful",),
    re.compile(r"AER: [Dd]evice recovery successful"),
    re.compile(r"pcieport ([\da-fA-F:.]{7,16}): AER"),
)
TROUBLE_ENDS: Mapping[str, TroubleEnd] = {
    "port down": _PORT,
    "nic stuck": _PORT,
    "nic failure": TroubleEnd(
        "link recovered",
        ("health recovery succeeded", "recovered after timeout"),
        re.compile(r"mlx5_core .{0,200}(?:recovery succeeded|recovered after)"),
        re.compile(r"mlx5_core ([\da-fA-F:.]{7,16})"),
    ),
    "file server silent": _FILE_SERVER,
    "disk failure": TroubleEnd(
        "storage recovered",
        ("default/read/poll queues",),
        re.compile(r"\d{1,5}/\d{1,5}/\d{1,5} default/read/poll queues"),
        re.compile(r"(nvme\d{1,4})"),
    ),
    "pcie fatal": _PCIE,
    "pcie non-fatal": _PCIE,
    "ib event": TroubleEnd(
        "link recovered",
        ("port active",),
        re.compile(r"async event.{0,24}port active"),
        re.compile(r"\b(\w{1,32}:\d{1,3}) Got\b"),
    ),
}


def recovered_kind(kind: str, line: str, text: str, after: int) -> str | None:
    """Return the weaker kind of a clue if a later line reports the recovery of the same part; else None.

    `line`: line with the problem, of kind `kind`; `text`, from `after` on: the later lines.
    """
    recovery = TROUBLE_ENDS.get(kind)
    if recovery is None:
        return None
    part = _part(recovery, line)
    for needle in recovery.needles:
        at = text.find(needle, after)
        for _ in range(MAX_LINES):
            if at < 0:
                break
            start = max(text.rfind("\n", 0, at) + 1, at - _LINE_CHARACTERS)
            end = text.find("\n", at, at + _LINE_CHARACTERS)
            later = text[start : end if end >= 0 else at + _LINE_CHARACTERS]
            if recovery.ended.search(later) and _is_same(part, _part(recovery, later)):
                return recovery.kind
            at = text.find(needle, at + len(later)) if end >= 0 else -1
    return None


def _part(recovery: TroubleEnd, line: str) -> str:
    match = recovery.part.search(line)
    return next((group for group in match.groups() if group), "") if match is not None else ""


def _is_same(part: str, later_part: str) -> bool:
    """Return whether two lines may concern the same part; a line without the name of a part may concern any part."""
    return not part or not later_part or part == later_part
