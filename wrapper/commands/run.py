"""`resihp run`: validate the options, create the job's folder, then hand over to the guardian.

Nothing is started and no folder is created before configuration, layout, faults and command have been checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from resihp import faults
from resihp.db.url_passwords import has_password
from resihp.errors import ResihpError, UsageError
from resihp.faults import Fault
from resihp.settings import Detection, ProbeLimits, Settings
from resihp.slurm.client import Slurm
from resihp.words import count_of
from resihp.wrapper import early_signals, site_check
from resihp.wrapper.commands import in_slurm
from resihp.wrapper.commands.in_slurm import InSlurm
from resihp.wrapper.commands.operate.last_words import last_words
from resihp.wrapper.commands.operate.outcome import outcome
from resihp.wrapper.commands.resume import (
    CompletedError,
    Restart,
    after_restart,
    command_to_go_on,
    requested_resumption,
    resume_hint,
    resumption_if_any,
    run_of,
)
from resihp.wrapper.config import container, values
from resihp.wrapper.config.program import resolve
from resihp.wrapper.config.run_spec import Container, ListenerSettings, Program, RunRequest
from resihp.wrapper.config.schema import Configuration, DetectSection
from resihp.wrapper.config.script_settings import script_settings
from resihp.wrapper.config.shape import Shape, check_layout, check_target, of_allocation, on_this_machine
from resihp.wrapper.config.sources import check_partition, read
from resihp.wrapper.exit_codes import REQUEUE_REQUESTED, TRAINING_BROKEN, TRAINING_FAILED
from resihp.wrapper.job_folder import close_home, create_local_job, create_slurm_job, home
from resihp.wrapper.launch import allocation
from resihp.wrapper.launch.allocation import Allocation
from resihp.wrapper.output.answers import SCHEMA, message, to_json
from resihp.wrapper.sinks import fanout
from resihp.wrapper.slurm_tasks.requeue import end_for_good
from resihp.wrapper.supervisor import guardian
from resihp.wrapper.supervisor.patient_output import never_wait_for

CLI_SECTIONS = ("job", "layout", "adapt", "ledger", "checkpoint")
"""Sections of the configuration that have command line options."""


@dataclass(frozen=True)
class Options:
    """Options given on the command line; None for an option that was not given."""

    job: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    adapt: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    config: Path | None = None
    local: bool = False
    faults: tuple[str, ...] = ()
    resume: str | None = None
    """Job to resume from its newest checkpoint; empty: the newest job with a checkpoint; None: no --resume."""
    resume_or_start: bool = False
    """Whether to resume from the newest checkpoint of the configured folder if there is one."""
    arguments: tuple[str, ...] = ()
    """The whole command line, as it was typed."""
    words: tuple[str, ...] = ()
    """The command in it: script and arguments, or the words after --; empty if the configuration has the command."""
    as_json: bool = False
    """Whether to print the job's outcome as JSON at the end."""


def run(options: Options) -> int:
    """Run the job and return its exit code. Raises ResihpError."""
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
    if status not in (0, REQUEUE_REQUESTED):
        _end_for_good(options)
    return status


def _end_for_good(options: Options) -> None:
    if not options.local and (job_id := allocation.job_id(os.environ)):
        end_for_good(job_id, _slurm())


def _run(options: Options) -> int:
    checked = check(options)
    if has_password(options.ledger.get("url") or ""):
        message(
            "warning: the password in --ledger was visible in the process list for a moment; put it into ~/.pgpass "
            "(chmod 600), or the whole URL into url of [ledger] in a file that only you can read"
        )
    early_signals.note(early_signals.of_command())  # from here on there is a job, which these signals stop
    try:
        return _begin(make_request(checked, options), options)
    finally:
        early_signals.as_before()


def _begin(request: RunRequest, options: Options) -> int:
    never_wait_for("stderr")
    settings = request.settings
    spares = f", {settings.spares} of them spare" if settings.spares else ""
    nodes = f"{count_of(settings.nodes, 'node')} of {settings.gpus_per_node}{spares}"
    message(f"job {request.job}: {nodes}, logs in {request.of_job.logs}")
    if request.resume:
        message(f"job {request.job}: resumes from iteration {request.begins_at}, in {request.checkpoint_folder}")
    with _prints_on_stderr() if options.as_json else nullcontext():
        status = guardian.guard(request.save())
    if status in (TRAINING_FAILED, TRAINING_BROKEN) and (failure_lines := last_words(request.of_job)):
        message(f"job {request.job}: {failure_lines}")
    if status not in (0, REQUEUE_REQUESTED) and (hint := resume_hint(request)):
        message(f"job {request.job}: {hint}")
    if options.as_json:
        print(to_json(outcome(request.of_job, status)), flush=True)
    guardian.cancel_if_stopped(request, status)
    return status


@contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """Redirect stdout, including the output of rank 0, to stderr, so that stdout has only the JSON document."""
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A validated run, before anything is created for it."""

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
    """The configured folder for checkpoints; None to use the job's own folder."""
    restart: Restart
    of_slurm: InSlurm | None


def prepare(options: Options, slurm: Slurm | None = None) -> RunRequest:
    """Check everything, then create the job's folder and return the request. Raises ResihpError before that.

    `slurm`: the client to use in an allocation; default: the Slurm commands on PATH.
    """
    return make_request(check(options, slurm), options)


def make_request(checked: Checked, options: Options) -> RunRequest:
    """Create the job's folder, and return the request that describes the job."""
    configuration, shape = checked.configuration, checked.shape
    given, of_slurm = checked.allocation, checked.of_slurm
    resumption, restart_count = checked.restart.resumption, given.restart_count if given else 0
    job = create_slurm_job(given.job_id, restart_count) if given else create_local_job()
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
        chained=options.resume_or_start and given is not None,
        begins_at=resumption.iteration if resumption else 0,
        go_on=command_to_go_on(options.arguments, job.name, options.words or command, options.resume or ""),
        run=run_of(checkpoints, resumed=resumption is not None, earlier=checked.restart.run),
        ledger_url=configuration.ledger.url,
        ledger_keep_s=configuration.ledger.keep,
        checkpoint_pattern=configuration.checkpoint.latest,
        progress_pattern=configuration.progress.pattern,
        restart_count=restart_count,
        host=of_slurm.address if of_slurm else "127.0.0.1",
        ports=values.ports_of(configuration.slurm.ports) if of_slurm else None,
        interface=configuration.network.interface if of_slurm else "",
        succession=_has_succession(configuration, given is not None and len(shape.nodes) > 1),
        slurm=of_slurm.request if of_slurm else None,
        container=container.with_folders(checked.inside, mounted),
        listening=checked.listening,
        configuration=_recorded_configuration(configuration),
    )


def check(options: Options, slurm: Slurm | None = None) -> Checked:
    """Validate the options and return the run that they describe. Creates and starts nothing.

    Raises ResihpError if the run cannot work.
    """
    values_by_section = {
        section: {key: value for key, value in getattr(options, section).items() if value is not None}
        for section in CLI_SECTIONS
    }
    configuration = read(values_by_section, options.config)
    _check_words(configuration)
    given = None
    if not options.local:
        slurm = slurm or _slurm()
        given = allocation.find(os.environ, slurm)
        in_slurm.look_at_release(slurm, message)
        check_partition(given.partition, configuration, f"job {given.job_id}: partition")
    shape = of_allocation(configuration, given, message) if given else on_this_machine(configuration)
    check_layout(configuration.layout, shape.laid_out, shape.gpus_per_node)
    planned = tuple(faults.parse(text, i + 1) for i, text in enumerate(options.faults))
    for fault in planned:
        check_target(fault, shape, configuration.adapt.come_backs)
    listening = fanout.asked(configuration)
    inside = container.check(configuration.container)
    program = resolve(configuration.job.command, message, configuration.container.python if inside else None)
    cwd, python_path = os.getcwd(), _absolute_entries(os.environ.get("PYTHONPATH", ""))
    container.with_folders(inside, [Path(cwd), home()])  # raises if a folder cannot be mounted
    saved = _checkpoint_folder(options, configuration, given)
    if options.resume_or_start and given and slurm and saved:
        in_slurm.check_chain(saved, given, slurm, message)
    restart = _resumption(options, configuration, given, saved)
    of_slurm = in_slurm.of_slurm(configuration, given, slurm, restart.failed, message) if given and slurm else None
    return Checked(
        configuration=configuration,
        allocation=given,
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
    """Raise UsageError for an argument that is not valid text, because it can be neither journaled nor sent. Raise
    LedgerError for an invalid URL of a ledger."""
    from resihp.db.engine import resolve as resolve_ledger

    resolve_ledger(configuration.ledger.url, home())
    for part in configuration.job.command:
        if not part.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in part):
            raise UsageError(f"command: {part!a} is not UTF-8; rename that file, or pass its name in a file")


def _recorded_configuration(configuration: Configuration) -> dict[str, Any]:
    """Return the configuration as journal and ledger store it: without passwords."""
    from resihp.db.engine import masked

    recorded = configuration.model_dump(mode="json")
    recorded["ledger"]["url"] = masked(recorded["ledger"]["url"])
    return recorded


def _slurm() -> Slurm:
    """Return the client for Slurm's commands. Raises UsageError outside of an allocation."""
    if not allocation.job_id(os.environ):
        raise UsageError(allocation.NO_ALLOCATION)
    from resihp.slurm.commands import CommandLine

    return CommandLine()


def _checkpoint_folder(options: Options, configuration: Configuration, given: Allocation | None) -> Path | None:
    """Return the configured folder; each task of an array gets a subfolder, unless tasks resume from each other."""
    if not configuration.checkpoint.folder:
        return None
    folder = Path(configuration.checkpoint.folder).absolute()
    if given is None or not given.task or options.resume_or_start or folder.name == given.task:
        return folder
    message(f"job {given.job_id}: task of a job array; its checkpoints are in {folder / given.task}")
    return folder / given.task


def _resumption(
    options: Options, configuration: Configuration, given: Allocation | None, saved: Path | None
) -> Restart:
    """Return the checkpoints to resume from: after a restart by Slurm those of earlier runs, else as requested."""
    close_home()  # before anything in it is trusted
    restart = Restart(None, 0)
    if given is not None and given.restart_count:
        job, max_restarts = configuration.job, configuration.slurm.restarts
        restart = after_restart(given.job_id, given.restart_count, job.command, max_restarts, message)
        if restart.resumption is not None:
            return restart
    if options.resume is not None:
        resumption = requested_resumption(saved, options.resume, configuration.job.command, message)
        return replace(restart, resumption=resumption)
    return replace(restart, resumption=resumption_if_any(saved, message)) if options.resume_or_start else restart


def _settings(
    configuration: Configuration,
    job: str,
    shape: Shape,
    planned: tuple[Fault, ...],
    of_slurm: InSlurm | None,
    program: Program,
) -> Settings:
    """Return the controller's settings."""
    layout, adapt, slurm = configuration.layout, configuration.adapt, configuration.slurm
    settings = Settings(
        job=job,
        nodes=len(shape.nodes),
        node_names=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        spares=shape.spares,
        **script_settings(configuration, program, os.getcwd()),
        tp=layout.tp,
        pp=layout.pp,
        schedule=layout.schedule,
        chunks=layout.virtual_stages,
        sequence_parallel=layout.sequence_parallel,
        tune=layout.tune,
        memory_bytes=configuration.job.memory_per_device,
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
        return settings
    return msgspec.structs.replace(
        settings,
        slurm=True,
        batch_node=of_slurm.request.batch_node,
        drains_left=of_slurm.drains_left,
        died_before=of_slurm.died_before,
        may_requeue=of_slurm.may_requeue,
        restarts_left=of_slurm.restarts_left,
        warning_lead_s=of_slurm.warning_lead_s,
        replacements=slurm.replacements,
        replacement_least_left_s=slurm.replacement_min_left,
        replacement_wait_s=slurm.replacement_wait,
        site_check_s=site_check.longest_s(configuration.site.health_command, configuration.site.health_timeout),
        on_warning=slurm.on_warning,
        on_drain=slurm.on_drain,
    )


def _detection(section: DetectSection) -> Detection:
    probe_limits = ProbeLimits(fit=section.fit, link_fit=section.link_fit, link_confirmed=section.link_confirmed)
    return Detection(
        mode=section.mode,
        false_alarms_per=section.false_alarms_per,
        patience=section.patience,
        least=section.least,
        sure=section.sure,
        probe_limits=probe_limits,
    )


def _has_succession(configuration: Configuration, default: bool) -> bool:
    return default if configuration.adapt.succession is None else configuration.adapt.succession


def _absolute_entries(python_path: str) -> str:
    return os.pathsep.join(os.path.abspath(entry) for entry in python_path.split(os.pathsep)) if python_path else ""
