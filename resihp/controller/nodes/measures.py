"""What is done about a node that failed: drained for everybody, left out of its user's next jobs, or nothing.

A drain keeps a node from all users until a human comes, so it takes evidence against the hardware. A node that merely
died is Slurm's: it marks the node down, and takes it back after a reboot where the site has it so (ReturnToService).
Pure; asked by `drains`, which knows the evidence. How long a node is left out is `slurm.drains.exclusions`' to say.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Measure = Literal["drain", "exclude"]
Grounds = Literal["hardware", "died again", "died", "agent"]

TOLD: dict[Grounds, str] = {
    "hardware": "something of it is broken",
    "died again": "it died under an earlier run of this job, too",
    "died": "nothing says that its hardware is broken",
    "agent": "it answers, only its agent ended",
}
"""For the user."""


class Decision(NamedTuple):
    measure: Measure
    grounds: Grounds


def decide(
    *, hardware: bool, answers: bool = False, together: bool = False, died_before: bool = False, may_drain: bool = True
) -> Decision | None:
    """The measure for one node; None for nothing.

    =============================================================  ==========  ========
    what is known                                                  grounds     measure
    =============================================================  ==========  ========
    a device of it failed for good, or its kernel named broken
    hardware (`hardware`), whatever else                           hardware    drain
    several nodes were lost together (`together`)                  -           nothing
    it was lost, and it answers: its agent was killed by a signal
    (kill -9, out of memory) or ended, and Slurm could tell how    agent       exclude
    it died or fell silent, as in an earlier run of the same
    Slurm job (`died_before`)                                      died again  drain
    it died or fell silent                                         died        exclude
    =============================================================  ==========  ========

    Where no (further) drain is allowed (`may_drain`), the node is left out instead.
    """
    drain: Measure = "drain" if may_drain else "exclude"
    if hardware:
        return Decision(drain, "hardware")
    if together:
        return None
    if answers:
        return Decision("exclude", "agent")
    return Decision(drain, "died again") if died_before else Decision("exclude", "died")
