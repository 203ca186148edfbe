"""Compute the figures of a job from the raw rows of its ledger, by the definitions in docs/post-mortem.md.

An independent second program: it imports nothing of ours, and goes by plain loops over gaps between commits. Only for
local jobs: their devices are held from the start to the end. What `test_figures.py` compares with.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]

CAUSES = ("start", "detect", "reconfigure", "redo", "rollback", "slow", "idle", "capacity", "checkpoint", "other")


def seconds_of(text: str | None) -> float | None:
    """Seconds since 1970 of a time as SQLite has it."""
    if text is None:
        return None
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@dataclass
class Rows:
    """Raw rows of one job; columns that are times are seconds since 1970."""

    job: Row
    iterations: list[Row]
    plans: dict[int, Row]
    failures: list[Row]
    reconfigurations: list[Row]
    checkpoints: set[int]


def read(ledger: Path, name: str) -> Rows:
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as book:
        book.row_factory = sqlite3.Row

        def ask(query: str, *arguments: object) -> list[Row]:
            rows = [dict(row) for row in book.execute(query, arguments)]
            for row in rows:
                for column in row:
                    if column.endswith("_at"):
                        row[column] = seconds_of(row[column])
            return rows

        [job] = ask("SELECT * FROM jobs WHERE name = ?", name)
        of = job["id"]
        assert not ask("SELECT * FROM nodes WHERE job_id = ? AND released_at IS NOT NULL", of)
        return Rows(
            job=job,
            iterations=ask("SELECT * FROM iterations WHERE job_id = ? ORDER BY iteration", of),
            plans={row["epoch"]: row for row in ask("SELECT * FROM plans WHERE job_id = ? ORDER BY epoch", of)},
            failures=ask("SELECT * FROM failures WHERE job_id = ? ORDER BY failure", of),
            reconfigurations=ask("SELECT * FROM reconfigurations WHERE job_id = ? ORDER BY epoch", of),
            checkpoints={row["iteration"] for row in ask("SELECT iteration FROM checkpoints WHERE job_id = ?", of)},
        )


# --- one failure ----------------------------------------------------------------------------------------------------


def failed_at(failure: Row) -> float:
    return failure["noticed_at"] if failure["failed_at"] is None else failure["failed_at"]


def times_of(rows: Rows, failure: Row) -> Row:
    """What `history failures` tells of its recovery."""
    back = [row["finished_at"] for row in rows.reconfigurations if row["epoch"] == failure["recovered_epoch"]]
    return {
        "seconds_to_recover": back[0] - failed_at(failure) if back else None,
        "seconds_without_noticing": back[0] - failure["noticed_at"] if back else None,
        "noticed_after_seconds": (
            None if failure["failed_at"] is None else failure["noticed_at"] - failure["failed_at"]
        ),
    }


def recoveries(rows: Rows) -> dict[int, Row]:
    """By epoch: what failed first, what was noticed first, and when training was back."""
    found = {}
    for change in rows.reconfigurations:
        mended = [row for row in rows.failures if row["recovered_epoch"] == change["epoch"]]
        if mended:
            began = min(failed_at(row) for row in mended)
            noticed = min(row["noticed_at"] for row in mended)
            found[change["epoch"]] = {
                "action": change["action"],
                "seconds_to_recover": change["finished_at"] - began,
                "noticed_after": noticed - began,
                "without_noticing": change["finished_at"] - noticed,
            }
    return found


# --- where the time went --------------------------------------------------------------------------------------------


@dataclass
class Gap:
    """From one commit to the next one; the first from the beginning of the first iteration, the last to the end."""

    begin: float
    end: float
    took: float
    """Of the iteration at its end, what counts."""
    shares: dict[str, float]
    """What its time went to."""

    @property
    def free(self) -> float:
        return max(self.end - self.begin - sum(self.shares.values()), 0.0)


def counted_seconds(iterations: list[Row]) -> list[float]:
    """An iteration counts from the last commit on, or from as much earlier as that one came late under its plan."""
    counted, late = [], 0.0
    for place, row in enumerate(iterations):
        if place == 0:
            counted.append(row["seconds"])
            continue
        before = iterations[place - 1]
        passed = row["finished_at"] - before["finished_at"]
        assert passed >= 0.0, "no recorded clock was set back"
        counts = min(row["seconds"], passed + late)
        counted.append(counts)
        if passed < row["seconds"] / 2:
            late += passed - counts
        else:
            late = max(passed - row["seconds"], 0.0) if row["epoch"] == before["epoch"] else 0.0
    return counted


def asked_devices(job: Row) -> int:
    spares = (json.loads(job["configuration"] or "{}").get("slurm") or {}).get("spares") or 0
    return int((job["nodes"] - spares) * job["gpus_per_node"])


def slowness(rows: Rows) -> list[int | None]:
    """For each iteration the first one of the oldest slowness that has work in it; None where all was well."""
    found: list[int | None] = []
    slow = [row for row in rows.failures if row["kind"] == "fail-slow"]
    for row in rows.iterations:
        number, epoch = row["iteration"], row["epoch"]
        idle = set(json.loads(rows.plans[epoch]["unaffected_by"] or "[]"))
        idle |= {failure["failure"] for failure in slow if failure["idle"] and failure["epoch"] == epoch}
        at_work = [
            failure["iteration"]
            for failure in slow
            if failure["iteration"] <= number
            and (failure["ended_iteration"] is None or failure["ended_iteration"] > number)
            and failure["failure"] not in idle
        ]
        found.append(min(at_work, default=None))
    return found


def healthy_seconds(rows: Rows) -> list[float | None]:
    """What each slow iteration takes where all is well; None of those that are not slow, or of which nobody knows."""
    onsets = slowness(rows)
    both = list(zip(rows.iterations, onsets, strict=True))
    well = [row for row, onset in both if onset is None]
    ratios = [row["seconds"] / row["predicted_seconds"] for row in well if row["predicted_seconds"]]
    off = statistics.median(ratios) if len(ratios) >= 3 else 1.0
    if 1 / 1.2 <= off <= 1.2:
        off = 1.0
    per_token: dict[int, list[float]] = {}
    for row in well:
        per_token.setdefault(rows.plans[row["epoch"]]["active"], []).append(row["seconds"] / row["tokens"])
    epochs = {row["iteration"]: row["epoch"] for row in rows.iterations}
    found: list[float | None] = []
    for row, onset in both:
        rates = per_token.get(rows.plans[row["epoch"]]["active"])
        if onset is None:
            found.append(None)
        elif row["predicted_seconds"] is not None and (
            rates is None or epochs.get(onset, row["epoch"]) == row["epoch"]
        ):
            found.append(row["predicted_seconds"] * off)
        else:
            found.append(None if rates is None else statistics.median(rates) * row["tokens"])
    return found


def work(rows: Rows, again: set[int]) -> list[Row]:
    """What the time of each iteration went to."""
    took = counted_seconds(rows.iterations)
    excess = [
        seconds - (seconds if healthy is None else healthy)
        for seconds, healthy in zip(took, healthy_seconds(rows), strict=True)
    ]
    slower = [min(max(more, 0.0), seconds) for more, seconds in zip(excess, took, strict=True)]
    # Some were faster than healthy: what was slow is what is left of all together.
    part = max(sum(excess), 0.0) / sum(slower) if sum(slower) > 0.0 else 0.0
    asked = asked_devices(rows.job)
    found = []
    for row, seconds, more in zip(rows.iterations, took, slower, strict=True):
        plan = rows.plans[row["epoch"]]
        missing = max(asked - plan["active"], 0)
        idle = min(missing, plan["standby"])
        shares = {
            "idle": seconds * idle / asked,
            "capacity": seconds * (missing - idle) / asked,
            "slow": more * part * (1 - missing / asked),
        }
        left = max(seconds - sum(shares.values()), 0.0)
        shares["rollback" if row["iteration"] in again else "useful"] = left
        found.append(shares)
    return found


def gaps(rows: Rows, again: set[int], ended: float) -> list[Gap]:
    took = counted_seconds(rows.iterations)
    first = rows.iterations[0]
    begin = first["finished_at"] - took[0]
    found = []
    for row, seconds, shares in zip(rows.iterations, took, work(rows, again), strict=True):
        found.append(Gap(begin, row["finished_at"], seconds, shares))
        begin = row["finished_at"]
    # An iteration that is longer than its gap began in the one before.
    for later, earlier in zip(found[::-1], found[-2::-1], strict=False):
        length, total = later.end - later.begin, sum(later.shares.values())
        if total > length:
            for share, seconds in later.shares.items():
                moved = seconds * (1 - length / total)
                later.shares[share] -= moved
                earlier.shares[share] = earlier.shares.get(share, 0.0) + moved
    return [*found, Gap(begin, max(ended, begin), 0.0, {})]


@dataclass
class Interruption:
    """What it took of the time, in order: work thrown away, until it was noticed, until training was back."""

    kind: str
    before: int
    """Commits before it was noticed."""
    after: int
    """Commits until training was back."""
    redo: float
    detect: float
    reconfigure: float


def interruptions(rows: Rows, found: list[Gap], wall_end: float) -> list[Interruption]:
    spans = []
    for change in rows.reconfigurations:
        after = next(n for n, row in enumerate(rows.iterations) if row["epoch"] == change["epoch"])
        mended = [row for row in rows.failures if row["recovered_epoch"] == change["epoch"]]
        stopped = [row for row in mended if row["kind"] != "fail-slow"]
        back = found[after].end
        noticed = failed = back - change["seconds"]
        if stopped:
            noticed = min(row["noticed_at"] for row in stopped)
            failed = min(failed_at(row) for row in stopped)
        # The first that was noticed gives its kind.
        kind = min(mended, key=lambda row: row["noticed_at"])["kind"] if mended else "reconfiguration"
        spans.append(_span(found, kind, change["action"], failed, noticed, after, back))
    last = rows.iterations[-1]["finished_at"]
    if rows.job["state"] != "completed":
        open_ones = [row for row in rows.failures if row["recovered_epoch"] is None and row["kind"] != "fail-slow"]
        if open_ones:
            kind = min(open_ones, key=lambda row: row["noticed_at"])["kind"]
            noticed = max(min(row["noticed_at"] for row in open_ones), last)
            failed = min(failed_at(row) for row in open_ones)
            spans.append(_span(found, kind, "redo", failed, noticed, len(rows.iterations), wall_end))
    return spans


def _span(
    found: list[Gap], kind: str, action: str, failed: float, noticed: float, after: int, back: float
) -> Interruption:
    before = min(sum(gap.end <= noticed + 1e-3 for gap in found[:-1]), after)
    begin = found[before].begin
    meanwhile = sum(gap.took for gap in found[before:after])
    lost = max(back - begin - meanwhile - found[after].took, 0.0)
    unnoticed = min(max(noticed - begin - meanwhile, 0.0), lost)
    detect = min(max(noticed - failed, 0.0), unnoticed)
    redo = unnoticed - detect if action == "redo" else 0.0
    return Interruption(kind, before, after, redo, detect, lost - detect - redo)


def checkpoint_pauses(rows: Rows, found: list[Gap], spans: list[Interruption]) -> dict[int, float]:
    """Pauses after iterations that were saved, beyond the usual pause, by the gap that they are in."""
    touched = {gap for span in spans for gap in range(span.before, span.after + 1)}
    saved, others = {}, []
    for place in range(1, len(rows.iterations)):
        if place in touched:
            continue
        pause = max(found[place].end - found[place].begin - found[place].took, 0.0)
        if rows.iterations[place - 1]["iteration"] in rows.checkpoints:
            saved[place] = pause
        else:
            others.append(pause)
    usual = statistics.median(others) if others else 0.0
    return {place: pause - usual for place, pause in saved.items() if pause > usual} if rows.checkpoints else {}


def figures(rows: Rows, again: set[int] = frozenset()) -> Row:  # type: ignore[assignment]
    """Everything of one job that is over; `again`: iterations that a later attempt committed again."""
    job = rows.job
    ended = job["last_entry_at"] if job["state"] == "abnormal" else job["ended_at"]
    last = rows.iterations[-1]["finished_at"]
    wall_end = last if job["state"] == "completed" else max(ended, last)
    found = gaps(rows, again, ended)
    begin = found[0].begin
    spans = interruptions(rows, found, wall_end)
    total = dict.fromkeys(("useful", *CAUSES), 0.0)
    total["start"] = max(begin - job["started_at"], 0.0)
    free = [gap.free for gap in found]
    for span in spans:
        place = span.before
        for cause in ("redo", "detect", "reconfigure"):
            wanted = getattr(span, cause)
            while wanted > 1e-9 and place <= span.after:
                taken = min(wanted, free[place])
                total[cause] += taken
                free[place] -= taken
                wanted -= taken
                place += wanted > 1e-9
    for place, pause in checkpoint_pauses(rows, found, spans).items():
        taken = min(pause, free[place])
        total["checkpoint"] += taken
        free[place] -= taken
    total["other"] = sum(free)
    for gap in found:
        for share, seconds in gap.shares.items():
            total[share] += seconds

    held = max(begin - job["started_at"], 0.0) + max(ended, last) - begin
    wall = wall_end - begin
    devices = job["nodes"] * job["gpus_per_node"]
    done = min(total["useful"] + total["slow"] + total["rollback"], wall)
    repairs = [t for t in (times_of(rows, row)["seconds_to_recover"] for row in rows.failures) if t is not None]
    lost_by_kind: dict[str, float] = {share: total[share] for share in ("idle", "capacity") if total[share] > 0.0}
    for span in spans:
        seconds = span.redo + span.detect + span.reconfigure
        lost_by_kind[span.kind] = lost_by_kind.get(span.kind, 0.0) + seconds
    lost_by_kind["other"] = max(wall - done - sum(lost_by_kind.values()), 0.0)
    recent = [row["seconds"] for row in rows.iterations[-20:]]
    in_effect = [plan["epoch"] for plan in rows.plans.values() if plan["in_effect_at"] is not None]
    return {
        "seconds": total,
        "gpu_hours": {cause: seconds * devices / 3600 for cause, seconds in total.items()},
        "held": held,
        "wall": wall,
        "done": done,
        "goodput": done / wall,
        "ettr": min(done / held, 1.0),
        "mttr": statistics.fmean(repairs) if repairs else None,
        "lost_by_kind": lost_by_kind,
        "iteration": rows.iterations[-1]["iteration"],
        "loss": rows.iterations[-1]["loss"],
        "committed": len(rows.iterations),
        "iteration_seconds": statistics.median(recent),
        "epoch": max(in_effect),
        "tokens_per_second": pace(rows.iterations[-20:]),
    }


def pace(recent: list[Row]) -> float:
    """Tokens in a second at the pace of the last iterations, with the pauses between them: the median of the means of
    six neighbours, or of half of them, where they are fewer."""
    passed = [b["finished_at"] - a["finished_at"] for a, b in pairwise(recent)]
    width = min(6, (len(passed) + 1) // 2)
    means = [statistics.fmean(passed[n : n + width]) for n in range(len(passed) - width + 1)]
    return statistics.fmean(row["tokens"] for row in recent) / statistics.median(means)
