"""What of a device's memory is not for state and activations: CUDA's, NCCL's, what carries state, and gaps. Pure.

Estimates on the careful side, none of them measured: no GPU was at hand. `benchmarks.gpu` measures each of them, and
whoever has its figures corrects the constants here, which are all that there are. On processors nothing is counted.
What is not here: the buffer in which gradients add up, which is part of state (`memory.STATE_BYTES`); copies of those
that cannot be summed where they lie, since replicas cut them differently (`executor.state.gradients`); and the second
copy of state while a transition is under way, when there are no activations (`transition_memory`).

Called by the planner and by the executor, both of which have to come to the same (`overhead`).
"""

from __future__ import annotations

import msgspec

from resihp.record.describe import size

FEW_BYTES = 100_000_000
"""Less is not told in GB."""
CONTEXT_BYTES = 500_000_000
"""Of a process that uses CUDA: its context, the kernels of torch and of its libraries. About half a GB on Hopper, more
with a lazy library's first use; `nvidia-smi` shows it for a process that holds one small tensor."""

CONNECTION_BYTES = 12 << 20
"""Of one channel of NCCL's to one peer: buffers of three protocols, 4 MiB (Simple), 4.7 MiB (LL128) and 0.5 MiB (LL)
(NCCL's init.cc, computeBuffSizes), which are allocated as 10 MiB, and 2 MiB of the other direction's flags (allocations
of eight H100, issue 1685 of NVIDIA/nccl)."""
PEERS = 2
"""That a channel has such buffers for: a ring's one and a chain's other one, or over a network both directions."""
CHANNELS = 24
"""Of a communicator, as many as NCCL takes on a node of eight H100. All are connected when it is made
(`NCCL_RUNTIME_CONNECT=0`)."""
EDGE_CHANNELS = 4
"""Of one between two stages: as many as `backends.EDGE_CTAS` allows."""

LARGE_COMMUNICATORS = 6
"""Of a rank, not between stages: the world's, a tensor-parallel group's and those of sums, of which a rank whose
replicas are cut differently has several. Most have two or three."""
EDGE_COMMUNICATORS = 8
"""Of a rank, between stages: two directions of two neighbours, and twice these beside a group of half its degree."""

TRANSFER_BYTES = 2 * (16 << 20)
"""Of state on its way: two messages of `state_transfer.CHUNK_BYTES`."""

GAPS = 0.05
"""Of state and activations, what gaps between allocations add: an assumption. State is allocated once; activations come
and go with the lengths of micro-batches. Where all does, as in fine-tuning, gaps were 15 % (Guo et al., "GMLake", 2024,
on average)."""


class Overhead(msgspec.Struct, frozen=True):
    """Bytes that a rank's device must have whatever its plan, by what they are for, and the share that gaps add."""

    parts: tuple[tuple[str, int], ...] = ()
    gaps: float = 0.0

    def room(self, memory_bytes: int) -> int:
        """What a device has for state and activations; negative where it is too small for anything."""
        return int((memory_bytes - self._fixed) / (1 + self.gaps))

    def with_gaps(self, needed_bytes: int) -> int:
        """What a device must have for so much state and activations; nothing where there is nothing to do."""
        return int(needed_bytes * (1 + self.gaps)) + self._fixed if needed_bytes else 0

    def told(self, state_bytes: int, activation_bytes: int) -> str:
        """Which part takes how much, in words."""
        rows = [("state", state_bytes), ("activations", activation_bytes), *self.parts]
        if self.gaps:
            rows.append(("gaps between allocations", int((state_bytes + activation_bytes) * self.gaps)))
        return ", ".join(f"{_in_words(count)} of {name}" for name, count in rows)

    @property
    def _fixed(self) -> int:
        return sum(size for _, size in self.parts)


def _in_words(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= FEW_BYTES else size(count)


NOTHING = Overhead()


def overhead(device: str, back_end: str) -> Overhead:
    """Of a rank that works on such a device ("cpu", "cuda") with such a back end (`executor.backends`)."""
    if device != "cuda":
        return NOTHING
    parts = [("CUDA's context", CONTEXT_BYTES), ("state on its way", TRANSFER_BYTES)]
    if back_end == "nccl":
        parts.append(("NCCL's communicators", communicator_bytes(LARGE_COMMUNICATORS, EDGE_COMMUNICATORS)))
    return Overhead(tuple(parts), GAPS)


def communicator_bytes(large: int, edges: int) -> int:
    """Of so many of NCCL's communicators, `edges` of them between two ranks of different stages."""
    return (large * CHANNELS + edges * EDGE_CHANNELS) * PEERS * CONNECTION_BYTES
