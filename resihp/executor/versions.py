"""What trains, for the record: versions of libraries, and the commit of the script. Nothing here raises, or runs git.

Asked by the trainer as it declares.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from resihp.protocol.inventory import MAX_TEXT_CHARS, Software
from resihp.worker import nccl_versions

MOST_BYTES = 1 << 24
"""Read of a file of git's; `packed-refs` has a line for each branch and tag."""
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def software(script: Path | None = None) -> Software:
    """`script`: the one that runs, if none is named."""
    found = Path(sys.argv[0]) if script is None else script
    return Software(
        torch=torch.__version__[:MAX_TEXT_CHARS],
        megatron_core=_installed("megatron-core"),
        cuda=(torch.version.cuda or "")[:MAX_TEXT_CHARS],
        nccl=_nccl(),
        script_commit=commit_of(found.parent) if found.is_file() else "",
    )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)[:MAX_TEXT_CHARS]
    except metadata.PackageNotFoundError:
        return ""


def _nccl() -> str:
    """Of the library that is loaded, where one is."""
    version = nccl_versions.loaded()
    return "" if version is None else nccl_versions.shown(version)[:MAX_TEXT_CHARS]


def commit_of(folder: Path) -> str:
    """The commit that is checked out where a folder is, whatever was changed since; empty where there is none."""
    with suppress(OSError, ValueError, RuntimeError):
        for place in (folder.resolve(), *folder.resolve().parents):
            if (place / ".git").exists():
                return _head(place / ".git")
    return ""


def _head(git: Path) -> str:
    """Raises OSError, ValueError."""
    if git.is_file():  # of a work tree, or a submodule
        git = git.parent / _read(git).removeprefix("gitdir:").strip()
    head = _read(git / "HEAD")
    if not head.startswith("ref:"):
        return _commit(head)
    name = head.removeprefix("ref:").strip()
    shared = git / _read(git / "commondir") if (git / "commondir").is_file() else git
    for place in (git, shared):
        if (place / name).is_file():
            return _commit(_read(place / name))
    for line in _read(shared / "packed-refs").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return _commit(commit)
    return ""


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_BYTES).decode(errors="replace").strip()


def _commit(text: str) -> str:
    return text if _COMMIT.fullmatch(text) else ""
