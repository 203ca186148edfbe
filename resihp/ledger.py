"""What a ledger answers, for notebooks and scripts: `from resihp.ledger import queries`.

The package that reads ledgers is called `db`, as many a module of a user's is, and Python takes the first of that name
on its path, that beside the script before all others. Here it is taken from where resihp itself is, whatever the path.
One name is one module in a process: where another `db` has been imported already, that file is named and nothing is
imported; and a script that asks for ours first has ours under that name from then on.

Nothing else of resihp imports `db`, nor this module: a training process never has it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "queries":
        return _queries()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _queries() -> Any:
    """`db.reading.queries`. Raises ImportError where `db` is somebody else's already."""
    ours = Path(__file__).resolve().parents[1]
    there = sys.modules.get("db")
    if there is not None:
        file = Path(getattr(there, "__file__", None) or "a package without a file").resolve()
        if file.parent != ours / "db":
            raise ImportError(
                f"resihp.ledger: `db` is {file} in this process, and resihp's package of that name cannot be there "
                "too; import resihp.ledger before it, rename that file, or have the rows without either: "
                "resihp history failures --parquet failures.parquet"
            )
        return import_module("db.reading.queries")
    sys.path.insert(0, str(ours))
    try:
        return import_module("db.reading.queries")
    finally:
        sys.path.remove(str(ours))
