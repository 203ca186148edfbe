"""A private PostgreSQL for tests and benchmarks: made by initdb in a temporary folder, reached by a Unix socket only.

PostgreSQL refuses to run as root, so root starts it as another user (`postgres`, or `nobody`), who owns the folder; it
is closed to everybody else. A small shell keeps it: when the shell's standard input ends, because the test session
closed it or was killed, the server is stopped and its folder removed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

DEADLINE_S = 60.0
LONGEST_SOCKET_FOLDER = 80
"""A socket's whole path is at most 107 bytes (unix(7))."""
SUPERUSER = "resihp"
KEEPER = """
bin=$1 folder=$2 options=$3
if [ ! -d "$folder/data" ]; then
  "$bin/initdb" -D "$folder/data" -U resihp -A trust -E UTF8 --locale=C --no-sync --no-instructions \\
    >"$folder/log" 2>&1 \\
    || { tail -n 5 "$folder/log"; rm -rf "$folder"; exit 1; }
fi
"$bin/pg_ctl" -D "$folder/data" -w -s -l "$folder/log" -o "-k '$folder' $options" start >/dev/null 2>&1 \\
  || { tail -n 5 "$folder/log"; rm -rf "$folder"; exit 1; }
echo ready
read -r word
"$bin/pg_ctl" -D "$folder/data" -w -s -m immediate stop
[ "$word" = keep ] || rm -rf "$folder"
"""
FAST = "-c fsync=off -c synchronous_commit=off -c full_page_writes=off"
"""For tests that do not show durability."""


def programs() -> Path | None:
    """The folder with initdb and pg_ctl, of the newest PostgreSQL here; None if there is none."""
    on_path = shutil.which("initdb")
    folders = [Path(on_path).resolve().parent] if on_path else []
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    folders += sorted(installed, key=lambda path: [int(n) for n in path.parent.name.split(".") if n.isdigit()])[::-1]
    return next((each for each in folders if (each / "initdb").exists() and (each / "pg_ctl").exists()), None)


def missing() -> str:
    """Why no server can be started here, and what to install; empty if one can."""
    if programs() is None:
        return "initdb is not found (PATH, /usr/lib/postgresql/*/bin); apt-get install postgresql"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "the PostgreSQL driver is not installed; pip install 'psycopg[binary]'"
    if os.geteuid() == 0 and _unprivileged() is None:
        return "root needs a user postgres or nobody to start PostgreSQL as"
    return ""


def _unprivileged() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


def _folder() -> Path:
    """Where another user may go too, and where a socket's name is short enough."""
    parent = tempfile.gettempdir()
    if os.geteuid() == 0 or len(parent) > LONGEST_SOCKET_FOLDER:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="resihp-pg-", dir=parent))


class Server:
    """One PostgreSQL, running from `start` to `stop`."""

    def __init__(self, options: str = FAST) -> None:
        binaries = programs()
        assert binaries is not None, missing()
        self._binaries = binaries
        self._options = f"-c listen_addresses='' -c max_connections=60 -c shared_buffers=64MB {options}"
        self._databases = 0
        self._keeper: subprocess.Popen[str] | None = None
        self.folder = _folder()
        self._owner = _unprivileged() if os.geteuid() == 0 else None
        if self._owner is not None:
            os.chown(self.folder, self._owner.pw_uid, self._owner.pw_gid)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Server:
        """Start it, making its data first if need be; returns when it takes connections. Raises RuntimeError."""
        owner = self._owner
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "keeper", str(self._binaries), str(self.folder), self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the tests; the end of stdin tells it
            user=None if owner is None else owner.pw_uid,
            group=None if owner is None else owner.pw_gid,
            extra_groups=None if owner is None else [],
            env={"PATH": os.defpath, "LC_ALL": "C", "HOME": "/"},
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "ready\n":
            raise RuntimeError(f"PostgreSQL did not start: {self._keeper.communicate()[0].strip()}")
        return self

    def stop(self, *, keep: bool = False) -> None:
        """Stop it at once, as a crash would; its folder goes too unless `keep`."""
        if self._keeper is None:
            return
        self._keeper.communicate("keep\n" if keep else "", timeout=DEADLINE_S)
        self._keeper = None

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://{SUPERUSER}@/{database}?host={self.folder}"

    def conninfo(self, database: str = "postgres") -> str:
        """The same for psycopg itself."""
        return f"host={self.folder} user={SUPERUSER} dbname={database}"

    def new_database(self, folder: Path | None = None, encoding: str = "") -> str:
        """The URL of an empty database of its own; its tables in `folder`, an empty one, if it is given."""
        import psycopg

        self._databases += 1
        name, place = f"ledger_{self._databases}", ""
        with psycopg.connect(self.conninfo(), autocommit=True) as connection:
            if folder is not None:
                if self._owner is not None:
                    os.chown(folder, self._owner.pw_uid, self._owner.pw_gid)
                connection.execute(f"CREATE TABLESPACE of_{name} LOCATION '{folder}'")  # type: ignore[arg-type]
                place = f" TABLESPACE of_{name}"
            if encoding:
                place += f" ENCODING '{encoding}' TEMPLATE template0"
            connection.execute(f"CREATE DATABASE {name}{place}")  # type: ignore[arg-type]
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Away with it, whoever is still connected."""
        import psycopg

        name = url.partition("?")[0].rpartition("/")[2]
        with psycopg.connect(self.conninfo(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")  # type: ignore[arg-type]
