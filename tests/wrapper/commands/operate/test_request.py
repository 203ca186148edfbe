"""What is asked of a supervisor that is just ending, or is no supervisor of ours."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from resihp.errors import ResihpError
from resihp.protocol.messages import AskCheckpoint
from resihp.wrapper.commands.operate.request import ask
from resihp.wrapper.job_folder import create_local_job, take_lock, write_private


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_one_that_ends_meanwhile_is_told_with_the_next_command(fresh_home: Path, said: bytes) -> None:
    job = create_local_job()
    lock = take_lock(job)
    assert lock is not None

    async def asked() -> None:
        async def ends(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(ends, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            address = {"host": "127.0.0.1", "port": port, "pid": 1}
            write_private(job.supervisor_file, json.dumps(address).encode())
            await ask(job, AskCheckpoint())

    try:
        with pytest.raises(ResihpError) as refused:
            asyncio.run(asked())
    finally:
        os.close(lock)
    assert str(refused.value).startswith("job local-1: the supervisor ended before it answered (")
    assert str(refused.value).endswith("; resihp status local-1")
