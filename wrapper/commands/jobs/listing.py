"""Computes the rows of `resihp jobs`: each job in the registry or in this home, with its progress.

The data of a submitted job that has not begun come from Slurm (`slurm_states`). The data of a finished job come from
the registry. The data of a running job come from the progress file in its folder, or else from its ledger, and from
Slurm. If a job has lost its supervisor, its end is recorded here, as `status` does. A job whose folder is gone is
removed from the registry after a month, and a job that never began after a day. A job whose end was not recorded counts
as ended once Slurm no longer has it. A file system that hangs affects only the jobs on it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from resihp.errors import JobNotFoundError, OwnershipError, ResihpError
from resihp.wrapper import registry
from resihp.wrapper.commands.jobs.slurm_states import NOT_SEEN, UNKNOWN_STATE, Row, Say, add_slurm_states
from resihp.wrapper.job_files.dead_jobs import finish_dead_job
from resihp.wrapper.job_files.homes import home
from resihp.wrapper.job_files.job import STARTS_S
from resihp.wrapper.job_files.registered import NEVER_BEGAN, entry_of
from resihp.wrapper.job_folder import Job, all_jobs, is_there, job_of, note_end, ours
from resihp.wrapper.registry import QUEUED, KnownJob

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader
    from resihp.slurm.client import Slurm

DAMAGED_JOB_ERRORS = (ResihpError, OSError, ValueError, ArithmeticError, RecursionError)
"""Errors that damaged files or a damaged ledger of one job may cause. They must not hide the other jobs."""
LISTED_AFTER_END_S = 86400.0
"""Seconds after its end during which a job is listed by default."""
LISTED_WITHOUT_FOLDER_S = 30 * 86400.0
"""Seconds after its end during which a job stays in the registry although its folder is gone."""
FILE_SYSTEM_TIMEOUT_S = 2.0
"""Seconds to wait for an answer of a file system."""


def listed(*, include_old: bool, now_s: float, say: Say, slurm: Slurm | None = None) -> tuple[list[Row], int]:
    """Return the rows, and the number of jobs that were left out because they ended long ago. Running and waiting jobs
    come first, then newer jobs before older ones.

    `slurm`: the client that returns Slurm's states; default: the Slurm commands on PATH.
    """
    rows: list[Row] = []
    hidden = 0
    entries, hanging_homes = _known(say)
    with _Ledgers(say) as ledgers:
        for entry in _drop_replaced(entries, hanging_homes):
            is_readable = entry.home not in hanging_homes
            try:
                over_at = entry.ended_at
                if is_readable and entry.state != QUEUED:
                    entry = _settled(entry, now_s, say)
                    over_at = _over_at(entry)
                    if over_at is not None and over_at < now_s - LISTED_WITHOUT_FOLDER_S and not is_there(entry):
                        registry.drop(entry)
                        continue
                if over_at is not None and over_at < now_s - LISTED_AFTER_END_S and not include_old:
                    hidden += 1
                else:
                    rows.append(_row(entry, now_s, ledgers if is_readable else None))
            except DAMAGED_JOB_ERRORS as error:
                say(f"warning: job {entry.name}: {entry.folder}: {error}")
                rows.append(_row(entry, now_s, None))
    hidden += _leave_out_ended(rows, add_slurm_states(rows, slurm, say), entries, now_s, include_old=include_old)
    waits = [row for row in rows if row["ended_at"] is None or row["slurm_state"] == "pending"]
    return sorted(rows, key=lambda row: (row not in waits, -row["began_at"].timestamp())), hidden


def _drop_replaced(entries: Sequence[KnownJob], hanging_homes: Collection[str]) -> Iterator[KnownJob]:
    """Yield the entries. An entry that a newer entry of the same job replaces is dropped: its folder was moved, or the
    submitted job has begun."""
    moved = _moved([entry for entry in entries if entry.home not in hanging_homes])
    for entry in entries:
        if entry in moved:
            _keep_at_new_place(entry, entries)
            registry.drop(entry)
        elif entry.state == QUEUED and any(_is_begun(entry, candidate) for candidate in entries):
            registry.drop(entry)
        else:
            yield entry


def _leave_out_ended(
    rows: list[Row], ended_rows: Sequence[Row], entries: Sequence[KnownJob], now_s: float, *, include_old: bool
) -> int:
    """Remove the rows of jobs that ended long ago from `rows`, and return their number. Jobs that never began are
    dropped from the registry and not counted."""
    hidden = 0
    for row in ended_rows:
        last_sign = max(row["began_at"], row["last_iteration_at"] or row["began_at"])
        if last_sign.timestamp() > now_s - LISTED_AFTER_END_S:
            continue
        if row["state"] == NEVER_BEGAN:
            this = row["folder"], row["began_at"]
            registry.drop(next(entry for entry in entries if (entry.folder, _time(entry.began_at)) == this))
        elif include_old:
            continue
        else:
            hidden += 1
        rows.remove(row)
    return hidden


def _moved(entries: Sequence[KnownJob]) -> list[KnownJob]:
    """Return the entries for former folders of jobs that were moved and also have an entry for the present folder."""
    entries_of_job: dict[tuple[str, str, float], list[KnownJob]] = {}
    for entry in entries:
        entries_of_job.setdefault((entry.name, entry.host, entry.began_at), []).append(entry)
    moved_jobs = [entries for entries in entries_of_job.values() if len(entries) > 1 and any(map(is_there, entries))]
    return [entry for entries in moved_jobs for entry in entries if not is_there(entry)]


def _keep_at_new_place(moved: KnownJob, entries: Sequence[KnownJob]) -> None:
    """Copy the entry of a job whose folder was moved to its entry for the present folder."""
    for entry in entries:
        is_same_job = (entry.name, entry.host, entry.began_at) == (moved.name, moved.host, moved.began_at)
        if is_same_job and is_there(entry) and ours(job_of(entry)) is not None:
            registry.note(entry, partial(_stronger, msgspec.structs.replace(moved, folder=entry.folder)))


def _stronger(moved: KnownJob, present: KnownJob | None) -> KnownJob:
    """Return `present`, the entry for the job's present folder, unless a command that saw the job there created it;
    then return `moved`."""
    return moved if present is None or present.only_seen else present


def _is_begun(queued: KnownJob, candidate: KnownJob) -> bool:
    """Return whether `candidate` is a run of the submitted job `queued`. Equal numbers are not enough, because Slurm
    reuses numbers."""
    return (
        candidate.state != QUEUED
        and candidate.slurm_job == queued.slurm_job
        and (candidate.cluster == queued.cluster or not (candidate.cluster and queued.cluster))
        and candidate.began_at > queued.began_at - STARTS_S
    )


def _known(say: Say) -> tuple[list[KnownJob], set[str]]:
    """Return the jobs in the registry, and jobs of this home that the registry lacks; and the homes that do not
    answer."""
    entries, problems = registry.entries()
    if problems:
        say(f"warning: {problems[0]}" + (f"; and {len(problems) - 1} more" if len(problems) > 1 else ""))
    here: Path | None = None
    try:
        here = home()
    except OwnershipError as error:
        say(f"warning: {error}")
    homes = dict.fromkeys([*([] if here is None else [str(here)]), *(entry.home for entry in entries)])
    hanging_homes = _silent(homes)
    for hanging_home in sorted(hanging_homes):
        say(
            f"warning: {hanging_home}: no answer for {FILE_SYSTEM_TIMEOUT_S:g} s; "
            "jobs there are shown as they were when they began"
        )
    if here is not None and str(here) not in hanging_homes:
        folders = {(entry.folder, entry.began_at) for entry in entries}
        for job in all_jobs(here):
            with suppress(JobNotFoundError):
                file = job.read()
                if (str(job.folder), file.created_at) not in folders:
                    entries.append(entry_of(job, file))
    return entries, hanging_homes


def _silent(homes: Collection[str]) -> set[str]:
    """Return the homes on a file system that hangs: reading them in this thread would block the list of all other
    jobs."""

    def look(folder: str) -> None:
        with suppress(OSError), os.scandir(Path(folder, "jobs")) as entries:
            next(entries, None)

    threads = {folder: threading.Thread(target=look, args=(folder,), daemon=True) for folder in homes}
    deadline = time.monotonic() + FILE_SYSTEM_TIMEOUT_S
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(deadline - time.monotonic(), 0.0))
    return {folder for folder, thread in threads.items() if thread.is_alive()}


def _settled(entry: KnownJob, now_s: float, say: Say) -> KnownJob:
    """Return the entry. If the job is over and its end was not recorded, record the end first."""
    if entry.ended_at is not None or not is_there(entry):
        return entry
    job = ours(job_of(entry))
    if job is None:
        return entry  # another user may have written this folder
    try:
        if job.is_led:
            return entry
        if job.exit_code_file.exists() or finish_dead_job(job) or job.never_began(now_s):
            return note_end(job) or entry
    except DAMAGED_JOB_ERRORS as error:
        say(f"warning: job {job.name}: {error}")
    return entry


def _over_at(entry: KnownJob) -> float | None:
    """Return the time when the job ended; None while it may be running.

    A job whose folder was removed before its end was recorded counts as ended at its start; but only on the host that
    created the folder, because another host may still see it.
    """
    if entry.ended_at is None and entry.host == socket.gethostname() and not is_there(entry):
        return entry.began_at
    return entry.ended_at


def _row(entry: KnownJob, now_s: float, ledgers: _Ledgers | None) -> Row:
    """Return the row of a job. `ledgers`: None if the job's folder cannot be read."""
    state = UNKNOWN_STATE if ledgers is None and entry.ended_at is None else entry.state
    if ledgers is not None:
        state = _state(entry, now_s)
    row: Row = {
        "job": entry.name,
        "state": state,
        "slurm_state": None,
        "slurm_reason": None,
        "exit_code": entry.exit_code,
        "nodes": entry.nodes or None,
        "gpus_per_node": entry.gpus_per_node or None,
        "layout": entry.layout or None,
        "iteration": entry.iterations,
        "target": entry.target or None,
        "loss": entry.loss,
        "last_iteration_at": _time(entry.last_iteration_at),
        "seconds_since_iteration": None,
        "tokens_per_second": None,
        "eta_seconds": None,
        "stuck": False,
        "began_at": _time(entry.began_at),
        "ended_at": _time(entry.ended_at),
        "host": entry.host,
        "user": entry.user,
        "cluster": entry.cluster or None,
        "slurm_job": entry.slurm_job or None,
        "ledger": entry.ledger or None,
        "folder": entry.folder,
    }
    if state == "running" and ledgers is not None:
        row |= _reported_progress(entry, now_s) or ledgers.figures(job_of(entry), now_s)
    return row


def _state(entry: KnownJob, now_s: float) -> str:
    if entry.state == QUEUED:
        return QUEUED  # a submitted job has no folder yet
    if not is_there(entry):
        return "folder gone" if entry.host == socket.gethostname() else NOT_SEEN
    if entry.ended_at is None and not job_of(entry).is_led:
        return "starting" if entry.began_at > now_s - STARTS_S else UNKNOWN_STATE
    return entry.state


def _reported_progress(entry: KnownJob, now_s: float) -> Row | None:
    """Return the progress that the supervisor wrote to the job's folder, so that no ledger has to be opened.

    None if the file is missing or too old. In that case, the ledger shows whether the job is stuck or the folder was
    not writable.
    """
    from resihp.wrapper.output.progress import longest_s, progress_in, recent_rows

    file = job_of(entry).progress(entry.began_at)
    figures = None if file is None else progress_in(file, now_s)
    if file is None or figures is None:
        return None
    if now_s - (file.recent[-1].finished_at if file.recent else file.written_at) > longest_s(recent_rows(file)):
        return None
    return figures


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


class _Ledgers:
    """The ledgers of running jobs, each opened only once. A ledger that cannot be read is reported, and its jobs have
    no figures."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._stack = ExitStack()
        self._readers: dict[str, Reader | None] = {}

    def __enter__(self) -> _Ledgers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def figures(self, job: Job, now_s: float) -> Row:
        from resihp.wrapper.output.ledgers import row_of
        from resihp.wrapper.output.progress import RECENT_ITERATIONS, goal, progress

        try:
            if (reader := self._reader(job)) is None:
                return {}
            row = row_of(reader, job)
            plans = reader.shown_plan(row["id"])
            now = datetime.fromtimestamp(now_s, UTC)
            return {
                **progress(
                    goal(row["model"]),
                    reader.rows("iterations", row["id"], last=RECENT_ITERATIONS),
                    now,
                    running=row["state"] == "running",
                ),
                "nodes": row["nodes"],
                "gpus_per_node": row["gpus_per_node"],
                "layout": plans[0]["description"] if plans else None,
            }
        except JobNotFoundError:
            return {}  # the job has just begun
        except DAMAGED_JOB_ERRORS as error:
            self._say(f"warning: job {job.name}: {error}")
            return {}

    def _reader(self, job: Job) -> Reader | None:
        from resihp.db.reading.queries import Reader
        from resihp.wrapper.output.ledgers import exists, url_of

        url = url_of(job)
        if url not in self._readers:
            self._readers[url] = None
            if exists(url):
                self._readers[url] = self._stack.enter_context(Reader.open(url))
        return self._readers[url]
