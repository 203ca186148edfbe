"""The doctor looks at the folders of [site] before a job waits for its nodes; it writes nothing there."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from resihp.wrapper.commands.doctor import places
from resihp.wrapper.config.sources import read
from resihp.wrapper.site_folders import folder as site_folder


def test_the_sites_folders_are_checked_before_a_job_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_home: Path
) -> None:
    folder = tmp_path / "audit"
    etc = tmp_path / "etc.toml"
    etc.write_text(f"[site]\naudit = '{folder}'\n")
    monkeypatch.setattr(places, "read", partial(read, site=(etc,), authority=etc))
    monkeypatch.setattr(site_folder, "ADMINISTRATOR_UID", os.geteuid())
    (finding,) = places.site_folders()
    assert (finding.check, finding.outcome) == ("site", "warning")
    assert f"[site] audit {folder}: no such file or directory; ask the administrator" in finding.text
    assert "jobs run all the same" in finding.text
    folder.mkdir()
    folder.chmod(0o1733)
    (finding,) = places.site_folders()
    assert (finding.outcome, finding.text) == ("ok", f"[site] audit {folder}: jobs can write there")
    folder.chmod(0o777)
    (finding,) = places.site_folders()
    assert "not sticky" in finding.text
    assert list(folder.iterdir()) == []
