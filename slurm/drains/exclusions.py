"""Nodes that are excluded from a user's own jobs: the step of the drain ladder that needs no permission.

There is one file for each cluster, `<home>/exclusions/<cluster>.json`, because clusters may have the same node names.
Each exclusion expires (`EXCLUSION_S`), because resihp is not told when a node has been repaired. The file is shared by
all jobs of a user: it is changed under a lock and replaced as a whole. A file that cannot be read excludes nothing and
logs a warning; it is kept beside the file that replaces it. Used by `resihp.slurm.drains.drain`, by all code that
submits jobs, and by `resihp node`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from resihp.slurm.client import Slurm
from resihp.slurm.errors import SlurmError

VERSION = 1
Measure = Literal["drain", "exclude"]
EXCLUSION_S = {"hardware": 7 * 86400.0, "died again": 7 * 86400.0, "died": 86400.0, "agent": 3600.0}
"""Seconds for which a user's own jobs avoid a node, by grounds (`journal.DrainDecided`). Broken hardware has to be
repaired by people. A node that died may die again, most likely on the first day. A node that still answers was short of
memory, or its agent was killed: an hour gives another job on it time to leave."""
LOCK_S = 5.0
"""Seconds to wait for another process that has locked the file; usually it does so for milliseconds."""

_log = logging.getLogger(__name__)


class ExclusionError(SlurmError):
    """The list could not be changed; its previous content remains."""


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """One excluded node. Times are UTC, seconds since 1970. `job_id`: the job that found the node bad; empty if a user
    excluded it.

    `measure`: whether the node was to be drained as well. `since`: when the node was excluded; 0 if unknown.
    `expires_at`: 0 for a revoked exclusion. `check`: result of the last `resihp node check` since then, at
    `checked_at`; empty if there was none.
    """

    node: str
    reason: str
    expires_at: float
    job_id: str = ""
    measure: Measure = "drain"
    since: float = 0.0
    checked_at: float = 0.0
    check: str = ""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    cluster: str
    nodes: tuple[Exclusion, ...]


def clusters(home: Path) -> tuple[str, ...]:
    """Return the clusters that have an exclusion list under `home`. Used if Slurm does not report its cluster's
    name."""
    return tuple(sorted(path.stem for path in (home / "exclusions").glob("[!.]*.json")))


def avoided(items: Collection[Exclusion], slurm: Slurm) -> tuple[str, ...]:
    """Return the names of nodes that a submission should exclude. Nodes that Slurm does not know are omitted, because
    sbatch refuses them. Raises SlurmError.

    A cloud reuses node names, so a job's finding about a node is valid only for one instance. An instance that is
    powered down has a flag, or is not listed at all (22.05). If a new instance is up before this is called, its name is
    still excluded.
    """
    views = slurm.nodes(sorted({item.node for item in items})) if items else {}
    names = (item.node for item in items if item.node in views and not (item.job_id and views[item.node].instance_gone))
    return tuple(sorted(set(names)))


class Exclusions:
    """The exclusion list of one cluster, under `home` (RESIHP_HOME). Read anew on each use, because other jobs change
    it, too."""

    def __init__(self, home: Path, cluster: str) -> None:
        self.cluster = cluster
        self.path = home / "exclusions" / f"{re.sub(r'[^A-Za-z0-9._-]|^[.]', '_', cluster) or '_'}.json"

    def current(self, now: float) -> tuple[Exclusion, ...]:
        """Return the exclusions that have not expired at time `now`, sorted by node name."""
        return tuple(item for item in self.known() if item.expires_at > now)

    def to_avoid(self, slurm: Slurm, now: float) -> tuple[str, ...]:
        """Return the names of nodes to exclude from a submission (see `avoided`). Raises SlurmError."""
        return avoided(self.current(now), slurm)

    def known(self) -> tuple[Exclusion, ...]:
        """Return every exclusion on file, sorted by node name, including expired and revoked ones."""
        return tuple(sorted(self._read(), key=lambda item: item.node))

    def add(
        self,
        node: str,
        reason: str,
        expires_at: float,
        *,
        job_id: str = "",
        measure: Measure = "exclude",
        now: float = 0.0,
    ) -> Exclusion:
        """Exclude a node until `expires_at`, or until the end of an existing exclusion if that is later. Raises
        ExclusionError."""
        added = Exclusion(node=node, reason=reason, expires_at=expires_at, job_id=job_id, measure=measure, since=now)
        with self._changing() as items:
            before = items.get(node)
            if before is not None and before.expires_at > expires_at:
                added = msgspec.structs.replace(added, expires_at=before.expires_at, measure=before.measure)
            items[node] = added
        return added

    def remove(self, node: str) -> bool:
        """Revoke a node's exclusion; return False if the node was not excluded. The entry stays on file. Raises
        ExclusionError."""
        with self._changing() as items:
            before = items.get(node)
            if before is None or before.expires_at == 0:
                return False
            items[node] = msgspec.structs.replace(before, expires_at=0.0)
        return True

    def note_check(self, node: str, result: str, at: float) -> None:
        """Note the result of a check of an excluded node; a node that is not on file is ignored. Raises
        ExclusionError."""
        with self._changing() as items:
            if node in items:
                items[node] = msgspec.structs.replace(items[node], check=result, checked_at=at)

    def _read(self) -> tuple[Exclusion, ...]:
        try:
            return self._decoded()
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("exclusions of cluster %s: %s cannot be read, so nothing is excluded: %s", *self._named(error))
            return ()

    def _decoded(self) -> tuple[Exclusion, ...]:
        file = msgspec.json.decode(self.path.read_bytes(), type=_File)
        if file.version != VERSION:
            raise msgspec.ValidationError(f"version {file.version}, this is {VERSION}")
        return file.nodes

    def _named(self, error: Exception) -> tuple[str, Path, object]:
        return self.cluster, self.path, getattr(error, "strerror", None) or error

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Exclusion]]:
        """Yield the exclusions by node name, to be modified; at the end, write the file if they changed."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                try:
                    read = self._decoded()
                except FileNotFoundError:
                    read = ()
                except msgspec.MsgspecError as error:
                    kept = self.path.with_name(f"{self.path.name}.broken-{time.time_ns()}")
                    self.path.rename(kept)
                    _log.warning(
                        "exclusions of cluster %s: %s was broken: %s; renamed to %s", *self._named(error), kept
                    )
                    read = ()
                items = {item.node: item for item in read}
                before = dict(items)
                yield items
                if items != before:
                    self._write(tuple(items[node] for node in sorted(items)))
        except OSError as error:
            raise ExclusionError("exclusions of cluster {}: {}: {}".format(*self._named(error))) from error

    def _write(self, items: tuple[Exclusion, ...]) -> None:
        content = msgspec.json.encode(_File(version=VERSION, cluster=self.cluster, nodes=items))
        temporary = self.path.with_name(f".{self.path.name}.new")  # one writer at a time has the lock
        with suppress(FileNotFoundError):
            temporary.unlink()  # left by a killed process, or planted by another user to redirect the write
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(msgspec.json.format(content, indent=2))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file. Raises OSError if another process keeps the lock for too long."""
        lock = self.path.with_name(f".{self.path.name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(None, f"another process has held its lock for {LOCK_S:g} s") from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(descriptor)
