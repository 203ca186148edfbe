"""Which back end a worker takes, on which device, and the manners of NCCL's that tests can do without one."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from resihp.errors import CommunicatorError, ModelError  # noqa: E402
from resihp.executor import backends, devices  # noqa: E402
from resihp.executor.backends import BACKEND_VARIABLE, CONNECT_LIMITS, NO_WATCHDOG, NcclLike, Role, chosen  # noqa: E402
from resihp.executor.communicators import Communicators  # noqa: E402
from resihp.executor.compute.channels import Channel, PendingWork  # noqa: E402
from resihp.executor.devices import (  # noqa: E402
    ALLOCATOR_SETTINGS,
    LOCAL_RANK_VARIABLE,
    SHARED_GPUS_VARIABLE,
    VISIBLE_GPUS_VARIABLE,
    refuse_precision,
)
from resihp.executor.group_store import TorchRendezvous  # noqa: E402
from resihp.executor.tensor_group import TensorGroup, guarded  # noqa: E402
from resihp.pipeline.program import GroupSpec  # noqa: E402
from resihp.protocol import messages as m  # noqa: E402
from resihp.worker import nccl_versions  # noqa: E402
from resihp.worker.forkserver import PRELOADED_MODULES  # noqa: E402
from tests.waiting import until  # noqa: E402

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]

SPY = """
import sys, torch
torch.cuda._is_compiled = lambda: sys._getframe(1).f_globals["__name__"] == "torch.utils.cpp_extension"
torch.version.cuda = "13.0"
asked = []
def spied(name, function):
    return lambda *given, **named: (asked.append(name), function(*given, **named))[1]
entries = ("is_available", "device_count", "_lazy_init", "init", "current_device")
for module in (torch.cuda, torch._C):
    for name in dir(module):
        if name in entries or name.startswith("_cuda_"):
            setattr(module, name, spied(name, getattr(module, name)))
for name in sys.argv[1].split(","):
    __import__(name)
print(*asked)
"""


def test_what_the_fork_server_imports_asks_for_no_gpu(tmp_path: Path) -> None:
    """That would start CUDA, and no child of a process that has may use it. Beside CUDA's compiler, as in containers,
    torch's `cpp_extension` asks, which megatron-core imports."""
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "-c", SPY, PRELOADED_MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == []
    assert "CUDA" not in done.stderr


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a build for CPUs, in which no fork is a bad one")
@pytest.mark.parametrize(("arguments", "fork"), [((PRELOADED_MODULES,), "sound"), (("torch", "ask"), "bad")])
def test_a_fork_after_the_preload_may_use_cuda(tmp_path: Path, arguments: tuple[str, ...], fork: str) -> None:
    """The second case shows that a fork which may not is noticed."""
    command = [sys.executable, "-m", "tests.integration.fork_after_preload", *arguments]
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout)["fork"] == fork


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Eight of them, as far as anybody asks."""
    seen: dict[str, Any] = {"count": 8, "taken": [], "free": 79e9, "name": "NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen["count"] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen["count"])
    monkeypatch.setattr(torch.cuda, "set_device", seen["taken"].append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (seen["free"], 80e9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: seen["name"])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for name in (
        BACKEND_VARIABLE,
        LOCAL_RANK_VARIABLE,
        SHARED_GPUS_VARIABLE,
        VISIBLE_GPUS_VARIABLE,
        ALLOCATOR_SETTINGS[0],
        *NO_WATCHDOG,
        *CONNECT_LIMITS,
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(devices, "RELEASE_S", 0.0)
    return seen


@pytest.mark.parametrize("local", [0, 5])
def test_a_worker_takes_the_device_that_it_was_given(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, local: int
) -> None:
    monkeypatch.setenv(LOCAL_RANK_VARIABLE, str(local))
    back_end = chosen()
    assert (back_end.name, back_end.device) == ("nccl", torch.device("cuda", local))
    assert set(gpus["taken"]) == {torch.device("cuda", local)}


def test_torchs_watchdog_is_told_before_the_first_communicator_to_end_nobody(gpus: dict[str, Any]) -> None:
    chosen()
    assert {name: os.environ[name] for name in NO_WATCHDOG} == NO_WATCHDOG


@pytest.mark.parametrize(
    ("version", "told"), [((2, 26, 2), "NCCL 2.26.2: "), ((2, 18, 1), "NCCL 2.18.1: "), ((2, 27, 3), "")]
)
def test_a_version_of_nccl_that_has_hung_is_told_by_name(
    gpus: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: tuple[int, ...],
    told: str,
) -> None:
    monkeypatch.setattr(nccl_versions, "loaded", lambda: version)
    chosen()
    said = capsys.readouterr().out
    assert said.startswith(told)
    assert ("versions before 2.27" in said) == bool(told)


@pytest.mark.parametrize(
    ("count", "environment", "told"),
    [
        (8, {BACKEND_VARIABLE: "ncl"}, "RESIHP_BACKEND=ncl: must be one of gloo, nccl, nccl-like"),
        (4, {LOCAL_RANK_VARIABLE: "6"}, "device 6: 4 GPUs visible here"),
        (0, {BACKEND_VARIABLE: "nccl"}, "no GPU is visible here"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, count: int, environment: dict[str, str], told: str
) -> None:
    gpus["count"] = count
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=told):
        chosen()


def test_a_torch_without_nccl_is_told_before_training(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ModelError, match="is built without NCCL, by which GPUs communicate; install a build that"):
        chosen()
    monkeypatch.setenv(BACKEND_VARIABLE, "gloo")
    assert chosen().name == "gloo"


def test_a_driver_that_is_too_old_is_told_and_nobody_trains_on_processors_instead(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["The NVIDIA driver on your system is too old (found version 11040).\nMore"]

    def old() -> bool:
        warnings.warn(f"CUDA initialization: {said[0]}", stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old)
    with pytest.raises(
        ModelError, match=r"driver on your system is too old \(found version 11040\)\.; look at"
    ) as told:
        chosen()
    assert "\n" not in str(told.value)
    said[0] = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    with pytest.raises(RuntimeError, match="system not yet initialized"):  # the node's fault: judged by last words
        chosen()


@pytest.mark.parametrize(("given", "fine"), [("6,7", False), ("", True), ("-1", True), ("NoDevFiles", True)])
def test_gpus_that_a_job_was_given_and_torch_does_not_see_are_told(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: str, fine: bool
) -> None:
    gpus["count"] = 0
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(VISIBLE_GPUS_VARIABLE, given)
    if fine:
        assert chosen().device == CPU
    else:
        with pytest.raises(ModelError, match="CUDA_VISIBLE_DEVICES=6,7 and torch sees none of these"):
            chosen()


def test_slices_of_a_gpu_are_told_by_name(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.update(count=1, name="NVIDIA A100-SXM4-80GB MIG 1g.10gb")
    monkeypatch.setenv(VISIBLE_GPUS_VARIABLE, "MIG-5a71,MIG-5a72")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ModelError, match=r"MIG 1g\.10gb is a slice of a GPU"):
        chosen()
    monkeypatch.setenv(LOCAL_RANK_VARIABLE, "1")
    with pytest.raises(ModelError, match="1 GPU visible here; CUDA shows a process one MIG slice"):
        chosen()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(LOCAL_RANK_VARIABLE, "0")
    assert chosen().name == "nccl"


def test_a_gpu_that_others_have_to_themselves_is_the_users_to_free(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "set_device", busy)
    with pytest.raises(ModelError, match="device cuda:0: a process has it to itself"):
        chosen()


@pytest.mark.parametrize("mode", ["default", "exclusive"])
def test_a_device_whose_last_process_is_still_being_cleared_away_is_waited_for(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """As of a worker that was killed, whose place a joiner takes."""
    left_s, waited = 1.5, list[float]()
    monkeypatch.setattr(devices, "RELEASE_S", 5.0)
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append))

    def memory(device: torch.device) -> tuple[float, float]:
        if sum(waited) >= left_s:
            return 79e9, 80e9
        if mode == "exclusive":
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
        return 20e9, 80e9

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    chosen()
    assert sum(waited) == pytest.approx(left_s, abs=0.2)
    assert capsys.readouterr().out == ""


def test_what_others_have_of_a_gpus_memory_is_told_in_a_line(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen()
    assert capsys.readouterr().out == ""
    gpus["free"] = 50e9
    chosen()
    told = "device cuda:0: 30.0 of 80.0 GB are in use by other processes; nvidia-smi shows which\n"
    assert capsys.readouterr().out == told
    monkeypatch.setenv(SHARED_GPUS_VARIABLE, "1")
    chosen()
    assert capsys.readouterr().out == ""


def test_tests_may_share_few_gpus(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus["count"] = 2
    monkeypatch.setenv(SHARED_GPUS_VARIABLE, "1")
    monkeypatch.setenv(LOCAL_RANK_VARIABLE, "5")
    assert chosen().device == torch.device("cuda", 1)


def test_bf16_is_refused_where_a_gpu_would_only_imitate_it(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    gpus["name"] = "Tesla V100-SXM2-32GB"
    with pytest.raises(ModelError, match="cuda: Tesla V100-SXM2-32GB has no bf16 arithmetic"):
        refuse_precision(torch.device("cuda"), torch.bfloat16)
    refuse_precision(torch.device("cuda"), torch.float32)
    refuse_precision(CPU, torch.bfloat16)


def test_gloo_works_beside_gpus_and_where_there_are_none(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "gloo")
    assert (chosen().name, chosen().device.type) == ("gloo", "cuda")
    monkeypatch.setenv(BACKEND_VARIABLE, "")
    gpus["count"] = 0
    assert (chosen().name, chosen().device) == ("gloo", CPU)


# --- what NCCL is asked for -------------------------------------------------------------------------------------------


class FakeNccl:
    """Notes what NCCL would be asked for. A split waits for all of its parent's ranks, as NCCL's does."""

    class Options:
        def __init__(self) -> None:
            self.is_high_priority_stream = False
            self.config = SimpleNamespace(max_ctas=None)
            self.split_from: FakeNccl | None = None
            self.split_color = -2

    met: ClassVar[dict[Any, list[tuple[int, int]]]] = {}
    """By split of a communicator: (rank of the parent, colour) of those that came."""
    all_here = threading.Condition()

    def __init__(self, store: Any, index: int, size: int, options: Any) -> None:
        self.index, self.members, self.options = index, size, options
        self.splits = 0
        self.asked: list[str] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.options.split_from is not None:
            self.options.split_from.split(self.options.split_color)

    def abort(self) -> None: ...

    def split(self, colour: int) -> None:
        key, self.splits = self.splits, self.splits + 1
        with self.all_here:
            self.met.setdefault(key, []).append((self.index, colour))
            self.all_here.notify_all()
            assert self.all_here.wait_for(lambda: len(self.met[key]) == self.members, 20), self.met

    def allreduce(self, tensors: Any) -> Any:
        return SimpleNamespace(wait=lambda: True)

    def _allgather_base(self, output: Any, part: Any) -> None:
        self.asked.append("allgather_base")

    def _reduce_scatter_base(self, output: Any, whole: Any) -> None:
        self.asked.append("reduce_scatter_base")


@pytest.fixture
def nccl(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    FakeNccl.met.clear()
    back_end = chosen()
    back_end.device = CPU  # where tensors can be made
    return back_end


@pytest.mark.parametrize(
    ("use", "high_priority", "ctas"), [("edge", True, 4), ("tensor", True, None), ("bulk", False, None)]
)
def test_what_computation_waits_for_goes_ahead_and_edges_leave_it_the_device(
    nccl: Any, use: Any, high_priority: bool, ctas: int | None
) -> None:
    options = nccl.connect(None, 0, 2, timedelta(seconds=7), Role(use, (3, 5))).options
    assert (options.is_high_priority_stream, options.config.max_ctas) == (high_priority, ctas)
    assert (options.global_ranks_in_group, options._timeout) == ([3, 5], timedelta(seconds=7))
    assert options.split_from is None


class Operations(TorchDispatchMode):
    """What torch is asked to do with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **kwargs or {})


def test_a_layers_collectives_take_memory_for_their_result_and_copy_nothing(nccl: Any) -> None:
    """Lists of tensors are flattened by NCCL's back end: as much memory again, and a copy of each part."""
    backend = nccl.connect(None, 0, 2, timedelta(seconds=7))
    group, tensor = TensorGroup(2, 0), torch.ones(4, 3)
    group.bind(Channel(backend, lambda: False, kind=type(nccl)))
    with Operations() as seen:
        assert group.all_gather(tensor).shape == (8, 3)
        assert group.reduce_scatter(tensor).shape == (2, 3)
    assert backend.asked == ["allgather_base", "reduce_scatter_base"]
    assert seen.names == ["new_empty", "new_empty"]


def test_every_rank_takes_part_in_every_split_of_the_world_and_gets_its_groups(nccl: Any) -> None:
    """Three stages in a row, whose middle one is in both rounds of edges; state comes from a rank without work."""
    groups = [
        GroupSpec("world", (0, 1, 2, 3)),
        GroupSpec("group/0-1", (0, 1), "tensor"),
        GroupSpec("edge/1-2", (1, 2), "edge"),
        GroupSpec("edge/2-3", (2, 3), "edge"),
        GroupSpec("state/4-3", (4, 3)),
    ]
    store = torch.distributed.HashStore()
    ranks = [Communicators(m.MeetingId(epoch=1), rank, groups, 20.0, nccl) for rank in range(5)]
    with ThreadPoolExecutor(5) as pool:
        for opened in [pool.submit(rank.open, TorchRendezvous(store)) for rank in ranks]:
            opened.result(20)
    assert {key: sorted(came) for key, came in FakeNccl.met.items()} == {
        0: [(0, 1), (1, 1), (2, 2), (3, 2)],
        1: [(0, 2), (1, 1), (2, 1), (3, 5)],
    }
    for rank, communicators in enumerate(ranks):
        assert set(communicators.names) == {group.name for group in groups if rank in group.ranks}
        for name in communicators.names:
            parent = communicators.channel(name).backend.options.split_from
            world = communicators.find("world")
            by_itself = name == "world" or name.startswith("state/")
            assert parent is (None if by_itself or world is None else world.backend)
        communicators._channels.clear()  # there is nothing to abort


# --- NCCL's manners ---------------------------------------------------------------------------------------------------


@contextmanager
def pair() -> Iterator[list[Any]]:
    """The two ends of a communicator."""
    kind, store = NcclLike(CPU), torch.distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(kind.connect, store, index, 2, timedelta(seconds=30)) for index in range(2)]
        yield [end.result(20) for end in ends]


def test_a_synchronous_call_returns_nothing_and_is_waited_for_all_the_same() -> None:
    options = torch.distributed.AllreduceOptions()
    options.asyncOp = False
    with pair() as ends, ThreadPoolExecutor(2) as pool:
        tensors = [torch.full((3,), float(index)) for index in range(2)]
        begun = [pool.submit(end.allreduce, [tensor], options) for end, tensor in zip(ends, tensors, strict=True)]
        works = [each.result(20) for each in begun]
        assert works == [None, None]
        assert all(tensor.tolist() == [1.0, 1.0, 1.0] for tensor in tensors)
        assert PendingWork(works[0], lambda: False).wait()


def test_an_abort_ends_the_wait_as_if_all_were_well_and_leaves_no_numbers() -> None:
    with pair() as (end, other), ThreadPoolExecutor(1) as pool:
        tensor = torch.zeros(3)
        waiting = pool.submit(end.allreduce([tensor]).wait)
        end.abort()
        assert waiting.result(20)
        assert torch.isnan(tensor).all()
        other.allreduce([torch.zeros(3)]).wait()  # or gloo's end would wait for its timeout


def test_what_a_peer_was_aborted_in_is_no_number_on_those_who_go_on_either() -> None:
    """More than sockets hold, so that there is something left to send."""
    with pair() as (end, other):
        work = end.allreduce([torch.zeros(1 << 23)])
        end.abort()
        summed = torch.zeros(1 << 23)
        assert other.allreduce([summed]).wait()
        assert torch.isnan(summed).any()
        assert work.wait()


def test_what_was_done_before_an_abort_stays() -> None:
    with pair() as (end, other):
        tensors = [torch.ones(3), torch.ones(3)]
        for work in [each.allreduce([tensor]) for each, tensor in zip((end, other), tensors, strict=True)]:
            assert work.wait()
        end.abort()
        assert tensors[0].tolist() == [2.0, 2.0, 2.0]


def test_an_aborted_communicator_goes_with_its_last_holder_and_no_garbage_collector_waits_for_it() -> None:
    """In whatever thread that comes by: in the one that trains, it was a rank that hangs until gloo's timeout."""
    with pair() as ends:
        works = [end.allreduce([torch.zeros(3)]) for end in ends]  # nobody waits for them
        for end in ends:
            end.abort()
        held = [weakref.ref(end) for end in ends]
    gc.disable()
    try:
        del end
        ends.clear()
        assert [one() for one in held] == [None, None], "though work that was under way is still held"
        assert all(work.is_completed() for work in works)
    finally:
        gc.enable()


def test_a_wait_that_is_told_for_how_long_aborts_the_communicator() -> None:
    """So no wait of ours may be told, and none is (`Channel`)."""
    with pair() as ends, ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(Channel(end, lambda: False, kind=NcclLike).allreduce([torch.ones(1)]).wait) for end in ends]
        assert all(each.result(20) for each in sums)
        works = [end.allreduce([torch.ones(1)]) for end in ends]
        with pytest.raises(RuntimeError, match="aborted the communicator"):
            works[0].wait(timedelta(seconds=60))
        assert works[0].is_completed()
        ends[1].abort()


def test_a_wait_over_nccl_is_given_no_time(nccl: Any) -> None:
    given: list[tuple[Any, ...]] = []
    backend = SimpleNamespace(allreduce=lambda _: SimpleNamespace(wait=lambda *time: given.append(time) or True))
    assert Channel(backend, lambda: False, kind=type(nccl)).allreduce([torch.zeros(1)]).wait(timedelta(seconds=1))
    assert given == [()]


def test_nobody_takes_what_an_abort_left_for_a_result() -> None:
    woken = threading.Event()
    with pair() as (end, other), ThreadPoolExecutor(1) as pool:
        channel = Channel(end, woken.is_set, kind=NcclLike)
        waiting = pool.submit(channel.allreduce([torch.zeros(3)]).wait)
        woken.set()
        end.abort()
        with pytest.raises(CommunicatorError, match="woken"):
            waiting.result(20)
        other.allreduce([torch.zeros(3)]).wait()


def test_what_a_device_raises_is_no_peers_fault() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("illegal address")):
        with pytest.raises(type(error)), guarded("a collective"):
            raise error
    with pytest.raises(CommunicatorError), guarded("a collective"):
        raise RuntimeError("connection closed by peer")


def test_a_device_without_memory_for_a_communicator_is_no_peers_fault() -> None:
    """Taken for a peer's, it would be met again by every plan that follows."""
    text = (
        "NCCL error in: ProcessGroupNCCL.cpp:2395, unhandled cuda error, NCCL version 2.28.9\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    )
    with (
        pytest.raises(torch.OutOfMemoryError, match="communicators of epoch 3: NCCL error"),
        guarded("communicators of epoch 3"),
    ):
        raise RuntimeError(text)


@pytest.mark.parametrize("given", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_a_gpu_is_kept_in_segments_that_grow_unless_the_user_says_otherwise(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    chosen()
    settings = {name: os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ}
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if given is None else {given: "max_split_size_mb:64"}
    assert settings == expected


@pytest.mark.parametrize("fails", ["when it is called", "when it is waited for"])
def test_what_a_device_raises_inside_a_layer_is_no_peers_fault(fails: str) -> None:
    class Communicator:
        def __init__(self, error: RuntimeError) -> None:
            self._error = error

        def allreduce(self, *_: Any) -> Communicator:
            if fails == "when it is called":
                raise self._error
            return self

        def wait(self) -> bool:
            raise self._error

    group = TensorGroup(2, 0)
    for error in (torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("illegal address")):
        group.bind(Communicator(error))
        with pytest.raises(type(error)):
            group.all_reduce(torch.zeros(1))
    group.bind(Communicator(RuntimeError("connection closed by peer")))
    with pytest.raises(CommunicatorError):
        group.all_reduce(torch.zeros(1))


def test_aborting_waits_for_all_at_once_and_tells_when_one_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for another one's kernel ends only with that."""
    monkeypatch.setattr(backends, "ABORT_S", 0.2)
    met = threading.Barrier(2, timeout=10)

    class Entangled:
        def abort(self) -> None:
            met.wait()

    class Stuck:
        def abort(self) -> None:
            threading.Event().wait(5)

    nccl = backends.Nccl(torch.device("cuda", 0))
    assert nccl.abort([Entangled(), Entangled()])
    assert not nccl.abort([Stuck()])


class OfNccl:
    """Stands in for torch's ProcessGroupNCCL: notes what it is asked, and connects when its peers come, or never."""

    class Options:
        def __init__(self) -> None:
            self.config, self.is_high_priority_stream = SimpleNamespace(blocking=1), False

    def __init__(self, store: Any, index: int, size: int, options: Any) -> None:
        self.options, self.freed = options, threading.Event()
        self.asked: list[str] = []

    def eager_connect_single_device(self, device: Any) -> None:
        self.asked.append("connect")

    def allreduce(self, tensors: Any) -> Any:
        self.asked.append("allreduce")
        assert self.freed.wait(20)
        raise RuntimeError("NCCL communicator was aborted on rank 0")

    def abort(self) -> None:
        self.freed.set()


def test_what_nccl_is_still_connecting_can_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", OfNccl, raising=False)
    for name in (*NO_WATCHDOG, *CONNECT_LIMITS):
        monkeypatch.setenv(name, "")
    nccl, begun = backends.Nccl(CPU), []
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(nccl.connect, None, 0, 2, timedelta(seconds=60), Role(begun=begun.append))
        until(lambda: begun and "allreduce" in begun[0].asked)
        assert begun[0].options.config.blocking == 0, "else torch knows of none before all have come"
        assert nccl.abort([], begun)
        with pytest.raises(RuntimeError, match="aborted"):
            connecting.result(20)


def test_an_abort_of_what_is_connecting_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch can keep it waiting for a peer; the device is free all the same."""
    let, begun = threading.Event(), threading.Event()
    stuck = SimpleNamespace(abort=lambda: (begun.set(), let.wait(20)))
    assert backends.Nccl(CPU).abort([], [stuck])
    assert begun.wait(20)
    let.set()
