"""The job's nodes: bad ones are drained or left out, lost ones given back, Slurm's view is compared with our own.

Decides when something is done about a node with a verdict (what, is `measures`'), when a lost one is given back to
Slurm, and what to make of what Slurm says. A verdict is a failure found that names a node or a device; nothing is ever
done on a suspicion, to the node that the batch script runs on, or while the job is being stopped. Our own observation
wins over Slurm's: what it says of a node leads to words, never to action, unless the user wants nodes vacated that an
administrator drains (`Settings.on_drain`). New nodes are the business of `replacements`.
All that it goes by is on record, so that a new supervisor goes on where the last one was (`resume`). Called by the
controller at the end of each event, and with what Slurm answers.
"""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.controller import planning, replan_policy, transition
from resihp.controller.fail_stop import failures
from resihp.controller.nodes import joins, measures, replacements
from resihp.controller.nodes.measures import Decision
from resihp.controller.state.job import Job
from resihp.controller.state.members import natural
from resihp.controller.state.requests import COINCIDENCE_S
from resihp.controller.state.upkeep import GivingBack
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.record.journal import DrainAnswered, DrainDecided, DrainWaived, NodeLost, NodeReleased, SlurmSaw
from resihp.record.state import Drain, LostNode, Verdict

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
    if not job.settings.slurm or job.stage == "ended":
        return
    lost, job.upkeep.unwatched = job.upkeep.unwatched, []
    for name in lost:
        job.do(api.WatchNode(node=name))
        if job.settings.replacements:  # whether one still pays hangs on it
            job.do(api.AskTimeLeft())
    if job.stage == "gathering":
        return
    if job.settings.observes:
        _tell_only(job)
        return
    if job.departure is None:
        _act(job)
        if job.stage != "halting":
            _leave_useless(job)
            _vacate(job)
            _release(job)
    replacements.review(job)


# --- bad nodes ----------------------------------------------------------------------------------------------------


def _act(job: Job) -> None:
    """On verdicts, once no other node's end can make them doubtful any more."""
    for verdict in tuple(job.record.verdicts.values()):
        if job.now - job.upkeep.found_at[verdict.node] < COINCIDENCE_S:
            continue
        decision = _decision(job, verdict)
        if decision is None:
            job.log(DrainWaived(node=verdict.node, failure=verdict.failure))
            continue
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
        what = "to be drained" if decision.measure == "drain" else "left out of your next jobs, not drained"
        job.say("notice", f"node {verdict.node}: {what} ({measures.TOLD[decision.grounds]})")
        job.do(_climb(job.record.drains[number]))


def _tell_only(job: Job) -> None:
    """What would be done about verdicts, where nothing is: no node is drained, given back or asked for."""
    for verdict in tuple(job.record.verdicts.values()):
        if job.departure is not None or job.now - job.upkeep.found_at[verdict.node] < COINCIDENCE_S:
            continue
        decision = _decision(job, verdict)
        job.log(DrainWaived(node=verdict.node, failure=verdict.failure))
        if decision is not None:
            what = "drained" if decision.measure == "drain" else "left out of your next jobs"
            told = f"would be {what} ({measures.TOLD[decision.grounds]}); observe mode, it is left as it is"
            job.say("notice", f"node {verdict.node}: {told}")


def _climb(drain: Drain) -> api.DrainNode:
    return api.DrainNode(
        drain=drain.number, node=drain.node, reason=drain.reason, measure=drain.measure, grounds=drain.grounds
    )


def _reason(job: Job, verdict: Verdict) -> str:
    """What the node's owner will read: whose job, what went, and why."""
    ranks = ", ".join(map(str, verdict.ranks))
    lost = f"lost rank {ranks}" if ranks else "began without it"
    cause = verdict.cause
    for subject in (f"node {verdict.node}: ", f"rank {ranks}: ", f"rank {ranks} "):
        cause = cause.removeprefix(subject)
    return f"job {job.settings.job} {lost}: {cause}"[:REASON_LENGTH]


def _decision(job: Job, verdict: Verdict) -> Decision | None:
    record = job.record
    if verdict.node == job.settings.batch_node or job.excused(verdict.node, job.upkeep.found_at[verdict.node]):
        return None
    if any(drain.node == verdict.node for drain in record.drains.values()):
        return None
    lost = record.lost.get(verdict.node)
    return measures.decide(
        hardware=verdict.hardware,
        answers=lost is not None and lost.answers,
        together=lost is not None and _together(job, lost),
        died_before=verdict.node in job.settings.died_before,
        may_drain=sum(drain.measure == "drain" for drain in record.drains.values()) < job.settings.drains,
    )


def _together(job: Job, lost: LostNode) -> bool:
    """Whether more than this node was lost at once: to Slurm, an administrator, a switch; no node is to blame.

    What was decided about is not: it was lost alone, COINCIDENCE_S before.
    """
    decided = {drain.node for drain in job.record.drains.values()}
    releases = job.upkeep.releases
    others = [releases[name].lost_at for name in job.record.lost if name != lost.name and name not in decided]
    return any(abs(at - releases[lost.name].lost_at) <= COINCIDENCE_S for at in others)


def drain_step(job: Job, event: api.DrainStep) -> None:
    drain = job.record.drains.get(event.drain)
    if drain is None or drain.answers.get(event.step) in ("done", event.outcome):
        return
    job.log(DrainAnswered(drain=event.drain, node=drain.node, step=event.step, outcome=event.outcome, text=event.text))


# --- giving nodes back --------------------------------------------------------------------------------------------


def _leave_useless(job: Job) -> None:
    """A node all of whose devices are dead is kept for nothing, unless the batch script runs there."""
    if job.stage not in ("running", "pausing"):
        return
    for name in sorted({name for name, _ in job.dead_devices}, key=natural):
        node = job.nodes[name]
        if not node.alive or name == job.settings.batch_node:
            continue
        if any((name, device) not in job.dead_devices for device in range(node.devices)):
            continue
        busy = any(job.members[rank].node == name for rank in job.live)
        starting = any(job.record.placements[rank].node == name for rank in job.starting)
        if not busy and not starting and job.stage in ("running", "pausing"):
            failures.node_lost(job, name, "no device of it can be used any more", "useless")


def _vacate(job: Job) -> None:
    """Leave nodes that an administrator drains: first their ranks stand by, then they are let go. No failure."""
    if job.settings.on_drain != "vacate":
        return
    drained = [name for name, node in job.nodes.items() if node.alive and _is_administrators(job, name)]
    for name in sorted(job.vacating.difference(drained)):
        _stay(job, name)
    if not job.may_interrupt:
        return
    for name in drained:
        if not any(job.members[rank].node == name for rank in job.record.active):
            _leave(job, name)
        elif name in job.vacating:  # no plan came of it that does without it
            _keep(job, name)
        elif job.can_still_gain:
            _stand_by(job, name)
            return


def _is_administrators(job: Job, name: str) -> bool:
    seen = job.record.slurm_sees.get(name)
    if seen is None or name == job.settings.batch_node or job.upkeep.kept.get(name) == seen:
        return False
    state, reason = seen
    return "drain" in state.split("+")[1:] and not reason.startswith(OURS)


def _stand_by(job: Job, name: str) -> None:
    job.vacating.add(name)
    stay = {rank for rank in job.ready if job.members[rank].node not in job.vacating}
    try:
        planning.best(job, job.epoch + 1, stay, None)
    except (LayoutError, NotEnoughDevicesError):
        _keep(job, name)
    else:
        transition.pause(job, f"node {name}: is drained ({job.record.slurm_sees[name][1] or 'no reason'}), leaving it")


def _stay(job: Job, name: str) -> None:
    """It is drained no longer: who stands by there already may have work again."""
    job.vacating.discard(name)
    for rank in job.ready:
        if job.members[rank].node == name:
            replan_policy.consider_newcomer(job, rank, f"node {name} is drained no longer")


def _keep(job: Job, name: str) -> None:
    job.vacating.discard(name)
    job.upkeep.kept[name] = job.record.slurm_sees[name]
    job.say("notice", f"node {name}: is drained, but the layout cannot do without it; it trains on")


def _leave(job: Job, name: str) -> None:
    """Nobody works there any more."""
    job.vacating.discard(name)
    drained = job.record.slurm_sees[name][1] or "no reason"
    reason = f"left for an administrator, who drains it: {drained}"
    failures.leave_node(job, NodeLost(node=name, reason=reason, how="vacated"))
    job.say("notice", f"node {name}: left and given back, for it is drained")


def _release(job: Job) -> None:
    """Give lost nodes back, after they were drained if they are to be."""
    for lost in job.record.lost.values():
        release = job.upkeep.releases[lost.name]
        if not release.asked and _is_due(job, lost, release):
            release.asked = True
            release.tries += 1
            job.do(api.ReleaseNode(node=lost.name, keep=_kept(job)))


def _is_due(job: Job, lost: LostNode, release: GivingBack) -> bool:
    if lost.released or release.tries > len(RELEASE_PAUSES_S):
        return False
    if job.now < max(release.next_try_at, release.lost_at + COINCIDENCE_S):
        return False
    if lost.name == job.settings.batch_node or _is_leased(job, lost.name):
        return False
    if lost.name in job.record.verdicts or any(incident.node == lost.name for incident in job.incidents):
        return False
    return _is_for_others(job, lost, release)


def _is_for_others(job: Job, lost: LostNode, release: GivingBack) -> bool:
    """Whether Slurm may have it back: it would give it to the next job, dead or not, if it did not know better."""
    drains = [drain for drain in job.record.drains.values() if drain.node == lost.name and drain.measure == "drain"]
    decided_at = job.upkeep.decided_at
    if not all(drain.settled or job.now - decided_at[drain.number] > DRAIN_PATIENCE_S for drain in drains):
        return False
    if lost.answers or any(drain.answers.get("slurm") == "done" for drain in drains):
        return True
    seen = job.record.slurm_sees.get(lost.name)
    return (seen is not None and not _is_usable(seen[0])) or job.now - release.lost_at > SLURM_NOTICES_S


def _is_leased(job: Job, name: str) -> bool:
    """Whether a node came with a request of ours: it is not in the job's allocation."""
    return any(request.joined and request.node == name for request in job.record.replacements.values())


def _kept(job: Job) -> tuple[str, ...]:
    """What the job's own allocation is to be: live nodes, and that of the batch script, whatever became of it."""
    own = [name for name in job.nodes if not _is_leased(job, name)]
    return tuple(
        sorted((name for name in own if job.nodes[name].alive or name == job.settings.batch_node), key=natural)
    )


def release_answered(job: Job, event: api.ReleaseAnswered) -> None:
    """A refusal is "not now"; only the first one is remembered."""
    lost, release = job.record.lost.get(event.node), job.upkeep.releases.get(event.node)
    if lost is None or release is None or not release.asked or lost.released:
        return
    release.asked = False
    if event.outcome == "done" or not lost.told:
        job.log(NodeReleased(node=event.node, outcome=event.outcome, text=event.text))
    if event.outcome != "done" and release.tries <= len(RELEASE_PAUSES_S):
        release.next_try_at = job.now + RELEASE_PAUSES_S[release.tries - 1]


# --- Slurm's view -------------------------------------------------------------------------------------------------


def slurm_sees(job: Job, event: api.SlurmSees) -> None:
    """Remember what Slurm says of a node when it is not what one would expect, or is not any more."""
    known = job.record.slurm_sees.get(event.node)
    usable = _is_usable(event.state)
    if known == (event.state, event.reason) or (known is None and usable):
        return
    was_usable = known is None or _is_usable(known[0])
    job.log(SlurmSaw(node=event.node, state=event.state, text=event.reason))
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


def take_over(job: Job) -> None:
    """A new supervisor: when things were found and decided it does not know; for it that is now."""
    upkeep, record = job.upkeep, job.record
    upkeep.found_at = dict.fromkeys(record.verdicts, job.now)
    upkeep.decided_at = dict.fromkeys(record.drains, job.now)
    upkeep.releases = {name: GivingBack(job.now, next_try_at=job.now + COINCIDENCE_S) for name in record.lost}


def resume(job: Job) -> None:
    """A new supervisor: ask again for what was decided and never answered. All of it can be done twice."""
    if not job.settings.slurm or job.stage == "ended":
        return
    for drain in job.record.drains.values():
        if not drain.settled:
            job.do(_climb(drain))
    for name in job.record.lost:
        if name not in job.upkeep.unwatched:
            job.do(api.WatchNode(node=name))
    for request in job.record.replacements.values():
        if request.state == "joined" and request.node is not None:
            joins.start_node(job, request.node)
    replacements.resume(job)
