"""Carries out one rank's program for one iteration: chunks of work, transfers between stages, gradient sums.

The order of everything is the program's (`resihp.pipeline.program`); nothing here waits for anything but what a chunk
needs, and what is left at the end. All state of an iteration lives in an `Interpreter`, which is dropped with it: an
iteration that breaks leaves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from resihp.detector.observation import Floats
from resihp.errors import DatasetError
from resihp.executor.compute.channels import PendingWork, guarded
from resihp.executor.compute.iteration import Iteration, waiting
from resihp.executor.compute.stage import IGNORED
from resihp.executor.compute.staging import staged
from resihp.executor.compute.stopwatch import Stopwatch
from resihp.executor.emulation import Pace
from resihp.executor.state.rank_state import State
from resihp.faults import Phase
from resihp.parallelism.plan import Primitive
from resihp.pipeline.program import Compute, Parcel, Program, Reduce, Transmit, edge_of, sums_of

_Key = tuple[Literal["forward", "backward"], int, int]
"""(direction, micro-batch, boundary), as of a Parcel."""


@dataclass
class _Arrival:
    """A parcel on its way to this rank: `part` is filled by its transfers, and is [low, low + numel) of the whole."""

    parcel: Parcel
    transfers: list[PendingWork]
    part: Tensor
    elements: int
    """Of the whole tensor."""


class Interpreter:
    """Runs one iteration's program on one rank's state; gradients accumulate in its parameters, then are summed.

    An evaluation's programs have forwards alone: nothing of the state is changed.
    What is differentiated is the mean loss over the global batch. `pace` emulates a device's speed.
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
        """Index of the virtual stage on a micro-batch's path, by (micro-batch, chunk)."""
        self._split = {
            (i.primitive.micro_batch, i.primitive.chunk)
            for i in iteration.program
            if isinstance(i, Compute) and i.primitive.kind == "W"
        }
        self._saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._produced: dict[_Key, Tensor] = {}
        """Results for other stages: taken by their transfer, or by the next chunk on this very stage."""
        self._arriving: dict[_Key, _Arrival] = {}
        self._departing: list[tuple[PendingWork, Tensor]] = []
        self._summing: list[tuple[PendingWork, Tensor, list[Tensor]]] = []
        self._entered: set[Phase] = set()
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        """Sum over tokens of the loss, of the micro-batches that passed here; stays 0 before the last stage."""
        self._work: list[tuple[float, float]] = []
        """Tokens and sum of squared lengths of each primitive's micro-batch."""

    def run(self) -> None:
        """Raises CommunicatorError when a peer is lost, DatasetError, or whatever the data set raises."""
        with torch.set_grad_enabled(self._it.learns):
            self._run()

    def _run(self) -> None:
        try:
            for instruction in self._it.program:
                match instruction:
                    case Compute(primitive):
                        self._compute(primitive)
                    case Transmit(parcel):
                        self._transmit(parcel)
                    case Reduce(bucket):
                        self._reduce(bucket)
            self._finish()
        finally:
            self._stage.weights.discard()

    # --- chunks of work ---------------------------------------------------------------------------------------

    def _compute(self, primitive: Primitive) -> None:
        self._enter("forward" if primitive.kind == "F" else "backward")
        if primitive.kind == "F":
            self._forward(primitive.micro_batch, primitive.chunk)
        elif primitive.kind == "B":
            self._backward(primitive.micro_batch, primitive.chunk)
        else:
            self._stopwatch.begin()
            self._stage.weights.finish((primitive.micro_batch, primitive.chunk))
        if self._pace is not None:
            both = primitive.kind == "B" and (primitive.micro_batch, primitive.chunk) not in self._split
            work = "BW" if both else primitive.kind
            self._stopwatch.emulate(self._pace(work, self._state.holding, primitive.chunk))
        self._stopwatch.end()
        micro_batch = self._batch[primitive.micro_batch]
        self._work.append((float(micro_batch.tokens), float(micro_batch.sum_squared_lengths)))
        self._observer.progressed()

    def workload(self) -> Floats:
        """(2, primitives): tokens and sum of squared lengths of each one's micro-batch, in the order of the program."""
        return np.array(self._work, dtype=np.float64).reshape(-1, 2).T

    def _forward(self, m: int, chunk: int) -> None:
        v = self._position[m, chunk]
        tokens, labels, lengths = self._load(m, chunk)
        inputs = tokens if v == 0 else self._take(("forward", m, v - 1)).requires_grad_(self._it.learns)
        assert inputs is not None
        self._stopwatch.begin()
        output = self._stage(chunk, lengths, inputs, labels)
        if labels is not None:
            self.loss_sum += output.detach()
            output = output / self._total_tokens
        if self._it.learns:
            self._saved[m, chunk] = (inputs, output)
        if labels is None:
            self._produced["forward", m, v] = output.detach()

    def _backward(self, m: int, chunk: int) -> None:
        v = self._position[m, chunk]
        gradient = None if self._ends(chunk) else self._take(("backward", m, v))
        inputs, output = self._saved.pop((m, chunk))
        self._stopwatch.begin()
        if (m, chunk) in self._split:
            with self._stage.weights.collecting((m, chunk)):
                output.backward(gradient)
        else:
            output.backward(gradient)
        if v > 0:
            assert inputs.grad is not None
            self._produced["backward", m, v - 1] = inputs.grad

    def _ends(self, chunk: int) -> bool:
        """Whether a chunk is the model's last: it ends in the loss."""
        return self._stage.last and chunk == len(self._state.holding.chunks) - 1

    def _load(self, m: int, chunk: int) -> tuple[Tensor | None, Tensor | None, tuple[int, ...]]:
        """(tokens, labels, lengths) of a micro-batch, padded: tokens for the first chunk, labels for the last."""
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
            for array, fill in zip(arrays, (0, IGNORED), strict=True)
        )
        return tokens if begins else None, labels if self._ends(chunk) else None, lengths

    # --- between stages ---------------------------------------------------------------------------------------

    def _shape(self, m: int) -> tuple[int, ...]:
        """Of one rank's activations of a micro-batch: split along the sequence under sequence parallelism."""
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
        """What a chunk needs from the stage before (or after) it, complete."""
        if key in self._produced:  # the neighbour is this very stage
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
        """Begin to sum a bucket where it lies, or copied out: a slice in several is offered unreduced to each."""
        bucket, views = self._it.prepared.buckets[index], list[Tensor]()
        flat = self._state.gradients.stretch(index)
        if flat is None:
            views = [self._state.gradient(piece) for piece in bucket.slices]
            flat = torch.cat([view.reshape(-1) for view in views])
        channel = self._communicators.channel(sums_of(bucket.owners, self._it.active))
        with guarded("gradient reduction"):
            self._summing.append((channel.allreduce([flat]), flat, views))
        if len(self._summing) == 1:
            self._enter("reduce")  # with more to come, half-way: one bucket is under way

    def _finish(self) -> None:
        """Wait for all that is under way, and put what was copied back where the gradients are."""
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


def speaks(state: State) -> bool:
    """Whether a rank contributes its replica's loss to sums over the model: one of the last stage."""
    return state.holding.last and state.holding.t == 0


def computed(program: Program, state: State) -> list[int]:
    """Micro-batches whose loss a rank computes, migrated ones included."""
    final = len(state.holding.chunks) - 1
    return [
        i.primitive.micro_batch
        for i in program
        if isinstance(i, Compute) and i.primitive.kind == "F" and i.primitive.chunk == final
    ]
