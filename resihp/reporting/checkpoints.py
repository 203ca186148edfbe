"""The call by which a script reports a checkpoint."""

from __future__ import annotations

import os

from resihp.protocol.messages import ScriptSaved
from resihp.reporting import outlet


def checkpointed(path: str | os.PathLike[str], iteration: int | None = None) -> None:
    """Report that a checkpoint is complete: all ranks have written their parts of it, and nothing of it changes any
    more.

    Call it on rank 0 or on all ranks. After a restart the script finds the path of the newest checkpoint that can be
    trusted in the environment variable RESIHP_RESUME_FROM, and in its arguments in place of `{checkpoint}`. Does
    nothing outside `resihp run`.

    Args:
        path: file or folder of the checkpoint, as other nodes see it. A relative path is relative to the present
            working directory.
        iteration: number of the last iteration that the checkpoint contains; the last printed one if None.
    """
    number = None if iteration is None else int(iteration)  # it may be a scalar of numpy
    outlet.send(ScriptSaved(path=os.path.abspath(os.fsdecode(path)), iteration=number))
