"""`resihp init`: a job file and a batch script for this cluster, each line explained, to be edited and submitted.

What Slurm tells is written down (partition, GPUs of a node, time limit); where there is no Slurm, or no answer, usual
values stand there instead, and that is said. Both files are tried before they are written: `resihp submit job.toml
--dry-run` takes them as they are. Submits nothing.
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
from wrapper.output.answers import message

if TYPE_CHECKING:
    from slurm.survey import PartitionView, Survey
    from wrapper.config.schema import Configuration

JOB_FILE, SCRIPT = "job.toml", "job.sbatch"
SCHEMA = 1
USUAL_NODES = 2
LONGEST_S = 24 * 3600.0
"""Asked for where Slurm allows more."""
WARNING_S, LEAST_WARNING_S = 300.0, 60.0
LIKELY = ("train.py", "pretrain.py", "pretrain_gpt.py", "main.py")
PLACEHOLDER = ("echo", "put your training command into job.toml")


class JobFileChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the files. `why` tells where it comes from, for their comments; None: not said."""

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
    """The Slurm of this machine; None where there is none."""
    if shutil.which("scontrol") is None or shutil.which("sbatch") is None:
        return None
    from slurm.survey import CommandSurvey

    return CommandSurvey()


def init(
    command: Annotated[list[str] | None, typer.Argument(help="After --: what each worker runs.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the files go.", show_default="here")] = Path(),
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of the layout.", show_default="2")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a node.", show_default="by Slurm")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.", show_default="one with GPUs")] = None,
    time: Annotated[str | None, typer.Option(help="How long the job may take: 24h.", show_default="by Slurm")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Write job.toml and a batch script for this cluster, each line explained.

    Example: resihp init --nodes 4 -- python train.py
    """
    from wrapper.config.program import missing_script
    from wrapper.config.schema import read

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
    after = [f"resihp submit {name} --dry-run"]
    if wanted.command == PLACEHOLDER:
        message(f"put what you train into command = [...] of {name}, and the layout that your model needs")
    elif missing := missing_script(wanted.command):
        message(f"{missing}; put it there, or mend command = [...] of {name}")
    message(f"resihp doctor --config {name} looks whether this cluster can run it")
    message(f"{after[0]} prints the batch script, resihp submit {name} submits it")
    paths = [str(folder / file) for file in files]
    if as_json:
        print(json.dumps({"schema": SCHEMA, "files": paths, "next": after}))
    else:
        print("\n".join(paths))


# --- what to write --------------------------------------------------------------------------------------------------


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
    """What was asked for, else what Slurm has, else what is usual. Raises UsageError for what Slurm does not have."""
    from slurm.errors import SlurmError

    found: Sequence[PartitionView] = ()
    notices: list[str] = []
    why = "usual values: there is no Slurm on this machine"
    if survey is not None:
        try:
            found = survey.partitions()
        except SlurmError as error:
            notices.append(f"{error}; usual values are written, look at them")
            why = "usual values: Slurm did not answer"
    else:
        notices.append("no Slurm on this machine: usual values are written; on a login node they are Slurm's")
    view = _pick(found, partition if partition is not None else site.slurm.partition, site.site.partitions)
    if view is not None:
        why = f"from Slurm: partition {view.name} has {count_of(view.nodes, 'node')} of {count_of(view.gpus, 'GPU')}"
        if nodes is not None and nodes > view.nodes:
            raise UsageError(f"--nodes {nodes}: partition {view.name} has {view.nodes}; sinfo -p {view.name}")
        if view.unreadable:
            why = f"from Slurm: partition {view.name} has {count_of(view.nodes, 'node')}"
            notices.append(f"{view.unreadable}; 8 GPUs a node are written unless you say --gpus-per-node")
        elif gpus_per_node is not None and gpus_per_node > max(view.gpus, 1):
            raise UsageError(
                f"--gpus-per-node {gpus_per_node}: nodes of partition {view.name} have {view.gpus}; "
                f"sinfo -p {view.name} -o '%D %G'"
            )
        elif not view.gpus:
            notices.append(f"partition {view.name} has no GPUs; --partition names another: sinfo -o '%P %D %G'")
        limit = view.seconds
        if seconds is not None and limit is not None and seconds > limit:
            raise UsageError(f"--time: partition {view.name} allows {limit / 3600:g} h; sinfo -p {view.name} -o %l")
        seconds = seconds or min(limit or LONGEST_S, LONGEST_S)
    return JobFileChoice(
        nodes=nodes or min(USUAL_NODES, view.nodes if view else USUAL_NODES),
        gpus_per_node=gpus_per_node or (max(view.gpus, 1) if view and not view.unreadable else 8),
        seconds=seconds or LONGEST_S,
        partition=view.name if view and not (view.default and partition is None) else partition or "",
        command=command or _command(),
        why=why,
        notices=tuple(notices),
    )


def _pick(found: Sequence[PartitionView], named: str, allowed: Sequence[str]) -> PartitionView | None:
    """Nodes of the named partition, or of one with GPUs, the default one first; the kind with most nodes."""
    if not found:
        return None
    if named:
        of_that_name = [view for view in found if view.name == named]
        if not of_that_name:
            there = ", ".join(dict.fromkeys(view.name for view in found))
            raise UsageError(f"partition {named[:80]!a}: Slurm has none of that name for you; there are {there}")
        return max(of_that_name, key=lambda view: (view.gpus > 0 or bool(view.unreadable), view.nodes))
    usable = [view for view in found if view.up and view.nodes and (not allowed or view.name in allowed)]
    ranked = sorted(usable, key=lambda view: (view.gpus > 0, view.default, view.nodes), reverse=True)
    return ranked[0] if ranked else None


def _command() -> tuple[str, ...]:
    for name in LIKELY:
        if Path(name).is_file():
            return ("python", name)
    return PLACEHOLDER


# --- the files ------------------------------------------------------------------------------------------------------


def write(wanted: JobFileChoice, folder: Path, *, force: bool) -> tuple[str, str]:
    """Write both files, or none; their names. Raises UsageError for files that are there, and what cannot be read."""
    import tempfile

    from wrapper.commands.submit import script_of
    from wrapper.config.schema import read

    job_file, script = folder / JOB_FILE, folder / SCRIPT
    there = [str(path) for path in (job_file, script) if os.path.lexists(path)]
    if there and not force:
        raise UsageError(f"{' and '.join(there)}: there already; --force replaces, --folder names another place")
    text = job_text(wanted)
    with tempfile.TemporaryDirectory(prefix="resihp-init-") as trial:
        tried = Path(trial, JOB_FILE)
        tried.write_text(text, encoding="utf-8")
        configuration = read({}, tried)
    batch = annotated(script_of(configuration, job_file.absolute(), chain=1))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in ((job_file, text), (script, batch)):
            with replacing(path, named_by_user=True) as file:
                file.write(content.encode())
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}; --folder names another place") from None
    return JOB_FILE, SCRIPT


def job_text(wanted: JobFileChoice) -> str:
    """job.toml. Keys that are usually left alone stand there as comments, with what they are by default."""
    seconds = wanted.seconds or LONGEST_S
    warning_s = WARNING_S if seconds >= 2 * WARNING_S else max(LEAST_WARNING_S, seconds // 4)
    partition = f"partition = {_toml(wanted.partition)}" if wanted.partition else '# partition = "gpu"'
    whose = "Where it runs." if wanted.partition else "Where it runs; Slurm's default partition if left out."
    warning = f"warning = {_toml(_duration(warning_s))}"
    return f"""# A job for resihp, as resihp init wrote it ({wanted.why}).
# Try it: resihp submit {JOB_FILE} --dry-run. Submit it: resihp submit {JOB_FILE}.
# Run it on one machine, with virtual nodes: resihp run --local --config {JOB_FILE}.

[job]
# Nodes that the layout uses; spares come on top of them.
nodes = {wanted.nodes}
# GPUs of each node; each gets one worker.
gpus_per_node = {wanted.gpus_per_node}
# Memory of each GPU, so that no plan is made that does not fit: 80GB, 79.5GiB. Not checked if left out.
# memory_per_device = "80GB"
# How long Slurm gives the job. It is run again, and goes on, until training is done.
time = {_toml(_duration(seconds))}
# What Slurm calls the job.
name = "resihp"
# What each worker runs: a Python script or module, or any other command.
command = {_toml(list(wanted.command))}

[layout]
# GPUs that share each layer (tensor parallelism), inside of a node: gpus_per_node must be a multiple of it.
tp = 1
# Stages that the layers are cut into (pipeline parallelism). There are nodes * gpus_per_node / (tp * pp) replicas; with
# two or more of them, training goes on at once when one loses a GPU.
pp = 1
# Order of work in the pipeline: 1f1b, interleaved or zero-bubble.
schedule = "1f1b"

[checkpoint]
# Iterations between checkpoints, 0 for none: for when too little is left to go on with. One is of the last iteration.
every = 100
# How many complete ones are kept.
keep = 2
# Where they are; the job's own folder if left out. Jobs of a chain (resihp submit --chain 3) have to share one.
# folder = "/shared/checkpoints/run-1"

[ledger]
# Where the job's history goes: a file in its folder, or a database for all jobs, postgresql+psycopg://host/resihp.
url = "sqlite"

[slurm]
# {whose}
{partition}
# Whom Slurm charges.
# account = "project"
# Slurm's name for the GPUs, where it has several kinds: sinfo -o %G lists them.
# gpu_type = "h100"
# More nodes than the layout needs, whose workers stand by for those that die.
spares = 0
# How many nodes the job may ask Slurm for in place of lost ones, each as a job of its own.
replacements = 0
# How many bad nodes the job may have drained, where you or the site's hook may do that.
drains = 2
# How long before its time is up the job writes a checkpoint.
{warning}
# What follows that: requeue (it is run again), or end.
on_warning = "requeue"
# How it is run again: usual, or expedite (at once; Slurm 25.11 or later, where the site allows it).
# requeue = "expedite"
# Further options for sbatch.
# extra = ["--mail-type=END"]

# Interfaces between nodes, where the right ones are not found: ip -br link lists them.
# [network]
# interface = "ib0"

# The job's figures for Prometheus: on loopback of the supervisor's node, or in a file for node_exporter.
# [metrics]
# port = 9400
# textfile = "/var/lib/node_exporter/resihp-{{job}}.prom"

# Who is told when something happens. The file holds the webhook's URL; chmod 600 it.
# [hooks]
# webhook_file = "~/.config/resihp/webhook"
# command = ["/usr/local/bin/page-me"]
# events = ["failure", "drain", "replacement", "end"]
"""


_COMMENTS = {
    "nodes": f"Nodes of the layout and spares together, GPUs of each, for how long: as {JOB_FILE} has it.",
}


def annotated(script: str) -> str:
    """The batch script with a word on what stands in the job file, too, and on how to use it."""
    lines = script.splitlines()
    title = [
        f"# What resihp submit {JOB_FILE} would submit, for sbatch: sbatch {SCRIPT}",
        f"# Change {JOB_FILE} rather than this: its layout has to fit what is asked for here.",
    ]
    found: list[str] = [lines[0], *title]
    for line in lines[2:]:
        for name, comment in _COMMENTS.items():
            if line.startswith(f"#SBATCH --{name}="):
                found.append(f"# {comment}")
        if line.startswith("exec "):
            found.append("# The python environment that has resihp must be there on all nodes.")
        found.append(line)
    return "\n".join(found) + "\n"


def _toml(value: Any) -> str:
    """A string or a list of strings. TOML's basic strings take JSON's escapes but the one of DEL, and no surrogates."""
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{value[:80]!a}: is not text that a job file can hold")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _duration(seconds: float) -> str:
    """`24h`, `1h30m`, `45s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{count}{unit}" for count, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if count]
    return "".join(parts)


def _seconds(text: str | None) -> float | None:
    from wrapper.config.values import duration

    try:
        return duration(text)
    except ValueError as error:
        raise UsageError(f"--time {text!r}: {error}") from None
