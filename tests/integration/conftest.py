from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.jobs import Job, jobs
from tests.integration.slurm_jobs import ITERATIONS, Reference, expected_digests

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


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The tiny example on one device, undisturbed: what losses and samples have to be, whoever trains it."""
    for make in jobs(tmp_path_factory.mktemp("reference")):
        done = make("job").train(iterations=ITERATIONS, nodes=1, gpus=1, tp=1, pp=1).wait()
        assert done.status == 0, done.stderr
        yield Reference(losses=done.losses(), digests=expected_digests(ITERATIONS))
