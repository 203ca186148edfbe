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
import stat
import struct
import zipfile
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from resihp.plain_files import open_plain

MAX_ENTRIES = 4096
"""Most files of a checkpoint's folder that are looked at. Ranks write one file each, or a few."""
MAX_NOTE_BYTES = 256
MAX_DIGITS = 15
"""Most digits of an iteration in a name."""
SEAL_SLACK_S = 2.0
"""How much newer than the file that is written last the other files may seem: clocks of nodes differ."""
MAX_HEADER_BYTES = 100 << 20
"""Largest header of a safetensors file, as its format says."""
UNFINISHED_ENDINGS = (".tmp", ".part", ".partial", ".incomplete", ".crdownload")
"""Endings of names that libraries give to what they have not written to the end."""
ZIP_FILES = (".pt", ".pth", ".ckpt")
MEGATRON_NOTE, DEEPSPEED_NOTE = "latest_checkpointed_iteration.txt", "latest"
DCP_SEAL, HF_SEAL = ".metadata", "trainer_state.json"
DATA_FILES = (".distcp", *ZIP_FILES, ".safetensors", ".bin")

_STEP = re.compile(r"step[=_-]?(\d+)")
_NUMBER = re.compile(r"\d+")
_HF_FOLDER = re.compile(r"checkpoint-\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a script. `iteration`: from its name; None if the name has no number. `modified`: time of the
    file that is written last, if its format has one, because an evaluation may add files later; else of the last change
    of it or of its direct entries, in seconds since 1970. `bytes`: size of its direct files. `is_certain`: whether its
    format shows that it is complete."""

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
    if not stat.S_ISDIR(state.st_mode):
        if path.name in (MEGATRON_NOTE, DEEPSPEED_NOTE):
            return None
        is_whole = _is_whole(path)
        if is_whole is False:
            return None
        return Checkpoint(path, iteration_of(path.name), state.st_mtime, state.st_size, is_certain=bool(is_whole))
    entries = _entries(path)
    modified = max([state.st_mtime, *(entry.st_mtime for entry in entries.values())])
    verdict = _is_complete_folder(path, entries, modified)
    if verdict is False:
        return None
    seal = _seal(path, entries.keys())
    if verdict and seal is not None:
        modified = entries[seal].st_mtime
    size = sum(entry.st_size for entry in entries.values() if stat.S_ISREG(entry.st_mode))
    return Checkpoint(path, iteration_of(path.name), modified, size, is_certain=bool(verdict))


def iteration_of(name: str) -> int | None:
    """Return the iteration in a name: 500 in `step_500`, `iter_0000500`, `checkpoint-500`, `epoch=1-step=500.ckpt`."""
    stem = name.removesuffix(Path(name).suffix) if Path(name).suffix in (*ZIP_FILES, ".safetensors", ".bin") else name
    step = _STEP.search(stem)
    number = step[1] if step else next(reversed(_NUMBER.findall(stem)), "")
    return int(number) if 0 < len(number) <= MAX_DIGITS else None


def _entries(folder: Path) -> dict[str, os.stat_result]:
    entries: dict[str, os.stat_result] = {}
    with os.scandir(folder) as scan:
        for entry in islice(scan, MAX_ENTRIES):
            with suppress(FileNotFoundError):
                entries[entry.name] = entry.stat()
    return entries


def _seal(folder: Path, names: Collection[str]) -> str | None:
    """Return the name of the file that is written last, whether it is there or not; None if the format has none."""
    if any(name == DCP_SEAL or name.endswith(".distcp") for name in names):
        return DCP_SEAL
    return HF_SEAL if HF_SEAL in names or _HF_FOLDER.fullmatch(folder.name) else None


def _is_complete_folder(folder: Path, entries: Mapping[str, os.stat_result], modified: float) -> bool | None:
    """Return whether a folder holds a complete checkpoint; None if its format is not known, or if it may be about to be
    written again: files that the format writes first are newer than the last one."""
    names = entries.keys()
    if not names:
        return False
    seal = _seal(folder, names)
    if seal is not None and (seal not in names or not entries[seal].st_size):
        return False
    is_noted = _is_noted(folder, modified)
    if is_noted is not None or seal is None:
        return is_noted if is_noted is not None else _is_whole_folder(folder, names)
    times = (entry.st_mtime for name, entry in entries.items() if name.endswith(DATA_FILES))
    return True if max(times, default=0.0) <= entries[seal].st_mtime + SEAL_SLACK_S else None


def _is_noted(folder: Path, modified: float) -> bool | None:
    """Return whether a folder is no newer than the newest complete checkpoint, which Megatron-LM and DeepSpeed name in
    a file beside it: by its iteration, and by the time of that file. None if there is no such file, or if it names this
    folder, which has changed since."""
    for name in (MEGATRON_NOTE, DEEPSPEED_NOTE):
        if name == MEGATRON_NOTE and not folder.name.startswith("iter_"):
            continue
        note = folder.parent / name
        if (text := _note(note)) is None:
            continue
        newest, iteration = iteration_of(text), iteration_of(folder.name)
        if newest is not None and iteration is not None and iteration > newest:
            return False  # it was not written to the end
        if modified <= note.stat().st_mtime:
            return True
        return None if text == folder.name or (iteration is not None and iteration == newest) else False
    return None


def _is_whole_folder(folder: Path, names: Iterable[str]) -> bool | None:
    """Return whether no file of a folder is truncated; None if no format shows it."""
    if any(name.endswith(UNFINISHED_ENDINGS) for name in names):
        return False
    whole = [_is_whole(folder / name) for name in sorted(names) if name.endswith((*ZIP_FILES, ".safetensors"))]
    return False if False in whole else None


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
