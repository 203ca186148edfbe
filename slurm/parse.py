"""What Slurm's commands print, read: bytes in, views out. Pure.

Decides what is a well-formed answer; anything else is SlurmOutputError, nothing ever another exception. Fields are
asked for by name (`NODE_FORMAT`, `JOB_FORMAT`), each ended by a control character that no sane value contains, so that
neither spaces nor bars nor line breaks in a reason or a job's name shift fields. Called by `slurm.commands`.
"""

from __future__ import annotations

import re

import msgspec

from slurm.client import Gres, JobRequest, JobView, NodeView
from slurm.errors import SlurmOutputError

FIELD, RECORD = "\x1f", "\x1e"

_NODE_FIELDS = ("NodeList", "StateComplete", "Reason", "User", "NodeAddr", "CPUs", "Memory", "Gres")
_JOB_FIELDS = (
    *("JobID", "JobArrayID", "UserName", "State", "NodeList", "BatchHost", "Reason", "RestartCnt", "TimeLeft"),
    *("PreemptTime", "SubmitTime", "Comment", "Name"),
)

_REQUEST_FIELDS = (
    *("JobID", "JobArrayID", "Partition", "Account", "QOS", "Reservation", "Feature", "Licenses", "WCKey", "Network"),
    *("Container", "OverSubscribe", "Exclusive", "tres-per-node", "tres-per-job", "tres-per-task", "tres-per-socket"),
    *("MinMemory", "mem-per-tres", "MinTmpDisk", "tres-alloc"),
)
"""`Exclusive` is from 25.11 on; squeue leaves the place of a field that it does not know empty."""


def _format(fields: tuple[str, ...]) -> str:
    """For `-O`: a field with an ending and without a size is printed whole, not padded and not cut off."""
    return ",".join(f"{field}:{RECORD if field == fields[-1] else FIELD}" for field in fields)


NODE_FORMAT = _format(_NODE_FIELDS)
"""For `sinfo --Format`."""
JOB_FORMAT = _format(_JOB_FIELDS)
"""For `squeue --Format`."""
REQUEST_FORMAT = _format(_REQUEST_FIELDS)
"""For `squeue --noconvert --Format`."""
_PREEMPTION_FIELDS = ("PreemptTime", "Partition", "QOS", "BatchFlag")
PREEMPTION_FORMAT = _format(_PREEMPTION_FIELDS)
"""For `squeue --Format`, of one job."""

_NODE_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9_])?", re.ASCII)
JOB_ID = re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?", re.ASCII)
"""A job's number; `_` an element of an array, `+` a component of a heterogeneous job."""
_BLANKS = re.compile(r"\s*,\s*")
NODE_LIST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._,\[\]-]*[A-Za-z0-9_\]])?", re.ASCII)

_STATE = re.compile(r"[a-z_]+", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,15}", re.ASCII)
_CLOCK = re.compile(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,6}):)?([0-9]{1,6}):([0-9]{2})", re.ASCII)
_GPUS = re.compile(r"gpu(?::[^:(),]+)??(?::no_consume)?(?::([0-9]{1,6})([KMG]?))?(?:\([^()]*\))?", re.ASCII)
"""`gpu:8`, `gpu:h100:8(S:0-1)`, `gpu:a100:no_consume:4`, as gres.conf allows them."""
_MULTIPLES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_GRES = re.compile(r"gres[:/]([A-Za-z0-9_-]+)(?:[:=]([A-Za-z0-9_.-]+?))??(?:[:=]([0-9]{1,6}))?", re.ASCII)
_MEMORY = re.compile(r"([0-9]{1,15}(?:\.[0-9]+)?)([KMGTP]?)", re.ASCII)
_NODES_GRES = re.compile(r"\s+Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES(?:_IDX)?=(\S*)\s*", re.ASCII)
_VERSION = re.compile(
    r"\bslurm(?:[-_ ][A-Za-z][A-Za-z0-9_]*)*[-_ ]v?([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?![0-9])", re.ASCII
)
"""`slurm 24.11.3`, `slurm-wlm 22.05.8`, `slurm-23.02.7`, `slurm 25.11`, each with whatever a site appends."""
_CLUSTER = re.compile(r"^ClusterName\s*=\s*(\S+)\s*$", re.MULTILINE)
_SETTING = re.compile(r"^([A-Za-z][\w/]*) *= ?(.*?) *$", re.MULTILINE)
_PARTITION_MODE = re.compile(r" PreemptMode=(\S+) ", re.ASCII)
_QOS_MODE = re.compile(r"[A-Za-z,]+", re.ASCII)
_EXPEDITED = re.compile(r"\bExpeditedRequeue=Yes\b", re.ASCII)
_SUBMITTED = re.compile(r"([0-9]{1,10})(?:;[A-Za-z0-9._-]+)?", re.ASCII)

_NOTHING = ("", "N/A", "None", "(null)")
_EXCERPT = 80


def is_node(name: str) -> bool:
    """Whether this can be a node's name. ALL cannot: to Slurm's commands it is the whole cluster."""
    return _NODE_NAME.fullmatch(name) is not None and name.lower() != "all"


def node_list(text: str) -> str:
    """Return a list of nodes as Slurm writes it: people put blanks after its commas, and Slurm takes these."""
    return _BLANKS.sub(",", text.strip())


def nodes(output: bytes) -> dict[str, NodeView]:
    """Views by name from `sinfo -h -N -O NODE_FORMAT`. A node in two partitions is there twice, and the same.

    A row that cannot be read takes no other row with it: its node is `unreadable`, and a row without a node's name is
    left out. Raises SlurmOutputError where no row can be read.
    """
    views: dict[str, NodeView] = {}
    unknown: dict[str, NodeView] = {}
    refusal = None
    for fields in _rows(output, "sinfo"):
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


def _node(fields: list[str]) -> NodeView:
    """One row of `sinfo`. Raises SlurmOutputError where its width, name or state cannot be read."""
    if len(fields) != len(_NODE_FIELDS):
        raise _wrong_width("sinfo", fields, len(_NODE_FIELDS))
    name, state, reason, by, address, cpus, memory, gres = fields
    if not is_node(name):
        raise _unreadable("sinfo", "a node's name", name)
    base, *flags = state.lower().split("+")
    if not all(_STATE.fullmatch(word) for word in (base, *flags)):
        raise _unreadable("sinfo", f"the state of node {name}", state)
    return NodeView(
        name=name,
        state=base,
        flags=frozenset(flags),
        reason="" if reason == "none" else reason,
        reason_by="" if reason == "none" else by,
        address=address,
        cpus=int(cpus) if _COUNT.fullmatch(cpus) else 0,
        memory_mb=int(memory) if _COUNT.fullmatch(memory) else 0,
        gpus=_readable_gpus(gres),
    )


def _readable_gpus(gres: str) -> int:
    """Return how many GPUs generic resources are; 0 where that cannot be read."""
    try:
        return gpus(gres)
    except SlurmOutputError:
        return 0


def jobs(output: bytes) -> list[tuple[frozenset[str], JobView, str]]:
    """From `squeue -h -O JOB_FORMAT`: all ids that a job has, its view without nodes, and its list of nodes."""
    found = []
    for fields in _records(output, len(_JOB_FIELDS), "squeue"):
        number, in_array, user, state, nodelist, host, why, restarts, left, preempted, submitted, comment, name = fields
        if not JOB_ID.fullmatch(number):
            raise _unreadable("squeue", "a job's id", number)
        if not _STATE.fullmatch(state.lower()):
            raise _unreadable("squeue", f"the state of job {number}", state)
        nodelist = "" if nodelist in ("(null)", "n/a", "N/A") else node_list(nodelist)
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
            preempted=preempted not in _NOTHING,
            element=in_array if "_" in in_array and JOB_ID.fullmatch(in_array) else "",
            submitted_at=_time(submitted, f"when job {number} was submitted"),
            comment="" if comment == "(null)" else comment,
        )
        found.append((frozenset((number, in_array)), view, nodelist))
    return found


_SHARING = ("NO", "OK", "YES", "USER", "MCS", "TOPO")


def request(output: bytes, job_id: str) -> JobRequest:
    """From `squeue -h --noconvert -O REQUEST_FORMAT`: of the records that a job array has, this job's."""
    for fields in _records(output, len(_REQUEST_FIELDS), "squeue"):
        told = dict(zip(_REQUEST_FIELDS, fields, strict=True))
        if job_id not in (told["JobID"], told["JobArrayID"]):
            continue
        for name, text in told.items():
            if not text.isprintable():
                raise _unreadable("squeue", f"{name} of job {job_id}", text)
        said = {name: "" if text in _NOTHING else text for name, text in told.items()}
        sharing, exclusive = told["OverSubscribe"], told["Exclusive"]
        if sharing not in _SHARING:
            raise _unreadable("squeue", f"OverSubscribe of job {job_id}", sharing)
        if not exclusive:  # before 25.11 one field told both
            exclusive = {"NO": "NODE", "OK": "NO", "YES": "NO"}.get(sharing, sharing)
        if exclusive not in ("NO", "NODE", "USER", "MCS", "TOPO"):
            raise _unreadable("squeue", f"Exclusive of job {job_id}", exclusive)
        in_total = ("tres-per-job", "tres-per-task", "tres-per-socket")
        per_gpu = _memory_per_gpu(said["mem-per-tres"])
        return JobRequest(
            partition=said["Partition"],
            account=said["Account"],
            qos=said["QOS"],
            reservation=said["Reservation"],
            constraint=said["Feature"],
            licenses=said["Licenses"],
            # A star marks the user's default, which nobody has to ask for.
            wckey="" if said["WCKey"].startswith("*") else said["WCKey"],
            network=said["Network"],
            container=said["Container"],
            exclusive="" if exclusive == "NO" else exclusive.lower(),
            oversubscribe=sharing == "YES",
            gres=_gres(said["tres-per-node"]),
            gres_in_total=tuple(each for name in in_total for each in _gres(said[name])),
            memory_mb=_memory_of_a_node(said["tres-alloc"]) if _megabytes(told["MinMemory"]) and not per_gpu else 0,
            memory_per_gpu_mb=per_gpu,
            disk_mb=_megabytes(told["MinTmpDisk"]),
        )
    raise SlurmOutputError(f"slurm: squeue was asked for job {job_id} and told of others")


def _gres(text: str) -> tuple[Gres, ...]:
    """Generic resources among those of `gres:gpu:a100:2` (22.05) or `cpu=2,gres/gpu:a100=2` (since)."""
    found = []
    for part in text.split(",") if text else ():
        if not part.startswith("gres"):
            continue  # processors, memory and licences, which other fields tell
        match = _GRES.fullmatch(part)
        if match is None:
            raise _unreadable("squeue", "generic resources", text)
        found.append(Gres(match[1], match[2] or "", int(match[3] or 1)))
    return tuple(found)


def _memory_per_gpu(text: str) -> int:
    """Megabytes in `gres:gpu:500` or `gres/gpu:500`; 0 where nothing was said. Of other resources nothing is known."""
    match = re.fullmatch(r"gres[:/]gpu[:=]([0-9]{1,15})M?", text, re.ASCII)
    if text and match is None:
        raise _unreadable("squeue", "memory per GPU", text)
    return 0 if match is None else int(match[1])


def _memory_of_a_node(allocated: str) -> int:
    """One node's share of `cpu=2,mem=25000M,node=2,billing=2`, in megabytes: memory may have been asked for per CPU."""
    words = dict(part.split("=", 1) for part in allocated.split(",") if "=" in part)
    count = words.get("node", "")
    if "mem" not in words or not _COUNT.fullmatch(count) or int(count) == 0:
        raise _unreadable("squeue", "the memory that a job has", allocated)
    return _megabytes(words["mem"]) // int(count)


def _megabytes(text: str) -> int:
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise _unreadable("squeue", "an amount of memory", text)
    return round(float(match[1]) * 1024.0 ** ("KMGTP".index(match[2] or "M") - 1))


def job_gpus(output: bytes) -> list[tuple[str, int]]:
    """From `scontrol show job -d`: GPUs on each node of a node list, of the lists of nodes that have the same."""
    found = []
    for line in _text(output, "scontrol").splitlines():
        if not line.lstrip().startswith("Nodes="):
            continue
        match = _NODES_GRES.fullmatch(line)
        if match is None or not NODE_LIST.fullmatch(match[1]):
            raise _unreadable("scontrol", "a job's generic resources", line.strip())
        if count := gpus(match[2], "scontrol"):
            found.append((match[1], count))
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
    """From `sinfo --version`, such as `slurm 24.11.3`, `slurm-wlm 22.05.8` or `slurm 25.11`, which is 25.11.0."""
    text = _text(output, "sinfo")
    found = _VERSION.search(text)
    if found is None:
        raise _unreadable("sinfo", "the version", text)
    major, minor, micro = (int(number or 0) for number in found.groups())
    return major, minor, micro


def cluster(output: bytes) -> str:
    """From `scontrol show config`."""
    found = _CLUSTER.search(_text(output, "scontrol"))
    if found is None:
        raise SlurmOutputError("slurm: scontrol show config names no ClusterName")
    return found.group(1)


def settings(output: bytes) -> dict[str, str]:
    """From `scontrol show config`: `KEY = VALUE`, a line each; (null) and N/A are nothing."""
    found = dict(_SETTING.findall(_text(output, "scontrol")))
    if "ClusterName" not in found:
        raise SlurmOutputError("slurm: scontrol show config names no ClusterName")
    return {key: "" if value in ("(null)", "N/A") else value for key, value in found.items()}


class Preemption(msgspec.Struct, frozen=True):
    """What is known of a job when it is preempted. `tries`: how often Slurm has started it by itself, and once more."""

    now: bool
    partition: str
    qos: str
    tries: int


def preemption(output: bytes) -> Preemption:
    """From `squeue -h -j JOB -O PREEMPTION_FORMAT`."""
    records = _records(output, len(_PREEMPTION_FIELDS), "squeue")
    if len(records) != 1:
        raise SlurmOutputError(f"slurm: squeue tells of {len(records)} jobs instead of one")
    when, partition, qos, tries = records[0]
    return Preemption(when not in _NOTHING, partition, qos, _count(tries, "how often a job was started"))


def partition_mode(output: bytes) -> str:
    """How jobs of a partition are preempted, from `scontrol show partition -o`."""
    found = _PARTITION_MODE.search(_text(output, "scontrol"))
    if found is None:
        raise SlurmOutputError("slurm: scontrol show partition names no PreemptMode")
    return found[1]


def qos_mode(output: bytes) -> str:
    """How jobs of a QOS are preempted, from `sacctmgr -nP show qos format=preemptmode`; cluster: as all are."""
    text = _text(output, "sacctmgr").strip().lower()
    if not _QOS_MODE.fullmatch(text):
        raise _unreadable("sacctmgr", "the preemption mode of a QOS", text)
    return text


def expedited(output: bytes) -> bool:
    """Whether a job has an expedited requeue, from `scontrol show job`."""
    return _EXPEDITED.search(_text(output, "scontrol")) is not None


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


def gpus(gres: str, command: str = "sinfo") -> int:
    """How many GPUs generic resources such as `gpu:h100:8(S:0-1),nic:2` are. Of shares of GPUs nothing is known."""
    total = 0
    # Commas in parentheses do not separate: gpu:8(S:0,1).
    for part in re.split(r",(?![^()]*\))", gres):
        found = _GPUS.fullmatch(part)
        if found is not None:
            total += int(found[1] or 1) * _MULTIPLES[found[2] or ""]
        elif part.startswith("gpu:"):
            raise _unreadable(command, "generic resources", gres)
    return total


def _records(output: bytes, width: int, command: str) -> list[list[str]]:
    """Fields of each record, all of them of that width. Raises SlurmOutputError."""
    rows = _rows(output, command)
    for fields in rows:
        if len(fields) != width:
            raise _wrong_width(command, fields, width)
    return rows


def _rows(output: bytes, command: str) -> list[list[str]]:
    """Fields of each record. Raises SlurmOutputError where something stands after the last record's end: the output
    was cut off."""
    text = _text(output, command)
    *records, rest = text.split(RECORD)
    if rest.strip():
        whole = f"{len(records)} record{'s' * (len(records) != 1)}"
        raise SlurmOutputError(f"slurm: {command}'s output is cut off after {whole}")
    # Versions that pad fields do it with spaces.
    return [[field.strip(" ") for field in record.removeprefix("\n").split(FIELD)] for record in records]


def _wrong_width(command: str, fields: list[str], width: int) -> SlurmOutputError:
    return _unreadable(command, f"a record of {len(fields)} fields instead of {width}", " ".join(fields))


def _text(output: bytes, command: str) -> str:
    """Names and states are ASCII and checked; what a user wrote in another encoding only looks odd."""
    if b"\0" in output:
        raise SlurmOutputError(f"slurm: {command}'s output is not text")
    return output.decode("utf-8", "replace")


def _time(text: str, what: str) -> float | None:
    """Seconds since 1970, as we have Slurm write all times."""
    return None if text in ("", "N/A", "Unknown", "None", "(null)") else float(_count(text, what))


def _count(text: str, what: str) -> int:
    if not _COUNT.fullmatch(text):
        raise _unreadable("slurm", what, text)
    return int(text)


def _unreadable(command: str, what: str, text: str) -> SlurmOutputError:
    return SlurmOutputError(f"slurm: cannot read {what} in {command}'s output: {text[:_EXCERPT]!a}")
