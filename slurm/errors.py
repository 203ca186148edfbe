"""What asking Slurm can lead to. Refused is an answer; unavailable is none, and what was asked may have happened."""

from __future__ import annotations

from resihp.errors import ResihpError, UsageError


class SlurmError(ResihpError):
    """Base: something about Slurm."""


class SlurmUnavailableError(SlurmError):
    """No answer: the controller is down, slow, or the command is not there. Never a reason to blame a node."""


class SlurmRefusedError(SlurmError):
    """Slurm said no. `permission`: because of who asks."""

    def __init__(self, text: str, *, permission: bool = False) -> None:
        super().__init__(text)
        self.permission = permission


class SlurmOutputError(SlurmError):
    """Slurm's output is not what its documentation promises: malformed or cut off."""


class SlurmUsageError(UsageError):
    """What the user asked of Slurm cannot be: the message names the command that mends it."""
