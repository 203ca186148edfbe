"""Types of file systems, determined from the mount points in /proc/mounts.

Decides which types count as network file systems; never opens a ledger. Called by `resihp.db.engine`,
`resihp.db.writer` and `resihp doctor`.
"""

from __future__ import annotations

import re
from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    """
    9p afs beegfs ceph cifs fuse.beegfs fuse.ceph fuse.dfuse fuse.glusterfs fuse.juicefs fuse.lustre fuse.s3fs
    fuse.sshfs gfs2 glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs panfs pvfs2 quobyte smb3 smbfs wekafs
    """.split()  # noqa: SIM905 - one word per line would fill a page
)
"""Types of file systems, as in /proc/mounts, on which SQLite's WAL is unsafe, because it needs reliable locks and
shared memory (sqlite.org/wal.html)."""


def file_system(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that contains `path`, by the longest mount point above it; empty if unknown.
    `mounts`: text in the format of /proc/mounts, instead of that file."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(errors="replace")
        except OSError:
            return ""
    target = path.resolve() if path.is_absolute() else path.absolute().resolve()
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1]))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind
