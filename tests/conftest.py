"""Tests leave nothing behind: hypothesis writes to a temporary folder, pytest keeps no cache (pyproject.toml)."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.integration.cluster import Cluster, requires_slurm

_home = tempfile.mkdtemp(prefix="resihp-hypothesis-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
set_hypothesis_home_dir(_home)
settings.register_profile("resihp", database=None, deadline=None)
settings.load_profile("resihp")


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """`cluster(nodes=4, gpus=2)`: a real private Slurm cluster, idle, gone after the test."""
    with ExitStack() as stack:

        def make(**options: Any) -> Cluster:
            requires_slurm(isolate=bool(options.get("isolate")), network=bool(options.get("network")))
            made = Cluster(**options)
            stack.callback(made.down)
            return made.up()

        yield make
