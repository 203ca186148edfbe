"""Checks whether a checkpoint that a script has written in a format of its own is complete. Reads names, sizes and the
ends of files only, and never imports torch.

Known formats say so themselves: torch.distributed.checkpoint writes `.metadata` last, Megatron-LM and DeepSpeed name
the newest complete checkpoint in a file beside it, the Hugging Face Trainer writes `trainer_state.json` last, and files
of `torch.save` and safetensors show by their ends or headers whether they were truncated. Of any other format nothing
is known; `Checkpoint.is_certain` is then False.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resihp.plain_files import open_plain

MAX_ENTRIES = 4096
"""Most files of a checkpoint's folder that are looked at. Ranks write one file each, or a few."""
MAX_NOTE_BYTES = 256
MAX_HEADER_BYTES = 100 << 20
"""Largest header of a safetensors file, as its format says."""
UNFINISHED_ENDINGS = (".tmp", ".part", ".partial", ".incomplete", ".crdownload")
"""Endings of names that libraries give to what they have not written to the end."""
ZIP_FILES = (".pt", ".pth", ".ckpt")
MEGATRON_NOTE, DEEPSPEED_NOTE = "latest_checkpointed_iteration.txt", "latest"

_STEP = re.compile(r"step[=_-]?(\d+)")
_NUMBER = re.compile(r"\d+")
_HF_FOLDER = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a script. `iteration`: from its name; None if the name has no number. `modified`: time of the
    last change of it or of its direct entries, in seconds since 1970. `bytes`: size of its direct files. `is_certain`:
    whether its format shows that it is complete."""

    path: Path
    iteration: int | None
    modified: float
    bytes: int
    is_certain: bool


def complete(path: Path) -> Checkpoint | None:
    """Return the checkpoint at a path; None if it is not there or known to be incomplete. Raises OSError."""
    if path.name.startswith(".") or path.name.endswith(UNFINISHED_ENDINGS):
        return None
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    if not os.path.isdir(path):
        is_whole = _is_whole(path)
        if is_whole is False:
            return None
        return Checkpoint(path, iteration_of(path.name), state.st_mtime, state.st_size, is_certain=bool(is_whole))
    entries = _entries(path)
    verdict = _is_complete_folder(path, entries, state.st_mtime)
    if verdict is False:
        return None
    modified, size = state.st_mtime, 0
    for entry in entries:
        with suppress(FileNotFoundError):
            entry_state = entry.stat()
            modified = max(modified, entry_state.st_mtime)
            size += entry_state.st_size if entry.is_file() else 0
    return Checkpoint(path, iteration_of(path.name), modified, size, is_certain=bool(verdict))


def iteration_of(name: str) -> int | None:
    """Return the iteration in a name: 500 in `step_500`, `iter_0000500`, `checkpoint-500`, `epoch=1-step=500.ckpt`."""
    stem = name.removesuffix(Path(name).suffix) if Path(name).suffix in (*ZIP_FILES, ".safetensors", ".bin") else name
    if step := _STEP.search(stem):
        return int(step[1])
    numbers = _NUMBER.findall(stem)
    return int(numbers[-1]) if numbers else None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    entries: list[os.DirEntry[str]] = []
    with os.scandir(folder) as scan:
        for entry in scan:
            entries.append(entry)
            if len(entries) == MAX_ENTRIES:
                break
    return entries


def _is_complete_folder(folder: Path, entries: Sequence[os.DirEntry[str]], modified: float) -> bool | None:
    """Return whether a folder holds a complete checkpoint; None if its format is not known."""
    names = {entry.name for entry in entries}
    if not names:
        return False
    noted = _note(folder.parent / MEGATRON_NOTE)
    if noted is not None and folder.name.startswith("iter_"):
        iteration = iteration_of(folder.name)
        return noted.isdigit() and iteration is not None and iteration <= int(noted)
    if any(name == ".metadata" or name.endswith(".distcp") for name in names):
        return _size(folder / ".metadata") > 0
    if "trainer_state.json" in names or _HF_FOLDER.fullmatch(folder.name):
        return "trainer_state.json" in names
    noted = _note(folder.parent / DEEPSPEED_NOTE)
    if noted is not None:
        return noted == folder.name or modified <= (folder.parent / DEEPSPEED_NOTE).stat().st_mtime
    if any(name.endswith(UNFINISHED_ENDINGS) for name in names):
        return False
    whole = [_is_whole(folder / name) for name in sorted(names) if name.endswith((*ZIP_FILES, ".safetensors"))]
    return False if False in whole else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _note(path: Path) -> str | None:
    """Return the text of a small file; None if there is none."""
    try:
        with os.fdopen(open_plain(path, follow=True), "rb") as file:
            return file.read(MAX_NOTE_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


def _is_whole(path: Path) -> bool | None:
    """Return whether a file is not truncated; None if its format does not show it."""
    with os.fdopen(open_plain(path, follow=True), "rb") as file:
        start = file.read(8)
        if start.startswith(b"PK"):
            return bool(zipfile.is_zipfile(file))
        if path.suffix != ".safetensors":
            return None if start else False
        if len(start) < 8:
            return False
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER_BYTES:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return False
        return bool(os.fstat(file.fileno()).st_size >= 8 + length + max(ends, default=0))
