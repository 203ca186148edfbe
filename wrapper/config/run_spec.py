"""The request that describes one run: written by `resihp run` into the job's folder, read by supervisor and agents.

It is a file, not arguments, so that the list of processes reveals nothing about a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from resihp.errors import UsageError
from resihp.record.journal import SlurmIdentity
from resihp.settings import Settings
from resihp.slurm.drains.site_limits import NO_LIMITS, DrainLimits
from resihp.worker.forkserver import PRELOADED_MODULES
from resihp.wrapper.job_folder import Job, OurJob, write_private
from resihp.wrapper.launch.ports import Ports

CHECKPOINT_PLACE, ITERATION_PLACE = "{checkpoint}", "{checkpoint_iteration}"
"""Stand in the command of a script for the checkpoint from which it is to resume: its path, its last iteration."""
RESUME_VARIABLE, RESUME_ITERATION_VARIABLE = "RESIHP_RESUME_FROM", "RESIHP_RESUME_ITERATION"
"""Environment variables with the same values."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Description of how to start the user's command. `argv` begins with the script, the module's name, or the
    command."""

    kind: Literal["script", "module", "command"]
    argv: tuple[str, ...]
    interpreter: str
    preload: str = PRELOADED_MODULES


class SlurmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm job of a run, and limits on the run's requests to Slurm. An empty string means that a setting is not
    set.

    Counts are per node; None if unknown. `host_names`: for each node, the name by which Slurm reaches it. `job_id`,
    `number`: as in `resihp.wrapper.launch.allocation.Allocation`; an empty number means that it equals the id.
    """

    job_id: str
    number: str = ""
    cluster: str
    identity: SlurmIdentity | None = None
    batch_node: str
    host_names: dict[str, str]
    cpus: int | None
    gpus: int | None
    """Number of GPUs of a node that steps request from Slurm; None if the allocation has no GPUs."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    replacement_partition: str = ""
    replacement_qos: str = ""
    constraint: str = ""
    reservation: str = ""
    extra: tuple[str, ...] = ()
    """Further options of sbatch."""
    step_extra: tuple[str, ...] = ()
    """Further options of the srun step that starts the agents."""
    limits: DrainLimits = NO_LIMITS
    """The site's limits on drains by all jobs together."""
    health_command: tuple[str, ...] = ()
    """The site's own health check of a node (`resihp.wrapper.site_check`); empty for none."""
    health_timeout_s: float = 30.0
    spool: str = ""
    comment: bool = True


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """The container of the workers. `mounts`: (source, destination, read-only), including the job's own folders."""

    runtime: Literal["apptainer", "enroot"]
    image: str
    mounts: tuple[tuple[str, str, bool], ...]


class ListenerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The listeners of a job (`resihp.wrapper.sinks.fanout`). Paths are absolute; 0 or an empty string means that a
    listener is off.

    `webhook` may be secret: only the owner can read this file, and we write the URL nowhere else.
    """

    metrics_port: int = 0
    textfile: str = ""
    tensorboard: str = ""
    traces: bool = False
    webhook: str = ""
    webhook_file: str = ""
    command: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    timeout_s: float = 10.0
    audit: str = ""
    """The site's folder for the audit of decisions."""
    share: str = ""
    """The site's folder for summaries of running jobs."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for one run. Folders are absolute. `python_path`: the user's PYTHONPATH, which only workers get."""

    settings: Settings
    folder: str
    program: Program
    command: tuple[str, ...]
    cwd: str
    python_path: str
    checkpoint_folder: str
    checkpoint_keep: int
    resume: bool
    ledger_url: str
    restart_count: int
    checkpoint_pattern: str = ""
    """Value of `[checkpoint] latest`; empty if not set."""
    progress_pattern: str = ""
    """Value of `[progress] pattern`; empty if not set."""
    ledger_keep_s: float | None = None
    """Value of `[ledger] keep`, in seconds; None to keep everything for ever."""
    host: str = "127.0.0.1"
    """Address that the supervisor listens on: never all addresses of a machine."""
    ports: Ports | None = None
    """Range of ports on which our processes listen for other nodes; None: any port."""
    interface: str = ""
    """Network interface of the workers, from `[network] interface`; empty: the interface by which the supervisor is
    reached."""
    succession: bool = False
    """Whether agents keep copies of the journal, and elect another supervisor if the supervisor's node is lost."""
    chained: bool = False
    """Whether the job is part of a chain, in which each job resumes from the checkpoints of the previous one."""
    begins_at: int = 0
    """Iteration of the newest checkpoint when the run begins; 0 without a checkpoint."""
    run: str = ""
    """Identifier that is shared by all attempts of one training, which resume from each other's checkpoints."""
    go_on: str = ""
    """Shell command that resumes from this run's checkpoints; empty if not recorded."""
    slurm: SlurmRequest | None = None
    container: Container | None = None
    listening: ListenerSettings = ListenerSettings()
    configuration: dict[str, object]

    def save(self) -> Path:
        write_private(self.of_job.run_file, msgspec.json.encode(self))
        return self.of_job.run_file

    @property
    def job(self) -> str:
        return self.settings.job

    @property
    def of_job(self) -> OurJob:
        """The job's folder as an `OurJob`. This is safe: only `load`, which checks the folder, and `resihp run` create
        requests."""
        return OurJob(self.job, Path(self.folder))


def virtual_nodes(count: int) -> tuple[str, ...]:
    """Return names for `count` virtual nodes, which are only processes on this machine."""
    return tuple(f"n{i + 1}" for i in range(count))


def load(path: Path) -> RunRequest:
    """Read a request. `path` is run.json in a job's folder; if that folder was moved, paths inside it are adapted.

    Raises OwnershipError if others could have written the file, UsageError if it is missing or of another version.
    """
    job = Job(path.parent.name, path.parent)
    try:
        request = msgspec.json.decode(job.read_own(path.name), type=RunRequest)
        checkpoints = str(job.now(Path(request.checkpoint_folder))) if request.checkpoint_folder else ""
        return msgspec.structs.replace(request, folder=str(job.folder), checkpoint_folder=checkpoints)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a run of this version: {error}") from error
