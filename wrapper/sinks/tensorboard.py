"""Writes scalars of committed iterations for TensorBoard, one TensorBoard run for each job. Needs the package
tensorboard.

Listens to the journal (`resihp.wrapper.sinks.fanout`) and writes in a separate thread. Decides nothing about the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from resihp.errors import ConfigurationError
from resihp.record import journal
from resihp.wrapper.sinks.figures import Figures, follow, snapshot
from resihp.wrapper.sinks.queue import BackgroundQueue

Scalar = tuple[str, float, int, float]
"""(tag, value, iteration, time in UTC seconds since 1970)."""


def check() -> None:
    """Raise ConfigurationError if the package is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigurationError(
            "[metrics] tensorboard: the package tensorboard is not installed; pip install tensorboard, or leave it out"
        )


def scalars(figures: Figures, record: journal.Record) -> Iterator[Scalar]:
    """Yield the scalars of a record. `figures` must have followed the record already."""
    entry = record.entry
    if isinstance(entry, journal.EvaluationDone):
        yield "validation_loss", entry.loss, entry.iteration, record.at
    if not isinstance(entry, journal.IterationCommitted):
        return
    step, values = entry.outcome.iteration, entry.outcome
    named_values = {
        "loss": values.loss,
        "gradient_norm": values.gradient_norm,
        "learning_rate": values.learning_rate,
        "iteration/seconds": entry.seconds,
        "iteration/predicted_seconds": entry.predicted_seconds,
        "iteration/tokens_per_second": values.tokens / entry.seconds if entry.seconds and values.tokens else None,
        "goodput": figures.goodput(record.at),
    }
    for tag, value in named_values.items():
        if value is not None and not (values.is_printed and math.isnan(value)):  # then it is unknown
            yield tag, value, step, record.at


class TensorBoard:
    """A listener that writes scalars. `past`: the figures under earlier leaders, which have already written those
    scalars."""

    def __init__(
        self,
        folder: Path,
        *,
        say: Callable[[str], None],
        past: Figures | None = None,
        open_writer: Callable[[str], Any] | None = None,
    ) -> None:
        self._folder = folder
        self._open = open_writer or _writer
        self._writer: Any = None
        self._figures = snapshot(past or Figures())
        self._queue: BackgroundQueue[list[Scalar]] = BackgroundQueue("tensorboard", self._write, say)

    def submit(self, record: journal.Record) -> None:
        follow(self._figures, record)
        if values := list(scalars(self._figures, record)):
            self._queue.put(values)

    def close(self, deadline: float) -> bool:
        done = self._queue.close(deadline)
        if done and self._writer is not None:
            self._writer.close()
        return done

    def _write(self, values: list[Scalar]) -> None:
        if self._writer is None:
            self._writer = self._open(str(self._folder))
        for tag, value, step, at in values:
            self._writer.add_scalar(tag, value, step, wall_time=at)


def _writer(folder: str) -> Any:
    from tensorboard.summary import Writer  # type: ignore[import-not-found,unused-ignore]  # where it is installed

    return Writer(folder)
