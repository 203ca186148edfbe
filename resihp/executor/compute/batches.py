"""The data set as the executor sees it: the checked global batch of an iteration. And what identifies a training."""

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
    """Global batches of a data set whose longest document has `sequence` tokens. Raises DatasetError if it is empty.

    `validates`: the one to train on, for one to evaluate on; it must have as many micro-batches.
    """

    def __init__(self, dataset: Dataset, sequence: int, validates: Batches | None = None) -> None:
        self._dataset, self._sequence = dataset, sequence
        self._told = "iteration" if validates is None else "evaluation's global batch"
        ramp, first = ramp_of(dataset), dataset.micro_batches(1)
        usual = ramp[-1][1] if ramp else max(1, len(first))
        self.sizes: BatchSizes = BatchSizes(usual, ramp) if validates is None else BatchSizes(validates.sizes.usual)
        """Micro-batches of each iteration, as the data set says."""
        whose = "iteration 1" if validates is None else "one that is trained on"
        more = ", or say otherwise by a ramp-up" if validates is None else "; what is evaluated has no ramp-up"
        self._others = f"({whose} has {self.sizes.usual}){more}"
        self.first = self._checked(1, first)
        self._last: tuple[int, Sequence[MicroBatch]] = 1, self.first

    @property
    def longest(self) -> int:
        """Tokens of the longest micro-batch of the first iteration: what memory is estimated for."""
        return max(micro_batch.tokens for micro_batch in self.first)

    def of(self, iteration: int) -> Sequence[MicroBatch]:
        """The data set is asked once for an iteration. Raises DatasetError naming the micro-batch at fault."""
        if self._last[0] != iteration:
            self._last = iteration, self._checked(iteration, self._dataset.micro_batches(iteration))
        return self._last[1]

    def _checked(self, iteration: int, batch: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        due = self.sizes.at(iteration)
        if len(batch) != due:
            same = f"the same number, at least one, every time {self._others}"
            must = f"{due}, as its ramp-up says" if self.sizes.ramp else same
            raise DatasetError(f"{self._told} {iteration}: {len(batch)} micro-batches; the data set must give {must}")
        for m, micro_batch in enumerate(batch):
            lengths = micro_batch.lengths
            if not lengths or min(lengths) < 1 or max(lengths) > self._sequence:
                raise DatasetError(
                    f"{self._told} {iteration} micro-batch {m}: document lengths {list(lengths)}; each must lie "
                    f"between 1 and the sequence length {self._sequence}"
                )
            if len(lengths) != len(micro_batch.samples):
                raise DatasetError(
                    f"{self._told} {iteration} micro-batch {m}: {len(lengths)} lengths, "
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
    """Digest of all that must be equal on all ranks of a job: library versions included, and which back end works on
    which kind of device. A node whose GPUs are gone would wait with gloo for peers that come with NCCL. `evaluation`:
    every so many iterations, over so many global batches, and the first of them."""
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
