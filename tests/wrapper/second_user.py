"""Commands as another system user, and folders that belong to one. Needs root, who alone can give files away.

The user who looks has a number of his own, and may read whatever there is (CAP_DAC_READ_SEARCH), since the interpreter
that tests run in may stand in root's home: whatever he must not do, he must not do with less either.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ATTACKER, VICTIM = 54321, 54322
ROOT = 0
TIMEOUT_S = 300.0
"""Of all commands together, on a machine that is busy with other tests."""
CODE = """
import json, os, sys, time, traceback
from typer.testing import CliRunner
from resihp.errors import ResihpError
from resihp.wrapper.cli import app
answers = []
for words in json.loads(sys.argv[1]):
    began = time.monotonic()
    result = CliRunner().invoke(app, words)
    error = result.exception
    fault = "" if error is None or isinstance(error, (ResihpError, SystemExit)) else "".join(
        traceback.format_exception(error))
    said = str(error) if isinstance(error, ResihpError) else ""
    answers.append({"words": words, "exit": result.exit_code, "said": said, "fault": fault, "output": result.output,
                    "took_s": time.monotonic() - began})
print("ANSWERS" + json.dumps(answers))
"""
_CAPABILITY = "+dac_read_search"

needs_two_users = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, who can become others, and setpriv"
)


def give(folder: Path, user: int) -> None:
    """Make all of it another user's; the attacker lets everybody read what is his."""
    for path in (folder, *folder.rglob("*")):
        if user == ATTACKER and not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o7777 | (0o555 if path.is_dir() else 0o444))
        os.chown(path, user, user, follow_symlinks=False)


def run_as(
    user: int, commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run commands as a user, in that folder; what each answered. No command may end with a traceback."""
    become: list[str] = []
    if user != ROOT:
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        become += [f"--inh-caps={_CAPABILITY}", f"--ambient-caps={_CAPABILITY}"]
    process = subprocess.run(
        [*become, sys.executable, "-P", "-c", CODE, json.dumps([list(words) for words in commands])],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("ANSWERS")]
    assert lines, process.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("ANSWERS"))
    assert [answer["fault"] for answer in answers if answer["fault"]] == []
    return answers


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """All that is in a folder: owner, mode, and content."""
    return {str(path.relative_to(folder)): _state(path) for path in sorted(folder.rglob("*"))}


def _state(path: Path) -> tuple[Any, ...]:
    found = path.lstat()
    plain = path.is_file() and not path.is_symlink()
    return found.st_uid, found.st_mode, path.read_bytes() if plain else None


@pytest.fixture
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that every user may go into, in one that is root's."""
    folder = Path(os.path.realpath(os.environ.get("TMPDIR", "/tmp")), f"resihp-two-users-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
