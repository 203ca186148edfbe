"""Options of a batch script, and whether Slurm's signal before the time limit reaches `resihp run`.

With `--signal=B:USR2@300`, Slurm signals only the batch script's shell. If `resihp run` replaces the shell (`exec`), it
receives the signal. A shell that waits for `resihp run` dies of the signal, and the job ends without saving. Options on
sbatch's own command line are invisible. Decides nothing. Used by `resihp run` and `resihp doctor`.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
from collections.abc import Iterator, Mapping

import psutil

HANDLED_SIGNALS = frozenset({"USR1", "USR2", "TERM", "INT", "HUP"})
"""Signals that `resihp run` handles. Any other signal kills it, as it would kill the shell."""

_SIGNAL = re.compile(r"(?:([BR]{1,2}):)?([A-Za-z0-9]+)(?:@[0-9]+)?")
_RUN = re.compile(r"(?:\bresihp|-m\s+wrapper)\s+run\b")


def options(script: str | None) -> Iterator[str]:
    """Yield the words of the #SBATCH lines that sbatch reads."""
    for line in (script or "").splitlines():
        if line.startswith("#SBATCH"):
            try:
                yield from shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                continue
        elif line.strip() and not line.startswith("#"):
            return  # sbatch stops reading here


def _requested(environment: Mapping[str, str], script: str | None) -> str:
    """Return the value of `--signal`; empty if it is not visible."""
    requested = environment.get("SBATCH_SIGNAL", "")
    for word, following in itertools.pairwise([*options(script), ""]):
        name, separator, value = word.partition("=")
        if name == "--signal":
            requested = value if separator else following
    return requested


def warning_lead_s(environment: Mapping[str, str], script: str | None) -> float:
    """Return how many seconds before the time limit Slurm was asked to send its signal; 0 if this is not visible."""
    _, _, seconds = _requested(environment, script).partition("@")
    return float(seconds) if seconds.isdigit() else 0.0


def warning(environment: Mapping[str, str], script: str | None) -> str | None:
    """Return the signal, such as `USR2`, that Slurm was asked to send to the batch script alone; None if no such
    request is visible."""
    match = _SIGNAL.fullmatch(_requested(environment, script))
    if match is None or "B" not in (match[1] or ""):
        return None
    name = match[2].upper().removeprefix("SIG")
    try:
        return signal.Signals(int(name)).name.removeprefix("SIG") if name.isdigit() else name
    except ValueError:
        return name


def is_trapped(name: str, script: str | None) -> bool:
    """Return whether the script itself traps this signal."""
    try:
        number = str(int(signal.Signals[f"SIG{name}"]))
    except KeyError:
        number = name
    word = re.compile(rf"^\s*trap\b.*\b(?:SIG)?(?:{re.escape(name)}|{number})\b", re.MULTILINE)
    return word.search(script or "") is not None


def lost_warning(environment: Mapping[str, str], script: str | None) -> str | None:
    """Return the reason why Slurm's signal would end the job without saving, and the remedy; None if the signal is
    handled. For `resihp run`.

    If a shell waits for this process, the process that Slurm started is one of its ancestors.
    """
    name = warning(environment, script)
    if name is None or is_trapped(name, script):
        return None
    if name not in HANDLED_SIGNALS:
        return _not_handled(name)
    first = environment.get("SLURM_TASK_PID", "")
    waiting = [process for process in psutil.Process().parents() if str(process.pid) == first != str(os.getpid())]
    try:
        shell = bool(waiting) and os.path.basename((waiting[0].cmdline() or [""])[0]).endswith("sh")
    except psutil.Error:
        return None
    return _shell_waits(name) if shell else None


def warning_would_be_lost(environment: Mapping[str, str], script: str | None) -> str | None:
    """Return the reason why Slurm's signal would end the job without saving, and the remedy; None if the signal is
    handled. For `resihp doctor`, which the script does not start: judged by the script's text."""
    name = warning(environment, script)
    if name is None or is_trapped(name, script):
        return None
    if name not in HANDLED_SIGNALS:
        return _not_handled(name)
    lines = [line.strip() for line in (script or "").splitlines()]
    runs = [line for line in lines if not line.startswith("#") and _RUN.search(line)]
    return _shell_waits(name) if any(not line.startswith("exec ") for line in runs) else None


def _shell_waits(name: str) -> str:
    return (
        f"Slurm's warning, --signal=B:{name}, goes to the batch script's shell, which dies of it, and the job with it, "
        "unsaved and not requeued; write exec before resihp run in the script"
    )


def _not_handled(name: str) -> str:
    return (
        f"--signal=B:{name} makes Slurm send a signal that resihp run does not handle, which would end the job "
        "unsaved; write #SBATCH --signal=B:USR2@300"
    )
