"""A process that keeps a journal and its ledger as a supervisor does, to be killed at any moment by the tests.

`long_story` is what happens; `work` goes on with it where the journal ends and tells the number of each record once it
is in the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from resihp.db.writer import Ledger
from resihp.record import journal, journal_file
from tests.db.conftest import BEGAN, outcome, story

FLUSH_EVERY = 10


def long_story(iterations: int) -> Iterator[tuple[journal.AnyEntry, float]]:
    """The usual story, and then iterations, suspicions and checkpoints in turn."""
    at = BEGAN
    for entry, at in story(ended=False):
        yield entry, at
    for i in range(21, iterations + 1):
        at += 0.5
        yield journal.IterationCommitted(epoch=2, outcome=outcome(i, 2.0), seconds=0.5, predicted_seconds=0.5), at
        if i % 3 == 0:
            yield journal.Suspected(rank=i % 12, node="n1", evidence=f"no progress in iteration {i}"), at
        if i % 10 == 0:
            yield journal.CheckpointCommitted(iteration=i, folder=f"checkpoints/{i}", bytes=1 << 20, seconds=0.2), at
    yield journal.JobEnded(exit_code=0, state="completed", reason=f"{iterations} iterations done"), at


def work(url: str, folder: str, iterations: int, told: Connection) -> None:
    """Go on until the story's end, or until killed."""
    path = Path(folder, "journal")
    kept = journal_file.Journal(path, sync=False)
    with Ledger.open(url, Path(folder), journal_path=path) as ledger:
        ledger.catch_up(path)
        for number, (entry, at) in enumerate(long_story(iterations), 1):
            if number <= kept.seq:
                continue
            record = kept.append(entry, at)
            told.send(record.seq)
            ledger.submit(record)
            ledger.telemetry([(number, 1, rank, 0.5, 0.4) for rank in range(12)])
            if number % FLUSH_EVERY == 0:
                ledger.flush(30)
    kept.close()
    told.send(0)
