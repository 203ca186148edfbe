"""The job's nodes: bad ones are drained or left out, lost ones given back, Slurm's view is compared with our own.

Decides when something is done about a node with a verdict (what, is `measures`'), when a lost one is given back to
Slurm, and what to make of what Slurm says. A verdict is a failure found that names a node or a device; nothing is ever
done on a suspicion, to the node that the batch script runs on, or while the job is being stopped. Our own observation
wins over Slurm's: what it says of a node leads to words, never to action, unless the user wants nodes vacated that an
administrator drains (`Settings.on_drain`). New nodes are the business of `replacements`.
All that this remembers follows from the journal (`replay`), so that a new supervisor goes on where the last one was
(`resume`). Called by the controller at the end of each event, and with what Slurm answers.
"""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.controller import planning, transition
from resihp.controller.fail_stop import failures, incidents
from resihp.controller.nodes import joins, measures, replacements
from resihp.controller.nodes.measures import Decision
from resihp.controller.state import COINCIDENCE_S, USELESS, VACATED, Drain, Job, LostNode, Verdict, natural
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.record.journal import AnyEntry, DrainAnswered, DrainDecided, FailureFound, NodeLost, NodeReleased, SlurmSaw

DRAIN_PATIENCE_S = 10.0
"""A node is drained before it is given back, or Slurm could give it to somebody else in between; so long that waits."""
SLURM_NOTICES_S = 330.0
"""A node that fell silent and is not drained is kept until Slurm has seen that it is gone: for SlurmdTimeout, which is
300 s where the site has not changed it."""
RELEASE_PAUSES_S = (10.0, 60.0, 300.0)
"""Between the tries to give a node back. Without accounting, Slurm takes nodes of a job back but once."""
REASON_LENGTH = 120
OURS = "resihp: "
"""What the reasons of drains begin with that jobs of ours have asked for (`slurm.client.PREFIX`)."""


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
        _act(job)
        if job.phase != "halting":
            _leave_useless(job)
            _vacate(job)
            _release(job)
    replacements.review(job)


# --- bad nodes ----------------------------------------------------------------------------------------------------


def _act(job: Job) -> None:
    """On verdicts, once no other node's end can make them doubtful any more."""
    upkeep = job.upkeep
    for verdict in tuple(upkeep.verdicts.values()):
        if job.now - verdict.found_at < COINCIDENCE_S:
            continue
        del upkeep.verdicts[verdict.node]
        decision = _decision(job, verdict)
        if decision is not None:
            number = len(upkeep.drains) + 1
            record(
                job,
                DrainDecided(
                    drain=number,
                    node=verdict.node,
                    failure=verdict.failure,
                    reason=_reason(job, verdict),
                    measure=decision.measure,
                    grounds=decision.grounds,
                ),
            )
            what = "to be drained" if decision.measure == "drain" else "left out of your next jobs, not drained"
            job.say("notice", f"node {verdict.node}: {what} ({measures.TOLD[decision.grounds]})")
            job.do(_climb(upkeep.drains[number]))


def _climb(drain: Drain) -> api.DrainNode:
    return api.DrainNode(
        drain=drain.number, node=drain.node, reason=drain.reason, measure=drain.measure, grounds=drain.grounds
    )


def _reason(job: Job, verdict: Verdict) -> str:
    """What the node's owner will read: whose job, what went, and why."""
    ranks = ", ".join(map(str, verdict.ranks))
    cause = verdict.cause
    for subject in (f"node {verdict.node}: ", f"rank {ranks}: ", f"rank {ranks} "):
        cause = cause.removeprefix(subject)
    return f"job {job.settings.job} lost rank {ranks}: {cause}"[:REASON_LENGTH]


def _decision(job: Job, verdict: Verdict) -> Decision | None:
    upkeep = job.upkeep
    if verdict.node == job.settings.batch_node or job.excused(verdict.node, verdict.found_at):
        return None
    if any(drain.node == verdict.node for drain in upkeep.drains.values()):
        return None
    lost = upkeep.lost.get(verdict.node)
    return measures.decide(
        hardware=verdict.hardware,
        answers=lost is not None and lost.answers,
        together=lost is not None and _together(job, lost),
        died_before=verdict.node in job.settings.died_before,
        may_drain=sum(drain.measure == "drain" for drain in upkeep.drains.values()) < job.settings.drains,
    )


def _together(job: Job, lost: LostNode) -> bool:
    """Whether more than this node was lost at once: to Slurm, an administrator, a switch; no node is to blame.

    What was decided about is not: it was lost alone, COINCIDENCE_S before.
    """
    decided = {drain.node for drain in job.upkeep.drains.values()}
    others = [other for other in job.upkeep.lost.values() if other is not lost and other.name not in decided]
    return any(abs(other.lost_at - lost.lost_at) <= COINCIDENCE_S for other in others)


def drain_step(job: Job, event: api.DrainStep) -> None:
    drain = job.upkeep.drains.get(event.drain)
    if drain is None or drain.answers.get(event.step) in ("done", event.outcome):
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
            reason = USELESS
            failures.node_lost(job, node.name, reason)
            replay(job, NodeLost(node=node.name, reason=reason))


def _vacate(job: Job) -> None:
    """Leave nodes that an administrator drains: first their ranks stand by, then they are let go. No failure."""
    if job.settings.on_drain != "vacate" or job.phase != "running" or job.plan is None:
        return
    if job.transition is not None or job.pause is not None:
        return
    drained = [name for name, node in job.nodes.items() if node.alive and _is_administrators(job, name)]
    job.vacating.intersection_update(drained)
    for name in drained:
        if not any(job.members[rank].node == name for rank in job.active):
            _leave(job, name)
        elif name in job.vacating:  # no plan came of it that does without it
            _keep(job, name)
        elif job.furthest + 1 < job.goal:  # the iteration under way is finished before anybody has left
            _stand_by(job, name)
            return


def _is_administrators(job: Job, name: str) -> bool:
    seen = job.upkeep.slurm_sees.get(name)
    if seen is None or name == job.settings.batch_node or job.upkeep.kept.get(name) == seen:
        return False
    state, reason = seen
    return "drain" in state.split("+")[1:] and not reason.startswith(OURS)


def _stand_by(job: Job, name: str) -> None:
    job.vacating.add(name)
    stay = {rank for rank in job.ready if job.members[rank].node not in job.vacating}
    try:
        planning.best(job, job.epoch + 1, stay, planning.base_while_running(job))
    except (LayoutError, NotEnoughDevicesError):
        _keep(job, name)
    else:
        transition.pause(job, f"node {name}: is drained ({job.upkeep.slurm_sees[name][1] or 'no reason'}), leaving it")


def _keep(job: Job, name: str) -> None:
    job.vacating.discard(name)
    job.upkeep.kept[name] = job.upkeep.slurm_sees[name]
    job.say("notice", f"node {name}: is drained, but the layout cannot do without it; it trains on")


def _leave(job: Job, name: str) -> None:
    """Nobody works there any more."""
    entry = NodeLost(node=name, reason=f"{VACATED}: {job.upkeep.slurm_sees[name][1] or 'no reason'}")
    job.vacating.discard(name)
    job.nodes[name].alive = False
    record(job, entry)
    job.do(api.DropNode(node=name))
    for placement in job.placements:
        placement.settled = placement.settled or placement.node == name
    for rank in [rank for rank in job.live if job.members[rank].node == name]:
        incidents.bury(job, job.members[rank], None)
    job.say("notice", f"node {name}: left and given back, for it is drained")


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
    return _is_for_others(job, lost)


def _is_for_others(job: Job, lost: LostNode) -> bool:
    """Whether Slurm may have it back: it would give it to the next job, dead or not, if it did not know better."""
    drains = [drain for drain in job.upkeep.drains.values() if drain.node == lost.name and drain.measure == "drain"]
    if not all(drain.settled or job.now - drain.decided_at > DRAIN_PATIENCE_S for drain in drains):
        return False
    if lost.answers or any(drain.answers.get("slurm") == "done" for drain in drains):
        return True
    seen = job.upkeep.slurm_sees.get(lost.name)
    return (seen is not None and not _is_usable(seen[0])) or job.now - lost.lost_at > SLURM_NOTICES_S


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
        leave = job.settings.on_drain == "vacate" and _is_administrators(job, node.name)
        what = "to be left, if the layout can do without it" if leave else "its agent is there, it trains on"
        job.say("notice", f"node {node.name}: {event.state} for Slurm{because}; {what}")
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
            upkeep.lost[entry.node] = LostNode(entry.node, job.now, entry.reason)
        case FailureFound(kind="fail-stop", component="node" | "device") if entry.node is not None:
            lost = upkeep.lost.get(entry.node)
            died = lost is not None and entry.cause == f"node {lost.name}: {lost.reason}"  # as `failures` has it
            known = upkeep.verdicts.get(entry.node)
            if known is None or not known.hardware:
                upkeep.verdicts[entry.node] = Verdict(
                    entry.failure, entry.node, entry.cause, entry.ranks, job.now, hardware=not died
                )
        case DrainDecided():
            upkeep.drains[entry.drain] = Drain(
                entry.drain, entry.node, entry.failure, entry.reason, entry.measure, entry.grounds, job.now
            )
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
            job.do(_climb(drain))
    for lost in upkeep.lost.values():
        lost.lost_at, lost.next_try_at = job.now, job.now + COINCIDENCE_S
        job.do(api.WatchNode(node=lost.name))
    for request in upkeep.requests.values():
        if request.state == "joined" and request.node is not None:
            joins.start_node(job, request.node)
    replacements.resume(job)
