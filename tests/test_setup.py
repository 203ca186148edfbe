"""`make setup TORCH=site`: an environment with the torch that is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
OWN_TORCH = "torch==2."
CONSTRAINTS = "-c constraints.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_without_it_versions_are_those_of_constraints_txt(folder: Path) -> None:
    commands = make(folder, "-n", "setup").stdout
    assert OWN_TORCH in commands
    assert CONSTRAINTS in commands


def test_the_torch_that_is_there_is_neither_replaced_nor_constrained(folder: Path) -> None:
    commands = make(folder, "-n", "setup", "TORCH=site", f"PYTHON={sys.executable}").stdout
    assert "pip install" in commands
    assert OWN_TORCH not in commands
    assert CONSTRAINTS not in commands


def test_an_environment_with_the_sites_torch_keeps_it_when_make_is_called_again(folder: Path) -> None:
    (folder / ".venv").mkdir()
    (folder / ".venv" / "torch-of-site.txt").write_text("torch==2.11.0\n")
    commands = make(folder, "-n", "setup").stdout
    assert "pip install" in commands
    assert OWN_TORCH not in commands


def test_a_python_without_torch_is_named(folder: Path) -> None:
    venv.create(folder / "bare", with_pip=False)
    python = folder / "bare" / "bin" / "python"
    done = make(folder, "setup", "TORCH=site", f"PYTHON={python}")
    assert done.returncode
    assert f"{python} has no torch; try: make setup TORCH=site PYTHON=" in done.stderr
    assert not (folder / ".venv").exists()


def test_an_environment_with_its_own_torch_is_not_mixed_with_the_sites(folder: Path) -> None:
    (folder / ".venv").mkdir()
    (folder / ".venv" / "complete").touch()
    done = make(folder, "setup", "TORCH=site")
    assert done.returncode
    assert ".venv has a torch of its own; make clean, then make setup TORCH=site" in done.stderr
