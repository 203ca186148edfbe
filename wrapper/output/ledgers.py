"""Finds the ledgers that a command reads: one job's ledger, the ledger of `--ledger`, or the ledgers of all jobs of
this home.

Jobs of this user are brought up to date first. If a job lost its supervisor, its end is recorded
(`resihp.wrapper.job_files.dead_jobs`). If a job is over and its ledger lags behind the journal, the missing records are
added. For another user's job, only the ledger file in its folder is read, unchanged, whatever its job.json says. Used
by the commands that read ledgers.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from resihp.errors import JobNotFoundError, LedgerError, ResihpError
from resihp.wrapper.strict_modes import read_plain

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader
    from resihp.wrapper.job_folder import Job, OurJob

Answer = TypeVar("Answer")
Row = dict[str, Any]


@contextmanager
def opened(job: str | None, ledger: str | None) -> Iterator[tuple[Reader, dict[str, Any]]]:
    """Open the ledger to read, and find the job's row in it.

    Without `ledger`, or with `sqlite`, the job is searched first in this home, then in the user's other homes, and its
    own ledger is opened.
    """
    from resihp.db.reading.queries import Reader

    if ledger is not None and ledger != "sqlite":
        with Reader.open(ledger) as reader:
            yield reader, reader.job(job)
        return
    from resihp.wrapper.job_files.dead_jobs import finish_dead_job
    from resihp.wrapper.job_folder import find_job, ours

    job_here = find_job(job)
    url = url_of(job_here) if ledger is None else _own_url(job_here)
    try:
        if (own := ours(job_here)) is not None:
            finish_dead_job(own)
            _bring_up_to_date(own, url)
        if not exists(url):
            raise LedgerError(f"job {job_here.name}: {_no_ledger(job_here)}")
        reader = Reader.open(url)
    except LedgerError as error:
        raise LedgerError(f"{error}\nwithout a ledger: resihp jobs, and resihp logs {job_here.name}") from error
    with reader:
        try:
            row = row_of(reader, job_here)
        except JobNotFoundError:
            if job_here.supervisor() is None:
                raise
            raise LedgerError(
                f"job {job_here.name}: runs, and ledger {reader.name} does not have it yet; try again in a few "
                f"seconds, logs are in {job_here.logs}"
            ) from None
        yield reader, row


def pinned(job: str | None, ledger: str | None) -> str | None:
    """Return a name that identifies the same job in all later queries, even if other jobs begin meanwhile: the job's
    folder or, if a ledger was named, the job's name."""
    from resihp.wrapper.job_folder import find_job

    return job if ledger is not None and ledger != "sqlite" else str(find_job(job).folder)


def folder_of(pinned: str | None, ledger: str | None) -> str | None:
    """Return the folder of a job name from `pinned`; None if a ledger was named, as its jobs may have run on other
    machines."""
    return pinned if ledger is None or ledger == "sqlite" else None


def row_of(reader: Reader, job: Job) -> Row:
    """Return the ledger's row of the job in this folder. Names repeat between folders and hosts that share a ledger.

    The row is found by the id in the first record of the journal or, if the journal is on another machine, by host and
    start time. Raises JobNotFoundError.
    """
    from resihp.wrapper.job_folder import id_of, ours

    if (uuid := id_of(job)) is not None:
        return reader.job(job.name, uuid=uuid)
    file, own = job.read(), ours(job)
    if own is not None and file.host == socket.gethostname() and own.journal_file.parent.is_dir():
        raise JobNotFoundError(f"job {job.name}: has not begun; logs are in {job.logs}")
    return reader.job(job.name, host=file.host, started=datetime.fromtimestamp(file.created_at, UTC))


@contextmanager
def both(first: str, second: str, ledger: str | None) -> Iterator[tuple[tuple[Reader, Row], tuple[Reader, Row]]]:
    """Open two jobs, each with its own ledger, and yield (reader, row) for each."""
    with opened(first, ledger) as first_job, opened(second, ledger) as second_job:
        yield first_job, second_job


def _own_url(job: Job) -> str:
    from resihp.db.engine import default_url

    return default_url(job.folder)


def url_of(job: Job) -> str:
    """Return the URL of a job's ledger. For a job of ours, it is in job.json; for another user's job, it is always the
    file in the job's folder."""
    from resihp.wrapper.job_folder import ours

    own = ours(job)
    return _own_url(job) if own is None else our_url(own)


def our_url(job: OurJob) -> str:
    """Return the URL of the ledger of a job of ours, to read and to write."""
    return job.ledger_url or _own_url(job)


def urls_of(jobs: Iterable[Job], *, quiet: bool = False) -> tuple[list[str], int]:
    """Return the distinct URLs of these jobs' ledgers, and the number of jobs whose URL is unknown.

    A job with an unknown URL is left out, with a warning on stderr unless `quiet`.
    """
    from resihp.wrapper.output.answers import message

    urls: dict[str, None] = {}
    left_out = 0
    for job in jobs:
        try:
            urls[url_of(job)] = None
        except (ResihpError, OSError) as error:
            left_out += 1
            if not quiet:
                message(f"warning: job {job.name}: left out: {error}")
    return list(urls), left_out


def exists(url: str) -> bool:
    from resihp.db.engine import file_of, resolve

    file = file_of(resolve(url))
    return file is None or os.path.lexists(file)


def _bring_up_to_date(job: OurJob, url: str) -> None:
    """Add to the ledger of a finished job the records that only its journal has.

    If a newer resihp wrote the ledger, this version may be unable to write it: then it stays unchanged, with a warning.
    """
    from resihp.db.reading.queries import Reader

    if not job.is_over:
        return
    path, records = job.best_journal()
    if path is None or not records:
        return
    if exists(url):
        with Reader.open(url) as reader:
            try:
                row = row_of(reader, job)
                if reader.applied(row["id"]) >= records[-1].seq:
                    return
            except JobNotFoundError:
                pass
    from resihp.db.migrate import only_readable
    from resihp.db.writing.catch_up import catch_up
    from resihp.wrapper.output.answers import message

    if exists(url) and (why := only_readable(url)):
        message(f"warning: {why}; job {job.name} is shown without its last records")
        return
    try:
        catch_up(url, job.folder, path)
    except LedgerError as error:
        if not exists(url):
            raise
        message(f"warning: {error}; job {job.name} is shown without its last records")


def from_all(ledger: str | None, ask: Callable[[Reader], Answer], *, quiet: bool = False) -> list[Answer]:
    """Call `ask` with the named ledger, or else with each ledger of this home's jobs, and return the answers.

    A ledger of the home that cannot be read is left out, with a warning on stderr unless `quiet`. Raises
    JobNotFoundError if the home has no job. Raises LedgerError if the named ledger, or every ledger of the home, cannot
    be read, as missing data must not look like a past without failures.
    """
    from resihp.db.reading.queries import Reader
    from resihp.wrapper.output.answers import message

    if ledger is not None and ledger != "sqlite":
        with Reader.open(ledger) as reader:
            return [ask(reader)]
    from resihp.wrapper.job_folder import all_jobs, home, named, no_job_here, other_homes

    jobs = all_jobs()
    if not jobs:
        raise no_job_here()
    if not quiet and (homes := other_homes()):
        message(f"only jobs of this home; other jobs of yours are in {named(homes)}")
    answers: list[Answer] = []
    read_urls: set[str] = set()
    servers = _Servers()
    left_out: dict[str, list[str]] = {}
    for job in jobs:
        try:
            url = _caught_up(job, servers, own=ledger == "sqlite")
            if url in read_urls:
                continue
            read_urls.add(url)
            with Reader.open(url) as reader:
                answers.append(ask(reader))
        except (ResihpError, OSError) as error:
            left_out.setdefault(str(error), []).append(job.name)
    if not answers:
        subject = f"job {jobs[0].name}" if len(jobs) == 1 else f"none of {len(jobs)} jobs in {home()} can be read"
        raise LedgerError(f"{subject}: {next(iter(left_out))}")
    for why, names in () if quiet else left_out.items():
        subject = f"job {names[0]}" if len(names) == 1 else f"{len(names)} jobs ({named(names)})"
        message(f"warning: {subject}: left out: {why}")
    return answers


class _Servers:
    """Ledgers on servers, each tried only once, so that a server that is down does not cause one timeout for each of
    its jobs."""

    def __init__(self) -> None:
        self._tried: dict[str, LedgerError | None] = {}

    def check(self, url: str) -> None:
        """Raise LedgerError if the URL is a ledger on a server, and it cannot be opened."""
        from resihp.db.engine import file_of, resolve
        from resihp.db.reading.queries import Reader

        if url not in self._tried:
            self._tried[url] = None
            if file_of(resolve(url)) is None:
                try:
                    Reader.open(url).close()
                except LedgerError as error:
                    self._tried[url] = error
        if (failed := self._tried[url]) is not None:
            raise failed


class _RunName(msgspec.Struct):
    """The field of a job's run file that is the same for all attempts of one training."""

    run: str = ""


def attempts_here(ledger: str | None, run: str | None = None) -> list[dict[str, Any]]:
    """Return the attempts of each training that several jobs of this home have attempted, or of the training `run`
    only, as `Reader.attempts` does.

    Empty if a `ledger` was named, as it has all attempts itself. A ledger that cannot be read is left out.
    """
    from resihp.db.reading.queries import Reader
    from resihp.wrapper.job_folder import all_jobs

    if ledger is not None and ledger != "sqlite":
        return []
    runs: dict[str, list[Job]] = {}
    for job in all_jobs():
        with suppress(OSError, ValueError, RecursionError):
            runs.setdefault(msgspec.json.decode(read_plain(job.run_file), type=_RunName).run, []).append(job)
    attempts: list[dict[str, Any]] = []
    servers = _Servers()
    for name, jobs in runs.items():
        if not name or len(jobs) < 2 or run not in (None, name):
            continue
        for job in jobs:
            with (
                suppress(ResihpError, OSError),
                Reader.open(_caught_up(job, servers, own=ledger == "sqlite")) as reader,
            ):
                attempts += reader.attempts(name)
    return attempts


def _caught_up(job: Job, servers: _Servers, *, own: bool) -> str:
    """Return the URL of a job's ledger, after bringing the ledger up to date with the journal, if it lacks the job's
    end."""
    from resihp.db.reading.queries import Reader
    from resihp.wrapper.job_files.dead_jobs import finish_dead_job
    from resihp.wrapper.job_folder import ours

    url = _own_url(job) if own else url_of(job)
    servers.check(url)
    if exists(url):
        with Reader.open(url) as reader:
            try:
                row = row_of(reader, job)
            except JobNotFoundError:
                row = {"ended_at": None}
        if row["ended_at"] is not None:
            return url
    if (our_job := ours(job)) is not None:
        finish_dead_job(our_job)
        _bring_up_to_date(our_job, url)
    if not exists(url):
        raise LedgerError(_no_ledger(job))
    return url


def _no_ledger(job: Job) -> str:
    from resihp.wrapper.job_folder import ours

    if ours(job) is None:
        return (
            f"{job.folder} is not yours alone, so nothing but a ledger in it is read, and it has none; "
            "name the job's ledger yourself with --ledger"
        )
    if job.never_began(time.time()):
        return f"never began: it has no supervisor, and no history; logs are in {job.logs}"
    return f"its ledger is not there yet; has it begun? logs are in {job.logs}"
