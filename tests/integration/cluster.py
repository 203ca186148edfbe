"""A private Slurm cluster on this machine: real slurmctld, slurmd and munged, everything under one folder, for tests.

    with Cluster(nodes=4, gpus=2) as cluster:
        slurm = CommandLine(environment=cluster.environment)
        cluster.kill_node("n3")

Nodes are called n1, n2, ... and have addresses of their own (127.0.1.1, ... or, with `network`, 10.99.0.1, ...). GPUs
are pretended. `shared` is a folder that all nodes and all users can write, as a cluster's shared file system.

`release` names another Slurm than the installed one, such as "24.11" (`tests.integration.slurm_releases`). With `dbd`
it has accounting (`tests.integration.slurm_accounts`).

Nothing of this machine's own Slurm is used or touched. `down` ends all that was started, whoever started it. Tests get
one by the fixture `cluster` (tests/conftest.py), which also skips where the programs are missing: `requires_slurm`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

import pytest

from tests.integration import slurm_accounts, slurm_conf, slurm_releases
from tests.integration.boxes import Box, listening, namespaces_allowed
from tests.integration.polling import pause

PROGRAMS = ("slurmctld", "slurmd", "munged", "scontrol", "sinfo", "squeue", "sbatch", "scancel", "srun")
COMMANDS = ("scontrol", "sinfo", "squeue", "sbatch", "scancel", "srun", "salloc", "sacct", "sacctmgr")
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
"""Where the daemons are, also for a user whose PATH lacks them."""

HEAD_ADDRESS = "10.99.1.1"
"""Of slurmctld in a cluster with a network of its own."""

Ending = Literal["terminate", "kill", "freeze"]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])


def requires_slurm(*, isolate: bool = False, network: bool = False, release: str = "", dbd: bool = False) -> None:
    """Skip the test, saying why, where no private cluster can be started."""
    if release and not slurm_releases.is_here(release):
        pytest.skip(f"Slurm {release} is not in {slurm_releases.FOLDER}; try: sudo make setup-system")
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)} missing); try: sudo make setup-system")
    if dbd and (missing := slurm_accounts.missing(_path())):
        pytest.skip(f"no accounting without {', '.join(missing)}; try: sudo make setup-system")
    if os.geteuid() != 0:
        pytest.skip("a private Slurm cluster needs root: slurmd changes to the user of a job")
    if (isolate or network) and not namespaces_allowed():
        pytest.skip("this machine does not allow namespaces of our own (a container without CAP_SYS_ADMIN?)")
    if network and shutil.which("ip", path=_path()) is None:
        pytest.skip("the command ip is not installed; try: apt-get install iproute2")


class ClusterError(Exception):
    """The cluster did not do what a test needs; the message ends with the daemons' last lines."""


class Cluster:
    """See the module. `isolate`: namespaces per node; None is wherever they are allowed.

    `settings` are lines of slurm.conf that replace or add to ours. `health_check` is run as root on each node, every
    `health_check_s` seconds. `gpu_type` names the model of all GPUs, or by node, `features` what each node has. A node
    with `node_gpus` of its own has as many instead of `gpus`. `dbd`: with accounting. `files` are further ones beside
    slurm.conf, by name.
    """

    def __init__(
        self,
        *,
        nodes: int = 4,
        gpus: int = 0,
        cpus: int = 16,
        memory_mb: int = 16000,
        isolate: bool | None = None,
        network: bool = False,
        settings: Mapping[str, str] | None = None,
        health_check: Path | None = None,
        health_check_s: int = 1,
        release: str = "",
        gpu_type: str | Mapping[str, str] = "",
        features: Mapping[str, str] | None = None,
        node_gpus: Mapping[str, int] | None = None,
        dbd: bool = False,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.release = release
        self.dbd = dbd
        self._gpu_type = gpu_type
        self._features = dict(features or {})
        self._node_gpus = dict(node_gpus or {})
        self._files = dict(files or {})
        self.nodes = tuple(f"n{i + 1}" for i in range(nodes))
        self.gpus = gpus
        self.cpus = cpus
        self.memory_mb = memory_mb
        self.network = network
        self.isolated = namespaces_allowed() if isolate is None else isolate or network
        self.settings = dict(settings or {})
        if health_check is not None:
            self.settings = {
                "HealthCheckProgram": str(health_check),
                "HealthCheckInterval": str(health_check_s),
                "HealthCheckNodeState": "ANY",
                **self.settings,
            }
        # Not pytest's own folder: ordinary users cannot look into that, and the paths of sockets must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="resihp-slurm-"))
        self.folder.chmod(0o755)
        self.shared = self.folder / "shared"
        for name in ("log", "run", "state", "spool", "dev", "shared"):
            (self.folder / name).mkdir()
        self.shared.chmod(0o1777)
        self.configuration = self.folder / "slurm.conf"
        self._hosts = self.folder / "hosts"
        self._head: Box | None = None
        self._boxes: dict[str, Box] = {}
        self._munged: subprocess.Popen[bytes] | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self._slurmds: dict[str, subprocess.Popen[bytes]] = {}
        self._port = 0

    # What a test needs to use it.

    @property
    def environment(self) -> dict[str, str]:
        """For a program that is to use this cluster; without what another cluster left in ours."""
        foreign = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SQUEUE", "SINFO", "SCONTROL")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        return {**kept, "PATH": self._path, "SLURM_CONF": str(self.configuration)}

    @property
    def _path(self) -> str:
        own = [str(slurm_releases.programs(self.release))] if self.release else []
        return os.pathsep.join([*own, _path()])

    def address(self, node: str) -> str:
        return f"{'10.99.0' if self.network else '127.0.1'}.{self.nodes.index(node) + 1}"

    def as_user(self, user: str = "nobody") -> list[str]:
        """What to write in front of a command to run it as an ordinary user, with a home of its own."""
        entry = pwd.getpwnam(user)
        home = self.folder / "home" / user
        if not home.exists():
            home.mkdir(parents=True)
            os.chown(home, entry.pw_uid, entry.pw_gid)
        ids = [f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
        return ["setpriv", *ids, "--", "env", f"HOME={home}", f"USER={user}", f"LOGNAME={user}"]

    def on(self, node: str | None = None) -> list[str]:
        """What to write in front of a command to run it on a node; without one, where users log in."""
        box = self._boxes[node] if node is not None else self._head
        if box is None or (node is None and not self.network):
            return []
        return [*box.enter(), "env", f"--chdir={self.shared}"]

    def commands(self, user: str | None = None) -> Path:
        """A folder with Slurm's commands as they run for this user where users log in: for `CommandLine(bin=...)`."""
        folder = self.folder / "commands" / (user or "root")
        folder.mkdir(parents=True, exist_ok=True)
        before = " ".join([*self.on(), *(self.as_user(user) if user else [])])
        for name in COMMANDS:
            script = folder / name
            script.write_text(f'#!/bin/sh\nexec {before} {shutil.which(name, path=self._path)} "$@"\n')
            script.chmod(0o755)
        return folder

    def run(
        self, *argv: str, user: str | None = None, node: str | None = None, check: bool = True, timeout_s: float = 30
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as a user (root without one), on a node (where users log in without one)."""
        done = subprocess.run(
            [*self.on(node), *(self.as_user(user) if user else []), *argv],
            env=self.environment,
            cwd=self.shared,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode != 0:
            raise ClusterError(f"{argv[0]} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
        return done

    def wait(self, until: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
        """Wait for something; it is an error if it does not come."""
        began = time.monotonic()
        deadline = began + timeout_s
        while not until():
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {timeout_s:g} s for {what}\n{self.last_words()}")
            pause(began, 0.05)
            began = time.monotonic()

    def states(self) -> dict[str, str]:
        """Each node's state as sinfo writes it, in lower case: `idle`, `down*`, `drained`, ..."""
        done = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return dict(line.split() for line in done.stdout.splitlines())

    def wait_state(self, node: str, *states: str, timeout_s: float = 60) -> None:
        """Wait until Slurm says one of these states of a node."""
        self.wait(lambda: self.states().get(node) in states, f"{node} to be {' or '.join(states)}", timeout_s)

    def pids(self, node: str) -> list[int]:
        """Processes on a node, slurmd included, as the host sees them."""
        return self._boxes[node].pids()

    def slurmd_pid(self, node: str) -> int | None:
        """slurmd's process as the host sees it; None when it does not run."""
        process = self._slurmds.get(node)
        return None if process is None else self._boxes[node].program(process)

    def last_words(self, lines: int = 15) -> str:
        """The ends of the daemons' logs, for the message of a failed test."""
        texts = []
        for log in sorted((self.folder / "log").iterdir()):
            end = log.read_text(errors="replace").splitlines()[-lines:]
            texts.append(f"--- {log.name}\n" + "\n".join(end))
        return "\n".join(texts)

    # Life and death of all of it.

    def __enter__(self) -> Cluster:
        return self.up()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def up(self) -> Cluster:
        """Start all of it, and wait until every node is idle."""
        try:
            for attempt in range(3):
                self._port = random.randrange(10000, 30000) if self.network else _free_ports(len(self.nodes) + 2)
                self._write_configuration()
                self._head = self._box("head", {"RESIHP_TEST_HEAD": str(self.folder)})
                self._boxes = {node: self._box(node, self._marks(node)) for node in self.nodes}
                for box in (self._head, *self._boxes.values()):
                    box.ready()
                if self.network:
                    self._head.ip(
                        "link set lo up",
                        "link add bridge type bridge",
                        f"address add {HEAD_ADDRESS}/16 dev bridge",
                        "link set bridge up",
                        "link add island type bridge",
                        "link set island up",
                    )
                    self._connect(self.nodes)
                self._start_munged()
                try:
                    if self.dbd:
                        self._start_accounts()
                    self.start_controller()
                    break
                except ClusterError:
                    # Somebody took a port between our look and slurmctld's: another choice.
                    if attempt == 2:
                        raise
                    self._stop_all()
            for node in self.nodes:
                self._start_slurmd(node)
            ready = {"idle"}
            self.wait(lambda: set(self.states().values()) == ready and self._registered(), "all nodes to be idle")
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End everything and remove the folder. May be called twice."""
        self._stop_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Faults.

    def kill_node(self, node: str) -> None:
        """The node loses power: slurmd and everything that runs there is gone when this returns."""
        self._boxes[node].kill()
        self._slurmds.pop(node, None)

    def stop_node(self, node: str) -> None:
        """The node hangs: its processes are stopped, its connections stay."""
        self._boxes[node].signal(signal.SIGSTOP)

    def cont_node(self, node: str) -> None:
        self._boxes[node].signal(signal.SIGCONT)

    def kill_slurmd(self, node: str) -> None:
        """Only slurmd dies; jobs on the node run on."""
        pid = self.slurmd_pid(node)
        assert pid is not None, f"no slurmd runs on {node}"
        os.kill(pid, signal.SIGKILL)
        self._slurmds.pop(node).wait()

    def start_node(self, node: str) -> None:
        """Start what is missing: a node after `kill_node`, slurmd after `kill_slurmd`. Returns when slurmd listens."""
        if not self._boxes[node].alive:
            self._boxes[node] = self._box(node, self._marks(node))
            self._boxes[node].ready()
            if self.network:
                self._connect([node])
        if self.slurmd_pid(node) is None:
            self._start_slurmd(node)

        def up() -> bool:
            pid = self.slurmd_pid(node)
            return pid is not None and listening(pid, self.slurmd_port(node))

        self.wait(up, f"slurmd on {node}")

    def stop_controller(self, how: Ending = "terminate") -> None:
        """slurmctld ends in order, or is killed, or hangs: then commands get no answer until their own timeout."""
        assert self._head is not None
        assert self._controller is not None, "slurmctld does not run"
        pid = self._head.program(self._controller)
        assert pid is not None, "slurmctld does not run"
        if how == "freeze":
            os.kill(pid, signal.SIGSTOP)
            return
        os.kill(pid, signal.SIGTERM if how == "terminate" else signal.SIGKILL)
        try:
            self._controller.wait(timeout=20)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"slurmctld does not end\n{self.last_words()}") from None

    def start_controller(self) -> None:
        """Start slurmctld, with the state that it had, or let a frozen one go on. Returns when it listens."""
        assert self._head is not None
        pid = None if self._controller is None else self._head.program(self._controller)
        if pid is not None:
            self._head.signal(signal.SIGCONT)
            return
        argv = ["slurmctld", "-D", "-f", str(self.configuration)]
        started = self._controller = self._head.start(
            argv, environment=self.environment, log=self.folder / "log" / "slurmctld.out"
        )

        def up() -> bool:
            if started.poll() is not None:
                raise ClusterError(f"slurmctld ended with {started.returncode}\n{self.last_words()}")
            pid = self._head.program(started) if self._head is not None else None
            return pid is not None and listening(pid, self._port)

        self.wait(up, "slurmctld to listen")

    def partition(self, *nodes: str) -> None:
        """Cut nodes off: they reach each other, and nobody else, as behind a dead uplink. Needs `network`."""
        self._plug(nodes, "island")

    def heal(self, *nodes: str) -> None:
        self._plug(nodes, "bridge")

    # How it is made.

    def _box(self, name: str, marks: Mapping[str, str]) -> Box:
        over = slurm_releases.programs(self.release) if self.release else None
        return Box(name, hosts=self._hosts, marks=marks, isolated=self.isolated, network=self.network, over=over)

    def _marks(self, node: str) -> dict[str, str]:
        # Slurm sets both for every process of a job, too.
        return {"SLURM_CONF": str(self.configuration), "SLURMD_NODENAME": node}

    def slurmd_port(self, node: str) -> int:
        return self._port + 1 + self.nodes.index(node)

    def _start_munged(self) -> None:
        assert self._head is not None
        key = self.folder / "munge.key"
        if not key.exists():
            key.touch(0o600)
            key.write_bytes(os.urandom(128))
        run, log = self.folder / "run", self.folder / "log"
        files = {"socket": run / "munge", "pid-file": run / "munged.pid", "seed-file": run / "munged.seed"}
        files |= {"key-file": key, "log-file": log / "munged.log"}
        argv = ["munged", "--foreground", "--force", "--num-threads=2", *(f"--{k}={v}" for k, v in files.items())]
        self._munged = self._head.start(argv, environment=self.environment, log=log / "munged.out")
        self.wait(lambda: (run / "munge").exists(), "munged")

    def _start_accounts(self) -> None:
        assert self._head is not None
        plugins = slurm_releases.plugins(self.release) if self.release else None
        box, environment, wait = self._head, self.environment, self.wait
        slurm_accounts.start(box, self.folder, self._accounts_port, plugins=plugins, environment=environment, wait=wait)
        self.run("sacctmgr", "-i", "add", "cluster", slurm_conf.NAME)

    @property
    def _accounts_port(self) -> int:
        return self._port + 1 + len(self.nodes)

    def _start_slurmd(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        argv = ["slurmd", "-D", "-f", str(self.configuration), "-N", node]
        if self.release:
            argv += ["-d", str(slurm_releases.programs(self.release) / "slurmstepd")]
        log = self.folder / "log" / f"slurmd.{node}.out"
        self._slurmds[node] = self._boxes[node].start(argv, environment=self.environment, log=log)

    def _registered(self) -> bool:
        """Nodes of a new cluster are idle only after they have told what they have, but slurmd may still be busy."""
        return all(
            (pid := self.slurmd_pid(node)) is not None and listening(pid, self.slurmd_port(node)) for node in self.nodes
        )

    def _connect(self, nodes: Iterable[str]) -> None:
        """Give nodes a cable each to the bridge that stands where users log in and slurmctld runs."""
        assert self._head is not None
        for node in nodes:
            box = self._boxes[node]
            # A node that was killed may have left its end of the old cable for a moment.
            with contextlib.suppress(RuntimeError):
                self._head.ip(f"link del {node}-port")
            self._head.ip(
                f"link add {node}-port type veth peer name eth0 netns {box.first}",
                f"link set {node}-port master bridge up",
            )
            box.ip("link set lo up", f"address add {self.address(node)}/16 dev eth0", "link set eth0 up")

    def _plug(self, nodes: Iterable[str], bridge: str) -> None:
        assert self.network, "nodes without a network of their own cannot be cut off: cluster(network=True)"
        assert self._head is not None
        self._head.ip(*(f"link set {node}-port master {bridge}" for node in nodes))

    def _stop_all(self) -> None:
        boxes = [*self._boxes.values(), *([self._head] if self._head is not None else [])]
        self._boxes, self._head = {}, None
        self._slurmds.clear()
        self._controller = self._munged = None
        for box in boxes:
            box.kill()

    def _write_configuration(self) -> None:
        addresses = {node: self.address(node) for node in self.nodes}
        head = HEAD_ADDRESS if self.network else "127.0.0.1"
        names = {"localhost": "127.0.0.1", "head": head, **addresses}
        self._hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        host = f"{'head' if self.isolated else 'localhost'}({head})"
        accounts = slurm_accounts.settings(self.folder, head, self._accounts_port) if self.dbd else {}
        settings = {**slurm_conf.usual(self.folder, host, self._port), **accounts, **self.settings}
        if self.release:
            settings = {"PluginDir": str(slurm_releases.plugins(self.release)), **settings}
        nodes = [
            slurm_conf.node(
                node,
                host=node if self.isolated else "localhost",
                address=self.address(node),
                port=self.slurmd_port(node),
                cpus=self.cpus,
                memory_mb=self.memory_mb,
                gpus=self._node_gpus.get(node, self.gpus),
                gpu_type=self._type_of(node),
                features=self._features.get(node, ""),
            )
            for node in self.nodes
        ]
        self.configuration.write_text(slurm_conf.text(settings, nodes))
        kinds = {node: (self._type_of(node), self._node_gpus.get(node, self.gpus)) for node in self.nodes}
        (self.folder / "gres.conf").write_text(slurm_conf.devices(self.folder / "dev", kinds))
        for name, text in self._files.items():
            (self.folder / name).write_text(text)
        if settings["AuthType"] == "auth/slurm":
            key = self.folder / "slurm.key"
            key.touch(0o600)
            key.write_bytes(os.urandom(1024))
        # Newer releases look for control groups unless told not to; older ones do not read it.
        plugin = "cgroup/v1" if settings["ProctrackType"] == "proctrack/cgroup" else "disabled"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n" if self.release else "")

    def _type_of(self, node: str) -> str:
        return self._gpu_type if isinstance(self._gpu_type, str) else self._gpu_type.get(node, "")


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the system itself gives out."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choices: Sequence[int] = random.sample(range(10000, lowest - count), 200)
    for first in choices:
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, each in enumerate(sockets):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.bind(("", first + offset))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise ClusterError(f"no {count} free ports in a row")
