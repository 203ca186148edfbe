"""Starts agents on the nodes of a Slurm allocation by one `srun` step, and reads their exits from srun's messages.

srun runs in its own session and writes to files on local disk, so it outlives the supervisor; a restarted supervisor
finds it by its process id (`adopt`). Agents write their logs themselves; their output does not pass through srun. An
agent's exit status is taken from srun's messages if they report it. Slurm's messages that a *node* failed are ignored,
because broken connections show it sooner. The user cannot kill one node's part of a step, except through the agent
itself.

Used by the supervisor under Slurm, in place of `resihp.wrapper.launch.launcher.LocalLauncher`. Decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from resihp.errors import ResihpError
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.launch.launcher import EXECVE_FAILED, NO_JOB_STATUS, NOT_LAUNCHED, AgentEnded, own_environment
from resihp.wrapper.strict_modes import private, write_private

Say = Callable[[Literal["warning", "error"], str], None]

LOOK_EVERY_S = 0.25
GATHER_WINDOW_S = 1.0
"""Nodes with the same problem are reported together, once no further node was found for this long."""
MAX_MESSAGES = 20
"""Limit on the messages of srun that are shown to the user."""

_KEPT = re.compile(
    r"SLURM_(CONF|JOB_ID|JOBID|CLUSTERS|CLUSTER_NAME|WORKING_CLUSTER|RESTART_COUNT|SUBMIT_DIR|SUBMIT_HOST)"
    r"|SLURM_JOB_(USER|UID|GID|NAME|PARTITION|ACCOUNT|QOS|RESERVATION|START_TIME|END_TIME)"
    r"|SLURM_ARRAY_(JOB_ID|TASK_ID|TASK_COUNT|TASK_MIN|TASK_MAX|TASK_STEP)"
)
"""Variables of Slurm that srun receives: those that identify the job. The others are options of srun, some of them
outdated after a node died."""


def step_environment() -> dict[str, str]:
    """Return this process's environment for srun, without variables that would override srun's options."""
    return {
        name: value
        for name, value in own_environment().items()
        if _KEPT.fullmatch(name) or not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_"))
    }


def step_command(request: RunRequest, address: str, *, srun: str = "srun") -> list[str]:
    """Return the command that starts one agent on each node, with all resources of the job there. Each option overrides
    an inherited setting."""
    assert request.slurm is not None
    slurm, count = request.slurm, len(request.settings.node_names)
    logs = str(request.of_job.logs).replace("%", "%%")
    options = [
        f"--jobid={slurm.number or slurm.job_id}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(request.settings.node_names)}",
        "--job-name=resihp-agents",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--input=none",
        f"--output={logs}/%N.agent.log",
        "--open-mode=append",
        "--export=ALL",
    ]
    if slurm.cpus is not None:
        options.append(f"--cpus-per-task={slurm.cpus}")
    if slurm.gpus:
        options.append(f"--gres=gpu:{slurm.gpus}")
    options += slurm.step_extra
    run_file = str(request.of_job.run_file)
    agent = [
        sys.executable,
        "-P",
        "-m",
        "resihp.wrapper.agent.process",
        "--run",
        run_file,
        "--node",
        "-",
        "--supervisor",
        address,
    ]
    return [srun, *options, *agent]


class SlurmLauncher:
    """Launcher by one srun step (see the module). `say` shows messages to the user, one line at a time."""

    worker_environment: Mapping[str, str] = {}
    """Empty: the workers' libraries choose the interface by themselves, or by the user's variables."""

    def __init__(
        self, request: RunRequest, host: str, say: Say = lambda level, text: None, *, srun: str = "srun"
    ) -> None:
        self.host = host
        self.nodes = request.settings.node_names
        self._request = request
        self._say = say
        self._srun = srun
        place = request.of_job.journal_file.parent
        self._pid_file, self._messages_file = place / "srun.pid", place / "srun.log"
        self._over = asyncio.Event()
        self._over.set()
        self._watches: set[asyncio.Task[None]] = set()
        self._messages = Messages(self.nodes)
        self._troubles: dict[str, list[str]] = {}
        self._reported_count = 0
        self._given_up: set[str] = set()
        self._bytes_before = 0
        """Number of bytes of srun's messages that an earlier supervisor has already reported."""

    async def start(self, port: int, ended: AgentEnded) -> None:
        """Start the step. Raises ResihpError if srun is missing."""
        command = step_command(self._request, f"{_bracketed(self.host)}:{port}", srun=self._srun)
        with open(self._messages_file, "wb", opener=private) as messages:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.DEVNULL,
                    stdout=messages,
                    stderr=messages,
                    env=step_environment(),
                    start_new_session=True,
                )
            except OSError as error:
                raise ResihpError(f"{self._srun}: {error.strerror}; is Slurm on the batch script's PATH?") from None
        write_private(self._pid_file, f"{process.pid}\n".encode())
        self._watch(self._until_exit(process, ended), ended)

    def adopt(self, node: str, pid: int, ended: AgentEnded) -> None:
        """Watch the step that an earlier supervisor on this machine started. The agents connect by themselves."""
        if self._watches:
            return
        handle = self._handle()
        if handle is not None:
            self._bytes_before = self._messages_file.stat().st_size
            self._watch(self._until_gone(handle), ended)

    def kill(self, node: str) -> None:
        """Stop waiting for the node's agent, which cannot be killed (see the module). Processes on a lost node are
        refused by their epoch."""
        self._given_up.add(node)
        if self._given_up.issuperset(self.nodes):
            self._report_troubles()  # `_listen` may not run again
            self._over.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the step, and so of all agents; return False after `timeout_s`. Returns True at once if
        no step can be observed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    # --- the step's process -----------------------------------------------------------------------------------

    def _watch(self, end: Coroutine[Any, Any, None], ended: AgentEnded) -> None:
        self._over.clear()
        self._watches = {asyncio.create_task(self._watch_end(end)), asyncio.create_task(self._listen(ended))}

    async def _watch_end(self, end: Coroutine[Any, Any, None]) -> None:
        try:
            await end
        finally:
            self._over.set()

    async def _until_exit(self, process: asyncio.subprocess.Process, ended: AgentEnded) -> None:
        status = await process.wait()
        with suppress(OSError):
            self._pid_file.unlink()
        if status != 0 and not self._messages.launched:
            self._read(ended)
            for node in self.nodes:
                ended(node, status)

    async def _until_gone(self, handle: int) -> None:
        """Wait for the exit of a process that is not a child process; its exit status cannot be observed."""
        loop, has_exited = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(handle, has_exited.set)
        try:
            await has_exited.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)

    def _handle(self) -> int | None:
        """Return a descriptor of the srun process that an earlier supervisor started; None if it no longer runs."""
        try:
            pid = int(self._pid_file.read_text())
            handle = os.pidfd_open(pid)
        except (OSError, ValueError):
            return None
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            command = []
        if os.fsencode(self._request.of_job.run_file) in command:
            return handle
        os.close(handle)  # the number is now another process's
        return None

    # --- srun's messages --------------------------------------------------------------------------------------

    async def _listen(self, ended: AgentEnded) -> None:
        quiet_s = 0.0
        while not self._over.is_set():
            await asyncio.sleep(LOOK_EVERY_S)
            quiet_s = 0.0 if self._read(ended) else quiet_s + LOOK_EVERY_S
            if quiet_s >= GATHER_WINDOW_S:
                self._report_troubles()
        self._read(ended)
        self._report_troubles()

    def _read(self, ended: AgentEnded) -> bool:
        """Read srun's new messages; return True if there were any."""
        try:
            with self._messages_file.open("rb") as file:
                file.seek(self._messages.bytes_read)
                new = file.read(1 << 16)
        except OSError:
            return False
        old = self._messages.bytes_read < self._bytes_before
        for message in self._messages.feed(new):
            for node, status in message.ends:
                if not old:
                    self._take_end(node, status)
                ended(node, status)
            if not message.ends and not old and self._reported_count < MAX_MESSAGES:
                self._reported_count += 1
                self._say("warning", message.text)
        return bool(new)

    def _take_end(self, node: str, status: int) -> None:
        request = self._request
        shared = "put RESIHP_HOME into a folder that all nodes share"
        if status in (NOT_LAUNCHED, NO_JOB_STATUS):
            path = request.of_job.logs if status == NOT_LAUNCHED else request.of_job.run_file
            self._troubles.setdefault(f"cannot open {path} there; {shared}", []).append(node)
        elif status == EXECVE_FAILED:
            trouble = f"cannot run {sys.executable} there; install resihp in a folder that all nodes share"
            self._troubles.setdefault(trouble, []).append(node)

    def _report_troubles(self) -> None:
        for trouble, nodes in self._troubles.items():
            some = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
            self._say("error", f"{'node' if len(nodes) == 1 else 'nodes'} {some}: {trouble}")
        self._troubles.clear()


class SrunLine:
    """One line of srun's output. `ends`: (node, exit status) of the agents with exits that the line reports; empty for
    other lines."""

    def __init__(self, text: str, ends: Sequence[tuple[str, int]] = ()) -> None:
        self.text = text
        self.ends = tuple(ends)


_TASKS = r"tasks? (?P<tasks>[\d,-]+)"
_EXITED = re.compile(rf"srun: error: (?P<hosts>\S+): {_TASKS}: Exited with exit code (?P<code>\d+)")
_SIGNALLED = re.compile(rf"srun: error: (?P<hosts>\S+): {_TASKS}: (?P<signal>[A-Z][A-Za-z0-9 /]*?)( \(core dumped\))?")
_FAILED = re.compile(rf"srun: error: {_TASKS} launch failed: (?P<reason>.*)")
_HARMLESS = ("lacks support for cpu binding", "srun: Force Terminated", "Node failure on", "STEP ", "JOB ")
"""Parts of Slurm's messages about nodes and about the end of the step, which are known from other sources."""
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals} | {"Out Of Memory": int(signal.SIGKILL)}
"""Signal numbers by the names that srun prints; srun prints the last name for a task which the kernel killed for its
memory limit."""


class Messages:
    """Parses srun's messages as they are written. Task i runs on the i-th node."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = tuple(nodes)
        self._rest = b""
        self.bytes_read = 0
        self.launched = False
        """Whether a message about a task was read, which shows that the step did start."""

    def feed(self, new: bytes) -> list[SrunLine]:
        self.bytes_read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [message for line in lines if (message := self._parse(line.decode(errors="replace").strip()))]

    def _parse(self, line: str) -> SrunLine | None:
        if match := _EXITED.fullmatch(line):
            return self._ends(line, match, int(match["code"]))
        if match := _FAILED.fullmatch(line):
            return self._ends(line, match, NOT_LAUNCHED)
        if (match := _SIGNALLED.fullmatch(line)) and match["signal"] in _SIGNALS:
            return self._ends(line, match, -_SIGNALS[match["signal"]])
        if not line or any(words in line for words in _HARMLESS):
            return None
        return SrunLine(line)

    def _ends(self, line: str, match: re.Match[str], status: int) -> SrunLine:
        self.launched = True
        return SrunLine(line, [(self._nodes[i], status) for i in indices(match["tasks"]) if i < len(self._nodes)])


def indices(text: str) -> list[int]:
    """Return the numbers in `0-2,5`; invalid parts are ignored."""
    numbers: list[int] = []
    for part in map(str.strip, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            numbers += range(int(first), min(int(last or first), int(first) + 100_000) + 1)
    return numbers


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
