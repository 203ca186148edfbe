"""New nodes in place of lost ones: requested while training is below its first layout, released when no longer needed.

Decides when to make a request, which node it replaces, and when to give it up; `joins` takes in the node that arrives.
Never requests more nodes than the job is allowed, nor two for one node at a time. All knowledge of a request is in the
journal, so that a new supervisor has it as well. Called by `drains`, `joins` and `incidents`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from resihp.controller import interface as api
from resihp.controller import replan_policy
from resihp.controller.planning import first_plan
from resihp.controller.state.job import Job
from resihp.controller.state.requests import COINCIDENCE_S
from resihp.errors import LayoutError
from resihp.record.journal import ChangeDeclined, ReplacementAsked, ReplacementChanged
from resihp.record.state import Replacement
from resihp.scheduler import transition_cost

JOINING_S = 10.0
"""Seconds from a node's arrival until its processes are ready; training goes on meanwhile."""
RETRY_AFTER_S = 30.0
"""Seconds after a failed request until the next one; doubled after each further failure."""
MAX_RETRY_AFTER_S = 600.0
"""Upper limit of that time, in seconds."""


def review(job: Job) -> None:
    """Give up requests that are no longer needed, and request missing nodes, at the end of each event."""
    for request in tuple(job.record.replacements.values()):
        if request.state == "joined" and request.node is not None and not job.nodes[request.node].alive:
            _let_go(job, request, "ended", f"node {request.node} was lost")
    if job.stage == "halting":
        cancel_open(job, "training is done")
    elif job.stop_request is not None:
        cancel_open(job, "the job is to stop")
    elif job.stage == "running":
        _compare(job)


def _compare(job: Job) -> None:
    """Compare the nodes that are coming with those that are missing."""
    lacking = nodes_lacking(job)
    coming = [request for request in job.record.replacements.values() if _is_coming(job, request)]
    if not in_time(job):
        for request in coming:
            if request.state in ("asked", "pending"):
                _let_go(job, request, "cancelled", "the job's time limit is too near")
        allowed = max(0, job.settings.replacements - len(job.record.replacements))
        if names := missing(job)[: min(lacking, allowed)]:
            min_left = f"{job.settings.replacement_least_left_s / 60:.3g} min"
            _decline(
                job, names, f"less than {min_left} is left until the job's time limit (slurm.replacement_min_left)"
            )
        return
    needless = max(0, len(coming) - lacking)
    for request in [request for request in reversed(coming) if request.open][:needless]:
        _let_go(job, request, "cancelled", "no longer needed" if lacking else "the first layout is back")
    wanted = min(lacking - len(coming), job.settings.replacements - len(job.record.replacements))
    if wanted > 0 and job.now >= job.maintenance.ask_after and (names := missing(job)[:wanted]):
        verdict = _worth(job)
        if verdict is None or not verdict.go:
            job.maintenance.ask_after = job.now + RETRY_AFTER_S
            _decline(job, names, "the gain is unknown" if verdict is None else verdict.reason)
            return
        job.maintenance.declined = ()
        for name in names:
            _ask(job, name, verdict.reason)


def nodes_lacking(job: Job) -> int:
    """Return how many nodes' worth of ranks the plan in effect lacks, compared with the first one, or with the
    requested ranks if the job started with fewer."""
    ranks = _wanted(job) - len(job.record.computing)
    return max(0, -(-ranks // job.settings.gpus_per_node))


def _wanted(job: Job) -> int:
    """Return the number of ranks with work in the first layout, or as requested if nodes were missing at the start."""
    assert job.record.first_plan is not None
    first = len(job.record.first_plan.computing)
    return max(first, job.settings.ranks_asked) if job.record.lost else first


def missing(job: Job) -> list[str]:
    """Return the job's own lost nodes that have no replacement yet, in the order of their loss.

    A node counts only after a while, once it is clear that its loss is not part of the end of the whole job.
    """
    requests, releases = job.record.replacements.values(), job.maintenance.releases
    filled = {request.instead for request in requests if request.open or request.state == "joined"}
    arrived = {request.node for request in requests if request.joined}
    return [
        lost.name
        for lost in job.record.lost.values()
        if lost.name not in filled
        and lost.name not in arrived
        and job.now - releases[lost.name].lost_at >= COINCIDENCE_S
    ]


def in_time(job: Job) -> bool:
    """Return whether enough time is left until the job's limit, as far as it is known."""
    return job.deadline is None or job.deadline - job.now > job.settings.replacement_least_left_s


def _is_coming(job: Job, request: Replacement) -> bool:
    """Return whether a requested node is on its way, or is here without work: its workers start, or they are of no use,
    as those of any other node would be."""
    if request.state != "joined":
        return request.open
    return not any(job.members[rank].node == request.node for rank in job.record.computing)


def _worth(job: Job) -> transition_cost.Verdict | None:
    """Decide whether the time that the first layout would save pays for the wait and for the transition to it.

    None if that is not known: there was no iteration yet, or state is lost.
    """
    if job.usual_s == 0:
        return None
    try:
        wait_s = statistics.median(job.maintenance.waits_s or [job.settings.replacement_wait_s])
        return replan_policy.weigh_asking(job, first_plan.choose_again(job), wait_s=wait_s, joining_s=JOINING_S)
    except LayoutError:
        return None


def _decline(job: Job, names: Sequence[str], why: str) -> None:
    """Record that these nodes are not replaced, once for as long as they are the same nodes."""
    if job.maintenance.declined == tuple(names):
        return
    job.maintenance.declined = tuple(names)
    reason = f"node {', '.join(names)} lost"
    job.log(ChangeDeclined(about="node", reason=reason, why=why, iteration=job.furthest + 1))


def _ask(job: Job, instead: str, why: str) -> None:
    number = len(job.record.replacements) + 1
    reason = f"{len(job.record.computing)} of {_wanted(job)} ranks have work; another node {why}"
    excluded = unwanted(job)
    job.log(ReplacementAsked(replacement=number, node=instead, excluded=excluded, reason=reason))
    job.say("notice", f"node {instead}: lost, {reason}; asking Slurm for another one")
    job.do(api.AskReplacement(replacement=number, exclude=excluded))


def news(job: Job, event: api.ReplacementNews) -> None:
    """Take Slurm's state of a request. A request that is over stays so; one that has joined can only end."""
    request = job.record.replacements.get(event.replacement)
    if request is None or not (request.open or request.state == "joined"):
        return
    if request.state == "joined" and event.state == "refused":
        return  # an answer to a repeated request; another one was granted
    state: Literal["pending", "running", "joined", "refused", "ended"] = event.state
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
    if was_open and state in ("refused", "ended"):
        _wait(job)
        job.say("notice", f"replacement {request.number} for node {request.instead}: {state}: {event.text}")


def expected(job: Job, lease: int) -> Replacement | None:
    """Return the open request that an agent answers, if there is one."""
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
    """Release an unsuitable node, so that no later request gets it."""
    _let_go(job, request, "refused", reason, node)
    _wait(job)


def unwanted(job: Job) -> tuple[str, ...]:
    """Return nodes that no request may be given: the job's own, those it lost, and those that were unsuitable."""
    unfit = (
        request.node for request in job.record.replacements.values() if request.state == "refused" and request.node
    )
    return tuple(dict.fromkeys((*job.nodes, *unfit)))


def _wait(job: Job) -> None:
    """Wait before the next request, after one that failed."""
    pause_s = min(RETRY_AFTER_S * 2 ** (job.record.failed_requests - 1), MAX_RETRY_AFTER_S)
    job.maintenance.ask_after = job.now + pause_s


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
    """Repeat requests and cancellations that Slurm may not have received, as a new supervisor."""
    for request in job.record.replacements.values():
        if request.open:
            job.do(api.AskReplacement(replacement=request.number, exclude=unwanted(job)))
        elif request.state == "cancelled":
            job.do(api.CancelReplacement(replacement=request.number, reason="cancelled before"))
