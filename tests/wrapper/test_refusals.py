"""What a running job refuses on its socket: strangers, twins and agents of the past. It goes on."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from resihp.errors import ProtocolError, UsageError
from resihp.protocol import framing
from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.framing import Envelope
from resihp.wrapper.commands.operate import inject
from resihp.wrapper.job_folder import SupervisorFile
from tests.wrapper.conftest import SOON, StubJob
from tests.wrapper.test_processes import FOREVER, exits, running


async def throw(address: SupervisorFile, content: bytes) -> None:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(content)
    try:
        while await reader.read(1000):
            pass
    except ConnectionError:
        pass
    writer.close()


async def answer_to(address: SupervisorFile, key: bytes, message: msgspec.Struct) -> list[object]:
    """What the supervisor says to this until it closes the connection."""
    receives = Envelope[m.AgentOrder]
    channel: SecureChannel[Envelope[m.AgentOrder]] = await SecureChannel.connect(
        address.host, address.port, key, receives
    )
    await channel.send(message)
    said: list[object] = []
    async with asyncio.timeout(5):
        while (envelope := await channel.recv()) is not None:
            assert (envelope.number, envelope.acknowledged) == (0, 0)
            said.append(envelope.message)
    channel.close()
    return said


def join(node: str, epoch: int) -> Envelope[m.AgentMessage]:
    return Envelope(message=m.Join(node=node, host="elsewhere", pid=1, devices=1, epoch=epoch))


def test_job_goes_on_while_bad_frames_are_thrown_at_it(stub_job: StubJob) -> None:
    stub_job.start(FOREVER)
    running(stub_job)
    address = stub_job.job.supervisor()
    assert address is not None
    assert address.host == "127.0.0.1"
    greeting = framing.MAGIC + os.urandom(32)
    for content in (b"GET / HTTP/1.1\r\n\r\n", greeting + b"\xff" * 20, greeting + bytes(12) + os.urandom(32)) * 5:
        asyncio.run(throw(address, content))
    with pytest.raises(ProtocolError):
        asyncio.run(SecureChannel.connect(address.host, address.port, bytes(32), m.AgentOrder))
    for message in (join("n1", 0), join("n1", 1), join("n1", 7), join("n9", 0)):
        assert asyncio.run(answer_to(address, stub_job.job.key, message)) == [m.Release(grace_s=0.0)]
    gone = m.Exited(rank=0, pid=1, status=0)
    for strange in (gone, Envelope(number=1, message=gone), join("n1", 1).message, Envelope[m.AgentMessage]()):
        assert isinstance(strange, msgspec.Struct)
        assert asyncio.run(answer_to(address, stub_job.job.key, strange)) == []
    assert exits(stub_job) == {}

    log = stub_job.log("supervisor.log")
    for reason in ("garbage", "oversize", "wrong key"):
        assert reason in log
    assert len(log.splitlines()) <= 10, "refusals are not told without end"

    with pytest.raises(UsageError, match="there is no rank 5"):
        inject.inject(None, "kill", 5, None)
    with pytest.raises(UsageError, match="disconnect happens to a node, not to a rank"):
        inject.inject(None, "disconnect", 0, None)
    with pytest.raises(UsageError, match="unknown kind"):
        inject.inject(None, "maim", 0, None)
    with pytest.raises(UsageError, match="kill happens to a rank or a node, not to a link"):
        inject.inject(None, "kill", None, None, link="n1-n2")
    with pytest.raises(UsageError, match="RESIHP_EMULATED_LINK_MS=20 resihp run"):
        inject.inject(None, "slow", None, None, 0.5, "n1-n2")
    with pytest.raises(UsageError, match="--link n1 is not two nodes"):
        inject.inject(None, "slow", None, None, 0.5, "n1")
    with pytest.raises(UsageError, match="name one target"):
        inject.inject(None, "slow", 0, None, 0.5, "n1-n2")
    assert stub_job.process is not None
    stub_job.process.send_signal(signal.SIGTERM)
    assert stub_job.wait() == 143
    with pytest.raises(UsageError, match="not running"):
        inject.inject(None, "kill", 0, None)


def test_silent_node_that_is_given_up_is_ended(stub_job: StubJob) -> None:
    """Stopped as a whole, its sockets stay open: only its silence tells, and nothing of it may stay."""
    stub_job.start(FOREVER, nodes=2, environment=SOON)
    workers = running(stub_job, 2)
    assert "injected" in inject.inject(None, "stop", None, "n2")["text"]
    stub_job.until(lambda: all(p.status() == "stopped" for p in stub_job.processes("--node n2")))
    assert stub_job.wait(20) == 5, stub_job.stderr
    assert "node n2: silent" in stub_job.stderr
    assert len(workers) == 2
    assert stub_job.processes() == []
