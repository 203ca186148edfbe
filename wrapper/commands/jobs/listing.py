"""What `resihp jobs` lists: each job that the registry or this home knows, with how far it is.

Of a job that was submitted and has not begun, what Slurm says of it; of one that is over, what the registry has; of one
that runs, what its supervisor has written into its folder, or else its ledger, and what Slurm says of it. One that
nobody supervises any more is ended here, as `status` does. Jobs whose folders are gone are dropped after a month, and
those that never began after a day. One that died where nobody could tell its end, and that Slurm does not have any
more, is taken for one that has ended. A file system that hangs holds up nothing but the jobs on it.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.errors import JobNotFoundError, OwnershipError, ResihpError
from wrapper import registry
from wrapper.exit_codes import REQUEUE
from wrapper.job_files import NEVER_BEGAN, STARTS_S, entry_of, home
from wrapper.job_folder import Job, all_jobs, finish_dead_job, is_there, job_of, note_end, ours
from wrapper.registry import QUEUED, KnownJob

if TYPE_CHECKING:
    from db.reading.queries import Reader
    from slurm.client import JobView, Slurm

Row = dict[str, Any]
Say = Callable[[str], None]

NOT_SEEN = "not seen from here"
"""Of a folder that another host made."""
NOT_TOLD = "unknown"
"""Of a job that nobody seems to supervise, and whose journal is elsewhere; or whose folder cannot be looked at."""
UNFIT = (ResihpError, OSError, ValueError, ArithmeticError, RecursionError)
"""What a job may cause whose files or ledger hold anything: one such job keeps none of the others from being listed."""
LAST_S = 86400.0
"""So long after its end a job is listed."""
KEPT_S = 30 * 86400.0
"""So long one is listed whose folder is gone."""
ANSWER_S = 2.0
"""How long a file system is waited for."""
SLURM_S = 3.0
"""How long Slurm is waited for."""


def listed(*, every: bool, now_s: float, say: Say, slurm: Slurm | None = None) -> tuple[list[Row], int]:
    """Rows, running jobs first and newest first, and how many were left out as they ended long ago. `slurm`: whom to
    ask for states; the commands on PATH if left out."""
    rows: list[Row] = []
    hidden = 0
    known, silent = _known(say)
    moved = _moved([entry for entry in known if entry.home not in silent])
    with _Ledgers(say) as ledgers:
        for entry in known:
            if entry in moved:
                _keep_at_new_place(entry, known)
            if entry in moved or (entry.state == QUEUED and any(_is_begun(entry, other) for other in known)):
                registry.drop(entry)
                continue
            try:
                over_at = entry.ended_at
                if entry.home not in silent and entry.state != QUEUED:
                    entry = _settled(entry, now_s, say)
                    over_at = _over_at(entry)
                    if over_at is not None and over_at < now_s - KEPT_S and not is_there(entry):
                        registry.drop(entry)
                        continue
                if over_at is not None and over_at < now_s - LAST_S and not every:
                    hidden += 1
                else:
                    rows.append(_row(entry, now_s, None if entry.home in silent else ledgers))
            except UNFIT as error:
                say(f"warning: job {entry.name}: {entry.folder}: {error}")
                rows.append(_row(entry, now_s, None))
    for row in _that_are_over(rows, slurm, say):
        if max(row["began_at"], row["last_iteration_at"] or row["began_at"]).timestamp() > now_s - LAST_S:
            continue
        if row["state"] == NEVER_BEGAN:
            this = row["folder"], row["began_at"]
            registry.drop(next(entry for entry in known if (entry.folder, _time(entry.began_at)) == this))
        elif every:
            continue
        else:
            hidden += 1
        rows.remove(row)
    waits = [row for row in rows if row["ended_at"] is None or row["slurm_state"] == "pending"]
    return sorted(rows, key=lambda row: (row not in waits, -row["began_at"].timestamp())), hidden


def _moved(known: Sequence[KnownJob]) -> list[KnownJob]:
    """Entries of jobs whose folders were moved, and are known where they are now."""
    same: dict[tuple[str, str, float], list[KnownJob]] = {}
    for entry in known:
        same.setdefault((entry.name, entry.host, entry.began_at), []).append(entry)
    twice = [entries for entries in same.values() if len(entries) > 1 and any(map(is_there, entries))]
    return [entry for entries in twice for entry in entries if not is_there(entry)]


def _keep_at_new_place(moved: KnownJob, known: Sequence[KnownJob]) -> None:
    """Write the entry of a job whose folder was moved for the place where the folder is now."""
    for entry in known:
        is_same_job = (entry.name, entry.host, entry.began_at) == (moved.name, moved.host, moved.began_at)
        if is_same_job and is_there(entry) and ours(job_of(entry)) is not None:
            registry.note(entry, partial(_stronger, msgspec.structs.replace(moved, folder=entry.folder)))


def _stronger(moved: KnownJob, present: KnownJob | None) -> KnownJob:
    """Return the entry at a job's new place, unless that is there only because a command saw the job."""
    return moved if present is None or present.only_seen else present


def _is_begun(queued: KnownJob, other: KnownJob) -> bool:
    """Whether that is the job that was submitted, or its first run: numbers are used again, and are one cluster's."""
    return (
        other.state != QUEUED
        and other.slurm_job == queued.slurm_job
        and (other.cluster == queued.cluster or not (other.cluster and queued.cluster))
        and other.began_at > queued.began_at - STARTS_S
    )


def _known(say: Say) -> tuple[list[KnownJob], set[str]]:
    """Jobs of the registry; those of this home that it does not have, as of an older version; and the homes that do
    not answer."""
    found, wrong = registry.entries()
    if wrong:
        say(f"warning: {wrong[0]}" + (f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    here: Path | None = None
    try:
        here = home()
    except OwnershipError as error:
        say(f"warning: {error}")
    homes = dict.fromkeys([*([] if here is None else [str(here)]), *(entry.home for entry in found)])
    silent = _silent(homes)
    for each in sorted(silent):
        say(f"warning: {each}: no answer for {ANSWER_S:g} s; of jobs there is told what was known when they began")
    if here is not None and str(here) not in silent:
        folders = {(entry.folder, entry.began_at) for entry in found}
        for job in all_jobs(here):
            with suppress(JobNotFoundError):
                file = job.read()
                if (str(job.folder), file.created_at) not in folders:
                    found.append(entry_of(job, file))
    return found, silent


def _silent(homes: Collection[str]) -> set[str]:
    """Of these, those on a file system that hangs: who looks there would hang as well, with all that is to be told of
    the others."""

    def look(each: str) -> None:
        with suppress(OSError), os.scandir(Path(each, "jobs")) as there:
            next(there, None)

    looks = {each: threading.Thread(target=look, args=(each,), daemon=True) for each in homes}
    until = time.monotonic() + ANSWER_S
    for one in looks.values():
        one.start()
    for one in looks.values():
        one.join(max(until - time.monotonic(), 0.0))
    return {each for each, one in looks.items() if one.is_alive()}


def _settled(entry: KnownJob, now_s: float, say: Say) -> KnownJob:
    """The entry, with the end of a job that is over and whose end was not noted."""
    if entry.ended_at is not None or not is_there(entry):
        return entry
    job = ours(job_of(entry))
    if job is None:
        return entry  # somebody else may have written what is there
    try:
        if job.is_led:
            return entry
        if job.exit_code_file.exists() or finish_dead_job(job) or job.never_began(now_s):
            return note_end(job) or entry
    except UNFIT as error:
        say(f"warning: job {job.name}: {error}")
    return entry


def _over_at(entry: KnownJob) -> float | None:
    """When it ended; of one whose folder was removed before it was known to have ended, when it began. None while it
    may run: on another host its folder may be there."""
    if entry.ended_at is None and entry.host == socket.gethostname() and not is_there(entry):
        return entry.began_at
    return entry.ended_at


def _row(entry: KnownJob, now_s: float, ledgers: _Ledgers | None) -> Row:
    """`ledgers`: None where its folder cannot be looked at."""
    state = NOT_TOLD if ledgers is None and entry.ended_at is None else entry.state
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
        row |= _told(entry, now_s) or ledgers.figures(job_of(entry), now_s)
    return row


def _state(entry: KnownJob, now_s: float) -> str:
    if entry.state == QUEUED:
        return QUEUED  # it has no folder yet
    if not is_there(entry):
        return "folder gone" if entry.host == socket.gethostname() else NOT_SEEN
    if entry.ended_at is None and not job_of(entry).is_led:
        return "starting" if entry.began_at > now_s - STARTS_S else NOT_TOLD
    return entry.state


def _told(entry: KnownJob, now_s: float) -> Row | None:
    """What the job's supervisor has written of it, with no ledger to be opened; None where nothing new was written for
    so long that the job may be stuck: the ledger tells whether it is, or the folder could not be written to."""
    from wrapper.output.progress import Goal, longest_s, progress

    file = job_of(entry).progress(entry.began_at)
    if file is None:
        return None
    try:
        recent = [
            {**msgspec.structs.asdict(each), "finished_at": datetime.fromtimestamp(each.finished_at, UTC)}
            for each in file.recent
        ]
        trains = Goal(iterations=file.target, resume_from=file.resumed_from)
        found = progress(trains, recent, datetime.fromtimestamp(now_s, UTC), running=True)
    except (ValueError, OverflowError, OSError):
        return None  # times that no calendar has
    if now_s - (file.recent[-1].finished_at if file.recent else file.written_at) > longest_s(recent):
        return None
    return {
        **found,
        "nodes": file.nodes,
        "gpus_per_node": file.gpus_per_node,
        "layout": file.layout or None,
    }


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


class _Ledgers:
    """Ledgers of running jobs, each opened once; what cannot be read is told once, and its jobs have no figures."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._stack = ExitStack()
        self._readers: dict[str, Reader | None] = {}

    def __enter__(self) -> _Ledgers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def figures(self, job: Job, now_s: float) -> Row:
        from wrapper.output.ledgers import row_of
        from wrapper.output.progress import RECENT_ITERATIONS, goal, progress

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
            return {}  # it has just begun
        except UNFIT as error:
            self._say(f"warning: job {job.name}: {error}")
            return {}

    def _reader(self, job: Job) -> Reader | None:
        from db.reading.queries import Reader
        from wrapper.output.ledgers import exists, url_of

        url = url_of(job)
        if url not in self._readers:
            self._readers[url] = None
            if exists(url):
                self._readers[url] = self._stack.enter_context(Reader.open(url))
        return self._readers[url]


def _that_are_over(rows: Iterable[Row], slurm: Slurm | None, say: Say) -> list[Row]:
    """Add Slurm's state to jobs that are not known to have ended, and to those that Slurm may run again, in one call;
    those that Slurm does not run or hold, and of which nothing else is known. Numbers are used again, and are those of
    one cluster: a job that Slurm had before ours began, of another user, or of another cluster, is another one."""
    of_slurm = [row for row in rows if row["slurm_job"]]
    newest = _newest(of_slurm)
    asked = [row for row in of_slurm if row["ended_at"] is None or (row in newest and _may_run_again(row))]
    if not asked or (slurm is None and shutil.which("squeue") is None):
        return []
    if slurm is None:
        from slurm.commands import CommandLine

        slurm = CommandLine(timeout_s=SLURM_S)
    from slurm.errors import SlurmError

    try:
        here = slurm.cluster() if any(row["cluster"] for row in asked) else ""
        asked = [row for row in asked if row["cluster"] in (None, here)]
        views = slurm.jobs(dict.fromkeys(row["slurm_job"] for row in asked)) if asked else {}
    except SlurmError as error:
        say(f"Slurm was not asked: {error}")
        return []
    over = []
    for row in asked:
        waits = row["state"] == QUEUED
        view = views.get(row["slurm_job"])
        if view is not None and not _is_that(view, row):
            view = None
        if row["ended_at"] is not None and (view is None or view.state != "pending"):
            continue
        if view is not None:
            row["slurm_state"] = view.state
            row["slurm_reason"] = view.why or None
        active = view is not None and view.active
        if waits and (view is None or view.state != "pending"):
            row["state"] = "starting" if active else NEVER_BEGAN
        if not active and row["state"] in (NEVER_BEGAN, NOT_SEEN, NOT_TOLD):
            over.append(row)
    return over


def _newest(rows: Iterable[Row]) -> Collection[Row]:
    """Of several runs of a job in Slurm, the last one."""
    of_job = {(row["cluster"], row["slurm_job"]): row for row in sorted(rows, key=lambda row: row["began_at"])}
    return of_job.values()


def _may_run_again(row: Row) -> bool:
    """Whether it asked Slurm for that, or died in a way that Slurm may have seen."""
    return bool(row["exit_code"] == REQUEUE or row["state"] == "abnormal")


def _is_that(view: JobView, row: Row) -> bool:
    """Whether Slurm means the job of that row; one that is run again was submitted anew then."""
    began_s: float = row["began_at"].timestamp()
    if row["ended_at"] is not None:
        in_time = view.submitted_at is None or view.submitted_at >= began_s
    else:
        in_time = row["state"] == QUEUED or view.submitted_at is None or view.submitted_at <= began_s + STARTS_S
    return in_time and view.user == str(row["user"])
