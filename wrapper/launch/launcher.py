"""Launchers start agents and report their exits at once. `LocalLauncher` starts them as processes of this machine, on
virtual nodes.

Used only by the supervisor. Under Slurm, `resihp.wrapper.launch.slurm_launcher` does the same with one `srun` step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from resihp.protocol.channels import LocalChannel
from resihp.slurm import command_call
from resihp.worker.requests import Serve
from resihp.wrapper.job_folder import Job
from resihp.wrapper.strict_modes import private

NO_JOB_STATUS = 3
"""Exit status of an agent that cannot read the run file, because the job's folder does not exist on its node."""
NO_SUPERVISOR_STATUS = 4
"""Exit status of an agent that no supervisor ever answered."""
EXECVE_FAILED = 2
"""Exit status that slurmstepd reports for a task whose program cannot be started on its node."""
NOT_LAUNCHED = 127
"""Status of an agent that slurmd refused to start, with a reason."""
CANNOT_START = frozenset({NO_JOB_STATUS, EXECVE_FAILED, NOT_LAUNCHED})
"""Exit statuses that another start on the same node would have again."""

AgentEnded = Callable[[str, int | None], None]
"""Callback in the event loop, with the node and its agent's exit status: negative for a signal, None if it is
unknown."""


class Launcher(Protocol):
    """Starts one agent for each node of the job."""

    host: str
    """The one address on which the supervisor listens."""

    nodes: tuple[str, ...]

    worker_environment: Mapping[str, str]
    """Network settings for the workers' libraries."""

    async def start(self, port: int, ended: AgentEnded) -> None:
        """Start all agents; they connect to `host`:`port`."""

    def adopt(self, node: str, pid: int, ended: AgentEnded) -> None:
        """Take over an agent that an earlier supervisor started. Called instead of `start`."""

    def kill(self, node: str) -> None:
        """Kill every process of the node with SIGKILL. No error if none is left."""

    async def wait(self, timeout_s: float) -> bool:
        """Wait for all agents to exit; return False if some are still running after `timeout_s`."""


def own_environment() -> dict[str, str]:
    """Return the environment of resihp's own processes: the user's, without Python modules of the user that could
    shadow resihp's."""
    return command_call.own_environment(os.environ)


class LocalLauncher:
    """Launcher for virtual nodes n1..nN, each with an agent in its own process group."""

    host = "127.0.0.1"
    worker_environment: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo"}

    def __init__(self, job: Job, run_file: Path, nodes: int, preloading: socket.socket | None = None) -> None:
        """`preloading`: socket of the process that forks a fork server for each node
        (`resihp.wrapper.launch.preloading`); None if there is none."""
        self._preloading = None if preloading is None else LocalChannel(preloading)
        self._job = job
        self._run_file = run_file
        self.nodes = tuple(f"n{i + 1}" for i in range(nodes))
        self._groups: dict[str, int] = {}
        self._watches: set[asyncio.Task[None]] = set()

    async def start(self, port: int, ended: AgentEnded) -> None:
        for node in self.nodes:
            process = await self._start(node, port)
            self._groups[node] = process.pid
            self._watches.add(asyncio.create_task(self._watch(node, process, ended)))
        if self._preloading is not None:
            self._preloading.close()

    async def _start(self, node: str, port: int) -> asyncio.subprocess.Process:
        command = [
            sys.executable,
            "-P",
            "-m",
            "resihp.wrapper.agent.process",
            "--run",
            str(self._run_file),
            "--node",
            node,
        ]
        command += ["--supervisor", f"{self.host}:{port}"]
        agents, servers = socket.socketpair()
        forks = () if self._preloading is None else (agents.fileno(),)
        with agents, servers, open(self._job.logs / f"{node}.agent.log", "ab", opener=private) as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                *(f"--forks={number}" for number in forks),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=own_environment(),
                process_group=0,
                pass_fds=forks,
            )
            if self._preloading is not None:
                log_of_server = str(self._job.logs / f"{node}.forkserver.log")
                order = Serve(group=process.pid, log=log_of_server, job=self._job.name, node=node)
                with suppress(OSError):  # that process has ended: the agent will notice
                    self._preloading.send(order, [servers.fileno()])
        return process

    def adopt(self, node: str, pid: int, ended: AgentEnded) -> None:
        """Take over an agent that is not a child process. Its exit can be observed, but not its exit status."""
        if node not in self.nodes or node in self._groups:
            return
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # its connection is about to close
        self._groups[node] = pid
        self._watches.add(asyncio.create_task(self._watch_adopted(node, handle, ended)))

    def kill(self, node: str) -> None:
        group = self._groups.get(node)
        if group is not None:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        if not self._watches:
            return True
        _, pending = await asyncio.wait(self._watches, timeout=timeout_s)
        return not pending

    async def _watch(self, node: str, process: asyncio.subprocess.Process, ended: AgentEnded) -> None:
        self._ended(node, await process.wait(), ended)

    async def _watch_adopted(self, node: str, handle: int, ended: AgentEnded) -> None:
        loop = asyncio.get_running_loop()
        has_exited = asyncio.Event()
        loop.add_reader(handle, has_exited.set)
        try:
            await has_exited.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        self._ended(node, None, ended)

    def _ended(self, node: str, status: int | None, ended: AgentEnded) -> None:
        self.kill(node)  # processes that an agent leaves behind are useless without it
        del self._groups[node]  # the number may be another process's from here on
        ended(node, status)


class Followers:
    """The launcher of a successor, which has started no agents and cannot kill any: it only has their connections.

    `nodes`: the nodes in the journal.
    """

    worker_environment: Mapping[str, str] = {}

    def __init__(self, host: str, nodes: tuple[str, ...]) -> None:
        self.host = host
        self.nodes = nodes
        self._there: dict[str, asyncio.Event] = {}

    async def start(self, port: int, ended: AgentEnded) -> None:
        raise AssertionError("a successor starts no agents")

    def adopt(self, node: str, pid: int, ended: AgentEnded) -> None: ...

    def kill(self, node: str) -> None: ...

    async def wait(self, timeout_s: float) -> bool:
        return True
