"""`resihp submit`: validate a job file, turn it into a batch script and pass the script to sbatch.

The job file is copied to the script's folder, so that later edits do not change a job that is queued or requeued.
Starts nothing itself; inside the job, `resihp run` finds its nodes (`resihp.wrapper.commands.run`).
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from resihp.errors import ConfigurationError, UsageError
from resihp.slurm import releases, render
from resihp.slurm.client import Slurm
from resihp.slurm.command_call import CLUSTER_CHOICES, sbatch_choices
from resihp.slurm.errors import SlurmError, SlurmRefusedError, SlurmUnavailableError, SlurmUsageError
from resihp.words import count_of
from resihp.wrapper import registry
from resihp.wrapper.config import container
from resihp.wrapper.config.program import resolve
from resihp.wrapper.config.schema import Configuration
from resihp.wrapper.config.shape import check_layout
from resihp.wrapper.config.sources import read
from resihp.wrapper.job_files.registered import user_name
from resihp.wrapper.job_folder import close_home, home, write_private
from resihp.wrapper.sinks.fanout import asked
from resihp.wrapper.slurm_tasks.exclusion_lists import to_avoid
from resihp.wrapper.strict_modes import check_folder

ADVICE_ON_REFUSAL = (
    ("invalid partition", "sinfo -o '%P %a %l %D' lists partitions; set partition in [slurm]"),
    ("invalid account", "sacctmgr show associations user=$USER format=account,partition,qos; set account in [slurm]"),
    ("invalid qos", "sacctmgr show associations user=$USER format=account,partition,qos; set qos in [slurm]"),
    ("reservation", "scontrol show reservation lists them; set reservation in [slurm]"),
    ("invalid feature", "sinfo -o '%P %f' lists features; set constraint in [slurm]"),
    ("generic resource", "sinfo -o '%P %D %G' lists nodes with GPUs; set gpus_per_node in [job], gpu_type in [slurm]"),
    (
        "node configuration is not available",
        "sinfo -o '%P %D %c %m %G %f' lists the nodes; change [job], or gpu_type and constraint in [slurm]",
    ),
    (
        "topology configuration",
        "with --segment, nodes in [job] and spares in [slurm] together must be a multiple of it",
    ),
    ("evenly divisible", "with --segment, nodes in [job] and spares in [slurm] together must be a multiple of it"),
    ("node count", "sinfo -o '%P %D %G' lists the nodes; lower nodes in [job] or spares in [slurm]"),
    ("time limit", "sinfo -o '%P %l' lists time limits; set time in [job]"),
    (
        "operation not supported",
        'SlurmctldParameters=enable_expedited_requeue is not set at this site; set requeue to "usual" in [slurm]',
    ),
    ("not responding", "scontrol ping shows whether Slurm is up"),
)
"""Words in sbatch's refusal, in lower case, each with advice: a command that shows more, and the setting to change."""


CPU_OPTIONS = ("--cpus-per-gpu", "--cpus-per-task", "--mincpus", "--exclusive")
"""Options of sbatch that say how many CPUs of a node a job needs."""


class Submitted(NamedTuple):
    """Result of a submission: Slurm's ids (one for each job of a chain, none for a dry run), the batch script, and its
    path."""

    ids: list[str]
    script: str
    path: Path | None = None


def submit(
    job_file: Path, *, dry_run: bool, chain: int, slurm: Callable[[], Slurm], notice: Callable[[str], None]
) -> Submitted:
    """Submit the job, or a chain of `chain` jobs. Raises ResihpError with the name of a command that helps."""
    configuration = read({}, job_file)
    _check(configuration, chain, notice)
    if dry_run:
        if chain > 1:
            notice("each job of the chain waits for the one before it: sbatch --dependency=afterany:ID job.sbatch")
        return Submitted([], script_of(configuration, job_file.absolute(), chain))
    client = slurm()
    _check_cluster(os.environ, client)
    if choices := sbatch_choices(os.environ):
        names = ", ".join(sorted(choices))  # values may be secret
        notice(f"your environment has options for sbatch, which come before those of {job_file.name}: {names}")
    _check_release(configuration, job_file, client)
    if configuration.slurm.step_extra:
        client.check_step(configuration.slurm.step_extra)
    folder = _keep(configuration, job_file, chain)
    options = _left_out(client, configuration, notice)
    ids: list[str] = []
    for _ in range(max(1, chain)):
        after = [f"--dependency=afterany:{ids[-1]}"] if ids else []  # whatever the outcome of the previous job is
        try:
            ids.append(_sbatch(client, folder / "job.sbatch", job_file, configuration, [*options, *after]))
        except SlurmError:
            if ids:
                notice(f"submitted before this: {', '.join(ids)}; to end them: scancel {' '.join(ids)}")
            raise
    script = folder / "job.sbatch"
    output, places = _places(script.read_text(), ids)
    _register(client, dict(zip(ids, places, strict=True)), configuration, notice)
    _report_submission(ids, configuration, folder, output, places[0], notice)
    return Submitted(ids, script.read_text(), script)


def script_of(configuration: Configuration, job_file: Path, chain: int) -> str:
    """Return the batch script of a job, or of each job of a chain. Raises SlurmUsageError."""
    job, section = configuration.job, configuration.slurm
    nodes = job.nodes + section.spares
    name = "chain" if chain > 1 else "spares" if section.spares else "nodes" if nodes > 1 else "one-node"
    requeue = section.on_warning == "requeue" or chain > 1
    directives: dict[str, str | bool] = {
        "job-name": name_of(configuration),
        "nodes": str(nodes),
        "gpus-per-node": f"{section.gpu_type}:{job.gpus_per_node}" if section.gpu_type else str(job.gpus_per_node),
        "time": False if job.time is None else render.time_limit(job.time),
        "partition": section.partition or False,
        "account": section.account or False,
        "qos": section.qos or False,
        "constraint": section.constraint or False,
        "reservation": section.reservation or False,
        "signal": f"B:USR2@{round(section.warning)}",
        "dependency": False,
        "requeue": "expedite" if requeue and section.requeue == "expedite" else requeue,
        "no-requeue": not requeue,
    }
    if not section.exclusive:
        directives |= {"exclusive": False, "mem": False}
    for option in section.extra:
        key, separator, value = option.removeprefix("--").partition("=")
        directives[key] = value if separator else True
    command = [*_resihp(), "run", "--config", str(job_file)]
    if chain > 1:
        command.append("--resume-or-start")
    return render.render(
        render.template(name),
        directives,
        command,
        title=f"Written by resihp submit, from {job_file.name}",
        setup=job.setup,
        exports=dict(assignment.split("=", 1) for assignment in job.environment)
        | ({"RESIHP_SLURM__ON_WARNING": "end"} if chain > 1 else {}),
    )


def name_of(configuration: Configuration) -> str:
    """Return the job's name in Slurm: the configured one, or else that of the training script."""
    job = configuration.job
    if job.name:
        return job.name
    script = next((argument for argument in job.command if argument.endswith(".py")), "")
    if not script and "-m" in job.command[:-1]:
        script = job.command[job.command.index("-m") + 1]
    stem = Path(script or (job.command[0] if job.command else "")).name.removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip("-") or "resihp"


def _resihp() -> list[str]:
    """Return the command that starts the same installation of resihp on another node."""
    script = Path(sys.executable).parent / "resihp"
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-m", "resihp"]


def _check(configuration: Configuration, chain: int, notice: Callable[[str], None]) -> None:
    """Raise ResihpError for a job that `resihp run` would refuse, perhaps after hours in the queue."""
    job, section = configuration.job, configuration.slurm
    check_layout(configuration.layout, job.nodes, job.gpus_per_node)
    inside = container.check(configuration.container)
    resolve(job.command, notice, configuration.container.python if inside else None)
    asked(configuration)
    if job.time is not None and job.time < 2 * section.warning:
        raise ConfigurationError(
            f"[slurm] warning: {section.warning:g} s before the end of a job of {job.time:g} s leaves too little time "
            "to train; set time in [job] to more than twice that, or lower warning"
        )
    if not section.exclusive and not any(option.startswith(CPU_OPTIONS) for option in section.extra):
        notice(
            "[slurm] exclusive = false without a number of CPUs: most sites then give all workers of a node one CPU; "
            "add, for example, \"--cpus-per-gpu=8\" to extra; sinfo -o '%P %c %G' lists the CPUs and GPUs of nodes"
        )
    if chain > 1 and not configuration.checkpoint.folder:
        raise ConfigurationError("--chain: jobs of a chain share their checkpoints; set folder in [checkpoint]")


def _check_cluster(environment: Mapping[str, str], client: Slurm) -> None:
    """Raise ConfigurationError if the user's environment makes sbatch submit to another cluster: what resihp knows of
    jobs and nodes is of this one. Raises SlurmError."""
    for variable in CLUSTER_CHOICES:
        if (chosen := environment.get(variable)) and chosen != (here := client.cluster()):
            raise ConfigurationError(
                f"{variable}={chosen}: resihp submits to the cluster of this machine, {here}; unset {variable}, or "
                f"submit the script yourself: resihp submit --dry-run > job.sbatch; sbatch -M {chosen} job.sbatch"
            )


def _check_release(configuration: Configuration, job_file: Path, client: Slurm) -> None:
    """Raise ConfigurationError if the job needs a newer release of Slurm, and SlurmError if Slurm does not answer."""
    if configuration.slurm.requeue != "expedite":
        return
    version = client.version()
    if not releases.of(version).expedites:
        raise ConfigurationError(
            f"{job_file}: [slurm] requeue: expedite needs Slurm 25.11 or later, and this is {releases.named(version)}; "
            'set it to "usual"'
        )


def _keep(configuration: Configuration, job_file: Path, chain: int) -> Path:
    """Create a folder with the script and a copy of the job file, and return its path. Raises UsageError."""
    place = home() / "submitted"
    close_home()
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        check_folder(place)  # Slurm runs the script in this folder as this user
        folder = Path(tempfile.mkdtemp(prefix=f"{name_of(configuration).replace('/', '-')}-", dir=place))
        write_private(folder / "job.toml", job_file.read_bytes())  # the URL of the ledger may contain a password
        write_private(folder / "job.sbatch", script_of(configuration, folder / "job.toml", chain).encode())
    except OSError as error:
        raise UsageError(f"{place}: cannot be written: {error.strerror}; set RESIHP_HOME to another folder") from error
    return folder


def _left_out(client: Slurm, configuration: Configuration, notice: Callable[[str], None]) -> tuple[str, ...]:
    """Return the --exclude option, with the nodes that the user's jobs avoid and the nodes that the job file
    excludes."""
    try:
        avoided_nodes = to_avoid(client, client.cluster(), time.time())
    except SlurmError as error:
        notice(f"{error}; the list of nodes to avoid is unknown")
        return ()
    if not avoided_nodes:
        return ()
    notice(f"excludes {', '.join(avoided_nodes)}, as your jobs avoid them; see resihp node list")
    return exclude_option(configuration.slurm.extra, avoided_nodes)


def exclude_option(extra: Sequence[str], avoided_nodes: Sequence[str]) -> tuple[str, ...]:
    """Return sbatch's option with the nodes that the user's jobs avoid, and those that the options `extra` exclude."""
    if not avoided_nodes:
        return ()
    by_job_file = [option.partition("=")[2] for option in extra if option.startswith("--exclude=")]
    return (f"--exclude={','.join([*by_job_file, *avoided_nodes])}",)


def advice_on(refusal: str, options: Sequence[str]) -> str:
    """Return advice on a refusal of sbatch; empty if there is none. `options`: those that sbatch was given."""
    lowered = refusal.lower()
    advice = next((how for words, how in ADVICE_ON_REFUSAL if words in lowered), "")
    excluded = next((option.partition("=")[2] for option in options if option.startswith("--exclude=")), "")
    if excluded and "node configuration is not available" in lowered:
        return (
            f"the job may not run on {excluded}: resihp node list tells why, resihp node exclude NODE --remove permits "
            f"a node; or {advice}"
        )
    return advice


def _sbatch(client: Slurm, script: Path, job_file: Path, configuration: Configuration, options: Sequence[str]) -> str:
    try:
        return client.submit(script, options)
    except SlurmRefusedError as error:
        refusal = str(error).removeprefix(f"{script}: not submitted: ")
        advice = advice_on(refusal, options) or f"resihp submit {job_file} --dry-run prints the script"
        raise SlurmUsageError(f"{job_file}: {refusal}; {advice}") from None
    except SlurmUnavailableError as error:
        raise SlurmUnavailableError(
            f"{job_file}: {error}; the job may have been submitted anyway, "
            f"check with squeue --me --name={name_of(configuration)}"
        ) from None


def _register(
    client: Slurm, places: Mapping[str, Path], configuration: Configuration, notice: Callable[[str], None]
) -> None:
    """Add the queued jobs to the registry, so that `resihp jobs` shows them before they begin."""
    try:
        cluster = client.cluster()
    except SlurmError:
        cluster = ""
    for job_id, folder in places.items():
        entry = registry.KnownJob(
            name=job_id,
            folder=str(folder),
            host=socket.gethostname(),
            user=user_name(),
            began_at=time.time(),
            cluster=cluster,
            slurm_job=job_id,
            state=registry.QUEUED,
            nodes=configuration.job.nodes,
            gpus_per_node=configuration.job.gpus_per_node,
        )
        if wrong := registry.save(entry):
            notice(f"warning: resihp jobs will not list it until it begins: {wrong}")
            return


def _report_submission(
    ids: list[str],
    configuration: Configuration,
    folder: Path,
    output: Path,
    job_folder: Path,
    notice: Callable[[str], None],
) -> None:
    job, spares = configuration.job, configuration.slurm.spares
    size = f"{count_of(job.nodes, 'node')} of {count_of(job.gpus_per_node, 'GPU')}" + (
        f" and {spares} spare" if spares else ""
    )
    if len(ids) > 1:
        notice(f"submitted a chain of {len(ids)} jobs, each {size}: {', '.join(ids)}; script {folder / 'job.sbatch'}")
    else:
        notice(f"submitted job {ids[0]}: {size}; script {folder / 'job.sbatch'}")
    first = "" if len(ids) == 1 else " of the first job"
    notice(f"output{first}: {output}; once it runs, its folder is {job_folder}, with logs in {job_folder / 'logs'}")
    notice(
        f"resihp jobs shows whether it is queued, squeue --start --jobs={ids[0]} when it may start; then: "
        f"resihp status {ids[0]} --watch, and resihp logs {ids[0]} -f"
    )
    notice(f"to end it: scancel {' '.join(ids)}")


def _places(script: str, ids: Sequence[str]) -> tuple[Path, list[Path]]:
    """Return the path of the first job's output, and the folder of each job.

    Patterns that only Slurm can fill in, such as %N, stay as they are.
    """
    lines = (line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --"))
    directives = {name: value for name, _, value in (line.partition("=") for line in lines)}
    names = {"%j": ids[0], "%A": ids[0], "%x": directives.get("job-name", "")}
    output = re.sub("%[jAx]", lambda match: names[match[0]], directives.get("output", "slurm-%j.out"))
    work_folder = Path.cwd() / directives.get("chdir", "")
    jobs = work_folder / (os.environ.get("RESIHP_HOME") or ".resihp") / "jobs"
    return work_folder / output, [jobs / job_id for job_id in ids]
