"""Whatever is left of a job takes the layout that suits it, in the same processes, with nothing lost."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from resihp.datasets import ByteFiles, PackedDataset
from resihp.faults import Phase
from resihp.parallelism.workload import samples_digest
from tests.integration.jobs import BACKEND, EXAMPLE, STRICT, TINY, Job, jobs

ITERATIONS = 12
SIX_LAYERS = ("--layers", "6")
SOAK = pytest.mark.soak
PHASES = ("groups", "transfer", "park", "resume")
COMPUTING = ("forward", "backward", "reduce")
WHERE = {"nodes": 2, "gpus": 4, "tp": 2, "pp": 2}


def mostly_in_soak(here: str) -> list[Any]:
    """Phases of a transition: `make test` has the disturbance in this one, `make soak` in each."""
    return [phase if phase == here else pytest.param(phase, marks=SOAK) for phase in PHASES]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, float]]:
    """Losses of the same training without failures."""
    for make in jobs(tmp_path_factory.mktemp("reference")):
        done = make("job").train(script=SIX_LAYERS, iterations=ITERATIONS, **WHERE).wait()
        assert done.status == 0, done.stderr
        yield done.losses()


def run(job: Job, *faults: str, options: tuple[str, ...] = (), program: Path = EXAMPLE, **where: int) -> Job:
    given = [word for fault in faults for word in ("--fault", fault)]
    sizes = (*TINY, "--iterations", str(ITERATIONS), *SIX_LAYERS)
    command = (sys.executable, str(program), *sizes)
    return job.start(*given, *options, command=command, **(where or WHERE)).wait()


def assert_nothing_lost(job: Job, reference: dict[int, float]) -> None:
    assert job.status == 0, job.stderr
    rows = job.history("iterations")
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    for row in rows:
        assert row["loss"] == pytest.approx(reference[row["iteration"]], rel=1e-4), f"iteration {row['iteration']}"
    data = PackedDataset(
        ByteFiles(sysconfig.get_paths()["stdlib"], ".py"), budget=64, micro_batches_per_iteration=8, seed=1234
    )
    for row in rows:
        samples = (s for batch in data.micro_batches(row["iteration"]) for s in batch.samples)
        assert row["samples_digest"] == f"{samples_digest(samples):016x}"


def exits(job: Job) -> dict[int, int]:
    return {row["rank"]: row["exit"] for row in job.history("workers")}


def layouts(job: Job) -> list[Any]:
    """Of the plans that took effect, in order."""
    return [row["layout"] for row in job.history("plans") if row["outcome"] in ("in effect", "superseded")]


@pytest.mark.parametrize(
    "setting",
    [{}, pytest.param({STRICT: "1"}, marks=SOAK), pytest.param({BACKEND: "nccl-like"}, marks=SOAK)],
    ids=["gloo", "strict", "nccl-like"],
)
def test_five_kills_in_five_iterations_leave_three_ranks_that_finish(
    job: Job, reference: dict[int, float], setting: dict[str, str]
) -> None:
    job.environment |= setting
    phases = ("backward", "forward", "reduce", "backward", "step")
    run(job, *(f"kill:rank={rank}@iteration={3 + i},phase={phases[i]}" for i, rank in enumerate((1, 4, 5, 6, 7))))
    assert_nothing_lost(job, reference)
    assert exits(job) == {rank: 0 if rank in (0, 2, 3) else -9 for rank in range(8)}, "the same processes"
    assert len(job.history("failures")) == 5
    assert {row["component"] for row in job.history("failures")} == {"device"}


@pytest.mark.parametrize(
    "phase", [*mostly_in_soak("transfer"), *(pytest.param(p, marks=SOAK) for p in COMPUTING), "step"]
)
def test_stages_that_lost_all_ranks_stay_without_and_nothing_moves(
    job: Job, reference: dict[int, float], phase: str
) -> None:
    """By the paper's rule: what would pass there passes in the other replica; at last neither replica is whole."""
    faults = (
        "kill:rank=5@iteration=3,phase=backward",
        f"kill:rank=3@iteration={3 if phase in PHASES else 6},phase={phase}",
    )
    options = ("--planner", "resihp-paper", "--checkpoint-every", "5", "--checkpoint-folder", str(job.folder / "saved"))
    run(job, *faults, options=options, nodes=2, gpus=4, tp=1, pp=4)
    assert_nothing_lost(job, reference)
    assert exits(job) == {rank: -9 if rank in (3, 5) else 0 for rank in range(8)}, "the same processes"
    last = layouts(job)[-1]["replicas"]
    assert [[len(stage["ranks"]) for stage in replica] for replica in last] == [[1, 1, 1, 0], [1, 0, 1, 1]]
    assert {row["bytes_moved"] for row in job.history("reconfigurations")} <= {0, None}
    assert (job.folder / "saved" / "iteration-000010" / "manifest.json").exists(), "ranks of both write it"


TELLING = """
import hashlib, json, runpy
from pathlib import Path
from resihp.executor import trainer

train = trainer.Trainer.train

def and_tell(self, iterations):
    train(self, iterations)
    engine = self.engine
    told = {{}}
    for bucket in engine.prepare(engine.plan, engine.rank).buckets if engine.state is not None else ():
        for piece in bucket.slices if engine.rank in bucket.owners else ():
            tensors = engine.state.tensors(engine.state.specs[piece.name], piece)
            assert all(tensor.isfinite().all() for tensor in tensors.values()), piece
            content = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
            told[f"{{piece.name}} {{piece.start}}-{{piece.stop}}"] = hashlib.sha256(content).hexdigest()
    Path(f"{folder}/state-{{engine.rank}}.json").write_text(json.dumps(told))

trainer.Trainer.train = and_tell
runpy.run_path("{example}", run_name="__main__")
"""
"""The example; at the end each rank writes a digest of every slice of state that it owns, all of them finite."""

SHORT = {("kill", "backward"), ("kill", "reduce"), ("kill", "transfer"), ("hang", "backward")}


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        pytest.param(kind, phase, marks=() if (kind, phase) in SHORT else SOAK)
        for phase in get_args(Phase)
        for kind in ("kill", "hang")
    ],
)
def test_with_nccls_manners_no_phase_loses_or_spoils_anything(
    job: Job, reference: dict[int, float], kind: str, phase: str
) -> None:
    """Failures hang until they are aborted, aborted buffers are poisoned, and nobody says so: see `backends`."""
    job.environment[BACKEND] = "nccl-like"
    job.folder.mkdir(parents=True)
    script = job.folder / "train.py"
    script.write_text(TELLING.format(folder=job.folder, example=EXAMPLE))
    lost = {1, 6} if phase in PHASES else {6}
    faults = ["kill:rank=1@iteration=4,phase=backward"] if phase in PHASES else []
    run(job, *faults, f"{kind}:rank=6@iteration=4,phase={phase}", program=script)
    assert_nothing_lost(job, reference)
    ended = exits(job)
    failed = {rank: status for rank, status in ended.items() if status != 0}
    assert set(failed) == lost, f"who was lost, and nobody else: {failed}"
    assert len(ended) == (9 if kind == "hang" else 8), "a process that hung is started again, a device killed is not"
    assert {rank for row in job.history("failures") for rank in row["ranks"]} == lost
    told = defaultdict(set)
    files = list(job.folder.glob("state-*.json"))
    assert len(files) == len(ended) - len(lost)
    for file in files:
        for piece, digest in json.loads(file.read_text()).items():
            told[piece].add(digest)
    assert told
    assert {len(digests) for digests in told.values()} == {1}, "all owners hold the same"


@pytest.mark.parametrize("phase", mostly_in_soak("groups"))
def test_a_second_kill_in_mid_transition(job: Job, reference: dict[int, float], phase: str) -> None:
    run(job, "kill:rank=1@iteration=4,phase=backward", f"kill:rank=6@iteration=4,phase={phase}")
    assert_nothing_lost(job, reference)
    assert exits(job) == {rank: -9 if rank in (1, 6) else 0 for rank in range(8)}


@pytest.mark.parametrize("phase", mostly_in_soak("transfer"))
def test_the_supervisor_is_cut_off_in_mid_transition(job: Job, reference: dict[int, float], phase: str) -> None:
    cut = [f"disconnect:node=n{n}@iteration=4,phase={phase}" for n in (1, 2)]
    run(job, "kill:rank=1@iteration=4,phase=backward", *cut)
    assert_nothing_lost(job, reference)
    assert exits(job) == {rank: -9 if rank == 1 else 0 for rank in range(8)}
    assert len(job.history("failures")) == 1, "a broken connection is none"


def test_a_crashed_process_comes_back_on_its_device(job: Job) -> None:
    run(job, "crash:rank=2@iteration=3,phase=backward", nodes=2, gpus=4, tp=4, pp=1)
    assert job.status == 0, job.stderr
    degrees = [
        sorted(len(stage["ranks"]) for replica in layout["replicas"] for stage in replica) for layout in layouts(job)
    ]
    assert degrees == [[4, 4], [2, 4], [4, 4]]
    assert exits(job) == {**{rank: -9 if rank == 2 else 0 for rank in range(8)}, 8: 0}
    newcomer = next(row for row in job.history("workers") if row["rank"] == 8)
    assert (newcomer["node"], newcomer["device"]) == ("n1", 2)
    assert layouts(job)[1]["standby"] == [
        next(iter(set(range(4)) - {2} - {r for s in layouts(job)[1]["replicas"][0] for r in s["ranks"]}))
    ]


@SOAK
def test_a_killed_device_stays_out_and_the_standby_is_used_next(job: Job) -> None:
    faults = ("kill:rank=2@iteration=3,phase=backward", "kill:rank=0@iteration=6,phase=backward")
    run(job, *faults, nodes=2, gpus=4, tp=4, pp=1)
    assert job.status == 0, job.stderr
    first, second, third = layouts(job)
    assert [len(replica[0]["ranks"]) for replica in second["replicas"]] == [2, 4]
    (standby,) = second["standby"]
    assert standby in third["replicas"][0][0]["ranks"]
    assert len(third["replicas"][0][0]["ranks"]) == 2
    assert first["standby"] == third["standby"] == []
    assert set(exits(job)) == set(range(8)), "nothing was started on a dead device"


@pytest.mark.parametrize(
    "options",
    [
        ("--sequence-parallel", "--schedule", "zero-bubble"),
        ("--schedule", "interleaved", "--virtual-stages", "3"),
        pytest.param(("--tune",), marks=SOAK),
    ],
    ids=lambda options: options[-1],
)
def test_every_schedule_survives(job: Job, reference: dict[int, float], options: tuple[str, ...]) -> None:
    run(job, "kill:rank=1@iteration=4,phase=backward", "crash:rank=6@iteration=7,phase=forward", options=options)
    assert_nothing_lost(job, reference)


def test_state_that_no_rank_holds_any_more_is_loaded_from_the_newest_checkpoint(
    job: Job, reference: dict[int, float]
) -> None:
    run(job, "kill:rank=0@iteration=6", nodes=1, gpus=2, tp=1, pp=2, options=("--checkpoint-every", "2"))
    assert job.status == 0, job.stderr
    assert "goes back to the checkpoint of iteration 4, 1 iteration to be trained again" in job.stderr
    assert job.losses() == pytest.approx(reference, rel=1e-4)
    assert [row["iteration"] for row in job.history("iterations")] == sorted(reference)


def test_a_process_that_is_started_again_takes_part_in_a_rollback(job: Job, reference: dict[int, float]) -> None:
    """Without a checkpoint, everything is trained again, in the same layout."""
    run(job, "crash:rank=1@iteration=4", nodes=1, gpus=2, tp=1, pp=2)
    assert job.status == 0, job.stderr
    assert "goes back to the beginning, 3 iterations to be trained again" in job.stderr
    assert job.losses() == pytest.approx(reference, rel=1e-4)
    (_, second) = job.history("plans")
    assert [stage["ranks"] for stage in second["layout"]["replicas"][0]] == [[0], [2]]


def test_without_restarts_state_that_no_rank_holds_ends_the_job_with_advice(job: Job) -> None:
    run(job, "kill:rank=0@iteration=3", nodes=1, gpus=2, tp=1, pp=2, options=("--max-restarts", "0"))
    assert job.status == 5, job.stderr
    assert "was lost with rank 0" in job.stderr
    assert "there is no checkpoint to continue from (--checkpoint-every N writes them)" in job.stderr
    assert [row["iteration"] for row in job.history("iterations")] == [1, 2]


CHANGED = """
import os, runpy, sys
sys.argv += ["--lr", "0.002"] if int(os.environ["RANK"]) >= 4 else []
runpy.run_path({example!r}, run_name="__main__")
"""


def test_a_newcomer_of_another_training_is_turned_away(job: Job) -> None:
    """The script was edited while the job ran: whoever starts now would train something else."""
    job.folder.mkdir(parents=True)
    script = job.folder / "train.py"
    script.write_text(CHANGED.replace("{example!r}", repr(str(EXAMPLE))))
    sizes = (*TINY, "--iterations", "30")
    job.start(
        "--fault", "crash:rank=1@iteration=4", command=(sys.executable, str(script), *sizes), nodes=2, gpus=2, pp=1
    )
    job.wait()
    assert job.status == 0, job.stderr
    assert "does not join: declares another fingerprint than the job" in job.stderr
    assert [row["iteration"] for row in job.history("iterations")] == list(range(1, 31))
    assert exits(job)[4] == -9


def test_a_plan_that_needs_more_memory_than_there_is_is_not_tried(job: Job) -> None:
    """Without its counterpart, a rank would have to hold a whole stage of three layers: another plan is found."""
    job.train(
        "--memory-per-device", "1MB", "--fault", "kill:rank=1@iteration=3", script=SIX_LAYERS, iterations=6, **WHERE
    )
    job.wait()
    assert job.status == 0, job.stderr
    first, second = layouts(job)
    assert (held(first), len(first["replicas"])) == ({1.5}, 2)
    assert max(held(second)) < 3


def held(layout: Any) -> set[float]:
    """Count the layers that each computing rank holds, whole ones or shares.

    A mirror, some of whose stages have no ranks, needs no room for activations.
    """
    whole = [replica for replica in layout["replicas"] if all(stage["ranks"] for stage in replica)]
    stages = [stage for replica in whole for stage in replica]
    return {(stage["layers"][-1] - stage["layers"][0] + 1) / len(stage["ranks"]) for stage in stages}
