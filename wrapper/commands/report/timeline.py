"""The picture of what the job did when: lanes over its wall time. Rows in, SVG out.

However long the job was, a lane has no more than a screen can show: of many recoveries the share of time that they
took, of many failures how many there were, in each stretch of time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from markupsafe import Markup

from resihp.record.describe import size
from resihp.words import count_of
from wrapper.commands.report.facts import Facts
from wrapper.commands.report.marks import NAMED, SIGNS, clock, every_nth, failure_line, inside, iterations_of
from wrapper.commands.report.svg import Drawing, time_ticks
from wrapper.output.render import duration

MOST_BOXES = 60
"""Recoveries, and plans, that have boxes of their own."""
STRETCHES = 120
"""Into which the time is cut where there are more."""
LANE = 20.0
HIGH_LANE = 34.0

Places = Callable[[datetime], float]


def timeline(facts: Facts) -> Markup:
    """Lanes over the job's wall time: training, failures, plans with the ranks that have work, nodes, checkpoints."""
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
    """From the first iteration's start to the last commit, and what lay in between."""
    drawing.box(0, 1, 18, LANE, "idle", "no training")
    if facts.iterations:
        first, last = facts.iterations[0], facts.iterations[-1]
        begin = first["finished_at"] - timedelta(seconds=first["seconds"] or 0.0)
        tip = f"training, iterations {first['iteration']} to {last['iteration']}"
        drawing.box(at(begin), at(last["finished_at"]), 18, LANE, "training", tip)
    if len(facts.reconfigurations) > MOST_BOXES:
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
        drawing.box(at(begin), at(row["finished_at"]), 18, LANE, "recovery", tip)


def _shares_of_time(drawing: Drawing, facts: Facts, at: Places) -> None:
    """In each stretch, the share of time that changes of plan took, from above."""
    taken = [0.0] * STRETCHES
    for row in facts.reconfigurations:
        start = at(row["finished_at"] - timedelta(seconds=row["seconds"])) * STRETCHES
        end = at(row["finished_at"]) * STRETCHES
        for n in range(int(start), min(int(end), STRETCHES - 1) + 1):
            taken[n] += max(min(end, n + 1) - max(start, n), 0.0)
    for n, share in enumerate(taken):
        if share > 0:
            tip = f"{100 * min(share, 1.0):.1f} % of this time went into changes of plan"
            drawing.box(n / STRETCHES, (n + 1) / STRETCHES, 18, max(LANE * min(share, 1.0), 0.5), "recovery", tip)


def _failure_lane(drawing: Drawing, facts: Facts, at: Places, middle: float) -> None:
    """A mark for each failure; of many, in each stretch a bar as high as there were failures, by kind."""
    if len(facts.failures) > NAMED:
        _failures_in_stretches(drawing, facts, at, middle)
        return
    drawing.rule(middle)
    last = -1.0
    for row in facts.failures:
        place = at(row["noticed_at"])
        named = place - last > 0.03
        last = place if named else last
        tip = f"{failure_line(row)}, {clock(row['noticed_at'])}"
        number = str(row["failure"]) if named else ""
        drawing.mark(inside(place), middle, SIGNS[row["kind"]], row["kind"], tip, number)


def _failures_in_stretches(drawing: Drawing, facts: Facts, at: Places, middle: float) -> None:
    found: list[dict[str, int]] = [{} for _ in range(STRETCHES)]
    for row in facts.failures:
        stretch = found[min(int(at(row["noticed_at"]) * STRETCHES), STRETCHES - 1)]
        stretch[row["kind"]] = stretch.get(row["kind"], 0) + 1
    most = max(sum(stretch.values()) for stretch in found)
    bottom = middle + 10
    for n, stretch in enumerate(found):
        top = bottom
        for kind in SIGNS:
            if kind in stretch:
                height = 22 * stretch[kind] / most
                top -= height
                tip = f"{stretch[kind]} {kind} of {sum(stretch.values())}"
                drawing.box((n + 0.1) / STRETCHES, (n + 0.9) / STRETCHES, top, height, f"count {kind}", tip)
    drawing.rule(bottom)
    drawing.text(1, 59, f"at most {most} in {duration(_stretch_s(facts))}", "lane", "end")


def _stretch_s(facts: Facts) -> float:
    return (facts.ended - facts.began).total_seconds() / STRETCHES


def _plan_lane(drawing: Drawing, facts: Facts, at: Places, top: float) -> None:
    """A box for each plan that took effect, as high as the share of ranks that have work; of many, their outline."""
    drawing.text(0, top + 1, "ranks with work, by plan", "lane")
    effective = [row for row in facts.plans if row["in_effect_at"] is not None]
    most = max([row["active"] + row["standby"] for row in effective], default=1) or 1
    begins = [at(row["in_effect_at"]) for row in effective]
    if len(effective) > MOST_BOXES:
        shares = [row["active"] / most for row in effective]
        drawing.box(0, 1, top + 8, HIGH_LANE, "without-work")
        steps = _steps(begins, shares)
        drawing.area(top + 8, HIGH_LANE, steps, [(steps[0][0], 0.0), (1.0, 0.0)], "plan")
        least = min(row["active"] for row in effective)
        drawing.text(1, top + 1, f"{least:,} to {most:,}", "lane", "end")
        return
    for row, start, end in zip(effective, begins, [*begins[1:], 1.0], strict=False):
        tall = HIGH_LANE * row["active"] / most
        tip = f"epoch {row['epoch']}: {row['description']}, from iteration {row['next_iteration']}; {row['reason']}"
        drawing.box(start, end, top + 8, HIGH_LANE - tall, "without-work")
        drawing.box(start, end, top + 8 + HIGH_LANE - tall, tall, "plan", tip)
        drawing.post(start, top + 8, top + 8 + HIGH_LANE, "begin")
        if end - start > 0.1:
            drawing.text(start + 0.006, top + 36, f"{row['active']} of {most}", "inside wide")
        elif end - start > 0.045:
            drawing.text(start + 0.006, top + 36, str(row["active"]), "inside wide")


def _steps(begins: list[float], shares: list[float]) -> list[tuple[float, float]]:
    """An outline; of very many plans, the least share in each of as many places as a screen has."""
    places = sorted({*begins} if len(begins) < 800 else {n / 800 for n in range(int(begins[0] * 800) + 1, 801)})
    ends = [*places[1:], 1.0]
    points = []
    for start, end in zip(places, ends, strict=True):
        inner = shares[max(bisect_right(begins, start) - 1, 0) : bisect_right(begins, end)]
        share = shares[bisect_right(begins, start) - 1] if len(begins) < 800 else min(inner)
        points += [(start, share), (end, share)]
    return points


NODE_SIGNS = {
    "node lost": ("down", "fail-stop"),
    "node came": ("triangle", "good"),
    "node drained, or left out of next jobs": ("square", "drained"),
}


def node_signs(facts: Facts) -> list[tuple[str, str, str]]:
    """(shape, style, meaning) of the marks in the lane of nodes."""
    drawn = {(shape, style) for _, shape, style, _ in _node_changes(facts)}
    return [(*how, words) for words, how in NODE_SIGNS.items() if how in drawn]


def has_slow_strips(facts: Facts) -> bool:
    """Whether the lane of training shows when something was slow."""
    few = len(facts.reconfigurations) <= MOST_BOXES
    return few and any(row["kind"] == "fail-slow" for row in facts.failures)


def _node_changes(facts: Facts) -> Iterator[tuple[datetime, str, str, str]]:
    for row in facts.nodes:
        if row["lost_at"] is not None:
            what = "lost" if row["joined_at"] is not None else "never came"
            tip = f"node {row['node']} {what}: {row['lost_reason']}, {clock(row['lost_at'])}"
            yield row["lost_at"], *NODE_SIGNS["node lost"], tip
        if row["replacement"] is not None and row["joined_at"] is not None:
            yield row["joined_at"], *NODE_SIGNS["node came"], f"node {row['node']} came, {clock(row['joined_at'])}"
    for row in facts.drains:
        how = "left out of next jobs" if row["step"] == "exclusion" else "drained"
        tip = f"node {row['node']} {how}, {clock(row['drained_at'])}"
        yield row["drained_at"], *NODE_SIGNS["node drained, or left out of next jobs"], tip


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
