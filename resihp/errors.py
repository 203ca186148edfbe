"""Every exception that resihp raises on purpose, in one tree.

The command line maps these to exit codes (`wrapper.exit_codes.EXIT_CODES`); nothing below imports anything of ours.
Messages are lower case, name the subject first, and end with what to type or change.
"""

from __future__ import annotations


class ResihpError(Exception):
    """Root of all errors that a user may see without a traceback."""


class UsageError(ResihpError):
    """The job cannot start as it was asked for: configuration, layout, model, data set or ledger (exit code 2)."""


class ConfigurationError(UsageError):
    """A configuration key or value is not valid."""


class LayoutError(UsageError):
    """A layout contradicts itself, or does not fit the devices, the model or the batch."""


class PlanError(LayoutError):
    """A plan cannot be carried out: an order that never ends, communication that would deadlock, too much memory."""


class ModelError(UsageError):
    """A model configuration asks for something that the executor does not honour."""


class DatasetError(UsageError):
    """A corpus is missing, unreadable, or does not keep the data set protocol."""


class LedgerError(UsageError):
    """The ledger cannot be opened, or has a schema that this version does not know."""


class CheckpointError(UsageError):
    """No complete checkpoint is there to resume from, or it belongs to another model."""


class DeviceError(UsageError):
    """A device failed the examination before a process on it was given work."""


class JobNotFoundError(UsageError):
    """No job of that name is known here."""


class OwnershipError(UsageError):
    """A file or folder that is to be believed may be written by somebody else."""


class ProtocolError(ResihpError):
    """A frame was refused: wrong key, replayed, oversize, malformed, or of an old epoch."""


class CommunicatorError(ResihpError):
    """A collective or a transfer broke, or was woken because the supervisor asked to park."""


class TrainingProgramError(ResihpError):
    """The training program itself is broken: it fails everywhere in the same way (exit code 93)."""


class NotEnoughDevicesError(ResihpError):
    """What is left cannot run the model: no whole replica (exit code 5)."""


class RestartBudgetError(ResihpError):
    """The job was run again and again and got nowhere: it is not run once more (exit code 4)."""


class FaultNotFiredError(ResihpError):
    """A fault injected on purpose never happened, so the run proves nothing (exit code 1)."""
