"""What Slurm's commands print, read: bytes in, views out. Pure.

Decides what is a well-formed answer; anything else is SlurmOutputError, nothing ever another exception. Fields are
asked for by name (`NODE_FORMAT`, `JOB_FORMAT`), each ended by a control character that no sane value contains, so that
neither spaces nor bars nor line breaks in a reason or a job's name shift fields. Called by `slurm.commands`.
"""

from __future__ import annotations

import re

from slurm.client import JobView, NodeView
from slurm.errors import SlurmOutputError

FIELD, RECORD = "\x1f", "\x1e"

_NODE_FIELDS = ("NodeList", "StateComplete", "Reason", "User", "NodeAddr", "CPUs", "Memory", "Gres")
_JOB_FIELDS = (
    *("JobID", "JobArrayID", "UserName", "State", "NodeList", "BatchHost", "Reason", "RestartCnt", "TimeLeft"),
    *("PreemptTime", "Comment", "Name"),
)


def _format(fields: tuple[str, ...]) -> str:
    """For `-O`: a field with an ending and without a size is printed whole, not padded and not cut off."""
    return ",".join(f"{field}:{RECORD if field == fields[-1] else FIELD}" for field in fields)


NODE_FORMAT = _format(_NODE_FIELDS)
"""For `sinfo --Format`."""
JOB_FORMAT = _format(_JOB_FIELDS)
"""For `squeue --Format`."""

_NODE_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9_])?", re.ASCII)
JOB_ID = re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?", re.ASCII)
"""A job's number; `_` an element of an array, `+` a component of a heterogeneous job."""
NODE_LIST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._,\[\]-]*[A-Za-z0-9_\]])?", re.ASCII)

_STATE = re.compile(r"[a-z_]+", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,15}", re.ASCII)
_CLOCK = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{2})", re.ASCII)
_GPUS = re.compile(r"gpu(?::[^:(),]+)??(?::([0-9]{1,6}))?(?:\([^()]*\))?", re.ASCII)
_VERSION = re.compile(r"\bslurm\S* ([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", re.ASCII)
_CLUSTER = re.compile(r"^ClusterName\s*=\s*(\S+)\s*$", re.MULTILINE)
_SUBMITTED = re.compile(r"([0-9]{1,10})(?:;[A-Za-z0-9._-]+)?", re.ASCII)

_EXCERPT = 80


def is_node(name: str) -> bool:
    """Whether this can be a node's name. ALL cannot: to Slurm's commands it is the whole cluster."""
    return _NODE_NAME.fullmatch(name) is not None and name.lower() != "all"


def nodes(output: bytes) -> dict[str, NodeView]:
    """Views by name from `sinfo -h -N -O NODE_FORMAT`. A node in two partitions is there twice, and the same."""
    views = {}
    for fields in _records(output, len(_NODE_FIELDS), "sinfo"):
        name, state, reason, by, address, cpus, memory, gres = fields
        if not is_node(name):
            raise _unreadable("sinfo", "a node's name", name)
        base, *flags = state.lower().split("+")
        if not all(_STATE.fullmatch(word) for word in (base, *flags)):
            raise _unreadable("sinfo", f"the state of node {name}", state)
        views[name] = NodeView(
            name=name,
            state=base,
            flags=frozenset(flags),
            reason="" if reason == "none" else reason,
            reason_by="" if reason == "none" else by,
            address=address,
            cpus=_count(cpus, f"the CPUs of node {name}"),
            memory_mb=_count(memory, f"the memory of node {name}"),
            gpus=gpus(gres),
        )
    return views


def jobs(output: bytes) -> list[tuple[frozenset[str], JobView, str]]:
    """From `squeue -h -O JOB_FORMAT`: all ids that a job has, its view without nodes, and its list of nodes."""
    found = []
    for fields in _records(output, len(_JOB_FIELDS), "squeue"):
        number, in_array, user, state, nodelist, host, why, restarts, left, preempted, comment, name = fields
        if not JOB_ID.fullmatch(number):
            raise _unreadable("squeue", "a job's id", number)
        if not _STATE.fullmatch(state.lower()):
            raise _unreadable("squeue", f"the state of job {number}", state)
        if nodelist in ("(null)", "n/a", "N/A"):
            nodelist = ""
        if nodelist and not NODE_LIST.fullmatch(nodelist):
            raise _unreadable("squeue", f"the nodes of job {number}", nodelist)
        view = JobView(
            id=number,
            name=name,
            user=user,
            state=state.lower(),
            batch_host="" if host in ("n/a", "N/A", "(null)") else host,
            why="" if why in ("None", "(null)") else why,
            restarts=_count(restarts, f"the restarts of job {number}"),
            seconds_left=seconds_left(left),
            preempted=preempted not in ("", "N/A", "None", "(null)"),
            comment="" if comment == "(null)" else comment,
        )
        found.append((frozenset((number, in_array)), view, nodelist))
    return found


def hostnames(output: bytes, nodelist: str) -> tuple[str, ...]:
    """From `scontrol show hostnames`, which ends with 0 whatever it was given."""
    names = tuple(_text(output, "scontrol").strip().split("\n"))
    if names == ("",):
        raise SlurmOutputError(f"node list {nodelist[:_EXCERPT]}: scontrol finds no nodes in it")
    for name in names:
        if not is_node(name):
            raise _unreadable("scontrol", f"the node list {nodelist[:_EXCERPT]}", name)
    return names


def version(output: bytes) -> tuple[int, int, int]:
    """From `sinfo --version`, such as `slurm 24.11.3` or `slurm-wlm 22.05.8`."""
    text = _text(output, "sinfo")
    found = _VERSION.search(text)
    if found is None:
        raise _unreadable("sinfo", "the version", text)
    major, minor, micro = (int(number) for number in found.groups())
    return major, minor, micro


def cluster(output: bytes) -> str:
    """From `scontrol show config`."""
    found = _CLUSTER.search(_text(output, "scontrol"))
    if found is None:
        raise SlurmOutputError("slurm: scontrol show config names no ClusterName")
    return found.group(1)


def submitted(output: bytes) -> str:
    """The job's id from `sbatch --parsable`."""
    lines = _text(output, "sbatch").split()
    found = _SUBMITTED.fullmatch(lines[-1]) if lines else None
    if found is None:
        raise _unreadable("sbatch", "the new job's id", " ".join(lines))
    return found.group(1)


def script(output: bytes, job_id: str) -> str:
    """A batch script. Never altered: one that is not UTF-8 is not read."""
    try:
        text = output.decode()
    except UnicodeDecodeError:
        raise SlurmOutputError(f"job {job_id}: its batch script is not UTF-8 text") from None
    if not text.startswith("#!"):
        raise _unreadable("scontrol", f"the batch script of job {job_id}", text)
    return text


def seconds_left(text: str) -> float | None:
    """`[days-][hours:]minutes:seconds`, as squeue writes time; None without a limit. Past the limit it says INVALID."""
    if text in ("UNLIMITED", "NOT_SET", "N/A", "Partition_Limit"):
        return None
    if text == "INVALID":
        return 0.0
    found = _CLOCK.fullmatch(text)
    if found is None:
        raise _unreadable("squeue", "the time left", text)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def gpus(gres: str) -> int:
    """How many GPUs generic resources such as `gpu:h100:8(S:0-1),nic:2` are. Of shares of GPUs nothing is known."""
    total = 0
    # Commas in parentheses do not separate: gpu:8(S:0,1).
    for part in re.split(r",(?![^()]*\))", gres):
        found = _GPUS.fullmatch(part)
        if found is not None:
            total += int(found.group(1) or 1)
        elif part.startswith("gpu:"):
            raise _unreadable("sinfo", "generic resources", gres)
    return total


def _records(output: bytes, width: int, command: str) -> list[list[str]]:
    """Fields of each record. Whatever stands after the last record's end was cut off."""
    text = _text(output, command)
    *records, rest = text.split(RECORD)
    if rest.strip():
        raise SlurmOutputError(f"slurm: {command}'s output is cut off after {len(records)} records")
    fields = [record.removeprefix("\n").split(FIELD) for record in records]
    for record in fields:
        if len(record) != width:
            raise _unreadable(command, f"a record of {len(record)} fields instead of {width}", " ".join(record))
    # Versions that pad fields do it with spaces.
    return [[field.strip(" ") for field in record] for record in fields]


def _text(output: bytes, command: str) -> str:
    """Names and states are ASCII and checked; what a user wrote in another encoding only looks odd."""
    if b"\0" in output:
        raise SlurmOutputError(f"slurm: {command}'s output is not text")
    return output.decode("utf-8", "replace")


def _count(text: str, what: str) -> int:
    if not _COUNT.fullmatch(text):
        raise _unreadable("slurm", what, text)
    return int(text)


def _unreadable(command: str, what: str, text: str) -> SlurmOutputError:
    return SlurmOutputError(f"slurm: cannot read {what} in {command}'s output: {text[:_EXCERPT]!a}")
