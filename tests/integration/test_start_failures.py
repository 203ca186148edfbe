"""What goes wrong before the first iteration: the job begins with the rest, and says who was missing and why."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest

from resihp.controller.fail_stop.watchdog import LATECOMERS_S
from resihp.record.journal import NodeJoined, NodeLost, WorkerStarted
from tests.integration import reading
from tests.integration.jobs import EXAMPLE, TINY, Job
from tests.integration.slurm_jobs import Reference
from tests.integration.test_takeover import entries, supervisor_of, wait_for

SOAK = pytest.mark.soak
ITERATIONS = 4
SCRIPT = f"""\
import os, runpy, signal, sys, time
rank, gate = int(os.environ["RANK"]), sys.argv.pop(1)
if rank == BAD:
    FAILS
while not os.path.exists(gate):
    time.sleep(0.02)
sys.argv[0] = {str(EXAMPLE)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Begun:
    """A job whose processes wait for `open()` before they say what they train; one rank `fails` in some way."""

    def __init__(self, job: Job, fails: str = "pass", bad: int = -1, **where: int) -> None:
        self.job = job
        self.gate = job.folder / "gate"
        script = job.folder / "script.py"
        job.folder.mkdir(parents=True, exist_ok=True)
        script.write_text(SCRIPT.replace("BAD", str(bad)).replace("FAILS", fails))
        command = (sys.executable, str(script), str(self.gate), *TINY, "--iterations", str(ITERATIONS))
        job.start(command=command, **{"nodes": 4, "gpus": 1, "tp": 1, "pp": 2} | where)

    def open(self) -> None:
        self.gate.touch()

    def agent(self, node: str) -> psutil.Process | None:
        for process in self.job.processes():
            with suppress(psutil.Error):
                if process.cmdline()[-2:] == ["--node", node] or f"--node {node} " in " ".join(process.cmdline()):
                    return process
        return None

    def kill_node(self, node: str) -> None:
        agent = self.job.until(lambda: self.agent(node))
        os.killpg(agent.pid, signal.SIGKILL)

    def until_started(self, *ranks: int) -> None:
        wait_for(lambda: {entry.rank for entry in entries(self.job, WorkerStarted)} >= set(ranks))

    def trained(self, reference: Reference) -> list[dict[str, Any]]:
        """Wait for its end; the failures, if it has trained as if nothing had happened."""
        assert self.job.wait().status == 0, self.job.stderr
        losses = {i: loss for i, loss in reference.losses.items() if i <= ITERATIONS}
        assert self.job.losses() == pytest.approx(losses, rel=1e-4)
        return self.job.history("failures")


def test_a_process_that_dies_before_it_declares_is_begun_without(job: Job, reference: Reference) -> None:
    begun = Begun(job, "os.kill(os.getpid(), signal.SIGKILL)", bad=2)
    begun.open()
    (failure,) = begun.trained(reference)
    assert (failure["kind"], failure["component"], failure["node"]) == ("fail-stop", "process", "n3")
    assert failure["cause"] == "rank 2 killed by signal 9 (SIGKILL)"
    workers = {row["rank"]: row["node"] for row in job.history("workers")}
    assert workers.get(4) == "n3", "its device was tried again"


def test_what_one_rank_alone_raises_is_not_the_scripts(job: Job, reference: Reference) -> None:
    begun = Begun(job, 'raise ImportError("libcudart.so.12: cannot open shared object file")', bad=1, nodes=2, gpus=2)
    begun.open()
    (failure,) = begun.trained(reference)
    assert (failure["kind"], failure["component"], failure["node"]) == ("fail-stop", "process", "n1")
    assert failure["cause"].startswith("rank 1 raised ImportError: libcudart.so.12")
    assert len(job.history("workers")) == 4, "what its script raised is not tried again"
    assert "ImportError" in report(job)


def test_a_node_that_does_not_come_and_one_that_dies_before_it_declares(job: Job, reference: Reference) -> None:
    begun = Begun(job)
    begun.kill_node("n2")
    begun.until_started(0, 1, 2)
    begun.kill_node("n4")
    begun.open()
    failures = {row["node"]: row for row in begun.trained(reference)}
    assert {row["component"] for row in failures.values()} == {"node"}
    assert set(failures) == {"n2", "n4"}
    told = report(job)
    assert "n2" in told
    assert "n4" in told


@SOAK
def test_a_node_that_comes_late_joins_what_trains(job: Job, reference: Reference) -> None:
    """A spare, which is waited for a minute and not ten."""
    job.environment["RESIHP_SLURM__SPARES"] = "1"
    begun = Begun(job, nodes=2)
    agent = job.until(lambda: begun.agent("n2"))
    agent.suspend()
    (lost,) = wait_for(lambda: entries(job, NodeLost), timeout_s=LATECOMERS_S + 60)
    assert (lost.node, lost.reason.partition(" within ")[0]) == ("n2", "has not joined")
    begun.until_started(0, 1)
    agent.resume()
    wait_for(lambda: [entry.node for entry in entries(job, NodeJoined)][2:] == ["n2"])
    begun.open()
    assert begun.trained(reference) == []
    assert "n2 device 0" in job.stderr or "node n2: joined late" in job.stderr
    assert {row["node"]: row["lost_at"] for row in job.history("nodes")}["n2"] is None


@pytest.mark.parametrize(
    "moment", ["started", "joining", pytest.param("spawned", marks=SOAK), pytest.param("declared", marks=SOAK)]
)
def test_a_supervisor_that_is_killed_meanwhile_changes_nothing(job: Job, reference: Reference, moment: str) -> None:
    job.environment["RESIHP_ADAPT__SUCCESSION"] = str(moment == "started").lower()
    begun = Begun(job, "os.kill(os.getpid(), signal.SIGKILL)", bad=2)
    early = []
    if moment == "started":  # none of them has come to any supervisor yet
        for node in ("n1", "n2", "n3", "n4"):
            early.append(job.until(partial(begun.agent, node)))
            early[-1].suspend()
        job.until(lambda: len(list(job.folder.glob("home/jobs/*/logs/*.forkserver.log"))) == 4)
        assert not entries(job, NodeJoined)
    elif moment == "joining":
        job.until(lambda: entries(job, NodeJoined))
    else:
        begun.until_started(0, 1, 2, 3)
    if moment == "declared":
        begun.open()
    supervisor_of(job).kill()
    for agent in early:
        agent.resume()
    begun.until_started(0, 1, 2, 3)
    begun.open()
    (failure,) = begun.trained(reference)
    assert (failure["component"], failure["node"]) == ("process", "n3")


def report(job: Job) -> str:
    status, told, error = reading.ask("report", "--markdown", environment=job.environment, folder=job.folder)
    assert status == 0, error
    return told
