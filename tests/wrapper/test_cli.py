"""What `resihp` itself answers: its version, help under both names, completion."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import resihp
from resihp.errors import FaultNotFiredError, ProtocolError, ResihpError, UsageError
from resihp.slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError
from resihp.wrapper import cli
from resihp.wrapper.cli import app
from resihp.wrapper.job_folder import create_local_job, note_end


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
    script = "import sys; sys.argv[:] = ['resihp']; from resihp.wrapper.cli import app; app(prog_name='resihp')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | asked, capture_output=True, text=True, check=False, timeout=60
    )
    assert sorted(done.stdout.split()) == ["status", "stop"]


def typed(arguments: str, **given: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "resihp", *arguments.split()]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60, **given)


@pytest.mark.parametrize("what", ["--help", "jobs --all", "jobs --all --json", "history --help", "--version"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_a_command_as_of_any_other_program(
    fresh_home: Path, what: str, unbuffered: str
) -> None:
    """Not with 1, which of `status` says that the job has failed."""
    note_end(create_local_job())
    read, write = os.pipe()
    os.close(read)
    done = typed(what, stdout=write, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("what", ["--version", "jobs --all", "jobs --all --json"])
def test_output_that_cannot_be_written_is_one_line(fresh_home: Path, what: str) -> None:
    note_end(create_local_job())
    with Path("/dev/full").open("w") as full:
        done = typed(what, stdout=full)
    assert (done.returncode, done.stderr) == (
        69,
        "resihp: stdout: cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("columns", ["0", "", "00"])
def test_a_terminal_that_has_no_columns_gets_it_all(fresh_home: Path, columns: str) -> None:
    note_end(create_local_job())
    assert "local-1" in typed("jobs --all", stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": columns}).stdout


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ResihpError("the other end hung up"), 69),
        (ProtocolError("malformed"), 69),
        (SlurmUnavailableError("slurmctld does not answer"), 69),
        (SlurmRefusedError("Invalid account"), 69),
        (SlurmOutputError("squeue printed half a line"), 70),
        (ZeroDivisionError("a bug"), 70),
        (FileNotFoundError(2, "No such file or directory", "a bug"), 70),
        (FaultNotFiredError("fault 1 did not fire"), 1),
        (UsageError("no such key"), 2),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_only_a_training_that_failed_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: Exception, code: int
) -> None:
    def broken() -> None:
        raise raised

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert str(raised) in capsys.readouterr().err


def test_a_file_that_cannot_be_reached_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "theirs/job.toml")

    monkeypatch.setattr(cli, "app", closed)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 69
    told = "resihp: theirs/job.toml: Permission denied; check it with ls -ld and df -h\n"
    assert capsys.readouterr().err == told
