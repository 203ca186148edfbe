"""Checks of `resihp doctor` on one machine: Python, packages, GPUs, limits.

Each check yields findings and changes nothing. It does not raise for the faults that it looks for;
`resihp.wrapper.commands.doctor.command` reports an unforeseen exception as unknown. Folders, ledger and ports:
`resihp.wrapper.commands.doctor.places`; torch and its libraries: `resihp.wrapper.commands.doctor.training_libraries`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from resihp.words import count_of
from resihp.worker import affinity

Outcome = Literal["ok", "warning", "failed", "skipped", "unknown"]
FILES_PER_NODE, OTHER_FILES = 3, 256
"""Numbers of file descriptors that a supervisor needs: for each node (the agent's connection, a connection that
replaces it, and one that has not yet proven the key), and for everything else. An agent in an election needs no more
than the supervisor of a small job."""
SOMAXCONN_FILE = Path("/proc/sys/net/core/somaxconn")
SUBPROCESS_TIMEOUT_S = 60.0
VISIBLE_DEVICES = Path("/dev")
GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")
PCI_DEVICES = affinity.PCI_DEVICES


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. `advice`: the command to type, or the setting to change. `nodes`: the nodes that it is
    about; empty for this machine.

    Outcome `skipped`: the check does not apply, or is not possible from here, as the text says. Outcome `unknown`: the
    check got no answer.
    """

    check: str
    outcome: Outcome
    text: str
    advice: str = ""
    nodes: tuple[str, ...] = ()


def python() -> Iterator[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    text = f"{version}, {sys.executable}"
    yield CheckResult(check="python", outcome="ok", text=text)


_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(;.*)?")


def packages() -> Iterator[CheckResult]:
    """Check that the Python packages required by resihp's own metadata are installed."""
    try:
        wanted = metadata.requires("resihp") or []
    except metadata.PackageNotFoundError:
        text = "resihp is not installed in this environment; it runs from its folder"
        yield CheckResult(check="packages", outcome="warning", text=text, advice="pip install resihp")
        return
    problems = []
    for requirement in wanted:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None or "extra ==" in (match[3] or ""):
            continue
        name, min_version = match[1], re.search(r">=\s*([0-9.]+)", match[2])
        version = _version(name)
        if version is None:
            problems.append(f"{name} is missing")
        elif min_version and numbers(version) < numbers(min_version[1]):
            problems.append(f"{name} {version} is older than {min_version[1]}")
    extras = ("opentelemetry-sdk", "prometheus-client", "psycopg", "tensorboard")
    installed_extras = [f"{name} {version}" for name in extras if (version := _version(name))]
    own = f"resihp {_version('resihp')}"
    if problems:
        yield CheckResult(check="packages", outcome="failed", text="; ".join(problems), advice="pip install -U resihp")
    else:
        yield CheckResult(check="packages", outcome="ok", text=", ".join([own, *installed_extras]))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version such as `2.10.0`."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


_QUERY = (
    "index",
    "name",
    "memory.total",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
)


def gpus() -> Iterator[CheckResult]:
    devices = sorted(VISIBLE_DEVICES.glob("nvidia[0-9]*"))
    if shutil.which("nvidia-smi") is None:
        if devices:
            text = f"{count_of(len(devices), 'GPU')}, but nvidia-smi is not installed"
            yield CheckResult(check="gpus", outcome="warning", text=text, advice="install NVIDIA's driver utilities")
        else:
            yield CheckResult(check="gpus", outcome="skipped", text="no NVIDIA GPU on this machine")
        return
    done = run_command(["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"], timeout_s=20)
    if isinstance(done, str):
        yield CheckResult(check="gpus", outcome="unknown", text=f"nvidia-smi: {done}", advice="dmesg | grep -i xid")
        return
    if done.returncode:
        first_line = (done.stdout.strip() or done.stderr.strip()).splitlines()[:1]
        text = f"nvidia-smi ended with {done.returncode}: {''.join(first_line)[:200]}"
        outcome: Outcome = "failed" if devices else "skipped"
        yield CheckResult(check="gpus", outcome=outcome, text=text, advice="nvidia-smi; dmesg | grep -i xid")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]
    rows = [row for row in rows if len(row) == len(_QUERY)]
    if not rows:
        yield CheckResult(check="gpus", outcome="skipped", text="no NVIDIA GPU on this machine")
        return
    yield _judge_gpus(rows)
    yield from _near_cpus()


def _near_cpus() -> Iterator[CheckResult]:
    """Yield the CPUs on which the workers of this machine's GPUs run; nothing without GPUs, or if the kernel reports
    no CPUs for them."""
    allowed = os.sched_getaffinity(0)
    buses = sorted(folder.name for folder in GPU_FOLDERS.glob("*:*"))
    if not any(affinity.near(bus, allowed, PCI_DEVICES) for bus in buses):
        return
    chosen = affinity.chosen(dict(enumerate(buses)), allowed, PCI_DEVICES)
    groups = Counter(chosen.values())
    text = "; ".join(f"{count_of(gpus, 'GPU')} near CPUs {affinity.ranges(cpus)}" for cpus, gpus in groups.items())
    if far := [bus for number, bus in enumerate(buses) if number not in chosen]:
        text = "; ".join(filter(None, (text, f"too few of the CPUs that this job may use are near {', '.join(far)}")))
        advice = "request whole nodes: exclusive = true in [slurm]"
        yield CheckResult(check="affinity", outcome="warning", text=text, advice=advice)
    else:
        yield CheckResult(check="affinity", outcome="ok", text=f"each worker runs near its GPU: {text}")


def _judge_gpus(rows: list[list[str]]) -> CheckResult:
    """Return the result for the GPUs that nvidia-smi lists. A row has the values of `_QUERY` for one GPU."""
    kinds = {(row[1], row[2], row[3]) for row in rows}
    name, mib, driver = sorted(kinds)[0]
    memory = f"{int(mib) / 1024:.0f} GiB" if mib.isdigit() else mib
    text = f"{len(rows)} x {name}, {memory}, driver {driver}{_nvml()}"
    memory_errors = [
        f"GPU {row[0]} has {row[4]} uncorrected memory errors" for row in rows if row[4].isdigit() and int(row[4])
    ]
    if memory_errors:
        advice = "nvidia-smi -q -d ECC,ROW_REMAPPER; dcgmi diag -r 3"
        return CheckResult(check="gpus", outcome="failed", text=f"{text}; {', '.join(memory_errors)}", advice=advice)
    if mig_gpus := [f"GPU {row[0]}" for row in rows if row[5] == "Enabled"]:
        text += f"; {', '.join(mig_gpus)} in MIG mode, and NCCL connects whole GPUs only"
        return CheckResult(check="gpus", outcome="warning", text=text, advice="ask for whole GPUs; nvidia-smi -mig 0")
    if len(kinds) > 1:
        return CheckResult(check="gpus", outcome="warning", text=f"{len(rows)} GPUs of {len(kinds)} kinds on one node")
    return CheckResult(check="gpus", outcome="ok", text=text)


def _nvml() -> str:
    """Return text on whether NVML answers, for the line about GPUs; empty if the Python package for NVML is not
    installed."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]  # where it is installed
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f", NVML: {error}"
    return f", NVML sees {count}"


def limits(nodes: int = 1) -> Iterator[CheckResult]:
    """Check the limits of this machine for a job of `nodes` nodes whose supervisor may run here."""
    yield from _open_files(nodes)
    with suppress(OSError, ValueError):
        backlog = int(SOMAXCONN_FILE.read_text())
        if backlog < nodes:
            text = f"{backlog} (net.core.somaxconn), but {nodes} agents may connect at once: the rest have to retry"
            advice = "sysctl -w net.core.somaxconn=4096"
            yield CheckResult(check="listen backlog", outcome="warning", text=text, advice=advice)
    fabric = Path("/sys/class/infiniband")
    cards = sorted(card.name for card in fabric.iterdir()) if fabric.is_dir() else []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"{_limit(soft, 'bytes')}" + (f", RDMA by {', '.join(cards[:4])}" if cards else ", no RDMA here")
    if cards and soft != resource.RLIM_INFINITY:
        advice = "LimitMEMLOCK=infinity for slurmd, PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        yield CheckResult(check="locked memory", outcome="warning", text=f"{text}: NCCL may fail", advice=advice)
    else:
        yield CheckResult(check="locked memory", outcome="ok", text=text)


def _open_files(nodes: int) -> Iterator[CheckResult]:
    """Check the hard limit of open files, because supervisor and agents raise the soft limit to it
    (`resihp.process.raise_open_files`)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_PER_NODE * nodes + OTHER_FILES
    text = f"{_limit(hard)} at most"
    job = f"a job of {nodes} node{'s' if nodes > 1 else ''} needs {needed}"
    if 0 <= hard < needed:
        advice = f"systemctl edit slurmd, and add LimitNOFILE={needed} or more; without Slurm, limits.conf"
        yield CheckResult(check="open files", outcome="failed", text=f"{text}, and {job}", advice=advice)
    else:
        yield CheckResult(check="open files", outcome="ok", text=f"{text}; {job}")


def _limit(value: int, unit: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value} {unit}".strip()


def run_command(argv: list[str], timeout_s: float = SUBPROCESS_TIMEOUT_S) -> subprocess.CompletedProcess[str] | str:
    """Run a command and return its result; or, if it did not start or did not end in time, a text with the reason."""
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return f"cannot be started ({error.strerror})"
