"""The one way to talk to Slurm: what can be asked, and how answers look. `slurm.commands` asks the real one.

Synchronous, each call with a timeout; called from threads. Every method raises SlurmUnavailableError when there is no
answer, SlurmRefusedError when the answer is no, SlurmOutputError when it cannot be read. Callers treat no answer as
*unknown*: never as a verdict about a node, and never as "it did not happen".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as Slurm sees it.

    `state` is the base state in lower case (`idle`, `allocated`, `mixed`, `down`, `unknown`, ...), `flags` what is
    joined to it with plus signs, in lower case (`drain`, `not_responding`, `completing`, ...). `reason_by` is the user
    who set `reason`.
    """

    name: str
    state: str
    flags: frozenset[str] = frozenset()
    reason: str = ""
    reason_by: str = ""
    address: str = ""
    cpus: int = 0
    memory_mb: int = 0
    gpus: int = 0

    @property
    def draining(self) -> bool:
        return "drain" in self.flags

    @property
    def usable(self) -> bool:
        """Whether Slurm would start something there."""
        return self.state in ("idle", "allocated", "mixed") and not self.flags & {"drain", "not_responding", "fail"}


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as Slurm sees it. `state` in lower case (`pending`, `running`, `completing`, `preempted`, ...).

    `seconds_left` until its time limit; None without one. `why` is Slurm's reason for the state. `preempted`: another
    job takes its place, at once or after a time of grace; a job that was run again since is not.
    """

    id: str
    name: str
    user: str
    state: str
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    why: str = ""
    restarts: int = 0
    seconds_left: float | None = None
    preempted: bool = False
    comment: str = ""

    @property
    def active(self) -> bool:
        """Whether it holds nodes, or will."""
        return self.state in ("pending", "configuring", "running", "completing", "suspended", "requeued", "resizing")


class Slurm(Protocol):
    """What resihp asks of Slurm."""

    def version(self) -> tuple[int, int, int]: ...

    def cluster(self) -> str:
        """The cluster's name."""

    def nodes(self, names: Sequence[str]) -> Mapping[str, NodeView]:
        """These nodes; one that Slurm does not know is left out."""

    def job(self, job_id: str) -> JobView | None:
        """One job, pending, running or just ended; None when Slurm does not know it."""

    def jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobView]:
        """Several jobs in one call; those that Slurm does not know are left out."""

    def batch_script(self, job_id: str) -> str:
        """The text of one's own job's batch script (scontrol write batch_script). Refused for a job without one."""

    def expand(self, nodelist: str) -> tuple[str, ...]:
        """Names in a node list such as `n[1-3,7]`, in its order. Needs no controller."""

    def drain(self, node: str, reason: str) -> None:
        """Set State=DRAIN. Needs an operator's rights."""

    def undrain(self, node: str) -> None:
        """Set State=UNDRAIN: a node that is down stays down. Needs an operator's rights.

        Until its slurmd has answered, the node is `not_responding`.
        """

    def keep_nodes(self, job_id: str, keep: Sequence[str]) -> None:
        """Give all nodes of one's own running job but these back to Slurm."""

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        """sbatch; returns the job's id."""

    def requeue(self, job_id: str) -> None:
        """Let a job of one's own run again, later. One that waits already is left to wait."""

    def cancel(self, job_id: str) -> None: ...

    def comment(self, job_id: str, text: str) -> None:
        """Set the comment of one's own job, as `commented` makes one. Refused for a job that is ending or has ended."""


PREFIX = "resihp: "
"""What every reason begins with that we give a node, and what we add to a job's comment: by it we know our own."""
MAX_REASON = 160


def sanitised(reason: str) -> str:
    """One line of printable text for Slurm, with our prefix and not too long: reasons end in logs and other tools."""
    text = " ".join("".join(c if c.isprintable() and c not in "\"'`$\\|;<>" else " " for c in reason).split())
    return PREFIX + text.removeprefix(PREFIX.strip()).strip()[: MAX_REASON - len(PREFIX)]


_OURS = re.compile(rf"(?:^| \| ){re.escape(PREFIX)}[^|]*$")


def commented(theirs: str, text: str) -> str:
    """A job's comment: what somebody else has written there stays, and ours, sanitised, stands behind it."""
    kept = _OURS.sub("", theirs)
    return f"{kept} | {sanitised(text)}" if kept else sanitised(text)
