"""Inspect the workers of a node that make no progress: the kernel's state, and the stack of the main thread.

Each worker writes its stacks when it gets a signal (`resihp.worker.stacks`). A worker that cannot write them is
described by its state alone. A stack shows no function of C, so the text of the innermost line is read from its source.
Called by `resihp.wrapper.agent.process`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from resihp.detector.hangs.stacks import MAX_TEXT, StackFrame, main_thread
from resihp.plain_files import open_plain
from resihp.process import state_letter
from resihp.protocol import messages as m
from resihp.worker.stacks import STACK_SIGNAL, file_of
from resihp.wrapper.abandoned_threads import answer_within
from resihp.wrapper.agent.idleness import Idleness

WRITING_S = 0.5
"""Time in which a worker writes its stacks."""
MAX_BYTES = 256 << 10
"""Bytes of a worker's stacks that are read, the last ones: the main thread comes last."""
SOURCE_BYTES = 4 << 20
"""Bytes of a source file that are read."""
SOURCES_TIMEOUT_S = 1.0
"""Time limit of the reading of source files."""


async def inspect(
    pids: Mapping[int, int], send_signal: Callable[[int, int], None], idleness: Idleness
) -> tuple[m.WorkerLook, ...]:
    """Return the state and stack of each worker. `pids`: process ids, by rank.

    `send_signal(rank, signal)`: send a signal to a worker that has not ended. `idleness` is told how many bytes a
    process has written because of the inspection, so that they do not make it look busy.
    """
    files = await asyncio.to_thread(lambda: {rank: _with_size(file_of(pid)) for rank, pid in pids.items()})
    for rank, file in files.items():
        if file is not None:
            idleness.begin_inspection(pids[rank])
            send_signal(rank, STACK_SIGNAL)
    await asyncio.sleep(WRITING_S)
    texts = await asyncio.to_thread(
        lambda: {rank: "" if file is None else _added(*file) for rank, file in files.items()}
    )
    for rank, text in texts.items():
        idleness.end_inspection(pids[rank], len(text))
    stacks = {rank: main_thread(text) for rank, text in texts.items()}
    innermost = {frames[0] for frames in stacks.values() if frames}
    unread: dict[StackFrame, str] = {}
    sources = await answer_within(SOURCES_TIMEOUT_S, lambda: _sources(innermost), unread, "source of hung workers")
    return tuple(_look(rank, pid, stacks[rank], sources) for rank, pid in pids.items())


def _with_size(file: Path | None) -> tuple[Path, int] | None:
    try:
        return None if file is None else (file, file.stat().st_size)
    except OSError:
        return None


def _look(rank: int, pid: int, frames: tuple[StackFrame, ...], sources: Mapping[StackFrame, str]) -> m.WorkerLook:
    calls = tuple((frame.file, frame.line, frame.name) for frame in frames)
    source = sources.get(frames[0], "") if frames else ""
    return m.WorkerLook(rank=rank, state=state_letter(pid), frames=calls, source=source)


def _sources(frames: Iterable[StackFrame]) -> dict[StackFrame, str]:
    """Return the source text of each frame's line, as far as its file can be read."""
    return {frame: _source(frame) for frame in frames}


def _source(frame: StackFrame) -> str:
    try:
        with os.fdopen(open_plain(Path(frame.file), follow=True), "rb") as file:
            lines = file.read(SOURCE_BYTES).splitlines()
    except (OSError, ValueError):
        return ""
    text = lines[frame.line - 1] if 0 < frame.line <= len(lines) else b""
    return text.decode(errors="replace").strip()[:MAX_TEXT]


def _added(path: Path, begin: int) -> str:
    """Return the text that was added to a file since it had `begin` bytes."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(begin, end - MAX_BYTES))
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
