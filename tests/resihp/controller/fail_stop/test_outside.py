"""Storage and services that fail: neither the script nor a node is the cause, and another run may do well."""

from __future__ import annotations

from typing import Any

import pytest

from resihp.controller import interface as api
from resihp.detector.diagnosis.clues import read_log
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound
from tests.resihp.controller.fail_stop.test_early_losses import gathered, says
from tests.resihp.controller.fail_stop.test_root_causes import Job, clues
from tests.resihp.controller.test_startup import Start
from tests.resihp.detector.diagnosis.test_survived import WATCHDOG
from tests.resihp.detector.lines import GLOO_CLOSED, REFUSED_BY_A_SERVICE, traceback

EIO = "OSError: [Errno 5] Input/output error: '/data/shard-17.bin'"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '/scratch/shard-5.bin'"
HTTP_503 = "HTTPError: 503 Server Error: Service Unavailable for url: https://huggingface.co/api/models/gpt2"
AGAIN = {"slurm": True, "may_requeue": True, "restarts_left": 1}


def met(**settings: Any) -> Start:
    """A plain script whose ranks have met by themselves."""
    job = gathered(**{"slurm": False, **settings})
    job.spawn(0, 1, 2, 3)
    job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
    return job


def all_raise(job: Start, text: str) -> None:
    error = text.splitlines()[-1]
    for rank in range(4):
        says(job, rank, m.Raised(iteration=1, error=error.rpartition("exceptions.")[2], traceback=text))
    for rank in range(4):
        job.feed(api.WorkerExited(rank=rank, status=1, clues=read_log(text)))


def lacks_a_file(job: Job, *ranks: int) -> None:
    """These ranks do not find a file, and end."""
    for rank in ranks:
        job.raise_(rank, MISSING)
        job.exit(rank, traceback(MISSING))


@pytest.mark.parametrize(
    "text",
    [
        traceback(EIO),
        traceback("OSError: [Errno 116] Stale file handle: '/data/shard-17.bin'"),
        traceback("TimeoutError: [Errno 110] Connection timed out: '/mnt/nfs/data'"),
        traceback(HTTP_503),
        REFUSED_BY_A_SERVICE,
        traceback("socket.gaierror: [Errno -3] Temporary failure in name resolution", raised_in="socket.py"),
        traceback("ConnectionRefusedError: [Errno 111] Connection refused", raised_in="socket.py"),
    ],
)
def test_what_storage_or_a_service_does_to_all_ranks_is_one_failure_and_not_the_scripts(text: str) -> None:
    job = met()
    all_raise(job, text)
    assert job.end is not None
    assert job.end[0] == 1
    assert "neither the script nor a node is the cause" in job.end[1]
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.component, failure.node) == ("fail-stop", "process", None)
    assert failure.cause.startswith("4 ranks raised the same: ")
    assert not failure.hardware


@pytest.mark.parametrize(("restarts_left", "code"), [(1, 75), (0, 1)])
def test_slurm_runs_it_again_as_often_as_it_may(restarts_left: int, code: int) -> None:
    job = met(**AGAIN | {"restarts_left": restarts_left})
    all_raise(job, traceback(EIO))
    assert job.end is not None
    assert job.end[0] == code
    assert ("to be run again" if code == 75 else "[slurm] restarts is used up") in job.end[1]


def test_of_a_command_the_log_tells() -> None:
    """A shell script that runs python: nothing but its status and its log is known."""
    job = gathered(declares=False, slurm=False)
    job.spawn(0, 1, 2, 3)
    for rank in range(4):
        job.feed(api.WorkerExited(rank=rank, status=1, clues=read_log(traceback(EIO))))
    assert job.end is not None
    assert job.end[0] == 1
    assert "neither the script nor a node is the cause" in job.end[1]
    assert len(job.all(FailureFound)) == 1


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError",
        "KeyError: 503",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/5'",
        "HTTPError: 404 Client Error: Not Found for url: https://huggingface.co/api/models/gpt9",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
)
def test_what_may_be_the_scripts_is_the_scripts_where_all_raise_it(error: str) -> None:
    job = met(**AGAIN)
    all_raise(job, traceback(error))
    assert job.end is not None
    assert job.end[0] == 93
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.component) == ("program", "script")


def test_a_lost_peer_on_all_ranks_is_not_the_scripts_doing() -> None:
    job = met()
    all_raise(job, GLOO_CLOSED)
    assert job.end is not None
    assert job.end[0] == 1
    assert job.end[1].endswith("; 3 other ranks raised the same error")


# --- while training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [EIO, HTTP_503])
def test_training_goes_on_without_two_ranks_that_storage_failed_and_starts_them_again(error: str) -> None:
    job = Job()
    for rank in (2, 3):
        job.raise_(rank, error)
        job.exit(rank, traceback(error))
    (failure,) = job.failures()
    assert job.end is None
    assert (failure.kind, failure.component, failure.node, failure.ranks) == ("fail-stop", "process", None, (2, 3))
    assert job.started_again == [("n2", 0), ("n2", 1)]


@pytest.mark.parametrize("slurm", [True, False])
def test_where_it_fails_all_ranks_the_job_ends_to_go_on_from_its_checkpoint(slurm: bool) -> None:
    job = Job(**(AGAIN if slurm else {}))
    for rank in range(6):
        job.raise_(rank, EIO)
        job.exit(rank, traceback(EIO))
    assert job.end is not None
    assert job.end.exit_code == (75 if slurm else 5)
    assert job.end.requeue == slurm
    assert "raised OSError: [Errno 5]" in job.end.reason
    (failure,) = job.all(FailureFound)
    assert failure.component == "process"
    assert failure.ranks == (0, 1, 2, 3, 4, 5)


def test_a_device_that_two_ranks_lost_is_not_the_scripts_doing() -> None:
    job = Job()
    for rank in (2, 3):
        job.raise_(rank, "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution")
        job.exit(rank, status=1)
    job.settle()
    assert job.end is None


def test_an_error_that_all_ranks_of_one_node_share_costs_the_node_its_ranks_and_not_the_job() -> None:
    """A file system that is not mounted there; on nodes with one GPU the same cost one rank."""
    job = Job()
    lacks_a_file(job, 2, 3)
    job.settle()
    assert job.end is None
    assert {2, 3}.isdisjoint(job.job.record.active)
    assert all(failure.node is None for failure in job.all(FailureFound))


def test_an_error_that_follows_its_sample_to_another_node_is_the_scripts() -> None:
    job = Job()
    lacks_a_file(job, 2, 3)
    job.settle()
    lacks_a_file(job, 4, 5)
    job.park(stepped=job.job.record.committed)
    assert job.end is not None
    assert job.end.exit_code == 93


def test_one_error_of_several_ranks_is_one_failure() -> None:
    job = Job()
    job.exit(5, status=-9)
    for rank in (1, 3):
        job.raise_(rank, "ValueError: bad batch 17")
        job.exit(rank, status=1)
    job.park(stepped=job.job.record.committed)
    assert job.end is not None
    assert job.end.exit_code == 93
    causes = [failure.cause for failure in job.all(FailureFound)]
    assert causes == ["rank 5 killed by signal 9 (SIGKILL)", "2 ranks raised the same: ValueError: bad batch 17"]


# --- whose words --------------------------------------------------------------------------------------------------


def test_the_first_ones_own_words_are_told_though_its_peers_raise_for_the_lost_connection() -> None:
    job = met()
    words = clues("ValueError\ndouble free or corruption (!prev)\n")
    job.feed(api.WorkerExited(rank=1, status=-6, clues=words))
    for rank in (0, 2, 3):
        says(job, rank, m.Raised(iteration=1, error=GLOO_CLOSED.splitlines()[-1], traceback=GLOO_CLOSED))
        job.feed(api.WorkerExited(rank=rank, status=1, clues=read_log(GLOO_CLOSED)))
    (failure,) = job.all(FailureFound)
    assert failure.cause == "rank 1 (n1 device 1): the program damaged its own memory"
    assert failure.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("aborted", ["", "Fatal Python error: Aborted\n\nThread 0x7f (most recent call first):\n"])
def test_a_watchdogs_aborts_are_one_failure_with_faulthandler_as_without(aborted: str) -> None:
    job = met()
    for rank in range(4):
        job.feed(api.WorkerExited(rank=rank, status=-6, clues=read_log(WATCHDOG + aborted)))
    (failure,) = job.all(FailureFound)
    assert (failure.node, failure.ranks) == (None, (0, 1, 2, 3))
    assert "interpreter" not in failure.cause


def test_a_line_that_was_lived_with_condemns_no_device() -> None:
    line = "E0303 09:26:51.1 cuda_driver.cc:152] failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device"
    job = Job()
    job.exit(1, line, status=3)
    (failure,) = job.failures()
    assert failure.cause == "rank 1 exited with status 3"
    assert failure.component == "process"
    assert job.started_again == [("n1", 1)]
