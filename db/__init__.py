"""The ledger: tables that record the history of jobs, written in the background and read afterwards.

=================================  ============================================================================
`models`, `engine`, `migrate`      tables, supported databases, versions of the schema
`url_passwords`                    masks passwords in ledger URLs, and hides them from the process list
`projection`, `layouts`            entries of a journal as rows
`writer`, `writing`, `telemetry`   the only writer of a job's ledger
`exchange`, `parquet`              copies jobs, and maintenance records, from one ledger into another
`retention`                        how long rows of iterations are kept
`reading`                          questions to a ledger
=================================  ============================================================================

A ledger decides nothing: a job continues without it, and the journal is the authority. Notebooks use `from
resihp.ledger import queries` (`db.reading.queries`), which works even beside a db.py of the user's; `from db import
queries` is the same where there is no such file.
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
