"""Exit codes of resihp, and one table from errors to codes, used by the command line and the supervisor.

0 done · 1 training failed · 2 usage · 3 unhealthy environment · 4 restart budget spent · 5 not enough healthy nodes ·
69 refused or no answer · 70 resihp itself failed · 75 please requeue · 93 do not requeue (the training program is
broken) · 130/143 signalled.
"""

from __future__ import annotations

from resihp import errors
from slurm.errors import SlurmOutputError

TRAINING_FAILED = 1
"""Training failed."""
SERVICE_UNAVAILABLE = 69
"""A request was refused or not answered: by Slurm, a job's supervisor, or a full disk. EX_UNAVAILABLE of sysexits. It
implies nothing about the training."""
INTERNAL_ERROR = 70
"""resihp itself failed: an unforeseen exception, or Slurm output that is not as documented. EX_SOFTWARE of sysexits. It
implies nothing about the training."""
REQUEUE_REQUESTED = 75
"""The job should be requeued."""
TRAINING_BROKEN = 93
"""The training program is broken; the job must not be requeued."""
LEADER_DEPOSED = 76
"""A supervisor gave up the lead. Seen only by its guardian, never the exit code of `resihp run`."""
CANNOT_LEAD = 77
"""A successor could not start. Seen only by its agent, so that another node is chosen."""
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
"""The first class of an exception's method resolution order that is listed here decides."""


def exit_code_of(error: errors.ResihpError) -> int:
    """Return the exit code for an error."""
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)
