"""A box holds the processes of one node of a test cluster: what is started in it, and what those start, ends with it.

With namespaces (pid, mount, uts and, if asked, net) a box has its own process table, its own host name and its own
/etc/hosts, and killing its first process kills all of it, as pulling the plug does. Without them (a container that
does not allow namespaces) the processes of a box are found by their environment, which is good enough for jobs that do
not hide. A box also ends when the process that made it is gone: its first process waits for the end of a pipe.

Linux only; namespaces need root. Used by `tests.integration.cluster` alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_FIRST = """
hostname "$1" && mount --bind "$2" /etc/hosts || exit 1
for program in ${3:+"$3"/*}; do
  for place in /usr/bin /usr/sbin; do
    there=$place/${program##*/}
    if [ -e "$there" ]; then mount --bind "$program" "$there" || exit 1; fi
  done
done
exec 3<&0
cat <&3 >/dev/null &
echo ready
wait $!
"""
"""The first process of a box. `wait` collects whatever orphans end; the end of the pipe ends it, and so the box."""


@functools.cache
def namespaces_allowed() -> bool:
    """Whether this machine lets us have namespaces of our own."""
    if os.geteuid() != 0:
        return False
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--net", "true"]
    try:
        return subprocess.run(argv, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def listening(pid: int, port: int) -> bool:
    """Whether somebody listens on a TCP port of the network that this process sees."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":
                return True
    return False


class Box:
    """One node's processes. `marks`: environment by which they are known where there are no namespaces.

    `over`: a folder of programs that stand in the place of the system's own in there, if it has namespaces.
    """

    def __init__(
        self,
        name: str,
        *,
        hosts: Path,
        marks: Mapping[str, str],
        isolated: bool,
        network: bool = False,
        over: Path | None = None,
    ) -> None:
        self.name = name
        self.marks = dict(marks)
        self.isolated = isolated
        self.network = network
        self._started: list[subprocess.Popen[bytes]] = []
        self._unshare: subprocess.Popen[bytes] | None = None
        self.first: int | None = None
        """Process id, as the host sees it, of the first process of a box with namespaces."""
        if isolated:
            argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount"]
            argv += ["--net"] if network else []
            argv += ["sh", "-c", _FIRST, "sh", name, str(hosts), str(over or "")]
            self._unshare = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ready(self) -> None:
        """Wait until programs can be started in it."""
        if self._unshare is None or self.first is not None:
            return
        assert self._unshare.stdout is not None
        line = self._unshare.stdout.readline()
        if line.strip() != b"ready":
            raise RuntimeError(f"box {self.name}: {(line + self._unshare.stdout.read()).decode().strip()}")
        (self.first,) = (child.pid for child in psutil.Process(self._unshare.pid).children())

    def enter(self) -> list[str]:
        """What to write in front of a command to run it in here."""
        if not self.isolated:
            return ["env", *(f"{k}={v}" for k, v in self.marks.items())]
        net = ["--net"] if self.network else []
        return ["nsenter", "--target", str(self.first), "--pid", "--mount", "--uts", *net, "--"]

    def ip(self, *lines: str) -> None:
        """Run lines of `ip` in its network, in which all process ids are those of the host."""
        argv = ["nsenter", "--target", str(self.first), "--net", "--", "ip", "-batch", "-"]
        done = subprocess.run(argv, input="\n".join(lines), capture_output=True, text=True, timeout=10)
        if done.returncode != 0:
            raise RuntimeError(f"box {self.name}: ip: {done.stderr.strip()}")

    def start(self, argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a daemon that stays in the foreground."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*self.enter(), *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def program(self, process: subprocess.Popen[bytes]) -> int | None:
        """The process id of what `start` started, without what stands in front of it; None when it has ended."""
        if process.poll() is not None:
            return None
        if not self.isolated:
            return process.pid
        try:
            return next((child.pid for child in psutil.Process(process.pid).children()), None)
        except psutil.NoSuchProcess:
            return None

    def pids(self) -> list[int]:
        """All its processes as the host sees them, without those that make the box. Zombies are not counted."""
        if self.isolated:
            own = {self.first}
            for child in self._children(self.first):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                    own |= {child.pid} if child.name() == "cat" else set()
            return [pid for pid in self._in_namespace() if pid not in own]
        wanted = {f"{k}={v}".encode() for k, v in self.marks.items()}
        found = []
        for process in psutil.process_iter():
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if wanted <= set(environ.split(b"\0")) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (OSError, psutil.NoSuchProcess):
                continue
        return found

    def signal(self, number: int) -> None:
        """Send a signal to everything in it, the box itself included."""
        for pid in self._in_namespace() if self.isolated else self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGCONT:
            # unshare and nsenter stop themselves when what they have started is stopped.
            for process in self._outside():
                process.send_signal(number)

    def kill(self) -> None:
        """Pull the plug. Returns when nothing of it is left."""
        deadline = time.monotonic() + 10
        if self.first is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.first, signal.SIGKILL)
        while self._remains():
            if time.monotonic() > deadline:
                raise RuntimeError(f"box {self.name}: processes {self.pids()} do not die")
            time.sleep(0.005)
        for process in self._outside():
            process.kill()
            process.wait(timeout=10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._started.clear()

    def _remains(self) -> bool:
        """Whether something of a killed box is still there; helps it to go."""
        if self._unshare is None:
            self.signal(signal.SIGKILL)
            return bool(self.pids())
        if self.first is None:
            self._unshare.kill()
        for process in self._outside():
            process.send_signal(signal.SIGCONT)
        # Ends when the first process has been collected, and that only when all others of its namespace have been.
        return self._unshare.poll() is None

    @property
    def alive(self) -> bool:
        """Whether the box is there; one without namespaces always is."""
        return self._unshare is None or self._unshare.poll() is None

    def _outside(self) -> list[subprocess.Popen[bytes]]:
        """Our own children: what made the box, and what stands in front of its daemons."""
        return [*self._started, *([self._unshare] if self._unshare is not None else [])]

    @staticmethod
    def _children(pid: int | None) -> list[psutil.Process]:
        try:
            return psutil.Process(pid).children() if pid is not None else []
        except psutil.NoSuchProcess:
            return []

    def _in_namespace(self) -> list[int]:
        try:
            ours = os.readlink(f"/proc/{self.first}/ns/pid")
        except OSError:
            return []
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    if os.readlink(f"/proc/{entry.name}/ns/pid") == ours:
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found
