"""Releases of Slurm beside the installed one, for test clusters: where they are, and which are there.

`make setup-system` unpacks them from the other suites of the distribution (`slurm_releases.sh`), where it may. Nothing
of the system is replaced: a cluster of such a release runs its programs by their own paths, and in the boxes of its
nodes they stand where the system's are. What is not there is skipped, saying so.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(os.environ.get("RESIHP_TEST_RELEASES", "/opt/resihp-tests"))
"""A folder for each release, named like it, that all users can read."""
INSTALLED = ""
"""The one that this machine has."""
RELEASES = ("24.11", "26.05")
"""Those that tests ask for."""
CHOSEN = os.environ.get("RESIHP_TEST_SLURM", INSTALLED)
"""What a test runs on that names no release; `make soak` runs all of them on each."""


def is_here(release: str) -> bool:
    return (programs(release) / "slurmctld").exists()


def programs(release: str) -> Path:
    """The folder of its daemons and commands."""
    return FOLDER / f"slurm-{release}" / "bin"


def plugins(release: str) -> Path:
    (found,) = (FOLDER / f"slurm-{release}").glob("usr/lib/*/slurm-wlm")
    return found
