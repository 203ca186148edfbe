"""Look after the job's nodes: take measures against bad ones, give lost ones back to Slurm, and note Slurm's view.

Decides when a node leaves the job, when a lost node is given back to Slurm, and how to react to Slurm's view; `drains`
decides on measures against failed nodes, and `replacements` handles new nodes. The job's own observations take
precedence over Slurm's: Slurm's view is recorded but never acted on, except that nodes that an administrator drains are
vacated if the user wants that (`Settings.on_drain`). Nodes of replacements are vacated when their own Slurm job ends.
All of this is in the journal, so that a new supervisor continues it (`resume`). Called by the controller at the end of
each event, and with Slurm's answers.
"""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.controller import replan_policy, transition
from resihp.controller.fail_stop import failures
from resihp.controller.nodes import drains, joins, replacements
from resihp.controller.planning import next_plan
from resihp.controller.state.job import Job
from resihp.controller.state.requests import COINCIDENCE_S
from resihp.controller.state.upkeep import GivingBack
from resihp.errors import LayoutError, NotEnoughDevicesError
from resihp.record.journal import NodeLost, NodeReleased, SlurmSaw
from resihp.record.state import LostNode
from resihp.words import natural

DRAIN_PATIENCE_S = 10.0
"""Seconds that a node is kept for its drain to succeed before it is given back. Without the wait, Slurm could give the
node to another job first. If the site's own health check is asked before the drain, its time is added."""
SLURM_NOTICES_S = 330.0
"""Seconds that a silent node without a drain is kept, so that Slurm notices that it is down. SlurmdTimeout is 300 s
unless the site has changed it."""
RELEASE_PAUSES_S = (10.0, 60.0, 300.0)
"""Seconds between the attempts to give a node back. Without accounting, Slurm accepts nodes of a job back only once."""
SCRIPT_EVERY_S = 1.0
"""Seconds between two looks at the nodes of a script that does not declare a model."""
REASON_PREFIX = "resihp: "
"""Prefix of the reasons of drains that resihp jobs have requested (`resihp.slurm.client.PREFIX`)."""


def review(job: Job) -> None:
    """Take measures against nodes, give nodes back and request new ones, as far as they are due. Called at the end of
    each event."""
    if not job.settings.slurm or job.stage == "ended":
        return
    watch_lost(job)
    if job.stage in ("gathering", "restarting") and not _is_script_due(job):
        return
    drains.review(job)
    if job.settings.observes:
        return
    if job.stop_request is None and job.stage != "halting":
        _leave_unusable_nodes(job)
        _vacate(job)
        _release(job)
    replacements.review(job)


def _is_script_due(job: Job) -> bool:
    """Return whether the nodes of a running script are to be looked at now. Not at each event: that costs time for each
    rank, and nothing is due at once."""
    if not (job.record.lost or job.record.verdicts) or job.now < job.maintenance.script_due_at:
        return False
    job.maintenance.script_due_at = job.now + SCRIPT_EVERY_S
    return job.runs_script


def watch_lost(job: Job) -> None:
    """Have Slurm's view of newly lost nodes watched. Slurm may have ended or suspended the job of a replacement."""
    if not job.settings.slurm:
        return
    lost_nodes, job.maintenance.unwatched = job.maintenance.unwatched, []
    guests = replacements.guests(job) if lost_nodes else set()
    for name in lost_nodes:
        job.do(api.WatchNode(node=name))
        if name in guests:
            job.do(api.WatchReplacements())
        if job.settings.replacements:  # the worth of a replacement depends on the time left
            job.do(api.AskTimeLeft())


# --- giving nodes back --------------------------------------------------------------------------------------------


def _leave_unusable_nodes(job: Job) -> None:
    """Remove nodes without a usable device from the job, except the node of the batch script."""
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
    """Remove nodes that an administrator drains, and nodes of replacements whose Slurm job is ending: first their ranks
    stand by, then the nodes are given back. This is not a failure."""
    ending = job.maintenance.ending
    leaving = [name for name in sorted(ending, key=natural) if job.nodes[name].alive]
    if job.settings.on_drain == "vacate":
        drained = (name for name, node in job.nodes.items() if node.alive and _is_administrators(job, name))
        leaving += [name for name in drained if name not in ending]
    for name in sorted(job.vacating.difference(leaving)):
        _use_again(job, name)
    if not job.may_interrupt:
        return
    for name in leaving:
        if not any(job.members[rank].node == name for rank in job.record.active):
            _leave(job, name)
        elif name in job.vacating:  # no plan was found that does without it
            _keep(job, name)
        elif job.can_still_gain:
            _stand_by(job, name)
            return


def _is_administrators(job: Job, name: str) -> bool:
    view = job.record.slurm_sees.get(name)
    if view is None or name == job.settings.batch_node or job.maintenance.kept.get(name) == view:
        return False
    state, reason = view
    return "drain" in state.split("+")[1:] and not reason.startswith(REASON_PREFIX)


def _stand_by(job: Job, name: str) -> None:
    job.vacating.add(name)
    stay = {rank for rank in job.ready if job.members[rank].node not in job.vacating}
    try:
        next_plan.best(job, job.epoch + 1, stay, None)
    except (LayoutError, NotEnoughDevicesError):
        _keep(job, name)
    else:
        transition.pause(job, f"node {name}: {_reason_to_leave(job, name)}, leaving it")


def _use_again(job: Job, name: str) -> None:
    """Let the standby ranks of a node that is no longer drained get work again."""
    job.vacating.discard(name)
    for rank in job.ready:
        if job.members[rank].node == name:
            replan_policy.consider_newcomer(job, rank, f"node {name} is no longer drained")


def _reason_to_leave(job: Job, name: str) -> str:
    """Return, in words, why a node leaves the job."""
    if name in job.maintenance.ending:
        return "the Slurm job of this replacement is ending"
    return f"is drained ({job.record.slurm_sees[name][1] or 'no reason'})"


def _keep(job: Job, name: str) -> None:
    job.vacating.discard(name)
    if name in job.maintenance.ending:
        job.maintenance.ending.discard(name)
        job.say("notice", f"node {name}: the layout needs it; it trains until Slurm ends it")
    else:
        job.maintenance.kept[name] = job.record.slurm_sees[name]
        job.say("notice", f"node {name}: is drained, but the layout needs it; it keeps training")


def _leave(job: Job, name: str) -> None:
    """Remove a node from the job after its last rank has lost its work."""
    job.vacating.discard(name)
    if name in job.maintenance.ending:
        job.maintenance.ending.discard(name)
        reason, because = "released because the Slurm job of this replacement is ending", "its Slurm job is ending"
    else:
        drained = job.record.slurm_sees[name][1] or "no reason"
        reason, because = f"released because an administrator drains it: {drained}", "it is drained"
    failures.leave_node(job, NodeLost(node=name, reason=reason, how="vacated"))
    job.say("notice", f"node {name}: released and given back, because {because}")


def _release(job: Job) -> None:
    """Give lost nodes back to Slurm; a node that is to be drained only after its drain."""
    for lost_node in job.record.lost.values():
        release = job.maintenance.releases[lost_node.name]
        if not release.asked and _is_due(job, lost_node, release):
            release.asked = True
            release.tries += 1
            job.do(api.ReleaseNode(node=lost_node.name, keep=_kept(job)))


def _is_due(job: Job, lost_node: LostNode, release: GivingBack) -> bool:
    if lost_node.released or release.tries > len(RELEASE_PAUSES_S):
        return False
    if job.now < max(release.next_try_at, release.lost_at + COINCIDENCE_S):
        return False
    if lost_node.name == job.settings.batch_node or lost_node.name in replacements.guests(job):
        return False
    if lost_node.name in job.record.verdicts or any(incident.node == lost_node.name for incident in job.incidents):
        return False
    return _may_be_reused(job, lost_node, release)


def _may_be_reused(job: Job, lost_node: LostNode, release: GivingBack) -> bool:
    """Return whether a lost node may be given back now. Slurm gives a node to the next job unless it knows that the
    node is dead."""
    drains = [
        drain for drain in job.record.drains.values() if drain.node == lost_node.name and drain.measure == "drain"
    ]
    decided_at = job.maintenance.decided_at
    patience_s = DRAIN_PATIENCE_S + job.settings.site_check_s
    if not all(drain.settled or job.now - decided_at[drain.number] > patience_s for drain in drains):
        return False
    if lost_node.answers or any(drain.answers.get("slurm") == "done" for drain in drains):
        return True
    view = job.record.slurm_sees.get(lost_node.name)
    return (view is not None and not _is_usable(view[0])) or job.now - release.lost_at > SLURM_NOTICES_S


def _kept(job: Job) -> tuple[str, ...]:
    """Return the nodes that the job's own allocation keeps: its live nodes, and always the node of the batch script."""
    guests = replacements.guests(job)
    own = [name for name in job.nodes if name not in guests]
    return tuple(
        sorted((name for name in own if job.nodes[name].alive or name == job.settings.batch_node), key=natural)
    )


def release_answered(job: Job, event: api.ReleaseAnswered) -> None:
    """Handle Slurm's answer to a request to take a node back. A refusal means "not now"; only the first one is
    journaled."""
    lost_node, release = job.record.lost.get(event.node), job.maintenance.releases.get(event.node)
    if lost_node is None or release is None or not release.asked or lost_node.released:
        return
    release.asked = False
    if event.outcome == "done" or not lost_node.release_answered:
        job.log(NodeReleased(node=event.node, outcome=event.outcome, text=event.text))
    if event.outcome != "done" and release.tries <= len(RELEASE_PAUSES_S):
        release.next_try_at = job.now + RELEASE_PAUSES_S[release.tries - 1]


# --- Slurm's view -------------------------------------------------------------------------------------------------


def slurm_sees(job: Job, event: api.SlurmSees) -> None:
    """Journal Slurm's view of a node if it is unexpected, or if it is as expected again."""
    previous = job.record.slurm_sees.get(event.node)
    usable = _is_usable(event.state)
    if previous == (event.state, event.reason) or (previous is None and usable):
        return
    was_usable = previous is None or _is_usable(previous[0])
    job.log(SlurmSaw(node=event.node, state=event.state, text=event.reason))
    node = job.nodes.get(event.node)
    if node is None or usable == was_usable:
        return
    because = f" ({event.reason})" if event.reason else ""
    if node.alive and not usable:
        leave = job.settings.on_drain == "vacate" and _is_administrators(job, node.name)
        outcome = "to be released if the layout can do without it" if leave else "its agent answers, it keeps training"
        job.say("notice", f"node {node.name}: Slurm reports it {event.state}{because}; {outcome}")
    elif not node.alive and usable:
        job.say("notice", f"node {node.name}: Slurm reports it {event.state} again; this job goes on without it")


def _is_usable(state: str) -> bool:
    base, *flags = state.split("+")
    return base in ("idle", "allocated", "mixed") and {"drain", "fail", "not_responding"}.isdisjoint(flags)


def take_over(job: Job) -> None:
    """Set the times of failures, decisions and losses after a take-over. A new supervisor does not know the real times,
    so they count from now."""
    maintenance, record = job.maintenance, job.record
    maintenance.found_at = dict.fromkeys(record.verdicts, job.now)
    maintenance.decided_at = dict.fromkeys(record.drains, job.now)
    maintenance.releases = {name: GivingBack(job.now, next_try_at=job.now + COINCIDENCE_S) for name in record.lost}


def resume(job: Job) -> None:
    """Repeat, after a take-over, the orders that were decided but never answered. Each of them can safely be given
    twice."""
    if not job.settings.slurm or job.stage == "ended":
        return
    for name in job.record.lost:
        if name not in job.maintenance.unwatched:
            job.do(api.WatchNode(node=name))
    for request in job.record.replacements.values():
        if request.state == "joined" and request.node is not None:
            joins.start_node(job, request.node)
    replacements.resume(job)
