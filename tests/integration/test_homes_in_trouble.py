"""A home that can be read and not written, as a snapshot, or a disk that the kernel has mounted so after an error; and
one on a file system that hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resihp.db.writer import Ledger
from resihp.wrapper.job_folder import create_local_job
from tests.waiting import until
from tests.wrapper.commands.status.test_status import record_job, resihp


def needs_bindfs() -> None:
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK) or os.geteuid():
        pytest.skip("needs bindfs, /dev/fuse and root; try: make setup-system")


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a home with a job that has ended and one of which nobody knows how it ended; so is the registry."""
    needs_bindfs()
    home, seen = tmp_path / "home", tmp_path / "seen"
    monkeypatch.setenv("RESIHP_HOME", str(home))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("RESIHP_STATE", str(home / "state"))
    for ended in (True, False):
        job = create_local_job()
        with Ledger.open("sqlite", job.folder) as ledger:
            for record in record_job(job, ended=ended):
                ledger.submit(record)
        (job.logs / "n1.rank0.log").write_text("the end\n")
    seen.mkdir()
    subprocess.run(["bindfs", "-r", str(home), str(seen)], check=True)
    try:
        monkeypatch.setenv("RESIHP_HOME", str(seen))
        monkeypatch.setenv("RESIHP_STATE", str(seen / "state"))
        yield seen
    finally:
        subprocess.run(["fusermount", "-u", "-z", str(seen)], check=True)


@pytest.mark.parametrize("name", ["local-1", "local-2"])
def test_all_that_reads_reads(snapshot: Path, name: str) -> None:
    assert not (snapshot / "jobs" / name / "ledger.db-wal").exists()
    state = json.loads(resihp("status", name, "--json").stdout)
    assert (state["iteration"], state["failures"]) == (3, 1)
    assert resihp("logs", name, "--rank", "0").stdout == "the end\n"
    for command in (["history", "failures", name], ["history", "failures", "--all"], ["history", "cost", name]):
        assert resihp(*command).stdout
    assert "left out" not in resihp("history", "failures", "--all").stderr


def test_jobs_lists_them(snapshot: Path) -> None:
    rows = json.loads(resihp("jobs", "--all", "--json").stdout)["rows"]
    assert {row["job"] for row in rows if row["folder"].startswith(str(snapshot))} == {"local-1", "local-2"}


def test_a_file_system_that_hangs_holds_up_no_other_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_bindfs()
    disk, hung = tmp_path / "disk", tmp_path / "hung"
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("RESIHP_STATE", str(tmp_path / "state"))
    for folder in (disk, hung):
        folder.mkdir()
    server = subprocess.Popen(["bindfs", "-f", str(disk), str(hung)])
    try:
        until(lambda: os.path.ismount(hung))
        for home in (hung / "home", tmp_path / "fine"):
            monkeypatch.setenv("RESIHP_HOME", str(home))
            record_job(create_local_job())
        server.send_signal(signal.SIGSTOP)
        for cwd in (tmp_path / "fine", hung / "home"):
            monkeypatch.setenv("RESIHP_HOME", str(cwd))
            command = [sys.executable, "-m", "resihp", "jobs", "--json"]
            told = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
            states = {row["folder"]: row["state"] for row in json.loads(told.stdout)["rows"]}
            assert states[str(tmp_path / "fine" / "jobs" / "local-1")] == "completed"
            assert states[str(hung / "home" / "jobs" / "local-1")] == "unknown"
            assert f"warning: {hung}/home: no answer for 2 s; " in told.stderr
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["fusermount", "-u", "-z", str(hung)], check=True)
        server.terminate()  # nodes of a test cluster that began meanwhile still have it mounted
        server.wait(30)
