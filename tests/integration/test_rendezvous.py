"""What stands between two ranks that look for each other, and who could stand there instead."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import EXAMPLE, TINY, Job
from tests.integration.test_departure import committed

torch = pytest.importorskip("torch")
RANKS = 4
VALIDATE = b"\x00" + (0x3C85F7CE).to_bytes(4, sys.byteorder)
"""How torch's store is spoken to (torch/csrc/distributed/c10d/TCPStoreBackend.hpp): queries are bytes of an enum."""
PING, NUMBER_OF_KEYS = b"\x0d", b"\x07"


def listeners(job: Job) -> dict[tuple[str, int], set[str]]:
    """Every TCP listener of the job's processes, as the kernel has it, and the command lines that hold it."""
    found: dict[tuple[str, int], set[str]] = {}
    for process in job.processes():
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                found.setdefault(tuple(each.laddr), set()).add(" ".join(process.cmdline()))
    return found


def keys_told_to_a_stranger(address: tuple[str, int]) -> int | None:
    """How many keys somebody without the job's key is told of; None: nothing there speaks as torch's store does."""
    nonce = b"\x7f\x01\x02\x03"
    with socket.create_connection(address, timeout=2) as stranger:
        stranger.sendall(VALIDATE + PING + nonce + NUMBER_OF_KEYS)
        answer = b""
        with suppress(OSError):  # nothing more comes, or it has hung up
            while chunk := stranger.recv(100):
                answer += chunk
                if len(answer) == len(nonce) + 8:
                    break
    return int.from_bytes(answer[4:], sys.byteorder) if answer.startswith(nonce) else None


def test_the_stranger_of_these_tests_knows_how_torchs_store_is_asked() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=10))
    before = keys_told_to_a_stranger(("127.0.0.1", store.port))
    store.set("epoch-1/world/0/0", "an address")
    assert keys_told_to_a_stranger(("127.0.0.1", store.port)) == (before or 0) + 1


def test_nobody_without_the_key_is_told_an_address_or_can_change_one(job: Job) -> None:
    """A stranger on the same network tries every port that a job in training has open.

    Who lists the rendezvous, and rewrites an address in it, stands between two ranks.
    """
    job.train(iterations=2000, nodes=2, gpus=2, tp=1, pp=2)
    job.until(lambda: committed(job) >= 2, timeout_s=120)
    found = listeners(job)
    told = {address: keys_told_to_a_stranger(address) for address in found}
    assert set(told.values()) == {None}, told
    gloo = {address for address, held in found.items() if all(re.search(r" rank \d", line) for line in held)}
    assert len(gloo) == RANKS, f"a worker listens for its peers, and for nobody else: {found}"
    (others,) = (held for address, held in found.items() if address not in gloo)
    assert all("-m resihp" in line or " guardian run " in line for line in others), others
    before = committed(job)
    job.until(lambda: committed(job) > before)  # and it trains on
    assert job.process is not None
    job.process.terminate()
    job.wait(60)


def test_without_a_supervisor_ranks_meet_in_torchruns_store(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLE), "--pp", "2", *TINY, "--iterations", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "iteration 2/2 | loss" in done.stdout
