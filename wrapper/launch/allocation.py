"""The Slurm allocation of this environment: its nodes, their resources, and their addresses.

`find` reads the variables that Slurm set when the job began; later changes, such as a lost node, are not in them. It
never starts or changes anything. Used by `resihp run` (`resihp.wrapper.commands.run`), and by processes that listen for
connections of other nodes.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence

import msgspec

from resihp.errors import UsageError
from resihp.slurm.client import Slurm
from resihp.slurm.errors import SlurmError
from resihp.wrapper.launch.batch_script import options

NO_ALLOCATION = (
    "not in a Slurm allocation: resihp submit job.toml submits a job, resihp submit job.toml --dry-run > job.sbatch "
    "writes a batch script for sbatch, and --local runs on this machine"
)

SLURM_FALLBACK = "/tmp"
"""Folder in which Slurm starts a batch script if the script's own folder does not exist."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one Slurm job. Counts are those of the node with the fewest CPUs or GPUs; None if Slurm does not report
    them."""

    job_id: str
    """Name of the job in Slurm and in resihp: a number, or `12_3` for an array element."""
    task: str
    """Index of the element in its array; empty for other jobs."""
    array_job: int | None
    array_task: int | None
    """`array_job`: number of the array; `array_task`: index of the element. None for other jobs."""
    number: str
    """Number of the job for srun, which in 22.05 accepts only numbers. The last element of an array has the array's
    number."""
    restart_count: int
    nodes: tuple[str, ...]
    """In Slurm's order, which is also the order of a step's tasks."""
    batch_node: str
    """Node on which the batch script runs; empty if it runs outside of the job's nodes, as with salloc on a login
    node."""
    cpus_per_node: int | None
    gpus_per_node: int | None
    partition: str
    account: str
    qos: str
    reservation: str
    uneven: bool
    """Whether nodes have different numbers of CPUs."""


def job_id(environment: Mapping[str, str]) -> str:
    """Return the name of this environment's Slurm job; empty outside of a job.

    The last element of an array has the array's number, and a request with that number would apply to all elements. So
    the name of this element is `12_3`. Other elements have numbers of their own; their SLURM_ARRAY_JOB_ID may come from
    a job that submitted this one.
    """
    number = _number(environment)
    return _element(environment) if number and number == environment.get("SLURM_ARRAY_JOB_ID") else number


def _element(environment: Mapping[str, str]) -> str:
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array and task else ""


def _identity(environment: Mapping[str, str], slurm: Slurm) -> tuple[str, str]:
    """Return the job's name, which is `12_3` for any element of an array, and its index in the array.

    Slurm is queried whether the job is an element. Without an answer, the job's number is used, which no other job has
    (scancel of 22.05 silently ignores it); its part of a folder is then still unique.
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
    text = environment.get(name, "")
    return int(text) if text.isdigit() else None


def find(environment: Mapping[str, str], slurm: Slurm) -> Allocation:
    """Return the allocation of this environment. Raises UsageError if there is none or if it cannot be used,
    SlurmError."""
    if not job_id(environment):
        raise UsageError(NO_ALLOCATION)
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
            f"job {job}: the folder it was submitted from, {submitted_in}, does not exist on {socket.gethostname()}; "
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
"""Longest time that counts as a time limit: Slurm gives jobs without a limit an end in one year."""


def end_time(environment: Mapping[str, str], now: float) -> float | None:
    """Return the end of the job's time limit, in seconds since 1970; None without a limit, or if this release of Slurm
    does not put it into the environment."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() and now < float(end) < now + NO_LIMIT_S else None


_COUNT = re.compile(r"(\d+)(?:\(x\d+\))?")


def counts(text: str) -> tuple[int, ...]:
    """Return the different counts in Slurm's `16(x3),8`; none if the text has another form."""
    matches = [_COUNT.fullmatch(part) for part in text.split(",")] if text else []
    return tuple(int(match[1]) for match in matches if match is not None) if all(matches) else ()


def _refuse_parts(job: str, environment: Mapping[str, str]) -> None:
    """Raise UsageError in a heterogeneous job: the step with the agents would get the nodes of only one component."""
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
    """Return the number of GPUs of each node; None if unknown. Raises UsageError if nodes have different numbers and
    the requested number is unknown.

    The environment contains this node's number, or the requested number. Slurm is queried for the other nodes, unless
    this node has exactly the requested number.
    """
    here = _gpus_here(environment)
    match = re.fullmatch(r"(?:[^,]*:)?(\d+)(?:\([^)]*\))?", environment.get("SLURM_GPUS_PER_NODE", ""))
    requested = None if match is None else int(match[1])
    if len(nodes) == 1 or (requested is not None and requested == here):
        return requested if here is None else here
    try:
        given = slurm.gpus(job)
    except SlurmError:
        given = {}
    by_count: dict[int, list[str]] = {}
    for node in nodes:
        by_count.setdefault(given.get(node, 0), []).append(node)
    if not given:
        return requested if here is None else here
    if len(by_count) == 1:
        return min(by_count)
    if requested is not None and requested <= min(by_count):
        return requested  # with --exclusive, nodes may have more
    counts = [
        f"{count} on {some[0]}" + (f" and {len(some) - 1} more" if len(some) > 1 else "")
        for count, some in sorted(by_count.items(), reverse=True)
    ]
    most, least = max(by_count), min(by_count)
    raise UsageError(
        f"job {job}: nodes have different numbers of GPUs: {', '.join(counts)}; resihp needs the same number on each: "
        f"sbatch --nodes={len(nodes)} --gpus-per-node={most}"
        + (f", or --gpus-per-node={least}," if least else "")
        + " in place of --gpus, --gpus-per-task or --gres"
    )


def _gpus_here(environment: Mapping[str, str]) -> int | None:
    """Return this node's number of GPUs: from `SLURM_GPUS_ON_NODE=8`, else by counting indices as in
    `SLURM_JOB_GPUS=0,1`."""
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit():
        return int(on_node)
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if indices := environment.get(name):
            return len(indices.split(","))
    return None


def batch_script(slurm: Slurm, job_id: str) -> str | None:
    """Return the text of the job's batch script; None if Slurm does not give it, as for an interactive allocation."""
    try:
        return slurm.batch_script(job_id)
    except SlurmError:
        return None


def no_kill_seen(environment: Mapping[str, str], script: str | None) -> bool:
    """Return whether sbatch received --no-kill, as far as visible: Slurm itself never reports it (22.05 to 24.11).

    `script`: the batch script's text, None if it is not available. The option is invisible if it was given on sbatch's
    own command line.
    """
    if environment.get("SBATCH_NO_KILL", "off") != "off":
        return True
    return any(option in ("--no-kill", "-k") for option in options(script))


def requeue_asked(environment: Mapping[str, str], script: str | None) -> bool | None:
    """Return True if sbatch received --requeue, False for --no-requeue, None if neither is visible."""
    if "SBATCH_REQUEUE" in environment:
        return True
    if "SBATCH_NO_REQUEUE" in environment:
        return False
    choices = [option == "--requeue" for option in options(script) if option in ("--requeue", "--no-requeue")]
    return choices[-1] if choices else None


# --- addresses ------------------------------------------------------------------------------------------------------


def addresses(slurm: Slurm, nodes: Sequence[str]) -> dict[str, str]:
    """Return the name or address by which Slurm itself reaches each node; the node's name if Slurm does not report
    it."""
    try:
        views = slurm.nodes(nodes)
    except SlurmError:
        views = {}
    return {node: (views[node].address if node in views else "") or node for node in nodes}


def own_address(own: str, others: Sequence[str]) -> str:
    """Return an address of this machine to which other nodes can connect. Raises UsageError if there is none.

    `own` and `others`: names or addresses of this node and of the other nodes. If this node's name resolves only to
    loopback addresses, as is common in /etc/hosts, the source address of packets to the other nodes is used.
    """
    theirs = [_resolve(name) for name in others]
    alone = all(resolved and all(map(_is_loopback, resolved)) for resolved in theirs)
    for address in _resolve(own):
        if (alone or not _is_loopback(address)) and _is_ours(address):
            return address
    for address in (address for resolved in theirs for address in resolved):
        source = _source_of_packets_to(address)
        if source is not None and (alone or not _is_loopback(source)):
            return source
    if alone:
        return "127.0.0.1"
    raise UsageError(
        f"{own}: this machine has no address that {others[0]} could connect to; "
        f"check that getent hosts {own} and getent hosts {others[0]} answer here"
    )


def _resolve(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in answers))


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
    """Return the source address of packets to `address`; None if there is no route. No packet is sent."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
