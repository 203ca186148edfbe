"""Commits checkpoints that all ranks have written, and finds those of scripts, in background tasks.

The controller decides when a checkpoint is complete; its manifest is then written, one at a time. A failed commit is
reported and not repeated. Owned by `resihp.wrapper.supervisor.shell`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from resihp.controller import interface as api
from resihp.errors import CheckpointError
from resihp.record.journal import AnyEntry, CheckpointCommitted
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.supervisor.checkpoints.finder import CheckpointFinder


class CheckpointFiles:
    """The checkpoint files of one job. `under_way`: commits in progress. `fingerprint`: of the job's model and data,
    as the workers declare it."""

    def __init__(
        self,
        request: RunRequest,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        log: Callable[[AnyEntry], None],
        report_failure: Callable[[str], None],
        send: Callable[[api.CheckpointsFound], None],
    ) -> None:
        """`start` starts a background task, `log` journals a committed checkpoint, `report_failure` receives the reason
        if a checkpoint cannot be committed, and `send` the result of a search."""
        self.under_way: set[asyncio.Task[None]] = set()
        self.fingerprint = ""
        self._finder = CheckpointFinder(request, start, send)
        self._request = request
        self._start = start
        self._log = log
        self._lost = report_failure
        self._in_turn = asyncio.Lock()
        """Allows one commit at a time, in the order of completion, because each commit removes all but the newest
        checkpoints."""

    def begin(self, action: api.CommitCheckpoint | api.FindCheckpoints) -> None:
        if isinstance(action, api.FindCheckpoints):
            self._finder.begin(action)
            return
        task = self._start(self._commit(action))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def _commit(self, action: api.CommitCheckpoint) -> None:
        from resihp.worker.checkpoints import write_manifest

        folder = Path(self._request.checkpoint_folder, action.folder)
        keep = self._request.checkpoint_keep
        write = partial(write_manifest, layout=action.layout, seconds=round(action.seconds, 3))
        try:
            async with self._in_turn:
                await asyncio.to_thread(write, folder, action.iteration, action.parts, self.fingerprint, keep)
        except (CheckpointError, OSError) as error:
            self._lost(f"checkpoint of iteration {action.iteration}: not committed: {error}")
            return
        size = sum(part_bytes for _, part_bytes in action.parts)
        self._log(
            CheckpointCommitted(iteration=action.iteration, folder=str(folder), bytes=size, seconds=action.seconds)
        )
