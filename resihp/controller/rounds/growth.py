"""Start a script again on more nodes, right after a checkpoint, once nodes have joined that it does not use.

A script goes on with fewer nodes when some are lost and `[job] min_nodes` allows it. Replacement nodes then wait for
the next round. The moment after a checkpoint is the cheapest one for that round, because no iteration is lost. Called
by `controller` when a new checkpoint is found.
"""

from __future__ import annotations

from statistics import median

from resihp.controller.rounds import next_round, restarts
from resihp.controller.state.job import Job
from resihp.words import count_of, natural

RESTART_S = 60.0
"""Assumed seconds that a restart costs, with loading of the checkpoint and the first slow iterations."""


def review(job: Job) -> None:
    """Start the script again if more nodes can be used and this pays. A checkpoint has just been found."""
    placed = dict.fromkeys(place.node for place in job.record.placements)
    is_whole = len(job.live) == len(job.record.placements)  # else the script is about to start, or to end
    is_calm = is_whole and job.start.early_at is None and job.stop_request is None and not job.settings.observes
    if not job.runs_script or job.stage != "gathering" or not is_calm or not job.settings.takes_checkpoint:
        return
    nodes = next_round.nodes_of(job)
    if len(nodes) > len(placed) and _pays(job, len(placed), len(nodes)):
        more = sorted(set(nodes) - placed.keys(), key=natural)
        reason = f"node {', '.join(more)} joined: {count_of(len(nodes), 'node')} instead of {len(placed)}"
        restarts.begin(job, reason, is_planned=True)


def _pays(job: Job, present: int, future: int) -> bool:
    """Return whether the restart costs less than the additional nodes save; True if the script's end is not known."""
    record = job.record
    if not record.goal or not record.recent:
        return True
    left_s = (record.goal - job.counter.iteration) * median(record.recent)
    return left_s * (1 - present / future) > RESTART_S
