"""Which of the user's own jobs holds a node, and in which of his homes that job is: of this one, and of all others that
the registry knows. Refuses what is not his; where several of his jobs hold the node, or several homes keep it out, the
choice is his. Used by `resihp node drain` and `undrain`.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.errors import UsageError

if TYPE_CHECKING:
    from slurm.client import JobView, Slurm
    from slurm.drains.exclusions import Exclusions

JOBS_ASKED = 20
"""Of this home's jobs, and of those of all others that have ended, the newest; older ones have to be named."""
JOURNALS_READ = 5


def holder(slurm: Slurm, node: str, job: str | None) -> JobView:
    """The user's own job that holds this node, or has held it. Raises UsageError."""
    from wrapper.launch.allocation import job_id as own_job

    me = user()
    ids = [job] if job else _own_jobs(slurm)
    views = slurm.jobs(ids) if ids else {}
    if job and job not in views:
        raise UsageError(f"job {job}: Slurm does not know it; try: squeue --me")
    if job and views[job].user != me:
        raise UsageError(f"job {job}: is {views[job].user}'s, not yours; only nodes of your own jobs can be drained")
    mine = [views[job_id] for job_id in ids if job_id in views and views[job_id].user == me]
    now = [view for view in mine if view.active and node in view.nodes]
    if len(now) > 1 and now[0].id != own_job(os.environ):
        raise UsageError(
            f"node {node[:80]!a}: {len(now)} of your jobs hold it; name one: resihp node drain {node[:80]} --job ID"
            + _choices(view.id for view in now)
        )
    for view in [*now, *mine]:
        if node in view.nodes:
            return view
    for view in mine[:JOURNALS_READ]:
        if node in _joined(view.id):
            return view
    whose = f"job {job} does not hold it and never has" if job else "none of your jobs that are known here holds it"
    raise UsageError(f"node {node[:80]!a}: {whose}; name the job that does: resihp node drain {node[:80]} --job ID")


def home_of(job_id: str) -> Path:
    """Where a job of Slurm's has its folder; this home for one that nobody knows."""
    from wrapper.job_folder import home

    return next((each for each, ids in _homes().items() if job_id in ids), home())


def lists_with(node: str, cluster: str, now: float) -> list[Exclusions]:
    """Of all homes that are known, those that keep the node out of the user's jobs."""
    from slurm.drains.exclusions import Exclusions
    from wrapper.job_folder import is_our_home

    lists = [Exclusions(each, cluster) for each in _homes() if is_our_home(each)]
    return [each for each in lists if any(item.node == node for item in each.current(now))]


def user() -> str:
    """Raises UsageError for one who has no name here."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise UsageError(f"user {os.getuid()}: has no name on this machine; use a node where id -un knows it") from None


def _own_jobs(slurm: Slurm) -> list[str]:
    """The user's Slurm jobs of this cluster: the one that we are in, those of this home, and those of all others."""
    from slurm.parse import JOB_ID
    from wrapper import registry
    from wrapper.job_folder import all_jobs, slurm_job_of
    from wrapper.launch.allocation import job_id as own_job

    here = [slurm_job_of(job.name) or "" for job in all_jobs()[:JOBS_ASKED]]
    known = [entry for entry in registry.entries()[0] if entry.slurm_job]
    if known:
        cluster = slurm.cluster()
        known = [entry for entry in known if entry.cluster in ("", cluster)]
    running = [entry.slurm_job for entry in known if entry.ended_at is None]
    ended = [entry.slurm_job for entry in known if entry.ended_at is not None]
    ids = dict.fromkeys([own_job(os.environ), *here, *running, *ended[:JOBS_ASKED]])
    return [name for name in ids if JOB_ID.fullmatch(name)]


def _homes() -> dict[Path, set[str]]:
    """This home and those of all jobs that are known, each with its jobs of Slurm's."""
    from wrapper import registry
    from wrapper.job_folder import all_jobs, home, slurm_job_of

    found = {home(): {slurm_job_of(job.name) or "" for job in all_jobs()}}
    for entry in registry.entries()[0]:
        if entry.slurm_job and Path(entry.home).is_dir():
            found.setdefault(Path(entry.home), set()).add(entry.slurm_job)
    return found


def _choices(ids: Iterable[str]) -> str:
    homes = _homes()
    where = {job_id: [str(home) for home, of in homes.items() if job_id in of] for job_id in ids}
    return "".join(f"\n{job_id}{_in(homes)}" for job_id, homes in where.items())


def _in(homes: Sequence[str]) -> str:
    return f" (in {', '.join(homes)})" if homes else ""


def _joined(job_id: str) -> set[str]:
    """Nodes that have ever been the job's, as its journal has it."""
    from resihp.errors import ResihpError
    from resihp.record.journal import NodeJoined
    from wrapper.job_folder import find_job

    try:
        records = find_job(job_id).records()
    except (ResihpError, OSError):
        return set()
    return {record.entry.node for record in records if isinstance(record.entry, NodeJoined)}
