"""`resihp` and `python -m wrapper`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    _leave_python_path()
    try:
        from db.url_passwords import hide_own

        hide_own()  # before anything that takes time to import: until then others can read them
        from wrapper.cli import main as run

        run()
    except KeyboardInterrupt:  # also while modules are read, which takes seconds on a busy shared disk
        sys.exit(130)


def _leave_python_path() -> None:
    """Take the user's PYTHONPATH off sys.path, where a db.py of theirs would hide ours. Workers get it back.

    Unless resihp itself is found there.
    """
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    theirs = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry} - {ours}
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) not in theirs]


if __name__ == "__main__":
    main()
