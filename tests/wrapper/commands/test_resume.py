"""Where a job goes on that Slurm has started again, and when that is one time too many."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resihp.errors import JobNotFoundError, RestartBudgetError, UsageError
from resihp.record.journal import JobEnded, JobSignalled, JobStarted
from resihp.record.journal_file import Journal
from resihp.slurm.client import JobView, NodeView
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.errors import SlurmOutputError, SlurmUnavailableError
from resihp.worker.checkpoints import write_manifest
from resihp.wrapper.commands.resume import RUN_FILE, CompletedError, command_to_go_on, requested_resumption, run_of
from resihp.wrapper.commands.run import Options, prepare
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.exit_codes import exit_code_of
from resihp.wrapper.job_folder import create_local_job, find_job, runs_of, write_private
from tests.slurm.fake_slurm import FakeSlurm
from tests.wrapper.run_requests import run_request

COMMAND = (sys.executable, "train.py")
STARTED: dict[str, Any] = {
    **{"job": "77", "command": COMMAND, "nodes": 2, "gpus_per_node": 2, "tp": 1, "pp": 1, "schedule": "1f1b"},
    **{"host": "n1", "user": "u", "restart_count": 0, "version": "", "configuration": {}},
}
PREEMPTED = JobSignalled(signal=15, nodes=(), meaning="preempted")


@pytest.fixture
def batch(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in the batch script of job 77 on two nodes."""
    (fresh_home / "train.py").write_text("")
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CLUSTER_NAME": "fake",
        "SLURM_JOB_PARTITION": "gpu",
    }.items():
        monkeypatch.setenv(name, value)
    return fresh_home


def start(
    restart: int = 0,
    command: tuple[str, ...] = COMMAND,
    script: str = "#SBATCH --no-kill",
    version: tuple[int, int, int] = (22, 5, 8),
    **options: object,
) -> RunRequest:
    """One run of the job, which Slurm has started again so many times."""
    views = [NodeView(name=name, state="allocated", address="127.0.0.1") for name in ("n1", "n2")]
    slurm = FakeSlurm(views, version=version)
    slurm.job_views["77"] = JobView(id="77", name="resihp", user=slurm.user, state="running")
    slurm.scripts["77"] = f"#!/bin/bash\n{script}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_RESTART_COUNT", str(restart))
        request = prepare(Options(job={"command": command}, **options), slurm)  # type: ignore[arg-type]
    request.save()
    return request


def checkpoint(request: RunRequest, iteration: int) -> None:
    part = Path(request.checkpoint_folder) / f"iteration-{iteration:06d}" / "part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"1234")
    write_manifest(part.parent, iteration, [("part", 4)], "fingerprint", keep=2)


def test_a_run_is_named_by_slurms_job_and_found_by_it(batch: Path) -> None:
    first, again, third = start(), start(1), start(2)
    assert [first.job, again.job, third.job] == ["77", "77-r1", "77-r2"]
    assert find_job("77").name == "77-r2"
    assert find_job("77-r1").name == "77-r1"
    assert [job.name for job in runs_of("77")] == ["77-r2", "77-r1", "77"]
    assert start(2).job == "77-r2-2", "a second one in the same allocation"
    with pytest.raises(JobNotFoundError):
        find_job("7")


def test_what_attempts_have_in_common_is_read_from_a_plain_file_alone(tmp_path: Path) -> None:
    """Others may write beside the checkpoints; nobody waits for a pipe."""
    os.mkfifo(tmp_path / RUN_FILE)
    named = run_of(tmp_path, resumed=True, earlier="")
    assert run_of(tmp_path, resumed=True, earlier="") == named
    (tmp_path / RUN_FILE).write_text(named + "\n" * 1000)
    assert run_of(tmp_path, resumed=True, earlier="") != named


def test_a_job_starts_though_slurm_tells_its_cluster_only_once(batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    answers = iter(["blue"])

    def cluster(slurm: FakeSlurm) -> str:
        for answer in answers:
            return answer
        raise SlurmUnavailableError("scontrol: no answer")

    monkeypatch.setattr(FakeSlurm, "cluster", cluster)
    told = start().slurm
    assert told is not None
    assert told.identity is not None
    assert told.cluster == told.identity.cluster == "blue"


def test_elements_of_an_array_are_runs_of_their_own(
    batch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both with the same number: the one that Slurm has started again had the array's own at first."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    saved = {"folder": str(batch / "saved")}
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    first = start(checkpoint=saved)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "12")
    other, unconfigured = start(checkpoint=saved), start()
    assert [first.job, other.job, unconfigured.job] == ["77_1", "77_12", "77_12-2"]
    assert (first.checkpoint_folder, other.checkpoint_folder) == (
        str(batch / "saved" / "1"),
        str(batch / "saved" / "12"),
    )
    assert unconfigured.checkpoint_folder == str(batch / "home" / "jobs" / "77_12-2" / "checkpoints")
    assert f"job 77_1: task of a job array; its checkpoints are in {batch}/saved/1" in capsys.readouterr().err
    checkpoint(first, 5)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    again = start(1, checkpoint=saved)
    assert (again.job, again.begins_at, again.checkpoint_folder) == ("77_1-r1", 5, first.checkpoint_folder)
    assert find_job("77_1").name == "77_1-r1"
    assert find_job("77_12").name == "77_12-2"
    with pytest.raises(JobNotFoundError, match="did you mean 77_1"):
        find_job("77")
    assert start(checkpoint=saved, resume_or_start=True).checkpoint_folder == str(batch / "saved"), "a chain shares it"


def test_what_the_allocation_is_reaches_the_controller(batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_SLURM__SPARES", "1")
    monkeypatch.setenv("RESIHP_SLURM__REPLACEMENTS", "3")
    monkeypatch.setenv("RESIHP_SLURM__ON_WARNING", "end")
    request = start()
    settings = request.settings
    assert settings.node_names == ("n1", "n2")
    assert (settings.nodes, settings.spares, settings.gpus_per_node, request.succession) == (2, 1, 2, True)
    assert request.host == "127.0.0.1"
    assert request.slurm is not None
    assert (request.slurm.job_id, request.slurm.cluster, request.slurm.cpus, request.slurm.gpus) == ("77", "fake", 8, 2)
    assert request.slurm.partition == "gpu", "replacements go where the job is"
    settings = request.settings
    assert (settings.slurm, settings.spares, settings.replacements, settings.drains_left) == (True, 1, 3, 2)
    assert (settings.batch_node, settings.on_warning, settings.replacement_least_left_s) == ("n1", "end", 1800)


def test_missing_no_kill_is_a_warning(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start()
    assert "--no-kill" not in capsys.readouterr().err
    start(script="exec resihp run")
    assert "job 77: no --no-kill in the batch script: if a node fails, Slurm ends the whole job" in (
        capsys.readouterr().err
    )


def test_a_node_that_is_kept_out_and_was_given_all_the_same_is_told(
    batch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template that was given to sbatch itself."""
    Exclusions(batch / "home", "fake").add("n2", "Xid 79", time.time() + 60)
    Exclusions(batch / "home", "fake").add("n3", "Xid 79", time.time() + 60)
    start()
    told = [line for line in capsys.readouterr().err.splitlines() if "avoid it" in line]
    assert len(told) == 1
    assert told[0].startswith("resihp: node n2: in this allocation, although your jobs avoid it (Xid 79); ")
    assert told[0].endswith("--exclude=n2")


def test_what_slurm_starts_again_goes_on_unasked(batch: Path) -> None:
    first = start()
    checkpoint(first, 40)
    again = start(1)
    assert (again.resume, again.checkpoint_folder, again.begins_at) == (True, first.checkpoint_folder, 40)
    checkpoint(again, 80)
    assert start(2).begins_at == 80


def test_attempts_of_one_job_are_one_run_whether_there_is_a_checkpoint_or_not(batch: Path) -> None:
    first, again = start(), start(1)
    assert first.run == again.run != ""
    checkpoint(again, 5)
    assert start(2).run == first.run


def test_jobs_that_go_on_from_each_other_s_checkpoints_are_one_run(
    batch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"folder": str(batch / "saved")}
    first = start(checkpoint=saved)
    checkpoint(first, 5)
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    assert start(checkpoint=saved, resume="").run == first.run
    assert start(checkpoint=saved, resume_or_start=True).run == first.run
    afresh = start(checkpoint=saved)
    assert afresh.run != first.run, "it was not asked to go on"


def test_a_damaged_name_of_a_run_is_replaced(batch: Path) -> None:
    saved = {"folder": str(batch / "saved")}
    first = start(checkpoint=saved)
    checkpoint(first, 5)
    (batch / "saved" / ".run").write_bytes(b"\xff" * 40)
    again = start(checkpoint=saved, resume="")
    assert again.run not in ("", first.run)
    assert start(checkpoint=saved, resume="").run == again.run


def test_what_slurm_s_own_records_call_it_is_journaled(batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "ml")
    monkeypatch.setenv("RESIHP_SLURM__PARTITION", "spot")
    request = start()
    assert request.slurm is not None
    assert request.slurm.identity is not None
    identity = request.slurm.identity
    assert (identity.cluster, identity.job, identity.account) == ("fake", 77, "ml")
    assert identity.partition == "gpu", "its own; replacements may be asked for elsewhere"
    assert (identity.array_job, identity.submitted_at) == (None, None)


def test_without_a_checkpoint_it_starts_afresh_with_a_notice(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start()
    again = start(1)
    assert (again.resume, again.begins_at) == (False, 0)
    assert "restarted, but 77 left no complete checkpoint; starting afresh" in capsys.readouterr().err
    other = start(2, command=(sys.executable, "train.py", "--other"))
    assert not other.resume
    assert "no earlier run is in" in capsys.readouterr().err


def test_what_has_completed_is_not_run_once_more(batch: Path) -> None:
    first = start()
    checkpoint(first, 40)
    first.of_job.exit_code_file.write_text("75\n")
    again = start(1)
    again.of_job.exit_code_file.write_text("0\n")
    for restart in (2, 3):
        with pytest.raises(CompletedError, match="job 77: started again by Slurm, but its run 77-r1 has completed"):
            start(restart)
    assert len(runs_of("77")) == 2, "no folder was made"
    assert start(2, command=(sys.executable, "train.py", "--other")).begins_at == 0


@pytest.mark.parametrize("code", ["75", "93", "143", "", "?"])
def test_what_has_not_completed_is_run_again(batch: Path, code: str) -> None:
    start().of_job.exit_code_file.write_text(code)
    assert start(1).job == "77-r1"


@pytest.mark.parametrize(("version", "which"), [((20, 11, 9), "older"), ((27, 5, 0), "newer"), ((23, 11, 4), "")])
def test_a_release_that_nobody_has_tried_is_told_once(
    batch: Path, version: tuple[int, int, int], which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(version=version).job == "77"
    said = [line for line in capsys.readouterr().err.splitlines() if "Slurm" in line]
    assert len(said) == bool(which)
    assert all(f"is {which} than the releases that resihp was tested with" in line for line in said)


def test_a_release_that_cannot_be_read_is_told_and_the_job_goes_on(
    batch: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(self: FakeSlurm) -> tuple[int, int, int]:
        raise SlurmOutputError("slurm: cannot read the version in sinfo's output: 'slurm next'")

    monkeypatch.setattr(FakeSlurm, "version", unreadable)
    assert start().job == "77"
    assert "cannot read the version in sinfo's output: 'slurm next'; going on" in capsys.readouterr().err


def test_runs_that_get_nowhere_are_not_started_for_ever(batch: Path) -> None:
    for restart in range(3):
        start(restart)
    with pytest.raises(RestartBudgetError, match="3 runs in a row began at the beginning and failed without") as caught:
        start(3)
    assert exit_code_of(caught.value) == 4
    assert len(runs_of("77")) == 3, "no folder was made"


def test_progress_pays_into_the_restart_budget(batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    checkpoint(start(1), 10)
    start(2)
    start(3)
    checkpoint(start(4), 20)
    start(5)
    monkeypatch.setenv("RESIHP_SLURM__RESTARTS", "1")
    with pytest.raises(RestartBudgetError, match="the last run began at iteration 20"):
        start(6)


def ends(request: RunRequest, *entries: JobSignalled | JobEnded) -> None:
    """What the journal of a run comes to."""
    journal = Journal(request.of_job.journal_file)
    for entry in (JobStarted(**STARTED), *entries):
        journal.append(entry, 0.0)
    journal.close()


STOPPED = {
    "preempted": (PREEMPTED, JobEnded(exit_code=75, state="cancelled", reason="")),
    "requeued by an administrator": (PREEMPTED, JobEnded(exit_code=143, state="cancelled", reason="")),
    "killed while it was being stopped": (PREEMPTED,),
    "found dead after that": (PREEMPTED, JobEnded(exit_code=1, state="abnormal", reason="")),
}
FAILED = {
    "nodes lost": (JobEnded(exit_code=75, state="failed", reason=""),),
    "failed after it was warned": (PREEMPTED, JobEnded(exit_code=1, state="failed", reason="")),
    "killed": (),
    "found dead": (JobEnded(exit_code=1, state="abnormal", reason=""),),
}


@pytest.mark.parametrize("how", STOPPED)
def test_runs_that_were_stopped_do_not_count_against_the_budget(batch: Path, how: str) -> None:
    for restart in range(5):
        ends(start(restart), *STOPPED[how])
    request = start(5)
    assert request.slurm is not None
    assert request.settings.restarts_left == 2, "after this one"


@pytest.mark.parametrize("how", FAILED)
def test_runs_that_failed_do(batch: Path, how: str) -> None:
    for restart in range(3):
        request = start(restart)
        assert request.settings.restarts_left == 2 - restart
        ends(request, *FAILED[how])
    with pytest.raises(RestartBudgetError, match="3 runs in a row began at the beginning and failed"):
        start(3)


def test_stops_between_failures_neither_count_nor_make_up_for_them(batch: Path) -> None:
    for restart, how in enumerate([FAILED, STOPPED, FAILED, STOPPED, FAILED]):
        ends(start(restart), *next(iter(how.values())))
    with pytest.raises(RestartBudgetError, match="3 runs in a row"):
        start(5)


@pytest.mark.parametrize(
    ("script", "on_warning", "expected"),
    [
        ("", "requeue", True),
        ("", "end", False),
        ("#SBATCH --requeue", "end", True),
        ("#SBATCH --no-requeue", "requeue", False),
        ("#SBATCH --requeue\n#SBATCH --no-requeue", "requeue", False),
    ],
)
def test_whether_a_job_may_be_run_again_is_its_batch_scripts_to_say(
    batch: Path, monkeypatch: pytest.MonkeyPatch, script: str, on_warning: str, expected: bool
) -> None:
    """A job of a chain ends when its time is up, and yet is run again when too many of its nodes have died."""
    monkeypatch.setenv("RESIHP_SLURM__ON_WARNING", on_warning)
    assert start(script=f"#SBATCH --no-kill\n{script}").settings.may_requeue is expected


def test_what_sbatch_was_told_otherwise_overrules_its_script(batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")
    assert not start(script="#SBATCH --no-kill --requeue").settings.may_requeue


def test_jobs_of_a_chain_share_a_folder(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = {"folder": str(batch / "saved")}
    first = start(checkpoint=folder, resume_or_start=True)
    assert not first.resume
    assert "starting afresh" in capsys.readouterr().err
    checkpoint(first, 7)
    second = start(checkpoint=folder, resume_or_start=True)
    assert (second.resume, second.begins_at, second.checkpoint_folder) == (True, 7, str(batch / "saved"))
    with pytest.raises(UsageError, match="--resume-or-start: needs a folder that all jobs of the chain share"):
        start(resume_or_start=True)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("run --local --nodes 2 -- python train.py", "run --local --nodes 2 --resume local-4 -- python train.py"),
        ("run --local python train.py", "run --local --resume local-4 -- python train.py"),
        ("run --config job.toml", "run --config job.toml --resume local-4 -- python train.py"),
        ("run --local --resume local-3 -- python train.py", "run --local --resume local-4 -- python train.py"),
        ("run --resume --local -- python train.py", "run --local --resume local-4 -- python train.py"),
        ("run --resume-or-start --checkpoint-folder c -- python train.py", None),
        ("run --fault kill:rank=1@iteration=3 --local -- python train.py", None),
        ("run --local --fault=kill:rank=1@iteration=3 -- python train.py", None),
        ("", "run --resume local-4 -- python train.py"),
    ],
)
def test_the_command_that_goes_on_is_the_one_that_was_typed_but_from_the_checkpoint(
    typed: str, told: str | None
) -> None:
    command = ("python", "train.py")
    again = command_to_go_on(typed.split(), "local-4", command, "local-3" if "local-3" in typed else "")
    if told is None:
        told = "run --checkpoint-folder c" if "-folder" in typed else "run --local"
        told += " --resume local-4 -- python train.py"
    assert again == f"resihp {told}"


@pytest.mark.parametrize("typed", ["--ledger {}", "--ledger={}"])
def test_the_command_that_goes_on_has_no_password(typed: str) -> None:
    arguments = ("run", *typed.format("postgresql://me:s3cret@db:5432/runs").split(), "--local", "--", "python", "x.py")
    told = command_to_go_on(arguments, "local-1", ("python", "x.py"))
    ledger = typed.format("postgresql://me@db:5432/runs")
    assert told == f"resihp run {ledger} --local --resume local-1 -- python x.py"


def test_what_the_shell_would_take_apart_is_quoted() -> None:
    arguments = ("run", "--local", "--", "python", "my train.py")
    told = command_to_go_on(arguments, "local-1", ("python", "my train.py"))
    assert told == "resihp run --local --resume local-1 -- python 'my train.py'"


def test_a_job_of_another_version_does_not_keep_from_the_checkpoints_of_the_one_before(fresh_home: Path) -> None:
    good, odd = create_local_job(), create_local_job()
    request = run_request(good.name, good.folder, checkpoint_folder=str(good.checkpoints))
    request.save()
    checkpoint(request, 7)
    write_private(odd.run_file, b'{"settings": {}}')
    said: list[str] = []
    found = requested_resumption(None, "", ("true",), said.append)
    assert (found.folder, found.iteration) == (good.checkpoints, 7)
    assert said[0].startswith(f"--resume: job {odd.name} is skipped: {odd.run_file}: not a run of this version")
