"""One error of the script that several ranks raised in one transition, each with a text of its own: one failure.

"rank 3: bad batch 51" and "rank 4: bad batch 68" are the same error if they are of one type and were raised for the
same line of the script. Only failures that are the script's anyway become one: whether the job ends, and who has work,
is decided without (`incidents.same_error_everywhere` takes for the same what is so word for word). Called by
`root_causes`.
"""

from __future__ import annotations

import os
import re

from resihp.controller.state.incidents import Incident
from resihp.controller.state.job import Job
from resihp.detector.diagnosis.signatures import USUALLY_THE_PROGRAM
from resihp.protocol.messages import Raised

MOST_NAMED = 16
"""So many others are named in the evidence."""
_FRAME = re.compile(r'^  File "([^"\n]{1,400})", line (\d{1,9})', re.MULTILINE)
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<|/resihp/")
_BEGINS = "Traceback (most recent call last)"


def unite(job: Job) -> None:
    """Incidents that are the same error become the first of them."""
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
            _tell(job, first, others, kind, f"{os.path.basename(file)}:{line}")
    job.incidents = kept


def _of_the_script(job: Job, incident: Incident) -> Raised | None:
    """What its rank raised, if that is nothing but the script's error: no lost peer's, and no device's if it recurs.

    Or what storage or a service did to it, of which no node is to blame.
    """
    found = incident.diagnosis
    of_the_script = incident.kind == "program" and incident.component == "script"
    of_no_node = incident.component == "process" and incident.node is None
    from_outside = found is not None and found.category in ("storage", "service") and of_no_node
    if not (of_the_script or from_outside) or incident.detect_s is not None:
        return None
    if found is not None and (found.secondary or found.code in USUALLY_THE_PROGRAM):
        return None
    told = [job.members[rank].raised for rank in incident.ranks if rank in job.members]
    return told[0] if len(told) == 1 else None


def _place(raised: Raised) -> tuple[str, str] | None:
    """File and line of the script's innermost frame, or of a library's where there is none."""
    frames = _FRAME.findall(raised.traceback.rpartition(_BEGINS)[2])
    own: list[tuple[str, str]] = [frame for frame in frames if not _LIBRARIES.search(frame[0])]
    return (own or frames or [None])[-1]


def _tell(job: Job, first: Incident, others: list[Incident], kind: str, place: str) -> None:
    (rank,) = first.ranks
    raised = job.members[rank].raised
    text = raised.error.partition(": ")[2] if raised is not None else ""
    for other in others:
        first.ranks |= other.ranks
        first.explains |= other.explains
    first.cause = f"{len(first.ranks)} ranks raised {kind} at {place}{f': {text}' if text else ''}"
    more = [f"and {len(others) - MOST_NAMED} more"] if len(others) > MOST_NAMED else []
    first.evidence = "\n".join((first.evidence, *(f"then {other.cause}" for other in others[:MOST_NAMED]), *more))
    if first.diagnosis is not None:
        first.diagnosis = first.diagnosis.but(ranks=tuple(sorted(first.ranks)), node=None, device=None)
