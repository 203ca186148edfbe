"""An agent that comes in answer to a request for another node finds the supervisor by itself, and says whose it is."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.framing import Envelope
from resihp.protocol.serving import serve
from resihp.wrapper.config.run_spec import Program, RunRequest
from resihp.wrapper.job_folder import SupervisorFile, write_private
from tests.wrapper.conftest import StubJob
from tests.wrapper.run_requests import run_request


def request_of(stub_job: StubJob) -> RunRequest:
    job = stub_job.job
    return run_request(
        job.name,
        job.folder,
        gpus=2,
        program=Program(kind="command", argv=("sleep", "60"), interpreter=sys.executable, preload="json"),
        command=("sleep", "60"),
        cwd=str(stub_job.folder),
    )


def command(run_file: Path) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-m",
        "resihp.wrapper.agent.process",
        "--run",
        str(run_file),
        "--node",
        "n9",
        "--lease",
        "3",
    ]


def test_it_connects_to_whom_the_jobs_folder_names_and_tells_its_lease(stub_job: StubJob) -> None:
    run_file = request_of(stub_job).save()

    async def play() -> m.Join:
        joined: asyncio.Future[m.Join] = asyncio.get_running_loop().create_future()

        async def connected(channel: SecureChannel[Envelope[m.AgentMessage]]) -> None:
            first = await channel.recv()
            assert first is not None
            assert isinstance(first.message, m.Join)
            joined.set_result(first.message)
            channel.post(Envelope(message=m.Release(grace_s=0.0)))
            await channel.recv()

        listener = socket.create_server(("127.0.0.1", 0))
        server = await serve(listener, stub_job.job.key, Envelope[m.AgentMessage], connected, lambda peer, why: None)
        address = SupervisorFile(host="127.0.0.1", port=listener.getsockname()[1], pid=1)
        write_private(stub_job.job.supervisor_file, msgspec.json.encode(address))
        agent = await asyncio.create_subprocess_exec(*command(run_file))
        try:
            found = await asyncio.wait_for(joined, 30)
            await asyncio.wait_for(agent.wait(), 30)
        finally:
            server.close()
        return found

    join = asyncio.run(play())
    assert (join.node, join.lease, join.devices) == ("n9", 3, 2)


def test_without_a_supervisor_to_be_found_it_says_so(stub_job: StubJob) -> None:
    done = subprocess.run(command(request_of(stub_job).save()), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "supervisor.json does not have the supervisor's address" in done.stderr
