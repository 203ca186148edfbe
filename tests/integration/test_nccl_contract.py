"""What is used of torch's NCCL back end is there, under its name and with its arguments, from torch 2.11 to the newest.

resihp is installed beside such a torch without replacing it, and what its fork server forks may use CUDA.

Installs torch's CUDA builds, which import without a GPU, each in a virtual environment of its own, 5 GB, under
RESIHP_TEST_RELEASES; there they stay. Skips what cannot be had, with the reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from resihp.worker.forkserver import PRELOADED_MODULES
from tests.integration import nccl_contract

FOLDER = Path(os.environ.get("RESIHP_TEST_RELEASES", "/opt/resihp-tests"))
OLDEST = "2.11.0"
ROOT = Path(__file__).parents[2]
INSTALL_S, LOOK_S = 1800, 300

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * INSTALL_S)]

Answer = dict[str, Any]


def run(*command: str | Path, seconds: float, **variables: str) -> str:
    """Return what a command prints that runs in the project's folder. Raises what `subprocess` does."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=seconds, check=True
    )
    return done.stdout


def newest() -> str:
    versions = run(sys.executable, "-m", "pip", "index", "versions", "torch", seconds=120)
    found = re.search(r"torch \(([\d.]+)\)", versions)
    assert found is not None, versions
    return found[1]


def installed(version: str) -> Path:
    """The interpreter that has it. Raises what `subprocess` does where it cannot be had."""
    folder = FOLDER / f"torch-{version}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        run(sys.executable, "-m", "venv", "--clear", folder, seconds=120)
        run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch==={version}", seconds=INSTALL_S)
        (folder / "complete").touch()
    return python


def answer(python: Path) -> Answer:
    """How its torch answers; that it cannot is no reason to skip."""
    script = Path(nccl_contract.__file__)
    told: Answer = json.loads(run(python, script, *environment(), seconds=LOOK_S))
    return told


def environment() -> list[str]:
    """Variables that are set for the back end."""
    pytest.importorskip("torch")
    from resihp.executor import backends

    return [*backends.NO_WATCHDOG, *(name for name in backends.CONNECT_LIMITS if name.startswith("TORCH_"))]


def reason(error: Exception) -> str:
    """In a line."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.strip().splitlines()
        return f"{error.cmd[-1]}: {lines[-1] if lines else f'ended with {error.returncode}'}"
    return str(error)


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer | str]:
    """By version; a text says why there is none. Prints the table."""
    found: dict[str, Answer | str] = {}
    for name, version_of in (("oldest", lambda: OLDEST), ("newest", newest)):
        try:
            python = installed(version_of())
        except (subprocess.SubprocessError, OSError) as error:
            found[name] = reason(error)
        else:
            found[name] = answer(python)
    had = [each for each in found.values() if not isinstance(each, str)]
    print(f"{'':45}" + "".join(f"{each['torch']:>16}" for each in had))
    print(f"{'NCCL':45}" + "".join(f"{each['nccl']:>16}" for each in had))
    for line in dict.fromkeys(line for each in had for line in each["found"]):
        print(f"{line:45}" + "".join(f"{each['found'].get(line, 'not asked') or 'as used':>16}" for each in had))
    return found


@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_torch_has_what_is_used_of_its_nccl_back_end(answers: dict[str, Answer | str], name: str) -> None:
    told = answers[name]
    if isinstance(told, str):
        pytest.skip(f"the CUDA build of torch cannot be had: {told}")
    if "+cpu" in told["torch"]:
        pytest.skip(f"torch {told['torch']} is no CUDA build")
    assert {line: wrong for line, wrong in told["found"].items() if wrong} == {}
    assert len(told["found"]) >= 25


@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_installing_beside_torch_leaves_it_alone_and_forks_may_use_cuda(
    answers: dict[str, Answer | str], name: str
) -> None:
    told = answers[name]
    if isinstance(told, str):
        pytest.skip(f"the CUDA build of torch cannot be had: {told}")
    if "+cpu" in told["torch"]:
        pytest.skip(f"torch {told['torch']} is no CUDA build")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    python = installed(told["torch"].partition("+")[0])
    run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *requirements, seconds=INSTALL_S)
    command = (python, "-W", "ignore", "-m", "tests.integration.fork_after_preload", PRELOADED_MODULES)
    forked = json.loads(run(*command, seconds=LOOK_S, CUDA_HOME="/usr/local/cuda"))
    assert forked == {"torch": told["torch"], "fork": "sound"}
