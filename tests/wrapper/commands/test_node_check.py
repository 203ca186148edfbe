"""`resihp node check`: where a suspect node is checked, and what is told; the site's health check before an undrain."""

from __future__ import annotations

import json
import os
import pwd
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from resihp.errors import ResihpError, UsageError
from resihp.slurm.client import PREFIX
from resihp.slurm.errors import SlurmRefusedError
from resihp.wrapper import site_check
from resihp.wrapper.cli import app
from resihp.wrapper.commands.node import check, gpu_speed
from resihp.wrapper.commands.node import command as node_commands
from resihp.wrapper.commands.node.gpu_speed import GpuSpeed
from resihp.wrapper.config import sources
from resihp.wrapper.site_check import Answer
from tests.slurm.fake_slurm import FakeSlurm
from tests.slurm.fake_survey import FakeSurvey

ME = pwd.getpwuid(os.getuid()).pw_name
GOOD = [
    {"check": "gpus", "outcome": "ok", "text": "8 x H100"},
    {"check": "health command", "outcome": "ok", "text": ""},
]
BAD = [*GOOD, {"check": "gpu speed", "outcome": "failed", "text": "GPU 3: 400 TFLOP/s, the others 800"}]


class Slurm(FakeSlurm):
    """Runs a submitted job at once, unless `busy`; it prints `printed`."""

    busy = False
    printed = ""

    def submit(self, script: Path, options: Sequence[str] = ()) -> str:
        self.script_text = script.read_text()
        job = super().submit(script, options)
        if not self.busy:
            (output,) = (option.removeprefix("--output=") for option in options if option.startswith("--output="))
            Path(output).write_text(self.printed)
            self.set_job(job, state="completed")
        return job


@pytest.fixture
def slurm(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    fake = Slurm(("n1", "n2", "n3"), user=ME, cluster="vc", operator=True)
    fake.survey = FakeSurvey(started=lambda nodes, argv: fake.printed)  # type: ignore[attr-defined]
    fake.printed = f"Welcome\n{json.dumps({'rows': GOOD})}\n"
    monkeypatch.setattr(check, "connect", lambda: (fake, fake.survey))  # type: ignore[attr-defined]
    monkeypatch.setattr(node_commands, "connect", lambda: fake)
    monkeypatch.setattr(check, "POLL_PAUSES_S", (0.01,))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("resihp.slurm.drains.spool.DEFAULT_FOLDER", fresh_home / "no-spool")
    return fake


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["node", *argv])


def refused(kind: type[ResihpError], *argv: str) -> str:
    result = run(*argv)
    assert type(result.exception) is kind, result.exception
    return str(result.exception)


def test_a_free_node_is_checked_by_a_job_of_its_own(slurm: Slurm) -> None:
    slurm.set_node("n3", gpus=8)
    result = run("check", "n3", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert (answer["schema"], answer["node"], answer["healthy"]) == (1, "n3", True)
    assert [(row["check"], row["outcome"]) for row in answer["rows"]] == [("gpus", "ok"), ("health command", "ok")]
    ((_, _, options),) = slurm.submissions
    assert {"--nodelist=n3", "--nodes=1", "--exclusive", "--gpus-per-node=8", "--no-requeue"} <= set(options)
    assert "-m resihp node check n3 --here --json" in slurm.script_text


def test_a_node_of_a_running_job_of_ours_is_checked_beside_it(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    job = slurm.add_job("n2", "n3")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    slurm.set_node("n3", flags=frozenset({"drain"}))  # Slurm starts steps there all the same
    assert run("check", "n3").exit_code == 0
    assert slurm.submissions == []


def test_what_fails_is_told_by_the_exit_status_and_in_the_list(slurm: Slurm) -> None:
    run("exclude", "n3")
    slurm.printed = json.dumps({"rows": BAD})
    result = run("check", "n3")
    assert result.exit_code == 3
    assert "GPU 3: 400 TFLOP/s" in result.stdout
    (row,) = json.loads(run("list", "--json").stdout)["rows"]
    assert (row["node"], row["check"]) == ("n3", "failed: gpu speed")
    assert row["checked_at"].endswith("Z")
    run("exclude", "n3", "--reason", "again")
    (row,) = json.loads(run("list", "--json").stdout)["rows"]
    assert row["check"] is None, "a check before the new reason says nothing about it"


@pytest.mark.parametrize("printed", ["", "Traceback\nImportError: no resihp\x1b[2J", '{"rows": 3}', '{"rows": [{}]}'])
def test_a_node_without_a_readable_answer_is_not_healthy(slurm: Slurm, printed: str) -> None:
    slurm.printed = printed
    result = run("check", "n3", "--json")
    assert result.exit_code == 3
    (row,) = json.loads(result.stdout)["rows"]
    assert row["outcome"] == "unknown"
    assert row["text"].isprintable()


@pytest.mark.parametrize(
    ("reason", "advice"),
    [(f"{PREFIX}Xid 79", "resihp node undrain n3"), ("broken fan", "scontrol update NodeName=n3 State=UNDRAIN")],
)
def test_a_drained_node_is_not_waited_for(slurm: Slurm, reason: str, advice: str) -> None:
    slurm.set_node("n3", flags=frozenset({"drain"}), reason=reason)
    text = refused(SlurmRefusedError, "check", "n3")
    assert f"Slurm starts no job there, it is idle+drain ({reason})" in text
    assert "resihp node check n3 --here" in text
    assert advice in text
    assert slurm.submissions == []


def test_a_busy_node_is_waited_for_no_longer_than_asked_and_no_job_is_left(slurm: Slurm) -> None:
    slurm.busy = True
    assert "did not start" in refused(SlurmRefusedError, "check", "n3", "--patience", "1s")
    (view,) = slurm.job_views.values()
    assert view.state == "cancelled"


def test_here_is_only_the_node_itself(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket.gethostname() in refused(UsageError, "check", "n3", "--here")
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    result = run("check", "n3", "--here", "--json")
    names = [row["check"] for row in json.loads(result.stdout)["rows"]]
    assert {"gpus", "home", "journal", "health command", "gpu speed"} <= set(names)
    assert "Slurm does not know it" in refused(UsageError, "check", "n9")


# --- GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "outcome", "text"),
    [
        ([], "skipped", "torch can use no GPU here"),
        ([(8e14, 3e12)] * 8, "ok", "8 GPUs, each at least 800 TFLOP/s and 3e+03 GB/s"),
        ([(8e14, 3e12)] * 7 + [(4e14, 3e12)], "failed", "GPU 7: 400 TFLOP/s, the others 800"),
        ([(8e14, 3e12), (8e14, 1e12)], "failed", "GPU 1: 1e+03 GB/s, the others 3e+03"),
    ],
)
def test_gpus_are_compared_with_the_others_of_the_node(
    gpus: list[tuple[float, float]], outcome: str, text: str
) -> None:
    measured = [GpuSpeed(gpu=index, flops=flops, memory_bytes=copied) for index, (flops, copied) in enumerate(gpus)]
    result = gpu_speed.judge(measured)
    assert (result.outcome, result.text) == (outcome, text)


def test_a_gpu_that_computes_wrongly_fails() -> None:
    result = gpu_speed.judge([GpuSpeed(gpu=0, error="a product is off by 3"), GpuSpeed(gpu=1, flops=1, memory_bytes=1)])
    assert (result.outcome, result.text) == ("failed", "GPU 0: a product is off by 3")


def test_the_measurement_is_that_of_a_jobs_start() -> None:
    (measured,) = gpu_speed.measure([torch.device("cpu")])
    assert measured.error == ""
    assert measured.flops > 0
    assert measured.memory_bytes > 0


# --- undrain --------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site with a health check, which a test writes."""
    script, file = tmp_path / "nhc", tmp_path / "site.toml"
    file.write_text(f"[site]\nhealth_command = ['{script}']\n")
    read = sources.read
    monkeypatch.setattr(sources, "read", lambda given: read(given, site=(file,), authority=file))
    return script


def answers(script: Path, text: str) -> None:
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)


def drained_by_us(slurm: Slurm) -> None:
    slurm.set_node("n3", flags=frozenset({"drain"}), reason=f"{PREFIX}silent", reason_by=ME)


def test_undrain_is_refused_where_the_sites_check_fails(
    slurm: Slurm, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n3")
    drained_by_us(slurm)
    answers(site, "echo GPU 3 ECC; exit 1")
    text = refused(SlurmRefusedError, "undrain", "n3")
    assert text.startswith("node n3: not undrained: the site's health check does not pass there: exit status 1: GPU 3")
    assert slurm.node_views["n3"].draining
    answers(site, "exit 0")
    assert run("undrain", "n3").exit_code == 0
    assert not slurm.node_views["n3"].draining


def test_undrain_asks_beside_a_job_of_ours(slurm: Slurm, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", slurm.add_job("n2", "n3"))
    drained_by_us(slurm)
    hung = Answer(outcome="silent", text="not finished within 30 s, killed")
    slurm.printed = f"{site_check.ANSWER_PREFIX}{json.dumps({'outcome': hung.outcome, 'text': hung.text})}\n"
    assert hung.text in refused(SlurmRefusedError, "undrain", "n3")
    assert slurm.node_views["n3"].draining


def test_undrain_goes_on_where_nobody_can_be_asked(slurm: Slurm, site: Path) -> None:
    drained_by_us(slurm)
    result = run("undrain", "n3")
    assert result.exit_code == 0
    assert "was not asked: none of your jobs runs there" in result.stderr
    assert not slurm.node_views["n3"].draining


def test_nobody_is_asked_about_somebody_elses_drain(slurm: Slurm, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n3")
    slurm.set_node("n3", flags=frozenset({"drain"}), reason="broken fan", reason_by="root")
    answers(site, f"touch {site}.ran; exit 0")
    refused(SlurmRefusedError, "undrain", "n3")
    assert not Path(f"{site}.ran").exists()
