"""Finds the user's job that holds a node, and the home of that job, in this home and in all other homes in the
registry.

Refuses other users' jobs. If several of the user's jobs hold the node, or several homes exclude it, the user must
choose one. Used by `resihp node drain` and `undrain`.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.errors import UsageError

if TYPE_CHECKING:
    from resihp.slurm.client import JobView, Slurm
    from resihp.slurm.drains.exclusions import Exclusions

MAX_JOBS_CONSIDERED = 20
"""Number of this home's newest jobs, and of the newest finished jobs of other homes, that are considered; older jobs
must be named."""
MAX_JOURNALS_READ = 5


def holder(slurm: Slurm, node: str, job: str | None) -> JobView:
    """Return the user's own job that holds this node, or else one that has held it. Raises UsageError if there is
    none."""
    own_views = _own_views(slurm, job)
    _check_one_holds(own_views, node)
    for view in own_views:
        if view.active and node in view.nodes:
            return view
    for view in own_views:
        if node in view.nodes:
            return view
    for view in own_views[:MAX_JOURNALS_READ]:
        if node in _joined(view.id):
            return view
    problem = f"job {job} does not hold it and never has" if job else "none of your jobs known here holds it"
    raise UsageError(f"node {node[:80]!a}: {problem}; name the job that does: resihp node drain {node[:80]} --job ID")


def running_on(slurm: Slurm, node: str) -> JobView | None:
    """Return a running job of the user that holds this node; None if none of the jobs known here does."""
    return next((view for view in _own_views(slurm, None) if view.state == "running" and node in view.nodes), None)


def _own_views(slurm: Slurm, job: str | None) -> list[JobView]:
    """Return Slurm's view of the named job, or of all jobs of the user that are known here.

    Raises UsageError if Slurm does not know the named job, or if it belongs to another user.
    """
    me = user()
    ids = [job] if job else _own_jobs(slurm)
    views = slurm.jobs(ids) if ids else {}
    if job and job not in views:
        raise UsageError(f"job {job}: Slurm does not know it; try: squeue --me")
    if job and views[job].user != me:
        raise UsageError(f"job {job}: is {views[job].user}'s, not yours; only nodes of your own jobs can be drained")
    return [views[job_id] for job_id in ids if job_id in views and views[job_id].user == me]


def _check_one_holds(own_views: Sequence[JobView], node: str) -> None:
    """Raise UsageError if several jobs hold the node, unless this process runs in the first of them."""
    from resihp.wrapper.launch.allocation import job_id as own_job

    holding_views = [view for view in own_views if view.active and node in view.nodes]
    if len(holding_views) > 1 and holding_views[0].id != own_job(os.environ):
        raise UsageError(
            f"node {node[:80]!a}: {len(holding_views)} of your jobs hold it; name one: "
            f"resihp node drain {node[:80]} --job ID" + _choices(view.id for view in holding_views)
        )


def home_of(job_id: str) -> Path:
    """Return the home of a Slurm job; this home if the job is unknown."""
    from resihp.wrapper.job_folder import home

    return next((home_path for home_path, ids in _homes().items() if job_id in ids), home())


def lists_with(node: str, cluster: str, now: float) -> list[Exclusions]:
    """Return the exclusion lists, of all known homes, that contain the node."""
    from resihp.slurm.drains.exclusions import Exclusions
    from resihp.wrapper.job_folder import is_our_home

    lists = [Exclusions(exclusion_list, cluster) for exclusion_list in _homes() if is_our_home(exclusion_list)]
    return [
        exclusion_list for exclusion_list in lists if any(item.node == node for item in exclusion_list.current(now))
    ]


def user() -> str:
    """Return the user's name. Raises UsageError if the user has no name on this machine."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise UsageError(f"user {os.getuid()}: has no name on this machine; use a node where id -un knows it") from None


def _own_jobs(slurm: Slurm) -> list[str]:
    """Return the numbers of the user's Slurm jobs on this cluster: this process's job, jobs of this home, and jobs of
    other homes."""
    from resihp.slurm.parsing.parse import JOB_ID
    from resihp.wrapper import registry
    from resihp.wrapper.job_folder import all_jobs, slurm_job_of
    from resihp.wrapper.launch.allocation import job_id as own_job

    ids_here = [slurm_job_of(job.name) or "" for job in all_jobs()[:MAX_JOBS_CONSIDERED]]
    entries = [entry for entry in registry.entries()[0] if entry.slurm_job]
    if entries:
        cluster = slurm.cluster()
        entries = [entry for entry in entries if entry.cluster in ("", cluster)]
    running = [entry.slurm_job for entry in entries if entry.ended_at is None]
    ended = [entry.slurm_job for entry in entries if entry.ended_at is not None]
    ids = dict.fromkeys([own_job(os.environ), *ids_here, *running, *ended[:MAX_JOBS_CONSIDERED]])
    return [name for name in ids if JOB_ID.fullmatch(name)]


def _homes() -> dict[Path, set[str]]:
    """Return this home and the homes of all registered jobs, each with the numbers of its Slurm jobs."""
    from resihp.wrapper import registry
    from resihp.wrapper.job_folder import all_jobs, home, slurm_job_of

    jobs_by_home = {home(): {slurm_job_of(job.name) or "" for job in all_jobs()}}
    for entry in registry.entries()[0]:
        if entry.slurm_job and Path(entry.home).is_dir():
            jobs_by_home.setdefault(Path(entry.home), set()).add(entry.slurm_job)
    return jobs_by_home


def _choices(ids: Iterable[str]) -> str:
    homes = _homes()
    homes_by_job = {job_id: [str(home) for home, job_ids in homes.items() if job_id in job_ids] for job_id in ids}
    return "".join(f"\n{job_id}{_in(homes)}" for job_id, homes in homes_by_job.items())


def _in(homes: Sequence[str]) -> str:
    return f" (in {', '.join(homes)})" if homes else ""


def _joined(job_id: str) -> set[str]:
    """Return all nodes that have ever joined the job, from its journal; empty if the journal cannot be read."""
    from resihp.errors import ResihpError
    from resihp.record.journal import NodeJoined
    from resihp.wrapper.job_folder import find_job

    try:
        records = find_job(job_id).records()
    except (ResihpError, OSError):
        return set()
    return {record.entry.node for record in records if isinstance(record.entry, NodeJoined)}
