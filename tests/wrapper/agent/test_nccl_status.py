"""The answer of NCCL's RAS service, as evidence of a hang, from a server that speaks its protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from resihp.wrapper.agent.hangs import nccl_status as module
from resihp.wrapper.agent.hangs.nccl_status import MAX_TEXT, nccl_status

ANSWER = """\
NCCL version 2.27.3 compiled with CUDA 12.9

Job summary
===========

  Nodes  Processes
      2         16

Errors
======

#0-0 (5a8f6a3e) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 1 managed by process 4711 on node n2
"""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def ask(handler: Handler, host: str = "127.0.0.1") -> str:
    async def run() -> str:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await nccl_status({"NCCL_RAS_ADDR": f"{host}:{port}"})

    return asyncio.run(run())


def service(answer: str) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"CLIENT PROTOCOL 2\n"
        writer.write(b"SERVER PROTOCOL 3\n")
        assert await reader.readline() == b"TIMEOUT 3\n"
        writer.write(b"OK\n")
        assert await reader.readline() == b"STATUS\n"
        writer.write(answer.encode())
        await writer.drain()
        writer.close()

    return handle


def test_the_problems_come_first() -> None:
    assert ask(service(ANSWER)).splitlines()[0] == "Errors"
    assert "Rank 5 -- GPU 1 managed by process 4711 on node n2" in ask(service(ANSWER))


def test_an_answer_without_problems_is_kept_from_its_end() -> None:
    assert ask(service("Job summary\n" + "x" * 2 * MAX_TEXT + "\nOK\n")).endswith("x\nOK")


def test_a_long_answer_is_cut_and_has_no_control_characters() -> None:
    text = ask(service("Errors\n" + "\x1b[2Jy" * 2 * MAX_TEXT))
    assert len(text) == MAX_TEXT
    assert "\x1b" not in text


async def greets_otherwise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH\r\n")
    await reader.read()


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def never_ends_its_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"x" * (1 << 18))
    await reader.read()


@pytest.mark.parametrize("handler", [greets_otherwise, says_nothing, never_ends_its_line])
def test_any_other_service_gives_no_text(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    monkeypatch.setattr(module, "CONNECT_S", 0.3)
    assert ask(handler) == ""


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:99999", ""])
def test_without_a_service_there_is_no_text(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEFAULT_ADDRESS", ("127.0.0.1", 1))
    assert asyncio.run(nccl_status({"NCCL_RAS_ADDR": address})) == ""
