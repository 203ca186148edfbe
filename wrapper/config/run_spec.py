"""The request that describes one run: written by `resihp run` into the job's folder, read by supervisor and agents.

It is a file, not arguments, so that the list of processes reveals nothing about a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from resihp.errors import UsageError
from resihp.record.journal import SlurmIdentity
from resihp.settings import Settings
from resihp.worker.forkserver import PRELOADED_MODULES
from wrapper.job_folder import Job, OurJob, write_private
from wrapper.launch.ports import Ports


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the user's command. `argv` begins with the script, the module's name, or the command."""

    kind: Literal["script", "module", "command"]
    argv: tuple[str, ...]
    interpreter: str
    preload: str = PRELOADED_MODULES


class SlurmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm job of the run, and limits on requests to Slurm for it. Empty strings: not set.

    Counts are per node, None where they are unknown. `host_names`: by node, the name by which Slurm reaches it.
    `job_id`, `number`: see `wrapper.launch.allocation.Allocation`; an empty number means that it equals the id.
    """

    job_id: str
    number: str = ""
    cluster: str
    identity: SlurmIdentity | None = None
    batch_node: str
    host_names: dict[str, str]
    cpus: int | None
    gpus: int | None
    """Slurm's GPUs, which steps request; None: the allocation has none."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    extra: tuple[str, ...] = ()
    """Further options of sbatch."""
    most_drained: int | None = None
    """How many nodes of the cluster may be drained with our reason at a time, by all jobs; None: any number."""
    spool: str = ""
    comment: bool = True


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """Container of the workers. `mounts`: (source, destination, read-only), the job's own folders included."""

    runtime: Literal["apptainer", "enroot"]
    image: str
    mounts: tuple[tuple[str, str, bool], ...]


class ListenerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Listeners of the job (`wrapper.sinks.fanout`). Paths are absolute; 0 and empty strings: no listener.

    `webhook` may be secret: only the owner may read this file, and we store it nowhere else.
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


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Folders are absolute. `python_path` is the user's PYTHONPATH, which only workers get."""

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
    ledger_keep_s: float | None = None
    """Value of `[ledger] keep`."""
    host: str = "127.0.0.1"
    """Address that the supervisor listens on: never all addresses of a machine."""
    ports: Ports | None = None
    """Range of ports on which our processes listen for other nodes; None: any port."""
    interface: str = ""
    """Interface of the workers, from `[network] interface`; empty: the one on which the supervisor is reached."""
    succession: bool = False
    """Whether agents keep copies of the journal, and elect another supervisor when this one's node is lost."""
    chained: bool = False
    """Whether the job belongs to a chain, in which each job continues from the checkpoints of the one before."""
    begins_at: int = 0
    """Iteration of the newest checkpoint at the start; 0 for none."""
    run: str = ""
    """Identifier shared by all attempts that continue from each other's checkpoints."""
    go_on: str = ""
    """Shell command that continues from this run's checkpoints."""
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
        """The job's folder, as ours: `load` has checked who could have written it, and only it and `resihp run` make
        requests."""
        return OurJob(self.job, Path(self.folder))


def virtual_nodes(count: int) -> tuple[str, ...]:
    """Return names for nodes that are only processes on this machine."""
    return tuple(f"n{i + 1}" for i in range(count))


def load(path: Path) -> RunRequest:
    """Read a request. Raises OwnershipError if others could have written it, UsageError if it is missing or of another
    version.

    `path` is run.json in a job's folder. If that folder was moved, paths inside it follow it.
    """
    job = Job(path.parent.name, path.parent)
    try:
        document = msgspec.json.decode(job.read_own(path.name), type=dict[str, Any])
        request = msgspec.convert(document if "settings" in document else _of_0_1(document), RunRequest)
        checkpoints = str(job.now(Path(request.checkpoint_folder))) if request.checkpoint_folder else ""
        return msgspec.structs.replace(request, folder=str(job.folder), checkpoint_folder=checkpoints)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a run of this version: {error}") from error


def _of_0_1(document: dict[str, Any]) -> dict[str, Any]:
    """Convert a run that resihp 0.1 wrote, which may have to go on after an update: there, the settings of today stood
    at the top level and in the Slurm request."""
    slurm = document.get("slurm") or {}
    of_that_version = {"examine": True, "plans_ahead": False, "search_s": 0.0}
    its_own = {"slurm": bool(slurm), "chunks": document.get("virtual_stages", 1)}
    old = of_that_version | slurm | document | its_own
    if "replacement_min_left_s" in slurm:
        old["replacement_least_left_s"] = slurm["replacement_min_left_s"]
    return document | {"settings": {key: old[key] for key in Settings.__struct_fields__ if key in old}}
