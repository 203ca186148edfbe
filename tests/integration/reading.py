"""What `resihp history` and `resihp status` say of a test's job, without starting Python for each question.

`python -P reading.py PARENT` has imported what these commands need, and is forked for each of them: the command itself,
with its arguments, environment and folder, from its first line to its exit code. `ask` starts it, and asks. That the
commands can be started as users start them is in tests/wrapper.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn

PRELOAD = (
    "alembic",
    "resihp.db.layouts",
    "resihp.db.migrate",
    "resihp.db.reading.queries",
    "pydantic.json_schema",
    "sqlalchemy.dialects.sqlite",
    "resihp.wrapper.cli",
    "resihp.wrapper.commands.history.command",
    "resihp.wrapper.commands.status.job_status",
    "resihp.wrapper.job_folder",
    "resihp.wrapper.output.rank_health",
    "resihp.wrapper.output.render",
    "resihp.wrapper.output.shells",
)


def ask(*arguments: str, environment: Mapping[str, str], folder: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `resihp` with these arguments."""
    process = _server()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([arguments, dict(environment), str(folder)]) + "\n")
    process.stdin.flush()
    status, out, err = json.loads(process.stdout.readline())
    return status, out, err


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, whose end is that of the pipe."""
    process = subprocess.Popen(
        [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.wait)
    atexit.register(process.kill)
    return process


def _run(arguments: list[str], environment: dict[str, str], folder: str, out: IO[bytes], err: IO[bytes]) -> NoReturn:
    status: object = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["resihp", *arguments]
        from resihp.__main__ import main as resihp

        resihp()
        status = 0
    except SystemExit as exit:
        status = exit.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def main() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                _run(*json.loads(line), out, err)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode())
        print(json.dumps([status, *said]), flush=True)


if __name__ == "__main__":
    main()
