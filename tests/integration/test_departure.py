"""A job that is asked to stop writes a checkpoint first, and goes on from there as if nothing had been."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from resihp.record import journal, journal_file
from resihp.worker import checkpoints
from resihp.wrapper.launch.preloading import FOR_TESTS
from tests.integration import jobs as jobs_of_tests
from tests.integration.jobs import Job, jobs
from tests.waiting import gone

ITERATIONS = 24
SMALL = {"nodes": 2, "gpus": 2, "tp": 1, "pp": 2}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The same job, left alone."""
    for make in jobs(tmp_path_factory.mktemp("left-alone")):
        job = make("job").train(iterations=ITERATIONS, **SMALL).wait()
        assert job.status == 0, job.stderr
        yield job


def committed(job: Job) -> int:
    """Iterations so far, from the journal itself: asking takes longer than they do."""
    newest = 0
    for file in (job.folder / "local").rglob("journal"):
        with suppress(OSError):
            entries = [record.entry for record in journal_file.read(file)]
            newest = max(newest, sum(isinstance(entry, journal.IterationCommitted) for entry in entries))
    return newest


def newest_checkpoint(job: Job) -> int:
    folder = checkpoints.newest_complete(job.folder / "home" / "jobs" / "local-1" / "checkpoints")
    assert folder is not None, job.stderr
    return checkpoints.iteration_of(folder)


def goes_on(job: Job, reference: Job, stopped_after: int) -> None:
    """Resume, and compare with the job that was left alone."""
    job.train("--resume", "local-1", iterations=ITERATIONS, **SMALL).wait()
    assert job.status == 0, job.stderr
    losses, expected = job.losses(), reference.losses()
    assert list(losses) == list(range(stopped_after + 1, ITERATIONS + 1))
    assert losses == pytest.approx({i: expected[i] for i in losses}, rel=1e-6)


def test_a_warning_leads_to_a_checkpoint_and_the_job_goes_on_from_it(job: Job, reference: Job) -> None:
    job.train(iterations=ITERATIONS, **SMALL)
    before = job.until(lambda: (done := committed(job)) >= 3 and done)
    assert job.process is not None
    job.process.send_signal(signal.SIGUSR2)
    job.wait(60)
    assert job.status == 75, job.stderr
    done = max(job.losses())
    assert before < done < ITERATIONS
    assert newest_checkpoint(job) == done
    assert job.history("failures") == []
    entries = [record.entry for file in (job.folder / "local").rglob("journal") for record in journal_file.read(file)]
    told = [entry for entry in entries if isinstance(entry, journal.JobSignalled)]
    assert told == [journal.JobSignalled(signal=signal.SIGUSR2, nodes=(), meaning="warning")]
    goes_on(job, reference, done)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_an_operator_stops_is_saved_and_told_how_to_go_on(
    job: Job, reference: Job, number: signal.Signals, status: int
) -> None:
    job.train(iterations=ITERATIONS, **SMALL)
    before = job.until(lambda: (done := committed(job)) >= 3 and done)
    assert job.process is not None
    job.process.send_signal(number)
    job.wait(60)
    assert job.status == status, job.stderr
    done = max(job.losses())
    assert before < done < ITERATIONS
    assert newest_checkpoint(job) == done
    assert job.history("failures") == []
    folder = job.folder / "home" / "jobs" / "local-1" / "checkpoints" / f"iteration-{done:06d}"
    assert f"received {number.name}: stopped after iteration {done}; its checkpoint is written" in job.stderr
    assert f"resihp: job local-1: checkpoint of iteration {done}: {folder}\n" in job.stderr
    told = next(line for line in job.stderr.splitlines() if "to resume from it, type: " in line)
    typed = shlex.split(told.partition("type: ")[2])
    assert typed[:4] == ["resihp", "run", "--local", "--nodes"]
    assert typed[typed.index("--") - 2 :][:2] == ["--resume", "local-1"]
    goes_on(job, reference, done)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_supervisor_still_imports_ends_the_job_as_any_other(
    job: Job, number: signal.Signals, status: int
) -> None:
    job.train(iterations=ITERATIONS, **SMALL)
    assert job.process is not None
    guardian = psutil.Process(job.process.pid)
    job.until(
        lambda: [child for child in guardian.children() if "resihp.wrapper.supervisor.process" in child.cmdline()]
    )
    job.process.send_signal(number)
    job.wait(60)
    assert job.status == status, job.stderr
    assert f"received {number.name}" in job.stderr
    assert "Traceback" not in job.stderr
    assert "the supervisor" not in job.stderr, "none died of it"
    assert job.ask("status")["state"] == "cancelled"
    assert job.processes() == []


SIGNALLED = """
import os, signal, sys
from resihp.wrapper import cli
from resihp.wrapper.commands import run

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
honest = run.create_local_job

def create_local_job():
    made = honest()
    os.kill(os.getpid(), signal.Signals[os.environ["COMES"]])
    return made

run.create_local_job = create_local_job
cli.main()
"""
"""`resihp`, with a signal that comes when there is a job's folder, and nothing else of it yet."""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_before_there_is_a_supervisor_ends_the_job_as_any_other(
    job: Job, number: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.environment["COMES"] = number.name
    job.folder.mkdir()
    signalled = job.folder / "signalled.py"
    signalled.write_text(SIGNALLED)
    monkeypatch.setattr(jobs_of_tests, "RESIHP", [sys.executable, str(signalled)])
    job.train(**SMALL).wait(60)
    monkeypatch.undo()
    assert job.status == status, job.stderr
    assert "the job is to stop; training has not begun" in job.stderr
    assert job.ask("status")["state"] == "cancelled"
    assert job.processes() == []


def test_a_terminal_that_is_closed_does_not_stop_a_job_under_nohup(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_of_tests, "RESIHP", ["nohup", *jobs_of_tests.RESIHP])
    job.train(iterations=6, **SMALL)
    monkeypatch.undo()
    job.until(lambda: committed(job) >= 1)
    assert job.process is not None
    job.process.send_signal(signal.SIGHUP)
    job.wait(60)
    assert job.status == 0, job.stderr
    assert list(job.losses()) == list(range(1, 7))


def test_who_asks_until_the_end_kills_no_supervisor(job: Job) -> None:
    job.train(iterations=ITERATIONS, **SMALL)
    job.until(lambda: committed(job) >= 3)
    assert job.process is not None
    supervisor = next(p for p in job.processes() if "resihp.wrapper.supervisor.process" in p.cmdline())
    while not gone(supervisor.pid):
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    job.wait(30)
    assert "was killed by" not in job.stderr
    assert "its checkpoint is written" in job.stderr


def test_asked_twice_the_job_does_not_wait_for_its_iteration(job: Job) -> None:
    job.train("--fault", "hang:rank=1@iteration=4,phase=forward", iterations=ITERATIONS, **SMALL)
    job.until(lambda: committed(job) >= 3)
    assert job.process is not None
    job.process.send_signal(signal.SIGINT)
    job.until(lambda: "stopping after the iteration under way" in (job.folder / "stderr").read_text())
    begun = time.monotonic()
    time.sleep(0.3)  # a person's second signal, and not the same one once more
    job.process.send_signal(signal.SIGINT)
    job.wait(20)
    assert job.status == 130, job.stderr
    assert time.monotonic() - begun < 12
    assert "received SIGINT again: ended at once; did not wait for a checkpoint of iteration 3" in job.stderr
    assert job.processes() == []


def test_signals_to_every_process_but_ours_stop_the_job_and_blame_nobody(job: Job, reference: Job) -> None:
    """As Slurm does it: CONT and TERM to all processes of all steps. Only the supervisor's are spared here."""
    del job.environment[FOR_TESTS]
    job.train(iterations=ITERATIONS, **SMALL)
    job.until(lambda: committed(job) >= 3)
    targets = [p for p in job.processes() if _is_of_a_step(p)]
    assert len(targets) == 2 * (1 + 1 + 2) + 1, "agents, fork servers, workers, and what forked the servers"
    for number in (signal.SIGCONT, signal.SIGTERM):
        for process in targets:
            process.send_signal(number)
    job.wait(60)
    assert job.status == 143, job.stderr
    done = max(job.losses())
    assert newest_checkpoint(job) == done
    assert job.history("failures") == []
    assert {row["exit"] for row in job.history("workers")} == {-signal.SIGTERM}
    goes_on(job, reference, done)


def _is_of_a_step(process: psutil.Process) -> bool:
    command = process.cmdline()
    return any(name in command for name in ("resihp.wrapper.agent.process", "resihp.worker.forkserver"))


def test_the_script_that_goes_on_after_training_hears_signals_again(job: Job, tmp_path: Path) -> None:
    """Training disregards TERM, but what the script does before and after it does not."""
    script = tmp_path / "after.py"
    example = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
    script.write_text(
        "import os, runpy, signal, sys\n"
        f"sys.argv[0] = {str(example)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "print('heard again', flush=True)\n"
    )
    tiny = ("--layers", "4", "--hidden", "32", "--tokens", "64", "--micro-batches", "8", "--iterations", "2")
    job.start(command=("python", str(script), *tiny), nodes=1, gpus=1, tp=1, pp=1)
    assert job.wait().status == 0, job.stderr
    logs = (job.folder / "home" / "jobs" / "local-1" / "logs").glob("*.rank0.log")
    assert any("heard again" in log.read_text() for log in logs)
