"""Many jobs that write to one PostgreSQL with its default settings (100 connections), and a reader meanwhile.

    python -m benchmarks.ledger_writers [--writers 300] [--seconds 40] [--iterations 30] [--begin-within 30]

Each writer is a job's ledger as a supervisor has it, opened behind its back, which is handed a journal of its own as
time goes by; the writers are threads of a few processes, and begin one after the other. Then every job's rows are
counted. The reader does what `resihp status` asks of the ledger. Exits with 1 where a record is missing, or an answer
took longer than a second, or the reader was refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from rich.console import Console
from rich.table import Table

from resihp.db.engine import resolve
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import LedgerError
from resihp.record import journal, journal_file

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from resihp.wrapper.sinks.deferred_ledger import DeferredLedger
from tests.db.killed_writer import long_story
from tests.db.postgres import Server

DEFAULTS = "-c max_connections=100 -c shared_buffers=128MB"
"""As PostgreSQL comes; `Server` asks for less."""
LONGEST_ANSWER_S = 1.0
CLOSE_S = 60.0
PRIORITY = 10


@dataclass(frozen=True)
class Load:
    """`seconds`: how long each job runs; `begin_within_s`: from the first job's start to the last one's."""

    writers: int
    seconds: float
    iterations: int
    begin_within_s: float
    processes: int

    @property
    def names(self) -> list[str]:
        return [f"job-{number}" for number in range(self.writers)]


def told_by(name: str, iterations: int) -> list[tuple[journal.AnyEntry, float]]:
    return [
        (msgspec.structs.replace(entry, job=name) if isinstance(entry, journal.JobStarted) else entry, at)
        for entry, at in long_story(iterations)
    ]


def one_job(name: str, url: str, folder: Path, load: Load, begin: Any, said: list[str], lacking: list[str]) -> None:
    path = folder / f"{name}.journal"
    kept = journal_file.Journal(path, sync=False)
    told = told_by(name, load.iterations)
    begin.wait()
    time.sleep(load.begin_within_s * load.names.index(name) / load.writers)
    opened: list[Ledger] = []

    def opener() -> Ledger:
        opened.append(Ledger.open(url, folder, say=said.append, journal_path=path))
        return opened[-1]

    ledger = DeferredLedger(opener, path, said.append, pause_s=0.0)
    began = time.monotonic()
    for number, (entry, at) in enumerate(told):
        time.sleep(max(began + load.seconds * number / len(told) - time.monotonic(), 0.0))
        ledger.submit(kept.append(entry, at))
    kept.close()
    ended = time.monotonic()
    complete = ledger.close()
    while opened and opened[0].applied < len(told) and time.monotonic() < ended + CLOSE_S:
        time.sleep(0.1)
    if not complete or opened[0].applied < len(told):
        lacking.append(name)


def _stand_back() -> None:
    """Lower priority, also where the kernel shares processors among sessions first (sched_autogroup, sched(7))."""
    os.setsid()
    os.nice(PRIORITY)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(PRIORITY))


def jobs_of(names: list[str], url: str, folder: str, load: Load, begin: Any, result: Connection) -> None:
    """One process's part. Its threads stand for jobs on machines of their own: none is to keep the interpreter for long
    while another one has a transaction open, and none takes a processor from the server and the reader."""
    _stand_back()
    sys.setswitchinterval(0.0005)
    said: list[str] = []
    lacking: list[str] = []
    threads = [
        threading.Thread(target=one_job, args=(name, url, Path(folder), load, begin, said, lacking)) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result.send((said, lacking))


class Looking(threading.Thread):
    """The reader, and who counts connections, until `over`."""

    def __init__(self, server: Server, url: str) -> None:
        super().__init__(daemon=True)
        self.server, self.url = server, url
        self.over = threading.Event()
        self.answers_s: list[float] = []
        self.connections: list[int] = []
        self.refused: list[str] = []
        self.not_counted = 0

    def run(self) -> None:
        name = resolve(self.url).database
        while not self.over.wait(0.2):
            began = time.monotonic()
            try:
                with Reader.open(self.url) as reader:
                    for row in reader.jobs()[:1]:
                        for table in ("nodes", "workers", "plans", "failures", "events"):
                            reader.rows(table, row["id"], last=20)
                        reader.rows("iterations", row["id"], last=400)
                self.answers_s.append(time.monotonic() - began)
            except LedgerError as error:
                if "holds no ledger" not in str(error):
                    self.refused.append(str(error).splitlines()[0][:120])
            self._count(name)

    def _count(self, database: str | None) -> None:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        try:
            with psycopg.connect(self.server.conninfo()) as connection:
                self.connections.append(int((connection.execute(query, (database,)).fetchone() or (0,))[0]))
        except psycopg.Error:  # no connection is free: not counted, but how often is
            self.not_counted += 1


def missing_in(url: str, load: Load) -> dict[str, int]:
    """What each job lacks, of those that lack something."""
    told = told_by("x", load.iterations)
    lacks: dict[str, int] = {}
    with Reader.open(url) as reader:
        jobs = {row["name"]: row["id"] for row in reader.jobs()}
        for name in load.names:
            found = 0
            if name in jobs:
                found = len(reader.rows("iterations", jobs[name])) + len(reader.rows("events", jobs[name]))
            if found != len(told):
                lacks[name] = len(told) - found
    return lacks


def measure(load: Load) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with Server(DEFAULTS) as server, tempfile.TemporaryDirectory() as folder:
        url = server.new_database()
        begin = context.Barrier(load.writers + 1)
        parts = []
        for part in range(load.processes):
            told, telling = context.Pipe(duplex=False)
            arguments = (load.names[part :: load.processes], url, folder, load, begin, telling)
            parts.append((context.Process(target=jobs_of, args=arguments), told))
            parts[-1][0].start()
        begin.wait()
        looking = Looking(server, url)
        looking.start()
        began = time.monotonic()
        said: list[str] = []
        lacking: list[str] = []
        for process, told in parts:
            heard, lacks = told.recv()
            said += heard
            lacking += lacks
            process.join()
        took_s = time.monotonic() - began
        looking.over.set()
        looking.join()
        for name in lacking:  # as the next `resihp status` of the job does
            catch_up(url, Path(folder), Path(folder, f"{name}.journal"))
        lacks_rows = missing_in(url, load)
    answers = sorted(looking.answers_s)
    return {
        "records": load.writers * len(told_by("x", load.iterations)),
        "seconds": took_s,
        "jobs that lack something": len(lacks_rows),
        "jobs that status had to bring in": len(lacking),
        "records missing": sum(lacks_rows.values()),
        "connections, most": max(looking.connections, default=0),
        "connections, median": sorted(looking.connections)[len(looking.connections) // 2] if looking.connections else 0,
        "answers": len(answers),
        "answer, median s": answers[len(answers) // 2] if answers else None,
        "answer, 99 of 100 s": answers[len(answers) * 99 // 100] if answers else None,
        "answer, slowest s": answers[-1] if answers else None,
        "reader refused": len(looking.refused),
        "connections not counted, none was free": looking.not_counted,
        "warnings": dict(Counter(kind_of(text) for text in said)),
    }


def kind_of(text: str) -> str:
    kinds = ("too many clients", "remaining connection slots", "temporarily unavailable", "timeout expired")
    kinds += ("lock timeout", "written again", "incomplete", "could not be opened", "does not answer")
    return next((kind for kind in kinds if kind in text), text[-120:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--writers", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=40.0, help="how long each job runs")
    parser.add_argument("--iterations", type=int, default=30, help="of each job; 20 at least")
    parser.add_argument(
        "--begin-within", type=float, default=30.0, help="seconds from the first job's start to the last"
    )
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(Load(options.writers, options.seconds, options.iterations, options.begin_within, options.processes))
    table = Table("one PostgreSQL, default settings", f"{options.writers} writers")
    for name, value in found.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    slowest = found["answer, slowest s"]
    return int(
        bool(found["jobs that lack something"] or found["reader refused"])
        or slowest is None
        or slowest > LONGEST_ANSWER_S
    )


if __name__ == "__main__":
    sys.exit(main())
