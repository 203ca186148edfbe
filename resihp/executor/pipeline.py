"""Carries out one rank's order of forward and backward chunks for one iteration, with its neighbours' transfers.

All state of an iteration lives in an `Interpreter`, which is dropped with it: an iteration that breaks leaves nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from resihp.errors import DatasetError
from resihp.executor.communicators import Communicators, Edge, guarded
from resihp.executor.stage import StageModule
from resihp.faults import Phase
from resihp.pipeline.schedules import Primitive
from resihp.workload import MicroBatch

UNFINISHED_SENDS = 4
"""Gradients on their way to the previous stage before the oldest must have arrived: bounds their memory."""


class Observer(Protocol):
    """Told where an iteration stands, from the rank's own thread."""

    def enter(self, phase: Phase) -> None: ...

    def progressed(self) -> None:
        """One more primitive or synchronisation is done."""

    def communicating(self, waits: bool) -> None:
        """True before and False after each wait for peers."""


@contextmanager
def waiting(observer: Observer, what: str) -> Iterator[None]:
    """Around a wait for peers. Raises CommunicatorError for what the back end raises."""
    observer.communicating(True)
    try:
        with guarded(what):
            yield
    finally:
        observer.communicating(False)


class Interpreter:
    """Runs one iteration's primitives on one stage; gradients accumulate in the stage's parameters.

    `total_tokens` is the size of the global batch, whose mean loss is what is differentiated.
    """

    def __init__(
        self,
        stage: StageModule,
        vocab: int,
        communicators: Communicators,
        order: Sequence[Primitive],
        batch: Sequence[MicroBatch],
        total_tokens: int,
        observer: Observer,
        device: torch.device,
    ) -> None:
        self._stage, self._vocab, self._device = stage, vocab, device
        self._order, self._batch, self._total_tokens, self._observer = order, batch, total_tokens, observer
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._forward_sends: dict[int, tuple[Any, Tensor]] = {}
        self._backward_sends: deque[tuple[Any, Tensor]] = deque()
        width = stage.config.hidden_size
        shapes: dict[int, tuple[int, ...]] = {
            primitive.micro_batch: (batch[primitive.micro_batch].tokens, 1, width) for primitive in order
        }
        micro_batches = [primitive.micro_batch for primitive in order if primitive.kind == "F"]
        self._activations = _inbox(communicators.edge("forward", outgoing=False), micro_batches, shapes, device)
        self._gradients = _inbox(communicators.edge("backward", outgoing=False), micro_batches, shapes, device)
        self._forward_edge = communicators.edge("forward", outgoing=True)
        self._backward_edge = communicators.edge("backward", outgoing=True)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Sum over tokens of the loss, of the micro-batches that passed here; stays 0 before the last stage."""
        self.compute_s = 0.0
        """Seconds in forward and backward chunks, without waits for tensor-parallel peers."""

    def run(self) -> None:
        """Raises CommunicatorError when a peer is lost, DatasetError, or whatever the data set raises."""
        entered: set[str] = set()
        for primitive in self._order:
            if primitive.kind not in entered:
                entered.add(primitive.kind)
                self._observer.enter("forward" if primitive.kind == "F" else "backward")
            if primitive.kind == "F":
                self._forward(primitive.micro_batch)
            else:
                self._backward(primitive.micro_batch)
            self._observer.progressed()
        with waiting(self._observer, "pipeline send"):
            for work, _ in (*self._forward_sends.values(), *self._backward_sends):
                work.wait()
        self._forward_sends.clear()
        self._backward_sends.clear()

    def _forward(self, m: int) -> None:
        tokens, labels = self._load(m)
        if self._activations is not None:
            inputs = self._activations.take(m, self._observer).requires_grad_()
        else:
            assert tokens is not None
            inputs = tokens
        with self._computing():
            output = self._stage(self._batch[m].lengths, inputs, labels)
            if self._stage.last:
                self.loss_sum += output.detach()
                output = output / self._total_tokens
        self._saved[m] = (inputs, output)
        if self._forward_edge is not None:
            sent = output.detach()
            self._forward_sends[m] = (self._forward_edge.send(sent), sent)

    def _backward(self, m: int) -> None:
        gradient = None
        if self._gradients is not None:
            gradient = self._gradients.take(m, self._observer)
            with waiting(self._observer, "pipeline send"):  # arrived long ago, since its gradient is back
                self._forward_sends.pop(m)[0].wait()
        inputs, output = self._saved.pop(m)
        with self._computing():
            output.backward(gradient)
        if self._backward_edge is not None:
            assert inputs.grad is not None
            self._backward_sends.append((self._backward_edge.send(inputs.grad), inputs.grad))
            if len(self._backward_sends) > UNFINISHED_SENDS:
                with waiting(self._observer, "pipeline send"):
                    self._backward_sends.popleft()[0].wait()

    def _load(self, m: int) -> tuple[Tensor | None, Tensor | None]:
        """(tokens, labels) of a micro-batch where they are needed: on first and last stages."""
        if not (self._stage.first or self._stage.last):
            return None, None
        size = self._batch[m].tokens
        arrays = self._batch[m].load()
        for name, array in zip(("tokens", "labels"), arrays, strict=True):
            if not isinstance(array, np.ndarray) or array.shape != (size,) or array.dtype != np.int64:
                raise DatasetError(f"micro-batch {m}: {name} must be int64 of shape [{size}], the sum of its lengths")
            if array.min() < 0 or array.max() >= self._vocab:
                raise DatasetError(f"micro-batch {m}: {name} outside the vocabulary of {self._vocab}")
        tokens, labels = (torch.from_numpy(np.ascontiguousarray(array)).to(self._device) for array in arrays)
        return tokens, labels

    @contextmanager
    def _computing(self) -> Iterator[None]:
        group = self._stage.tp_group
        began, waited = time.perf_counter(), group.waited_s
        yield
        self.compute_s += time.perf_counter() - began - (group.waited_s - waited)


class _Inbox:
    """Receives on one edge, in order, each posted while the one before is still to be used."""

    def __init__(
        self, edge: Edge, micro_batches: Sequence[int], shapes: dict[int, tuple[int, ...]], device: torch.device
    ) -> None:
        self._edge, self._shapes, self._device = edge, shapes, device
        self._due = deque(micro_batches)
        self._posted: deque[tuple[int, Any, Tensor]] = deque()
        self._post()

    def _post(self) -> None:
        if self._due:
            m = self._due.popleft()
            buffer = torch.empty(self._shapes[m], device=self._device)
            self._posted.append((m, self._edge.receive(buffer), buffer))

    def take(self, m: int, observer: Observer) -> Tensor:
        self._post()
        expected, work, buffer = self._posted.popleft()
        assert expected == m, f"micro-batch {m} is due after {expected}"
        with waiting(observer, "pipeline receive"):
            work.wait()
        return buffer


def _inbox(
    edge: Edge | None, micro_batches: Sequence[int], shapes: dict[int, tuple[int, ...]], device: torch.device
) -> _Inbox | None:
    return None if edge is None else _Inbox(edge, micro_batches, shapes, device)
