"""A rank's part of a checkpoint: slices by name, so that any layout can read checkpoints written under any other.

Each slice of parameters and moments is written once, by ranks of one replica (`resihp.parallelism.ownership.counted`):
the first replica, unless it cannot. Never commits a checkpoint: it counts only after its manifest is written
(`resihp.worker.checkpoints`). Called by `trainer` and `supervised`.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from resihp.durable_files import commit_file
from resihp.errors import CheckpointError
from resihp.executor.engine import Engine
from resihp.executor.state.rank_state import State
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec, Slice, counted
from resihp.parallelism.plan import Plan
from resihp.worker import checkpoints
from resihp.worker.leaving import begin_thread

Piece = tuple[int, int, dict[str, Tensor]]
"""(start, stop, tensors by kind) of one slice in a checkpoint."""


class Part(NamedTuple):
    """The content of one rank's part, copied to host memory so that training can continue."""

    file: str
    content: dict[str, Any]


def part_of(engine: Engine, plan: Plan, replica: int = 0) -> Part:
    """Return this rank's part of a checkpoint of the last step.

    The rank's state follows `plan`. The ranks of `replica`, and ranks with state that this replica lacks
    (`Layout.model_copy`), together write the whole state, each slice once. The file name contains epoch and rank, so
    that no attempt overwrites a file of another.
    """
    state = engine.state
    assert state is not None
    slices: dict[str, dict[str, Tensor]] = {}
    writers = Layout((plan.layout.model_copy(replica),))
    for piece in counted(writers, engine.specs)[engine.rank]:
        tensors = state.tensors(state.specs[piece.name], piece)
        slices[f"{piece.name}:{piece.start}:{piece.stop}"] = {
            kind: tensor.detach().to("cpu", copy=True) for kind, tensor in tensors.items()
        }
    content = {
        "iteration": engine.stepped,
        "updates": engine.updates,
        "model": msgspec.json.encode(engine.model).decode(),
        "slices": slices,
    }
    return Part(f"part-e{plan.epoch:04d}-r{engine.rank:05d}.pt", content)


def write_part(part: Part, folder: Path) -> int:
    """Write a part and return its size in bytes. The file appears only when it is complete and flushed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / part.file
    temporary = path.with_suffix(".writing")
    with suppress(FileNotFoundError):
        temporary.unlink()  # left by a killed process, or a link that somebody created
    with temporary.open("xb") as file:
        torch.save(part.content, file)
        file.flush()
        os.fsync(file.fileno())
    commit_file(temporary, path)
    return path.stat().st_size


def save_part(engine: Engine, plan: Plan, folder: Path, replica: int = 0) -> tuple[str, int]:
    """Write this rank's part before returning (file, bytes)."""
    part = part_of(engine, plan, replica)
    return part.file, write_part(part, folder)


class Writer:
    """Writes parts in the background, one at a time, so that a hanging file system delays only checkpoints, not
    training."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, part: Part, folder: Path, done: Callable[[int], None], failed: Callable[[Exception], None]) -> None:
        """Start writing `part`; then call `done` with its bytes, or `failed` with the exception, in the writer's
        thread.

        When the process exits, it waits only briefly for the writer.
        """
        self.wait()

        def write() -> None:
            try:
                size = write_part(part, folder)
            except Exception as error:  # noqa: BLE001 -- costs a checkpoint; training must continue
                failed(error)
            else:
                done(size)

        self._thread = begin_thread(write, name="resihp-checkpoint")

    def wait(self) -> None:
        """Wait until no part is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def load(engine: Engine, folder: Path) -> None:
    """Fill this rank's state from a committed checkpoint, written under any layout.

    Raises CheckpointError, before anything is changed, if the checkpoint is incomplete or belongs to another model.
    """
    iteration, _, files = checkpoints.read_manifest(folder)
    stored: dict[str, list[Piece]] = defaultdict(list)
    updates = 0
    for file in files:
        content = _read(folder / file)
        if not _same_model(content["model"], engine.model) or content["iteration"] != iteration:
            raise CheckpointError(
                f"checkpoint {folder}: {file} holds iteration {content['iteration']} of {content['model']}, "
                f"not iteration {iteration} of this model"
            )
        updates = content["updates"]
        for key, tensors in content["slices"].items():
            name, start, stop = key.rsplit(":", 2)
            stored[name].append((int(start), int(stop), tensors))
    state = engine.state
    assert state is not None
    copies: list[tuple[Tensor, Tensor]] = []
    for spec in state.specs.values():
        copies += _copies(state, spec, stored[spec.name], folder)
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
    engine.resume(iteration, updates)


def _same_model(stored: str, model: ModelSpec) -> bool:
    """Return whether a checkpoint is of this model. Precision and computation may differ, since stored values are
    always float32."""
    try:
        model_found = msgspec.json.decode(stored, type=ModelSpec)
    except msgspec.DecodeError:
        return False
    return msgspec.structs.replace(model_found, precision=model.precision, computation=model.computation) == model


def _copies(state: State, spec: ParameterSpec, pieces: list[Piece], folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (view of the rank's state, view of a stored tensor) that together cover the rank's share of a
    parameter."""
    wanted = state.share(spec)
    pairs: list[tuple[Tensor, Tensor]] = []
    reached = wanted.start
    for start, stop, tensors in sorted(pieces, key=lambda piece: piece[:2]):
        begin, end = max(start, reached), min(stop, wanted.stop)
        if begin >= end:
            continue
        if begin > reached:
            break
        targets = state.tensors(spec, Slice(spec.name, begin, end))
        for kind, target in targets.items():
            source = tensors[kind]
            if spec.axis is not None:  # stored as [..., parts, stop - start, ...]
                source = source.narrow(spec.axis + 1, begin - start, end - begin)
            if source.shape != target.shape:
                raise CheckpointError(f"checkpoint {folder}: {spec.name} has another shape in this model")
            pairs.append((target, source))
        reached = end
    if reached < wanted.stop:
        raise CheckpointError(f"checkpoint {folder}: rows {reached} to {wanted.stop} of {spec.name} are missing")
    return pairs


def _read(path: Path) -> dict[str, Any]:
    """Map a part into memory without reading it, so that a rank reads only the slices that it needs. Only tensors are
    unpickled."""
    try:
        content: dict[str, Any] = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        for key in ("iteration", "updates", "model", "slices"):
            content[key]
    except Exception as error:  # for a damaged file torch raises anything from KeyError to PickleError
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} cannot be read: {error}") from error
    return content
