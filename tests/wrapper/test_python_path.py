"""resihp where `pip install --target` put it: found by PYTHONPATH alone, in all of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from resihp.slurm.command_call import own_environment

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter with everything that resihp needs, and without resihp."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path file in a folder that is named by a path file is not read: so an editable installation is not followed.
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    missing = subprocess.run([python, "-P", "-c", "import resihp"], capture_output=True, text=True, check=False)
    assert "No module named 'resihp'" in missing.stderr
    return python


def test_a_job_runs_from_a_folder_on_the_python_path(bare_python: Path, tmp_path: Path) -> None:
    modules, script = tmp_path / "modules", tmp_path / "train.py"
    modules.mkdir()
    (modules / "asyncio.py").write_text("raise SystemExit('a module of the user is in our processes')\n")
    (modules / "mine.py").write_text("OWNER = 'user'\n")
    script.write_text("import os, mine\nprint('rank', os.environ['RANK'], mine.OWNER)\n")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RESIHP_LOCAL": str(tmp_path / "local")}
    environment["PYTHONPATH"] = f"{ROOT}:{modules}"
    command = [bare_python, "-P", "-m", "resihp", "run", "--local", "--nodes", "2", "--", "python", script]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    logs = sorted(path.read_text() for path in tmp_path.rglob("*.rank*.log"))
    assert logs == ["rank 0 user\n", "rank 1 user\n"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (f"/home/user/code:{ROOT}:", str(ROOT)),
        (os.path.relpath(ROOT), str(ROOT)),
        ("/home/user/code", None),
        ("", None),
    ],
)
def test_of_the_users_python_path_our_processes_keep_our_own_folder(given: str, kept: str | None) -> None:
    assert own_environment({"PYTHONPATH": given, "HOME": "/root"}).get("PYTHONPATH") == kept
