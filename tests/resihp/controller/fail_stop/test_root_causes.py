"""How a failure is told when somebody said why: by the process itself, by its peers, by the kernel of its node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.detector.diagnosis.diagnosis import read_log
from resihp.faults import parse
from resihp.protocol import messages as m
from resihp.protocol.messages import Clue
from resihp.record.journal import FailureFound, NodeLost, Reconfigured
from tests.resihp.controller.direct import DECLARE, Direct
from tests.resihp.controller.test_takeover import TakenOver
from tests.resihp.detector.lines import EXAMPLES, REFUSED_BY_A_SERVICE, traceback

LONG = msgspec.structs.replace(DECLARE, iterations=1000)

OFF_THE_BUS = (
    "[191433.212907] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)
GPU_LOST = "\n".join(
    (
        traceback("RuntimeError: CUDA error: GPU is lost"),
        "[rank1]:[E303 09:26:51.1 ProcessGroupNCCL.cpp:1895] CUDA error: GPU is lost",
    )
)
GPU_MEMORY = traceback(
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of "
    "79.11 GiB of which 1.31 GiB is free. Process 1001 has 77.79 GiB memory in use."
)
NCCL_REMOTE = "\n".join(
    (
        "gpu-18:2217:2301 [3] NCCL WARN [Service thread] Connection closed by localRank 1",
        traceback(
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited or there was "
            "a network error, NCCL version 2.20.5\nncclRemoteError: A call failed possibly due to a network error"
        ),
    )
)
BROKEN_PIPE = traceback("BrokenPipeError: [Errno 32] Broken pipe")
ILLEGAL_ACCESS = traceback("RuntimeError: CUDA error: an illegal memory access was encountered")


def clues(*texts: str) -> tuple[Clue, ...]:
    """What an agent reads in a worker's log and in its kernel's messages."""
    found = tuple(clue for text in texts for clue in read_log(text))
    assert found or not texts, "the lines say nothing"
    return found


class Job(Direct):
    """DP3 x PP2 on three nodes of two."""

    def __init__(self, **options: Any) -> None:
        given: dict[str, Any] = {"nodes": 3, "declare": LONG}
        super().__init__(**given | options)
        self.run(2)

    def exit(self, rank: int, *texts: str, status: int = 1) -> list[api.AnyAction]:
        return self.feed(api.WorkerExited(rank=rank, status=status, clues=clues(*texts)))

    def raise_(self, rank: int, error: str) -> None:
        self.say(rank, m.Raised(iteration=3, error=error, traceback=traceback(error)))

    def settle(self) -> None:
        """Everybody who is left parks, and training goes on."""
        self.park(stepped=self.job.record.committed)
        self.run(1)

    def failures(self) -> list[FailureFound]:
        self.settle()
        return self.all(FailureFound)

    @property
    def started_again(self) -> list[tuple[str, int]]:
        """(node, device) of processes that were started where one had died."""
        starts = [action for action in self.actions if isinstance(action, api.StartWorkers) and action.joins]
        return [(start.node, device) for start in starts for _, device in start.workers]


# --- one process --------------------------------------------------------------------------------------------------


def test_without_a_telling_line_a_failure_is_told_as_the_exit_tells_it() -> None:
    job = Job()
    job.crash(1)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node, entry.device) == ("fail-stop", "process", "n1", 1)
    assert entry.cause == "rank 1 killed by signal 9 (SIGKILL)"
    assert "pid 1001 on node n1: killed by signal 9 (SIGKILL)" in entry.evidence


def test_an_abort_that_does_not_end_is_no_failure_of_its_node_and_the_process_is_started_again() -> None:
    job = Job()
    job.exit(1, status=m.ABORT_STATUS)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node, entry.device) == ("fail-stop", "process", None, None)
    assert entry.cause == "rank 1 exited, since an abort of its communicators did not end"
    assert job.started_again == [("n1", 1)]


def test_what_the_kernel_says_of_a_device_counts_though_an_abort_did_not_end() -> None:
    job = Job()
    job.exit(1, OFF_THE_BUS.replace("'<unknown>'", "1001"), status=m.ABORT_STATUS)
    (entry,) = job.failures()
    assert (entry.component, entry.node, entry.device) == ("device", "n1", 1)
    assert job.started_again == []


@pytest.mark.parametrize("texts", [(GPU_LOST, OFF_THE_BUS), (OFF_THE_BUS.replace("'<unknown>'", "1001"),)])
def test_a_gpu_that_fell_off_the_bus_is_its_devices_failure_with_the_line_that_says_so(texts: tuple[str, ...]) -> None:
    job = Job()
    job.exit(1, *texts, status=-6)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node, entry.device) == ("fail-stop", "device", "n1", 1)
    assert entry.cause == "rank 1: GPU has fallen off the bus (Xid 79)"
    first, *more = entry.evidence.splitlines()
    assert first == texts[-1]
    assert "pid 1001 on node n1: killed by signal 6 (SIGABRT)" in more
    assert more[-1].startswith("next: ")
    assert "power-cycle" in more[-1]


def test_on_a_node_of_one_device_the_kernel_need_not_say_which() -> None:
    job = Job(nodes=4, gpus=1)
    job.exit(1, OFF_THE_BUS, status=-6)
    (entry,) = job.failures()
    assert (entry.component, entry.node, entry.device) == ("device", "n2", 0)
    assert job.started_again == []


def test_no_process_is_started_on_a_device_with_a_verdict() -> None:
    job = Job()
    job.exit(1, GPU_LOST, OFF_THE_BUS)
    assert job.started_again == []
    job.settle()
    assert TakenOver(job).all_back().job.dead_devices == {("n1", 1)}


@pytest.mark.parametrize("text", [GPU_MEMORY, NCCL_REMOTE, BROKEN_PIPE, ILLEGAL_ACCESS])
def test_a_process_is_started_again_where_the_device_is_not_to_blame(text: str) -> None:
    job = Job()
    job.exit(1, text)
    assert job.started_again == [("n1", 1)]


@pytest.mark.parametrize("told", ["by a clue", "by the rank", "by both"])
def test_a_program_that_asks_for_too_much_memory_names_no_node(told: str) -> None:
    job = Job()
    if told != "by a clue":
        job.raise_(1, GPU_MEMORY.splitlines()[-1])
    job.exit(1, *((GPU_MEMORY,) if told != "by the rank" else ()))
    (entry,) = job.failures()
    assert (entry.ranks, entry.node, entry.device) == ((1,), None, None)
    own = told == "by a clue"
    assert entry.cause.startswith("rank 1: GPU memory was exhausted" if own else "rank 1 raised torch.cuda.OutOf")
    assert "total capacity of 79.11 GiB" in entry.evidence


@pytest.mark.parametrize(
    ("error", "devices"),
    [
        ("AcceleratorError: CUDA error: unknown error", True),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        ("AcceleratorError: CUDA error: out of memory", False),
        ("ValueError: CUDA error: unknown error", False),
    ],
)
def test_an_error_of_a_device_that_the_program_did_not_ask_for_is_the_devices(error: str, devices: bool) -> None:
    """The process is started again there, after an examination of the device; nobody is drained for it."""
    job = Job(slurm=True, drains_left=4, batch_node="n1")
    job.raise_(3, error)
    job.exit(3)
    (entry,) = job.failures()
    place = ("fail-stop", "process", "n2", 1) if devices else ("program", "script", None, None)
    assert (entry.kind, entry.component, entry.node, entry.device) == place
    assert entry.cause == f"rank 3 raised {error}"
    assert (("n2", 1) in job.started_again) == devices
    assert [action for action in job.actions if isinstance(action, api.DrainNode)] == []


def test_what_a_rank_raised_is_told_even_where_its_traceback_is_cut_short() -> None:
    job = Job()
    error = "RecursionError: maximum recursion depth exceeded"
    job.say(3, m.Raised(iteration=3, error=error, traceback=traceback(error)[-120:]))
    job.exit(3)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node) == ("program", "script", None)
    assert entry.cause == f"rank 3 raised {error}"


def test_an_exception_of_the_program_names_no_node() -> None:
    job = Job(slurm=True, drains_left=4, batch_node="n1")
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)"
    job.raise_(3, error)
    job.exit(3, traceback(error))
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node, entry.device) == ("program", "script", None, None)
    assert entry.cause == f"rank 3 raised {error}"
    assert 'train.py", line 71, in main' in entry.evidence
    for _ in range(10):
        job.feed(api.Tick(), 1.0)
    assert [action for action in job.actions if isinstance(action, api.DrainNode)] == []


def test_a_process_that_the_kernel_killed_for_its_memory_is_told_so() -> None:
    job = Job()
    job.exit(1, "[5.5] Memory cgroup out of memory: Killed process 1001 (python) total-vm:91823412kB", status=-9)
    (entry,) = job.failures()
    assert (entry.component, entry.node) == ("process", None)
    assert entry.cause == "rank 1 killed by the kernel: its memory limit was reached"
    assert job.started_again == [("n1", 1)]


def test_a_process_that_the_kernel_killed_for_its_memory_beside_ours_is_no_cause() -> None:
    job = Job()
    job.exit(1, "[5.5] Memory cgroup out of memory: Killed process 77 (python) total-vm:91823412kB", status=-9)
    (entry,) = job.failures()
    assert (entry.component, entry.node, entry.device) == ("process", "n1", 1)
    assert entry.cause == "rank 1 killed by signal 9 (SIGKILL)"


def test_a_lost_gpu_that_reaches_the_script_as_an_exception_is_the_devices() -> None:
    job = Job()
    job.raise_(1, "RuntimeError: CUDA error: no CUDA-capable device is detected")
    job.exit(1, GPU_LOST, OFF_THE_BUS)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node, entry.device) == ("fail-stop", "device", "n1", 1)
    assert OFF_THE_BUS in entry.evidence or "no CUDA-capable device" in entry.evidence
    assert job.job.dead_devices == {("n1", 1)}
    assert job.started_again == []


def test_a_gpu_that_several_processes_of_a_node_do_not_see_is_a_settings_doing() -> None:
    job = Job()
    for rank in (0, 1):
        job.raise_(rank, "RuntimeError: CUDA error: no CUDA-capable device is detected")
    for rank in (0, 1):
        job.exit(rank)
    job.settle()
    assert job.job.dead_devices == set()


def test_an_injected_kill_is_told_as_such_whatever_its_log_says() -> None:
    job = Job(faults=(parse("kill:rank=1@iteration=3", 0),))
    job.say(1, m.FaultDue(fault=0))
    job.exit(1, GPU_MEMORY, status=-9)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node, entry.device) == ("fail-stop", "device", "n1", 1)
    assert entry.cause == "rank 1 killed by signal 9 (SIGKILL)"
    assert entry.detect_s == pytest.approx(0.01)


def test_a_crash_after_an_injected_slowness_is_not_measured_from_it() -> None:
    job = Job(faults=(parse("slow:rank=1,speed=0.5@iteration=3", 0),))
    job.say(1, m.FaultDue(fault=0))
    assert job.job.slow_since.keys() == {1}
    job.exit(1, status=-9)
    (entry,) = job.failures()
    assert entry.detect_s is None


def test_a_link_to_a_peer_lays_a_failure_to_no_node() -> None:
    job = Job()
    job.exit(1, EXAMPLES["ib retry exceeded"][0])
    (entry,) = job.failures()
    assert (entry.component, entry.node, entry.device) == ("link", None, None)


def test_what_is_the_programs_as_a_rule_is_the_devices_when_it_does_it_again() -> None:
    job = Job()
    job.exit(1, ILLEGAL_ACCESS)
    (entry,) = job.failures()
    assert (entry.kind, entry.node) == ("program", None)
    job.join(6)
    job.step(4, pause=True)
    job.park(6, stepped=0, epoch=3)
    job.park(0, stepped=4, epoch=3)
    job.settle()
    assert 6 in job.job.record.active
    job.exit(6, ILLEGAL_ACCESS)
    entry = job.failures()[-1]
    assert (entry.kind, entry.component, entry.node, entry.device) == ("fail-stop", "device", "n1", 1)
    assert "the same happened on this device before" in entry.cause
    assert job.started_again == [("n1", 1)], "not once more"


def test_the_error_of_a_rank_without_work_is_no_repetition_of_itself() -> None:
    """Its failure is on record at once, since nobody waits for it: before it is decided whether to start another."""
    job = Job()
    job.crash(1)
    job.settle()
    job.join(6)
    assert 6 not in job.job.record.working
    job.raise_(6, "AcceleratorError: CUDA error: an illegal memory access was encountered")
    job.exit(6)
    entry = job.all(FailureFound)[-1]
    assert (entry.kind, entry.ranks, entry.node) == ("program", (6,), None)
    assert job.started_again == [("n1", 1)], "after the crash alone: a script that raises does so again"


# --- several of one transition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 4, 2), (4, 2, 1)])
@pytest.mark.parametrize("text", [NCCL_REMOTE, BROKEN_PIPE])
def test_what_peers_say_of_a_lost_connection_is_part_of_the_same_failure(order: tuple[int, ...], text: str) -> None:
    job = Job()
    for rank in order:
        job.exit(rank, *((GPU_LOST, OFF_THE_BUS) if rank == 1 else (text,)))
    (entry,) = job.failures()
    assert (entry.failure, entry.component, entry.node, entry.device) == (1, "device", "n1", 1)
    assert entry.ranks == (1, 2, 4)
    assert entry.cause.endswith("GPU has fallen off the bus (Xid 79)")
    assert "roken pipe" in entry.evidence or "remote process exited" in entry.evidence
    assert [e.failures for e in job.all(Reconfigured)] == [(1,)]
    assert sorted(job.started_again) == [("n2", 0), ("n3", 0)]


@pytest.mark.parametrize("told", ["by the rank", "by a clue"])
@pytest.mark.parametrize("order", [(1, 4, 2), (4, 2, 1)])
def test_a_rank_that_a_service_refused_is_why_its_peers_lost_it(order: tuple[int, ...], told: str) -> None:
    job = Job()
    error = REFUSED_BY_A_SERVICE.splitlines()[-1]
    for rank in order:
        if rank == 1 and told == "by the rank":
            job.say(1, m.Raised(iteration=3, error=error[:200], traceback=REFUSED_BY_A_SERVICE))
        job.exit(rank, REFUSED_BY_A_SERVICE if rank == 1 else NCCL_REMOTE)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node, entry.ranks) == ("program", "script", None, (1, 2, 4))
    assert entry.cause == f"rank 1 raised {error[:200]}"
    assert "remote process exited" in entry.evidence
    assert job.started_again.count(("n1", 1)) == (told == "by a clue"), "what a script raised is not tried again"


BAD_BATCH = "ValueError: rank {0}: bad batch {1} in /data/shard-{0}"
DEEPER = '  File "/opt/lib/python3.11/site-packages/torch/utils/data/fetch.py", line 5{0}, in fetch\n    data[i]\n'


def bad_batch(rank: int) -> str:
    """Raised in a library, for what one line of the script asked of it; which of its lines may differ."""
    text = traceback(BAD_BATCH.format(rank, 17 * rank))
    return text.replace("ValueError", DEEPER.format(rank) + "ValueError")


def test_a_scripts_error_whose_text_differs_from_rank_to_rank_is_one_failure_and_the_job_goes_on() -> None:
    job = Job(nodes=4)
    for rank in (1, 2, 4, 6):
        error = BAD_BATCH.format(rank, 17 * rank)
        job.say(rank, m.Raised(iteration=3, error=error, traceback=bad_batch(rank)))
    for rank in (1, 2, 4, 6):
        job.exit(rank)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.node, entry.device) == ("program", "script", None, None)
    assert entry.ranks == entry.diagnosed.ranks == (1, 2, 4, 6)
    assert entry.cause == f"4 ranks raised ValueError at train.py:71: {BAD_BATCH.format(1, 17).partition(': ')[2]}"
    assert "Traceback" in entry.evidence
    for rank in (2, 4, 6):
        assert f"then rank {rank} raised {BAD_BATCH.format(rank, 17 * rank)}" in entry.evidence
    assert [e.failures for e in job.all(Reconfigured)] == [(1,)]
    assert job.end is None
    assert job.job.record.active == (0, 3, 5, 7), "each could have been survived, and all of them are"
    assert TakenOver(job).all_back().job.record.failures == 1


@pytest.mark.parametrize("differs", ["type", "place", "file", "device", "injected", "unknown place"])
def test_errors_that_may_have_nothing_in_common_are_failures_of_their_own(differs: str) -> None:
    fault = parse("crash:rank=4@iteration=3", 0)
    job = Job(nodes=4, faults=(fault,) if differs == "injected" else ())
    texts = [bad_batch(1), bad_batch(4)]
    if differs == "device":
        texts = [text.replace("ValueError", "AcceleratorError: CUDA error") for text in texts]
    elif differs == "injected":
        job.say(4, m.FaultDue(fault=0))
    elif differs == "unknown place":
        texts = ["Traceback cut short\nValueError: no such token", "Traceback cut short\nValueError: no more samples"]
    else:
        changes = {"type": ("ValueError", "KeyError"), "place": ("line 71", "line 72"), "file": ("train.py", "data.py")}
        texts[1] = texts[1].replace(*changes[differs])
    for rank, text in zip((1, 4), texts, strict=True):
        job.say(rank, m.Raised(iteration=3, error=text.splitlines()[-1], traceback=text))
        job.exit(rank)
    assert [entry.ranks for entry in job.failures()] == [(1,), (4,)]


def test_two_roots_of_one_transition_are_two_failures() -> None:
    job = Job()
    job.exit(1, GPU_LOST, OFF_THE_BUS)
    job.exit(4, GPU_MEMORY)
    first, second = job.failures()
    assert (first.component, first.node, first.device) == ("device", "n1", 1)
    assert (second.ranks, second.node) == ((4,), None)


def test_nobody_is_blamed_when_all_say_only_that_the_others_are_gone() -> None:
    job = Job()
    for rank in (1, 4):
        job.exit(rank, NCCL_REMOTE)
    for entry in job.failures():
        assert entry.kind == "fail-stop"
        assert entry.component != "device"
    assert len(job.started_again) == 2


def test_peers_of_a_lost_node_are_part_of_its_failure() -> None:
    job = Job()
    job.exit(4, NCCL_REMOTE)
    job.feed(api.AgentLost(node="n1", reason="connection closed for 1 s"))
    (entry,) = job.failures()
    assert (entry.component, entry.node, entry.ranks) == ("node", "n1", (0, 1, 4))


def test_a_kernel_line_about_one_gpu_does_not_blame_the_devices_of_its_victims() -> None:
    """Everybody who ends on that node brings the same kernel messages along."""
    job = Job(nodes=2, gpus=4)
    job.exit(1, GPU_LOST, OFF_THE_BUS, status=-6)
    job.exit(0, NCCL_REMOTE, OFF_THE_BUS)
    job.exit(2, NCCL_REMOTE, OFF_THE_BUS)
    (entry,) = job.failures()
    assert (entry.component, entry.node, entry.device) == ("device", "n1", 1)
    assert sorted(job.started_again) == [("n1", 0), ("n1", 2)]


def test_a_gpus_old_kernel_line_does_not_blame_the_next_process_that_ends_on_its_node() -> None:
    job = Job(nodes=2, gpus=4)
    job.exit(1, GPU_LOST, OFF_THE_BUS, status=-6)
    job.settle()
    job.exit(2, GPU_MEMORY, OFF_THE_BUS)
    entry = job.failures()[-1]
    assert (entry.ranks, entry.node, entry.device) == ((2,), None, None)
    assert job.started_again == [("n1", 2)]


def test_of_many_old_kernel_lines_none_blames_the_next_process_that_ends_on_its_node() -> None:
    """More than a failure is told by."""
    job = Job(nodes=2, gpus=4)
    burst = [OFF_THE_BUS.replace("191433", str(191433 + second)) for second in range(12)]
    job.exit(1, GPU_LOST, *burst, status=-6)
    job.settle()
    job.exit(2, burst[-1], status=-6)
    entry = job.failures()[-1]
    assert (entry.component, entry.cause) == ("process", "rank 2 killed by signal 6 (SIGABRT)")


def test_nor_does_one_under_a_new_supervisor() -> None:
    """It knew only those lines that the failure was told by, and condemned the device of whoever ended next."""
    job = Job(nodes=2, gpus=4)
    burst = [OFF_THE_BUS.replace("191433", str(191433 + second)) for second in range(12)]
    job.exit(1, GPU_LOST, *burst, status=-6)
    job.settle()
    heir = TakenOver(job)
    assert heir.job.record.explained == job.job.record.explained
    assert heir.job.record.explained["n1"] >= {clue.line for clue in job.job.members[1].clues if "Xid" in clue.line}


def test_a_line_that_explained_nothing_may_explain_what_comes_later() -> None:
    job = Job(nodes=2, gpus=4)
    (cancelled, *_) = EXAMPLES["cancelled"]
    job.exit(1, ILLEGAL_ACCESS, cancelled)
    job.settle()
    job.exit(2, cancelled, status=-6)
    assert [entry.cause for entry in job.failures()] == ["rank 1: GPU memory was accessed illegally", "job: cancelled"]


def test_a_kernel_line_that_could_be_about_either_of_two_condemns_no_device() -> None:
    """Both ended without a word, and the node has a bad GPU: which one is found out by examining the newcomers."""
    job = Job(nodes=2, gpus=4)
    job.exit(1, OFF_THE_BUS, status=-6)
    job.exit(2, OFF_THE_BUS, status=-6)
    first, second = job.failures()
    assert (first.component, first.node, first.device) == ("device", "n1", None)
    assert first.cause == "node n1: GPU has fallen off the bus (Xid 79)"
    assert (second.component, second.node, second.device) == ("process", "n1", 2)
    assert job.job.dead_devices == set()
    assert sorted(job.started_again) == [("n1", 1), ("n1", 2)]


def test_the_only_one_that_ended_on_its_node_has_the_device_that_the_kernel_means() -> None:
    """That is known when the transition is decided; a process may have been started there before."""
    job = Job(nodes=2, gpus=4)
    job.exit(1, OFF_THE_BUS, status=-6)
    assert job.started_again == [("n1", 1)]
    assert job.job.dead_devices == set()
    (entry,) = job.failures()
    assert (entry.component, entry.node, entry.device) == ("device", "n1", 1)
    assert job.job.dead_devices == TakenOver(job).all_back().job.dead_devices == {("n1", 1)}


def test_a_line_that_a_failure_was_told_by_explains_nothing_to_a_new_supervisor() -> None:
    job = Job(nodes=2, gpus=4)
    job.exit(1, GPU_LOST, OFF_THE_BUS, status=-6)
    job.settle()
    heir = TakenOver(job)
    heir.all_back()
    heir.feed(api.WorkerExited(rank=2, status=-6, clues=clues(OFF_THE_BUS)))
    heir.park(stepped=heir.job.record.committed)
    (entry,) = heir.all(FailureFound)
    assert (entry.component, entry.cause) == ("process", "rank 2 killed by signal 6 (SIGABRT)")


def test_a_node_that_goes_with_its_device_is_told_as_the_node() -> None:
    job = Job()
    job.exit(5, GPU_LOST, OFF_THE_BUS, status=-6)
    job.feed(api.AgentLost(node="n3", reason="its agent is gone"))
    (entry,) = job.failures()
    assert (entry.component, entry.node, entry.ranks) == ("node", "n3", (4, 5))
    assert entry.cause == "node n3: its agent is gone; before, rank 5: GPU is lost to its driver"


def test_what_ended_on_another_node_is_no_part_of_a_lost_nodes_failure() -> None:
    job = Job()
    job.exit(1, status=-6)
    job.feed(api.AgentLost(node="n3", reason="its agent is gone"))
    assert sorted((entry.component, entry.ranks) for entry in job.failures()) == [("node", (4, 5)), ("process", (1,))]


def test_a_node_is_lost_once_however_often_that_is_told() -> None:
    job = Job()
    for _ in range(2):
        job.feed(api.AgentLost(node="n3", reason="its agent is gone"))
    assert len(job.all(NodeLost)) == 1
    (entry,) = job.failures()
    assert entry.ranks == (4, 5)


def test_who_was_killed_is_no_victim_of_what_its_log_said_of_peers_before() -> None:
    job = Job()
    job.exit(1, BROKEN_PIPE, status=-9)
    job.exit(4, status=-9)
    assert [entry.ranks for entry in job.failures()] == [(1,), (4,)]


# --- what follows from it -----------------------------------------------------------------------------------------

SIGNS = [
    traceback("RuntimeError: CUDA error: the launch timed out and was terminated"),
    "NVRM: Xid (PCI:0000:b3:00): 63, pid=1001, Row Remapper: New row (0x00000000035c21c9) marked for remapping",
]
"""Of a device, which they do not blame (`Diagnosis.blames_node`)."""


def test_a_node_is_drained_for_a_device_that_is_to_blame() -> None:
    job = Job(slurm=True, drains_left=4, batch_node="n3")
    job.exit(1, GPU_LOST, OFF_THE_BUS)
    job.settle()
    for _ in range(5):
        job.feed(api.Tick(), 1.0)
    (drain,) = [action for action in job.actions if isinstance(action, api.DrainNode)]
    assert drain.node == "n1"
    assert "GPU has fallen off the bus (Xid 79)" in drain.reason


def test_the_reason_of_a_drain_names_the_rank_once() -> None:
    job = Job(slurm=True, drains_left=4, batch_node="n3")
    job.exit(1, GPU_LOST, OFF_THE_BUS)
    job.settle()
    for _ in range(5):
        job.feed(api.Tick(), 1.0)
    (drain,) = [action for action in job.actions if isinstance(action, api.DrainNode)]
    assert drain.reason == "job local-1 lost rank 1: GPU has fallen off the bus (Xid 79)"


@pytest.mark.parametrize("text", SIGNS)
def test_no_node_is_drained_for_what_blames_nobody(text: str) -> None:
    job = Job(slurm=True, drains_left=4, batch_node="n3")
    job.exit(1, text)
    job.settle()
    for _ in range(5):
        job.feed(api.Tick(), 1.0)
    assert [action for action in job.actions if isinstance(action, api.DrainNode)] == []


@pytest.mark.parametrize("text", SIGNS)
def test_a_new_supervisor_agrees_on_which_devices_may_be_used(text: str) -> None:
    job = Job()
    job.exit(1, text)
    job.settle()
    assert TakenOver(job).all_back().job.dead_devices == job.job.dead_devices


def test_clues_that_come_while_a_new_supervisor_waits_for_its_agents_count() -> None:
    heir = TakenOver(Job())
    heir.back("n1")
    heir.back("n2")
    heir.feed(api.WorkerExited(rank=1, status=-6, clues=clues(GPU_LOST, OFF_THE_BUS)))
    heir.back("n3")
    heir.park(stepped=2)
    (entry,) = heir.all(FailureFound)
    assert (entry.component, entry.node, entry.device) == ("device", "n1", 1)


def test_what_the_kernel_says_of_a_node_does_not_outdo_what_a_process_says_of_itself() -> None:
    """An exception of the script beside a device of the other rank's that fell off the bus."""
    job = Job()
    job.raise_(3, "KeyError: 'lr'")
    job.exit(3, OFF_THE_BUS)
    (entry,) = job.failures()
    assert (entry.kind, entry.component, entry.device) == ("program", "script", None)
    assert job.job.dead_devices == set()


def test_a_process_with_a_cause_of_its_own_is_not_laid_to_its_nodes_kernel() -> None:
    job = Job()
    job.exit(2, GPU_MEMORY, OFF_THE_BUS)
    (entry,) = job.failures()
    assert "memory" in entry.cause
    assert job.job.dead_devices == set()


def test_of_many_lines_that_only_the_kernel_said_none_blames_the_next_process_either() -> None:
    job = Job(nodes=2, gpus=4)
    burst = [OFF_THE_BUS.replace("191433", str(191433 + second)) for second in range(12)]
    job.exit(1, *burst, status=-6)
    job.settle()
    job.exit(2, burst[-1], status=-6)
    entry = job.failures()[-1]
    assert (entry.component, entry.cause) == ("process", "rank 2 killed by signal 6 (SIGABRT)")


def test_an_abort_that_hangs_after_a_loss_is_part_of_that_failure() -> None:
    job = Job()
    job.exit(1, status=-9)
    job.exit(2, status=m.ABORT_STATUS)
    (entry,) = job.failures()
    assert (entry.cause, entry.ranks) == ("rank 1 killed by signal 9 (SIGKILL)", (1, 2))
    assert "then rank 2 exited, since an abort of its communicators did not end" in entry.evidence
