"""Draws the timeline of a job: lanes over its wall time. Rows in, SVG out.

A lane never has more elements than a screen can show: if there are many recoveries, their share of time is drawn in
each of `TIME_BINS` bins; if there are many failures, their number in each bin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from markupsafe import Markup

from resihp.record.describe import size
from resihp.words import count_of
from resihp.wrapper.commands.report.facts import Facts
from resihp.wrapper.commands.report.marks import (
    FAILURE_SHAPES,
    MAX_FAILURES_NUMBERED,
    clock,
    every_nth,
    failure_line,
    inside,
    iterations_of,
)
from resihp.wrapper.commands.report.svg import Drawing, time_ticks
from resihp.wrapper.output.render import duration

MAX_BOXES = 60
"""Most recoveries, and most plans, that are drawn as boxes."""
TIME_BINS = 120
"""Number of time bins that are drawn if there are more recoveries or failures than can be drawn one by one."""
LANE_HEIGHT = 20.0
HIGH_LANE_HEIGHT = 34.0

Places = Callable[[datetime], float]


def timeline(facts: Facts) -> Markup:
    """Draw lanes over the job's wall time: training, failures, plans with their working ranks, nodes, checkpoints."""
    span_s = max((facts.ended - facts.began).total_seconds(), 1e-3)

    def at(moment: datetime) -> float:
        return min(max((moment - facts.began).total_seconds() / span_s, 0.0), 1.0)

    changes = list(_node_changes(facts))
    saved = facts.checkpoints
    number = len(facts.reconfigurations)
    recoveries = "1 recovery" if number == 1 else f"{number} recoveries"
    drawing = Drawing(
        186 + 42 * bool(changes) + 38 * bool(saved),
        f"timeline of {duration(span_s)}: {count_of(len(facts.failures), 'failure')}, {recoveries}",
    )
    drawing.text(0, 11, "training", "lane")
    _training_lane(drawing, facts, at)
    drawing.text(0, 59, "failures", "lane")
    _failure_lane(drawing, facts, at, 76)
    _plan_lane(drawing, facts, at, 100)
    top = 158.0
    if changes:
        drawing.text(0, top + 1, "nodes", "lane")
        drawing.rule(top + 14)
        for moment, shape, style, tip in changes[:: every_nth(len(changes))]:
            drawing.mark(inside(at(moment)), top + 14, shape, style, tip)
        top += 42
    if saved:
        drawing.text(0, top + 1, "checkpoints", "lane")
        for row in saved[:: every_nth(len(saved))]:
            drawing.post(at(row["at"]), top + 6, top + 18, "checkpoint", f"{row['text']}, {clock(row['at'])}")
        top += 38
    drawing.rule(top, "axis")
    for second in time_ticks(span_s, 6):
        share = second / span_s
        drawing.post(share, top, top + 4, "axis")
        anchor = "start" if share < 0.04 else "end" if share > 0.96 else "middle"
        drawing.text(share, top + 17, _since(second, span_s), "tick", anchor)
    return drawing.markup()


# --- lanes ----------------------------------------------------------------------------------------------------------


def _training_lane(drawing: Drawing, facts: Facts, at: Places) -> None:
    """Draw training from the start of the first iteration to the last commit, with recoveries and the spells in which
    something was slow."""
    drawing.box(0, 1, 18, LANE_HEIGHT, "idle", "no training")
    if facts.iterations:
        first, last = facts.iterations[0], facts.iterations[-1]
        begin = first["finished_at"] - timedelta(seconds=first["seconds"] or 0.0)
        tip = f"training, iterations {first['iteration']} to {last['iteration']}"
        drawing.box(at(begin), at(last["finished_at"]), 18, LANE_HEIGHT, "training", tip)
    if len(facts.reconfigurations) > MAX_BOXES:
        _shares_of_time(drawing, facts, at)
        return
    for row in facts.failures:
        if row["kind"] == "fail-slow":
            tip = f"{failure_line(row)}, iterations {iterations_of(row)}"
            drawing.box(at(row["noticed_at"]), at(row["ended_at"] or facts.ended), 33, 5, "slow", tip)
    for row in facts.reconfigurations:
        begin = row["finished_at"] - timedelta(seconds=row["seconds"])
        tries = f" in {row['attempts']} attempts" if row["attempts"] > 1 else ""
        moved = f", {size(row['bytes_moved'])} moved" if row["bytes_moved"] else ""
        tip = f"change to epoch {row['epoch']}: {duration(row['seconds'])}{tries}{moved}"
        drawing.box(at(begin), at(row["finished_at"]), 18, LANE_HEIGHT, "recovery", tip)


def _shares_of_time(drawing: Drawing, facts: Facts, at: Places) -> None:
    """Draw the share of time that changes of plan took in each bin, as bars from the top."""
    taken = [0.0] * TIME_BINS
    for row in facts.reconfigurations:
        start = at(row["finished_at"] - timedelta(seconds=row["seconds"])) * TIME_BINS
        end = at(row["finished_at"]) * TIME_BINS
        for n in range(int(start), min(int(end), TIME_BINS - 1) + 1):
            taken[n] += max(min(end, n + 1) - max(start, n), 0.0)
    for n, share in enumerate(taken):
        if share > 0:
            tip = f"changes of plan took {100 * min(share, 1.0):.1f} % of this time"
            drawing.box(
                n / TIME_BINS, (n + 1) / TIME_BINS, 18, max(LANE_HEIGHT * min(share, 1.0), 0.5), "recovery", tip
            )


def _failure_lane(drawing: Drawing, facts: Facts, at: Places, middle: float) -> None:
    """Draw a mark for each failure. For many failures, draw a bar in each bin that shows their number by kind."""
    if len(facts.failures) > MAX_FAILURES_NUMBERED:
        _failure_counts(drawing, facts, at, middle)
        return
    drawing.rule(middle)
    last_numbered_place = -1.0
    for row in facts.failures:
        place = at(row["noticed_at"])
        is_numbered = place - last_numbered_place > 0.03
        last_numbered_place = place if is_numbered else last_numbered_place
        tip = f"{failure_line(row)}, {clock(row['noticed_at'])}"
        number = str(row["failure"]) if is_numbered else ""
        drawing.mark(inside(place), middle, FAILURE_SHAPES[row["kind"]], row["kind"], tip, number)


def _failure_counts(drawing: Drawing, facts: Facts, at: Places, middle: float) -> None:
    bins: list[dict[str, int]] = [{} for _ in range(TIME_BINS)]
    for row in facts.failures:
        counts = bins[min(int(at(row["noticed_at"]) * TIME_BINS), TIME_BINS - 1)]
        counts[row["kind"]] = counts.get(row["kind"], 0) + 1
    max_count = max(sum(counts.values()) for counts in bins)
    bottom = middle + 10
    for n, counts in enumerate(bins):
        top = bottom
        for kind in FAILURE_SHAPES:
            if kind in counts:
                height = 22 * counts[kind] / max_count
                top -= height
                tip = f"{counts[kind]} {kind} of {sum(counts.values())}"
                drawing.box((n + 0.1) / TIME_BINS, (n + 0.9) / TIME_BINS, top, height, f"count {kind}", tip)
    drawing.rule(bottom)
    drawing.text(1, 59, f"at most {max_count} in {duration(_bin_s(facts))}", "lane", "end")


def _bin_s(facts: Facts) -> float:
    return (facts.ended - facts.began).total_seconds() / TIME_BINS


def _plan_lane(drawing: Drawing, facts: Facts, at: Places, top: float) -> None:
    """Draw a box for each plan that took effect. Its height is the share of working ranks. For many plans, draw an
    outline."""
    drawing.text(0, top + 1, "ranks with work, by plan", "lane")
    effective = [row for row in facts.plans if row["in_effect_at"] is not None]
    max_ranks = max([row["active"] + row["standby"] for row in effective], default=1) or 1
    begins = [at(row["in_effect_at"]) for row in effective]
    if len(effective) > MAX_BOXES:
        shares = [row["active"] / max_ranks for row in effective]
        drawing.box(0, 1, top + 8, HIGH_LANE_HEIGHT, "without-work")
        steps = _steps(begins, shares)
        drawing.area(top + 8, HIGH_LANE_HEIGHT, steps, [(steps[0][0], 0.0), (1.0, 0.0)], "plan")
        min_active = min(row["active"] for row in effective)
        drawing.text(1, top + 1, f"{min_active:,} to {max_ranks:,}", "lane", "end")
        return
    for row, start, end in zip(effective, begins, [*begins[1:], 1.0], strict=False):
        height = HIGH_LANE_HEIGHT * row["active"] / max_ranks
        tip = f"epoch {row['epoch']}: {row['description']}, from iteration {row['next_iteration']}; {row['reason']}"
        drawing.box(start, end, top + 8, HIGH_LANE_HEIGHT - height, "without-work")
        drawing.box(start, end, top + 8 + HIGH_LANE_HEIGHT - height, height, "plan", tip)
        drawing.post(start, top + 8, top + 8 + HIGH_LANE_HEIGHT, "begin")
        if end - start > 0.1:
            drawing.text(start + 0.006, top + 36, f"{row['active']} of {max_ranks}", "inside wide")
        elif end - start > 0.045:
            drawing.text(start + 0.006, top + 36, str(row["active"]), "inside wide")


def _steps(begins: list[float], shares: list[float]) -> list[tuple[float, float]]:
    """Return the points of the outline. For 800 plans or more, return the lowest share in each of 800 places."""
    places = sorted({*begins} if len(begins) < 800 else {n / 800 for n in range(int(begins[0] * 800) + 1, 801)})
    ends = [*places[1:], 1.0]
    points = []
    for start, end in zip(places, ends, strict=True):
        inner = shares[max(bisect_right(begins, start) - 1, 0) : bisect_right(begins, end)]
        share = shares[bisect_right(begins, start) - 1] if len(begins) < 800 else min(inner)
        points += [(start, share), (end, share)]
    return points


NODE_MARKS = {
    "node lost": ("down", "fail-stop"),
    "node joined": ("triangle", "good"),
    "node drained, or excluded from your jobs": ("square", "drained"),
}


def node_signs(facts: Facts) -> list[tuple[str, str, str]]:
    """Return (shape, style, meaning) of each mark in the lane of nodes."""
    drawn = {(shape, style) for _, shape, style, _ in _node_changes(facts)}
    return [(*how, words) for words, how in NODE_MARKS.items() if how in drawn]


def has_slow_strips(facts: Facts) -> bool:
    """Return whether the lane of training shows spells in which something was slow."""
    has_boxes = len(facts.reconfigurations) <= MAX_BOXES
    return has_boxes and any(row["kind"] == "fail-slow" for row in facts.failures)


def _node_changes(facts: Facts) -> Iterator[tuple[datetime, str, str, str]]:
    for row in facts.nodes:
        if row["lost_at"] is not None:
            event = "lost" if row["joined_at"] is not None else "never joined"
            tip = f"node {row['node']} {event}: {row['lost_reason']}, {clock(row['lost_at'])}"
            yield row["lost_at"], *NODE_MARKS["node lost"], tip
        if row["replacement"] is not None and row["joined_at"] is not None:
            yield row["joined_at"], *NODE_MARKS["node joined"], f"node {row['node']} joined, {clock(row['joined_at'])}"
    for row in facts.drains:
        how = "excluded from your jobs" if row["step"] == "exclusion" else "drained"
        tip = f"node {row['node']} {how}, {clock(row['drained_at'])}"
        yield row["drained_at"], *NODE_MARKS["node drained, or excluded from your jobs"], tip


def _since(second: float, span_s: float) -> str:
    if second == 0:
        return "0"
    if span_s < 120:
        return f"{second:g} s"
    if span_s < 7200:
        return f"{second / 60:g} min"
    if span_s < 172800 * 1.5:
        return f"{second / 3600:g} h"
    return f"{second / 86400:.3g} d"
