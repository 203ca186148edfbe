"""The home of jobs: the folder that RESIHP_HOME names, or else `.resihp` in the current folder.

Decides which folder is the home. Creates nothing. Used by `resihp.wrapper.job_folder` and by commands that name the
home.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from resihp.errors import OwnershipError
from resihp.wrapper.strict_modes import other_owner


def home() -> Path:
    """Return RESIHP_HOME, or else `.resihp` in the current folder.

    Raises OwnershipError if `.resihp` belongs to another user: a command that runs in a folder that others may write
    must not use files that others put there.
    """
    if named := os.environ.get("RESIHP_HOME"):
        return Path(named).absolute()
    here = Path(".resihp").absolute()
    if owner := other_owner(here):
        raise OwnershipError(
            f"{here}: belongs to {owner}; a .resihp of another user is not used by default. To use it: "
            f"RESIHP_HOME={shlex.quote(str(here))}"
        )
    return here
