"""The folder of an export: a new folder, or the folder of an earlier export; any other folder is refused.

An export is built beside its place, under a name that begins with a dot, and then moved into place as a whole. An
earlier export is moved aside first and removed afterwards, so that readers never find a mixture of two exports.
"""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

from resihp.db import migrate
from resihp.db.parquet.manifest import MANIFEST, Manifest, foreign, read_manifest
from resihp.durable_files import sync_folder
from resihp.errors import UsageError


def earlier_export(folder: Path) -> Manifest | None:
    """Return the manifest of the export in `folder`, complete or not; None if the folder is missing or empty. Raises
    UsageError if the folder contains anything that does not belong to an export."""
    if not folder.exists() and (aside := _moved_aside(folder)):
        aside[-1].rename(folder)  # an export was killed between moving this aside and moving its own here
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"{folder}: exists; name a new folder with -o")
    manifest = read_manifest(folder)
    if migrate.is_newer(manifest.schema):
        raise UsageError(f"{folder}: exists, written by a newer resihp; upgrade, or name a new folder with -o")
    former = [f"{table}.parquet" for table in manifest.rows if not manifest.files]
    for path in foreign(folder, manifest, [MANIFEST, *former]):
        raise UsageError(
            f"{folder}: exists, and has {path!a}, which is not a file of an export; name a new folder with -o"
        )
    return manifest


def put_in_place(part: Path, folder: Path) -> None:
    """Move a complete export into place, and replace an earlier one. All its files are flushed to disk before."""
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
    """Return the folders that exports to this place have moved aside: by the current export, or by exports that were
    killed."""
    aside = folder.parent.glob(f".{glob.escape(folder.name)}.*.old")
    return sorted(path for path in aside if path.lstat().st_uid == os.geteuid())  # others may write here, too


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
    else:
        with path.open("rb") as file:
            os.fsync(file.fileno())
