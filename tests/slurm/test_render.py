"""Batch scripts: shipped templates are whole, and what is put into them stays where it belongs."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from resihp.slurm.errors import SlurmUsageError
from resihp.slurm.render import TEMPLATES, render, template, time_limit

COMMAND = ("resihp", "run", "--config", "job.toml")


def directives(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert len(lines) == len({line.partition("=")[0] for line in lines}), "none stands there twice"
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def command(script: str) -> list[str]:
    (line,) = [line for line in script.splitlines() if line.startswith("exec ")]
    return shlex.split(line)[1:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_scripts_that_survive_a_node_and_a_time_limit(name: str, tmp_path: Path) -> None:
    script = template(name)
    assert script.startswith("#!/bin/bash\n")
    assert max(len(line) for line in script.splitlines()) <= 120
    found = directives(script)
    assert found["signal"] == "B:USR2@300"
    assert found["open-mode"] == "append"
    assert {"no-kill", "requeue", "exclusive", "time"} <= found.keys()
    assert command(script)[:2] == ["resihp", "run"]
    assert script.splitlines()[-1].startswith("exec "), "signals for the batch script reach resihp itself"
    (tmp_path / "script").write_text(script)
    assert subprocess.run(["bash", "-n", str(tmp_path / "script")], check=False).returncode == 0


def test_values_replace_those_of_the_template() -> None:
    script = render(
        template("nodes"),
        {"nodes": "7", "partition": "gpu", "time": False, "requeue": False, "no-requeue": True, "contiguous": True},
        COMMAND,
        title="Written for a test",
    )
    found = directives(script)
    assert (found["nodes"], found["partition"]) == ("7", "gpu")
    assert {"time", "requeue"}.isdisjoint(found)
    assert {"no-requeue", "contiguous", "no-kill", "open-mode"} <= found.keys()
    assert command(script) == list(COMMAND)
    assert "EDIT" not in script
    assert "##SBATCH" not in script
    assert script.splitlines()[:2] == ["#!/bin/bash", "# Written for a test"]
    assert "When a node dies" in script, "what a line means stays above it"
    assert "Slurm runs the job again" not in script, "and goes with it"


@pytest.mark.parametrize("odd", ["it's", "$(touch here)", "a b", "`id`", '"', "\\", "#", "*", "-x"])
def test_an_argument_reaches_the_command_as_it_is(tmp_path: Path, odd: str) -> None:
    script = render(template("one-node"), {}, ["printf", "%s|", odd], title="t", exports={"A_B": odd})
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{odd}|"
    exported = render(template("one-node"), {}, ["printenv", "A_B"], title="t", exports={"A_B": odd})
    done = subprocess.run(["bash", "-c", exported], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{odd}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["a b", "a\nexec rm", "a\x00", "a'", 'a"', "$HOME", "a#b", "", "`id`"])
def test_a_directive_holds_no_value_that_ends_it(value: str) -> None:
    with pytest.raises(SlurmUsageError, match="a batch script cannot hold this value"):
        render(template("nodes"), {"comment": value}, COMMAND, title="t")


def test_newlines_get_nowhere() -> None:
    with pytest.raises(SlurmUsageError, match="has a character that a batch script cannot hold"):
        render(template("nodes"), {}, ["resihp", "a\nb"], title="t")
    with pytest.raises(SlurmUsageError, match="has a character that a batch script cannot hold"):
        render(template("nodes"), {}, COMMAND, title="a\nrm -rf")
    with pytest.raises(SlurmUsageError, match="not an option of sbatch"):
        render(template("nodes"), {"no kill\n": True}, COMMAND, title="t")
    with pytest.raises(SlurmUsageError, match="not a name of an environment variable"):
        render(template("nodes"), {}, COMMAND, title="t", exports={"A;B": "1"})


@pytest.mark.parametrize(
    ("seconds", "text"), [(60, "0-00:01:00"), (86400, "1-00:00:00"), (90061, "1-01:01:01"), (5400.4, "0-01:30:00")]
)
def test_time_limits_are_slurms(seconds: float, text: str) -> None:
    assert time_limit(seconds) == text
