"""A run's file is read again: by agents, by a new supervisor, and by a newer resihp than wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from resihp.errors import UsageError
from resihp.settings import Detection, ProbeLimits
from tests.wrapper.run_requests import run_request
from wrapper.config.run_spec import load

HERE = Path(__file__).parent


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    asked = run_request("j1", tmp_path, nodes=2, settings={"tp": 2, "come_backs": 1})
    assert load(asked.save()) == asked


def test_a_run_of_the_version_before_goes_on_after_an_update() -> None:
    found = load(HERE / "run-0.1.json")
    settings = found.settings
    assert (found.job, settings.node_names, settings.gpus_per_node, settings.spares) == ("77", ("n1", "n2", "n5"), 2, 1)
    assert (settings.schedule, settings.chunks, settings.memory_bytes) == ("interleaved", 2, 80_000_000_000)
    assert (settings.come_backs, settings.recheck_s, settings.checkpoint_every) == (5, 30.0, 5)
    assert [(fault.kind, fault.rank, fault.iteration) for fault in settings.faults] == [("kill", 1, 3)]
    assert (settings.slurm, settings.batch_node, settings.drains_left, settings.died_before) == (True, "n1", 1, ("n9",))
    assert (settings.replacements, settings.replacement_least_left_s) == (2, 600.0)
    assert (settings.may_requeue, settings.restarts_left) == (True, 2)
    assert found.slurm is not None
    assert found.slurm.host_names == {"n1": "10.0.0.1"}


def test_limits_of_a_run_of_a_development_version_are_kept_after_an_update(tmp_path: Path) -> None:
    path = run_request("j1", tmp_path, nodes=2).save()
    document = json.loads(path.read_text())
    del document["settings"]["detection"]["sure"]
    document["settings"]["detection"]["thresholds"] |= {"fit": 0.7, "sure": 0.9}
    path.write_text(json.dumps(document))
    assert load(path).settings.detection == Detection(sure=0.9, probe_limits=ProbeLimits(fit=0.7))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": {}}', '{"virtual_stages": 1}', "null"])
def test_what_is_no_run_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"run\.json: not a run of this version"):
        load(path)


def test_a_run_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copy(HERE / "run-0.1.json", tmp_path / "run.json"))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError):
        load(path)
