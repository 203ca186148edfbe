"""Decides whether a problem of a node's network, disks, file servers or memory can have led to the ends of processes.

A port that is down, or a file server that does not answer, is a possible cause only if a process lost a connection or a
file, or hung. It is not if the process was killed by a signal from outside, or failed for a reason of its own. Never
chooses the root cause. Called by `candidates`. Pure.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from resihp.detector.diagnosis.signatures import Depth, Signature
from resihp.protocol.messages import ABORT_STATUS, Clue

MOMENT_S = 60.0
"""Longest time, in seconds, from a line to an end at which the time alone links them."""

_NETWORK_WORDS = re.compile(r"(?i)connect|timed? ?out|network|unreachable|socket|transport|\bNCCL\b|\bgloo\b")
_STORAGE_WORDS = re.compile(r"\b(?:OS|IO|EOF|Timeout)Error\b|I/O|Errno \d|timed? ?out|truncated|corrupt|BadZip")
_KINDS_FROM_A_LIVING_PEER = ("peer closed", "nccl remote", "launcher", "interrupted transfer")
"""Kinds of lines that report the end of a peer. A peer that closes a connection can be reached, so that such a line is
evidence of a broken link only at that moment."""
_OWN_SIGNALS = (signals.SIGKILL, signals.SIGSEGV, signals.SIGILL, signals.SIGFPE)
"""Signals that no broken connection and no file server causes. Other signals may follow from the end of another
rank."""
_MEMORY_WORDS = re.compile(r"[Kk]illed|SIGKILL|\bEOFError|died|terminated|exit(?:ed)? unexpectedly|[Mm]emory")
"""Words of an exception after the end of a child process, which the kernel may have killed for lack of memory."""
_ABSOLUTE = re.compile(r"['\"]/")
_FILE_KINDS = ("import", "file missing", "broken file", "loader ended")


class Ending(Protocol):
    """The end of a rank: the fields of its report that this module needs."""

    @property
    def ended(self) -> bool: ...
    @property
    def exit(self) -> int | None: ...
    @property
    def fenced(self) -> str: ...


class Endings(msgspec.Struct):
    """Summary of the ends of all ranks of an incident, as sets of ties ("network", "storage", "memory").

    `at_any_time`: ties with lines that can have led to an end whenever they were written; `at_the_moment`: only if
    written within `MOMENT_S` before the end; `against`: ties that an end with another cause rules out.
    """

    at_any_time: set[str]
    at_the_moment: set[str]
    against: set[str]
    spoken: bool = False
    """Whether any rank logged a reason of its end, or the loss of a peer."""

    def allow(self, signature: Signature, age_s: float | None) -> bool:
        """Return whether a line of this kind can be a cause. `age_s`: seconds from the line to the end; None:
        unknown."""
        tie = signature.tie
        of_that_moment = age_s is None or age_s <= MOMENT_S
        if not tie or (tie == "moment" and of_that_moment):
            return True
        if tie == "silence":
            return of_that_moment and not self.spoken
        if tie == "memory":
            return tie in self.at_any_time or tie not in self.against
        if tie in self.against or tie == "nothing":
            return False
        if tie in self.at_any_time and signature.depth < Depth.SIGN:
            return True
        return of_that_moment and (tie in self.at_any_time or tie in self.at_the_moment)


def ends_of(reports: Iterable[tuple[Ending, Sequence[tuple[Signature, Clue]]]]) -> Endings:
    """Return the summary of the ends of all ranks, each given with the clues in its own log."""
    ends = Endings(set(), set(), set())
    for report, own in reports:
        _add(ends, report, own)
    return ends


def _add(ends: Endings, report: Ending, own: Sequence[tuple[Signature, Clue]]) -> None:
    ends.spoken |= bool(own)
    for signature, clue in own:
        _add_words(ends, signature, clue, report.ended)
    if not report.ended:
        return
    if report.fenced or report.exit is None or report.exit == ABORT_STATUS:
        ends.at_any_time |= {"network", "storage"}
        return
    status = 128 - report.exit if 128 < report.exit <= 192 else report.exit
    if status == -signals.SIGKILL:
        ends.at_any_time.add("memory")
    if status == -signals.SIGBUS:  # a mapped file that cannot be read
        ends.against.add("network")
        ends.at_any_time.add("storage")
    elif -status in _OWN_SIGNALS:
        ends.against |= {"network", "storage"}
    elif not own and status >= 0:
        ends.at_the_moment |= {"network", "storage"}


def _add_words(ends: Endings, signature: Signature, clue: Clue, ended: bool) -> None:
    error = clue.named.get("error", "") if signature.depth == Depth.RAISED else ""
    network = signature.category in ("link", "secondary") or signature.depth in (Depth.TRANSFER, Depth.AFTER)
    relative = signature.kind == "file missing" and not _ABSOLUTE.search(error)  # it looked in the wrong folder
    storage = signature.category == "storage" or (signature.kind in _FILE_KINDS and not relative)
    if ended and signature.depth <= Depth.RAISED:
        of_memory = signature.category == "memory" or _MEMORY_WORDS.search(error)
        (ends.at_any_time if of_memory else ends.against).add("memory")
    if network or _NETWORK_WORDS.search(error):
        momentary = signature.kind in _KINDS_FROM_A_LIVING_PEER
        (ends.at_the_moment if momentary else ends.at_any_time).add("network")
        if not momentary:
            ends.at_any_time.add("storage")  # peers wait in vain for a rank that waits for a file
        return
    if storage or (_STORAGE_WORDS.search(error) and not relative):
        ends.at_any_time.add("storage")
        if ended:
            ends.against.add("network")
    elif ended and signature.depth <= Depth.RAISED:
        ends.against |= {"network", "storage"}
