"""What `resihp` itself answers: its version, help under both names, completion."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import resihp
from wrapper.cli import app


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"resihp {resihp.__version__}\n")


@pytest.mark.parametrize(
    "command",
    ["", "run", "stop", "checkpoint", "checkpoint now", "checkpoint list", "history failures", "node list", "db prune"],
)
def test_help_has_a_short_name_everywhere(command: str) -> None:
    short, long = (CliRunner().invoke(app, [*command.split(), name]) for name in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage" in short.output
    assert short.output == long.output


def test_shells_complete_commands() -> None:
    asked = {"_RESIHP_COMPLETE": "complete_bash", "COMP_WORDS": "resihp st", "COMP_CWORD": "1"}
    script = "import sys; sys.argv[:] = ['resihp']; from wrapper.cli import app; app(prog_name='resihp')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | asked, capture_output=True, text=True, check=False, timeout=60
    )
    assert sorted(done.stdout.split()) == ["status", "stop"]
