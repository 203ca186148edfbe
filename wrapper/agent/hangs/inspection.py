"""Inspect the workers of a node that make no progress: the kernel's state, and the stack of the main thread.

Each worker writes its stacks when it gets a signal (`resihp.worker.stacks`). A worker that cannot write them is
described by its state alone. Called by `resihp.wrapper.agent.process`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from resihp.detector.hangs.stacks import main_thread
from resihp.process import state_letter
from resihp.protocol import messages as m
from resihp.worker.stacks import STACK_SIGNAL, file_of

WRITING_S = 0.5
"""Time in which a worker writes its stacks."""
MAX_BYTES = 256 << 10
"""Bytes of a worker's stacks that are read, the last ones: the main thread comes last."""


async def inspect(
    pids: Mapping[int, int], send_signal: Callable[[int, int], None], written: Callable[[int, int], None]
) -> tuple[m.WorkerLook, ...]:
    """Return the state and stack of each worker. `pids`: process ids, by rank.

    `send_signal(rank, signal)`: send a signal to a worker that has not ended. `written(pid, size)` is told how many
    bytes a process has written because of the inspection, so that they do not make it look busy.
    """
    files = await asyncio.to_thread(lambda: {rank: _with_size(file_of(pid)) for rank, pid in pids.items()})
    for rank, file in files.items():
        if file is not None:
            send_signal(rank, STACK_SIGNAL)
    await asyncio.sleep(WRITING_S)
    texts = await asyncio.to_thread(
        lambda: {rank: "" if file is None else _added(*file) for rank, file in files.items()}
    )
    for rank, text in texts.items():
        written(pids[rank], len(text))
    return tuple(_look(rank, pid, texts[rank]) for rank, pid in pids.items())


def _with_size(file: Path | None) -> tuple[Path, int] | None:
    try:
        return None if file is None else (file, file.stat().st_size)
    except OSError:
        return None


def _look(rank: int, pid: int, text: str) -> m.WorkerLook:
    calls = tuple((frame.file, frame.line, frame.name) for frame in main_thread(text))
    return m.WorkerLook(rank=rank, state=state_letter(pid), frames=calls)


def _added(path: Path, begin: int) -> str:
    """Return the text that was added to a file since it had `begin` bytes."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(begin, end - MAX_BYTES))
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
