"""Checkpoints that all ranks have written become valid: manifests, beside the job, one task each.

When one is complete is the controller's to say; one that cannot be committed is told and left. Owned by
`wrapper.supervisor.shell`.
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
from wrapper.config.run_spec import RunRequest


class CheckpointCommits:
    """`under_way`: those that are being committed. `fingerprint`: of what the job trains, as its workers say."""

    def __init__(
        self,
        request: RunRequest,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        log: Callable[[AnyEntry], None],
        lost: Callable[[str], None],
    ) -> None:
        """`lost` is told of one that cannot be committed."""
        self.under_way: set[asyncio.Task[None]] = set()
        self.fingerprint = ""
        self._request = request
        self._start = start
        self._log = log
        self._lost = lost
        self._in_turn = asyncio.Lock()
        """One at a time, in the order in which they became complete: the newest ones are kept, older ones removed."""

    def begin(self, action: api.CommitCheckpoint) -> None:
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
