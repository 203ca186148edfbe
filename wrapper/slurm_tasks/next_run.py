"""Keeps a requeued job from the nodes that its user's jobs avoid.

sbatch is told of these nodes when a job is submitted (`resihp.wrapper.commands.submit`), but Slurm may give a requeued
job the node again on which it has just died. So the nodes are set in the job's own request, while it is pending. This
is done only if enough other nodes are left: with too few, Slurm would hold the job for ever. Called by the processes
that request a requeue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from resihp.errors import ResihpError
from resihp.slurm.client import NodeChoice, NodeView, Slurm
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.errors import SlurmError, SlurmRefusedError
from resihp.words import count_of
from resihp.wrapper.config.run_spec import RunRequest, SlurmRequest
from resihp.wrapper.slurm_tasks import exclusion_lists

MAX_ATTEMPTS = 8
"""How often to ask a controller that does not answer, at most."""
RETRY_PAUSE_S = 1.0


def exclude_bad_nodes(
    request: RunRequest, slurm: Slurm, say: Callable[[str], None], *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Keep a pending job from the nodes that its user's jobs avoid, and from those that its user excluded. Says what
    was done, and why a node cannot be excluded. Asks again for a few seconds if Slurm does not answer: a controller
    that has just come back refuses connections now and then."""
    main = request.slurm
    assert main is not None
    for last in (*[False] * (MAX_ATTEMPTS - 1), True):
        try:
            _exclude(request, main, slurm, say)
        except _NotExcludedError as error:
            if last or isinstance(error.__cause__, SlurmRefusedError):
                say(f"job {main.job_id}: {error}")
                return
            sleep(RETRY_PAUSE_S)
        else:
            return


class _NotExcludedError(ResihpError):
    """A call to Slurm failed, so that the next run may get the nodes again. Its cause is the call's error."""


def _exclude(request: RunRequest, main: SlurmRequest, slurm: Slurm, say: Callable[[str], None]) -> None:
    here, now = request.of_job.folder.parent.parent, time.time()
    names = "the same nodes"
    try:
        avoided = set(exclusion_lists.to_avoid(slurm, main.cluster, now, here))
        choice = slurm.node_choice(main.job_id)
        kept = set(choice.excluded) - _no_longer_avoided(Exclusions(here, main.cluster), main.job_id, now)
        names = ", ".join(sorted(avoided - kept)) or names
        obstacle = _obstacle(request, main, slurm, choice, avoided | kept) if avoided - kept else ""
        excluded = kept if obstacle else avoided | kept
        if excluded != set(choice.excluded):
            slurm.exclude_nodes(main.job_id, sorted(excluded))
    except SlurmError as error:
        raise _NotExcludedError(f"its next run may get {names} again: {error}") from error
    if obstacle:
        say(f"job {main.job_id}: its next run may get {names} again: {obstacle}")
    if excluded and excluded != set(choice.excluded):
        text = f"its next run will not get {', '.join(sorted(excluded))}"
        say(f"job {main.job_id}: {text}; if it should: scontrol update JobId={main.job_id} ExcNodeList=")


def _obstacle(
    request: RunRequest, main: SlurmRequest, slurm: Slurm, choice: NodeChoice, excluded: Collection[str]
) -> str:
    """Return why these nodes may not be excluded from the next run; empty if enough others are left. Raises
    SlurmError."""
    if requested := sorted(set(choice.requested).intersection(excluded)):
        return f"it was submitted for {', '.join(requested)} by name"
    if choice.contiguous:
        return "it was submitted for contiguous nodes"
    if choice.reservation:
        return f"it runs in the reservation {choice.reservation}"
    own_nodes = request.settings.node_names
    partition_views = slurm.partition_nodes(choice.partition or main.partition)
    other_nodes = alike(partition_views, own_nodes).difference(excluded)
    if len(other_nodes) < len(own_nodes):
        needed = count_of(len(own_nodes), "node")
        return f"it needs {needed}, and without them only {len(other_nodes)} of their kind are in order"
    return ""


def _no_longer_avoided(exclusions: Exclusions, job_id: str, now: float) -> set[str]:
    """Return the nodes that an earlier run of this Slurm job excluded for a time that is over."""
    return {item.node for item in exclusions.known() if item.job_id == job_id and item.expires_at <= now}


def alike(views: Mapping[str, NodeView], samples: Collection[str]) -> set[str]:
    """Return the names of the usable nodes that have the same CPUs, memory, GPUs and features as some node in
    `samples`. Nodes that a reservation holds for others do not count."""
    kinds = {_kind(views[name]) for name in samples if name in views}
    reserved = {"maint", "reserved"}
    return {name for name, view in views.items() if view.usable and not view.flags & reserved and _kind(view) in kinds}


def _kind(view: NodeView) -> tuple[int, int, int, frozenset[str]]:
    return view.cpus, view.memory_mb, view.gpus, view.features
