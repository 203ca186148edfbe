"""Real jobs for tests: `resihp run --local` in a folder of its own, and what its ledger says afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from resihp.settings import Settings
from resihp.wrapper.launch.preloading import FOR_TESTS
from tests.integration import reading
from tests.integration.fork_server import fork_server
from tests.integration.polling import pause

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "pretrain_gpt.py"
RESIHP = [sys.executable, "-m", "resihp"]
STRICT = "RESIHP_STRICT_ORDER"
"""Gloo behaves as NCCL does at its strictest."""
BACKEND = "RESIHP_BACKEND"
"""What communicators are made of: `nccl-like` has NCCL's manners."""
HANDED_ON = (STRICT, BACKEND)
"""Set for the tests, these are set for their jobs."""

UNWATCHED = {"RESIHP_ADAPT__DETECT": "false", "RESIHP_ADAPT__EXAMINE": "false"}
"""Eight workers on two cores are slow in turns: only where that is the point (test_slow.py) is it looked for."""

DETECTION = Settings(job="any", nodes=1, gpus_per_node=1, tp=1, pp=1)
"""How long the controller waits for what, unless told otherwise."""

TINY = ("--layers", "4", "--hidden", "32", "--tokens", "64", "--micro-batches", "8")


@dataclass
class Job:
    """One run; `home` and `local` are its own, so that nothing leaks into the user's."""

    folder: Path
    process: subprocess.Popen[str] | None = None
    stdout: str = ""
    stderr: str = ""
    status: int | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {
            **{k: v for k, v in os.environ.items() if k in HANDED_ON or not k.startswith(("RESIHP_", "PYTHONPATH"))},
            "RESIHP_HOME": str(self.folder / "home"),
            "RESIHP_LOCAL": str(self.folder / "local"),
            # torch asks for the name of the store's address; a machine without a resolver waits 5 s for that.
            "RES_OPTIONS": "timeout:1 attempts:1",
            FOR_TESTS: fork_server(),
            **UNWATCHED,
        }

    def start(
        self, *options: str, command: tuple[str, ...] = (), nodes: int = 2, gpus: int = 4, tp: int = 2, pp: int = 2
    ) -> Job:
        argv = [*RESIHP, "run", "--local", "--nodes", str(nodes), "--gpus-per-node", str(gpus)]
        argv += ["--tp", str(tp), "--pp", str(pp), *options, "--", *command]
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "stdout", "w") as out, open(self.folder / "stderr", "w") as err:
            self.process = subprocess.Popen(
                argv, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True
            )
        return self

    def train(self, *options: str, script: tuple[str, ...] = (), iterations: int = 6, **where: int) -> Job:
        """Start the example, with tiny sizes."""
        command = (sys.executable, str(EXAMPLE), *TINY, "--iterations", str(iterations), *script)
        return self.start(*options, command=command, **where)

    def wait(self, timeout_s: float = 240) -> Job:
        assert self.process is not None
        try:
            self.status = self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                self.kill_all()
            self.stdout = (self.folder / "stdout").read_text()
            self.stderr = (self.folder / "stderr").read_text()
        return self

    def until(self, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
        """Poll for something that the job does; fails with its output when it ends or takes too long."""
        began = time.monotonic()
        deadline = began + timeout_s
        while not (found := condition()):
            assert self.process is not None
            assert self.process.poll() is None, f"job ended early:\n{(self.folder / 'stderr').read_text()}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s:\n{(self.folder / 'stderr').read_text()}"
            pause(began, 0.02)
            began = time.monotonic()
        return found

    def ask(self, *arguments: str) -> Any:
        """Run a reading command with --json."""
        status, out, err = reading.ask(*arguments, "--json", environment=self.environment, folder=self.folder)
        assert status == 0 or (arguments[0] == "status" and out), err  # which tells so of a job that has failed
        return json.loads(out)

    def history(self, table: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.ask("history", table)["rows"]
        return rows

    def losses(self) -> dict[int, float]:
        return {row["iteration"]: row["loss"] for row in self.history("iterations")}

    def processes(self) -> list[psutil.Process]:
        """Every live process that belongs to this job: by its environment, or where it was forked, by its log."""
        mark, folder = str(self.folder / "local"), f"{self.folder}/"
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("RESIHP_LOCAL") == mark or _log(process.pid).startswith(folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill_all(self) -> None:
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue


def _log(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return ""


def jobs(folder: Path) -> Iterator[Callable[[str], Job]]:
    """Factory for a fixture: makes jobs, and fails the test when one leaves a process behind."""
    made: list[Job] = []

    def make(name: str = "job") -> Job:
        job = Job(folder / name)
        made.append(job)
        return job

    yield make
    left = [(p.pid, p.cmdline()) for job in made for p in job.processes()]
    for job in made:
        job.kill_all()
    assert not left, f"processes left behind: {left}"
