"""Supervisors that are killed while training runs: another takes over, and training does not notice."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import sysconfig
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from resihp.datasets import ByteFiles, PackedDataset
from resihp.parallelism.workload import samples_digest
from resihp.record.journal import (
    AnyEntry,
    FaultInjected,
    IterationCommitted,
    LeaderChosen,
    PlanDecided,
    PlanInEffect,
    Record,
    SlurmSaw,
    WorkerStarted,
)
from resihp.record.journal_file import read
from resihp.record.journal_format import encode
from tests.integration.jobs import TINY, Job, jobs
from tests.integration.slurm_jobs import PACED

SOAK = pytest.mark.soak
ITERATIONS = 24
ADOPTED_S = 5.0
WHERE = {"nodes": 2, "gpus": 2, "tp": 1, "pp": 2}
PACE_S = 0.5
"""Of a micro-batch, where a job is to last: some two seconds for an iteration, 24 of them for three successors."""
SUCCESSION = {"RESIHP_ADAPT__SUCCESSION": "true"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, float]]:
    """Losses of the same training without disturbance."""
    for make in jobs(tmp_path_factory.mktemp("reference")):
        done = train(make("job")).wait()
        assert done.status == 0, done.stderr
        yield done.losses()


def train(job: Job, *faults: str, **where: int) -> Job:
    given = [word for fault in faults for word in ("--fault", fault)]
    return job.train(*given, script=(), iterations=ITERATIONS, **(where or WHERE))


# --- what can be seen of a job ------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Like `Job.until`, for what a job does whose guardian may be gone."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s"
        time.sleep(0.01)
    return found


def records(job: Job) -> list[Record]:
    """The journal of whoever leads, as far as it is written."""
    found = [path for path in job.folder.glob("local/*/*") if path.name == "journal" or path.suffix == ".journal"]
    return read(max(found, key=lambda path: path.stat().st_mtime_ns)) if found else []


def entries(job: Job, kind: type) -> list[Any]:
    return [record.entry for record in records(job) if isinstance(record.entry, kind)]


def committed(job: Job, iterations: int) -> bool:
    return len(entries(job, IterationCommitted)) >= iterations


def led_in(job: Job, term: int) -> bool:
    return any(entry.term == term for entry in entries(job, LeaderChosen))


def supervisor_of(job: Job) -> psutil.Process:
    found = [each for each in job.processes() if "resihp.wrapper.supervisor.process" in each.cmdline()]
    ids = {each.pid for each in found}
    (supervisor,) = [each for each in found if each.ppid() not in ids]  # a fork of it has its name until it execs
    return supervisor


def workers(job: Job) -> dict[int, int]:
    """Process ids by rank."""
    return {entry.rank: entry.pid for entry in entries(job, WorkerStarted)}


def exit_code(job: Job) -> str:
    (path,) = job.folder.glob("home/jobs/*")
    code = path / "exit_code"
    return code.read_text() if code.exists() else ""


def log(job: Job, name: str) -> str:
    (path,) = job.folder.glob(f"home/jobs/*/logs/{name}")
    return path.read_text()


def adopted_after(job: Job, killed_at: float) -> float:
    """Seconds from the kill to the first decision or commit of the next supervisor."""
    later = [record for record in records(job) if record.at > killed_at]
    chosen = next(at for at, record in enumerate(later) if isinstance(record.entry, LeaderChosen))
    first = next(r for r in later[chosen:] if isinstance(r.entry, IterationCommitted | PlanDecided))
    return first.at - killed_at


def assert_nothing_lost(job: Job, reference: dict[int, float]) -> None:
    rows = job.history("iterations")
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    source = ByteFiles(sysconfig.get_paths()["stdlib"], ".py")
    data = PackedDataset(source, budget=64, micro_batches_per_iteration=8, seed=1234)
    for row in rows:
        assert row["loss"] == pytest.approx(reference[row["iteration"]], rel=1e-4), f"iteration {row['iteration']}"
        samples = (s for batch in data.micro_batches(row["iteration"]) for s in batch.samples)
        assert row["samples_digest"] == f"{samples_digest(samples):016x}"


def assert_the_same_processes(job: Job, before: dict[int, int], lost: tuple[int, ...] = ()) -> None:
    rows = {row["rank"]: row for row in job.history("workers")}
    assert {rank: rows[rank]["pid"] for rank in before} == before
    assert {rank: rows[rank]["exit"] for rank in before} == {rank: -9 if rank in lost else 0 for rank in before}
    came_back = {rank: row["device"] for rank, row in rows.items() if rank not in before}
    assert len(came_back) <= len(lost), "nothing is started but in place of what died"


# --- the guardian starts another ----------------------------------------------------------------------------------


def test_training_does_not_notice_that_the_supervisor_is_killed(job: Job, reference: dict[int, float]) -> None:
    train(job)
    job.until(partial(committed, job, 5))
    before = workers(job)
    killed_at = time.time()
    supervisor_of(job).kill()
    assert job.wait().status == 0, job.stderr
    seconds = adopted_after(job, killed_at)
    print(f"adopted {seconds:.2f} s after the kill")
    assert seconds < ADOPTED_S
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before)
    assert job.history("failures") == []
    assert job.history("reconfigurations") == []
    (told,) = [event["text"] for event in job.ask("status")["events"] if event["kind"] == "LeaderChosen"]
    assert "term 2" in told
    assert "took over: 4 workers train on" in job.stderr


def test_a_rank_that_dies_with_the_supervisor_is_a_failure(job: Job, reference: dict[int, float]) -> None:
    train(job)
    job.until(partial(committed, job, 5))
    before = workers(job)
    supervisor = supervisor_of(job)
    killed_at = time.time()
    supervisor.kill()
    os.kill(before[3], signal.SIGKILL)
    assert job.wait().status == 0, job.stderr
    print(f"decided {adopted_after(job, killed_at):.2f} s after the kill")
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before, lost=(3,))
    (failure,) = job.history("failures")
    assert (failure["node"], failure["device"], failure["ranks"]) == ("n2", 1, [3])
    assert failure["recovered_epoch"] in [row["epoch"] for row in job.history("reconfigurations")]


@pytest.mark.parametrize("phase", ["transfer", *(pytest.param(p, marks=SOAK) for p in ("groups", "park", "resume"))])
def test_supervisor_killed_in_mid_transition(job: Job, reference: dict[int, float], phase: str) -> None:
    """Rank 1 crashes; rank 2 is stopped in that phase of what follows, so that it goes no further before the kill."""
    train(job, "crash:rank=1@iteration=4,phase=backward", f"stop:rank=2@iteration=4,phase={phase}")
    job.until(lambda: len(entries(job, FaultInjected)) == 2)
    before = {rank: pid for rank, pid in workers(job).items() if rank < 4}
    stopped = psutil.Process(before[2])
    job.until(lambda: stopped.status() == psutil.STATUS_STOPPED)
    killed_at = time.time()
    supervisor_of(job).kill()
    stopped.resume()
    decided: list[AnyEntry] = [*entries(job, PlanDecided), *entries(job, PlanInEffect)]
    assert job.wait().status == 0, job.stderr
    expected = {"park": ["D1", "E1"], "resume": ["D1", "D2", "E1", "E2"]}.get(phase, ["D1", "D2", "E1"])
    assert sorted(_short(entry) for entry in decided) == expected, "killed in another phase"
    print(f"decided {adopted_after(job, killed_at):.2f} s after the kill")
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before, lost=(1,))
    (failure,) = job.history("failures")
    assert failure["ranks"] == [1]


def _short(entry: AnyEntry) -> str:
    return f"D{entry.plan.epoch}" if isinstance(entry, PlanDecided) else f"E{getattr(entry, 'epoch', 0)}"


@pytest.mark.soak
def test_supervisor_killed_again_and_again(job: Job, reference: dict[int, float]) -> None:
    """Each successor lives only until it has decided something. The job ends no sooner than the last one leads."""
    pace = job.folder / "pace"
    job.folder.mkdir()
    pace.write_text(str(PACE_S))
    options = (*TINY, "--iterations", str(ITERATIONS))
    job.start(command=(sys.executable, str(PACED), str(pace), *options), **WHERE)
    job.until(partial(committed, job, 3))
    before = workers(job)
    for term in (2, 3, 4):
        supervisor_of(job).kill()
        job.until(partial(led_in, job, term))
    assert not committed(job, ITERATIONS), "the last one took over nothing"
    pace.write_text("0")
    assert job.wait().status == 0, job.stderr
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before)
    assert [entry.term for entry in entries(job, LeaderChosen)] == [2, 3, 4]


# --- an agent starts another --------------------------------------------------------------------------------------


def kill_guardian_and_supervisor(job: Job) -> float:
    """Both at once, as if their node had died; returns when."""
    assert job.process is not None
    supervisor, guardian = supervisor_of(job), psutil.Process(job.process.pid)
    guardian.suspend()  # else it would start another
    killed_at = time.time()
    supervisor.kill()
    guardian.kill()
    job.process.wait()
    return killed_at


def test_a_successor_finishes_what_guardian_and_supervisor_began(job: Job, reference: dict[int, float]) -> None:
    job.environment |= SUCCESSION
    train(job, nodes=4, gpus=1, tp=1, pp=2)
    job.until(partial(committed, job, 5))
    before = workers(job)
    killed_at = kill_guardian_and_supervisor(job)
    wait_for(lambda: exit_code(job))
    assert exit_code(job) == "0\n", log(job, "supervisor.log")
    wait_for(lambda: not job.processes(), 20)
    seconds = adopted_after(job, killed_at)
    print(f"adopted {seconds:.2f} s after the kill")
    assert seconds < 15.0
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before)
    assert job.history("failures") == []
    (chosen,) = entries(job, LeaderChosen)
    assert (chosen.term, chosen.how) == (2, "elected")
    assert chosen.node in ("n1", "n2", "n3", "n4")


@pytest.mark.soak
def test_with_succession_a_killed_supervisor_is_still_replaced_by_its_guardian(
    job: Job, reference: dict[int, float]
) -> None:
    job.environment |= SUCCESSION
    train(job, nodes=4, gpus=1, tp=1, pp=2)
    job.until(partial(committed, job, 5))
    before = workers(job)
    killed_at = time.time()
    supervisor_of(job).kill()
    assert job.wait().status == 0, job.stderr
    print(f"adopted {adopted_after(job, killed_at):.2f} s after the kill")
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before)
    assert [(entry.term, entry.how) for entry in entries(job, LeaderChosen)] == [(2, "restarted")]
    copies = [read(path) for path in job.folder.glob("local/*/*.copy")]
    assert len(copies) == 4
    for copy in copies:
        assert copy == records(job)[: len(copy)]
        assert any(isinstance(record.entry, LeaderChosen) for record in copy)


@pytest.mark.soak
def test_a_supervisor_that_was_frozen_finds_its_successor_and_gives_up(job: Job, reference: dict[int, float]) -> None:
    job.environment |= SUCCESSION
    train(job, nodes=4, gpus=1, tp=1, pp=2)
    job.until(partial(committed, job, 5))
    before = workers(job)
    frozen = supervisor_of(job)
    frozen.suspend()
    job.until(lambda: entries(job, LeaderChosen))
    frozen.resume()
    assert job.wait().status == 0, job.stderr
    assert "no quorum follows this supervisor; waiting for its successor" in job.stderr
    wait_for(lambda: not job.processes(), 20)
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before)
    assert job.history("failures") == []


def test_a_leader_whose_disk_is_full_leaves_the_job_to_a_successor(job: Job, reference: dict[int, float]) -> None:
    job.environment |= SUCCESSION
    train(job, nodes=3, gpus=1, tp=1, pp=1)
    job.until(partial(committed, job, 5))
    before = workers(job)
    (journal,) = job.folder.glob("local/*/journal")
    size = journal.stat().st_size
    supervisor_of(job).rlimit(psutil.RLIMIT_FSIZE, (size, size))
    left_alone(job, reference, before)
    assert "cannot be written for 5 s: File too large" in log(job, "supervisor.log")


@pytest.mark.soak
def test_a_leader_whose_disk_hangs_leaves_the_job_to_a_successor(job: Job, reference: dict[int, float]) -> None:
    """The thread that writes its journal is stopped, as if it waited for a device that is dead."""
    job.environment |= SUCCESSION
    train(job, nodes=3, gpus=1, tp=1, pp=1)
    job.until(partial(committed, job, 5))
    before = workers(job)
    with stopped_thread(supervisor_of(job), "journal"):
        left_alone(job, reference, before)
    assert "the disk does not answer" in log(job, "supervisor.log")


def left_alone(job: Job, reference: dict[int, float], before: dict[int, int]) -> None:
    """The leader has given up: the job goes on under a successor, and nobody who trains notices."""
    wait_for(lambda: led_in(job, 2))
    assert job.wait().status == 0, job.stderr
    assert "no quorum follows this supervisor; waiting for its successor" in job.stderr
    wait_for(lambda: not job.processes(), 20)
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before)
    assert job.history("failures") == []
    assert len(entries(job, PlanDecided)) == 1, "training was not even interrupted"


FUTEX = 202
"""The system call in which a thread waits for others, on x86-64."""


@contextmanager
def stopped_thread(process: psutil.Process, name: str) -> Iterator[None]:
    """Keep one thread of a process from running, by ptrace, until the process has ended or this is left.

    It is stopped as it waits: it holds no lock that others need.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    seize, interrupt, detach, any_thread = 0x4206, 0x4207, 17, 0x40000000
    tasks = Path(f"/proc/{process.pid}/task")
    (thread,) = [int(task.name) for task in tasks.iterdir() if (task / "comm").read_text().strip() == name]
    waits = False
    while not waits:
        assert libc.ptrace(seize, thread, None, None) == 0, os.strerror(ctypes.get_errno())
        assert libc.ptrace(interrupt, thread, None, None) == 0
        os.waitpid(thread, any_thread)
        waits = (tasks / str(thread) / "syscall").read_text().startswith(f"{FUTEX} ")
        if not waits:
            libc.ptrace(detach, thread, None, None)
    # A process with a thread that is traced is not gone before the tracer has noticed.
    threading.Thread(target=os.waitpid, args=(thread, any_thread), daemon=True).start()
    try:
        yield
    finally:
        libc.ptrace(detach, thread, None, None)


def frames(first: int, count: int, at: float) -> bytes:
    """Records of these numbers, as the journal has them."""
    sample = encode(Record(1 << 31, at, SlurmSaw(node="n1", state="alloc", text="")))
    head, tail = sample.split((1 << 31).to_bytes(4, "big"))
    found = []
    for seq in range(first, first + count):
        body = head + seq.to_bytes(4, "big") + tail
        found.append(len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body)
    return b"".join(found)


def test_taking_over_after_months_is_no_different(job: Job, reference: dict[int, float]) -> None:
    """200,000 records that no agent's copy has, 16 workers: worse than what months leave, which is packed."""
    job.environment |= SUCCESSION
    train(job, nodes=4, gpus=4, tp=1, pp=2)
    job.until(partial(committed, job, 5))
    before = workers(job)
    (path,) = job.folder.glob("local/*/journal")
    far = records(job)[-1].seq + 1000
    months = frames(far, 200_000, time.time())  # before anybody misses the leader
    supervisor = supervisor_of(job)
    supervisor.suspend()
    last = read(path)[-1]
    assert last.seq < far
    with path.open("ab") as file:
        file.write(frames(last.seq + 1, far - last.seq - 1, last.at) + months)
    resumed_at = time.time()
    supervisor.kill()
    assert job.wait().status == 0, job.stderr
    seconds = adopted_after(job, resumed_at)
    print(f"adopted {seconds:.2f} s after the supervisor was started")
    assert seconds < 30.0, "agents wait for a leader for a minute; 4 s on an idle machine"
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before)
    assert [entry.term for entry in entries(job, LeaderChosen)] == [2], "started again, or chosen if that took too long"
    assert len(entries(job, PlanDecided)) == 1, "training was not even interrupted"


@pytest.mark.soak
def test_the_successor_is_killed_and_its_agent_starts_it_again(job: Job, reference: dict[int, float]) -> None:
    job.environment |= SUCCESSION
    train(job, nodes=3, gpus=1, tp=1, pp=1)
    job.until(partial(committed, job, 5))
    before = workers(job)
    kill_guardian_and_supervisor(job)
    wait_for(lambda: entries(job, LeaderChosen))
    supervisor_of(job).kill()
    wait_for(lambda: exit_code(job))
    assert exit_code(job) == "0\n"
    wait_for(lambda: not job.processes(), 20)
    assert_nothing_lost(job, reference)
    assert_the_same_processes(job, before)
    assert [entry.how for entry in entries(job, LeaderChosen)] == ["elected", "elected"]
