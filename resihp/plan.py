"""What all ranks agree on: an epoch, a layout, who computes which micro-batch, in which order.

Written by the controller, confirmed by every rank through `Plan.digest` before the first group is built.
"""

from __future__ import annotations

import hashlib

import msgspec

from resihp.errors import LayoutError
from resihp.layout import Layout

SCHEDULES = ("1f1b",)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch's agreement.

    `assignment[d]` lists the micro-batches, by their index in the global batch, that replica d computes, in order.
    """

    epoch: int
    layout: Layout
    assignment: tuple[tuple[int, ...], ...]
    schedule: str = "1f1b"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the global batch."""
        return sum(len(share) for share in self.assignment)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical encoding."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).hexdigest()


def spread(micro_batches: int, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Give each replica a contiguous share of the global batch, as even as it goes, the remainder to the first.

    Raises LayoutError when a replica would get none.
    """
    if micro_batches < replicas:
        raise LayoutError(
            f"{micro_batches} micro-batches an iteration cannot feed {replicas} replicas; "
            f"raise --micro-batches to {replicas} or more, or lower the data-parallel degree"
        )
    shares: list[tuple[int, ...]] = []
    first = 0
    for d in range(replicas):
        count = micro_batches // replicas + (d < micro_batches % replicas)
        shares.append(tuple(range(first, first + count)))
        first += count
    return tuple(shares)
