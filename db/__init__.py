"""The ledger: tables that record the history of jobs, written in the background and read later.

=================================  ============================================================================
`models`, `engine`, `migrate`      tables, supported databases, versions of the schema
`url_passwords`                    masks passwords in ledger URLs, and hides them from the process list
`projection`, `layouts`            rows that follow from the entries of a journal
`writer`, `writing`, `telemetry`   the only writer of a job's ledger
`exchange`, `parquet`              copy jobs, and maintenance records, from one ledger to another
`retention`                        how long rows of iterations are kept
`reading`                          queries of a ledger
=================================  ============================================================================

A ledger decides nothing: a job continues without it, and the journal is the authority. Notebooks use `from resihp.db
import queries`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resihp.db.reading import queries

__all__ = ["queries"]


def __getattr__(name: str) -> Any:
    if name == "queries":
        return import_module("resihp.db.reading.queries")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
