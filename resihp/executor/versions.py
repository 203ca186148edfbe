"""Reads the versions of libraries in use and the git commit of the training script, for the ledger.

Never raises, and never runs git. Called by `supervised.worker` for the `Declare` message.
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

MAX_GIT_FILE_BYTES = 1 << 24
"""Maximum number of bytes read from a file of git; `packed-refs` has a line for each branch and tag."""
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def software(script: Path | None = None) -> Software:
    """Return the versions in use, and the commit of the folder of `script`, by default the running script."""
    path = Path(sys.argv[0]) if script is None else script
    return Software(
        torch=torch.__version__[:MAX_TEXT_CHARS],
        megatron_core=_installed("megatron-core"),
        cuda=(torch.version.cuda or "")[:MAX_TEXT_CHARS],
        nccl=_nccl(),
        script_commit=commit_of(path.parent) if path.is_file() else "",
    )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)[:MAX_TEXT_CHARS]
    except metadata.PackageNotFoundError:
        return ""


def _nccl() -> str:
    """Return the version of the loaded NCCL library; empty if none is loaded."""
    version = nccl_versions.loaded()
    return "" if version is None else nccl_versions.shown(version)[:MAX_TEXT_CHARS]


def commit_of(folder: Path) -> str:
    """Return the commit checked out in a folder's repository, ignoring uncommitted changes; empty if there is none."""
    with suppress(OSError, ValueError, RuntimeError):
        for place in (folder.resolve(), *folder.resolve().parents):
            if (place / ".git").exists():
                return _head(place / ".git")
    return ""


def _head(git: Path) -> str:
    """Return the commit of HEAD for a `.git` folder or file. Raises OSError, ValueError."""
    if git.is_file():  # a work tree or a submodule
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
        return file.read(MAX_GIT_FILE_BYTES).decode(errors="replace").strip()


def _commit(text: str) -> str:
    return text if _COMMIT.fullmatch(text) else ""
