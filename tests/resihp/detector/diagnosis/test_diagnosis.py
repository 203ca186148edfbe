"""Incidents as they happen, of several ranks: the root cause is found, and nobody else is blamed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.detector.diagnosis.clues import Clock, read_log
from resihp.detector.diagnosis.diagnosis import Diagnosis, diagnose
from resihp.detector.diagnosis.reports import Report
from tests.resihp.detector.lines import (
    EXAMPLES,
    FAILED_CONNECTIONS,
    LOST_PEERS,
    REFUSED_BY_A_SERVICE,
    traceback,
    xid,
)

NOW = 1_740_994_011.0  # 2025-03-03 09:26:51 UTC
NCCL_REMOTE = "\n".join(
    (
        traceback(
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited or there was "
            "a network error, NCCL version 2.20.5",
            "[rank0]: ",
        ),
        *EXAMPLES["nccl remote"],
    )
)
GLOO = traceback(
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::]"
)


def report(rank: int, **what: Any) -> Report:
    """A rank on a node of 8, ended a little after rank 0's."""
    given = {"node": f"n{rank // 8}", "device": rank % 8, "exit": 1, "at": NOW + 0.1 * rank, "pid": 2000 + rank}
    return Report(rank=rank, **(given | what))


def peers(count: int, *roots: Report, log: str = NCCL_REMOTE) -> list[Report]:
    """All ranks: the roots as they are, the others lost their connections."""
    others = {rank: report(rank, log=log, at=NOW + 5 + 0.1 * rank) for rank in range(count)}
    return list((others | {root.rank: root for root in roots}).values())


def in_any_order(reports: list[Report], earlier: tuple[Diagnosis, ...] = ()) -> Diagnosis:
    verdict = diagnose(reports, earlier)
    shuffled = list(reports)
    for seed in range(3):
        random.Random(seed).shuffle(shuffled)
        assert diagnose(shuffled, earlier) == verdict
    return verdict


def test_a_dead_node_is_one_failure_and_not_eight() -> None:
    roots = [report(rank, exit=None, log=NCCL_REMOTE) for rank in range(8, 16)]
    verdict = in_any_order(peers(32, *roots))
    assert (verdict.category, verdict.component, verdict.node, verdict.device) == ("node", "node", "n1", None)
    assert verdict.ranks == tuple(range(8, 16))
    assert verdict.blames_node
    assert verdict.cause == "node n1: lost, nobody saw its processes end"


def test_what_the_kernel_said_before_the_node_died_is_the_cause() -> None:
    panic = f"[  99.000000] {EXAMPLES['machine check'][0][6:]}"
    clock = Clock(near=NOW, booted=NOW - 100)
    roots = [report(rank, exit=None, messages=panic, clock=clock) for rank in range(8, 16)]
    verdict = in_any_order(peers(16, *roots))
    assert (verdict.category, verdict.code, verdict.node) == ("node", "machine check", "n1")
    assert verdict.ranks == tuple(range(8, 16))
    assert verdict.at == pytest.approx(NOW - 1)


@pytest.mark.parametrize(
    "known",
    [{"bus": "00000000:3B:00.0"}, {"pid": 2217}, {"log": "\n".join(EXAMPLES["gpu lost"])}],
    ids=["by its PCI address", "by its process", "by its own complaint"],
)
def test_a_gpu_off_the_bus_is_the_root_of_its_peers_errors(known: dict[str, Any]) -> None:
    kernel = xid(79, pid=2217 if "pid" in known else "'<unknown>'")
    here = [report(rank, log=NCCL_REMOTE, messages=kernel) for rank in range(8) if rank != 5]
    root = report(5, **({"exit": -6, "at": NOW + 9, "messages": kernel} | known))
    verdict = in_any_order(peers(16, *here, root))
    assert (verdict.category, verdict.component, verdict.code) == ("device", "device", "xid 79")
    assert (verdict.ranks, verdict.node, verdict.device) == ((5,), "n0", 5)
    assert verdict.cause == "rank 5: GPU has fallen off the bus (Xid 79)"
    assert verdict.evidence[0] == kernel
    assert "power-cycle" in verdict.advice
    assert verdict.blames_node
    assert not verdict.secondary


def test_an_xid_of_a_gpu_that_nobody_can_place_blames_the_node_only() -> None:
    reports = [report(rank, log=NCCL_REMOTE, messages=xid(79)) for rank in range(8)]
    verdict = in_any_order(reports)
    assert (verdict.category, verdict.node, verdict.device, verdict.ranks) == ("device", "n0", None, ())
    assert verdict.cause == "node n0: GPU has fallen off the bus (Xid 79)"


def test_xid_45_follows_from_something_else() -> None:
    verdict = in_any_order([report(3, exit=-9, messages=xid(45, pid=2003))])
    assert (verdict.category, verdict.secondary, verdict.blames_node) == ("secondary", True, False)
    verdict = in_any_order([report(3, exit=1, messages=f"{xid(45, pid=2003)}\n{xid(48, bus='0000:3b:00')}")])
    assert verdict.code == "xid 48"
    verdict = in_any_order([report(3, exit=-11, messages=xid(45, pid=2003))])
    assert verdict.code == "exit -11"


def test_xids_of_others_and_of_long_ago_are_no_clues() -> None:
    mine = {"bus": "0000:3b:00.0", "clock": Clock(near=NOW, booted=NOW - 191_433.212907 - 5)}
    assert diagnose([report(0, exit=-9, messages=xid(31, bus="0000:5e:00", pid=77), **mine)]).code == "exit -9"
    old = mine | {"clock": Clock(near=NOW, booted=NOW - 191_433 - 86_400)}
    assert diagnose([report(0, exit=-9, messages=xid(79), **old)]).code == "exit -9"
    assert diagnose([report(0, exit=-9, messages=xid(79), **mine)]).code == "xid 79"
    assert diagnose([report(0, exit=-9, messages=xid(163), **mine)]).code == "exit -9"


def test_a_script_that_raises_everywhere_is_the_program() -> None:
    error = "ValueError: cannot reshape array of size {} into shape (4,4096)"
    reports = [report(rank, log=traceback(error.format(1000 + rank), f"[rank{rank}]: ")) for rank in range(16)]
    verdict = in_any_order(reports)
    assert (verdict.category, verdict.component, verdict.node) == ("program", "script", None)
    assert verdict.ranks == tuple(range(16))
    assert verdict.cause == f"16 ranks raised the same: {error.format(1000)}"
    assert not verdict.blames_node


def test_an_exception_on_one_rank_is_the_programs_and_its_peers_are_victims() -> None:
    root = report(6, log=traceback("KeyError: 'input_ids'"), at=NOW + 9)
    verdict = in_any_order(peers(16, root, log=GLOO))
    assert (verdict.category, verdict.ranks, verdict.cause) == ("program", (6,), "rank 6 raised KeyError: 'input_ids'")
    assert not verdict.blames_node


@pytest.mark.parametrize("how", LOST_PEERS)
def test_a_connection_of_the_process_group_is_one_to_a_peer_whatever_it_failed_of(how: str) -> None:
    verdict = in_any_order([report(rank, log=LOST_PEERS[how]) for rank in (0, 1, 3)])
    assert (verdict.category, verdict.secondary, verdict.blames_node) == ("secondary", True, False)
    for root in (report(2, exit=-9), report(2, log=REFUSED_BY_A_SERVICE)):
        assert in_any_order(peers(4, root, log=LOST_PEERS[how])).ranks == (2,)


@pytest.mark.parametrize("how", FAILED_CONNECTIONS)
def test_a_connection_that_another_library_lost_is_told_as_it_was_raised(how: str) -> None:
    error = FAILED_CONNECTIONS[how].splitlines()[-1]
    verdict = in_any_order(peers(8, report(0, log=FAILED_CONNECTIONS[how]), log=LOST_PEERS["gloo"]))
    assert (verdict.category, verdict.component, verdict.ranks) == ("program", "script", (0,))
    assert verdict.cause == f"rank 0 raised {error[:200]}"
    assert not verdict.blames_node
    assert not verdict.secondary


@pytest.mark.parametrize("how", FAILED_CONNECTIONS)
def test_a_connection_that_may_have_been_one_to_a_peer_follows_from_that_ones_end(how: str) -> None:
    verdict = in_any_order([report(0, log=FAILED_CONNECTIONS[how]), report(1, exit=-9)])
    assert (verdict.ranks, verdict.cause) == ((1,), "rank 1 killed by signal 9 (SIGKILL)")


def test_a_service_that_was_tried_in_vain_before_is_not_why_a_rank_lost_its_peers() -> None:
    log = f"{REFUSED_BY_A_SERVICE}\ngoing on without it\n{LOST_PEERS['gloo']}"
    assert in_any_order([report(rank, log=log) for rank in range(4)]).secondary
    assert diagnose([report(0, log=f"{traceback('KeyError: 3')}\n{log}")]).cause == "rank 0 raised KeyError: 3"


def test_what_fails_on_one_node_only_says_so() -> None:
    missing = traceback("ModuleNotFoundError: No module named 'flash_attn'")
    verdict = in_any_order(peers(16, *(report(rank, log=missing) for rank in range(8, 16))))
    assert verdict.cause.endswith("No module named 'flash_attn', only on node n1")
    assert verdict.node == "n1"
    assert not verdict.blames_node


def test_the_last_exception_counts_unless_it_is_a_peers_doing() -> None:
    caught, ended = traceback("KeyError: 'cache'"), traceback("ValueError: no such sample")
    assert diagnose([report(0, log=f"{caught}\nretrying\n{ended}")]).cause == "rank 0 raised ValueError: no such sample"
    assert diagnose([report(0, log=f"{ended}\nleaving\n{GLOO}")]).cause == "rank 0 raised ValueError: no such sample"


def test_of_a_chain_of_exceptions_the_most_telling_counts() -> None:
    memory = traceback(EXAMPLES["gpu memory"][0])
    then = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    cleanup = traceback("AttributeError: 'NoneType' object has no attribute 'close'")
    assert diagnose([report(0, log=memory + then + cleanup)]).code == "gpu memory"
    assert diagnose([report(0, log=f"{memory}\nsmaller batch\n{cleanup}")]).code == "exception"


def test_out_of_memory_on_one_rank_is_memory_and_nobodys_fault() -> None:
    root = report(3, log=traceback(EXAMPLES["gpu memory"][0]))
    verdict = in_any_order(peers(8, root))
    assert (verdict.category, verdict.component, verdict.ranks) == ("memory", "process", (3,))
    assert not verdict.blames_node


def test_out_of_memory_on_a_device_with_less_of_it_says_so() -> None:
    reports = [report(rank, log=NCCL_REMOTE, memory_bytes=80 << 30) for rank in range(8)]
    reports[3] = report(3, log=traceback(EXAMPLES["gpu memory"][1]), memory_bytes=40 << 30)
    verdict = in_any_order(reports)
    assert (verdict.category, verdict.component) == ("memory", "device")
    assert verdict.cause == "rank 3: GPU memory was exhausted; its device has 40.0 GiB, others 80.0"


def test_out_of_memory_with_a_stranger_on_the_device_names_it() -> None:
    line = EXAMPLES["gpu memory"][0].replace(" Including", " Process 919 has 41.50 GiB memory in use. Including")
    assert "process 919 with 41.50 GiB" in diagnose([report(3, log=line)]).cause


def test_out_of_memory_everywhere_is_the_scripts() -> None:
    verdict = in_any_order([report(rank, log=EXAMPLES["gpu memory"][0]) for rank in range(8)])
    assert (verdict.category, verdict.component, verdict.ranks) == ("memory", "script", tuple(range(8)))


@pytest.mark.parametrize("kind", ["memory cgroup", "host memory", "slurm oom"])
def test_a_process_killed_for_host_memory(kind: str) -> None:
    reports = peers(8, report(3, exit=-9, pid=2217), log=GLOO)
    for i, one in enumerate(reports):
        reports[i] = report(one.rank, exit=one.exit, pid=one.pid, log=one.log, messages=EXAMPLES[kind][0])
    verdict = in_any_order(reports)
    assert (verdict.category, verdict.code, verdict.ranks) == ("memory", kind, (3,))
    assert not verdict.blames_node


def test_the_time_limit_ends_a_job_and_nobody_is_to_blame() -> None:
    reports = [report(rank, exit=-15, log=GLOO, messages=EXAMPLES["time limit"][0]) for rank in range(8)]
    reports[2] = report(2, exit=-9, messages=EXAMPLES["time limit"][0])
    verdict = in_any_order(reports)
    assert (verdict.category, verdict.cause) == ("allocation", "job: reached its time limit")
    assert verdict.node is None
    assert not verdict.blames_node


def test_what_failed_well_before_the_job_was_cancelled_is_the_cause() -> None:
    clock = Clock(near=NOW, booted=NOW - 191_433.212907 - 60, utc_offset_s=0)
    kernel = f"{xid(48)}\n{EXAMPLES['time limit'][0]}"
    assert in_any_order([report(1, exit=-15, messages=kernel, clock=clock)]).code == "xid 48"
    later = Clock(near=NOW, booted=NOW - 191_433.212907 + 60, utc_offset_s=0)
    assert in_any_order([report(1, exit=-15, messages=kernel, clock=later)]).code == "time limit"


def test_a_cancelled_step_follows_from_a_crash() -> None:
    cancelled = EXAMPLES["cancelled"][0]
    reports = [report(rank, exit=-15, messages=cancelled) for rank in range(7)]
    assert in_any_order(reports).category == "allocation"
    assert in_any_order([*reports, report(7, exit=-11, messages=cancelled)]).code == "exit -11"


@pytest.mark.parametrize("log", [GLOO, NCCL_REMOTE, *EXAMPLES["watchdog"], *EXAMPLES["ib flushed"]])
def test_lost_connections_alone_blame_nobody(log: str) -> None:
    verdict = in_any_order([report(rank, log=log) for rank in range(7)])
    assert (verdict.category, verdict.secondary, verdict.blames_node) == ("secondary", True, False)
    assert verdict.ranks == tuple(range(7))
    assert verdict.certainty == 0.0
    assert verdict.node is None


def test_a_rank_that_was_killed_without_a_word_is_the_root_of_its_peers_errors() -> None:
    verdict = in_any_order(peers(8, report(4, exit=-9, at=NOW + 30)))
    assert (verdict.category, verdict.component, verdict.ranks) == ("unknown", "process", (4,))
    assert verdict.cause == "rank 4 killed by signal 9 (SIGKILL)"
    assert not verdict.blames_node


def test_a_rank_that_hung_keeps_the_controllers_reason() -> None:
    hung = report(4, exit=-9, fenced="hung: no progress for 12.0 s while its peers wait for it", log=GLOO)
    assert in_any_order(peers(8, hung)).cause == f"rank 4 {hung.fenced}"


def test_transfers_that_were_not_acknowledged_are_the_links_unless_the_peer_died() -> None:
    broken, flushed = EXAMPLES["ib retry exceeded"][0], EXAMPLES["ib flushed"][0]
    reports = [report(rank, log=f"{flushed}\n{broken}\n{flushed}\n{NCCL_REMOTE}") for rank in range(8)]
    verdict = in_any_order([*reports, report(8, log=GLOO)])
    assert (verdict.category, verdict.component, verdict.code) == ("link", "link", "ib retry exceeded")
    assert verdict.cause == "ranks 0-7: transfers to its peer 10.0.0.2 were not acknowledged"
    assert not verdict.blames_node
    assert in_any_order([*reports, report(8, exit=-11)]).ranks == (8,)
    down = in_any_order([*reports, report(8, log=GLOO, messages=EXAMPLES["port down"][0])])
    assert (down.code, down.node, down.blames_node) == ("port down", "n1", True)


def test_an_illegal_access_is_the_programs_until_one_device_does_it_again() -> None:
    log, kernel = traceback(EXAMPLES["illegal access"][0]), xid(31, pid=2005)
    first = in_any_order(peers(8, report(5, exit=-6, log=log, messages=kernel)))
    assert (first.category, first.code, first.blames_node) == ("program", "xid 31", False)
    assert first.evidence == (kernel, EXAMPLES["illegal access"][0])
    elsewhere = in_any_order(peers(8, report(2, exit=-6, log=log)), (first,))
    assert (elsewhere.category, elsewhere.blames_node) == ("program", False)
    again = in_any_order(peers(8, report(5, exit=-6, log=log)), (first, elsewhere))
    assert (again.category, again.component, again.device, again.blames_node) == ("device", "device", 5, True)


def test_a_failed_assertion_in_a_kernel_is_always_the_programs() -> None:
    log = "\n".join(reversed(EXAMPLES["device assert"]))
    first = in_any_order(peers(8, report(5, exit=-6, log=log, messages=xid(43, pid=2005))))
    assert (first.category, first.blames_node) == ("program", False)
    assert in_any_order(peers(8, report(5, exit=-6, log=log)), (first,)).category == "program"


@pytest.mark.parametrize(
    ("status", "category", "code"),
    [
        (-11, "program", "exit -11"),
        (139, "program", "exit -11"),
        (-7, "memory", "exit -7"),
        (137, "unknown", "exit -9"),
        (-64, "unknown", "exit -64"),
        (3, "unknown", "exit 3"),
        (0, "unknown", "exit 0"),
    ],
)
def test_an_exit_without_a_word(status: int, category: str, code: str) -> None:
    verdict = in_any_order([report(2, exit=status)])
    assert (verdict.category, verdict.code, verdict.blames_node) == (category, code, False)


def test_a_file_system_that_fails_on_several_nodes_is_no_nodes_fault() -> None:
    log = EXAMPLES["stale handle"][0]
    shared = in_any_order([report(0, log=log), report(9, log=log)])
    assert (shared.category, shared.node, shared.blames_node) == ("storage", None, False)
    disk = in_any_order(peers(16, report(9, log=EXAMPLES["io error"][0], messages=EXAMPLES["disk failure"][0])))
    assert (disk.category, disk.node, disk.blames_node) == ("storage", "n1", True)


def test_nodes_lost_together_have_a_cause_that_is_none_of_theirs() -> None:
    verdict = in_any_order(peers(32, *(report(rank, exit=None) for rank in range(8, 24))))
    assert verdict.cause.startswith("nodes n1, n2: lost")
    assert verdict.ranks == tuple(range(8, 24))
    assert not verdict.blames_node


def test_slurm_names_a_node_that_failed_in_another_ones_log() -> None:
    told = EXAMPLES["node failure"][1].replace("gpu-18", "n1")
    reports = peers(16, *(report(rank, exit=1, log=NCCL_REMOTE, messages=told) for rank in range(8)))
    verdict = in_any_order(reports)
    assert (verdict.category, verdict.node, verdict.ranks) == ("node", "n1", tuple(range(8, 16)))


def test_a_living_rank_tells_only_what_it_saw_of_others() -> None:
    alive = report(0, ended=False, exit=None, log=f"{EXAMPLES['gpu memory'][0]}\n{EXAMPLES['ib retry exceeded'][0]}")
    assert in_any_order([alive]).code == "ib retry exceeded"
    assert in_any_order([alive, report(1, exit=-9)]).code == "exit -9"


def test_clues_may_be_read_where_the_log_is() -> None:
    there = report(5, clues=(*read_log(traceback("KeyError: 3")), *read_log(xid(79))))
    here = report(5, log=traceback("KeyError: 3"), messages=xid(79))
    assert diagnose([there]) == diagnose([here])
    assert diagnose([there]).code == "xid 79"


def test_without_any_report_nothing_is_known() -> None:
    assert (diagnose([]).category, diagnose([]).cause) == ("unknown", "job: no log or kernel message gives a reason")
    assert diagnose([report(0, ended=False)]).category == "unknown"


LINES = st.sampled_from([line for lines in EXAMPLES.values() for line in lines])
REPORTS = st.builds(
    lambda rank, status, log, messages, ended, at: report(
        rank, exit=status, log="\n".join(log), messages="\n".join(messages), ended=ended, at=at
    ),
    st.integers(0, 15),
    st.none() | st.integers(-70, 255),
    st.lists(LINES, max_size=3),
    st.lists(LINES, max_size=3),
    st.booleans(),
    st.none() | st.floats(NOW - 10, NOW + 10),
)


@given(st.lists(REPORTS, max_size=6, unique_by=lambda one: one.rank))
def test_whatever_is_reported_the_verdict_makes_sense(reports: list[Report]) -> None:
    verdict = in_any_order(reports)
    assert set(verdict.ranks) <= {one.rank for one in reports}
    assert len(verdict.evidence) <= 4
    assert verdict.cause
    assert not verdict.cause[0].isupper()
    assert not (verdict.secondary and (verdict.blames_node or verdict.node))
    assert "{" not in verdict.cause.split("raised")[0]
    if verdict.category in ("allocation", "program", "secondary", "unknown"):
        assert not verdict.blames_node
    if verdict.blames_node:
        assert verdict.node is not None
