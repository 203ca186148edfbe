"""A line of torchrun's as `resihp run`: what each option becomes, and what is said or refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resihp.errors import UsageError
from resihp.wrapper.cli import app
from resihp.wrapper.commands import run
from resihp.wrapper.commands.run import Options, prepare
from resihp.wrapper.config.torchrun_options import IGNORED_REASONS, REFUSAL_REASONS

HONOURED = {"nnodes", "nproc_per_node", "max_restarts", "standalone", "module", "no_python", "run_path"}
HERE = "resihp: not in a Slurm allocation: runs on this machine, as with --standalone"


class Typed:
    """What `resihp run` makes of a line, without running it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_on: list[Options] = []
        monkeypatch.setattr(run, "run", lambda options: self.passed_on.append(options) or 0)

    def __call__(self, line: str) -> tuple[Options, str]:
        outcome = CliRunner().invoke(app, ["run", *line.split()])
        if isinstance(outcome.exception, UsageError):
            raise outcome.exception
        assert outcome.exit_code == 0, outcome.output
        return self.passed_on.pop(), outcome.stderr


@pytest.fixture
def typed(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    (fresh_home / "train.py").write_text("")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return Typed(monkeypatch)


def job_of(options: Options) -> dict[str, Any]:
    return {key: value for key, value in options.job.items() if value is not None and key != "command"}


def test_every_option_of_torchrun_has_one_fate(typed: Typed) -> None:
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    fates = [*HONOURED, *IGNORED_REASONS, *REFUSAL_REASONS]
    assert {action.dest for action in actions} <= set(fates), "older releases of torch have fewer options"
    assert len(fates) == len(set(fates))
    for action in actions:
        if action.dest not in IGNORED_REASONS:
            continue
        for spelling in action.option_strings:
            said = typed(f"--standalone {spelling} 1 train.py")[1]
            assert f"not needed: --{action.dest.replace('_', '-')}: {IGNORED_REASONS[action.dest]}" in said


@pytest.mark.parametrize(
    ("line", "local", "job"),
    [
        ("--standalone train.py", True, {"nodes": 1}),
        ("--standalone --nnodes 1 --nproc-per-node 2 train.py", True, {"nodes": 1, "gpus_per_node": 2}),
        ("--standalone --nproc_per_node=2 train.py", True, {"nodes": 1, "gpus_per_node": 2}),
        ("--local --nnodes 4 train.py", True, {"nodes": 4}),
        ("--local --nnodes 2:4 train.py", True, {"nodes": 4, "min_nodes": 2}),
        ("--local --nproc-per-node cpu train.py", True, {"gpus_per_node": len(os.sched_getaffinity(0))}),
        ("--nnodes 4 --nproc-per-node 8 train.py", False, {"nodes": 4, "gpus_per_node": 8}),
    ],
)
def test_nodes_and_workers(typed: Typed, line: str, local: bool, job: dict[str, int]) -> None:
    options, said = typed(line)
    assert (options.local, job_of(options), said) == (local, job, "")


def test_numbers_reach_the_controllers_settings(typed: Typed) -> None:
    settings = prepare(typed("--local --nnodes 2:4 --nproc-per-node 2 --max-restarts 3 train.py")[0]).settings
    assert (settings.nodes, settings.min_nodes, settings.gpus_per_node, settings.max_restarts) == (4, 2, 2, 3)


@pytest.mark.parametrize("line", ["--nproc-per-node 4 train.py", "--nnodes 1:1 --nproc-per-node 4 train.py"])
def test_outside_of_slurm_one_node_is_this_machine(typed: Typed, line: str) -> None:
    options, said = typed(line)
    assert options.local
    assert (options.job["nodes"], options.job["gpus_per_node"]) == (1, 4)
    assert said.startswith(HERE)


def test_in_slurm_the_nodes_are_those_of_the_allocation(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for devices in ("gpu", "auto"):
        options, said = typed(f"--nproc-per-node {devices} --max-restarts 3 train.py")
        assert (options.local, job_of(options), said) == (False, {}, "")
        assert options.adapt["max_restarts"] == 3


def test_gpus_are_counted_on_this_machine(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3")
    assert typed("--standalone --nproc-per-node gpu train.py")[0].job["gpus_per_node"] == 3


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("train.py --lr 1 -- -m", ("train.py", "--lr", "1", "--", "-m")),
        ("-- train.py --lr 1", ("train.py", "--lr", "1")),
        ("python train.py", ("python", "train.py")),
        ("-m train.main --lr 1", ("python", "-m", "train.main", "--lr", "1")),
        ("--module train.main", ("python", "-m", "train.main")),
        ("--no-python ./train.py --lr 1", ("env", "./train.py", "--lr", "1")),
        ("--no_python bash train.sh", ("bash", "train.sh")),
        ("--run-path train", ("python", "train")),
    ],
)
def test_words_after_the_options_are_the_script(typed: Typed, line: str, command: tuple[str, ...]) -> None:
    options = typed(f"--standalone {line}")[0]
    assert options.job["command"] == command
    words = line.split()
    assert options.words == tuple(words[1:] if words[0].startswith("-") else words)


def test_what_is_not_needed_is_one_line(typed: Typed) -> None:
    line = "--standalone --rdzv-endpoint n1:29500 --tee 3 --rdzv_backend c10d --log-dir logs train.py"
    assert typed(line)[1] == (
        "resihp: not needed: --rdzv-backend, --rdzv-endpoint: resihp finds the nodes and a free port itself; "
        "--log-dir, --tee: each rank has its own log (resihp logs --rank R -f), and rank 0's output is shown here\n"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--logs-specs theirs train.py", "--logs-specs theirs: resihp writes the logs itself"),
        ("--shutdown-timeout 60 train.py", "--shutdown-timeout 60: a worker gets SIGKILL 3 s after SIGTERM"),
        ("--virtual_local_rank train.py", "--virtual-local-rank: LOCAL_RANK is the number of the worker's GPU"),
        ("--standalone --nnodes 2 train.py", "--standalone: is one node, not 2"),
        ("--standalone --nodes 2 train.py", "--standalone: is one node, not 2"),
        ("--nodes 2 --nnodes 2 train.py", "--nodes and --nnodes: two names"),
        ("--gpus-per-node 2 --nproc-per-node 2 train.py", "--gpus-per-node and --nproc-per-node: two names"),
        *((f"--nnodes {nodes} train.py", f"--nnodes {nodes}: a number of nodes") for nodes in ("0", "4:2", "2:", "a")),
        *((f"--nnodes {nodes} train.py", f"--nnodes {nodes}: a number of nodes") for nodes in (":2", "1:2:3", "0:2")),
        ("--standalone --nproc-per-node xpu train.py", "--nproc-per-node xpu: a number, auto, gpu or cpu"),
        ("--standalone -m", "-m: nothing to run"),
        ("--standalone -m --no-python train", "-m and --no-python: say in different ways"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(typed: Typed, line: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        typed(line)
    assert str(refusal.value).startswith(message)


def test_a_module_s_job_is_resumed_by_the_line_that_was_typed(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--standalone --nproc-per-node 2 -m train --lr 1"
    monkeypatch.setattr("sys.argv", ["resihp", "run", *line.split()])
    request = prepare(typed(line)[0])
    assert request.command == ("python", "-m", "train", "--lr", "1")
    assert request.go_on == "resihp run --standalone --nproc-per-node 2 -m --resume local-1 -- train --lr 1"
    assert typed(request.go_on.removeprefix("resihp run "))[0].job["command"] == request.command
