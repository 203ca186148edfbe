"""Request new nodes in place of lost ones while training has fewer ranks than its first layout, and cancel requests
that are no longer needed.

Decides when to make a request, which lost node it is for, and when to give it up; `joins` handles the node that
arrives. Never requests more nodes than the job is allowed, nor two nodes at a time for one lost node. Everything about
a request is in the journal, so that a new supervisor knows it as well. Called by `drains`, `joins` and `incidents`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from resihp.controller import interface as api
from resihp.controller import replan_policy
from resihp.controller.nodes import reservations
from resihp.controller.planning import first_plan
from resihp.controller.rounds import next_round
from resihp.controller.state.job import Job
from resihp.controller.state.requests import COINCIDENCE_S
from resihp.errors import LayoutError
from resihp.record.journal import ChangeDeclined, ReplacementAsked, ReplacementChanged
from resihp.record.state import Replacement
from resihp.scheduler import transition_cost
from resihp.words import count_of

JOINING_S = 10.0
"""Estimated seconds from a node's arrival until its processes are ready. Training goes on meanwhile."""
LEAVING_S = 60.0
"""Seconds that the Slurm job of a node that left in order may take to end."""
SLURM_SAYS_S = 10.0
"""Seconds that Slurm has to say what became of the Slurm job of a replacement whose node was lost."""
RETRY_AFTER_S = 30.0
"""Seconds from a failed request to the next request; doubled after each further failure."""
MAX_RETRY_AFTER_S = 600.0
"""Largest number of seconds from a failed request to the next one."""
MAX_REFUSALS = 8
"""Number of requests in place of one node that Slurm may refuse to accept; with the pauses between them, they take 40
minutes."""


def review(job: Job) -> None:
    """Cancel requests that are no longer needed, and request missing nodes. Called at the end of each event."""
    for request in tuple(job.record.replacements.values()):
        if request.state == "joined" and request.node is not None and _is_gone(job, request.node):
            _let_go(job, request, "ended", f"node {request.node} was lost")
    if job.stage == "halting":
        cancel_open(job, "training is done")
    elif job.stop_request is not None:
        cancel_open(job, "the job is to stop")
    elif job.stage == "running" or job.runs_script:
        _compare(job)


def _is_gone(job: Job, name: str) -> bool:
    """Return whether the Slurm job of a replacement's node is to be ended. A node that left in order ends it by itself,
    within `LEAVING_S`. For any other, Slurm has `SLURM_SAYS_S` to say that the job has ended already, and why."""
    if job.nodes[name].alive:
        return False
    patience_s = LEAVING_S if job.record.lost[name].how == "vacated" else SLURM_SAYS_S
    return job.now - job.maintenance.releases[name].lost_at > patience_s


def was_taken_by_slurm(job: Job, name: str) -> bool:
    """Return whether Slurm, not its node, ended or suspended the Slurm job of a replacement."""
    withdrawn = (request.node for request in job.record.replacements.values() if request.state == "withdrawn")
    return name in job.maintenance.taken_by_slurm or name in withdrawn


def _compare(job: Job) -> None:
    """Compare the number of requested nodes with the number of missing nodes; cancel or make requests accordingly."""
    lacking = nodes_lacking(job)
    coming = [request for request in job.record.replacements.values() if _is_coming(job, request)]
    if not in_time(job):
        for request in coming:
            if request.state in ("asked", "pending"):
                _let_go(job, request, "cancelled", f"{_nearest_end(job)} is too near")
        if names := missing(job)[: min(lacking, _requests_left(job))]:
            min_left = f"{job.settings.replacement_least_left_s / 60:.3g} min"
            _decline(job, names, f"less than {min_left} is left until {_nearest_end(job)} (slurm.replacement_min_left)")
        return
    needless = max(0, len(coming) - lacking)
    for request in [request for request in reversed(coming) if request.open][:needless]:
        _let_go(job, request, "cancelled", "no longer needed" if lacking else "the first layout is back")
    wanted = min(lacking - len(coming), _requests_left(job))
    if wanted > 0 and job.now >= job.maintenance.ask_after and (names := missing(job)[:wanted]):
        if job.runs_script:
            why = f"the script can be started again with {count_of(_script_nodes_wanted(job), 'node')} then"
        else:
            verdict = _worth(job)
            if verdict is None or not verdict.go:
                job.maintenance.ask_after = job.now + RETRY_AFTER_S
                _decline(job, names, "the gain is unknown" if verdict is None else verdict.reason)
                return
            devices = f"{len(job.record.computing)} of {_wanted(job)} ranks have work"
            why = f"{devices}; another node {verdict.reason}"
        job.maintenance.declined = ()
        for name in names:
            _ask(job, name, why)


def _requests_left(job: Job) -> int:
    """Return how many further nodes the job may request now. A request that Slurm did not accept costs nothing; the
    next is for one node only, to find out whether Slurm accepts it."""
    requests = list(job.record.replacements.values())
    refused = sum(map(_was_not_accepted, requests))
    requests_left = max(0, job.settings.replacements - (len(requests) - refused))
    answered = [request for request in requests if request.state != "asked"]
    if answered and _was_not_accepted(answered[-1]):
        return min(requests_left, 1) if len(answered) == len(requests) else 0
    return requests_left


def _was_not_accepted(request: Replacement) -> bool:
    return request.state == "refused" and request.slurm_job is None


def _is_refused_for_good(job: Job, name: str) -> bool:
    """Return whether Slurm has so often not accepted a request for a node in place of this one that another is
    useless."""
    requests = job.record.replacements.values()
    return sum(request.instead == name and _was_not_accepted(request) for request in requests) >= MAX_REFUSALS


def nodes_lacking(job: Job) -> int:
    """Return the number of nodes that the plan in effect lacks, compared with the first plan, or with the requested
    number of ranks if the job started with fewer. A script lacks the nodes that it could use and that are not there."""
    if job.runs_script:
        return max(0, _script_nodes_wanted(job) - len(next_round.usable(job)))
    ranks = _wanted(job) - len(job.record.computing)
    return max(0, -(-ranks // job.settings.gpus_per_node))


def _script_nodes_wanted(job: Job) -> int:
    return job.settings.nodes - job.settings.spares


def may_still_come(job: Job) -> bool:
    """Return whether a requested node is on its way, or may be requested."""
    if not job.settings.slurm or job.settings.observes:
        return False
    is_open = any(request.open for request in job.record.replacements.values())
    return is_open or (_requests_left(job) > 0 and in_time(job))


def _wanted(job: Job) -> int:
    """Return the number of ranks with work in the first layout, or the requested number if nodes were missing at the
    start."""
    assert job.record.first_plan is not None
    first = len(job.record.first_plan.computing)
    return max(first, job.settings.ranks_asked) if job.record.lost else first


def missing(job: Job) -> list[str]:
    """Return the job's own lost nodes without a replacement, in the order of their loss. A node whose replacement was
    cancelled by somebody else is not replaced again.

    A node counts only `COINCIDENCE_S` seconds after its loss, when it is clear that the loss is not part of the end of
    the whole job.
    """
    requests, releases = job.record.replacements.values(), job.maintenance.releases
    filled = {request.instead for request in requests if request.open or request.state in ("joined", "withdrawn")}
    arrived = {request.node for request in requests if request.joined}
    return [
        lost.name
        for lost in job.record.lost.values()
        if lost.name not in filled
        and lost.name not in arrived
        and not _is_refused_for_good(job, lost.name)
        and job.now - releases[lost.name].lost_at >= COINCIDENCE_S
    ]


def in_time(job: Job) -> bool:
    """Return whether enough time is left for a replacement until the job's time limit, and until a reservation of nodes
    of the job; True if neither is known."""
    ends = [] if job.deadline is None else [job.deadline]
    reserved = reservations.next_on(job)
    if reserved is not None and reserved.at > job.now:
        ends.append(reserved.at)
    return all(end - job.now > job.settings.replacement_least_left_s for end in ends)


def _nearest_end(job: Job) -> str:
    """Return, in words, what ends the time in which a replacement would be of use."""
    reserved = reservations.next_on(job)
    if reserved is not None and reserved.at > job.now and (job.deadline is None or reserved.at < job.deadline):
        return f"reservation {reserved.name} of nodes of the job"
    return "the job's time limit"


def _is_coming(job: Job, request: Replacement) -> bool:
    """Return whether a requested node is on its way, or has joined but has no work yet. In the latter case its workers
    are still starting, or the planner has no use for them, nor would it for those of another node."""
    if request.state != "joined" or job.runs_script:
        return request.open
    return not any(job.members[rank].node == request.node for rank in job.record.computing)


def _worth(job: Job) -> transition_cost.Verdict | None:
    """Decide whether the first layout would save more time than the wait for the node and the transition cost.

    None if that is not known, because no iteration is complete yet or state is lost.
    """
    if job.usual_s == 0:
        return None
    try:
        wait_s = statistics.median(job.maintenance.waits_s or [job.settings.replacement_wait_s])
        return replan_policy.weigh_asking(job, first_plan.choose_again(job), wait_s=wait_s, joining_s=JOINING_S)
    except LayoutError:
        return None


def _decline(job: Job, names: Sequence[str], why: str) -> None:
    """Journal that these nodes are not replaced; only once as long as the same nodes are missing."""
    if job.maintenance.declined == tuple(names):
        return
    job.maintenance.declined = tuple(names)
    reason = f"node {', '.join(names)} lost"
    job.log(ChangeDeclined(about="node", reason=reason, why=why, iteration=job.furthest + 1))


def _ask(job: Job, instead: str, why: str) -> None:
    number = len(job.record.replacements) + 1
    excluded = unwanted(job)
    job.log(ReplacementAsked(replacement=number, node=instead, excluded=excluded, reason=why))
    job.say("notice", f"node {instead}: lost, {why}; asking Slurm for another one")
    job.do(api.AskReplacement(replacement=number, exclude=excluded))


def _note_taken(job: Job, request: Replacement, event: api.ReplacementNews) -> None:
    """Note whether Slurm has taken the request's node from the job."""
    if request.node is None:
        return
    if event.by_slurm:
        job.maintenance.taken_by_slurm.add(request.node)
    elif request.node in job.nodes and job.nodes[request.node].alive:  # else it was lost while Slurm had taken it
        job.maintenance.taken_by_slurm.discard(request.node)


def news(job: Job, event: api.ReplacementNews) -> None:
    """Handle Slurm's report on a request. A request that is over stays over, and a request with a joined node can only
    end."""
    request = job.record.replacements.get(event.replacement)
    if request is None:
        return
    _note_taken(job, request, event)
    if not (request.open or request.state == "joined"):
        return
    if request.state == "joined" and event.state == "refused":
        return  # the answer to a repeated request, after an earlier one was granted
    state: Literal["pending", "running", "joined", "refused", "ended", "withdrawn"] = event.state
    if request.state in ("running", "joined") and event.state in ("pending", "running"):
        state = request.state  # a new supervisor may learn of the states from the beginning
    slurm_job = event.slurm_job or request.slurm_job
    node = request.node if request.joined else event.node or request.node
    known_text = state != "pending" or not event.text or event.text in request.texts
    if known_text and (state, slurm_job, node) == (request.state, request.slurm_job, request.node):
        return  # each reason for waiting is journaled once: reasons alternate
    was_open = request.open
    job.log(
        ReplacementChanged(replacement=request.number, state=state, slurm_job=slurm_job, node=node, text=event.text)
    )
    if state == "withdrawn":
        outcome = f"{event.text}; no other node is requested in place of {request.instead}"
        job.say("notice", f"replacement {request.number} for node {request.instead}: {outcome}")
    elif was_open and state in ("refused", "ended"):
        _wait(job)
        job.say("notice", f"replacement {request.number} for node {request.instead}: {state}: {event.text}")


def expected(job: Job, lease: int) -> Replacement | None:
    """Return the open request that a newly connected agent belongs to; None if there is none. `lease`: the number of
    the request, sent by the agent."""
    request = job.record.replacements.get(lease)
    return request if request is not None and request.open else None


def joined(job: Job, request: Replacement, node: str) -> None:
    asked_at = job.maintenance.asked_at.get(request.number)
    if asked_at is not None:
        job.maintenance.waits_s.append(job.now - asked_at)
    job.log(
        ReplacementChanged(replacement=request.number, state="joined", slurm_job=request.slurm_job, node=node, text="")
    )


def unfit(job: Job, request: Replacement, node: str, reason: str) -> None:
    """Refuse an unsuitable node and cancel its request. No later request may get the same node."""
    _let_go(job, request, "refused", reason, node)
    _wait(job)


def unwanted(job: Job) -> tuple[str, ...]:
    """Return the nodes that a request excludes: the job's own nodes, its lost nodes, and unsuitable nodes of earlier
    requests."""
    unfit = (
        request.node for request in job.record.replacements.values() if request.state == "refused" and request.node
    )
    return tuple(dict.fromkeys((*job.nodes, *unfit)))


def _wait(job: Job) -> None:
    """Set the time of the next request after a failed one."""
    pause_s = min(RETRY_AFTER_S * 2 ** (job.record.failed_requests - 1), MAX_RETRY_AFTER_S)
    job.maintenance.ask_after = job.now + pause_s


def guests(job: Job) -> set[str]:
    """Return the nodes that came as replacements: each belongs to a Slurm job of its own, and not to the job's own
    allocation."""
    return {request.node for request in job.record.replacements.values() if request.joined and request.node is not None}


def cancel(job: Job, request: Replacement, reason: str) -> None:
    _let_go(job, request, "cancelled", reason)


def cancel_open(job: Job, reason: str) -> None:
    for request in tuple(job.record.replacements.values()):
        if request.open:
            _let_go(job, request, "cancelled", reason)


def _let_go(
    job: Job,
    request: Replacement,
    state: Literal["cancelled", "ended", "refused"],
    reason: str,
    node: str | None = None,
) -> None:
    node = node or request.node
    job.log(
        ReplacementChanged(replacement=request.number, state=state, slurm_job=request.slurm_job, node=node, text=reason)
    )
    job.do(api.CancelReplacement(replacement=request.number, reason=reason))


def resume(job: Job) -> None:
    """Repeat, after a take-over, the requests and cancellations that Slurm may not have received."""
    for request in job.record.replacements.values():
        if request.open:
            job.do(api.AskReplacement(replacement=request.number, exclude=unwanted(job)))
        elif request.state == "cancelled":
            job.do(api.CancelReplacement(replacement=request.number, reason="cancelled before"))
