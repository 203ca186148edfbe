"""Parsing of a job's request for nodes, as squeue prints it. Pure; called by `resihp.slurm.commands`."""

from __future__ import annotations

import re

from resihp.slurm.client import Gres, JobRequest
from resihp.slurm.errors import SlurmOutputError
from resihp.slurm.parsing.fields import COUNT_PATTERN, MISSING_VALUES, format_of, read_records, unreadable

_REQUEST_FIELDS = (
    *("JobID", "JobArrayID", "Partition", "Account", "QOS", "Reservation", "Feature", "Licenses", "WCKey", "Network"),
    *("Container", "OverSubscribe", "Exclusive", "tres-per-node", "tres-per-job", "tres-per-task", "tres-per-socket"),
    *("MinMemory", "mem-per-tres", "MinTmpDisk", "tres-alloc"),
)
"""`Exclusive` exists since 25.11. squeue prints an empty text in place of a field that it does not know."""
REQUEST_FORMAT = format_of(_REQUEST_FIELDS)
"""Fields for `squeue --noconvert --Format`."""
_GRES = re.compile(r"gres[:/]([A-Za-z0-9_-]+)(?:[:=]([A-Za-z0-9_.-]+?))??(?:[:=]([0-9]{1,6}))?", re.ASCII)
_MEMORY = re.compile(r"([0-9]{1,15}(?:\.[0-9]+)?)([KMGTP]?)", re.ASCII)


_SHARING = ("NO", "OK", "YES", "USER", "MCS", "TOPO")


def request(output: bytes, job_id: str) -> JobRequest:
    """Parse `squeue -h --noconvert -O REQUEST_FORMAT`. For a job array, squeue prints several records; the one of
    `job_id` is returned."""
    for fields in read_records(output, len(_REQUEST_FIELDS), "squeue"):
        raw = dict(zip(_REQUEST_FIELDS, fields, strict=True))
        if job_id not in (raw["JobID"], raw["JobArrayID"]):
            continue
        for name, text in raw.items():
            if not text.isprintable():
                raise unreadable("squeue", f"{name} of job {job_id}", text)
        values = {name: "" if text in MISSING_VALUES else text for name, text in raw.items()}
        sharing, exclusive = raw["OverSubscribe"], raw["Exclusive"]
        if sharing not in _SHARING:
            raise unreadable("squeue", f"OverSubscribe of job {job_id}", sharing)
        if not exclusive:  # before 25.11 one field held both
            exclusive = {"NO": "NODE", "OK": "NO", "YES": "NO"}.get(sharing, sharing)
        if exclusive not in ("NO", "NODE", "USER", "MCS", "TOPO"):
            raise unreadable("squeue", f"Exclusive of job {job_id}", exclusive)
        in_total = ("tres-per-job", "tres-per-task", "tres-per-socket")
        per_gpu = _memory_per_gpu(values["mem-per-tres"])
        return JobRequest(
            partition=values["Partition"],
            account=values["Account"],
            qos=values["QOS"],
            reservation=values["Reservation"],
            constraint=values["Feature"],
            licenses=values["Licenses"],
            # A star marks the user's default, which need not be requested.
            wckey="" if values["WCKey"].startswith("*") else values["WCKey"],
            network=values["Network"],
            container=values["Container"],
            exclusive="" if exclusive == "NO" else exclusive.lower(),
            oversubscribe=sharing == "YES",
            gres=_gres(values["tres-per-node"]),
            gres_in_total=tuple(gres for name in in_total for gres in _gres(values[name])),
            memory_mb=_memory_of_a_node(values["tres-alloc"]) if _megabytes(raw["MinMemory"]) and not per_gpu else 0,
            memory_per_gpu_mb=per_gpu,
            disk_mb=_megabytes(raw["MinTmpDisk"]),
        )
    raise SlurmOutputError(f"slurm: squeue was asked for job {job_id} and returned other jobs")


def _gres(text: str) -> tuple[Gres, ...]:
    """Return the generic resources in `gres:gpu:a100:2` (22.05) or `cpu=2,gres/gpu:a100=2` (later releases)."""
    resources = []
    for part in text.split(",") if text else ():
        if not part.startswith("gres"):
            continue  # processors, memory and licences: other fields report them
        match = _GRES.fullmatch(part)
        if match is None:
            raise unreadable("squeue", "generic resources", text)
        resources.append(Gres(match[1], match[2] or "", int(match[3] or 1)))
    return tuple(resources)


def _memory_per_gpu(text: str) -> int:
    """Return the megabytes in `gres:gpu:500` or `gres/gpu:500`; 0 for an empty text. Raises SlurmOutputError for other
    resources."""
    match = re.fullmatch(r"gres[:/]gpu[:=]([0-9]{1,15})M?", text, re.ASCII)
    if text and match is None:
        raise unreadable("squeue", "memory per GPU", text)
    return 0 if match is None else int(match[1])


def _memory_of_a_node(allocated: str) -> int:
    """Return one node's share of the memory in `cpu=2,mem=25000M,node=2,billing=2`, in megabytes. The allocation is
    used because memory may be requested per CPU."""
    words = dict(part.split("=", 1) for part in allocated.split(",") if "=" in part)
    count = words.get("node", "")
    if "mem" not in words or not COUNT_PATTERN.fullmatch(count) or int(count) == 0:
        raise unreadable("squeue", "the memory that a job has", allocated)
    return _megabytes(words["mem"]) // int(count)


def _megabytes(text: str) -> int:
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise unreadable("squeue", "an amount of memory", text)
    return round(float(match[1]) * 1024.0 ** ("KMGTP".index(match[2] or "M") - 1))
