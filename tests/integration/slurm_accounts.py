"""Accounting for a test cluster: a MariaDB and a slurmdbd of its own, in its folder, reached by no network but its own.

    with Cluster(nodes=2, dbd=True) as cluster:
        cluster.run("sacctmgr", "-i", "add", "account", "lab")

Without it (the usual test cluster) Slurm remembers jobs for MinJobAge only, knows no limits but those of partitions,
and a job can give back one node only. Both end with the cluster. Used by `tests.integration.cluster` alone.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.integration.boxes import Box, listening

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
DATABASE_USER = "mysql"
"""MariaDB does not run as root. Its package makes this one."""

_FIRST_STATEMENTS = """\
CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY 'slurm';
GRANT ALL ON *.* TO slurm@localhost;
"""
"""A line each."""


def missing(path: str) -> list[str]:
    """What would have to be installed."""
    programs = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    try:
        pwd.getpwnam(DATABASE_USER)
    except KeyError:
        programs.append(f"the user {DATABASE_USER}")
    return programs


def settings(folder: Path, address: str, port: int) -> dict[str, str]:
    """Lines of slurm.conf by key."""
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": address,
        "AccountingStoragePort": str(port),
        "AccountingStoragePass": f"{folder}/run/munge",
        "AccountingStorageTRES": "gres/gpu",
        "JobAcctGatherType": "jobacct_gather/linux",
    }


def start(
    box: Box,
    folder: Path,
    port: int,
    *,
    plugins: Path | None,
    environment: Mapping[str, str],
    wait: Callable[[Callable[[], bool], str], None],
) -> None:
    """Start both, and return when slurmdbd listens. `plugins`: slurmdbd's, where they are not the installed ones.

    Keeps what an earlier start wrote.
    """
    place = folder / "database"
    socket = place / "socket"
    if not place.exists():
        place.mkdir()
        shutil.chown(place, DATABASE_USER)
        (place / "first.sql").write_text(_FIRST_STATEMENTS)
        argv = ["mariadb-install-db", "--no-defaults", f"--user={DATABASE_USER}", f"--datadir={place}/data"]
        argv += ["--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve"]
        with (folder / "log" / "mariadb-install-db.out").open("wb") as log:
            subprocess.run(argv, env=dict(environment), stdout=log, stderr=log, check=True, timeout=60)
    socket.unlink(missing_ok=True)
    argv = ["mariadbd", "--no-defaults", f"--user={DATABASE_USER}", f"--datadir={place}/data", f"--socket={socket}"]
    argv += ["--skip-networking", "--skip-log-bin", f"--pid-file={place}/pid", f"--init-file={place}/first.sql"]
    # Small and fast: what a test writes need not outlive the machine.
    argv += ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0"]
    argv += ["--innodb-lock-wait-timeout=900"]  # slurmdbd asks for it
    box.start(argv, environment=environment, log=folder / "log" / "mariadbd.out")
    wait(socket.exists, "MariaDB")
    _write_configuration(folder, port, plugins)
    daemon = box.start(
        ["slurmdbd", "-D"],
        environment={**environment, "MYSQL_UNIX_PORT": str(socket)},
        log=folder / "log" / "slurmdbd.out",
    )

    def up() -> bool:
        pid = box.program(daemon)
        return pid is not None and listening(pid, port)

    wait(up, "slurmdbd to listen")


def _write_configuration(folder: Path, port: int, plugins: Path | None) -> None:
    """slurmdbd reads it beside slurm.conf, and refuses one that others could read."""
    lines = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/run/munge",
        "DbdHost": "localhost",
        "DbdPort": str(port),
        "SlurmUser": "root",
        "PidFile": f"{folder}/run/slurmdbd.pid",
        "LogFile": f"{folder}/log/slurmdbd.log",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "slurm",
        "StoragePass": "slurm",
        "StorageLoc": "slurm",
        **({} if plugins is None else {"PluginDir": str(plugins)}),
    }
    path = folder / "slurmdbd.conf"
    path.touch(0o600)
    os.chmod(path, 0o600)
    path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
