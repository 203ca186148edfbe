from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.jobs import Job, jobs

pytest.importorskip("torch", reason="integration tests train: pip install 'resihp[train]'")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """One job in a folder of its own; fails the test if it leaves a process behind."""
    for make in jobs(tmp_path):
        yield make("job")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Job]]:
    """The same job without failures: what losses and samples have to be."""
    for make in jobs(tmp_path_factory.mktemp("undisturbed")):
        done: list[Job] = []

        def run(make: Callable[[str], Job] = make, done: list[Job] = done) -> Job:
            if not done:
                done.append(make("job").train().wait())
                assert done[0].status == 0, done[0].stderr
            return done[0]

        yield run
