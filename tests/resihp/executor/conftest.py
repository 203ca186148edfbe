"""Fixture for tests that need ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


Serve = Callable[..., list[dict[str, Any]]]


@contextmanager
def fork_server(scenarios: str) -> Iterator[Serve]:
    """`serve(scenario, world, **arguments)`: the answers of all ranks, see `ranks.py`. Imports one scenario file."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch's store clients ask for names
    }
    with subprocess.Popen(
        [sys.executable, str(HERE / "ranks.py"), str(HERE / scenarios)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:

        def ask(scenario: str, world: int = 1, **arguments: Any) -> list[dict[str, Any]]:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps({"scenario": scenario, "world": world, "arguments": arguments}) + "\n")
            server.stdin.flush()
            answers: list[dict[str, Any]] = json.loads(server.stdout.readline())
            return answers

        yield ask
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    with fork_server("scenarios.py") as ask:
        yield ask


@pytest.fixture(scope="session")
def stage_ranks() -> Iterator[Callable[..., list[Any]]]:
    """As `ranks`, for the scenarios of single stages."""
    with fork_server("stage_scenarios.py") as ask:
        yield _succeeding(ask)


@pytest.fixture(scope="session")
def chain_ranks() -> Iterator[Callable[..., list[Any]]]:
    """As `ranks`, for chains of random plans."""
    with fork_server("chain_scenarios.py") as ask:
        yield _succeeding(ask)


@pytest.fixture
def ranks(serve: Serve) -> Callable[..., list[Any]]:
    """As `serve`, but every rank must succeed; gives their results."""
    return _succeeding(serve)


def _succeeding(serve: Serve) -> Callable[..., list[Any]]:
    def ask(scenario: str, world: int = 1, **arguments: Any) -> list[Any]:
        answers = serve(scenario, world, **arguments)
        errors = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if "result" not in answer]
        assert not errors, "\n".join(errors)
        return [answer["result"] for answer in answers]

    return ask
