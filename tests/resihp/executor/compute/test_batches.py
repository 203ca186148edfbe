"""What a data set to evaluate on has to be like."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="pip install 'resihp[train]'")

from resihp import Evaluation
from resihp.errors import ConfigurationError, DatasetError
from resihp.executor.compute.batches import Batches
from resihp.parallelism.workload import MicroBatch


class Documents:
    def __init__(self, micro_batches: int, tokens: int = 8) -> None:
        self._count, self._tokens = micro_batches, tokens

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        return [MicroBatch((self._tokens,), (10 * iteration + m,), lambda: None) for m in range(self._count)]  # type: ignore[arg-type,return-value]


def test_a_global_batch_to_evaluate_has_as_many_micro_batches_as_one_to_train_on() -> None:
    trained = Batches(Documents(6), 16)
    assert len(Batches(Documents(6), 16, trained).of(2)) == 6
    with pytest.raises(DatasetError, match=r"evaluation's global batch 1: 4 micro-batches.*trained on has 6"):
        Batches(Documents(4), 16, trained)
    with pytest.raises(DatasetError, match="evaluation's global batch 1 micro-batch 0: document lengths"):
        Batches(Documents(6, tokens=17), 16, trained)


@pytest.mark.parametrize("numbers", [{"every": 0, "iterations": 1}, {"every": 10, "iterations": 0}])
def test_an_evaluation_that_never_comes_or_is_of_nothing_is_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        Evaluation(Documents(6), **numbers)


def test_evaluations_are_due_every_so_often_and_at_the_end() -> None:
    evaluation = Evaluation(Documents(6), every=4, iterations=1)
    assert [i for i in range(11) if evaluation.is_due(i, last=10)] == [4, 8, 10]
