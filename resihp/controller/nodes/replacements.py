"""New nodes in place of lost ones: asked for when training is below its first layout, let go when no longer needed.

Decides when a request is made, which node it stands for, and when it is given up; `joins` takes in the node that
comes. Never asks for more than the job was allowed, nor twice for one node at a time. What the journal tells is all
that is known of a request, so that a new supervisor knows the same. Called by `drains`, `joins` and `incidents`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from resihp.controller import interface as api
from resihp.controller import planning, replan_policy
from resihp.controller.state.job import Job
from resihp.controller.state.requests import COINCIDENCE_S
from resihp.errors import LayoutError
from resihp.record.journal import ChangeDeclined, ReplacementAsked, ReplacementChanged
from resihp.record.state import Replacement
from resihp.scheduler import transition_cost

JOINING_S = 10.0
"""From a node's coming until its processes are ready; training goes on meanwhile."""
AGAIN_AFTER_S = 30.0
"""How long after a request that came to nothing the next one is made; twice as long after each further one."""
AGAIN_AT_MOST_S = 600.0


def review(job: Job) -> None:
    """At the end of each event: give up what is not needed any more, ask for what is missing."""
    for request in tuple(job.record.replacements.values()):
        if request.state == "joined" and request.node is not None and not job.nodes[request.node].alive:
            _let_go(job, request, "ended", f"node {request.node} was lost")
    if job.stage == "halting":
        cancel_open(job, "training is done")
    elif job.departure is not None:
        cancel_open(job, "the job is to stop")
    elif job.stage == "running":
        _compare(job)


def _compare(job: Job) -> None:
    """What is on its way against what is missing."""
    lacking = nodes_lacking(job)
    coming = [request for request in job.record.replacements.values() if _is_coming(job, request)]
    if not in_time(job):
        for request in coming:
            if request.state in ("asked", "pending"):
                _let_go(job, request, "cancelled", "the job's time limit is too near")
        allowed = max(0, job.settings.replacements - len(job.record.replacements))
        if names := missing(job)[: min(lacking, allowed)]:
            least = f"{job.settings.replacement_least_left_s / 60:.3g} min"
            _decline(job, names, f"less than {least} are left until the job's time limit (slurm.replacement_min_left)")
        return
    needless = max(0, len(coming) - lacking)
    for request in [request for request in reversed(coming) if request.open][:needless]:
        _let_go(job, request, "cancelled", "no longer needed" if lacking else "the first layout is back")
    wanted = min(lacking - len(coming), job.settings.replacements - len(job.record.replacements))
    if wanted > 0 and job.now >= job.upkeep.ask_after and (names := missing(job)[:wanted]):
        found = _worth(job)
        if found is None or not found.go:
            job.upkeep.ask_after = job.now + AGAIN_AFTER_S
            _decline(job, names, "it cannot be told" if found is None else found.reason)
            return
        job.upkeep.declined = ()
        for name in names:
            _ask(job, name, found.reason)


def nodes_lacking(job: Job) -> int:
    """How many nodes' worth of ranks the plan in effect is below the first one, or below what was asked for, where the
    job began with less."""
    ranks = _wanted(job) - len(job.record.computing)
    return max(0, -(-ranks // job.settings.gpus_per_node))


def _wanted(job: Job) -> int:
    """Ranks with work in the first layout; what was asked for where nodes were missing then."""
    assert job.record.first_plan is not None
    first = len(job.record.first_plan.computing)
    return max(first, job.settings.ranks_asked) if job.record.lost else first


def missing(job: Job) -> list[str]:
    """Lost nodes of the job's own, in the order of their loss, in whose place nothing came or is about to.

    A node counts once it is clear that it is not the first of all of them, which somebody is ending.
    """
    requests, releases = job.record.replacements.values(), job.upkeep.releases
    filled = {request.instead for request in requests if request.open or request.state == "joined"}
    came = {request.node for request in requests if request.joined}
    return [
        lost.name
        for lost in job.record.lost.values()
        if lost.name not in filled and lost.name not in came and job.now - releases[lost.name].lost_at >= COINCIDENCE_S
    ]


def in_time(job: Job) -> bool:
    """Whether enough time is left until the job's limit, as far as it is known."""
    return job.deadline is None or job.deadline - job.now > job.settings.replacement_least_left_s


def _is_coming(job: Job, request: Replacement) -> bool:
    """On its way, or here and without work: starting, or of no use, like any other that we could ask for."""
    if request.state != "joined":
        return request.open
    return not any(job.members[rank].node == request.node for rank in job.record.computing)


def _worth(job: Job) -> transition_cost.Verdict | None:
    """Whether the time that the first layout would save pays for the wait and for the transition to it.

    None where it cannot be told: no iteration was seen yet, or state is lost.
    """
    if job.usual_s == 0:
        return None
    try:
        wait_s = statistics.median(job.upkeep.waits_s or [job.settings.replacement_wait_s])
        return replan_policy.weigh_asking(job, planning.first_again(job), wait_s=wait_s, joining_s=JOINING_S)
    except LayoutError:
        return None


def _decline(job: Job, names: Sequence[str], why: str) -> None:
    """Put on record that nobody comes in for these nodes, once for as long as they are the same."""
    if job.upkeep.declined == tuple(names):
        return
    job.upkeep.declined = tuple(names)
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
    """What Slurm says of a request. One that is over stays so; one that has joined can only end."""
    request = job.record.replacements.get(event.replacement)
    if request is None or not (request.open or request.state == "joined"):
        return
    if request.state == "joined" and event.state == "refused":
        return  # an answer to one of several askings; another one was granted
    state: Literal["pending", "running", "joined", "refused", "ended"] = event.state
    if request.state in ("running", "joined") and event.state in ("pending", "running"):
        state = request.state  # a supervisor that has just come may find out from the beginning
    slurm_job = event.slurm_job or request.slurm_job
    node = request.node if request.joined else event.node or request.node
    told = state != "pending" or not event.text or event.text in request.texts
    if told and (state, slurm_job, node) == (request.state, request.slurm_job, request.node):
        return  # why it waits is told once: reasons alternate
    was_open = request.open
    job.log(
        ReplacementChanged(replacement=request.number, state=state, slurm_job=slurm_job, node=node, text=event.text)
    )
    if was_open and state in ("refused", "ended"):
        _wait(job)
        job.say("notice", f"replacement {request.number} for node {request.instead}: {state}: {event.text}")


def expected(job: Job, lease: int) -> Replacement | None:
    """The request that an agent may answer, if there is one."""
    request = job.record.replacements.get(lease)
    return request if request is not None and request.open else None


def joined(job: Job, request: Replacement, node: str) -> None:
    asked_at = job.upkeep.asked_at.get(request.number)
    if asked_at is not None:
        job.upkeep.waits_s.append(job.now - asked_at)
    job.log(
        ReplacementChanged(replacement=request.number, state="joined", slurm_job=request.slurm_job, node=node, text="")
    )


def unfit(job: Job, request: Replacement, node: str, reason: str) -> None:
    """The node that came is of no use: it is let go, and not given to a later request."""
    _let_go(job, request, "refused", reason, node)
    _wait(job)


def unwanted(job: Job) -> tuple[str, ...]:
    """Nodes that no request may be given: the job's own, those that it lost, and those that were of no use to it."""
    unfit = (
        request.node for request in job.record.replacements.values() if request.state == "refused" and request.node
    )
    return tuple(dict.fromkeys((*job.nodes, *unfit)))


def _wait(job: Job) -> None:
    """After a request that came to nothing."""
    pause_s = min(AGAIN_AFTER_S * 2 ** (job.record.failed_requests - 1), AGAIN_AT_MOST_S)
    job.upkeep.ask_after = job.now + pause_s


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
    """A new supervisor: whatever may not have been said to Slurm is said again."""
    for request in job.record.replacements.values():
        if request.open:
            job.do(api.AskReplacement(replacement=request.number, exclude=unwanted(job)))
        elif request.state == "cancelled":
            job.do(api.CancelReplacement(replacement=request.number, reason="cancelled before"))
