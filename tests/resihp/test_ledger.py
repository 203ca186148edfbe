"""The ledger in a notebook: found beside a user's own db.py, and told where that is in the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A script's folder with modules of the user's that are called as our packages are."""
    for name in ("db", "slurm", "wrapper"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    return tmp_path


def python(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> subprocess.CompletedProcess[str]:
    """A script in this folder; resihp is on the path behind it, as where it is installed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder / "notebook.py").write_text(code)
    return subprocess.run([sys.executable, "notebook.py"], cwd=folder, capture_output=True, text=True, check=False)


def test_it_is_found_beside_a_users_own_db(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from resihp.ledger import queries\nprint(queries.Reader.__name__, queries.__name__)\n"
    done = python(beside, code, monkeypatch)
    assert (done.stdout, done.stderr) == ("Reader db.reading.queries\n", "")
    done = python(beside, "from resihp.ledger import queries\nqueries.Reader.open('sqlite:////none.db')\n", monkeypatch)
    assert "no such file; name another with --ledger" in done.stderr, "what it imports later is ours as well"


def test_another_db_that_is_there_already_is_named(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = python(beside, "import db\nassert db.MINE\nfrom resihp.ledger import queries\n", monkeypatch)
    assert f"ImportError: resihp.ledger: `db` is {beside / 'db.py'} in this process" in done.stderr
    assert "import resihp.ledger before it, rename that file" in done.stderr


def test_the_path_is_left_as_it_was(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys\nbefore = list(sys.path)\nfrom resihp.ledger import queries\nassert sys.path == before\n"
    assert python(beside, code, monkeypatch).stderr == ""


def test_a_training_process_never_has_it(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, resihp, resihp.datasets, resihp.worker.forkserver\n"
        "print([name for name in ('db', 'slurm', 'wrapper', 'resihp.ledger') if name in sys.modules])\n"
    )
    assert python(beside, code, monkeypatch).stdout == "[]\n"
