"""Memory of a device that is not available for state and activations: CUDA, NCCL, transfer buffers, gaps. Pure.

The constants are cautious estimates; none is measured, because no GPU was available. `benchmarks.gpu` measures each of
them; its figures should then replace the constants here, their only copy. On CPUs, nothing is counted. Not included:
the buffer in which gradients add up, which is part of state (`tensor_bytes.STATE_BYTES`); copies of gradients that
cannot be summed in place because replicas cut them differently (`executor.state.gradients`); and the second copy of
state during a transition, when there are no activations (`transition_memory`).

Called by the planner and by the executor, which must use the same `overhead`.
"""

from __future__ import annotations

import msgspec

from resihp.record.describe import size

MIN_BYTES_IN_GB = 100_000_000
"""Sizes of at least this many bytes are printed in GB."""
CONTEXT_BYTES = 500_000_000
"""Memory of a process that uses CUDA: its context, and the kernels of torch and of its libraries. About half a GB on
Hopper, and more after the first use of a library that loads lazily. `nvidia-smi` shows it for a process with one small
tensor."""

CONNECTION_BYTES = 12 << 20
"""Memory of one NCCL channel to one peer. Its buffers for three protocols take 4 MiB (Simple), 4.7 MiB (LL128) and 0.5
MiB (LL) (NCCL's init.cc, computeBuffSizes), which are allocated as 10 MiB; the flags of the other direction take 2 MiB
(allocations of eight H100, issue 1685 of NVIDIA/nccl)."""
PEERS_PER_CHANNEL = 2
"""Peers for which a channel has such buffers: one in its ring and one in its chain, or both directions over a
network."""
CHANNELS_PER_COMMUNICATOR = 24
"""Channels of a communicator, as many as NCCL uses on a node of eight H100. All are connected when the communicator is
created (`NCCL_RUNTIME_CONNECT=0`)."""
EDGE_CHANNELS = 4
"""Channels of a communicator between two stages: the limit `backends.EDGE_CTAS`."""

LARGE_COMMUNICATORS = 6
"""Communicators of a rank that are not between stages: one of all ranks, one of its tensor-parallel group, and those
for sums. A rank has several for sums if its replicas are cut differently. Most ranks have only two or three
communicators that are not between stages."""
EDGE_COMMUNICATORS = 8
"""Communicators of a rank between stages: two directions for each of two neighbours, and twice as many beside a group
of half its degree."""

TRANSFER_BYTES = 2 * (16 << 20)
"""Buffers of a state transfer: two messages of `state_transfer.CHUNK_BYTES`."""

GAP_SHARE = 0.05
"""Assumed share that gaps between allocations add to state and activations. State is allocated once; activations come
and go with the lengths of micro-batches. Where all sizes vary, as in fine-tuning, gaps were 15 % on average (Guo et
al., "GMLake", 2024)."""


class Overhead(msgspec.Struct, frozen=True):
    """Memory that every rank's device needs under any plan: `parts` in bytes, by purpose, and the share that `gaps`
    add."""

    parts: tuple[tuple[str, int], ...] = ()
    gaps: float = 0.0

    def room(self, memory_bytes: int) -> int:
        """Return the bytes for state and activations on a device with `memory_bytes`; negative if the overhead alone
        exceeds it."""
        return int((memory_bytes - self._fixed) / (1 + self.gaps))

    def with_gaps(self, needed_bytes: int) -> int:
        """Return the memory that a device needs for `needed_bytes` of state and activations; 0 for a device without
        work."""
        return int(needed_bytes * (1 + self.gaps)) + self._fixed if needed_bytes else 0

    def describe(self, state_bytes: int, activation_bytes: int) -> str:
        """Describe the memory that each part takes."""
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
    """Return the overhead of a rank on a device ("cpu" or "cuda") with a communication back end
    (`executor.backends`)."""
    if device != "cuda":
        return NO_OVERHEAD
    parts = [("CUDA's context", CONTEXT_BYTES), ("transfer buffers", TRANSFER_BYTES)]
    if back_end == "nccl":
        parts.append(("NCCL's communicators", communicator_bytes(LARGE_COMMUNICATORS, EDGE_COMMUNICATORS)))
    return Overhead(tuple(parts), GAP_SHARE)


def communicator_bytes(large: int, edges: int) -> int:
    """Return the memory of NCCL's communicators: `large` ones, and `edges` between two ranks of different stages."""
    return (large * CHANNELS_PER_COMMUNICATOR + edges * EDGE_CHANNELS) * PEERS_PER_CHANNEL * CONNECTION_BYTES
