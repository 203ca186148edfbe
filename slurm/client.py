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
    who set `reason`. Figures are 0 where they cannot be read. `unreadable` says what could not be read where that was
    the state or more: then nothing is known of the node but its name, and nothing is done to it.
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
        """Of a cloud: what ran under this name is no more, or about to be, whether or not another one comes up."""
        powered = {"power_down", "powering_down", "powered_down", "powering_up"}
        return "cloud" in self.flags and bool(self.flags & powered)

    @property
    def usable(self) -> bool:
        """Whether Slurm would start something there."""
        return self.state in ("idle", "allocated", "mixed") and not self.flags & {"drain", "not_responding", "fail"}


OVER = frozenset(
    {
        *("boot_fail", "cancelled", "completed", "deadline", "failed", "node_fail", "out_of_memory", "preempted"),
        *("revoked", "timeout"),
    }
)
"""States of jobs that are over; `revoked`: another cluster of a federation runs it. In every other state of Slurm 22.05
to 26.05 a job holds nodes (completing, resizing, running, signaling, stage_out, stopped, suspended) or will once it
starts, is started again or let go (configuring, expediting, pending, requeue_fed, requeue_hold, requeued,
resv_del_hold, special_exit); one that only a later Slurm knows is not taken for an end."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as Slurm sees it. `state` in lower case (`pending`, `running`, `completing`, `preempted`, ...).

    `seconds_left` until its time limit; None without one. `why` is Slurm's reason for the state. `preempted`: another
    job takes its place, at once or after a time of grace; a job that was run again since is not. `submitted_at`: UTC,
    seconds since 1970, None where Slurm does not tell; of a requeued job, when it was requeued. `element`: what it is
    called as one of an array, `12_3`, whatever it was asked for by; empty for other jobs.
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
        """Whether it holds nodes, or will."""
        return self.state not in OVER


class Gres(msgspec.Struct, frozen=True):
    """Generic resources of one kind: `gpu`, of a `type` or, empty, of any."""

    name: str
    type: str
    count: int


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asked of Slurm that says what each of its nodes must be like. Empty strings: nothing was said.

    `exclusive` is how nodes are taken whole: `node`, or for a `user`, `mcs` label or `topo` segment; empty if not at
    all. `gres` are for each node, `gres_in_total` for the job, its tasks or sockets. `memory_mb` is one node's share, 0
    where no limit was set or all of it was asked for; `memory_per_gpu_mb` was asked for instead of it. `licenses` are
    those of the whole job.
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
    """What resihp asks of Slurm."""

    def version(self) -> tuple[int, int, int]: ...

    def cluster(self) -> str:
        """The cluster's name."""

    def nodes(self, names: Sequence[str]) -> Mapping[str, NodeView]:
        """These nodes; one that Slurm does not know is left out."""

    def drained(self) -> Mapping[str, NodeView]:
        """All nodes of the cluster that are drained or draining."""

    def job(self, job_id: str) -> JobView | None:
        """One job, pending, running or just ended; None when Slurm does not know it."""

    def jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobView]:
        """Several jobs in one call; those that Slurm does not know are left out."""

    def request(self, job_id: str) -> JobRequest:
        """What a running job asked for when it was submitted. Refused for one that Slurm does not know."""

    def gpus(self, job_id: str) -> Mapping[str, int]:
        """How many GPUs a running job has on each of its nodes. Nodes without any are left out."""

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

    def runs_again(self, job_id: str) -> bool:
        """Whether Slurm will run this job of one's own again by itself when its batch script ends now.

        It does with one that it preempts, on releases where asking for it would do harm (`slurm.releases`).
        """

    def end_for_good(self, job_id: str) -> None:
        """A job of one's own that is about to end is not to be run again because of its exit code.

        Only one with an expedited requeue would be; of others nothing is changed.
        """

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
