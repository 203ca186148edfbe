from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration import slurm_releases
from tests.integration.cluster import Cluster, requires_slurm


@pytest.fixture(scope="session")
def real_cluster() -> Iterator[Cluster]:
    """One cluster of four nodes for all tests that leave it as they found it."""
    requires_slurm(release=slurm_releases.CHOSEN)
    with Cluster(nodes=4, gpus=2, release=slurm_releases.CHOSEN) as cluster:
        yield cluster
