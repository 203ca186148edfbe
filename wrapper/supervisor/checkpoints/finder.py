"""Finds the complete checkpoints of a script that does not train with `resihp.Trainer`.

The controller asks: at the start, every few seconds while the script runs, and before the script is started again. The
search runs in a thread, because the file system may hang; a request that comes meanwhile gets the same answer. Owned by
`resihp.wrapper.supervisor.shell`.
"""

from __future__ import annotations

import asyncio
import glob
import heapq
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

from resihp.controller import interface as api
from resihp.record.scripts.checkpoints import StoredCheckpoint
from resihp.wrapper.abandoned_threads import answer_within
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.supervisor.checkpoints.formats import Checkpoint, complete, iteration_of

_log = logging.getLogger("supervisor")

MAX_MATCHES = 1024
"""Most paths whose time is looked at in one search; of more, those with the largest iterations in their names."""
MAX_FOUND = 16
"""Number of checkpoints in an answer, the newest ones. The files of older ones are not looked at."""
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
        self._pattern = os.path.join(glob.escape(request.cwd), os.path.expanduser(request.checkpoint_pattern))
        self._has_pattern = bool(request.checkpoint_pattern)
        self._start, self._send = start, send
        self._task: asyncio.Task[None] | None = None
        self._first_seen: dict[tuple[Path, float], float] = {}
        """Time of the first search that found this version of a checkpoint, by path and time of change."""

    def begin(self, action: api.FindCheckpoints) -> None:
        if self._task is None or self._task.done():
            self._task = self._start(self._answer(action))

    async def _answer(self, action: api.FindCheckpoints) -> None:
        nothing = api.CheckpointsFound(checkpoints=(), error="the search has failed")
        self._send(await answer_within(None, lambda: self._search(action), nothing, "finds checkpoints"))

    def _search(self, action: api.FindCheckpoints) -> api.CheckpointsFound:
        try:
            checkpoints = self._find(action)
        except Exception as error:  # noqa: BLE001 - a file that somebody else may have written must not end the job
            _log.warning("the search for checkpoints failed", exc_info=error)
            return api.CheckpointsFound(checkpoints=(), error=str(error) or type(error).__name__)
        checkpoints.sort(key=lambda checkpoint: (checkpoint.modified, checkpoint.iteration or 0), reverse=True)
        return api.CheckpointsFound(
            checkpoints=tuple(
                StoredCheckpoint(
                    path=str(checkpoint.path),
                    iteration=checkpoint.iteration,
                    modified=checkpoint.modified,
                    bytes=checkpoint.bytes,
                )
                for checkpoint in checkpoints
            )
        )

    def _find(self, action: api.FindCheckpoints) -> list[Checkpoint]:
        """Return the newest complete checkpoints. Raises OSError if none can be read, though there are some."""
        failure: OSError | None = None
        matching = self._matching(action) if self._has_pattern else []
        checkpoints: list[Checkpoint] = []
        now, first_seen = time.monotonic(), {}
        for path in _newest_first({*map(Path, action.reported), *map(Path, matching)}):
            if len(checkpoints) == MAX_FOUND:
                break
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
            is_known = str(path) in action.fresh or (str(path), checkpoint.modified) in action.complete
            if checkpoint.is_certain or is_known or settled:
                checkpoints.append(checkpoint)
        self._first_seen = first_seen
        if failure is not None and not checkpoints:
            raise failure
        return checkpoints

    def _matching(self, action: api.FindCheckpoints) -> list[str]:
        """Return the paths that match the pattern. Raises OSError if their folder cannot be read, or if it is not there
        any more: `glob` does not tell."""
        plain = takewhile(lambda part: not glob.has_magic(part), Path(self._pattern).parts[:-1])
        try:
            os.scandir(Path(*plain)).close()
        except FileNotFoundError:
            if action.complete:
                raise
            return []
        return heapq.nlargest(MAX_MATCHES, glob.iglob(self._pattern), key=_number)


def _number(path: str) -> int:
    """Return the iteration in a name; of paths without one, none may be left out."""
    iteration = iteration_of(os.path.basename(path))
    return sys.maxsize if iteration is None else iteration


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return the paths in the order of their last changes, without links to others among them. Those without an
    iteration in their names come first: they are written again and again, which the time of a folder does not show."""
    places: dict[tuple[int, int], tuple[int, float, Path]] = {}
    for path in sorted(paths, key=lambda path: (_number(str(path)), path), reverse=True):
        if not str(path).isprintable():
            continue  # no variable or message could hold it
        try:
            state = path.stat()
        except OSError:  # the caller finds out why
            places[-1, len(places)] = (0, 0.0, path)
            continue
        places[state.st_dev, state.st_ino] = (int(iteration_of(path.name) is None), state.st_mtime, path)
    return [path for _, _, path in sorted(places.values(), reverse=True)]
