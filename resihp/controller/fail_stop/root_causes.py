"""Root causes: the lines of a process's log and of its node's kernel, weighed by the detector (`detector.diagnosis`).

Decides how a failure is described and to which component it is attributed; the consequences are decided elsewhere. The
end of a rank that only followed from another rank's end becomes part of that failure. Without a significant line a
failure is described by the exit alone, and an exception is always reported as it was raised. Never starts, ends or
drains anything. Called by `failures` when a process has ended, and by `incidents` before failures are logged.

All processes that end on a node bring the same kernel messages along. A line that names one of our processes counts for
that one; any other is weighed for all processes that ended on the node together, and for one failure only: lines used
as evidence are remembered and explain no later failure.
"""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Iterable

import msgspec

from resihp.controller.fail_stop import same_errors
from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.controller.state.members import Follows, Member
from resihp.detector.diagnosis.candidates import kind_of_raised
from resihp.detector.diagnosis.diagnosis import Diagnosis, diagnose, read_log
from resihp.detector.diagnosis.reports import Report
from resihp.detector.diagnosis.signatures import CONNECTION_FAILED, EXCEPTION, NO_GPU, Depth, signature_of
from resihp.protocol.messages import ABORT_STATUS, Clue
from resihp.record.journal import Diagnosed

MAX_EVIDENCE_CHARS = 6000
OUT_OF_ORDER_S = 1.0
"""Seconds by which the report of a death may arrive later than the reports of its consequences on other nodes."""
DEVICE_ERROR_CLASS = "AcceleratorError"
"""Torch's name for a CUDA error since 2.8; a RuntimeError before."""
_OF_A_PROCESS = ("process", "script")
OUTSIDE_CATEGORIES = frozenset({"storage", "service"})
"""Categories of causes that are neither the script nor a node."""
PROGRAM_CATEGORIES = frozenset({"program", "memory", "unknown"})
"""Categories of causes that may be the script itself."""
EXIT_ONLY_CODES = ("unknown", "fenced", "gone", "node lost")
"""Codes of diagnoses that rest only on the exit of a process; `exit N` is another."""


def condemns_its_device(job: Job, member: Member) -> bool:
    """Return whether a process that has just ended leaves a dead device, according to its own lines or to a kernel line
    about it alone.

    Lines that may be about another device of the node are left to `explain`, which has all reports. A process that sees
    no GPU may have a wrong setting, so a kernel line about a device of that node is required as well.
    """
    diagnosis = _own_diagnosis(job, member)
    if diagnosis.code == NO_GPU.kind and not _others_see_none(job, member):
        diagnosis = diagnose([_report(job, member)])
    located = (diagnosis.node, diagnosis.device) == (member.node, member.device)
    return diagnosis.category == "device" and diagnosis.blames_node and located and _is_conclusive(diagnosis, member)


def _others_see_none(job: Job, member: Member) -> bool:
    """Return whether another process of the same node saw no GPU either."""
    others = [other for other in job.members.values() if other is not member and other.node == member.node]
    return any(_own_diagnosis(job, other).code == NO_GPU.kind for other in others if other.failed_at is not None)


def failed_on_its_device(job: Job, member: Member) -> bool:
    """Return whether a rank's exception came from its device, with no sign that the program caused it."""
    raised = member.raised is not None and member.raised.error.startswith(DEVICE_ERROR_CLASS)
    return raised and _own_diagnosis(job, member).category not in ("program", "memory")


def is_from_outside(job: Job, rank: int) -> bool:
    """Return whether storage, or a service its script uses, made a rank fail: neither the script nor its node."""
    return _kind_of_end(job, rank)[0] in OUTSIDE_CATEGORIES


def may_pass(job: Job, rank: int) -> bool:
    """Return whether another run may succeed with the same script on the same nodes; this includes a failed connection.

    Without a traceback it is not known whether the connection was one to a service.
    """
    category, code = _kind_of_end(job, rank)
    member = job.members[rank]
    is_traced = member.raised is None or any(clue.raised for clue in member.raised_clues)
    return category in OUTSIDE_CATEGORIES or (code == CONNECTION_FAILED.kind and is_traced)


def may_be_the_program(job: Job, rank: int) -> bool:
    """Return whether the script could be the cause of a rank's failure. A lost device or a lost peer never is."""
    return not may_pass(job, rank) and _kind_of_end(job, rank)[0] in PROGRAM_CATEGORIES


def lost_a_peer(job: Job, rank: int) -> bool:
    """Return whether a rank failed only because of a connection to other ranks of its process group."""
    return _kind_of_end(job, rank)[0] in ("secondary", "link")


def advice(job: Job, rank: int) -> str:
    """Return the advice for the end of a rank."""
    signature = signature_of(_kind_of_end(job, rank)[1])
    return signature.advice if signature is not None else _own_diagnosis(job, job.members[rank]).advice


def log_lines(job: Job, rank: int) -> tuple[str, ...]:
    """Return the lines of a rank's log that show the cause of its end."""
    return _own_diagnosis(job, job.members[rank]).evidence


def _kind_of_end(job: Job, rank: int) -> tuple[str, str]:
    """Return category and code of a rank's exception, whatever its log says besides; without an exception, of its
    end."""
    member = job.members[rank]
    if member.raised is None:
        diagnosis = _own_diagnosis(job, member)
        return diagnosis.category, diagnosis.code
    signature = kind_of_raised(member.raised_clues)
    if signature is None:
        signature = (
            kind_of_raised(read_log(f"Traceback (most recent call last):\n{member.raised.error}\n")) or EXCEPTION
        )
    return signature.category, signature.kind


def note_failed(job: Job, member: Member) -> None:
    """Note that a process has raised or ended: the time, and whether it followed from another rank's end."""
    if member.failed_at is None:
        member.failed_at = job.now
    member.follows = _follows_another(job, member)


def _follows_another(job: Job, member: Member) -> Follows:
    """Return whether a rank failed because of another rank's end, judged by its log.

    No process kills itself with SIGKILL because of a lost peer, so a line about peers in the log of a killed process is
    outdated. A process that has raised may take a while to end. A refused connection may have been one to a peer, or to
    a service.
    """
    if _was_killed(member):
        return "never"
    diagnosis = _own_diagnosis(job, member)
    if diagnosis.secondary:
        return "surely"
    if diagnosis.code == CONNECTION_FAILED.kind:
        return "perhaps"
    signature = signature_of(diagnosis.code)
    return "never" if signature is not None and signature.depth <= Depth.REPORTED else ""


def _was_killed(member: Member) -> bool:
    """Return whether a process was killed, by us or by others. A process that had raised and was killed only for ending
    too slowly does not count."""
    return member.exit_status == -signals.SIGKILL and not _was_killed_after_raising(member)


def _was_killed_after_raising(member: Member) -> bool:
    return member.raised is not None and member.fenced is not None


def may_follow_from(member: Member) -> float:
    """Return the time from which a connection may have failed because of this rank's end."""
    at = member.failed_at if member.failed_at is not None else -math.inf
    return at - OUT_OF_ORDER_S if member.follows == "never" else at


def reported_cause(job: Job, member: Member) -> str:
    """Return the cause of a process's end as far as its own log shows it."""
    return _own_diagnosis(job, member).cause


def _own_diagnosis(job: Job, member: Member) -> Diagnosis:
    """Return the diagnosis of one process alone; computed again only if its reports, or the earlier diagnoses, have
    changed.

    A process that has raised counts as ended with status 1.
    """
    report, on_record = _report(job, member, own=True), job.record.diagnosed
    if report.exit is None and member.raised is not None:
        report = msgspec.structs.replace(report, exit=1)
    if member.weighed is None or member.weighed[:2] != (report, len(on_record)):
        earlier = [past for past in on_record if member.rank not in past.ranks]  # of a rank, that is this very end
        member.weighed = report, len(on_record), diagnose([report], earlier)
    return member.weighed[2]


def explain(job: Job) -> None:
    """Describe the incidents of a transition by their causes, and attribute consequences to their causes."""
    ended = [i for i in job.incidents if i.kind != "communication" and i.component != "node" and _members(job, i)]
    earlier = tuple(job.record.diagnosed)
    for incident in ended:
        first, *others = _members(job, incident)
        if others:
            incident.diagnosis = diagnose([_report(job, m, own=True) for m in (first, *others)], earlier)
        else:
            incident.diagnosis = _own_diagnosis(job, first)
    ended_by_node: dict[str, dict[int, Incident]] = {}
    for incident in ended:
        for member in _members(job, incident):
            ended_by_node.setdefault(member.node, {})[member.rank] = incident
    living: dict[str, list[Report]] = {}
    for member in job.members.values():
        if member.alive and member.node in ended_by_node:
            living.setdefault(member.node, []).append(_alive(member))
    for node in sorted(ended_by_node):
        _weigh_node(job, ended_by_node[node], living.get(node, []), earlier)
    same_errors.merge_same(job)
    roots = {id(incident): _members(job, incident) for incident in job.incidents}
    _merge(job)
    for incident in job.incidents:
        if incident.diagnosis is not None:
            _describe(roots[id(incident)], incident, incident.diagnosis)


# --- one node -----------------------------------------------------------------------------------------------------


def _weigh_node(job: Job, ended: dict[int, Incident], living: list[Report], earlier: tuple[Diagnosed, ...]) -> None:
    """Make the lines about a node as such the cause of one incident, if they are closer to a root cause than its own
    lines.

    `ended`: incidents of its ended ranks; `living`: reports of its live ranks.
    """
    diagnosis = diagnose([*(_report(job, job.members[rank]) for rank in sorted(ended)), *living], earlier)
    signature = signature_of(diagnosis.code)
    if diagnosis.secondary or signature is None or not signature.node_wide:
        return
    named_incidents = [ended[rank] for rank in diagnosis.ranks if rank in ended]
    in_order = sorted(ended.values(), key=lambda incident: (incident.found_at, min(incident.ranks)))
    related = [i for i in in_order if i.diagnosis is not None and _is_related(i.diagnosis, diagnosis)]
    unexplained = [i for i in in_order if not _has_own_cause(job, i)]
    target = next((i for i in named_incidents if i in related or i in unexplained), None)
    if target is None and not named_incidents and not related:
        target = next(iter(unexplained), None)
    if target is not None:
        target.diagnosis = diagnosis
    if target is not None or related:
        lines = {clue.line for rank in ended for clue in job.members[rank].clues if _is_of_node(clue)}
        (target or related[0]).explains |= lines


def _is_related(own: Diagnosis, diagnosis: Diagnosis) -> bool:
    """Return whether a process reported the trouble that its node has. A process that sees no GPU may have lost it."""
    return own.category == diagnosis.category or (own.code == NO_GPU.kind and diagnosis.category == "device")


def _has_own_cause(job: Job, incident: Incident) -> bool:
    """Return whether a cause was found without the lines about the node, or none is needed."""
    own = incident.diagnosis
    members = _members(job, incident)
    if own is None or incident.component == "device" or any(member.raised is not None for member in members):
        return True
    return own.secondary or any(_is_conclusive(own, member) for member in members)


def _is_of_node(clue: Clue) -> bool:
    signature = signature_of(clue.kind)
    return signature is not None and signature.node_wide


def _is_only_about(job: Job, member: Member, clue: Clue) -> bool:
    """Return whether a line is about this process and no other of its node."""
    if not _is_of_node(clue):
        return True
    if "pid" in clue.named:
        return clue.named["pid"] == str(member.pid)
    signature = signature_of(clue.kind)
    of_device = signature is not None and signature.component == "device"
    return of_device and job.nodes[member.node].devices == 1


# --- causes and consequences -----------------------------------------------------------------------------------------


def _merge(job: Job) -> None:
    """Merge failures that only followed from a lost peer into the first failure with a cause of its own.

    If there is none, and the script makes its own process groups, all of them become one failure, attributed to no
    node.
    """
    declared = job.has_declared
    roots, unsure = _roots(job, declared)
    if not roots and job.stage == "gathering" and not declared:
        roots = [i for i in job.incidents if _follows(job, i, declared)][:1]
        for first in roots:
            first.node = first.device = None
            if first.component == "process" and first.diagnosis is not None:
                first.cause = first.diagnosis.cause
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
    """Return the incidents with a cause of their own, and the `id` of connection failures that followed from one of
    them because they happened later."""
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
    """Return the time from which other ranks may have failed because of an incident; a lost node is noticed long after
    its consequences."""
    if incident.component == "node":
        return -math.inf
    return min((may_follow_from(member) for member in _members(job, incident)), default=incident.found_at)


def _failed_at(job: Job, incident: Incident) -> float:
    at = [member.failed_at for member in _members(job, incident) if member.failed_at is not None]
    return min([incident.found_at, *at]) if incident.component != "node" else incident.found_at


def _follows(job: Job, incident: Incident, declared: bool) -> bool:
    """Return whether an incident follows from another one. So does a process whose abort hung."""
    if _is_hung_abort(job, incident):
        return True
    diagnosis = incident.diagnosis
    return diagnosis is not None and diagnosis.secondary and _may_be_anothers(job, incident, declared)


def _may_be_anothers(job: Job, incident: Incident, declared: bool) -> bool:
    """Return whether the lines of an incident about another rank's end count. An exception in a script that trains with
    us is always its own: a lost peer does not reach such a script."""
    members = _members(job, incident)
    has_own_cause = any(_was_killed(member) or (member.raised is not None and declared) for member in members)
    return incident.component in _OF_A_PROCESS and not has_own_cause


def _is_hung_abort(job: Job, incident: Incident) -> bool:
    """Return whether it is a process that we ended because its communicators could not be aborted."""
    members = _members(job, incident)
    return bool(members) and all(member.exit_status == ABORT_STATUS for member in members)


# --- wording -------------------------------------------------------------------------------------------------------


def _describe(members: list[Member], incident: Incident, diagnosis: Diagnosis) -> None:
    """Describe an incident by its cause. `members`: the ranks that had the cause, without those that lost them as
    peers."""
    if not any(_is_conclusive(diagnosis, member) for member in members):
        return
    raised = any(member.raised is not None for member in members) and incident.condemned is None
    dead = incident.component == "device" and incident.condemned is None  # by an injected fault
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
    """Return the text with those lines below it that are not part of it."""
    return "\n".join((text, *(line for line in lines if line not in text)))[:MAX_EVIDENCE_CHARS]


def _is_conclusive(diagnosis: Diagnosis, member: Member) -> bool:
    """Return whether a line gives the cause, rather than just the exit, another rank's end, or a process that was
    killed."""
    if (
        not diagnosis.evidence
        or diagnosis.secondary
        or diagnosis.code in EXIT_ONLY_CODES
        or diagnosis.code.startswith("exit ")
    ):
        return False
    signature = signature_of(diagnosis.code)
    only_a_sign = signature is not None and signature.depth > Depth.EXIT
    return not (only_a_sign and member.exit_status == -signals.SIGKILL)


# --- reports ------------------------------------------------------------------------------------------------------


def _members(job: Job, incident: Incident) -> list[Member]:
    return [job.members[rank] for rank in sorted(incident.ranks) if rank in job.members]


def _report(job: Job, member: Member, own: bool = False) -> Report:
    """Return the report of one rank's end; with `own`, without lines that may be about other ranks of its node."""
    explained, killed_after_raising = job.record.explained.get(member.node, set()), _was_killed_after_raising(member)
    clues = [clue for clue in member.clues if not (_is_of_node(clue) and clue.line in explained)]
    if own:
        clues = [clue for clue in clues if _is_only_about(job, member, clue)]
    return Report(
        rank=member.rank,
        node=member.node,
        device=member.device,
        exit=1 if killed_after_raising else member.exit_status,
        pid=member.pid,
        clues=(*clues, *member.raised_clues),
        fenced="" if killed_after_raising else member.fenced or "",
    )


def _alive(member: Member) -> Report:
    """Return the report of a live rank of the same node: lines about the node may be about it as well."""
    return Report(rank=member.rank, node=member.node, device=member.device, pid=member.pid, ended=False)
