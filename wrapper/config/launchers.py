"""Refuses a command that starts a group of processes itself, such as torchrun: under `resihp run`, each worker would
start such a group of its own.

A launcher that a script starts is not recognised. Called by `resihp.wrapper.config.program`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from resihp.errors import UsageError

PAGE_HINT = "docs/coming-from.md has the launch line for each launcher"

TORCHRUN_NAMES = ("torchrun", "torch.distributed.run")
"""Commands and modules whose options `resihp run` takes."""
OTHER_LAUNCHERS = (
    ("torch.distributed.launch",),
    ("accelerate", "launch"),
    ("accelerate-launch",),
    ("accelerate.commands.launch",),
    ("accelerate.commands.accelerate_cli", "launch"),
    ("deepspeed",),
    ("deepspeed.launcher.runner",),
    ("ft_launcher",),
    ("nvidia_resiliency_ext.fault_tolerance.launcher",),
    ("fabric", "run"),
)
"""First words of a command, or after python -m, of launchers whose options are their own."""


def refuse_launcher(words: Sequence[str]) -> None:
    """Raise UsageError if a command, or a module with its arguments, is a launcher."""
    if words[0] in TORCHRUN_NAMES:
        same_line = shlex.join(["resihp", "run", *words[1:]])
        raise UsageError(
            f"{words[0]}: resihp run takes its place, and each worker would start a group of its own; in a job file, "
            f"begin command with the script; on the command line, type: {same_line}"
        )
    for launcher in OTHER_LAUNCHERS:
        if tuple(words[: len(launcher)]) == launcher:
            raise UsageError(
                f"{' '.join(launcher)}: resihp run takes its place, and each worker would start a group of its own; "
                f"{PAGE_HINT}"
            )
