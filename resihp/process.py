"""What the kernel is asked about processes: who dies with whom, what state one is in. Linux only; decides nothing."""

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
"""Environment variable of a worker: the number of its inherited socket to the agent."""

OPEN_FILES = "RESIHP_OPEN_FILES"
"""Environment variable of our own processes: how many descriptors the user's may have, / and to how many we raised
that."""
MOST_OPEN_FILES = 1 << 16
"""Enough for 16,384 nodes. Where a hard limit is a thousand million, programs that close all there could be hang."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel for signal `number` when the parent process ends; send it to ourselves if it already has.

    The kernel's parent is the *thread* that forked: start processes that call this from a main thread. `parent` 0:
    nobody is asked, as in a container, where the parent is a process of the runtime.
    """
    if parent == 0:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_by(number: int) -> None:
    """End this process by a signal, whatever its handler is and whatever the main thread does. Any thread."""
    ctypes.CDLL(None, use_errno=True).signal(int(number), None)
    os.kill(os.getpid(), number)


def inherited_socket(descriptor: int) -> socket.socket:
    """The socket that we were started with. Standard input, if it was that, is empty from here on.

    Of all descriptors only 0, 1 and 2 come through every container runtime.
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
    """Become the parent of every orphan among our descendants, so that none is out of reach."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Orphans:
    """Waits for the children that this process has adopted, once they have ended: else each stays, and has its number.

    `reap` is to be called now and then. Who starts a child of our own waits for its end, and takes it at once; one that
    has ended and is still there at the next call is nobody's.
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
    """Wait for a child's end, and take that of every other that ends meanwhile. Main thread; returns its status."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and ended.si_pid != child.pid:
        with suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
    return child.wait()


def kill_children(within_s: float) -> None:
    """Kill every child of this process, and what those leave behind if it adopts orphans; wait for their ends."""
    until = time.monotonic() + within_s
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            for pid in _children(os.getpid()):
                with suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)  # not waited for yet: its number is nobody else's
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)


def _children(parent: int) -> list[int]:
    found = []
    with suppress(OSError):  # not every kernel has it
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as children:
                found += [int(pid) for pid in children.read().split()]
        return found
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                    if int(stat.read().rpartition(")")[2].split()[1]) == parent:
                        found.append(int(name))
            except (OSError, IndexError):
                continue
    return found


def most_open_files() -> int:
    """How many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files() -> None:
    """As far as we may: a supervisor has a socket for each agent, an agent that stands for one asks all others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = max(soft, min(hard, MOST_OPEN_FILES))
    if os.environ.get(OPEN_FILES, "").partition("/")[2] != str(soft):  # else we have, above us, and srun passed it on
        os.environ[OPEN_FILES] = f"{soft}/{raised}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def restore_open_files() -> None:
    """For what starts the user's processes: some programs close whatever could be open, or call `select`."""
    usual = os.environ.pop(OPEN_FILES, "").partition("/")[0]
    if usual:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(int(usual), hard), hard))


def threads() -> int:
    """Threads of this process, native ones included."""
    return len(os.listdir("/proc/self/task"))


def state_letter(pid: int) -> str:
    """The kernel's process state (R, S, D, T, Z, ...); X when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


class Work(NamedTuple):
    """What a process and everything below it have done so far."""

    processor_s: float
    bytes_moved: int
    bytes_written_by_itself: int
    waits_for_disk: bool
    processes: frozenset[int]


def work_of(pid: int) -> Work:
    """What the kernel says of a process and its descendants; zeros for what is gone, or may not be seen."""
    ticks = os.sysconf("SC_CLK_TCK")
    processes: set[int] = set()
    pending = [pid]
    processor_s, bytes_moved, own_bytes, waits = 0.0, 0, 0, False
    while pending:
        each = pending.pop()
        if each in processes:
            continue
        processes.add(each)
        pending += _children(each)
        with suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{each}/stat", encoding="utf-8", errors="replace") as stat:
                fields = stat.read().rpartition(")")[2].split()
            waits = waits or fields[0] == "D"
            processor_s += sum(int(field) for field in fields[11:15]) / ticks  # its own, and of children waited for
        with suppress(OSError, ValueError):
            with open(f"/proc/{each}/io", encoding="ascii") as io:
                counts = dict(line.split(": ") for line in io.read().splitlines())
            bytes_moved += int(counts["rchar"]) + int(counts["wchar"])
            if each == pid:
                own_bytes = int(counts["wchar"])
    return Work(processor_s, bytes_moved, own_bytes, waits, frozenset(processes))


def identity(pid: int) -> str:
    """What no other process of this machine has, while it is not started again: numbers are used again, with the time
    since boot when it began they are not. Empty when there is no such process."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return f"{pid}/{stat.read().rpartition(')')[2].split()[19]}"  # starttime of proc(5)
    return ""


def ending(status: int) -> str:
    """How a process ended, in words; `status` as in subprocess."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def name_process(job: str, what: str, keep: int = 2, since: bytes = b"-m") -> None:
    """Have `ps` call this process `resihp job 6 rank 5`, in place of its interpreter; which module it runs follows.
    `top` and the kernel have 15 letters of `resihp-rank-5`: without blanks, at which Slurm's proctrack/linuxproc stops
    reading, so that neither its signals nor its kill at the end would reach this process and those below it.

    Written over the arguments, as daemons do. Not over the environment behind them, as libraries for it do: by that,
    Slurm and administrators find whose process it is. There is no more room than there was: what follows is cut short,
    but for the first `keep` words from `since` on, by which processes are found; then the title is.
    """
    name_thread(f"resihp {what}".replace(" ", "-"))
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        title = titled(f"resihp job {job} {what}".encode(), words, keep, end - start, since)
        if start and title:
            ctypes.memmove(start, title, len(title))


def titled(title: bytes, words: Sequence[bytes], keep: int, room: int, since: bytes = b"-m") -> bytes:
    """A command line of `room` bytes that begins with a title; empty where there is no room for one."""
    rest = list(words[words.index(since) :]) if since in words else []
    kept = sum(len(word) + 1 for word in rest[:keep])
    shown = title[: room - 1 - kept]
    if room <= 1 + kept:
        return b""
    return b"\0".join([shown, *rest])[: room - 1].ljust(room, b"\0")


def name_thread(name: str) -> None:
    """Call this thread so for whoever looks with `ps -L` which one is stuck; at most 15 letters count."""
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
