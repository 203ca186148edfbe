"""The command where it cannot run: an environment for training has only some of its dependencies."""

from __future__ import annotations

import subprocess
import sys


def test_a_python_without_the_commands_dependencies_names_the_way_out() -> None:
    without_typer = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['resihp', 'jobs']; "
        "from resihp.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", without_typer], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{sys.prefix} has no module typer, only what training needs; use the resihp of another" in done.stderr
