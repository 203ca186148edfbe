"""The ledger. `from db import queries` is the way in for notebooks (`db.reading.queries`), loaded when asked for."""

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
