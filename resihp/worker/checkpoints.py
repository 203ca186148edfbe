"""Checkpoint folders as files: which are complete, which are committed, which may be deleted. Never imports torch.

A checkpoint is a folder `iteration-000040` with parts, each written by one rank (`resihp.executor.state.checkpoint`),
and a manifest. Writing the manifest is the commit: without it the folder does not count. Called by the supervisor,
which learns of the parts from the ranks' reports, and by code that resumes from a checkpoint.
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
"""Largest manifest that is read; each part takes a few hundred bytes in it."""
FORMAT_VERSION = 1
_FOLDER = re.compile(r"iteration-(\d{6,})")


def folder_of(root: Path, iteration: int) -> Path:
    """Return `root/iteration-000040` for iteration 40."""
    return root / f"iteration-{iteration:06d}"


def is_due(interval: int, iteration: int, last: int) -> bool:
    """Return whether a checkpoint is written after this iteration.

    With an `interval` above 0, one is written after every multiple of it and after the last iteration, which holds the
    trained model. With 0, none is written.
    """
    return interval > 0 and (iteration % interval == 0 or iteration == last)


def iteration_of(folder: Path) -> int:
    """Return 40 for `.../iteration-000040`. Raises CheckpointError for a folder with any other kind of name."""
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
    """Commit a checkpoint whose parts, (file, bytes) each, are all on disk; then prune older ones down to `keep`.

    `layout`, under which it was written, and `seconds`, the time that took, are shown in lists of checkpoints.

    Raises CheckpointError, leaving the folder uncommitted, if a part is missing or has another size.
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

    Raises CheckpointError when it is incomplete: no readable manifest, or a part that is missing or truncated.
    """
    manifest = _manifest(folder)
    return manifest.iteration, manifest.fingerprint, manifest.parts


@dataclass(frozen=True)
class _Manifest:
    """A manifest whose parts all exist. `seconds`: time it took to write them; None if not recorded."""

    iteration: int
    fingerprint: str
    parts: tuple[str, ...]
    layout: str
    seconds: float | None


def _manifest(folder: Path) -> _Manifest:
    """Read and check a manifest. Raises CheckpointError as `read_manifest` does."""
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

    Raises OSError if it is not a regular file, ValueError if it is too large, and ValueError, TypeError or
    RecursionError if it is not a JSON object.
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
    """Return the newest checkpoint folder that can be resumed from, or None. Incomplete and damaged ones are skipped.

    With `verify`, every part is read at disk speed and its checksums are compared (torch's files are zip archives with
    one checksum per tensor). Without it, only the sizes of parts are compared.
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
    """A checkpoint folder as found on disk. `at`: time of its commit or, if it has none, of its last write, since 1970.

    `fault`: why it is incomplete, or empty if it is complete. `seconds` and `layout` are unknown for incomplete
    checkpoints and for those of older versions.
    """

    folder: Path
    iteration: int
    at: float
    bytes: int
    fault: str
    layout: str = ""
    seconds: float | None = None


def stored(root: Path, *, verify: bool = False) -> list[Stored]:
    """Return all checkpoint folders, newest first. With `verify`, every part is read, as before a resume."""
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
    """Remove complete checkpoints beyond the newest `keep`, and incomplete ones older than the newest complete one.

    A manifest goes first, so that a removal cut short leaves an incomplete folder and not a damaged checkpoint.
    """
    complete: list[Path] = []
    for folder in _folders(root):
        try:
            read_manifest(folder)
        except CheckpointError:
            if complete:  # An incomplete folder newer than all complete ones is being written right now.
                shutil.rmtree(folder, ignore_errors=True)
            continue
        complete.append(folder)
        if len(complete) > max(keep, 1):
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    """Return the checkpoint folders, newest first."""
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
