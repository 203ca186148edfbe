"""A fork server for tests with several ranks: torch and megatron-core are imported once, each rank is a fork of it.

Run as a program. It reads one JSON request a line, {"scenario", "world", "arguments"}, forks `world` ranks that call
`scenario(rank, line, **arguments)` of the modules named on its command line, and answers with one JSON line: for each
rank {"result"} or {"error"} or {"killed"}. It has no threads when it forks; where ranks meet (`meeting_place`), and a
store for the tests' own words, are in forks, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from meeting_place import LIMIT_S, Line, serve


def main() -> None:
    torch.set_num_threads(1)
    scenarios: dict[str, Callable[..., Any]] = {}
    for path in sys.argv[1:]:
        spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py"), path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        scenarios.update({name: value for name, value in vars(module).items() if callable(value)})
    for line in sys.stdin:
        request = json.loads(line)
        answers = _run(scenarios[request["scenario"]], request["world"], request["arguments"])
        print(json.dumps(answers), flush=True)


def _run(scenario: Callable[..., Any], world: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    store, port = _start_store()
    place, ends = _start_place(world)
    pids, pipes = [], []
    for rank in range(world):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            for other in range(world):
                if other != rank:
                    ends[other].close()
            _rank(scenario, rank, Line(ends[rank], port), arguments, writing)
        os.close(writing)
        pids.append(pid)
        pipes.append(reading)
    for end in ends:
        end.close()
    answers = _collect(pipes)
    for rank, pid in enumerate(pids):
        if "error" in answers[rank]:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if "error" in answers[rank] and not answers[rank]["error"] and os.WIFSIGNALED(status):
            answers[rank] = {"killed": os.WTERMSIG(status)}
    for helper in (store, place):
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
    return answers


def _rank(scenario: Callable[..., Any], rank: int, line: Line, arguments: dict[str, Any], writing: int) -> None:
    os.dup2(2, 1)
    try:
        answer = {"result": scenario(rank, line, **arguments)}
    except BaseException:  # noqa: BLE001 reported to the test
        answer = {"error": traceback.format_exc()}
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(answer))
    os._exit(0)


def _collect(pipes: list[int]) -> list[dict[str, Any]]:
    texts = [b""] * len(pipes)
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    limit = time.monotonic() + LIMIT_S
    while open_pipes and time.monotonic() < limit:
        for pipe in select.select(list(open_pipes), [], [], 1.0)[0]:
            chunk = os.read(pipe, 1 << 16)
            texts[open_pipes[pipe]] += chunk
            if not chunk:
                del open_pipes[pipe]
    for pipe in pipes:
        os.close(pipe)
    late = {rank: {"error": f"nothing after {LIMIT_S} s"} for rank in open_pipes.values()}
    return [late.get(rank) or (json.loads(text) if text else {"error": ""}) for rank, text in enumerate(texts)]


def _start_place(world: int) -> tuple[int, list[socket.socket]]:
    pairs = [socket.socketpair() for _ in range(world)]
    pid = os.fork()
    if pid == 0:
        for _, end in pairs:
            end.close()
        serve([ours for ours, _ in pairs])
        signal.pause()
    for ours, _ in pairs:
        ours.close()
    return pid, [end for _, end in pairs]


def _start_store() -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=LIMIT_S))
        os.write(writing, str(store.port).encode())
        signal.pause()
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    return pid, port


if __name__ == "__main__":
    main()
