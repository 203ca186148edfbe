"""What a run asks of Slurm, and what its allocation is like: looked at once, before anything is started.

Nothing here changes anything in Slurm. What may go wrong later for want of an option is told now. Used by
`wrapper.commands.run`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from resihp.record.journal import SlurmIdentity
from slurm import releases
from slurm.client import Slurm
from slurm.errors import SlurmError
from wrapper.commands import earlier_runs
from wrapper.config.run_spec import SlurmRequest
from wrapper.config.schema import Configuration
from wrapper.launch import allocation, batch_script, interfaces
from wrapper.launch.allocation import Allocation
from wrapper.slurm_tasks import chain
from wrapper.slurm_tasks.exclusion_lists import given_all_the_same


class InSlurm(NamedTuple):
    """What a run asks of Slurm, the address to listen on, and what earlier runs of the same Slurm job have left it."""

    request: SlurmRequest
    address: str
    drains: int
    died_before: tuple[str, ...]
    may_requeue: bool
    restarts_left: int


def look_at_release(slurm: Slurm, notice: Callable[[str], None]) -> None:
    """Nothing depends on it yet: a release that nobody has tried, or that cannot be read, is told once."""
    try:
        told = releases.untried(slurm.version())
    except SlurmError as error:
        told = f"{error}; going on as with Slurm {releases.OLDEST[0]}.{releases.OLDEST[1]:02}"
    if told:
        notice(told)


def of_slurm(
    configuration: Configuration, found: Allocation, slurm: Slurm, failed: int, notice: Callable[[str], None]
) -> InSlurm:
    """Raises UsageError, SlurmError."""
    section = configuration.slurm
    script = allocation.batch_script(slurm, found.job_id)
    asked = allocation.requeue_asked(os.environ, script)
    if found.uneven:
        notice(f"job {found.job_id}: nodes differ; each agent gets {found.cpus_per_node} CPUs, as the smallest has")
    if (lost := batch_script.lost_warning(os.environ, script)) is not None:
        notice(f"job {found.job_id}: {lost}")
    if not allocation.no_kill_seen(os.environ, script):
        notice(
            f"job {found.job_id}: no --no-kill in the batch script: if a node fails, Slurm ends the whole job; "
            "put #SBATCH --no-kill into it (unless it was given to sbatch itself, which cannot be seen)"
        )
    host_names = allocation.addresses(slurm, found.nodes)
    here = host_names.get(found.batch_node) or socket.gethostname()
    earlier = earlier_runs.of(found.job_id, notice)
    others = [name for node, name in host_names.items() if node != found.batch_node]
    cluster = os.environ.get("SLURM_CLUSTER_NAME") or slurm.cluster()
    _tell_of_kept_out(cluster, found, notice)
    request = SlurmRequest(
        job_id=found.job_id,
        number=found.number,
        cluster=cluster,
        identity=_identity(found, slurm, cluster),
        batch_node=found.batch_node,
        host_names=host_names,
        cpus=found.cpus_per_node,
        gpus=found.gpus_per_node,
        partition=section.partition or found.partition,
        account=section.account or found.account,
        qos=section.qos or found.qos,
        constraint=section.constraint,
        reservation=section.reservation or found.reservation,
        extra=section.extra,
        most_drained=configuration.site.drained,
        spool=section.spool,
        comment=section.comment,
    )
    control = configuration.network.control
    return InSlurm(
        request,
        interfaces.address_of(control, found.batch_node or here) if control else allocation.own_address(here, others),
        drains=max(0, section.drains - earlier.drained),
        died_before=earlier.died,
        may_requeue=section.on_warning == "requeue" if asked is None else asked,
        restarts_left=section.restarts - failed - 1,
    )


def _tell_of_kept_out(cluster: str, found: Allocation, notice: Callable[[str], None]) -> None:
    """Of nodes that the user's jobs avoid, and that this one has been given."""
    for one in given_all_the_same(cluster, found.nodes, time.time()):
        notice(
            f"node {one.node}: is in this allocation, though it is kept out of your jobs ({one.reason}); resihp submit "
            f"heeds that, sbatch has to be told: --exclude={one.node}"
        )


def _identity(found: Allocation, slurm: Slurm, cluster: str) -> SlurmIdentity | None:
    """For the ledger alone: a Slurm that does not say when the job was submitted holds up nothing."""
    if not found.number.isdigit():
        return None
    try:
        view = slurm.job(found.job_id)
    except SlurmError:
        view = None
    return SlurmIdentity(
        cluster=cluster,
        job=int(found.number),
        array_job=found.array_job,
        array_task=found.array_task,
        submitted_at=None if view is None else view.submitted_at,
        account=found.account,
        partition=found.partition,
        qos=found.qos,
    )


def check_chain(folder: Path, found: Allocation, slurm: Slurm, notice: Callable[[str], None]) -> None:
    """Raises TrainingProgramError when a job before this one has found out that it is in vain."""
    chain.check(folder, found.job_id, slurm, notice)
    if os.environ.get("SLURM_JOB_NAME") == chain.TEMPLATES_NAME:
        notice(
            f"job {found.job_id}: has the name of the template, {chain.TEMPLATES_NAME}: all chains that have it wait "
            "for each other; put one of its own after --job-name= in the batch script"
        )
