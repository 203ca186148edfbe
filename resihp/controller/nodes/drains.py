"""Decide when a measure is taken against a node that failed: a drain, or its exclusion from the user's next jobs.

`measures` decides which measure. A node has failed if a journaled failure names it or one of its devices. No measure is
taken on a mere suspicion, against the node of the batch script, or while the job is being stopped. Called by `upkeep`
at the end of each event, by `endings` before a job ends because of its nodes, and with Slurm's answers.
"""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.controller.nodes import measures, replacements
from resihp.controller.nodes.measures import Decision
from resihp.controller.state.job import Job
from resihp.controller.state.requests import COINCIDENCE_S
from resihp.record.journal import DrainAnswered, DrainDecided, DrainWaived
from resihp.record.state import Drain, LostNode, Verdict

MAX_REASON_CHARS = 120


def review(job: Job) -> None:
    """Decide on the measure against each failed node, as far as it is due. In observe mode, only say what would be
    done."""
    if job.stop_request is not None:
        return
    for verdict in tuple(job.record.verdicts.values()):
        if not _is_due(job, verdict):
            continue
        decision = _decision(job, verdict)
        if decision is None or job.settings.observes:
            job.log(DrainWaived(node=verdict.node, failure=verdict.failure))
        else:
            _decide(job, verdict, decision)
        if decision is not None:
            _say(job, verdict.node, decision)


def are_undecided(job: Job) -> bool:
    """Return whether it is still to be decided what to do about some failed node."""
    return job.settings.slurm and bool(job.record.verdicts)


def _is_due(job: Job, verdict: Verdict) -> bool:
    """Return whether enough time has passed since a node's failure to learn of a cause outside of it: other nodes that
    were lost at the same time, or, for the node of a replacement, the end of its own Slurm job."""
    is_guest = verdict.node in replacements.guests(job)
    wait_s = replacements.SLURM_SAYS_S if is_guest else COINCIDENCE_S
    return job.now - job.maintenance.found_at[verdict.node] >= wait_s


def _decide(job: Job, verdict: Verdict, decision: Decision) -> None:
    number = len(job.record.drains) + 1
    job.log(
        DrainDecided(
            drain=number,
            node=verdict.node,
            failure=verdict.failure,
            reason=_reason(job, verdict),
            measure=decision.measure,
            grounds=decision.grounds,
        )
    )
    job.do(_climb(job.record.drains[number]))


def _say(job: Job, node: str, decision: Decision) -> None:
    grounds = measures.GROUNDS_TEXT[decision.grounds]
    measure = "drained" if decision.measure == "drain" else "excluded from your next jobs"
    if job.settings.observes:
        job.say("notice", f"node {node}: would be {measure} ({grounds}); observe mode: nothing is done")
    elif decision.measure == "drain":
        job.say("notice", f"node {node}: to be drained ({grounds})")
    else:
        job.say("notice", f"node {node}: {measure}, not drained ({grounds})")


def resume(job: Job) -> None:
    """Repeat, after a take-over, the orders that were decided but never answered."""
    if not job.settings.slurm:
        return
    for drain in job.record.drains.values():
        if not drain.settled:
            job.do(_climb(drain))


def _climb(drain: Drain) -> api.DrainNode:
    return api.DrainNode(
        drain=drain.number, node=drain.node, reason=drain.reason, measure=drain.measure, grounds=drain.grounds
    )


def _reason(job: Job, verdict: Verdict) -> str:
    """Return the reason of a drain, as the node's owner will read it: the job, the lost ranks, and the cause."""
    ranks = ", ".join(map(str, verdict.ranks))
    loss = f"lost rank {ranks}" if ranks else "started without it"
    cause = verdict.cause
    for subject in (f"node {verdict.node}: ", f"rank {ranks}: ", f"rank {ranks} "):
        cause = cause.removeprefix(subject)
    return f"job {job.settings.job} {loss}: {cause}"[:MAX_REASON_CHARS]


def _decision(job: Job, verdict: Verdict) -> Decision | None:
    record = job.record
    if verdict.node == job.settings.batch_node or job.excused(verdict.node, job.maintenance.found_at[verdict.node]):
        return None
    if any(drain.node == verdict.node for drain in record.drains.values()):
        return None
    if not verdict.hardware and replacements.was_taken_by_slurm(job, verdict.node):
        return None
    lost_node = record.lost.get(verdict.node)
    return measures.decide(
        hardware=verdict.hardware,
        answers=lost_node is not None and lost_node.answers,
        together=lost_node is not None and _together(job, lost_node),
        died_before=verdict.node in job.settings.died_before and _has_joined(job, verdict.node),
        may_drain=sum(drain.measure == "drain" for drain in record.drains.values()) < job.settings.drains_left,
    )


def _has_joined(job: Job, name: str) -> bool:
    """Return whether a node was ever in this run. One that never joined may only have been slow to start."""
    return name in job.nodes and job.nodes[name].devices > 0


def _together(job: Job, lost_node: LostNode) -> bool:
    """Return whether other nodes were lost at the same time. Then Slurm, an administrator or a network switch is the
    cause, and no node is to blame.

    A node with a decided measure does not count: it was lost alone, more than `COINCIDENCE_S` seconds earlier.
    """
    decided = {drain.node for drain in job.record.drains.values()}
    releases = job.maintenance.releases
    others = [releases[name].lost_at for name in job.record.lost if name != lost_node.name and name not in decided]
    return any(abs(at - releases[lost_node.name].lost_at) <= COINCIDENCE_S for at in others)


def drain_step(job: Job, event: api.DrainStep) -> None:
    drain = job.record.drains.get(event.drain)
    if drain is None or drain.answers.get(event.step) in ("done", event.outcome):
        return
    job.log(DrainAnswered(drain=event.drain, node=drain.node, step=event.step, outcome=event.outcome, text=event.text))
