"""What was measured of one iteration, as the workers reported it. Facts only; nothing here judges them.

A rank measures each primitive of its stage's order (`resihp.pipeline.schedules.orders_of`): five numbers each, one row
of `CHUNKS` after the other, as little-endian float32 on the wire (`pack`). Offsets are from the iteration's beginning,
which all ranks share to within a collective's latency: the last synchronisation of the iteration before lets them go.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.errors import ProtocolError

Floats = npt.NDArray[np.float64]

CHUNKS = ("starts", "spans", "compute", "tokens", "squares")
"""Rows of a rank's measurements. `starts`: offset at which a primitive had all it needs; `spans`: seconds until it was
done, tensor-parallel peers' lateness included; `compute`: seconds of it in this rank's own work; `tokens`, `squares`: N
and sum of squared lengths of its micro-batch."""


class RankTimes(msgspec.Struct, frozen=True, eq=False):
    """One rank's iteration: `chunks` has shape (5, primitives), rows as in CHUNKS. Seconds."""

    rank: int
    seconds: float
    """Of the whole iteration, step included."""
    chunks: Floats
    reduced: float
    """Offset at which all of its gradients were summed."""

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
    """One committed iteration. `times` may lack ranks whose report was lost, and is empty where nobody measures."""

    iteration: int
    epoch: int
    seconds: float
    """The slowest rank's."""
    times: Mapping[int, RankTimes]


def pack(rows: npt.ArrayLike) -> bytes:
    """(5, primitives) as it crosses the wire."""
    return np.ascontiguousarray(rows, dtype="<f4").tobytes()


def unpack(packed: bytes, where: str) -> Floats:
    """The inverse of `pack`; NaN passes, who judges ignores it. Raises ProtocolError for what cannot be measured."""
    row = 4 * len(CHUNKS)
    if len(packed) % row:
        raise ProtocolError(f"{where}: {len(packed)} bytes of measurements, not a multiple of {row}")
    return np.frombuffer(packed, dtype="<f4").reshape(len(CHUNKS), -1).astype(np.float64)
