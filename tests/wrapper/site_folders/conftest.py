"""A folder as a site makes it, for whoever runs the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resihp.wrapper.site_folders import folder as site_folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What root makes on a real site; here whoever runs the tests."""
    monkeypatch.setattr(site_folder, "ADMINISTRATOR_UID", os.geteuid())
    made = tmp_path / "site"
    made.mkdir()
    made.chmod(0o1733)
    return made


def put_impostor(kind: str, path: Path, target: Path) -> None:
    """Put something at `path` that is not a file of one name: a link or second name of `target`, a pipe, a folder."""
    if kind == "link":
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        assert kind == "second name"
        path.hardlink_to(target)
