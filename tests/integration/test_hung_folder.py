"""The job's folder lies on a shared file system that hangs: training goes on as if nothing was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resihp.record.journal import CheckpointCommitted
from tests.integration.jobs import Job
from tests.integration.slurm_jobs import ITERATIONS, Reference
from tests.integration.test_takeover import committed, entries, supervisor_of, wait_for

HUNG_S = 12.0
"""Longer than anything that a training job waits for: a silent node is given up after 6 s."""
STOPPED_S = 2.0
"""So long that the supervisor notices and writes it down, and nobody takes over."""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A file system whose server is one process of ours: while that is stopped, whoever touches a file waits."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK) or os.geteuid():
        pytest.skip("needs bindfs, /dev/fuse and root; try: make setup-system")
    disk, mounted = tmp_path / "disk", tmp_path / "shared"
    disk.mkdir()
    mounted.mkdir()
    server = subprocess.Popen(["bindfs", "-f", str(disk), str(mounted)])
    wait_for(lambda: server.poll() is not None or os.path.ismount(mounted))
    assert os.path.ismount(mounted), "bindfs does not mount"
    try:
        yield mounted, server
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["fusermount", "-u", "-z", str(mounted)], check=True)
        server.terminate()  # nodes of a test cluster that began meanwhile still have it mounted
        server.wait(10)


def test_training_does_not_notice(
    tmp_path: Path, shared: tuple[Path, subprocess.Popen[bytes]], job: Job, reference: Reference
) -> None:
    """Logs, ledger and checkpoints are there: the one that was due meanwhile is written late, and the next left out."""
    mounted, server = shared
    job.environment["RESIHP_HOME"] = str(mounted / "home")
    job.environment["RESIHP_ADAPT__SUCCESSION"] = "true"  # as under Slurm: logs on the node's own disk,
    job.folder.mkdir()
    (job.folder / "stderr").symlink_to(mounted / "stderr")  # but what the supervisor says in the shared folder
    job.train("--checkpoint-every", "5", iterations=ITERATIONS, nodes=2, gpus=2)
    wait_for(lambda: committed(job, 4))
    server.send_signal(signal.SIGSTOP)
    hung = time.monotonic()
    supervisor = supervisor_of(job)
    supervisor.suspend()  # what it says of that in its log, too, must not wait
    time.sleep(STOPPED_S)
    supervisor.resume()
    try:
        wait_for(lambda: committed(job, 20))
        wait_for(lambda: time.monotonic() > hung + HUNG_S)
    finally:
        server.send_signal(signal.SIGCONT)
    job.wait()
    assert job.status == 0, job.stderr
    assert job.history("failures") == []
    reference.check(job.history("iterations"), last=ITERATIONS)
    kept = [entry.iteration for entry in entries(job, CheckpointCommitted)]
    assert (kept[0], kept[-1]) == (5, ITERATIONS), job.stderr
    assert not {10, 15, 20}.intersection(kept), job.stderr
    assert f"iteration {ITERATIONS} " in job.stderr
    (log,) = mounted.glob("home/jobs/*/logs/supervisor.log")
    assert "was stopped for" in log.read_text()
