"""A job that loses workers and nodes goes on in the same processes, and its mathematics does not notice."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable

import pytest

from resihp.datasets import ByteFiles, PackedDataset
from resihp.parallelism.workload import samples_digest
from tests.integration.jobs import DETECTION, Job

ITERATIONS = 6


def expected_digests() -> dict[int, str]:
    """What each iteration must have consumed, computed from the data set itself."""
    source = ByteFiles(sysconfig.get_paths()["stdlib"], ".py")
    data = PackedDataset(source, budget=64, micro_batches_per_iteration=8, seed=1234)
    return {
        i: f"{samples_digest(s for batch in data.micro_batches(i) for s in batch.samples):016x}"
        for i in range(1, ITERATIONS + 1)
    }


def assert_same_training(disturbed: Job, undisturbed: Job) -> None:
    losses, reference = disturbed.losses(), undisturbed.losses()
    assert list(losses) == list(reference) == list(range(1, ITERATIONS + 1))
    for iteration, loss in losses.items():
        assert loss == pytest.approx(reference[iteration], rel=1e-4), f"iteration {iteration}"
    digests = {row["iteration"]: row["samples_digest"] for row in disturbed.history("iterations")}
    assert digests == expected_digests()


@pytest.mark.parametrize(
    ("phase", "action"),
    [
        pytest.param("forward", "redo", marks=pytest.mark.soak),
        pytest.param("backward", "redo", marks=pytest.mark.soak),  # as when a node is killed, below
        ("reduce", "redo"),
        ("step", "commit"),
    ],
)
def test_worker_killed_in_each_phase(job: Job, undisturbed: Callable[[], Job], phase: str, action: str) -> None:
    job.train("--fault", f"kill:rank=5@iteration=3,phase={phase}").wait()
    assert job.status == 0, job.stderr
    assert "ledger " not in job.stderr, "everything had its place there"
    assert_same_training(job, undisturbed())

    (failure,) = job.history("failures")
    assert (failure["node"], failure["device"], failure["iteration"]) == ("n2", 1, 3)
    assert failure["detect_seconds"] < DETECTION.beat_s, "by its end, not by its silence"
    (reconfiguration,) = job.history("reconfigurations")
    assert reconfiguration["action"] == action
    workers = {row["rank"]: row for row in job.history("workers")}
    assert {rank: row["exit"] for rank, row in workers.items()} == {r: -9 if r == 5 else 0 for r in range(8)}
    assert len(workers) == 8, "the survivors are the same processes"


def test_node_killed_is_one_failure(job: Job, undisturbed: Callable[[], Job]) -> None:
    job.train("--fault", "kill:node=n2@iteration=4,phase=backward").wait()
    assert job.status == 0, job.stderr
    assert_same_training(job, undisturbed())
    (failure,) = job.history("failures")
    assert failure["component"] == "node"
    assert failure["node"] == "n2"
    assert failure["detect_seconds"] < DETECTION.beat_s, "by its agent's end, not by its silence"


def test_stopped_worker_is_found_by_its_state(job: Job, undisturbed: Callable[[], Job]) -> None:
    job.train("--fault", "stop:rank=2@iteration=3,phase=backward").wait()
    assert job.status == 0, job.stderr
    assert_same_training(job, undisturbed())
    (failure,) = job.history("failures")
    assert "stopped" in failure["cause"]
    assert failure["evidence"].endswith("; then killed by resihp (SIGKILL)")


def test_fault_that_did_not_fire_fails_the_run(job: Job) -> None:
    job.train("--fault", "kill:rank=1@iteration=99", iterations=2, nodes=1, gpus=2, pp=1).wait()
    assert job.status == 1
    assert "did not fire" in job.stderr


def test_resume_continues_where_the_checkpoint_ends(job: Job, undisturbed: Callable[[], Job]) -> None:
    job.train("--checkpoint-every", "2", "--max-restarts", "0", "--fault", "kill:rank=0@iteration=6", nodes=1)
    assert job.wait().status == 5, job.stderr
    job.train("--checkpoint-every", "2", "--resume", "local-1", tp=1, pp=2, nodes=1)
    assert job.wait().status == 0, job.stderr
    losses, reference = job.losses(), undisturbed().losses()
    assert list(losses) == [5, 6]
    assert losses == pytest.approx({i: reference[i] for i in (5, 6)}, rel=1e-4)
