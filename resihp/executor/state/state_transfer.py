"""Carries out the moves of a transition: sends slices of parameters and moments from rank to rank, in bounded chunks.

`resihp.parallelism.transfers` decides the senders and receivers, and both ends know them; only values are sent. Moves
are carried out in one order that is equal on all ranks, chunk by chunk. Each pair of ranks uses one communicator, which
may be the plan's own (`groups_for`). At most two chunks of a rank are in flight. Called by the engine; frees nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from resihp.executor.communicators import Communicators
from resihp.executor.compute.channels import PendingWork
from resihp.executor.compute.iteration import Observer, waiting
from resihp.executor.state.rank_state import State
from resihp.parallelism.ownership import ParameterSpec, Slice
from resihp.parallelism.transfers import Move
from resihp.pipeline.program import GroupSpec

CHUNK_BYTES = 16 << 20
"""Bytes of state in one message. In addition to old and new state, a transition needs memory for a few messages."""
MAX_CHUNKS_IN_FLIGHT = 2
"""Maximum number of chunks in flight on one rank."""


STATE_GROUP_PREFIX = "state/"
"""Prefix of the names of communicators that only move state."""


def groups_for(moves: Sequence[Move], plan_groups: Sequence[GroupSpec]) -> dict[frozenset[int], GroupSpec]:
    """Return the communicator that each pair of ranks uses to move state, in both directions.

    If the plan has a communicator of exactly these two ranks, it is used: it is idle until the plan is in effect, while
    another one would take time to build, and memory of a device that has two states. Communicators between stages are
    not used, since NCCL gives them few channels (`backends.EDGE_CTAS`).
    """
    of_two = {frozenset(group.ranks): group for group in plan_groups if len(group.ranks) == 2 and group.use != "edge"}
    groups: dict[frozenset[int], GroupSpec] = {}
    for move in moves:
        pair = frozenset((move.source, move.target))
        own = GroupSpec(f"{STATE_GROUP_PREFIX}{min(pair)}-{max(pair)}", (min(pair), max(pair)))
        groups.setdefault(pair, of_two.get(pair, own))
    return groups


def move_state(
    moves: Sequence[Move],
    groups: Mapping[frozenset[int], GroupSpec],
    rank: int,
    old: State | None,
    new: State | None,
    specs: Mapping[str, ParameterSpec],
    communicators: Communicators,
    observer: Observer,
    device: torch.device,
) -> int:
    """Send this rank's slices from `old` and receive slices into `new`. Return the number of bytes received.

    `groups` is the result of `groups_for`. Raises CommunicatorError if a peer is lost or the rank is woken; `old` is
    never changed.
    """
    received = 0
    under_way: deque[tuple[PendingWork, Tensor, list[Tensor]]] = deque()
    for move in moves:
        if rank not in (move.source, move.target):
            continue
        state = old if rank == move.source else new
        assert state is not None, f"rank {rank}: no state for the move {move.source} -> {move.target}"
        group = groups[frozenset((move.source, move.target))]
        channel = communicators.channel(group.name)
        root = group.ranks.index(move.source)
        for views in _chunks(move, state, specs):
            if rank == move.source:
                flat = torch.cat([view.reshape(-1) for view in views])
                targets: list[Tensor] = []
            else:
                flat = torch.empty(sum(view.numel() for view in views), dtype=views[0].dtype, device=device)
                targets = views
                received += flat.nbytes
            under_way.append((channel.broadcast(flat, root), flat, targets))
            if len(under_way) >= MAX_CHUNKS_IN_FLIGHT:
                _finish(*under_way.popleft(), observer)
    while under_way:
        _finish(*under_way.popleft(), observer)
    communicators.settle()  # all state to be acknowledged has arrived, and all sent state has left
    return received


def copy_kept(old: State, new: State) -> None:
    """Copy the slices that stay on this rank from `old` to `new`, if the rank's share of the parameter has changed.
    Shared tensors need no copy."""
    for name, spec in new.specs.items():
        if name not in old.specs or old.optimizer.parameters[name] is new.optimizer.parameters[name]:
            continue
        ours, theirs = old.share(spec), new.share(spec)
        start, stop = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
        if start < stop:
            piece = Slice(name, start, stop)
            sources = old.tensors(spec, piece)
            for kind, target in new.tensors(spec, piece).items():
                target.copy_(sources[kind])


def _chunks(move: Move, state: State, specs: Mapping[str, ParameterSpec]) -> Iterator[list[Tensor]]:
    """Yield views of a move's tensors in the order of their transfer, in chunks that are equal at both ends."""
    chunk: list[Tensor] = []
    filled = 0
    for piece in move.slices:
        for tensor in state.tensors(specs[piece.name], piece).values():
            for part in _cut(tensor):
                if chunk and filled + part.nbytes > CHUNK_BYTES:
                    yield chunk
                    chunk, filled = [], 0
                chunk.append(part)
                filled += part.nbytes
    if chunk:
        yield chunk


def _cut(tensor: Tensor) -> Iterator[Tensor]:
    """Yield pieces of at most `CHUNK_BYTES`, cut along the longest axis. Both ends know the shape, so their pieces are
    equal."""
    if tensor.nbytes <= CHUNK_BYTES:
        yield tensor
        return
    axis = max(range(tensor.ndim), key=lambda a: tensor.shape[a])
    yield from tensor.chunk(-(-tensor.nbytes // CHUNK_BYTES), dim=axis)


def _finish(transfer: PendingWork, flat: Tensor, targets: list[Tensor], observer: Observer) -> None:
    with waiting(observer, "state transfer"):
        transfer.wait()
    for target, part in zip(targets, flat.split([t.numel() for t in targets]) if targets else (), strict=True):
        target.copy_(part.view(target.shape))
    observer.progressed()
