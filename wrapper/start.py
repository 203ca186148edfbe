"""`resihp run`: from options to a job's folder, then on to the guardian. All that can be refused is refused here.

Nothing is started and no folder made before configuration, layout, faults and command have been checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resihp import faults
from resihp.errors import CheckpointError, ConfigurationError, LayoutError, UsageError
from resihp.faults import Fault
from wrapper import guardian
from wrapper.config import Configuration, read
from wrapper.jobs import Job, all_jobs, create_local_job, find_job, home
from wrapper.program import resolve
from wrapper.request import RunRequest, load


@dataclass(frozen=True)
class Options:
    """What the command line said; None where it said nothing."""

    job: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    config: Path | None = None
    local: bool = False
    faults: tuple[str, ...] = ()
    resume: str | None = None
    """Job whose newest checkpoint is taken; empty: that of the newest job that has one."""


def run(options: Options) -> int:
    """Run the job; returns its exit code. Raises UsageError."""
    request = prepare(options)
    _notice(f"job {request.job}: {request.nodes} nodes of {request.gpus_per_node}, logs in {request.of_job.logs}")
    return guardian.guard(request.save())


def prepare(options: Options) -> RunRequest:
    """Check everything, then make the job's folder. Raises UsageError; then no folder was made."""
    given = {
        section: {key: value for key, value in getattr(options, section).items() if value is not None}
        for section in ("job", "layout", "ledger", "checkpoint")  # the command line has no [adapt]
    }
    configuration = read(given, options.config)
    if not options.local:
        raise UsageError("a Slurm allocation is not supported yet; add --local to run on this machine")
    check_layout(configuration)
    devices = configuration.job.nodes * configuration.job.gpus_per_node
    planned = tuple(faults.parse(text, i + 1) for i, text in enumerate(options.faults))
    for fault in planned:
        check_target(fault, devices, configuration.job.nodes, configuration.adapt.come_backs)
    program = resolve(configuration.job.command, _notice)
    inherited = None if options.resume is None else find_checkpoints(configuration, options.resume)

    job = create_local_job()
    return RunRequest(
        job=job.name,
        folder=str(job.folder),
        program=program,
        command=configuration.job.command,
        cwd=os.getcwd(),
        python_path=_absolute_entries(os.environ.get("PYTHONPATH", "")),
        nodes=configuration.job.nodes,
        gpus_per_node=configuration.job.gpus_per_node,
        tp=configuration.layout.tp,
        pp=configuration.layout.pp,
        schedule=configuration.layout.schedule,
        virtual_stages=configuration.layout.virtual_stages,
        sequence_parallel=configuration.layout.sequence_parallel,
        memory_bytes=configuration.job.memory_per_device,
        come_backs=configuration.adapt.come_backs,
        faults=planned,
        checkpoint_folder=str(inherited or Path(configuration.checkpoint.folder or job.checkpoints).absolute()),
        checkpoint_every=configuration.checkpoint.every,
        checkpoint_keep=configuration.checkpoint.keep,
        resume=options.resume is not None,
        ledger_url=configuration.ledger.url,
        restart_count=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        configuration=configuration.model_dump(mode="json"),
    )


def check_layout(configuration: Configuration) -> None:
    """What is wrong with a layout whatever the model is. Raises LayoutError."""
    job, layout = configuration.job, configuration.layout
    devices = job.nodes * job.gpus_per_node
    if layout.tp > job.gpus_per_node:
        raise LayoutError(
            f"layout tp={layout.tp}: a tensor-parallel group stays inside a node, which has {job.gpus_per_node} "
            f"devices; choose --tp {job.gpus_per_node} or less"
        )
    if devices < layout.tp * layout.pp:
        raise LayoutError(
            f"layout tp={layout.tp} pp={layout.pp}: needs {layout.tp * layout.pp} devices, the job has {devices}; "
            "raise --nodes or --gpus-per-node, or lower a degree"
        )
    if devices % (layout.tp * layout.pp):
        raise LayoutError(
            f"layout tp={layout.tp} pp={layout.pp}: a replica needs {layout.tp * layout.pp} devices, and the job's "
            f"{devices} ({job.nodes} nodes of {job.gpus_per_node}) are not a multiple of that"
        )
    if job.gpus_per_node % layout.tp:
        raise LayoutError(
            f"layout tp={layout.tp}: {job.gpus_per_node} devices a node are not a multiple of it, so a "
            "tensor-parallel group would cross nodes"
        )
    if layout.schedule == "interleaved" and layout.virtual_stages == 1:
        raise LayoutError(
            "layout schedule=interleaved: interleaves the virtual stages of each stage, and there is one; "
            "choose --virtual-stages 2 or more, or --schedule 1f1b"
        )
    if layout.schedule != "interleaved" and layout.virtual_stages > 1:
        raise LayoutError(
            f"layout schedule={layout.schedule}: has one virtual stage a stage, not {layout.virtual_stages}; "
            "choose --schedule interleaved, or --virtual-stages 1"
        )


def check_target(fault: Fault, devices: int, nodes: int, come_backs: int) -> None:
    """Raises ConfigurationError for a fault that hits nobody. Processes that come back have ranks of their own."""
    most = devices * (1 + come_backs)
    if fault.rank is not None and fault.rank >= most:
        later = f", {devices} to {most - 1} for processes that come back" if come_backs else ""
        raise ConfigurationError(
            f"fault {fault}: there is no rank {fault.rank}; ranks are 0 to {devices - 1} at the start{later}"
        )
    names = [f"n{i + 1}" for i in range(nodes)]
    if fault.node is not None and fault.node not in names:
        raise ConfigurationError(f"fault {fault}: there is no node {fault.node}; nodes are {names[0]} to {names[-1]}")


def find_checkpoints(configuration: Configuration, name: str) -> Path:
    """The folder to resume from: the named job's, the configured one, or the newest job's that has a checkpoint.

    Raises CheckpointError when there is none. Which checkpoint in it is complete, the trainer finds out.
    """
    from resihp.checkpoints import newest_complete

    if name or configuration.checkpoint.folder:
        folder = checkpoint_folder_of(find_job(name)) if name else Path(configuration.checkpoint.folder).absolute()
        if newest_complete(folder, verify=False) is None:
            raise CheckpointError(f"--resume: no complete checkpoint in {folder}")
        return folder
    for job in all_jobs():
        folder = checkpoint_folder_of(job)
        if newest_complete(folder, verify=False) is not None:
            return folder
    raise CheckpointError(
        f"--resume: no job in {home()} has a complete checkpoint; name a folder with --checkpoint-folder"
    )


def checkpoint_folder_of(job: Job) -> Path:
    """Where a job wrote its checkpoints: a resumed one goes on in the folder that it took over."""
    return Path(load(job.run_file).checkpoint_folder) if job.run_file.exists() else job.checkpoints


def _absolute_entries(python_path: str) -> str:
    return os.pathsep.join(os.path.abspath(entry) for entry in python_path.split(os.pathsep)) if python_path else ""


def _notice(text: str) -> None:
    print(f"resihp: {text}", file=sys.stderr)
