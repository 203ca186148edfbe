"""The interface to Slurm: the questions that can be asked, and the form of the answers. `slurm.commands` implements it.

Synchronous, each call with a timeout; called from threads. Every method raises SlurmUnavailableError if there is no
answer, SlurmRefusedError if the answer is no, SlurmOutputError if it cannot be read. Callers treat no answer as
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

    `state` is the base state in lower case (`idle`, `allocated`, `mixed`, `down`, `unknown`, ...), `flags` are the
    words joined to it with plus signs, in lower case (`drain`, `not_responding`, `completing`, ...). `reason_by` is the
    user who set `reason`. Numbers are 0 where they cannot be read. `unreadable` describes what could not be read if
    that includes the state: then only the node's name is known, and nothing is done to it.
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
    unreadable: str = ""

    @property
    def draining(self) -> bool:
        return "drain" in self.flags

    @property
    def instance_gone(self) -> bool:
        """Whether the cloud instance under this name is gone or going, regardless of whether another one comes up."""
        powered = {"power_down", "powering_down", "powered_down", "powering_up"}
        return "cloud" in self.flags and bool(self.flags & powered)

    @property
    def usable(self) -> bool:
        """Whether Slurm would start work there."""
        return self.state in ("idle", "allocated", "mixed") and not self.flags & {"drain", "not_responding", "fail"}


ENDED_STATES = frozenset(
    {
        *("boot_fail", "cancelled", "completed", "deadline", "failed", "node_fail", "out_of_memory", "preempted"),
        *("revoked", "timeout"),
    }
)
"""States of jobs that are over; `revoked`: another cluster of a federation runs the job. In every other state of Slurm
22.05 to 26.05 a job holds nodes (completing, resizing, running, signaling, stage_out, stopped, suspended) or will hold
some once it starts, is requeued or released (configuring, expediting, pending, requeue_fed, requeue_hold, requeued,
resv_del_hold, special_exit). A state that only a later Slurm has does not count as an end."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as Slurm sees it. `state` is in lower case (`pending`, `running`, `completing`, `preempted`, ...).

    `seconds_left` until its time limit; None without one. `why` is Slurm's reason for the state. `preempted`: another
    job takes its place, at once or after a grace time; false once the job runs again. `submitted_at`: UTC, seconds
    since 1970, None if Slurm does not report it; for a requeued job, the time of the requeue. `element` is its name as
    an array element, `12_3`, regardless of the id that was asked for; empty for other jobs.
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
    submitted_at: float | None = None
    comment: str = ""
    element: str = ""

    @property
    def active(self) -> bool:
        """Whether the job holds nodes, or will."""
        return self.state not in ENDED_STATES


class Gres(msgspec.Struct, frozen=True):
    """Generic resources of one kind, such as `gpu`; an empty `type` stands for any type."""

    name: str
    type: str
    count: int


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a job's request to Slurm that describe its nodes. Empty strings: not specified.

    `exclusive` is how nodes are allocated whole: `node`, or per `user`, `mcs` label or `topo` segment; empty if not at
    all. `gres` are per node, `gres_in_total` for the job, its tasks or sockets. `memory_mb` is one node's share, 0 if
    no limit was set or all memory was requested; `memory_per_gpu_mb` was requested instead of it. `licenses` are those
    of the whole job.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    licenses: str = ""
    wckey: str = ""
    network: str = ""
    container: str = ""
    exclusive: str = ""
    oversubscribe: bool = False
    gres: tuple[Gres, ...] = ()
    gres_in_total: tuple[Gres, ...] = ()
    memory_mb: int = 0
    memory_per_gpu_mb: int = 0
    disk_mb: int = 0


class Slurm(Protocol):
    """Questions and orders that resihp has for Slurm."""

    def version(self) -> tuple[int, int, int]: ...

    def cluster(self) -> str:
        """Return the cluster's name."""

    def nodes(self, names: Sequence[str]) -> Mapping[str, NodeView]:
        """Return these nodes; a node that Slurm does not know is left out."""

    def drained(self) -> Mapping[str, NodeView]:
        """Return all nodes of the cluster that are drained or draining."""

    def job(self, job_id: str) -> JobView | None:
        """Return one job, pending, running or recently ended; None if Slurm does not know it."""

    def jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobView]:
        """Return several jobs in one call; jobs that Slurm does not know are left out."""

    def request(self, job_id: str) -> JobRequest:
        """Return the resources that a running job requested when it was submitted. Refused for a job that Slurm does
        not know."""

    def gpus(self, job_id: str) -> Mapping[str, int]:
        """Return the number of GPUs that a running job has on each of its nodes. Nodes without GPUs are left out."""

    def batch_script(self, job_id: str) -> str:
        """Return the batch script of one's own job (scontrol write batch_script). Refused for a job without one."""

    def expand(self, nodelist: str) -> tuple[str, ...]:
        """Expand a node list such as `n[1-3,7]` into names, in its order. Does not need the controller."""

    def drain(self, node: str, reason: str) -> None:
        """Set State=DRAIN. Requires an operator's rights."""

    def undrain(self, node: str) -> None:
        """Set State=UNDRAIN: a node that is down stays down. Requires an operator's rights.

        Until its slurmd has answered, the node is `not_responding`.
        """

    def keep_nodes(self, job_id: str, keep: Sequence[str]) -> None:
        """Give back to Slurm all nodes of one's own running job except these."""

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        """Submit with sbatch; return the job's id."""

    def requeue(self, job_id: str) -> None:
        """Requeue one's own job. A job that is pending already stays as it is."""

    def cancel(self, job_id: str) -> None: ...

    def runs_again(self, job_id: str) -> bool:
        """Decide whether Slurm will requeue one's own job by itself if its batch script ends now.

        It does for a job that it preempts, on releases where requesting a requeue would do harm (`slurm.releases`).
        """

    def end_for_good(self, job_id: str) -> None:
        """Make sure that one's own job, about to end, is not requeued because of its exit code.

        Only a job with an expedited requeue would be; for others nothing changes.
        """

    def comment(self, job_id: str, text: str) -> None:
        """Set the comment of one's own job, as composed by `commented`. Refused for a job that is ending or has
        ended."""


PREFIX = "resihp: "
"""Start of every reason that we give a node, and of our part of a job's comment; it identifies them as ours."""
MAX_REASON = 160


def sanitised(reason: str) -> str:
    """Return one line of printable text for Slurm, with our prefix and bounded in length: reasons end up in logs and
    tools."""
    text = " ".join("".join(c if c.isprintable() and c not in "\"'`$\\|;<>" else " " for c in reason).split())
    return PREFIX + text.removeprefix(PREFIX.strip()).strip()[: MAX_REASON - len(PREFIX)]


_OURS = re.compile(rf"(?:^| \| ){re.escape(PREFIX)}[^|]*$")


def commented(theirs: str, text: str) -> str:
    """Return a job's new comment: text written by others stays, and ours, sanitised, is appended."""
    kept = _OURS.sub("", theirs)
    return f"{kept} | {sanitised(text)}" if kept else sanitised(text)
