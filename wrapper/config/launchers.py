"""Refuses a command that starts a group of processes itself, such as torchrun: under `resihp run`, each worker would
start such a group of its own.

The text of `bash -c` is searched as well. A launcher that a script starts is not recognised. Called by
`resihp.wrapper.config.program`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import dropwhile, groupby

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
SHELL_NAMES = ("sh", "bash", "dash", "zsh", "ksh")
_SEPARATOR = re.compile(r"[();<>|&]+")
_BEFORE_COMMAND = re.compile(r"\w+=.*|exec|env|nohup|time|command|if|then|do|!", re.DOTALL)
"""Words of a shell before the name of a command."""
_PYTHON = re.compile(r"python[\d.]*")


def refuse_launcher(words: Sequence[str]) -> None:
    """Raise UsageError if a command, or a module with its arguments, is a launcher, or a shell that starts one."""
    if words[0] in SHELL_NAMES:
        for command in _commands_of_shell(words):
            refuse_launcher(command)
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


def _commands_of_shell(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the commands in the text of `bash -c TEXT`, those of `python -m` without these two words."""
    options = [*dropwhile(lambda word: not re.fullmatch(r"-\w*c", word), words[1:])]
    if len(options) < 2:
        return
    lexer = shlex.shlex(options[1].replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:
        return  # a quote is not closed: the shell will say so
    for is_separator, group in groupby(tokens, lambda token: bool(_SEPARATOR.fullmatch(token))):
        command = [*dropwhile(_BEFORE_COMMAND.fullmatch, group)]
        if is_separator or not command:
            continue
        name, *arguments = os.path.basename(command[0]), *command[1:]
        if _PYTHON.fullmatch(name) and arguments[:1] == ["-m"]:
            arguments = arguments[1:]
            yield arguments or [name]
        else:
            yield [name, *arguments]
