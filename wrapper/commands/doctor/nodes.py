"""Checks of `resihp doctor` on all nodes of an allocation: Slurm starts one probe for each node, and each probe reports
its results.

A probe prints its results in one line on stdout, and connects back to the doctor, as an agent would connect to its
supervisor. This shows that the port can be reached, and the clocks of both are compared over the connection. A node
that does not answer is a result, too. `main` is the program of the probe.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from resihp.wrapper.commands.doctor.machine import CheckResult, Outcome, gpus, limits
from resihp.wrapper.commands.doctor.places import health_command, journal, nearest
from resihp.wrapper.launch.interfaces import meant, missing, present
from resihp.wrapper.launch.ports import Ports, listen

if TYPE_CHECKING:
    from resihp.slurm.client import Slurm
    from resihp.slurm.survey import Survey
    from resihp.wrapper.launch.allocation import Allocation

PROBE_PREFIX = "resihp-doctor "
"""Prefix of the line that a probe prints. Other lines, such as a node's login messages, are ignored."""
PROBE_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
CLOCK_EXCHANGES = 5
MAX_SKEW_S, MUNGE_SKEW_S = 0.5, 60.0
"""Clock differences between nodes, in seconds. Above the first, times in the ledger jump when another node takes over.
Above the second, munge will soon refuse the node."""
ON_NODES = {
    "gpus": gpus,
    "limits": lambda: limits(int(os.environ.get("SLURM_NNODES") or 1)),
    "journal": journal,
    "health command": health_command,
}
"""Checks that a probe runs, in addition to the checks of the home, the connection and the clock."""
MAX_NODES_NAMED = 8
"""Most nodes that are named in a line. Of more nodes, three are named and the others are counted."""


class NodeReport(msgspec.Struct, frozen=True):
    """The content of the line that a probe prints."""

    node: str
    findings: tuple[CheckResult, ...]
    home: str
    """Fault of RESIHP_HOME on the probe's node; empty if it is the same folder as on this machine."""
    connection: str
    """Reason why the probe could not connect to the doctor; empty if it could."""
    version: str
    interfaces: dict[str, str] = {}
    """Network interfaces that are up, with their addresses."""


def outside(nodes: int = 2) -> Iterator[CheckResult]:
    """Yield a single result: without an allocation, the nodes are not checked."""
    text = "shared folder, clocks, ports and GPUs of the nodes: not checked outside of an allocation"
    yield CheckResult(check="nodes", outcome="skipped", text=text, advice=f"salloc --nodes={nodes} resihp doctor")


def examine(
    allocation: Allocation,
    slurm: Slurm,
    survey: Survey,
    home: Path,
    *,
    ports: Ports | None = None,
    interface: str = "",
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Iterator[CheckResult]:
    """Start the probes and yield the results for all nodes of the allocation. Raises SlurmError if no probe can be
    started."""
    from resihp.wrapper.launch.allocation import addresses, own_address

    nodes = allocation.nodes
    addresses_by_node = addresses(slurm, nodes)
    own_host_name = addresses_by_node.get(allocation.batch_node) or socket.gethostname()
    other_addresses = [name for node, name in addresses_by_node.items() if node != allocation.batch_node]
    host = own_address(own_host_name, other_addresses or [own_host_name])
    note = nearest(home) / f".resihp-doctor-{secrets.token_hex(8)}"
    try:
        _leave(note, note.name)
        with ClockCheck(host, ports=ports) as clock:
            argv = [
                sys.executable,
                "-P",
                "-m",
                "resihp.wrapper.commands.doctor.nodes",
                clock.host,
                str(clock.port),
                str(note),
            ]
            output = survey.on_nodes(allocation.number, nodes, argv, timeout_s=timeout_s)
        reports = read(output, nodes)
        written = {node for node in nodes if note.with_name(f"{note.name}-{node}").exists()}
    finally:
        for path in (note, *(note.with_name(f"{note.name}-{node}") for node in nodes)):
            with suppress(OSError):
                path.unlink()
    yield from judge(nodes, reports, written, clock.skews, home)
    yield from _given_gpus(allocation.gpus_per_node or 0, reports)
    if interface:
        yield from interfaces_of(interface, reports)


def _leave(note: Path, text: str) -> None:
    """Create a file with this text. Raises an error if the path exists, so that no link is followed."""
    with note.open("x", encoding="utf-8") as file:
        file.write(text)


def interfaces_of(wanted: str, reports: Mapping[str, NodeReport]) -> Iterator[CheckResult]:
    """Check that each node has the network interface that `[network] interface` names."""
    missing_on = {
        node: missing(wanted, report.interfaces)
        for node, report in reports.items()
        if not meant(wanted, report.interfaces)
    }
    yield from _by_text("interfaces", "failed", missing_on, "set interface in [network] to one that all nodes have")
    if reports and not missing_on:
        yield CheckResult(check="interfaces", outcome="ok", text=f"{wanted}: on {node_names(list(reports))}")


def _given_gpus(given: int, reports: Mapping[str, NodeReport]) -> Iterator[CheckResult]:
    """Yield a warning about nodes on which no GPU is visible although Slurm gave GPUs to the job."""
    blind = [
        node
        for node, report in reports.items()
        if any(finding.check == "gpus" and finding.outcome == "skipped" for finding in report.findings)
    ]
    if given and blind:
        text = f"Slurm gave {given} per node, but {node_names(blind)} show none"
        advice = f"srun -w {blind[0]} nvidia-smi"
        yield CheckResult(check="gpus", outcome="warning", text=text, advice=advice, nodes=tuple(blind))


def read(output: str, nodes: Sequence[str]) -> dict[str, NodeReport]:
    """Return the reports of the probes by node, in the order of `nodes`. Lines that are not reports are ignored."""
    reports = {}
    for line in output.splitlines():
        if line.startswith(PROBE_PREFIX):
            with suppress(msgspec.DecodeError):
                report = msgspec.json.decode(line.removeprefix(PROBE_PREFIX), type=NodeReport)
                if report.node in nodes:
                    reports[report.node] = report
    return {node: reports[node] for node in nodes if node in reports}


def judge(
    nodes: Sequence[str],
    reports: Mapping[str, NodeReport],
    written: set[str],
    skews: Mapping[str, tuple[float, float]],
    home: Path,
) -> Iterator[CheckResult]:
    """Yield the results that follow from the reports of all nodes.

    `skews`: for each node, the seconds by which its clock is ahead of ours, and the measurement error in seconds.
    """
    silent = [node for node in nodes if node not in reports]
    if silent:
        text = f"no answer from {node_names(silent)}"
        advice = f"does {sys.prefix} exist there? srun -w {silent[0]} ls {sys.executable}"
        yield CheckResult(check="nodes", outcome="failed", text=text, advice=advice, nodes=tuple(silent))
    if not reports:
        return
    versions = {report.version for report in reports.values()}
    if len(versions) > 1:
        text = f"versions of resihp differ: {', '.join(sorted(versions))}"
        yield CheckResult(check="nodes", outcome="failed", text=text, advice="install one version on all nodes")
    elif not silent:
        yield CheckResult(check="nodes", outcome="ok", text=f"{len(nodes)} answer, resihp {versions.pop()}")
    bad = {node: report.home for node, report in reports.items() if report.home}
    bad |= {
        node: "a file written there is not seen here" for node in reports if node not in bad and node not in written
    }
    advice = "set RESIHP_HOME to a folder of yours that all nodes share"
    yield from _by_text("shared home", "failed", bad, advice, prefix=f"{home}: ")
    if not bad:
        yield CheckResult(
            check="shared home", outcome="ok", text=f"{home}: seen and written by {node_names(list(reports))}"
        )
    cut_off = {node: report.connection for node, report in reports.items() if report.connection}
    advice = "a firewall between nodes? ask which ports are open between them, and set ports in [slurm] to that range"
    yield from _by_text("connections", "failed", cut_off, advice)
    if not cut_off:
        yield CheckResult(check="connections", outcome="ok", text=f"{node_names(list(reports))} connect to this one")
    yield from _clocks(skews)
    yield from _of_machines(reports)


def _clocks(skews: Mapping[str, tuple[float, float]]) -> Iterator[CheckResult]:
    if not skews:
        yield CheckResult(
            check="clocks", outcome="unknown", text="no node has answered over a connection", advice="date"
        )
        return
    off = {node: skew for node, (skew, error) in skews.items() if abs(skew) - error > MAX_SKEW_S}
    worst = max(skews, key=lambda node: abs(skews[node][0]))
    skew, error = skews[worst]
    text = f"{worst} is {1000 * abs(skew):.1f} ms {'ahead' if skew > 0 else 'behind'}, the most of {len(skews)}"
    text += f" (within {1000 * error:.1f} ms)"
    if off:
        outcome: Outcome = "failed" if max(map(abs, off.values())) > MUNGE_SKEW_S else "warning"
        text = f"{node_names(list(off))}: more than {MAX_SKEW_S:g} s off; {text}"
        yield CheckResult(
            check="clocks", outcome=outcome, text=text, advice=f"srun -w {worst} chronyc tracking", nodes=tuple(off)
        )
    else:
        yield CheckResult(check="clocks", outcome="ok", text=text)


def _of_machines(reports: Mapping[str, NodeReport]) -> Iterator[CheckResult]:
    """Yield the results of the checks that each node ran; equal results of several nodes are one line. Yields a warning
    if nodes have different GPUs."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for node, report in reports.items():
        for finding in report.findings:
            text = finding.text
            if finding.check == "journal":
                text = text.partition(",")[0]  # free space and milliseconds differ between all nodes
            key = (finding.check, finding.outcome, text, finding.advice)
            alike.setdefault(key, []).append(node)
    for (check, outcome, text, advice), nodes in alike.items():
        text = f"{node_names(nodes)}: {text}"
        yield CheckResult(check=check, outcome=outcome, text=text, advice=advice, nodes=tuple(nodes))  # type: ignore[arg-type]
    kinds = {text for check, outcome, text, _ in alike if check == "gpus" and outcome == "ok"}
    if len(kinds) > 1:
        text = "nodes have different GPUs; the slowest ones set the pace"
        yield CheckResult(check="gpus", outcome="warning", text=text, advice="set constraint in [slurm]")


def _by_text(
    check: str, outcome: Any, problems: Mapping[str, str], advice: str, prefix: str = ""
) -> Iterator[CheckResult]:
    for text in dict.fromkeys(problems.values()):
        nodes = [node for node, problem in problems.items() if problem == text]
        yield CheckResult(
            check=check, outcome=outcome, text=f"{prefix}{node_names(nodes)}: {text}", advice=advice, nodes=tuple(nodes)
        )


def node_names(nodes: Sequence[str]) -> str:
    """Return the names of the nodes; of many nodes, three names and the number of the others."""
    return ", ".join(nodes) if len(nodes) <= MAX_NODES_NAMED else f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"


class ClockCheck:
    """Context manager that accepts connections from probes and compares clocks over them. `skews` has the results by
    node."""

    def __init__(self, host: str, now: Callable[[], float] = time.time, ports: Ports | None = None) -> None:
        """Listen on `host`. `ports`: the range that a job would use, and that must be open between nodes; None for any
        port."""
        self.skews: dict[str, tuple[float, float]] = {}
        self.host = host
        self._now = now
        self._listener = listen(host, ports)
        self.port = int(self._listener.getsockname()[1])
        self._talks: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._serve, name="doctor clock", daemon=True)

    def __enter__(self) -> ClockCheck:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for thread in (self._thread, *self._talks):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # A probe that hangs must not delay the other probes.
            talk = threading.Thread(target=self._talk, args=(connection,), name="doctor clock", daemon=True)
            self._talks.append(talk)
            talk.start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._compare(connection)

    def _compare(self, connection: socket.socket) -> None:
        """Measure the clock difference several times, and keep the fastest exchange, which is the most accurate: the
        node read its clock between our two readings."""
        length = _exactly(connection, 1)[0]
        node = _exactly(connection, length).decode()
        best = (0.0, float("inf"))
        for _ in range(CLOCK_EXCHANGES):
            sent_at = self._now()
            connection.sendall(b"?")
            (node_time,) = struct.unpack("!d", _exactly(connection, 8))
            answered_at = self._now()
            best = min(
                best, (node_time - (sent_at + answered_at) / 2, (answered_at - sent_at) / 2), key=lambda pair: pair[1]
            )
        self.skews[node] = best


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            raise ValueError("closed too early")
        content += part
    return content


# --- the probe ------------------------------------------------------------------------------------------------------


def probe(node: str, host: str, port: int, note: Path, now: Callable[[], float] = time.time) -> NodeReport:
    """Check this node, connect back to the doctor, and return the report."""
    import resihp

    connection = ""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(bytes([len(node.encode())]) + node.encode())
            for _ in range(CLOCK_EXCHANGES):
                if not link.recv(1):
                    break
                link.sendall(struct.pack("!d", now()))
    except OSError as error:
        connection = f"cannot connect to {host}: {error.strerror or error}"
    home = ""
    try:
        if note.read_text() != note.name:
            home = "is a different folder there (its test file differs)"
        _leave(note.with_name(f"{note.name}-{node}"), node)
    except FileNotFoundError:
        home = "is not the same folder there"
    except OSError as error:
        home = (error.strerror or str(error)).lower()
    findings: list[CheckResult] = []
    for name, check in ON_NODES.items():
        try:
            findings += check()
        except Exception as error:  # noqa: BLE001 - a check that raises is a finding of this node
            findings.append(CheckResult(check=name, outcome="unknown", text=f"{type(error).__name__}: {error}"))
    return NodeReport(node, tuple(findings), home, connection, resihp.__version__, present())


def main(arguments: Sequence[str]) -> None:
    host, port, note = arguments
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    report = probe(node, host, int(port), Path(note))
    print(f"{PROBE_PREFIX}{json.dumps(msgspec.to_builtins(report))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
