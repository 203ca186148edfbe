"""Which error ends a command with which exit code: one table, used by the command line and the supervisor.

0 done · 1 training failed · 2 usage · 3 unhealthy environment · 4 restart budget spent · 5 not enough healthy nodes ·
69 refused or no answer · 70 resihp itself failed · 75 please requeue · 93 do not requeue (the training program is
broken) · 130/143 signalled.
"""

from __future__ import annotations

from resihp import errors
from slurm.errors import SlurmOutputError

FAILED = 1
"""Training failed."""
UNAVAILABLE = 69
"""A request was refused, or whom it was made to gave no answer: Slurm, a job's supervisor, a disk that is full. What
sysexits calls an unavailable service. Nothing is known of the training by it."""
INTERNAL = 70
"""resihp itself failed: an exception that nobody foresaw, or output of Slurm that is not as documented. What sysexits
calls a software error. Nothing is known of the training by it."""
REQUEUE = 75
BROKEN = 93
DEPOSED = 76
"""Of a supervisor that gave up the lead, to its guardian; never that of `resihp run`."""
CANNOT_LEAD = 77
"""Of a successor that could not even begin, to its agent: another node is to be chosen."""
OUTPUT_CLOSED = 141
"""Whoever read what a command prints had seen enough; what a shell says of SIGPIPE."""

EXIT_CODES: dict[type[errors.ResihpError], int] = {
    errors.UsageError: 2,
    errors.CommunicatorError: FAILED,
    errors.FaultNotFiredError: FAILED,
    errors.RestartBudgetError: 4,
    errors.NotEnoughDevicesError: 5,
    errors.TrainingProgramError: BROKEN,
    SlurmOutputError: INTERNAL,
    errors.ResihpError: UNAVAILABLE,
}
"""The nearest class in an exception's ancestry decides."""


def exit_code_of(error: errors.ResihpError) -> int:
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)
