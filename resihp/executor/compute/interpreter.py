"""Executes one rank's program for one iteration: computation of chunks, transfers between stages, gradient sums.

The program determines the order of all work (`resihp.pipeline.program`); the interpreter never changes it. It waits
only for the inputs of a chunk, and at the end for all outstanding work. All state of an iteration belongs to an
`Interpreter`, which is discarded afterwards, so a failed iteration leaves nothing behind. Called by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from resihp.detector.observation import Floats
from resihp.errors import DatasetError
from resihp.executor.compute.channels import PendingWork
from resihp.executor.compute.iteration import Iteration, waiting
from resihp.executor.compute.stage import IGNORED_LABEL
from resihp.executor.compute.staging import staged
from resihp.executor.compute.stopwatch import Stopwatch
from resihp.executor.emulation import Pace
from resihp.executor.state.rank_state import State
from resihp.executor.tensor_group import guarded, ignore_start
from resihp.faults import Phase
from resihp.parallelism.layout import LayerSpan
from resihp.parallelism.plan import Primitive
from resihp.pipeline.program import Compute, Parcel, Program, Reduce, Transmit, edge_of, sums_of

_Key = tuple[Literal["forward", "backward"], int, int]
"""(direction, micro-batch, boundary), as in `Parcel`."""


@dataclass
class _Arrival:
    """A parcel on its way to this rank. The transfers fill `part`, the contiguous range of the tensor that this rank
    receives."""

    parcel: Parcel
    transfers: list[PendingWork]
    part: Tensor
    elements: int
    """Number of elements in the whole tensor."""


class Interpreter:
    """Executes the program of one iteration on one rank's state. Gradients accumulate in the parameters and are then
    reduced.

    Programs of an evaluation contain only forward passes, and change no state. The differentiated function is the mean
    loss over the tokens of the global batch. `pace` emulates a device's speed.
    """

    def __init__(self, iteration: Iteration, state: State, stopwatch: Stopwatch, pace: Pace | None = None) -> None:
        self._it = iteration
        self._state, self._stage, self._rank = state, state.stage, iteration.rank
        self._batch, self._multiple = iteration.batch, iteration.prepared.multiple
        self._communicators, self._observer = iteration.communicators, iteration.observer
        self._device, self._dtype = iteration.device, state.stage.config.params_dtype
        self._stopwatch, self._pace = stopwatch, pace
        self._total_tokens = sum(micro_batch.tokens for micro_batch in iteration.batch)
        self._tensor = iteration.communicators.find(iteration.prepared.tensor_group(*iteration.place))
        self._position = {
            (m, stop.chunk): v
            for m, path in iteration.prepared.paths.items()
            for v, stop in enumerate(path)
            if (stop.replica, stop.stage) == iteration.place
        }
        """Index of the virtual stage on the path of a micro-batch, by (micro-batch, chunk)."""
        self._split = {
            (i.primitive.micro_batch, i.primitive.chunk)
            for i in iteration.program
            if isinstance(i, Compute) and i.primitive.kind == "W"
        }
        self._cut: dict[tuple[int, int], list[int]] = {}
        """First layers of the parts of each backward pass that is split into parts, in program order."""
        for i in iteration.program:
            if isinstance(i, Compute) and i.layers is not None:
                self._cut.setdefault((i.primitive.micro_batch, i.primitive.chunk), []).append(i.layers[0])
        self._saved: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        """Inputs and output of each piece of a chunk's graph that is not differentiated yet. A graph that is not cut is
        one piece."""
        self._between: Tensor | None = None
        """Gradient of the inputs of the previous piece, during a backward pass that is split into parts; otherwise
        None."""
        self._produced: dict[_Key, Tensor] = {}
        """Results for other stages, until they are sent, or used by the next chunk if that is on this stage."""
        self._arriving: dict[_Key, _Arrival] = {}
        self._departing: list[tuple[PendingWork, Tensor]] = []
        self._summing: list[tuple[PendingWork, Tensor, list[Tensor]]] = []
        self._entered: set[Phase] = set()
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        """Sum of the loss over the tokens of this rank's micro-batches; 0 except on the last stage."""
        self._work: list[tuple[float, float]] = []
        """Tokens and sum of squared lengths of the micro-batch of each primitive."""

    def run(self) -> None:
        """Execute the program. Raises CommunicatorError after the loss of a peer, DatasetError, and errors of the data
        set."""
        with torch.set_grad_enabled(self._it.learns):
            self._run()

    def _run(self) -> None:
        try:
            for instruction in self._it.program:
                match instruction:
                    case Compute(primitive, layers):
                        self._compute(primitive, layers)
                    case Transmit(parcel):
                        self._transmit(parcel)
                    case Reduce(bucket):
                        self._reduce(bucket)
            self._finish()
        finally:
            self._stage.weights.discard()

    # --- chunks of work ---------------------------------------------------------------------------------------

    def _compute(self, primitive: Primitive, layers: LayerSpan | None) -> None:
        """Execute a primitive, or only the part of it for `layers`. All parts together are measured and reported as one
        primitive."""
        m, chunk = primitive.micro_batch, primitive.chunk
        first, last = self._state.holding.chunks[chunk]
        low, high = layers or (first, last)
        self._enter("forward" if primitive.kind == "F" else "backward")
        if high < last:
            self._stopwatch.go_on()
        if primitive.kind == "F":
            self._forward(m, chunk)
        elif primitive.kind == "B":
            self._backward(m, chunk, begins=high == last, ends=low == first)
        else:
            self._weights(m, chunk, layers, begins=high == last)
        if self._pace is not None:
            both = primitive.kind == "B" and (m, chunk) not in self._split
            work = "BW" if both else primitive.kind
            through = (last + 1 - low) / (last + 1 - first)
            self._stopwatch.emulate(self._pace(work, self._state.holding, chunk) * through)
        if low > first:
            self._stopwatch.pause()
            return
        self._stopwatch.end()
        micro_batch = self._batch[m]
        self._work.append((float(micro_batch.tokens), float(micro_batch.sum_squared_lengths)))
        self._observer.progressed()

    def workload(self) -> Floats:
        """Return an array of shape (2, primitives): tokens and sum of squared lengths of each micro-batch, in program
        order."""
        return np.array(self._work, dtype=np.float64).reshape(-1, 2).T

    def _forward(self, m: int, chunk: int) -> None:
        v = self._position[m, chunk]
        tokens, labels, lengths = self._load(m, chunk)
        inputs = tokens if v == 0 else self._take(("forward", m, v - 1)).requires_grad_(self._it.learns)
        assert inputs is not None
        self._stopwatch.begin()
        pieces = self._stage.in_pieces(chunk, lengths, inputs, labels, self._cut.get((m, chunk), ()))
        cut, output = pieces[-1]
        if labels is not None:
            self.loss_sum += output.detach()
            output = output / self._total_tokens
        if self._it.learns:
            self._saved[m, chunk] = [*pieces[:-1], (cut, output)]
        if labels is None:
            self._produced["forward", m, v] = output.detach()

    def _backward(self, m: int, chunk: int, *, begins: bool, ends: bool) -> None:
        """Differentiate one piece of a chunk's graph; all pieces if this part both `begins` and `ends` the backward
        pass."""
        v = self._position[m, chunk]
        if begins:
            self._between = None if self._ends(chunk) else self._take(("backward", m, v))
            self._stopwatch.begin()
        pieces = self._saved[m, chunk]
        for _ in range(len(pieces) if begins and ends else 1):
            inputs, output = pieces.pop()
            split = (m, chunk) in self._split
            with self._stage.weights.collecting((m, chunk, len(pieces))) if split else nullcontext():
                output.backward(self._between)
            self._between = inputs.grad
        if ends:
            del self._saved[m, chunk]
            if v > 0:
                assert self._between is not None
                self._produced["backward", m, v - 1] = self._between
            self._between = None

    def _weights(self, m: int, chunk: int, layers: LayerSpan | None, *, begins: bool) -> None:
        """Compute the weight gradients of a micro-batch, or of its piece with `layers`. Pieces count from the first
        layer."""
        if begins:
            self._stopwatch.begin()
        piece = 0 if layers is None else sorted(self._cut[m, chunk]).index(layers[0])
        self._stage.weights.finish((m, chunk, piece))

    def _ends(self, chunk: int) -> bool:
        """Return whether the chunk is the model's last one, which computes the loss."""
        return self._stage.last and chunk == len(self._state.holding.chunks) - 1

    def _load(self, m: int, chunk: int) -> tuple[Tensor | None, Tensor | None, tuple[int, ...]]:
        """Return (tokens, labels, lengths) of a micro-batch, padded. Tokens only for the first chunk, labels only for
        the last."""
        micro_batch = self._batch[m]
        lengths, size = micro_batch.lengths, micro_batch.tokens
        padding = -size % self._multiple
        if padding:
            lengths = (*lengths, padding)
        begins = self._stage.first and chunk == 0
        if not (begins or self._ends(chunk)):
            return None, None, lengths
        arrays = micro_batch.load()
        for name, array in zip(("tokens", "labels"), arrays, strict=True):
            if not isinstance(array, np.ndarray) or array.shape != (size,) or array.dtype != np.int64:
                raise DatasetError(f"micro-batch {m}: {name} must be int64 of shape [{size}], the sum of its lengths")
            if array.min() < 0 or array.max() >= self._it.vocab:
                raise DatasetError(f"micro-batch {m}: {name} outside the vocabulary of {self._it.vocab}")
        tokens, labels = (
            staged(torch.from_numpy(np.pad(array, (0, padding), constant_values=fill)), self._device)
            for array, fill in zip(arrays, (0, IGNORED_LABEL), strict=True)
        )
        return tokens if begins else None, labels if self._ends(chunk) else None, lengths

    # --- between stages ---------------------------------------------------------------------------------------

    def _shape(self, m: int) -> tuple[int, ...]:
        """Return the shape of this rank's activations of a micro-batch. Sequence parallelism divides the tokens among
        ranks."""
        tokens = -(-self._batch[m].tokens // self._multiple) * self._multiple
        return (tokens // self._parts, 1, self._stage.config.hidden_size)

    @property
    def _parts(self) -> int:
        return self._state.holding.tp if self._state.sequence_parallel else 1

    def _transmit(self, parcel: Parcel) -> None:
        key: _Key = (parcel.direction, parcel.micro_batch, parcel.boundary)
        shape = self._shape(parcel.micro_batch)
        elements = shape[0] * shape[2] * self._parts
        outgoing = [piece for piece in parcel.pieces if piece.sender == self._rank]
        incoming = [piece for piece in parcel.pieces if piece.receiver == self._rank]
        if outgoing:
            flat = self._produced.pop(key).reshape(-1)
            low = self._state.holding.t * flat.numel() if self._parts > 1 else 0
            for piece in outgoing:
                part = flat[piece.start * elements // piece.of - low : piece.stop * elements // piece.of - low]
                channel = self._communicators.channel(edge_of(parcel.direction, self._rank, piece.receiver))
                with guarded("pipeline send"):
                    self._departing.append((channel.broadcast(part), part))
            self._departing = [entry for entry in self._departing if not entry[0].is_completed()]
        if incoming:
            bounds = [(p.start * elements // p.of, p.stop * elements // p.of, p.sender) for p in incoming]
            low = min(start for start, _, _ in bounds)
            part = torch.empty(sum(stop - start for start, stop, _ in bounds), dtype=self._dtype, device=self._device)
            transfers = []
            for start, stop, sender in bounds:
                channel = self._communicators.channel(edge_of(parcel.direction, sender, self._rank))
                with guarded("pipeline receive"):
                    transfers.append(channel.broadcast(part[start - low : stop - low]))
            self._arriving[key] = _Arrival(parcel, transfers, part, elements)

    def _take(self, key: _Key) -> Tensor:
        """Wait for the input of a chunk from the previous stage, or for its gradient from the next stage, and return it
        whole."""
        if key in self._produced:  # the neighbour on the path is this stage as well
            return self._produced.pop(key)
        arrival = self._arriving.pop(key)
        whole = arrival.part
        with waiting(self._observer, "pipeline receive"):
            for transfer in arrival.transfers:
                transfer.wait()
            if arrival.parcel.gathered:
                assert self._tensor is not None
                whole = torch.empty(arrival.elements, dtype=self._dtype, device=self._device)
                self._tensor.all_gather(whole, arrival.part).wait()
        return whole.view(self._shape(key[1]))

    # --- gradients --------------------------------------------------------------------------------------------

    def _reduce(self, index: int) -> None:
        """Start the all-reduce of a bucket, in place or in a copy. A slice in several buckets needs its unreduced value
        in each."""
        bucket, views = self._it.prepared.buckets[index], list[Tensor]()
        flat = self._state.gradients.stretch(index)
        if flat is None:
            views = [self._state.gradient(piece) for piece in bucket.slices]
            flat = torch.cat([view.reshape(-1) for view in views])
        channel = self._communicators.channel(sums_of(bucket.owners, self._it.active))
        with guarded("gradient reduction"):
            self._summing.append((channel.allreduce([flat]), flat, views))
        if len(self._summing) == 1:
            self._enter("reduce")  # at the first bucket; others may follow

    def _finish(self) -> None:
        """Wait for all outstanding work, and copy sums back to the gradients that were copied out."""
        if self._it.learns:
            self._enter("reduce")
        for transfer, flat, views in self._summing:
            with waiting(self._observer, "gradient reduction"):
                transfer.wait()
            parts = flat.split([view.numel() for view in views]) if views else ()
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view(view.shape))
            self._observer.progressed()
        with waiting(self._observer, "pipeline send"):
            for work, _ in self._departing:
                work.wait()
        self._departing.clear()

    def _enter(self, phase: Phase) -> None:
        if phase not in self._entered:
            self._entered.add(phase)
            self._observer.enter(phase)


def reports_loss(state: State) -> bool:
    """Return whether this rank reports its replica's loss. One rank of the last stage does."""
    return state.holding.last and state.holding.t == 0


def computed_micro_batches(program: Program, state: State) -> list[int]:
    """Return the micro-batches for which this rank computes the loss, including those that began on another replica."""
    final = len(state.holding.chunks) - 1
    return [
        i.primitive.micro_batch
        for i in program
        if isinstance(i, Compute) and i.primitive.kind == "F" and i.primitive.chunk == final
    ]


@contextmanager
def timed(state: State, it: Iteration, stopwatch: Stopwatch) -> Iterator[None]:
    """Bind the stage's tensor-parallel group to its communicator for the duration of the block, and measure waits in
    it."""
    group = state.stage.tp_group
    group.bind(it.communicators.find(it.prepared.tensor_group(*it.place)))
    group.on_start = stopwatch.collective

    def waits(waiting: bool) -> None:
        it.observer.communicating(waiting)
        (stopwatch.waits if waiting else stopwatch.resumed)()

    group.on_wait = waits
    try:
        yield
    finally:
        group.on_start = ignore_start
