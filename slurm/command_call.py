"""One call of one Slurm command: without a shell, with a time limit, and with a limit on its output.

Decides which environment variables a command receives, and which failures count as no answer. Never interprets an
answer. Called by `resihp.slurm.commands` and other modules of this package.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from resihp.slurm.errors import SlurmOutputError, SlurmUnavailableError

LIMIT_BYTES = 64 << 20
"""Limit on one command's output; the largest clusters need less. Slurm prints about 200 bytes per node."""
REAP_S = 1.0
"""Seconds that a killed command may take to exit. A command that hangs in a file system does not exit, and is
abandoned."""

_SLURM_PREFIXES = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SQUEUE", "SINFO", "SCONTROL", "SCANCEL", "SACCT")
_CONNECTION = ("SLURM_CONF", "SLURM_JWT", "SLURM_SACK_SOCKET")
"""Variables that locate the controller and authenticate this user."""
_OUR_FOLDER = str(Path(os.path.abspath(__file__)).parents[2])
"""Folder from which resihp is imported."""
CLUSTER_CHOICES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
"""Variables that make sbatch submit to another cluster."""
_NOT_FOR_SUBMITTING = (*CLUSTER_CHOICES, "SBATCH_WAIT")
"""Options that the commands of resihp cannot honour: they talk to one cluster, and do not wait for a job's end."""
_OUTPUT_PREFIXES = ("SBATCH_CPU_BIND", "SBATCH_MEM_BIND")
"""Variables of a batch script that describe it; they are no options of sbatch."""


class CompletedCall(msgspec.Struct, frozen=True):
    """Result of one command. `status`: its exit status, negative for the signal that ended it."""

    status: int
    output: bytes
    complaint: str
    """Its standard error, on one line."""


def own_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for processes of resihp. PYTHONPATH contains only the folder of resihp, and only if it was
    in PYTHONPATH before (`pip install --target` puts resihp and its dependencies there): modules in other folders of
    the user could shadow resihp's."""
    kept = {key: value for key, value in base.items() if key != "PYTHONPATH"}
    entries = [os.path.abspath(entry) for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return kept | ({"PYTHONPATH": _OUR_FOLDER} if _OUR_FOLDER in entries else {})


def query_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for commands whose output is parsed, without variables that change formats, filter jobs or
    select another cluster."""
    kept = {key: value for key, value in base.items() if not key.startswith(_SLURM_PREFIXES) or key in _CONNECTION}
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def submit_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, which the new job inherits, without variables that describe the current job.

    The user's options for sbatch (`sbatch_choices`) are kept, as with any other call of sbatch.
    """
    return _without_slurm(base, (*_CONNECTION, *sbatch_choices(base)))


def replacement_environment(base: Mapping[str, str]) -> dict[str, str]:
    """As `submit_environment`, but without the user's options for sbatch: they would override those of the replacement,
    which Slurm reports of the main job."""
    return _without_slurm(base, _CONNECTION)


def sbatch_choices(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the user gives options to every call of sbatch."""
    return {
        key: value
        for key, value in base.items()
        if key.startswith("SBATCH_") and key not in _NOT_FOR_SUBMITTING and not key.startswith(_OUTPUT_PREFIXES)
    }


def _without_slurm(base: Mapping[str, str], allowed: Collection[str]) -> dict[str, str]:
    return {key: value for key, value in base.items() if not key.startswith(_SLURM_PREFIXES) or key in allowed}


def call(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    folder: Path | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> CompletedCall:
    """Run a command until it exits; `argv[0]` is a name or a path.

    Raises SlurmUnavailableError if the command is missing or exceeds `timeout_s`, SlurmOutputError if its output
    exceeds `limit_bytes`.
    """
    name = Path(argv[0]).name
    program = shutil.which(argv[0], path=environment.get("PATH", os.defpath))
    if program is None:
        raise SlurmUnavailableError(f"{name}: this machine has no such command; install Slurm's client programs")
    try:
        process = subprocess.Popen(
            [program, *argv[1:]],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SlurmUnavailableError(f"{name}: cannot be started ({error.strerror})") from None
    try:
        output, complaint = _read(process, name, timeout_s, limit_bytes)
    finally:
        _end(process)
    return CompletedCall(process.returncode, output, " ".join(complaint.decode("utf-8", "replace").split()))


def _read(process: subprocess.Popen[bytes], name: str, timeout_s: float, limit_bytes: int) -> tuple[bytes, bytes]:
    """Read standard output and standard error to their ends, and wait for the exit."""
    deadline = time.monotonic() + timeout_s
    late = SlurmUnavailableError(f"slurm: {name} gave no answer within {timeout_s:g} s; try: scontrol ping")
    assert process.stdout is not None
    assert process.stderr is not None
    chunks: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
    size = 0
    with selectors.DefaultSelector() as selector:
        for stream in chunks:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise late
            for key, _ in selector.select(left_s):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fd)
                chunks[key.fd].append(chunk)
                size += len(chunk)
            if size > limit_bytes:
                raise SlurmOutputError(f"slurm: {name} printed more than {limit_bytes} bytes; the rest was not read")
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise late from None
    output, complaint = (b"".join(parts) for parts in chunks.values())
    return output, complaint


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a command that has not exited, with all processes that it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
