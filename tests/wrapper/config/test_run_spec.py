"""A run's file is read again: by agents, and by a new supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.errors import UsageError
from resihp.wrapper.config.run_spec import load
from tests.wrapper.run_requests import run_request


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    asked = run_request("j1", tmp_path, nodes=2, settings={"tp": 2, "come_backs": 1})
    assert load(asked.save()) == asked


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": {}}', '{"virtual_stages": 1}', "null"])
def test_what_is_no_run_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"run\.json: not a run of this version"):
        load(path)


def test_a_run_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = run_request("j1", tmp_path, nodes=2).save()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError):
        load(path)
