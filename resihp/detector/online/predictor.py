"""Predicts how long a healthy chunk takes: the paper's Eq. 1, learnt in the warm-up. Pure, no clock.

For each key and kind, keeps the chunks of the first iterations, fits c + alpha N + beta S to them (`regression`), then
forgets them: the fit stays until a refit is requested, so that a slow-down is never learnt as healthy. A key without
observations, as after a reconfiguration, is derived from others until it has been observed long enough itself. Says
when it does not know. Others (`monitor`) judge whether a time is too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from resihp.detector.observation import Floats
from resihp.detector.online.regression import Coefficients, Fit, Samples, fit, non_negative
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Stop

Key = tuple[int, int, bool, bool]
"""Type of a chunk, regardless of its place: (layers, tensor-parallel degree, has the embedding, has the head)."""

Known = Literal["fitted", "rescaled", "unknown"]

MAX_RANKS_PER_KEY = 32
"""Number of ranks per key that are learnt from: a sample of them in a larger job."""
KEPT_FORMER_ITERATIONS = 8
"""Iterations kept of earlier learning, for when other workloads are learnt in addition."""
MAX_EXTRAPOLATION = 0.1
"""Relative margin by which N and S may exceed the learnt range."""
MAX_CHUNKS_PER_ITERATION = 16
"""Chunks of each kind that are kept of one rank's iteration."""


def keys(layout: Layout) -> dict[Stop, Key]:
    """Return the key of every chunk of every stage that has ranks."""
    last_layer = max(last for replica in layout.replicas for stage in replica.stages for _, last in stage.chunks)
    return {
        Stop(d, s, c): (last - first + 1, stage.tp, first == 0, last == last_layer)
        for d, replica in enumerate(layout.replicas)
        for s, stage in enumerate(replica.stages)
        if stage.ranks
        for c, (first, last) in enumerate(stage.chunks)
    }


class _Track:
    """Learning state of one key and kind: a fit, and the chunks of iterations that are still being learnt from."""

    def __init__(self, least: int, latest: int) -> None:
        self.latest = latest
        """Latest iteration that was learnt from."""
        self.fit: Fit | None = None
        self.current = False
        """Whether the fit is from this warm-up, not from one before a refit."""
        self.learning = True
        self.due = least
        """Number of iterations at which to fit next."""
        self.iterations: set[int] = set()
        self._ranks: set[int] = set()
        self._last = (0, 0)
        """The last, in `_scatter` order, of the ranks that are kept."""
        self._samples_taken: list[tuple[int, int, Floats]] = []
        self._former: list[tuple[int, int, Floats]] = []
        """A few iterations of earlier learning."""
        self.beside: list[tuple[int, int, Floats]] = []
        """Those of them that are learnt from once more."""

    def keeps(self, rank: int) -> bool:
        """Whether chunks of that rank would be kept: of many ranks, the first in `_scatter` order are."""
        return rank in self._ranks or len(self._ranks) < MAX_RANKS_PER_KEY or _scatter(rank) < self._last

    def take(self, rank: int, iteration: int, chunks: Floats) -> None:
        """Keep chunks (3, n) of N, S, seconds of a rank that `keeps` accepts."""
        if rank not in self._ranks:
            if len(self._ranks) == MAX_RANKS_PER_KEY:
                replaced = max(self._ranks, key=_scatter)
                self._ranks.remove(replaced)
                self._samples_taken = [taken for taken in self._samples_taken if taken[1] != replaced]
            self._ranks.add(rank)
            self._last = max(map(_scatter, self._ranks))
        if chunks.shape[1] > MAX_CHUNKS_PER_ITERATION:
            chunks = chunks[:, np.linspace(0, chunks.shape[1] - 1, MAX_CHUNKS_PER_ITERATION).astype(int)]
        self._samples_taken.append((iteration, rank, chunks))
        self.latest = max(self.latest, iteration)
        self.iterations.add(iteration)

    @property
    def sources(self) -> set[int]:
        """Iterations that the samples come from."""
        return self.iterations | {iteration for iteration, _, _ in self.beside}

    def samples(self, index: Mapping[int, int]) -> Samples:
        """Return all samples; `index`: number of each iteration."""
        taken = self.beside + self._samples_taken
        sizes = [chunks.shape[1] for _, _, chunks in taken]
        tokens, squares, seconds = np.concatenate([chunks for _, _, chunks in taken], axis=1)
        return Samples(
            iteration=np.repeat([index[iteration] for iteration, _, _ in taken], sizes),
            rank=np.repeat([rank for _, rank, _ in taken], sizes),
            tokens=tokens,
            squares=squares,
            seconds=seconds,
        )

    def forget(self, *, union: bool = False) -> None:
        """Start learning afresh; with `union`, in addition to some of the earlier samples."""
        if self._samples_taken:
            some = sorted(self.iterations)[:: -(-len(self.iterations) // KEPT_FORMER_ITERATIONS)]
            self._former = (self.beside + [taken for taken in self._samples_taken if taken[0] in some])[
                -3 * KEPT_FORMER_ITERATIONS * MAX_RANKS_PER_KEY :
            ]
        self.beside = self._former if union else []
        self.iterations, self._ranks, self._samples_taken = set(), set(), []


class Predictor:
    """Seconds of a chunk on a healthy device, by its key, kind, tokens N and sum of squared lengths S (Eq. 1).

    `kind` is F, B or W, or any other name that the caller distinguishes. A B that also computes weight gradients is
    another kind than one that leaves them to a W.

    A key is known once `least` iterations were observed and the standard error of its prediction is at most
    `tolerance`, and in any case after `enough` iterations. Until `warm_up` iterations the fit is refined a few times,
    then it is frozen: if iterations vary by 3 %, correlated with 0.5, their level is known to 1.1 % after 20, to
    0.8 % after 40. Memory per key does not depend on the number of observations; `observe` and `predict` are linear in
    the number of chunks.
    """

    def __init__(self, *, least: int = 8, enough: int = 20, warm_up: int = 40, tolerance: float = 0.02) -> None:
        if not 1 < least <= enough <= warm_up:
            raise ValueError(f"least {least}, enough {enough}, warm-up {warm_up}: give 1 < least <= enough <= warm_up")
        self._least, self._enough, self._warm_up, self._tolerance = least, enough, warm_up, tolerance
        self._tracks: dict[tuple[Key, str], _Track] = {}
        self._anchors: dict[int, list[float]] = {}
        """By iteration: log of observed over predicted of known keys; gives the iteration's factor to unknown ones."""
        self._seen = -1
        """The latest iteration with an observation."""
        self._due = False
        self._derived: dict[tuple[Key, str], Coefficients | None] = {}
        self.revision = 0
        """Incremented whenever predictions change, which makes residual levels learnt before obsolete."""

    @property
    def learning(self) -> bool:
        """Whether any key that still occurs is being learnt. If not, only new keys need to be observed."""
        return any(track.learning and self._seen - track.latest <= self._warm_up for track in self._tracks.values())

    def observe(
        self,
        key: Key,
        kind: str,
        tokens: npt.ArrayLike,
        squares: npt.ArrayLike,
        seconds: npt.ArrayLike,
        *,
        rank: int,
        iteration: int,
    ) -> None:
        """Learn from chunks of one rank in one iteration: N, S and seconds of its own work, each (n,).

        Iterations may come in any order and have gaps. Chunks with a number that is not finite, or not positive
        (S may be 0), are left out; arrays of different shapes are left out altogether. Do not pass ranks that are known
        to be slow; ranks that are slow unnoticed are recognised by comparison with peers of the same key.
        """
        track = self._tracks.get((key, kind))
        if track is not None and not track.learning and not self.learning:
            return
        self._seen = max(self._seen, iteration)
        if track is None:
            track = self._tracks[key, kind] = _Track(self._least, iteration)
        if track.learning and not track.keeps(rank):
            return
        chunks = _clean(tokens, squares, seconds)
        if not chunks.shape[1]:
            return
        if not track.learning:
            self._anchor(track, iteration, chunks)
        elif len(track.iterations) < self._warm_up or iteration in track.iterations:
            track.take(rank, iteration, chunks)
            self._due |= len(track.iterations) >= track.due

    def predict(self, key: Key, kind: str, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> Floats | None:
        """Return seconds of chunks of N tokens and sum of squared lengths S, any shape; None while unknown."""
        coefficients = self.coefficients(key, kind)
        return None if coefficients is None else coefficients.seconds(tokens, squares)

    def coefficients(self, key: Key, kind: str) -> Coefficients | None:
        """Return the coefficients that `predict` applies: fitted if the key was observed long enough, else derived."""
        self._refresh()
        track = self._tracks.get((key, kind))
        return track.fit.coefficients if track is not None and track.fit is not None else self.rescaled(key, kind)

    def covers(self, work: Iterable[tuple[Key, str]], tokens: npt.ArrayLike, squares: npt.ArrayLike) -> bool:
        """Whether micro-batches of N and S, any shape, are within the range that each key and kind of `work` was learnt
        from; otherwise Eq. 1 extrapolates.

        A quarter of them may be outside; NaN is ignored. A key that is not fitted restricts nothing.
        """
        self._refresh()
        tracks = [self._tracks.get(key_and_kind) for key_and_kind in work]
        n, s = np.asarray(tokens), np.asarray(squares)
        most, least = 1.0 + MAX_EXTRAPOLATION, 1.0 - MAX_EXTRAPOLATION
        for low_n, high_n, low_s, high_s in {track.fit.reach for track in tracks if track is not None and track.fit}:
            beyond = (n > most * high_n) | (n < least * low_n) | (s > most * high_s) | (s < least * low_s)
            if int(np.count_nonzero(beyond)) * 4 > n.size:
                return False
        return True

    def ready(self, key: Key, kind: str) -> bool:
        """Whether the key itself was observed long enough since the last refit."""
        self._refresh()
        track = self._tracks.get((key, kind))
        return track is not None and track.fit is not None and track.current

    def known(self, key: Key, kind: str) -> Known:
        """Return the source of a prediction."""
        self._refresh()
        track = self._tracks.get((key, kind))
        if track is not None and track.fit is not None:
            return "fitted"
        return "unknown" if self.rescaled(key, kind) is None else "rescaled"

    def uncertainty(self, key: Key, kind: str) -> float:
        """Return the relative standard error of a fitted prediction at the mean workload; infinite without a fit."""
        self._refresh()
        track = self._tracks.get((key, kind))
        return np.inf if track is None or track.fit is None else track.fit.uncertainty

    def ratios(self, key: Key, kind: str) -> dict[int, float]:
        """Return the observed over fitted times of the ranks learnt from: shows ranks that were slow in the warm-up."""
        self._refresh()
        track = self._tracks.get((key, kind))
        return {} if track is None or track.fit is None else dict(track.fit.ratios)

    def freeze(self) -> None:
        """Stop learning keys that are known, because something may be wrong from now on."""
        self._refresh()
        for track in self._tracks.values():
            if track.current:
                self._close(track)

    def refit(self, key: Key | None = None, kind: str | None = None, *, union: bool = False) -> None:
        """Learn a key, or a kind, or everything, once more. Predictions stay as they are until that is done.

        `union`: earlier samples still count, because only the workload has changed.
        """
        for (its_key, its_kind), track in self._tracks.items():
            if key in (None, its_key) and kind in (None, its_kind):
                track.forget(union=union)
                track.learning, track.current = True, False
                track.due, track.latest = self._least, self._seen

    def rescaled(self, key: Key, kind: str) -> Coefficients | None:
        """Derive coefficients from other keys: work grows with layers and is divided among tensor-parallel peers;
        launch overhead is not.

        The work of embedding and head is separated as far as the known keys allow; the rest is attributed to layers.
        None if nothing of that kind is known.
        """
        self._refresh()
        if (key, kind) not in self._derived:
            fits = [
                (its_key, track.fit)
                for (its_key, its_kind), track in self._tracks.items()
                if its_kind == kind and track.fit is not None and its_key != key
            ]
            self._derived[key, kind] = _derive(key, fits) if fits else None
        return self._derived[key, kind]

    def _anchor(self, track: _Track, iteration: int, chunks: Floats) -> None:
        ratios = self._anchors.setdefault(iteration, [])
        if len(self._anchors) > 2 * self._warm_up:
            del self._anchors[min(self._anchors)]
        if track.fit is not None and len(ratios) < 8 * MAX_RANKS_PER_KEY:
            tokens, squares, seconds = chunks
            predicted = track.fit.coefficients.seconds(tokens, squares)
            if (predicted > 0.0).all():
                ratios.append(float(np.median(np.log(seconds / predicted))))

    def _refresh(self) -> None:
        """Fit the tracks that are due."""
        if not self._due:
            return
        self._due = False
        tracks = [t for t in self._tracks.values() if t.learning and len(t.iterations) >= self._least]
        numbers = sorted({iteration for track in tracks for iteration in track.sources})
        index = {iteration: i for i, iteration in enumerate(numbers)}
        anchors = np.array([_middle(self._anchors.get(iteration, ())) for iteration in numbers])
        fits = fit([track.samples(index) for track in tracks], anchors)
        for track, new_fit in zip(tracks, fits, strict=True):
            done = len(track.iterations)
            if done >= self._enough or new_fit.uncertainty <= self._tolerance:
                track.fit, track.current = new_fit, True
            if done >= self._warm_up:
                self._close(track)
            else:
                later = (self._enough, done * 3 // 2 + 1, self._warm_up)
                track.due = min(due for due in later if due > done)
        self.revision += 1
        self._derived.clear()

    def _close(self, track: _Track) -> None:
        track.learning = False
        track.forget()


def _clean(tokens: npt.ArrayLike, squares: npt.ArrayLike, seconds: npt.ArrayLike) -> Floats:
    """Return (3, n): the chunks with possible numbers."""
    try:
        chunks = np.stack([np.asarray(row, dtype=np.float64).ravel() for row in (tokens, squares, seconds)])
    except (TypeError, ValueError):
        return np.empty((3, 0))
    n, s, t = chunks
    return chunks[:, np.isfinite(chunks).all(axis=0) & (n > 0.0) & (s >= 0.0) & (t > 0.0)]


def _derive(key: Key, fits: list[tuple[Key, Fit]]) -> Coefficients:
    """Derive the work of a layer, of the embedding and of the head from all fits, and combine them as in `key`."""
    layers, tp, *ends = key
    rows = np.array([its_key[:1] + its_key[2:] for its_key, _ in fits], dtype=np.float64)
    degrees = np.array([its_key[1] for its_key, _ in fits], dtype=np.float64)
    coefficients = np.array([_apart(own_fit) for _, own_fit in fits])  # c, alpha, beta
    work = np.concatenate([coefficients[:, :1], coefficients[:, 1:] * degrees[:, None]], axis=1)
    near = np.where(degrees == tp, 1.0, 0.1)  # kernels of another degree have another efficiency
    parts = np.array([layers, *ends], dtype=np.float64)
    derived = [_share(rows, work[:, i], near, (0,) if i == 2 else (0, 1, 2)) @ parts for i in range(3)]
    return Coefficients(float(derived[0]), float(derived[1] / tp), float(derived[2] / tp))


def _share(rows: Floats, work: Floats, near: Floats, columns: tuple[int, ...]) -> Floats:
    """Return (3,): work of a layer, the embedding and the head, so that rows @ it is `work` (keys,). Not negative."""
    largest = float(work.max())
    if largest <= 0.0:
        return np.zeros(3)
    ridge = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])  # work that cannot be separated is attributed to layers
    design, target = np.concatenate([rows, ridge]), np.concatenate([work, [0.0, 0.0]])
    return non_negative(design, target, np.concatenate([near, [1e-6, 1e-6]]), columns)


def _apart(source: Fit) -> tuple[float, float, float]:
    """Return c, alpha, beta with alpha unfolded: nearly all of the part that S does not explain is work on tokens."""
    c, alpha, beta = source.coefficients.intercept_s, source.coefficients.per_token_s, source.coefficients.per_square_s
    return (0.0, alpha + c / source.tokens, beta) if source.folded else (c, alpha, beta)


def _middle(ratios: list[float] | tuple[float, ...]) -> float:
    return float(np.median(ratios)) if ratios else np.nan


def _scatter(rank: int) -> tuple[int, int]:
    """Return a sort key that orders ranks independently of their place (Knuth's multiplicative hash)."""
    return (rank * 2654435761 % (1 << 32), rank)
