"""Translates journal entries into lines of the site's audit (`resihp.wrapper.site_folders.audit`).

Only decisions that concern the cluster become lines: nodes left out or given back, drains, exclusions, replacements, a
requeue, the end of a job. Decides nothing. `resihp.wrapper.sinks.fanout` delivers the lines like events of a hook: in
the background, at least once, also after a take-over.
"""

from __future__ import annotations

from typing import NamedTuple

from resihp.record import journal
from resihp.wrapper.exit_codes import REQUEUE_REQUESTED
from resihp.wrapper.site_folders import audit

DECISION_ENTRIES: tuple[type[journal.Entry], ...] = (
    *(journal.NodeLost, journal.NodeReleased, journal.DrainDecided, journal.DrainAnswered),
    *(journal.ReplacementAsked, journal.ReplacementChanged, journal.JobEnded),
)
"""The entries that become lines."""
STEP_NAMES = {"slurm": "drain", "spool": "drain request", "exclusion": "exclusion"}
"""Name of the decision that each step of the drain ladder carries out."""


class _Summary(NamedTuple):
    decision: str
    outcome: str
    node: str | None
    reason: str
    exit_code: int | None = None


def line_of(cluster: str, job: str, record: journal.Record) -> bytes:
    """Return the line for a record of the journal, whose entry is one of `DECISION_ENTRIES`."""
    fields = _summary(record.entry)._asdict()
    return audit.line(
        audit.Decision(id=f"{cluster}:{job}:{record.seq}", at=record.at, cluster=cluster, job=job, **fields)
    )


def _summary(entry: journal.AnyEntry) -> _Summary:
    match entry:
        case journal.NodeLost():
            return _Summary("node left out", entry.how or "silent", entry.node, entry.reason)
        case journal.NodeReleased():
            return _Summary("node given back", entry.outcome, entry.node, entry.text)
        case journal.DrainDecided():
            decision = "drain" if entry.measure == "drain" else "exclusion"
            return _Summary(decision, "decided", entry.node, entry.reason)
        case journal.DrainAnswered():
            return _Summary(STEP_NAMES[entry.step], entry.outcome, entry.node, entry.text)
        case journal.ReplacementAsked():
            return _Summary("replacement", "asked", entry.node, f"replacement {entry.replacement}: {entry.reason}")
        case journal.ReplacementChanged():
            job = f" (Slurm job {entry.slurm_job})" if entry.slurm_job else ""
            text = f"replacement {entry.replacement}{job}: {entry.text}".removesuffix(": ")
            return _Summary("replacement", entry.state, entry.node, text)
        case journal.JobEnded(exit_code=code):
            if code == REQUEUE_REQUESTED:
                return _Summary("requeue", "asked", None, entry.reason, code)
            return _Summary("end", entry.state, None, entry.reason, code)
        case _:
            raise AssertionError(f"{type(entry).__name__}: no line for it")
