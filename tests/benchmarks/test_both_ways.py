"""Each benchmark runs as a file and with `python -m`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.stem for path in ROOT.glob("benchmarks/*.py") if '__name__ == "__main__"' in path.read_text())
AS_FILES = """
import runpy, sys
root, *names = sys.argv[1:]
elsewhere = [path for path in sys.path if path not in ("", root)]
for name in names:
    sys.path[:] = [f"{root}/benchmarks", *elsewhere]
    for module in [module for module in sys.modules if module.split(".")[0] in ("benchmarks", "tests")]:
        del sys.modules[module]
    runpy.run_path(f"{root}/benchmarks/{name}.py", run_name=name)
"""
AS_MODULES = """
import importlib, sys
root, *names = sys.argv[1:]
sys.path[0] = root
for name in names:
    importlib.import_module(f"benchmarks.{name}")
"""


@pytest.mark.parametrize("script", [AS_FILES, AS_MODULES], ids=["as files", "as modules"])
def test_benchmarks_find_what_they_import(script: str, tmp_path: Path) -> None:
    assert BENCHMARKS
    command = [sys.executable, "-c", script, str(ROOT), *BENCHMARKS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
