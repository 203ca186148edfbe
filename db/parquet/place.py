"""Where an export is put: in a new place, or in that of an export of before, and in no other.

It is made beside its place, by a name that begins with a dot, and put there as a whole. What another export has there
is moved aside for that moment, and removed afterwards: nobody finds half of one and half of the other.
"""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

from db import migrate
from db.parquet.manifest import MANIFEST, Manifest, foreign, read_manifest
from resihp.durable_files import sync_folder
from resihp.errors import UsageError


def export_of_before(folder: Path) -> Manifest | None:
    """What stands where one is to be written, whole or not; None where nothing does. Raises UsageError where anything
    is there that is no export's."""
    if not folder.exists() and (aside := _moved_aside(folder)):
        aside[-1].rename(folder)  # an export was killed after it had moved this, before it had put its own here
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"{folder}: is there already; name a new folder with -o")
    manifest = read_manifest(folder)
    if migrate.is_newer(manifest.schema):
        raise UsageError(f"{folder}: is there already, of a newer resihp; upgrade, or name a new folder with -o")
    former = [f"{table}.parquet" for table in manifest.rows if not manifest.files]
    for path in foreign(folder, manifest, [MANIFEST, *former]):
        raise UsageError(
            f"{folder}: is there already, and has {path!a}, which no export has; name a new folder with -o"
        )
    return manifest


def put_in_place(part: Path, folder: Path) -> None:
    """A folder that is complete, where another may stand; on disk before it has its name."""
    for path in (*part.rglob("*"), part):
        _sync(path)
    if folder.exists():
        old = part.with_name(f"{part.name}.old")
        folder.rename(old)
        try:
            part.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    else:
        part.rename(folder)
    sync_folder(folder.parent)
    for old in _moved_aside(folder):
        shutil.rmtree(old, ignore_errors=True)


def _moved_aside(folder: Path) -> list[Path]:
    """By exports into this place: theirs that is in the making, or of those that were killed meanwhile."""
    aside = folder.parent.glob(f".{glob.escape(folder.name)}.*.old")
    return sorted(path for path in aside if path.lstat().st_uid == os.geteuid())  # others may write here, too


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
    else:
        with path.open("rb") as file:
            os.fsync(file.fileno())
