"""Tests leave nothing behind: hypothesis writes to a temporary folder, pytest keeps no cache (pyproject.toml).

Nor do they write into the home of whoever runs them: each test has a registry of jobs of its own, and so have the
processes that it starts.

Their folders are in memory where there is room: a job whose journal cannot be written for seconds hands over, as it
should, and the disk of a machine that tests share with others has such seconds.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.integration import slurm_releases
from tests.integration.cluster import Cluster, requires_slurm

MEMORY = "/dev/shm"
ROOM_BYTES = 6 << 30
"""All folders of a whole run are smaller than a sixth of it."""

if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK):
    _there = os.statvfs(MEMORY)
    if _there.f_bavail * _there.f_frsize >= ROOM_BYTES and not _there.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY

_home = tempfile.mkdtemp(prefix="resihp-hypothesis-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
set_hypothesis_home_dir(_home)
_states = tempfile.mkdtemp(prefix="resihp-states-")
atexit.register(shutil.rmtree, _states, ignore_errors=True)
_state_numbers = itertools.count()
os.environ["XDG_STATE_HOME"] = f"{_states}/none"
os.environ.pop("RESIHP_STATE", None)

settings.register_profile("resihp", database=None, deadline=None)
settings.load_profile("resihp")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's jobs are known, which makes it when it has one."""
    state = Path(_states, str(next(_state_numbers)))
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    return state / "resihp" / "jobs"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch in the process of a test computes in one thread, as workers do. Beside other tests, the second thread of a
    small kernel waits for a core, and the first one spins for it: that took up to twenty times as long."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests marked `every_slurm` run on each release, unless one was chosen for all."""
    if metafunc.definition.get_closest_marker("every_slurm") is None or slurm_releases.CHOSEN:
        return
    releases = (slurm_releases.INSTALLED, *slurm_releases.RELEASES)
    metafunc.parametrize("slurm_release", releases, indirect=True, ids=[f"slurm-{r or 'installed'}" for r in releases])


@pytest.fixture
def slurm_release(request: pytest.FixtureRequest) -> str:
    """Of the test's clusters; empty for the installed one."""
    return str(getattr(request, "param", slurm_releases.CHOSEN))


@pytest.fixture
def cluster(slurm_release: str) -> Iterator[Callable[..., Cluster]]:
    """`cluster(nodes=4, gpus=2)`: a real private Slurm cluster, idle, gone after the test."""
    with ExitStack() as stack:

        def make(**options: Any) -> Cluster:
            options.setdefault("release", slurm_release)
            needs = {name: options[name] for name in ("isolate", "network", "release", "dbd") if options.get(name)}
            requires_slurm(**needs)
            made = Cluster(**options)
            stack.callback(made.down)
            return made.up()

        yield make
