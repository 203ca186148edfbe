"""Ask NCCL's RAS service how the communicators of a job stand, as evidence of a hang.

NCCL 2.24 and later runs this service in each process, unless NCCL_RAS_ENABLE is 0: threads that know of all processes
of the job, and answer on a port of their node. The answer lists processes that do not respond, and the ranks that have
started fewer collectives than others. It is evidence only and decides nothing: the service may report no problem while
a collective hangs. The protocol is that of the program `ncclras`: lines of text. Called by
`resihp.wrapper.agent.process`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress

ADDRESS_VARIABLE = "NCCL_RAS_ADDR"
DEFAULT_ADDRESS = ("localhost", 28028)
PROTOCOL_VERSION = 2
CONNECT_S, ANSWER_S = 1.0, 3.0
"""Time to connect, and time for the answer, for which the service asks all processes of the job."""
MAX_ANSWER_BYTES = 1 << 20
MAX_TEXT = 6000
"""Characters of the answer that are kept, from its first problem on."""
_PROBLEMS = re.compile(r"^(?:Errors|Warnings)\b", re.MULTILINE)


async def nccl_status(environment: Mapping[str, str]) -> str:
    """Return the answer of the service on this node, problems first; empty if there is none. `environment`: that of
    the workers, in which the user may have set another address."""
    host, port = _address(environment)
    with suppress(OSError, TimeoutError, ValueError):
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port)
        try:
            async with asyncio.timeout(ANSWER_S + CONNECT_S):
                return _problems_first(await _ask(reader, writer))
        finally:
            writer.close()
    return ""


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Return the answer to a status request; empty if this is no RAS service."""
    writer.write(f"CLIENT PROTOCOL {PROTOCOL_VERSION}\n".encode())
    if not (await reader.readline()).upper().startswith(b"SERVER PROTOCOL "):
        return ""
    writer.write(f"TIMEOUT {ANSWER_S:.0f}\n".encode())
    if (await reader.readline()).strip().upper() != b"OK":
        return ""
    writer.write(b"STATUS\n")
    answer = bytearray()
    while len(answer) < MAX_ANSWER_BYTES and (part := await reader.read(1 << 16)):
        answer += part
    return answer.decode(errors="replace")


def _problems_first(answer: str) -> str:
    text = "".join(letter for letter in answer if letter.isprintable() or letter == "\n").strip()
    problem = _PROBLEMS.search(text)
    begin = problem.start() if problem is not None else max(0, len(text) - MAX_TEXT)
    return text[begin : begin + MAX_TEXT]


def _address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return where the service listens for clients."""
    given = environment.get(ADDRESS_VARIABLE, "")
    host, separator, port = given.rpartition(":")
    if separator and port.isdecimal() and int(port) < 1 << 16:
        return host.strip("[]") or DEFAULT_ADDRESS[0], int(port)
    return DEFAULT_ADDRESS
