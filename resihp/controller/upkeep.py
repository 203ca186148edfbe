"""The job's nodes: bad ones are drained and given back, and Slurm's view of them is compared with our own.

Decides when a node with a verdict is drained, when a lost one is given back to Slurm, and what to make of what Slurm
says. A verdict is a failure found that names a node or a device; nothing is ever done on a suspicion, to the node that
the batch script runs on, or while the job is being stopped. Our own observation wins over Slurm's: what it says of a
node leads to words, never to action. New nodes are the business of `replacements`. All that this remembers follows from
the journal (`replay`), so that a new supervisor goes on where the last one was (`resume`). Called by the controller at
the end of each event, and with what Slurm answers.
"""

from __future__ import annotations

from resihp.controller import failures, newcomers, replacements
from resihp.controller import interface as api
from resihp.controller.state import COINCIDENCE_S, Drain, Job, LostNode, Verdict, natural
from resihp.journal import (
    AnyEntry,
    DrainAnswered,
    DrainDecided,
    FailureFound,
    NodeLost,
    NodeReleased,
    SlurmSaw,
)

DRAIN_PATIENCE_S = 10.0
"""A node is drained before it is given back, or Slurm could give it to somebody else in between; so long that waits."""
RELEASE_PAUSES_S = (10.0, 60.0, 300.0)
"""Between the tries to give a node back. Without accounting, Slurm takes nodes of a job back but once."""
REASON_LENGTH = 120


def review(job: Job) -> None:
    """At the end of each event."""
    if not job.settings.slurm or job.phase == "ended":
        return
    for action in tuple(job.actions):
        if isinstance(action, api.Log) and isinstance(action.entry, NodeLost | FailureFound):
            replay(job, action.entry)
            if isinstance(action.entry, NodeLost):
                job.do(api.WatchNode(node=action.entry.node))
                if job.settings.replacements:  # whether one still pays hangs on it
                    job.do(api.AskTimeLeft())
    if job.phase == "gathering":
        return
    if job.departure is not None:
        job.upkeep.verdicts.clear()
    else:
        _drain(job)
        if job.phase != "halting":
            _leave_useless(job)
            _release(job)
    replacements.review(job)


# --- drains -------------------------------------------------------------------------------------------------------


def _drain(job: Job) -> None:
    """Act on verdicts, once no other node's end can make them doubtful any more."""
    upkeep = job.upkeep
    for verdict in tuple(upkeep.verdicts.values()):
        if job.now - verdict.found_at < COINCIDENCE_S:
            continue
        del upkeep.verdicts[verdict.node]
        if _may_be_drained(job, verdict):
            number, reason = len(upkeep.drains) + 1, _reason(job, verdict)
            record(job, DrainDecided(drain=number, node=verdict.node, failure=verdict.failure, reason=reason))
            job.say("notice", f"node {verdict.node}: to be drained")
            job.do(api.DrainNode(drain=number, node=verdict.node, reason=reason))


def _reason(job: Job, verdict: Verdict) -> str:
    """What the node's owner will read: whose job, what went, and why."""
    ranks = ", ".join(map(str, verdict.ranks))
    cause = verdict.cause
    for subject in (f"node {verdict.node}: ", f"rank {ranks}: ", f"rank {ranks} "):
        cause = cause.removeprefix(subject)
    return f"job {job.settings.job} lost rank {ranks}: {cause}"[:REASON_LENGTH]


def _may_be_drained(job: Job, verdict: Verdict) -> bool:
    upkeep = job.upkeep
    if verdict.node == job.settings.batch_node or len(upkeep.drains) >= job.settings.drains:
        return False
    if job.excused(verdict.node, verdict.found_at):
        return False
    return all(drain.node != verdict.node for drain in upkeep.drains.values()) and not _common_cause(job, verdict.node)


def _common_cause(job: Job, name: str) -> bool:
    """Whether somebody ended several nodes' agents at once: Slurm, an administrator; the nodes are not to blame."""
    lost = job.upkeep.lost.get(name)
    if lost is None or not lost.signalled:
        return False
    return any(
        other.signalled and abs(other.lost_at - lost.lost_at) <= COINCIDENCE_S
        for other in job.upkeep.lost.values()
        if other is not lost
    )


def drain_step(job: Job, event: api.DrainStep) -> None:
    drain = job.upkeep.drains.get(event.drain)
    if drain is None or drain.answers.get(event.step) == event.outcome:
        return
    record(
        job,
        DrainAnswered(drain=event.drain, node=drain.node, step=event.step, outcome=event.outcome, text=event.text),
    )


# --- giving nodes back --------------------------------------------------------------------------------------------


def _leave_useless(job: Job) -> None:
    """A node all of whose devices are dead is kept for nothing, unless the batch script runs there."""
    for node in tuple(job.nodes.values()):
        if not node.alive or node.name == job.settings.batch_node:
            continue
        if any((node.name, device) not in job.dead_devices for device in range(node.devices)):
            continue
        busy = any(job.members[rank].node == node.name for rank in job.live)
        starting = any(place.node == node.name and not place.settled for place in job.placements)
        if not busy and not starting and job.phase == "running" and job.transition is None:
            reason = "no device of it can be used any more"
            failures.node_lost(job, node.name, reason)
            replay(job, NodeLost(node=node.name, reason=reason))


def _release(job: Job) -> None:
    """Give lost nodes back, after they were drained if they are to be."""
    for lost in job.upkeep.lost.values():
        if not lost.asked and _is_due(job, lost):
            lost.asked = True
            lost.tries += 1
            job.do(api.ReleaseNode(node=lost.name, keep=_kept(job)))


def _is_due(job: Job, lost: LostNode) -> bool:
    upkeep = job.upkeep
    if lost.released or lost.tries > len(RELEASE_PAUSES_S):
        return False
    if job.now < max(lost.next_try_at, lost.lost_at + COINCIDENCE_S):
        return False
    if lost.name == job.settings.batch_node or _is_leased(job, lost.name):
        return False
    if lost.name in upkeep.verdicts or any(incident.node == lost.name for incident in job.incidents):
        return False
    drains = [drain for drain in upkeep.drains.values() if drain.node == lost.name]
    return all(drain.settled or job.now - drain.decided_at > DRAIN_PATIENCE_S for drain in drains)


def _is_leased(job: Job, name: str) -> bool:
    """Whether a node came with a request of ours: it is not in the job's allocation."""
    return any(request.joined and request.node == name for request in job.upkeep.requests.values())


def _kept(job: Job) -> tuple[str, ...]:
    """What the job's own allocation is to be: live nodes, and that of the batch script, whatever became of it."""
    own = [name for name in job.nodes if not _is_leased(job, name)]
    return tuple(
        sorted((name for name in own if job.nodes[name].alive or name == job.settings.batch_node), key=natural)
    )


def release_answered(job: Job, event: api.ReleaseAnswered) -> None:
    """A refusal is "not now"; only the first one is remembered."""
    lost = job.upkeep.lost.get(event.node)
    if lost is None or not lost.asked or lost.released:
        return
    lost.asked = False
    if event.outcome == "done" or not lost.told:
        record(job, NodeReleased(node=event.node, outcome=event.outcome, text=event.text))
    if event.outcome != "done" and lost.tries <= len(RELEASE_PAUSES_S):
        lost.next_try_at = job.now + RELEASE_PAUSES_S[lost.tries - 1]


# --- Slurm's view -------------------------------------------------------------------------------------------------


def slurm_sees(job: Job, event: api.SlurmSees) -> None:
    """Remember what Slurm says of a node when it is not what one would expect, or is not any more."""
    known = job.upkeep.slurm_sees.get(event.node)
    usable = _is_usable(event.state)
    if known == (event.state, event.reason) or (known is None and usable):
        return
    was_usable = known is None or _is_usable(known[0])
    record(job, SlurmSaw(node=event.node, state=event.state, text=event.reason))
    node = job.nodes.get(event.node)
    if node is None or usable == was_usable:
        return
    because = f" ({event.reason})" if event.reason else ""
    if node.alive and not usable:
        job.say("notice", f"node {node.name}: {event.state} for Slurm{because}; its agent is there, it trains on")
    elif not node.alive and usable:
        job.say("notice", f"node {node.name}: {event.state} for Slurm again; this job does without it")


def _is_usable(state: str) -> bool:
    base, *flags = state.split("+")
    return base in ("idle", "allocated", "mixed") and {"drain", "fail", "not_responding"}.isdisjoint(flags)


# --- the journal --------------------------------------------------------------------------------------------------


def record(job: Job, entry: AnyEntry) -> None:
    job.do(api.Log(entry=entry))
    replay(job, entry)


def replay(job: Job, entry: AnyEntry) -> None:
    """What an entry tells of drains, nodes given back, and new ones."""
    upkeep = job.upkeep
    match entry:
        case NodeLost():
            signalled = "was killed by" in entry.reason  # as `resihp.process.ending` has it
            upkeep.lost[entry.node] = LostNode(entry.node, job.now, signalled)
        case FailureFound(kind="fail-stop", component="node" | "device") if entry.node is not None:
            upkeep.verdicts[entry.node] = Verdict(entry.failure, entry.node, entry.cause, entry.ranks, job.now)
        case DrainDecided():
            upkeep.drains[entry.drain] = Drain(entry.drain, entry.node, entry.failure, entry.reason, job.now)
            upkeep.verdicts.pop(entry.node, None)
        case DrainAnswered() if entry.drain in upkeep.drains:
            upkeep.drains[entry.drain].answers[entry.step] = entry.outcome
        case NodeReleased() if entry.node in upkeep.lost:
            upkeep.lost[entry.node].told = True
            upkeep.lost[entry.node].released = entry.outcome == "done"
        case SlurmSaw():
            upkeep.slurm_sees[entry.node] = (entry.state, entry.text)
        case _:
            replacements.replay(job, entry)


def resume(job: Job) -> None:
    """A new supervisor: ask again for what was decided and never answered. All of it can be done twice."""
    if not job.settings.slurm or job.phase == "ended":
        return
    upkeep = job.upkeep
    for verdict in upkeep.verdicts.values():
        verdict.found_at = job.now
    for drain in upkeep.drains.values():
        drain.decided_at = job.now
        if not drain.settled:
            job.do(api.DrainNode(drain=drain.number, node=drain.node, reason=drain.reason))
    for lost in upkeep.lost.values():
        lost.next_try_at = job.now + COINCIDENCE_S
        job.do(api.WatchNode(node=lost.name))
    for request in upkeep.requests.values():
        if request.state == "joined" and request.node is not None:
            newcomers.start_node(job, request.node)
    replacements.resume(job)
