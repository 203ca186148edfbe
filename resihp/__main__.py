"""Entry point of `resihp` and of `python -m resihp`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    _leave_python_path()
    try:
        from resihp.db.url_passwords import hide_own

        hide_own()  # before slow imports: until then, other users can read the passwords in our arguments
        try:
            from resihp.wrapper.cli import main as run
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("resihp"):
                raise  # the installation is damaged
            sys.exit(_what_is_missing(error))
        run()
    except KeyboardInterrupt:  # may also arrive during imports, which take seconds on a busy shared disk
        sys.exit(130)


def _what_is_missing(error: ModuleNotFoundError) -> str:
    """Return, in words, that this Python lacks a dependency of the commands, as an environment for training may."""
    return (
        f"resihp: {sys.prefix} has no module {error.name}, only what training needs; use the resihp of another "
        f"installation (type -a resihp), or: {sys.executable} -m pip install resihp"
    )


def _leave_python_path() -> None:
    """Remove the user's PYTHONPATH from sys.path: a module there, such as `pandas.py`, would hide one of resihp's own
    dependencies. Workers get it back.

    The entry that contains resihp itself stays.
    """
    own_folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    user_folders = {os.path.abspath(entry) for entry in entries if entry} - {own_folder}
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) not in user_folders]


if __name__ == "__main__":
    main()
