"""A line that a library logs, and that its process lives with, is not why that process ends later."""

from __future__ import annotations

import pytest

from resihp.detector.diagnosis.clues import read_log
from resihp.detector.diagnosis.diagnosis import Diagnosis, diagnose
from resihp.detector.diagnosis.reports import Report
from tests.resihp.detector.lines import CAUSED, traceback

STEPS = "\n".join(f"step {step} loss {10 / step:.3f}" for step in range(1, 40))
TENSORFLOW = (
    "2025-03-03 09:26:51.123456: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed call to "
    "cuInit: INTERNAL: CUDA error: Failed call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
)
LINES = {
    "tensorflow": TENSORFLOW,
    "jax": "W0303 09:26:51 xla_bridge.py:794] CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected; using CPU",
    "nvml": "Failed to initialize NVML: Unknown Error",
    "driver": "UserWarning: CUDA initialization: The NVIDIA driver: CUDA driver version is insufficient for runtime",
    "fabric": "UserWarning: CUDA initialization: Error 802: system not yet initialized (Triggered internally)",
    "a query of ecc": "dcgm exporter: CUDA_ERROR_ECC_UNCORRECTABLE is watched on GPU 3",
    "caught memory": "WARNING caught CUDA out of memory. Tried to allocate 2.00 GiB; batch of 8 instead of 16",
    "read-only cache": "mkdir -p failed for path /.config/matplotlib: [Errno 30] Read-only file system; "
    "created a temporary cache directory",
    "full cache": "triton: cache not written: No space left on device, ignored",
    "too many files": "WARNING:root:Too many open files, retrying",
}
ENDINGS = {
    "raised": (traceback("ValueError: bad sample 17"), 1, "raised ValueError: bad sample 17"),
    "exited": ("", 3, "exited with status 3"),
    "killed": ("", -9, "killed by signal 9 (SIGKILL)"),
    "terminated": ("", -15, "killed by signal 15 (SIGTERM)"),
    "crashed": ("", -11, "killed by signal 11 (SIGSEGV)"),
    "aborted": ("", -6, "killed by signal 6 (SIGABRT)"),
}


def verdict(log: str, status: int) -> Diagnosis:
    return diagnose([Report(rank=1, node="n1", device=1, exit=status, clues=read_log(log))])


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "talking"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_process_ended_counts_for_more_than_what_it_logged(ending: str, silent: bool) -> None:
    text, status, words = ENDINGS[ending]
    for name, line in LINES.items():
        assert read_log(line), name
        found = verdict("\n".join((line, *(() if silent else (STEPS,)), text)), status)
        assert words in found.cause, name
        assert not found.blames_node, name
        assert found.category in ("program", "unknown"), name


@pytest.mark.parametrize("status", [3, -9, -6, -15])
def test_an_exception_that_was_caught_is_not_why_a_process_ends_much_later(status: int) -> None:
    for error in ("torch.OutOfMemoryError: CUDA out of memory.", "RuntimeError: CUDA error: GPU is lost"):
        found = verdict(f"{traceback(error)}\n{STEPS}\n", status)
        assert found.code == f"exit {status}"
        assert not found.blames_node


DIES_OF_IT = {
    "raised": (f"{STEPS}\n{traceback('RuntimeError: CUDA error: uncorrectable ECC error encountered')}", 1, "device"),
    "raised, and said after": (
        traceback("RuntimeError: CUDA error: uncorrectable ECC error encountered") + "\nshutting down\nbye\n",
        1,
        "device",
    ),
    "raised from": (
        traceback("RuntimeError: CUDA error: uncorrectable ECC error encountered")
        + CAUSED
        + traceback("RuntimeError: step 17 failed"),
        1,
        "device",
    ),
    "c++": (
        f"{STEPS}\nterminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously "
        "reported at some other API call, so the stacktrace below might be incorrect.\n"
        + "\n".join(f"frame #{n}: c10::Error::Error (0x7f in /opt/libc10.so)" for n in range(60)),
        -6,
        "device",
    ),
    "watchdog": (
        "[rank3]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:1895] [PG ID 0 Rank 3] Process group watchdog thread terminated "
        "with exception: CUDA error: uncorrectable ECC error encountered\n"
        + "\n".join(f"frame #{n}: c10::Error::Error (0x7f in /opt/libc10.so)" for n in range(60)),
        -6,
        "device",
    ),
    "nccl": (
        f"{STEPS}\ngpu-17:2217:2301 [3] enqueue.cc:1402 NCCL WARN Cuda failure 214 'uncorrectable ECC error "
        "encountered'\n"
        + traceback("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error"),
        1,
        "device",
    ),
    "nccl's last error": (
        traceback(
            "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error (run with "
            "NCCL_DEBUG=INFO for details)\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
            "Cuda failure 'uncorrectable ECC error encountered'"
        ),
        1,
        "device",
    ),
    "nccl's memory": (
        f"{STEPS}\ngpu-17:983:1261 [3] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-t to 330 "
        "bytes\n" + traceback("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error"),
        1,
        "memory",
    ),
    "a disk": (f"{STEPS}\nERROR: cannot save /scratch/120.pt: No space left on device\n", 1, "storage"),
    "a shell": (f"{STEPS}\ncp: error writing '/scratch/x': No space left on device\n", 1, "storage"),
    "glibc": (f"{STEPS}\ndouble free or corruption (!prev)\n", -6, "program"),
    "bad_alloc": (f"{STEPS}\nterminate called after throwing an instance of 'std::bad_alloc'\n", -6, "memory"),
    "faulthandler": (
        "Fatal Python error: Segmentation fault\n\n"
        + "\n".join(f'  File "/opt/lib/x.py", line {n} in call' for n in range(90))
        + "\nExtension modules: numpy, torch._C (total: 40)",
        -11,
        "program",
    ),
}


@pytest.mark.parametrize("how", DIES_OF_IT)
def test_what_a_process_died_of_is_the_cause(how: str) -> None:
    log, status, category = DIES_OF_IT[how]
    found = verdict(log, status)
    assert found.category == category
    assert found.blames_node == (category == "device")


WATCHDOG = (
    "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception\n"
)


@pytest.mark.parametrize("aborted", ["", "Fatal Python error: Aborted\n\nThread 0x00007f (most recent call first):\n"])
def test_a_watchdogs_abort_is_a_peers_doing_with_and_without_faulthandler(aborted: str) -> None:
    found = verdict(WATCHDOG + aborted + '  File "/opt/lib/threading.py", line 324 in wait\n', -6)
    assert found.secondary


def test_an_abort_without_a_word_is_told_by_its_signal() -> None:
    found = verdict("Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n", -6)
    assert found.code == "exit -6"
