"""The interface to Slurm: queries and orders, and the form of the answers. `resihp.slurm.commands` implements it.

Calls are synchronous, have a timeout, and are made from threads. Every method raises SlurmUnavailableError if there is
no answer, SlurmRefusedError if Slurm refuses, and SlurmOutputError if the answer cannot be parsed. Callers treat a
missing answer as *unknown*: it is neither a verdict about a node, nor a proof that an order was not carried out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as Slurm sees it.

    `state` is the base state in lower case (`idle`, `allocated`, `mixed`, `down`, `unknown`, ...). `flags` are the
    words that Slurm appends to the state with plus signs, in lower case (`drain`, `not_responding`, `completing`, ...).
    `reason_by` is the user who set `reason`, `reason_at` the time (UTC, seconds since 1970; None if unknown). Numbers
    are 0 where they cannot be parsed. `features`: the active ones, only in the answer of `partition_nodes`.
    `unreadable`: description of the part of the row that cannot be parsed, if this includes the state; then only the
    node's name is known, and nothing is done to the node.
    """

    name: str
    state: str
    flags: frozenset[str] = frozenset()
    reason: str = ""
    reason_by: str = ""
    reason_at: float | None = None
    address: str = ""
    cpus: int = 0
    memory_mb: int = 0
    gpus: int = 0
    features: frozenset[str] = frozenset()
    unreadable: str = ""

    @property
    def draining(self) -> bool:
        return "drain" in self.flags

    @property
    def instance_gone(self) -> bool:
        """Whether the cloud instance with this name is powered down or about to be, even if another instance will get
        the name."""
        powered = {"power_down", "powering_down", "powered_down", "powering_up"}
        return "cloud" in self.flags and bool(self.flags & powered)

    @property
    def usable(self) -> bool:
        """Whether Slurm would start work on this node."""
        return self.state in ("idle", "allocated", "mixed") and not self.flags & {"drain", "not_responding", "fail"}


ENDED_STATES = frozenset(
    {
        *("boot_fail", "cancelled", "completed", "deadline", "failed", "node_fail", "out_of_memory", "preempted"),
        *("revoked", "timeout"),
    }
)
"""States of jobs that are over; `revoked`: another cluster of a federation runs the job. In every other state of Slurm
22.05 to 26.05, a job either holds nodes (completing, resizing, running, signaling, stage_out, stopped, suspended) or
will hold nodes once it starts, is requeued or released (configuring, expediting, pending, requeue_fed, requeue_hold,
requeued, resv_del_hold, special_exit). A state that only a later Slurm has does not count as over."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job as Slurm sees it. `state` is in lower case (`pending`, `running`, `completing`, `preempted`, ...).

    `why`: Slurm's reason for the state. `seconds_left`: until the time limit, None without a limit. `preempted`:
    another job takes this job's nodes, at once or after a grace time; false once the job runs again. `submitted_at`:
    UTC, seconds since 1970, None if Slurm does not report it; for a requeued job, the time of the requeue. `element`:
    the job's name as an array element, such as `12_3`, whichever id was queried; empty for other jobs.
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
        """Whether the job holds nodes, or will hold some later."""
        return self.state not in ENDED_STATES


class Gres(msgspec.Struct, frozen=True):
    """Generic resources of one kind, such as `gpu`; an empty `type` stands for any type."""

    name: str
    type: str
    count: int


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a job's request to Slurm that describe its nodes. Empty strings mean not specified.

    `exclusive`: how whole nodes are allocated: `node`, or per `user`, `mcs` label or `topo` segment; empty if nodes are
    not allocated whole. `gres`: generic resources per node; `gres_in_total`: those requested for the job, its tasks or
    its sockets. `memory_mb`: one node's share; 0 if no limit was set, if all memory was requested, or if
    `memory_per_gpu_mb` was requested instead. `licenses`: licenses of the whole job.
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


class NodeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """From where Slurm may choose a job's nodes: partitions, separated by commas, a reservation, and the nodes that the
    job requests or excludes by name. `contiguous`: its nodes must be neighbours."""

    partition: str = ""
    reservation: str = ""
    requested: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    contiguous: bool = False


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are reserved for a time. Times are UTC, in seconds since 1970. `flags`: Slurm's words, such as `MAINT`
    for maintenance. A reservation of licenses only has no nodes."""

    name: str
    begins_at: float
    ends_at: float
    nodes: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()


class Slurm(Protocol):
    """Queries and orders that resihp sends to Slurm."""

    def version(self) -> tuple[int, int, int]: ...

    def cluster(self) -> str:
        """Return the cluster's name."""

    def nodes(self, names: Sequence[str]) -> Mapping[str, NodeView]:
        """Return the views of these nodes, by name. Unknown nodes are omitted."""

    def partition_nodes(self, partition: str) -> Mapping[str, NodeView]:
        """Return the views of all nodes of a partition, or of several, separated by commas, by name. The views lack
        reasons and addresses."""

    def drained(self) -> Mapping[str, NodeView]:
        """Return all nodes of the cluster that are drained or draining."""

    def reservations(self) -> Sequence[Reservation]:
        """Return all reservations of the cluster, current and future ones."""

    def job(self, job_id: str) -> JobView | None:
        """Return a job that is pending, running or recently ended; None if Slurm does not know it."""

    def jobs(self, job_ids: Iterable[str]) -> Mapping[str, JobView]:
        """Return several jobs, by id. Unknown jobs are omitted."""

    def request(self, job_id: str) -> JobRequest:
        """Return the resources that a running job requested at its submission. Raises SlurmRefusedError for an unknown
        job."""

    def node_choice(self, job_id: str) -> NodeChoice:
        """Return from where Slurm may choose the nodes of a job, pending or running. Raises SlurmRefusedError for an
        unknown job."""

    def gpus(self, job_id: str) -> Mapping[str, int]:
        """Return the number of GPUs that a running job has on each of its nodes. Nodes without GPUs are omitted."""

    def batch_script(self, job_id: str) -> str:
        """Return the batch script of a job of this user (scontrol write batch_script). Raises SlurmRefusedError for a
        job without one."""

    def expand(self, nodelist: str) -> tuple[str, ...]:
        """Expand a node list such as `n[1-3,7]` into names, in order. Works without the controller."""

    def drain(self, node: str, reason: str) -> None:
        """Set State=DRAIN. Requires operator rights."""

    def undrain(self, node: str) -> None:
        """Set State=UNDRAIN. A node that is down stays down. Requires operator rights.

        The node is `not_responding` until its slurmd has answered.
        """

    def keep_nodes(self, job_id: str, keep: Sequence[str]) -> None:
        """Return all nodes of a running job of this user to Slurm, except for the nodes in `keep`."""

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        """Submit a batch script with sbatch; return the job's id."""

    def check_step(self, options: Sequence[str]) -> None:
        """Have srun read these options, without starting anything. Raises SlurmUsageError if it refuses them."""

    def requeue(self, job_id: str) -> None:
        """Requeue a job of this user. A pending job stays pending."""

    def exclude_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        """Set the nodes that a pending job of this user will not get, in place of those that it excluded before. Slurm
        refuses this for a job that is not pending."""

    def cancel(self, job_id: str) -> None: ...

    def runs_again(self, job_id: str) -> bool:
        """Decide whether Slurm itself will requeue a job of this user if its batch script ends now.

        True for a job that is being preempted, on releases where an additional request to requeue would do harm
        (`resihp.slurm.releases`).
        """

    def end_for_good(self, job_id: str) -> None:
        """Make sure that a job of this user, which is about to end, is not requeued because of its exit code.

        Changes only jobs with an expedited requeue; other jobs would not be requeued for that.
        """

    def comment(self, job_id: str, text: str) -> None:
        """Set the comment of a job of this user, to a text made by `commented`. Raises SlurmRefusedError for a job that
        is ending or has ended."""


PREFIX = "resihp: "
"""Start of every reason that resihp gives a node, and of its part of a job's comment; it identifies them as
resihp's."""
MAX_REASON = 160


def sanitised(reason: str) -> str:
    """Return `reason` as one line of printable text for Slurm, with `PREFIX`, and at most `MAX_REASON` characters long:
    reasons end up in logs and other tools."""
    text = " ".join("".join(c if c.isprintable() and c not in "\"'`$\\|;<>" else " " for c in reason).split())
    return PREFIX + text.removeprefix(PREFIX.strip()).strip()[: MAX_REASON - len(PREFIX)]


_OURS = re.compile(rf"(?:^| \| ){re.escape(PREFIX)}[^|]*$")


def commented(theirs: str, text: str) -> str:
    """Return a job's new comment: the text that others wrote, followed by `text` after `sanitised`."""
    kept = _OURS.sub("", theirs)
    return f"{kept} | {sanitised(text)}" if kept else sanitised(text)
