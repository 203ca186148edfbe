"""Checks of `resihp doctor` on a machine's folders and services: home, journal, ledger, configuration, ports.

Each check yields findings; test files are removed again, and no missing folder is created. Called by
`resihp.wrapper.commands.doctor.command`, and by its probes on nodes (`resihp.wrapper.commands.doctor.nodes`).

Imports are at module level, not inside the checks: checks run in threads, and threads that import parts of one package
at the same time can deadlock.
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
from functools import partial
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from resihp.db.engine import is_on_network, make_engine, masked, refusal, resolve
from resihp.db.file_systems import NETWORK_FILE_SYSTEMS, file_system
from resihp.errors import ResihpError
from resihp.wrapper import job_folder, site_check
from resihp.wrapper.commands.doctor.machine import CheckResult
from resihp.wrapper.config import container
from resihp.wrapper.config.program import missing_script
from resihp.wrapper.config.sources import SITE_FILE, read, site_files
from resihp.wrapper.job_folder import NO_LOCKS
from resihp.wrapper.sinks.fanout import asked
from resihp.wrapper.site_folders import audit
from resihp.wrapper.site_folders.audit import AUDIT_KEY
from resihp.wrapper.site_folders.folder import check_writable
from resihp.wrapper.site_folders.summaries import SHARE_KEY
from resihp.wrapper.strict_modes import check_above, check_folder

MIN_FREE_BYTES = 1 << 30
MAX_SYNC_S = 0.05
"""Seconds that a flush to disk may take without a warning. Every decision of a job waits for a flush of its journal."""


def home() -> Iterator[CheckResult]:
    """Check RESIHP_HOME, or the folder in which it would be created."""
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
    if _free_bytes(folder) < MIN_FREE_BYTES:
        yield CheckResult(
            check="home", outcome="warning", text=text, advice="free disk space, or set RESIHP_HOME to another"
        )
    elif (
        not shared and shutil.which("sbatch") and not os.environ.get("SLURM_JOB_ID")
    ):  # in a job, the check of the nodes covers this
        text += "; other nodes may not see it"
        yield CheckResult(
            check="home", outcome="warning", text=text, advice=f"{advice}; salloc -N2 resihp doctor checks it"
        )
    else:
        yield CheckResult(check="home", outcome="ok", text=text)


def journal() -> Iterator[CheckResult]:
    """Check the folder of journals. It should be on a local disk, because a journal is flushed with every decision."""
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
        text += "; the job stops if this file system hangs"
        yield CheckResult(check="journal", outcome="warning", text=text, advice=advice)
    elif kind in ("tmpfs", "ramfs"):
        text += "; lost when the node reboots"
        yield CheckResult(check="journal", outcome="warning", text=text, advice=advice)
    elif sync_s > MAX_SYNC_S or _free_bytes(folder) < MIN_FREE_BYTES:
        yield CheckResult(check="journal", outcome="warning", text=text, advice=advice)
    else:
        yield CheckResult(check="journal", outcome="ok", text=text)


def nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(candidate for candidate in (folder, *folder.parents) if candidate.exists())


def _use(folder: Path) -> str | None:
    """Write, lock and remove a test file in the folder. Return the error, or None."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".resihp-doctor-", dir=nearest(folder)) as file:
            file.write(b"x")
            file.flush()
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        return f"{words}; Lustre must be mounted with -o flock" if error.errno in NO_LOCKS else words
    return None


def _sync_s(folder: Path) -> float:
    durations_s = []
    with tempfile.NamedTemporaryFile(prefix=".resihp-doctor-", dir=nearest(folder)) as file:
        for _ in range(9):
            file.write(b"x" * 200)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            durations_s.append(time.perf_counter() - began)
    return statistics.median(durations_s)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(nearest(folder)).free


def _free(folder: Path) -> str:
    return f"{_free_bytes(folder) / 1e9:.1f} GB free"


def health_command() -> Iterator[CheckResult]:
    """Check that the site's health check of a node could be started here; yield nothing if the site has none."""
    try:
        command = read({}).site.health_command
    except ResihpError:
        return  # the check of the configuration reports the error
    if not command:
        return
    program = site_check.program_path(command[0])
    if program is None:
        text = f"{command[0]}: not on this machine, or not executable: nodes without it are drained without being asked"
        advice = f"if all nodes have it, ignore this; else correct health_command in [site] of {SITE_FILE}"
        yield CheckResult(check="health command", outcome="warning", text=text, advice=advice)
    else:
        yield CheckResult(check="health command", outcome="ok", text=program)


# --- configured services --------------------------------------------------------------------------------------------


def configuration(job_file: Path | None = None) -> Iterator[CheckResult]:
    """Check configuration files and environment, the container, and the settings of metrics and hooks."""
    files = [str(path) for path in ((job_file,) if job_file else ()) + site_files() if path.is_file()]
    try:
        configured = read({}, job_file)
        asked(configured)
        container.check(configured.container)
    except ResihpError as error:
        yield CheckResult(check="configuration", outcome="failed", text=str(error))
        return
    if script_error := missing_script(configured.job.command):
        advice = "run resihp doctor in the folder that the job is submitted from, or correct command in [job]"
        yield CheckResult(check="configuration", outcome="failed", text=script_error, advice=advice)
        return
    yield CheckResult(check="configuration", outcome="ok", text=", ".join(files) or "no file; all defaults")


def site_folders(job_file: Path | None = None) -> Iterator[CheckResult]:
    """Check the folders of [site] that jobs write to. Nothing is written: the lines there are the site's records."""
    site = read({}, job_file).site
    for setting, check in ((AUDIT_KEY, audit.check), (SHARE_KEY, partial(check_writable, setting=SHARE_KEY))):
        if not (named := getattr(site, setting)):
            continue
        try:
            check(Path(named))
        except ResihpError as error:
            text = f"{error}; jobs run all the same, without it"
            yield CheckResult(check="site", outcome="warning", text=text)
        else:
            yield CheckResult(check="site", outcome="ok", text=f"[site] {setting} {named}: jobs can write there")


def ledger(job_file: Path | None = None) -> Iterator[CheckResult]:
    try:
        named = read({}, job_file).ledger.url
        url = resolve(named, job_folder.home() / "jobs" / "JOB")
        masked_url = masked(url)
        if url.get_backend_name() == "sqlite":
            if is_on_network(url):
                text = (
                    f"{masked_url}: on a network file system, without WAL: readers may wait; the journal is unaffected"
                )
                yield CheckResult(
                    check="ledger", outcome="warning", text=text, advice="set url in [ledger] to a PostgreSQL URL"
                )
            else:
                text = "SQLite, a file in each job's folder" if named == "sqlite" else masked_url
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
        yield CheckResult(check="ledger", outcome="ok", text=f"{masked_url}: answers, {'.'.join(map(str, version))}")
    finally:
        engine.dispose()


def ports() -> Iterator[CheckResult]:
    """Check that this machine's own name resolves to an address that it can listen on."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        text = f"{name}: {error.strerror or error}; other nodes cannot resolve this node's name"
        yield CheckResult(check="ports", outcome="warning", text=text, advice=f"getent hosts {name}")
        return
    usable_addresses, problems = [], []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.create_server((address, 0), family=family) as listener:
                socket.create_connection(listener.getsockname()[:2], timeout=5).close()
                usable_addresses.append(address)
        except OSError as error:
            problems.append(f"{address}: {error.strerror or error}")
    if not usable_addresses:
        yield CheckResult(
            check="ports", outcome="failed", text=f"{name}: {'; '.join(problems)}", advice=f"getent hosts {name}"
        )
    else:
        yield CheckResult(
            check="ports", outcome="ok", text=f"{name} listens on {', '.join(usable_addresses)}, any port"
        )
