"""Agents on the nodes of a Slurm allocation: one `srun` step that starts one on each, and what it says of their ends.

srun runs in a session of its own and writes to files on local disk, so it outlives the supervisor; one that is started
again finds it by its pid (`adopt`). Agents write their logs themselves, nothing of theirs goes through srun. How an
agent ended is read off srun's messages where it says so; that a *node* failed is Slurm's opinion, and not taken from
here: connections tell sooner. One node's part of a step cannot be killed by its user, except by the agent itself.

Used by the supervisor under Slurm, in place of `wrapper.launch.launcher.LocalLauncher`. Decides nothing.
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
from wrapper.config.run_spec import RunRequest
from wrapper.launch.launcher import EXECVE_FAILED, NO_JOB_STATUS, NOT_LAUNCHED, AgentEnded, own_environment
from wrapper.strict_modes import private, write_private

Say = Callable[[Literal["warning", "error"], str], None]

LOOK_EVERY_S = 0.25
GATHER_S = 1.0
"""Nodes with the same trouble are told of together, once no more come for so long."""
MOST_LINES = 20
"""Messages of srun that are passed on."""

_KEPT = re.compile(
    r"SLURM_(CONF|JOB_ID|JOBID|CLUSTERS|CLUSTER_NAME|WORKING_CLUSTER|RESTART_COUNT|SUBMIT_DIR|SUBMIT_HOST)"
    r"|SLURM_JOB_(USER|UID|GID|NAME|PARTITION|ACCOUNT|QOS|RESERVATION|START_TIME|END_TIME)"
    r"|SLURM_ARRAY_(JOB_ID|TASK_ID|TASK_COUNT|TASK_MIN|TASK_MAX|TASK_STEP)"
)
"""Of Slurm's variables: those that name the job. Others are options of srun, some of them stale after a node died."""


def step_environment() -> dict[str, str]:
    """Our environment for srun: nothing in it changes what the options say."""
    return {
        name: value
        for name, value in own_environment().items()
        if _KEPT.fullmatch(name) or not name.startswith(("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_"))
    }


def step_command(request: RunRequest, address: str, *, srun: str = "srun") -> list[str]:
    """One agent on each node, with all that the job has there. Each option overrules what Slurm would inherit."""
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
    run_file = str(request.of_job.run_file)
    agent = [
        sys.executable,
        "-P",
        "-m",
        "wrapper.agent.process",
        "--run",
        run_file,
        "--node",
        "-",
        "--supervisor",
        address,
    ]
    return [srun, *options, *agent]


class SlurmLauncher:
    """See the module. `say` gets what the user should know, a line at a time."""

    worker_environment: Mapping[str, str] = {}
    """Nothing: the workers' libraries find the interface by themselves, or by what the user has set."""

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
        self._told = 0
        self._given_up: set[str] = set()
        self._said_before = 0
        """How much of srun's messages an earlier supervisor has passed on."""

    async def start(self, port: int, ended: AgentEnded) -> None:
        """Start the step. Raises ResihpError when there is no srun."""
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
        """Watch the step that an earlier supervisor on this machine started; agents of it tell the rest."""
        if self._watches:
            return
        handle = self._handle()
        if handle is not None:
            self._said_before = self._messages_file.stat().st_size
            self._watch(self._until_gone(handle), ended)

    def kill(self, node: str) -> None:
        """Wait for it no more; it cannot be killed, see the module. What runs on a lost node is fenced by its epoch."""
        self._given_up.add(node)
        if self._given_up.issuperset(self.nodes):
            self._tell_troubles()  # whoever gathers them may not come to it any more
            self._over.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the step to end: for all agents. At once where there is no step that we could see."""
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
        """It is not our child: how it ends cannot be seen, only when."""
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(handle, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)

    def _handle(self) -> int | None:
        """A descriptor of the srun that an earlier supervisor started, if it still runs."""
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
        os.close(handle)  # the number is another process's by now
        return None

    # --- what it says -----------------------------------------------------------------------------------------

    async def _listen(self, ended: AgentEnded) -> None:
        quiet_s = 0.0
        while not self._over.is_set():
            await asyncio.sleep(LOOK_EVERY_S)
            quiet_s = 0.0 if self._read(ended) else quiet_s + LOOK_EVERY_S
            if quiet_s >= GATHER_S:
                self._tell_troubles()
        self._read(ended)
        self._tell_troubles()

    def _read(self, ended: AgentEnded) -> bool:
        """Take what srun has written since; True if there was something."""
        try:
            with self._messages_file.open("rb") as file:
                file.seek(self._messages.bytes_read)
                new = file.read(1 << 16)
        except OSError:
            return False
        old = self._messages.bytes_read < self._said_before
        for message in self._messages.feed(new):
            for node, status in message.ends:
                if not old:
                    self._take_end(node, status)
                ended(node, status)
            if not message.ends and not old and self._told < MOST_LINES:
                self._told += 1
                self._say("warning", message.text)
        return bool(new)

    def _take_end(self, node: str, status: int) -> None:
        request = self._request
        shared = "put RESIHP_HOME into a folder that all nodes share"
        if status in (NOT_LAUNCHED, NO_JOB_STATUS):
            what = request.of_job.logs if status == NOT_LAUNCHED else request.of_job.run_file
            self._troubles.setdefault(f"cannot open {what} there; {shared}", []).append(node)
        elif status == EXECVE_FAILED:
            trouble = f"cannot run {sys.executable} there; install resihp in a folder that all nodes share"
            self._troubles.setdefault(trouble, []).append(node)

    def _tell_troubles(self) -> None:
        for trouble, nodes in self._troubles.items():
            some = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
            self._say("error", f"{'node' if len(nodes) == 1 else 'nodes'} {some}: {trouble}")
        self._troubles.clear()


class SrunLine:
    """One line of srun: the agents whose end it tells, with their exit status; or else just its text."""

    def __init__(self, text: str, ends: Sequence[tuple[str, int]] = ()) -> None:
        self.text = text
        self.ends = tuple(ends)


_TASKS = r"tasks? (?P<tasks>[\d,-]+)"
_EXITED = re.compile(rf"srun: error: (?P<hosts>\S+): {_TASKS}: Exited with exit code (?P<code>\d+)")
_SIGNALLED = re.compile(rf"srun: error: (?P<hosts>\S+): {_TASKS}: (?P<signal>[A-Z][A-Za-z0-9 /]*?)( \(core dumped\))?")
_FAILED = re.compile(rf"srun: error: {_TASKS} launch failed: (?P<reason>.*)")
_HARMLESS = ("lacks support for cpu binding", "srun: Force Terminated", "Node failure on", "STEP ", "JOB ")
"""Slurm's opinion of nodes and its farewells come by other ways."""
_SIGNALS = {signal.strsignal(number): int(number) for number in signal.Signals} | {"Out Of Memory": int(signal.SIGKILL)}
"""The last is srun's word for a task that the kernel killed for its memory limit."""


class Messages:
    """srun's messages, as they are written. Task i runs on the i-th node."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = tuple(nodes)
        self._rest = b""
        self.bytes_read = 0
        self.launched = False
        """Whether anything was heard of a task, so that the step was more than a wish."""

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
    """Numbers in `0-2,5`; parts that are none are left out."""
    found: list[int] = []
    for part in map(str.strip, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), min(int(last or first), int(first) + 100_000) + 1)
    return found


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
