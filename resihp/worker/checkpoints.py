"""Manages checkpoint folders as files: finds complete ones, commits new ones, deletes old ones. Never imports torch.

A checkpoint is a folder `iteration-000040` with a manifest and parts, each written by one rank
(`resihp.executor.state.checkpoint`). Writing the manifest commits the checkpoint; a folder without a manifest is
incomplete. Called by the supervisor, to which ranks report their parts, and by code that resumes from a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resihp.durable_files import write_durably
from resihp.errors import CheckpointError
from resihp.plain_files import open_plain

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
"""Size limit of a manifest; each part adds a few hundred bytes."""
FORMAT_VERSION = 1
_FOLDER = re.compile(r"iteration-(\d{6,})")


def folder_of(root: Path, iteration: int) -> Path:
    """Return `root/iteration-000040` for iteration 40."""
    return root / f"iteration-{iteration:06d}"


def is_due(interval: int, iteration: int, last: int) -> bool:
    """Return whether a checkpoint is due after this iteration.

    With an `interval` above 0, a checkpoint is due after each multiple of the interval, and after the `last` iteration,
    which produces the trained model. With 0, no checkpoint is due.
    """
    return interval > 0 and (iteration % interval == 0 or iteration == last)


def iteration_of(folder: Path) -> int:
    """Return 40 for `.../iteration-000040`. Raises CheckpointError for any other kind of name."""
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"checkpoint {folder}: not named like iteration-000040")
    return int(match[1])


def write_manifest(
    folder: Path,
    iteration: int,
    parts: Sequence[tuple[str, int]],
    fingerprint: str = "",
    keep: int = 2,
    *,
    layout: str = "",
    seconds: float | None = None,
) -> None:
    """Commit a checkpoint after all its parts, (file, bytes) each, are on disk; then delete older checkpoints except
    `keep`.

    `layout` of the writing ranks and `seconds` of writing are shown in lists of checkpoints.

    Raises CheckpointError and does not commit if a part is missing or has another size.
    """
    for file, size in parts:
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"checkpoint {folder}: part {file} of {size} bytes is not there; not committed")
    content = {
        "format": FORMAT_VERSION,
        "iteration": iteration,
        "fingerprint": fingerprint,
        "parts": [{"file": file, "bytes": size} for file, size in parts],
        "layout": layout,
        "seconds": seconds,
    }
    write_durably(folder / MANIFEST_NAME, json.dumps(content, indent=1).encode())
    prune(folder.parent, keep)


def read_manifest(folder: Path) -> tuple[int, str, tuple[str, ...]]:
    """Return (iteration, fingerprint, part files) of a committed checkpoint.

    Raises CheckpointError if the checkpoint is incomplete: no readable manifest, or a part that is missing or
    truncated.
    """
    manifest = _manifest(folder)
    return manifest.iteration, manifest.fingerprint, manifest.parts


@dataclass(frozen=True)
class _Manifest:
    """A manifest, after all its parts were found on disk. `seconds` is the time of writing the checkpoint; None if not
    recorded."""

    iteration: int
    fingerprint: str
    parts: tuple[str, ...]
    layout: str
    seconds: float | None


def _manifest(folder: Path) -> _Manifest:
    """Read and check a manifest. Raises CheckpointError in the same cases as `read_manifest`."""
    try:
        content = _content(folder)
        if content["format"] != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {folder}: format {content['format']}; this version reads {FORMAT_VERSION}"
            )
        parts = tuple(str(part["file"]) for part in content["parts"])
        for name in parts:
            if Path(name).name != name:
                raise CheckpointError(f"checkpoint {folder}: part {name[:80]!a} is not in its folder")
        for part in content["parts"]:
            if (folder / part["file"]).stat().st_size != part["bytes"]:
                raise CheckpointError(f"checkpoint {folder}: part {part['file']} is not of {part['bytes']} bytes")
        seconds = content.get("seconds")
        return _Manifest(
            iteration=int(content["iteration"]),
            fingerprint=str(content["fingerprint"]),
            parts=parts,
            layout=str(content.get("layout") or ""),
            seconds=float(seconds) if isinstance(seconds, int | float) else None,
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder}: incomplete: {error}") from error


def _content(folder: Path) -> dict[str, Any]:
    """Return the JSON object in a manifest file, which may be malformed.

    Raises OSError if the path is not a regular file, ValueError if the file is too large, and ValueError, TypeError or
    RecursionError if it does not contain a JSON object.
    """
    with os.fdopen(open_plain(folder / MANIFEST_NAME, follow=True), "rb") as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST_NAME} has more than {MAX_MANIFEST_BYTES} bytes")
    manifest = json.loads(content)
    if not isinstance(manifest, dict):
        raise TypeError(f"{MANIFEST_NAME} is not a JSON object")
    return manifest


def newest_complete(root: Path, *, verify: bool = True) -> Path | None:
    """Return the newest complete checkpoint folder, or None. Incomplete and damaged checkpoints are skipped.

    With `verify`, every part is read, at disk speed, and its checksums are checked (torch's files are zip archives with
    one checksum per tensor). Without it, only the sizes of parts are checked.
    """
    for folder in _folders(root):
        try:
            _, _, parts = read_manifest(folder)
            if not verify or all(_sound(folder / part) for part in parts):
                return folder
        except CheckpointError:
            continue
    return None


@dataclass(frozen=True)
class Stored:
    """A checkpoint folder on disk. `at` is the time of its commit, or of its last write if not committed, in seconds
    since 1970.

    `bytes` is the total size of its parts. `fault` is the reason why it is incomplete, empty if it is complete.
    `layout` and `seconds` are empty and None for incomplete checkpoints and for those of older versions.
    """

    folder: Path
    iteration: int
    at: float
    bytes: int
    fault: str
    layout: str = ""
    seconds: float | None = None


def stored(root: Path, *, verify: bool = False) -> list[Stored]:
    """Return all checkpoint folders, newest first. With `verify`, every part is read and checked, as before a
    resume."""
    checkpoints = []
    for folder in _folders(root):
        try:
            checkpoints.append(_stored(folder, verify))
        except FileNotFoundError:
            continue  # pruned just now
    return checkpoints


def _stored(folder: Path, verify: bool) -> Stored:
    fault, layout, seconds, written = "", "", None, folder
    try:
        manifest = _manifest(folder)
        layout, seconds, written = manifest.layout, manifest.seconds, folder / MANIFEST_NAME
        damaged = [part for part in manifest.parts if not _sound(folder / part)] if verify else []
        fault = f"{', '.join(damaged)} damaged" if damaged else ""
    except CheckpointError as error:
        fault = str(error).removeprefix(f"checkpoint {folder}: ").removeprefix("incomplete: ")
        fault = "no manifest: not all parts were written" if not (folder / MANIFEST_NAME).exists() else fault
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != MANIFEST_NAME)
    return Stored(folder, iteration_of(folder), written.stat().st_mtime, size, fault, layout, seconds)


def prune(root: Path, keep: int) -> None:
    """Delete complete checkpoints except the newest `keep`, and incomplete ones older than the newest complete one.

    The manifest is deleted first, so that an interrupted deletion leaves an incomplete folder, not a damaged
    checkpoint.
    """
    complete: list[Path] = []
    for folder in _folders(root):
        try:
            read_manifest(folder)
        except CheckpointError:
            if complete:  # An incomplete folder newer than all complete ones may still be being written.
                shutil.rmtree(folder, ignore_errors=True)
            continue
        complete.append(folder)
        if len(complete) > max(keep, 1):
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    """Return the checkpoint folders below `root`, newest first."""
    if not root.is_dir():
        return []
    folders = [(int(match[1]), path) for path in root.iterdir() if (match := _FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(folders, reverse=True)]


def _sound(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
