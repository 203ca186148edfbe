"""`resihp init`: write a job file and a batch script for this cluster, each line explained, to be edited and submitted.

Partition, GPUs per node and time limit come from Slurm; without Slurm, or without an answer, the files have default
values and say so. Both files are validated before they are written: `resihp submit job.toml --dry-run` accepts them
unchanged. Submits nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from resihp.durable_files import replacing
from resihp.errors import UsageError
from resihp.words import count_of
from resihp.wrapper.output.answers import message

if TYPE_CHECKING:
    from resihp.slurm.survey import PartitionView, Survey
    from resihp.wrapper.config.schema import Configuration

JOB_FILE, SCRIPT = "job.toml", "job.sbatch"
JSON_SCHEMA = 1
DEFAULT_NODES, DEFAULT_GPUS = 2, 8
MAX_DEFAULT_TIME_S = 24 * 3600.0
"""Longest time limit, in seconds, that the job file gets by default. It is lower if Slurm allows less."""
MIN_WARNING_S = 60.0
CHECKPOINT_EVERY = 100
"""Iterations between checkpoints in the job file. The key's own default is 0: no checkpoints."""
LIKELY_SCRIPTS = ("train.py", "pretrain.py", "pretrain_gpt.py", "main.py")
PLACEHOLDER_COMMAND = ("echo", "put your training command into job.toml")


class JobFileChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The values for both files. `why`: their source, for the comments in the files. `seconds`: the time limit; None if
    not given."""

    nodes: int
    gpus_per_node: int
    seconds: float | None
    partition: str
    command: tuple[str, ...]
    why: str
    notices: tuple[str, ...] = ()


def register(app: typer.Typer) -> None:
    """Add `resihp init` to the command line."""
    app.command(context_settings={"allow_interspersed_args": False})(init)


def connect() -> Survey | None:
    """Return a client for this machine's Slurm; None if there is none."""
    if shutil.which("scontrol") is None or shutil.which("sbatch") is None:
        return None
    from resihp.slurm.survey import CommandSurvey

    return CommandSurvey()


def init(
    command: Annotated[list[str] | None, typer.Argument(help="After --: the command of each worker.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder for the files.", show_default="here")] = Path(),
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of the layout.", show_default="2")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs per node.", show_default="from Slurm")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.", show_default="one with GPUs")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, as 24h.", show_default="from Slurm")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Write job.toml and a batch script for this cluster, each line explained.

    Example: resihp init --nodes 4 -- python train.py
    """
    from resihp.wrapper.config.program import missing_script
    from resihp.wrapper.config.sources import read

    wanted = choose(
        connect(),
        read({}),
        command=tuple(command or ()),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        partition=partition,
        seconds=_seconds(time),
    )
    files = write(wanted, folder, force=force)
    for text in wanted.notices:
        message(text)
    name = shlex.quote(files[0] if folder == Path() else str(folder / files[0]))
    next_commands = [f"resihp submit {name} --dry-run"]
    if wanted.command == PLACEHOLDER_COMMAND:
        message(f"set command = [...] in {name} to your training command, and the layout to your model's needs")
    elif missing := missing_script(wanted.command):
        message(f"{missing}; put it there, or correct command = [...] in {name}")
    message(f"resihp doctor --config {name} checks whether this cluster can run it")
    message(f"{next_commands[0]} prints the batch script, resihp submit {name} submits it")
    paths = [str(folder / file) for file in files]
    if as_json:
        print(json.dumps({"schema": JSON_SCHEMA, "files": paths, "next": next_commands}))
    else:
        print("\n".join(paths))


# --- values for the files -------------------------------------------------------------------------------------------


def choose(
    survey: Survey | None,
    site: Configuration,
    *,
    command: tuple[str, ...] = (),
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    partition: str | None = None,
    seconds: float | None = None,
) -> JobFileChoice:
    """Return the values for the files: the given values, or else Slurm's, or else defaults. Raises UsageError if Slurm
    lacks a given value, such as a partition."""
    partitions, why, notices = _survey(survey)
    view = _pick(partitions, partition if partition is not None else site.slurm.partition, site.site.partitions)
    if view is None:
        return JobFileChoice(
            nodes=nodes or DEFAULT_NODES,
            gpus_per_node=gpus_per_node or DEFAULT_GPUS,
            seconds=seconds or MAX_DEFAULT_TIME_S,
            partition=partition or "",
            command=command or _command(),
            why=why,
            notices=tuple(notices),
        )
    _check_available(view, nodes=nodes, gpus_per_node=gpus_per_node, seconds=seconds)
    why = f"from Slurm: partition {view.name} has {count_of(view.nodes, 'node')}"
    if view.unreadable:
        notices.append(f"{view.unreadable}; using {DEFAULT_GPUS} GPUs per node, set --gpus-per-node to change it")
    else:
        why += f" of {count_of(view.gpus, 'GPU')}"
        if not view.gpus:
            notices.append(f"partition {view.name} has no GPUs; choose another with --partition: sinfo -o '%P %D %G'")
    is_default = view.default and partition is None
    return JobFileChoice(
        nodes=nodes or min(DEFAULT_NODES, view.nodes),
        gpus_per_node=gpus_per_node or (DEFAULT_GPUS if view.unreadable else max(view.gpus, 1)),
        seconds=seconds or min(view.seconds or MAX_DEFAULT_TIME_S, MAX_DEFAULT_TIME_S),
        partition="" if is_default else view.name,
        command=command or _command(),
        why=why,
        notices=tuple(notices),
    )


def _survey(survey: Survey | None) -> tuple[Sequence[PartitionView], str, list[str]]:
    """Return Slurm's partitions; if there are none, also the reason and notices for the user."""
    from resihp.slurm.errors import SlurmError

    if survey is None:
        notice = "no Slurm on this machine: the files have default values; on a login node, they come from Slurm"
        return (), "default values: there is no Slurm on this machine", [notice]
    try:
        return survey.partitions(), "default values: there is no Slurm on this machine", []
    except SlurmError as error:
        notice = f"{error}; the files have default values, check them"
        return (), "default values: Slurm did not answer", [notice]


def _check_available(
    view: PartitionView, *, nodes: int | None, gpus_per_node: int | None, seconds: float | None
) -> None:
    """Raise UsageError if the given values exceed what the partition has or allows."""
    if nodes is not None and nodes > view.nodes:
        raise UsageError(f"--nodes {nodes}: partition {view.name} has {view.nodes}; sinfo -p {view.name}")
    if gpus_per_node is not None and gpus_per_node > max(view.gpus, 1) and not view.unreadable:
        raise UsageError(
            f"--gpus-per-node {gpus_per_node}: nodes of partition {view.name} have {view.gpus}; "
            f"sinfo -p {view.name} -o '%D %G'"
        )
    if seconds is not None and view.seconds is not None and seconds > view.seconds:
        raise UsageError(f"--time: partition {view.name} allows {view.seconds / 3600:g} h; sinfo -p {view.name} -o %l")


def _pick(partitions: Sequence[PartitionView], name: str, allowed: Sequence[str]) -> PartitionView | None:
    """Return the named partition, or else one with GPUs, preferably the default partition. If it has several kinds of
    nodes, return the kind with most nodes."""
    if not partitions:
        return None
    if name:
        views = [view for view in partitions if view.name == name]
        if not views:
            names = ", ".join(dict.fromkeys(view.name for view in partitions))
            raise UsageError(f"partition {name[:80]!a}: not among the partitions you may use: {names}")
        return max(views, key=lambda view: (view.gpus > 0 or bool(view.unreadable), view.nodes))
    usable = [view for view in partitions if view.up and view.nodes and (not allowed or view.name in allowed)]
    ranked = sorted(usable, key=lambda view: (view.gpus > 0, view.default, view.nodes), reverse=True)
    return ranked[0] if ranked else None


def _command() -> tuple[str, ...]:
    for name in LIKELY_SCRIPTS:
        if Path(name).is_file():
            return ("python", name)
    return PLACEHOLDER_COMMAND


# --- the files ------------------------------------------------------------------------------------------------------


def write(wanted: JobFileChoice, folder: Path, *, force: bool) -> tuple[str, str]:
    """Write both files, or neither, and return their names.

    Raises UsageError for existing files, unless `force`, and for values that a job file cannot have.
    """
    import tempfile

    from resihp.wrapper.commands.submit import script_of
    from resihp.wrapper.config.sources import read

    job_file, script = folder / JOB_FILE, folder / SCRIPT
    existing = [str(path) for path in (job_file, script) if os.path.lexists(path)]
    if existing and not force:
        raise UsageError(f"{' and '.join(existing)}: already there; --force replaces, --folder DIR writes elsewhere")
    text = job_text(wanted)
    with tempfile.TemporaryDirectory(prefix="resihp-init-") as trial:
        trial_file = Path(trial, JOB_FILE)
        trial_file.write_text(text, encoding="utf-8")
        configuration = read({}, trial_file)
    batch = annotated(script_of(configuration, job_file.absolute(), chain=1))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in ((job_file, text), (script, batch)):
            with replacing(path, named_by_user=True) as file:
                file.write(content.encode())
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}; choose another place with --folder") from None
    return JOB_FILE, SCRIPT


OPTIONAL_SECTIONS = """
# Network interface between nodes, if the wrong one is chosen: ip -br link lists them.
# [network]
# interface = "ib0"

# Metrics for Prometheus: on loopback of the supervisor's node, or in a file for node_exporter.
# [metrics]
# port = 9400
# textfile = "/var/lib/node_exporter/resihp-{job}.prom"

# Notifications of events. The file holds the webhook's URL; chmod 600 it.
# [hooks]
# webhook_file = "~/.config/resihp/webhook"
# command = ["/usr/local/bin/page-me"]
# events = ["failure", "drain", "replacement", "end"]
"""
"""The end of job.toml: sections that few jobs need, as comments."""


def job_text(wanted: JobFileChoice) -> str:
    """Return the text of job.toml. Keys that are rarely changed are comments with their default values."""
    default, seconds = _defaults(), wanted.seconds or MAX_DEFAULT_TIME_S
    warning_s = default.slurm.warning if seconds >= 2 * default.slurm.warning else max(MIN_WARNING_S, seconds // 4)
    partition = f"partition = {_toml(wanted.partition)}" if wanted.partition else '# partition = "gpu"'
    about_partition = "Partition to run in." + ("" if wanted.partition else " Default: Slurm's default partition.")
    warning = f"warning = {_toml(_duration(warning_s))}"
    return f"""# A job for resihp, written by resihp init ({wanted.why}).
# Try it: resihp submit {JOB_FILE} --dry-run. Submit it: resihp submit {JOB_FILE}.
# Run it on one machine, with virtual nodes: resihp run --local --config {JOB_FILE}.

[job]
# Nodes of the layout; spares are additional.
nodes = {wanted.nodes}
# GPUs per node; each gets one worker.
gpus_per_node = {wanted.gpus_per_node}
# Memory of each GPU, so that every plan fits: 80GB, 79.5GiB. Not checked if left out.
# memory_per_device = "80GB"
# Time limit of each run. The job is requeued and resumes until training is done.
time = {_toml(_duration(seconds))}
# Name of the job in Slurm; default: the script's.
# name = "gpt-7b"
# Lines of the batch script before the job starts, and environment variables of all its processes.
# setup = ["module load cuda"]
# environment = ["NCCL_DEBUG=INFO"]
# Command of each worker: a Python script or module, or any other command.
command = {_toml(list(wanted.command))}

[layout]
# GPUs that share each layer (tensor parallelism), within a node: gpus_per_node must be a multiple of it.
tp = {default.layout.tp}
# Stages that the layers are split into (pipeline parallelism). There are nodes * gpus_per_node / (tp * pp) replicas;
# with two or more, training continues at once when one of them loses a GPU.
pp = {default.layout.pp}
# Order of work in the pipeline: 1f1b, interleaved or zero-bubble.
schedule = {_toml(default.layout.schedule)}

[checkpoint]
# Iterations between checkpoints, 0 for none; needed when too few GPUs are left to continue. The last iteration has one.
every = {CHECKPOINT_EVERY}
# Number of complete checkpoints to keep.
keep = {default.checkpoint.keep}
# Folder of checkpoints; default: the job's own. Jobs of a chain (resihp submit --chain 3) have to share one.
# folder = "/shared/checkpoints/run-1"

[ledger]
# Ledger of the job's history: a file in its folder, or one database for all jobs, postgresql+psycopg://host/resihp.
url = {_toml(default.ledger.url)}

[slurm]
# {about_partition}
{partition}
# Account that Slurm charges.
# account = "project"
# Slurm's name for the GPU type, if there are several: sinfo -o %G lists them.
# gpu_type = "h100"
# Nodes in addition to the layout's; their workers are on standby for those that die.
spares = {default.slurm.spares}
# Most nodes that the job may request from Slurm to replace lost ones, each as a job of its own.
replacements = {default.slurm.replacements}
# Most bad nodes that the job may have drained, if you or the site's hook may drain nodes.
drains = {default.slurm.drains}
# Time before the end of the time limit at which the job writes a checkpoint.
{warning}
# After that: requeue (it runs again), or end.
on_warning = {_toml(default.slurm.on_warning)}
# How it is requeued: usual, or expedite (at once; Slurm 25.11 or later, where the site allows it).
# requeue = "expedite"
# Further options for sbatch.
# extra = ["--mail-type=END"]
{OPTIONAL_SECTIONS}"""


def _defaults() -> Configuration:
    """Return the defaults of all keys, whatever files and environment say."""
    from resihp.wrapper.config.schema import Configuration

    return Configuration.model_construct()


_COMMENTS = {
    "nodes": f"Nodes of the layout plus spares, GPUs per node, and time limit, as in {JOB_FILE}.",
}


def annotated(script: str) -> str:
    """Return the batch script with comments on how to use it and on values that the job file has as well."""
    lines = script.splitlines()
    title = [
        f"# The script that resihp submit {JOB_FILE} submits; without resihp submit: sbatch {SCRIPT}",
        f"# Change {JOB_FILE} rather than this file: its layout has to fit the nodes requested here.",
    ]
    annotated_lines: list[str] = [lines[0], *title]
    for line in lines[2:]:
        for name, comment in _COMMENTS.items():
            if line.startswith(f"#SBATCH --{name}="):
                annotated_lines.append(f"# {comment}")
        if line.startswith("exec "):
            annotated_lines.append("# The Python environment with resihp must exist on all nodes.")
        annotated_lines.append(line)
    return "\n".join(annotated_lines) + "\n"


def _toml(value: Any) -> str:
    """Return a string or a list of strings in TOML's syntax.

    TOML's basic strings take the escapes of JSON except the one for DEL, and no surrogates. Raises UsageError for a
    surrogate.
    """
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{value[:80]!a}: not valid Unicode, a job file cannot hold it")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _duration(seconds: float) -> str:
    """Format a duration as `24h`, `1h30m` or `45s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if count]
    return "".join(parts)


def _seconds(text: str | None) -> float | None:
    from resihp.wrapper.config.values import duration

    try:
        return duration(text)
    except ValueError as error:
        raise UsageError(f"--time {text!r}: {error}") from None
