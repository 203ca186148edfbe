"""Record the jobs whose figures `test_figures.py` recomputes, from real runs.

    python -m tests.wrapper.figures.record [NAME...]

Writes `recorded/NAME.jsonl`: the records of one journal, one a line, as JSON. What names this machine or its user is
replaced. Each job is small; all of them take some minutes.
"""

from __future__ import annotations

import getpass
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from resihp.errors import JobNotFoundError
from resihp.executor.emulation import LAYER_MS
from resihp.record import journal_file
from resihp.record.journal import FailureFound, IterationCommitted, Reconfigured, Record
from resihp.wrapper.job_files import job as wrapper_job
from tests.integration.jobs import REPOSITORY, UNWATCHED, Job

RECORDED = Path(__file__).parent / "recorded"
WHERE = {"nodes": 2, "gpus": 2, "tp": 1, "pp": 2}


def records_of(job: Job, number: int = 1) -> list[Record]:
    folder = wrapper_job.Job(f"local-{number}", job.folder / "home" / "jobs" / f"local-{number}")
    try:
        path = next(path for path in folder.journals if path.exists())
    except (StopIteration, JobNotFoundError):
        return []
    return journal_file.read(path)


def committed(job: Job, number: int = 1) -> int:
    commits = [record.entry for record in records_of(job, number) if isinstance(record.entry, IterationCommitted)]
    return commits[-1].outcome.iteration if commits else 0


def expect(records: list[Record], kind: type, at_least: int) -> None:
    """Refuse a recording in which what it is for did not happen."""
    count = sum(isinstance(record.entry, kind) for record in records)
    if count < at_least:
        raise SystemExit(f"{count} of {at_least} {kind.__name__}: record it again")


def two_failures(job: Job) -> dict[str, list[Record]]:
    """A process crashes, whose device comes back; then another is killed for good."""
    faults = ("crash:rank=1@iteration=6,phase=backward", "kill:rank=2@iteration=30,phase=forward")
    given = [word for fault in faults for word in ("--fault", fault)]
    job.train(*given, iterations=40, **WHERE).wait(900)
    records = records_of(job)
    expect(records, FailureFound, 2)
    expect(records, Reconfigured, 3)
    return {"two-failures": records}


def resumed(job: Job) -> dict[str, list[Record]]:
    """A job without replicas loses a device after a checkpoint; another goes on from that, and repeats iterations."""
    where = {"nodes": 1, "gpus": 2, "tp": 1, "pp": 2}
    job.train("--checkpoint-every", "5", "--fault", "kill:rank=1@iteration=14", iterations=20, **where).wait(900)
    job.train("--checkpoint-every", "5", "--resume", "local-1", iterations=20, **where).wait(900)
    first, second = records_of(job, 1), records_of(job, 2)
    expect(first, FailureFound, 1)
    expect(second, IterationCommitted, 8)
    return {"interrupted": first, "resumed": second}


def interrupted_by_hand(job: Job) -> dict[str, list[Record]]:
    """Ctrl-C while it trains."""
    job.train("--checkpoint-every", "10", iterations=2000, **WHERE)
    job.until(lambda: committed(job) >= 15, 900)
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    job.wait(900)
    return {"ctrl-c": records_of(job)}


def supervisor_killed(job: Job) -> dict[str, list[Record]]:
    """The supervisor is killed, and its guardian starts another."""
    job.train("--checkpoint-every", "10", iterations=40, **WHERE)
    job.until(lambda: committed(job) >= 12, 900)
    supervisors = [each for each in job.processes() if "resihp.wrapper.supervisor.process" in each.cmdline()]
    ids = {each.pid for each in supervisors}
    for supervisor in supervisors:
        if supervisor.ppid() not in ids:
            psutil.Process(supervisor.pid).kill()
    job.wait(900)
    return {"supervisor-killed": records_of(job)}


def slow_device(job: Job) -> dict[str, list[Record]]:
    """A device is slow for a while."""
    for name in UNWATCHED:
        del job.environment[name]
    job.environment["RESIHP_ADAPT__EXAMINE"] = "false"
    job.train("--fault", "slow:rank=1,speed=0.4@iteration=20,until=40", iterations=60, **WHERE).wait(900)
    records = records_of(job)
    expect(records, FailureFound, 1)
    expect(records, Reconfigured, 1)
    return {"slow": records}


JOBS: dict[str, Callable[[Job], dict[str, list[Record]]]] = {
    "two-failures": two_failures,
    "resumed": resumed,
    "ctrl-c": interrupted_by_hand,
    "supervisor-killed": supervisor_killed,
    "slow": slow_device,
}


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or JOBS:
        folder = Path(tempfile.mkdtemp(prefix="recorded-"))
        job = Job(folder)
        job.environment[LAYER_MS] = "15"
        try:
            for recorded, records in JOBS[name](job).items():
                write(RECORDED / f"{recorded}.jsonl", records, folder)
                print(f"{recorded}: {len(records)} records")
        finally:
            job.kill_all()
            shutil.rmtree(folder, ignore_errors=True)


def write(path: Path, records: list[Record], folder: Path) -> None:
    """Write records without what names this machine, its user or its folders."""
    replaced = {
        str(folder): "/home/me/work",
        sys.executable: "python",
        str(REPOSITORY): "/home/me/resihp",
        f'"host":"{socket.gethostname()}"': '"host":"here"',
        f'"user":"{getpass.getuser()}"': '"user":"me"',
    }
    lines = []
    for record in records:
        line = msgspec.json.encode(record).decode()
        for named, instead in replaced.items():
            line = line.replace(named, instead)
        lines.append(line)
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
