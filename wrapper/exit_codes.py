"""Exit codes of resihp, and the table that maps errors to exit codes. Used by the command line and the supervisor.

0 done · 1 training failed · 2 usage · 3 unhealthy environment · 4 restart budget spent · 5 not enough healthy nodes ·
69 refused or no answer · 70 resihp itself failed · 75 please requeue · 93 do not requeue (the training program is
broken) · 130/143 signalled.
"""

from __future__ import annotations

from resihp import errors
from resihp.slurm.errors import SlurmOutputError

TRAINING_FAILED = 1
"""Training failed."""
SERVICE_UNAVAILABLE = 69
"""A request was refused or not answered: by Slurm, by a job's supervisor, or because a disk is full. EX_UNAVAILABLE of
sysexits. Says nothing about the training."""
INTERNAL_ERROR = 70
"""resihp itself failed: an unforeseen exception, or output of Slurm in an undocumented form. EX_SOFTWARE of sysexits.
Says nothing about the training."""
REQUEUE_REQUESTED = 75
"""The job should be requeued."""
TRAINING_BROKEN = 93
"""The training program is broken; the job must not be requeued."""
LEADER_DEPOSED = 76
"""A supervisor has given up leading the job. Only its guardian sees this code; `resihp run` never exits with it."""
CANNOT_LEAD = 77
"""A successor could not start. Only its agent sees this code, so that another node is chosen."""
OUTPUT_CLOSED = 141
"""The reader closed stdout early (for example `head`). A shell reports SIGPIPE with the same code."""

EXIT_CODES: dict[type[errors.ResihpError], int] = {
    errors.UsageError: 2,
    errors.CommunicatorError: TRAINING_FAILED,
    errors.FaultNotFiredError: TRAINING_FAILED,
    errors.RestartBudgetError: 4,
    errors.NotEnoughDevicesError: 5,
    errors.TrainingProgramError: TRAINING_BROKEN,
    SlurmOutputError: INTERNAL_ERROR,
    errors.ResihpError: SERVICE_UNAVAILABLE,
}
"""Exit code of each class of errors. An error of a class that is not listed has the code of its nearest listed base
class."""


def exit_code_of(error: errors.ResihpError) -> int:
    """Return the exit code for an error."""
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)
