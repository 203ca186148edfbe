"""What the environment says of the Slurm allocation that we are in: nodes, what they have, how they are reached.

`find` reads what Slurm set when the job began; what has changed since (a node gone) is not in it. It never starts or
changes anything. Used by `resihp run` (`wrapper.commands.run`), and by whoever has to listen where other nodes can
connect.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence

import msgspec

from resihp.errors import UsageError
from slurm.client import Slurm
from slurm.errors import SlurmError
from wrapper.launch.batch_script import options

NOT_THERE = (
    "not in a Slurm allocation: resihp submit job.toml submits a job, resihp submit job.toml --dry-run > job.sbatch "
    "writes a batch script for sbatch, and --local runs on this machine"
)

SLURM_FALLBACK = "/tmp"
"""Where Slurm starts a batch script whose folder is not there."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """One Slurm job's nodes. Counts are those of the node that has least; None where Slurm does not tell."""

    job_id: str
    """As Slurm is told of it, and our job is called: an element of an array is `12_3`."""
    task: str
    """Which element of an array it is; empty for other jobs."""
    array_job: int | None
    array_task: int | None
    """Numbers of the array that it is an element of, and of the element; None of other jobs."""
    number: str
    """As srun is: 22.05 takes nothing but numbers. That of an array's last element is the array's own."""
    restart_count: int
    nodes: tuple[str, ...]
    """In Slurm's order, which is that of a step's tasks."""
    batch_node: str
    """Where the batch script runs; empty when that is none of the nodes, as with salloc on a login node."""
    cpus_per_node: int | None
    gpus_per_node: int | None
    partition: str
    account: str
    qos: str
    reservation: str
    uneven: bool
    """Whether nodes have different numbers of CPUs."""


def job_id(environment: Mapping[str, str]) -> str:
    """The Slurm job that this environment is in, as Slurm is to be told of it; empty outside of one.

    The number of an array's last element is the array's own, and whatever is done to that, is done to all of them: it
    is called `12_3`. Those of others are theirs alone; their SLURM_ARRAY_JOB_ID may be left from a job that has
    submitted this one.
    """
    number = _number(environment)
    return _element(environment) if number and number == environment.get("SLURM_ARRAY_JOB_ID") else number


def _element(environment: Mapping[str, str]) -> str:
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else ""


def _identity(environment: Mapping[str, str], slurm: Slurm) -> tuple[str, str]:
    """The job's name, as with `job_id`, but of all elements of an array that of the element, and which one it is.

    Slurm is asked whether it is one. Without an answer its number serves, which nobody else has (scancel of 22.05
    passes over it, without a word), and its part of a folder is its own.
    """
    job, element, task = job_id(environment), _element(environment), environment.get("SLURM_ARRAY_TASK_ID", "")
    if not element:
        return job, ""
    if job == element:
        return job, task
    try:
        view = slurm.job(job)
    except SlurmError:
        view = None
    if view is None:
        return job, task
    return (element, task) if view.element == element else (job, "")


def _number(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID") or ""


def _numbered(name: str, environment: Mapping[str, str]) -> int | None:
    said = environment.get(name, "")
    return int(said) if said.isdigit() else None


def find(environment: Mapping[str, str], slurm: Slurm) -> Allocation:
    """The allocation that this environment is in. Raises UsageError where there is none, SlurmError."""
    if not job_id(environment):
        raise UsageError(NOT_THERE)
    job, task = _identity(environment, slurm)
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environment and tasks.isdigit() and int(tasks) > 1:
        raise UsageError(
            f"job {job}: resihp run was started {tasks} times by srun; call it in the batch script without srun, "
            "it starts one agent a node itself"
        )
    submitted_in = environment.get("SLURM_SUBMIT_DIR", "")
    if os.getcwd() == SLURM_FALLBACK and submitted_in and not os.path.isdir(submitted_in):
        raise UsageError(
            f"job {job}: the folder it was submitted from, {submitted_in}, is not there on {socket.gethostname()}; "
            "submit from a folder that all nodes share, or name one: sbatch --chdir=FOLDER"
        )
    nodelist = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not nodelist:
        raise UsageError(f"job {job}: SLURM_JOB_NODELIST is not set; call resihp run in the batch script itself")
    _refuse_parts(job, environment)
    nodes = slurm.expand(nodelist)
    here = environment.get("SLURMD_NODENAME", "")
    cpus = counts(environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    least = min(cpus, default=None)
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    return Allocation(
        job_id=job,
        task=task,
        array_job=_numbered("SLURM_ARRAY_JOB_ID", environment) if task else None,
        array_task=_numbered("SLURM_ARRAY_TASK_ID", environment) if task else None,
        number=_number(environment),
        restart_count=int(restarts) if restarts.isdigit() else 0,
        nodes=nodes,
        batch_node=here if here in nodes else "",
        cpus_per_node=least,
        gpus_per_node=_gpus(job, environment, nodes, slurm),
        partition=environment.get("SLURM_JOB_PARTITION", ""),
        account=environment.get("SLURM_JOB_ACCOUNT", ""),
        qos=environment.get("SLURM_JOB_QOS", ""),
        reservation=environment.get("SLURM_JOB_RESERVATION", ""),
        uneven=len(set(cpus)) > 1,
    )


NO_LIMIT_S = 300 * 86400.0
"""Slurm has jobs without a time limit end in a year."""


def end_time(environment: Mapping[str, str], now: float) -> float | None:
    """Until when the job may run, in seconds since 1970, as newer Slurms say at its start; None if that is not said."""
    said = environment.get("SLURM_JOB_END_TIME", "")
    return float(said) if said.isdigit() and now < float(said) < now + NO_LIMIT_S else None


_COUNT = re.compile(r"(\d+)(?:\(x\d+\))?")


def counts(text: str) -> tuple[int, ...]:
    """The different counts in Slurm's `16(x3),8`; none if it is not of that form."""
    found = [_COUNT.fullmatch(part) for part in text.split(",")] if text else []
    return tuple(int(match[1]) for match in found if match is not None) if all(found) else ()


def _refuse_parts(job: str, environment: Mapping[str, str]) -> None:
    """Raises UsageError in a heterogeneous job: a step has the nodes of one of its parts, and so have its steps."""
    parts = environment.get("SLURM_HET_SIZE") or environment.get("SLURM_PACK_SIZE") or ""
    if not parts.isdigit() or int(parts) < 2:
        return
    counts = [environment.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{i}", "") for i in range(int(parts))]
    nodes = str(sum(map(int, counts))) if all(count.isdigit() for count in counts) else "N"
    gpus = environment.get("SLURM_GPUS_ON_NODE") or "G"
    raise UsageError(
        f"job {job}: a heterogeneous job, of {parts} parts; resihp runs in one part, on nodes that are alike: "
        f'submit it without " : " and without #SBATCH hetjob: sbatch --nodes={nodes} --gpus-per-node={gpus}'
    )


def _gpus(job: str, environment: Mapping[str, str], nodes: Sequence[str], slurm: Slurm) -> int | None:
    """What each node has. Raises UsageError where they differ, and nothing says how many were asked of each.

    The environment tells of this node, or of what was asked. Of the others Slurm does, and is asked, unless this node
    has exactly what each was asked for.
    """
    here = _gpus_here(environment)
    match = re.fullmatch(r"(?:[^,]*:)?(\d+)(?:\([^)]*\))?", environment.get("SLURM_GPUS_PER_NODE", ""))
    asked = None if match is None else int(match[1])
    if len(nodes) == 1 or (asked is not None and asked == here):
        return asked if here is None else here
    try:
        given = slurm.gpus(job)
    except SlurmError:
        given = {}
    by_count: dict[int, list[str]] = {}
    for node in nodes:
        by_count.setdefault(given.get(node, 0), []).append(node)
    if not given:
        return asked if here is None else here
    if len(by_count) == 1:
        return min(by_count)
    if asked is not None and asked <= min(by_count):
        return asked  # --exclusive gives all that a node has
    told = [
        f"{count} on {some[0]}" + (f" and {len(some) - 1} more" if len(some) > 1 else "")
        for count, some in sorted(by_count.items(), reverse=True)
    ]
    most, least = max(by_count), min(by_count)
    raise UsageError(
        f"job {job}: nodes have different numbers of GPUs: {', '.join(told)}; resihp needs as many on each: "
        f"sbatch --nodes={len(nodes)} --gpus-per-node={most}"
        + (f", or --gpus-per-node={least}," if least else "")
        + " in place of --gpus, --gpus-per-task or --gres"
    )


def _gpus_here(environment: Mapping[str, str]) -> int | None:
    """`SLURM_GPUS_ON_NODE=8`, else the indices in `SLURM_JOB_GPUS=0,1`."""
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit():
        return int(on_node)
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if indices := environment.get(name):
            return len(indices.split(","))
    return None


def batch_script(slurm: Slurm, job_id: str) -> str | None:
    """The text of the job's batch script; None if Slurm does not give it, as for an interactive allocation."""
    try:
        return slurm.batch_script(job_id)
    except SlurmError:
        return None


def no_kill_seen(environment: Mapping[str, str], script: str | None) -> bool:
    """Whether sbatch was told --no-kill, as far as anybody can see: Slurm itself never tells (22.05 to 24.11).

    `script`: the batch script's text, None if it cannot be had. On sbatch's own command line the option leaves no
    trace.
    """
    if environment.get("SBATCH_NO_KILL", "off") != "off":
        return True
    return any(option in ("--no-kill", "-k") for option in options(script))


def requeue_asked(environment: Mapping[str, str], script: str | None) -> bool | None:
    """Whether sbatch was told --requeue or --no-requeue, as far as anybody can see; None where nothing is seen."""
    if "SBATCH_REQUEUE" in environment:
        return True
    if "SBATCH_NO_REQUEUE" in environment:
        return False
    said = [option == "--requeue" for option in options(script) if option in ("--requeue", "--no-requeue")]
    return said[-1] if said else None


# --- addresses ------------------------------------------------------------------------------------------------------


def addresses(slurm: Slurm, nodes: Sequence[str]) -> dict[str, str]:
    """Name or address that Slurm itself reaches each node by; the node's name where it does not tell."""
    try:
        views = slurm.nodes(nodes)
    except SlurmError:
        views = {}
    return {node: (views[node].address if node in views else "") or node for node in nodes}


def own_address(own: str, others: Sequence[str]) -> str:
    """The address of this machine that other nodes can connect to. Raises UsageError.

    `own`, `others`: names or addresses of this node and the others. Where this node's name leads to itself only, as
    /etc/hosts often has it, the address is taken that packets to the others start from.
    """
    theirs = [_resolve(other) for other in others]
    alone = all(found and all(map(_is_loopback, found)) for found in theirs)
    for address in _resolve(own):
        if (alone or not _is_loopback(address)) and _is_ours(address):
            return address
    for address in (address for found in theirs for address in found):
        source = _source_of_packets_to(address)
        if source is not None and (alone or not _is_loopback(source)):
            return source
    if alone:
        return "127.0.0.1"
    raise UsageError(
        f"{own}: no address of this machine is found that {others[0]} could connect to; "
        f"check that getent hosts {own} and getent hosts {others[0]} answer here"
    )


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_ours(address: str) -> bool:
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _source_of_packets_to(address: str) -> str | None:
    """No packet is sent."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
