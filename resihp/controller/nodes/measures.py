"""Choose the measure against a node that failed: drain it for all users, exclude it from its user's next jobs, or do
nothing.

A drained node is closed to all users until a human resumes it, so a drain requires evidence that the hardware is
broken. A node that merely died is left to Slurm: Slurm marks it down, and uses it again after a reboot if the site is
configured that way (ReturnToService). Pure; called by `drains`, which supplies the evidence.
`resihp.slurm.drains.exclusions` decides how long a node is excluded.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Measure = Literal["drain", "exclude"]
Grounds = Literal["hardware", "died again", "died", "agent"]

GROUNDS_TEXT: dict[Grounds, str] = {
    "hardware": "its hardware is broken",
    "died again": "it also died in an earlier run of this job",
    "died": "nothing indicates that its hardware is broken",
    "agent": "the node answers, only its agent ended",
}
"""The grounds of a measure in words for the user."""


class Decision(NamedTuple):
    measure: Measure
    grounds: Grounds


def decide(
    *, hardware: bool, answers: bool = False, together: bool = False, died_before: bool = False, may_drain: bool = True
) -> Decision | None:
    """Return the measure against one node; None if nothing is to be done.

    =============================================================  ==========  ========
    evidence                                                       grounds     measure
    =============================================================  ==========  ========
    one of its devices failed for good, or its kernel reported
    broken hardware (`hardware`); the rest does not matter         hardware    drain
    several nodes were lost together (`together`)                  -           nothing
    it was lost, but it answers (`answers`): a signal killed its
    agent (kill -9, out of memory), or Slurm reported its exit     agent       exclude
    it died or fell silent, as in an earlier run of the same
    Slurm job (`died_before`)                                      died again  drain
    it died or fell silent                                         died        exclude
    =============================================================  ==========  ========

    If no further drain is allowed (`may_drain` False), the node is excluded instead.
    """
    drain: Measure = "drain" if may_drain else "exclude"
    if hardware:
        return Decision(drain, "hardware")
    if together:
        return None
    if answers:
        return Decision("exclude", "agent")
    return Decision(drain, "died again") if died_before else Decision("exclude", "died")
