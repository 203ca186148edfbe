"""What a run was asked to be: written by `resihp run` into the job's folder, read by supervisor and agents.

A file and not arguments, so that nothing of a job stands in the list of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from resihp.errors import UsageError
from resihp.faults import Fault
from resihp.worker.forkserver import PRELOAD
from wrapper.job_folder import Job, write_private
from wrapper.launch.ports import Ports

if TYPE_CHECKING:
    from resihp.controller.interface import Settings


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """How the user's command is started. `argv` begins with the script, the module's name, or the command."""

    kind: Literal["script", "module", "command"]
    argv: tuple[str, ...]
    interpreter: str
    preload: str = PRELOAD


class SlurmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm job that the run is in, and what may be asked of Slurm for it. Empty strings: nothing is said.

    Counts are of each node, None where they are not known. `host_names`: by node, what Slurm reaches it by. `job_id`,
    `number`: see `wrapper.launch.allocation.Allocation`; an empty number is the same as the id.
    """

    job_id: str
    number: str = ""
    cluster: str
    batch_node: str
    host_names: dict[str, str]
    cpus: int | None
    gpus: int | None
    """Slurm's GPUs, that steps ask for; None: the allocation has none."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    extra: tuple[str, ...] = ()
    """Further options of sbatch."""
    replacements: int = 0
    replacement_min_left_s: float = 1800.0
    replacement_wait_s: float = 60.0
    drains: int = 0
    """What earlier runs of the Slurm job have left of it."""
    died_before: tuple[str, ...] = ()
    """Nodes that died under these."""
    most_drained: int | None = None
    """How many nodes of the cluster may be drained by us at a time, whoever of us drained them; None: any number."""
    spool: str = ""
    on_drain: Literal["stay", "vacate"] = "stay"
    on_warning: Literal["requeue", "end"] = "requeue"
    may_requeue: bool = False
    """Whether the job is to be run again when too many of its nodes are lost."""
    restarts_left: int = 0
    """How many more runs may follow if this one fails and has added no checkpoint."""
    comment: bool = True


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """What workers run in. `mounts`: (source, destination, read-only), the job's own folders among them."""

    runtime: Literal["apptainer", "enroot"]
    image: str
    mounts: tuple[tuple[str, str, bool], ...]


class ListenerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who is told of the job (`wrapper.sinks.fanout`). Paths are absolute; 0 and empty strings: nobody.

    `webhook` may be secret: this file is its owner's alone, and nothing else of us holds it.
    """

    metrics_port: int = 0
    textfile: str = ""
    tensorboard: str = ""
    webhook: str = ""
    webhook_file: str = ""
    command: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    timeout_s: float = 10.0


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Folders are absolute. `python_path` is the user's PYTHONPATH, which only workers get."""

    job: str
    folder: str
    program: Program
    command: tuple[str, ...]
    cwd: str
    python_path: str
    nodes: int
    gpus_per_node: int
    tp: int
    pp: int
    schedule: str
    virtual_stages: int = 1
    sequence_parallel: bool = False
    tune: bool = False
    memory_bytes: int | None = None
    """Of each device; None where it is not known."""
    come_backs: int = 3
    examine: bool = True
    detect: bool = True
    recheck_s: float = 60.0
    faults: tuple[Fault, ...]
    checkpoint_folder: str
    checkpoint_every: int
    checkpoint_keep: int
    resume: bool
    ledger_url: str
    restart_count: int
    host: str = "127.0.0.1"
    """Address that the supervisor listens on: never all of a machine's."""
    ports: Ports | None = None
    """Where our processes listen for other nodes; None: as ports come."""
    interface: str = ""
    """The workers', as `[network] interface` has it; empty: the one on which the supervisor is reached."""
    succession: bool = False
    """Whether agents keep copies of the journal, and choose another supervisor when this one's node is gone."""
    node_names: tuple[str, ...] = ()
    """In Slurm's order, in which a step's tasks are numbered; n1, n2, ... without Slurm."""
    spares: int = 0
    """How many of the nodes are not in the first layout: those with the highest ranks."""
    chained: bool = False
    """Whether the job is one of a chain, whose jobs go on from each other's checkpoints."""
    begins_at: int = 0
    """Iteration of the newest checkpoint that there was; 0 for none."""
    slurm: SlurmRequest | None = None
    container: Container | None = None
    listening: ListenerSettings = ListenerSettings()
    configuration: dict[str, object]

    def __post_init__(self) -> None:
        if not self.node_names:
            msgspec.structs.force_setattr(self, "node_names", virtual_nodes(self.nodes))

    def save(self) -> Path:
        write_private(self.of_job.run_file, msgspec.json.encode(self))
        return self.of_job.run_file

    @property
    def of_job(self) -> Job:
        return Job(self.job, Path(self.folder))

    @property
    def settings(self) -> Settings:
        from resihp.controller.interface import Settings  # a third of an agent's start, which needs none of it

        slurm = self.slurm
        return Settings(
            job=self.job,
            nodes=self.nodes,
            node_names=self.node_names,
            gpus_per_node=self.gpus_per_node,
            tp=self.tp,
            pp=self.pp,
            schedule=self.schedule,
            chunks=self.virtual_stages,
            sequence_parallel=self.sequence_parallel,
            tune=self.tune,
            memory_bytes=self.memory_bytes,
            come_backs=self.come_backs,
            examine=self.examine,
            detect=self.detect,
            recheck_s=self.recheck_s,
            faults=self.faults,
            checkpoint_every=self.checkpoint_every,
            spares=self.spares,
            slurm=slurm is not None,
            drains=slurm.drains if slurm else 0,
            died_before=slurm.died_before if slurm else (),
            replacements=slurm.replacements if slurm else 0,
            replacement_least_left_s=slurm.replacement_min_left_s if slurm else 0.0,
            replacement_wait_s=slurm.replacement_wait_s if slurm else 60.0,
            batch_node=slurm.batch_node if slurm else "",
            on_warning=slurm.on_warning if slurm else "requeue",
            on_drain=slurm.on_drain if slurm else "stay",
            may_requeue=slurm is not None and slurm.may_requeue,
            restarts_left=slurm.restarts_left if slurm else 0,
        )


def virtual_nodes(count: int) -> tuple[str, ...]:
    """Names of nodes that are only processes on this machine."""
    return tuple(f"n{i + 1}" for i in range(count))


def load(path: Path) -> RunRequest:
    """Raises UsageError when the file is not there or not of this version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRequest)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path}: not a run of this version: {error}") from error
