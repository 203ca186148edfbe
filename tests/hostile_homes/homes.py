"""Job homes as the product makes them, without training: jobs that have finished, run, died, and one of Slurm's.

Called by `places.World`. The journals are those of the ledger's tests, written by the product's own classes; a mutation
then spoils a copy.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from resihp.db.migrate import upgrade
from resihp.db.writing.catch_up import catch_up
from resihp.record import journal, journal_file
from resihp.worker.checkpoints import write_manifest
from resihp.wrapper.job_files.contents import LastIteration, ProgressFile, SupervisorFile
from resihp.wrapper.job_files.dead_jobs import copy_journal
from resihp.wrapper.job_folder import Job, create_local_job, create_slurm_job, note_end, write_private
from tests.db.conftest import story
from tests.wrapper.commands.plan.test_of_job import DECLARE
from tests.wrapper.run_requests import run_request

KINDS = ("finished", "running", "dead", "slurm")
"""What becomes of the jobs of a home, in the order in which they are made: local-1, local-2, local-3, 4711-r1."""


def make(home: Path, local: Path, state: Path, *, kinds: tuple[str, ...]) -> list[Job]:
    """Make a home with a job of each kind, as whoever runs this."""
    with (
        _environment(RESIHP_HOME=str(home), RESIHP_LOCAL=str(local), XDG_STATE_HOME=str(state)),
        tempfile.TemporaryDirectory() as folder,
    ):
        empty = Path(folder) / "ledger.db"
        upgrade(f"sqlite:///{empty}")
        return [_job(kind, empty) for kind in kinds]


def open_to_all(folder: Path) -> None:
    """Let everybody read it, as an attacker does who wants to be read."""
    for where, _, files in os.walk(folder):
        os.chmod(where, 0o755)
        for name in files:
            os.chmod(Path(where, name), 0o644)


def _job(kind: str, empty_ledger: Path) -> Job:
    job = create_slurm_job("4711", 1) if kind == "slurm" else create_local_job()
    _journal(job, ended=kind in ("finished", "slurm"))
    shutil.copy(empty_ledger, job.folder / "ledger.db")  # to make one takes longer than all the rest
    catch_up("sqlite", job.folder, job.journal_file)
    job.set_ledger(f"sqlite:///{job.folder}/ledger.db")
    for rank in range(3):
        (job.logs / f"n{rank + 1}.rank{rank}.log").write_text("".join(f"iteration {i}\n" for i in range(40)))
    (job.logs / "supervisor.log").write_text("it began\n")
    run_request(
        job.name,
        job.folder,
        nodes=3,
        gpus=4,
        checkpoint_folder=str(job.checkpoints),
        cwd=str(job.home.parent),
        run="run-of-two" if kind in ("finished", "slurm") else "",
    ).save()
    _checkpoint(job, 20)
    _progress(job)
    if kind in ("finished", "slurm"):
        copy_journal(job)
        write_private(job.exit_code_file, b"0\n")
        (job.folder / "supervisor.lock").touch(0o600)
        note_end(job)
    if kind == "running":
        address = SupervisorFile(host=socket.gethostname(), port=9, pid=os.getpid())
        write_private(job.supervisor_file, msgspec.json.encode(address))
        (job.folder / "supervisor.lock").touch(0o600)
    return job


def _journal(job: Job, *, ended: bool) -> None:
    """The story of the ledger's tests, as this job's, with a model, so that it can be planned for."""
    began = job.read().created_at
    entries = list(story(ended))
    first = entries[0][1]
    writer = journal_file.Journal(job.journal_file, sync=False)
    for entry, at in entries:
        if isinstance(entry, journal.JobStarted):
            entry = msgspec.structs.replace(entry, job=job.name, host=socket.gethostname())
        if isinstance(entry, journal.PlanDecided) and entry.plan.epoch == 1:
            writer.append(journal.ModelDeclared(declare=DECLARE), began + at - first)
        writer.append(entry, began + at - first)
    writer.close()


def _checkpoint(job: Job, iteration: int) -> None:
    folder = job.checkpoints / f"iteration-{iteration:06d}"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "part-0", "w") as archive:
        archive.writestr("tensor", bytes(64))
    write_manifest(folder, iteration, [("part-0", (folder / "part-0").stat().st_size)], "fingerprint", seconds=0.5)


def _progress(job: Job) -> None:
    now = time.time()
    last = LastIteration(iteration=20, loss=2.0, tokens=8192, seconds=0.6, finished_at=now)
    file = ProgressFile(
        began_at=job.read().created_at,
        written_at=now,
        nodes=3,
        gpus_per_node=4,
        layout="TP2 PP2 DP3",
        target=20,
        recent=(last,),
    )
    write_private(job.progress_file, msgspec.json.encode(file))


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
