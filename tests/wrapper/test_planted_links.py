"""In a folder that others may write, too, somebody has put links under the names that a command is about to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from resihp import durable_files
from resihp.slurm.drains.exclusions import Exclusions
from resihp.worker.checkpoints import write_manifest
from resihp.wrapper.commands import init
from resihp.wrapper.commands.report import command as report
from resihp.wrapper.config.sources import read
from resihp.wrapper.output.answers import write_parquet

ATTACKER = 54321


def excluded(folder: Path) -> Path:
    exclusions = Exclusions(folder, "c")
    exclusions.add("n1", "slow", 1.0)
    return exclusions.path


def written_by_init(folder: Path) -> Path:
    init.write(init.choose(None, read({})), folder, force=True)
    return folder / "job.toml"


def parquet(folder: Path) -> Path:
    write_parquet(pd.DataFrame({"a": [1]}), folder / "rows.parquet", "rows")
    return folder / "rows.parquet"


def page(folder: Path) -> Path:
    report.write(folder / "report.html", "page")
    return folder / "report.html"


def manifest(folder: Path) -> Path:
    write_manifest(folder, 2, [])
    return next(path for path in folder.iterdir() if "manifest" in path.name)


NAMED_BY_USER = (page, written_by_init, parquet)
"""Through these the user's own links are followed; through no others."""


@pytest.mark.usefixtures("fresh_home")
@pytest.mark.parametrize("write", [*NAMED_BY_USER, excluded, manifest])
def test_nothing_is_written_through_links(
    tmp_path: Path, write: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal, shared, victim = tmp_path / "rehearsal", tmp_path / "shared", tmp_path / "victim"
    rehearsal.mkdir()
    shared.mkdir()
    victim.write_text("precious")
    path = shared / write(rehearsal).relative_to(rehearsal)
    path.parent.mkdir(exist_ok=True)
    for name in (path.name, f".{path.name}.{os.getpid()}", f".{path.name}.new"):
        (path.parent / name).symlink_to(victim)
        if write in NAMED_BY_USER and os.geteuid() == 0:
            os.chown(path.parent / name, ATTACKER, -1, follow_symlinks=False)
    if write in NAMED_BY_USER and os.geteuid() != 0:  # who cannot give links away is somebody else himself
        monkeypatch.setattr(durable_files, "own_users", lambda: (ATTACKER,))
    write(shared)
    assert victim.read_text() == "precious"
    assert path.is_file()
    assert not path.is_symlink()
