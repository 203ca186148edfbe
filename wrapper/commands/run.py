"""`resihp run`: from options to a job's folder, then on to the guardian. All that can be refused is refused here.

Nothing is started and no folder made before configuration, layout, faults and command have been checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from db.url_passwords import has_password
from resihp import faults
from resihp.errors import ResihpError, UsageError
from resihp.faults import Fault
from resihp.settings import Detection, Settings, Thresholds
from resihp.words import count_of
from slurm.client import Slurm
from wrapper import early_signals
from wrapper.commands import in_slurm
from wrapper.commands.in_slurm import InSlurm
from wrapper.commands.operate.last_words import last_words
from wrapper.commands.operate.outcome import outcome
from wrapper.commands.resume import (
    CompletedError,
    Restart,
    after_restart,
    asked_for,
    command_to_go_on,
    how_to_go_on,
    if_there_is_one,
    run_of,
)
from wrapper.config import container, values
from wrapper.config.program import resolve
from wrapper.config.run_spec import Container, ListenerSettings, Program, RunRequest
from wrapper.config.schema import Configuration, DetectSection, check_partition, read
from wrapper.config.shape import Shape, check_layout, check_target, of_allocation, on_this_machine
from wrapper.exit_codes import BROKEN, FAILED, REQUEUE
from wrapper.job_folder import close_home, create_local_job, create_slurm_job, home
from wrapper.launch import allocation
from wrapper.launch.allocation import Allocation
from wrapper.output.answers import SCHEMA, message, to_json
from wrapper.sinks import fanout
from wrapper.slurm_tasks.requeue import end_for_good
from wrapper.supervisor import guardian
from wrapper.supervisor.patient_output import never_wait_for

SECTIONS = ("job", "layout", "adapt", "ledger", "checkpoint")
"""Of the configuration, those that the command line has something of."""


@dataclass(frozen=True)
class Options:
    """What the command line said; None where it said nothing."""

    job: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    adapt: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    config: Path | None = None
    local: bool = False
    faults: tuple[str, ...] = ()
    resume: str | None = None
    """Job whose newest checkpoint is taken; empty: that of the newest job of this home that has one."""
    resume_or_start: bool = False
    """Take the newest checkpoint of the configured folder if there is one."""
    arguments: tuple[str, ...] = ()
    """All of it, as it was typed."""
    as_json: bool = False
    """Print at the end what became of the job."""


def run(options: Options) -> int:
    """Run the job; returns its exit code. Raises ResihpError."""
    try:
        status = _run(options)
    except CompletedError as error:
        message(str(error))
        if options.as_json:
            print(to_json({"schema": SCHEMA, "job": None, "exit_code": 0, "state": "completed", "reason": str(error)}))
        return 0
    except ResihpError:
        _end_for_good(options)
        raise
    if status not in (0, REQUEUE):
        _end_for_good(options)
    return status


def _end_for_good(options: Options) -> None:
    """Have Slurm's job end as it does, in an allocation."""
    if not options.local and (job_id := allocation.job_id(os.environ)):
        end_for_good(job_id, _slurm())


def _run(options: Options) -> int:
    checked = check(options)
    if has_password(options.ledger.get("url") or ""):
        message(
            "warning: the password in --ledger was visible in the process list for a moment; put it into ~/.pgpass "
            "(chmod 600), or the whole URL into url of [ledger] in a file that only you can read"
        )
    early_signals.note(early_signals.of_command())  # from here on there is a job, which they stop
    try:
        return _begin(made(checked, options), options)
    finally:
        early_signals.as_before()


def _begin(request: RunRequest, options: Options) -> int:
    never_wait_for("stderr")
    settings = request.settings
    of_them = f", {settings.spares} of them spare" if settings.spares else ""
    nodes = f"{count_of(settings.nodes, 'node')} of {settings.gpus_per_node}{of_them}"
    message(f"job {request.job}: {nodes}, logs in {request.of_job.logs}")
    if request.resume:
        message(f"job {request.job}: goes on from iteration {request.begins_at}, in {request.checkpoint_folder}")
    with _prints_on_stderr() if options.as_json else nullcontext():
        status = guardian.guard(request.save())
    if status in (FAILED, BROKEN) and (words := last_words(request.of_job)):
        message(f"job {request.job}: {words}")
    if status not in (0, REQUEUE) and (told := how_to_go_on(request)):
        message(f"job {request.job}: {told}")
    if options.as_json:
        print(to_json(outcome(request.of_job, status)))
    return status


@contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """What rank 0 of the script prints goes there as well: stdout is for one document."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """All that a run is to be, before anything of it is made."""

    configuration: Configuration
    allocation: Allocation | None
    shape: Shape
    faults: tuple[Fault, ...]
    listening: ListenerSettings
    inside: Container | None
    program: Program
    cwd: str
    python_path: str
    saved: Path | None
    """Where checkpoints are to go, if that is said."""
    restart: Restart
    of_slurm: InSlurm | None


def prepare(options: Options, slurm: Slurm | None = None) -> RunRequest:
    """Check everything, then make the job's folder. Raises ResihpError; then no folder was made.

    `slurm`: whom to ask in an allocation; the commands on PATH if left out.
    """
    return made(check(options, slurm), options)


def made(checked: Checked, options: Options) -> RunRequest:
    """The job that it is to be, with its folder."""
    configuration, found, of_slurm, shape = (
        checked.configuration,
        checked.allocation,
        checked.of_slurm,
        checked.shape,
    )
    resumption, again = checked.restart.resumption, found.restart_count if found else 0
    job = create_slurm_job(found.job_id, again) if found else create_local_job()
    checkpoints = resumption.folder if resumption else checked.saved or job.checkpoints.absolute()
    mounted = container.job_folders(checked.cwd, job.folder, checkpoints, checked.python_path)
    command = configuration.job.command
    return RunRequest(
        settings=_settings(configuration, job.name, shape, checked.faults, of_slurm, checked.program),
        folder=str(job.folder),
        program=checked.program,
        command=command,
        cwd=checked.cwd,
        python_path=checked.python_path,
        checkpoint_folder=str(checkpoints),
        checkpoint_keep=configuration.checkpoint.keep,
        resume=resumption is not None,
        chained=options.resume_or_start and found is not None,
        begins_at=resumption.iteration if resumption else 0,
        go_on=command_to_go_on(options.arguments, job.name, command, options.resume or ""),
        run=run_of(checkpoints, resumed=resumption is not None, earlier=checked.restart.run),
        ledger_url=configuration.ledger.url,
        ledger_keep_s=configuration.ledger.keep,
        restart_count=again,
        host=of_slurm.address if of_slurm else "127.0.0.1",
        ports=values.ports_of(configuration.slurm.ports) if of_slurm else None,
        interface=configuration.network.interface if of_slurm else "",
        succession=_succession(configuration, found is not None and len(shape.nodes) > 1),
        slurm=of_slurm.request if of_slurm else None,
        container=container.with_folders(checked.inside, mounted),
        listening=checked.listening,
        configuration=_told(configuration),
    )


def check(options: Options, slurm: Slurm | None = None) -> Checked:
    """What `prepare` goes by. Raises ResihpError for what can be refused; makes and starts nothing."""
    given = {
        section: {key: value for key, value in getattr(options, section).items() if value is not None}
        for section in SECTIONS
    }
    configuration = read(given, options.config)
    _check_words(configuration)
    found = None
    if not options.local:
        slurm = slurm or _slurm()
        found = allocation.find(os.environ, slurm)
        in_slurm.look_at_release(slurm, message)
        check_partition(found.partition, configuration, f"job {found.job_id}: partition")
    shape = of_allocation(configuration, found, message) if found else on_this_machine(configuration)
    check_layout(configuration.layout, shape.laid_out, shape.gpus_per_node)
    planned = tuple(faults.parse(text, i + 1) for i, text in enumerate(options.faults))
    for fault in planned:
        check_target(fault, shape, configuration.adapt.come_backs)
    listening = fanout.asked(configuration)
    inside = container.check(configuration.container)
    program = resolve(configuration.job.command, message, configuration.container.python if inside else None)
    cwd, python_path = os.getcwd(), _absolute_entries(os.environ.get("PYTHONPATH", ""))
    container.with_folders(inside, [Path(cwd), home()])  # raises for what cannot be mounted
    saved = _checkpoint_folder(options, configuration, found)
    if options.resume_or_start and found and slurm and saved:
        in_slurm.check_chain(saved, found, slurm, message)
    restart = _resumption(options, configuration, found, saved)
    of_slurm = in_slurm.of_slurm(configuration, found, slurm, restart.failed, message) if found and slurm else None
    return Checked(
        configuration=configuration,
        allocation=found,
        shape=shape,
        faults=planned,
        listening=listening,
        inside=inside,
        program=program,
        cwd=cwd,
        python_path=python_path,
        saved=saved,
        restart=restart,
        of_slurm=of_slurm,
    )


def _check_words(configuration: Configuration) -> None:
    """Raises UsageError for an argument that is no text: it could neither be journaled nor told to anybody; LedgerError
    for a ledger that is none."""
    from db.engine import resolve as resolve_ledger

    resolve_ledger(configuration.ledger.url, home())
    for part in configuration.job.command:
        if not part.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in part):
            raise UsageError(f"command: {part!a} is not UTF-8; rename that file, or pass its name in a file")


def _told(configuration: Configuration) -> dict[str, Any]:
    """What the journal and the ledger keep of the configuration: everything but passwords."""
    from db.engine import masked

    told = configuration.model_dump(mode="json")
    told["ledger"]["url"] = masked(told["ledger"]["url"])
    return told


def _slurm() -> Slurm:
    """Raises UsageError outside of an allocation, before anything is looked for."""
    if not allocation.job_id(os.environ):
        raise UsageError(allocation.NO_ALLOCATION)
    from slurm.commands import CommandLine

    return CommandLine()


def _checkpoint_folder(options: Options, configuration: Configuration, found: Allocation | None) -> Path | None:
    """The configured one; of it, each element of an array has its own part, unless they go on from each other."""
    if not configuration.checkpoint.folder:
        return None
    folder = Path(configuration.checkpoint.folder).absolute()
    if found is None or not found.task or options.resume_or_start or folder.name == found.task:
        return folder
    message(f"job {found.job_id}: an element of an array; its checkpoints are in {folder / found.task}")
    return folder / found.task


def _resumption(
    options: Options, configuration: Configuration, found: Allocation | None, saved: Path | None
) -> Restart:
    """What Slurm starts again goes on by itself; what the command line asks for counts for a first start."""
    close_home()  # before anything that is found in it is believed
    restart = Restart(None, 0)
    if found is not None and found.restart_count:
        job, most = configuration.job, configuration.slurm.restarts
        restart = after_restart(found.job_id, found.restart_count, job.command, most, message)
        if restart.resumption is not None:
            return restart
    if options.resume is not None:
        resumption = asked_for(saved, options.resume, configuration.job.command, message)
        return replace(restart, resumption=resumption)
    return replace(restart, resumption=if_there_is_one(saved, message)) if options.resume_or_start else restart


def _settings(
    configuration: Configuration,
    job: str,
    shape: Shape,
    planned: tuple[Fault, ...],
    of_slurm: InSlurm | None,
    program: Program,
) -> Settings:
    """What the controller goes by."""
    layout, adapt, slurm = configuration.layout, configuration.adapt, configuration.slurm
    given = Settings(
        job=job,
        nodes=len(shape.nodes),
        node_names=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        spares=shape.spares,
        declares=program.kind != "command",
        tp=layout.tp,
        pp=layout.pp,
        schedule=layout.schedule,
        chunks=layout.virtual_stages,
        sequence_parallel=layout.sequence_parallel,
        tune=layout.tune,
        memory_bytes=configuration.job.memory_per_device,
        idle_limit_s=configuration.job.idle_limit,
        come_backs=adapt.come_backs,
        least=adapt.least,
        examine=adapt.examine,
        detect=adapt.detect,
        detection=_detection(configuration.detect),
        observes=adapt.mode == "observe",
        planner=adapt.planner,
        plans_ahead=adapt.plans_ahead,
        search_s=adapt.search_s,
        recheck_s=adapt.recheck_s,
        faults=planned,
        checkpoint_every=configuration.checkpoint.every,
    )
    if of_slurm is None:
        return given
    return msgspec.structs.replace(
        given,
        slurm=True,
        batch_node=of_slurm.request.batch_node,
        drains=of_slurm.drains,
        died_before=of_slurm.died_before,
        may_requeue=of_slurm.may_requeue,
        restarts_left=of_slurm.restarts_left,
        replacements=slurm.replacements,
        replacement_least_left_s=slurm.replacement_min_left,
        replacement_wait_s=slurm.replacement_wait,
        on_warning=slurm.on_warning,
        on_drain=slurm.on_drain,
    )


def _detection(section: DetectSection) -> Detection:
    thresholds = Thresholds(
        fit=section.fit,
        sure=section.sure,
        link_fit=section.link_fit,
        link_confirmed=section.link_confirmed,
    )
    return Detection(
        mode=section.mode,
        false_alarms_per=section.false_alarms_per,
        patience=section.patience,
        least=section.least,
        thresholds=thresholds,
    )


def _succession(configuration: Configuration, default: bool) -> bool:
    asked = configuration.adapt.succession
    return default if asked is None else asked


def _absolute_entries(python_path: str) -> str:
    return os.pathsep.join(os.path.abspath(entry) for entry in python_path.split(os.pathsep)) if python_path else ""
