"""`resihp submit`: from a job file to a batch script, and on to sbatch. What can be refused is refused before.

The job file is copied beside the script, so that a job that waits, or is run again, is the one that was submitted.
Starts nothing itself; inside the job, `resihp run` finds its nodes (`wrapper.commands.run`).
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
from resihp.words import count_of
from slurm import releases, render
from slurm.client import Slurm
from slurm.errors import SlurmError, SlurmRefusedError, SlurmUnavailableError, SlurmUsageError
from wrapper import registry
from wrapper.config import container
from wrapper.config.program import resolve
from wrapper.config.schema import Configuration, read
from wrapper.config.shape import check_layout
from wrapper.job_files import user_name
from wrapper.job_folder import close_home, home, write_private
from wrapper.sinks.fanout import asked
from wrapper.slurm_tasks.exclusion_lists import to_avoid
from wrapper.strict_modes import check_folder

MENDED = (
    ("invalid partition", "sinfo -o '%P %a %l %D' lists partitions; set partition in [slurm]"),
    ("invalid account", "sacctmgr show associations user=$USER format=account,partition,qos; set account in [slurm]"),
    ("invalid qos", "sacctmgr show associations user=$USER format=account,partition,qos; set qos in [slurm]"),
    ("reservation", "scontrol show reservation lists them; set reservation in [slurm]"),
    ("invalid feature", "sinfo -o '%P %f' lists features; set constraint in [slurm]"),
    ("generic resource", "sinfo -o '%P %D %G' lists nodes with GPUs; set gpus_per_node in [job], gpu_type in [slurm]"),
    (
        "node configuration is not available",
        "sinfo -o '%P %D %c %m %G %f' lists what there is; change [job], or gpu_type and constraint in [slurm]",
    ),
    (
        "topology configuration",
        "with --segment, nodes in [job] and spares in [slurm] together must be a multiple of it",
    ),
    ("evenly divisible", "with --segment, nodes in [job] and spares in [slurm] together must be a multiple of it"),
    ("node count", "sinfo -o '%P %D %G' lists what there is; lower nodes in [job] or spares in [slurm]"),
    ("time limit", "sinfo -o '%P %l' lists time limits; set time in [job]"),
    (
        "operation not supported",
        'SlurmctldParameters=enable_expedited_requeue is not set at this site; set requeue to "usual" in [slurm]',
    ),
    ("not responding", "scontrol ping tells whether Slurm is up"),
)
"""Words in sbatch's refusal, and the command that tells more, with what to change then."""


class Submitted(NamedTuple):
    """Slurm's ids of the job, or of each job of a chain, none on a dry run; the batch script, and where it is kept."""

    ids: list[str]
    script: str
    path: Path | None = None


def submit(
    job_file: Path, *, dry_run: bool, chain: int, slurm: Callable[[], Slurm], notice: Callable[[str], None]
) -> Submitted:
    """Submit the job, or a chain of so many. Raises ResihpError with the command that mends it."""
    configuration = read({}, job_file)
    _check(configuration, chain, notice)
    if dry_run:
        if chain > 1:
            notice("each job of the chain waits for the one before it: sbatch --dependency=afterany:ID job.sbatch")
        return Submitted([], script_of(configuration, job_file.absolute(), chain))
    client = slurm()
    _check_release(configuration, job_file, client)
    folder = _keep(configuration, job_file, chain)
    options = _left_out(client, configuration, notice)
    ids: list[str] = []
    for _ in range(max(1, chain)):
        after = [f"--dependency=afterany:{ids[-1]}"] if ids else []  # however it ends; names do not matter
        try:
            ids.append(_sbatch(client, folder / "job.sbatch", job_file, configuration, [*options, *after]))
        except SlurmError:
            if ids:
                notice(f"submitted before this: {', '.join(ids)}; to end them: scancel {' '.join(ids)}")
            raise
    script = folder / "job.sbatch"
    output, places = _places(script.read_text(), ids)
    _register(client, dict(zip(ids, places, strict=True)), configuration, notice)
    _tell(ids, configuration, folder, output, places[0], notice)
    return Submitted(ids, script.read_text(), script)


def script_of(configuration: Configuration, job_file: Path, chain: int) -> str:
    """The batch script of a job, or of each job of a chain. Raises SlurmUsageError."""
    job, section = configuration.job, configuration.slurm
    nodes = job.nodes + section.spares
    name = "chain" if chain > 1 else "spares" if section.spares else "nodes" if nodes > 1 else "one-node"
    requeue = section.on_warning == "requeue" or chain > 1
    directives: dict[str, str | bool] = {
        "job-name": job.name,
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
        exports={"RESIHP_SLURM__ON_WARNING": "end"} if chain > 1 else None,
    )


def _resihp() -> list[str]:
    """How this very program is started on another node."""
    beside = Path(sys.executable).parent / "resihp"
    return [str(beside)] if os.access(beside, os.X_OK) else [sys.executable, "-P", "-m", "wrapper"]


def _check(configuration: Configuration, chain: int, notice: Callable[[str], None]) -> None:
    """What `resihp run` would refuse inside the job, after hours in the queue."""
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
    if chain > 1 and not configuration.checkpoint.folder:
        raise ConfigurationError("--chain: jobs of a chain share their checkpoints; set folder in [checkpoint]")


def _check_release(configuration: Configuration, job_file: Path, client: Slurm) -> None:
    """What is asked for that only newer releases of Slurm know. Raises ConfigurationError, SlurmError."""
    if configuration.slurm.requeue != "expedite":
        return
    version = client.version()
    if not releases.of(version).expedites:
        raise ConfigurationError(
            f"{job_file}: [slurm] requeue: expedite needs Slurm 25.11 or later, and this is {releases.named(version)}; "
            'set it to "usual"'
        )


def _keep(configuration: Configuration, job_file: Path, chain: int) -> Path:
    """A new folder with the script and a copy of the job file. Raises UsageError."""
    place = home() / "submitted"
    close_home()
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        check_folder(place)  # the script in it is what Slurm runs as us
        folder = Path(tempfile.mkdtemp(prefix=f"{configuration.job.name.replace('/', '-')}-", dir=place))
        write_private(folder / "job.toml", job_file.read_bytes())  # the URL of its ledger may have a password
        write_private(folder / "job.sbatch", script_of(configuration, folder / "job.toml", chain).encode())
    except OSError as error:
        raise UsageError(f"{place}: cannot be written: {error.strerror}; set RESIHP_HOME to another folder") from error
    return folder


def _left_out(client: Slurm, configuration: Configuration, notice: Callable[[str], None]) -> tuple[str, ...]:
    """An option that keeps out what our jobs avoid for now, beside what the job file itself leaves out."""
    try:
        known = to_avoid(client, client.cluster(), time.time())
    except SlurmError as error:
        notice(f"{error}; whether nodes are to be avoided is not known")
        return ()
    if not known:
        return ()
    notice(f"avoids {', '.join(known)}: kept out of your jobs, see resihp node list")
    own = [option.partition("=")[2] for option in configuration.slurm.extra if option.startswith("--exclude=")]
    return (f"--exclude={','.join([*own, *known])}",)


def _sbatch(client: Slurm, script: Path, job_file: Path, configuration: Configuration, options: Sequence[str]) -> str:
    try:
        return client.submit(script, options)
    except SlurmRefusedError as error:
        said = str(error).removeprefix(f"{script}: not submitted: ")
        mend = next((how for words, how in MENDED if words in said.lower()), None)
        if mend is None:
            mend = f"resihp submit {job_file} --dry-run prints the script"
        raise SlurmUsageError(f"{job_file}: {said}; {mend}") from None
    except SlurmUnavailableError as error:
        raise SlurmUnavailableError(
            f"{job_file}: {error}; it may have been submitted all the same, "
            f"squeue --me --name={configuration.job.name} tells"
        ) from None


def _register(
    client: Slurm, places: Mapping[str, Path], configuration: Configuration, notice: Callable[[str], None]
) -> None:
    """For `resihp jobs`, until they begin."""
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
            notice(f"warning: resihp jobs will not have it until it begins: {wrong}")
            return


def _tell(
    ids: list[str],
    configuration: Configuration,
    folder: Path,
    output: Path,
    of_job: Path,
    notice: Callable[[str], None],
) -> None:
    job, spares = configuration.job, configuration.slurm.spares
    what = f"{count_of(job.nodes, 'node')} of {count_of(job.gpus_per_node, 'GPU')}" + (
        f" and {spares} spare" if spares else ""
    )
    if len(ids) > 1:
        notice(f"submitted a chain of {len(ids)} jobs, each {what}: {', '.join(ids)}; script {folder / 'job.sbatch'}")
    else:
        notice(f"submitted job {ids[0]}: {what}; script {folder / 'job.sbatch'}")
    first = "" if len(ids) == 1 else " of the first one"
    notice(f"output{first}: {output}; once it runs its folder is {of_job}, logs in {of_job / 'logs'}")
    notice(
        f"resihp jobs tells whether it waits, squeue --start --jobs={ids[0]} when it may start; then: "
        f"resihp status {ids[0]} --watch, and resihp logs {ids[0]} -f"
    )
    notice(f"to end it: scancel {' '.join(ids)}")


def _places(script: str, ids: Sequence[str]) -> tuple[Path, list[Path]]:
    """Where the output of the first job of this script will be, and the folder of each. What only Slurm knows (%N)
    stands."""
    lines = (line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --"))
    asked = {name: value for name, _, value in (line.partition("=") for line in lines)}
    names = {"%j": ids[0], "%A": ids[0], "%x": asked.get("job-name", "")}
    output = re.sub("%[jAx]", lambda match: names[match[0]], asked.get("output", "slurm-%j.out"))
    there = Path.cwd() / asked.get("chdir", "")
    jobs = there / (os.environ.get("RESIHP_HOME") or ".resihp") / "jobs"
    return there / output, [jobs / job_id for job_id in ids]
