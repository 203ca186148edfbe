"""Checkpoint folders as files: what is complete, what is committed, what may go. Never imports torch.

A checkpoint is a folder `iteration-000040` of parts, each written by one rank (`resihp.executor.state.checkpoint`), and
a manifest. Writing the manifest is the commit: before it, the folder does not count. Called by the supervisor, which
learns of the parts from the ranks' reports, and by whoever resumes.
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

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
"""Of one that is read; a part has some hundred bytes in it."""
FORMAT = 1
_FOLDER = re.compile(r"iteration-(\d{6,})")


def folder_of(root: Path, iteration: int) -> Path:
    """`root/iteration-000040` for 40."""
    return root / f"iteration-{iteration:06d}"


def is_due(every: int, iteration: int, last: int) -> bool:
    """Whether one is written after this iteration: each `every` ones, if that is not 0, and then after the last one,
    too, which has what was trained for."""
    return every > 0 and (iteration % every == 0 or iteration == last)


def iteration_of(folder: Path) -> int:
    """40 for `.../iteration-000040`. Raises CheckpointError for a folder that is not a checkpoint's."""
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
    """Commit a checkpoint whose parts, (file, bytes) each, are all on disk, then prune older ones down to `keep`.

    `layout` it was written under, and the `seconds` that it took, are for whoever lists checkpoints.

    Raises CheckpointError, leaving the folder uncommitted, if a part is missing or has another size.
    """
    for file, size in parts:
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"checkpoint {folder}: part {file} of {size} bytes is not there; not committed")
    content = {
        "format": FORMAT,
        "iteration": iteration,
        "fingerprint": fingerprint,
        "parts": [{"file": file, "bytes": size} for file, size in parts],
        "layout": layout,
        "seconds": seconds,
    }
    write_durably(folder / MANIFEST, json.dumps(content, indent=1).encode())
    prune(folder.parent, keep)


def read_manifest(folder: Path) -> tuple[int, str, tuple[str, ...]]:
    """(iteration, fingerprint, part files) of a committed checkpoint.

    Raises CheckpointError when it is incomplete: no readable manifest, or a part that is missing or cut short.
    """
    manifest = _manifest(folder)
    return manifest.iteration, manifest.fingerprint, manifest.parts


@dataclass(frozen=True)
class _Manifest:
    """A manifest whose parts are all there. `seconds`: how long it took to write them; None where nobody says."""

    iteration: int
    fingerprint: str
    parts: tuple[str, ...]
    layout: str
    seconds: float | None


def _manifest(folder: Path) -> _Manifest:
    """Raises CheckpointError as `read_manifest`."""
    try:
        content = _content(folder)
        if content["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {folder}: format {content['format']}; this version reads {FORMAT}")
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
    """What a manifest says, whoever wrote it. Raises OSError for what is no plain file or too large, ValueError,
    TypeError, RecursionError for what is none."""
    with os.fdopen(open_plain(folder / MANIFEST, follow=True), "rb") as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} has more than {MAX_MANIFEST_BYTES} bytes")
    told = json.loads(content)
    if not isinstance(told, dict):
        raise TypeError(f"{MANIFEST} is no JSON object")
    return told


def newest_complete(root: Path, *, verify: bool = True) -> Path | None:
    """Folder of the newest checkpoint that can be resumed from, or None. Incomplete and damaged ones are skipped.

    `verify` reads every part and compares checksums (torch's files are zip archives with one for each tensor), at
    the speed of the disk; without it only the parts' sizes are compared.
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
    """A checkpoint folder as it is. `at`: when it was committed, or last written to, in seconds since 1970.

    `fault`: why it is not complete, empty if it is. `seconds` and `layout` are not known of old or incomplete ones.
    """

    folder: Path
    iteration: int
    at: float
    bytes: int
    fault: str
    layout: str = ""
    seconds: float | None = None


def stored(root: Path, *, verify: bool = False) -> list[Stored]:
    """All checkpoint folders, newest first. `verify` reads every part, as whoever resumes does."""
    found = []
    for folder in _folders(root):
        try:
            found.append(_stored(folder, verify))
        except FileNotFoundError:
            continue  # pruned just now
    return found


def _stored(folder: Path, verify: bool) -> Stored:
    fault, layout, seconds, written = "", "", None, folder
    try:
        manifest = _manifest(folder)
        layout, seconds, written = manifest.layout, manifest.seconds, folder / MANIFEST
        damaged = [part for part in manifest.parts if not _sound(folder / part)] if verify else []
        fault = f"{', '.join(damaged)} damaged" if damaged else ""
    except CheckpointError as error:
        fault = str(error).removeprefix(f"checkpoint {folder}: ").removeprefix("incomplete: ")
        fault = "no manifest: not all parts were written" if not (folder / MANIFEST).exists() else fault
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != MANIFEST)
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
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _sound(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
