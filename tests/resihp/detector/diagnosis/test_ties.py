"""A line about a node's network, disks or file servers explains only an end that has to do with it."""

from __future__ import annotations

from typing import Any

import pytest

from resihp.detector.diagnosis.clues import Clock, read_log
from resihp.detector.diagnosis.diagnosis import Diagnosis, diagnose
from resihp.detector.diagnosis.reports import Report
from tests.resihp.detector.diagnosis.test_diagnosis import GLOO, NOW
from tests.resihp.detector.lines import EXAMPLES, traceback

NETWORK = (
    "bnxt_en 0000:5e:00.0 eno2: NIC Link is Down",
    "mlx5_core 0000:5e:00.0 ens1f0: Link down",
    "bond0: (slave eth0): link status definitely down, disabling slave",
    "NETDEV WATCHDOG: eno2 (bnxt_en): transmit queue 3 timed out",
    "mlx5_core 0000:5e:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count",
)
STORAGE = (
    EXAMPLES["file server silent"][1][6:],
    "nfs: server fs1 not responding, still trying",
    "blk_update_request: I/O error, dev sdb, sector 2048 op 0x0:(READ) flags 0x0",
    "EXT4-fs error (device sdb1): ext4_find_entry:1455: inode #2: comm python",
)
RECOVERED = [
    pair
    for kind in ("link recovered", "storage recovered", "pcie recovered")
    for pair in EXAMPLES[kind]
    if "[5" in pair
]
UNRELATED = {
    "killed": {"exit": -9},
    "killed, in a shell": {"exit": 137},
    "crashed": {"exit": -11},
    "its own error": {"exit": 1, "log": traceback("ValueError: shard 17 is empty")},
    "no GPU memory": {"exit": 1, "log": traceback(EXAMPLES["gpu memory"][0])},
    "killed after lost peers": {"exit": -9, "log": GLOO},
}


def kernel(lines: str, age_s: float) -> str:
    """As dmesg has it, on a node that was up for 1,000 s at `NOW`."""
    bare = [line.partition("] ")[2] if line.startswith("[") else line for line in lines.split("\n")]
    return "\n".join(f"[{1000 - age_s + i:12.6f}] {line}" for i, line in enumerate(bare))


def one_rank(lines: str, age_s: float, *, timed: bool = True, **end: Any) -> Diagnosis:
    """The verdict on rank 3. Not `timed`: as the controller has it, which does not know when a rank ended by the clock
    of its node, but how old each line was."""
    clock = Clock(near=NOW, booted=NOW - 1000, utc_offset_s=0)
    clues = read_log(kernel(lines, age_s), clock)
    at = NOW if timed else None
    return diagnose([Report(**({"rank": 3, "node": "n0", "device": 3, "pid": 2003, "at": at, "clues": clues} | end))])


@pytest.mark.parametrize("line", [*NETWORK, *STORAGE, *RECOVERED], ids=lambda line: line[:40])
def test_nothing_that_a_node_said_explains_an_end_of_another_kind(line: str) -> None:
    for name, end in UNRELATED.items():
        for age_s, timed in ((400.0, True), (400.0, False), (30.0, True)):
            verdict = one_rank(line, age_s, timed=timed, **end)
            alone = diagnose([Report(rank=3, node="n0", device=3, pid=2003, at=NOW, **end)])
            assert (verdict.code, verdict.cause) == (alone.code, alone.cause), (name, age_s, line)
            assert not verdict.blames_node


@pytest.mark.parametrize("line", NETWORK, ids=lambda line: line[:40])
def test_a_broken_link_explains_waiting_in_vain_and_lost_connections_of_that_moment(line: str) -> None:
    waited = {"exit": 1, "log": EXAMPLES["peer silent"][0]}
    lost = {"exit": 1, "log": GLOO}
    assert one_rank(line, 400, **waited).category == "link"
    assert one_rank(line, 400, exit=-9, fenced="hung: no progress for 600 s").category == "link"
    assert one_rank(line, 20, **lost).category == "link"
    assert one_rank(line, 400, **lost).secondary, "a peer that closes a connection can be reached"


@pytest.mark.parametrize("line", STORAGE, ids=lambda line: line[:40])
def test_a_broken_disk_explains_errors_of_files(line: str) -> None:
    for end in ({"exit": 1, "log": traceback(EXAMPLES["io error"][0])}, {"exit": -7}):
        assert one_rank(line, 400, **end).code in ("file server silent", "disk failure", "file system damaged")


def test_a_file_server_that_came_back_long_ago_is_no_cause() -> None:
    [nfs, *_] = EXAMPLES["storage recovered"]
    assert one_rank(nfs, 400, exit=1, log=EXAMPLES["peer silent"][0]).secondary
    assert one_rank(nfs, 20, exit=1, log=EXAMPLES["peer silent"][0]).code == "storage recovered"


def test_a_port_error_of_nccls_that_was_over_again_blames_nobody() -> None:
    error = "n0:1:2 [3] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)"
    active = "n0:1:2 [3] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port active(9)"
    broken = diagnose([Report(rank=3, node="n0", exit=1, log=f"{error}\n{EXAMPLES['peer silent'][0]}")])
    assert (broken.code, broken.blames_node) == ("ib event", True)
    over = diagnose([Report(rank=3, node="n0", exit=1, log=f"{error}\n{active}\n{EXAMPLES['peer silent'][0]}")])
    assert (over.category, over.blames_node) == ("link", False)
    killed = diagnose([Report(rank=3, node="n0", exit=-9, log=error)])
    assert (killed.code, killed.blames_node) == ("exit -9", False)


HARMLESS_EVENTS = (
    "GID table change(18)",
    "client reregistration(17)",
    "LID change(11)",
    "P_Key change(12)",
    "SM change(13)",
    "port active(9)",
    "send queue drained(5)",
    "path migrated(6)",
    "last WQE reached(16)",
)


@pytest.mark.parametrize("event", HARMLESS_EVENTS)
@pytest.mark.parametrize("form", ["Got non-fatal async event: {}", "Got async event : {}"])
def test_events_of_an_adapter_that_harm_nothing_are_no_clues(event: str, form: str) -> None:
    words = form.format(event if "non-fatal" in form else event.partition("(")[0])
    for device in ("mlx5_0:1 ", "bnxt_re0:1 ", ""):
        assert read_log(f"n0:1:2 [3] transport/net_ib.cc:253 NCCL WARN NET/IB : {device}{words}") == ()
    assert read_log("n0:1:2 [3] NCCL WARN NET/IB : mlx5_0:1 GID table changed") == ()
    assert read_log("n0:1:2 [3] NCCL WARN NET/IB : mlx5_0:1 unknown event type (18)") == ()


@pytest.mark.parametrize("code", range(144, 151))
def test_an_nvlink_xid_blames_its_node_only_where_it_is_fatal(code: int) -> None:
    for process in ("", "pid=2003, name=python3, ", "pid='<unknown>', name=<unknown>, "):
        line = f"NVRM: Xid (PCI:0000:01:00): {code}, {process}SAW_MVB {{}} XC0 i0 Link 00 (0x00000001 0x00000008)"
        fatal, harmless = line.format("Fatal"), line.format("Nonfatal")
        assert one_rank(fatal, 5, exit=1, log=GLOO).blames_node
        for end in ({"exit": 1, "log": GLOO}, {"exit": -9}, {"exit": 1}):
            for age_s in (5, 400):
                assert not one_rank(harmless, age_s, **end).blames_node
        assert one_rank(harmless, 5, exit=-9).code == "exit -9"
        assert one_rank(harmless, 5, exit=1, log=GLOO).secondary
        assert one_rank(harmless, 5, exit=1).code == "exit 1"


def test_an_xid_of_a_part_of_a_gpu_is_the_process_that_it_names() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:00): 94, pid=2004, name=python, Contained: SM (0x1)"
    here = [
        Report(rank=r, node="n0", device=r, pid=2000 + r, exit=1, bus="0000:3b:00.0", messages=line) for r in (3, 4)
    ]
    verdict = diagnose(here)
    assert (verdict.code, verdict.ranks, verdict.blames_node) == ("xid 94", (4,), True)


def test_what_several_lines_of_the_driver_say_together_names_the_gpu() -> None:
    [clue] = read_log(EXAMPLES["gpu off the bus"][2])
    assert clue.named == {"bus": "0000:3b:00"}
    unsupported = (
        "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:1b06)\nNVRM: installed in this system is not supported by the"
    )
    assert read_log(unsupported) == ()


LOOKALIKES = (
    "slurmstepd: error: Detected 0 oom-kill event(s) in StepId=4711.0. Some of your processes may have been killed by "
    "the cgroup out-of-memory handler.",
    "resihp: rank 3 exceeded memory limit (33893560 > 33554432) of its pool, going on",
    "NaN found in input tensor: attention_mask (3 values)",
    "error: *** STEP 4711.0 STEPD TERMINATED ON n0 AT 2025-03-03T09:26:51 DUE TO JOB NOT RUNNING ***",
    "Reason=gres/shard count reported lower than configured (0 < 8)",
    "[rank0]: ProcessGroupNCCL monitor thread is disabled, but would have terminated the process after attempting to "
    "dump debug info, due to ProcessGroupNCCL watchdog hang.",
    "pyxis: imported docker image: nvcr.io/nvidia/pytorch",
    "communicator ranks have different hosts",
    "oom-kill:constraint",
    "Connection restored to scratch-OST0004",
)


@pytest.mark.parametrize("line", LOOKALIKES, ids=lambda line: line[:40])
def test_what_looks_alike_is_no_clue(line: str) -> None:
    assert read_log(line) == ()


def test_slurm_names_the_node_whose_processes_did_not_end() -> None:
    line = EXAMPLES["unkillable"][1].replace(" ON n0 ", " ON n7 ")
    verdict = diagnose([Report(rank=3, node="n0", exit=1, log=GLOO, messages=line)])
    assert verdict.cause == "node n7: its processes did not end when Slurm killed them"
    assert not verdict.blames_node


@pytest.mark.parametrize("line", EXAMPLES["slurm oom"], ids=lambda line: line[:60])
def test_slurm_tells_of_memory_in_many_ways(line: str) -> None:
    verdict = diagnose([Report(rank=3, node="n0", exit=-9, messages=line)])
    assert (verdict.category, verdict.ranks, verdict.blames_node) == ("memory", (3,), False)


def test_what_slurm_set_up_badly_is_told_of_a_process_that_exited_and_not_of_one_that_was_killed() -> None:
    for kind in ("container", "nodes left out", "unkillable"):
        line = EXAMPLES[kind][0]
        assert diagnose([Report(rank=3, node="n0", exit=1, messages=line)]).code == kind
        assert diagnose([Report(rank=3, node="n0", exit=-9, messages=line)]).code == "exit -9"
    [ports, _] = EXAMPLES["srun ports"]
    verdict = diagnose([Report(rank=3, node="n0", exit=1, messages=ports)])
    assert verdict.cause == "job: srun could not open a port (Address already in use)"
