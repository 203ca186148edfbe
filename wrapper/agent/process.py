"""The agent: one process on each node. Starts workers, forwards messages, reports exits at once.

`python -P -m resihp.wrapper.agent.process --run FILE [--node N] --supervisor HOST:PORT`, started by a launcher. Without
`--node`, or with `-`, the node has the name that Slurm gives it. With `--lease N` the agent starts later, on a node
that Slurm gave in answer to request N for another node, and reads the supervisor's address from the job's folder. The
agent decides only one thing: if no supervisor leads for too long (`resihp.wrapper.agent.supervisor_link`), it ends its
workers and itself, so that no process outlives the job. With succession, agents keep copies of the journal, and one of
them starts a successor when the supervisor is gone (`resihp.wrapper.agent.succession.election`). A signal from outside
is reported to the supervisor, which decides what to do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import psutil

from resihp.errors import ConfigurationError, OwnershipError, ResihpError, UsageError
from resihp.process import Orphans, adopt_orphans, inherited_socket, name_process, raise_open_files
from resihp.protocol import messages as m
from resihp.settings import SCRIPT_ALONE_S
from resihp.wrapper.agent import inventory
from resihp.wrapper.agent.hangs.inspection import inspect
from resihp.wrapper.agent.hangs.nccl_status import nccl_status
from resihp.wrapper.agent.logs.log_mirror import LogMirror, print_to
from resihp.wrapper.agent.peers import Peers
from resihp.wrapper.agent.succession.journal_copy import Replica, local_place
from resihp.wrapper.agent.supervisor_link import LeaderLink
from resihp.wrapper.agent.workers import Workers
from resihp.wrapper.config import container
from resihp.wrapper.config.run_spec import RunRequest, load
from resihp.wrapper.job_folder import SupervisorFile
from resihp.wrapper.launch import preloading
from resihp.wrapper.launch.interfaces import of_workers
from resihp.wrapper.launch.launcher import NO_JOB_STATUS, NO_SUPERVISOR_STATUS

BEAT_S = 1.0
REAP_EVERY_S = 10.0
TERM_GRACE_S = 1.0
LAST_MESSAGES_TIMEOUT_S = 1.0
"""How long an agent that exits waits for the supervisor to acknowledge its last messages."""
STALL_S = 1.0
"""If a heartbeat is late by more than this, the agent itself was stopped or starved."""
SUCCESSOR_EXIT_TIMEOUT_S = 60.0
"""How long a supervisor that runs as a child process of this agent may take to exit after it has released the agent."""
REPORTED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT)
"""Signals from outside that an agent reports to the supervisor."""


class NoSupervisorError(ResihpError):
    """No supervisor ever answered this agent."""


class Agent:
    """The agent of one node. `run` returns when the agent is released or gives up. `logs`: folder for the logs of its
    processes."""

    def __init__(
        self,
        request: RunRequest,
        node: str,
        host: str,
        port: int,
        logs: Path,
        lease: int = 0,
        forks: socket.socket | None = None,
    ) -> None:
        job = request.of_job
        self._request = request
        self._node = node
        self._lease = lease
        self._incarnation = secrets.token_hex(8)
        self._machine = inventory.read(
            request.settings.gpus_per_node, container.of_workers(request.container, os.environ)
        )
        self._link = LeaderLink((host, port), job.key, self, succession=request.succession)
        self._replica: Replica | None = None
        self._peers: Peers | None = None
        if request.succession:
            self._replica = Replica(local_place(job) / f"{node}.copy")
            self._peers = Peers(
                node, job.run_file, job.key, self._replica, self._link, request.ports, self._incarnation
            )
        self._workers = Workers(request, node, logs, self._link.send, lambda: self.dismiss(0.0), forks)
        self._workers.processors = inventory.processors(self._machine, os.sched_getaffinity(0))
        self._needed = asyncio.Event()
        """Set once there are workers to start."""
        self._round_end: asyncio.Task[None] | None = None
        """The end of all workers that are to be started again."""
        self._inspection: asyncio.Task[None] | None = None
        self._fence: asyncio.Task[None] | None = None
        """The end of all workers that no supervisor watches."""
        self._stalled_until = 0.0
        """Time until which this process was stopped, if it was."""
        self._release: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Resolved when the agent is to exit, with the seconds of grace for its workers. A negative value: send workers
        SIGTERM first."""

    async def run(self) -> None:
        """Run the agent until its exit. Raises NoSupervisorError if no supervisor ever answered."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in REPORTED_SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is handled by the supervisor
        starting = asyncio.create_task(self._start_workers())
        conversing = asyncio.create_task(self._link.run())
        tasks = [conversing, asyncio.create_task(self._beat()), asyncio.create_task(self._reap())]
        if self._peers is not None:
            tasks += [asyncio.create_task(self._link.watch()), asyncio.create_task(self._peers.run())]
        reasons_to_go: list[asyncio.Future[Any]] = [*tasks, self._release]
        await asyncio.wait(reasons_to_go, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, starting):
            if task.done():
                task.result()  # a bug in one of them ends the agent, with a traceback
        starting.cancel()
        successor = None if self._peers is None else self._peers.successor
        if self._peers is not None:
            self._peers.retire()
        await self._workers.end(
            self._release.result() if self._release.done() else -TERM_GRACE_S,
            spare=None if successor is None else successor.pid,
        )
        if not conversing.done():
            await self._link.flush_and_close(conversing, LAST_MESSAGES_TIMEOUT_S)
        if successor is not None:
            await asyncio.wait(tasks[-1:], timeout=SUCCESSOR_EXIT_TIMEOUT_S)
        if self._peers is not None:
            self._peers.close()
        for task in tasks:
            task.cancel()
        if self._link.trouble and not self._link.welcome:
            raise NoSupervisorError(self._link.trouble)

    # --- requests of the link to the leader -------------------------------------------------------------------

    @property
    def log(self) -> int:
        return 0 if self._replica is None else self._replica.log

    async def introduce(self, own_host: str) -> m.Join:
        if "SLURM_JOB_ID" in os.environ:
            self._choose_interface(own_host)
        return m.Join(
            node=self._node,
            peer_port=await self._peers.listen(own_host) if self._peers is not None else 0,
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=self._request.settings.gpus_per_node,
            lease=self._lease,
            hardware=hardware(),
            machine=self._machine,
            incarnation=self._incarnation,
            epoch=max(1, self._workers.epoch) if self._link.welcome else 0,
            meeting_port=self._workers.meeting_port,
        )

    def _choose_interface(self, own_host: str) -> None:
        """Choose the network interface of the workers: as set in the user's environment, else as configured, else the
        interface of the agent's own address."""
        set_by_user = os.environ.keys() & {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
        if self._request.interface and len(set_by_user) < 2:
            try:
                self._workers.network = of_workers(self._request.interface)
            except ConfigurationError as error:
                self._workers.obstacle = str(error)
        elif "GLOO_SOCKET_IFNAME" not in set_by_user:
            self._workers.network = network_of(own_host)

    async def _start_workers(self) -> None:
        """Start the fork server once there are workers to start, which is after all agents have joined: its imports
        take longer than the whole start of an agent, and would delay it."""
        await self._needed.wait()
        await self._workers.start()

    def inventory(self) -> m.Inventory:
        return self._workers.inventory()

    def obey(self, order: m.AgentOrder) -> None:
        match order:
            case m.Spawn():
                self._needed.set()
                self._workers.spawn(order)
            case m.InspectWorkers():
                self._inspection = asyncio.create_task(self._inspect(order.asks_nccl))
            case m.EndRound():
                self._end_round(order)
            case m.ToWorkers():
                self._workers.order(order)
            case m.Published():
                self._workers.published(order)
            case m.HangUp():
                self._workers.hang_up(order.rank, order.reason)
            case m.Signal():
                self._workers.signal(order.rank, order.signal)
            case m.Replicate() if self._replica is not None:
                self._replica.apply(order)
                self._workers.committed(self._replica.membership.committed)
            case m.Roster() if self._peers is not None:
                self._peers.roster(order)
            case m.KillNode():
                os.killpg(0, order.signal)
            case m.Release():
                self.dismiss(order.grace_s)
            case _:
                pass

    async def _inspect(self, asks_nccl: bool) -> None:
        """Report the state and the stack of each worker, and the answer of NCCL's service if asked for it."""
        workers = self._workers
        nccl = asyncio.create_task(nccl_status(os.environ)) if asks_nccl else None
        looks = await inspect(workers.pids, workers.signal, workers.idleness)
        self._link.send(m.WorkersInspected(looks=looks, nccl="" if nccl is None else await nccl))

    def _end_round(self, order: m.EndRound) -> None:
        """End all workers, then tell the supervisor. An order that a new supervisor repeats meanwhile is answered with
        the first."""
        if self._round_end is None or self._round_end.done():
            self._round_end = asyncio.create_task(self._workers.end_round(order.round, order.grace_s))

    def dismiss(self, grace_s: float) -> None:
        if not self._release.done():
            self._release.set_result(grace_s)

    # --- by itself --------------------------------------------------------------------------------------------

    def _signalled(self, number: signal.Signals) -> None:
        print(f"received {number.name} from outside", flush=True)
        if number == signal.SIGTERM and not self._link.welcome:
            self.dismiss(-TERM_GRACE_S)  # there is no supervisor to decide
        else:
            self._link.send(m.Signalled(signal=int(number)))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._link.send(self._workers.beat())
            if loop.time() - due > STALL_S:
                self._stalled_until = time.monotonic()  # the agent was stopped, and the supervisor not silent
            self._fence_script()
            due = max(due + BEAT_S, loop.time())
            await asyncio.sleep(due - loop.time())

    def _fence_script(self) -> None:
        """End the workers of a script without a supervisor, which may start them again elsewhere."""
        alone_s = time.monotonic() - max(self._link.heard_at, self._stalled_until)
        if alone_s > SCRIPT_ALONE_S and (self._fence is None or self._fence.done()):
            reason = f"no message of a supervisor for {alone_s:.0f} s"
            self._fence = asyncio.create_task(self._workers.end_alone(reason))

    async def _reap(self) -> None:
        """Reap orphaned processes regularly. In a thread, because going through the processes of a busy node takes a
        while."""
        orphans = Orphans()
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            await asyncio.to_thread(orphans.reap)


def network_of(own_host: str) -> dict[str, str]:
    """Return the variables that make workers use the network interface with this address; empty if no interface has
    it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own_host for entry in addresses):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def hardware(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Return the models of the node's GPUs, from the driver's files. This starts no process, and sees all GPUs."""
    try:
        texts = [(gpu / "information").read_text(errors="replace") for gpu in driver.iterdir()]
    except OSError:
        return ""
    lines = [line.partition(":") for text in texts for line in text.splitlines()]
    return " and ".join(sorted({value.strip() for name, _, value in lines if name.strip() == "Model"}))


def node_name(requested: str) -> str:
    """Return the node's name; `-` means Slurm's name of the node. Raises UsageError if Slurm does not set it."""
    name = os.environ.get("SLURMD_NODENAME", "") if requested == "-" else requested
    if not name:
        raise UsageError("SLURMD_NODENAME is not set: start the agent by srun, or name its node with --node")
    return name


def run(request: RunRequest, node: str, address: str, lease: int, forks: socket.socket | None = None) -> None:
    """Run the agent. With succession, logs are written to the node's own disk, so that a hung folder does not stop the
    processes that write them."""
    host, _, port = (address or _address_of(request)).rpartition(":")

    async def live(logs: Path) -> None:
        await Agent(request, node, host.strip("[]"), int(port), logs, lease, forks).run()

    job = request.of_job
    if not request.succession:
        asyncio.run(live(job.logs))
        return
    logs = local_place(job) / "logs"
    mirror = LogMirror(node, logs, job.logs)
    print_to(logs / f"{node}.agent.log")
    try:
        asyncio.run(live(logs))
    except ResihpError as error:
        print(f"agent {node}: {error}", flush=True)
        sys.exit(_status_of(error))
    except Exception:  # noqa: BLE001 - printed to the log that is still being copied
        traceback.print_exc()
        sys.exit(1)
    finally:
        mirror.close()


def _address_of(request: RunRequest) -> str:
    """Return the supervisor's current address from the job's folder. Raises UsageError if it is not recorded there."""
    file = request.of_job.supervisor_file
    try:
        address = msgspec.json.decode(file.read_bytes(), type=SupervisorFile)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"job {request.job}: {file} does not have the supervisor's address: {error}") from error
    return f"{address.host}:{address.port}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="resihp.wrapper.agent.process")
    parser.add_argument("--run", required=True, type=Path, help="the job's run.json")
    parser.add_argument("--node", default="-", help="this node's name; -: from Slurm (SLURMD_NODENAME)")
    parser.add_argument("--supervisor", default="", help="host:port; if left out, from the job's folder")
    parser.add_argument("--lease", type=int, default=0, help="number of the request for a node that this node answers")
    parser.add_argument("--forks", type=int, help="inherited socket to a fork server; if left out, one is started")
    options = parser.parse_args(arguments)
    node = options.node
    raise_open_files()
    try:
        node = node_name(options.node)
        request = _load(options.run)
        name_process(request.job, f"agent {node}", keep=6)  # keeps run file and node, by which agents are found
        forks = preloading.for_agent(request, node) if options.forks is None else inherited_socket(options.forks)
        run(request, node, options.supervisor, options.lease, forks)
    except _NoJobError as error:
        print(f"agent {node}: {error}", file=sys.stderr)
        sys.exit(NO_JOB_STATUS)
    except (ResihpError, msgspec.MsgspecError) as error:
        print(f"agent {node}: {error}", file=sys.stderr)
        sys.exit(_status_of(error))


def _status_of(error: Exception) -> int:
    return NO_SUPERVISOR_STATUS if isinstance(error, NoSupervisorError) else 1


class _NoJobError(Exception):
    """The job's folder, or its run file, cannot be read on this node."""


def _load(path: Path) -> RunRequest:
    try:
        request = load(path)
        request.of_job.key  # noqa: B018 - raises if it is missing
    except OwnershipError as error:
        raise _NoJobError(str(error)) from error
    except (UsageError, OSError) as error:
        raise _NoJobError(f"{error}; is the job's folder on a file system that all nodes share?") from error
    return request


if __name__ == "__main__":
    main()
