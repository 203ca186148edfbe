"""Ranks as forks of one warm process, for benchmarks: torch and megatron-core are imported once.

`answers` forks them and collects what they return. The forking process must have no threads, so the store that the
ranks meet in lives in a fork of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

dist: Any = torch.distributed
Address = tuple[str, int]
Work = Callable[[int, Address], Any]
"""What a rank does, given its number and the store's address; returns something that JSON can carry."""


def answers(work: Work, world: int, limit_s: float) -> list[Any]:
    """What each of `world` ranks returned. Exits with the first rank's traceback if one fails."""
    store, port = _start_store()
    pids = {store}
    pipes: list[int] = []
    try:
        for rank in range(world):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                _rank(work, rank, ("127.0.0.1", port), writing)
            os.close(writing)
            pids.add(pid)
            pipes.append(reading)
        texts = _collect(pipes, limit_s)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
    found = [json.loads(text) if text else {"error": "died, or took too long"} for text in texts]
    for rank, answer in enumerate(found):
        if "error" in answer:
            raise SystemExit(f"rank {rank}: {answer['error']}")
    return [answer["result"] for answer in found]


def _rank(work: Work, rank: int, store: Address, writing: int) -> None:
    try:
        answer = {"result": work(rank, store)}
    except BaseException:  # noqa: BLE001 reported to whoever runs the benchmark
        answer = {"error": traceback.format_exc()}
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(answer))
    signal.pause()  # peers may still be talking to us


def _collect(pipes: list[int], limit_s: float) -> list[bytes]:
    """What each rank wrote before it closed its pipe; stops early when one reports an error, or at the limit."""
    texts = [b""] * len(pipes)
    reading = {pipe: i for i, pipe in enumerate(pipes)}
    limit = time.monotonic() + limit_s
    while reading and time.monotonic() < limit and not any(text.startswith(b'{"error"') for text in texts):
        for pipe in select.select(list(reading), [], [], 1.0)[0]:
            chunk = os.read(pipe, 1 << 20)
            texts[reading[pipe]] += chunk
            if not chunk:
                del reading[pipe]
    for pipe in pipes:
        os.close(pipe)
    return [text if i not in reading.values() or text.startswith(b'{"error"') else b"" for i, text in enumerate(texts)]


def _start_store() -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60))
        os.write(writing, str(store.port).encode())
        signal.pause()
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    return pid, port
