"""The doctor: what is broken is failed, what gives no answer is unknown, what is not here is skipped; never ok."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.slurm.client import NodeView
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.limits import Limit
from resihp.wrapper.cli import app
from resihp.wrapper.commands.doctor import command as doctor
from resihp.wrapper.commands.doctor import machine, places, slurm_settings, training_libraries
from resihp.wrapper.commands.doctor import nodes as doctor_nodes
from resihp.wrapper.commands.doctor.machine import CheckResult
from resihp.wrapper.commands.doctor.nodes import PROBE_PREFIX, ClockCheck, NodeReport, judge, probe, read
from resihp.wrapper.commands.doctor.slurm_checks import SlurmChecks
from resihp.wrapper.job_folder import home
from tests.slurm.fake_slurm import FakeSlurm
from tests.slurm.fake_survey import SETTINGS, FakeSurvey, partition
from tests.wrapper.launch.test_ports import free_range


def outcomes(findings: Iterable[CheckResult]) -> dict[str, str]:
    """The worst of each check."""
    order = ("ok", "skipped", "warning", "unknown", "failed")
    found: dict[str, str] = {}
    for finding in findings:
        found[finding.check] = max(found.get(finding.check, "ok"), finding.outcome, key=order.index)
    return found


def only(findings: Iterable[CheckResult]) -> CheckResult:
    (finding,) = findings
    return finding


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def bare_path(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing of Slurm or NVIDIA on it."""
    folder = fresh_home / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(machine, "VISIBLE_DEVICES", fresh_home / "dev")
    return folder


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes seconds, and has tests of its own."""
    text = "not looked at"
    monkeypatch.setattr(training_libraries, "torch", lambda: [CheckResult(check="torch", outcome="ok", text=text)])


def resihp(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.usefixtures("quick", "bare_path")
def test_a_laptop_without_slurm_and_gpus_is_healthy() -> None:
    done = resihp("--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["healthy"]) == (1, True)
    rows = {row["check"]: row for row in answer["rows"]}
    assert rows["slurm"]["outcome"] == rows["gpus"]["outcome"] == "skipped"
    assert "resihp run --local" in rows["slurm"]["text"]
    assert rows["home"]["outcome"] == "ok"
    assert all(set(row) == {"check", "outcome", "text", "advice", "nodes"} for row in answer["rows"])


@pytest.mark.usefixtures("quick", "bare_path")
def test_what_failed_comes_with_what_to_type_and_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_LEDGER__URL", "oracle://scott:tiger@db/x")
    done = resihp()
    assert done.exit_code == 3
    assert "tiger" not in done.output
    text = " ".join(done.stdout.split())
    assert "driver oracle is not known here" in text
    assert "resihp cannot run here as it is" in done.stderr


@pytest.mark.usefixtures("quick", "bare_path")
def test_a_check_that_hangs_is_unknown_and_so_is_one_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hangs() -> list[CheckResult]:
        release.wait(60)
        return []

    def breaks() -> list[CheckResult]:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(places, "home", hangs)
    monkeypatch.setattr(places, "ports", breaks)
    began = time.monotonic()
    done = resihp("--json", "--timeout", "1s")
    assert time.monotonic() - began < 30
    release.set()
    assert done.exit_code == 3
    rows = {row["check"]: row for row in json.loads(done.stdout)["rows"]}
    assert (rows["home"]["outcome"], rows["home"]["text"]) == ("unknown", "no answer within 1 s")
    assert rows["ports"]["outcome"] == "unknown"
    assert "ZeroDivisionError" in rows["ports"]["text"]


def test_a_check_that_says_nothing_is_not_ok() -> None:
    assert outcomes(doctor.run({"x": list}, 5)) == {"x": "unknown"}


@pytest.mark.parametrize("given", ["soon", "-1s", "0s"])
def test_a_timeout_that_is_none(given: str) -> None:
    assert resihp("--timeout", given).exit_code != 0


# --- this machine ---------------------------------------------------------------------------------------------------


SMI_ROWS = (
    "0, NVIDIA H100 80GB HBM3, 81559, 550.54.15, {}, Disabled\\n1, NVIDIA H100 80GB HBM3, 81559, 550.54.15, 0, {}"
)


@pytest.mark.parametrize(
    ("script", "outcome", "text"),
    [
        (f"printf '{SMI_ROWS.format(0, 'Disabled')}'", "ok", r"2 x NVIDIA H100 80GB HBM3, 80 GiB, driver 550\.54\.15"),
        (f"printf '{SMI_ROWS.format(3, '[N/A]')}'", "failed", r"GPU 0 has 3 uncorrected memory errors"),
        (f"printf '{SMI_ROWS.format('[N/A]', '[N/A]')}'", "ok", "2 x NVIDIA"),
        (f"printf '{SMI_ROWS.format(0, 'Enabled')}'", "warning", r"15; GPU 1 in MIG mode, and NCCL"),
        (
            f"printf '{SMI_ROWS.format(0, '[N/A]')}\\n2, NVIDIA A100, 40000, 550.54.15, 0, [N/A]'",
            "warning",
            "3 GPUs of 2 kinds",
        ),
        (
            "echo 'NVIDIA-SMI_ROWS has failed because it could not communicate with the driver'; exit 9",
            "failed",
            "driver",
        ),
        ("true", "skipped", "no NVIDIA GPU"),
    ],
)
def test_gpus(script: str, outcome: str, text: str, bare_path: Path, fresh_home: Path) -> None:
    (fresh_home / "dev").mkdir()
    (fresh_home / "dev" / "nvidia0").touch()
    program(bare_path, "nvidia-smi", script)
    finding = only(machine.gpus())
    assert finding.outcome == outcome
    assert re.search(text, finding.text)


@pytest.mark.parametrize(
    ("listed", "outcome", "text"),
    [
        (("0-1", "0-1"), "ok", "each worker runs near its GPU: 2 GPUs near CPUs 0-1"),
        (("0", "1"), "ok", "each worker runs near its GPU: 1 GPU near CPUs 0; 1 GPU near CPUs 1"),
        (("64-127", "0-1"), "warning", "too few of the CPUs that this job may use are near 0000:00:00.0"),
    ],
)
def test_the_cpus_near_gpus(
    listed: tuple[str, str], outcome: str, text: str, bare_path: Path, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    for name in ("GPU_FOLDERS", "PCI_DEVICES"):
        monkeypatch.setattr(machine, name, fresh_home / name)
    for number, cpus in enumerate(listed):
        (fresh_home / "GPU_FOLDERS" / f"0000:{number:02}:00.0").mkdir(parents=True)
        file = fresh_home / "PCI_DEVICES" / f"0000:{number:02}:00.0" / "local_cpulist"
        file.parent.mkdir(parents=True)
        file.write_text(f"{cpus}\n")
    program(bare_path, "nvidia-smi", "echo '0, A100, 40960, 535.1, 0, Disabled'")
    _, finding = machine.gpus()
    assert (finding.check, finding.outcome) == ("affinity", outcome)
    assert text in finding.text


def test_gpus_whose_driver_hangs_are_unknown(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(argv: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(argv, 20)

    program(bare_path, "nvidia-smi", "true")
    monkeypatch.setattr(subprocess, "run", hangs)
    assert only(machine.gpus()).outcome == "unknown"


def test_gpus_without_nvidia_smi(bare_path: Path, fresh_home: Path) -> None:
    assert only(machine.gpus()).outcome == "skipped"
    (fresh_home / "dev").mkdir()
    (fresh_home / "dev" / "nvidia0").touch()
    assert only(machine.gpus()).outcome == "warning"


@pytest.mark.parametrize(
    ("hard", "nodes", "outcome"),
    [
        (1024, 1, "ok"),
        (1024, 256, "ok"),
        (1024, 257, "failed"),
        (4096, 2048, "failed"),
        (resource.RLIM_INFINITY, 2048, "ok"),
    ],
)
def test_open_files_are_compared_with_the_job(
    hard: int, nodes: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hard limit counts: our own processes raise the soft one to it."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, hard))
    found = next(each for each in machine.limits(nodes) if each.check == "open files")
    assert found.outcome == outcome
    assert str(3 * nodes + 256) in found.text
    if outcome == "failed":
        assert f"LimitNOFILE={3 * nodes + 256} " in found.advice


def test_agents_that_the_kernel_does_not_let_wait_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SOMAXCONN_FILE", tmp_path / "somaxconn")
    machine.SOMAXCONN_FILE.write_text("128\n")
    assert "listen backlog" not in outcomes(machine.limits(128))
    assert outcomes(machine.limits(129))["listen backlog"] == "warning"


def test_the_job_that_is_configured_is_what_limits_are_for(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NNODES", raising=False)
    job_file = fresh_home / "job.toml"
    job_file.write_text("[job]\nnodes = 100\n[slurm]\nspares = 10\n")
    files = next(each for each in doctor.here(job_file)["limits"]() if each.check == "open files")
    assert "a job of 110 nodes needs 586" in files.text
    monkeypatch.setenv("SLURM_NNODES", "7")
    files = next(each for each in doctor.here(job_file)["limits"]() if each.check == "open files")
    assert "a job of 7 nodes" in files.text


def test_a_home_that_cannot_be_written(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_HOME", "/proc/resihp")
    finding = only(places.home())
    assert finding.outcome == "failed"
    assert "RESIHP_HOME" in finding.advice


def test_looking_leaves_nothing_behind(fresh_home: Path) -> None:
    before = sorted(fresh_home.rglob("*"))
    for name in ("configuration", "home", "journal", "ledger", "ports", "limits"):
        assert "failed" not in outcomes(doctor.here()[name]()).values()
    assert sorted(fresh_home.rglob("*")) == before


@pytest.mark.parametrize(("kind", "outcome"), [("ext4", "ok"), ("nfs4", "warning"), ("tmpfs", "warning")])
def test_where_the_journal_is(fresh_home: Path, monkeypatch: pytest.MonkeyPatch, kind: str, outcome: str) -> None:
    monkeypatch.setattr(places, "file_system", lambda path: kind)
    monkeypatch.setattr(places, "_sync_s", lambda folder: 0.001)
    assert only(places.journal()).outcome == outcome


@pytest.mark.parametrize(
    ("command", "outcome", "text"),
    [
        ("true", "ok", "/true"),
        ("/usr/sbin/no-such-check", "warning", "not on this machine, or not executable"),
        ("/etc/passwd", "warning", "not on this machine, or not executable"),
    ],
)
def test_the_sites_health_command_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, outcome: str, text: str
) -> None:
    file = tmp_path / "site.toml"
    file.write_text(f"[site]\nhealth_command = ['{command}']\n")
    configured = places.read({}, site=(file,), authority=file)
    monkeypatch.setattr(places, "read", lambda *given: configured)
    monkeypatch.setattr("resihp.wrapper.config.sources.read", lambda *given: configured)
    assert "health command" in doctor.here()
    finding = only(places.health_command())
    assert finding.outcome == outcome
    assert text in finding.text


def test_a_site_without_a_health_command_is_not_told_of_it(fresh_home: Path) -> None:
    assert "health command" not in doctor.here()


def test_a_slow_disk_is_told(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "file_system", lambda path: "ext4")
    monkeypatch.setattr(places, "_sync_s", lambda folder: 0.2)
    finding = only(places.journal())
    assert finding.outcome == "warning"
    assert "a flush takes 200.0 ms" in finding.text


def test_a_ledger_on_a_network_file_system(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resihp.db.engine.file_system", lambda path: "lustre")
    finding = only(places.ledger())
    assert finding.outcome == "warning"
    assert "without WAL" in finding.text


def test_a_server_that_is_not_there(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RESIHP_LEDGER__URL", f"postgresql://u:SECRET@127.0.0.1:{port}/x")
    finding = only(places.ledger())
    assert finding.outcome == "failed"
    assert "SECRET" not in finding.text


def test_what_is_configured_wrongly(fresh_home: Path) -> None:
    (fresh_home / "resihp.toml").write_text("[hooks]\nevents = ['ends']\n")
    finding = only(places.configuration())
    assert finding.outcome == "failed"
    assert "did you mean end?" in finding.text


@pytest.mark.usefixtures("quick", "bare_path")
def test_a_job_file_is_looked_at_too(fresh_home: Path) -> None:
    path = fresh_home / "job.toml"
    path.write_text("[container]\nruntime = 'apptainer'\nimage = '/no/such.sif'\n")
    done = resihp("--json", "--config", str(path))
    assert done.exit_code == 3
    failed = [row["text"] for row in json.loads(done.stdout)["rows"] if row["outcome"] == "failed"]
    assert len(failed) == 1
    assert "/no/such.sif" in failed[0] or "apptainer" in failed[0]


def test_packages_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["msgspec>=999.1", "no-such-package>=1", "numpy>=1.0", 'matplotlib>=999; extra == "plot"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    finding = only(machine.packages())
    assert finding.outcome == "failed"
    assert "is older than 999.1; no-such-package is missing" in finding.text


def test_torch_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_libraries, "TORCH_QUESTION", "raise ImportError('libcudart.so.12: cannot open')")
    finding = only(training_libraries.torch())
    assert finding.outcome in ("failed", "warning")  # where torch is not installed at all
    if finding.outcome == "failed":
        assert "libcudart.so.12" in finding.text


GOOD_TORCH: dict[str, object] = {
    "version": "2.13.0+cu130",
    "cuda": "13.0",
    "gpus": 8,
    "warnings": [],
    "gloo": True,
    "nccl": True,
    "nccl_version": [2, 28, 9],
    "nccl_files": [],
}
OLD_DRIVER = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def torch_says(bare_path: Path, fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CheckResult]]:
    """Return the doctor's findings about a good torch that differs in these answers, on a machine with a GPU."""
    (fresh_home / "dev").mkdir()
    (fresh_home / "dev" / "nvidia0").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CC", "/opt/compiler")
    versions = {"torch": "2.13.0", "megatron-core": "0.16.1"}
    monkeypatch.setattr(training_libraries, "installed", versions.__getitem__)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ['megatron-core<0.20,>=0.16.1; extra == "train"'])

    def findings(*, megatron_core: str = "0.16.1", **answers: object) -> list[CheckResult]:
        versions["megatron-core"] = megatron_core
        answer = json.dumps(GOOD_TORCH | answers)
        monkeypatch.setattr(training_libraries, "TORCH_QUESTION", f"print({json.dumps(answer)})")
        return list(training_libraries.torch())

    return findings


def test_a_torch_with_nothing_amiss_needs_no_compiler_of_cudas(torch_says: Callable[..., list[CheckResult]]) -> None:
    """Nothing but the doctor's own commands is on the PATH."""
    finding = only(torch_says())
    assert (finding.outcome, finding.text) == ("ok", "2.13.0+cu130, gloo, NCCL 2.28.9, megatron-core 0.16.1")


@pytest.mark.parametrize(
    ("answers", "outcome", "words"),
    [
        ({"nccl_version": [2, 26, 2]}, "warning", "NCCL 2.26.2: communicators that can be aborted have hung"),
        ({"nccl_files": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}, "warning", "2 NCCL libraries are loaded in one"),
        ({"gpus": 0, "warnings": [OLD_DRIVER]}, "failed", f"it sees none of 1 GPU here: {OLD_DRIVER}"),
        ({"gpus": 0, "cuda": None}, "failed", "it sees none of 1 GPU here, it is a build for CPUs"),
        ({"nccl": False, "nccl_version": None}, "failed", "it is built without NCCL, which GPUs use to communicate"),
        (
            {"version": "2.7.1", "gpus": 0, "warnings": []},
            "failed",
            "torch 2.7.1 is too old: resihp needs 2.8 or later",
        ),
        ({"version": "2.9.1+cu128"}, "warning", "torch 2.9.1+cu128 is too old: bf16 on a GPU needs 2.10 or later"),
        ({"version": "2.10.0"}, "warning", "were compared with torch 2.11 and later only"),
        ({"megatron_core": "0.20.0"}, "failed", "resihp needs megatron-core>=0.16.1,<0.20"),
        ({"gloo": False, "nccl": False, "gpus": 0}, "failed", "processes cannot communicate"),
    ],
)
def test_what_keeps_a_torch_from_training_is_a_line_of_its_own(
    torch_says: Callable[..., list[CheckResult]],
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, object],
    outcome: str,
    words: str,
) -> None:
    if answers.get("gpus") == 0 and "sees none" not in words:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = only(torch_says(**answers))
    assert (finding.outcome, words in finding.text) == (outcome, True), finding.text
    assert finding.advice


def test_a_machine_of_gpus_without_a_c_compiler_is_told(
    torch_says: Callable[..., list[CheckResult]], bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC")
    finding = only(torch_says())
    assert finding.outcome == "warning"
    assert "no C compiler, which" in finding.text
    program(bare_path, "gcc", "true")
    assert only(torch_says()).outcome == "ok"


def test_two_faults_of_torch_are_two_findings(torch_says: Callable[..., list[CheckResult]]) -> None:
    assert len(torch_says(nccl_version=[2, 26, 2], version="2.10.0")) == 2


# --- Slurm ----------------------------------------------------------------------------------------------------------


def asked(slurm: FakeSlurm, survey: FakeSurvey, environment: dict[str, str] | None = None) -> list[CheckResult]:
    return doctor.run(SlurmChecks(slurm, survey, environment or {}).by_name(), 20)


def test_a_good_cluster(fresh_home: Path) -> None:
    found = outcomes(asked(FakeSlurm(), FakeSurvey(operator=True)))
    assert found | {"munge": "ok"} == {
        **dict.fromkeys(
            ("slurm", "node death", "requeue", "firewall", "drain", "partition", "submission", "munge", "limits"), "ok"
        ),
        "nodes": "skipped",
    }


def test_the_job_is_tried_without_the_nodes_that_it_will_not_get(fresh_home: Path) -> None:
    Exclusions(home(), "fake").add("n1", "Xid 79", time.time() + 60)
    slurm, survey = FakeSlurm(["n1"]), FakeSurvey(operator=True)
    asked(slurm, survey)
    assert "--exclude=n1" in survey.options
    survey.refusal = "Requested node configuration is not available"
    (finding,) = [finding for finding in asked(slurm, survey) if finding.check == "submission"]
    assert finding.outcome == "failed"
    assert "may not run on n1: " in finding.advice


def test_slurm_that_does_not_answer_is_said_once_and_is_no_health(fresh_home: Path) -> None:
    survey = FakeSurvey()
    survey.unavailable = True
    found = asked(FakeSlurm(), survey)
    assert [finding.check for finding in found if finding.outcome == "unknown"] == ["slurm"]
    assert not doctor.is_healthy(found)
    assert survey.calls["settings"] == 1


@pytest.mark.parametrize(
    ("settings", "check", "outcome", "words"),
    [
        ({"InactiveLimit": "120 sec"}, "node death", "warning", "InactiveLimit=120 sec"),
        ({"ProctrackType": "proctrack/pgid"}, "node death", "warning", "pgid"),
        ({"KillWait": "2 sec"}, "node death", "warning", "KillWait=2 s"),
        ({"JobContainerType": "job_container/tmpfs"}, "node death", "warning", "with a journal in it at its end"),
        ({"KillOnBadExit": "1"}, "node death", "ok", "which resihp overrides"),
        ({"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE"}, "requeue", "warning", "preemption by requeue"),
        ({"SlurmctldParameters": "enable_expedited_requeue"}, "requeue", "ok", "at once with --requeue=expedite"),
        (
            {"PreemptType": "preempt/qos", "PreemptMode": "CANCEL", "PreemptParameters": "send_user_signal"},
            "requeue",
            "ok",
            "with the warning signal",
        ),
        ({"AccountingStorageType": "accounting_storage/none"}, "release", "ok", "only one node"),
        (
            {"SrunPortRange": "60001-63000"},
            "firewall",
            "warning",
            "SrunPortRange=60001-63000: other ports may be closed",
        ),
        ({"SrunPortRange": "0-0"}, "firewall", "ok", "sets no range"),
        ({"AuthType": "auth/slurm"}, "munge", "skipped", "auth/slurm"),
    ],
)
def test_settings(settings: dict[str, str], check: str, outcome: str, words: str, fresh_home: Path) -> None:
    found = asked(FakeSlurm(), FakeSurvey(operator=True, **settings))
    assert outcomes(found)[check] == outcome
    assert any(words in finding.text for finding in found if finding.check == check)


def test_limits_that_accounting_enforces_are_held_against_the_job(fresh_home: Path) -> None:
    job_file = fresh_home / "resihp.toml"
    job_file.write_text('[job]\nnodes = 4\n[slurm]\npartition = "gpu"\n')
    survey = FakeSurvey(AccountingStorageEnforce="associations,limits")
    survey.limited = (Limit(whose="QOS q", setting="MaxTRES", kind="nodes", per="job", most=2),)

    def finding() -> CheckResult:
        (told,) = [each for each in asked(FakeSlurm(), survey) if each.check == "limits"]
        return told

    assert (finding().outcome, "4 nodes, but QOS q allows 2" in finding().text) == ("failed", True), finding()
    job_file.write_text('[slurm]\npartition = "elsewhere"\n')
    assert (finding().outcome, finding().text) == ("skipped", "no partition to check")


def test_ports_that_are_open(fresh_home: Path) -> None:
    """What srun may use is what to set; once it is, jobs and the doctor listen there."""
    survey = FakeSurvey(operator=True, SrunPortRange="60001-63000")
    advice = next(finding.advice for finding in asked(FakeSlurm(), survey) if finding.check == "firewall")
    assert 'ports = "60001-63000"' in advice
    (fresh_home / "resihp.toml").write_text('[slurm]\nports = "60001-63000"\n')
    found = next(finding for finding in asked(FakeSlurm(), survey) if finding.check == "firewall")
    assert (found.outcome, "listen on 60001-63000" in found.text) == ("ok", True)
    with ClockCheck("127.0.0.1", ports=(first_last := free_range(16))) as clock:
        assert first_last[0] <= clock.port <= first_last[1]


def test_who_may_drain(fresh_home: Path) -> None:
    spool = fresh_home / "spool"

    def drain(operator: bool) -> CheckResult:
        return next(iter(slurm_settings.rights(FakeSurvey(operator=operator), SETTINGS, "me", spool)))

    assert drain(True).outcome == "ok"
    assert drain(False).outcome == "warning"
    spool.mkdir()
    assert "ask the site's hook" in drain(False).text


@pytest.mark.parametrize(
    ("wanted", "outcome", "words"),
    [
        ("", "ok", "gpu: nodes 4 with 8 GPUs, 2 with 4 GPUs; 5 idle; at most 48 h"),
        ("cpu", "failed", "cpu: is down"),
        ("gpus", "failed", "not among the partitions you may use: gpu, cpu"),
    ],
)
def test_partitions(wanted: str, outcome: str, words: str) -> None:
    views = [partition(), partition(nodes=2, nodes_idle=1, gpus=4), partition("cpu", default=False, up=False)]
    finding = only(slurm_settings.partitions(views, wanted))
    assert (finding.outcome, words in finding.text) == (outcome, True), finding.text


def test_a_job_that_slurm_would_not_take(fresh_home: Path) -> None:
    (fresh_home / "resihp.toml").write_text("[slurm]\naccount = 'nobody'\npartition = 'gpu'\n")
    survey = FakeSurvey()
    assert outcomes(asked(FakeSlurm(), survey))["submission"] == "ok"
    assert {"--account=nobody", "--partition=gpu", "--no-kill"} <= set(survey.options)
    survey.refusal = "Invalid account or account/partition combination specified"
    (finding,) = [finding for finding in asked(FakeSlurm(), survey) if finding.check == "submission"]
    assert finding.outcome == "failed"
    assert "set account in [slurm]" in finding.advice


def test_an_old_slurm(fresh_home: Path) -> None:
    assert outcomes(asked(FakeSlurm(version=(19, 5, 0)), FakeSurvey()))["slurm"] == "failed"


# --- the nodes of an allocation -------------------------------------------------------------------------------------


NODES = ("n1", "n2", "n3")
INSIDE = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURMD_NODENAME": "n1",
    "SBATCH_NO_KILL": "1",
}


def started(change: Callable[[str, list[str]], list[str]] = lambda node, argv: argv) -> Callable[..., str]:
    """Runs probes as Slurm would, on this machine; `change` may give a node's another command."""

    def run(nodes: Sequence[str], argv: Sequence[str]) -> str:
        texts = ["Welcome to the cluster!\n"]
        for node in nodes:
            command = change(node, list(argv))
            environment = os.environ | {"SLURMD_NODENAME": node}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
            texts.append(done.stdout)
        return "".join(texts)

    return run


@pytest.fixture
def three_nodes() -> FakeSlurm:
    fake = FakeSlurm([NodeView(name=node, state="idle", address="127.0.0.1") for node in NODES])
    fake.add_job(*NODES, id="7", script="#!/bin/sh\n#SBATCH --no-kill\n")
    return fake


def test_three_nodes_that_are_well(fresh_home: Path, three_nodes: FakeSlurm) -> None:
    found = asked(three_nodes, FakeSurvey(operator=True, started=started()), INSIDE)
    differs = {"gpus", "munge", "journal"}  # with the machine; it is told of a folder in memory, which tests may have
    assert {check for check, outcome in outcomes(found).items() if outcome != "ok"} <= differs
    texts = {finding.check: finding.text for finding in found}
    assert "n1, n2, n3 connect to this one" in texts["connections"]
    assert "the most of 3" in texts["clocks"]
    assert not list(fresh_home.glob(".resihp-doctor*"))


def test_a_node_without_our_folder_and_one_that_is_silent(fresh_home: Path, three_nodes: FakeSlurm) -> None:
    def change(node: str, argv: list[str]) -> list[str]:
        if node == "n3":
            return ["/bin/true"]
        return [*argv[:-1], f"{argv[-1]}.elsewhere"] if node == "n2" else argv

    found = asked(three_nodes, FakeSurvey(operator=True, started=started(change)), INSIDE)
    failed = {(finding.check, finding.nodes) for finding in found if finding.outcome == "failed"}
    assert failed == {("nodes", ("n3",)), ("shared home", ("n2",))}
    text = next(finding.text for finding in found if finding.check == "shared home")
    assert "n2: is not the same folder there" in text


def test_a_node_that_cannot_connect(fresh_home: Path, three_nodes: FakeSlurm) -> None:
    def change(node: str, argv: list[str]) -> list[str]:
        return [*argv[:-2], "1", argv[-1]] if node == "n2" else argv

    found = asked(three_nodes, FakeSurvey(operator=True, started=started(change)), INSIDE)
    failed = [finding for finding in found if finding.outcome == "failed"]
    assert [(finding.check, finding.nodes) for finding in failed] == [("connections", ("n2",))]
    assert "Connection refused" in failed[0].text


@pytest.mark.usefixtures("bare_path")
def test_gpus_that_slurm_gave_and_nobody_sees(three_nodes: FakeSlurm) -> None:
    found = asked(three_nodes, FakeSurvey(started=started()), INSIDE | {"SLURM_GPUS_ON_NODE": "8"})
    texts = [finding.text for finding in found if (finding.check, finding.outcome) == ("gpus", "warning")]
    assert texts == ["Slurm gave 8 per node, but n1, n2, n3 show none"]


def test_no_probe_at_all_is_a_failure(fresh_home: Path, three_nodes: FakeSlurm) -> None:
    found = asked(three_nodes, FakeSurvey(operator=True), INSIDE)
    assert outcomes(found)["nodes"] == "failed"


def test_a_batch_script_without_no_kill(fresh_home: Path, three_nodes: FakeSlurm) -> None:
    three_nodes.scripts["7"] = "#!/bin/sh\n"
    environment = {name: value for name, value in INSIDE.items() if name != "SBATCH_NO_KILL"}
    found = asked(three_nodes, FakeSurvey(operator=True, started=started()), environment)
    assert any("no --no-kill" in finding.text for finding in found)


@pytest.mark.parametrize(("ahead_s", "outcome"), [(0.0, "ok"), (3.0, "warning"), (-100.0, "failed")])
def test_clocks_are_compared_over_a_connection(ahead_s: float, outcome: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    note.write_text("note")
    with ClockCheck("127.0.0.1") as clock:
        report = probe("n2", "127.0.0.1", clock.port, note, now=lambda: time.time() + ahead_s)
    skew, error = clock.skews["n2"]
    assert abs(skew - ahead_s) <= error + 0.005
    found = judge(("n2",), {"n2": report}, {"n2"}, clock.skews, tmp_path)
    assert outcomes(found)["clocks"] == outcome


def test_strangers_do_not_stop_the_clock() -> None:
    with ClockCheck("127.0.0.1") as clock, socket.create_connection(("127.0.0.1", clock.port)):
        socket.create_connection(("127.0.0.1", clock.port)).close()
        with socket.create_connection(("127.0.0.1", clock.port)) as rude:
            rude.sendall(b"\xff\xff\xff")
        assert not probe("n1", "127.0.0.1", clock.port, Path("/no/such")).connection
    assert set(clock.skews) == {"n1"}


def test_a_node_that_lacks_the_interface_is_named_with_what_it_has() -> None:
    reports = {
        node: NodeReport(node, (), "", "", "1", {"lo": "127.0.0.1", name: "10.0.0.1"})
        for node, name in (("n1", "ib0"), ("n2", "ib1"), ("n3", "eth0"))
    }
    failed = only(doctor_nodes.interfaces_of("ib", reports))
    assert (failed.outcome, failed.nodes) == ("failed", ("n3",))
    assert "n3: no interface ib is up with an address; available: eth0 (10.0.0.1), lo (127.0.0.1)" in failed.text
    del reports["n3"]
    assert only(doctor_nodes.interfaces_of("ib", reports)).outcome == "ok", "nodes may number theirs differently"
    assert only(doctor_nodes.interfaces_of("ib0", reports)).nodes == ("n2",)


def test_versions_that_differ_and_gpus_that_do(tmp_path: Path) -> None:
    def report(node: str, version: str, gpu: str) -> NodeReport:
        return NodeReport(node, (CheckResult(check="gpus", outcome="ok", text=gpu),), "", "", version)

    reports = {"n1": report("n1", "1.0", "8 x A"), "n2": report("n2", "1.1", "8 x B")}
    found = list(judge(("n1", "n2"), reports, {"n1", "n2"}, {"n1": (0, 0), "n2": (0, 0)}, tmp_path))
    assert outcomes(found)["nodes"] == "failed"
    assert outcomes(found)["gpus"] == "warning"


def test_only_lines_of_probes_of_our_nodes_are_read() -> None:
    good = PROBE_PREFIX + msgspec.json.encode(NodeReport("n1", (), "", "", "1")).decode()
    text = "\n".join([good, PROBE_PREFIX + "{}", PROBE_PREFIX, "resihp", good.replace("n1", "n9"), good[:-4]])
    assert set(read(text, NODES)) == {"n1"}


def test_many_nodes_are_counted() -> None:
    assert doctor_nodes.node_names([f"n{i}" for i in range(4000)]) == "n0, n1, n2 and 3997 more"


def test_a_probe_is_one_line(fresh_home: Path) -> None:
    note = fresh_home / "note"
    note.write_text("note")
    argv = [sys.executable, "-P", "-m", "resihp.wrapper.commands.doctor.nodes", "127.0.0.1", "1", str(note)]
    done = subprocess.run(argv, env=os.environ | {"SLURMD_NODENAME": "n1"}, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1
    assert read(done.stdout, NODES)["n1"].connection
    assert stat.S_ISREG((fresh_home / "note-n1").stat().st_mode)


IMPORTS = """
import sys, threading
from resihp.wrapper.commands.doctor.command import here, run

class Seen:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            print(threading.current_thread().name, name)

checks = here()
sys.meta_path.insert(0, Seen())
run(checks, 60)
"""


@pytest.mark.usefixtures("bare_path")
def test_no_two_checks_can_wait_for_each_others_imports() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, check=True)
    loaded = [line.split()[1] for line in done.stdout.splitlines()]
    ours = ("wrapper", "resihp", "slurm", "db", "pydantic", "pydantic_settings", "sqlalchemy")
    assert loaded, "nothing was seen, not even what only one check needs"
    assert not [name for name in loaded if name.split(".")[0] in ours and not name.startswith("sqlalchemy.dialects")]


def test_a_script_that_is_not_there_is_noticed(fresh_home: Path) -> None:
    (fresh_home / "job.toml").write_text('[job]\ncommand = ["python", "-u", "train.py", "--lr", "1"]\n')
    finding = only(places.configuration(fresh_home / "job.toml"))
    assert (finding.outcome, finding.text) == ("failed", f"train.py: no such script in {fresh_home}")
    (fresh_home / "train.py").write_text("")
    finding = only(places.configuration(fresh_home / "job.toml"))
    assert (finding.outcome, finding.text) == ("ok", str(fresh_home / "job.toml")), "the files that were read"


@pytest.mark.parametrize(
    ("worst", "end"),
    [
        (["ok", "warning"], "resihp can run here"),
        (["ok", "unknown"], "checks without an answer may hide a fault"),
        (["unknown", "failed"], "resihp cannot run here as it is"),
    ],
)
def test_the_end_says_whether_it_can_run(capsys: pytest.CaptureFixture[str], worst: list[str], end: str) -> None:
    doctor.show([CheckResult(check="c", outcome=outcome, text="t") for outcome in worst])  # type: ignore[arg-type]
    assert capsys.readouterr().err.rstrip().endswith(f": {end}")
