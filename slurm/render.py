"""Batch scripts: a template, filled in with the directives and the command of one job.

Templates (`slurm/templates/*.sbatch`) are complete scripts, which sbatch accepts unchanged and users may copy. `render`
replaces values line by line; there is no template language. Values of directives are checked, and the command is quoted
for the shell. Called by `resihp submit`; submits nothing itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources

from resihp.slurm.errors import SlurmUsageError

TEMPLATES = ("one-node", "nodes", "spares", "chain")

Directives = Mapping[str, str | bool]
"""sbatch option without its dashes -> value; True sets a flag, False omits the option."""

_DIRECTIVE = re.compile(r"#SBATCH --([a-z-]+)(?:=(.*))?")
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_VALUE = re.compile(r"[^\x00-\x20\x7f\"'`$\\#]+")
"""Values that sbatch accepts without quotes. A space would end the value."""


def template(name: str) -> str:
    """Return the text of the template with this name that comes with resihp."""
    return (resources.files(__package__) / "templates" / f"{name}.sbatch").read_text(encoding="utf-8")


def render(
    text: str,
    directives: Directives,
    command: Sequence[str],
    *,
    title: str,
    setup: Sequence[str] = (),
    exports: Mapping[str, str] | None = None,
) -> str:
    """Return the template `text` with these directives. Directives that it lacks are added; its other directives stay.

    `command` replaces the template's command, and `exports` its environment variables. `setup`: lines of shell before
    both. `title` becomes a comment.
    Raises SlurmUsageError for a value that a batch script cannot contain.
    """
    remaining = dict(directives)
    lines = ["#!/bin/bash", f"# {_one_line(title)}", ""]
    for comments, options, last in _blocks(text):
        block = [_line(name, remaining.pop(name, None), line) for name, line in options]
        if last:
            block += [_line(name, value, None) for name, value in remaining.items()]
        kept = [line for line in block if line is not None]
        lines += [*comments, *kept] if kept else []
    prepared = [
        *(_one_line(line) for line in setup),
        *(f"export {_variable(name)}={shlex.quote(_one_line(value))}" for name, value in (exports or {}).items()),
    ]
    lines += ["", *prepared, ""] if prepared else [""]
    lines.append(f"exec {shlex.join(_one_line(argument) for argument in command)}")
    return "\n".join(lines) + "\n"


def _blocks(text: str) -> list[tuple[list[str], list[tuple[str, str]], bool]]:
    """Return the directives in blocks, each with the comments above it, and whether the block is the last. Comments
    that begin with "EDIT" are dropped."""
    blocks: list[tuple[list[str], list[tuple[str, str]]]] = []
    comments: list[str] = []
    editing = False
    for line in text.splitlines()[1:]:
        match = _DIRECTIVE.fullmatch(line)
        if match:
            if comments or editing or not blocks:
                blocks.append((comments, []))
                comments, editing = [], False
            blocks[-1][1].append((match[1], line))
        elif line.startswith("##SBATCH"):
            continue
        elif line.startswith("#"):
            editing = editing or line.startswith("# EDIT")
            comments = [] if editing else [*comments, line]
        else:
            comments, editing = [], False
    return [(*block, i == len(blocks) - 1) for i, block in enumerate(blocks)]


def _line(name: str, value: str | bool | None, line: str | None) -> str | None:
    if value is None:
        return line
    if value is False:
        return None
    if not _NAME.fullmatch(name):
        raise SlurmUsageError(f"--{name[:40]!a}: not an option of sbatch")
    if value is True:
        return f"#SBATCH --{name}"
    if not _VALUE.fullmatch(value):
        raise SlurmUsageError(
            f"--{name}={value[:80]!a}: a batch script cannot hold this value; leave out spaces, quotes, $, # and "
            "backslashes, or write the script yourself: resihp submit --dry-run prints one"
        )
    return f"#SBATCH --{name}={value}"


def _one_line(text: str) -> str:
    """Return `text` unchanged. Raises SlurmUsageError if it does not fit on one line."""
    if any(not character.isprintable() for character in text):
        raise SlurmUsageError(f"{text[:80]!a}: has a character that a batch script cannot hold")
    return text


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise SlurmUsageError(f"{name[:40]!a}: not a name of an environment variable")
    return name


def time_limit(seconds: float) -> str:
    """Return a time limit in Slurm's form `days-hours:minutes:seconds`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
