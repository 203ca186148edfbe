"""Linux process control: parent-death signals, child reaping, descriptor limits, process states. Decides nothing."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

AGENT_FD = "RESIHP_AGENT_FD"
"""Environment variable of a worker: descriptor number of its inherited socket to the agent."""

OPEN_FILES = "RESIHP_OPEN_FILES"
"""Environment variable of our own processes: the user's descriptor limit, a slash, and our raised limit."""
MOST_OPEN_FILES = 1 << 16
"""Enough for 16,384 nodes. With a hard limit of 10^9, programs that close every possible descriptor would hang."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send signal `number` to this process when its parent ends; send it now if the parent has ended.

    The kernel regards the *thread* that forked as the parent: start processes that call this from a main thread. With
    `parent` 0 nothing is requested, as in a container, where the parent is a process of the runtime.
    """
    if parent == 0:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_by(number: int) -> None:
    """End this process by a signal, regardless of its handler and of the main thread's activity. From any thread."""
    ctypes.CDLL(None, use_errno=True).signal(int(number), None)
    os.kill(os.getpid(), number)


def inherited_socket(descriptor: int) -> socket.socket:
    """Return the socket that this process was started with. If it was standard input, that reads as empty from now on.

    Descriptors 0, 1 and 2 are the only ones that every container runtime passes on.
    """
    if descriptor > 2:
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
    own = os.dup(descriptor)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)
    return socket.socket(fileno=own)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants, so that it can reap and signal them all."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Orphans:
    """Reaps adopted children after they end; unreaped, each would remain as a zombie and keep its process id.

    Call `reap` periodically. Code that starts a child of our own waits for its end and reaps it immediately, so a child
    that has ended and is still there at the next call belongs to nobody.
    """

    def __init__(self) -> None:
        self._ended: set[int] = set()

    def reap(self) -> None:
        ended = {pid for pid in _children(os.getpid()) if state_letter(pid) == "Z"}
        for pid in ended & self._ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait for a child, reap every other child that ends meanwhile, and return the child's status. Main thread only."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and ended.si_pid != child.pid:
        with suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
    return child.wait()


def kill_children(within_s: float) -> None:
    """Kill all children of this process and any orphans adopted from them; wait up to `within_s` for their ends."""
    until = time.monotonic() + within_s
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            for pid in _children(os.getpid()):
                with suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so its id cannot have been reused
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)


def _children(parent: int) -> list[int]:
    pids = []
    with suppress(OSError):  # not every kernel has this file
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as children:
                pids += [int(pid) for pid in children.read().split()]
        return pids
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                    if int(stat.read().rpartition(")")[2].split()[1]) == parent:
                        pids.append(int(name))
            except (OSError, IndexError):
                continue
    return pids


def most_open_files() -> int:
    """Return this process's soft limit of open descriptors."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files() -> None:
    """Raise the limit of open descriptors to at most `MOST_OPEN_FILES`.

    A supervisor has a socket for each agent, and an agent that stands for election asks all other agents.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = max(soft, min(hard, MOST_OPEN_FILES))
    # If the variable names the current limit, a process above us raised it and srun passed it on.
    if os.environ.get(OPEN_FILES, "").partition("/")[2] != str(soft):
        os.environ[OPEN_FILES] = f"{soft}/{raised}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def restore_open_files() -> None:
    """Restore the user's descriptor limit before user processes start.

    Some programs close every descriptor that could be open, or call `select`.
    """
    usual = os.environ.pop(OPEN_FILES, "").partition("/")[0]
    if usual:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(int(usual), hard), hard))


def threads() -> int:
    """Return the number of threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


def state_letter(pid: int) -> str:
    """Return the kernel's process state (R, S, D, T, Z, ...); X if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


class Work(NamedTuple):
    """Cumulative activity of a process and all its descendants."""

    processor_s: float
    bytes_moved: int
    bytes_written_by_itself: int
    waits_for_disk: bool
    processes: frozenset[int]


def work_of(pid: int) -> Work:
    """Return the activity of a process and its descendants; processes that are gone or hidden count as zero."""
    ticks = os.sysconf("SC_CLK_TCK")
    processes: set[int] = set()
    pending = [pid]
    processor_s, bytes_moved, own_bytes, waits = 0.0, 0, 0, False
    while pending:
        current = pending.pop()
        if current in processes:
            continue
        processes.add(current)
        pending += _children(current)
        with suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{current}/stat", encoding="utf-8", errors="replace") as stat:
                fields = stat.read().rpartition(")")[2].split()
            waits = waits or fields[0] == "D"
            processor_s += sum(int(field) for field in fields[11:15]) / ticks  # its own, and of reaped children
        with suppress(OSError, ValueError):
            with open(f"/proc/{current}/io", encoding="ascii") as io:
                counts = dict(line.split(": ") for line in io.read().splitlines())
            bytes_moved += int(counts["rchar"]) + int(counts["wchar"])
            if current == pid:
                own_bytes = int(counts["wchar"])
    return Work(processor_s, bytes_moved, own_bytes, waits, frozenset(processes))


def identity(pid: int) -> str:
    """Return an identifier that no other process of this machine has until a reboot; empty if there is no such process.

    Process ids are reused, but not together with the start time since boot.
    """
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return f"{pid}/{stat.read().rpartition(')')[2].split()[19]}"  # starttime of proc(5)
    return ""


def ending(status: int) -> str:
    """Return how a process ended, in words; `status` as in subprocess."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def name_process(job: str, role: str, keep: int = 2, since: bytes = b"-m") -> None:
    """Show this process in `ps` as `resihp job 6 rank 5` in place of its interpreter, followed by the module it runs.

    `top` and the kernel show the first 15 characters of `resihp-rank-5`. That name has no blanks, because Slurm's
    proctrack/linuxproc stops reading at a blank, and then neither its signals nor its final kill would reach this
    process and its descendants.

    The title overwrites the arguments, as daemons do. Unlike process title libraries, this leaves the environment
    behind the arguments alone: Slurm and administrators use it to find out who owns the process. The available space
    does not grow: what follows the title is cut, except for the first `keep` words from `since` on, which identify the
    process; if necessary the title is cut instead.
    """
    name_thread(f"resihp {role}".replace(" ", "-"))
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        title = titled(f"resihp job {job} {role}".encode(), words, keep, end - start, since)
        if start and title:
            ctypes.memmove(start, title, len(title))


def titled(title: bytes, words: Sequence[bytes], keep: int, room: int, since: bytes = b"-m") -> bytes:
    """Return a command line of exactly `room` bytes that begins with the title; empty if there is no room for one."""
    rest = list(words[words.index(since) :]) if since in words else []
    tail_bytes = sum(len(word) + 1 for word in rest[:keep])
    visible_title = title[: room - 1 - tail_bytes]
    if room <= 1 + tail_bytes:
        return b""
    return b"\0".join([visible_title, *rest])[: room - 1].ljust(room, b"\0")


def name_thread(name: str) -> None:
    """Name the calling thread for `ps -L`, so that a stuck thread can be identified; at most 15 characters count."""
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
