"""Defines the reports of an incident, and the candidates for its root cause.

A report describes the end of a rank. Plain data: never reads a log (`clues`) and never chooses a cause (`diagnosis`).
Used by `candidates` and `diagnosis`, and by the controller, which collects the reports. Pure.
"""

from __future__ import annotations

import msgspec

from resihp.detector.diagnosis.clues import Clock
from resihp.detector.diagnosis.signatures import Signature
from resihp.protocol.messages import Clue


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank that ended, or, with `ended` False, of a rank that is alive and logged something relevant.

    `exit`: exit status as in `subprocess`, negative for a signal; None if it is unknown because the node was lost.
    `at`: time at which the end was noticed, in seconds since 1970. `log`: tail of the rank's log; `messages`: tails of
    the messages of the kernel and Slurm on the node; `clues`: clues that the agent found in them. `fenced`: the reason
    if the controller killed the rank, else empty. `bus`: PCI address of the device; `memory_bytes`: memory of the
    device.
    """

    rank: int
    node: str
    device: int | None = None
    ended: bool = True
    exit: int | None = None
    at: float | None = None
    pid: int = 0
    bus: str = ""
    log: str = ""
    messages: str = ""
    clues: tuple[Clue, ...] = ()
    fenced: str = ""
    memory_bytes: int | None = None
    clock: Clock | None = None
    """Facts to read the times in `log` and `messages`; None: only times with a zone are read."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate for the root cause: a clue or an end, of the rank of `report` or, if that is None, of the node as
    such.

    `at`: time in the clue's line, None without one; `until`: latest time at which the cause can have happened, None if
    unknown. Both in seconds since 1970.
    """

    signature: Signature
    node: str
    report: Report | None
    at: float | None
    until: float | None
    clue: Clue | None = None
    line: str = ""
    survived: bool = False
    """Whether the process continued after the clue, or something else ended it: then the clue is evidence, no cause."""

    @property
    def kind(self) -> str:
        return self.clue.kind if self.clue is not None else self.signature.kind

    @property
    def order(self) -> tuple[bool, float, float, int]:
        """Sort key of candidates: the nearest to a root cause first, then the earliest."""
        latest = self.until if self.until is not None else float("inf")
        return self.survived, self.signature.depth, latest, self.report.rank if self.report is not None else -1

    def named(self, group: str) -> str:
        return self.clue.named.get(group, "") if self.clue is not None else ""
