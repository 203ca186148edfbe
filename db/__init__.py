"""The ledger: tables that tell what happened to jobs, written behind a job's back and read after it.

=================================  ============================================================================
`models`, `engine`, `migrate`      tables, databases that we speak to, versions of the schema
`url_passwords`                    masks passwords in ledgers' URLs, and takes them out of the process list
`projection`, `layouts`            a journal's entries as rows
`writer`, `report_rows`            the one writer of a job's ledger
`exchange`, `parquet`              jobs from one ledger into another, what was repaired as well
`retention`                        how long rows of iterations stay
`reading`                          what is asked of a ledger
=================================  ============================================================================

A ledger decides nothing: a job goes on without it, and the journal is what counts.
`from resihp.ledger import queries` is the way in for notebooks (`db.reading.queries`), also beside a
db.py of the user's; `from db import queries` is the same where there is none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from db.reading import queries

__all__ = ["queries"]


def __getattr__(name: str) -> Any:
    if name == "queries":
        return import_module("db.reading.queries")
    raise AttributeError(f"module 'db' has no attribute {name!r}")
