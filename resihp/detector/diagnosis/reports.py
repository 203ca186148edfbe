"""The reports of an incident, and possible causes found in them.

Describes how a rank ended, and what a line of a log says about it. Never reads a log (`clues`), and never weighs causes
(`diagnosis`). Called by `candidates` and `diagnosis`, and by the controller, which collects the reports. Pure.
"""

from __future__ import annotations

import msgspec

from resihp.detector.diagnosis.clues import Clock
from resihp.detector.diagnosis.signatures import Signature
from resihp.protocol.messages import Clue


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """State of one rank at its end; or, with `ended` False, of a living rank that logged something relevant.

    `exit`: as in subprocess, negative for a signal; None if the rank went with its node, unobserved. `at`: time at
    which the end was noticed, seconds since 1970. `log`: tail of its log; `messages`: tails of its node's messages from
    the kernel and Slurm; `clues`: clues already read from either on the node. `fenced`: why the controller killed it,
    if it did. `bus`: PCI address of its device; `memory_bytes`: memory of its device.
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
    """How to read times in `log` and `messages`; None: only times that name their zone are read."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A clue or an end, of a rank or of a node as such (`report` None). `at`: its time, if its line has one; `until`:
    latest time at which it can have happened."""

    signature: Signature
    node: str
    report: Report | None
    at: float | None
    until: float | None
    clue: Clue | None = None
    line: str = ""
    survived: bool = False
    """Whether the process went on after it, or was ended by something else: evidence, but not a cause."""

    @property
    def kind(self) -> str:
        return self.clue.kind if self.clue is not None else self.signature.kind

    @property
    def order(self) -> tuple[bool, float, float, int]:
        """Sort key: nearest to a root cause first, then the earliest."""
        latest = self.until if self.until is not None else float("inf")
        return self.survived, self.signature.depth, latest, self.report.rank if self.report is not None else -1

    def named(self, group: str) -> str:
        return self.clue.named.get(group, "") if self.clue is not None else ""
