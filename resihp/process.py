"""Controls Linux processes: signals on a parent's death, reaping of children, descriptor limits, states, names.

Used by supervisors, agents and workers. Never decides which process should end: the callers do.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

AGENT_FD = "RESIHP_AGENT_FD"
"""Environment variable of a worker: descriptor number of its inherited socket to the agent."""

OPEN_FILES = "RESIHP_OPEN_FILES"
"""Environment variable of resihp's own processes: the user's descriptor limit, a slash, and the raised limit."""
MOST_OPEN_FILES = 1 << 16
"""Highest descriptor limit that is set: enough for 16,384 nodes. With a limit of 10^9, programs that close every
possible descriptor would hang."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send signal `number` to this process when its parent ends, or send it now if the parent is gone.

    `parent`: process id of the parent; with 0, as in a container whose runtime is the parent, nothing is requested.
    The kernel sends the signal when the *thread* that forked ends: a caller of this function must have been started
    from its parent's main thread.
    """
    if parent == 0:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_by(number: int) -> None:
    """End this process by the signal `number`, from any thread.

    A Python handler of that signal is bypassed, so the process ends even if the main thread is busy.
    """
    ctypes.CDLL(None, use_errno=True).signal(int(number), None)
    os.kill(os.getpid(), number)


def inherited_socket(descriptor: int) -> socket.socket:
    """Return the socket that this process inherited as `descriptor`.

    Descriptors 0, 1 and 2 are the only ones that every container runtime passes on. If `descriptor` is one of these,
    the socket gets a new number and the old number refers to /dev/null from now on.
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
    """Make this process the parent of all orphans among its descendants, so that it can signal and reap them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Orphans:
    """Reaps adopted orphans after they end; otherwise they would remain as zombies and occupy process ids.

    Call `reap` periodically. A child that is a zombie in two calls in a row is taken for an orphan and reaped: code
    that starts a child of its own waits for the child and reaps it immediately.
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
    """Wait for `child` to end, reap all other children that end meanwhile, and return the status of `child`.

    Call from the main thread only.
    """
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and ended.si_pid != child.pid:
        with suppress(ChildProcessError):
            os.waitpid(ended.si_pid, os.WNOHANG)
    return child.wait()


def kill_children(within_s: float, spare: Set[int] = frozenset()) -> bool:
    """Kill and reap all children of this process, and the orphans that it adopts meanwhile, for up to `within_s`
    seconds; return whether none is left. Children in `spare` are left alone."""
    until = time.monotonic() + within_s
    was_empty = False
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            remaining = [pid for pid in _children(os.getpid()) if pid not in spare]
            if spare and not remaining and was_empty:  # once is not enough: the kernel's list may miss a child
                return True
            was_empty = not remaining
            for pid in remaining:
                with suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so its id cannot have been reused
                os.waitpid(pid, os.WNOHANG)
            if not spare:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if there is no child
            time.sleep(0.005)
        return False
    return True


def kill_descendants(spare: int | None, within_s: float) -> None:
    """Kill all processes that this process has started, and those that they have started; wait for their ends for up to
    `within_s` seconds. `spare`: id of a child that is not killed, nor is anything that it has started; None for
    none."""
    import psutil

    def started_by(pid: int) -> list[psutil.Process]:
        try:
            return list(psutil.Process(pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    spared = set() if spare is None else {spare, *(process.pid for process in started_by(spare))}
    remaining = [process for process in started_by(os.getpid()) if process.pid not in spared]
    for process in remaining:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(remaining, within_s)


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
    """Return the soft limit on open descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files() -> None:
    """Raise the soft limit on open descriptors to the hard limit, but to no more than `MOST_OPEN_FILES`.

    A supervisor has one socket per agent, and an agent that stands for election connects to all other agents. The
    user's limit is noted in the environment for `restore_open_files`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = max(soft, min(hard, MOST_OPEN_FILES))
    # If the variable names the current limit, a process above us raised it and srun passed it on.
    if os.environ.get(OPEN_FILES, "").partition("/")[2] != str(soft):
        os.environ[OPEN_FILES] = f"{soft}/{raised}"
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def restore_open_files() -> None:
    """Restore the user's descriptor limit, before a user's process starts.

    A raised limit would harm programs that close every possible descriptor or call `select`.
    """
    usual = os.environ.pop(OPEN_FILES, "").partition("/")[0]
    if usual:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(int(usual), hard), hard))


def threads() -> int:
    """Return the number of threads of this process, including threads that Python did not start."""
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
    """Processor time in seconds, user and system, including reaped children."""
    bytes_moved: int
    """Bytes read and written by all these processes, through files, pipes and sockets."""
    bytes_written_by_itself: int
    """Bytes written by the process alone, without its descendants."""
    waits_for_disk: bool
    """Whether any of these processes is in uninterruptible sleep (state D)."""
    processes: frozenset[int]
    """Ids of the process and its descendants."""


def work_of(pid: int) -> Work:
    """Return the activity of process `pid` and its descendants. A process that is gone or unreadable counts as zero."""
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


def thread_times(pids: Iterable[int]) -> dict[int, float]:
    """Return the processor time in seconds of each thread of the processes, by thread id. Threads that are gone, or
    whose time the kernel does not tell, are left out."""
    times: dict[int, float] = {}
    for pid in pids:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with (
                    suppress(OSError, IndexError, ValueError),
                    open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as statistics,
                ):
                    times[int(thread)] = int(statistics.read().split()[0]) / 1e9
    return times


def identity(pid: int) -> str:
    """Return an identifier of process `pid` that is unique on this machine until a reboot; "" if there is no process.

    It consists of the process id and the start time since boot, because process ids alone are reused.
    """
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        return f"{pid}/{stat.read().rpartition(')')[2].split()[19]}"  # starttime of proc(5)
    return ""


def ending(status: int) -> str:
    """Return in words how a process ended; `status` is a `subprocess` return code, negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def name_process(job: str, role: str, keep: int = 2, since: bytes = b"-m") -> None:
    """Show this process in `ps` as `resihp job 6 rank 5`, followed by the module it runs, not as its interpreter.

    `top` and the kernel show the first 15 characters of `resihp-rank-5`. That name has no blanks, because Slurm's
    proctrack/linuxproc stops reading at a blank, and then neither Slurm's signals nor its final kill would reach this
    process and its descendants.

    The title overwrites the process's arguments in memory, as daemons do. Unlike process title libraries, this function
    leaves the environment behind the arguments alone: Slurm and administrators read it to find the owner of a process.
    The space does not grow. If it is too small, the arguments after the title are cut, except for the first `keep`
    arguments from `since` on, which identify the process; if that is not enough, the title is cut.
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
    """Return a command line of exactly `room` bytes: the title, then `words` from `since` on; b"" without room for it.

    The title is cut if necessary, so that the first `keep` words from `since` on fit.
    """
    rest = list(words[words.index(since) :]) if since in words else []
    tail_bytes = sum(len(word) + 1 for word in rest[:keep])
    visible_title = title[: room - 1 - tail_bytes]
    if room <= 1 + tail_bytes:
        return b""
    return b"\0".join([visible_title, *rest])[: room - 1].ljust(room, b"\0")


def name_thread(name: str) -> None:
    """Name the calling thread for `ps -L`, so that a stuck thread can be identified. The kernel keeps 15 characters."""
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still use, by the machine's memory and by the limits of its control
    groups, of either version. Memory of files that the kernel can drop counts as free."""
    free = _figure(proc / "meminfo", "MemAvailable:") * 1024
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit_name, usage_name, droppable_name = names
        top = cgroups / controllers
        for folder in (top / path.strip("/"), *(top / path.strip("/")).parents):
            limit = "".join(_lines(folder / limit_name)).strip()
            if limit.isdecimal() and folder.is_relative_to(top):
                usage = int("".join(_lines(folder / usage_name)).strip() or 0)
                free = min(free, int(limit) - usage + _figure(folder / "memory.stat", droppable_name))
    return max(0, free)


def _lines(path: Path) -> list[str]:
    """Return the lines of a small file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _figure(path: Path, name: str) -> int:
    """Return the number after a name at the beginning of a line; 0 if there is none."""
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [name]), 0)
