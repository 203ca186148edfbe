"""One call of one of Slurm's commands: started without a shell, ended in time, its output of bounded size.

Decides what of our environment a command sees, and which failures are no answer at all. Never reads what an answer
says. Called by `slurm.commands` alone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slurm.errors import SlurmOutputError, SlurmUnavailableError

LIMIT_BYTES = 64 << 20
"""More than the largest cluster has to say. Slurm's own text is some 200 bytes a node."""
REAP_S = 1.0
"""How long a killed command may take to go. One that hangs in a file system does not; it is left behind."""

_SLURMS = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SQUEUE", "SINFO", "SCONTROL", "SCANCEL", "SACCT")
_CONNECTION = ("SLURM_CONF", "SLURM_JWT", "SLURM_SACK_SOCKET")
"""How the controller is found, and how it knows us."""
_OUR_FOLDER = str(Path(os.path.abspath(__file__)).parents[1])
"""That resihp is imported from."""
_ON_WHOSE_ACCOUNT = ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION")


class CompletedCall(msgspec.Struct, frozen=True):
    """What a command said. `status` is its exit status, negative for the signal that ended it."""

    status: int
    output: bytes
    complaint: str
    """What it wrote to standard error, on one line."""


def own_environment(base: Mapping[str, str]) -> dict[str, str]:
    """For resihp's own processes: PYTHONPATH names the folder of resihp at most, where `pip install --target` has put
    it and all that it needs. Modules in the user's folders could shadow ours."""
    kept = {key: value for key, value in base.items() if key != "PYTHONPATH"}
    entries = [os.path.abspath(entry) for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return kept | ({"PYTHONPATH": _OUR_FOLDER} if _OUR_FOLDER in entries else {})


def query_environment(base: Mapping[str, str]) -> dict[str, str]:
    """For commands whose output we read: nothing that changes formats, filters jobs, or leads to another cluster."""
    kept = {key: value for key, value in base.items() if not key.startswith(_SLURMS) or key in _CONNECTION}
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def submit_environment(base: Mapping[str, str]) -> dict[str, str]:
    """For sbatch, whose environment the new job inherits: nothing that says what our own job is or has.

    The user's choice of account, partition, QOS and reservation stays, as with any other sbatch.
    """
    allowed = (*_CONNECTION, *_ON_WHOSE_ACCOUNT)
    return {key: value for key, value in base.items() if not key.startswith(_SLURMS) or key in allowed}


def call(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    folder: Path | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> CompletedCall:
    """Run a command (`argv[0]` by name or path) to its end.

    Raises SlurmUnavailableError when it is not there or not done in time, SlurmOutputError when it says too much.
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
    """Both outputs to their ends, and the exit."""
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
                raise SlurmOutputError(f"slurm: {name} said more than {limit_bytes} bytes; the rest was not read")
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise late from None
    output, complaint = (b"".join(parts) for parts in chunks.values())
    return output, complaint


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that is not done, with whatever it started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
