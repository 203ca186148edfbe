"""`resihp run` before anything is started: what is refused, with which exit code, and what is passed on."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resihp import errors
from resihp.errors import CheckpointError, ConfigurationError, JobNotFoundError, LayoutError, UsageError
from resihp.settings import Detection, ProbeLimits
from resihp.worker.checkpoints import write_manifest
from resihp.wrapper.commands import run
from resihp.wrapper.commands.run import Options, prepare
from resihp.wrapper.config.program import missing_script, resolve
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.exit_codes import EXIT_CODES, exit_code_of

COMMAND = (sys.executable, "train.py", "--lr", "1")


@pytest.fixture
def script(fresh_home: Path) -> Path:
    path = fresh_home / "train.py"
    path.write_text("")
    return path


def options(*, job: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **others: Any) -> Options:
    return Options(job={"command": COMMAND} | (job or {}), layout=layout or {}, **({"local": True} | others))


def test_request_carries_what_was_asked_for(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    asked = options(
        job={"nodes": 2, "gpus_per_node": 4},
        layout={"tp": 2, "pp": 2},
        faults=("kill:rank=5@iteration=3,phase=backward",),
        checkpoint={"every": 5},
    )
    request = prepare(asked)
    settings = request.settings
    assert (settings.nodes, settings.gpus_per_node, settings.tp, settings.pp) == (2, 4, 2, 2)
    assert request.program.kind == "script"
    assert request.program.argv == ("train.py", "--lr", "1")
    assert request.program.interpreter == sys.executable
    assert request.python_path == str(Path("mine").absolute())
    assert request.settings.faults[0].rank == 5
    settings = request.settings
    assert (settings.schedule, settings.chunks, settings.sequence_parallel) == ("1f1b", 1, False)
    assert (settings.memory_bytes, settings.come_backs) == (None, 3)
    assert request.settings.checkpoint_every == 5
    assert request.checkpoint_folder == str(request.of_job.checkpoints)
    assert request.save().stat().st_mode & 0o777 == 0o600


def test_an_argument_that_is_no_text_is_refused(script: Path) -> None:
    with pytest.raises(UsageError, match=r"command: 'data-\\udcff' is not UTF-8"):
        prepare(options(job={"command": (*COMMAND, "data-\udcff")}))


def test_the_journal_is_not_told_the_ledgers_password(script: Path) -> None:
    asked = options(ledger={"url": "postgresql+psycopg://me:s3cret@host/history"})
    request = prepare(asked)
    assert "s3cret" in request.ledger_url
    assert request.configuration["ledger"]["url"] == "postgresql+psycopg://me:***@host/history"
    assert "s3cret" not in str(request.configuration)


def test_new_layout_options_reach_the_controllers_settings(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESIHP_ADAPT__COME_BACKS", "1")
    asked = options(
        job={"gpus_per_node": 2, "memory_per_device": "80GB"},
        layout={"tp": 2, "schedule": "interleaved", "virtual_stages": 4, "sequence_parallel": True},
        faults=("kill:rank=3@iteration=3,phase=transfer", "disconnect:node=n1@iteration=2,phase=park"),
    )
    settings = prepare(asked).settings
    assert (settings.schedule, settings.chunks, settings.sequence_parallel) == ("interleaved", 4, True)
    assert (settings.memory_bytes, settings.come_backs) == (80 * 10**9, 1)
    assert [fault.phase for fault in settings.faults] == ["transfer", "park"]


def test_how_slow_devices_are_looked_for_reaches_the_controllers_settings(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = prepare(options()).settings
    assert (settings.detection, settings.observes) == (Detection(), False), "defaults are those of the controller"
    for name, value in {"MODE": "paper", "FIT": "0.7", "SURE": "0.9"}.items():
        monkeypatch.setenv(f"RESIHP_DETECT__{name}", value)
    monkeypatch.setenv("RESIHP_ADAPT__MODE", "observe")
    settings = prepare(options()).settings
    assert settings.detection == Detection(mode="paper", sure=0.9, probe_limits=ProbeLimits(fit=0.7))
    assert settings.observes
    monkeypatch.setenv("RESIHP_DETECT__MODE", "sequential")
    for name, value in {"LEAST": "0.1", "PATIENCE": "7", "FALSE_ALARMS_PER": "500"}.items():
        monkeypatch.setenv(f"RESIHP_DETECT__{name}", value)
    found = prepare(options()).settings.detection
    assert (found.least, found.patience, found.false_alarms_per) == (0.1, 7, 500)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (options(local=False), UsageError, "--local"),
        (options(layout={"tp": 2}), LayoutError, "tp=2: a tensor-parallel group stays inside a node"),
        (options(job={"gpus_per_node": 2}, layout={"tp": 2, "pp": 2}), LayoutError, "needs 4 devices, the job has 2"),
        (options(job={"gpus_per_node": 3}, layout={"pp": 2}), LayoutError, "not a multiple"),
        (options(job={"gpus_per_node": 3, "nodes": 2}, layout={"tp": 2}), LayoutError, "would cross nodes"),
        (
            options(faults=("kill:rank=4@iteration=3",)),
            ConfigurationError,
            "no rank 4; ranks are 0 to 0 at the start, 1 to 3 for respawned processes",
        ),
        (options(faults=("disconnect:rank=0@iteration=3",)), ConfigurationError, "happens to a node, not to a rank"),
        (options(layout={"schedule": "interleaved"}), LayoutError, "choose --virtual-stages 2 or more"),
        (options(layout={"virtual_stages": 2}), LayoutError, "schedule=1f1b: has one virtual stage a stage, not 2"),
        (
            options(layout={"schedule": "zero-bubble", "virtual_stages": 2}),
            LayoutError,
            "choose --schedule interleaved, or --virtual-stages 1",
        ),
        (options(faults=("kill:node=n2@iteration=3",)), ConfigurationError, "there is no node n2"),
        (options(faults=("slow:link=n1-n7,speed=0.5@iteration=3",)), ConfigurationError, "there is no node n7"),
        (
            options(job={"nodes": 2}, faults=("slow:link=n1-n2,speed=0.5@iteration=3",)),
            ConfigurationError,
            "EMULATED_LINK_MS=20",
        ),
        (options(faults=("kill:rank=0",)), ConfigurationError, "expected KIND:TARGET@WHEN"),
        (options(job={"command": None}), UsageError, "no command to run"),
        (options(job={"command": ("no_such_program",)}), UsageError, "no_such_program: no such command"),
        (options(job={"command": (sys.executable, "gone.py")}), UsageError, "gone.py: no such script"),
        (options(resume=""), CheckpointError, "--resume: no job in"),
        (options(resume="local-7"), JobNotFoundError, "job local-7: not in"),
        (options(checkpoint={"folder": "/gone"}, resume=""), CheckpointError, "no complete checkpoint in /gone"),
    ],
)
def test_what_cannot_run_is_refused_before_a_folder_is_made(
    script: Path, asked: Options, error: type[errors.ResihpError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        prepare(asked)
    assert exit_code_of(caught.value) == 2
    assert not (script.parent / "home").exists()


def test_a_refused_job_ends_its_allocation_and_the_refusal_is_passed_on(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm would otherwise start it again and again."""
    ended: list[str] = []
    monkeypatch.setattr(run, "end_for_good", lambda job_id, slurm: ended.append(job_id))
    monkeypatch.setattr(run, "_slurm", lambda: None)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(LayoutError, match="tp=2"):
        run.run(options(layout={"tp": 2}))
    assert ended == [], "a job on this machine is none of Slurm's"
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST is not set"):
        run.run(options(local=False))
    assert ended == ["77"]


def with_checkpoint(request: RunRequest) -> Path:
    """Make the run's job one that has written a complete checkpoint."""
    request.save()
    folder = Path(request.checkpoint_folder)
    part = folder / "iteration-000004" / "part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"1234")
    write_manifest(part.parent, 4, [("part", 4)], "fingerprint", keep=2)
    return folder


def test_resume_says_whose_checkpoint_it_takes_and_takes_none_of_another_folder(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_checkpoint(prepare(options()))
    home = script.parent / "home"
    capsys.readouterr()
    prepare(options(resume=""))
    assert capsys.readouterr().err == (
        f"resihp: --resume: iteration 4 of job local-1, the newest in {home} that has a checkpoint, from {folder}\n"
    )
    other = options(job={"command": (*COMMAND, "--lr", "1")}, resume="")
    prepare(other)
    assert f"of job local-1 (which ran {shlex.join(COMMAND)}), the newest in" in capsys.readouterr().err
    prepare(options(checkpoint={"folder": str(folder)}, resume=""))
    assert capsys.readouterr().err == f"resihp: --resume: iteration 4, from {folder}\n"
    monkeypatch.setenv("RESIHP_HOME", str(script.parent / "another"))
    with pytest.raises(CheckpointError, match=rf"has a complete checkpoint; you have jobs in {home}: name one"):
        prepare(options(resume=""))
    assert prepare(options(resume="local-1")).checkpoint_folder == str(folder)
    assert capsys.readouterr().err == f"resihp: --resume: iteration 4 of job local-1, from {folder}\n"


def test_resume_finds_the_newest_checkpoint_or_the_one_of_the_job_named(script: Path) -> None:
    first, second, empty = (
        with_checkpoint(prepare(options())),
        with_checkpoint(prepare(options())),
        prepare(options()),
    )
    empty.save()
    assert prepare(options(resume="")).checkpoint_folder == str(second)
    resumed = prepare(options(resume="local-1"))
    assert resumed.checkpoint_folder == str(first)
    assert resumed.resume
    resumed.save()
    assert prepare(options(resume=resumed.job)).checkpoint_folder == str(first), "it went on there"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        prepare(options(resume="local-3"))


@pytest.mark.parametrize(
    ("command", "kind", "argv"),
    [
        ((sys.executable, "train.py", "-x"), "script", ("train.py", "-x")),
        ((sys.executable, "-u", "-B", "train.py"), "script", ("train.py",)),
        ((sys.executable, "-m", "train", "-m"), "module", ("train", "-m")),
        ((sys.executable, "-c", "pass"), "command", (sys.executable, "-c", "pass")),
        (("sh", "run.sh"), "command", ("sh", "run.sh")),
        (("train.py", "-x"), "script", ("train.py", "-x")),
        (("env", "./train.py"), "command", ("env", "./train.py")),
    ],
)
def test_kinds_of_commands(
    script: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], kind: str, argv: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    program = resolve(command, pytest.fail)
    assert (program.kind, program.argv) == (kind, argv)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun --nproc-per-node 4 train.py -x", "type: resihp run --nproc-per-node 4 train.py -x$"),
        ("/opt/bin/torchrun train.py", "type: resihp run train.py$"),
        ("python -u -m torch.distributed.run --nnodes=2 train.py", "type: resihp run --nnodes=2 train.py$"),
        ("python -m torch.distributed.launch train.py", "^torch.distributed.launch: .* docs/coming-from.md"),
        ("accelerate launch train.py", "^accelerate launch: .* docs/coming-from.md"),
        ("python3 -m accelerate.commands.launch train.py", "docs/coming-from.md"),
        ("deepspeed train.py", "docs/coming-from.md"),
        ("ft_launcher train.py", "docs/coming-from.md"),
        ("fabric run train.py", "docs/coming-from.md"),
        ("nosuch", "^nosuch: no such command; write a script as train.py"),
        ("nosuch.py", "^nosuch.py: no such script in"),
    ],
)
def test_commands_that_cannot_be_workers_are_refused(script: Path, command: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(command.split(), pytest.fail)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun train.py",
        "source env.sh && cd run; OMP_NUM_THREADS=8 exec /opt/bin/torchrun --nproc-per-node 8 train.py > log",
        "set -e\nexport A='x y'\nif true; then python -m torch.distributed.run train.py; fi",
        "module load cuda | cat; accelerate launch train.py",
    ],
)
def test_a_launcher_in_a_shell_command_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="each worker would start a group of its own"):
        resolve(("bash", "-lc", text), pytest.fail)


@pytest.mark.parametrize(
    "text", ["python train.py --launcher torchrun", "echo torchrun train.py", "echo 'not closed", "", "python -m"]
)
def test_other_shell_commands_are_not(text: str) -> None:
    assert resolve(("bash", "-c", text), pytest.fail).kind == "command"


def test_a_script_that_is_missing_is_named_before_anything_runs(script: Path) -> None:
    assert missing_script(("train.py", "nosuch.py")) == missing_script(("python", "train.py")) == ""
    assert missing_script(("nosuch.py",)) == missing_script(("python", "nosuch.py")) != ""


def test_options_of_python_that_would_be_lost_are_refused(script: Path) -> None:
    with pytest.raises(UsageError, match="-O: this option of python is not supported"):
        resolve((sys.executable, "-O", "train.py"), pytest.fail)


def fake_interpreter(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


def test_bare_python_without_resihp_falls_back_with_a_notice(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_interpreter(script.parent / "bin", "python")
    monkeypatch.setenv("PATH", str(script.parent / "bin"), prepend=os.pathsep)
    said: list[str] = []
    assert resolve(("python", "train.py"), said.append).interpreter == sys.executable
    assert len(said) == 1
    assert "does not have resihp" in said[0]


def test_named_interpreter_without_resihp_is_refused(script: Path) -> None:
    other = fake_interpreter(script.parent / "bin", "python3.9")
    with pytest.raises(UsageError, match="cannot import resihp; install it there"):
        resolve((str(other), "train.py"), pytest.fail)


def test_every_error_has_an_exit_code() -> None:
    assert all(EXIT_CODES[kind] in (1, 2, 3, 4, 5, 69, 70, 75, 93) for kind in EXIT_CODES)
    assert exit_code_of(errors.LedgerError("x")) == 2
    assert exit_code_of(errors.NotEnoughDevicesError("x")) == 5
    assert exit_code_of(errors.TrainingProgramError("x")) == 93
    assert exit_code_of(errors.ResihpError("x")) == 69


def command_line(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "resihp", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_help_is_quick_and_imports_nothing_heavy(fresh_home: Path) -> None:
    def used_s() -> float:
        """CPU time: the clock tells of whatever else runs here."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    times = []
    for _ in range(3):
        before = used_s()
        done = command_line(fresh_home, "--help")
        times.append(used_s() - before)
        assert done.returncode == 0
    assert "run" in done.stdout
    assert min(times) < 0.5
    heavy = "{'torch', 'pandas', 'sqlalchemy', 'pydantic', 'numpy'}"
    probe = f"import sys, resihp.wrapper.cli, resihp.wrapper.sinks.hooks; print({heavy} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    assert loaded.stdout == "set()\n"


def test_errors_are_one_line_on_stderr(script: Path) -> None:
    done = command_line(script.parent, "run", "--local", "--tp", "2", "--", *COMMAND)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("resihp: layout tp=2: ")
    assert done.stderr.count("\n") == 1


def test_python_path_with_modules_of_our_names_does_not_reach_us(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadows = script.parent / "shadows"
    shadows.mkdir()
    for name in ("db", "pydantic"):
        (shadows / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.setenv("PYTHONPATH", str(shadows))
    done = command_line(script.parent, "run", "--local", "--tp", "2", "--", *COMMAND)
    assert done.stderr.startswith("resihp: layout tp=2: ")
