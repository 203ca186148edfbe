"""What a run was asked to be: written by `resihp run` into the job's folder, read by supervisor and agents.

A file and not arguments, so that nothing of a job stands in the list of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from resihp.controller.interface import Settings
from resihp.errors import UsageError
from resihp.faults import Fault
from resihp.forkserver import PRELOAD
from wrapper.jobs import Job, write_private


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """How the user's command is started. `argv` begins with the script, the module's name, or the command."""

    kind: Literal["script", "module", "command"]
    argv: tuple[str, ...]
    interpreter: str
    preload: str = PRELOAD


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
    memory_bytes: int | None = None
    """Of each device; None where it is not known."""
    come_backs: int = 3
    faults: tuple[Fault, ...]
    checkpoint_folder: str
    checkpoint_every: int
    checkpoint_keep: int
    resume: bool
    ledger_url: str
    restart_count: int
    configuration: dict[str, object]

    def save(self) -> Path:
        write_private(self.of_job.run_file, msgspec.json.encode(self))
        return self.of_job.run_file

    @property
    def of_job(self) -> Job:
        return Job(self.job, Path(self.folder))

    @property
    def settings(self) -> Settings:
        return Settings(
            job=self.job,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            tp=self.tp,
            pp=self.pp,
            schedule=self.schedule,
            chunks=self.virtual_stages,
            sequence_parallel=self.sequence_parallel,
            memory_bytes=self.memory_bytes,
            come_backs=self.come_backs,
            faults=self.faults,
            checkpoint_every=self.checkpoint_every,
        )


def load(path: Path) -> RunRequest:
    """Raises UsageError when the file is not there or not of this version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRequest)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path}: not a run of this version: {error}") from error
