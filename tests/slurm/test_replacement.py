"""What is asked for when a node is to be replaced, and what becomes of sbatch's answer. With an sbatch of our own."""

from __future__ import annotations

import os
import pickle
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.slurm.client import Gres, JobRequest
from resihp.slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.replacement import ReplacementJob, all_submitted, parameters, submit, submitted

WANTED = ReplacementJob(
    folder="",
    name="resihp-77-r1",
    comment="replacement 1 of a node of job 77",
    command=("/usr/bin/python3", "-P", "-m", "resihp.wrapper.agent.process", "--lease", "1"),
    exclude=("n1", "n2"),
    seconds=3700.0,
    wait_s=1900.0,
    asked=JobRequest(partition="gpu", exclusive="node"),
    gpus=2,
)


def like(**asked: Any) -> dict[str, Any]:
    """What is asked for in the place of a node of a job that asked so."""
    return parameters(msgspec.structs.replace(WANTED, asked=msgspec.structs.replace(WANTED.asked, **asked)))


class Sbatch:
    """A folder with an `sbatch` that says what it is told to, and writes down how it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.job = folder / "r1"
        self._write("srun", "exit 1")
        self.says("echo Submitted batch job 41")

    def _write(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def says(self, script: str) -> None:
        seen = shlex.quote(str(self.folder / "seen"))
        self._write("sbatch", f'env > {seen}.env\ncp "$1" {seen}.script\npwd > {seen}.pwd\n{script}')

    def submit(self, timeout_s: float = 30.0, **changes: Any) -> str:
        environment = {**os.environ, "PATH": f"{self.bin}:/usr/bin:/bin"} | changes.pop("environment", {})
        wanted = msgspec.structs.replace(WANTED, folder=str(self.job), **changes)
        return submit(wanted, environment=environment, timeout_s=timeout_s)

    def seen(self, what: str) -> str:
        return (self.folder / f"seen.{what}").read_text()


@pytest.fixture
def sbatch(tmp_path: Path) -> Sbatch:
    return Sbatch(tmp_path)


def test_the_script_asks_for_one_node_and_becomes_the_agent(sbatch: Sbatch) -> None:
    assert sbatch.submit() == "41"
    script = sbatch.seen("script")
    options = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert options >= {
        *("--nodes=1", "--ntasks-per-node=1", "--exclusive", "--mem=0M", "--gpus-per-node=2", "--time=61"),
        *("--exclude=n1,n2", "--partition=gpu", "--job-name=resihp-77-r1", "--no-requeue"),
        *("--comment='replacement 1 of a node of job 77'", "--deadline=now+5560", "--signal=B:USR2@120"),
    }
    assert not [option for option in options if option.startswith(("--wckey", "--account", "--qos", "--reservation"))]
    assert "srun" not in script
    assert f"{sys.executable} -P -u -m submitit.core._submit" in script
    delayed = pickle.loads((sbatch.job / "41_submitted.pkl").read_bytes())  # noqa: S301 - written by this test
    assert (delayed.function, delayed.args) == (os.execv, (WANTED.command[0], list(WANTED.command)))


def test_nothing_of_the_main_job_reaches_the_new_one(sbatch: Sbatch) -> None:
    ours = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "4",
        "SBATCH_EXCLUSIVE": "1",
        "SBATCH_PARTITION": "main",  # would override the partition that the replacement asks for
        "SRUN_DEBUG": "3",
        "CUDA_VISIBLE_DEVICES": "5",
        "PYTHONPATH": "/home/user/code",
        "SLURM_CONF": "/etc/elsewhere/slurm.conf",
        "HF_HOME": "/data",
    }
    sbatch.submit(environment=ours)
    given = dict(line.split("=", 1) for line in sbatch.seen("env").splitlines() if "=" in line)
    assert ours.keys() & given.keys() == {"SLURM_CONF", "HF_HOME"}
    assert sbatch.seen("pwd").strip() == str(sbatch.job)


def test_asked_again_it_is_the_same_job(sbatch: Sbatch) -> None:
    assert sbatch.submit() == "41"
    sbatch.says("echo Submitted batch job 42")
    assert sbatch.submit() == "41"
    assert submitted(sbatch.job) == "41"
    assert all_submitted(sbatch.folder) == {1: "41"}
    assert all_submitted(sbatch.folder / "no such") == {}, "no replacement was asked for yet"


@pytest.mark.parametrize(
    ("script", "error", "told"),
    [
        (
            "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; exit 1",
            SlurmRefusedError,
            "Invalid partition name specified",
        ),
        (
            "echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller' >&2; exit 1",
            SlurmUnavailableError,
            "scontrol ping",
        ),
        ("echo 'Submitted something'", SlurmOutputError, "Could not make sense of sbatch output"),
        ("exit 1", SlurmOutputError, "exited with 1 without a job id"),
    ],
)
def test_what_sbatch_says_instead_of_a_number(sbatch: Sbatch, script: str, error: type[Exception], told: str) -> None:
    sbatch.says(script)
    with pytest.raises(error, match=told):
        sbatch.submit()
    assert submitted(sbatch.job) is None


def test_an_sbatch_that_hangs_is_no_answer(sbatch: Sbatch) -> None:
    sbatch.says("exec sleep 60")
    with pytest.raises(SlurmUnavailableError, match="within 2 s"):
        sbatch.submit(timeout_s=2)


def test_a_folder_that_cannot_be_written_is_no_answer(sbatch: Sbatch) -> None:
    sbatch.job.write_text("a file")
    with pytest.raises(SlurmUnavailableError, match="cannot be written"):
        sbatch.submit()


@pytest.mark.parametrize(("seconds", "wait_s", "minutes", "ends"), [(7200, 5400, 120, 12600), (119, -5, 1, 120)])
def test_what_waits_too_long_ends(seconds: float, wait_s: float, minutes: int, ends: int) -> None:
    """Slurm ends a job that cannot be done by its deadline, and refuses it at once where that was never possible."""
    given = parameters(msgspec.structs.replace(WANTED, seconds=seconds, wait_s=wait_s))
    assert (given["time"], given["additional_parameters"]["deadline"]) == (minutes, f"now+{ends}")


def test_what_the_main_job_asked_for_is_asked_for_again() -> None:
    given = like(
        account="project",
        qos="high",
        reservation="team",
        constraint="a100&nvlink",
        licenses="matlab:2,fs",
        wckey="run",
        network="job_vni",
        container="/images/a",
        disk_mb=5,
        gres=(Gres("gpu", "a100", 8), Gres("nic", "", 2)),
    )
    told = {
        name: given[name] for name in ("partition", "account", "qos", "constraint", "wckey", "gpus_per_node", "gres")
    }
    assert told == {
        "partition": "gpu",
        "account": "project",
        "qos": "high",
        "constraint": "a100&nvlink",
        "wckey": "run",
        "gpus_per_node": "a100:8",
        "gres": "nic:2",
    }
    assert (
        given["additional_parameters"].items()
        >= {
            "reservation": "team",
            "licenses": "matlab:2,fs",
            "network": "job_vni",
            "container": "/images/a",
            "tmp": "5M",
        }.items()
    )


def test_a_part_of_a_node_is_asked_for_as_the_main_job_has_it() -> None:
    whole = parameters(msgspec.structs.replace(WANTED, cpus=16))
    asked = JobRequest(memory_mb=4000)
    part = parameters(msgspec.structs.replace(WANTED, cpus=8, asked=asked))
    assert (whole["exclusive"], whole["cpus_per_task"], whole["additional_parameters"]["mem"]) == (True, None, "0M")
    assert (part["exclusive"], part["cpus_per_task"], part["additional_parameters"]["mem"]) == (None, 8, "4000M")
    assert like(exclusive="user")["exclusive"] == "user"
    assert like(exclusive="", oversubscribe=True)["additional_parameters"]["oversubscribe"] is True
    per_gpu = like(memory_per_gpu_mb=900)["additional_parameters"]
    assert (per_gpu["mem-per-gpu"], "mem" in per_gpu) == ("900M", False)


def test_gpus_asked_for_in_total_are_a_nodes_share_of_the_same_type() -> None:
    assert like(gres_in_total=(Gres("gpu", "h100", 16),))["gpus_per_node"] == "h100:2"
    assert like(gres_in_total=(Gres("gpu", "", 16),))["gpus_per_node"] == "2"
    assert like(gres=(Gres("gpu", "a100", 1), Gres("gpu", "h100", 1)))["gpus_per_node"] == "a100:1,h100:1"
    assert like(gres=())["gpus_per_node"] == "2"
    assert parameters(msgspec.structs.replace(WANTED, gpus=None))["gpus_per_node"] is None


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"gres_in_total": (Gres("gpu", "a100", 8), Gres("gpu", "h100", 8))}, "GPUs of types a100 and h100 in total"),
        ({"gres_in_total": (Gres("nic", "", 8),)}, "nic in total.*--gres"),
        ({"constraint": "[rack1|rack2]"}, r"group of nodes.*set constraint in \[slurm\]"),
        ({"constraint": "fast*2&ib*1"}, "group of nodes"),
    ],
)
def test_what_one_node_cannot_repeat_is_refused(sbatch: Sbatch, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(SlurmRefusedError, match=told):
        sbatch.submit(asked=msgspec.structs.replace(WANTED.asked, **asked))


def test_of_further_options_only_those_count_that_say_what_a_node_must_be_like() -> None:
    extra = ("--licenses=fs", "--oversubscribe", "--mail-type=END", "--nodelist=n[1-4]", "--exclude=n[7-8]", "--mem=9G")
    asked = JobRequest(licenses="matlab:2", reservation="team")
    given = parameters(msgspec.structs.replace(WANTED, extra=(*extra, "--segment=4"), asked=asked))
    assert given["exclude"] == "n1,n2,n[7-8]"
    options = given["additional_parameters"]
    assert options == {
        "licenses": "fs", "oversubscribe": True, "no-requeue": True, "mem": "9G", "reservation": "team",
        "deadline": "now+5560",
        "signal": "B:USR2@120",
    }  # fmt: skip


def test_submitit_takes_these_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses names that it does not know."""
    submitit = pytest.importorskip("submitit")
    (tmp_path / "srun").write_text(textwrap.dedent("#!/bin/sh\n"))
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    submitit.SlurmExecutor(folder=tmp_path).update_parameters(**parameters(WANTED))
