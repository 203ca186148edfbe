"""Finds the complete checkpoints of a script that does not train with `resihp.Trainer`.

The controller asks: at the start, every few seconds while the script runs, and before the script is started again. The
search runs in a thread, because the file system may hang; a request that comes meanwhile gets the same answer. Owned by
`resihp.wrapper.supervisor.shell`.
"""

from __future__ import annotations

import asyncio
import glob
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from resihp.controller import interface as api
from resihp.record.scripts.checkpoints import StoredCheckpoint
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.supervisor.checkpoints.formats import Checkpoint, complete

MAX_MATCHES = 1024
"""Most paths that are looked at in one search."""
MAX_FOUND = 16
"""Number of checkpoints in an answer, the newest ones."""
SETTLED_S, SURELY_SETTLED_S = 10.0, 60.0
"""A checkpoint of an unknown format counts as complete once it has not changed for the first of these times, as two
searches show, or for the second one by its own time."""


class CheckpointFinder:
    """The search for the checkpoints of one job. `start` starts a background task, and `send` receives the answer."""

    def __init__(
        self,
        request: RunRequest,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        send: Callable[[api.CheckpointsFound], None],
    ) -> None:
        self._pattern = os.path.join(request.cwd, os.path.expanduser(request.checkpoint_pattern))
        self._has_pattern = bool(request.checkpoint_pattern)
        self._start, self._send = start, send
        self._task: asyncio.Task[None] | None = None
        self._first_seen: dict[tuple[Path, float], float] = {}
        """Time of the first search that found this version of a checkpoint, by path and time of change."""

    def begin(self, action: api.FindCheckpoints) -> None:
        if self._task is None or self._task.done():
            self._task = self._start(self._answer(action.reported))

    async def _answer(self, reported: tuple[str, ...]) -> None:
        try:
            checkpoints = await asyncio.to_thread(self._find, reported)
        except (OSError, ValueError) as error:
            self._send(api.CheckpointsFound(checkpoints=(), error=str(error)))
            return
        checkpoints.sort(key=lambda checkpoint: (checkpoint.modified, checkpoint.iteration or 0), reverse=True)
        self._send(
            api.CheckpointsFound(
                checkpoints=tuple(
                    StoredCheckpoint(
                        path=str(checkpoint.path),
                        iteration=checkpoint.iteration,
                        modified=checkpoint.modified,
                        bytes=checkpoint.bytes,
                    )
                    for checkpoint in checkpoints[:MAX_FOUND]
                )
            )
        )

    def _find(self, reported: Iterable[str]) -> list[Checkpoint]:
        """Return all complete checkpoints. Raises OSError if none can be read, though there are some."""
        by_script = {Path(path) for path in reported}
        failure: OSError | None = None
        matching = islice(glob.iglob(self._pattern), MAX_MATCHES) if self._has_pattern else ()
        now, checkpoints, first_seen = time.monotonic(), [], {}
        for path in {*by_script, *map(Path, matching)}:
            try:
                checkpoint = complete(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # the script removed it just now
            except OSError as error:
                failure = error
                continue
            if checkpoint is None:
                continue
            version = path, checkpoint.modified
            first_seen[version] = self._first_seen.get(version, now)
            settled = now - first_seen[version] >= SETTLED_S or time.time() - checkpoint.modified > SURELY_SETTLED_S
            if checkpoint.is_certain or path in by_script or settled:
                checkpoints.append(checkpoint)
        self._first_seen = first_seen
        if failure is not None and not checkpoints:
            raise failure
        return checkpoints
