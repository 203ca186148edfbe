"""Merge a script error that several ranks raised in one transition, each with its own text, into one failure.

"rank 3: bad batch 51" and "rank 4: bad batch 68" are the same error if they have the same type and were raised at the
same line of the script. Only failures that are attributed to the script anyway are merged. The merge decides neither
whether the job ends nor which ranks get work (`endings.same_error_everywhere` compares texts word for word). Called
by `root_causes`.
"""

from __future__ import annotations

import os
import re

from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.detector.diagnosis.signatures import USUALLY_THE_PROGRAM
from resihp.protocol.messages import Raised

MAX_NAMED_RANKS = 16
"""Largest number of other ranks that the evidence names."""
_FRAME = re.compile(r'^  File "([^"\n]{1,400})", line (\d{1,9})', re.MULTILINE)
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<|/resihp/")
_TRACEBACK_HEADER = "Traceback (most recent call last)"


def merge_same(job: Job) -> None:
    """Merge incidents that show the same error into the first of them."""
    firsts: dict[tuple[str, str, str, str], Incident] = {}
    united: dict[int, list[Incident]] = {}
    kept = []
    for incident in job.incidents:
        raised = _of_the_script(job, incident)
        where = _place(raised) if raised is not None else None
        if raised is None or where is None:
            kept.append(incident)
            continue
        key = (raised.error.partition(":")[0], incident.diagnosis.code if incident.diagnosis else "", *where)
        if key in firsts:
            united.setdefault(id(firsts[key]), []).append(incident)
        else:
            firsts[key] = incident
            kept.append(incident)
    for (kind, _, file, line), first in firsts.items():
        if others := united.get(id(first)):
            _merge(job, first, others, kind, f"{os.path.basename(file)}:{line}")
    job.incidents = kept


def _of_the_script(job: Job, incident: Incident) -> Raised | None:
    """Return the exception of an incident's rank if the script is the cause; None if a lost peer or a device may be.

    An exception because of storage or a service, which is attributed to no node, is returned as well.
    """
    diagnosis = incident.diagnosis
    of_the_script = incident.kind == "program" and incident.component == "script"
    of_no_node = incident.component == "process" and incident.node is None
    from_outside = diagnosis is not None and diagnosis.category in ("storage", "service") and of_no_node
    if not (of_the_script or from_outside) or incident.detect_s is not None:
        return None
    if diagnosis is not None and (diagnosis.secondary or diagnosis.code in USUALLY_THE_PROGRAM):
        return None
    exceptions = [job.members[rank].raised for rank in incident.ranks if rank in job.members]
    return exceptions[0] if len(exceptions) == 1 else None


def _place(raised: Raised) -> tuple[str, str] | None:
    """Return file and line of the innermost stack frame in the script itself, or in a library if there is none; None
    without any frame."""
    frames = _FRAME.findall(raised.traceback.rpartition(_TRACEBACK_HEADER)[2])
    own: list[tuple[str, str]] = [frame for frame in frames if not _LIBRARIES.search(frame[0])]
    return (own or frames or [None])[-1]


def _merge(job: Job, first: Incident, others: list[Incident], kind: str, place: str) -> None:
    (rank,) = first.ranks
    raised = job.members[rank].raised
    text = raised.error.partition(": ")[2] if raised is not None else ""
    for other in others:
        first.ranks |= other.ranks
        first.explains |= other.explains
    first.cause = f"{len(first.ranks)} ranks raised {kind} at {place}{f': {text}' if text else ''}"
    more = [f"and {len(others) - MAX_NAMED_RANKS} more"] if len(others) > MAX_NAMED_RANKS else []
    first.evidence = "\n".join((first.evidence, *(f"then {other.cause}" for other in others[:MAX_NAMED_RANKS]), *more))
    if first.diagnosis is not None:
        first.diagnosis = first.diagnosis.but(ranks=tuple(sorted(first.ranks)), node=None, device=None)
