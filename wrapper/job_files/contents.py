"""The JSON files in a job's folder: their fields, and limits for reading them.

Decides which values are valid. Reads and writes nothing. Used by `job`, `registered` and the writers of these files.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from resihp.wrapper import registry

MAX_PROGRESS_BYTES = 64 << 10
"""Largest progress.json that is read, in bytes; ours have a few thousand."""
MAX_EXIT_CODE_BYTES = 64
READ_ERRORS = (OSError, ValueError, RecursionError)
"""Errors of reading and decoding a file. Errors of msgspec and of text encodings are ValueErrors."""


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of job.json. `created_at`: UTC, seconds since 1970. `starter`: identity of the process on `host` that
    created the job.

    `uuid`: the job's id in its ledger; empty until the journal is begun, and in files of earlier versions.
    """

    name: str
    host: str
    created_at: float
    journal: str
    ledger: str | None = None
    starter: str = ""
    uuid: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for invalid fields. A caller that decodes the file gets it as a msgspec.ValidationError."""
        if "\0" in self.journal or not self.journal.startswith("/"):
            raise ValueError("names no journal")
        if not 0 <= self.created_at < registry.LATEST_S:
            raise ValueError("has an invalid creation time")


class SupervisorFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of supervisor.json: the address at which the supervisor takes requests of operators."""

    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class LastIteration(msgspec.Struct, frozen=True, kw_only=True):
    """A committed iteration; `seconds` and `loss` are None if unknown. Times are UTC, in seconds since 1970."""

    iteration: int
    loss: float | None
    tokens: int
    seconds: float | None
    finished_at: float


class ProgressFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of progress.json: a job's progress, written by its supervisor every few seconds while it changes.

    `began_at`: the job's `created_at`, which tells the file from one of an earlier job in the same folder. `recent`:
    the last iterations, oldest first.
    """

    began_at: float
    written_at: float
    nodes: int
    gpus_per_node: int
    layout: str = ""
    target: int | None = None
    resumed_from: int = 0
    redone: bool = False
    """Whether a script without `resihp.Trainer` does iterations again after a restart, so that none is committed."""
    recent: tuple[LastIteration, ...] = ()


class OriginalFolder(msgspec.Struct):
    """The field of run.json with the folder in which the job was created."""

    folder: str = ""
