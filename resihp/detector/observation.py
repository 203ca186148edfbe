"""Defines the measurements of one iteration as workers report them, and their encoding on the wire.

Used by workers, the controller and the detector; nothing here judges a measurement. A rank measures five numbers for
each primitive of its stage's order (`resihp.pipeline.schedules.orders_of`); they are sent row by row in the order of
`CHUNKS`, as little-endian float32 (`pack`). Offsets are seconds since the iteration began. All ranks begin an iteration
at the same time, to within the latency of a collective, because the last synchronisation of the previous iteration
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
"""Rows of a rank's measurements, one column per primitive. `starts`: offset at which all inputs of the primitive had
arrived; `spans`: seconds from then to the primitive's end, including waits for late tensor-parallel peers; `compute`:
seconds of this span that are the rank's own work; `tokens`, `squares`: token count N and sum of squared lengths S of
the micro-batch."""


class RankTimes(msgspec.Struct, frozen=True, eq=False):
    """The measurements of one rank in one iteration."""

    rank: int
    seconds: float
    """Seconds of the whole iteration, including the optimizer step."""
    chunks: Floats
    """Measurements of shape (5, primitives), with the rows of `CHUNKS`."""
    reduced: float
    """Offset, in seconds, at which all gradients of the rank were reduced."""

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
    """The measurements of all ranks in one committed iteration."""

    iteration: int
    epoch: int
    seconds: float
    """Seconds of the iteration on the slowest rank."""
    times: Mapping[int, RankTimes]
    """Measurements by rank, without ranks that lost their report; empty if measuring is switched off."""


def pack(rows: npt.ArrayLike) -> bytes:
    """Encode an array of shape (5, primitives) for the wire."""
    return np.ascontiguousarray(rows, dtype="<f4").tobytes()


def unpack(packed: bytes, where: str) -> Floats:
    """Decode bytes that `pack` returned, into shape (5, primitives). NaN is preserved; the detector ignores it.

    `where` begins the message of the ProtocolError for an impossible length.
    """
    row = 4 * len(CHUNKS)
    if len(packed) % row:
        raise ProtocolError(f"{where}: {len(packed)} bytes of measurements, not a multiple of {row}")
    return np.frombuffer(packed, dtype="<f4").reshape(len(CHUNKS), -1).astype(np.float64)
