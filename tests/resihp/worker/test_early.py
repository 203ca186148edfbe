"""A script that is started again finds its libraries imported, and cannot tell the difference."""

from __future__ import annotations

import _ctypes
import io
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from resihp.protocol.channels import LocalChannel
from resihp.worker import early as early_workers
from resihp.worker.requests import Alone, Ended, Fork, Forked, KillOrphans, Ready, Report
from resihp.worker.watched_reads import watched_arguments
from tests.resihp.worker.test_forkserver import gone

SOON = """\
import sys
from resihp.worker import early, forkserver
early.EARLY_AFTER_S = 0.3
forkserver.main(sys.argv[1:])
"""
LIBRARY = """\
import atexit, os, sys, time, __main__
time.sleep(0.15)
ROUND, LOCAL_RANK, OPTION = map(os.environ.get, ("TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK", "OPTION"))
MAIN, PID = __main__, os.getpid()
os.environ["SET_BY_LIBRARY"] = "yes"
atexit.register(print, "end of the library", flush=True)
print("the library is imported", flush=True)
"""
SCRIPT = """\
import library
import atexit, os, sys, time
assert library.MAIN is sys.modules["__main__"] and library.MAIN.__dict__ is globals()
assert library.PID == os.getpid() and type(sys.argv) is list
assert getattr(library, "ARGUMENTS", sys.argv) == sys.argv
atexit.register(print, "end of the script", flush=True)
print(library.ROUND, library.LOCAL_RANK, library.OPTION, os.environ["SET_BY_LIBRARY"], flush=True)
while os.path.exists("wait"):
    time.sleep(0.01)
sys.exit(3)
"""
READ_LIKE_THE_DRIVER = """
import ctypes
def value():
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return getenv(b"CUDA_VISIBLE_DEVICES")
"""


class Node:
    """A fork server that soon starts early workers, and the agent's end of its socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        (folder / "site-packages").mkdir()
        (folder / "train.py").write_text(SCRIPT)
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        self.server = LocalChannel(ours)
        with theirs, self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", SOON, "--fd", "0", "--parent", "0", "--preload", "json"],
                env={**os.environ, "PYTHONPATH": str(folder / "site-packages")},
                stdin=theirs,
                stderr=log,
            )
        assert isinstance(self.server.recv(Report), Ready)

    def start_round(
        self,
        number: int,
        ranks: int = 1,
        *,
        program: str = "train.py",
        cwd: str = "",
        resume: str = "--resume=step_0",
        **environment: str,
    ) -> list[int]:
        """Start ranks that wait; return their process ids."""
        (self.folder / "wait").touch()
        pids = []
        for rank in range(ranks):
            own = {
                "TORCHELASTIC_RESTART_COUNT": str(number),
                "LOCAL_RANK": str(rank),
                "MASTER_PORT": str(29500 + number),
            }
            request = Fork(
                rank=rank,
                kind="script" if program.endswith(".py") else "module",
                argv=(program, "--lr", "1", resume),
                cwd=str(self.folder / cwd),
                environment={"OPTION": "a", **own, **environment},
                log=str(self.folder / f"{rank}.log"),
                heading=f"round {number}",
            )
            ours, theirs = socket.socketpair()
            with ours, theirs:
                self.server.send(request, [theirs.fileno()])
            answer = self.server.recv(Report)
            assert isinstance(answer, Forked)
            pids.append(answer.pid)
        return pids

    def until_logged(self, text: str, times: int = 1) -> None:
        until = time.monotonic() + 30
        while self.log.read_text().count(text) < times:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.01)

    def end_round(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert isinstance(self.server.recv(Report), Ended)
        self.server.send(KillOrphans())
        assert isinstance(self.server.recv(Report), Alone)

    def finish(self, pid: int, rank: int = 0) -> str:
        """Let a rank go on to its end; return what it has written in this round."""
        (self.folder / "wait").unlink(missing_ok=True)
        while (ended := self.server.recv(Report)).rank != rank:
            assert ended.status == 3, ended  # the script of another rank
        assert ended == Ended(rank=rank, pid=pid, status=3)
        return (self.folder / f"{rank}.log").read_text().rpartition("round ")[2]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    started = Node(tmp_path)
    (tmp_path / "site-packages" / "library.py").write_text(LIBRARY)
    yield started
    started.server.close()
    started.process.kill()
    started.process.wait()


def children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_the_next_round_runs_in_processes_that_have_imported(node: Node) -> None:
    first = node.start_round(0, ranks=2)
    node.until_logged("imported in advance", times=2)
    early = children_of(node.process.pid) - set(first)
    assert len(early) == 2
    node.end_round(first)
    second = node.start_round(1, ranks=2)
    assert set(second) == early
    node.until_logged("imported in advance", times=4)
    assert node.finish(second[0]) == ("1\nthe library is imported\n1 0 a yes\nend of the script\nend of the library\n")


def test_libraries_see_the_environment_of_their_own_rank(node: Node) -> None:
    first = node.start_round(0, ranks=2)
    node.until_logged("imported in advance", times=2)
    node.end_round(first)
    second = node.start_round(1, ranks=2)
    (node.folder / "wait").unlink()
    for _ in second:
        assert isinstance(node.server.recv(Report), Ended)
    assert "1 0 a yes" in (node.folder / "0.log").read_text()
    assert "1 1 a yes" in (node.folder / "1.log").read_text()


def test_another_value_of_a_variable_that_was_read_needs_a_new_import(node: Node) -> None:
    first = node.start_round(0)
    node.until_logged("imported in advance")
    early = children_of(node.process.pid) - set(first)
    node.end_round(first)
    (second,) = node.start_round(1, OPTION="b")
    assert second not in early
    assert "1 0 b yes" in node.finish(second)


def test_the_next_round_may_have_another_checkpoint_in_its_arguments(node: Node) -> None:
    with (node.folder / "site-packages" / "library.py").open("a") as library:
        library.write("NAMES = set(os.environ)\n")
    (node.folder / "train.py").write_text(SCRIPT + "\n")
    first = node.start_round(0)
    node.until_logged("imported in advance")
    early = children_of(node.process.pid) - set(first)
    node.end_round(first)
    (second,) = node.start_round(1, resume="--resume=step_40", RESIHP_RESUME_FROM="step_40")
    assert {second} == early
    node.finish(second)


def test_other_arguments_need_a_new_import_if_a_library_has_read_them(node: Node) -> None:
    with (node.folder / "site-packages" / "library.py").open("a") as library:
        library.write("ARGUMENTS = [*sys.argv]\n")
    first = node.start_round(0)
    node.until_logged("imported in advance")
    early = children_of(node.process.pid) - set(first)
    node.end_round(first)
    (second,) = node.start_round(1, resume="--resume=step_40")
    assert {second} != early
    node.finish(second)


def test_the_arguments_of_a_module_are_not_known_in_advance(node: Node) -> None:
    """The first is its file, which python finds later."""
    with (node.folder / "site-packages" / "library.py").open("a") as library:
        library.write("PROGRAM = sys.argv[0]\n")
    (node.folder / "train.py").write_text(SCRIPT.replace("sys.exit(3)", "print(library.PROGRAM)\nsys.exit(3)"))
    first = node.start_round(0, program="train")
    node.until_logged("reads those of a module")
    node.end_round(first)
    (second,) = node.start_round(1, program="train")
    assert str(node.folder / "train.py") in node.finish(second)


@pytest.mark.parametrize(
    "reading",
    [
        "sys.argv[0]",
        "sys.argv[1:]",
        "[*sys.argv]",
        "list(sys.argv)",
        "tuple(sys.argv)",
        "' '.join(sys.argv)",
        "len(sys.argv)",
        "bool(sys.argv)",
        "'-v' in sys.argv",
        "sys.argv + ['-v']",
        "sys.argv.copy()",
        "sys.argv.index('train.py')",
        "sys.argv == ['train.py']",
        "repr(sys.argv)",
        "sorted(sys.argv)",
        "kept.append(sys.argv)",
        "setattr(sys, 'argv', ['x'])",
    ],
)
def test_any_use_of_the_arguments_is_noticed(reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    usual = sys.argv
    kept: list[list[str]] = []
    with watched_arguments() as arguments:
        assert not arguments.were_read
        eval(reading, {"sys": sys, "kept": kept})
    assert arguments.were_read
    assert sys.argv is usual


def test_arguments_that_nothing_reads_are_known_as_such() -> None:
    with watched_arguments() as arguments:
        import json.tool  # noqa: F401
    assert not arguments.were_read


def test_a_changed_script_is_started_as_it_is_now(node: Node) -> None:
    first = node.start_round(0)
    node.until_logged("imported in advance")
    node.end_round(first)
    (node.folder / "train.py").write_text("import sys\nprint('library' in sys.modules)\nsys.exit(3)\n")
    (second,) = node.start_round(1)
    assert node.finish(second) == "1\nFalse\n"


def test_a_newly_installed_package_needs_a_new_import(node: Node) -> None:
    """Libraries look for others when they are imported."""
    with (node.folder / "site-packages" / "library.py").open("a") as library:
        library.write("print(os.path.exists(os.path.join(os.path.dirname(__file__), 'other.py')), flush=True)\n")
    first = node.start_round(0)
    node.until_logged("imported in advance")
    node.end_round(first)
    (node.folder / "site-packages" / "other.py").write_text("")
    (second,) = node.start_round(1)
    assert "the library is imported\nTrue\n" in node.finish(second)


def test_a_folder_that_is_replaced_is_the_one_that_the_script_starts_in(node: Node) -> None:
    """A name such as `current` may lead to another version of the user's files, with an equal script."""
    versions = [node.folder / "v1", node.folder / "v2"]
    for version in versions:
        version.mkdir()
        (version / "name.py").write_text(f"NAME = {version.name!r}\n")
        (version / "train.py").write_text(SCRIPT.replace("sys.exit", "import name\nprint(name.NAME)\nsys.exit"))
        os.utime(version / "train.py", (1, 1))
    (node.folder / "current").symlink_to("v1")
    first = node.start_round(0, program="current/train.py")
    node.until_logged("imported in advance")
    node.end_round(first)
    (node.folder / "current").unlink()
    (node.folder / "current").symlink_to("v2")
    (second,) = node.start_round(1, program="current/train.py")
    assert node.finish(second).endswith("v2\nend of the script\nend of the library\n")


def test_the_working_directory_is_the_one_with_that_name_at_the_restart(node: Node) -> None:
    (node.folder / "cwd").mkdir()
    (node.folder / "cwd" / "wait").touch()
    (node.folder / "train.py").write_text(SCRIPT.replace("sys.exit", "print(os.getcwd())\nsys.exit"))
    first = node.start_round(0, cwd="cwd", program="../train.py")
    node.until_logged("imported in advance")
    early = children_of(node.process.pid) - set(first)
    node.end_round(first)
    (node.folder / "cwd").rename(node.folder / "old")
    (node.folder / "cwd").mkdir()
    (second,) = node.start_round(1, cwd="cwd", program="../train.py")
    assert {second} == early
    assert f"{node.folder / 'cwd'}\n" in node.finish(second)


@pytest.mark.parametrize("devices", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
def test_the_cuda_driver_finds_no_device_during_an_import_in_advance(node: Node, devices: dict[str, str]) -> None:
    """The rank that runs meanwhile needs their memory. The rank itself finds them."""
    with (node.folder / "site-packages" / "library.py").open("a") as library:
        library.write(READ_LIKE_THE_DRIVER + "print(value())\n")
    script = SCRIPT.replace("sys.exit", "print(library.value(), os.environ.get('CUDA_VISIBLE_DEVICES'))\nsys.exit")
    (node.folder / "train.py").write_text(script)
    first = node.start_round(0, **devices)
    node.until_logged("imported in advance")
    node.end_round(first)
    (second,) = node.start_round(1, **devices)
    own = devices.get("CUDA_VISIBLE_DEVICES")
    lines = node.finish(second).splitlines()
    assert lines[2] == "b''"
    assert lines[4] == f"{own.encode() if own else None} {own}"


def test_a_library_that_asks_the_cuda_driver_is_not_imported_in_advance(node: Node) -> None:
    driver = node.folder / "site-packages" / "libcuda.so.1"
    shutil.copy(_ctypes.__file__, driver)
    with (node.folder / "site-packages" / "library.py").open("a") as library:
        library.write(f"{READ_LIKE_THE_DRIVER}ctypes.CDLL({str(driver)!r})\nprint(value())\n")
    first = node.start_round(0, CUDA_VISIBLE_DEVICES="0,1")
    node.until_logged("asks the CUDA driver for devices")
    node.end_round(first)
    (second,) = node.start_round(1, CUDA_VISIBLE_DEVICES="0,1")
    assert "b'0,1'" in node.finish(second)


@pytest.mark.parametrize(
    ("at_import", "reason"),
    [
        ("import threading\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "starts a thread"),
        ("import subprocess\nCHILD = subprocess.Popen(['sleep', '60'])", "starts a process"),
        ("import subprocess\nsubprocess.run(['true'])", "starts a process"),
        ("import socket\nSOCKET = socket.socket()", "opens socket:"),
        ("import ours", "imports ours, which is the user's"),
        ("ALL = dict(os.environ)", "copies the whole environment"),
        ("KEPT = os.dup(1)", "keeps a copy of standard output"),
        ("sys.argv = [*sys.argv]", "changes or keeps the arguments"),
        ("sys.argv.remove('1'); sys.argv.append('1')", "changes or keeps the arguments"),
        (
            "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' and not os.path.exists('ended'): sys.exit(9)",
            "SystemExit: 9",
        ),
    ],
)
def test_an_import_that_is_no_mere_import_is_left_to_the_script(node: Node, at_import: str, reason: str) -> None:
    (node.folder / "ours.py").write_text("")
    with (node.folder / "site-packages" / "library.py").open("a") as library:
        library.write(at_import)
    first = node.start_round(0)
    node.until_logged(reason)
    node.end_round(first)
    (node.folder / "ended").touch()
    (second,) = node.start_round(1)
    assert node.finish(second).startswith("1\nthe library is imported\n1 0 a yes\n")


def test_light_imports_are_not_worth_a_process(node: Node) -> None:
    (node.folder / "train.py").write_text("import json, sys, time\ntime.sleep(60)\n")
    first = node.start_round(0)
    node.until_logged("the libraries at the top of the script take 0.00 s")
    while children_of(node.process.pid) != set(first):
        time.sleep(0.01)


def test_early_workers_end_with_their_fork_server(node: Node) -> None:
    first = node.start_round(0)
    node.until_logged("imported in advance")
    (early,) = children_of(node.process.pid) - set(first)
    node.process.kill()
    assert gone(early)


@pytest.mark.parametrize("is_full", [False, True])
def test_ranks_go_on_if_no_early_worker_can_be_forked_or_the_log_cannot_be_written(
    is_full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fork() -> int:
        raise BlockingIOError("no process is left")

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(early_workers, "free_memory", lambda: early_workers.MIN_FREE_BYTES)
    monkeypatch.setattr(early_workers, "EARLY_AFTER_S", 0.0)
    workers = early_workers.EarlyWorkers(never_run)
    workers.take(Fork(rank=0, kind="script", argv=("train.py",), cwd=str(tmp_path), environment={}, log=""))
    poll, (heard, said) = select.poll(), os.pipe()
    poll.register(heard, select.POLLIN)
    os.write(said, b"x")
    if is_full:
        monkeypatch.setattr(sys, "stderr", FullDisk())
    assert workers.wait(poll) == {heard}
    assert workers.wait(poll) == {heard}
    assert is_full or capsys.readouterr().err == "nothing is imported in advance: no process is left\n"
    os.close(heard)
    os.close(said)


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def never_run(request: Fork, channel: LocalChannel) -> NoReturn:
    raise AssertionError
