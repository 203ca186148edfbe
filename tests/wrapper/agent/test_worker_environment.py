"""What workers find in their environment, against what torch's own launcher sets there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from resihp.protocol.messages import Start
from resihp.wrapper.agent.worker_environment import arguments_of, as_torchrun, environment_of
from resihp.wrapper.config.run_spec import Program
from tests.wrapper.run_requests import run_request

NODES = ("n1", "n1", "n2", "n2")


def start(rank: int, device: int, nodes: tuple[str, ...] = NODES) -> Start:
    return Start(
        rank=rank,
        node=nodes[rank],
        device=device,
        world_size=len(nodes),
        nodes=nodes,
        faults=(),
        checkpoint_folder="",
        checkpoint_every=0,
        resume=False,
    )


def test_all_that_torchrun_sets_is_there(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch.distributed.elastic.agent.server import local_elastic_agent

    theirs = set(re.findall(r'^ +"([A-Z_]+)": ', inspect.getsource(local_elastic_agent.LocalElasticAgent), re.M))
    assert len(theirs) > 10
    added = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711"}
    ours = environment_of(start(3, 1), run_request("6", tmp_path, nodes=2, gpus=2), {}, added, {})
    assert theirs <= ours.keys()
    assert (ours["GROUP_RANK"], ours["GROUP_WORLD_SIZE"], ours["LOCAL_WORLD_SIZE"]) == ("1", "2", "2")
    assert (ours["OMP_NUM_THREADS"], ours["TORCHELASTIC_USE_AGENT_STORE"]) == ("1", "False")


def test_what_the_user_sets_stays_but_for_another_jobs_place_to_meet(tmp_path: Path) -> None:
    inherited = {"OMP_NUM_THREADS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    inherited["MASTER_WEIGHTS"] = "/data/master"
    ours = environment_of(start(0, 0), run_request("6", tmp_path, nodes=2, gpus=2), inherited, {}, {"NET": "ib0"})
    assert (ours["OMP_NUM_THREADS"], ours["TORCH_NCCL_ASYNC_ERROR_HANDLING"], ours["NET"]) == ("8", "3", "ib0")
    assert {name for name in ours if name.startswith("MASTER_")} == {"MASTER_WEIGHTS"}


def test_a_process_that_comes_later_counts_devices_and_not_the_dead(tmp_path: Path) -> None:
    ours = as_torchrun(start(4, 1, (*NODES, "n1")), run_request("6", tmp_path, nodes=2, gpus=2))
    assert (ours["LOCAL_RANK"], ours["LOCAL_WORLD_SIZE"], ours["GROUP_RANK"]) == ("1", "2", "0")


def test_the_checkpoint_is_in_the_arguments_and_in_the_environment(tmp_path: Path) -> None:
    argv = ("train.py", "--resume={checkpoint}", "--ckpt-step={checkpoint_iteration}", "--tp", "{tp}")
    request = run_request("6", tmp_path, program=Program(kind="script", argv=argv, interpreter="python"))
    first = start(0, 0)
    assert arguments_of(first, request) == ("train.py", "--tp", "1"), "no checkpoint: nothing to resume from"
    assert "RESIHP_RESUME_FROM" not in environment_of(first, request, {}, {}, {})
    second = msgspec.structs.replace(first, resume_from="/ckpt/{tp} x", resume_iteration=40)
    assert arguments_of(second, request) == ("train.py", "--resume=/ckpt/{tp} x", "--ckpt-step=40", "--tp", "1")
    environment = environment_of(second, request, {}, {}, {})
    assert environment["RESIHP_RESUME_FROM"] == "/ckpt/{tp} x"
    assert environment["RESIHP_RESUME_ITERATION"] == "40"


def test_a_checkpoint_of_another_job_is_not_inherited(tmp_path: Path) -> None:
    inherited = {"RESIHP_RESUME_FROM": "/other/step_9", "RESIHP_RESUME_ITERATION": "9"}
    environment = environment_of(start(0, 0), run_request("6", tmp_path, nodes=2, gpus=2), inherited, {}, {})
    assert not inherited.keys() & environment.keys()
