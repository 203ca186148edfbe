"""Replacement for a lost node: a one-node Slurm job, submitted through submitit, that runs only an agent.

Decides what to request from Slurm: the same as the main job, for one node. `resihp.controller` decides when a
replacement is requested, and `resihp.wrapper.slurm_tasks.replacements` follows the request. submitit reads the
environment of its process, and waits for sbatch without a limit. It therefore runs in a separate process: `submit`
starts `python -P
-m resihp.slurm.replacement FOLDER` with a time limit, and with an environment that lacks the main job's variables. That
process writes the id of the submitted job to a file in FOLDER, even if its parent has died in the meantime; a further
call of `submit` finds this file.

submitit pickles a file in the same folder: the call of `os.execv` by which the job's process becomes the agent. So
nothing is pickled on the way back, and the agent's output is the job's output. The batch script, too, becomes that
process: if it waited for it instead, it would end at the first SIGTERM, and Slurm would take the node for idle while
the agent still runs. submitit's own
`srun` is omitted, because the batch step of a one-node job has the whole node; so is its default wckey, which many
clusters refuse.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from resihp.slurm import commands
from resihp.slurm.client import Gres, JobRequest
from resihp.slurm.command_call import call, own_environment, replacement_environment
from resihp.slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError

TIMEOUT_S = 30.0
"""Time limit for starting Python, importing submitit, and sbatch."""

WARNING_S = 120
"""Seconds before the end of its time limit at which a replacement's agent is warned. It usually ends together with the
main job, which is warned earlier; only if the main job's limit was extended is the replacement the first."""

_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Variables with the numbers of the main job's devices on its own nodes."""
_NOT_FOR_ONE = frozenset(
    {
        *("array", "begin", "chdir", "comment", "contiguous", "deadline", "dependency", "error", "gpus"),
        *("gpus-per-socket", "gpus-per-task", "hold", "input", "job-name", "mail-type", "mail-user", "mincpus"),
        *("nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-gpu", "ntasks-per-node", "output", "parsable"),
        *(
            "segment",
            "signal",
            "spread-job",
            "switches",
            "test-only",
            "time",
            "time-min",
            "tres-per-task",
            "use-min-nodes",
        ),
        *("wait", "wait-all-nodes", "wrap"),
    }
)
"""Options of the main job that do not describe the properties of one additional node."""

_WANTED, _SUBMITTED = "wanted.json", "slurm_job"


class ReplacementJob(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a replacement. `folder` is the request's own folder on the shared file system.

    `asked`: the main job's request, or its user's override. `gpus` and `cpus`: counts per node of the main job.
    `seconds`: time limit of the replacement. `wait_s`: how long the job may wait for its node; after that it is
    useless, and Slurm ends it even if no process is left to cancel it. `extra`: sbatch options of the main job, which
    take precedence over `asked`.
    """

    folder: str
    name: str
    comment: str
    command: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    seconds: float
    wait_s: float
    asked: JobRequest
    gpus: int | None = None
    cpus: int | None = None
    extra: tuple[str, ...] = ()


def submit(wanted: ReplacementJob, *, environment: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> str:
    """Submit the replacement job, unless it was submitted before; return its id.

    Raises SlurmRefusedError if it was not submitted, SlurmUnavailableError or SlurmOutputError if it is unknown whether
    it was.
    """
    job_id = submitted(Path(wanted.folder))
    if job_id is not None:
        return job_id
    parameters(wanted)  # raises for a request that one node cannot meet
    folder = Path(wanted.folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / _WANTED).write_bytes(msgspec.json.encode(wanted))
    except OSError as error:
        raise SlurmUnavailableError(f"{folder}: cannot be written: {error.strerror}") from None
    submitted_with = own_environment(replacement_environment(environment))
    clean = {name: value for name, value in submitted_with.items() if name not in _DEVICES}
    argv = [sys.executable, "-P", "-m", "resihp.slurm.replacement", str(folder)]
    answer = call(argv, environment=clean, timeout_s=timeout_s, folder=folder)
    job_id = submitted(folder)
    if job_id is not None:
        return job_id
    subject = f"{wanted.name}: not submitted"
    if answer.complaint and "Traceback" not in answer.complaint:
        raise commands.failure(subject, "sbatch", answer.complaint)
    last_words = f": ...{answer.complaint[-200:]}" if answer.complaint else ""
    raise SlurmOutputError(f"{subject}: submitit exited with {answer.status} without a job id{last_words}")


def submitted(folder: Path) -> str | None:
    """Return the id of the Slurm job that was submitted from this folder; None if there is none."""
    try:
        text = (folder / _SUBMITTED).read_text().strip()
    except OSError:
        return None
    return text if text.isdigit() else None


def folder_of(folder: Path, number: int) -> Path:
    """Return the folder of request `number` below `folder`, which contains all requests of a job."""
    return folder / f"r{number}"


def all_submitted(folder: Path) -> dict[int, str]:
    """Return the ids of Slurm jobs that were submitted as replacements, by request number. `folder` contains all
    requests of a job."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return {}
    numbers = sorted(int(name[1:]) for name in names if name[:1] == "r" and name[1:].isdigit())
    jobs = {number: submitted(folder_of(folder, number)) for number in numbers}
    return {number: job for number, job in jobs.items() if job is not None}


def parameters(wanted: ReplacementJob) -> dict[str, Any]:
    """Return the arguments of `submitit.SlurmExecutor.update_parameters`, which has its own names for sbatch's options.

    Raises SlurmRefusedError for a request that cannot be made for a single node.
    """
    request = wanted.asked
    extra, exclude = _extra(wanted.extra, wanted.exclude)
    minutes = max(1, int(wanted.seconds // 60))
    options: dict[str, Any] = {
        "no-requeue": True,
        "deadline": f"now+{minutes * 60 + max(60, round(wanted.wait_s))}",
        "signal": f"B:USR2@{WARNING_S}",
    }
    for name in ("reservation", "licenses", "network", "container"):
        if value := getattr(request, name):
            options[name] = value
    if request.oversubscribe:
        options["oversubscribe"] = True
    if request.disk_mb:
        options["tmp"] = f"{request.disk_mb}M"
    if not extra.keys() & {"mem", "mem-per-cpu", "mem-per-gpu"}:
        per_gpu = request.memory_per_gpu_mb
        options |= {"mem-per-gpu": f"{per_gpu}M"} if per_gpu else {"mem": f"{request.memory_mb}M"}
    gpus, others = _devices(wanted)
    given: dict[str, Any] = {
        "job_name": wanted.name,
        "comment": wanted.comment,
        "nodes": 1,
        "ntasks_per_node": 1,
        "time": minutes,
        "gpus_per_node": gpus or None,
        "gres": others or None,
        "cpus_per_task": None if request.exclusive else wanted.cpus,
        "exclusive": True if request.exclusive == "node" else request.exclusive or None,
        "partition": request.partition or None,
        "account": request.account or None,
        "qos": request.qos or None,
        "constraint": _single_node_constraint(request.constraint) or None,
        "exclude": exclude or None,
        "wckey": request.wckey or None,
        "use_srun": False,
        "stderr_to_stdout": True,
        "additional_parameters": options | extra,
    }
    return given


def _devices(wanted: ReplacementJob) -> tuple[str, str]:
    """Return a node's GPUs, with the types of the main job's GPUs, and its other generic resources, both in sbatch's
    form."""
    request = wanted.asked
    gpus = [gres for gres in request.gres if gres.name == "gpu"]
    kinds = {gres.type for gres in request.gres_in_total if gres.name == "gpu"}
    odd = sorted({gres.name for gres in request.gres_in_total} - {"gpu"})
    if odd or len(kinds) > 1:
        unsplittable = " and ".join(odd) or f"GPUs of types {' and '.join(sorted(kinds))}"
        raise SlurmRefusedError(
            f"{wanted.name}: the job asked for {unsplittable} in total, so one node's share is unknown; "
            "submit it with --gres or --gpus-per-node"
        )
    if not gpus and wanted.gpus:
        gpus = [Gres("gpu", "".join(kinds), wanted.gpus)]
    others = ",".join(_gres_text(gres.name, gres) for gres in request.gres if gres.name != "gpu")
    return ",".join(_gres_text("", gres) for gres in gpus), others


def _gres_text(name: str, gres: Gres) -> str:
    return ":".join(part for part in (name, gres.type, str(gres.count)) if part)


def _single_node_constraint(constraint: str) -> str:
    """Return the constraint unchanged. Raises SlurmRefusedError if it describes features of a group of nodes."""
    if "[" in constraint or "*" in constraint:
        raise SlurmRefusedError(
            f"constraint {constraint}: uses [ ] or *, which describe a group of nodes, but a replacement is one node; "
            "set constraint in [slurm] to the features that it needs"
        )
    return constraint


def _extra(extra: Iterable[str], exclude: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the main job's further sbatch options, and the list of all nodes to exclude."""
    options: dict[str, Any] = {}
    left_out = list(exclude)
    for option in extra:
        name, separator, value = option.removeprefix("--").partition("=")
        if name == "exclude":
            left_out.append(value)
        elif name not in _NOT_FOR_ONE:
            options[name] = value if separator else True
    return options, ",".join(left_out)


def main(folder: Path) -> None:
    """Submit the requested job and write its id to a file. Runs in its own process."""
    import submitit

    wanted = msgspec.json.decode((folder / _WANTED).read_bytes(), type=ReplacementJob)
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=0, python=f"exec {shlex.quote(sys.executable)} -P")
    executor.update_parameters(**parameters(wanted))
    try:
        job = executor.submit(os.execv, wanted.command[0], list(wanted.command))
    except submitit.core.utils.FailedJobError:
        sys.exit(1)  # sbatch has written its error to standard error
    note = folder / f".{_SUBMITTED}"
    note.write_text(f"{job.job_id}\n")
    note.rename(folder / _SUBMITTED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
