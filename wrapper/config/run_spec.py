"""What a run was asked to be: written by `resihp run` into the job's folder, read by supervisor and agents.

A file and not arguments, so that nothing of a job stands in the list of processes.
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
    """How the user's command is started. `argv` begins with the script, the module's name, or the command."""

    kind: Literal["script", "module", "command"]
    argv: tuple[str, ...]
    interpreter: str
    preload: str = PRELOADED_MODULES


class SlurmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm job that the run is in, and what may be asked of Slurm for it. Empty strings: nothing is said.

    Counts are of each node, None where they are not known. `host_names`: by node, what Slurm reaches it by. `job_id`,
    `number`: see `wrapper.launch.allocation.Allocation`; an empty number is the same as the id.
    """

    job_id: str
    number: str = ""
    cluster: str
    identity: SlurmIdentity | None = None
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
    most_drained: int | None = None
    """How many nodes of the cluster may be drained by us at a time, whoever of us drained them; None: any number."""
    spool: str = ""
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
    """As `[ledger] keep` has it."""
    host: str = "127.0.0.1"
    """Address that the supervisor listens on: never all of a machine's."""
    ports: Ports | None = None
    """Where our processes listen for other nodes; None: as ports come."""
    interface: str = ""
    """The workers', as `[network] interface` has it; empty: the one on which the supervisor is reached."""
    succession: bool = False
    """Whether agents keep copies of the journal, and choose another supervisor when this one's node is gone."""
    chained: bool = False
    """Whether the job is one of a chain, whose jobs go on from each other's checkpoints."""
    begins_at: int = 0
    """Iteration of the newest checkpoint that there was; 0 for none."""
    run: str = ""
    """What attempts have in common that go on from each other's checkpoints."""
    go_on: str = ""
    """The command that goes on from this run's checkpoints, to be typed as it is."""
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
        """Ours: `load` has looked who could have written the folder, and nobody else makes a request."""
        return OurJob(self.job, Path(self.folder))


def virtual_nodes(count: int) -> tuple[str, ...]:
    """Names of nodes that are only processes on this machine."""
    return tuple(f"n{i + 1}" for i in range(count))


def load(path: Path) -> RunRequest:
    """Raises OwnershipError when others could have written it, UsageError when it is not there or not of this version.

    `path` is run.json in a job's folder; where that was moved since, its own folders are those of today."""
    job = Job(path.parent.name, path.parent)
    try:
        found = msgspec.json.decode(job.read_own(path.name), type=dict[str, Any])
        request = msgspec.convert(found if "settings" in found else _of_0_1(found), RunRequest)
        checkpoints = str(job.now(Path(request.checkpoint_folder))) if request.checkpoint_folder else ""
        return msgspec.structs.replace(request, folder=str(job.folder), checkpoint_folder=checkpoints)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a run of this version: {error}") from error


def _of_0_1(found: dict[str, Any]) -> dict[str, Any]:
    """A run that was written by resihp 0.1, which may have to go on after an update: what is settings now stood beside
    the rest, and with what is asked of Slurm."""
    slurm = found.get("slurm") or {}
    old = {"examine": True} | slurm | found | {"slurm": bool(slurm), "chunks": found.get("virtual_stages", 1)}
    if "replacement_min_left_s" in slurm:
        old["replacement_least_left_s"] = slurm["replacement_min_left_s"]
    return found | {"settings": {key: old[key] for key in Settings.__struct_fields__ if key in old}}
