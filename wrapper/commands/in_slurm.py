"""Gathers a run's settings for Slurm, and facts about its allocation, once, before anything starts.

Changes nothing in Slurm. Warns early about missing options that would cause failures later. Used by
`resihp.wrapper.commands.run`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from resihp.record.journal import SlurmIdentity
from resihp.slurm import releases
from resihp.slurm.client import Slurm
from resihp.slurm.errors import SlurmError
from resihp.wrapper.commands import earlier_runs
from resihp.wrapper.config.run_spec import SlurmRequest
from resihp.wrapper.config.schema import Configuration
from resihp.wrapper.config.site_limits import drain_limits
from resihp.wrapper.launch import allocation, batch_script, interfaces
from resihp.wrapper.launch.allocation import Allocation
from resihp.wrapper.slurm_tasks import chain
from resihp.wrapper.slurm_tasks.exclusion_lists import given_all_the_same


class InSlurm(NamedTuple):
    """A run's Slurm settings, the address to listen on, and the allowances that the job's earlier runs have not
    used."""

    request: SlurmRequest
    address: str
    drains_left: int
    died_before: tuple[str, ...]
    may_requeue: bool
    restarts_left: int
    warning_lead_s: float


def look_at_release(slurm: Slurm, notice: Callable[[str], None]) -> None:
    """Give a notice if resihp was not tested with this release of Slurm, or if the release cannot be read. The run
    continues."""
    try:
        remark = releases.untried(slurm.version())
    except SlurmError as error:
        remark = f"{error}; going on as with Slurm {releases.OLDEST[0]}.{releases.OLDEST[1]:02}"
    if remark:
        notice(remark)


def of_slurm(
    configuration: Configuration, given: Allocation, slurm: Slurm, failed: int, notice: Callable[[str], None]
) -> InSlurm:
    """Return the run's Slurm settings for the given allocation. Raises UsageError, SlurmError."""
    section = configuration.slurm
    if section.step_extra:
        slurm.check_step(section.step_extra)
    script = allocation.batch_script(slurm, given.job_id)
    requeue_asked = allocation.requeue_asked(os.environ, script)
    if given.uneven:
        notice(f"job {given.job_id}: nodes differ; each agent gets {given.cpus_per_node} CPUs, as on the smallest node")
    if (lost_warning := batch_script.lost_warning(os.environ, script)) is not None:
        notice(f"job {given.job_id}: {lost_warning}")
    if not allocation.no_kill_seen(os.environ, script):
        notice(
            f"job {given.job_id}: no --no-kill in the batch script: if a node fails, Slurm ends the whole job; "
            "add #SBATCH --no-kill (unless it was passed to sbatch itself, which cannot be seen)"
        )
    host_names = allocation.addresses(slurm, given.nodes)
    own_host_name = host_names.get(given.batch_node) or socket.gethostname()
    earlier = earlier_runs.of(given.job_id, notice)
    others = [name for node, name in host_names.items() if node != given.batch_node]
    cluster = os.environ.get("SLURM_CLUSTER_NAME") or slurm.cluster()
    _report_avoided_nodes(cluster, given, notice)
    request = SlurmRequest(
        job_id=given.job_id,
        number=given.number,
        cluster=cluster,
        identity=_identity(given, slurm, cluster),
        batch_node=given.batch_node,
        host_names=host_names,
        cpus=given.cpus_per_node,
        gpus=given.gpus_per_node,
        partition=section.partition or given.partition,
        account=section.account or given.account,
        qos=section.qos or given.qos,
        replacement_partition=section.replacement_partition,
        replacement_qos=section.replacement_qos,
        constraint=section.constraint,
        reservation=section.reservation or given.reservation,
        extra=section.extra,
        step_extra=section.step_extra,
        limits=drain_limits(configuration, section.partition or given.partition, section.replacement_partition),
        health_command=configuration.site.health_command,
        health_timeout_s=configuration.site.health_timeout,
        spool=section.spool,
        comment=section.comment,
    )
    control = configuration.network.control
    return InSlurm(
        request,
        interfaces.address_of(control, given.batch_node or own_host_name)
        if control
        else allocation.own_address(own_host_name, others),
        drains_left=max(0, section.drains - earlier.drained),
        died_before=earlier.died,
        may_requeue=section.on_warning == "requeue" if requeue_asked is None else requeue_asked,
        restarts_left=section.restarts - failed - 1,
        warning_lead_s=batch_script.warning_lead_s(os.environ, script),
    )


def _report_avoided_nodes(cluster: str, given: Allocation, notice: Callable[[str], None]) -> None:
    """Give a notice about nodes of this allocation that the user's jobs avoid."""
    for exclusion in given_all_the_same(cluster, given.nodes, time.time()):
        notice(
            f"node {exclusion.node}: in this allocation, although your jobs avoid it ({exclusion.reason}); "
            f"resihp submit excludes it, for sbatch add --exclude={exclusion.node}"
        )


def _identity(given: Allocation, slurm: Slurm, cluster: str) -> SlurmIdentity | None:
    """Return the job's identity for the ledger. Its time of submission is None if Slurm does not give it."""
    if not given.number.isdigit():
        return None
    try:
        view = slurm.job(given.job_id)
    except SlurmError:
        view = None
    return SlurmIdentity(
        cluster=cluster,
        job=int(given.number),
        array_job=given.array_job,
        array_task=given.array_task,
        submitted_at=None if view is None else view.submitted_at,
        account=given.account,
        partition=given.partition,
        qos=given.qos,
    )


def check_chain(folder: Path, given: Allocation, slurm: Slurm, notice: Callable[[str], None]) -> None:
    """Raise TrainingProgramError if an earlier job of the chain has found that the chain cannot succeed."""
    chain.check(folder, given.job_id, slurm, notice)
    if os.environ.get("SLURM_JOB_NAME") == chain.TEMPLATES_NAME:
        notice(
            f"job {given.job_id}: still has the template's name, {chain.TEMPLATES_NAME}: all chains of that name wait "
            "for each other; set a name of its own with --job-name= in the batch script"
        )
