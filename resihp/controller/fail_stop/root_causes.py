"""Determine the root causes of several ends together: how each failure is described, and which failures are
consequences of others.

Decides to which component a failure is attributed; the consequences are decided elsewhere. The end of a rank that only
followed from another rank's end becomes part of that rank's failure. A log line about the node itself is used for all
processes that ended there together, and for one failure only: lines used as evidence are remembered and explain no
later failure. Never starts, ends or drains anything. Called by `incidents` before failures are journaled. `own_causes`
judges each end separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from resihp.controller.fail_stop import same_errors
from resihp.controller.fail_stop.own_causes import (
    ended_early,
    ended_early_cause,
    is_about_node,
    is_conclusive,
    may_follow_from,
    own_diagnosis,
    report_of,
    report_of_living,
    was_killed,
)
from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.controller.state.members import Member
from resihp.detector.diagnosis.diagnosis import Diagnosis, diagnose
from resihp.detector.diagnosis.reports import Report
from resihp.detector.diagnosis.signatures import CONNECTION_FAILED, NO_GPU, signature_of
from resihp.protocol.messages import ABORT_STATUS
from resihp.record.journal import Diagnosed

MAX_EVIDENCE_CHARS = 6000
_OF_A_PROCESS = ("process", "script")


def explain(job: Job) -> None:
    """Describe the incidents of a transition by their causes, and merge consequences into their causes."""
    ended = [i for i in job.incidents if i.kind != "communication" and i.component != "node" and _members(job, i)]
    earlier = tuple(job.record.diagnosed)
    for incident in ended:
        first, *others = _members(job, incident)
        if others:
            incident.diagnosis = diagnose([report_of(job, m, own=True) for m in (first, *others)], earlier)
        else:
            incident.diagnosis = own_diagnosis(job, first)
    ended_by_node: dict[str, dict[int, Incident]] = {}
    for incident in ended:
        for member in _members(job, incident):
            ended_by_node.setdefault(member.node, {})[member.rank] = incident
    living: dict[str, list[Report]] = {}
    for member in job.members.values():
        if member.alive and member.node in ended_by_node:
            living.setdefault(member.node, []).append(report_of_living(member))
    for node in sorted(ended_by_node):
        _weigh_node(job, ended_by_node[node], living.get(node, []), earlier)
    same_errors.merge_same(job)
    roots = {id(incident): _members(job, incident) for incident in job.incidents}
    _merge(job)
    for incident in job.incidents:
        if incident.diagnosis is not None:
            _describe(roots[id(incident)], incident, incident.diagnosis)


# --- one node -------------------------------------------------------------------------------------------------------


def _weigh_node(job: Job, ended: dict[int, Incident], living: list[Report], earlier: tuple[Diagnosed, ...]) -> None:
    """Make the log lines about a node itself the cause of one incident, if they are closer to a root cause than the
    incident's own lines.

    `ended`: incidents of the node's ended ranks, by rank; `living`: reports of its live ranks.
    """
    diagnosis = diagnose([*(report_of(job, job.members[rank]) for rank in sorted(ended)), *living], earlier)
    signature = signature_of(diagnosis.code)
    if diagnosis.secondary or signature is None or not signature.node_wide:
        return
    in_order = sorted(ended.values(), key=lambda incident: (incident.found_at, min(incident.ranks)))
    related = [i for i in in_order if i.diagnosis is not None and _is_related(i.diagnosis, diagnosis)]
    unexplained = [i for i in in_order if not _has_own_cause(job, i)]
    named_incidents = [ended[rank] for rank in diagnosis.ranks if rank in ended]
    if named_incidents:
        candidates = [i for i in named_incidents if i in related or i in unexplained]
    else:
        candidates = [] if related else unexplained
    if candidates:
        candidates[0].diagnosis = diagnosis
    bearers = candidates or related
    if bearers:
        bearers[0].explains |= _lines_about_node(job, ended)


def _lines_about_node(job: Job, ranks: Iterable[int]) -> set[str]:
    return {clue.line for rank in ranks for clue in job.members[rank].clues if is_about_node(clue)}


def _is_related(own: Diagnosis, diagnosis: Diagnosis) -> bool:
    """Return whether a process reported the same problem as its node. A process that sees no GPU may have lost its
    GPU."""
    return own.category == diagnosis.category or (own.code == NO_GPU.kind and diagnosis.category == "device")


def _has_own_cause(job: Job, incident: Incident) -> bool:
    """Return whether a cause was found without the lines about the node, or no cause is needed."""
    own = incident.diagnosis
    members = _members(job, incident)
    if own is None or incident.component == "device" or any(member.raised is not None for member in members):
        return True
    return own.secondary or any(is_conclusive(own, member) for member in members)


# --- causes and consequences ----------------------------------------------------------------------------------------


def _merge(job: Job) -> None:
    """Merge failures that only followed from a lost peer into the first failure with a cause of its own.

    If there is no such failure, and the script creates its own process groups, all of them become one failure that is
    attributed to no node.
    """
    declared = job.has_declared
    roots, unsure = _roots(job, declared)
    if not roots and job.stage == "gathering" and not declared:
        roots = [i for i in job.incidents if _follows(job, i, declared)][:1]
        for first in roots:
            first.node = first.device = None
            if first.component == "process" and first.diagnosis is not None:
                first.cause = first.diagnosis.cause
            if ended := ended_early(job):
                first.evidence = f"then {first.cause}\n{first.evidence}"
                first.cause = f"rank {ended[0]} {ended_early_cause(ended)}"
                first.ranks, first.kind = first.ranks | set(ended), "program"
    if not roots:
        return
    root = min(roots, key=lambda incident: _failed_at(job, incident))
    kept: list[Incident] = []
    for victim in job.incidents:
        if victim is root or not (id(victim) in unsure or _follows(job, victim, declared)):
            kept.append(victim)
            continue
        root.ranks |= victim.ranks
        root.explains |= victim.explains
        lines = victim.diagnosis.evidence if victim.diagnosis is not None else ()
        root.evidence = _joined(f"{root.evidence}\nthen {victim.cause}", lines)
    job.incidents = kept


def _roots(job: Job, declared: bool) -> tuple[list[Incident], set[int]]:
    """Return the incidents with a cause of their own, and the `id`s of incidents about failed connections that are
    consequences of one of them because they happened later."""
    sure: list[Incident] = []
    unsure: list[Incident] = []
    for incident in job.incidents:
        diagnosis = incident.diagnosis
        if incident.component == "node" or (
            diagnosis and not diagnosis.secondary and not _is_hung_abort(job, incident)
        ):
            connection_failed = diagnosis is not None and diagnosis.code == CONNECTION_FAILED.kind
            (unsure if connection_failed and _may_be_anothers(job, incident, declared) else sure).append(incident)
    since = min((_may_follow_from(job, incident) for incident in sure), default=math.inf)
    first = [incident for incident in unsure if _failed_at(job, incident) < since]
    return [*sure, *first], {id(incident) for incident in unsure} - {id(incident) for incident in first}


def _may_follow_from(job: Job, incident: Incident) -> float:
    """Return the earliest time at which other ranks may have failed because of an incident. A lost node counts from the
    beginning, because it is noticed long after its consequences."""
    if incident.component == "node":
        return -math.inf
    return min((may_follow_from(member) for member in _members(job, incident)), default=incident.found_at)


def _failed_at(job: Job, incident: Incident) -> float:
    at = [member.failed_at for member in _members(job, incident) if member.failed_at is not None]
    return min([incident.found_at, *at]) if incident.component != "node" else incident.found_at


def _follows(job: Job, incident: Incident, declared: bool) -> bool:
    """Return whether an incident is a consequence of another one. A process with a hung abort always is."""
    if _is_hung_abort(job, incident):
        return True
    diagnosis = incident.diagnosis
    return diagnosis is not None and diagnosis.secondary and _may_be_anothers(job, incident, declared)


def _may_be_anothers(job: Job, incident: Incident, declared: bool) -> bool:
    """Return whether the log lines of an incident about another rank's end count. In a script that trains with resihp
    an exception is always the script's own, because a lost peer does not raise one there."""
    members = _members(job, incident)
    has_own_cause = any(was_killed(member) or (member.raised is not None and declared) for member in members)
    return incident.component in _OF_A_PROCESS and not has_own_cause


def _is_hung_abort(job: Job, incident: Incident) -> bool:
    """Return whether an incident is about processes that resihp ended because their communicators could not be
    aborted."""
    members = _members(job, incident)
    return bool(members) and all(member.exit_status == ABORT_STATUS for member in members)


# --- wording --------------------------------------------------------------------------------------------------------


def _describe(members: list[Member], incident: Incident, diagnosis: Diagnosis) -> None:
    """Describe an incident by its cause. `members`: the ranks that had the cause themselves, without ranks that lost
    them as peers."""
    if not any(is_conclusive(diagnosis, member) for member in members):
        return
    raised = any(member.raised is not None for member in members) and incident.condemned is None
    dead = incident.component == "device" and incident.condemned is None  # dead because of an injected fault
    if raised or dead:
        incident.evidence = _joined(incident.evidence, diagnosis.evidence)
        return
    incident.cause = diagnosis.cause
    incident.evidence = _joined("\n".join(diagnosis.evidence), incident.evidence.splitlines())
    if diagnosis.advice:
        incident.evidence += f"\nnext: {diagnosis.advice}"
    if diagnosis.category == "program":
        incident.kind = "program"
    if diagnosis.blames_node and diagnosis.node is not None:
        incident.component, incident.node = diagnosis.component, diagnosis.node
        incident.device = diagnosis.device if diagnosis.component == "device" else None
    else:
        incident.component = "process" if diagnosis.component in ("device", "node") else diagnosis.component
        incident.node, incident.device = None, None


def _joined(text: str, lines: Iterable[str]) -> str:
    """Return the text, followed by those of the lines that it does not contain."""
    return "\n".join((text, *(line for line in lines if line not in text)))[:MAX_EVIDENCE_CHARS]


def _members(job: Job, incident: Incident) -> list[Member]:
    return [job.members[rank] for rank in sorted(incident.ranks) if rank in job.members]
