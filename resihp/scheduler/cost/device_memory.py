"""Memory of a device that is not available for state and activations: CUDA, NCCL, transfer buffers, and gaps. Pure.

Cautious estimates, none of them measured: no GPU was available. `benchmarks.gpu` measures each of them; its figures
should then replace the constants here, which exist nowhere else. On CPUs nothing is counted. Not included: the buffer
in which gradients add up, which is part of state (`tensor_bytes.STATE_BYTES`); copies of gradients that cannot be
summed in place, since replicas cut them differently (`executor.state.gradients`); and the second copy of state during a
transition, when there are no activations (`transition_memory`).

Called by the planner and by the executor, which must agree on the result (`overhead`).
"""

from __future__ import annotations

import msgspec

from resihp.record.describe import size

MIN_BYTES_IN_GB = 100_000_000
"""Smallest number of bytes that is printed in GB."""
CONTEXT_BYTES = 500_000_000
"""Memory of a process that uses CUDA: its context, the kernels of torch and of its libraries. About half a GB on
Hopper, more after the first use of a lazy library; `nvidia-smi` shows it for a process that holds one small tensor."""

CONNECTION_BYTES = 12 << 20
"""Memory of one NCCL channel to one peer: buffers of three protocols, 4 MiB (Simple), 4.7 MiB (LL128) and 0.5 MiB (LL)
(NCCL's init.cc, computeBuffSizes), which are allocated as 10 MiB, and 2 MiB of the other direction's flags (allocations
of eight H100, issue 1685 of NVIDIA/nccl)."""
PEERS_PER_CHANNEL = 2
"""Peers for which a channel has such buffers: one in its ring and another in its chain, or over a network both
directions."""
CHANNELS_PER_COMMUNICATOR = 24
"""Channels of a communicator, as many as NCCL takes on a node of eight H100. All are connected when it is made
(`NCCL_RUNTIME_CONNECT=0`)."""
EDGE_CHANNELS = 4
"""Channels of a communicator between two stages, as many as `backends.EDGE_CTAS` allows."""

LARGE_COMMUNICATORS = 6
"""Communicators of a rank that are not between stages: the world's, a tensor-parallel group's and those of sums. A rank
whose replicas are cut differently has several of the last. Most ranks have two or three in all."""
EDGE_COMMUNICATORS = 8
"""Communicators of a rank between stages: two directions of two neighbours, and twice as many beside a group of half
its degree."""

TRANSFER_BYTES = 2 * (16 << 20)
"""Buffers of a state transfer: two messages of `state_transfer.CHUNK_BYTES`."""

GAP_SHARE = 0.05
"""Share that gaps between allocations add to state and activations: an assumption. State is allocated once; activations
come and go with the lengths of micro-batches. Where everything varies, as in fine-tuning, gaps were 15 % on average
(Guo et al., "GMLake", 2024)."""


class Overhead(msgspec.Struct, frozen=True):
    """Bytes that every rank's device must have under any plan, by purpose, and the share that gaps add."""

    parts: tuple[tuple[str, int], ...] = ()
    gaps: float = 0.0

    def room(self, memory_bytes: int) -> int:
        """Return the bytes that a device has for state and activations; negative if it is too small for any."""
        return int((memory_bytes - self._fixed) / (1 + self.gaps))

    def with_gaps(self, needed_bytes: int) -> int:
        """Return the memory that a device must have for these bytes of state and activations; 0 if it has no work."""
        return int(needed_bytes * (1 + self.gaps)) + self._fixed if needed_bytes else 0

    def describe(self, state_bytes: int, activation_bytes: int) -> str:
        """Describe how much each part takes."""
        rows = [("state", state_bytes), ("activations", activation_bytes), *self.parts]
        if self.gaps:
            rows.append(("gaps between allocations", int((state_bytes + activation_bytes) * self.gaps)))
        return ", ".join(f"{_in_words(count)} of {name}" for name, count in rows)

    @property
    def _fixed(self) -> int:
        return sum(size for _, size in self.parts)


def _in_words(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= MIN_BYTES_IN_GB else size(size_bytes)


NO_OVERHEAD = Overhead()


def overhead(device: str, back_end: str) -> Overhead:
    """Return the overhead of a rank on a device ("cpu", "cuda") with a back end (`executor.backends`)."""
    if device != "cuda":
        return NO_OVERHEAD
    parts = [("CUDA's context", CONTEXT_BYTES), ("transfer buffers", TRANSFER_BYTES)]
    if back_end == "nccl":
        parts.append(("NCCL's communicators", communicator_bytes(LARGE_COMMUNICATORS, EDGE_COMMUNICATORS)))
    return Overhead(tuple(parts), GAP_SHARE)


def communicator_bytes(large: int, edges: int) -> int:
    """Return the memory of NCCL's communicators; `edges` of them are between two ranks of different stages."""
    return (large * CHANNELS_PER_COMMUNICATOR + edges * EDGE_CHANNELS) * PEERS_PER_CHANNEL * CONNECTION_BYTES
