"""Keeps a requeued job from the nodes that its user's jobs avoid.

sbatch is told of these nodes when a job is submitted (`resihp.wrapper.commands.submit`), but Slurm may give a requeued
job the node again on which it has just died. So the nodes are set in the job's own request, while it is pending. This
is done only if enough other nodes are left: with too few, Slurm would hold the job for ever. Called by the processes
that request a requeue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from resihp.slurm.client import NodeChoice, NodeView, Slurm
from resihp.slurm.drains.exclusions import Exclusions
from resihp.slurm.errors import SlurmError, SlurmRefusedError
from resihp.words import count_of
from resihp.wrapper.config.run_spec import RunRequest, SlurmRequest
from resihp.wrapper.slurm_tasks import exclusion_lists

PATIENCE_S = 45.0
"""How long to ask a controller that does not answer. It kills the batch script after KillWait, 30 s by default."""
RETRY_PAUSE_S = 1.0


def exclude_bad_nodes(
    request: RunRequest,
    slurm: Slurm,
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Keep a pending job from the nodes that its user's jobs avoid, and from those that its user excluded. Says what
    was done, and why a node cannot be excluded.

    Asks again until Slurm ends this process. A controller that has just come back refuses connections now and then,
    and without accounting (slurmdbd) it changes no requeued job before the job's last process has ended.
    """
    main = request.slurm
    assert main is not None
    deadline = clock() + PATIENCE_S
    while True:
        try:
            for text in _exclude(request, main, slurm):
                say(f"job {main.job_id}: {text}")
            return
        except SlurmError as error:
            is_final = isinstance(error, SlurmRefusedError) and not error.for_now
            if clock() > deadline or is_final:
                say(f"job {main.job_id}: its next run may get the nodes again that it should avoid: {error}")
                return
        sleep(RETRY_PAUSE_S)


def _exclude(request: RunRequest, main: SlurmRequest, slurm: Slurm) -> list[str]:
    """Change the job's excluded nodes once; return what is to be said. Raises SlurmError."""
    here, now = request.of_job.folder.parent.parent, time.time()
    avoided = set(exclusion_lists.to_avoid(slurm, main.cluster, now, here))
    choice = slurm.node_choice(main.job_id)
    kept = set(choice.excluded) - _no_longer_avoided(Exclusions(here, main.cluster), main.job_id, now)
    added = avoided - kept
    obstacle = _obstacle(request, main, slurm, choice, avoided | kept) if added else ""
    excluded = kept if obstacle else avoided | kept
    texts = [f"its next run may get {', '.join(sorted(added))} again: {obstacle}"] if obstacle else []
    if excluded == set(choice.excluded):
        return texts
    slurm.exclude_nodes(main.job_id, sorted(excluded))
    if excluded:
        undo = f"scontrol update JobId={main.job_id} ExcNodeList="
        texts.append(f"its next run will not get {', '.join(sorted(excluded))}; if it should: {undo}")
    return texts


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
