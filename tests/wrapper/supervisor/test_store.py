"""The store's process: listens where it says, is restarted, ends with its owner."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from resihp.errors import ResihpError
from wrapper.supervisor.store import StoreProcess

distributed = pytest.importorskip("torch.distributed", reason="the store is torch's: pip install 'resihp[train]'")


def test_store_serves_is_restarted_when_killed_and_ends_when_cancelled(tmp_path: Path) -> None:
    async def main() -> None:
        listening: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        store = StoreProcess("127.0.0.1", sys.executable, tmp_path / "store.log")
        task = asyncio.create_task(store.run(lambda host, port: listening.put_nowait((host, port))))
        for value in ("first", "second"):
            async with asyncio.timeout(60):
                host, port = await listening.get()
            client = distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
            client.set("key", value)
            assert client.get("key") == value.encode()
            (child,) = [p for p in psutil.Process().children() if "resihp.worker.store" in p.cmdline()]
            addresses = {connection.laddr.ip for connection in child.net_connections() if connection.status == "LISTEN"}
            assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
            if value == "first":
                os.kill(child.pid, signal.SIGKILL)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not child.is_running()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port))

    asyncio.run(main())


def test_store_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    async def main() -> None:
        store = StoreProcess("127.0.0.1", "/bin/false", tmp_path / "store.log")
        with pytest.raises(ResihpError, match=r"exited with status 1 before it listened.*store\.log"):
            await store.run(lambda host, port: None)

    asyncio.run(main())
