"""Read access to a ledger for notebooks and scripts: `from resihp.ledger import queries`.

The package that reads ledgers is called `db`. Users often have a module called `db`, too, and Python imports the first
match on its path, beginning with the script's folder. This module always loads the `db` that was installed with resihp.
A process can load only one module called `db`. If the user's `db` was imported before, accessing `queries` raises
ImportError with the file of that module. If resihp's `db` was imported first, a later `import db` finds resihp's.

No other module of resihp imports `db` or this module, so a training process never loads either.
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
    """Return the module `db.reading.queries`. Raises ImportError if another `db` than resihp's was imported before."""
    ours = Path(__file__).resolve().parents[1]
    loaded = sys.modules.get("db")
    if loaded is not None:
        file = Path(getattr(loaded, "__file__", None) or "a package without a file").resolve()
        if file.parent != ours / "db":
            raise ImportError(
                f"resihp.ledger: `db` is {file} in this process, and resihp's package of that name cannot be there "
                "too; import resihp.ledger before it, rename that file, or export the rows instead: "
                "resihp history failures --parquet failures.parquet"
            )
        return import_module("db.reading.queries")
    sys.path.insert(0, str(ours))
    try:
        return import_module("db.reading.queries")
    finally:
        sys.path.remove(str(ours))
