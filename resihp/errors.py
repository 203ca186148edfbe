"""All exceptions that resihp raises deliberately, in one tree.

The command line maps these to exit codes (`resihp.wrapper.exit_codes.EXIT_CODES`). This module imports nothing from
resihp. Messages are lower case, name the subject first, and end with the command to run or the setting to change.
"""

from __future__ import annotations


class ResihpError(Exception):
    """Base class of all errors that a user may see without a traceback."""


class UsageError(ResihpError):
    """The job cannot start as requested: configuration, layout, model, data set or ledger (exit code 2)."""


class ConfigurationError(UsageError):
    """A configuration key or value is not valid."""


class LayoutError(UsageError):
    """A layout contradicts itself, or does not fit the devices, the model or the batch."""


class PlanError(LayoutError):
    """A plan cannot be carried out: its order never finishes, it would deadlock, or it needs too much memory."""


class ModelError(UsageError):
    """A model configuration uses an option that the executor does not support."""


class DatasetError(UsageError):
    """A corpus is missing or unreadable, or violates the data set protocol."""


class LedgerError(UsageError):
    """The ledger cannot be opened, or its schema is not known to this version."""


class CheckpointError(UsageError):
    """There is no complete checkpoint to resume from, or it belongs to another model."""


class DeviceError(UsageError):
    """A device failed the examination that precedes its first work."""


class JobNotFoundError(UsageError):
    """There is no job of that name here."""


class OwnershipError(UsageError):
    """A file or folder that must be trusted can be written by another user."""


class ProtocolError(ResihpError):
    """A frame was refused: wrong key, replayed, too large, malformed, or from an earlier epoch."""


class CommunicatorError(ResihpError):
    """A collective or a transfer failed, or was interrupted because the supervisor asked the rank to park."""


class TrainingProgramError(ResihpError):
    """The training program itself is broken: it fails in the same way on every rank (exit code 93)."""


class NotEnoughDevicesError(ResihpError):
    """The remaining devices cannot run the model: they do not form one whole replica (exit code 5)."""


class RestartBudgetError(ResihpError):
    """The job was restarted repeatedly without progress and is not restarted again (exit code 4)."""


class FaultNotFiredError(ResihpError):
    """An injected fault never happened, so the run proves nothing (exit code 1)."""
