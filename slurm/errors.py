"""Errors of calls to Slurm. "Refused" is an answer; "unavailable" is none, and the change requested may have
happened."""

from __future__ import annotations

from resihp.errors import ResihpError, UsageError


class SlurmError(ResihpError):
    """Base of all errors about Slurm."""


class SlurmUnavailableError(SlurmError):
    """No answer: the controller is down or slow, or the command is missing. Never a reason to blame a node."""


class SlurmRefusedError(SlurmError):
    """Slurm refused. `permission`: because of the caller's rights."""

    def __init__(self, text: str, *, permission: bool = False) -> None:
        super().__init__(text)
        self.permission = permission


class SlurmOutputError(SlurmError):
    """Slurm's output differs from its documentation: malformed or cut off."""


class SlurmUsageError(UsageError):
    """The user requested something that Slurm cannot do; the message names the command that fixes it."""
