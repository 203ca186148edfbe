"""Parser for the output of Slurm's commands: bytes in, views out. Pure.

Decides whether an answer is well-formed; raises SlurmOutputError, and no other exception, if it is not. Fields are
requested by name (`NODE_FORMAT`, `JOB_FORMAT`); `fields` splits the answer into them. Called by
`resihp.slurm.commands`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import msgspec

from resihp.slurm.client import JobView, NodeChoice, NodeView
from resihp.slurm.errors import SlurmOutputError
from resihp.slurm.parsing.fields import (
    COUNT_PATTERN,
    EXCERPT_LENGTH,
    MISSING_VALUES,
    count_of,
    decoded,
    format_of,
    read_records,
    read_rows,
    time_of,
    unreadable,
    wrong_width,
)

_NODE_FIELDS = ("NodeList", "StateComplete", "Reason", "User", "NodeAddr", "CPUs", "Memory", "Gres", "Timestamp")
_PARTITION_NODE_FIELDS = ("NodeList", "StateComplete", "CPUs", "Memory", "Gres", "FeaturesAct")
_JOB_FIELDS = (
    *("JobID", "JobArrayID", "UserName", "State", "NodeList", "BatchHost", "Reason", "RestartCnt", "TimeLeft"),
    *("PreemptTime", "SubmitTime", "Comment", "Name"),
)


NODE_FORMAT = format_of(_NODE_FIELDS)
"""Fields for `sinfo --Format`."""
PARTITION_NODE_FORMAT = format_of(_PARTITION_NODE_FIELDS)
"""Fields for `sinfo --Format` of all nodes of a partition."""
JOB_FORMAT = format_of(_JOB_FIELDS)
"""Fields for `squeue --Format`."""
_PREEMPTION_FIELDS = ("PreemptTime", "Partition", "QOS", "BatchFlag")
PREEMPTION_FORMAT = format_of(_PREEMPTION_FIELDS)
"""Fields for `squeue --Format` of one job."""

_NODE_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9_])?", re.ASCII)
JOB_ID = re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?", re.ASCII)
"""A job's number. `_` precedes the index of an array element, `+` the number of a component of a heterogeneous job."""
PARTITION_LIST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,-]{0,1023}", re.ASCII)
"""Names of partitions, separated by commas."""
_BLANKS = re.compile(r"\s*,\s*")
NODE_LIST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._,\[\]-]*[A-Za-z0-9_\]])?", re.ASCII)

_STATE = re.compile(r"[a-z_]+", re.ASCII)
_CLOCK = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{2})", re.ASCII)
_GPUS = re.compile(r"gpu(?::[^:(),]+)??(?::no_consume)?(?::([0-9]{1,6})([KMG]?))?(?:\([^()]*\))?", re.ASCII)
"""Matches `gpu:8`, `gpu:h100:8(S:0-1)` or `gpu:a100:no_consume:4`, which gres.conf permits."""
_MULTIPLES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_NODES_GRES = re.compile(r"\s+Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES(?:_IDX)?=(\S*)\s*", re.ASCII)
_VERSION = re.compile(
    r"\bslurm(?:[-_ ][A-Za-z][A-Za-z0-9_]*)*[-_ ]v?([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?![0-9])", re.ASCII
)
"""Matches `slurm 24.11.3`, `slurm-wlm 22.05.8`, `slurm-23.02.7` or `slurm 25.11`, also with a suffix that a site
appends."""
_CLUSTER = re.compile(r"^ClusterName\s*=\s*(\S+)\s*$", re.MULTILINE)
_SETTING = re.compile(r"^([A-Za-z][\w/]*) *= ?(.*?) *$", re.MULTILINE)
_PARTITION_MODE = re.compile(r" PreemptMode=(\S+) ", re.ASCII)
_QOS_MODE = re.compile(r"[A-Za-z,]+", re.ASCII)
_NODE_CHOICE = re.compile(r"^\s*ReqNodeList=(\S+) ExcNodeList=(\S+)\s*$", re.ASCII | re.MULTILINE)
_PARTITION = re.compile(r"^\s*Partition=(\S+) ", re.ASCII | re.MULTILINE)
_RESERVATION = re.compile(r"^\s*Reservation=(\S+)\s*$", re.ASCII | re.MULTILINE)
_CONTIGUOUS = re.compile(r"^\s*OverSubscribe=\S+ Contiguous=1\b", re.ASCII | re.MULTILINE)
_EXPEDITED = re.compile(r"\bExpeditedRequeue=Yes\b", re.ASCII)
_SUBMITTED = re.compile(r"([0-9]{1,10})(?:;[A-Za-z0-9._-]+)?", re.ASCII)


def is_node(name: str) -> bool:
    """Decide whether `name` may be a node's name. ALL may not: to Slurm's commands it means the whole cluster."""
    return _NODE_NAME.fullmatch(name) is not None and name.lower() != "all"


def node_list(text: str) -> str:
    """Return a list of nodes without blanks after its commas, which Slurm accepts but does not print."""
    return _BLANKS.sub(",", text.strip())


def nodes(output: bytes) -> dict[str, NodeView]:
    """Return views by node name from `sinfo -h -N -O NODE_FORMAT`. A node in two partitions has two equal rows.

    A row that cannot be parsed does not affect the others: its node becomes `unreadable`, or is omitted if the row has
    no node name. Raises SlurmOutputError if no row can be parsed.
    """
    views: dict[str, NodeView] = {}
    unknown: dict[str, NodeView] = {}
    refusal = None
    for fields in read_rows(output, "sinfo"):
        try:
            view = _node(fields)
        except SlurmOutputError as error:
            refusal = refusal or error
            if is_node(fields[0]):
                unknown[fields[0]] = NodeView(name=fields[0], state="unknown", unreadable=str(error))
        else:
            views[view.name] = view
    if refusal is not None and not views:
        raise refusal
    return unknown | views


def partition_nodes(output: bytes) -> dict[str, NodeView]:
    """Return views by node name from `sinfo -h -N -O PARTITION_NODE_FORMAT`. Rows that cannot be parsed are omitted."""
    views: dict[str, NodeView] = {}
    for fields in read_rows(output, "sinfo"):
        if len(fields) != len(_PARTITION_NODE_FIELDS):
            raise wrong_width("sinfo", fields, len(_PARTITION_NODE_FIELDS))
        name, state, cpus, memory, gres, features = fields
        with suppress(SlurmOutputError):
            base, flags = _state(name, state)
            views[name] = NodeView(
                name=name,
                state=base,
                flags=flags,
                cpus=int(cpus) if COUNT_PATTERN.fullmatch(cpus) else 0,
                memory_mb=int(memory) if COUNT_PATTERN.fullmatch(memory) else 0,
                gpus=_readable_gpus(gres),
                features=frozenset() if features in MISSING_VALUES else frozenset(features.split(",")),
            )
    return views


def _state(name: str, text: str) -> tuple[str, frozenset[str]]:
    """Parse the state of a node. Return (base state, flags). Raises SlurmOutputError if its name or state is
    invalid."""
    if not is_node(name):
        raise unreadable("sinfo", "a node's name", name)
    base, *flags = text.lower().split("+")
    if not all(_STATE.fullmatch(word) for word in (base, *flags)):
        raise unreadable("sinfo", f"the state of node {name}", text)
    return base, frozenset(flags)


def _node(fields: list[str]) -> NodeView:
    """Parse one row of `sinfo`. Raises SlurmOutputError if its number of fields, name or state is invalid."""
    if len(fields) != len(_NODE_FIELDS):
        raise wrong_width("sinfo", fields, len(_NODE_FIELDS))
    name, state, reason, by, address, cpus, memory, gres, at = fields
    base, flags = _state(name, state)
    return NodeView(
        name=name,
        state=base,
        flags=flags,
        reason="" if reason == "none" else reason,
        reason_by="" if reason == "none" else by,
        reason_at=float(at) if reason != "none" and COUNT_PATTERN.fullmatch(at) else None,
        address=address,
        cpus=int(cpus) if COUNT_PATTERN.fullmatch(cpus) else 0,
        memory_mb=int(memory) if COUNT_PATTERN.fullmatch(memory) else 0,
        gpus=_readable_gpus(gres),
    )


def _readable_gpus(gres: str) -> int:
    """Return the number of GPUs in a list of generic resources; 0 if it cannot be parsed."""
    try:
        return gpus(gres)
    except SlurmOutputError:
        return 0


def jobs(output: bytes) -> list[tuple[frozenset[str], JobView, str]]:
    """Parse `squeue -h -O JOB_FORMAT`. Return for each job all its ids, its view (without nodes), and its node list."""
    parsed_jobs = []
    for fields in read_records(output, len(_JOB_FIELDS), "squeue"):
        number, in_array, user, state, nodelist, host, why, restarts, time_left, preempted, submitted, comment, name = (
            fields
        )
        if not JOB_ID.fullmatch(number):
            raise unreadable("squeue", "a job's id", number)
        if not _STATE.fullmatch(state.lower()):
            raise unreadable("squeue", f"the state of job {number}", state)
        nodelist = "" if nodelist in ("(null)", "n/a", "N/A") else node_list(nodelist)
        if nodelist and not NODE_LIST.fullmatch(nodelist):
            raise unreadable("squeue", f"the nodes of job {number}", nodelist)
        view = JobView(
            id=number,
            name=name,
            user=user,
            state=state.lower(),
            batch_host="" if host in ("n/a", "N/A", "(null)") else host,
            why="" if why in ("None", "(null)") else why,
            restarts=count_of(restarts, f"the restarts of job {number}"),
            seconds_left=seconds_left(time_left),
            preempted=preempted not in MISSING_VALUES,
            element=in_array if "_" in in_array and JOB_ID.fullmatch(in_array) else "",
            submitted_at=time_of(submitted, f"when job {number} was submitted"),
            comment="" if comment == "(null)" else comment,
        )
        parsed_jobs.append((frozenset((number, in_array)), view, nodelist))
    return parsed_jobs


def job_gpus(output: bytes) -> list[tuple[str, int]]:
    """Parse `scontrol show job -d`. Return pairs of a node list and the number of GPUs on each of its nodes."""
    gpus_by_nodes = []
    for line in decoded(output, "scontrol").splitlines():
        if not line.lstrip().startswith("Nodes="):
            continue
        match = _NODES_GRES.fullmatch(line)
        if match is None or not NODE_LIST.fullmatch(match[1]):
            raise unreadable("scontrol", "a job's generic resources", line.strip())
        if count := gpus(match[2], "scontrol"):
            gpus_by_nodes.append((match[1], count))
    return gpus_by_nodes


def node_choice(output: bytes, expand: Callable[[str], tuple[str, ...]]) -> NodeChoice:
    """Parse the part of `scontrol show job` about the nodes that Slurm may choose. `expand` returns the names in a list
    of nodes."""
    text = decoded(output, "scontrol")
    lists, partition, reservation = _NODE_CHOICE.search(text), _PARTITION.search(text), _RESERVATION.search(text)
    if lists is None or partition is None:
        raise unreadable("scontrol", "the nodes that a job requests and excludes", text)
    requested, excluded = (() if nodelist in MISSING_VALUES else expand(nodelist) for nodelist in lists.groups())
    return NodeChoice(
        partition=partition[1],
        reservation="" if reservation is None or reservation[1] in MISSING_VALUES else reservation[1],
        requested=requested,
        excluded=excluded,
        contiguous=_CONTIGUOUS.search(text) is not None,
    )


def hostnames(output: bytes, nodelist: str) -> tuple[str, ...]:
    """Parse `scontrol show hostnames`, which exits with 0 even for a list that it cannot expand."""
    names = tuple(decoded(output, "scontrol").strip().split("\n"))
    if names == ("",):
        raise SlurmOutputError(f"node list {nodelist[:EXCERPT_LENGTH]}: scontrol finds no nodes in it")
    for name in names:
        if not is_node(name):
            raise unreadable("scontrol", f"the node list {nodelist[:EXCERPT_LENGTH]}", name)
    return names


def version(output: bytes) -> tuple[int, int, int]:
    """Parse `sinfo --version`, such as `slurm 24.11.3`, `slurm-wlm 22.05.8` or `slurm 25.11` (which becomes
    25.11.0)."""
    text = decoded(output, "sinfo")
    match = _VERSION.search(text)
    if match is None:
        raise unreadable("sinfo", "the version", text)
    major, minor, micro = (int(number or 0) for number in match.groups())
    return major, minor, micro


def cluster(output: bytes) -> str:
    """Return the cluster's name from `scontrol show config`."""
    match = _CLUSTER.search(decoded(output, "scontrol"))
    if match is None:
        raise SlurmOutputError("slurm: scontrol show config names no ClusterName")
    return match.group(1)


def settings(output: bytes) -> dict[str, str]:
    """Parse `scontrol show config`, which prints one `KEY = VALUE` per line; (null) and N/A become empty."""
    settings_by_key = dict(_SETTING.findall(decoded(output, "scontrol")))
    if "ClusterName" not in settings_by_key:
        raise SlurmOutputError("slurm: scontrol show config names no ClusterName")
    return {key: "" if value in ("(null)", "N/A") else value for key, value in settings_by_key.items()}


class Preemption(msgspec.Struct, frozen=True):
    """State of a job's preemption. `now`: the job is being preempted. `tries`: how often Slurm has started the job by
    itself, plus one."""

    now: bool
    partition: str
    qos: str
    tries: int


def preemption(output: bytes) -> Preemption:
    """Parse `squeue -h -j JOB -O PREEMPTION_FORMAT`."""
    records = read_records(output, len(_PREEMPTION_FIELDS), "squeue")
    if len(records) != 1:
        raise SlurmOutputError(f"slurm: squeue returned {len(records)} jobs instead of 1")
    when, partition, qos, tries = records[0]
    return Preemption(when not in MISSING_VALUES, partition, qos, count_of(tries, "how often a job was started"))


def partition_mode(output: bytes) -> str:
    """Return the preemption mode of a partition's jobs, from `scontrol show partition -o`."""
    match = _PARTITION_MODE.search(decoded(output, "scontrol"))
    if match is None:
        raise SlurmOutputError("slurm: scontrol show partition names no PreemptMode")
    return match[1]


def qos_mode(output: bytes) -> str:
    """Return the preemption mode of a QOS's jobs, from `sacctmgr -nP show qos format=preemptmode`; `cluster` means that
    the cluster's setting applies."""
    text = decoded(output, "sacctmgr").strip().lower()
    if not _QOS_MODE.fullmatch(text):
        raise unreadable("sacctmgr", "the preemption mode of a QOS", text)
    return text


def expedited(output: bytes) -> bool:
    """Decide whether a job was submitted with the option of an expedited requeue, from `scontrol show job`."""
    return _EXPEDITED.search(decoded(output, "scontrol")) is not None


def submitted(output: bytes) -> str:
    """Return the job's id from `sbatch --parsable`."""
    lines = decoded(output, "sbatch").split()
    match = _SUBMITTED.fullmatch(lines[-1]) if lines else None
    if match is None:
        raise unreadable("sbatch", "the new job's id", " ".join(lines))
    return match.group(1)


def script(output: bytes, job_id: str) -> str:
    """Return a batch script unchanged. Raises SlurmOutputError if it is not UTF-8 or does not start with `#!`."""
    try:
        text = output.decode()
    except UnicodeDecodeError:
        raise SlurmOutputError(f"job {job_id}: its batch script is not UTF-8 text") from None
    if not text.startswith("#!"):
        raise unreadable("scontrol", f"the batch script of job {job_id}", text)
    return text


def seconds_left(text: str) -> float | None:
    """Parse `[days-][hours:]minutes:seconds`, as squeue prints the time left; None without a limit. INVALID means that
    the limit has passed, and returns 0."""
    if text in ("UNLIMITED", "NOT_SET", "N/A", "Partition_Limit"):
        return None
    if text == "INVALID":
        return 0.0
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise unreadable("squeue", "the time left", text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def gpus(gres: str, command: str = "sinfo") -> int:
    """Return the number of GPUs in generic resources such as `gpu:h100:8(S:0-1),nic:2`. Shards of GPUs are not
    counted."""
    total = 0
    # Commas in parentheses do not separate: gpu:8(S:0,1).
    for part in re.split(r",(?![^()]*\))", gres):
        match = _GPUS.fullmatch(part)
        if match is not None:
            total += int(match[1] or 1) * _MULTIPLES[match[2] or ""]
        elif part.startswith("gpu:"):
            raise unreadable(command, "generic resources", gres)
    return total
