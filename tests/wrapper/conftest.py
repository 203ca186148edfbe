"""Real processes without training: a job whose workers are tiny scripts, its ledger a list."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from resihp.record.journal import AnyEntry
from resihp.wrapper.config.run_spec import Program
from resihp.wrapper.job_folder import Job, create_local_job
from tests.wrapper.run_requests import run_request

STUB = Path(__file__).with_name("stub_run.py")


SOON = {"STUB_BUDGET": "3"}
"""Environment of a job whose script has three seconds to say what it trains, if something of it is lost meanwhile."""


class StubJob:
    """One `resihp run` with the real guardian, supervisor, agents and fork servers."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder = folder
        self.job = job
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        script: str,
        *,
        nodes: int = 1,
        gpus: int = 1,
        kind: Literal["script", "module", "command"] = "script",
        arguments: tuple[str, ...] = (),
        preload: str = "json",
        environment: dict[str, str] | None = None,
        **changed: Any,
    ) -> StubJob:
        """Run `script`: as `train.py`, as module `train`, or by the shell."""
        path = self.folder / "train.py"
        path.write_text(script)
        argv = {"script": (str(path),), "module": ("train",), "command": ("/bin/sh", "-c", script)}[kind] + arguments
        fields: dict[str, Any] = {
            "program": Program(kind=kind, argv=argv, interpreter=sys.executable, preload=preload),
            "command": argv,
            "cwd": str(self.folder),
            "checkpoint_folder": str(self.job.checkpoints),
        }
        run_file = run_request(self.job.name, self.job.folder, nodes=nodes, gpus=gpus, **(fields | changed)).save()
        with (self.folder / "stderr").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(STUB), "guard", str(run_file)],
                stdin=subprocess.DEVNULL,
                stderr=err,
                env=os.environ | (environment or {}),
            )
        return self

    def wait(self, timeout_s: float = 30) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def log(self, name: str) -> str:
        path = self.job.logs / name
        return path.read_text() if path.exists() else ""

    def entries(self) -> list[AnyEntry]:
        return [record.entry for record in self.job.records()]

    def until(self, condition: Callable[[], Any], timeout_s: float = 20) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                logs = "".join(f"\n--- {path.name}\n{path.read_text()}" for path in sorted(self.job.logs.iterdir()))
                raise AssertionError(f"waited {timeout_s} s in vain:\n{self.stderr}{logs}")
            time.sleep(0.005)
        return found

    def processes(self, what: str = "") -> list[psutil.Process]:
        """Live processes of this job with `what` in their command line, found by their environment."""
        mark = os.environ["RESIHP_LOCAL"]
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.pid != os.getpid() and process.environ().get("RESIHP_LOCAL") == mark
                if ours and process.status() != psutil.STATUS_ZOMBIE and what in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def stub_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubJob]:
    """Fails the test when the job leaves a process behind."""
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    job = StubJob(tmp_path, create_local_job())
    yield job
    left = [(process.pid, process.cmdline()) for process in job.processes()]
    for pid, _ in left:
        os.kill(pid, signal.SIGKILL)
    if job.process is not None:
        job.process.wait()
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def fresh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no configuration of the user's."""
    for name in [name for name in os.environ if name.startswith("RESIHP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
