"""Classifies the user's command as a Python script, a Python module or anything else, and chooses its interpreter.

Scripts and modules are forked from a server that has imported resihp, so their interpreter must have resihp installed.
Called by `resihp run` before anything is started.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import dropwhile, pairwise
from pathlib import Path

from resihp.errors import UsageError
from resihp.plain_files import open_plain
from resihp.wrapper.config.launchers import refuse_launcher
from resihp.wrapper.config.run_spec import (
    CHECKPOINT_PLACE,
    ITERATION_PLACE,
    RESUME_ITERATION_VARIABLE,
    RESUME_VARIABLE,
    Program,
)
from resihp.wrapper.launch.launcher import own_environment

MAX_SCRIPT_BYTES = 1 << 20
SCRIPT_CALLS = frozenset(("checkpointed", "iteration", "section", "reporting", "ResihpError", "__version__"))
"""Names of resihp that a script with a training loop of its own may use."""
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_HARMLESS = frozenset("uB")
"""Options of python that may be dropped: output is line-buffered anyway, and writing bytecode or not makes no
difference."""


def resolve(command: Sequence[str], notice: Callable[[str], None], inside: str | None = None) -> Program:
    """Return how to start a command. Raises UsageError if the command does not exist, if it is a launcher, or if its
    interpreter lacks resihp.

    `inside`: interpreter in the container that runs the command, whose files cannot be checked from here; None without
    a container.
    """
    _refuse_lone_place(command)
    if not command:
        raise UsageError("no command to run; resihp run ... -- python train.py, or command = [...] in [job]")
    command = with_python(command)
    first = command[0]
    any_command = Program(kind="command", argv=tuple(command), interpreter=inside or sys.executable)
    is_missing = not inside and shutil.which(first) is None
    if not _PYTHON.fullmatch(os.path.basename(first)):
        refuse_launcher([os.path.basename(first), *command[1:]])
        if is_missing:
            raise UsageError(
                f"{first}: no such command; write a script as train.py, or after -- the workers' command, as in "
                "-- python train.py"
            )
        return any_command
    rest = _without_options(command)
    if not rest:
        raise UsageError(f"{first}: no script; name one, as in -- {first} train.py")
    if rest[0] in ("-c", "-"):
        if is_missing:
            raise UsageError(f"{first}: no such command")
        return any_command
    if rest[0] == "-m":
        if len(rest) == 1:
            raise UsageError(f"{first} -m: no module; name one")
        refuse_launcher(rest[1:])
        return Program(kind="module", argv=tuple(rest[1:]), interpreter=inside or _interpreter(first, notice))
    if missing := missing_script(command):
        raise UsageError(missing)
    return Program(kind="script", argv=tuple(rest), interpreter=inside or _interpreter(first, notice))


def with_python(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command with `python` before it if it begins with a Python script, as torchrun runs one."""
    return ("python", *command) if command and command[0].endswith(".py") else tuple(command)


def _without_options(command: Sequence[str]) -> list[str]:
    """Return the words after python and its options. Raises UsageError for an option that cannot be dropped
    (`_HARMLESS`)."""
    first, rest = command[0], list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        option = rest.pop(0)
        if not set(option[1:]) <= _HARMLESS or option == "--":
            raise UsageError(
                f"{first} {option}: this option of python is not supported before a script under resihp run; "
                "use its environment variable (PYTHONWARNINGS, PYTHONFAULTHANDLER, ...)"
            )
    return rest


def missing_script(command: Sequence[str]) -> str:
    """Return a description of the Python script that the command names and that does not exist; empty if nothing is
    missing."""
    command = with_python(command)
    if not command or not _PYTHON.fullmatch(os.path.basename(command[0])):
        return ""
    rest = [*dropwhile(lambda word: word.startswith("-") and word not in ("-m", "-c", "-"), command[1:])]
    if not rest or rest[0].startswith("-") or Path(rest[0]).exists():
        return ""
    return f"{rest[0]}: no such script in {Path.cwd()}"


def _interpreter(named: str, notice: Callable[[str], None]) -> str:
    path = shutil.which(named)
    if path is not None and os.path.abspath(path) == sys.executable:
        return sys.executable
    if path is not None and _has_resihp(os.path.abspath(path)):
        return os.path.abspath(path)
    if named in ("python", "python3"):
        place = path or "not on PATH"
        notice(f"{named} ({place}) does not have resihp; workers run under {sys.executable}")
        return sys.executable
    if path is None:
        raise UsageError(f"{named}: no such interpreter")
    raise UsageError(
        f"{named}: cannot import resihp; install it there ({named} -m pip install 'resihp[train]') "
        f"or use {sys.executable}"
    )


def _has_resihp(interpreter: str) -> bool:
    """Return whether an interpreter can import resihp. It is started as the fork server will be, without the user's
    modules."""
    probe = [interpreter, "-P", "-c", "import resihp.worker.forkserver"]
    try:
        done = subprocess.run(probe, capture_output=True, env=own_environment(), timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def may_declare_model(program: Program, cwd: str) -> bool:
    """Return whether a script, or a module in the working directory, may train with `resihp.Trainer`, by its text.

    Comments, docstrings and the calls of scripts (`SCRIPT_CALLS`) do not count; any other use of resihp does, and so
    does the word in a text that cannot be parsed. A script without it may still import a module that trains.
    """
    text = _text(program, cwd)
    if b"resihp" not in text:
        return False
    try:
        return _uses_trainer(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True


def takes_checkpoint(program: Program, cwd: str) -> bool:
    """Return whether a script resumes from the checkpoint that it is given: its arguments have a place for it, or its
    text mentions the environment variable that names it."""
    named = (CHECKPOINT_PLACE, ITERATION_PLACE, RESUME_VARIABLE, RESUME_ITERATION_VARIABLE)
    if any(name in word for word in program.argv for name in named):
        return True
    texts = [_text(program, cwd)]
    if program.kind == "command":  # as in bash train.sh
        texts = [_read(Path(cwd, word)) for word in program.argv[:2]]
    return any(name.encode() in text for text in texts for name in (RESUME_VARIABLE, RESUME_ITERATION_VARIABLE))


def _refuse_lone_place(command: Sequence[str]) -> None:
    """Raise UsageError for an option whose value alone has a place for a checkpoint: the option would be left without a
    value while there is no checkpoint."""
    for option, value in pairwise(command):
        has_place = CHECKPOINT_PLACE in value or ITERATION_PLACE in value
        if has_place and option.startswith("-") and "=" not in option and not value.startswith("-"):
            raise UsageError(
                f"{option} {value}: the value is left out while there is no checkpoint, the option is not; write "
                f"{option}={value}, or read {RESUME_VARIABLE} in the script"
            )


def _text(program: Program, cwd: str) -> bytes:
    """Return the text of a script, or of a module in the working directory; empty if it cannot be read."""
    if program.kind == "command":
        return b""
    name = program.argv[0]
    return _read(Path(cwd, name if program.kind == "script" else f"{name.replace('.', '/')}.py"))


def _read(path: Path) -> bytes:
    try:
        with os.fdopen(open_plain(path, follow=True), "rb") as file:
            return file.read(MAX_SCRIPT_BYTES)
    except OSError:
        return b""


def _uses_trainer(tree: ast.Module) -> bool:
    """Return whether parsed code uses anything of resihp but `SCRIPT_CALLS`, or names it in a string that may be
    executed."""
    nodes = list(ast.walk(tree))
    if any(_imports_more(node) for node in nodes):
        return True
    aliases = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names = {"resihp", *(alias.asname for alias in aliases if alias.name == "resihp" and alias.asname)}
    harmless = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in SCRIPT_CALLS}
    harmless |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    return any(_names_resihp(node, names) for node in nodes if id(node) not in harmless)


def _imports_more(node: ast.AST) -> bool:
    """Return whether a statement imports anything of resihp but `SCRIPT_CALLS`."""
    match node:
        case ast.Import():
            return any(_is_ours(alias.name) and not _is_of_scripts(alias.name) for alias in node.names)
        case ast.ImportFrom(module="resihp", level=0):
            return not SCRIPT_CALLS.issuperset(alias.name for alias in node.names)
        case ast.ImportFrom(module=str(module), level=0):
            return _is_ours(module) and not _is_of_scripts(module)
        case _:
            return False


def _names_resihp(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression is one of these names of the module, or a string with its name."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and "resihp" in node.value
    return isinstance(node, ast.Name) and node.id in names


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "resihp"


def _is_of_scripts(module: str) -> bool:
    return module == "resihp" or module.startswith("resihp.reporting")
