"""A node in place of a lost one: a Slurm job of one node, submitted through submitit, whose only process is our agent.

Decides what the job asks Slurm for: what the main job asked for, for one node. When one is wanted is the business of
`resihp.controller`, what becomes of it that of `wrapper.slurm_tasks.replacements`. submitit looks at the environment of
its process and waits for sbatch without end, so it gets a process of its own: `submit` starts `python -P -m
slurm.replacement FOLDER` with an environment that says nothing of the main job, and a time limit. A job that has been
submitted is noted in its folder by that process, whoever has died meanwhile: asked again, `submit` finds it there.

What submitit pickles is in that folder, written by us: the call of `os.execv` by which the job becomes the agent. So
nothing is pickled on the way back, signals reach the agent, and its output is the job's. submitit's own `srun` is left
out, since the batch step of one node has all of the node; and of its defaults a wckey, which many clusters refuse.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slurm import commands
from slurm.client import Gres, JobRequest
from slurm.command_call import call, own_environment, submit_environment
from slurm.errors import SlurmOutputError, SlurmRefusedError, SlurmUnavailableError

TIMEOUT_S = 30.0
"""For starting Python, importing submitit, and sbatch."""

_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""What the main job has on its own nodes."""
_NOT_FOR_ONE = frozenset(
    {
        *("array", "begin", "chdir", "comment", "contiguous", "deadline", "dependency", "error", "gpus"),
        *("gpus-per-socket", "gpus-per-task", "hold", "input", "job-name", "mail-type", "mail-user", "mincpus"),
        *("nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-gpu", "ntasks-per-node", "output", "parsable"),
        *("segment", "spread-job", "switches", "test-only", "time", "time-min", "tres-per-task", "use-min-nodes"),
        *("wait", "wait-all-nodes", "wrap"),
    }
)
"""Options of the main job that say nothing of what one more node must be like."""

_WANTED, _SUBMITTED = "wanted.json", "slurm_job"


class ReplacementJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for. `folder` is the job's own, on the shared file system.

    `asked` is what the main job asked for, or what its user wants instead. `gpus` and `cpus`: what it has on a node.
    `seconds`: the time limit, `wait_s` how long the job may wait for its node: then it is of no use to anybody, and
    Slurm ends it, also where nobody is left who could cancel it. `extra`: options of sbatch, as the main job was given
    them; they count more than `asked`.
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
    """Submit the job, unless it was before; returns its id.

    Raises SlurmRefusedError when it was not, SlurmUnavailableError or SlurmOutputError when that is not known.
    """
    known = submitted(Path(wanted.folder))
    if known is not None:
        return known
    parameters(wanted)  # what cannot be asked for is refused here
    folder = Path(wanted.folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / _WANTED).write_bytes(msgspec.json.encode(wanted))
    except OSError as error:
        raise SlurmUnavailableError(f"{folder}: cannot be written: {error.strerror}") from None
    submitted_with = own_environment(submit_environment(environment))
    clean = {name: value for name, value in submitted_with.items() if name not in _DEVICES}
    argv = [sys.executable, "-P", "-m", "slurm.replacement", str(folder)]
    answer = call(argv, environment=clean, timeout_s=timeout_s, folder=folder)
    known = submitted(folder)
    if known is not None:
        return known
    subject = f"{wanted.name}: not submitted"
    if answer.complaint and "Traceback" not in answer.complaint:
        raise commands.failure(subject, "sbatch", answer.complaint)
    last_words = f": ...{answer.complaint[-200:]}" if answer.complaint else ""
    raise SlurmOutputError(f"{subject}: submitit ended with {answer.status} and told of no job{last_words}")


def submitted(folder: Path) -> str | None:
    """The Slurm job that was submitted from this folder, if one was."""
    try:
        text = (folder / _SUBMITTED).read_text().strip()
    except OSError:
        return None
    return text if text.isdigit() else None


def folder_of(folder: Path, number: int) -> Path:
    """Where request `number` of a job is kept, in the folder of all of them."""
    return folder / f"r{number}"


def all_submitted(folder: Path) -> dict[int, str]:
    """The Slurm jobs that were submitted for a job, by the number of the request; `folder` is that of all of them."""
    try:
        names = [each.name for each in folder.iterdir()]
    except OSError:
        return {}
    numbers = sorted(int(name[1:]) for name in names if name[:1] == "r" and name[1:].isdigit())
    found = {number: submitted(folder_of(folder, number)) for number in numbers}
    return {number: job for number, job in found.items() if job is not None}


def parameters(wanted: ReplacementJob) -> dict[str, Any]:
    """For `submitit.SlurmExecutor.update_parameters`, whose names for sbatch's options these are.

    Raises SlurmRefusedError for what cannot be asked for one node alone.
    """
    asked = wanted.asked
    extra, exclude = _extra(wanted.extra, wanted.exclude)
    minutes = max(1, int(wanted.seconds // 60))
    options: dict[str, Any] = {"no-requeue": True, "deadline": f"now+{minutes * 60 + max(60, round(wanted.wait_s))}"}
    for name in ("reservation", "licenses", "network", "container"):
        if value := getattr(asked, name):
            options[name] = value
    if asked.oversubscribe:
        options["oversubscribe"] = True
    if asked.disk_mb:
        options["tmp"] = f"{asked.disk_mb}M"
    if not extra.keys() & {"mem", "mem-per-cpu", "mem-per-gpu"}:
        per_gpu = asked.memory_per_gpu_mb
        options |= {"mem-per-gpu": f"{per_gpu}M"} if per_gpu else {"mem": f"{asked.memory_mb}M"}
    gpus, others = _devices(wanted)
    given: dict[str, Any] = {
        "job_name": wanted.name,
        "comment": wanted.comment,
        "nodes": 1,
        "ntasks_per_node": 1,
        "time": minutes,
        "gpus_per_node": gpus or None,
        "gres": others or None,
        "cpus_per_task": None if asked.exclusive else wanted.cpus,
        "exclusive": True if asked.exclusive == "node" else asked.exclusive or None,
        "partition": asked.partition or None,
        "account": asked.account or None,
        "qos": asked.qos or None,
        "constraint": _of_one_node(asked.constraint) or None,
        "exclude": exclude or None,
        "wckey": asked.wckey or None,
        "use_srun": False,
        "stderr_to_stdout": True,
        "additional_parameters": options | extra,
    }
    return given


def _devices(wanted: ReplacementJob) -> tuple[str, str]:
    """GPUs of a node, of the job's types, and its other generic resources, as sbatch takes both."""
    asked = wanted.asked
    gpus = [each for each in asked.gres if each.name == "gpu"]
    kinds = {each.type for each in asked.gres_in_total if each.name == "gpu"}
    odd = sorted({each.name for each in asked.gres_in_total} - {"gpu"})
    if odd or len(kinds) > 1:
        what = " and ".join(odd) or f"GPUs of types {' and '.join(sorted(kinds))}"
        raise SlurmRefusedError(
            f"{wanted.name}: the job asked for {what} in total, and nothing tells one node's share; "
            "submit it with --gres or --gpus-per-node"
        )
    if not gpus and wanted.gpus:
        gpus = [Gres("gpu", "".join(kinds), wanted.gpus)]
    others = ",".join(_written(each.name, each) for each in asked.gres if each.name != "gpu")
    return ",".join(_written("", each) for each in gpus), others


def _written(name: str, gres: Gres) -> str:
    return ":".join(part for part in (name, gres.type, str(gres.count)) if part)


def _of_one_node(constraint: str) -> str:
    """Raises SlurmRefusedError for features that only several nodes have together, or have to have in common."""
    if "[" in constraint or "*" in constraint:
        raise SlurmRefusedError(
            f"constraint {constraint}: is about several nodes at once, and cannot be asked for one; set constraint in "
            "[slurm] to what a node in place of a lost one must have"
        )
    return constraint


def _extra(extra: Iterable[str], exclude: Iterable[str]) -> tuple[dict[str, Any], str]:
    """The main job's further options, and all that is to be left out."""
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
    """In a process of its own: submit what is wanted, and note what came of it."""
    import submitit

    wanted = msgspec.json.decode((folder / _WANTED).read_bytes(), type=ReplacementJob)
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=0, python=f"{shlex.quote(sys.executable)} -P")
    executor.update_parameters(**parameters(wanted))
    try:
        job = executor.submit(os.execv, wanted.command[0], list(wanted.command))
    except submitit.core.utils.FailedJobError:
        sys.exit(1)  # sbatch's words are on standard error by now
    note = folder / f".{_SUBMITTED}"
    note.write_text(f"{job.job_id}\n")
    note.rename(folder / _SUBMITTED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
