"""Reads and checks the global batches of a data set, and computes the fingerprint of a training job.

Never changes a batch. Called by `resihp.executor.engine`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from importlib import metadata

import msgspec
import torch
from megatron.core.transformer import TransformerConfig

import resihp
from resihp.errors import DatasetError
from resihp.executor.compute.rotary import Rotary
from resihp.executor.config_support import describe
from resihp.executor.state.optimizer import AdamW
from resihp.parallelism.batch_sizes import BatchSizes
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.workload import Dataset, MicroBatch, ramp_of, samples_digest


class Batches:
    """The global batches of a data set. No document may have more than `sequence` tokens. Raises DatasetError if it is
    empty.

    For an evaluation data set, `validates` has the batches of the training data set. Both data sets must have the same
    number of micro-batches.
    """

    def __init__(self, dataset: Dataset, sequence: int, validates: Batches | None = None) -> None:
        self._dataset, self._sequence = dataset, sequence
        self._subject = "iteration" if validates is None else "evaluation's global batch"
        ramp, first = ramp_of(dataset), dataset.micro_batches(1)
        usual = ramp[-1][1] if ramp else max(1, len(first))
        self.sizes: BatchSizes = BatchSizes(usual, ramp) if validates is None else BatchSizes(validates.sizes.usual)
        """Number of micro-batches of each iteration, according to the data set."""
        reference = "iteration 1" if validates is None else "one that is trained on"
        remedy = ", or declare a ramp-up" if validates is None else "; an evaluation data set has no ramp-up"
        self._others = f"({reference} has {self.sizes.usual}){remedy}"
        self.first = self._checked(1, first)
        self._last: tuple[int, Sequence[MicroBatch]] = 1, self.first

    @property
    def longest(self) -> int:
        """Number of tokens in the longest micro-batch of the first iteration, used to estimate memory."""
        return max(micro_batch.tokens for micro_batch in self.first)

    def of(self, iteration: int) -> Sequence[MicroBatch]:
        """Return the global batch of an iteration; the latest one is cached. Raises DatasetError for an invalid
        micro-batch."""
        if self._last[0] != iteration:
            self._last = iteration, self._checked(iteration, self._dataset.micro_batches(iteration))
        return self._last[1]

    def _checked(self, iteration: int, batch: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        due = self.sizes.at(iteration)
        if len(batch) != due:
            same = f"the same number, at least one, every time {self._others}"
            must = f"{due}, as its ramp-up says" if self.sizes.ramp else same
            raise DatasetError(
                f"{self._subject} {iteration}: {len(batch)} micro-batches; the data set must give {must}"
            )
        for m, micro_batch in enumerate(batch):
            lengths = micro_batch.lengths
            if not lengths or min(lengths) < 1 or max(lengths) > self._sequence:
                raise DatasetError(
                    f"{self._subject} {iteration} micro-batch {m}: document lengths {list(lengths)}; each must lie "
                    f"between 1 and the sequence length {self._sequence}"
                )
            if len(lengths) != len(micro_batch.samples):
                raise DatasetError(
                    f"{self._subject} {iteration} micro-batch {m}: {len(lengths)} lengths, "
                    f"{len(micro_batch.samples)} samples"
                )
        return batch


def fingerprint(
    config: TransformerConfig,
    model: ModelSpec,
    positions: tuple[str, Rotary],
    optimizer: AdamW,
    seed: int,
    first: Sequence[MicroBatch],
    works: tuple[str, str],
    evaluation: tuple[int, int, Sequence[MicroBatch]] | None = None,
) -> str:
    """Return a digest of all settings that must be equal on all ranks of a job.

    The digest includes the versions of libraries, the back end and the kind of device: a node that has lost its GPUs
    would wait with gloo for peers that use NCCL. `evaluation` is the interval in iterations, the number of global
    batches, and the first global batch.
    """
    content = {
        "model": msgspec.to_builtins(model),
        "config": {field.name: describe(getattr(config, field.name)) for field in dataclasses.fields(config)},
        "positions": [positions[0], dataclasses.asdict(positions[1])],
        "optimizer": dataclasses.asdict(optimizer),
        "seed": seed,
        "data": _described(first),
        "back end, device": works,
        "versions": [torch.__version__, metadata.version("megatron-core"), resihp.__version__],
    }
    if evaluation is not None:
        content["evaluation"] = [*evaluation[:2], _described(evaluation[2])]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _described(batch: Sequence[MicroBatch]) -> list[list[int | str]]:
    return [[*micro_batch.lengths, samples_digest(micro_batch.samples)] for micro_batch in batch]
