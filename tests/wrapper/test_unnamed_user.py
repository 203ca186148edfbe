"""A user number that has no name, no home and no variables, as in many containers: everything works as for others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.errors import ConfigurationError, LedgerError

NUMBER = 54321
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unnamed() -> list[str]:
    """What a command is begun with so that it runs as that user, whose all files of ours seem to be."""
    command = ["unshare", "--user", f"--map-user={NUMBER}", f"--map-group={NUMBER}"]
    try:
        done = subprocess.run([*command, "id", "-u"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no user namespaces here: {error}")
    assert done.stdout.strip() == str(NUMBER)
    return command


def test_a_job_of_a_user_without_a_name_runs_and_is_shown(unnamed: list[str], tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "RESIHP_LOCAL": str(tmp_path / "local")}

    def resihp(*command: str) -> subprocess.CompletedProcess[str]:
        argv = [*unnamed, sys.executable, "-m", "resihp", *command]
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    ran = resihp("run", "--local", "--", "true")
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    files = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ".resihp").rglob("*") if path.is_file()}
    assert set(files.values()) == {0o600}, "ledger and logs, too"
    for command in (["status"], ["history", "jobs", "--user", str(NUMBER), "--json"], ["jobs"], ["doctor", "--json"]):
        done = resihp(*command)
        assert "Traceback" not in done.stderr, done.stderr
        assert "local-1" in done.stdout or command[0] == "doctor", (command, done)


def test_a_tilde_without_a_home_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resihp.db.engine import resolve
    from resihp.wrapper.config.sources import site_files
    from resihp.wrapper.config.values import expanded

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: NUMBER)
    assert len(site_files()) == 2
    with pytest.raises(
        ConfigurationError, match=r"~/webhook: ~ cannot be expanded: the user has no home directory on this host"
    ):
        expanded("~/webhook")
    with pytest.raises(LedgerError, match="~ cannot be expanded"):
        resolve("sqlite:///~/ledger.db")
