"""Why a process ended: what its log and its node's kernel said, weighed by the detector (`detector.diagnosis`).

Decides how a failure is told, and to whom it is laid; what follows from it is decided elsewhere. What only followed
from another rank's end becomes part of that failure. Without a telling line a failure stays as the exit tells it, and
what a rank raised is always told as it raised it. Never starts, ends or drains anything. Called by `failures` when a
process has ended, and by `incidents` before failures are logged.

Everybody who ends on a node brings the same kernel messages along. A line that names one of our processes counts for
that one; any other is weighed for all of the node that ended, together, and for one failure only: what was told by it
is remembered, and explains nothing later.
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
from resihp.detector.diagnosis.diagnosis import Diagnosis, Report, diagnose, read_log
from resihp.detector.diagnosis.signatures import CONNECTION_FAILED, EXCEPTION, NO_GPU, Depth, signature_of
from resihp.protocol.messages import ABORT_STATUS, Clue
from resihp.record.journal import Diagnosed

MOST_EVIDENCE = 6000
OUT_OF_ORDER_S = 1.0
"""Agents of different nodes may tell of a death this much later than of what it led to elsewhere."""
DEVICES_ERROR = "AcceleratorError"
"""What torch calls an error of CUDA's since 2.8; a RuntimeError before."""
_OF_A_PROCESS = ("process", "script")
OUTSIDE = frozenset({"storage", "service"})
"""Categories of what is neither a script's doing nor a node's."""
THE_PROGRAMS = frozenset({"program", "memory", "unknown"})
"""Categories of what a script may have done itself."""
ENDS = ("unknown", "fenced", "gone", "node lost")
"""Codes of diagnoses that rest on how a process ended alone; beside these `exit N`."""


def condemns_its_device(job: Job, member: Member) -> bool:
    """Whether a process that has just ended leaves a dead device, by its own words or by a line about it alone.

    What a line says that may be about another device of the node is left to `explain`, which hears all. A process that
    sees no GPU may have a wrong setting: a line of the kernel's about a device of that node decides it.
    """
    found = _own(job, member)
    if found.code == NO_GPU.kind and not _others_see_none(job, member):
        found = diagnose([_report(job, member)])
    located = (found.node, found.device) == (member.node, member.device)
    return found.category == "device" and found.blames_node and located and _is_telling(found, member)


def _others_see_none(job: Job, member: Member) -> bool:
    """Whether another process of the same node saw no GPU either."""
    others = [other for other in job.members.values() if other is not member and other.node == member.node]
    return any(_own(job, other).code == NO_GPU.kind for other in others if other.failed_at is not None)


def failed_on_its_device(job: Job, member: Member) -> bool:
    """Whether what a rank raised came from its device, and nothing says that the program asked the device for it."""
    raised = member.raised is not None and member.raised.error.startswith(DEVICES_ERROR)
    return raised and _own(job, member).category not in ("program", "memory")


def is_from_outside(job: Job, rank: int) -> bool:
    """Whether storage, or a service that its script asks, is why a rank failed: neither the script nor its node."""
    return _kind_of_end(job, rank)[0] in OUTSIDE


def may_pass(job: Job, rank: int) -> bool:
    """Whether another run may do well, with the same script on the same nodes: also where a connection failed.

    Without a traceback nothing tells whether that was one to a service.
    """
    category, code = _kind_of_end(job, rank)
    member = job.members[rank]
    is_traced = member.raised is None or any(clue.raised for clue in member.raised_clues)
    return category in OUTSIDE or (code == CONNECTION_FAILED.kind and is_traced)


def may_be_the_programs(job: Job, rank: int) -> bool:
    """Whether what a rank failed of could be its script's doing. A device or a peer that it lost never is."""
    return not may_pass(job, rank) and _kind_of_end(job, rank)[0] in THE_PROGRAMS


def lost_a_peer(job: Job, rank: int) -> bool:
    """Whether a rank failed of a connection to others of its process group, and of nothing else."""
    return _kind_of_end(job, rank)[0] in ("secondary", "link")


def advice(job: Job, rank: int) -> str:
    """What to do about the end of a rank."""
    signature = signature_of(_kind_of_end(job, rank)[1])
    return signature.advice if signature is not None else _own(job, job.members[rank]).advice


def log_lines(job: Job, rank: int) -> tuple[str, ...]:
    """The lines of its log by which a rank's end is told."""
    return _own(job, job.members[rank]).evidence


def _kind_of_end(job: Job, rank: int) -> tuple[str, str]:
    """Category and code of what a rank raised, whatever its log says besides; without that, of how it ended."""
    member = job.members[rank]
    if member.raised is None:
        found = _own(job, member)
        return found.category, found.code
    signature = kind_of_raised(member.raised_clues)
    if signature is None:
        signature = (
            kind_of_raised(read_log(f"Traceback (most recent call last):\n{member.raised.error}\n")) or EXCEPTION
        )
    return signature.category, signature.kind


def note_failed(job: Job, member: Member) -> None:
    """A process has raised, or ended: when, and whether for another one's end."""
    if member.failed_at is None:
        member.failed_at = job.now
    member.follows = _words_tell(job, member)


def _words_tell(job: Job, member: Member) -> Follows:
    """Nobody kills itself with SIGKILL for a lost peer: what such a process wrote of peers is of another time. One that
    has raised may take its time to end. A connection that was refused may have been one to a peer, or to a service."""
    if _was_killed(member):
        return "never"
    found = _own(job, member)
    if found.secondary:
        return "surely"
    if found.code == CONNECTION_FAILED.kind:
        return "perhaps"
    signature = signature_of(found.code)
    return "never" if signature is not None and signature.depth <= Depth.REPORTED else ""


def _was_killed(member: Member) -> bool:
    """Also by us; but one that had raised was killed only for taking too long to end."""
    return member.exit_status == -signals.SIGKILL and not _was_hurried(member)


def _was_hurried(member: Member) -> bool:
    return member.raised is not None and member.fenced is not None


def may_follow_from(member: Member) -> float:
    """From when on a connection may have failed for this one's end."""
    at = member.failed_at if member.failed_at is not None else -math.inf
    return at - OUT_OF_ORDER_S if member.follows == "never" else at


def own_words(job: Job, member: Member) -> str:
    """Why a process ended, as far as it said so itself."""
    return _own(job, member).cause


def _own(job: Job, member: Member) -> Diagnosis:
    """The verdict on one process alone: asked for at each step from what it raised to the failure's entry, and weighed
    anew if anything of it, or of what came before, has changed. One that has raised ends with status 1."""
    report, on_record = _report(job, member, own=True), job.record.diagnosed
    if report.exit is None and member.raised is not None:
        report = msgspec.structs.replace(report, exit=1)
    if member.weighed is None or member.weighed[:2] != (report, len(on_record)):
        earlier = [past for past in on_record if member.rank not in past.ranks]  # of a rank, that is this very end
        member.weighed = report, len(on_record), diagnose([report], earlier)
    return member.weighed[2]


def explain(job: Job) -> None:
    """Tell the incidents of a transition by their causes, and lay what follows from another one to that."""
    ended = [i for i in job.incidents if i.kind != "communication" and i.component != "node" and _members(job, i)]
    earlier = tuple(job.record.diagnosed)
    for incident in ended:
        first, *others = _members(job, incident)
        if others:
            incident.diagnosis = diagnose([_report(job, m, own=True) for m in (first, *others)], earlier)
        else:
            incident.diagnosis = _own(job, first)
    gone: dict[str, dict[int, Incident]] = {}
    for incident in ended:
        for member in _members(job, incident):
            gone.setdefault(member.node, {})[member.rank] = incident
    living: dict[str, list[Report]] = {}
    for member in job.members.values():
        if member.alive and member.node in gone:
            living.setdefault(member.node, []).append(_alive(member))
    for node in sorted(gone):
        _weigh_node(job, gone[node], living.get(node, []), earlier)
    same_errors.unite(job)
    roots = {id(incident): _members(job, incident) for incident in job.incidents}
    _merge(job)
    for incident in job.incidents:
        if incident.diagnosis is not None:
            _tell(roots[id(incident)], incident, incident.diagnosis)


# --- one node -----------------------------------------------------------------------------------------------------


def _weigh_node(job: Job, gone: dict[int, Incident], living: list[Report], earlier: tuple[Diagnosed, ...]) -> None:
    """What was said of a node as such becomes the cause of one incident, if it is nearer to a root than its own.
    `gone`, `living`: of its ranks."""
    found = diagnose([*(_report(job, job.members[rank]) for rank in sorted(gone)), *living], earlier)
    signature = signature_of(found.code)
    if found.secondary or signature is None or not signature.node_wide:
        return
    named = [gone[rank] for rank in found.ranks if rank in gone]
    here = sorted(gone.values(), key=lambda incident: (incident.found_at, min(incident.ranks)))
    akin = [i for i in here if i.diagnosis is not None and _is_akin(i.diagnosis, found)]
    bare = [i for i in here if not _has_its_own(job, i)]
    target = next((i for i in named if i in akin or i in bare), None)
    if target is None and not named and not akin:
        target = next(iter(bare), None)
    if target is not None:
        target.diagnosis = found
    if target is not None or akin:
        lines = {clue.line for rank in gone for clue in job.members[rank].clues if _is_of_node(clue)}
        (target or akin[0]).explains |= lines


def _is_akin(own: Diagnosis, found: Diagnosis) -> bool:
    """Whether a process told of the trouble that its node has. One that sees no GPU may have lost it."""
    return own.category == found.category or (own.code == NO_GPU.kind and found.category == "device")


def _has_its_own(job: Job, incident: Incident) -> bool:
    """Whether a cause was found without what was said of the node, or none is looked for."""
    own = incident.diagnosis
    members = _members(job, incident)
    if own is None or incident.component == "device" or any(member.raised is not None for member in members):
        return True
    return own.secondary or any(_is_telling(own, member) for member in members)


def _is_of_node(clue: Clue) -> bool:
    signature = signature_of(clue.kind)
    return signature is not None and signature.node_wide


def _is_surely_of(job: Job, member: Member, clue: Clue) -> bool:
    """Whether a line is about this process, and no other of its node."""
    if not _is_of_node(clue):
        return True
    if "pid" in clue.named:
        return clue.named["pid"] == str(member.pid)
    signature = signature_of(clue.kind)
    of_device = signature is not None and signature.component == "device"
    return of_device and job.nodes[member.node].devices == 1


# --- what follows from what ---------------------------------------------------------------------------------------


def _merge(job: Job) -> None:
    """Who only lost a peer is part of the first failure that has a cause; where there is none, and a script makes
    process groups of its own, all of them are one failure, which is laid to no node."""
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
    """Those that have a cause of their own, and which others (their `id`) are connections that failed for one of them:
    those that failed after it."""
    sure: list[Incident] = []
    unsure: list[Incident] = []
    for incident in job.incidents:
        found = incident.diagnosis
        if incident.component == "node" or (found and not found.secondary and not _is_hung_abort(job, incident)):
            perhaps = found is not None and found.code == CONNECTION_FAILED.kind
            (unsure if perhaps and _may_be_anothers(job, incident, declared) else sure).append(incident)
    since = min((_may_follow_from(job, incident) for incident in sure), default=math.inf)
    first = [incident for incident in unsure if _failed_at(job, incident) < since]
    return [*sure, *first], {id(incident) for incident in unsure} - {id(incident) for incident in first}


def _may_follow_from(job: Job, incident: Incident) -> float:
    """A node's loss is noticed long after what it led to."""
    if incident.component == "node":
        return -math.inf
    return min((may_follow_from(member) for member in _members(job, incident)), default=incident.found_at)


def _failed_at(job: Job, incident: Incident) -> float:
    at = [member.failed_at for member in _members(job, incident) if member.failed_at is not None]
    return min([incident.found_at, *at]) if incident.component != "node" else incident.found_at


def _follows(job: Job, incident: Incident, declared: bool) -> bool:
    """An abort that hangs is another's end as well."""
    if _is_hung_abort(job, incident):
        return True
    found = incident.diagnosis
    return found is not None and found.secondary and _may_be_anothers(job, incident, declared)


def _may_be_anothers(job: Job, incident: Incident, declared: bool) -> bool:
    """Whether its words count that tell of another's end. What a script raised that trains with us is always its own:
    there a lost peer reaches no script."""
    members = _members(job, incident)
    own = any(_was_killed(member) or (member.raised is not None and declared) for member in members)
    return incident.component in _OF_A_PROCESS and not own


def _is_hung_abort(job: Job, incident: Incident) -> bool:
    """Whether it is a process that we had end, since its communicators could not be aborted."""
    members = _members(job, incident)
    return bool(members) and all(member.exit_status == ABORT_STATUS for member in members)


# --- how it is told -----------------------------------------------------------------------------------------------


def _tell(members: list[Member], incident: Incident, found: Diagnosis) -> None:
    """Tell an incident by its cause. `members`: those that had it, without their victims, who raise for lost peers."""
    if not any(_is_telling(found, member) for member in members):
        return
    raised = any(member.raised is not None for member in members) and incident.condemned is None
    dead = incident.component == "device" and incident.condemned is None  # by a fault injected
    if raised or dead:
        incident.evidence = _joined(incident.evidence, found.evidence)
        return
    incident.cause = found.cause
    incident.evidence = _joined("\n".join(found.evidence), incident.evidence.splitlines())
    if found.advice:
        incident.evidence += f"\nnext: {found.advice}"
    if found.category == "program":
        incident.kind = "program"
    if found.blames_node and found.node is not None:
        incident.component, incident.node = found.component, found.node
        incident.device = found.device if found.component == "device" else None
    else:
        incident.component = "process" if found.component in ("device", "node") else found.component
        incident.node, incident.device = None, None


def _joined(text: str, lines: Iterable[str]) -> str:
    """The text, and below it those lines that are not in it."""
    return "\n".join((text, *(line for line in lines if line not in text)))[:MOST_EVIDENCE]


def _is_telling(found: Diagnosis, member: Member) -> bool:
    """Whether a line says why, and not just the exit, or somebody else's end, or a process that somebody killed."""
    if not found.evidence or found.secondary or found.code in ENDS or found.code.startswith("exit "):
        return False
    signature = signature_of(found.code)
    only_a_sign = signature is not None and signature.depth > Depth.EXIT
    return not (only_a_sign and member.exit_status == -signals.SIGKILL)


# --- reports ------------------------------------------------------------------------------------------------------


def _members(job: Job, incident: Incident) -> list[Member]:
    return [job.members[rank] for rank in sorted(incident.ranks) if rank in job.members]


def _report(job: Job, member: Member, own: bool = False) -> Report:
    """One rank's end; with `own`, without what may be about others of its node."""
    explained, hurried = job.record.explained.get(member.node, set()), _was_hurried(member)
    clues = [clue for clue in member.clues if not (_is_of_node(clue) and clue.line in explained)]
    if own:
        clues = [clue for clue in clues if _is_surely_of(job, member, clue)]
    return Report(
        rank=member.rank,
        node=member.node,
        device=member.device,
        exit=1 if hurried else member.exit_status,
        pid=member.pid,
        clues=(*clues, *member.raised_clues),
        fenced="" if hurried else member.fenced or "",
    )


def _alive(member: Member) -> Report:
    """Somebody of the same node who lives: what was said there may be about that one as well."""
    return Report(rank=member.rank, node=member.node, device=member.device, pid=member.pid, ended=False)
