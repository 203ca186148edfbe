"""Every way in which a command of `resihp` can be called on a job, read off the command line's own definition.

A new command, view or flag is tried from the day it is there. What an argument stands for is known by its name
(`ARGUMENTS`, `OPTIONS`); a required one that is not known there raises, so that whoever adds it says what it may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

import typer

from resihp.wrapper.cli import app

ARGUMENTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "file": (("{journal}",), ("{log}",)),
    "first": (("{job}",),),
    "iteration": (("12",),),
    "job": (("{job}",),),
    "job_file": (("{run_file}",),),
    "kind": (("kill",),),
    "node": (("n2",),),
    "paths": (("{journal}",), ("{folder}",), ("{ledger_file}",), ("{journal_here}", "{folder}")),
    "rank": (("5",),),
    "role": (("alice",),),
    "second": (("{mine}",),),
}
"""By an argument's name, the words that it may be. Braces: what `Case.words` fills in."""
OPTIONS: Mapping[str, str] = {
    "--around": "1d",
    "--config": "{run_file}",
    "--days": "30",
    "--fail": "5",
    "--folder": "{folder}",
    "--job": "{job}",
    "--ledger": "{ledger}",
    "--limit": "5",
    "--node": "n2",
    "--older-than": "1s",
    "--output": "{output}",
    "--parquet": "{output}.parquet",
    "--patience": "1",
    "--price": "2.5",
    "--rank": "1",
    "--since": "30d",
    "--slow": "5=0.5",
    "--timeout": "1",
    "--user": "me",
}
"""Values of options that are tried; others, which say nothing of where anything is, are left out."""
TOGETHER: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("checkpoint", "now"): ("--patience", "1"),
    ("db", "export"): ("--output", "{output}"),
    ("db", "import"): ("--ledger", "sqlite:///{output}.db"),
    ("inject",): ("--rank", "1"),
    ("node", "drain"): ("--job", "{job}"),
    ("node", "maintenance"): ("--ledger", "{ledger}"),
    ("node", "repaired"): ("--ledger", "sqlite:///{output}.db", "--kind", "gpu"),
}
"""What a command is never called without here."""
ONLY: Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("run",): (
        ("--local", "--resume", "--dry-run", "{job}", "--", "true"),
        ("--local", "--resume", "--dry-run", "--", "true"),
        ("--local", "--resume-or-start", "--checkpoint-folder", "{folder}/checkpoints", "--dry-run", "true"),
    ),
    ("submit",): (("--dry-run", "{run_file}"),),
    ("init",): (("--force",),),
    ("doctor",): (("--json", "--timeout", "0.2"),),
}
"""Commands that would start something, or that look at the machine: so, and no other way."""
ALSO: Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("db", "import"): (("{journal}",), ("{journal_here}",)),
    ("history",): (
        ("failures", "--all"),
        ("failures", "--all", "--by", "cause"),
        ("cost", "--all", "--json"),
        ("cost", "--all", "--by", "owner"),
        ("cost", "{job}", "--ledger", "{ledger}"),
        ("nodes", "--all", "--json"),
        ("failures", "{job}", "--csv"),
        ("events", "{job}", "--csv"),
        ("iterations", "{job}", "--parquet", "{output}.parquet"),
    ),
    ("plan",): (("{job}", "--fail-node", "n2", "--json")),
    ("logs",): (("{job}", "--lines", "100000"),),
}
"""What no list of options gives."""
ENDLESS = frozenset({"--follow", "--watch"})
"""Flags of commands that end when they are interrupted."""
NO_JOB = frozenset({("doctor",), ("init",), ("submit",), ("db", "grant")})
"""Look at no home of a job; tried all the same, but rarely."""
SPEAK = frozenset({"stop", "inject", "checkpoint now", "why-not", "node drain", "node undrain"})
"""Ask a job's supervisor, whom an administrator may ask, too."""
WRITE_A_LEDGER = frozenset({"db upgrade", "db prune", "db grant", "node repaired"})
"""Change the ledger that `--ledger` names, whosever that is, where its file allows that."""


@dataclass(frozen=True)
class Invocation:
    """One way to call a command; `words` with names in braces still to be filled in."""

    command: str
    words: tuple[str, ...]

    @property
    def speaks(self) -> bool:
        """Whether it is for a running job's supervisor."""
        return self.command in SPEAK

    @property
    def writes_the_ledger(self) -> bool:
        """Whether the foreign ledger itself is named to be changed."""
        return self.command in WRITE_A_LEDGER and "{ledger}" in self.words

    @property
    def endless(self) -> bool:
        return bool(ENDLESS.intersection(self.words))

    @property
    def names_a_file(self) -> bool:
        """Whether a file is named to be read, whatever it leads to: its reader asked to see it."""
        return any(name in word for word in self.words for name in ("{journal}", "{log}", "{run_file}", "{folder}"))

    def __str__(self) -> str:
        return " ".join(self.words)


def leaves() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command that does something: its words, and how it is defined."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                yield from below(child, (*words, name))
        else:
            yield words, command

    return below(typer.main.get_command(app), ())


def invocations() -> list[Invocation]:
    """All of them. Raises LookupError for a required argument or option that nobody said a value for."""
    found: dict[Invocation, None] = {}
    for words, command in leaves():
        name = " ".join(words)
        if words in ONLY:
            found |= {Invocation(name, (*words, *rest)): None for rest in ONLY[words]}
            continue
        for rest in (*_ways(words, command), *ALSO.get(words, ())):
            found[Invocation(name, (*words, *rest))] = None
    return list(found)


def _ways(words: tuple[str, ...], command: Any) -> Iterator[tuple[str, ...]]:
    """Positional arguments in all their forms, bare and as JSON; then with each option alone."""
    arguments = [parameter for parameter in command.params if _is_argument(parameter)]
    options = [parameter for parameter in command.params if not _is_argument(parameter)]
    choices = [_values(words, parameter) for parameter in arguments]
    usual = _usual(words, options)
    positional = [tuple(word for part in parts for word in part) for parts in product(*choices)]
    for given in positional:
        yield (*given, *usual)
        yield from ((*given, *usual, "--json") for option in options if "--json" in option.opts)
    some = tuple(word for choice in choices for word in choice[0])
    for option in options:
        name = max(option.opts, key=len)
        if name in usual or name in ("--json", "--help"):
            continue
        if option.is_flag:
            yield (*some, *usual, name)
            if name == "--all":
                yield (*_without_job(arguments, some), *usual, name)
        elif name in OPTIONS:
            yield (*some, *usual, name, OPTIONS[name])
    if any(parameter.name == "job" and not parameter.required for parameter in arguments):
        yield (*_without_job(arguments, some), *usual)


def _usual(words: tuple[str, ...], options: list[Any]) -> tuple[str, ...]:
    usual = TOGETHER.get(words, ())
    for option in options:
        name = max(option.opts, key=len)
        if option.required and name not in usual:
            if name not in OPTIONS:
                raise LookupError(f"resihp {' '.join(words)}: say in OPTIONS what {name} may be")
            usual = (*usual, name, OPTIONS[name])
    return usual


def _values(words: tuple[str, ...], argument: Any) -> tuple[tuple[str, ...], ...]:
    if argument.name in ARGUMENTS:
        return ARGUMENTS[argument.name]
    if choices := _choices(argument):
        return tuple((choice,) for choice in choices)
    if not argument.required:
        return ((),)
    raise LookupError(f"resihp {' '.join(words)}: say in ARGUMENTS what {argument.name} may be")


def _choices(argument: Any) -> list[str]:
    """What an argument must be one of; later releases of Typer keep the annotation, former ones the choices."""
    annotation = getattr(getattr(argument, "type_descriptor", None), "annotation", None)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(choice.value) for choice in annotation]
    choices = getattr(getattr(argument, "type", None), "choices", None) or ()
    return [str(getattr(choice, "value", choice)) for choice in choices]


def _without_job(arguments: list[Any], some: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for word in some if word != "{job}") if any(a.name == "job" for a in arguments) else some


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")
