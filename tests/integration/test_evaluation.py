"""Validation losses do not depend on what happens: who dies or hangs in an evaluation, the first or the last one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from resihp.record.journal import EvaluationDone
from tests.integration.jobs import BACKEND, Job, jobs
from tests.integration.test_takeover import entries

ITERATIONS = 5
EVALUATED = (2, 4, 5)
SCRIPT = ("--eval-interval", "2", "--eval-iters", "2")
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The same training and evaluations on one device, undisturbed."""
    for make in jobs(tmp_path_factory.mktemp("reference")):
        done = make("job").train(script=SCRIPT, iterations=ITERATIONS, nodes=1, gpus=1, tp=1, pp=1).wait()
        assert done.status == 0, done.stderr
        yield done


def validated(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["iteration"]: row["validation_loss"] for row in rows if row["validation_loss"] is not None}


@pytest.mark.parametrize("setting", [{}, pytest.param({BACKEND: "nccl-like"}, marks=SOAK)], ids=["gloo", "nccl-like"])
@pytest.mark.parametrize("kind", ["kill", pytest.param("hang", marks=SOAK)])
def test_a_failure_in_an_evaluation_changes_no_loss(
    job: Job, reference: Job, kind: str, setting: dict[str, str]
) -> None:
    """The evaluation of iteration 2 is the first that iteration 3 computes; that of the last, 5, comes after all."""
    job.environment |= setting
    faults = [f"{kind}:rank=5@iteration=3,phase=forward", f"{kind}:rank=2@iteration=6,phase=forward"]
    job.train(*(word for fault in faults for word in ("--fault", fault)), script=SCRIPT, iterations=ITERATIONS).wait()
    assert job.status == 0, job.stderr
    rows, expected = job.history("iterations"), reference.history("iterations")
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    for row, due in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(due["loss"], rel=1e-4)
        assert row["samples_digest"] == due["samples_digest"]
    assert validated(rows) == pytest.approx(validated(expected), rel=1e-4)
    assert tuple(validated(rows)) == EVALUATED
    assert tuple(entry.iteration for entry in entries(job, EvaluationDone)) == EVALUATED, "each once"
    assert {rank for row in job.history("failures") for rank in row["ranks"]} == {5, 2}
