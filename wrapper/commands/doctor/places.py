"""What `resihp doctor` looks at of a machine's places: home, journal, ledger, configuration, ports.

Each check yields findings; files that it writes to try a folder are gone afterwards, and nothing is made that was not
there. Called by `wrapper.commands.doctor.command`, and by its probes on nodes (`wrapper.commands.doctor.nodes`).

What the checks need is imported here, not in them: they run in threads, and threads that import parts of one package at
the same time can end up waiting for each other.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from db.engine import NETWORK_FILE_SYSTEMS, file_system, is_on_network, make_engine, masked, refusal, resolve
from resihp.errors import ResihpError
from wrapper import job_folder
from wrapper.commands.doctor.machine import CheckResult
from wrapper.config import container
from wrapper.config.program import missing_script
from wrapper.config.schema import read, site_files
from wrapper.job_folder import NO_LOCKS
from wrapper.sinks.fanout import asked
from wrapper.strict_modes import check_above, check_folder

LEAST_FREE_BYTES = 1 << 30
SLOW_SYNC_S = 0.05
"""A decision waits for one such flush of the journal."""


def home() -> Iterator[CheckResult]:
    """RESIHP_HOME, or where it would be made."""
    folder = job_folder.home()
    kind = file_system(folder) or "an unknown file system"
    problem = _use(folder)
    advice = "set RESIHP_HOME to a folder of yours that all nodes share"
    try:
        job_folder.close_home()
    except ResihpError as error:
        yield CheckResult(check="home", outcome="failed", text=str(error))
        return
    if problem is not None:
        yield CheckResult(check="home", outcome="failed", text=f"{folder} ({kind}): {problem}", advice=advice)
        return
    shared = kind in NETWORK_FILE_SYSTEMS
    text = f"{folder} ({kind}), {_free(folder)}"
    if _free_bytes(folder) < LEAST_FREE_BYTES:
        yield CheckResult(check="home", outcome="warning", text=text, advice="make room, or set RESIHP_HOME to another")
    elif not shared and shutil.which("sbatch") and not os.environ.get("SLURM_JOB_ID"):  # in a job, its nodes are asked
        text += "; other nodes may not see it"
        yield CheckResult(
            check="home", outcome="warning", text=text, advice=f"{advice}; salloc -N2 resihp doctor tells"
        )
    else:
        yield CheckResult(check="home", outcome="ok", text=text)


def journal() -> Iterator[CheckResult]:
    """Where journals are: on local disk, and flushed with every decision."""
    folder = Path(os.environ.get("RESIHP_LOCAL") or f"/var/tmp/resihp-{os.getuid()}").absolute()
    kind = file_system(folder) or "an unknown file system"
    advice = "set RESIHP_LOCAL to a folder of yours on local disk"
    problem = _use(folder)
    if problem is None and folder.exists():
        try:
            check_folder(folder, "RESIHP_LOCAL")
            check_above(folder, "RESIHP_LOCAL")
        except ResihpError as error:
            yield CheckResult(check="journal", outcome="failed", text=str(error))
            return
    if problem is None and folder.is_symlink() and not os.environ.get("RESIHP_LOCAL"):
        problem = "is a link"
    if problem is not None:
        yield CheckResult(check="journal", outcome="failed", text=f"{folder} ({kind}): {problem}", advice=advice)
        return
    try:
        sync_s = _sync_s(folder)
    except OSError as error:
        yield CheckResult(check="journal", outcome="failed", text=f"{folder}: {error.strerror}", advice=advice)
        return
    text = f"{folder} ({kind}), {_free(folder)}, a flush takes {1000 * sync_s:.1f} ms"
    if kind in NETWORK_FILE_SYSTEMS:
        text += "; the job stops with it when it hangs"
        yield CheckResult(check="journal", outcome="warning", text=text, advice=advice)
    elif kind in ("tmpfs", "ramfs"):
        text += "; gone when the node reboots"
        yield CheckResult(check="journal", outcome="warning", text=text, advice=advice)
    elif sync_s > SLOW_SYNC_S or _free_bytes(folder) < LEAST_FREE_BYTES:
        yield CheckResult(check="journal", outcome="warning", text=text, advice=advice)
    else:
        yield CheckResult(check="journal", outcome="ok", text=text)


def nearest(folder: Path) -> Path:
    """The folder, or the one above it in which it would be made."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _use(folder: Path) -> str | None:
    """Write, lock and take away a file there; what went wrong."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".resihp-doctor-", dir=nearest(folder)) as file:
            file.write(b"x")
            file.flush()
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        return f"{words}; Lustre has to be mounted with -o flock" if error.errno in NO_LOCKS else words
    return None


def _sync_s(folder: Path) -> float:
    took = []
    with tempfile.NamedTemporaryFile(prefix=".resihp-doctor-", dir=nearest(folder)) as file:
        for _ in range(9):
            file.write(b"x" * 200)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(nearest(folder)).free


def _free(folder: Path) -> str:
    return f"{_free_bytes(folder) / 1e9:.1f} GB free"


# --- what is configured ---------------------------------------------------------------------------------------------


def configuration(job_file: Path | None = None) -> Iterator[CheckResult]:
    """Files and environment, the container, and what is asked of metrics and hooks."""
    files = [str(path) for path in ((job_file,) if job_file else ()) + site_files() if path.is_file()]
    try:
        found = read({}, job_file)
        asked(found)
        container.check(found.container)
    except ResihpError as error:
        yield CheckResult(check="configuration", outcome="failed", text=str(error))
        return
    if missing := missing_script(found.job.command):
        advice = "call resihp doctor in the folder that the job is submitted from, or mend command in [job]"
        yield CheckResult(check="configuration", outcome="failed", text=missing, advice=advice)
        return
    yield CheckResult(check="configuration", outcome="ok", text=", ".join(files) or "no file, all defaults")


def ledger(job_file: Path | None = None) -> Iterator[CheckResult]:
    try:
        named = read({}, job_file).ledger.url
        url = resolve(named, job_folder.home() / "jobs" / "JOB")
        shown = masked(url)
        if url.get_backend_name() == "sqlite":
            if is_on_network(url):
                text = f"{shown}: on a network file system, without WAL: readers may wait; the journal is what counts"
                yield CheckResult(
                    check="ledger", outcome="warning", text=text, advice="set url in [ledger] to PostgreSQL's"
                )
            else:
                text = "SQLite, a file in each job's folder" if named == "sqlite" else shown
                yield CheckResult(check="ledger", outcome="ok", text=text)
            return
        engine = make_engine(url, write=False)
    except ResihpError as error:
        yield CheckResult(check="ledger", outcome="failed", text=str(error))
        return
    try:
        with engine.connect() as connection:
            version = connection.dialect.server_version_info or ()
    except (DBAPIError, OSError) as error:
        yield CheckResult(check="ledger", outcome="failed", text=str(refusal(url, error)))
    else:
        yield CheckResult(check="ledger", outcome="ok", text=f"{shown}: answers, {'.'.join(map(str, version))}")
    finally:
        engine.dispose()


def ports() -> Iterator[CheckResult]:
    """Whether this machine's own name leads to an address that it can listen on."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        text = f"{name}: {error.strerror or error}; other nodes will not find this one by its name"
        yield CheckResult(check="ports", outcome="warning", text=text, advice=f"getent hosts {name}")
        return
    open_to, problems = [], []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.create_server((address, 0), family=family) as listener:
                socket.create_connection(listener.getsockname()[:2], timeout=5).close()
                open_to.append(address)
        except OSError as error:
            problems.append(f"{address}: {error.strerror or error}")
    if not open_to:
        yield CheckResult(
            check="ports", outcome="failed", text=f"{name}: {'; '.join(problems)}", advice=f"getent hosts {name}"
        )
    else:
        yield CheckResult(
            check="ports", outcome="ok", text=f"{name} listens at {', '.join(open_to)}, ports as they come"
        )
