"""Errors of calls to Slurm. "Refused" means that Slurm answered; "unavailable" means that it did not, so that a
requested change may have been made."""

from __future__ import annotations

from resihp.errors import ResihpError, UsageError


class SlurmError(ResihpError):
    """Base of all errors about Slurm."""


class SlurmUnavailableError(SlurmError):
    """No answer: the controller is down or slow, or the command is missing. Never a reason to blame a node."""


class SlurmRefusedError(SlurmError):
    """Slurm refused a query or order. `permission`: because of the caller's rights. `for_now`: Slurm asks to try again
    soon."""

    def __init__(self, text: str, *, permission: bool = False, for_now: bool = False) -> None:
        super().__init__(text)
        self.permission = permission
        self.for_now = for_now


class SlurmOutputError(SlurmError):
    """Slurm's output is malformed or cut off."""


class SlurmUsageError(UsageError):
    """The user requested something that Slurm cannot do. The message contains the remedy."""
