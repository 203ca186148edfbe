"""The measurements of one iteration, as the workers reported them. Facts only; nothing here judges them.

A rank measures each primitive of its stage's order (`resihp.pipeline.schedules.orders_of`): five numbers each, one row
of `CHUNKS` after the other, as little-endian float32 on the wire (`pack`). Offsets count from the beginning of the
iteration, which all ranks share to within a collective's latency: the last synchronisation of the previous iteration
releases them together.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.errors import ProtocolError

Floats = npt.NDArray[np.float64]

CHUNKS = ("starts", "spans", "compute", "tokens", "squares")
"""Rows of a rank's measurements. `starts`: offset at which a primitive had all its inputs; `spans`: seconds until it
was done, including the lateness of tensor-parallel peers; `compute`: the part of it, in seconds, that is this rank's
own work; `tokens`, `squares`: N and sum of squared lengths of its micro-batch."""


class RankTimes(msgspec.Struct, frozen=True, eq=False):
    """One rank's iteration: `chunks` has shape (5, primitives), rows as in CHUNKS. Seconds."""

    rank: int
    seconds: float
    """Of the whole iteration, including the optimizer step."""
    chunks: Floats
    reduced: float
    """Offset at which all of its gradients were reduced."""

    @property
    def starts(self) -> Floats:
        row: Floats = self.chunks[0]
        return row

    @property
    def spans(self) -> Floats:
        row: Floats = self.chunks[1]
        return row

    @property
    def compute(self) -> Floats:
        row: Floats = self.chunks[2]
        return row

    @property
    def tokens(self) -> Floats:
        row: Floats = self.chunks[3]
        return row

    @property
    def squares(self) -> Floats:
        row: Floats = self.chunks[4]
        return row


class Observation(msgspec.Struct, frozen=True, eq=False):
    """One committed iteration. `times` may lack ranks with a lost report; it is empty if measuring is switched off."""

    iteration: int
    epoch: int
    seconds: float
    """Of the slowest rank."""
    times: Mapping[int, RankTimes]


def pack(rows: npt.ArrayLike) -> bytes:
    """Encode an array of shape (5, primitives) for the wire."""
    return np.ascontiguousarray(rows, dtype="<f4").tobytes()


def unpack(packed: bytes, where: str) -> Floats:
    """Decode bytes of `pack`; NaN is kept, and judges ignore it. Raises ProtocolError for an impossible length."""
    row = 4 * len(CHUNKS)
    if len(packed) % row:
        raise ProtocolError(f"{where}: {len(packed)} bytes of measurements, not a multiple of {row}")
    return np.frombuffer(packed, dtype="<f4").reshape(len(CHUNKS), -1).astype(np.float64)
