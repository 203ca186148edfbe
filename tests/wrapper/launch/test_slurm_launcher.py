"""The step that starts agents: what srun is told, what its messages mean, who watches it. srun itself is pretended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.errors import ResihpError
from resihp.wrapper.config.run_spec import Program, RunRequest, SlurmRequest
from resihp.wrapper.job_folder import create_slurm_job
from resihp.wrapper.launch.slurm_launcher import Messages, SlurmLauncher, indices, step_command, step_environment
from tests.wrapper.run_requests import run_request

NODES = ("n1", "n2", "n3", "n7")


@pytest.fixture
def request_(fresh_home: Path) -> RunRequest:
    job = create_slurm_job("77", 0)
    slurm = SlurmRequest(
        job_id="77",
        cluster="fake",
        batch_node="n1",
        host_names={},
        cpus=8,
        gpus=2,
    )
    made = run_request(
        job.name,
        job.folder,
        nodes=4,
        gpus=2,
        settings={"node_names": NODES},
        program=Program(kind="command", argv=("true",), interpreter=sys.executable),
        command=("true",),
        cwd=str(fresh_home),
        slurm=slurm,
    )
    made.save()
    return made


def test_one_step_starts_an_agent_on_each_node_with_all_that_is_there(request_: RunRequest) -> None:
    assert request_.slurm is not None
    slurm = msgspec.structs.replace(request_.slurm, step_extra=("--network=instances=2",))
    command = step_command(msgspec.structs.replace(request_, slurm=slurm), "10.0.0.1:4000")
    options, agent = command[1 : command.index(sys.executable)], command[command.index(sys.executable) :]
    assert command[0] == "srun"
    for option in (
        *(
            "--jobid=77",
            "--nodes=4",
            "--ntasks=4",
            "--network=instances=2",
            "--ntasks-per-node=1",
            "--nodelist=n1,n2,n3,n7",
            "--cpus-per-task=8",
        ),
        *("--gres=gpu:2", "--mem=0", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--cpu-bind=none"),
        *("--mpi=none", "--input=none", "--export=ALL", f"--output={request_.of_job.logs}/%N.agent.log"),
    ):
        assert option in options
    assert agent == [
        *[sys.executable, "-P", "-m", "resihp.wrapper.agent.process", "--run", str(request_.of_job.run_file)],
        *["--node", "-", "--supervisor", "10.0.0.1:4000"],
    ]


def test_the_step_of_an_arrays_element_is_asked_for_by_number(request_: RunRequest) -> None:
    """srun of 22.05: Invalid numeric value "77_3" for --jobid."""
    assert request_.slurm is not None
    element = msgspec.structs.replace(request_.slurm, job_id="77_3", number="79")
    command = step_command(msgspec.structs.replace(request_, slurm=element), "10.0.0.1:4000")
    assert "--jobid=79" in command


def test_nothing_that_slurm_set_for_the_batch_script_bends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ("SLURM_NNODES", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE", "SLURM_JOB_NODELIST")
    options = ("SLURM_EXPORT_ENV", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SRUN_CONTAINER", "SBATCH_NO_KILL")
    kept = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT", "SLURM_ARRAY_TASK_ID")
    for name in (*stale, *options, *kept, "NCCL_DEBUG"):
        monkeypatch.setenv(name, "x")
    found = step_environment()
    assert found.keys().isdisjoint({*stale, *options, "PYTHONPATH"})
    assert found.keys() >= {*kept, "NCCL_DEBUG"}


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("srun: error: n2: task 1: Exited with exit code 3", [("n2", 3)]),
        ("srun: error: n[2-3]: tasks 1-2: Exited with exit code 1", [("n2", 1), ("n3", 1)]),
        ("srun: error: n[1,7]: tasks 0,3: Exited with exit code 1", [("n1", 1), ("n7", 1)]),
        ("srun: error: n7: task 3: Killed", [("n7", -9)]),
        ("srun: error: n7: task 3: Out Of Memory", [("n7", -9)]),
        ("srun: error: n7: task 3: Segmentation fault (core dumped)", [("n7", -11)]),
        ("srun: error: task 1 launch failed: Slurmd could not connect IO", [("n2", 127)]),
        ("srun: error: n9: task 9: Exited with exit code 1", []),
        ("srun: error: n2: task 999999999999-3: Exited with exit code 1", []),
    ],
)
def test_ends_of_agents_are_read_off_srun(line: str, ends: list[tuple[str, int]]) -> None:
    (message,) = Messages(NODES).feed(line.encode() + b"\n")
    assert list(message.ends) == ends


@pytest.mark.parametrize(
    "line",
    [
        "srun: cluster configuration lacks support for cpu binding",
        "srun: error: Node failure on n3",
        "srun: Force Terminated StepId=7.0",
        "srun: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-21T12:20:23 DUE TO TIME LIMIT ***",
        "",
    ],
)
def test_opinions_of_slurm_and_farewells_are_not_passed_on(line: str) -> None:
    assert Messages(NODES).feed(line.encode() + b"\n") == []


def test_messages_may_come_in_pieces_and_hold_anything() -> None:
    messages = Messages(NODES)
    assert messages.feed(b"srun: error: n2: ta") == []
    (message,) = messages.feed(b"sk 1: Killed\nsrun: \xff")
    assert message.ends == (("n2", -9),)
    (message,) = messages.feed(b" odd\n")
    assert message.ends == ()
    assert "odd" in message.text


@pytest.mark.parametrize(("text", "found"), [("0", [0]), ("0-2,5", [0, 1, 2, 5]), ("x,3-,-4", [3]), ("5-2", [])])
def test_indices(text: str, found: list[int]) -> None:
    assert indices(text) == found


# --- the process --------------------------------------------------------------------------------------------------


class Watched:
    """A launcher with an srun of ours, and what it tells."""

    def __init__(self, launcher: SlurmLauncher, ends: dict[str, int | None], said: list[str]) -> None:
        self.launcher, self.ends, self.said = launcher, ends, said

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def step(request: RunRequest, script: str) -> AsyncIterator[Watched]:
    srun = Path(request.folder) / "srun"
    srun.write_text(f"#!/bin/sh\n{script}\n")
    srun.chmod(0o755)
    ends: dict[str, int | None] = {}
    said: list[str] = []
    launcher = SlurmLauncher(request, "127.0.0.1", lambda level, text: said.append(text), srun=str(srun))
    await launcher.start(4000, ends.__setitem__)
    yield Watched(launcher, ends, said)


def test_the_step_is_watched_to_its_end(request_: RunRequest) -> None:
    async def main() -> None:
        script = "echo 'srun: error: n3: task 2: Exited with exit code 1' >&2\nread line < gate"
        os.mkfifo("gate")
        async with step(request_, script) as watched:
            await watched.until(lambda: watched.ends)
            assert watched.ends == {"n3": 1}
            assert not await watched.launcher.wait(0)
            Path("gate").write_text("\n")
            assert await watched.launcher.wait(20)

    asyncio.run(main())


def test_what_ends_a_job_at_once_is_told_all_the_same(request_: RunRequest) -> None:
    async def main() -> None:
        script = "echo 'srun: error: n3: task 2: Exited with exit code 3' >&2\nread line < gate"
        os.mkfifo("gate")
        async with step(request_, script) as watched:
            await watched.until(lambda: watched.ends)
            for node in watched.launcher.nodes:
                watched.launcher.kill(node)
            assert len(watched.said) == 1
            assert watched.said[0].startswith("node n3: ")
            Path("gate").write_text("\n")

    asyncio.run(main())


def test_a_step_whose_nodes_are_all_given_up_is_not_waited_for(request_: RunRequest) -> None:
    """srun waits for the agents of dead nodes, too."""

    async def main() -> None:
        os.mkfifo("gate")
        async with step(request_, "read line < gate") as watched:
            *nodes, last = watched.launcher.nodes
            for node in nodes:
                watched.launcher.kill(node)
            assert not await watched.launcher.wait(0.05)
            watched.launcher.kill(last)
            assert await watched.launcher.wait(0.05)
            Path("gate").write_text("\n")

    asyncio.run(main())


def test_nodes_without_the_jobs_folder_are_told_of_once(request_: RunRequest) -> None:
    async def main() -> None:
        script = (
            "echo 'srun: error: task 1 launch failed: Slurmd could not connect IO' >&2\n"
            "echo 'srun: error: task 3 launch failed: Slurmd could not connect IO' >&2\n"
            "echo 'srun: error: n3: task 2: Exited with exit code 2' >&2\n"
        )
        async with step(request_, script) as watched:
            await watched.until(lambda: len(watched.said) == 2)
            shared = "put RESIHP_HOME into a folder that all nodes share"
            assert watched.said == [
                f"nodes n2, n7: cannot open {request_.of_job.logs} there; {shared}",
                f"node n3: cannot run {sys.executable} there; install resihp in a folder that all nodes share",
            ]
            assert watched.ends == {"n2": 127, "n7": 127, "n3": 2}

    asyncio.run(main())


def test_a_step_that_is_refused_ends_all_agents_with_what_srun_said(request_: RunRequest) -> None:
    async def main() -> None:
        refusal = "srun: error: Unable to create step for job 77: More processors requested than permitted"
        async with step(request_, f"echo '{refusal}' >&2; exit 1") as watched:
            await watched.until(lambda: len(watched.ends) == 4)
            assert watched.ends == dict.fromkeys(NODES, 1)
            assert watched.said == [refusal]

    asyncio.run(main())


def test_a_missing_srun_is_told(request_: RunRequest) -> None:
    launcher = SlurmLauncher(request_, "127.0.0.1", srun="/gone/srun")
    with pytest.raises(ResihpError, match="/gone/srun: No such file or directory; is Slurm on the batch script's PATH"):
        asyncio.run(launcher.start(4000, lambda node, status: None))


def test_another_supervisor_finds_the_step_again(request_: RunRequest) -> None:
    """srun lives in a session of its own; the next supervisor knows it by its number and its command line."""

    async def main() -> None:
        os.mkfifo("gate")
        async with step(request_, "read line < gate; echo 'srun: error: n2: task 1: Killed' >&2") as watched:
            pid = int((request_.of_job.journal_file.parent / "srun.pid").read_text())
            assert os.getsid(pid) == pid
            second: dict[str, int | None] = {}
            heir = SlurmLauncher(request_, "127.0.0.1")
            assert await heir.wait(0), "it knows of no step yet"
            heir.adopt("n1", 1, second.__setitem__)
            heir.adopt("n2", 2, second.__setitem__)
            assert not await heir.wait(0)
            Path("gate").write_text("\n")
            assert await heir.wait(20)
            await watched.until(lambda: second)
            assert second == {"n2": -signal.SIGKILL}

    asyncio.run(main())


def test_a_number_that_another_process_has_by_now_is_not_taken_for_the_step(request_: RunRequest) -> None:
    async def main() -> None:
        place = request_.of_job.journal_file.parent
        (place / "srun.pid").write_text(f"{os.getpid()}\n")
        heir = SlurmLauncher(request_, "127.0.0.1")
        heir.adopt("n1", 1, lambda node, status: None)
        assert await heir.wait(0)

    asyncio.run(main())
