"""Determine the cause of one process's end from its own log and from its node's kernel messages (`detector.diagnosis`).

Decides whether a process condemns its device, whether its end followed from another rank's end, and whether the script
may be the cause; the consequences are decided elsewhere. Without a significant log line, a failure is described by the
exit status alone. An exception is always reported as it was raised. `root_causes` judges the ends of several ranks
together. Called by `failures`, `early_losses`, `incidents`, `joins` and `root_causes`.

All processes that end on a node report the same kernel messages. A line that names one of the job's processes counts
for that process; other lines are left to `root_causes`.
"""

from __future__ import annotations

import math
import signal as signals

import msgspec

from resihp.controller.state.job import Job
from resihp.controller.state.members import Follows, Member
from resihp.detector.diagnosis.candidates import kind_of_raised
from resihp.detector.diagnosis.diagnosis import Diagnosis, Report, diagnose, read_log
from resihp.detector.diagnosis.signatures import CONNECTION_FAILED, EXCEPTION, NO_GPU, Depth, signature_of
from resihp.protocol.messages import Clue
from resihp.words import count_of

OUT_OF_ORDER_S = 1.0
"""Seconds by which the report of a death may arrive after the reports of its consequences on other nodes."""
DEVICE_ERROR_CLASS = "AcceleratorError"
"""Torch's class for a CUDA error since version 2.8; a RuntimeError before."""
OUTSIDE_CATEGORIES = frozenset({"storage", "service"})
"""Categories of causes outside the script and the nodes."""
PROGRAM_CATEGORIES = frozenset({"program", "memory", "unknown"})
"""Categories of causes for which the script itself may be responsible."""
EXIT_ONLY_CODES = ("unknown", "fenced", "gone", "node lost")
"""Codes of diagnoses that are based only on the exit status of a process; so are codes of the form `exit N`."""


def condemns_its_device(job: Job, member: Member) -> bool:
    """Return whether a process that has just ended shows that its device is dead, by its own log lines or by a kernel
    line about this device alone.

    Lines that may be about another device of the node are left to `root_causes.explain`, which has all reports. A
    process that sees no GPU may have a wrong setting, so a kernel line about a device of the node is required as well.
    """
    diagnosis = own_diagnosis(job, member)
    if diagnosis.code == NO_GPU.kind and not _others_see_none(job, member):
        diagnosis = diagnose([report_of(job, member)])
    located = (diagnosis.node, diagnosis.device) == (member.node, member.device)
    return diagnosis.category == "device" and diagnosis.blames_node and located and is_conclusive(diagnosis, member)


def _others_see_none(job: Job, member: Member) -> bool:
    """Return whether another process on the same node saw no GPU either."""
    others = [other for other in job.members.values() if other is not member and other.node == member.node]
    return any(own_diagnosis(job, other).code == NO_GPU.kind for other in others if other.failed_at is not None)


def failed_on_its_device(job: Job, member: Member) -> bool:
    """Return whether a rank's exception came from its device, without a sign that the program caused it."""
    raised = member.raised is not None and member.raised.error.startswith(DEVICE_ERROR_CLASS)
    return raised and own_diagnosis(job, member).category not in ("program", "memory")


def is_from_outside(job: Job, rank: int) -> bool:
    """Return whether storage, or a service that the script uses, made a rank fail, rather than the script or the
    node."""
    return _kind_of_end(job, rank)[0] in OUTSIDE_CATEGORIES


def may_pass(job: Job, rank: int) -> bool:
    """Return whether another run of the same script may succeed on the same nodes. This includes a failed connection.

    A failed connection does not count if the exception was reported without its traceback, because it is then not known
    whether the connection was one to a service.
    """
    category, code = _kind_of_end(job, rank)
    member = job.members[rank]
    is_traced = member.raised is None or any(clue.raised for clue in member.raised_clues)
    return category in OUTSIDE_CATEGORIES or (code == CONNECTION_FAILED.kind and is_traced)


def may_be_the_program(job: Job, rank: int) -> bool:
    """Return whether the script may have caused a rank's failure. It never causes a lost device or a lost peer."""
    return not may_pass(job, rank) and _kind_of_end(job, rank)[0] in PROGRAM_CATEGORIES


def lost_a_peer(job: Job, rank: int) -> bool:
    """Return whether a rank failed only because its connection to other ranks of its process group broke."""
    return _kind_of_end(job, rank)[0] in ("secondary", "link")


def advice(job: Job, rank: int) -> str:
    """Return the advice to the user about a rank's end."""
    signature = signature_of(_kind_of_end(job, rank)[1])
    return signature.advice if signature is not None else own_diagnosis(job, job.members[rank]).advice


def log_lines(job: Job, rank: int) -> tuple[str, ...]:
    """Return the lines of a rank's log that show the cause of its end."""
    return own_diagnosis(job, job.members[rank]).evidence


def _kind_of_end(job: Job, rank: int) -> tuple[str, str]:
    """Return (category, code) of a rank's exception, regardless of other lines in its log. Without an exception, return
    those of its end."""
    member = job.members[rank]
    if member.raised is None:
        diagnosis = own_diagnosis(job, member)
        return diagnosis.category, diagnosis.code
    signature = kind_of_raised(member.raised_clues)
    if signature is None:
        signature = (
            kind_of_raised(read_log(f"Traceback (most recent call last):\n{member.raised.error}\n")) or EXCEPTION
        )
    return signature.category, signature.kind


def note_failed(job: Job, member: Member) -> None:
    """Note that a process raised an exception or ended: the time, and whether another rank's end was the cause."""
    if member.failed_at is None:
        member.failed_at = job.now
    member.follows = _follows_another(job, member)


def _follows_another(job: Job, member: Member) -> Follows:
    """Return whether a rank failed because of another rank's end, judged by its log.

    A process never kills itself with SIGKILL because of a lost peer, so a line about peers in the log of a killed
    process is outdated. A process may take a while to end after it has raised an exception. A refused connection may
    have been one to a peer or to a service.
    """
    if was_killed(member):
        return "never"
    diagnosis = own_diagnosis(job, member)
    if diagnosis.secondary:
        return "surely"
    if diagnosis.code == CONNECTION_FAILED.kind:
        return "perhaps"
    signature = signature_of(diagnosis.code)
    return "never" if signature is not None and signature.depth <= Depth.REPORTED else ""


def was_killed(member: Member) -> bool:
    """Return whether a process was killed, by resihp or by others. A process that had raised an exception and was
    killed only because it ended too slowly does not count."""
    return member.exit_status == -signals.SIGKILL and not _was_killed_after_raising(member)


def _was_killed_after_raising(member: Member) -> bool:
    return member.raised is not None and member.fenced is not None


def may_follow_from(member: Member) -> float:
    """Return the earliest time at which a connection of another rank may have failed because of this rank's end."""
    at = member.failed_at if member.failed_at is not None else -math.inf
    return at - OUT_OF_ORDER_S if member.follows == "never" else at


def reported_cause(job: Job, member: Member) -> str:
    """Return the cause of a process's end in words, as far as its own log shows it."""
    return own_diagnosis(job, member).cause


def own_diagnosis(job: Job, member: Member) -> Diagnosis:
    """Return the diagnosis of one process alone. It is computed again only if the process's reports or the earlier
    diagnoses have changed.

    A process that has raised an exception counts as ended with status 1.
    """
    report, on_record = report_of(job, member, own=True), job.record.diagnosed
    if report.exit is None and member.raised is not None:
        report = msgspec.structs.replace(report, exit=1)
    if member.weighed is None or member.weighed[:2] != (report, len(on_record)):
        earlier = [past for past in on_record if member.rank not in past.ranks]  # those with the rank are this end
        member.weighed = report, len(on_record), diagnose([report], earlier)
    return member.weighed[2]


def is_conclusive(diagnosis: Diagnosis, member: Member) -> bool:
    """Return whether a diagnosis rests on a log line that shows the cause, and not just on the exit, on another rank's
    end, or on the kill of the process."""
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


def report_of(job: Job, member: Member, own: bool = False) -> Report:
    """Return the report of one rank's end. `own`: leave out lines that may be about other ranks of the node."""
    explained, killed_after_raising = job.record.explained.get(member.node, set()), _was_killed_after_raising(member)
    clues = [clue for clue in member.clues if not (is_about_node(clue) and clue.line in explained)]
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


def report_of_living(member: Member) -> Report:
    """Return the report of a live rank of a node with ended ranks, because lines about the node may be about this rank
    as well."""
    return Report(rank=member.rank, node=member.node, device=member.device, pid=member.pid, ended=False)


def is_about_node(clue: Clue) -> bool:
    """Return whether a line is about the node itself, so that all processes of the node report it."""
    signature = signature_of(clue.kind)
    return signature is not None and signature.node_wide


def _is_only_about(job: Job, member: Member, clue: Clue) -> bool:
    """Return whether a log line is about this process alone, and about no other process of its node."""
    if not is_about_node(clue):
        return True
    if "pid" in clue.named:
        return clue.named["pid"] == str(member.pid)
    signature = signature_of(clue.kind)
    of_device = signature is not None and signature.component == "device"
    return of_device and job.nodes[member.node].devices == 1


def ended_early(job: Job) -> list[int]:
    """Return the ranks that exited with status 0. They are the cause if all other ends follow from a lost peer."""
    return [rank for rank, status in job.record.unexplained.items() if status == 0]


def ended_early_cause(ranks: list[int]) -> str:
    """Return the end of such ranks, in words."""
    more = f", and {count_of(len(ranks) - 1, 'more rank')}" if len(ranks) > 1 else ""
    return f"exited with status 0{more}, while other ranks still waited for it"
