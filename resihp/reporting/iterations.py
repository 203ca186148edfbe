"""The calls by which a script reports its iterations, and the time of its own work in them.

Keeps totals, and sends them at most twice a second: a lost message loses nothing. Call both from one thread. Neither
call imports torch, waits for a GPU or opens a connection.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import SupportsFloat

from resihp.protocol.messages import PrintedFigures, ScriptProgress, ScriptTotals
from resihp.reporting import outlet

SEND_EVERY_S = 0.5
MAX_FIGURES = 20
"""Most iterations that one message has one by one; further ones are combined with the last of them."""
MAX_SECTIONS = 16
"""Most names of sections. Seconds of further names count as the rank's own, without their name."""


class _Section:
    """One name of a section: its totals, and the context manager that adds to them."""

    def __init__(self, calls: _Calls, name: str) -> None:
        self.name = name
        self.seconds, self.count = 0.0, 0
        self._calls = calls
        self._began: list[float] = []

    def __enter__(self) -> None:
        self._calls.depth += 1
        self._began.append(perf_counter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = perf_counter() - self._began.pop()
        self.seconds += seconds
        self.count += 1
        self._calls.depth -= 1
        if not self._calls.depth:
            self._calls.own_s += seconds


class _Calls:
    """The totals of this process, and the iterations not sent yet."""

    def __init__(self) -> None:
        self.is_watched = outlet.is_watched()
        self.own_s, self.depth = 0.0, 0
        self.sections: dict[str, _Section] = {}
        self.unnamed = _Section(self, "")
        self._iterations = self._iteration = 0
        self._at: float | None = None
        self._sent_at = float("-inf")
        self._figures: list[PrintedFigures] = []
        self._combined = 0
        """Number of iterations that the last of the figures stands for, beyond `MAX_FIGURES`."""
        if self.is_watched:
            atexit.register(self.send)

    def section(self, name: str) -> _Section:
        """Return the section of this name, a new one at its first use."""
        if len(self.sections) >= MAX_SECTIONS:
            return self.unnamed
        return self.sections.setdefault(name, _Section(self, name))

    def iteration(self, number: int | None, loss: float | None, tokens: int, squares: int) -> None:
        """Count an iteration, and send all figures if a message is due."""
        now = perf_counter()
        self._iterations += 1
        self._iteration = self._iteration + 1 if number is None else number
        seconds = None if self._at is None else now - self._at
        self._at = now
        self._add(self._iteration, seconds, loss, tokens, squares)
        if now - self._sent_at >= SEND_EVERY_S:
            self._sent_at = now
            self.send()

    def send(self) -> None:
        """Send the totals, and the iterations since the last message that was sent. Called at the end as well."""
        if not self._figures:
            return
        sections = tuple((name, section.seconds, section.count) for name, section in self.sections.items())
        totals = ScriptTotals(
            iterations=self._iterations, iteration=self._iteration, own_s=self.own_s, sections=sections
        )
        if outlet.send(ScriptProgress(totals=totals, figures=tuple(self._figures))):
            self._figures, self._combined = [], 0

    def _add(self, iteration: int, seconds: float | None, loss: float | None, tokens: int, squares: int) -> None:
        """Add an iteration to the next message, combined with the last ones if there are many."""
        if len(self._figures) >= MAX_FIGURES and seconds is not None:
            last = self._figures.pop()
            self._combined = max(self._combined, 1) + 1
            share = 1.0 / self._combined
            seconds = seconds * share + (1.0 - share) * (seconds if last.seconds is None else last.seconds)
            loss = last.loss if loss is None else loss
            tokens = round(tokens * share + (1.0 - share) * last.tokens)
            squares = round(squares * share + (1.0 - share) * last.sum_squared_lengths)
        figures = PrintedFigures(
            iteration=iteration, seconds=seconds, loss=loss, tokens=tokens, sum_squared_lengths=squares
        )
        self._figures.append(figures)


_calls: _Calls | None = None


def _present() -> _Calls:
    global _calls
    if _calls is None:
        _calls = _Calls()
    return _calls


def iteration(
    number: int | None = None,
    *,
    loss: SupportsFloat | None = None,
    sequence_lengths: Iterable[int] | None = None,
    tokens: int | None = None,
) -> None:
    """Report that an iteration is complete. Call it once at the end of each, on all ranks.

    Rank 0's calls, or the last rank's if rank 0 makes none, then take the place of the iterations that resihp reads
    from the script's output. Together with `section` the calls show which rank is slow. Does nothing outside `resihp
    run`.

    Args:
        number: number of the iteration, from 1. Pass it if the script resumes from a checkpoint: without it, the calls
            of this process are counted.
        loss: a number, or a tensor of one element. A tensor on a GPU is waited for, so pass the loss where you have
            its value anyway.
        sequence_lengths: lengths in tokens of all sequences of the global batch. From them, and from the iterations
            before, the time that the iteration should take is predicted.
        tokens: number of tokens of the global batch; the sum of `sequence_lengths` if None.
    """
    calls = _present()
    if not calls.is_watched:
        return
    squares = 0
    if sequence_lengths is not None:
        lengths = [int(length) for length in sequence_lengths]
        squares = sum(length * length for length in lengths)
        tokens = sum(lengths) if tokens is None else tokens
    calls.iteration(
        None if number is None else int(number),
        None if loss is None else float(loss),
        0 if tokens is None else int(tokens),
        squares,
    )


def section(name: str) -> AbstractContextManager[None]:
    """Measure a part of the iteration that is this rank's own work: it must not wait for other ranks.

        with resihp.section("forward"):
            loss = model(batch)

    In synchronous training all iterations take as long as those of the slowest rank. resihp compares the seconds in
    sections, by rank, and with the rank's own past, to find that rank. Sections may be nested; the time of an inner one
    then counts once. Does nothing outside `resihp run`.

    The time is that of the host: it contains work on a GPU only if the script waits for that work within the section,
    as `loss.item()` and `torch.cuda.synchronize()` do. Without that, a section still shows a slow host (data,
    processor, memory), but no slow GPU.

    Args:
        name: the same in each iteration. At most 16 names are kept apart.
    """
    calls = _present()
    return calls.sections.get(name) or calls.section(name)
