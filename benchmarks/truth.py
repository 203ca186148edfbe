"""What was told of a job, held against what is true of it: delays, false verdicts, and what confidence is worth.

Called by `worlds`. Truth is what `disturbances` expects to be told; what was told is the journal of the controller, and
the findings of its detector (`closed_loop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.closed_loop import Played
from benchmarks.disturbances import Expected
from resihp.detector.findings import Finding
from resihp.record.journal import FailureFound, Suspected

NEAR = 0.06
"""By how much a speed told anew may be off."""
BINS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)


@dataclass
class Judged:
    """One job, and what was said of it."""

    seed: int
    onset: int
    expected: list[Expected]
    played: Played
    node_ranks: dict[str, frozenset[int]]
    suspicions: int = 0
    healthy_suspicions: int = 0
    """Of these, the ones before anything was wrong."""
    false: list[str] = field(default_factory=list)
    delays: list[int | None] = field(default_factory=list)
    """Of each that was expected, None where it was not told."""
    found: list[int | None] = field(default_factory=list)
    """The same of the detector's findings."""

    def right(self, within: int) -> bool:
        return not self.false and all(delay is not None and delay <= within for delay in self.delays)


def judge(job: Judged) -> None:
    """Count what was said, and see whether it is so."""
    first: dict[int, int] = {}
    suspicions: set[Any] = set()
    for told in job.played.told:
        entry = told.entry
        if isinstance(entry, Suspected) and not entry.cleared:
            key = entry.suspicion or ("entry", len(suspicions))
            if key not in suspicions:
                suspicions.add(key)
                job.suspicions += 1
                job.healthy_suspicions += not job.expected or told.at < job.onset
        elif isinstance(entry, FailureFound) and entry.kind == "fail-slow":
            if not holds(job, entry, told.at):
                job.false.append(
                    f"iteration {told.at}: {entry.component} {entry.ranks}: {entry.cause}; {entry.evidence}"
                )
            for i, expected in enumerate(job.expected):
                if told.at >= expected.since and _meets(job, entry, expected):
                    first.setdefault(i, told.at - expected.since + 1)
    job.delays = [first.get(i) for i in range(len(job.expected))]
    job.found = [
        next(
            (at - one.since + 1 for at, finding in job.played.found if at >= one.since and _covers(finding, one)), None
        )
        for one in job.expected
    ]


def holds(job: Judged, entry: FailureFound, at: int) -> bool:
    """Whether a verdict is true: there is something of its kind, and it names nobody who is well."""
    ranks = named(job, entry)
    there = [one for one in job.expected if at >= job.onset and _alike(entry, one)]
    if entry.component == "job":
        return bool(there)
    true = frozenset().union(*(one.ranks for one in there))
    return bool(ranks) and ranks <= true


def named(job: Judged, entry: FailureFound) -> frozenset[int]:
    if entry.ranks:
        return frozenset(entry.ranks)
    return job.node_ranks.get(entry.node or "", frozenset())


def _alike(entry: FailureFound, expected: Expected) -> bool:
    return entry.component == expected.component or (entry.component == "node" and expected.component == "device")


def _meets(job: Judged, entry: FailureFound, expected: Expected) -> bool:
    if not _alike(entry, expected):
        return False
    if expected.speed is not None and abs((entry.speed or 1.0) / expected.speed - 1.0) > NEAR:
        return False
    ranks = named(job, entry)
    if expected.component == "device":
        return expected.ranks <= ranks
    return expected.component == "job" or bool(ranks & expected.ranks)


def true_finding(job: Judged, finding: Finding, at: int) -> bool:
    """Whether what the detector found is so: the first that it names, or that nobody stands out."""
    there = [one for one in job.expected if at >= job.onset]
    if finding.link is not None:
        return any(one.component == "link" and one.ranks == frozenset(finding.link) for one in there)
    if not finding.ranks:
        return any(one.component == "job" for one in there)
    alike = [one for one in there if one.component == finding.component]
    return any(finding.ranks[0] in one.ranks for one in alike)


def _covers(finding: Finding, expected: Expected) -> bool:
    """Whether the detector has found what is expected, or some of its ranks."""
    if finding.kind != "fail-slow":
        return False
    if finding.link is not None:
        return expected.component == "link" and frozenset(finding.link) == expected.ranks
    if expected.component == "job":
        return not finding.ranks
    return finding.component == expected.component and bool(expected.ranks & frozenset(finding.ranks))


# --- confidence ------------------------------------------------------------------------------------------------------


def reliability(console: Console, jobs: Sequence[Judged]) -> list[dict[str, Any]]:
    """How often what was told with a confidence was right."""
    found = [
        (one.confidence, true_finding(job, one, at))
        for job in jobs
        for at, one in job.played.found
        if one.kind == "fail-slow"
    ]
    verdicts = [
        (told.entry.confidence, holds(job, told.entry, told.at))
        for job in jobs
        for told in job.played.told
        if isinstance(told.entry, FailureFound) and told.entry.confidence is not None
    ]
    rows: list[dict[str, Any]] = []
    for name, pairs in (("findings", found), ("verdicts", verdicts)):
        if not pairs:
            continue
        told, right = np.array([[one, float(true)] for one, true in pairs]).T
        brier = float(np.mean((told - right) ** 2))
        shown = Table(title=f"Confidence of {len(pairs)} {name}, and how often it was right; Brier score {brier:.3f}")
        for column in ("told", "how many", "mean told", "right"):
            shown.add_column(column, justify="right")
        for i in range(len(BINS) - 1):
            low, high = BINS[i : i + 2]
            inside = (told >= low) & ((told < high) | (high == BINS[-1]))
            if not inside.any():
                continue
            mean, share = float(told[inside].mean()), float(right[inside].mean())
            shown.add_row(f"{low:g} to {high:g}", str(int(inside.sum())), f"{mean:.4f}", f"{share:.2f}")
            rows.append({"of": name, "from": low, "count": int(inside.sum()), "told": mean, "right": share})
        rows.append({"of": name, "brier": brier})
        console.print(shown)
    return rows
