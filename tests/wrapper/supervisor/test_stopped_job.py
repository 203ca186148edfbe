"""A Slurm job whose processes were stopped, as by `scancel --signal=STOP`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.wrapper.config.run_spec import SlurmRequest
from resihp.wrapper.supervisor import attention
from tests.wrapper.run_requests import run_request


def test_what_depends_on_time_is_asked_anew_when_the_processes_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = SlurmRequest(job_id="77", cluster="vc", batch_node="n1", host_names={}, cpus=4, gpus=1)
    request = run_request("77", tmp_path / "77", nodes=2, gpus=1, settings={"batch_node": "n1"}, slurm=main)
    resumed: list[bool] = []
    said: list[str] = []
    job = attention.StoppedJob(request, lambda: resumed.append(True))

    def look() -> bool:
        return job.look(lambda level, text: said.append(text))

    join: Any = msgspec.defstruct("Join", [("node", str), ("pid", int)])("n1", os.getpid())
    job.joined(join)
    clock = time.monotonic()
    monkeypatch.setattr(attention.time, "monotonic", lambda: clock + attention.SILENCE_S + 1)
    assert not look(), "silent, but not stopped"
    monkeypatch.setattr(attention, "_is_stopped", lambda pid: pid == os.getpid())
    assert look()
    assert look()
    assert resumed == []
    job.heard()
    assert not look()
    assert resumed == [True]
    assert len(said) == 2
