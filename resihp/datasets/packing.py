"""Packs documents into micro-batches with a token budget. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

OPEN_BINS = 32
"""Number of bins open at the same time: enough to fill more than 95 % of the budget with long-tailed lengths."""


@dataclass(frozen=True)
class Piece:
    """`length` tokens of document `document` from token `start` on. `index` numbers the pieces of the whole data set
    from 0."""

    index: int
    document: int
    start: int
    length: int


@dataclass
class _Bin:
    room: int
    pieces: list[Piece] = field(default_factory=list)


def cut(documents: Iterable[int], budget: int) -> Iterator[Piece]:
    """Cut documents, given by their lengths in tokens, into pieces within the budget. An empty document yields none."""
    index = 0
    for document, length in enumerate(documents):
        for start in range(0, length, budget):
            yield Piece(index, document, start, min(budget, length - start))
            index += 1


class Pieces:
    """The pieces that `cut` yields, by index. Each is created on access, since most pieces of a large data set are
    never used."""

    def __init__(self, documents: Iterable[int], budget: int) -> None:
        self._budget = budget
        self._lengths = np.fromiter(documents, np.int64)
        self._ends = np.cumsum(-(-self._lengths // budget))
        """Cumulative number of pieces up to the end of each document."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Piece:
        """Return the piece with this index, counted from 0."""
        document = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[document - 1]) if document else 0)) * self._budget
        return Piece(index, document, start, min(self._budget, int(self._lengths[document]) - start))


def pack(pieces: Iterable[Piece], budget: int, open_bins: int = OPEN_BINS) -> Iterator[tuple[Piece, ...]]:
    """Pack pieces in the given order, each into the best fitting of at most `open_bins` open bins; yield the full bins.

    Each piece is used once. Equal inputs give equal bins. Raises ValueError for a piece longer than the budget.
    """
    bins: list[_Bin] = []
    for piece in pieces:
        if piece.length > budget:
            raise ValueError(f"piece {piece.index}: {piece.length} tokens do not fit a budget of {budget}")
        fitting = [b for b in bins if b.room >= piece.length]
        if fitting:
            best = min(fitting, key=lambda b: b.room)
        else:
            if len(bins) == open_bins:
                fullest = min(bins, key=lambda b: b.room)
                bins.remove(fullest)
                yield tuple(fullest.pieces)
            best = _Bin(budget)
            bins.append(best)
        best.pieces.append(piece)
        best.room -= piece.length
        if best.room == 0:
            bins.remove(best)
            yield tuple(best.pieces)
    for unfinished in bins:
        yield tuple(unfinished.pieces)
