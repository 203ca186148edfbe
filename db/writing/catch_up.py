"""Brings a ledger up to date with a journal, and waits for it: for commands that show a job, and for imports.

Decides how long to wait; `resihp.db.writer` writes. Called by `resihp.db.exchange`, by commands and by the supervisor.
"""

from __future__ import annotations

from pathlib import Path

from resihp.db.writer import Ledger
from resihp.errors import LedgerError, ResihpError


def catch_up(url: str, job_folder: Path, journal_path: Path, timeout_s: float = 60.0) -> None:
    """Write the journal's records that a ledger lacks, and wait for it as long as some are written every `timeout_s`.

    Raises LedgerError if the ledger cannot be opened, if the job belongs to another database user, or if nothing is
    written in time; ProtocolError if the journal cannot be read.
    """
    warnings: list[str] = []
    ledger = Ledger.open(url, job_folder, say=warnings.append)
    try:
        ledger.catch_up(journal_path)
        ledger.check_own()
    except (ResihpError, OSError):
        ledger.close(0.0)
        raise
    before = -1
    while not (complete := ledger.flush(timeout_s)) and ledger.applied > before:
        before = ledger.applied
    if not ledger.close(timeout_s if complete else 0.0):
        raise LedgerError(
            warnings[0] if warnings else f"ledger {ledger.name}: nothing was written for {timeout_s:.0f} s"
        )
