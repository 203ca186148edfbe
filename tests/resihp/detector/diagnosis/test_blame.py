"""What harms nothing, what a setting can cause and what a program only prints never condemns a node or a device."""

from __future__ import annotations

from typing import Any

import pytest

from resihp.detector.diagnosis.clues import Clock, read_log
from resihp.detector.diagnosis.diagnosis import diagnose
from resihp.detector.diagnosis.reports import Report
from tests.resihp.detector.diagnosis.test_diagnosis import NOW
from tests.resihp.detector.diagnosis.test_ties import one_rank
from tests.resihp.detector.lines import EXAMPLES, traceback

NFS = traceback("OSError: [Errno 116] Stale file handle: '/data/shard-17.bin'")
MISSING_SHARD_TRACEBACK = traceback("FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-17.bin'")
ENDS: dict[str, dict[str, Any]] = {
    "killed": {"exit": -9},
    "its own error": {"exit": 1, "log": traceback("ValueError: bad sample")},
    "a file": {"exit": 1, "log": NFS},
    "no file": {"exit": 1, "log": MISSING_SHARD_TRACEBACK},
    "hung": {"exit": -9, "fenced": "hung: no progress for 600 s"},
}
HARMLESS = (
    "mce: [Hardware Error]: CPU 40: Machine Check: 0 Bank 17: dc2040000000011b",
    "mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 7: 8c00004000010090",
    "mce: [Hardware Error]: CPU 4: Machine Check Exception: 0 Bank 7: 9c00004000010090",
    "pcieport 0000:3a:00.0: AER: Uncorrectable (Non-Fatal) error message received from 0000:3b:00.0",
    "nvme 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)",
    "{1}[Hardware Error]: event severity: recoverable",
    "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
    "I/O error, dev sr0, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
    "Buffer I/O error on dev sr0, logical block 0, async page read",
    "I/O error, dev loop3, sector 2048 op 0x0:(READ) flags 0x0",
    "block nbd0: I/O error, dev nbd0, sector 0 op 0x0:(READ)",
    "EXT4-fs error (device loop0): ext4_find_entry:1455: inode #2: comm python",
)


@pytest.mark.parametrize("line", HARMLESS, ids=lambda line: line[:60])
def test_what_harmed_nothing_blames_no_node_of_any_end(line: str) -> None:
    for name, end in ENDS.items():
        for age_s in (30.0, 500.0):
            for timed in (True, False):
                assert not one_rank(line, age_s, timed=timed, **end).blames_node, (name, age_s)
    assert one_rank(line, 500, **ENDS["its own error"]).cause == "rank 3 raised ValueError: bad sample"
    assert one_rank(line, 500, **ENDS["killed"]).code == "exit -9"


def test_an_uncorrected_error_of_the_hardware_still_condemns_its_node() -> None:
    for line in (
        "mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 7: be00000000800400",
        "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: bc00000000800400",
        "pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
        "{1}[Hardware Error]: event severity: fatal",
    ):
        assert one_rank(line, 30, exit=-9).blames_node, line
    assert one_rank("I/O error, dev sdb, sector 2048 op 0x0:(READ) flags 0x0", 30, **ENDS["a file"]).blames_node


def test_a_file_that_is_missing_by_a_relative_path_is_no_broken_disks_doing() -> None:
    disk = "I/O error, dev sdb, sector 2048 op 0x0:(READ) flags 0x0"
    relative = traceback("FileNotFoundError: [Errno 2] No such file or directory: 'a'")
    assert one_rank(disk, 500, exit=1, log=relative).code == "file missing"
    assert one_rank(disk, 500, exit=1, log=MISSING_SHARD_TRACEBACK).code == "disk failure"


PRINTED = (
    "sample: my training dies with NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
    "sample: 'Kernel panic - not syncing: Fatal machine check'",
    "sample: mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 7: be00000000800400",
    "sample: EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0",
    "sample: RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    "sample: RuntimeError: CUDA error: uncorrectable ECC error encountered",
)
STEPS = "\n".join(f"step {step} loss {10 / step:.3f}" for step in range(1, 40))


@pytest.mark.parametrize("line", PRINTED, ids=lambda line: line[:40])
@pytest.mark.parametrize("status", [-9, 1, 3, -6])
def test_what_the_kernel_would_say_condemns_nothing_where_a_program_prints_it(line: str, status: int) -> None:
    for log in (f"{line}\n{STEPS}", line, f"{line}\n{traceback('ValueError: bad sample')}"):
        verdict = diagnose([Report(rank=3, node="n0", device=3, exit=status, log=log, pid=2003, bus="0000:3b:00.0")])
        assert not verdict.blames_node, log
        assert verdict.category in ("unknown", "program"), log


OF_A_SETTING = (
    "CUDA error: no CUDA-capable device is detected",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA driver version is insufficient for CUDA runtime version",
    "Failed to initialize NVML: Unknown Error",
)


@pytest.mark.parametrize("error", OF_A_SETTING)
@pytest.mark.parametrize("ranks", [1, 7, 16])
def test_what_a_setting_of_the_job_can_cause_blames_no_gpu_and_no_node(error: str, ranks: int) -> None:
    log = traceback(f"RuntimeError: {error}")
    reports = [Report(rank=rank, node=f"n{rank // 8}", device=rank % 8, exit=1, log=log) for rank in range(ranks)]
    verdict = diagnose(reports)
    assert not verdict.blames_node
    assert verdict.ranks == tuple(range(ranks))


def test_what_several_gpus_raise_at_once_condemns_none_of_them() -> None:
    log = traceback("RuntimeError: CUDA error: uncorrectable ECC error encountered")

    def blames(devices: list[int]) -> tuple[bool, tuple[int, ...]]:
        verdict = diagnose(
            [Report(rank=rank, node="n0", device=device, exit=1, log=log) for rank, device in enumerate(devices)]
        )
        return verdict.blames_node, verdict.ranks

    assert blames([0, 1, 2, 3]) == (False, (0, 1, 2, 3))
    assert blames([3]) == (True, (0,))
    assert blames([3, 3]) == (True, (0, 1)), "two ranks share it"


@pytest.mark.parametrize("nodes", ["n0-[18-19]", "n1,n2", "gpu[1,3-4]"])
def test_a_list_of_lost_nodes_is_told_as_it_is_and_blames_none(nodes: str) -> None:
    verdict = diagnose([Report(rank=3, node="n0", exit=-15, messages=f"srun: error: Node failure on {nodes}")])
    assert verdict.cause == f"nodes {nodes}: Slurm lost these nodes"
    assert (verdict.node, verdict.blames_node) == (None, False)
    low = f"error: Setting node {nodes} state to DRAIN with reason:gres/gpu count too low (4 < 8)"
    assert not diagnose([Report(rank=3, node="n0", exit=1, messages=low)]).blames_node


# --- times ------------------------------------------------------------------------------------------------------------

OF_ITS_NODE = Clock(near=NOW, booted=NOW - 1000, utc_offset_s=3600)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("KeyError: Timestamp('2024-01-01 00:00:00')", "exception"),
        ("OSError: [Errno 116] Stale file handle: '/ckpt/2025-02-28T10:00:00/meta.json'", "stale handle"),
    ],
)
def test_a_date_within_an_exception_is_not_the_time_of_its_line(error: str, code: str) -> None:
    for at in (None, NOW):
        log = traceback(error)
        verdict = diagnose([Report(rank=3, node="n0", exit=1, at=at, log=log, clock=OF_ITS_NODE)])
        assert (verdict.code, verdict.at) == (code, at)


def test_a_date_in_an_exception_does_not_make_the_kernels_line_a_later_one() -> None:
    log = traceback("RuntimeError: CUDA error: unspecified launch failure while loading /ckpt/2025-02-28 10:00:00/x")
    kernel = "[  995.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=2003, name=python, GPU has fallen off the bus."
    clues = (*read_log(log, OF_ITS_NODE, kernel_lines=False), *read_log(kernel, OF_ITS_NODE))
    assert diagnose([Report(rank=3, node="n0", device=3, exit=1, pid=2003, clues=clues)]).code == "xid 79"


def test_a_logger_of_another_time_zone_leaves_the_time_of_its_lines_unknown() -> None:
    log = "2025-03-03 09:26:50,000 ERROR cannot save: No space left on device"
    [clue] = read_log(log, OF_ITS_NODE, kernel_lines=False)
    assert (clue.at, clue.age_s) == (None, None)
    [clue] = read_log(log, Clock(near=NOW, utc_offset_s=0), kernel_lines=False)
    assert clue.at == NOW - 1
    assert diagnose([Report(rank=3, node="n0", exit=1, at=NOW, log=log, clock=OF_ITS_NODE)]).code == "disk full"


# --- what libraries print at the end ----------------------------------------------------------------------------------

WANDB_SUMMARY = "\n".join(
    (
        "wandb: ",
        "wandb: Run history:",
        *(f"wandb:   train/m{i} ▁▂▃▄▅▆▇█" for i in range(14)),
        "wandb: Run summary:",
        *(f"wandb:   train/m{i} 0.{i}" for i in range(14)),
        "wandb: Find logs at: ./wandb/run-20250303_092651-abc/logs",
    )
)
TRACKER_SUMMARIES = (
    WANDB_SUMMARY,
    WANDB_SUMMARY.replace("wandb:", "COMET INFO:"),
    WANDB_SUMMARY.replace("wandb:", "[neptune] [info   ]"),
)


@pytest.mark.parametrize("summary", TRACKER_SUMMARIES, ids=lambda text: text[:9])
def test_an_experiment_trackers_summary_does_not_hide_what_was_raised(summary: str) -> None:
    for error, code in (
        ("ValueError: bad sample 17", "exception"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "cuda ecc"),
    ):
        log = f"{STEPS}\n{traceback(error)}\n{summary}"
        assert diagnose([Report(rank=3, node="n0", device=3, exit=1, log=log)]).code == code


def test_what_is_printed_after_the_last_exception_of_a_failed_process_counts_little_against_it() -> None:
    def code(error: str, status: int, lines: int) -> str:
        log = "\n".join((traceback(error), *(f"closing part {i}" for i in range(lines))))
        return diagnose([Report(rank=3, node="n0", device=3, exit=status, log=log)]).code

    assert code("ValueError: bad sample", 1, 30) == "exception"
    assert code("ValueError: bad sample", 1, 300) == "exit 1"
    assert code("ValueError: bad sample", 3, 30) == "exit 3"
    assert code("RuntimeError: CUDA error: GPU is lost", 1, 30) == "exit 1", "a device is not condemned on such a line"


# --- memory -----------------------------------------------------------------------------------------------------------

SLURM_OOM = EXAMPLES["slurm oom"][0]


def test_memory_is_no_cause_of_an_end_by_something_else() -> None:
    def code(log: str, status: int = 1) -> str:
        return diagnose([Report(rank=3, node="n0", exit=status, log=log, messages=SLURM_OOM)]).code

    assert code(traceback("ValueError: bad sample")) == "exception"
    assert code("", -9) == "slurm oom"
    assert code("") == "slurm oom"
    assert code(traceback(EXAMPLES["loader killed"][0])) == "slurm oom"
    assert code(traceback("subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.")) == "slurm oom"
    hint = 'hint: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if you see "CUDA out of memory"\nConfig ok\n'
    assert diagnose([Report(rank=3, node="n0", exit=3, log=hint)]).code == "exit 3"


# --- scripts that never ran -------------------------------------------------------------------------------------------


def test_a_script_that_cannot_be_read_or_refuses_its_arguments_is_told_by_its_own_words() -> None:
    syntax = "  File \"/home/me/train.py\", line 12\n    def f(\n         ^\nSyntaxError: '(' was never closed"
    verdict = diagnose([Report(rank=3, node="n0", exit=1, log=syntax)])
    assert (verdict.category, verdict.cause) == ("program", "rank 3 raised SyntaxError: '(' was never closed")
    usage = "usage: train.py [-h] --lr LR\ntrain.py: error: the following arguments are required: --lr"
    verdict = diagnose([Report(rank=3, node="n0", exit=2, log=usage)])
    assert verdict.category == "program"
    assert verdict.cause == "rank 3: train.py: error: the following arguments are required: --lr"
