"""Predicts the seconds of a chunk on a healthy device, by the paper's Eq. 1, which it learns in a warm-up.

For each key and kind of chunk, it keeps the chunks of the first iterations and fits c + alpha N + beta S to them
(`regression`), with N tokens and a sum of squared lengths S. Then it discards the chunks. The fit does not change until
a refit is requested, so that a slow-down is never learnt as healthy. The coefficients of a key without observations, as
after a reconfiguration, are derived from other keys until that key has been observed long enough. Without any basis,
the prediction is None.

Never judges whether a time is too long: its callers, `monitor` and `resihp.detector.rivals`, do. Pure, no clock.
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
"""Type of a chunk, regardless of its place in the pipeline: (number of layers, tensor-parallel degree, whether it has
the embedding, whether it has the head)."""

Known = Literal["fitted", "rescaled", "unknown"]

MAX_RANKS_PER_KEY = 32
"""Largest number of ranks per key that are learnt from; of more ranks, a sample."""
KEPT_FORMER_ITERATIONS = 8
"""Number of iterations of earlier learning that are kept, for a refit that adds other workloads."""
MAX_EXTRAPOLATION = 0.1
"""Relative margin by which N and S may be outside of the learnt range."""
MAX_CHUNKS_PER_ITERATION = 16
"""Largest number of chunks of each kind that are kept per rank and iteration."""


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
    """Learning state of one key and kind: the fit, and the chunks that the next fit will use."""

    def __init__(self, least: int, latest: int) -> None:
        self.latest = latest
        """Latest iteration with a chunk that was kept."""
        self.fit: Fit | None = None
        """The latest fit; None before the first."""
        self.current = False
        """Whether the fit is from the present warm-up; False if a refit was requested since."""
        self.learning = True
        """Whether chunks are still being collected; False once the fit is final."""
        self.due = least
        """Number of collected iterations at which the next fit is made."""
        self.iterations: set[int] = set()
        self._ranks: set[int] = set()
        self._last = (0, 0)
        """Sort key (`_scatter`) of the last of the kept ranks."""
        self._samples_taken: list[tuple[int, int, Floats]] = []
        """Kept chunks of this warm-up: iteration, rank, and (3, n) of N, S and seconds."""
        self._former: list[tuple[int, int, Floats]] = []
        """Kept chunks of some iterations of earlier warm-ups."""
        self.beside: list[tuple[int, int, Floats]] = []
        """Chunks of earlier warm-ups that the next fit uses as well; empty unless the refit was a union."""

    def keeps(self, rank: int) -> bool:
        """Return whether chunks of `rank` are kept. Of many ranks, the first ones in `_scatter` order are kept."""
        return rank in self._ranks or len(self._ranks) < MAX_RANKS_PER_KEY or _scatter(rank) < self._last

    def take(self, rank: int, iteration: int, chunks: Floats) -> None:
        """Keep the chunks of one rank and iteration: (3, n) of N, S and seconds. Call only if `keeps` is true for
        `rank`."""
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
        """Iterations from which chunks are kept."""
        return self.iterations | {iteration for iteration, _, _ in self.beside}

    def samples(self, index: Mapping[int, int]) -> Samples:
        """Return all kept chunks as arrays; `index`: position of each iteration."""
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
        """Discard the kept chunks, to learn again; with `union`, the next fit also uses some of the earlier chunks."""
        if self._samples_taken:
            some = sorted(self.iterations)[:: -(-len(self.iterations) // KEPT_FORMER_ITERATIONS)]
            self._former = (self.beside + [taken for taken in self._samples_taken if taken[0] in some])[
                -3 * KEPT_FORMER_ITERATIONS * MAX_RANKS_PER_KEY :
            ]
        self.beside = self._former if union else []
        self.iterations, self._ranks, self._samples_taken = set(), set(), []


class Predictor:
    """Predicts the seconds of a healthy chunk from its key, kind, token count N and sum of squared lengths S (Eq. 1).

    `kind` is F, B or W, or any other name that the caller distinguishes. A backward pass that also computes weight
    gradients is another kind than one that leaves them to a W.

    A key is known once `least` iterations were observed and the relative standard error of its prediction is at most
    `tolerance`, and in any case after `enough` iterations. The fit is refined a few times until `warm_up` iterations
    were observed, then it is final. If iterations vary by 3 %, correlated with 0.5, their level is known to 1.1 % after
    20 iterations and to 0.8 % after 40. Memory per key does not grow with the number of observations; the time of
    `observe` and `predict` is linear in the number of chunks.
    """

    def __init__(self, *, least: int = 8, enough: int = 20, warm_up: int = 40, tolerance: float = 0.02) -> None:
        if not 1 < least <= enough <= warm_up:
            raise ValueError(f"least {least}, enough {enough}, warm-up {warm_up}: give 1 < least <= enough <= warm_up")
        self._least, self._enough, self._warm_up, self._tolerance = least, enough, warm_up, tolerance
        self._tracks: dict[tuple[Key, str], _Track] = {}
        self._anchors: dict[int, list[float]] = {}
        """Log of observed over predicted seconds of known keys, by iteration; from it, fits of unknown keys take the
        iteration's factor."""
        self._seen = -1
        """The latest iteration with an observation."""
        self._due = False
        """Whether some track has enough iterations for its next fit."""
        self._derived: dict[tuple[Key, str], Coefficients | None] = {}
        """Cache of `rescaled`."""
        self.revision = 0
        """Counter of changes of the predictions. After a change, callers learn levels relative to predictions again."""

    @property
    def learning(self) -> bool:
        """Whether any key that still occurs is being learnt. If not, callers need to pass only new keys to
        `observe`."""
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
        """Learn from chunks of one rank in one iteration.

        `tokens`, `squares`, `seconds`: N, S and the seconds of the rank's own work, each of shape (n,). Iterations may
        come in any order and have gaps. A chunk with a value that is not finite or not positive is left out (S may be
        0); arrays of different shapes are ignored. Do not pass ranks that are known to be slow; other slow ranks are
        recognised by comparison with peers of the same key, and left out of the fit.
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
        """Return the seconds of healthy chunks with token counts N and sums of squared lengths S, arrays of any shape.

        None while the key and kind are unknown.
        """
        coefficients = self.coefficients(key, kind)
        return None if coefficients is None else coefficients.seconds(tokens, squares)

    def coefficients(self, key: Key, kind: str) -> Coefficients | None:
        """Return the coefficients that `predict` uses: fitted ones if the key was observed long enough, else derived
        ones.

        None while both are missing.
        """
        self._refresh()
        track = self._tracks.get((key, kind))
        return track.fit.coefficients if track is not None and track.fit is not None else self.rescaled(key, kind)

    def covers(self, work: Iterable[tuple[Key, str]], tokens: npt.ArrayLike, squares: npt.ArrayLike) -> bool:
        """Return whether the micro-batches are within the learnt range of each key and kind in `work`.

        Outside of that range, Eq. 1 would extrapolate. `tokens`, `squares`: N and S of the micro-batches, arrays of any
        shape; NaN is ignored. A quarter of the micro-batches may be outside. A key without a fit is ignored.
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
        """Return whether this key and kind were observed long enough since the last refit."""
        self._refresh()
        track = self._tracks.get((key, kind))
        return track is not None and track.fit is not None and track.current

    def known(self, key: Key, kind: str) -> Known:
        """Return the source of a prediction: "fitted", "rescaled" from other keys, or "unknown"."""
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
        """Return, for each rank that was learnt from, its time over the fitted time: far above 1 if the rank was
        slow."""
        self._refresh()
        track = self._tracks.get((key, kind))
        return {} if track is None or track.fit is None else dict(track.fit.ratios)

    def freeze(self) -> None:
        """Stop learning keys that are known, because devices may be slow from now on."""
        self._refresh()
        for track in self._tracks.values():
            if track.current:
                self._close(track)

    def refit(self, key: Key | None = None, kind: str | None = None, *, union: bool = False) -> None:
        """Learn again: one key, one kind, or, without arguments, everything. Until then the old predictions are used.

        `union`: fit earlier samples as well, because only the workload has changed.
        """
        for (its_key, its_kind), track in self._tracks.items():
            if key in (None, its_key) and kind in (None, its_kind):
                track.forget(union=union)
                track.learning, track.current = True, False
                track.due, track.latest = self._least, self._seen

    def rescaled(self, key: Key, kind: str) -> Coefficients | None:
        """Derive the coefficients of `key` from other keys.

        Work grows with the number of layers and is divided among tensor-parallel peers; launch overhead is not divided.
        The work of embedding and head is separated as far as the known keys allow; the rest is attributed to layers.
        None if no other key of this kind has a fit.
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
        """Make the fits that are due, and update `revision` if there are any."""
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
    """Return (3, n): N, S and seconds of the chunks with valid values."""
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
    """Return (3,): the work of a layer, of the embedding and of the head, none negative.

    It solves rows @ result = `work` (keys,) by least squares.
    """
    largest = float(work.max())
    if largest <= 0.0:
        return np.zeros(3)
    ridge = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])  # work that cannot be separated is attributed to layers
    design, target = np.concatenate([rows, ridge]), np.concatenate([work, [0.0, 0.0]])
    return non_negative(design, target, np.concatenate([near, [1e-6, 1e-6]]), columns)


def _apart(source: Fit) -> tuple[float, float, float]:
    """Return c, alpha, beta of a fit. If alpha was folded into c, all of c is attributed to tokens, because nearly all
    work that S does not explain is work on tokens."""
    c, alpha, beta = source.coefficients.intercept_s, source.coefficients.per_token_s, source.coefficients.per_square_s
    return (0.0, alpha + c / source.tokens, beta) if source.folded else (c, alpha, beta)


def _middle(ratios: list[float] | tuple[float, ...]) -> float:
    return float(np.median(ratios)) if ratios else np.nan


def _scatter(rank: int) -> tuple[int, int]:
    """Return a sort key that shuffles ranks deterministically (Knuth's multiplicative hash)."""
    return (rank * 2654435761 % (1 << 32), rank)
