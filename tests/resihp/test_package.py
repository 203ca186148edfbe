"""What importing resihp costs, and what it keeps out of the training process."""

from __future__ import annotations

import subprocess
import sys


def test_import_is_light_and_knows_none_of_the_wrapper() -> None:
    probe = (
        "import sys, resihp, resihp.controller, resihp.record.journal; "
        "heavy = {'torch', 'megatron', 'pandas', 'sqlalchemy', 'wrapper', 'slurm', 'db'} & set(sys.modules); "
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_training_runtime_imports_none_of_the_wrapper() -> None:
    probe = (
        "import sys, resihp; resihp.Trainer; "
        "ours = {'wrapper', 'slurm', 'db', 'sqlalchemy', 'typer'} & set(sys.modules); "
        "sys.exit(f'loaded: {ours}' if ours else 0)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
